# SPDX-License-Identifier: Apache-2.0
"""What `test_madeup.py` looks at, part by part: `python -m tests.madeup.parts checks dispatch`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch.library import opcheck

import cula
import tests.madeup.register  # noqa: F401
from cula.bench import runner, suites, timing
from cula.reference import relative_error
from tests.madeup.calls import tensors
from tests.madeup.family import cula_fading, reference


def checks():
    good = tensors()
    for change, message in (
        ({"rate": good["rate"][:, :3]}, r"cula_fading: rate has shape \[2, 3, 2\]; expected \[B, T, HV\] = \[2, 20, 2\]"),
        ({"initial_state": torch.zeros(2, 2, 16, 8)}, "K last"),
        ({"cu_seqlens": torch.tensor([0, 20])}, "B == 1"),
        ({"device": "cuda:0"}, "q is on cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            cula_fading(**good | change)
    with pytest.raises(TypeError, match=r"unknown keyword argument 'strenght'; did you mean 'strength'\?"):
        cula_fading(**good, strenght=3)
    cula_fading(**good, patience=3)  # the backend's own


def dispatch():
    with pytest.raises(NotImplementedError, match="madeup: takes head dims up to 64, and this call has K = 128"):
        cula_fading(**tensors(K=128), backend="madeup")
    with pytest.raises(NotImplementedError, match="madeup: fades no faster than 100; torch: has no kernel for fading_fwd"):
        cula_fading(**tensors(), strength=200)
    q = torch.randn(1, 5, 1, 32)
    assert cula.explain("kda", q, q, q, -q.abs(), q[..., 0].sigmoid()).name == "torch", "which madeup does not serve"


def explain():
    choice = cula.explain("fading", **tensors())
    assert choice.name == "madeup" and choice.op == "fading_fwd"
    assert dict(choice.passed_over)["triton"]
    t = {name: x.requires_grad_() for name, x in tensors().items()}
    assert cula.explain(cula_fading, **t).backward.op == "fading_bwd"


def autograd():
    t = tensors()
    h0 = torch.randn(2, 2, 8, 16)
    leaves = [{n: x.to(d).requires_grad_() for n, x in (*t.items(), ("initial_state", h0))} for d in (None, torch.float64)]
    results = []
    for given, function in zip(leaves, (cula_fading, reference)):
        o, state = function(**given, **({"output_final_state": True} if function is cula_fading else {}))
        grads = torch.autograd.grad(o.sin().sum() + state.square().sum(), list(given.values()))
        results.append([o, state, *grads])
    for got, want in zip(*results):
        assert relative_error(got, want) < 1e-5


def operators():
    t = [x.requires_grad_() for x in tensors(T=4).values()]
    opcheck(torch.ops.cula.fading.default, (*t, None, None, None, 1, "output_final_state", None, "auto", "test", False))
    pool, slots = torch.zeros(3, 2, 8, 16), torch.tensor([2, 0])
    q, k, v, rate = (x.detach() for x in t)
    rest = (None, None, "commit", None, "auto", "test", False)
    opcheck(torch.ops.cula.fading_decode.default, (q, k, v, pool, slots, rate, *[None] * 5, *rest))


def compile():
    def model(q, k, v, rate, pool, slots):
        o, state = cula_fading(q * 2, k, v, rate, output_final_state=True)
        with torch.no_grad():
            o2, _ = cula_fading(q, k, v, rate, state_pool=pool, initial_state_indices=slots, double=True)
        return o.sin().sum() + state.sum(), o2

    results = []
    for function in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        t = [x.requires_grad_() for x in tensors().values()]
        pool = torch.ones(3, 2, 8, 16)
        loss, o2 = function(*t, pool, torch.tensor([2, 0]))
        results.append([loss, o2, pool, *torch.autograd.grad(loss, t)])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


def pools():
    t, pool, slots = tensors(), torch.randn(4, 2, 8, 16), torch.tensor([3, -1])
    before = pool.clone()
    o, _ = cula_fading(**t, state_pool=pool, initial_state_indices=slots)
    first = torch.stack([before[3], torch.zeros_like(before[0])])
    want, state = reference(**t, initial_state=first)
    assert relative_error(o, want) < 1e-5 and relative_error(pool[3], state[0]) < 1e-5
    assert torch.equal(pool[:3], before[:3])


def decode():
    t, pool = tensors(T=3), torch.randn(2, 2, 8, 16)
    want, state = reference(**t, initial_state=pool)
    rate = t.pop("rate")
    o, _ = cula.cula_decode(**t, state=pool, mode="fading", rate=rate)
    assert relative_error(o, want) < 1e-5 and relative_error(pool, state) < 1e-5
    with pytest.raises(ValueError, match="decay= belongs to mode 'lightning'"):
        cula.cula_decode(**t, state=pool, mode="fading", rate=rate, decay=torch.ones(2))


def bench():
    timing.SECONDS_A_MEASURE, timing.MIN_REPEATS = 0.0, 2
    with tempfile.TemporaryDirectory() as folder:
        settings = runner.Settings(torch.device("cpu"), peers=())
        result = runner.run(suites.build(["fading"], "cpu"), settings, Path(folder) / "r.json")
    (row,) = result["rows"]
    assert row["backend"] == "madeup" and row["entries"]["cula"]["status"] == "ok"


def ranks():
    from tests.dist.harness import assert_passed, run_cases

    results = run_cases("tests.madeup.cp_cases", world=2)
    for name in results:
        assert_passed(results, name)


if __name__ == "__main__":
    for part in sys.argv[1:]:
        print(part, flush=True)  # the last one said is where it failed
        globals()[part]()
