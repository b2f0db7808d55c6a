# SPDX-License-Identifier: Apache-2.0
"""cuLA inside of Hugging Face transformers: gated delta rule, Kimi Delta Attention and Lightning Attention of its models.

    import cula.integrations.transformers
    cula.integrations.transformers.patch()

That is all, before or after a model was imported or made, with flash-linear-attention installed or not: Qwen3-Next, Qwen3.5,
Olmo-Hybrid, Kimi-Linear, GLM-5.3-Flash, Ling-3.0, MiniMax and whatever else has functions of these names. A layer of transformers
finds its recurrence as a global of its modeling file; `patch()` sets these globals in the files that are imported, and in
others when they are. `unpatch()` sets them back. Works under `torch.compile(fullgraph=True)`.

For users of the `kernels` package, `kernel_mapping()` is what `kernels.register_kernel_mapping` takes.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cula.api import cula_decode, cula_lightning
from cula.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from cula.integrations.changes import Changes, count, logger
from cula.kda import chunk_kda, fused_recurrent_kda

MODELING = re.compile(r"transformers\.models\.\w+\.modeling_\w+")
Result = tuple[Tensor, Tensor | None]


def patch() -> list[str]:
    """Use cuLA in transformers' models, imported already or later.

    Returns:
        What was replaced at once, as `module.name`; none if it was patched before.

    Example:
        >>> from cula.integrations import transformers  # doctest: +SKIP
        >>> transformers.patch()  # doctest: +SKIP
    """
    if _changes:
        return []
    if importlib.util.find_spec("transformers") is None:
        raise ImportError("cula.integrations.transformers needs transformers: pip install transformers", name="transformers")
    done: list[str] = []
    with _changes.or_none():
        _changes.on_import(MODELING.fullmatch, lambda module: done.extend(_patch_module(module)))
    return list(done)


def unpatch() -> None:
    """Undo `patch()`: every modeling file has its own functions again."""
    _changes.undo()


def is_patched() -> bool:
    return bool(_changes)


def kernel_mapping(devices: Sequence[str] = ("cuda", "cpu")) -> dict[str, dict[str, Any]]:
    """cuLA's functions as layers of the `kernels` package, for training and inference, with and without `torch.compile`.

    Example:
        >>> from kernels import register_kernel_mapping  # doctest: +SKIP
        >>> register_kernel_mapping(cula.integrations.transformers.kernel_mapping())  # doctest: +SKIP
        >>> model.set_use_kernels(True)  # doctest: +SKIP
    """
    return {name: {device: _Repository(layer) for device in devices} for name, layer in LAYERS.items()}


def chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> Result:
    """The gated delta rule (g of one value a head) or KDA (one a channel) over sequences, as transformers calls it.

    States are `[N, HV, K, V]`. Of what transformers hands on besides, `cu_seqlens` or `cu_seq_lens_q` counts; the rest is for
    others.
    """
    count("transformers.chunk")
    return _chunk(query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, _offsets(kwargs))


def recurrent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> Result:
    """The same for a token, as transformers calls it in generation; with gradients where they are asked for."""
    count("transformers.recurrent")
    tensors = (query, key, value, g, beta, initial_state)
    cu_seqlens = _offsets(kwargs) if query.shape[1] > 1 else kwargs.get("cu_seqlens")  # rows of a token are apart as they are
    options = (initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return _chunk(query, key, value, g, beta, *options)
    h0, final, norm, cu_seqlens = options
    function: Any = fused_recurrent_gated_delta_rule if g.dim() == 3 else fused_recurrent_kda
    return function(
        query, key, value, g=g, beta=beta, initial_state=h0, output_final_state=bool(final), use_qk_l2norm_in_kernel=norm,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip


def _offsets(kwargs: dict[str, Any]) -> Tensor | None:
    """Where packed sequences begin. Layers of the gated delta rule call it `cu_seqlens`; those of KDA (Kimi-Linear, GLM, Ling)
    hand the model's keywords on, in which it is `cu_seq_lens_q`."""
    cu_seqlens = kwargs.get("cu_seqlens")
    return kwargs.get("cu_seq_lens_q") if cu_seqlens is None else cu_seqlens


