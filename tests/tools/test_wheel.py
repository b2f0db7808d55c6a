# SPDX-License-Identifier: Apache-2.0
"""`make wheel`: what is in the file, and that an install takes kernels from it."""

import email
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from cula.compile import compile_all
from cula.ops.cute.toolchain import build, loader
from cula.ops.cute.toolchain.variants import MODULES, modules_of, source_hash
from tools import try_wheel, wheel

needs_tools = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in ("gcc", "strip", "readelf", "git")), reason="needs gcc, binutils and git"
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """A folder as `python -m cula.compile` makes it, with one small library in place of each architecture's kernels."""
    folder = tmp_path_factory.mktemp("kernels")
    for arch in MODULES:
        (folder / arch).mkdir()
        source = folder / "some.c"
        source.write_text("int some_kernel(void) { return 7; }\n")
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / arch / "some_kernel.so", source], check=True)
        manifest = {"arch": arch, "sources": source_hash(modules_of(arch)), "kernels": {"some_kernel": {}}}
        (folder / arch / loader.MANIFEST).write_text(json.dumps(manifest))
    return folder


@pytest.mark.slow
@needs_tools
def test_the_wheel_has_sources_kernels_and_native_code(kernels, tmp_path):
    if not (wheel.ROOT / ".git").exists():
        pytest.skip("the wheel is made from what git tracks")
    assert wheel.main(["--out", str(tmp_path), "--kernels", str(kernels), "--python", sys.executable]) == 0
    (made,) = tmp_path.glob("*.whl")
    assert "-py3-none-manylinux_2_" in made.name
    with zipfile.ZipFile(made) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "installed")
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as sources:
        inside = {name.partition("/")[2] for name in sources.getnames()}
    assert tracked() - inside == {".gitignore"}, "the archive of sources has all that its tests need"
    assert {name for name in inside if name.startswith("tests/") and name.endswith(".py")} <= tracked()
    package = tmp_path / "installed" / "cula"
    assert {f"cula/compiled/{arch}/some_kernel.so" for arch in MODULES} <= set(names)
    assert any(name.startswith("cula/core/replay/cula_native.") and name.endswith(".so") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "tools/", "benchmarks/"))]
    described = next((tmp_path / "installed").glob("*.dist-info/METADATA")).read_text()
    assert "## Quick start" in described and "](docs/" not in described  # what a package's page would not find
    listed = next((tmp_path / "installed").glob("*.dist-info/RECORD")).read_text()
    assert "cula/compiled/sm_90a/some_kernel.so,sha256=" in listed
    said = subprocess.run(
        [sys.executable, "-c", USES_THE_WHEEL], cwd=tmp_path / "installed", check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert said == [str(package / "compiled" / "sm_90a" / "some_kernel.so"), "True"]


def tracked() -> set[str]:
    return set(
        subprocess.run(["git", "ls-files"], cwd=wheel.ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    )


USES_THE_WHEEL = """
import sys; sys.path.insert(0, ".")
from cula.ops.cute.toolchain.loader import locate
from cula.ops.cute.toolchain.variants import modules_of
from cula.core.replay import record
print(locate("some_kernel", "sm_90a", modules_of("sm_90a")))
print(record._compiled() is None or "installed" in record._compiled().__file__)
"""


def test_kernels_of_other_sources_are_not_taken(monkeypatch, tmp_path, caplog):
    (tmp_path / "sm_90a").mkdir()
    (tmp_path / "sm_90a" / loader.MANIFEST).write_text(json.dumps({"sources": "of last year", "kernels": {}}))
    monkeypatch.setattr(loader, "IN_WHEEL", tmp_path)
    loader.has_wheel_kernels.cache_clear()
    try:
        assert not loader.has_wheel_kernels("sm_90a", modules_of("sm_90a"))
    finally:
        loader.has_wheel_kernels.cache_clear()
    assert "kernels of the installed wheel are not used" in caplog.text


def test_a_clone_has_none():
    assert not Path(loader.IN_WHEEL).exists()


@needs_tools
def test_the_tag_is_of_the_newest_glibc_that_is_needed(monkeypatch, tmp_path):
    answers = {"readelf": "Name: GLIBC_2.17\nName: GLIBC_2.34\n", "uname": "x86_64\n"}
    monkeypatch.setattr(
        wheel.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, answers[command[0]])
    )
    assert wheel.platform_tag(tmp_path) == "manylinux_2_34_x86_64"
    answers["readelf"] = "Name: GLIBC_2.2.5\n"
    assert wheel.platform_tag(tmp_path) == "manylinux_2_28_x86_64"


@pytest.mark.slow
@needs_tools
@pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
def test_a_wheel_serves_far_from_the_sources_without_a_compiler_or_a_home(tmp_path, capfd):
    """With one kernel, in an environment of its own that torch is installed into."""
    if not (wheel.ROOT / ".git").exists():
        pytest.skip("the wheel is made from what git tracks")
    compile_all("sm_90a", modules_of("sm_90a"), tmp_path / "kernels", only=["decode_1_bf16"])
    arguments = ["--out", str(tmp_path), "--arch", "sm_90a", "--kernels", str(tmp_path / "kernels"), "--python", sys.executable]
    assert wheel.main(arguments) == 0
    (made,) = tmp_path.glob("*.whl")
    assert try_wheel.main([str(made)]) == 0, capfd.readouterr().out
    assert "1 kernels of sm_90a are loaded; native.c is the wheel's" in capfd.readouterr().out


def test_the_package_says_where_it_is_published_if_that_is_known(tmp_path):
    about = tmp_path / "cula.dist-info" / "METADATA"
    about.parent.mkdir()
    page = "Metadata-Version: 2.4\nName: cula\n\n![p](docs/p.png) [a](docs/a.md)\n"
    about.write_text(page)
    wheel.describe(tmp_path, "https://files.example/cula/")
    described = email.message_from_string(about.read_text())
    assert "Source, https://files.example/cula" in described.get_all("Project-URL")
    assert "Changelog, https://files.example/cula/CHANGELOG.md" in described.get_all("Project-URL")
    assert "![p](https://files.example/cula/docs/p.png)" in described.get_payload()
    for path in filter(None, wheel.PROJECT_URLS.values()):
        assert (wheel.ROOT / path).is_file()
    about.write_text(page)
    wheel.describe(tmp_path, None)
    described = email.message_from_string(about.read_text())
    assert described.get_all("Project-URL") is None and "docs/" not in described.get_payload()
