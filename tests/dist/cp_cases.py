# SPDX-License-Identifier: Apache-2.0
"""Context-parallel calls that every rank runs and compares with float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from cula.dist import Schedule
from tests.dist.problems import Spec, check_cp

RING, GATHER = {"cp_mode": "ring"}, {"schedule": Schedule("gather")}
CHAIN = {"cp_mode": "scan", "schedule": Schedule("chain", 3)}


def cases(world: int) -> dict[str, Callable[[int, int], Any]]:
    slices = {2: (70, 61), 4: (40, 70, 1, 33)}[world]
    specs: dict[str, Spec] = {}
    for label, mode in (("ring", RING), ("chain", CHAIN), ("gather", GATHER)):
        for family in ("kda", "lightning"):
            specs[f"{family}-batch-{label}"] = Spec(family, slices=slices, B=2, has_h0=True, options=mode)
        split = mode | {"sp_mode": "split"}
        # a sequence over three ranks, sequences inside a rank, an empty one, a cut on a boundary
        lengths = {2: (30, 0, 64, 5), 4: (10, 95, 0, 3, 28, 24)}[world]
        specs[f"kda-split-{label}"] = Spec(lengths=lengths, H=2, HV=4, has_h0=True, options=split)
        specs[f"lightning-split-{label}"] = Spec("lightning", lengths=lengths, HV=2, has_h0=True, options=split)
        specs[f"kda-few-tokens-{label}"] = Spec(lengths=(2, 0, 1), has_h0=True, options=split)  # ranks without a token
        specs[f"kda-gate-{label}"] = Spec(slices=slices, gate="bounded", options=mode)
    everywhere = {"broadcast_final_state": True}
    specs["kda-auto"] = Spec(slices=slices, has_h0=True)
    specs["kda-scan"] = Spec(slices=slices, options={"cp_mode": "scan"})
    specs["kda-broadcast"] = Spec(slices=slices, B=2, has_h0=True, options=everywhere)
    specs["kda-split-broadcast"] = Spec(lengths=(50, 9, 71), has_h0=True, options=everywhere | {"sp_mode": "split"})
    specs["kda-complete"] = Spec(lengths=(30, 7, 64, 0, 5, 33), has_h0=True, H=1, HV=2)
    specs["lightning-complete"] = Spec("lightning", lengths=(30, 7, 64, 0, 5, 33), has_h0=True, options=everywhere)
    specs["kda-complete-one-sequence"] = Spec(lengths=(33,), has_h0=True)  # all other ranks are left without a token
    specs["kda-no-final-state"] = Spec(lengths=(80, 9), options={"sp_mode": "split", "output_final_state": False})
    specs["kda-softplus"] = Spec(slices=slices, gate="softplus")
    specs["kda-scalar-gate"] = Spec(slices=slices, scalar_gate=True, H=2, HV=4, options=CHAIN)
    specs["gdn-softplus"] = Spec("gdn", slices=slices, H=1, HV=2, gate="softplus", has_h0=True)
    specs["gdn-split-scan"] = Spec("gdn", lengths=(50, 9, 71), has_h0=True, options={"sp_mode": "split", "cp_mode": "scan"})
    pooled = {"has_h0": True, "state_dtype": torch.bfloat16}  # as a bfloat16 pool keeps them
    specs["gdn-bf16-states"] = Spec("gdn", slices=slices, B=2, options=RING, **pooled)
    specs["gdn-bf16-states-split"] = Spec("gdn", lengths=(50, 9, 71), options={"sp_mode": "split"}, **pooled)
    specs["kda-recompute-off"] = Spec(slices=slices, has_h0=True, options={"disable_recompute": True})
    specs["kda-empty-slice"] = Spec(slices=(0, 40, 0, 9)[-world:], has_h0=True, options=CHAIN)
    specs["kda-fast-decay"] = Spec(slices=slices, decay=4.0, has_h0=True, options=CHAIN)
    specs["kda-bf16"] = Spec(slices=slices, dtype=torch.bfloat16, has_h0=True, options=CHAIN)
    return {name: functools.partial(_run, spec) for name, spec in specs.items()}


def _run(spec: Spec, rank: int, world: int) -> dict[str, float]:
    return check_cp(spec, rank, world, tolerance=2e-5 if spec.dtype == torch.float32 else 2e-2)
