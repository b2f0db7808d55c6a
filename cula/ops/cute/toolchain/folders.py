# SPDX-License-Identifier: Apache-2.0
"""Folders of compiled kernels: whom they must belong to, and where to go when the cache cannot be written.

What lies there is loaded into the process, so that whoever may write there decides what it does.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger("cula")

BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def distrust(paths: Iterable[Path]) -> str | None:
    """Why code at these places, files and the folders they are in, is not to be loaded, as a sentence; None if it may be.

    Others than this user and root must not be able to write there. Where there are no such users, there is no objection.
    """
    if not hasattr(os, "getuid"):
        return None
    for path in paths:
        found = path.stat()
        if found.st_uid not in (0, os.getuid()):
            return f"{path} belongs to user {found.st_uid}, not to you ({os.getuid()}) or root, and holds code that is loaded"
        if found.st_mode & BY_OTHERS:
            return f"others may write to {path}, which holds code that is loaded (chmod go-w {path}, if you trust what is in it)"
    return None


def make(folder: Path) -> None:
    """Make a folder, and those above it that are not there, which only this user may write to whatever the umask."""
    for path in reversed([folder, *folder.parents]):
        if not path.is_dir():
            path.mkdir(mode=0o755, exist_ok=True)


def writable(folder: Path, root: Path) -> Path:
    """The folder, made where it is not there; or, where it cannot be written or trusted, a private one until this process ends,
    which is said.

    Args:
        root: the folder above it from which on all is ours.
    """
    try:
        make(folder)
        with tempfile.TemporaryFile(dir=folder):
            reason = distrust(within(root, folder))
    except OSError as error:
        reason = str(error)
    return folder if reason is None else _private(root, reason) / folder.relative_to(root)


def within(root: Path, path: Path) -> list[Path]:
    """A path, and the folders above it up to a root."""
    return [path, *(above for above in path.parents if above == root or root in above.parents)]


_instead: dict[Path, Path] = {}  # of caches that will not do, once a process


def _private(root: Path, reason: str) -> Path:
    """A folder in the place of one that cannot be used, for the reason given."""
    if root not in _instead:
        folder = _instead[root] = Path(tempfile.mkdtemp(prefix="cula-"))  # nobody else may enter it
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        logger.warning(
            "the cache %s cannot be used: %s; kernels compiled now are kept in %s until this process ends. "
            "Name a folder of your own in XDG_CACHE_HOME, or compile ahead of time (python -m cula warmup --help)",
            root,
            reason,
            folder,
        )
    return _instead[root]
