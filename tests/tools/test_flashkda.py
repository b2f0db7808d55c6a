# SPDX-License-Identifier: Apache-2.0
"""`tools/flashkda.py` with a made-up clone: what pip is given, and what is said where something is missing."""

import subprocess
import types

import pytest

from tools import flashkda


@pytest.fixture
def clone(tmp_path):
    (tmp_path / "FlashKDA/csrc").mkdir(parents=True)
    (tmp_path / "FlashKDA/setup.py").write_text("")
    headers = tmp_path / "CUTLASS" / flashkda.HEADERS
    headers.parent.mkdir(parents=True)
    headers.write_text("")
    return tmp_path


def test_what_is_missing_is_said(clone):
    with pytest.raises(SystemExit, match=r"setup.py is not there: expected a clone of FlashKDA"):
        flashkda.main([str(clone)])
    with pytest.raises(SystemExit, match=r"expected CUTLASS's headers; clone with --recursive, or name a clone by --cutlass"):
        flashkda.main([str(clone / "FlashKDA")])


def test_a_copy_is_built_with_the_headers_that_are_named(clone, monkeypatch):
    seen = []

    def run(command, env, check):
        copy = flashkda.Path(command[-1])
        seen.append(
            (command, env["FLASH_KDA_CUDA_ARCHS"], (copy / "cutlass" / flashkda.HEADERS).is_file(), copy != clone / "FlashKDA")
        )
        return types.SimpleNamespace(returncode=3)

    monkeypatch.setattr(subprocess, "run", run)
    given = [str(clone / "FlashKDA"), "--cutlass", str(clone / "CUTLASS"), "--to", str(clone / "peers")]
    assert flashkda.main(given) == 3
    ((command, arch, has_headers, is_copy),) = seen
    assert (arch, has_headers, is_copy) == ("90a", True, True)
    assert command[-3:-1] == ["--target", str(clone / "peers")] and {"--no-build-isolation", "--no-index"} <= set(command)
    assert not (clone / "FlashKDA/cutlass").exists(), "the clone stays as it is"
