# SPDX-License-Identifier: Apache-2.0
"""Level 1 of Lightning Attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from cula.core.checks import is_null_nonpositive, one_of
from cula.core.constants import CHUNK
from cula.core.nvtx import nvtx_range
from cula.core.prefill import call_prefill
from cula.lightning.family import FAMILY

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LightningKeywords(TypedDict, total=False):
    """The keywords of `cula_lightning` that are no tokens."""

    scale: float | None
    initial_state: Tensor | None
    output_final_state: bool
    cu_seqlens: Tensor | None
    state_pool: Tensor | None
    initial_state_indices: Tensor | None
    chunk_size: int
    device: torch.device | str | None
    has_initial_state: Tensor | None
    null_index: Literal["negative", "nonpositive"]
    out: Tensor | None
    batch_invariant: bool
    backend: str


@overload
def cula_lightning(
    Q: Tensor, K: Tensor, V: Tensor, decay: Tensor, **keywords: Unpack[LightningKeywords]
) -> tuple[Tensor, Tensor | None]: ...


@overload
def cula_lightning(
    *, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, **keywords: Unpack[LightningKeywords]
) -> tuple[Tensor, Tensor | None]: ...


@nvtx_range
def cula_lightning(
    Q: Tensor | None = None,
    K: Tensor | None = None,
    V: Tensor | None = None,
    decay: Tensor | None = None,
    *,
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    state_pool: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    chunk_size: int = CHUNK,
    device: torch.device | str | None = None,
    has_initial_state: Tensor | None = None,
    null_index: Literal["negative", "nonpositive"] = "negative",
    out: Tensor | None = None,
    batch_invariant: bool = False,
    backend: str = "auto",
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Lightning Attention over whole sequences, on the fastest kernel that can serve the call.

    For each token of a value head, with a state S [V, K]:  S <- exp(-s) S + v_t k_t^T;   o_t = scale * S q_t

    Differentiable in Q, K, V, decay and initial_state, and through final_state.

    Args:
        Q, K: queries and keys, `[B, T, H, K]`, bf16, fp16 or fp32. Value head hv reads head `hv // (HV // H)`.
        V: values, `[B, T, HV, V]`, the dtype of Q.
        q, k, v: the same by the names that the other families have, instead of Q, K and V.
        decay: s >= 0 of each value head, `[HV]` float32 (HV is H in the ordinary case).
        scale: factor on o; `K ** -0.5` by default.
        initial_state: `[N, HV, V, K]` float32; zeros by default.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: offsets `[N + 1]` of sequences packed along T (then B == 1); int32 or int64.
        state_pool: `[P, HV, V, K]` fp32, bf16 or fp16; sequence n starts from slot `initial_state_indices[n]` and leaves
            its last state there (inference only). A null index starts at zero and writes nothing.
        initial_state_indices: `[N]` int32 or int64.
        chunk_size: tokens handled at once, a power of two from 16 to 256; the result does not depend on it.
        device: the device the tensors are expected on; a mismatch is an error, nothing is moved.
        has_initial_state: `[N]` bool; False starts from zero and still writes the slot.
        null_index: "negative", or "nonpositive" where index 0 is null too.
        out: `[B, T, HV, V]` tensor that takes o (inference only).
        batch_invariant: give a sequence the same bits alone and in any batch or pack, at the cost of schedules that fill the
            GPU less well; `CULA_BATCH_INVARIANT=1` asks for it in every call.
        backend: force a backend by name; "auto" takes the best that can.
        **kwargs: options of the chosen backend; any other keyword is a TypeError.

    Returns:
        `(o, final_state)`: o `[B, T, HV, V]` in Q's dtype; final_state `[N, HV, V, K]` float32, or None unless
        `output_final_state`.

    Example:
        >>> import torch, cula
        >>> q, k, v = (torch.randn(1, 100, 2, 32) for _ in range(3))
        >>> o, state = cula.cula_lightning(q, k, v, torch.tensor([0.1, 0.5]), output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 32]), torch.Size([1, 2, 32, 32]))
    """
    if Q is None or K is None or V is None or decay is None or q is not None or k is not None or v is not None:
        Q, K, V = (one_of(FAMILY.function, pair) for pair in ({"Q": Q, "q": q}, {"K": K, "k": k}, {"V": V, "v": v}))
        decay = one_of(FAMILY.function, {"decay": decay})
    tensors = (
        Q, K, V, decay, initial_state, cu_seqlens,  # LightningInputs
        out, state_pool, initial_state_indices, has_initial_state, None, None,  # Serving
    )  # fmt: skip
    is_null = null_index != "negative" and is_null_nonpositive(FAMILY.function, null_index)
    options = (scale, chunk_size, output_final_state, is_null, batch_invariant)
    return call_prefill(FAMILY, tensors, options, None, device, backend, kwargs)
