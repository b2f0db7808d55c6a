# SPDX-License-Identifier: Apache-2.0
"""cuLA inside of SGLang: `--linear-attn-backend cula` for Gated DeltaNet, Kimi Delta Attention and Lightning Attention.

SGLang finds `register` by the entry point `sglang.srt.plugins` where cuLA is installed, and calls it in every process. It adds
the choice "cula" to `--linear-attn-backend`, `--linear-attn-prefill-backend` and `--linear-attn-decode-backend`, and hooks
SGLang's two kernel dispatchers, and the one function of Lightning Attention. Nothing changes unless the choice is made.

cuLA's kernels stand on SGLang's Triton kernels: what they do not serve (tree drafts, more than 8 draft tokens, ReplaySSM rings)
is Triton's, and the logger `cula` says so once.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from cula.api import cula_decode
from cula.core.constants import MAX_DECODE_TOKENS
from cula.core.serving import split_packed
from cula.integrations import engines
from cula.integrations.changes import count, log_once, logger

CHOICE = "cula"
LINEAR = "sglang.srt.layers.attention.linear"
DISPATCHERS: dict[str, tuple[engines.Mode, str, str]] = {
    f"{LINEAR}.gdn_backend.GDNKernelDispatcher.__init__": ("gdn", f"{LINEAR}.kernels.gdn_triton", "TritonGDNKernel"),
    f"{LINEAR}.kda_backend.KDAKernelDispatcher.__init__": ("kda", f"{LINEAR}.kernels.kda_triton", "TritonKDAKernel"),
}
LIGHTNING = f"{LINEAR}.lightning_backend.seg_la_fwd"
_registered: list[Any] = []  # SGLang's registry, once it has our hooks


def register() -> None:
    """What SGLang calls at its start."""
    try:
        choices: Any = importlib.import_module("sglang.srt.arg_groups.choices")
    except ModuleNotFoundError:
        choices = importlib.import_module("sglang.srt.server_args")  # before 0.5.2x
    hooks: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    known = choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES
    if CHOICE not in known:
        choices.add_linear_attn_kernel_backend_choices([CHOICE])
    if hooks.HookRegistry in _registered:
        return
    for target, (mode, module, base) in DISPATCHERS.items():
        hooks.HookRegistry.register(target, functools.partial(_init_dispatcher, mode, module, base), hooks.HookType.AROUND)
    hooks.HookRegistry.register(LIGHTNING, _seg_la, hooks.HookType.AROUND)
    _registered.append(hooks.HookRegistry)
    logger.info("cula.integrations.sglang: --linear-attn-backend %s is there", CHOICE)


def is_registered() -> bool:
    return bool(_registered)


def _init_dispatcher(mode: engines.Mode, module: str, base: str, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """In place of a dispatcher's `__init__(decode_backend, prefill_backend, verify_backend)`: what is custom is cuLA."""
    given = dict(zip(("decode_backend", "prefill_backend", "verify_backend"), args)) | kwargs
    ours = {name for name, backend in given.items() if backend is not None and backend.is_custom()}
    if not ours:
        original(self, **given)
        return
    triton = type(next(b for b in given.values() if b is not None)).TRITON
    original(self, **{name: triton if name in ours else backend for name, backend in given.items()})
    kernel = kernel_class(mode, getattr(importlib.import_module(module), base))()
    if "decode_backend" in ours:
        self.decode_kernel = kernel
        self.supports_packed_decode = kernel.supports_packed_decode
        if mode == "kda":
            self.supports_packed_decode_safe_gate = kernel.supports_packed_decode_safe_gate
    if "prefill_backend" in ours:
        self.extend_kernel = kernel
    verify = given.get("verify_backend")
    if "verify_backend" in ours or ("decode_backend" in ours and (verify is None or verify.is_triton())):
        self.verify_kernel = kernel
        if mode == "gdn":
            self.verify_kernel_is_flashinfer = False
    logger.info("cula.integrations.sglang: %s by cuLA: %s", mode, ", ".join(sorted(ours)))


