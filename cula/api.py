# SPDX-License-Identifier: Apache-2.0
"""Level 1: one function a family, each with the family; decode of all families; and which backend would take a call.

Each checks the call, picks the best kernel for the device and does the bookkeeping: `core/prefill.py` and `core/decode.py`
follow a call from here to its launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from cula.core import checks
from cula.core.decode import call_decode
from cula.core.dispatch import Choice
from cula.core.explain import explain_call
from cula.core.family import FAMILIES
from cula.core.nvtx import nvtx_range
from cula.gdn.api import cula_gdn
from cula.kda.api import cula_kda
from cula.lightning.api import cula_lightning

Mode = Literal["kda", "gdn", "lightning"]  # what `cula_decode` decodes

__all__ = ["cula_decode", "cula_gdn", "cula_kda", "cula_lightning", "explain"]


@nvtx_range
def cula_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    mode: Mode = "kda",
    state_indices: Tensor | None = None,
    scale: float | None = None,
    device: torch.device | str | None = None,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    decay: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    intermediate_states: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
    null_index: Literal["negative", "nonpositive"] = "negative",
    commit: bool = True,
    state_layout: Literal["vk", "kv"] = "vk",
    batch_invariant: bool = False,
    backend: str = "auto",
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Continue sequences by 1 to 8 tokens each, from states in a pool that is updated in place.

    The recurrences are those of `cula_kda` (mode "kda": g, beta and the gate's keywords), `cula_gdn` (mode "gdn": the same with
    one gate a head) and `cula_lightning` (mode "lightning": decay). Inference only.

    Row n starts from slot `state_indices[n]` (slot n without indices: the pool then has a slot for each row and no more) and
    leaves its last state there. Drafts that were
    rejected are undone by the next call: with `num_accepted_tokens[n] = a >= 1` row n starts from the state after the
    a-th token of the previous call instead, which stands in `intermediate_states[n, a - 1]` or, with indices `[N, T]`,
    in slot `state_indices[n, a - 1]`. a = 0 starts from the slot as usual.

    Args:
        q, k: `[N, T, H, K]`, or packed `[1, N, H, K]` (N rows of one token, or those of `cu_seqlens`); bf16, fp16 or fp32.
        v: `[N, T, HV, V]` or `[1, N, HV, V]`, the dtype of q.
        state: pool `[P, HV, V, K]`, fp32, bf16 or fp16; slots contiguous, their stride may be padded.
        mode: "kda", "gdn" or "lightning".
        state_indices: `[N]`, int32 or int64, any stride; a negative one marks a padded row, whose slot is neither read
            nor written and whose output is zero. `[N, T]`: the state after token t goes to slot `[n, t]`.
        scale: factor on o; `K ** -0.5` by default.
        device: the device the tensors are expected on; a mismatch is an error, nothing is moved.
        g, beta, A_log, dt_bias, use_gate_in_kernel, lower_bound, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel,
            allow_neg_eigval: as in `cula_kda` and `cula_gdn` (which has no bound), for modes "kda" and "gdn"; the norm for all.
        decay: as in `cula_lightning`, for mode "lightning".
        num_accepted_tokens: `[N]` int32 or int64, 0 to T: how many tokens of the previous call stand.
        intermediate_states: `[N, T, HV, V, K]` buffer that receives the state after each token; it may have more rows and
            tokens than the call.
        intermediate_state_indices: `[N]` int32 or int64: which row of that buffer is row n's; a negative one keeps nothing.
        cu_seqlens: offsets `[N + 1]` of rows of several lengths, 0 to 8 tokens (at most as many as `state_indices` or
            `intermediate_states` have room for), int32 or int64; q, k are then `[1, tokens, H, K]` and v likewise. A row
            without tokens does nothing. Tokens behind the last offset are nobody's, and what comes out for them means nothing.
        out: tensor of v's shape that takes o.
        null_index: "negative", or "nonpositive" where slot 0 marks padding too.
        commit: False verifies without writing the pool.
        state_layout: "vk", or "kv" for pools and buffers `[..., K, V]`.
        batch_invariant: give a row the same bits in calls of any number of rows, as in `cula_kda`.
        backend: force a backend by name; "auto" takes the best that can.
        **kwargs: tensors of a family that have no name here, options of the chosen backend; any other keyword is a TypeError.

    Returns:
        `(o, state)`: o of v's shape in q's dtype, and the pool that was passed in.

    Example:
        >>> import torch, cula
        >>> pool = torch.zeros(8, 2, 32, 32)
        >>> q, k, v = (torch.randn(3, 1, 2, 32) for _ in range(3))
        >>> o, pool = cula.cula_decode(
        ...     q, k, v, pool, mode="lightning", decay=torch.tensor([0.1, 0.5]), state_indices=torch.tensor([5, -1, 0])
        ... )
        >>> o.shape
        torch.Size([3, 1, 2, 32])
    """
    who = "cula_decode"
    null_is_nonpositive = null_index != "negative" and checks.is_null_nonpositive(who, null_index)
    state_is_kv = state_layout != "vk" and checks.is_state_kv(who, state_layout)
    tensors = (
        q, k, v, state, state_indices, g, beta, A_log, dt_bias, decay,
        num_accepted_tokens, intermediate_states, intermediate_state_indices, cu_seqlens, out,
    )  # fmt: skip
    options = (
        scale, lower_bound, use_gate_in_kernel, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        null_is_nonpositive, commit, state_is_kv, batch_invariant,
    )  # fmt: skip
    return call_decode(mode, tensors, options, device, backend, kwargs, who)


def explain(function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Choice:
    """Which backend would take this call and, for each better one, why not. Nothing runs and nothing is written.

    Args:
        function: `cula_kda`, `cula_gdn`, `cula_lightning` or `cula_decode`, or "kda", "gdn", "lightning", "decode".
        *args, **kwargs: the arguments of the call; tensors on the "meta" device will do.

    Returns:
        A `Choice`: `.name` of the backend, `.how` it would go about it where it says, `.passed_over` with reasons, and a
        readable `str()`.

    Example:
        >>> import torch, cula
        >>> q = torch.empty(1, 64, 2, 32)
        >>> print(cula.explain("lightning", q, q, q, torch.ones(2)).name)
        torch
    """
    if isinstance(function, str):
        named = {"decode": cula_decode} | {name: family.load_entry() for name, family in FAMILIES.items()}
        if function not in named:
            raise ValueError(f"explain: {function!r} is not one of {', '.join(named)}")
        return explain_call(named[function], *args, **kwargs)
    return explain_call(function, *args, **kwargs)
