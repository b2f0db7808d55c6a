# SPDX-License-Identifier: Apache-2.0
"""The small kernels around FLA's layers, in plain PyTorch, for CPU tensors: what `fla.register(cpu_modules=True)` adds.

FLA 0.6 dispatches them by function. Each function here has the name, the parameters and the results of FLA's, and computes in
float32 as FLA's kernels do. Backwards run the forward again under autograd.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cula import settings
from cula.integrations.changes import Changes


def register(changes: Changes) -> list[str]:
    """Register all of them with FLA, until `changes.undo()`."""
    backends = importlib.import_module("fla.backends")
    backend = _backend_class(backends.BaseBackend)
    done = []
    for module, functions in FUNCTIONS.items():
        owner = importlib.import_module(module)
        for function in functions:
            name = function.__name__
            backends.register(getattr(owner, name), backend=backend, verifier=_is_on_cpu)(function)
            done.append(f"{module}.{name}")
    loss = importlib.import_module("fla.modules.fused_cross_entropy.ops").FusedCrossEntropyLoss
    changes.set(loss, "forward", _loss_forward(loss.forward))
    backend.active = True
    changes.on_undo(lambda: setattr(backend, "active", False))
    return done


@functools.cache
def _backend_class(base: Any) -> Any:
    class CulaCpuBackend(base):
        backend_type = "cula_cpu"
        env_var = "FLA_CULA"
        priority = 100  # after all others
        active = False

        def is_enabled(self) -> bool:
            return type(self).active and settings.fla_may_use_cula()

    return CulaCpuBackend


def _is_on_cpu(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
    tensor = next(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
    return tensor.device.type == "cpu", "only for CPU tensors"


def _like_a_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Kernels see no autocast and record no gradients."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return call


def _gradients(forward: Callable[..., Any], inputs: Sequence[Tensor | None], d_outputs: Sequence[Tensor | None]) -> list[Any]:
    """Gradients of `forward(*inputs)`, a tuple of outputs; None where an input is None."""
    with torch.enable_grad():
        leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
        pairs = [(y, dy) for y, dy in zip(forward(*leaves), d_outputs) if dy is not None]
        wanted = [t for t in leaves if t is not None]
        got = iter(torch.autograd.grad([y for y, _ in pairs], wanted, [dy for _, dy in pairs]))
    return [None if t is None else next(got) for t in leaves]


# Norms. x is [T, D]; with groups, token t has the weight of group t % groups.


def _normalized(x: Tensor, eps: float, is_rms: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    x = x.float()
    mean = None if is_rms else x.mean(-1)
    centred = x if mean is None else x - mean[:, None]
    rstd = torch.rsqrt(centred.square().mean(-1) + eps)
    return centred * rstd[:, None], mean, rstd


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int = 1) -> Tensor:
    shape = x.shape
    x = x.view(-1, groups, shape[-1])
    if weight is not None:
        x = x * weight.float().view(groups, -1)
    if bias is not None:
        x = x + bias.float().view(groups, -1)
    return x.view(shape)


def _with_residual(x: Tensor, residual: Tensor | None, residual_dtype: torch.dtype | None) -> Tensor:
    if residual is not None:
        return (x.float() + residual.float()).to(residual.dtype)
    return x if residual_dtype is None else x.to(residual_dtype)


def _norm_gradients(dx: Tensor, dres: Tensor | None, x: Tensor, x_dtype: torch.dtype | None, has_residual: bool) -> Any:
    """dx and the gradient of the residual that was added to x."""
    dx = dx.float() if dres is None else dx.float() + dres.float()
    return dx.to(x_dtype or x.dtype), dx.to(x.dtype) if has_residual else None


@_like_a_kernel
def layer_norm_fwd(
    x, weight, bias, eps=1e-5, residual=None, out_dtype=None, residual_dtype=None, is_rms_norm=False, num_groups=1
):
    x_in = _with_residual(x, residual, residual_dtype)
    y, mean, rstd = _normalized(x_in, eps, is_rms_norm)
    return _scaled(y, weight, bias, num_groups).to(out_dtype or x.dtype), mean, rstd, x_in


@_like_a_kernel
def layer_norm_bwd(
    dy, x, weight, bias, mean=None, rstd=None, dres=None, has_residual=False, is_rms_norm=False, x_dtype=None,
    recompute_output=False, num_groups=1,
):  # fmt: skip
    normal = (x.float() if is_rms_norm else x.float() - mean[:, None]) * rstd[:, None]
    d_normal, dw, db = _gradients(lambda n, w, b: (_scaled(n, w, b, num_groups),), (normal, weight, bias), (dy.float(),))
    dx = _norm_input_gradient(d_normal, normal, rstd, is_rms_norm)
    dx, dres_in = _norm_gradients(dx, dres, x, x_dtype, has_residual)
    y = (_scaled(normal, weight, bias, num_groups).to(dy.dtype),) if recompute_output else ()
    return dx, dw, db, dres_in, *y


def _norm_input_gradient(d_normal: Tensor, normal: Tensor, rstd: Tensor, is_rms: bool) -> Tensor:
    dx = d_normal - normal * (normal * d_normal).mean(-1, keepdim=True)
    return (dx if is_rms else dx - d_normal.mean(-1, keepdim=True)) * rstd[:, None]


def _gate(g: Tensor, activation: str) -> Tensor:
    return torch.sigmoid(g.float()) if activation == "sigmoid" else F.silu(g.float())


@_like_a_kernel
def layer_norm_gated_fwd(
    x, g, weight, bias, activation="swish", eps=1e-5, residual=None, out_dtype=None, residual_dtype=None, is_rms_norm=False
):
    x_in = _with_residual(x, residual, residual_dtype)
    y, mean, rstd = _normalized(x_in, eps, is_rms_norm)
    return (_scaled(y, weight, bias) * _gate(g, activation)).to(out_dtype or x.dtype), mean, rstd, x_in


@_like_a_kernel
def layer_norm_gated_bwd(
    dy, x, g, weight, bias, activation="swish", eps=1e-5, mean=None, rstd=None, dresidual=None, has_residual=False,
    is_rms_norm=False, x_dtype=None, recompute_output=False,
):  # fmt: skip
    def gated(normal: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor]:
        return (_scaled(normal, weight, bias) * _gate(g, activation),)

    normal = (x.float() if is_rms_norm else x.float() - mean[:, None]) * rstd[:, None]
    d_normal, dg, dw, db = _gradients(gated, (normal, g, weight, bias), (dy.float(),))
    dx = _norm_input_gradient(d_normal, normal, rstd, is_rms_norm)
    dx, dres_in = _norm_gradients(dx, dresidual, x, x_dtype, has_residual)
    y = (gated(normal, g, weight, bias)[0].to(dy.dtype),) if recompute_output else ()
    return dx, dg.to(x_dtype or g.dtype), dw, db, dres_in, *y


@_like_a_kernel
def l2norm_fwd(x, eps=1e-6, output_dtype=None):
    rstd = torch.rsqrt(x.float().square().sum(-1) + eps)
    return (x.float() * rstd[..., None]).to(output_dtype or x.dtype), rstd


@_like_a_kernel
def l2norm_bwd(y, rstd, dy, eps=1e-6):
    y32, dy32 = y.float(), dy.float()
    return ((dy32 - (dy32 * y32).sum(-1, keepdim=True) * y32) * rstd[..., None]).to(y.dtype)


# Short convolution, causal and by channel. A state [N, D, W] holds the last W inputs of each sequence.


def _sequences(x: Tensor, cu_seqlens: Tensor | None) -> list[Tensor]:
    """[T_n, D] of each sequence."""
    if cu_seqlens is None:
        return list(x)
    offsets = cu_seqlens.tolist()
    return [x.reshape(-1, x.shape[-1])[start:end] for start, end in itertools.pairwise(offsets)]


def _conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, activation: Any, cu_seqlens: Any) -> Tensor:
    """[B, T, D] in float32, from x of that shape."""
    D, W = weight.shape

    def along_time(x: Tensor, state: Tensor | None) -> Tensor:  # [N, T, D]
        past = x.new_zeros(x.shape[0], D, W - 1) if state is None else state[:, :, 1:].float()
        full = torch.cat([past, x.transpose(1, 2)], -1)
        return F.conv1d(full, weight.float().unsqueeze(1), None if bias is None else bias.float(), groups=D).transpose(1, 2)

    if cu_seqlens is None:
        y = along_time(x.float(), state)
    else:
        parts = enumerate(_sequences(x.float(), cu_seqlens))
        y = torch.cat([along_time(p[None], None if state is None else state[n : n + 1]) for n, p in parts if len(p)], 1)
    return F.silu(y) if activation in ("silu", "swish") else y


def _states(x: Tensor, length: int, state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """The last inputs of each sequence, [N, D, length]."""
    rows = []
    for n, part in enumerate(_sequences(x, cu_seqlens)):
        past = part.new_zeros(length, part.shape[-1]) if state is None else state[n].to(part.dtype).t()
        rows.append(torch.cat([past, part])[-length:].t())
    return torch.stack(rows)


@_like_a_kernel
def causal_conv1d_update_states(x, state_len, initial_state=None, cu_seqlens=None):
    return _states(x, state_len, initial_state, cu_seqlens)


@_like_a_kernel
def causal_conv1d_fwd(
    x, weight, bias, residual, initial_state=None, output_final_state=False, activation=None, cu_seqlens=None,
    cu_seqlens_cpu=None, chunk_indices=None, chunk_size=64, layout_fallback=False,
):  # fmt: skip
    tokens = x.reshape(*x.shape[:2], -1)
    y = _conv(tokens, weight, bias, initial_state, activation, cu_seqlens)
    if residual is not None:
        y = y + residual.float().reshape(y.shape)
    state = _states(tokens, weight.shape[1], initial_state, cu_seqlens) if output_final_state else None
    return y.to(x.dtype).reshape(x.shape).contiguous(), state


@_like_a_kernel
def causal_conv1d_bwd(
    x, dy, dht, weight=None, bias=None, residual=None, initial_state=None, activation=None, cu_seqlens=None,
    cu_seqlens_cpu=None, chunk_indices=None, chunk_size=64, layout_fallback=False,
):  # fmt: skip
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        ht = None if dht is None else _states(x, weight.shape[1], state, cu_seqlens)
        return _conv(x, weight, bias, state, activation, cu_seqlens), ht

    tokens = x.reshape(*x.shape[:2], -1)
    dx, dw, db, dh0 = _gradients(forward, (tokens, weight, bias, initial_state), (dy.reshape(tokens.shape).float(), dht))
    return dx.reshape(x.shape), dw, db, None if residual is None else dy, dh0


@_like_a_kernel
def causal_conv1d_update(x, cache, residual=None, weight=None, bias=None, activation=None):
    row = x.reshape(-1, weight.shape[0])  # one token of each sequence
    cache.copy_(torch.cat([cache[:, :, 1:], row.to(cache.dtype).unsqueeze(-1)], -1))
    y = (cache.float() * weight.float()).sum(-1)
    y = y if bias is None else y + bias.float()
    y = F.silu(y) if activation in ("silu", "swish") else y
    y = y if residual is None else y + residual.float().reshape(y.shape)
    return y.to(x.dtype).reshape(x.shape), cache


# Activations


def _activation(function: Callable[..., Tensor], name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """FLA's `<name>_fwd(x, ...)` and `<name>_bwd(x, dy, ...)` of a function of x in float32 and, maybe, a temperature."""

    def fwd(x, *parameters, output_contiguous=False, **kwargs):
        return function(x.float(), *parameters, **kwargs).to(x.dtype)

    def bwd(x, dy, *parameters, output_contiguous=False, **kwargs):
        return _gradients(lambda x: (function(x.float(), *parameters, **kwargs),), (x,), (dy.float(),))[0]

    fwd.__name__, bwd.__name__ = f"{name}_fwd", f"{name}_bwd"
    return _like_a_kernel(fwd), _like_a_kernel(bwd)


