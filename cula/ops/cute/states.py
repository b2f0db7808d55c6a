# SPDX-License-Identifier: Apache-2.0
"""First and last states as the CuTe kernels take them: plain ones, or slots of a pool."""

from __future__ import annotations

import torch
from torch import Tensor

from cula.core.kernels import Pool
from cula.core.problem import Problem
from cula.ops.cute.launch import Operand
from cula.ops.cute.states_abi import StateKind

KINDS = {torch.float32: StateKind.F32, torch.bfloat16: StateKind.BF16, torch.float16: StateKind.F16}


def pool_why_not(problem: Problem) -> str | None:
    """Why kernels do not read and write a call's pool of states themselves, as a sentence; None if they do."""
    if not problem.has_aligned_slots:
        return "it reads states in pairs, and slots of the pool do not begin at multiples of 16 bytes"
    return None


def state_operands(
    of: dict[str, int], h0: Tensor | None, ht: Tensor | None, pool: Pool | None, place_of_ht: int
) -> dict[str, Operand]:
    """What stands at the addresses of `states_abi.py`, by name. `of` has the numbers of a call's tensors by name (`places`), and
    `place_of_ht` is the number of the final state, which the call makes."""
    if pool is None:
        first, last, indices, has_state = Operand(h0, of["initial_state"]), Operand(ht, place_of_ht), None, None
    else:
        states, indices, has_state, _ = pool
        first = last = Operand(states, of["state_pool"])
    slots = Operand(indices, of["initial_state_indices"])
    has_state_at = Operand(has_state, of["has_initial_state"])
    return {"h0": first, "ht": last, "read_from": slots, "write_to": slots, "has_state": has_state_at}


def state_numbers(p: Problem, h0: Tensor | None, ht: Tensor | None, pool: Pool | None) -> dict[str, int | float | bool]:
    """The numbers about them, by name."""
    if pool is None:
        return {
            "has_h0": int(h0 is not None),
            "has_ht": int(ht is not None),
            "state_step": 4 * p.HV * p.V * p.K,
            "state_kind": StateKind.F32,
            "index_bits": 0,
            "index_step": 0,
            "mask_step": 0,
            "first_slot": 0,
            "num_slots": 0,
        }
    states, indices, mask, _ = pool
    return {
        "has_h0": 1,
        "has_ht": 1,
        "state_step": bytes_between(states),
        "state_kind": KINDS[states.dtype],
        "index_bits": 8 * indices.element_size(),
        "index_step": bytes_between(indices),
        "mask_step": 0 if mask is None else bytes_between(mask),
        "first_slot": pool.first_slot,
        "num_slots": states.shape[0],
    }


def bytes_between(t: Tensor) -> int:
    """From an element of the first dimension to the next."""
    return t.stride(0) * t.element_size()
