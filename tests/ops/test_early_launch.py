# SPDX-License-Identifier: Apache-2.0
"""Kernels that are launched while the one in front of them still runs wait for its end before they read.

The kernel in front lets its successor start, takes its time and only then writes what the call reads: a call that did not wait
would see what was there before. With its wait taken out decode was seen to do so in a graph, and not on the default stream, where
kernels seem not to be started early.
"""

from dataclasses import replace

import pytest
import torch

import cula
from tests.support.calls import KdaCall, LightningCall

pytest.importorskip("triton")

import triton
import triton.language as tl

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
KDA = KdaCall(dtype=BF16, gate_dtype=BF16, H=2, HV=2, K=128, V=128, gate="bounded", norm=True, beta="sigmoid")
LIGHTNING = LightningCall(dtype=BF16, H=2, HV=2, K=128, V=128)
MANY = {"B": 12, "H": 32, "HV": 32}  # states: more blocks than are there at once
ROUNDS = 500  # of reading memory before it writes: some hundred microseconds


@triton.jit
def write_late(source, target, zero, size, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    tl.extra.cuda.gdc_launch_dependents()
    seen = 0.0
    for _ in range(ROUNDS):
        seen += tl.load(zero, volatile=True)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, (tl.load(source + at, mask=at < size) + seen).to(target.dtype.element_ty), mask=at < size)


def kda(call):
    """Of q and a pool, all else being the same each time; the pool is for decode."""
    x = {n: t for n, t in call.tensors("cuda").items() if n != "q"}
    return lambda q, pool: cula.cula_kda(q, **x, **call.switches(), safe_gate=True, output_final_state=True)


def lightning(call):
    x = call.tensors("cuda")
    rest = {"initial_state": x["initial_state"], "output_final_state": True}
    return lambda q, pool: cula.cula_lightning(q, x["k"], x["v"], x["decay"], **rest)


def decode(call):
    x = {n: t for n, t in call.tensors("cuda").items() if n not in ("q", "initial_state", "cu_seqlens")}
    options = call.switches() if isinstance(call, KdaCall) else {"mode": "lightning"}
    return lambda q, pool: cula.cula_decode(q, state=pool, **x, **options)


# On Hopper: one pass, two kernels, Lightning's one and two; decode by Triton, of one token on bfloat16 states, and of several.
CALLS = {
    "kda, 64 tokens": (kda, KDA.with_(T=64), None),
    "kda, 1024 tokens": (kda, KDA.with_(T=1024), None),
    "lightning, 64 tokens": (lightning, replace(LIGHTNING, T=64), None),
    "lightning, 8192 tokens": (lightning, replace(LIGHTNING, T=8192), None),
    "kda decode, float32": (decode, KDA.with_(T=1, B=4), torch.float32),
    "kda decode, bfloat16": (decode, KDA.with_(T=1, B=4), BF16),
    "kda decode, 4 tokens": (decode, KDA.with_(T=4, B=4), torch.float32),
    "lightning decode": (decode, replace(LIGHTNING, T=1, B=4), torch.float32),
    "lightning decode, 4 tokens": (decode, replace(LIGHTNING, T=4, B=4), BF16),
}


@pytest.mark.parametrize("how", ["eager", "on a stream of its own", "in a graph", "behind another stream"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_sees_what_the_kernel_in_front_wrote(name, how):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no kernel is launched early on this GPU")
    make, call, pool_dtype = CALLS[name]
    run = make(call)
    new = torch.randn(call.B, call.T, call.H, call.K, device="cuda").to(BF16)
    q, zero = torch.zeros_like(new), torch.zeros(1, device="cuda")
    pool = None
    if pool_dtype is not None:
        start = torch.randn(call.B, call.HV, call.V, call.K, device="cuda").to(pool_dtype)
        pool = start.clone()
    write = lambda: write_late[(triton.cdiv(q.numel(), 1024),)](new, q, zero, q.numel(), ROUNDS=ROUNDS, BLOCK=1024)
    restore = lambda: None if pool is None else pool.copy_(start)
    for _ in range(2):  # the second call is by a plan
        restore()
        want = [t.clone() for t in run(new, pool)]
    write()
    graph = torch.cuda.CUDAGraph()
    if how == "in a graph":
        with torch.cuda.graph(graph):
            write()
            got = run(q, pool)
    restore()
    q.zero_()
    torch.cuda.synchronize()
    if how == "in a graph":
        graph.replay()
    elif how == "eager":
        write()
        got = run(q, pool)
    elif how == "on a stream of its own":
        with torch.cuda.stream(torch.cuda.Stream()):
            write()
            got = run(q, pool)
    else:
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            write()
        torch.cuda.current_stream().wait_stream(other)
        got = run(q, pool)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert got[0].any()


@pytest.mark.parametrize("late", ["slots", "states"])
@pytest.mark.parametrize("call", [KDA.with_(T=1, **MANY), replace(LIGHTNING, T=1, **MANY)], ids=["kda", "lightning"])
def test_what_is_asked_for_early_is_a_hint(call, late):
    """With as many states, Hopper's first blocks have slots fetched before the kernel in front has ended, which then names others
    or writes them."""
    x = {n: t for n, t in call.tensors("cuda").items() if n not in ("initial_state", "cu_seqlens")}
    options = call.switches() if isinstance(call, KdaCall) else {"mode": "lightning"}
    named = torch.randperm(call.B + 4, device="cuda")[: call.B].int()
    before = torch.tensor([0, -1, 10**9, *range(call.B - 3)], device="cuda").int()
    start = torch.randn(call.B + 4, call.HV, call.V, call.K, device="cuda").to(BF16)
    zero, slots, pool = torch.zeros(1, device="cuda"), named.clone(), start.clone()
    run = lambda: cula.cula_decode(state=pool, state_indices=slots, **x, **options)[0]
    source, target = (named, slots) if late == "slots" else (start, pool)
    write = lambda: write_late[(triton.cdiv(target.numel(), 1024),)](
        source, target, zero, target.numel(), ROUNDS=ROUNDS, BLOCK=1024
    )
    for _ in range(2):  # the second call is by a plan
        pool.copy_(start)
        want, after = run().clone(), pool.clone()
    write()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write()
        got = run()
    pool.copy_(start)
    target.copy_(before if late == "slots" else torch.full_like(start, torch.nan))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, want)
    assert torch.equal(pool, after)


EVEN, UNEVEN = (512,) * 8, (3000, 0, 100, 1, 500, 95, 200, 200)


@pytest.mark.parametrize("lengths", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_lengths_that_the_kernel_in_front_writes_late_decide(lengths):
    """On Hopper which of the kernels serve a call: those that find nothing to do do not wait before they read lengths."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no kernel is launched early on this GPU")
    call = KDA.with_(lens=lengths, H=16, HV=16)
    x = call.tensors("cuda")
    named, cu, zero = x["cu_seqlens"].clone(), x["cu_seqlens"], torch.zeros(1, device="cuda")
    before = torch.tensor([0, *(UNEVEN if lengths == EVEN else EVEN)], device="cuda").cumsum(0).int()
    run = lambda: cula.cula_kda(**x, **call.switches(), safe_gate=True, output_final_state=True)
    write = lambda: write_late[(1,)](named, cu, zero, cu.numel(), ROUNDS=ROUNDS, BLOCK=16)
    for _ in range(2):  # the second call is by a plan
        want = [t.clone() for t in run()]
    write()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write()
        got = run()
    for _ in range(20):
        cu.copy_(before)
        for t in got:
            t.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, want))
