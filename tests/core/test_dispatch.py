# SPDX-License-Identifier: Apache-2.0
"""The table of backends: what is chosen for which hardware, and the sentences that say why."""

import dataclasses
import logging
import subprocess
import sys

import pytest
import torch

import cula
import cula.dist
from cula.core import dispatch
from cula.core.dispatch import BACKENDS, Backend, choose, choose_prefill
from cula.kda import chunk_kda, fused_recurrent_kda
from cula.kda.problem import KdaInputs, KdaOptions, check_kda
from tests.support.calls import KdaCall


def problem(**changes):
    q = torch.empty(1, 64, 2, 128, dtype=torch.bfloat16)
    g = torch.empty(1, 64, 2, 128)
    p, _ = check_kda(KdaInputs(q, q, q, g, g[..., 0]), KdaOptions())
    return dataclasses.replace(p, **changes)


def test_a_cpu_gets_torch():
    choice = choose("kda_fwd", problem())
    assert choice.name == "torch"
    for name, reason in choice.passed_over:
        assert name != "torch"
        assert reason


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"device": "cuda", "sm": (9, 0), "dtype": torch.float16}, "triton"),
        ({"device": "cuda", "sm": (8, 0)}, "triton"),
        ({"device": "cuda", "sm": (12, 0)}, "triton"),
        ({"device": "cuda", "sm": (7, 5)}, "torch"),
        ({"device": "cuda", "sm": (9, 0), "K": 60, "V": 100}, "triton"),
        ({"device": "cuda", "sm": (9, 0), "K": 256, "V": 512}, "triton"),
        ({"device": "cuda", "sm": (9, 0), "K": 257}, "torch"),
        ({"device": "cuda", "sm": (10, 0), "K": 256, "dtype": torch.float32}, "torch"),
        ({"device": "cuda", "sm": (10, 3), "K": 192}, "torch"),  # decays without a bound
        ({"device": "cuda", "sm": (10, 3), "K": 256, "options": KdaOptions(safe_gate=True)}, "triton"),
        ({"device": "cpu", "sm": None}, "torch"),
    ],
)
def test_what_is_chosen_for_which_hardware(changes, expected):
    """Decided from the description of a call, so a machine without the hardware can tell."""
    pytest.importorskip("triton")
    for op in ("kda_fwd", "kda_bwd"):
        choice = choose(op, problem(**changes))
        assert choice.name == expected
        assert (expected == "torch") == any(name == "triton" for name, _ in choice.passed_over)


def test_the_last_backend_serves_everything():
    """torch is the floor of the table: whatever the others decline is served."""
    assert BACKENDS[-1].name == "torch"
    for op in ("kda_fwd", "kda_bwd", "kda_transition", "kda_state_grad", "kda_decode"):
        assert BACKENDS[-1].objection(op, problem()) is None


def test_the_first_without_objection_is_taken(monkeypatch):
    table = (
        Backend(
            "absent",
            "cula.ops.torch",
            "needs a package",
            lambda op, p: None,
            requires=("no_such_package",),
            install="pip install it",
        ),
        Backend(
            "picky", "cula.ops.torch", "wants float16", lambda op, p: None if p.dtype == torch.float16 else "dtype is not float16"
        ),
        Backend("elsewhere", "cula.ops.torch", "for GPUs", lambda op, p: None, device="cuda"),
        *BACKENDS[-1:],
    )
    monkeypatch.setattr(dispatch, "BACKENDS", list(table))
    choice = choose("kda_fwd", problem())
    assert choice.name == "torch"
    reasons = dict(choice.passed_over)
    assert reasons["absent"] == "no_such_package not installed (pip install it)"
    assert reasons["picky"] == "dtype is not float16"
    assert reasons["elsewhere"] == "is for cuda, and the tensors are on cpu"
    for fragment in ("torch", "passed over picky", "dtype is not float16"):
        assert fragment in str(choice)
    assert choose("kda_fwd", problem(dtype=torch.float16)).name == "picky"


