# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel and hybrid calls, the context object of flash-linear-attention, and two layers in flight."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import cula
from cula import dist as cula_dist
from cula.dist import Schedule, tie
from cula.dist.comm import Channel
from cula.dist.varlen import packed_layout
from cula.kda import chunk_kda
from cula.reference import relative_error
from tests.dist.problems import TOKENS, Spec, answer, make, operator_options

HEADS = {"aligned": (2, 4), "one-group": (1, 4), "across-groups": (3, 12)}


def cases(world: int) -> dict[str, Callable[[int, int], Any]]:
    out: dict[str, Callable[[int, int], Any]] = {}
    for label, (H, HV) in HEADS.items():
        for gathered in (False, True):
            name = f"tp-{label}-{'gathered' if gathered else 'local'}"
            spec = Spec(slices=(37,), B=2, H=H, HV=HV, has_h0=True, gate="bounded")
            out[name] = functools.partial(tensor_parallel, spec, gathered, False)
    spec = Spec("lightning", slices=(37,), B=2, H=2, HV=4, has_h0=True)
    out["tp-lightning"] = functools.partial(tensor_parallel, spec, True, False)
    spec = Spec("gdn", slices=(37,), B=2, H=2, HV=4, has_h0=True, gate="softplus")
    out["tp-gdn"] = functools.partial(tensor_parallel, spec, True, False)
    out["tp-parallel-input"] = functools.partial(tensor_parallel, Spec(slices=(37,), H=4, HV=4, has_h0=True), True, True)
    for exchange in ("ring", "chain", "gather"):
        out[f"two-layers-{exchange}"] = functools.partial(two_layers, Schedule(exchange, 2), False)
        out[f"one-state-crosses-{exchange}"] = functools.partial(count_bytes, Schedule(exchange, 4))
    out["two-layers-broadcast"] = functools.partial(two_layers, Schedule("chain", 2), True)
    out["checkpointed"] = checkpointed
    out["unused-outputs"] = unused_outputs
    out["inference"] = inference
    for flags in (False, True):
        out[f"cp-context-{'flags' if flags else 'counts'}"] = functools.partial(cp_context, flags)
    if world == 4:
        out["mesh-gdn-ring"] = functools.partial(mesh_2x2, "gdn", "ring")
        for family in ("kda", "lightning"):
            for mode in ("ring", "scan"):
                out[f"mesh-{family}-{mode}"] = functools.partial(mesh_2x2, family, mode)
    return out


def tensor_parallel(spec: Spec, gathered: bool, is_parallel: bool, rank: int, world: int) -> dict[str, float]:
    w_o, w_s, whole, want = _problem(spec)
    leaves = {name: t.clone().requires_grad_(name != "decay") for name, t in whole.items()}
    given, heads = leaves, spec.HV // world
    if is_parallel:  # H == HV here: every tensor has its heads in one place
        at = {"initial_state": 1, "A_log": 0, "dt_bias": 0, "decay": 0}
        given = {name: t.narrow(at.get(name, 2), rank * heads, heads) for name, t in leaves.items()}
    positional, named = _arguments(spec, given)
    function = getattr(cula_dist, f"cula_{spec.family}_tp")
    o, state = function(
        *positional,
        tp_size=world,
        tp_rank=rank,
        tp_group=dist.group.WORLD if gathered else None,
        gather_output=gathered,
        input_is_parallel=is_parallel,
        output_final_state=True,
        **named,
    )
    mine = slice(None) if gathered else slice(rank * heads, (rank + 1) * heads)
    ((o * w_o[:, :, mine]).sum() + (state * w_s[:, mine]).sum()).backward()
    errors = {"o": relative_error(o, want["o"][:, :, mine]), "final_state": relative_error(state, want["final_state"][:, mine])}
    return errors | _summed_gradients(leaves, want)


def mesh_2x2(family: str, mode: str, rank: int, world: int) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    sp_rank, tp_rank = mesh.get_local_rank("cp"), mesh.get_local_rank("tp")
    spec = Spec(family, slices=(40, 33), B=2, H=2, HV=4, has_h0=True)
    w_o, w_s, whole, want = _problem(spec)
    tokens = slice(0, 40) if sp_rank == 0 else slice(40, 73)
    leaves = {name: (t[:, tokens] if name in TOKENS[family] else t).clone() for name, t in whole.items()}
    leaves = {name: t.requires_grad_(name != "decay") for name, t in leaves.items()}
    positional, named = _arguments(spec, leaves)
    function = getattr(cula_dist, f"cula_{family}_tp_cp")
    groups = {"tp_group": mesh, "sp_group": mesh} if mode == "ring" else {"tp_group": mesh["tp"], "sp_group": mesh["cp"]}
    sizes = {"tp_size": 2, "sp_size": 2, "tp_rank": tp_rank, "sp_rank": sp_rank}
    o, state = function(*positional, **groups, **sizes, cp_mode=mode, gather_output=True, **named)
    loss = (o * w_o[:, tokens]).sum()
    if state is not None:
        assert sp_rank == 1
        loss = loss + (state * w_s).sum()
    loss.backward()
    errors = {"o": relative_error(o, want["o"][:, tokens])}
    for name in TOKENS[family]:  # a rank has its heads' share of its tokens' gradient
        total = leaves[name].grad
        dist.all_reduce(total, group=mesh.get_group("tp"))
        errors["d" + name] = relative_error(total, want["d" + name][:, tokens])
    if sp_rank == 0:
        total = leaves["initial_state"].grad
        dist.all_reduce(total, group=mesh.get_group("tp"))
        errors["dinitial_state"] = relative_error(total, want["dinitial_state"])
    assert max(errors.values()) < 2e-5, errors
    return errors


