# SPDX-License-Identifier: Apache-2.0
"""cuLA inside of vLLM: prefill and decode of Gated DeltaNet (Qwen3-Next, Qwen3.5) and Kimi Delta Attention (Kimi-Linear).

vLLM finds `register` by the entry point `vllm.general_plugins` where cuLA is installed, and calls it in every process. With
`CULA_VLLM=1` in the environment cuLA then stands in for vLLM's kernels, and the log says for which; otherwise nothing changes.

- GDN prefill: vLLM's custom op `ChunkGatedDeltaRule`, replaced by `CustomOp.register_oot`.
- GDN decode, plain and speculative: the two functions that vLLM's layer calls, in its module. The layer itself is replaced by
  `PluggableLayer.register_oot` with one that does not prefer vLLM's own CUDA kernel.
- KDA prefill and decode: the three functions that vLLM's layer imports at each call.

Pools are vLLM's, updated in place; slot 0 is its null slot.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cula import gdn, settings
from cula.api import cula_gdn, cula_kda
from cula.core.constants import MAX_DECODE_TOKENS
from cula.core.serving import split_packed
from cula.integrations import engines
from cula.integrations.changes import Changes, count, log_once, logger

GDN_MODULE = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
KDA_MODULE = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
GDN_LAYER, GDN_PREFILL = "QwenGatedDeltaNetAttention", "ChunkGatedDeltaRule"

_changes = Changes()


def register() -> None:
    """What vLLM calls at its start."""
    if _changes or not settings.vllm_uses_cula():
        return
    with _changes.or_none():
        _changes.on_import(PATCHES.__contains__, lambda module: _patch(module))


def unregister() -> None:
    """Set vLLM's functions back. Classes that were replaced stay so for layers that exist."""
    _changes.undo()


def is_registered() -> bool:
    return bool(_changes)


def _patch(module: ModuleType) -> None:
    patch, wanted = PATCHES[module.__name__]
    missing = [name for name in wanted if name not in module.__dict__]
    if missing:
        raise ImportError(
            f"cula.integrations.vllm: {module.__name__} has no {', '.join(missing)}, which cuLA would replace; this vLLM is "
            "another than cuLA knows (docs/integrations.md): unset CULA_VLLM to run it without cuLA"
        )
    done = patch(module)
    logger.info("cula.integrations.vllm: cuLA in the place of %s of %s", ", ".join(done), module.__name__)


def _patch_gdn(module: Any) -> list[str]:
    for name in (PACKED_DECODE, DECODE):
        _changes.set(module, name, functools.partial(GDN_FUNCTIONS[name], module.__dict__[name]))
    done = [PACKED_DECODE, DECODE]
    for name, make, registers in (
        (GDN_PREFILL, prefill_op, module.CustomOp),
        (GDN_LAYER, gdn_layer, module.PluggableLayer),
    ):
        replaced = sys.modules[registers.__module__].op_registry_oot
        if name in replaced:
            logger.info("cula.integrations.vllm: %s stays that of another plug-in", name)
            continue
        registers.register_oot(name=name)(make(module.__dict__[name]))
        _changes.on_undo(functools.partial(replaced.pop, name, None))
        done.append(name)
    return done


def _patch_kda(module: ModuleType) -> list[str]:
    for name, ours in KDA_FUNCTIONS.items():
        _changes.set(module, name, functools.partial(ours, module.__dict__[name]))
    return list(KDA_FUNCTIONS)


def prefill_op(base: type) -> type:
    """vLLM's `ChunkGatedDeltaRule` with cuLA's forward."""

    def __init__(self: Any) -> None:
        base.__init__(self)  # type: ignore[misc]
        self._forward_method = self.forward_cula

    return type(f"Cula{base.__name__}", (base,), {"__init__": __init__, "forward_cula": _gdn_prefill})


def gdn_layer(base: type) -> type:
    """vLLM's layer, set to call the functions that cuLA replaced and not its own CUDA kernel."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)  # type: ignore[misc]
        self.gdn_decode_kernel = "triton"
        self.enable_fused_gdn_decode = False

    return type(f"Cula{base.__name__}", (base,), {"__init__": __init__})


def _gdn_prefill(
    self: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    core_attn_out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log decays and ready beta; states `[N, HV, V, K]` in any dtype. `core_attn_out` takes o in its first elements."""
    count("vllm.gdn.prefill")
    out = None if core_attn_out is None else core_attn_out.view(-1)[: v.numel()].view(v.shape)
    with torch.no_grad():
        return cula_gdn(
            q, k, v, g, beta, initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, out=out,
        )  # fmt: skip