def _chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, h0: Any, final: bool, norm: bool, cu_seqlens: Any) -> Result:
    function: Any = chunk_gated_delta_rule if g.dim() == 3 else chunk_kda
    return function(
        q, k, v, g, beta, initial_state=h0, output_final_state=bool(final), use_qk_l2norm_in_kernel=norm, cu_seqlens=cu_seqlens
    )


def minimax_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """`MiniMaxLightningAttention.forward`; transformers has its Lightning Attention in the layer's forward itself.

    The state in the cache is `[B, H, K, V]`, as transformers', in float32.
    """
    count("transformers.minimax")
    modeling = sys.modules[type(self).__module__]
    B, T, _ = hidden_states.shape
    qkv = modeling.apply_mask_to_padding_states(self.act_fn(self.qkv_proj(hidden_states)), attention_mask)
    q, k, v = qkv.reshape(B, T, self.num_attention_heads, 3 * self.head_dim).split(self.head_dim, dim=3)
    state = None if past_key_values is None else past_key_values.get_linear_cache(self.layer_idx)
    o, state = _lightning(q, k, v, self.slope_rate.reshape(-1).float(), state)
    o = self.norm(o.reshape(B, T, -1))
    o = self.out_proj(F.sigmoid(self.output_gate(hidden_states)) * o)
    if past_key_values is not None:
        past_key_values.set_linear_cache(self.layer_idx, state)
    return o, state


def _lightning(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or (state is not None and state.requires_grad))
    if state is not None and q.shape[1] == 1 and not needs_grad:
        state = state.float().clone(memory_format=torch.contiguous_format)
        return cula_decode(q, k, v, state, mode="lightning", decay=decay, scale=1.0, state_layout="kv")
    h0 = None if state is None else state.float().transpose(-1, -2).contiguous()
    o, final = cula_lightning(q, k, v, decay, scale=1.0, initial_state=h0, output_final_state=True)
    assert final is not None
    return o, final.transpose(-1, -2)


# Globals of modeling files. The first four stand in transformers 5; before, FLA's names stood beside the first two.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": chunk,
    "torch_recurrent_gated_delta_rule": recurrent,
    "chunk_kimi_delta_attention": chunk,
    "recurrent_kimi_delta_attention": recurrent,
    "chunk_gated_delta_rule": chunk,
    "fused_recurrent_gated_delta_rule": recurrent,
}
FORWARDS: dict[str, Callable[..., Any]] = {"MiniMaxLightningAttention": minimax_forward}

_changes = Changes()


def _patch_module(module: ModuleType) -> list[str]:
    done = []
    for name, ours in FUNCTIONS.items():
        if name in module.__dict__:
            _changes.set(module, name, _same_name(module.__dict__[name], ours))
            done.append(f"{module.__name__}.{name}")
    for name, forward in FORWARDS.items():
        layer = module.__dict__.get(name)
        if layer is not None and layer.__module__ == module.__name__:
            _changes.set(layer, "forward", functools.wraps(layer.forward)(forward))
            done.append(f"{module.__name__}.{name}.forward")
    if done:
        logger.info("cula.integrations.transformers: patched %s", ", ".join(done))
    return done


def _same_name(theirs: Any, ours: Callable[..., Any]) -> Callable[..., Any]:
    """A function of each name, so that nothing that is attached to it is shared."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    return functools.wraps(theirs)(call) if callable(theirs) else call


class ChunkLayer(nn.Module):
    """`chunk` as a layer of the `kernels` package."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self, query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, **kwargs,
    ):  # fmt: skip
        return chunk(query, key, value, g, beta, chunk_size, initial_state, output_final_state, use_qk_l2norm_in_kernel, **kwargs)


class RecurrentLayer(nn.Module):
    """`recurrent` as a layer of the `kernels` package."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self, query, key, value, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, **kwargs
    ):
        return recurrent(query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, **kwargs)


LAYERS: dict[str, type[nn.Module]] = {
    "chunk_gated_delta_rule": ChunkLayer,
    "fused_recurrent_gated_delta_rule": RecurrentLayer,
    "chunk_kda": ChunkLayer,
    "fused_recurrent_kda": RecurrentLayer,
}


@dataclass(frozen=True)
class _Repository:
    """Where the `kernels` package loads a layer from: here, not the Hub."""

    layer: type[nn.Module]

    def load(self) -> type[nn.Module]:
        return self.layer

    def __str__(self) -> str:
        return f"cuLA's {self.layer.__name__}"
