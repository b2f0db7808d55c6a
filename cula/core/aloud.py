# SPDX-License-Identifier: Apache-2.0
"""Saying why a call takes seconds."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

logger = logging.getLogger("cula")

SECONDS = 1.0  # that nobody needs to be told the reason of


@contextlib.contextmanager
def said_if_long(what: str) -> Iterator[None]:
    """Inside, `what` is said at WARNING after a second.

    For work that is in a cache of somebody else's on most days and takes long on others: what is found there is found in less.
    """
    timer = threading.Timer(SECONDS, logger.warning, ("%s", what))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
