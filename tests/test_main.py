# SPDX-License-Identifier: Apache-2.0
"""`python -m cula`: what is installed, what is supported, and what to do next; `check`: every family against float64."""

import importlib.metadata
import re

import pytest
import torch

from cula import __main__ as command
from cula import checking, install
from cula.core import versions
from cula.core.dispatch import Backend
from cula.ops.cute.toolchain import build

TRITON = versions.SUPPORTED["triton"]


@pytest.fixture
def releases(monkeypatch):
    """Packages by the release that is said to be installed; None: it is not."""
    said = {}
    real = importlib.metadata.version

    def version(name):
        if name not in said:
            return real(name)
        if said[name] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return said[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    versions.installed.cache_clear()
    build.dsl_version.cache_clear()
    yield said
    versions.installed.cache_clear()
    build.dsl_version.cache_clear()


def verdict(title: str) -> str:
    return next(row.verdict for row in install.rows() if row.what == title)


@pytest.mark.parametrize(
    ("title", "packages", "release", "said"),
    [
        ("Triton", ("triton", "pytorch-triton"), "3.5.1", "ok"),
        ("Triton", ("triton", "pytorch-triton"), "3.4.0", r"older than 3.5, .* \(pip install 'triton>=3.5'\)"),
        ("Triton", ("triton", "pytorch-triton"), "4.0", "newer than .*, the newest that was tried: python -m cula check"),
        ("Triton", ("triton", "pytorch-triton"), None, "pip install 'triton>=3.5'"),
        ("tvm-ffi", ("apache-tvm-ffi",), "0.1.8", "older than 0.1.9"),
        ("tvm-ffi", ("apache-tvm-ffi",), "0.1.15.post1", "ok"),
        ("CuTe DSL", ("nvidia-cutlass-dsl",), "4.7.0", "pip install 'nvidia-cutlass-dsl=="),
        ("CuTe DSL", ("nvidia-cutlass-dsl",), None, r"cuda-linear-attention\[cute\]"),
        ("torch", ("torch",), "2.9.0+cpu", "ok"),
    ],
)
def test_a_release_is_judged(releases, title, packages, release, said):
    releases.update(dict.fromkeys(packages, release))
    assert re.search(said, verdict(title))


def test_a_backend_declines_what_is_too_old(releases):
    backend = Backend("some", "cula.ops.some", "", requires=("triton",), install="pip install triton")
    releases |= {"triton": "3.1.0", "pytorch-triton": None}
    if versions.installed(TRITON) is None or backend.missing() == "triton not installed (pip install triton)":
        pytest.skip("Triton is not installed")
    assert "Triton 3.1.0 is older than 3.5" in str(backend.missing())


def test_a_driver_is_compared_with_what_torch_is_built_for(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for version, said in (((13, 0), "ok"), ((12, 8), "update NVIDIA's driver"), (None, "install NVIDIA's driver")):
        monkeypatch.setattr(install, "driver_version", lambda version=version: version)
        assert said in verdict("driver")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(install, "driver_version", lambda: (13, 0))
    assert "torch with CUDA" in verdict("driver")


def test_the_command_prints_the_matrix(capsys):
    assert command.main([]) == 0
    printed = capsys.readouterr().out
    for word in ("torch", "Triton", "CuTe DSL", "tvm-ffi", "driver", "GPU", "supported", "backends, best first", "next: "):
        assert word in printed
    assert command.main(["info"]) == 0
    assert capsys.readouterr().out == printed


def test_the_check_passes_and_fails(capsys, monkeypatch):
    assert command.main(["check", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    for family in ("kda", "gdn", "lightning"):
        for kind in checking.KINDS:
            assert f"{family}_{kind} " in printed
    assert "9 of 9 calls are right: cuLA works here" in printed

    monkeypatch.setattr(checking, "cases", lambda device, real=checking.cases: [c for c in real(device) if "lightning" in c.op])
    monkeypatch.setitem(checking.check.TOLERANCE, "float32", 1e-12)
    assert command.main(["check", "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "WRONG: relative error o " in printed
    assert "0 of 3 calls are right\n" in printed

    def broken(self, x):
        raise RuntimeError("a kernel is broken")

    monkeypatch.setattr(checking.Cula, "prepare", broken)
    assert command.main(["check", "--device", "cpu"]) == 1
    assert "WRONG: RuntimeError: a kernel is broken" in capsys.readouterr().out


def test_a_misspelt_backend_is_no_wrong_call(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["check", "--device", "cpu", "--backend", "tritn"])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert "invalid choice: 'tritn'" in printed.err and "triton" in printed.err and not printed.out


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_device_that_is_not_there_is_said(capsys):
    assert command.main(["check", "--device", "cuda"]) == 2
    assert "torch sees no GPU here; use --device cpu" in capsys.readouterr().err


def test_result_files_of_the_same_gpu_are_beside(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    cuda = torch.device("cuda")
    known, here = checking.recorded(cuda), checking.cases(cuda)
    assert {c.op for c in here if c.id in known} >= {"kda_prefill", "kda_decode", "lightning_prefill"}
