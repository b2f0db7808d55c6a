# SPDX-License-Identifier: Apache-2.0
"""Pages link to what is there, cite result files that are, and show code that runs; the site has a place for each of them."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch

from tools import pictures, site

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted(
    p.relative_to(ROOT).as_posix() for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
)
GUIDES = [page for page in PAGES if page.startswith("docs/guide/")]
WITH_CODE = [*GUIDES, "docs/gdn.md", "docs/layers.md"]
MODULES = ("cula", "cula.kda", "cula.gdn", "cula.lightning", "cula.dist", "cula.layers", "cula.reference")
DESIGN = [page for page in PAGES if not page.startswith(("docs/log/", "benchmarks/"))]


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        to = path.parent / name if name else path
        assert to.exists(), f"{page} links to {target}"
        assert not anchor or anchor in anchors(to), f"{page} links to {target}"


@pytest.mark.parametrize("page", PAGES)
def test_cited_result_files_are_there(page):
    for prefix, name in re.findall(r"`((?:benchmarks/results/)?(?:history/)?)([\w.-]+\.json)`", (ROOT / page).read_text()):
        if prefix or name.startswith("H200"):
            assert (RESULTS / prefix.removeprefix("benchmarks/results/") / name).exists(), f"{page} cites {prefix}{name}"


@pytest.mark.parametrize("page", DESIGN)
def test_pages_that_say_what_is_cite_results_that_stand(page):
    assert "history/H200" not in (ROOT / page).read_text(), f"{page} cites an earlier run: the logs are the place for those"


def test_every_design_page_and_log_can_be_found():
    readme = (ROOT / "README.md").read_text()
    pages = {page for page in PAGES if re.fullmatch(r"docs/[\w-]+\.md", page)}
    assert {page for page in pages if f"({page})" not in readme} == set()
    listed = (ROOT / "docs" / "log" / "README.md").read_text()
    for log in sorted(p.name for p in (ROOT / "docs" / "log").glob("*.md") if p.name != "README.md"):
        assert f"({log})" in listed and f"docs/{log}" in pages and f"(log/{log})" in (ROOT / "docs" / log).read_text()


@pytest.fixture
def restored():
    """What a page's code may change for others."""
    yield
    torch.set_default_dtype(torch.float32)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def run_blocks(page, with_slow):
    """The page's blocks in one namespace, as a reader would paste them one after another; slow ones have a mark before them."""
    namespace = {"__name__": page}
    for slow, block in re.findall(r"(<!-- slow -->\n)?```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE):
        if with_slow or not slow:
            exec(compile(block, page, "exec"), namespace)
    return namespace


@pytest.mark.parametrize("page", WITH_CODE)
def test_code_of_pages_runs_as_pasted(page, restored):
    run_blocks(page, with_slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in WITH_CODE if "<!-- slow -->" in (ROOT / page).read_text()])
def test_slow_code_of_pages_runs_as_pasted(page, restored):
    run_blocks(page, with_slow=True)


def public_names():
    for module in MODULES:
        (exported,) = (
            ast.literal_eval(node.value)
            for node in ast.parse(module_path(module).read_text()).body
            if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
        )
        yield from ((module, name) for name in exported if not name.startswith("__"))


def module_path(module):
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def test_every_public_name_has_an_example_and_a_place_in_the_reference():
    usage = (ROOT / "docs" / "guide" / "usage.md").read_text()
    reference = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    names = list(public_names())
    assert len(names) > 40
    assert [name for _, name in names if not re.search(rf"\b{name}\b", usage)] == []
    assert [f"{m}.{name}" for m, name in names if f"::: {m}.{name}\n" not in reference and f"`{m}.{name}`" not in reference] == []


def test_the_page_for_users_of_fla_has_every_argument():
    from cula import gdn, kda, lightning

    text = (ROOT / "docs" / "guide" / "from-fla.md").read_text()
    sections = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
    found = 0
    for module in (kda, gdn, lightning):
        for name in module.__all__:
            for title, body in sections.items():
                if name in title.split(", "):
                    arguments = [a for a in inspect.signature(getattr(module, name)).parameters if a != "kwargs"]
                    assert [a for a in arguments if f"`{a}`" not in body] == [], name
                    found += 1
    assert found == 7


def nav_pages():
    """The pages that mkdocs.yml names, without a parser of YAML."""
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    return re.findall(r"[\w/-]+\.md", nav)


def test_every_page_has_a_place_in_the_site():
    named = nav_pages()
    assert len(set(named)) == len(named)
    made = set(site.PAGES.values()) | set(site.examples().values())
    written = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    assert (made | written) - set(named) == set(), "give these a line in the nav of mkdocs.yml"
    assert set(named) - (made | written) == set(), "the nav of mkdocs.yml names these, which are not there"


def test_pictures_are_those_that_the_script_draws():
    drawn = {f"{draw.__name__}.svg": draw().svg() for draw in pictures.PICTURES}
    assert drawn == {path.name: path.read_text() for path in pictures.TO.glob("*.svg")}


def test_the_repository_on_one_page_has_every_folder():
    page = (ROOT / "docs" / "guide" / "layout.md").read_text()
    folders = [path.name for path in (ROOT / "cula").iterdir() if (path / "__init__.py").is_file()]
    assert len(folders) > 8
    assert [name for name in folders if f"{name}/" not in page] == []
