# SPDX-License-Identifier: Apache-2.0
"""Host time of the Triton backend's launches: what Python takes for them, not what the GPU does.

    python benchmarks/host_launch.py [--heads 4] [--tokens 64]

Two columns: launches as the library makes them (`cula/ops/triton/launch.py`), and the same through Triton's own JIT. The GPU is
waited for after every few calls, outside the time taken, so that its queue is never full. Times are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import torch
import triton

import cula
from cula.core.decode_checks import describe_decode
from cula.core.problem import DecodeOptions
from cula.kda.family import FAMILY
from cula.kda.problem import KdaDecodeInputs, KdaInputs, KdaOptions, check_kda
from cula.lightning.problem import LightningInputs, LightningOptions, check_lightning
from cula.ops.triton import decode, kda, launch, lightning

ROUNDS, CALLS = 60, 5  # calls between two waits for the GPU
K = V = 128
SWITCHES = dict(use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-5.0)

Times = dict[str, list[float]]


def host_us(call: Callable[[], object]) -> float:
    """Median host time of a call."""
    for _ in range(10):
        call()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(times)


class by_triton:
    """Inside, every launch goes through Triton's JIT."""

    def __enter__(self) -> None:
        self.usual = launch.can_launch_directly
        launch.can_launch_directly = lambda kernel, first: False

    def __exit__(self, *exception: object) -> None:
        launch.can_launch_directly = self.usual


def kernel_times(call: Callable[[], object]) -> dict[str, float]:
    """Median host time of each kernel's launch in a call."""
    times: Times = defaultdict(list)
    usual = launch.Variant.__call__

    def timed(self: launch.Variant, grid: int, /, **named: object) -> None:
        start = time.perf_counter()
        usual(self, grid, **named)
        times[self.kernel.name].append((time.perf_counter() - start) * 1e6)

    host_us(call)
    launch.Variant.__call__ = timed  # type: ignore[method-assign]
    try:
        host_us(call)
    finally:
        launch.Variant.__call__ = usual  # type: ignore[method-assign]
    return {name: statistics.median(t) for name, t in times.items()}


def tensors(T: int, H: int, lengths: list[int] | None = None) -> KdaInputs:
    new = lambda *shape, dtype=torch.bfloat16: torch.randn(*shape, device="cuda", dtype=dtype)
    ends = None if lengths is None else torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    return KdaInputs(
        new(1, T, H, K), new(1, T, H, K), new(1, T, H, V), new(1, T, H, K), new(1, T, H), torch.rand(H, device="cuda"),
        new(H, K, dtype=torch.float32), None, ends,
    )  # fmt: skip


def kda_calls(x: KdaInputs) -> dict[str, Callable[[], object]]:
    """A forward and a backward of the backend, and both through the public function."""
    problem, y = check_kda(x, KdaOptions(**SWITCHES, output_final_state=True))
    problem = replace(problem, needs_grad=True)
    result = kda.kda_fwd(problem, y)
    do, dht = torch.randn_like(result.o), torch.randn_like(result.final_state)
    leaves = [t.clone().requires_grad_() if t is not None and t.is_floating_point() else t for t in x]
    wanted = [t for t in leaves if t is not None and t.requires_grad]

    def step() -> object:
        q, k, v, g, beta, A_log, dt_bias, h0, cu_seqlens = leaves
        o, _ = cula.cula_kda(
            q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, initial_state=h0, cu_seqlens=cu_seqlens, backend="triton", **SWITCHES
        )
        return torch.autograd.grad(o, wanted, do)

    return {
        "kda_fwd": lambda: kda.kda_fwd(problem, y),
        "kda_bwd": lambda: kda.kda_bwd(problem, y, result.saved, do, dht),
        "cula_kda, forward and backward": step,
    }


def lightning_calls(T: int, H: int) -> dict[str, Callable[[], object]]:
    x = tensors(T, H)
    problem, y = check_lightning(
        LightningInputs(x.q, x.k, x.v, torch.rand(H, device="cuda")), LightningOptions(output_final_state=True)
    )
    do = torch.randn_like(x.v)
    return {
        "lightning_fwd": lambda: lightning.lightning_fwd(problem, y),
        "lightning_bwd": lambda: lightning.lightning_bwd(problem, y, (), do, None),
    }


def decode_call(H: int) -> Callable[[], object]:
    x = tensors(4, H)
    q, k, v, g, beta = (t.transpose(0, 1) for t in x[:5])
    pool, slots = torch.zeros(8, H, V, K, device="cuda"), torch.arange(4, device="cuda", dtype=torch.int32)
    options = DecodeOptions(**SWITCHES)
    inputs = KdaDecodeInputs(q, k, v, pool, slots, g, beta, x.A_log, x.dt_bias)
    _, problem, y, *_ = describe_decode(FAMILY, inputs, options, None, "benchmark")
    return lambda: decode.decode(problem, y)


def in_turn(calls: list[Callable[[], object]]) -> Callable[[], None]:
    """One after the other, as one call: lengths that change from call to call."""

    def all_of_them() -> None:
        for call in calls:
            call()

    return all_of_them


def table(title: str, rows: dict[str, tuple[float, float]]) -> None:
    print(f"\n{title:44s} {'direct us':>10s} {'JIT us':>10s}")
    for name, (direct, jit) in rows.items():
        print(f"{name:44s} {direct:10.1f} {jit:10.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    H, T = args.heads, args.tokens
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, H = {H}, T = {T}, bf16")

    def both(call: Callable[[], object], per: int = 1) -> tuple[float, float]:
        direct = host_us(call) / per
        with by_triton():
            return direct, host_us(call) / per

    dense = kda_calls(tensors(T, H))
    packed = kda_calls(tensors(T, H, [T // 4, 0, T - T // 4]))
    attention = lightning_calls(T, H)
    calls = {**dense, **{f"{name}, packed": call for name, call in packed.items()}, **attention, "decode": decode_call(H)}

    each: dict[str, tuple[float, float]] = {}
    for call in (packed["kda_fwd"], packed["kda_bwd"], *attention.values(), calls["decode"]):
        direct = kernel_times(call)
        with by_triton():
            jit = kernel_times(call)
        each |= {name: (direct[name], jit[name]) for name in direct}
    table("one launch", each)
    table("one call", {name: both(call) for name, call in calls.items()})

    lengths = [64, 65, 100, 128, 1000, 777, 16, 3]
    changing = [kda_calls(tensors(n, H)) for n in lengths]
    rows = {f"{name}, lengths {lengths}": [c[name] for c in changing] for name in ("kda_fwd", "kda_bwd")}
    spans = [lightning_calls(n, H) for n in lengths]
    rows |= {f"{name}, likewise": [c[name] for c in spans] for name in ("lightning_fwd", "lightning_bwd")}
    table("one call, another length each time", {name: both(in_turn(c), len(lengths)) for name, c in rows.items()})


if __name__ == "__main__":
    main()