def _gdn_packed_decode(theirs: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    count("vllm.gdn.packed_decode")
    with torch.no_grad():
        return gdn.fused_recurrent_gated_delta_rule_packed_decode(*args, **kwargs)


def _gdn_decode(
    theirs: Any,
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    is_kda: bool = False,
) -> tuple[Tensor, Tensor]:
    """vLLM's `fused_sigmoid_gating_delta_rule_update`; its vectors may be longer than the rows of a call."""
    options: dict[str, Any] = {"beta": beta, "threshold": threshold, "scale": scale, "initial_state": initial_state}
    options |= {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "cu_seqlens": cu_seqlens}
    why_not = _why_not_drafts(ssm_state_indices)
    if is_kda or not inplace_final_state or cu_seqlens is None or ssm_state_indices is None or initial_state is None:
        why_not = "a form of the call that vLLM's layers do not have"
    if why_not is not None:
        log_once(f"cula.integrations.vllm: {DECODE} stays vLLM's: {why_not}")
        return theirs(
            A_log=A_log, a=a, b=b, dt_bias=dt_bias, q=q, k=k, v=v, inplace_final_state=inplace_final_state,
            ssm_state_indices=ssm_state_indices, num_accepted_tokens=num_accepted_tokens, is_kda=is_kda, **options,
        )  # fmt: skip
    assert cu_seqlens is not None and ssm_state_indices is not None
    count("vllm.gdn.decode")
    N = cu_seqlens.shape[0] - 1
    accepted = None if num_accepted_tokens is None else num_accepted_tokens[:N]
    with torch.no_grad():
        o, pool = gdn.fused_sigmoid_gating_delta_rule_update(
            A_log=A_log, a=a, b=b, dt_bias=dt_bias, q=q, k=k, v=v, ssm_state_indices=ssm_state_indices[:N],
            num_accepted_tokens=accepted, **options,
        )  # fmt: skip
    return o, pool


def _kda_prefill(
    theirs: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """vLLM's `chunk_kda_with_fused_gate`: raw gates and raw beta logits."""
    count("vllm.kda.prefill")
    with torch.no_grad():
        return cula_kda(
            q, k, v, raw_g.reshape(*v.shape[:3], -1), raw_beta.reshape(v.shape[:3]), scale=scale, A_log=A_log, dt_bias=g_bias,
            lower_bound=lower_bound, safe_gate=lower_bound is not None, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens, output_final_state=output_final_state,
            initial_state=None if initial_state is None else initial_state.float(),
        )  # fmt: skip


def _kda_decode(
    theirs: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    fuse_gate: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """vLLM's `fused_recurrent_kda`: rows of draft tokens, each with its slot."""
    why_not = _why_not_drafts(ssm_state_indices)
    if why_not is not None:
        log_once(f"cula.integrations.vllm: fused_recurrent_kda stays vLLM's: {why_not}")
        return theirs(
            q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, ssm_state_indices,
            num_accepted_tokens, out, fuse_gate,
        )  # fmt: skip
    count("vllm.kda.decode")
    N = cu_seqlens.shape[0] - 1
    o = engines.decode(
        "kda", q, k, v, raw_g, raw_beta, initial_state, ssm_state_indices[:N], A_log=A_log, dt_bias=dt_bias,
        lower_bound=lower_bound, cu_seqlens=cu_seqlens, null_index="nonpositive", out=out,
        num_accepted_tokens=None if num_accepted_tokens is None else num_accepted_tokens[:N],
    )  # fmt: skip
    return o, initial_state


def _kda_packed_decode(
    theirs: Any,
    mixed_qkv: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    initial_state: Tensor,
    state_indices: Tensor,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """vLLM's `fused_recurrent_kda_packed_decode`: one token a row; returns o `[1, N, H, V]`."""
    count("vllm.kda.packed_decode")
    HV, V, K = initial_state.shape[1:]
    q, k, v = split_packed("fused_recurrent_kda_packed_decode", mixed_qkv, HV, V, K)
    o = engines.decode(
        "kda", q, k, v, raw_g, raw_beta, initial_state, state_indices, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
        scale=scale, null_index="nonpositive",
    )  # fmt: skip
    return o, initial_state


def _why_not_drafts(slots: Tensor | None) -> str | None:
    if slots is not None and slots.dim() == 2 and slots.shape[1] > MAX_DECODE_TOKENS:
        return f"{slots.shape[1]} draft tokens; cuLA takes up to {MAX_DECODE_TOKENS}"
    return None


PACKED_DECODE, DECODE = "fused_recurrent_gated_delta_rule_packed_decode", "fused_sigmoid_gating_delta_rule_update"
GDN_FUNCTIONS: dict[str, Any] = {PACKED_DECODE: _gdn_packed_decode, DECODE: _gdn_decode}
KDA_FUNCTIONS: dict[str, Any] = {
    "chunk_kda_with_fused_gate": _kda_prefill,
    "fused_recurrent_kda": _kda_decode,
    "fused_recurrent_kda_packed_decode": _kda_packed_decode,
}
# What is done to a module, and the names that it must have for that.
PATCHES: dict[str, tuple[Callable[[Any], list[str]], tuple[str, ...]]] = {
    GDN_MODULE: (_patch_gdn, (*GDN_FUNCTIONS, GDN_PREFILL, GDN_LAYER, "CustomOp", "PluggableLayer")),
    KDA_MODULE: (_patch_kda, tuple(KDA_FUNCTIONS)),
}
