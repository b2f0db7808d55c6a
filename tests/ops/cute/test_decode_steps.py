# SPDX-License-Identifier: Apache-2.0
"""Decode token by token on the CuTe kernels: states of draft tokens that are kept, ragged rows, and where rows start.

The same cases run in the interpreter of compiled kernels (here, without a GPU) and on a GPU. Outputs, kept states and slots that
no row names start as NaN: what a kernel reads or writes beside its own shows.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from cula.core import dispatch
from cula.core.decode_checks import describe_decode
from cula.core.family import FAMILIES
from cula.core.problem import DecodeOptions, DecodeProblem
from cula.kda.problem import KdaDecodeInputs
from cula.lightning.problem import LightningDecodeInputs
from cula.ops.cute import decode
from cula.ops.cute.archs import find_arch
from cula.ops.cute.toolchain import loader
from cula.ops.triton.backend import BACKEND as TRITON
from cula.reference import kda, lightning, relative_error
from tests.support.cute import skip_without_dsl
from tests.support.replay import replay, replay_on_cpu, stand_in
from tests.support.variants import DECODE_STEPS
from tools import ptx
from tools.ptx.mutate import replace, without

D, SLOTS = 128, 7
BF16, F32 = torch.bfloat16, torch.float32
TOLERANCE = {BF16: 2.2e-3, F32: 2e-6}  # rounding to bfloat16 alone is 1.7e-3


@dataclass(frozen=True)
class Case:
    """Rows of a call: how many tokens each has, its slot, and how many tokens of the drafts before were accepted."""

    lengths: tuple[int, ...] = (3, 3)
    slots: tuple[int, ...] = (2, -1)  # the first of a row's, where every token has one
    accepted: tuple[int, ...] | None = None
    keeps: str = ""  # "buffer": intermediate_states; "rows": some of its rows, by their numbers; "slots": a slot for each token
    is_ragged: bool = False
    commit: bool = True
    mode: str = "kda"
    has_scalar_gate: bool = False
    gate: str = "bounded"
    pool: torch.dtype = F32
    g: torch.dtype = BF16
    A: torch.dtype = F32
    bias: torch.dtype = F32
    index: torch.dtype = torch.int32
    null_is_nonpositive: bool = False
    H: int = 1
    HV: int = 1

    def __str__(self) -> str:
        default = Case()
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return ",".join(f"{k}={v}" for k, v in given.items() if v != getattr(default, k)).replace("torch.", "") or "default"


# Between them they take every kernel and flag.
CASES = [
    Case(keeps="buffer", commit=False),
    Case(keeps="buffer", accepted=(2, 1), commit=False, pool=BF16, index=torch.int64),
    Case(keeps="rows", accepted=(0, 3), slots=(1, 3), mode="lightning", index=torch.int64),
    Case(keeps="rows", accepted=(1, 3), slots=(0, 3), mode="lightning", pool=BF16, null_is_nonpositive=True),
    Case(keeps="slots", slots=(0, 3), accepted=(3, 0), HV=2, gate="softplus", g=F32),
    Case(keeps="slots", slots=(3, -1), mode="gdn", has_scalar_gate=True, gate="softplus", pool=BF16, index=torch.int64),
    Case(keeps="slots", mode="gdn", has_scalar_gate=True, gate="softplus", pool=BF16, HV=3, bias=BF16),
    Case(keeps="buffer", mode="gdn", has_scalar_gate=True, gate="softplus", HV=3, A=BF16, bias=BF16),
    Case(keeps="slots", slots=(3, 0), commit=False, has_scalar_gate=True, gate="log", g=F32),
    Case(lengths=(1, 0, 4, 2), slots=(2, 1, 5, -1), is_ragged=True, H=2, HV=2),
    Case(lengths=(2, 1), slots=(2, 1), is_ragged=True, keeps="buffer", pool=BF16, index=torch.int64),
    Case(lengths=(8, 5), slots=(2, 1), is_ragged=True, mode="lightning", commit=False, gate="log"),
    Case(lengths=(1, 1), HV=2, keeps="buffer"),
]


@dataclass
class Made:
    """A call, and what should come of it."""

    problem: DecodeProblem
    x: Any
    first: list[torch.Tensor | None]  # state of each row; None: it is padding
    offsets: list[int]


def make(case: Case, device: str, sm: tuple[int, int] = (9, 0)) -> Made:
    random = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=random)
    N, T, HV = len(case.lengths), max(case.lengths), case.HV
    lead = (1, sum(case.lengths)) if case.is_ragged else (N, T)
    offsets = torch.tensor([0, *case.lengths]).cumsum(0)
    integers = lambda x: None if x is None else torch.tensor(x, dtype=case.index, device=device)
    gates = (HV,) if case.has_scalar_gate else (HV, D)
    g = normal(*lead, *gates)
    g = -g.abs() if case.gate == "log" else g

    pool = torch.full((SLOTS, HV, D, D), torch.nan)
    least = 1 if case.null_is_nonpositive else 0
    slots: Any = list(case.slots)
    if case.keeps == "slots":  # the tokens of a row in slots next to each other
        slots = [[s + t if s >= least else s for t in range(T)] for s in case.slots]
    accepted = case.accepted or (0,) * N
    kept_rows = [3 * n - 1 for n in range(N)] if case.keeps == "rows" else None  # the first row keeps nothing
    kept = torch.full((4, T, HV, D, D), torch.nan) if case.keeps in ("buffer", "rows") else None
    first: list[torch.Tensor | None] = []
    for n in range(N):
        a = accepted[n]
        slot = slots[n][max(a - 1, 0)] if case.keeps == "slots" else slots[n]
        state = normal(HV, D, D).to(case.pool)
        first.append(None if slot < least else state)
        if slot < least:
            continue
        row = n if kept_rows is None else kept_rows[n]
        if kept is not None and a > 0 and row >= 0:
            kept[row, a - 1] = state
        else:
            pool[slot] = state
    common = dict(
        num_accepted_tokens=None if case.accepted is None else integers(case.accepted),
        intermediate_states=None if kept is None else kept.to(device, case.pool),
        intermediate_state_indices=integers(kept_rows),
        cu_seqlens=offsets.to(device, case.index) if case.is_ragged else None,
        out=torch.full((*lead, HV, D), torch.nan, dtype=BF16, device=device),
    )
    tokens = [normal(*lead, heads, D).to(device, BF16) for heads in (case.H, case.H, HV)]
    tokens += [pool.to(device, case.pool), integers(slots)]
    if case.mode == "lightning":
        x: Any = LightningDecodeInputs(*tokens, torch.rand(HV, generator=random).to(device), **common)
    else:
        parameters = {}
        if case.gate != "log":
            parameters = {"A_log": normal(HV).to(device, case.A), "dt_bias": normal(*gates).to(device, case.bias)}
        x = KdaDecodeInputs(*tokens, g=g.to(device, case.g), beta=normal(*lead, HV).to(device, BF16), **parameters, **common)
    is_kda = case.mode != "lightning"
    options = DecodeOptions(
        lower_bound=-5.0 if is_kda and case.gate == "bounded" else None,
        use_gate_in_kernel=is_kda and case.gate != "log",
        use_qk_l2norm_in_kernel=is_kda,
        use_beta_sigmoid_in_kernel=is_kda,
        null_is_nonpositive=case.null_is_nonpositive,
        commit=case.commit,
        scale=0.1,
    )
    _, p, x, *_ = describe_decode(FAMILIES[case.mode], x, options, None, "test")
    return Made(dataclasses.replace(p, sm=p.sm or sm), x, first, offsets.tolist())


def definition(made: Made, n: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """o of the first tokens of row n, and the state after them, in float64."""
    p, x = made.problem, made.x
    at = slice(made.offsets[n], made.offsets[n] + tokens)
    of = lambda t: (t[0, at] if p.is_ragged else t[n, :tokens])[None]
    first = made.first[n][None].to(x.q.device)
    if p.family == "lightning":
        o, state = lightning(of(x.q), of(x.k), of(x.v), x.decay, initial_state=first, scale=p.scale)
    else:
        given = p.options._asdict()
        switches = ("lower_bound", "use_gate_in_kernel", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel")
        o, state = kda(
            of(x.q), of(x.k), of(x.v), of(x.g), of(x.beta), scale=p.scale, initial_state=first, A_log=x.A_log,
            dt_bias=x.dt_bias, **{name: given[name] for name in switches},
        )  # fmt: skip
    return o[0], state[0]


def check(case: Case, device: str, sm: tuple[int, int] = (9, 0)) -> None:
    made = make(case, device, sm)
    p, x = made.problem, made.x
    pool, kept = x.state.clone(), None if x.intermediate_states is None else x.intermediate_states.clone()
    tolerance = TOLERANCE[case.pool]
    o = decode.decode(p, x)
    assert o is x.out
    for n, length in enumerate(case.lengths):
        own = o[0, made.offsets[n] : made.offsets[n] + length] if case.is_ragged else o[n]
        if made.first[n] is None:
            assert not own.any()
            continue
        if length:
            want, last = definition(made, n, length)
            assert relative_error(own, want) < TOLERANCE[BF16]
        row = n if x.intermediate_state_indices is None else int(x.intermediate_state_indices[n])
        for t in range(length):
            _, state = definition(made, n, t + 1)
            if kept is not None and row >= 0:
                assert relative_error(x.intermediate_states[row, t], state) < tolerance
                kept[row, t] = x.intermediate_states[row, t]
            if case.keeps == "slots" and case.commit:
                slot = int(x.state_indices[n, t])
                assert relative_error(x.state[slot], state) < tolerance
                pool[slot] = x.state[slot]
        if case.keeps != "slots" and case.commit and length:
            assert relative_error(x.state[case.slots[n]], last) < tolerance
            pool[case.slots[n]] = x.state[case.slots[n]]
    same = lambda a, b: torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert same(x.state, pool), "a slot was written that the call does not name"
    assert kept is None or same(x.intermediate_states, kept), "a state was kept where none should be"


@pytest.fixture
def interpreted(monkeypatch):
    skip_without_dsl()
    return ptx.interpret(monkeypatch, decode)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted(interpreted, case):
    interpreted(races=True)
    check(case, "cpu")


@pytest.mark.parametrize(
    "edit",
    [without(r"st\.global\.v4\.b32[^;]*;", 0), replace(r"shfl\.sync\.bfly\.b32\s+(\S+), (\S+), [^;]*;", r"mov.b32 \1, \2;", 0)],
    ids=["a row of a state is not kept", "lanes are not added up"],
)
def test_a_broken_kernel_is_noticed(interpreted, edit):
    interpreted(edit=edit)
    with pytest.raises(AssertionError):
        check(CASES[0], "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted_for_blackwell(interpreted, case):
    interpreted(races=True)
    check(case, "cpu", (10, 0))


def test_cases_take_every_variant():
    taken = {decode.variant(make(case, "cpu").problem) for case in CASES}
    assert taken == set(DECODE_STEPS)


@pytest.mark.parametrize("how", ["python", "c"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_recorded_launch_is_that_of_a_call(monkeypatch, how, case):
    launched = []
    kernel = stand_in(how)
    monkeypatch.setattr(decode, "load", lambda name, arch: kernel(lambda *arguments: launched.append((name, arguments))))
    monkeypatch.setattr(decode, "stream_of", lambda device: 0)
    replay_on_cpu(monkeypatch)
    made = make(case, "cpu")
    decode.decode(made.problem, made.x)
    o, state = replay(decode.record_decode(made.problem, made.x, made.x), made.x)
    assert o is made.x.out and state is made.x.state
    assert launched[0] == launched[1]


HOPPER = dict(device="cuda", sm=(9, 0))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"kept_dtype": torch.float16}, "intermediate_states in the dtype of the pool"),
        ({"has_aligned_kept": False}, "contiguous and begin at multiples of 16 bytes"),
        ({"K": 64}, "takes K = V = 128"),
    ],
    ids=str,
)
def test_what_is_taken(change, reason):
    p = dataclasses.replace(make(CASES[0], "cpu").problem, **(HOPPER | change))
    found = decode.why_not("kda_decode", p)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("why_not", [None, "triton not installed", "cannot compile its launchers"])
def test_one_token_with_parameters_in_16_bits_is_left_to_triton_where_that_can_launch(monkeypatch, why_not):
    """Triton reads them as they are. Named, the kernel takes the call; and where Triton is not, or finds no compiler."""
    is_there = why_not is None
    monkeypatch.setattr(loader, "missing", lambda arch: None)
    monkeypatch.setattr(dispatch, "_is_installed", lambda name: name != "triton" or why_not != "triton not installed")
    asked = []
    triton = dataclasses.replace(TRITON, lacks=lambda may_run: asked.append(may_run) or why_not)
    monkeypatch.setattr(dispatch, "BACKENDS", [triton if b.name == "triton" else b for b in dispatch.BACKENDS])
    p = dataclasses.replace(make(Case(lengths=(1, 1)), "cpu").problem, has_float32_parameters=False, **HOPPER)
    choice = dispatch.choose("kda_decode", p)
    assert choice.name == ("triton" if is_there else "cute_sm90")
    assert not is_there or "leaves one token with A_log or dt_bias in 16 bits to triton" in dict(choice.passed_over)["cute_sm90"]
    assert dispatch.choose("kda_decode", p, "cute_sm90").name == "cute_sm90"
    assert asked == ([] if why_not == "triton not installed" else [True, True] if is_there else [True])


def test_kept_states_that_are_not_in_one_piece_are_seen():
    made = make(CASES[0], "cpu")
    assert made.problem.has_aligned_kept
    x = made.x._replace(intermediate_states=made.x.intermediate_states.transpose(-1, -2))
    _, p, *_ = describe_decode(FAMILIES["kda"], x, made.problem.options, None, "test")
    assert not p.has_aligned_kept


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu(case):
    p = make(case, "cuda").problem
    arch = find_arch(p.sm)
    if arch is None:
        pytest.skip(f"there are no CuTe kernels for compute capability {p.sm}")
    op = "kda_decode" if case.mode == "kda" else f"{case.mode}_decode"
    assert dispatch.choose(op, p, f"cute_{arch.name}").name == f"cute_{arch.name}"
    check(case, "cuda")
