# SPDX-License-Identifier: Apache-2.0
"""A user's code, for the type checker alone: `make lint` checks it, nothing runs it.

A line marked `type: ignore` must be an error: mypy says so where it is none (`warn_unused_ignores`).
"""

import torch
from torch import Tensor
from typing_extensions import assert_type

import cula
from cula.gdn import chunk_gated_delta_rule
from cula.kda import chunk_kda, fused_recurrent_kda


def prefill(q: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    o, state = cula.cula_kda(q, q, q, g, beta, output_final_state=True)
    assert_type(o, Tensor)
    assert_type(state, Tensor | None)
    o, state, h = cula.cula_kda(q, q, q, g, beta, return_intermediate_states=True, use_qk_l2norm_in_kernel=True)
    assert_type(h, Tensor)
    o, state, h = cula.cula_gdn(q, q, q, beta, beta, return_intermediate_states=True, null_index="nonpositive")
    assert_type(h, Tensor)
    o, state = cula.cula_lightning(q, q, q, beta[0, 0], chunk_size=32)
    o, state = cula.cula_lightning(q=q, k=q, v=q, decay=beta[0, 0])
    assert_type(state, Tensor | None)
    return o


def by_a_flag(q: Tensor, g: Tensor, beta: Tensor, keeps: bool) -> Tensor:
    made = cula.cula_kda(q, q, q, g, beta, return_intermediate_states=keeps)
    assert_type(made, tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor])
    made = chunk_kda(q, q, q, g, beta, return_intermediate_states=keeps, chunk_size=64)
    return cula.cula_gdn(q, q, q, beta, beta, return_intermediate_states=keeps)[0]


def by_flas_names(q: Tensor, g: Tensor, beta: Tensor, slots: Tensor, maybe: Tensor | None) -> Tensor:
    o, state = chunk_kda(q, q, q, g, beta, 0.5, None, True, use_gate_in_kernel=True, A_log=beta[0, 0])
    assert_type(state, Tensor | None)
    o, state, h = chunk_kda(q, q, q, g, beta, None, state, return_intermediate_states=True, state_v_first=True)
    assert_type(h, Tensor)
    o, state = chunk_kda(q, q, q, g, beta, None, None, True, False, True, A_log=beta[0, 0], tune=3)  # ignored, with a warning
    o, state = fused_recurrent_kda(q, q, q, g, beta, output_final_state=True)
    o, state = chunk_gated_delta_rule(q, q, q, beta, beta, 0.5, state, True, cu_seqlens=slots, use_gate_in_kernel=True)
    assert_type(state, Tensor | None)
    o, none, kept = chunk_gated_delta_rule(q, q, q, beta, beta, initial_state=state, initial_state_indices=slots)
    assert_type(none, None)
    assert_type(kept, Tensor | None)
    return o + chunk_gated_delta_rule(q, q, q, beta, beta, initial_state=state, initial_state_indices=maybe)[0]


def decode(q: Tensor, pool: Tensor, decay: Tensor) -> Tensor:
    o, pool = cula.cula_decode(q, q, q, pool, mode="lightning", decay=decay, null_index="nonpositive", device=torch.device("cpu"))
    return o


def mistakes(q: Tensor, g: Tensor, beta: Tensor) -> None:
    cula.cula_gdn(q, q, q, beta, beta, lower_bound=-5.0)  # type: ignore[call-overload]
    cula.cula_kda(q, q, q, g, beta, use_gate_in_kernal=True)  # type: ignore[call-overload]
    cula.cula_kda(q, q, q, g, beta, lower_bound="-5")  # type: ignore[call-overload]
    _, _, _ = cula.cula_kda(q, q, q, g, beta)  # type: ignore[misc]
    chunk_kda(q, q, q, g, beta, lower_bound="-5")  # type: ignore[call-overload]
    chunk_gated_delta_rule(q, q, q, beta, beta, output_final_state=q)  # type: ignore[call-overload]
    cula.cula_lightning(q, q, q)  # type: ignore[call-overload]
    cula.cula_decode(q, q, q, q, mode="softmax")  # type: ignore[arg-type]
    cula.cula_decode(q, q, q, q, null_index="zero")  # type: ignore[arg-type]
