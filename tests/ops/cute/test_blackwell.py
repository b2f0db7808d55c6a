# SPDX-License-Identifier: Apache-2.0
"""What Blackwell serves of what Hopper does, without kernels of its own for it: Gated DeltaNet of few heads, on KDA's kernels
with one gate a head. Calls go through the functions that dispatch names, in the simulator."""

import dataclasses

import pytest
import torch

from cula.core.dispatch import IN_PLACE, choose_prefill
from cula.core.kernels import Pool
from cula.ops.cute import gdn, kda
from cula.ops.cute.gdn_schedule import schedule as gdn_schedule
from cula.ops.cute.kda_schedule import schedule
from cula.ops.cute.toolchain import loader
from cula.reference import relative_error
from tests.ops.cute.sm100.test_gdn import STATE_TOLERANCE
from tests.ops.cute.test_gdn import TABLE, Case, make, wanted
from tests.ops.cute.test_kda import BLACKWELL_SM, interpreted  # noqa: F401  (a fixture)
from tests.ops.cute.test_kda_dispatch import HOPPER

D, NUM_SMS = 128, 148
TOLERANCE = {True: 2.2e-3, False: 8e-3}  # of o, by whether keys are normalised in the kernel


@pytest.fixture
def on_blackwell(interpreted, monkeypatch):  # noqa: F811
    monkeypatch.setattr(kda, "schedule_on", lambda problem, device: schedule(problem, NUM_SMS))
    monkeypatch.setattr(gdn, "schedule_on", lambda problem, device: gdn_schedule(problem, NUM_SMS))


GDN = [
    Case((150, 5, 64), H=1, HV=2, gate="fast"),
    Case((130, 130), is_packed=False, gate="slow", has_state=False, numbers=torch.bfloat16),
    Case((150,), gate="steep", beta="plain"),
    Case((70,), gate="zero", beta="negative", numbers=torch.bfloat16),
    Case((130,), is_normalised=False, gate="log", beta="plain", numbers=torch.bfloat16),
    Case((90,), is_normalised=False, gate="slow"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", GDN, ids=str)
def test_gated_delta_net(on_blackwell, case):
    p, x = make(case)
    p = dataclasses.replace(p, sm=BLACKWELL_SM)
    found, (want_o, want_state) = gdn.gdn_fwd(p, x), wanted(p, x)
    assert relative_error(found.o, want_o) < TOLERANCE[case.is_normalised]
    assert relative_error(found.final_state, want_state) < STATE_TOLERANCE[case.is_normalised]


@pytest.mark.slow
@pytest.mark.parametrize("null_is_nonpositive", [False, True])
def test_gated_delta_net_on_a_pool(on_blackwell, null_is_nonpositive):
    """Both null conventions, and a sequence that does not read its slot."""
    case = Case((70, 20, 100, 3), HV=2)
    p, x = make(case)
    p = dataclasses.replace(p, sm=BLACKWELL_SM)
    states = torch.full((6, p.HV, D, D), torch.nan)
    slots, live = [3, -1, 2, 0], [0, 2] if null_is_nonpositive else [0, 2, 3]
    has_state = torch.tensor([True, True, False, True])
    h0 = torch.zeros_like(x.initial_state)
    for n in live:
        if has_state[n]:
            states[slots[n]] = h0[n] = x.initial_state[n]
    before = states.clone()
    o = gdn.gdn_fwd_pool(p, x._replace(initial_state=None), Pool(states, torch.tensor(slots), has_state, null_is_nonpositive))
    want_o, want_state = wanted(p, x._replace(initial_state=h0))
    assert relative_error(o, want_o) < TOLERANCE[True]
    for n in live:
        assert relative_error(states[slots[n]], want_state[n]) < STATE_TOLERANCE[True]
    others = [slot for slot in range(6) if slot not in [slots[n] for n in live]]
    assert torch.equal(states[others].view(torch.uint8), before[others].view(torch.uint8)), "nothing else is written"


@pytest.mark.parametrize("sm", [(10, 0), (10, 3)])
def test_pools_and_checkpoints_are_the_kernels(monkeypatch, sm):
    monkeypatch.setattr(loader, "missing", lambda arch: None)
    served = {"sm": sm, "pool_dtype": torch.bfloat16, "checkpoint_dtype": torch.float32}
    for problem in (HOPPER, dataclasses.replace(HOPPER, has_scalar_gate=True), TABLE):
        choice = choose_prefill(dataclasses.replace(problem, device="cuda", **served))
        assert (choice.name, choice.pool, choice.checkpoints) == ("cute_sm100", IN_PLACE, IN_PLACE)
    apart = choose_prefill(dataclasses.replace(HOPPER, **served, has_aligned_slots=False))
    assert (
        apart.pool == "around the kernel: it reads states in pairs, and slots of the pool do not begin at multiples of 16 bytes"
    )
