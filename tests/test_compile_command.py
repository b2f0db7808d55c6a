# SPDX-License-Identifier: Apache-2.0
"""`python -m cula.compile`."""

import json

import pytest

from cula import compile as command
from cula.ops.cute.toolchain import build, loader, variants

MODULE = "tests.support.kernels.hopper"


@pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
def test_a_folder_has_libraries_and_a_manifest(tmp_path, capsys):
    arguments = ["--arch", "sm_90a", "--out", str(tmp_path), "--modules", MODULE, "--only", "scale", "product_nt", "--no-runtime"]
    assert command.main([*arguments, "--keep-text"]) == 0
    printed = capsys.readouterr().out
    assert "wgmma:8 tma_load:4" in printed
    assert f"CULA_KERNEL_DIR={tmp_path}" in printed
    ends = ("cubin", "host.mlir", "json", "ptx", "so")
    files = [f"{name}.{end}" for name in ("product_nt", "scale") for end in ends]
    assert sorted(p.name for p in (tmp_path / "sm_90a").iterdir()) == sorted([*files, loader.MANIFEST])
    manifest = json.loads((tmp_path / "sm_90a" / loader.MANIFEST).read_text())
    assert manifest["sources"] == variants.source_hash((MODULE,))
    assert manifest["versions"]["nvidia-cutlass-dsl"] == build.dsl_version()
    assert manifest["kernels"]["product_nt"]["instructions"] == {"wgmma": 8, "tma_load": 4}
    assert manifest["kernels"]["product_nt"]["kernels"][0]["threads"] == 128


@pytest.mark.slow
@pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
def test_a_wrong_name_is_said_and_leaves_no_manifest(tmp_path, capsys):
    (tmp_path / "sm_90a").mkdir()
    (tmp_path / "sm_90a" / loader.MANIFEST).write_text("{}")
    assert command.main(["--arch", "sm_90a", "--out", str(tmp_path), "--modules", MODULE, "--only", "scales"]) == 1
    said = capsys.readouterr().err
    assert "no variant scales" in said
    assert "Traceback" not in said
    assert not (tmp_path / "sm_90a" / loader.MANIFEST).exists()


def test_what_is_lacking_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(build, "missing", lambda: "a compiler is not installed")
    assert command.main(["--arch", "sm_90a", "--out", str(tmp_path), "--modules", MODULE]) == 1
    assert "a compiler is not installed" in capsys.readouterr().err


def test_an_architecture_without_kernels_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(variants.MODULES, "sm_103a", ())
    assert command.main(["--arch", "sm_103a", "--out", str(tmp_path)]) == 1
    assert "no CuTe kernels for sm_103a yet" in capsys.readouterr().err
