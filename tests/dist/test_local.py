# SPDX-License-Identifier: Apache-2.0
"""`cula.dist` in one process: the transitions it rests on, a group of one, imports, and signatures."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys

import pytest
import torch

import cula
from cula import dist as cula_dist
from cula.core.dispatch import Backend, select
from cula.dist import handshake
from cula.dist.kernels import LocalKernels
from cula.dist.scan import Affine, blocks_of
from cula.kda.family import FAMILY as KDA
from cula.kda.problem import KdaInputs, KdaOptions, check_kda
from cula.lightning.family import FAMILY as LIGHTNING
from cula.lightning.problem import LightningInputs, LightningOptions, check_lightning
from cula.reference import relative_error
from tests.dist.problems import TOKENS, Spec, answer, make, operator_options

ALONE = {"sp_group": None, "sp_size": 1, "sp_rank": 0}
SOLE = {"tp_group": None, "tp_size": 1, "tp_rank": 0}


@pytest.mark.parametrize("gate", ["log", "bounded", "softplus"])
@pytest.mark.parametrize("lengths", [None, (70, 0, 5)])
def test_kda_state_grad_and_transition(gate, lengths):
    spec = Spec(lengths=lengths, slices=None if lengths else (75,), B=2 if lengths is None else 1, H=1, HV=2, gate=gate)
    x, do, dht, h0 = _tensors(spec)
    options = KdaOptions(**operator_options(spec), output_final_state=True)
    problem, inputs = check_kda(KdaInputs(*x, initial_state=h0, cu_seqlens=spec.cu_seqlens), options)
    _check_transition(problem, inputs, "kda", h0, do, dht)


@pytest.mark.parametrize("lengths", [None, (70, 0, 5)])
def test_lightning_state_grad_and_transition(lengths):
    spec = Spec("lightning", lengths=lengths, slices=None if lengths else (75,), B=2 if lengths is None else 1, H=1, HV=2)
    x, do, dht, h0 = _tensors(spec)
    problem, inputs = check_lightning(LightningInputs(*x, h0, spec.cu_seqlens), LightningOptions(output_final_state=True))
    _check_transition(problem, inputs, "lightning", h0, do, dht)


@pytest.mark.parametrize("family", ["kda", "lightning"])
def test_a_backend_may_do_without_the_short_passes(family, monkeypatch):
    """The whole forward and backward give the same numbers."""
    spec = Spec(family, slices=(75,), B=2, H=1, HV=2)
    x, do, dht, _ = _tensors(spec)
    if family == "kda":
        passes, inputs = LocalKernels(KDA, KdaOptions(), "auto", ("q",), "test"), KdaInputs(*x)
    else:
        passes, inputs = LocalKernels(LIGHTNING, LightningOptions(), "auto", ("q",), "test"), LightningInputs(*x)
    short = (*passes.transition(inputs), passes.state_grad(inputs, do, dht))
    find, short_ones = Backend.find, (f"{family}_state_grad", *(() if family == "kda" else ("lightning_transition",)))
    monkeypatch.setattr(Backend, "find", lambda self, of, name: None if name in short_ones else find(self, of, name))
    whole = (*passes.transition(inputs), passes.state_grad(inputs, do, dht))
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(short, whole, strict=True))


def _tensors(spec):
    x = make(spec)
    names = (*TOKENS["kda"], "A_log", "dt_bias") if spec.family == "kda" else (*TOKENS["lightning"], "decay")
    gen = torch.Generator().manual_seed(3)
    do = torch.randn(x["v"].shape, generator=gen)
    dht, h0 = (torch.randn(spec.N, spec.HV, spec.V, spec.K, generator=gen) for _ in range(2))
    return [x[name] for name in names if name in x], do, dht, h0


def _check_transition(problem, x, family, h0, do, dht):
    """Last state = h0 M + B and dh0 = dht M^T + C, against the whole forward and backward of the same backend."""
    forward, backward = select(f"{family}_fwd", problem), select(f"{family}_bwd", problem)
    final_state = forward(problem, x)[1]
    M, B = select(f"{family}_transition", problem)(problem, x)
    affine = Affine(M, B)
    assert relative_error(affine(h0), final_state) < 1e-5
    assert M.shape[-1] == (problem.K if family == "kda" else 1)
    rows = blocks_of(problem.V, 5)
    assert relative_error(torch.cat([affine(h0[:, :, r].contiguous(), r) for r in rows], dim=2), final_state) < 1e-5

    state_grad = select(f"{family}_state_grad", problem)
    want = backward(problem, x, (), do, dht)[-1]
    assert relative_error(state_grad(problem, x, do, dht), want) < 1e-5
    C = state_grad(problem, x, do)
    assert relative_error(Affine(M.mT, C)(dht), want) < 1e-5


@pytest.mark.parametrize("sp_mode", ["complete", "split"])
@pytest.mark.parametrize("lengths", [None, (30, 0, 12)])
def test_one_rank_alone_needs_no_group(lengths, sp_mode):
    spec = Spec(lengths=lengths, slices=None if lengths else (42,), has_h0=True)
    x = make(spec)
    weights = (torch.ones(1, 42, 2, spec.V), torch.ones(spec.N, 2, spec.V, spec.K))
    want = answer(spec, x, weights)
    leaves = {name: t.clone().requires_grad_() for name, t in x.items()}
    o, state = cula_dist.cula_kda_cp(
        *(leaves[name] for name in TOKENS["kda"]),
        initial_state=leaves["initial_state"],
        cu_seqlens=spec.cu_seqlens,
        sp_mode=sp_mode,
        broadcast_final_state=True,
        **ALONE,
    )
    (o.sum() + state.sum()).backward()
    assert relative_error(o, want["o"]) < 1e-5
    assert relative_error(state, want["final_state"]) < 1e-5
    assert all(relative_error(leaf.grad, want["d" + name]) < 2e-5 for name, leaf in leaves.items())


def test_second_derivatives_of_a_rank_alone_are_refused():
    x = make(Spec(slices=(5,)))
    q, *rest = (x[name] for name in TOKENS["kda"])
    q.requires_grad_()
    o, _ = cula_dist.cula_kda_cp(q, *rest, **ALONE)
    (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    for differentiate in (lambda y: torch.autograd.grad(y, q, allow_unused=True), torch.Tensor.backward):
        with pytest.raises(NotImplementedError, match="create_graph=True"):
            differentiate(dq.sum())


def test_forward_mode_is_refused():
    x = make(Spec(slices=(5,)))
    q, *rest = (x[name] for name in TOKENS["kda"])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="cula_kda_cp: forward-mode gradients"):
            cula_dist.cula_kda_cp(dual, *rest, **ALONE)


def test_hybrid_of_one_rank():
    x = make(Spec("lightning", slices=(20,), H=1, HV=2))
    arguments = [x[name] for name in (*TOKENS["lightning"], "decay")]
    want, _ = cula.cula_lightning(*arguments)
    sizes = SOLE | ALONE
    o, state = cula_dist.cula_lightning_tp_cp(*arguments, gather_output=True, **sizes)
    assert relative_error(o, want) < 1e-6
    assert state.shape == (1, 2, 12, 16)


@pytest.mark.parametrize("parallel", ["tp", "cp", "tp_cp"])
def test_lightning_takes_both_spellings(parallel):
    """Q, K, V and q, k, v are the same arguments, as at level 1."""
    x = make(Spec("lightning", slices=(20,), H=1, HV=2))
    function = getattr(cula_dist, f"cula_lightning_{parallel}")
    sizes = {"tp": SOLE, "cp": ALONE, "tp_cp": SOLE | ALONE}[parallel]
    want, _ = cula.cula_lightning(x["q"], x["k"], x["v"], x["decay"])
    for names in ("qkv", "QKV", "qKv"):
        named = {name: x[name.lower()] for name in names}
        assert relative_error(function(**named, decay=x["decay"], **sizes)[0], want) < 1e-6
    with pytest.raises(TypeError, match=f"cula_lightning_{parallel}: got 'Q' and 'q', which are the same argument"):
        function(x["q"], x["k"], x["v"], x["decay"], q=x["q"], **sizes)
    with pytest.raises(TypeError, match=f"cula_lightning_{parallel}: missing argument 'V' or 'v'"):
        function(x["q"], x["k"], decay=x["decay"], **sizes)


def test_tp_shares_pools_and_outputs_as_views():
    """A rank writes its own heads of a whole pool and of a whole output."""
    x = make(Spec("lightning", slices=(20,), H=2, HV=4))
    arguments = [x[name] for name in (*TOKENS["lightning"], "decay")]
    pool, out = torch.zeros(3, 4, 12, 16), torch.zeros(1, 20, 4, 12)
    options = {"state_pool": pool, "initial_state_indices": torch.tensor([2]), "out": out}
    for rank in range(2):
        cula_dist.cula_lightning_tp(*arguments, tp_size=2, tp_rank=rank, **options)
    o, state = cula.cula_lightning(*arguments, output_final_state=True)
    assert relative_error(out, o) < 1e-6
    assert relative_error(pool[2:], state) < 1e-6


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"cp_mode": "tree"}, ValueError, "cp_mode is 'tree'"),
        ({"sp_mode": "even"}, ValueError, "sp_mode is 'even'"),
        ({"schedule": cula_dist.Schedule("star")}, ValueError, "schedule is"),
        ({"schedule": "ring"}, TypeError, "schedule is 'ring'; expected a cula.dist.Schedule"),
        ({"null_index": "nonpositive"}, TypeError, r"unknown keyword argument 'null_index' \(backend"),
        ({"null_is_nonpositive": True}, TypeError, "unknown keyword argument 'null_is_nonpositive'"),
        ({"sp_size": 2}, ValueError, "torch.distributed is not initialised"),
        ({"nvshmem_backend": True}, NotImplementedError, "use a torch.distributed process group"),
        ({"cu_seqlens": torch.tensor([0, 10, 19])}, ValueError, "hold 20 tokens; .* give it 19"),
        ({"initial_state": torch.zeros(1, 2, 16, 12)}, ValueError, "initial_state has shape"),
        ({"initial_state": torch.zeros(1, 2, 12, 16).double()}, TypeError, "float32"),
        ({"state_pool": torch.zeros(1)}, NotImplementedError, "state_pool= is not available over ranks"),
        ({"return_intermediate_states": True}, NotImplementedError, "return_intermediate_states"),
        ({"batch_invariant": True}, NotImplementedError, "batch_invariant=True .* is not available over ranks"),
        ({"use_gates": True}, TypeError, "unknown keyword argument 'use_gates'"),
        ({"cp_moed": "ring"}, TypeError, "unknown keyword argument 'cp_moed'; did you mean 'cp_mode'"),
        ({"use_gate_in_kernel": True, "A_logs": torch.zeros(2)}, TypeError, "'A_logs'; did you mean 'A_log'"),
        ({"device": "cuda"}, ValueError, "device='cuda'"),
        ({"safe_gate": True, "use_gate_in_kernel": True}, ValueError, "lower_bound"),
    ],
)
def test_bad_arguments(options, error, words):
    x = make(Spec(slices=(20,)))
    with pytest.raises(error, match=words):
        cula_dist.cula_kda_cp(*(x[name] for name in TOKENS["kda"]), **(ALONE | options))


@pytest.mark.parametrize("function", [cula_dist.cula_kda_cp, cula_dist.cula_kda_tp], ids=["cp", "tp"])
@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("v", lambda t: t * float("nan"), "v holds NaN or Inf"),
        ("g", lambda t: -t, "g holds a positive log decay"),
        ("initial_state", lambda t: t / 0, "initial_state holds NaN or Inf"),
    ],
)
def test_values_are_checked_as_on_one_rank(name, change, words, function, monkeypatch):
    spec = Spec(slices=(20,), has_h0=True)
    x = make(spec)
    x[name] = change(x[name])
    options = {"initial_state": x["initial_state"]} | (ALONE if function is cula_dist.cula_kda_cp else SOLE)
    monkeypatch.setenv("CULA_CHECK", "1")
    with pytest.raises(ValueError, match=words):
        function(*(x[n] for n in TOKENS["kda"]), **options)


def test_batch_invariance_by_the_environment_is_refused_as_by_keyword(monkeypatch):
    monkeypatch.setenv("CULA_BATCH_INVARIANT", "1")
    x = make(Spec(slices=(20,)))
    with pytest.raises(NotImplementedError, match=r"batch_invariant=True \(or CULA_BATCH_INVARIANT=1\) is not available"):
        cula_dist.cula_kda_cp(*(x[name] for name in TOKENS["kda"]), **ALONE)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"A_log": torch.zeros(5)}, ValueError, r"A_log has shape \[5\]; expected 4 value heads in dimension 0"),
        ({"A_log": [0.0] * 4}, TypeError, "A_log is list; expected a torch.Tensor"),
        ({"beta": torch.zeros(1, 20)}, ValueError, r"beta has shape \[1, 20\]; expected 4 value heads in dimension 2"),
        ({"g": torch.zeros(1, 20, 3, 16)}, ValueError, "g has shape .*; expected 4 value heads in dimension 2"),
        (
            {"initial_state": torch.zeros(4, 12, 16)},
            ValueError,
            "initial_state has shape .*; expected 4 value heads in dimension 1",
        ),
        ({"gather_ouput": True}, TypeError, "unknown keyword argument 'gather_ouput'; did you mean 'gather_output'"),
        ({"A_logs": torch.zeros(4)}, TypeError, "unknown keyword argument 'A_logs'; did you mean 'A_log'"),
    ],
)
def test_bad_arguments_of_shared_heads(changes, error, words):
    x = make(Spec(slices=(20,), H=2, HV=4))
    with pytest.raises(error, match=f"cula_kda_tp: .*{words}"):
        cula_dist.cula_kda_tp(**x | changes, tp_size=2, tp_rank=1)


def test_a_context_without_a_group_is_refused():
    x = make(Spec(slices=(20,)))
    tokens = [x[name] for name in TOKENS["kda"]]
    with pytest.warns(DeprecationWarning, match="cula_kda_cp"), pytest.raises(ValueError, match="must have a group"):
        cula.cula_kda(*tokens, cp_context=object())
    with pytest.warns(DeprecationWarning, match="cp_context"), pytest.raises(ValueError, match="takes no initial_state"):
        cula.cula_kda(*tokens, cp_context=object(), output_final_state=True)


def test_tie_gives_exact_zeros():
    y, x = torch.ones(2, requires_grad=True), torch.full((3,), float("nan"), requires_grad=True)
    cula_dist.tie(y.sum(), x, None).backward()
    assert x.grad.tolist() == [0, 0, 0]
    assert y.grad.tolist() == [1, 1]


@pytest.mark.parametrize("call", [functools.partial(cula_dist.cula_kda_cp, **ALONE), cula_dist.cula_kda_tp], ids=["cp", "tp"])
def test_compiled_code_breaks_the_graph_around_a_call(call):
    x = make(Spec(slices=(20,)))
    tokens = [x[name] for name in TOKENS["kda"]]

    def layer(*tokens):
        return call(*tokens)[0] * 2

    assert relative_error(torch.compile(layer, backend="eager")(*tokens), layer(*tokens)) < 1e-6


@pytest.mark.slow
def test_import_initialises_nothing():
    code = "import cula.dist, torch.distributed as d; assert not d.is_initialized(); print('ok')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "ok"


def test_signatures_begin_as_documented():
    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(cula_dist.cula_kda_tp)[:8] == ["q", "k", "v", "g", "beta", "tp_group", "tp_size", "tp_rank"]
    wanted = ["Q", "K", "V", "decay", "sp_group", "sp_size", "sp_rank", "initial_state", "output_final_state"]
    assert names(cula_dist.cula_lightning_cp)[:9] == wanted
    assert names(cula_dist.split_cu_seqlens_for_sp) == ["cu_seqlens", "sp_rank", "sp_size", "max_seqlen"]
    for name in cula_dist.__all__:
        assert getattr(cula_dist, name).__doc__


@pytest.mark.parametrize("shape", [(4,), (1, 1, 4, 1), (4, 1)], ids=str)
def test_tp_shares_parameters_of_any_shape(shape):
    """A_log as models keep it: Kimi-Linear's is [1, 1, HV, 1]."""
    q, v, g = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 4, 8), torch.randn(1, 5, 4, 8)
    beta, A_log = torch.rand(1, 5, 4), torch.randn(4)
    options = {"use_gate_in_kernel": True, "dt_bias": torch.randn(32)}
    want, _ = cula.cula_kda(q, q, v, g, beta, A_log=A_log, **options)
    parts = [
        cula_dist.cula_kda_tp(q, q, v, g, beta, A_log=A_log.view(shape), **options, tp_size=2, tp_rank=rank)[0] for rank in (0, 1)
    ]
    assert relative_error(torch.cat(parts, 2), want) < 1e-6


