# SPDX-License-Identifier: Apache-2.0
"""Kernels are found in the folder that is set, or in the cache; what is lacking is said in words."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cula import settings
from cula.compile import compile_all, copy_runtime
from cula.ops.cute.toolchain import build, loader, variants
from tests.support.cute import needs_dsl, skip_without_dsl
from tests.support.once import once_a_run

ARCH, MODULES = "sm_90a", ("tests.support.kernels.hopper",)


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """No memory of other tests, and a cache of its own."""
    for name in ("CULA_KERNEL_DIR", "CUTE_DSL_RUNTIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loader.load.cache_clear()
    loader._missing.cache_clear()
    yield
    loader.load.cache_clear()
    loader._missing.cache_clear()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A folder as `python -m cula.compile` makes it."""
    skip_without_dsl()

    def compile_one() -> str:
        made = tmp_path_factory.mktemp("kernels")
        compile_all(ARCH, MODULES, made, only=["scale"])
        return str(made)

    own = tmp_path_factory.mktemp("own")  # tests put things into it
    return Path(shutil.copytree(once_a_run("loader-kernels", compile_one), own, dirs_exist_ok=True))


@pytest.fixture
def no_compiler(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("nothing is to be compiled here")

    monkeypatch.setattr(build, "build", refuse)


def is_scale(kernel) -> bool:
    """Whether it is the kernel, by what it says of its own arguments."""
    with pytest.raises(TypeError, match=r"Expects 4 parameters.*scale_host\(mX: Tensor\(\[n0\], float32\)"):
        kernel()
    x = torch.zeros(8)
    with pytest.raises(ValueError, match="expected device_type=cuda"):
        kernel(x, x, 2.0, 0)
    return True


@needs_dsl
def test_a_kernel_is_compiled_once(monkeypatch, tmp_path):
    kernel = loader.load("scale", ARCH, MODULES)
    assert is_scale(kernel)
    assert loader.load("scale", ARCH, MODULES) is kernel
    (folder,) = (tmp_path / "cache" / "cula" / "cute").iterdir()
    assert sorted(p.name for p in folder.iterdir()) == [".scale.lock", "scale.json", "scale.so"]  # and no scratch files
    loader.load.cache_clear()  # as another process would find it
    monkeypatch.setattr(build, "build", None)
    assert is_scale(loader.load("scale", ARCH, MODULES))


@pytest.mark.slow
@needs_dsl
def test_an_unknown_kernel_is_an_error_that_lists_the_known(tmp_path):
    with pytest.raises(build.CompileError, match=r"no variant scales in tests.support.kernels.hopper; there are scale, "):
        build.build(ARCH, MODULES, tmp_path, ["scales"])
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_folder_serves_without_the_dsl(compiled):
    """In a process where cutlass cannot be imported and the installed runtime library cannot be found."""
    copy_runtime(compiled)
    script = f"""
import sys
sys.modules["cutlass"] = sys.modules["nvidia_cutlass_dsl"] = None
from cula.ops.cute.toolchain import loader
assert loader.missing("{ARCH}") is None, loader.missing("{ARCH}")
try:
    loader.load("scale", "{ARCH}", {MODULES!r})()
except TypeError as error:
    print(error)
"""
    environment = {**os.environ, "CULA_KERNEL_DIR": str(compiled), "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert "Expects 4 parameters" in run.stdout, run.stderr
    (compiled / loader.RUNTIME).unlink()


@pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("objdump") is None, reason="needs objdump, for x86_64")
def test_host_code_is_for_any_cpu(compiled):
    """Nothing beyond SSE2, whatever the CPU has that compiled it: a wheel's kernels are loaded on others too."""
    command = ["objdump", "-d", "--no-show-raw-insn", str(compiled / ARCH / "scale.so")]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "__tvm_ffi_scale" in text
    assert not re.search(r"%[yz]mm|%k\d|\tv\w+ .*%xmm", text)


@pytest.mark.usefixtures("no_compiler")
def test_a_kernel_folder_is_the_only_source(monkeypatch, compiled):
    monkeypatch.setenv("CULA_KERNEL_DIR", str(compiled))
    assert is_scale(loader.load("scale", ARCH, MODULES))
    with pytest.raises(RuntimeError, match=r"has no kernel chain for sm_90a: python -m cula.compile"):
        loader.load("chain", ARCH, MODULES)
    with pytest.raises(RuntimeError, match=r"has no kernels for sm_100a \(python -m cula.compile --arch sm_100a"):
        loader.load("scale", "sm_100a", MODULES)


@pytest.mark.usefixtures("no_compiler")
def test_a_stale_kernel_folder_is_refused(monkeypatch, compiled, tmp_path):
    stale = tmp_path / "stale"
    shutil.copytree(compiled, stale)
    manifest = loader.read_manifest(stale, ARCH)
    (stale / ARCH / loader.MANIFEST).write_text(json.dumps({**manifest, "sources": "0" * 16}))
    monkeypatch.setenv("CULA_KERNEL_DIR", str(stale))
    assert loader.missing(ARCH) is None  # not a reason to take another backend without a word
    with pytest.raises(RuntimeError, match="was compiled from other sources"):
        loader.load("scale", ARCH, MODULES)


class TestMissing:
    def test_tvm_ffi(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "tvm_ffi", None)
        assert loader.missing(ARCH) == "apache-tvm-ffi is not installed (pip install apache-tvm-ffi)"

    def test_the_dsl_and_a_folder(self, monkeypatch):
        pytest.importorskip("tvm_ffi")
        monkeypatch.setitem(sys.modules, "cutlass", None)
        reason = loader.missing(ARCH)
        assert reason is not None
        assert "pip install 'nvidia-cutlass-dsl==" in reason
        assert "CULA_KERNEL_DIR" in reason
        with pytest.raises(RuntimeError, match="cannot load the kernel scale for sm_90a: nvidia-cutlass-dsl is not installed"):
            loader.load("scale", ARCH, MODULES)

    def test_a_linker(self, monkeypatch):
        pytest.importorskip("tvm_ffi")
        monkeypatch.setattr(build, "linker", lambda: None)
        assert "install" in str(loader.missing(ARCH))

    def test_the_runtime_library(self, monkeypatch, tmp_path):
        pytest.importorskip("tvm_ffi")
        (tmp_path / ARCH).mkdir()
        (tmp_path / ARCH / loader.MANIFEST).write_text("{}")
        monkeypatch.setenv("CULA_KERNEL_DIR", str(tmp_path))
        monkeypatch.setattr(loader, "installed_runtime", lambda: None)
        assert "CUTE_DSL_RUNTIME" in str(loader.missing(ARCH))
        monkeypatch.setenv("CUTE_DSL_RUNTIME", str(tmp_path / "nowhere.so"))
        loader._missing.cache_clear()
        with pytest.raises(FileNotFoundError, match=r"nowhere\.so is not a file"):
            loader.missing(ARCH)


def test_the_cache_follows_xdg(monkeypatch, tmp_path):
    assert settings.cache_dir() == tmp_path / "cache" / "cula"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings.cache_dir() == tmp_path / ".cache" / "cula"


def test_the_digest_follows_the_sources(monkeypatch, tmp_path):
    package = tmp_path / "some_kernels"
    package.mkdir()
    for name, text in {"__init__": "", "a": "raise ImportError", "helper": "x = 1"}.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    def digest():
        variants.source_hash.cache_clear()
        return variants.source_hash(("some_kernels.a",))

    first = digest()  # nothing was imported: a.py would have raised
    assert digest() == first
    (package / "helper.py").write_text("x = 2")
    assert digest() != first


@pytest.mark.slow
def test_infrastructure_does_not_import_the_dsl():
    names = ["cula.ops.cute.toolchain.loader", "cula.ops.cute.toolchain.build", "cula.compile"]
    packages = {module.rpartition(".")[0] for modules in variants.MODULES.values() for module in modules}
    script = f"import sys; sys.modules['cutlass'] = None; import {', '.join([*names, *sorted(packages)])}"
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.returncode == 0, run.stderr