ACTIVATIONS = (
    *_activation(torch.sigmoid, "sigmoid"),
    *_activation(F.silu, "swish"),
    *_activation(lambda x, temperature=1.0: F.logsigmoid(x) / temperature, "logsigmoid"),
)


def _swiglu(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x.float()) * y.float()


@_like_a_kernel
def swiglu_fwd(x, y, output_contiguous=False):
    return _swiglu(x, y).to(x.dtype)


@_like_a_kernel
def swiglu_fwdbwd(x, y, g, use_weight=False, output_contiguous=False):
    dx, dy = _gradients(lambda x, y: (_swiglu(x, y),), (x, y), (g.float(),))
    return (dx, dy, _swiglu(x, y).to(x.dtype)) if use_weight else (dx, dy)


def swiglu_linear(x, y, weight, bias):
    """Not a kernel, but a function with a gradient of its own; autograd and autocast take this one as it is."""
    return F.linear(F.silu(x) * y, weight, bias)


# Cross entropy. Vocabularies that are split among processes are not served.


def _capped(logits: Tensor, scale: float, cap: float | None) -> Tensor:
    z = logits.float() * scale
    return z if cap is None else cap * torch.tanh(z / cap)


def _entropy(logits, target, label_smoothing, logit_scale, lse_square_scale, logit_softcapping, ignore_index) -> Any:
    z = _capped(logits, logit_scale, logit_softcapping)
    lse = z.logsumexp(-1)
    counts = target != ignore_index
    of_target = z.gather(-1, torch.where(counts, target, 0)[:, None])[:, 0]
    z_loss = torch.where(counts, lse_square_scale * lse.square(), 0)
    loss = lse - (1 - label_smoothing) * of_target - label_smoothing * z.mean(-1)
    return torch.where(counts, loss, 0) + z_loss, z_loss, lse


