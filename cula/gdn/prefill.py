# SPDX-License-Identifier: Apache-2.0
"""GDN prefill kernels by the hardware they are written for. No choice: what a kernel cannot do is an error that says so."""

from __future__ import annotations

from torch import Tensor

from cula.core.prefill import prefill_by
from cula.gdn.family import FAMILY
from cula.gdn.problem import GdnInputs, GdnOptions
from cula.utils import assert_blackwell, assert_hopper


def gdn_prefill_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The Hopper prefill: bfloat16, K = V = 128, forward only.

    Args:
        q, k, v, g, beta, scale, ...: as in `cula.cula_gdn`; states are `[N, HV, V, K]`, and cu_seqlens is int32.
        out: a `[B, T, HV, V]` tensor for the result.

    Returns:
        `(o, final_state)`; final_state is None unless `output_final_state`.

    Raises:
        RuntimeError: the device is no SM90.
        NotImplementedError: the kernels do not serve this call, with the reason; `cula.cula_gdn` finds one that does.
    """
    assert_hopper(q.device)
    options = GdnOptions(
        scale=scale,
        use_gate_in_kernel=use_gate_in_kernel,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        output_final_state=output_final_state,
    )
    x = GdnInputs(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
    return prefill_by("cute_sm90", FAMILY, x, options, out, "gdn_prefill_hopper")


def gdn_prefill_blackwell(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The Blackwell prefill: bfloat16, K = V = 128, forward only. **Never run on hardware.**

    Compiled in CI, and its PTX run on a CPU against float64 (docs/gdn-blackwell.md). Before its first call on a machine it is
    compared with the torch backend there (`CULA_SELF_CHECK=0` leaves that out); if it is off, calls are refused with the figure.

    Arguments and results are those of `gdn_prefill_hopper`.

    Raises:
        RuntimeError: the device is neither SM100 nor SM103.
        NotImplementedError: the kernels do not serve this call, with the reason; `cula.cula_gdn` finds one that does.
    """
    assert_blackwell(q.device)
    options = GdnOptions(
        scale=scale,
        use_gate_in_kernel=use_gate_in_kernel,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        output_final_state=output_final_state,
    )
    x = GdnInputs(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
    return prefill_by("cute_sm100", FAMILY, x, options, out, "gdn_prefill_blackwell")
