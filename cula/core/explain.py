# SPDX-License-Identifier: Apache-2.0
"""Which backend would take a call, found by making the call up to its choice: nothing is compiled, run or written."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cula.core.dispatch import AnyProblem, Choice

# Whether a call is only to be explained; asked by `prefill` and `decode` before they look for a recorded launch.
is_explaining: contextvars.ContextVar[bool] = contextvars.ContextVar("is_explaining", default=False)


class Explained(BaseException):
    """Carries the choice, and what the call is, out of a call. No error: nothing in between is to catch it."""

    def __init__(self, choice: Choice, problem: AnyProblem):
        self.choice, self.problem = choice, problem


def explained(choice: Choice, problem: AnyProblem) -> Explained:
    how = choice.backend.how
    return Explained(choice if how is None else replace(choice, how=how(choice.op, problem)), problem)


def explain_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Choice:
    """The choice of the first attention call that `function` makes with these arguments."""
    return describe_call(function, *args, **kwargs)[0]


def describe_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Choice, AnyProblem]:
    """The same choice, and the problem that describes the call."""
    token = is_explaining.set(True)
    try:
        function(*args, **kwargs)
    except Explained as found:
        return found.choice, found.problem
    finally:
        is_explaining.reset(token)
    raise ValueError(f"explain: {function!r} made no call that is dispatched")
