# SPDX-License-Identifier: Apache-2.0
"""What `mkdocs build` needs beyond mkdocs.yml: pages that stand outside of docs/, and links as the site has them.

Links in the pages are those of the repository, so that they lead somewhere in an editor and on a code host as well. The site
keeps those to pages and pictures, wherever these stand in it; of a link to anything else (a source file, a folder) it keeps the
words.
"""

from __future__ import annotations

import ast
import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = {  # page of the repository: page of the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/results/README.md": "benchmarks/results.md",
    "tools/ptx/README.md": "simulator.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
SHIM = re.compile(r"https://[^\"\s]+/iframe-worker/shim")  # what the theme would load from there, docs/assets/worker.js does
FENCE = re.compile(r"(^```.*?^```[^\S\n]*$)", re.DOTALL | re.MULTILINE)


def examples() -> dict[str, str]:
    return {f"examples/{path.name}": f"examples/{path.stem}.md" for path in sorted((ROOT / "examples").glob("*.py"))}


def place(source: str) -> str | None:
    """Where a file of the repository stands in the site; None for one that does not."""
    if source.startswith("docs/"):
        return source.removeprefix("docs/") if (ROOT / source).is_file() else None
    return (PAGES | examples()).get(source)


def source_of(page: str) -> str:
    """The file of the repository that a page of the site is made from."""
    made = {page: source for source, page in (PAGES | examples()).items()}
    return made.get(page, f"docs/{page}")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for source, page in examples().items():
        files.append(File.generated(config, page, content=example(source)))
    return files


def example(source: str) -> str:
    """A page of an example: what its docstring says first, then the code."""
    code = (ROOT / source).read_text()
    said = (ast.get_docstring(ast.parse(code)) or "").partition("\n")[0]
    return f"# {Path(source).stem}\n\n`{source}`: {said}\n\n```python\n{code}```\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return relink(markdown, page.file.src_uri)


def on_post_page(output: str, page: Any, config: Any) -> str:
    return SHIM.sub(os.path.relpath("assets/worker.js", posixpath.dirname(page.file.dest_uri) or "."), output)


def on_post_template(output: str, template_name: str, config: Any) -> str:
    return SHIM.sub("assets/worker.js", output)  # 404.html


def relink(markdown: str, page: str) -> str:
    """The text of a page with links that hold in the site."""
    return _with_links(markdown, lambda picture, words, target: _link(picture, words, target, page))


def detach(markdown: str, address: str | None = None) -> str:
    """The README for a place that has none of the other files, a package's page: links and pictures lead to `address`, under
    which the repository's files are; without one, the words of links are kept and pictures are left out."""

    def to(picture: str, words: str, target: str) -> str:
        if address is not None:
            return f"{picture}[{words}]({address.rstrip('/')}/{target})"
        return "" if picture else words

    return _with_links(markdown, to)


def _with_links(markdown: str, to: Callable[[str, str, str], str]) -> str:
    """With every link to another file of the repository replaced; code, anchors and addresses are left as they are."""

    def link(match: re.Match[str]) -> str:
        is_elsewhere = re.match(r"\w+:", match[3]) or match[3].startswith("#")
        return match[0] if is_elsewhere else to(*match.groups())

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def _link(picture: str, words: str, target: str, page: str) -> str:
    name, _, anchor = target.partition("#")
    source = posixpath.normpath(posixpath.join(posixpath.dirname(source_of(page)), name))
    to = place(source) or place(posixpath.join(source, "README.md"))
    if to is None:
        return words if words.startswith("`") else f"`{words}`"
    here = os.path.relpath(to, posixpath.dirname(page) or ".")
    return f"{picture}[{words}]({here}{'#' + anchor if anchor else ''})"
