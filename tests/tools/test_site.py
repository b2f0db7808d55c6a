# SPDX-License-Identifier: Apache-2.0
"""Links of the repository's pages, in the site and on a package's page."""

import re
from pathlib import Path

import pytest

from tools import site

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("page", "text", "there"),
    [
        ("index.md", "[a](docs/gdn.md#decode)", "[a](gdn.md#decode)"),
        ("index.md", "![p](docs/benchmarks/H200-speedup.png)", "![p](benchmarks/H200-speedup.png)"),
        ("index.md", "[log](docs/log/)", "[log](log/README.md)"),
        ("guide/layout.md", "[c](../../CONTRIBUTING.md)", "[c](../contributing.md)"),
        ("integrations.md", "[e](../examples/hf_generate.py)", "[e](examples/hf_generate.md)"),
        ("benchmarks/results.md", "[r](../../README.md)", "[r](../index.md)"),
        ("index.md", "[LICENSE](LICENSE)", "`LICENSE`"),
        ("index.md", "[there](https://example.org)", "[there](https://example.org)"),
        ("index.md", "```\n[a](docs/gdn.md)\n```", "```\n[a](docs/gdn.md)\n```"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(page, text, there):
    assert site.relink(text, page) == there


def test_the_readme_stands_alone_on_a_packages_page():
    readme = (ROOT / "README.md").read_text()
    alone = site.detach(readme)
    assert re.findall(r"\]\((?!https?:|#)", readme) and not re.findall(r"\]\((?!https?:|#)", alone)
    assert "![" not in alone and "many GPUs, what every rank holds" in alone
    assert re.findall("```.*?```", alone, re.DOTALL) == re.findall("```.*?```", readme, re.DOTALL)


def test_the_readme_leads_to_an_address_where_there_is_one():
    text = site.detach("![p](docs/p.png) [a](docs/a.md#b) [c](https://c.example)", "https://files.example/cula/")
    assert (
        text == "![p](https://files.example/cula/docs/p.png) [a](https://files.example/cula/docs/a.md#b) [c](https://c.example)"
    )


def test_nothing_is_loaded_from_elsewhere():
    """The theme's only script from another host is replaced by one of ours."""
    page = type("Page", (), {"file": type("File", (), {"dest_uri": "guide/usage.html"})})
    script = '<script src="https://some.host/iframe-worker/shim">'
    assert site.on_post_page(script, page, None) == '<script src="../assets/worker.js">'
    assert site.on_post_template(script, "404.html", None) == '<script src="assets/worker.js">'
    assert (ROOT / "docs" / "assets" / "worker.js").is_file()


def test_an_example_is_a_page():
    page = site.example("examples/tiny_lm.py")
    assert page.startswith("# tiny_lm\n\n`examples/tiny_lm.py`: ") and (ROOT / "examples" / "tiny_lm.py").read_text() in page
