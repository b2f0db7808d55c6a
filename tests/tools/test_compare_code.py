# SPDX-License-Identifier: Apache-2.0
"""Two folders of compiled kernels beside each other."""

import pytest

from tools import compare_code


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    """What the command says of two folders with variants of these names, and what it returns. All code is the same."""

    def run(old, new):
        for folder, names in (("old", old), ("new", new)):
            (tmp_path / folder).mkdir()
            for name in names:
                (tmp_path / folder / f"{name}.cubin").touch()
        monkeypatch.setattr(compare_code, "compare", lambda old, new: None)
        monkeypatch.setattr("sys.argv", ["compare_code.py", str(tmp_path / "old"), str(tmp_path / "new")])
        return compare_code.main(), capsys.readouterr().out.replace(f"{tmp_path}/", "").splitlines()

    return run


def test_variants_of_one_folder_are_differences(said):
    assert said(["a", "b"], ["b", "c"]) == (
        1, ["a: only in old", "b: the same", "c: only in new", "1 of 3 have the same machine code"]
    )  # fmt: skip


def test_the_same_variants(said):
    assert said(["a"], ["a"]) == (0, ["a: the same", "1 of 1 have the same machine code"])


def test_a_folder_without_kernels_is_an_error(said, capsys):
    with pytest.raises(SystemExit, match="2"):
        said(["a"], [])
    assert "new has no cubins" in capsys.readouterr().err
