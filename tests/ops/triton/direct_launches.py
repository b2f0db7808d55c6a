# SPDX-License-Identifier: Apache-2.0
"""Launch the backend's kernels on a driver that is not there; compare what it gets with what they were launched with.

    python -m tests.ops.triton.direct_launches

Kernels are compiled by Triton as for a GPU (sm_90) and nothing is executed. A process of its own, because the interpreter that
the other tests use and the compiler cannot share one. Prints, as JSON, for each call how many launches were made, how many of
them went to the driver directly, and the kernels whose arguments arrived otherwise than they were given.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from triton.runtime import driver

from cula.core.decode_checks import describe_decode
from cula.core.problem import DecodeOptions
from cula.kda.family import FAMILY
from cula.kda.problem import KdaDecodeInputs, KdaInputs, KdaOptions, check_kda
from cula.lightning.problem import LightningInputs, LightningOptions, check_lightning
from cula.ops.triton import decode, kda, launch, lightning
from tests.support.calls import KdaCall, LightningCall
from tests.support.triton_offline import _AbsentGpu

BF16, STREAM = torch.bfloat16, 77
CTYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
KDA = KdaCall(gate="bounded", norm=True, beta="sigmoid", dtype=BF16, K=32, V=32, H=1, HV=2, B=2, gate_dtype=BF16)


class Gpu(_AbsentGpu):
    """Loads kernels under numbers of their own, and launches nothing."""

    def __init__(self) -> None:
        super().__init__(90)
        self.numbers = itertools.count(1000)
        self.launcher_cls = lambda src, metadata: lambda *arguments: None

    def load_binary(self, *kernel: Any) -> tuple[int, int, int, int, int]:
        return 1, next(self.numbers), 32, 0, 1024


class Spy:
    """Sees what is launched, and what arrives at the driver."""

    def __init__(self) -> None:
        self.kernels: dict[int, Any] = {}  # by the number of the loaded function
        self.arrived: list[tuple[Any, int, int, list]] = []
        self.launched = 0
        self.wrong: list[str] = []
        self.pointer = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(self.driver)
        driver.set_active(Gpu())
        launch._driver_function = lambda name: ctypes.cast(self.pointer, ctypes.c_void_p).value
        launch.can_launch_directly = lambda kernel, first: True
        launch.current_device, launch.current_stream = (lambda: 0), (lambda device: STREAM)
        frame, call = launch.frame, launch.Variant.__call__

        def seen_frame(compiled: Any, *rest: Any) -> Any:
            made = frame(compiled, *rest)
            self.kernels[compiled.function] = compiled
            return made

        def seen_call(variant: launch.Variant, grid: int, /, **named: Any) -> None:
            before = len(self.arrived)
            call(variant, grid, **named)
            self.launched += 1
            if len(self.arrived) > before and not self.is_right(variant, grid, named, *self.arrived[-1]):
                self.wrong.append(variant.kernel.name)

        launch.frame, launch.Variant.__call__ = seen_frame, seen_call  # type: ignore[method-assign]

    def driver(self, config: int, function: int, parameters: int, extra: int | None) -> int:
        types = self.types(self.kernels[function])
        at = (ctypes.c_void_p * len(types)).from_address(parameters)
        values = [CTYPES.get(kind, ctypes.c_uint64).from_address(a).value for kind, a in zip(types, at)]
        grid = (ctypes.c_uint32 * 3).from_address(config)
        stream = ctypes.c_uint64.from_address(config + launch.STREAM).value
        self.arrived.append((self.kernels[function], grid[0] if tuple(grid)[1:] == (1, 1) else -1, stream, values))
        return 0

    @staticmethod
    def types(compiled: Any) -> list[str]:
        types = tuple(compiled.src.signature.values())
        return [kind for kind, _ in launch.parameters(types, types)]

    @staticmethod
    def is_right(variant: launch.Variant, grid: int, named: dict, compiled: Any, there: int, stream: int, values: list) -> bool:
        given = (*variant.kernel.in_order(named), *variant.constants.values())
        expected = [
            v.data_ptr() if isinstance(v, torch.Tensor) else ctypes.c_float(v).value if kind == "fp32" else v
            for kind, v in launch.parameters(tuple(compiled.src.signature.values()), given)
        ]
        return (there, stream, values, compiled.name) == (grid, STREAM, expected, variant.kernel.name)


def calls() -> dict[str, list[Callable[[], object]]]:
    """Of each kind several, which differ in lengths: only the first may compile."""

    def train(call: KdaCall) -> Callable[[], object]:
        problem, x = check_kda(KdaInputs(**call.tensors()), KdaOptions(**call.switches(), output_final_state=True))
        problem = replace(problem, sm=(9, 0), needs_grad=True)
        do, dht = torch.zeros_like(x.v), torch.zeros_like(x.initial_state)
        return lambda: kda.kda_bwd(problem, x, kda.kda_fwd(problem, x).saved, do, dht)

    def attend(call: LightningCall) -> Callable[[], object]:
        problem, x = check_lightning(LightningInputs(**call.tensors()), LightningOptions(output_final_state=True))
        problem = replace(problem, sm=(9, 0))
        do, dht = torch.zeros_like(x.v), torch.zeros_like(x.initial_state)
        return lambda: (lightning.lightning_fwd(problem, x), lightning.lightning_bwd(problem, x, (), do, dht))

    def decoded(rows: int) -> Callable[[], object]:
        call = KDA.with_(T=1, B=rows)
        t = call.tensors()
        switches = {n: v for n, v in call.switches().items() if n != "scale"}
        pool, slots = torch.zeros(rows, call.HV, call.V, call.K), torch.zeros(rows, dtype=torch.int32)
        inputs = KdaDecodeInputs(t["q"], t["k"], t["v"], pool, slots, t["g"], t["beta"], t["A_log"], t["dt_bias"])
        _, problem, x, *_ = describe_decode(FAMILY, inputs, DecodeOptions(**switches), None, "test")
        return lambda: decode.decode(replace(problem, sm=(9, 0)), x)

    return {
        "kda": [train(KDA.with_(T=T)) for T in (64, 65, 1, 333, 256)],
        "kda, packed": [train(KDA.with_(B=1, lens=lens)) for lens in ((64, 3), (5,), (0, 7, 100), (16,) * 16)],
        "kda, segments": [train(KDA.with_(B=1, H=1, HV=1, T=T)) for T in (2048, 1999, 4000)],
        "lightning": [attend(LightningCall(dtype=BF16, K=32, V=32, B=2, T=T)) for T in (64, 65, 1, 333)],
        "lightning, packed": [attend(LightningCall(dtype=BF16, K=32, V=32, lens=lens)) for lens in ((64, 3), (5,), (0, 7, 100))],
        "decode": [decoded(rows) for rows in (2, 3, 16, 33)],
    }


def main() -> None:
    spy, report = Spy(), {}
    for name, some in calls().items():
        counts = []
        for call in some:
            for _ in range(2):
                launched, arrived = spy.launched, len(spy.arrived)
                call()
                counts.append((spy.launched - launched, len(spy.arrived) - arrived))
        report[name] = {"first": counts[0], "again": counts[1:], "wrong": sorted({*spy.wrong})}
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
