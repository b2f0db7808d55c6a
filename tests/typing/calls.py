# SPDX-License-Identifier: Apache-2.0
"""A user's code, for the type checker alone: `make lint` checks it, nothing runs it.

A line marked `type: ignore` must be an error: mypy says so where it is none (`warn_unused_ignores`).
"""

import torch
from torch import Tensor
from typing_extensions import assert_type

import cula


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


def decode(q: Tensor, pool: Tensor, decay: Tensor) -> Tensor:
    o, pool = cula.cula_decode(q, q, q, pool, mode="lightning", decay=decay, null_index="nonpositive", device=torch.device("cpu"))
    return o


def mistakes(q: Tensor, g: Tensor, beta: Tensor) -> None:
    cula.cula_gdn(q, q, q, beta, beta, lower_bound=-5.0)  # type: ignore[call-overload]
    cula.cula_kda(q, q, q, g, beta, use_gate_in_kernal=True)  # type: ignore[call-overload]
    cula.cula_kda(q, q, q, g, beta, lower_bound="-5")  # type: ignore[call-overload]
    _, _, _ = cula.cula_kda(q, q, q, g, beta)  # type: ignore[misc]
    cula.cula_lightning(q, q, q)  # type: ignore[call-overload]
    cula.cula_decode(q, q, q, q, mode="softmax")  # type: ignore[arg-type]
    cula.cula_decode(q, q, q, q, null_index="zero")  # type: ignore[arg-type]