@_like_a_kernel
def cross_entropy_fwd(
    logits, target, label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0, logit_softcapping=None, ignore_index=-100,
    process_group=None,
):  # fmt: skip
    if process_group is not None:
        raise NotImplementedError("cula.integrations.fla: cross entropy over a process group is not served on a CPU")
    options = (label_smoothing, logit_scale, lse_square_scale, logit_softcapping, ignore_index)
    return *_entropy(logits, target, *options), logits.shape[-1], 0


@_like_a_kernel
def cross_entropy_bwd(
    logits, target, lse, dloss, label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0, logit_softcapping=None,
    ignore_index=-100, total_classes=None, class_start_idx=0, inplace_backward=False,
):  # fmt: skip
    options = (label_smoothing, logit_scale, lse_square_scale, logit_softcapping, ignore_index)
    (d,) = _gradients(lambda z: _entropy(z, target, *options)[:1], (logits,), (dloss,))
    return logits.copy_(d) if inplace_backward else d


@_like_a_kernel
def fused_linear_cross_entropy_bwd(do, dx, dw, db):
    return dx.mul_(do), None if dw is None else dw.mul_(do), None if db is None else db.mul_(do)


def _loss_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`FusedCrossEntropyLoss.forward`, which refuses CPU tensors before it asks what it could dispatch to."""

    @functools.wraps(forward)
    def call(self: Any, input: Tensor, target: Tensor) -> Any:
        if input.device.type != "cpu":
            return forward(self, input, target)
        ops = importlib.import_module("fla.modules.fused_cross_entropy.ops")
        loss, z_loss = ops.cross_entropy_loss(
            logits=input,
            target=target,
            label_smoothing=self.label_smoothing,
            logit_scale=self.logit_scale,
            lse_square_scale=self.lse_square_scale,
            logit_softcapping=self.logit_softcapping,
            ignore_index=self.ignore_index,
            inplace_backward=self.inplace_backward,
            process_group=self.process_group,
        )
        if self.reduction != "none":
            total = (target != self.ignore_index).sum() if self.reduction == "mean" else 1
            loss, z_loss = loss.sum() / total, z_loss.sum() / total
        return (loss, z_loss) if self.return_z_loss else loss

    return call


# Rotary embedding


def _positions(T: int, offsets: Any, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """[B or 1, T]; an offset may be one number or one a sequence, and negative where tokens are padding."""
    if cu_seqlens is None:
        return torch.arange(T, device=device)[None] + (offsets[:, None] if isinstance(offsets, Tensor) else offsets)
    lengths = cu_seqlens.diff()
    starts = cu_seqlens[:-1] - offsets
    return (torch.arange(T, device=device) - torch.repeat_interleave(starts, lengths))[None]


@_like_a_kernel
def rotary_embedding_fwdbwd(
    x, cos, sin, seqlen_offsets=0, cu_seqlens=None, interleaved=False, inplace=False, conjugate=False, chunk_indices=None
):
    R = cos.shape[-1]
    at = _positions(x.shape[1], seqlen_offsets, cu_seqlens, x.device)
    c, s = (table.float()[at.clamp_min(0)][:, :, None] for table in (cos, -sin if conjugate else sin))
    turned = x[..., : 2 * R].float()
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.split(R, -1)
    pair = (a * c - b * s, a * s + b * c)
    y = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    y = torch.where((at >= 0)[..., None, None], y, turned if inplace else 0).to(x.dtype)
    y = torch.cat([y, x[..., 2 * R :]], -1)
    return x.copy_(y) if inplace else y


FUNCTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "fla.modules.norm.layernorm": (layer_norm_fwd, layer_norm_bwd),
    "fla.modules.norm.fused_norm_gate": (layer_norm_gated_fwd, layer_norm_gated_bwd),
    "fla.modules.norm.l2norm": (l2norm_fwd, l2norm_bwd),
    "fla.modules.causal_conv1d.ops": (
        causal_conv1d_fwd, causal_conv1d_bwd, causal_conv1d_update_states, causal_conv1d_update,
    ),
    "fla.modules.activations.ops": (*ACTIVATIONS, swiglu_linear, swiglu_fwd, swiglu_fwdbwd),
    "fla.modules.fused_cross_entropy.ops": (cross_entropy_fwd, cross_entropy_bwd),
    "fla.modules.fused_linear_cross_entropy.ops": (fused_linear_cross_entropy_bwd,),
    "fla.modules.rotary.ops": (rotary_embedding_fwdbwd,),
}  # fmt: skip
