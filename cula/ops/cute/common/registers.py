# SPDX-License-Identifier: Apache-2.0
"""Registers of warpgroups that have roles of their own."""

from __future__ import annotations

import cutlass.cute as cute


def set_registers(n: int, launched: int) -> None:
    """To so many for each thread of a warpgroup, from what the launch gave it."""
    if n > launched:
        cute.arch.setmaxregister_increase(n)
    elif n < launched:
        cute.arch.setmaxregister_decrease(n)
