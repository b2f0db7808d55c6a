# SPDX-License-Identifier: Apache-2.0
"""A warning that says why a call takes seconds."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

logger = logging.getLogger("cula")

SECONDS = 1.0  # that nobody wonders about


@contextlib.contextmanager
def warn_if_slow(what: str) -> Iterator[None]:
    """Log `what` at WARNING if the work inside takes more than a second.

    For compilers with a cache of their own, whose results are there in less: nobody can tell beforehand whether they will be.
    """
    timer = threading.Timer(SECONDS, logger.warning, ("%s", what))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
