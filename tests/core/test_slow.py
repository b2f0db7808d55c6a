# SPDX-License-Identifier: Apache-2.0
"""What takes long is said while it takes long, and what is quick is not."""

import time

from cula.core import slow


def test_long_work_is_said_while_it_is_done(monkeypatch, caplog):
    monkeypatch.setattr(slow, "SECONDS", 0.01)
    with slow.warn_if_slow("compiling 100% of it"):
        for _ in range(500):
            if caplog.records:
                break
            time.sleep(0.01)
        assert caplog.messages == ["compiling 100% of it"]
        assert caplog.records[0].levelname == "WARNING"  # shown where nobody has set up logging


def test_short_work_is_not(monkeypatch, caplog):
    monkeypatch.setattr(slow, "SECONDS", 0.2)
    with slow.warn_if_slow("compiling"):
        pass
    time.sleep(0.3)
    assert caplog.messages == []
