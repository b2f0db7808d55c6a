# SPDX-License-Identifier: Apache-2.0
"""What the layers have in common: projections, short convolutions, heads, the cache, the way through a forward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cula.core import checks
from cula.core.constants import MAX_DECODE_TOKENS
from cula.dist import cp, handshake, tp
from cula.dist.comm import process_group
from cula.layers.parallel import from_rank_before, shared, size_of, summed
from cula.layers.parts import LayerCache, ShortConvolution


class LinearAttention(nn.Module):
    """A layer with q, k, v projections, a recurrence over heads, and an output projection.

    A subclass makes its parameters in `__init__` and says how its recurrence runs (`_prefill`, `_decode`, `_context_parallel`)
    and what becomes of its output (`_finish`).
    """

    def __init__(
        self,
        hidden_size: int,
        head_k_dim: int,
        head_v_dim: int,
        num_heads: int,
        num_v_heads: int | None,
        *,
        use_short_conv: bool,
        conv_size: int,
        conv_bias: bool,
        layer_idx: int | None,
        tp_group: Any,
        cp_group: Any,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "num_v_heads": num_v_heads, "head_dim": head_k_dim}
        sizes |= {"conv_size": conv_size} if use_short_conv else {}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{who}: {name} is {size}; expected 1 or more")
        if num_v_heads % num_heads:
            raise ValueError(f"{who}: num_v_heads is {num_v_heads}; expected a multiple of num_heads = {num_heads}")
        self.tp_group = None if tp_group is None else process_group(who, "tp", tp_group, tp.MESH_DIMS)
        self.cp_group = None if cp_group is None else process_group(who, "cp", cp_group, cp.MESH_DIMS)
        tp_size = size_of(self.tp_group)
        if num_heads % tp_size:
            raise ValueError(f"{who}: tp_group has {tp_size} ranks, which do not divide num_heads = {num_heads}")
        self.hidden_size, self.layer_idx, self.conv_size = hidden_size, layer_idx, conv_size
        self.head_k_dim, self.head_v_dim = head_k_dim, head_v_dim
        self.num_heads, self.num_v_heads = num_heads // tp_size, num_v_heads // tp_size  # this rank's
        self.key_dim, self.value_dim = self.num_heads * head_k_dim, self.num_v_heads * head_v_dim
        self.use_short_conv = use_short_conv
        self.q_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        if use_short_conv:
            self.q_conv1d = ShortConvolution(self.key_dim, conv_size, conv_bias)
            self.k_conv1d = ShortConvolution(self.key_dim, conv_size, conv_bias)
            self.v_conv1d = ShortConvolution(self.value_dim, conv_size, conv_bias)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)

    def new_cache(self, num_sequences: int) -> LayerCache:
        """A cache of sequences that have no tokens yet."""
        weight = self.q_proj.weight
        convs, state = self._cache_shapes()
        with weight.device:  # and not `weight.new_zeros`, which makes sharded tensors of weights that FSDP shares out
            conv = tuple(torch.zeros(num_sequences, *shape, dtype=weight.dtype) for shape in convs)
            return LayerCache(conv, torch.zeros(num_sequences, *state, dtype=torch.float32))

    def _cache_shapes(self) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
        """What the cache holds of one sequence: past inputs of each convolution, and the state."""
        widths = (self.key_dim, self.key_dim, self.value_dim) if self.use_short_conv else ()
        return [(width, self.conv_size - 1) for width in widths], (self.num_v_heads, self.head_v_dim, self.head_k_dim)

    @torch.no_grad()
    def load_whole(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take this rank's share of the whole layer's parameters: all of them without a `tp_group`."""
        mine = self.state_dict()
        if mine.keys() != state_dict.keys():
            raise ValueError(
                f"{type(self).__name__}: parameters {sorted(mine.keys() ^ state_dict.keys())} are in one of both only"
            )
        shares = {name: self._share(name, state_dict[name], parameter.shape) for name, parameter in mine.items()}
        for name, parameter in mine.items():
            parameter.copy_(shares[name])

    def _share(self, name: str, whole: Tensor, shape: torch.Size) -> Tensor:
        """This rank's part of a parameter, which has its heads in one dimension or none."""
        ranks, rank = size_of(self.tp_group), 0 if self.tp_group is None else dist.get_rank(self.tp_group)
        share = whole
        for dim, size in enumerate(shape):
            if whole.dim() == len(shape) and whole.shape[dim] == size * ranks:
                share = share.narrow(dim, rank * size, size)
        if share.shape != shape:
            each = "" if ranks == 1 else f" on each of {ranks} ranks"
            raise ValueError(f"{type(self).__name__}: {name} has shape {list(whole.shape)}; the layer's is {list(shape)}{each}")
        return share

    def forward(self, hidden_states: Tensor, *, cache: LayerCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """
        Args:
            hidden_states: `[B, T, hidden_size]`; this rank's tokens with a `cp_group`.
            cache: of `new_cache`; the sequences go on from it, and it is updated in place (inference only).
            cu_seqlens: offsets `[N + 1]` of sequences packed along T (then B == 1).

        Returns:
            `[B, T, hidden_size]`.
        """
        if self.cp_group is None:
            self._check(hidden_states, cache, cu_seqlens)
        else:
            self._check_with_ranks(hidden_states, cache, cu_seqlens)
        x = shared(hidden_states, self.tp_group)
        q, k, v = self._convolved((self.q_proj(x), self.k_proj(x), self.v_proj(x)), cache, cu_seqlens)
        q, k, v = (t.unflatten(-1, (-1, d)) for t, d in zip((q, k, v), (self.head_k_dim, self.head_k_dim, self.head_v_dim)))
        gates = self._gates(hidden_states, x)
        if self.cp_group is not None:
            o = self._context_parallel(q, k, v, gates)
        elif cache is not None and cu_seqlens is None and 0 < q.shape[1] <= MAX_DECODE_TOKENS:
            o = self._decode(q, k, v, gates, cache.recurrent)
        else:
            h0 = None if cache is None else cache.recurrent
            o, final = self._prefill(q, k, v, gates, h0, cache is not None, cu_seqlens)
            if cache is not None:
                cache.recurrent.copy_(final)
        return summed(self.o_proj(self._finish(o, hidden_states, x).flatten(-2)), self.tp_group)

    def _check(self, hidden_states: Tensor, cache: LayerCache | None, cu_seqlens: Tensor | None) -> None:
        who = type(self).__name__
        if hidden_states.dim() != 3 or hidden_states.shape[-1] != self.hidden_size:
            raise ValueError(f"{who}: hidden_states is {list(hidden_states.shape)}; expected [B, T, {self.hidden_size}]")
        if self.cp_group is not None and (cache is not None or cu_seqlens is not None):
            raise NotImplementedError(f"{who}: cache= and cu_seqlens= do not go with a cp_group; use cula.dist for those")
        needed = self.conv_size - 1 if self.cp_group is not None and self.use_short_conv else 0
        if hidden_states.shape[1] < needed:
            raise ValueError(f"{who}: {hidden_states.shape[1]} tokens on a rank of cp_group; a convolution needs {needed}")
        if cu_seqlens is not None:  # before a convolution reads them
            checks.check_cu_seqlens(who, cu_seqlens, hidden_states, "hidden_states")
            has_values = not (torch.compiler.is_compiling() or checks.has_no_data(cu_seqlens))
            if has_values and hidden_states.device.type == "cpu":
                checks.check_cu_seqlens_values(cu_seqlens, hidden_states, who)
        if cache is None:
            return
        if not isinstance(cache, LayerCache):
            raise checks.ArgumentTypeError(
                f"{who}: cache is {type(cache).__name__}; expected a LayerCache, which new_cache makes"
            )
        if torch.is_grad_enabled() and (hidden_states.requires_grad or any(p.requires_grad for p in self.parameters())):
            raise ValueError(f"{who}: a cache is for inference; call the layer under torch.no_grad()")
        N = hidden_states.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if cache.recurrent.shape[0] != N:
            raise ValueError(f"{who}: the cache is of {cache.recurrent.shape[0]} sequences; the call has {N}")
        convs, state = self._cache_shapes()
        if cache.recurrent.shape[1:] != state:
            raise ValueError(f"{who}: the cache is another layer's: a sequence has the state {list(state)} here; use new_cache")
        if [tuple(t.shape[1:]) for t in cache.conv] != convs:
            raise ValueError(f"{who}: the cache is another layer's: convolutions keep inputs {convs} here; use new_cache")

    @torch.compiler.disable
    def _check_with_ranks(self, hidden_states: Tensor, cache: LayerCache | None, cu_seqlens: Tensor | None) -> None:
        """`_check`, and what the ranks of `cp_group` must have in common before they hand on inputs of convolutions."""
        who, device = type(self).__name__, hidden_states.device
        with handshake.announced_refusal(who, self.cp_group, device):
            self._check(hidden_states, cache, cu_seqlens)
        signature = (("B", hidden_states.shape[0]), ("dtype", str(hidden_states.dtype)))
        handshake.agree(who, signature, self.cp_group, device)

    def _convolved(self, qkv: tuple[Tensor, ...], cache: LayerCache | None, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
        if not self.use_short_conv:
            return tuple(F.silu(t) for t in qkv)
        out = []
        for i, (t, conv) in enumerate(zip(qkv, (self.q_conv1d, self.k_conv1d, self.v_conv1d))):
            past = None if cache is None else cache.conv[i]
            if self.cp_group is not None:
                past = self._of_rank_before(t)
            out.append(conv(t, past, cu_seqlens))
            if cache is not None:
                conv.remember(cache.conv[i], t, cu_seqlens)
        return tuple(out)

    def _of_rank_before(self, t: Tensor) -> Tensor:
        last = t[:, t.shape[1] - (self.conv_size - 1) :]
        return from_rank_before(last.transpose(1, 2).contiguous(), self.cp_group)

    def _cp(self) -> dict[str, Any]:
        return {
            "sp_group": self.cp_group, "sp_size": size_of(self.cp_group), "sp_rank": dist.get_rank(self.cp_group),
            "output_final_state": False,
        }  # fmt: skip

    def _gates(self, hidden_states: Tensor, x: Tensor) -> Any:
        """What the recurrence takes besides q, k and v. `x` is `hidden_states` for use in this rank's heads."""
        raise NotImplementedError

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, gates: Any, h0: Any, final: bool, cu_seqlens: Any) -> tuple[Tensor, Any]:
        raise NotImplementedError

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, gates: Any, states: Tensor) -> Tensor:
        raise NotImplementedError

    def _context_parallel(self, q: Tensor, k: Tensor, v: Tensor, gates: Any) -> Tensor:
        raise NotImplementedError

    def _finish(self, o: Tensor, hidden_states: Tensor, x: Tensor) -> Tensor:
        """Norm and output gate of o `[B, T, HV, V]`."""
        raise NotImplementedError


def new_dt_bias(elements: int) -> nn.Parameter:
    """The inverse softplus of time steps between 0.001 and 0.1, evenly spread in their logarithm."""
    dt = torch.exp(torch.rand(elements, dtype=torch.float32) * (math.log(0.1) - math.log(0.001)) + math.log(0.001)).clamp_min(
        1e-4
    )
    return _without_decay(dt + torch.log(-torch.expm1(-dt)))


def new_A_log(heads: int, low: float) -> nn.Parameter:
    return _without_decay(torch.log(torch.empty(heads, dtype=torch.float32).uniform_(low, 16)))


def _without_decay(value: Tensor) -> nn.Parameter:
    """A parameter that optimizers should not decay, marked as flash-linear-attention marks it."""
    parameter = nn.Parameter(value)
    parameter._no_weight_decay = True  # type: ignore[attr-defined]
    return parameter


def value_head_dim(who: str, head_dim: int, expand_v: float) -> int:
    V = round(head_dim * expand_v)
    if not math.isclose(V, head_dim * expand_v, rel_tol=1e-5):
        raise ValueError(f"{who}: head_dim * expand_v is {head_dim * expand_v}; expected an integer")
    return V
