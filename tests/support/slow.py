# SPDX-License-Identifier: Apache-2.0
"""Which cases of a test are quick: a few that between them take every path, while `make test-slow` has the others."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Parameters of which all are slow but those that are named, by value."""
    cases = list(cases)
    unknown = [case for case in quick if case not in cases]
    assert not unknown, f"no such cases: {unknown}"
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]