def two_layers(schedule: Schedule, is_broadcast: bool, rank: int, world: int) -> dict[str, float]:
    """Two calls of one shape on one group, whose backwards run in opposite orders on even and odd ranks.

    (With a broadcast final state gradients go both ways in one backward, and the orders must be the same.)
    """
    spec = Spec(slices=(20,) * world, B=2)
    tokens = slice(20 * rank, 20 * rank + 20)
    layers = []
    for seed in (1, 2):
        w_o, w_s, whole, want = _problem(spec, seed)
        leaves = {name: t[:, tokens].clone().requires_grad_() for name, t in whole.items()}
        options = {"sp_group": None, "sp_size": world, "sp_rank": rank, "schedule": schedule}
        o, state = cula_dist.cula_kda_cp(*(leaves[name] for name in TOKENS["kda"]), broadcast_final_state=is_broadcast, **options)
        loss = (o * w_o[:, tokens]).sum()
        if state is not None:
            loss = loss + (state * w_s).sum() / (world if is_broadcast else 1)
        layers.append((loss, leaves, want))
    for loss, _, _ in layers if rank % 2 == 0 or is_broadcast else reversed(layers):
        loss.backward()
    errors = {}
    for i, (_, leaves, want) in enumerate(layers):
        for name, leaf in leaves.items():
            errors[f"d{name} of layer {i}"] = relative_error(leaf.grad, want["d" + name][:, tokens])
    assert max(errors.values()) < 2e-5, errors
    return errors


def count_bytes(schedule: Schedule, rank: int, world: int) -> dict[str, float]:
    """Only states cross, one in each direction for each boundary; with "gather" transitions, to every later rank."""
    spec = Spec(slices=(20,) * world, B=2)
    state = spec.B * spec.HV * spec.V * spec.K
    a_map = state + spec.B * spec.HV * spec.K**2
    sent = []
    exchange = Channel.exchange

    def counting(self: Channel, sends: Any, receives: Any) -> Any:
        sent.append(sum(t.numel() for _, t in sends))
        return exchange(self, sends, receives)

    leaves = {name: t[:, :20].clone().requires_grad_() for name, t in make(spec).items()}
    Channel.exchange = counting  # type: ignore[method-assign]
    try:
        o, _ = cula_dist.cula_kda_cp(
            *(leaves[name] for name in TOKENS["kda"]), sp_group=None, sp_size=world, sp_rank=rank, schedule=schedule
        )
        forward = sum(sent)
        o.sum().backward()
        backward = sum(sent) - forward
    finally:
        Channel.exchange = exchange  # type: ignore[method-assign]
    after, before = world - 1 - rank, rank
    if schedule.exchange == "gather":
        assert (forward, backward) == (after * a_map, before * a_map)
    else:
        assert (forward, backward) == (min(after, 1) * state, min(before, 1) * state)
    return {}


def checkpointed(rank: int, world: int) -> dict[str, float]:
    """Two layers whose forwards run again in the backward (activation checkpointing)."""
    spec = Spec(slices=(20,) * world, HV=1, V=16)
    tokens = slice(20 * rank, 20 * rank + 20)
    whole = make(spec)

    def network(v: Tensor, layer: Callable[[Tensor], Tensor], recompute: bool) -> Tensor:
        for _ in range(2):
            v = checkpoint(layer, v, use_reentrant=False) if recompute else layer(v)
        return v

    def on_ranks(v: Tensor) -> Tensor:
        q, k, _, g, beta = (whole[name][:, tokens] for name in TOKENS["kda"])
        return cula_dist.cula_kda_cp(q, k, v, g, beta, sp_group=None, sp_size=world, sp_rank=rank)[0]

    def alone(v: Tensor) -> Tensor:
        return cula.cula_kda(whole["q"], whole["k"], v, whole["g"], whole["beta"])[0]

    mine, all_of_it = whole["v"][:, tokens].clone().requires_grad_(), whole["v"].clone().requires_grad_()
    network(mine, on_ranks, True).square().sum().backward()
    network(all_of_it, alone, False).square().sum().backward()
    errors = {"dv": relative_error(mine.grad, all_of_it.grad[:, tokens])}
    assert errors["dv"] < 2e-5
    return errors


