# SPDX-License-Identifier: Apache-2.0
"""Recorded decode calls on Triton: what they launch, without a GPU. `tests/core/replay/test_cache.py` runs them on one."""

import pytest
import torch

from cula.core.decode_checks import describe_decode
from cula.core.family import FAMILIES
from cula.core.problem import DecodeOptions
from cula.core.replay.record import launcher
from cula.kda.problem import KdaDecodeInputs
from cula.lightning.problem import LightningDecodeInputs
from cula.ops.triton import decode
from cula.ops.triton.launch import ALIGNMENT, Variant
from tests.support.replay import replay, replay_on_cpu

N, H, D, STREAM = 3, 2, 32, 77


def given(mode="kda", T=1, packed=False, **more):
    """The inputs, options and family of a decode."""
    lead, is_kda = (1, N) if packed else (N, T), mode == "kda"
    q, k, v = (torch.randn(*lead, H, D).bfloat16() for _ in range(3))
    Inputs = KdaDecodeInputs if is_kda else LightningDecodeInputs
    x = Inputs(q, k, v, torch.randn(5, H, D, D), torch.arange(N))
    if is_kda:
        x = x._replace(g=torch.randn(*lead, H, D), beta=torch.randn(*lead, H), A_log=torch.zeros(H), dt_bias=torch.zeros(H, D))
    else:
        x = x._replace(decay=torch.rand(H))
    return x._replace(**more), DecodeOptions(use_gate_in_kernel=is_kda), FAMILIES[mode]


def in_16_bits(x):
    """A_log and dt_bias as engines hand them over."""
    return x._replace(A_log=x.A_log.view(1, 1, H, 1).bfloat16(), dt_bias=x.dt_bias.flatten().bfloat16())


def checked(x, options, family):
    request = describe_decode(family, x, options, None, "test")
    return request.problem, request.x


@pytest.fixture
def launches(monkeypatch):
    """What is launched: tensors of what was recorded, arguments of the launch; and whether launches are ready."""
    made, done, ready = [], [], [True]

    def record(self, grid, of, /, **named):
        names = self.kernel.tensors
        made.append([named[name] for name in names])
        return 0, launcher([of[n] for n in names], lambda stream, numbers, *addresses: done.append((stream, *addresses)), None)

    monkeypatch.setattr(Variant, "record", record)
    monkeypatch.setattr(decode, "is_ready", lambda: ready[0])
    replay_on_cpu(monkeypatch, device=0, stream=STREAM)
    return made, done, ready


@pytest.mark.parametrize(
    ("call", "has_out"),
    [
        (given(), True),
        (given(), False),
        (given(packed=True), False),
        (given("lightning"), True),
        ((in_16_bits(given()[0]), *given()[1:]), False),
        (given(state=torch.randn(N, H, D, D), state_indices=None), True),
        (
            given(T=2, num_accepted_tokens=torch.zeros(N, dtype=torch.int32), intermediate_states=torch.empty(N, 2, H, D, D)),
            False,
        ),
    ],
    ids=["out", "no out", "packed", "lightning", "parameters in 16 bits", "no indices", "drafts"],
)
def test_a_record_passes_addresses_in_the_kernels_order(launches, call, has_out):
    made, done, ready = launches
    x, options, family = call
    x = x._replace(out=torch.empty_like(x.v)) if has_out else x
    problem, rows = checked(x, options, family)
    again = decode.record_decode(problem, rows, x)
    o, state = replay(again, x)
    assert state is x.state
    assert o is x.out if has_out else o.shape == x.v.shape and o.is_contiguous()
    tensors, (arguments,) = made[0], done
    addresses = [0 if t is None else t.data_ptr() for t in (*tensors[:-1], o)]
    assert arguments == (STREAM, *addresses)
    ready[0] = False
    assert replay(again, x) is None
    assert len(done) == 1


@pytest.mark.parametrize("name", [*KdaDecodeInputs._fields, "decay"])
def test_addresses_that_the_kernel_was_not_compiled_for(launches, name):
    more = {"num_accepted_tokens": torch.zeros(N, dtype=torch.int32), "intermediate_states": torch.empty(N, 1, H, D, D)}
    more["intermediate_state_indices"] = torch.arange(N, dtype=torch.int32)
    if name == "cu_seqlens":
        more["cu_seqlens"] = torch.arange(N + 1, dtype=torch.int32)
    x, options, family = given("lightning" if name == "decay" else "kda", packed="cu_seqlens" in more, **more)
    x = x._replace(out=torch.empty_like(x.v))
    problem, rows = checked(x, options, family)
    again = decode.record_decode(problem, rows, x)
    t = getattr(x, name)
    moved = torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape)
    assert moved.data_ptr() % ALIGNMENT
    parameter = next((of for of, field in decode.NAMES.items() if field == name), name)
    assert (replay(again, x._replace(**{name: moved})) is not None) == (parameter in decode.decode_kernel.any_address)
