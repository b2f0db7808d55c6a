# SPDX-License-Identifier: Apache-2.0
"""Pages link to what is there, and cite result files that are."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted(
    p.relative_to(ROOT).as_posix() for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
)
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