def unused_outputs(rank: int, world: int) -> dict[str, float]:
    """Rank 0's loss is about something else, the last rank's about the state alone, the others' about o."""
    spec = Spec(slices=(20,) * world)
    w_o, w_s, whole, _ = _problem(spec)
    w_o[:, :20] = 0
    w_o[:, -20:] = 0
    want = answer(spec, whole, (w_o, w_s))
    tokens = slice(20 * rank, 20 * rank + 20)
    leaves = {name: t[:, tokens].clone().requires_grad_() for name, t in whole.items()}
    o, state = cula_dist.cula_kda_cp(
        *(leaves[name] for name in TOKENS["kda"]), sp_group=None, sp_size=world, sp_rank=rank
    )  # fmt: skip
    if state is not None:
        loss = (state * w_s).sum()
    elif rank == 0:
        elsewhere = torch.ones(3, requires_grad=True)
        loss = tie(elsewhere.sum(), o, state)
        assert loss.item() == 3
    else:
        loss = (o * w_o[:, tokens]).sum()
    loss.backward()
    errors = {"d" + name: relative_error(leaf.grad, want["d" + name][:, tokens]) for name, leaf in leaves.items()}
    assert max(errors.values()) < 2e-5, errors
    return errors


def inference(rank: int, world: int) -> dict[str, float]:
    """Twice in inference mode, the second time from the first's final state; then in training with the same offsets."""
    spec = Spec(lengths=(30, 41, 9), options={"sp_mode": "split"})
    _, _, whole, want = _problem(spec)
    total = spec.T
    tokens = slice(rank * total // world, (rank + 1) * total // world)
    parts = [whole[name][:, tokens].clone() for name in TOKENS["kda"]]
    options = {"sp_group": None, "sp_size": world, "sp_rank": rank, "sp_mode": "split", "cu_seqlens": spec.cu_seqlens}
    with torch.inference_mode():
        o, state = cula_dist.cula_kda_cp(*parts, broadcast_final_state=True, **options)
        cula_dist.cula_kda_cp(*parts, initial_state=state, **options)
    errors = {"o": relative_error(o, want["o"][:, tokens]), "final_state": relative_error(state, want["final_state"])}
    leaves = [t.requires_grad_() for t in parts]
    cula_dist.cula_kda_cp(*leaves, **options)[0].sum().backward()
    assert max(errors.values()) < 2e-5, errors
    return errors


def cp_context(by_flags: bool, rank: int, world: int) -> dict[str, float]:
    spec = Spec(lengths=(7, 50, 0, 15, 8), gate="bounded")
    w_o, w_s, whole, _ = _problem(spec)
    want = answer(spec, whole, (w_o, torch.zeros_like(w_s)))
    assert spec.cu_seqlens is not None
    share = packed_layout(tuple(spec.cu_seqlens.tolist()), "split", rank, world).share
    reach = {"pre_num_ranks": share.num_before, "post_num_ranks": share.num_after}
    if by_flags:
        reach = {"is_first_rank": share.num_before == 0, "is_last_rank": share.num_after == 0}
    local = torch.tensor(share.cu_seqlens, dtype=torch.int32)
    context = SimpleNamespace(group=dist.group.WORLD, cu_seqlens=local, **reach)
    total = spec.T // world
    tokens = slice(rank * total, (rank + 1) * total)
    errors = {}
    for label, function in (("cula_kda", cula.cula_kda), ("chunk_kda", chunk_kda)):
        leaves = {name: (t[:, tokens] if name in TOKENS["kda"] else t).clone().requires_grad_() for name, t in whole.items()}
        positional, named = _arguments(spec, leaves)
        named["cu_seqlens"] = local
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            o, state = function(*positional, cp_context=context, **named)
        assert [(w.category, w.filename) for w in caught] == [(DeprecationWarning, __file__)], caught
        assert state is None
        (o * w_o[:, tokens]).sum().backward()
        errors[f"o of {label}"] = relative_error(o, want["o"][:, tokens])
        for name in TOKENS["kda"]:
            errors[f"d{name} of {label}"] = relative_error(leaves[name].grad, want["d" + name][:, tokens])
    assert max(errors.values()) < 2e-5, errors
    return errors


def _problem(spec: Spec, seed: int = 0) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
    gen = torch.Generator().manual_seed(seed + 7)
    w_o = torch.randn(spec.B, spec.T, spec.HV, spec.V, generator=gen)
    w_s = torch.randn(spec.N, spec.HV, spec.V, spec.K, generator=gen)
    whole = make(spec, seed)
    return w_o, w_s, whole, answer(spec, whole, (w_o, w_s))


def _arguments(spec: Spec, x: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
    positional = [x[name] for name in TOKENS[spec.family]] + ([x["decay"]] if spec.family == "lightning" else [])
    named: dict[str, Any] = {name: x[name] for name in ("A_log", "dt_bias", "initial_state") if name in x}
    return positional, named | operator_options(spec)


def _summed_gradients(leaves: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    errors = {}
    for name, leaf in leaves.items():
        if leaf.requires_grad:
            dist.all_reduce(leaf.grad)
            errors["d" + name] = relative_error(leaf.grad, want["d" + name])
    assert max(errors.values()) < 2e-5, errors
    return errors
