# SPDX-License-Identifier: Apache-2.0
"""Layers on two ranks: heads shared out, tokens shared out, beside the whole layer on one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from cula import layers
from cula.reference import relative_error

SMALL = {"hidden_size": 32, "num_heads": 2}
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "kda": ("KimiDeltaAttention", SMALL | {"head_dim": 16, "expand_v": 1.5, "conv_bias": True}),
    "kda-grouped": ("KimiDeltaAttention", SMALL | {"head_dim": 16, "num_v_heads": 4, "allow_neg_eigval": True}),
    "kda-bounded": ("KimiDeltaAttention", SMALL | {"head_dim": 16, "safe_gate": True, "lower_bound": -5.0, "conv_size": 3}),
    "kda-deep": ("KimiDeltaAttention", SMALL | {"head_dim": 16, "lower_bound": -9.0}),
    "gdn": ("GatedDeltaNet", SMALL | {"head_dim": 16, "num_v_heads": 4, "expand_v": 2, "output_gate_activation": "sigmoid"}),
    "gdn-narrow": ("GatedDeltaNet", SMALL | {"head_dim": 16, "conv_size": 1}),
    "gdn-plain": ("GatedDeltaNet", SMALL | {"head_dim": 16, "use_gate": False, "use_short_conv": False}),
    "lightning": ("LightningAttention", SMALL | {"head_dim": 16, "layer_idx": 1, "num_layers": 3}),
}


def make(name: str, **groups: Any) -> layers.base.LinearAttention:
    kind, options = LAYERS[name]
    torch.manual_seed(0)
    return getattr(layers, kind)(**options, **groups)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cases(world: int) -> dict[str, Callable[[int, int], Any]]:
    out: dict[str, Callable[[int, int], Any]] = {}
    for name in ("kda", "kda-grouped", "gdn", "lightning"):
        out[f"tensor-parallel-{name}"] = functools.partial(tensor_parallel, name)
    for name in ("kda", "gdn", "lightning"):
        out[f"context-parallel-{name}"] = functools.partial(context_parallel, name)
        out[f"sharded-{name}"] = functools.partial(sharded, name)
    out["meshes"] = meshes
    out["refused"] = refused
    return out


def whole(name: str) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The layer on one rank, its input with a gradient, its output and the output's gradient."""
    layer, x, dy = make(name), rand(2, 41, 32).requires_grad_(), rand(2, 41, 32, seed=1)
    y = layer(x)
    y.backward(dy)
    return layer, x, y.detach(), dy


def tensor_parallel(name: str, rank: int, world: int) -> None:
    """Outputs, the input's gradient, and each rank's share of every parameter's gradient; then a step with a cache."""
    reference, x, y, dy = whole(name)
    mine = make(name, tp_group=dist.group.WORLD)
    mine.load_whole(reference.state_dict())
    assert sum(p.numel() for p in mine.parameters()) < 0.75 * sum(p.numel() for p in reference.parameters())
    x2 = x.detach().clone().requires_grad_()
    got = mine(x2)
    got.backward(dy)
    assert relative_error(got.detach(), y) < 1e-5
    assert relative_error(x2.grad, x.grad) < 1e-5
    gradients = make(name, tp_group=dist.group.WORLD)
    gradients.load_whole({n: p.grad for n, p in reference.named_parameters()})
    for (n, p), want in zip(mine.named_parameters(), gradients.parameters()):
        assert relative_error(p.grad, want) < 2e-5, n
    with torch.no_grad():
        cache = mine.new_cache(2)
        parts = torch.cat([mine(part, cache=cache) for part in x.split([39, 1, 1], 1)], 1)
    assert relative_error(parts, y) < 1e-5


def context_parallel(name: str, rank: int, world: int) -> None:
    """Each rank has its tokens of the output and of the input's gradient; parameters' gradients are to be summed."""
    reference, x, y, dy = whole(name)
    mine = make(name, cp_group=dist.group.WORLD)
    mine.load_state_dict(reference.state_dict())
    here = slice(0, 20) if rank == 0 else slice(20, 41)
    x2 = x.detach()[:, here].clone().requires_grad_()
    got = mine(x2)
    got.backward(dy[:, here])
    assert relative_error(got.detach(), y[:, here]) < 1e-5
    assert relative_error(x2.grad, x.grad[:, here]) < 1e-5
    for (n, p), want in zip(mine.named_parameters(), reference.parameters()):
        total = p.grad.clone()
        dist.all_reduce(total)
        assert relative_error(total, want.grad) < 2e-5, n


def sharded(name: str, rank: int, world: int) -> None:
    """Generation by a layer whose parameters FSDP shares out, casting what it is called with: the cache is kept."""
    whole, x = make(name), rand(2, 30, 32)
    mine = fully_shard(make(name), mesh=init_device_mesh("cpu", (world,)), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    with torch.no_grad():
        want = whole(x)
        cache = mine.new_cache(2)
        got = torch.cat([mine(part, cache=cache) for part in x.split([20, 8, 1, 1], 1)], 1)
    assert cache.recurrent.dtype == torch.float32
    assert got.dtype == torch.bfloat16 and relative_error(got.float(), want) < 3e-2


def meshes(rank: int, world: int) -> None:
    """A `DeviceMesh` in the place of a group: of one dimension, or of several with a name that says which."""
    whole, x = make("lightning"), rand(2, 40, 32)
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("tp", "cp"))
    of_heads = make("lightning", tp_group=mesh)
    of_heads.load_whole(whole.state_dict())
    of_tokens = make("lightning", cp_group=mesh["tp"])
    of_tokens.load_state_dict(whole.state_dict())
    here = slice(rank * 20, rank * 20 + 20)
    with torch.no_grad():
        want = whole(x)
        assert relative_error(of_heads(x), want) < 1e-5
        assert relative_error(of_tokens(x[:, here]), want[:, here]) < 1e-5
    with pytest.raises(ValueError, match="LightningAttention: tp_group is str; expected a ProcessGroup or a DeviceMesh"):
        make("lightning", tp_group="tp")


def refused(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="do not divide num_heads = 3"):
        layers.KimiDeltaAttention(32, num_heads=3, tp_group=dist.group.WORLD)
    layer, is_last = make("kda", cp_group=dist.group.WORLD), rank == world - 1
    with pytest.raises(ValueError, match="a convolution needs 3"):
        layer(rand(1, 2, 32))
    with pytest.raises(ValueError, match="KimiDeltaAttention: 2 tokens on a rank of cp_group; a convolution needs 3"):
        layer(rand(1, 2 if is_last else 9, 32))
    with pytest.raises(ValueError, match=r"KimiDeltaAttention: ranks of the group disagree on B \(1 on rank 0; 2 on rank 1\)"):
        layer(rand(2 if is_last else 1, 9, 32))
    with pytest.raises(NotImplementedError, match="do not go with a cp_group"):
        layer(rand(1, 9, 32), cu_seqlens=torch.tensor([0, 9]))
