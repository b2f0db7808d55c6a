# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels are loaded from folders that nobody else may write to; where the cache will not do, it is said."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from cula import settings
from cula.ops.cute import backend
from cula.ops.cute.backend import kernels, self_check
from cula.ops.cute.sm90.arch import HOPPER
from cula.ops.cute.toolchain import build, folders, loader
from cula.ops.cute.toolchain.variants import modules_of, source_hash
from tests.ops.cute.test_kda_dispatch import HOPPER as CALL

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs users as POSIX has them")

ARCH = "sm_90a"
NAME = "kda_f16_gate_bf16"


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.delenv("CULA_KERNEL_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loader.uncompiled.cache_clear()
    backend._uncompiled.cache_clear()
    monkeypatch.setattr(folders, "_instead", {})
    yield
    loader.uncompiled.cache_clear()
    backend._uncompiled.cache_clear()


@pytest.fixture
def compiler(monkeypatch):
    """One that writes an empty library, and the folders that it was asked to write to."""
    asked = []

    def write(arch, modules, out, names, **_):
        asked.append(out)
        out.mkdir(parents=True, exist_ok=True)
        for name in names:
            (out / f"{name}.so").write_bytes(b"")

    monkeypatch.setattr(build, "build", write)
    return asked


def locate() -> Path:
    return loader.locate(NAME, ARCH, modules_of(ARCH))


def test_the_cache_is_used_and_compiling_is_said(compiler, caplog):
    library = locate()
    assert library == loader.cache_folder(ARCH, modules_of(ARCH)) / f"{NAME}.so"
    assert f"compiling the kernel {NAME} for sm_90a: some 20 seconds, once, because" in caplog.text
    assert "python -m cula warmup" in caplog.text
    assert locate() == library
    assert len(compiler) == 1


def test_a_cache_that_cannot_be_made_is_said_and_replaced(compiler, caplog, tmp_path):
    (tmp_path / "cache").write_text("a file, where a folder is to be")
    library = locate()
    assert tmp_path not in library.parents
    assert library.is_file()
    assert oct(library.parents[2].stat().st_mode & 0o777) == "0o700"
    assert "cannot be used: [Errno 17] File exists" in caplog.text
    assert "XDG_CACHE_HOME" in caplog.text
    assert locate() == library, "one folder for the whole process"
    assert len(compiler) == 1


@pytest.mark.skipif(hasattr(os, "getuid") and os.getuid() == 0, reason="root writes to any folder")
def test_a_home_that_cannot_be_written(compiler, caplog, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o500)
    assert tmp_path not in locate().parents
    assert "Permission denied" in caplog.text


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_cache_that_others_may_write_is_not_loaded_from(compiler, caplog, mode):
    library = locate()
    settings.cache_dir().chmod(mode)
    other = locate()
    assert other != library
    assert f"others may write to {settings.cache_dir()}, which holds code that is loaded (chmod go-w" in caplog.text
    settings.cache_dir().chmod(0o700)
    library.chmod(0o666)
    assert folders.distrust([library]) is not None


def test_folders_are_made_for_one_user_whatever_the_umask(tmp_path):
    before = os.umask(0o002)
    try:
        folders.make(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert folders.distrust(folders.within(tmp_path / "a", tmp_path / "a" / "b")) is None


def test_owners_are_told_apart(monkeypatch, tmp_path):
    class Stat:
        st_mode, st_uid = 0o100644, 1234

    monkeypatch.setattr(Path, "stat", lambda self: Stat)
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    assert folders.distrust([tmp_path]) is None
    monkeypatch.setattr(os, "getuid", lambda: 99)
    assert "belongs to user 1234, not to you (99) or root" in str(folders.distrust([tmp_path]))
    Stat.st_uid = 0
    assert folders.distrust([tmp_path]) is None


def test_a_kernel_folder_that_others_may_write_is_refused(monkeypatch, tmp_path):
    folder = tmp_path / "kernels" / ARCH
    folder.mkdir(parents=True)
    manifest = {"sources": source_hash(modules_of(ARCH)), "kernels": {NAME: {}}}
    (folder / loader.MANIFEST).write_text(json.dumps(manifest))
    (folder / f"{NAME}.so").write_bytes(b"")
    monkeypatch.setenv("CULA_KERNEL_DIR", str(folder.parent))
    assert locate() == folder / f"{NAME}.so"
    folder.chmod(0o775)
    with pytest.raises(RuntimeError, match=r"CULA_KERNEL_DIR=.* is refused: others may write to .*sm_90a, which holds code"):
        locate()


def test_a_broken_compiler_is_said_and_another_backend_serves(monkeypatch, caplog):
    """As on a Hopper: the kernel that a call wants is compiled before the choice is made, and the choice is made anew."""
    if build.missing() is not None:
        pytest.skip(str(build.missing()))
    (name,) = kernels("kda_fwd", CALL, 132)
    broken = subprocess.CompletedProcess([], 1, "Traceback ...\nRuntimeError: ptxas is of another decade\n")
    monkeypatch.setattr(build.subprocess, "run", lambda *_, **__: broken)
    monkeypatch.setattr("cula.ops.cute.backend._num_sms", lambda problem: 132)
    reason = self_check(HOPPER, "kda_fwd", CALL, may_run=True)
    assert reason == f"its kernel {name} does not compile on this machine: RuntimeError: ptxas is of another decade"
    assert "calls that want it go to another backend" in caplog.text
    assert "make wheel" in caplog.text
    assert self_check(HOPPER, "kda_fwd", CALL, may_run=False) is None, "explain compiles nothing"
