# SPDX-License-Identifier: Apache-2.0
"""Compile, for one architecture, the kernels of the calls that dispatch sends to Triton; print reports as JSON.

    python -m tests.ops.triton.compile_variants 90 first 0

A process of its own, because the interpreter that the other tests use and the compiler cannot share one.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import torch

from cula.core.decode_checks import describe_decode
from cula.core.problem import DecodeOptions
from cula.kda.family import FAMILY
from cula.kda.problem import KdaDecodeInputs, KdaInputs, KdaOptions, check_kda
from cula.lightning.problem import LightningInputs, LightningOptions, check_lightning
from cula.ops.triton import decode, kda, launch, lightning
from tests.support.calls import KdaCall, LightningCall
from tests.support.triton_offline import dry_run
from tools.sass.descriptors import misplaced_descriptors

BF16, FP32 = torch.bfloat16, torch.float32
ACCESS = r"\b(?:ld|st|atom|red)\.[\w.]*global[\w.]*"
FULL = KdaCall(gate="bounded", norm=True, beta="sigmoid", dtype=BF16, K=128, V=128, H=1, HV=2, T=256, gate_dtype=BF16)

# name -> call. Head dims and dtypes decide tiles; the gate decides how diagonal blocks are made.
KDA = {
    "bf16 128": FULL,
    "bf16 128, any gate": FULL.with_(gate="softplus"),
    "bf16 128, no groups": FULL.with_(H=2),
    "bf16 128, packed": FULL.with_(lens=(100, 0, 156)),
    "bf16 128 by 64, log decays of one gate a head": FULL.with_(gate="log", V=64, scalar_gate=True, norm=False),
    "fp16 128": FULL.with_(dtype=torch.float16, gate_dtype=torch.float16),
    "bf16 64": FULL.with_(K=64, V=64, HV=1),
    "bf16 64, any gate": FULL.with_(gate="softplus", K=64, V=64),
    "bf16 256": FULL.with_(K=256, V=256),
    "bf16 256 by 512": FULL.with_(K=256, V=512, HV=1),
    "bf16 32 by 128, scalar gate": FULL.with_(K=32, V=128, scalar_gate=True),
    "bf16 60 by 100": FULL.with_(K=60, V=100),
    "bf16 192 by 96 in tiles of 256, any gate": FULL.with_(gate="softplus", K=192, V=96),
    "fp32 64, log decays": KdaCall(dtype=FP32, K=64, V=64),
    "fp32 100, log decays": KdaCall(dtype=FP32, K=100, V=100),
}
LIGHTNING = {
    "bf16 128": LightningCall(dtype=BF16, K=128, V=128, T=256),
    "bf16 64, packed": LightningCall(dtype=BF16, K=64, V=64, lens=(100, 0, 156)),
    "bf16 256": LightningCall(dtype=BF16, K=256, V=256),
    "bf16 256 by 512": LightningCall(dtype=BF16, K=256, V=512),
    "bf16 60 by 100": LightningCall(dtype=BF16, K=60, V=100),
    "fp32 64": LightningCall(dtype=FP32, K=64, V=64),
}
DECODE = {
    "bf16 128, fp32 pool": (FULL.with_(T=1, B=4), FP32),
    "bf16 128, bf16 pool": (FULL.with_(T=1, B=4), BF16),
    "bf16 128, four tokens": (FULL.with_(T=4, B=4), FP32),
    "fp32 64": (KdaCall(T=1, B=4, K=64, V=64), FP32),
    "bf16 256": (FULL.with_(T=1, B=4, K=256, V=256), FP32),
    "bf16 60 by 100, four tokens": (FULL.with_(T=4, B=4, K=60, V=100), FP32),
}

# The calls that decide whether a tile fits; ptxas is what takes time. The others are for Hopper, where the kernels are tuned.
FIRST = (
    "bf16 128",
    "bf16 128, any gate",
    "bf16 256",
    "bf16 60 by 100",
    "fp32 64, log decays",
    "fp32 64",
    "bf16 128, fp32 pool",
    "bf16 128, four tokens",
)


def compile_all(arch: int, which: str, part: int) -> list[dict]:
    """Every fourth of the first calls, or of the others, from the `part`-th on: four processes share them."""
    sm = (arch // 10, arch % 10)
    reports: list[dict] = []

    def wanted(calls: dict) -> dict:
        names = [name for name in calls if (name in FIRST) == (which == "first")]
        return {name: calls[name] for name in names[part::4]}

    def record(what: str, run) -> None:
        with dry_run(arch) as compiled:
            run()
        for r in compiled:
            shown = {n: getattr(r, n) for n in ("name", "registers", "spill_bytes", "shared_bytes", "fits")}
            faults = misplaced_descriptors(r.kernel.asm["cubin"]) if arch == 90 else []
            types = tuple(r.kernel.src.signature.values())
            parameters = launch.num_parameters(r.kernel), len([*launch.parameters(types, types)])
            is_early = r.kernel.metadata.launch_pdl
            reports.append(
                {"call": what, "arch": arch, "faults": faults, "parameters": parameters, "is_early": is_early, **shown}
                | {"accesses": re.findall(ACCESS, r.kernel.asm["ptx"].partition("griddepcontrol.wait")[0]) if is_early else []}
            )

    for name, call in wanted(KDA).items():
        options = KdaOptions(**call.switches(), output_final_state=True)
        problem, x = check_kda(KdaInputs(**call.tensors()), options)
        problem = replace(problem, sm=sm, needs_grad=True)
        record(f"kda forward, {name}", lambda problem=problem, x=x: kda.kda_fwd(problem, x))
        do, dht = torch.empty_like(x.v), torch.empty_like(x.initial_state)
        with dry_run(arch):  # compiled above; its outputs are what a backward is handed
            saved = kda.kda_fwd(problem, x).saved
        record(f"kda backward, {name}", lambda p=problem, x=x, s=saved, do=do, dht=dht: kda.kda_bwd(p, x, s, do, dht))
    # few heads, many chunks: segments and their scan
    problem, x = check_kda(KdaInputs(**FULL.with_(T=8192, H=1, HV=1).tensors()), KdaOptions(**FULL.switches()))
    if which == "first" and part == 0:
        record("kda segments, bf16 128", lambda: kda.kda_fwd(replace(problem, sm=sm), x))
    elif which == "first" and part == 1:
        record("kda transition, bf16 128", lambda: kda.kda_transition(replace(problem, sm=sm), x))
    for name, call in wanted(LIGHTNING).items():
        p, y = check_lightning(LightningInputs(**call.tensors()), LightningOptions(output_final_state=True))
        p = replace(p, sm=sm)  # without the gradient of decay, whose kernel ptxas gets wrong and nobody is served with
        record(f"lightning forward, {name}", lambda p=p, y=y: lightning.lightning_fwd(p, y))
        do, dht = torch.empty_like(y.v), torch.empty_like(y.initial_state)
        record(f"lightning backward, {name}", lambda p=p, y=y, do=do, dht=dht: lightning.lightning_bwd(p, y, (), do, dht))
    for name, (call, pool_dtype) in wanted(DECODE).items():
        t = call.tensors()
        pool = torch.empty(8, call.HV, call.V, call.K, dtype=pool_dtype)
        slots = torch.zeros(4, dtype=torch.int32)
        switches = {n: v for n, v in call.switches().items() if n != "scale"}
        inputs = KdaDecodeInputs(t["q"], t["k"], t["v"], pool, slots, t["g"], t["beta"], t["A_log"], t["dt_bias"])
        _, d, z, *_ = describe_decode(FAMILY, inputs, DecodeOptions(**switches), None, "test")
        record(f"decode, {name}", lambda d=d, z=z: decode.decode(replace(d, sm=sm), z))
    return reports


if __name__ == "__main__":
    json.dump(compile_all(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])), sys.stdout)
