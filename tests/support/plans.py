# SPDX-License-Identifier: Apache-2.0
"""Plans without `Plans`."""

import pytest

from cula.ops import native


def run_plan(plan, tensors):
    """What a plan makes of these tensors, as `Plans.run` would call it."""
    tensors = tuple(tensors)
    return plan(tensors, native.addresses(tensors))


def stand_in(by: str):
    """How a test's function stands in for a kernel: called by Python, or by C as one of tvm-ffi's."""
    if by == "python":
        return lambda function: function
    return pytest.importorskip("tvm_ffi").convert