@pytest.mark.parametrize("name", ["cula_kda_cp", "cula_kda_tp", "cula_kda_tp_cp"])
def test_explain_runs_nothing_and_tells_nobody(name, monkeypatch):
    """Of a call over ranks it says what would serve this rank's tokens; the other ranks are not there to listen."""

    def fails(*args, **kwargs):
        raise AssertionError("a kernel ran, or ranks spoke to each other")

    monkeypatch.setattr(Backend, "load", fails)
    monkeypatch.setattr(handshake, "_compare", fails)
    monkeypatch.setattr(handshake.dist, "get_world_size", lambda group: 2)
    q, beta = torch.randn(1, 8, 2, 16), torch.rand(1, 8, 2)
    ranks = (ALONE if "_cp" in name else {}) | (SOLE if "_tp" in name else {})
    choice = cula.explain(getattr(cula_dist, name), q, q, q, -torch.rand(1, 8, 2, 16), beta, **ranks)
    assert choice.name == "torch" and choice.op == "kda_fwd" and choice.backward is None
    trained = cula.explain(getattr(cula_dist, name), q.requires_grad_(), q, q, -torch.rand(1, 8, 2, 16), beta, **ranks)
    assert trained.backward is not None and trained.backward.op == "kda_bwd"
    with pytest.raises(ValueError, match="beta"):
        cula.explain(getattr(cula_dist, name), q, q, q, -torch.rand(1, 8, 2, 16), beta[:, :3], **ranks)