def test_a_forced_backend_that_cannot_says_why(monkeypatch):
    picky = Backend("picky", "cula.ops.torch", "wants float16", lambda op, p: "dtype is not float16")
    monkeypatch.setattr(dispatch, "BACKENDS", [picky, *BACKENDS])
    with pytest.raises(NotImplementedError, match=r"kda_fwd: no backend can serve this call. picky: dtype is not float16"):
        choose("kda_fwd", problem(), "picky")
    t = {n: x.requires_grad_() for n, x in KdaCall(T=3, initial_state=False).tensors().items() if x is not None}
    gradless = Backend("gradless", "cula.ops.torch", "", lambda op, p: "makes no gradient" if op == "kda_bwd" else None)
    monkeypatch.setattr(dispatch, "BACKENDS", [picky, gradless, *BACKENDS])
    with pytest.raises(NotImplementedError, match=r"^cula_kda: no backend can serve this call. picky: dtype is not float16"):
        cula.cula_kda(**t, backend="picky")
    with pytest.raises(NotImplementedError, match=r"^cula_kda \(its gradient\): no backend can serve this call. gradless: makes"):
        cula.cula_kda(**t, backend="gradless")
    with pytest.raises(NotImplementedError, match=r"^fused_recurrent_kda: no backend can serve this call. picky: "):
        fused_recurrent_kda(**t, backend="picky")
    with pytest.raises(NotImplementedError, match=r"^cula_kda_cp: no backend can serve this call. picky: "):
        cula.dist.cula_kda_cp(**t, sp_group=None, sp_size=1, sp_rank=0, backend="picky")


@pytest.mark.parametrize("function", [cula.cula_kda, chunk_kda, fused_recurrent_kda])
def test_an_unknown_backend_is_told_of_the_function_that_was_called(function):
    with pytest.raises(ValueError, match=f"^{function.__name__}: unknown backend 'nope'; choose 'auto' or one of"):
        function(**KdaCall(T=3).tensors(), backend="nope")


def test_an_unknown_backend_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown backend 'cudnn'") as caught:
        choose("kda_fwd", problem(), "cudnn")
    for b in BACKENDS:
        assert b.name in str(caught.value)


def test_each_choice_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_seen", set())
    with caplog.at_level(logging.INFO, logger="cula"):
        for _ in range(3):
            choose_prefill(problem())
    assert [r.message.splitlines()[0] for r in caplog.records] == [str(choose("kda_fwd", problem())).splitlines()[0]]


def test_explain_takes_the_arguments_of_the_call():
    q = torch.empty(1, 64, 2, 32, device="meta")
    g, beta = torch.empty(1, 64, 4, 32, device="meta"), torch.empty(1, 64, 4, device="meta")
    v = torch.empty(1, 64, 4, 32, device="meta")
    assert cula.explain(cula.cula_kda, q, q, v, g, beta, output_final_state=True).name == "torch"
    assert cula.explain("lightning", q, q, v, torch.empty(4, device="meta")).name == "torch"
    state = torch.empty(8, 4, 32, 32, device="meta")
    indices = torch.empty(1, dtype=torch.int32, device="meta")
    token = {"g": g[:, :1], "beta": beta[:, :1], "state_indices": indices}
    assert cula.explain("decode", q[:, :1], q[:, :1], v[:, :1], state, **token).name == "torch"
    with pytest.raises(TypeError, match="tile"):
        cula.explain("kda", q, q, v, g, beta, tile=3)
    with pytest.raises(ValueError, match="explain"):
        cula.explain("softmax", q)


@pytest.mark.slow
def test_the_command_line_lists_backends():
    output = subprocess.run([sys.executable, "-m", "cula"], capture_output=True, text=True, check=True).stdout
    assert f"cuLA {cula.__version__}" in output
    for b in BACKENDS:
        assert b.name in output


def test_importing_cula_and_a_call_need_neither_triton_nor_cute_nor_the_compiler():
    code = """
import sys
for name in ("triton", "cutlass", "tvm_ffi"):
    sys.modules[name] = None  # importing it raises ImportError
import torch, cula, cula.kda, cula.lightning, cula.utils
q = torch.randn(1, 8, 1, 32)
o, _ = cula.cula_kda(q, q, q, -torch.rand(1, 8, 1, 32), torch.rand(1, 8, 1))
assert o.shape == q.shape
assert "torch._dynamo" not in sys.modules, "which takes a second to import"
import cula.dist
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