def _is_chosen(phase: str) -> bool:
    """Whether SGLang was started with cuLA for "decode" or "prefill"; Lightning has no dispatcher that would say."""
    chosen = importlib.import_module("sglang.srt.runtime_context").get_exec().mamba
    return (getattr(chosen, f"linear_attn_{phase}_backend") or chosen.linear_attn_backend) == CHOICE


def _seg_la(
    original: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    decay_scales: Tensor,
    meta: Any,
    caches: Tensor | None = None,
    cache_indices: Tensor | None = None,
    track_lens: Tensor | None = None,
    track_state_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    **kwargs: Any,
) -> Tensor:
    """In place of SGLang's `seg_la_fwd`: tokens `[T, H, D]`, states `[slots, H, K, V]`; prefill, one token each, or drafts.

    **kwargs: what else some releases pass (`decouple`), a hint for SGLang's own kernel.
    """
    N, T = meta.batch_size, q.shape[0]
    # The number of tokens does not tell a decode from prompts of a token each, or empty ones. SGLang's metadata does: of a
    # prefill they say which sequences have a state (bools), of a decode they are ones (integers).
    is_decode = caches is not None or (T == N and meta.s_scales.dtype != torch.bool)
    steps = -(-T // max(N, 1))
    phase = "decode" if is_decode else "prefill"
    why_not = None
    if not _is_chosen(phase):
        why_not = f"--linear-attn-{phase}-backend is another"
    elif getattr(meta, "mask", None) is not None or (is_decode and (N * steps != T or not 0 < steps <= MAX_DECODE_TOKENS)):
        why_not = "drafts are a tree, or of several lengths, or longer than 8"
    elif track_lens is not None and track_state_indices is not None:
        why_not = "states for prefix caches"
    if why_not is not None:
        log_once(f"cula.integrations.sglang: lightning stays SGLang's: {why_not}")
        given = (q, k, v, s, decay_scales, meta, caches, cache_indices, track_lens, track_state_indices, softmax_scale)
        return original(*given, **kwargs)
    count(f"sglang.lightning.{phase}")
    decay = decay_scales.reshape(-1).float()
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if not is_decode:
        q, k, v = (t.unsqueeze(0) for t in (q, k, v))
        return engines.lightning_prefill(q, k, v, decay, s, meta.s_offsets[:N], meta.q_offsets, meta.s_scales > 0, scale)[0]
    q, k, v = (t.reshape(N, steps, *t.shape[1:]) for t in (q, k, v))
    with torch.no_grad():
        o, _ = cula_decode(
            q, k, v, s, mode="lightning", decay=decay, scale=scale, state_indices=meta.s_offsets[:N], state_layout="kv",
            commit=caches is None, intermediate_states=caches, intermediate_state_indices=cache_indices,
        )  # fmt: skip
    return o.flatten(0, 1)


@functools.cache
def kernel_class(mode: engines.Mode, base: type) -> type:
    """cuLA's kernels with the methods of SGLang's `LinearAttnKernelBase`, on top of its Triton kernels `base`."""
    return type(f"Cula{mode.upper()}Kernel", (_Kernels, base), {"mode": mode})


class _Kernels:
    mode: engines.Mode
    supports_packed_decode = True
    supports_packed_decode_safe_gate = True
    supports_track_state_snapshot = True
    supports_safe_gate = True
    supports_safe_gate_verify = True
    supports_strided_target_verify_qkv = True
    uses_state_checkpoints = False
    supports_fused_chain_verify = False

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        lower_bound: float | None = None,
        beta_is_raw: bool = False,
        return_intermediate_states: bool = False,
        inplace_update: bool = True,
        track_state: Tensor | None = None,
        track_chunk_idx: Tensor | None = None,
        output: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Prefill. GDN: g log decays, beta ready, returns `(o, None, h)`; KDA: both raw, returns `o` or `(o, h)`.
        `output` takes o in its first elements."""
        count(f"sglang.{self.mode}.extend")
        options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}
        if output is not None:
            options["out"] = output.view(-1)[: v.numel()].view(v.shape)
        if self.mode == "kda":
            options |= {"use_beta_sigmoid_in_kernel": beta_is_raw, "use_gate_in_kernel": A_log is not None}
            if A_log is not None:
                options |= {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound}
                options["safe_gate"] = lower_bound is not None
        returns_states = return_intermediate_states and track_state is None
        o, h = engines.prefill(
            self.mode, q, k, v, g, beta, ssm_states, cache_indices, query_start_loc, writes=inplace_update,
            returns_states=returns_states, track_state=track_state, track_chunk_idx=track_chunk_idx, **options,
        )  # fmt: skip
        if self.mode == "gdn":
            return o, None, h
        return (o, h) if return_intermediate_states else o

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        A_log: Tensor,
        dt_bias: Tensor,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        lower_bound: float | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """One token of each request, packed `[1, N, H, K]`."""
        count(f"sglang.{self.mode}.decode")
        return engines.decode(
            self.mode, q, k, v, a, b, ssm_states, cache_indices, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound
        )

    def packed_decode(
        self,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        A_log: Tensor,
        dt_bias: Tensor,
        scale: float,
        ssm_states: Tensor,
        cache_indices: Tensor,
        num_v_heads: int,
        head_v_dim: int,
        lower_bound: float | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """One token of each request out of the convolution's `[N, 2 * H * K + HV * V]`; returns `[1, N, HV, V]`."""
        if kwargs.get("replayssm_d") is not None:
            self._leave("packed_decode", "ReplaySSM rings")
            return super().packed_decode(  # type: ignore[misc]
                mixed_qkv, a, b, A_log=A_log, dt_bias=dt_bias, scale=scale, ssm_states=ssm_states, cache_indices=cache_indices,
                num_v_heads=num_v_heads, head_v_dim=head_v_dim, lower_bound=lower_bound, **kwargs,
            )  # fmt: skip
        count(f"sglang.{self.mode}.packed_decode")
        q, k, v = split_packed("packed_decode", mixed_qkv, num_v_heads, head_v_dim, ssm_states.shape[-1])
        return engines.decode(
            self.mode, q, k, v, a, b, ssm_states, cache_indices, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
            scale=scale,
        )  # fmt: skip

    def target_verify(
        self,
        A_log: Tensor,
        dt_bias: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        intermediate_states_buffer: Tensor | None = None,
        intermediate_state_indices: Tensor | None = None,
        cache_steps: int | None = None,
        retrieve_parent_token: Tensor | None = None,
        lower_bound: float | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Draft tokens of each request, packed, of several lengths or one: the pool stays, states after each go to the buffer."""
        why_not = self._why_not_verify(intermediate_states_buffer, cache_steps, retrieve_parent_token, kwargs)
        if why_not is not None:
            self._leave("target_verify", why_not)
            return super().target_verify(  # type: ignore[misc]
                A_log=A_log, dt_bias=dt_bias, q=q, k=k, v=v, a=a, b=b, ssm_states=ssm_states, cache_indices=cache_indices,
                query_start_loc=query_start_loc, intermediate_states_buffer=intermediate_states_buffer,
                intermediate_state_indices=intermediate_state_indices, cache_steps=cache_steps,
                retrieve_parent_token=retrieve_parent_token, lower_bound=lower_bound, **kwargs,
            )  # fmt: skip
        count(f"sglang.{self.mode}.target_verify")
        return engines.decode(
            self.mode, q, k, v, a, b, ssm_states, cache_indices, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
            commit=False, cu_seqlens=query_start_loc, intermediate_states=intermediate_states_buffer,
            intermediate_state_indices=intermediate_state_indices,
        )  # fmt: skip

    def _why_not_verify(self, buffer: Tensor | None, steps: int | None, parents: Any, kwargs: dict[str, Any]) -> str | None:
        if parents is not None:
            return "drafts are a tree"
        if kwargs.get("cache_ring") or buffer is None:
            return "ReplaySSM rings instead of states"
        if steps is None or not 0 < steps <= MAX_DECODE_TOKENS:
            return f"more than {MAX_DECODE_TOKENS} draft tokens"
        return None

    def _leave(self, method: str, why: str) -> None:
        log_once(f"cula.integrations.sglang: {self.mode} {method} stays Triton's: {why}")
