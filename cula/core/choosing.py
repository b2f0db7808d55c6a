# SPDX-License-Identifier: Apache-2.0
"""Checks and choice of a call, in the one order that prefills and decodes have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from cula.core import checks
from cula.core.dispatch import Choice, refuse_unknown
from cula.core.explain import explained, is_explaining


def check_and_choose(
    describe: Callable[[], Any],
    choose: Callable[[Any, str, bool, str], Choice],
    backend: str,
    extra: Iterable[str],
    known: Iterable[str],
    who: str,
    tensors: Iterable[Any],
) -> tuple[Any, Choice]:
    """What `describe` makes of a call, and what serves it; where the call is only to be explained, `Explained` says so instead.

    Args:
        describe: raises on anything wrong, or returns the checked call, which has a `problem`.
        choose: `choose_prefill` or `choose_decode`.
        extra: keywords for the backend; what that does not know either is refused.
        known: keywords that the function takes itself, of which one may have been meant.
        tensors: those of the call, before any check.
    """
    checks.refuse_transforms(who, tensors)
    try:
        request = describe()
    except (TypeError, ValueError):
        refuse_unknown(who, extra, known, backend)
        raise
    choice = choose(request.problem, backend, not is_explaining.get(), who)
    checks.refuse_keywords(who, extra, known, choice.name, choice.backend.options)
    if is_explaining.get():
        raise explained(choice, request.problem)
    return request, choice
