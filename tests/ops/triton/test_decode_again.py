# SPDX-License-Identifier: Apache-2.0
"""Plans of decode on Triton: what they launch, without a GPU. `tests/test_plans.py` runs them on one."""

import pytest
import torch

from cula.contract import DecodeInputs, DecodeOptions, check_decode
from cula.ops.native import launcher
from cula.ops.triton import decode
from cula.ops.triton.launch import ALIGNMENT
from tests.support.plans import plan_on_cpu, run_plan

N, H, D, STREAM = 3, 2, 32, 77


def given(mode="kda", T=1, packed=False, **more) -> tuple[DecodeInputs, DecodeOptions]:
    lead, is_kda = (1, N) if packed else (N, T), mode == "kda"
    q, k, v = (torch.randn(*lead, H, D).bfloat16() for _ in range(3))
    x = DecodeInputs(q, k, v, torch.randn(5, H, D, D), torch.arange(N))
    if is_kda:
        x = x._replace(g=torch.randn(*lead, H, D), beta=torch.randn(*lead, H), A_log=torch.zeros(H), dt_bias=torch.zeros(H, D))
    else:
        x = x._replace(decay=torch.rand(H))
    return x._replace(**more), DecodeOptions(is_kda=is_kda, use_gate_in_kernel=is_kda)


@pytest.fixture
def launches(monkeypatch):
    """What is launched: (arguments of `Launch`, arguments of the launch); and whether launches are ready."""
    made, done, ready = [], [], [True]

    class Launch:
        device = 0

        def __init__(self, kernel, grid, tensors, rest, of, **options):
            made.append((grid, tensors, rest, options))
            self.run = launcher(of, lambda stream, *addresses: done.append((stream, *addresses)), None)

        def is_ready(self):
            return ready[0]

    monkeypatch.setattr(decode, "Launch", Launch)
    plan_on_cpu(monkeypatch, device=0, stream=STREAM)
    return made, done, ready


@pytest.mark.parametrize(
    ("call", "has_out"),
    [
        (given(), True),
        (given(), False),
        (given(packed=True), False),
        (given("lightning"), True),
        (given(state=torch.randn(N, H, D, D), state_indices=None), True),
        (
            given(T=2, num_accepted_tokens=torch.zeros(N, dtype=torch.int32), intermediate_states=torch.empty(N, 2, H, D, D)),
            False,
        ),
    ],
    ids=["out", "no out", "packed", "lightning", "no indices", "drafts"],
)
def test_a_plan_passes_addresses_in_the_kernels_order(launches, call, has_out):
    made, done, ready = launches
    x, options = call
    x = x._replace(out=torch.empty_like(x.v)) if has_out else x
    problem, rows, _ = check_decode(x, options)
    again = decode.record_decode(problem, rows, x)
    o, state = run_plan(again, x)
    assert state is x.state
    assert o is x.out if has_out else o.shape == x.v.shape and o.is_contiguous()
    (_, tensors, _, _), (arguments,) = made[0], done
    addresses = [0 if t is None else t.data_ptr() for t in (*tensors[:-1], o)]
    assert arguments == (STREAM, *addresses)
    ready[0] = False
    assert run_plan(again, x) is None
    assert len(done) == 1


@pytest.mark.parametrize("name", DecodeInputs._fields)
def test_addresses_that_the_kernel_was_not_compiled_for(launches, name):
    drafts = {"num_accepted_tokens": torch.zeros(N, dtype=torch.int32), "intermediate_states": torch.empty(N, 1, H, D, D)}
    x, options = given("lightning" if name == "decay" else "kda", **drafts)
    x = x._replace(out=torch.empty_like(x.v))
    problem, rows, _ = check_decode(x, options)
    again = decode.record_decode(problem, rows, x)
    t = getattr(x, name)
    moved = torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape)
    assert moved.data_ptr() % ALIGNMENT
    parameter = decode.decode_kernel.arg_names[DecodeInputs._fields.index(name)]
    assert (run_plan(again, x._replace(**{name: moved})) is not None) == (parameter in decode.ANY_ADDRESS)
