# SPDX-License-Identifier: Apache-2.0
"""The chunked float64 values that rows are judged by are those of `cula.reference`, gradients included."""

import pytest
import torch

from cula import reference
from cula.bench import check
from cula.bench.cases import ALL_FLAGS, Case
from cula.bench.inputs import make

CPU = torch.device("cpu")
DIMS = {"K": 16, "V": 8, "dtype": "float32"}


def whole(case: Case) -> check.Slice:
    return check.Slice(tuple(range(case.H)), tuple(range(case.N)), None)


def flat(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1, *t.shape[2:])


@pytest.mark.parametrize("gate", ["fast", "slow", "init", "slopes", "mixed", "softplus"])
@pytest.mark.parametrize("flags", [ALL_FLAGS, ("ht",), ("h0", "ht", "scalar")])
def test_kda_values_are_the_reference(gate, flags):
    case = Case("gva", "kda_prefill", (37, 1, 70), 2, 4, gate=gate, flags=flags, packed=True, **DIMS)
    x = make(case, CPU)
    o, state = reference.kda(x.q, x.k, x.v, x.g, x.beta, initial_state=x.h0, cu_seqlens=x.cu_seqlens, **x.switches())
    want = check.expected(x, whole(case))
    assert reference.relative_error(want["o"], flat(o)) < 1e-11
    assert reference.relative_error(want["state"], state) < 1e-11
    part = check.Slice((1,), (0, 2), None)
    cut = check.expected(x, part)
    exact = {"o": o, "state": state}
    assert max(check.errors(exact, cut, case, part).values()) < 1e-11


def test_lightning_values_are_the_reference():
    case = Case("lightning", "lightning_prefill", (70, 70), 2, 4, gate="slopes", flags=("h0", "ht"), **DIMS)
    x = make(case, CPU)
    o, state = reference.lightning(x.q, x.k, x.v, x.decay, initial_state=x.h0)
    want = check.expected(x, whole(case))
    assert reference.relative_error(want["o"], flat(o)) < 1e-12
    assert reference.relative_error(want["state"], state) < 1e-12


def test_decode_reads_the_slots_of_its_rows():
    case = Case("decode", "kda_decode", (1,) * 3, 2, 2, **DIMS)
    x = make(case, CPU)
    h0 = x.h0[x.state_indices.long()]
    o, state = reference.kda(x.q, x.k, x.v, x.g, x.beta, initial_state=h0, **x.switches())
    part = check.choose_slice(case, CPU)
    found = check.errors({"o": o, "state": state}, check.expected(x, part), case, part)
    assert max(found.values()) < 1e-12


def test_gradients_are_the_reference():
    case = Case("kda-train", "kda_train", (45, 45), 2, 4, **DIMS)
    x = make(case, CPU)
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "h0")
    at = {name: getattr(x, name).double().requires_grad_() for name in names}
    switches = x.switches() | {"A_log": at["A_log"], "dt_bias": at["dt_bias"]}
    o, _ = reference.kda(*(at[n] for n in names[:5]), initial_state=at["h0"], **switches)
    grads = dict(zip((f"d{n}" for n in names), torch.autograd.grad(o, list(at.values()), x.do.double())))
    part = whole(case)
    found = check.errors(grads | {"o": o}, check.expected(x, part), case, part)
    assert set(found) == {"o", *grads}
    assert max(found.values()) < 1e-10


def test_a_long_sequence_on_a_cpu_is_checked_from_its_start():
    case = Case("segments", "kda_prefill", (check.CPU_TOKENS + 10,), 1, 1, **DIMS)
    part = check.choose_slice(case, CPU)
    assert part.tokens == check.CPU_TOKENS
    assert "first 4096 tokens" in part.describe(case)
    assert check.choose_slice(case, torch.device("cuda")).tokens is None


def test_nan_and_large_errors_are_wrong():
    case = Case("kda-prefill", "kda_prefill", (8,), 1, 1)
    assert check.is_wrong({"o": 5e-3, "state": 4e-3}, case) is None
    assert "o 5.0e-01" in check.is_wrong({"o": 0.5, "state": 4e-3}, case)
    assert check.is_wrong({"o": float("nan")}, case) is not None
