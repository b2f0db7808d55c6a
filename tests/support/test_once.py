# SPDX-License-Identifier: Apache-2.0
"""What one worker has made, another reads."""

from tests.support import once


def test_it_is_made_once_where_a_folder_is_shared(monkeypatch, tmp_path):
    calls = []

    def make():
        calls.append(1)
        return {"a": [1, 2.5, None]}

    monkeypatch.setattr(once, "folder", tmp_path)
    assert [once.once_a_run("some", make) for _ in range(2)] == [{"a": [1, 2.5, None]}] * 2
    assert len(calls) == 1
    monkeypatch.setattr(once, "folder", None)
    assert once.once_a_run("some", make) == {"a": [1, 2.5, None]}
    assert len(calls) == 2
