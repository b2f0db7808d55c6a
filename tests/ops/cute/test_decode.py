# SPDX-License-Identifier: Apache-2.0
"""Decode on the CuTe kernels: what the backend takes, and its numbers.

The same cases run in the interpreter of compiled kernels (here, without a GPU) and on a GPU. Outputs start as NaN, and so do
slots that no row names: what a kernel reads or writes beside its own shows.
"""

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

import cula
from cula import reference
from cula.core.decode_checks import describe_decode
from cula.core.dispatch import choose
from cula.core.family import FAMILIES
from cula.core.problem import DecodeOptions, DecodeProblem
from cula.kda.problem import KdaDecodeInputs
from cula.lightning.problem import LightningDecodeInputs
from cula.ops.cute import decode
from cula.ops.cute.toolchain import loader, self_check, variants
from cula.reference import relative_error
from tests.support.cute import needs_dsl, skip_without_dsl
from tests.support.replay import instead_of_launches, replay
from tests.support.variants import BLACKWELL_DECODE, DECODE_STEPS, HOPPER_DECODE
from tools import ptx
from tools.ptx import copies

D, SLOTS = 128, 4
BF16, F32 = torch.bfloat16, torch.float32
# |x - x64| / |x64|: rounding to bfloat16 alone is 1.7e-3. A float32 state is as good as the sums that made it.
TOLERANCE = {BF16: 2.2e-3, F32: 2e-6}


@dataclass(frozen=True)
class Case:
    T: int = 2
    rows: tuple[int, ...] | None = (2, -1)  # slots, as they are named; None: no indices
    H: int = 1
    HV: int = 1
    mode: str = "kda"
    gate: str = "bounded"  # "softplus", "log"
    decay: float = 1.0  # the size of log decays that are given as such, and of Lightning's
    forgets: bool = False  # some of them are -inf
    has_scalar_gate: bool = False
    has_parameters: bool = True  # of the gate
    has_bias: bool = True  # among them
    norm: bool = True
    beta: str = "sigmoid"  # "negative", "plain"
    pool: torch.dtype = F32
    g: torch.dtype = BF16
    beta_dtype: torch.dtype = BF16
    A: torch.dtype = F32
    bias: torch.dtype = F32
    index: torch.dtype = torch.int32
    null_is_nonpositive: bool = False
    commit: bool = True
    layout: str = "rows"  # "packed": q, k and v side by side, indices and slots apart; "odd": nothing is aligned
    is_wide: bool = False  # 16 lanes a row of a float32 state, not 8
    is_tall: bool = False  # 32 rows of a bfloat16 state a warp, not 16

    def __str__(self) -> str:
        default = Case()
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return ",".join(f"{k}={v}" for k, v in given.items() if v != getattr(default, k)).replace("torch.", "") or "default"


# Between them they take every kernel and flag.
CASES = [
    Case(T=1, pool=BF16),
    Case(T=1, pool=BF16, HV=2, H=2, gate="softplus", g=F32, beta_dtype=F32, index=torch.int64, beta="negative", layout="packed"),
    Case(T=1, pool=BF16, gate="log", forgets=True, norm=False, beta="plain", rows=None),
    Case(T=1, pool=BF16, gate="log", decay=50.0, g=F32, rows=(0, 3, -1), null_is_nonpositive=True, HV=2),
    Case(T=1, pool=BF16, has_parameters=False, commit=False),
    Case(T=1, pool=BF16, HV=2, layout="odd"),
    Case(T=1, pool=BF16, mode="gdn", has_scalar_gate=True, HV=2, gate="softplus", layout="packed"),
    Case(T=1, pool=BF16, has_scalar_gate=True, rows=(0, 3, -1), null_is_nonpositive=True, g=F32, beta_dtype=F32, H=2, HV=2),
    Case(T=1, pool=BF16, mode="gdn", has_scalar_gate=True, gate="log", forgets=True, norm=False, beta="plain", rows=None),
    Case(T=1, pool=BF16, mode="gdn", has_scalar_gate=True, gate="softplus", has_bias=False, beta="negative", layout="odd"),
    Case(T=1, pool=BF16, mode="gdn", has_scalar_gate=True, gate="softplus", HV=3, bias=BF16),
    Case(T=1, pool=BF16, mode="gdn", has_scalar_gate=True, gate="softplus", HV=3, A=BF16, bias=BF16, g=F32, layout="packed"),
    Case(T=1, pool=BF16, mode="gdn", has_scalar_gate=True, gate="softplus", HV=3, A=BF16, has_bias=False),
    Case(T=1, pool=BF16, mode="lightning", norm=False, rows=(3, -1, 1), HV=2, H=2),
    Case(T=1, pool=BF16, mode="lightning", HV=2, layout="packed", index=torch.int64),
    Case(T=1, pool=BF16, mode="lightning", commit=False, rows=(0, 3), null_is_nonpositive=True),
    Case(T=1, pool=BF16, mode="lightning", norm=False, forgets=True, rows=None, HV=2),
    Case(T=1),
    Case(T=1, HV=2, H=2, gate="softplus", g=F32, beta_dtype=F32, index=torch.int64, beta="negative", layout="packed"),
    Case(T=1, gate="log", forgets=True, norm=False, beta="plain", rows=None),
    Case(T=1, gate="log", decay=50.0, g=F32, rows=(0, 3, -1), null_is_nonpositive=True, HV=2),
    Case(T=1, has_parameters=False, commit=False),
    Case(T=1, HV=2, layout="odd"),
    Case(T=1, mode="gdn", has_scalar_gate=True, HV=2, gate="softplus", layout="packed"),
    Case(T=1, has_scalar_gate=True, rows=(0, 3, -1), null_is_nonpositive=True, g=F32, beta_dtype=F32, H=2, HV=2),
    Case(T=1, mode="gdn", has_scalar_gate=True, gate="softplus", HV=3, A=BF16, bias=BF16, g=F32, layout="packed"),
    Case(T=1, mode="lightning", norm=False, rows=(3, -1, 1), HV=2, H=2),
    Case(T=1, mode="lightning", HV=2, layout="packed", index=torch.int64),
    Case(T=1, mode="lightning", norm=False, forgets=True, rows=None, HV=2),
    Case(),
    Case(pool=BF16),
    Case(pool=BF16, is_tall=True, has_scalar_gate=True, g=F32),
    Case(HV=2, gate="softplus", g=F32, beta_dtype=F32, index=torch.int64, is_wide=True),
    Case(gate="log", norm=False, beta="plain", g=F32, rows=None, is_wide=True),
    Case(mode="lightning", norm=False, pool=BF16),
    Case(mode="lightning", norm=False, rows=(0, 3, -1), null_is_nonpositive=True),
    Case(mode="lightning", HV=2, index=torch.int64, is_wide=True),
    Case(rows=(0, 3), null_is_nonpositive=True, beta="negative"),
    Case(has_scalar_gate=True, gate="softplus", HV=2, pool=BF16),
    Case(T=3, mode="lightning", norm=False, rows=(1, -1, 3), HV=2, H=2),
    Case(T=3, mode="lightning", pool=BF16, rows=(1, -1, 3), HV=2, H=2),
    Case(T=3, mode="lightning", norm=False, layout="odd", is_wide=True),
    Case(T=3, has_parameters=False, layout="odd", pool=BF16, beta_dtype=F32),
    Case(T=4, HV=2, layout="packed"),
    Case(T=4, gate="log", decay=50.0, norm=False, beta="plain", g=F32, is_wide=True),
    Case(T=4, gate="log", forgets=True),
    Case(T=4, gate="log", forgets=True, is_wide=True),
    Case(T=4, pool=BF16, gate="log", forgets=True, g=F32),
    Case(T=4, pool=BF16, gate="softplus", beta="negative"),
    Case(T=4, pool=BF16, is_tall=True, HV=2, layout="packed"),
    Case(T=3, pool=BF16, is_tall=True),
    Case(T=3, pool=BF16, is_tall=True, gate="log", forgets=True, norm=False, beta="plain", g=F32, commit=False),
    Case(T=4, commit=False, has_scalar_gate=True, gate="log", g=F32),
    Case(T=4, mode="lightning", norm=False, decay=0.0, layout="packed", HV=2),
    Case(T=4, mode="lightning", norm=False, decay=1000.0, is_wide=True),
    Case(T=4, mode="lightning", forgets=True, rows=None),
    Case(T=4, mode="lightning", norm=False, layout="packed", pool=BF16, HV=2, index=torch.int64),
    Case(T=5, mode="lightning", norm=False, commit=False),
    Case(T=5, pool=BF16),
    Case(T=7, mode="lightning", norm=True, HV=2, is_wide=True),
    Case(T=8, HV=2, H=2, gate="log", decay=50.0, g=F32),
    Case(T=8, has_scalar_gate=True, gate="softplus"),
    Case(T=8, is_wide=True),
    Case(T=8, pool=BF16, layout="packed"),
    Case(T=8, mode="lightning"),
    Case(T=8, mode="lightning", norm=False, pool=BF16, decay=1000.0),
    Case(T=8, mode="lightning", pool=BF16, forgets=True, commit=False, rows=(0, 3), null_is_nonpositive=True),
]


HOPPER_SM, BLACKWELL_SM = (9, 0), (10, 0)


def make(case: Case, device: str, sm: tuple[int, int] = HOPPER_SM) -> tuple[DecodeProblem, Any]:
    """A case on a device; on a CPU as if it were on a GPU of that capability."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    N = SLOTS if case.rows is None else len(case.rows)
    T, H, HV, is_kda = case.T, case.H, case.HV, case.mode != "lightning"
    q, k, v = normal(N, T, H, D), normal(N, T, H, D), normal(N, T, HV, D)
    if not case.norm:
        q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
    q, k, v = (t.bfloat16().to(device) for t in (q, k, v))
    indices = None if case.rows is None else torch.tensor(case.rows, dtype=case.index, device=device)
    pool = torch.full((SLOTS, HV, D, D), torch.nan)
    for slot in range(SLOTS) if case.rows is None else case.rows:
        if slot > 0 or (slot == 0 and not case.null_is_nonpositive):
            pool[slot] = normal(HV, D, D)
    pool = pool.to(device, case.pool)
    if case.layout == "packed":
        side_by_side = torch.cat([t.flatten(2) for t in (q, k, v)], -1)
        q, k, v = (t.unflatten(-1, (-1, D)) for t in side_by_side.split([H * D, H * D, HV * D], -1))
        pool = torch.cat([pool.flatten(1), torch.full((SLOTS, 8), 3.0).to(pool)], 1)[:, :-8].view(pool.shape)
        indices = torch.stack([indices, indices], 1).flatten()[::2]
    elif case.layout == "odd":
        q, k, v = (torch.cat([t, t[..., :1]], -1)[..., 1:] for t in (q, k, v))
    out = torch.full((N, T, HV, D), torch.nan, dtype=BF16, device=device)
    if case.layout == "odd":
        out = out.transpose(2, 3).contiguous().transpose(2, 3)
    per_channel = () if case.has_scalar_gate else (D,)
    g = normal(N, T, HV, *per_channel)
    g = -case.decay * torch.rand(g.shape, generator=random) if case.gate == "log" else g
    g = g.masked_fill(g < -0.8 * case.decay, -torch.inf) if case.forgets else g
    beta = normal(N, T, HV).sigmoid() if case.beta == "plain" else normal(N, T, HV)
    decay = torch.full((HV,), torch.inf) if case.forgets else 0.3 * case.decay * torch.rand(HV, generator=random)
    bias = normal(HV, *per_channel)
    bias = torch.cat([bias, bias], -1)[..., 1 : 1 + bias.shape[-1]] if case.layout == "odd" else bias
    has_A, has_bias = is_kda and case.gate != "log" and case.has_parameters, is_kda and case.gate != "log"
    A_log = torch.rand(HV, generator=random) - 0.5 if has_A else None
    if is_kda:
        x = KdaDecodeInputs(
            q,
            k,
            v,
            pool,
            indices,
            g=g.to(case.g).to(device),
            beta=beta.to(case.beta_dtype).to(device),
            A_log=None if A_log is None else A_log.to(device, case.A),
            dt_bias=bias.to(device, case.bias) if has_bias and case.has_parameters and case.has_bias else None,
            out=out,
        )
    else:
        x = LightningDecodeInputs(q, k, v, pool, indices, decay.to(device), out=out)
    options = DecodeOptions(
        lower_bound=-5.0 if is_kda and case.gate == "bounded" else None,
        use_gate_in_kernel=is_kda and case.gate != "log",
        use_qk_l2norm_in_kernel=case.norm,
        use_beta_sigmoid_in_kernel=is_kda and case.beta != "plain",
        allow_neg_eigval=is_kda and case.beta == "negative",
        null_is_nonpositive=case.null_is_nonpositive,
        commit=case.commit,
    )
    _, p, x, *_ = describe_decode(FAMILIES[case.mode], x, options, None, "test")
    return dataclasses.replace(p, sm=p.sm or sm), x


def kernel_of(case: Case, p: DecodeProblem) -> str:
    """Its name; such small calls would all take a wide one of float32 states, and none a tall one."""
    name = decode.variant(p)
    return name + "_tall" if case.is_tall else name if case.is_wide else name.replace("_wide", "")


def wanted(p: DecodeProblem, x: Any, rows: list[int], slots: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the states after the call, of rows that have slots."""
    of = lambda t: None if t is None else t[rows]
    first, options = x.state[slots], p.options
    q, k = of(x.q), of(x.k)
    if p.family == "lightning":
        if options.use_qk_l2norm_in_kernel:
            q, k = (t / (t.double().square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
        return reference.lightning(q, k, of(x.v), x.decay, initial_state=first, scale=p.scale)
    return reference.kda(
        q, k, of(x.v), of(x.g), of(x.beta), scale=p.scale, initial_state=first, A_log=x.A_log, dt_bias=x.dt_bias,
        lower_bound=options.lower_bound, use_gate_in_kernel=options.use_gate_in_kernel,
        use_qk_l2norm_in_kernel=options.use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=options.use_beta_sigmoid_in_kernel, allow_neg_eigval=options.allow_neg_eigval,
    )  # fmt: skip


def check(case: Case, device: str, sm: tuple[int, int] = HOPPER_SM) -> None:
    p, x = make(case, device, sm)
    named = list(range(SLOTS)) if case.rows is None else list(case.rows)
    live = [n for n, slot in enumerate(named) if slot > 0 or (slot == 0 and not case.null_is_nonpositive)]
    slots = [named[n] for n in live]
    want_o, want_state = wanted(p, x, live, slots)
    before = x.state.clone()
    o = decode.run(p, x, kernel_of(case, p))
    assert o is x.out
    assert relative_error(o[live], want_o) < TOLERANCE[BF16]
    padding = [n for n in range(p.N) if n not in live]
    assert not o[padding].any()
    others = [slot for slot in range(SLOTS) if slot not in slots or not case.commit]
    assert torch.equal(x.state[others].view(torch.uint8), before[others].view(torch.uint8))
    if case.commit:
        assert relative_error(x.state[slots], want_state) < TOLERANCE[case.pool]
    if case.layout == "packed":
        padding = x.state.as_strided((SLOTS, 8), (x.state.stride(0), 1), x.state[0].numel())
        assert bool((padding == 3).all()), "the padding between slots is untouched"


# In the interpreter


@pytest.fixture
def interpreted(monkeypatch):
    """`decode.run` on CPU tensors, its kernels in the interpreter: in an order of warps, and broken by a function, if given."""
    skip_without_dsl()
    return ptx.interpret(monkeypatch, decode)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted(interpreted, case):
    interpreted(races=True)
    check(case, "cpu")


# One of each kind of kernel: KDA's and GDN's single token, several on either kind of states, Lightning's.
BLACKWELL = [CASES[0], CASES[6], Case(T=4, HV=2, layout="packed"), Case(T=3, pool=BF16, is_tall=True), CASES[-1]]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in BLACKWELL else [pytest.mark.slow], id=str(case)) for case in CASES]
)
def test_interpreted_for_blackwell(interpreted, case):
    interpreted(races=True)
    check(case, "cpu", BLACKWELL_SM)


@pytest.mark.parametrize("case", [case for case in CASES if case.T == 1], ids=str)
def test_slots_are_asked_for_early(interpreted, monkeypatch, case):
    """As in calls with many states: what is asked for is memory of the pool."""
    asked = []
    monkeypatch.setattr(copies.Copies, "hint", lambda *of, hint=copies.Copies.hint: asked.append(hint(*of)))
    interpreted(races=True)
    check(case, "cpu")
    assert not asked
    monkeypatch.setattr(decode, "PREFETCH_BLOCKS", 0)
    check(case, "cpu")
    p, _ = make(case, "cpu")
    live = p.N if case.rows is None else sum(slot >= 0 for slot in case.rows)  # slot 0 is one, even if it means none
    assert len(asked) == live * p.HV * decode.STATE_BLOCKS[case.pool]


@pytest.mark.parametrize(("slot", "is_asked"), [(SLOTS - 1, True), (SLOTS, False), (1_000_000, False), (-1, False)])
def test_only_slots_of_the_pool_are_asked_for(interpreted, monkeypatch, slot, is_asked):
    """Whatever is named before the kernel in front has ended; and the result is that of the slots that are named afterwards."""
    asked = []
    monkeypatch.setattr(copies.Copies, "hint", lambda *of: asked.append(of))
    monkeypatch.setattr(decode, "PREFETCH_BLOCKS", 0)
    interpreted(edit=lambda text: re.sub(r"(ld\.relaxed\.gpu\.global\.b32 (%r\d+), .*;)", rf"\1 mov.b32 \2, {slot};", text))
    check(Case(T=1, pool=BF16), "cpu")
    assert bool(asked) == is_asked


@pytest.mark.parametrize("order", ["first", pytest.param("last", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case", [Case(is_wide=True), Case(T=4, pool=BF16), Case(T=8), Case(T=4, mode="lightning", is_wide=True)], ids=str
)
def test_order_of_warps_does_not_matter(interpreted, order, case):
    interpreted(order)
    check(case, "cpu")


@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize("mode", ["kda", "lightning"])
def test_a_missing_barrier_is_noticed(interpreted, mode, order):
    interpreted(order, lambda text: text.replace("bar.sync \t0;", ""))
    with pytest.raises((AssertionError, ptx.SimulationError)):
        check(Case(T=4, mode=mode), "cpu")


@pytest.mark.parametrize("pool", [F32, BF16], ids=str)
def test_a_missing_wait_for_the_tokens_is_noticed(interpreted, pool):
    interpreted(edit=lambda text: re.sub(r"cp\.async\.wait_group\s+0;", "", text))
    with pytest.raises((AssertionError, ptx.SimulationError)):
        check(Case(T=4, pool=pool), "cpu")


# The comparison at first use


QUICK = (BLACKWELL_DECODE[1], BLACKWELL_DECODE[2], BLACKWELL_DECODE[4])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in (*BLACKWELL_DECODE, *DECODE_STEPS)],
)
def test_the_comparison_at_self_check_tells_right_from_wrong(interpreted, name):
    error = lambda: self_check.worst_error(name, torch.device("cpu"), BLACKWELL_SM)
    assert error() < 1e-3
    interpreted(edit=lambda text: re.sub(r"ex2\.approx(\.ftz)?\.f32", "mov.b32", text))
    assert not error() < self_check.LIMIT


# Variants and launches


@needs_dsl
def test_cases_take_every_variant():
    taken = {kernel_of(case, make(case, "cpu")[0]) for case in CASES}
    assert taken == set(HOPPER_DECODE)
    assert {v.name for v in variants.collect(["cula.ops.cute.sm90.decode"])} == {*HOPPER_DECODE, *DECODE_STEPS}


@needs_dsl
@pytest.mark.slow
def test_blackwells_kernels_are_hoppers():
    """They use nothing that only Hopper has, and cases that take every variant of the one take every variant of the other."""
    assert {v.name for v in variants.collect(["cula.ops.cute.sm100.decode"])} == {
        v.name for v in variants.collect(["cula.ops.cute.sm90.decode"])
    }
    for facts, hopper in zip(*(ptx.compile_all(arch, names=BLACKWELL_DECODE) for arch in ("sm_100a", "sm_90a")), strict=True):
        assert facts.stack_bytes == 0
        assert (facts.name, facts.instructions, facts.smem_bytes) == (hopper.name, hopper.instructions, hopper.smem_bytes)


@needs_dsl
@pytest.mark.slow
def test_one_code_serves_both_blackwells():
    names = [v.name for v in variants.collect(["cula.ops.cute.sm100.decode"])]
    for arch in ("sm_100a", "sm_103a"):
        ptx.compile_all(arch, names=names)  # in one process
    for name in names:
        one, other = (ptx.compiled(name, arch).ptx for arch in ("sm_100a", "sm_103a"))
        assert one.replace(".target sm_100a", ".target sm_103a") == other, name


@pytest.mark.parametrize("T", [2, 3, 4, 8])
def test_the_number_of_states_chooses_the_kernel(T):
    """For N = 1, 8, 64 with 32 heads, as measured, and of bfloat16 states that are neither few nor many the tall one."""
    p = dataclasses.replace(make(Case(T=T), "cpu")[0], HV=32)
    tall = "bf16" if T == 8 else "bf16_tall"
    for pool, names in ((F32, ("f32_wide", "f32", "f32")), (BF16, ("bf16", tall, "bf16"))):
        calls = [dataclasses.replace(p, N=N, pool_dtype=pool) for N in (1, 8, 64)]
        wanted = [f"decode_{4 if T == 3 else T}_{name}" for name in names]
        assert [decode.variant(call) for call in calls] == wanted
        of_lightning = [decode.variant(dataclasses.replace(call, family="lightning")) for call in calls]
        assert of_lightning == ["decode_8_bf16_lightning" if pool == BF16 else f"{name}_lightning" for name in wanted], (
            "in bfloat16 one kernel is for all numbers of tokens"
        )
        invariant = [dataclasses.replace(c, options=c.options._replace(batch_invariant=True)) for c in calls]
        assert len({decode.variant(call) for call in invariant}) == 1


@pytest.fixture(params=["python", "c"])
def launched(monkeypatch, request):
    """The name and arguments of every launch, instead of launches."""
    return instead_of_launches(monkeypatch, decode, request.param, lambda *launched: launched)


@pytest.mark.parametrize("case", [case for case in CASES if case.layout != "odd"], ids=str)
def test_a_recorded_launch_is_that_of_a_call(launched, case):
    p, x = make(case, "cpu")
    decode.decode(p, x)
    o, state = replay(decode.record_decode(p, x, x), x)
    assert o is x.out and state is x.state
    assert launched[0] == launched[1]


def test_a_recorded_launch_makes_an_output(launched):
    p, x = make(Case(), "cpu")
    given = x._replace(out=None)
    o, _ = replay(decode.record_decode(p, given, given), given)
    assert o.shape == x.v.shape and o.dtype == BF16 and o.is_contiguous()
    assert launched[0][1][10] == o.data_ptr()


def test_parameters_in_16_bits_are_converted_for_the_kernel(launched, monkeypatch):
    """And there is no record of such a call, since a launch alone would not convert them."""
    p, x = make(Case(), "cpu")
    x = x._replace(A_log=x.A_log.bfloat16(), dt_bias=x.dt_bias.bfloat16())
    seen = []
    monkeypatch.setattr(
        decode, "_launch", lambda p, x, tensors, name, of=decode._launch: seen.append(tensors) or of(p, x, tensors, name)
    )
    decode.decode(p, x)
    for name in ("A_log", "dt_bias"):
        assert seen[0][name].dtype == torch.float32 and torch.equal(seen[0][name], getattr(x, name).float())
    assert len(launched) == 1 and decode.record_decode(p, x, x) is None


@pytest.mark.parametrize(
    ("case", "dtype", "is_read"),
    [
        (Case(T=1, pool=BF16, mode="gdn", has_scalar_gate=True, gate="softplus"), BF16, True),
        (Case(T=1, pool=BF16, mode="gdn", has_scalar_gate=True, gate="softplus"), torch.float16, False),
        (Case(T=1, mode="gdn", has_scalar_gate=True, gate="softplus"), BF16, True),
        (Case(T=2, mode="gdn", has_scalar_gate=True, gate="softplus"), BF16, False),
        (Case(T=1, pool=BF16), BF16, False),
    ],
    ids=str,
)
def test_one_gate_a_head_has_its_parameters_read_as_they_are(launched, case, dtype, is_read):
    p, x = make(case, "cpu")
    x = x._replace(A_log=x.A_log.to(dtype), dt_bias=x.dt_bias.to(dtype))
    decode.decode(p, x)
    abi, given = decode._abi(p), launched[0][1]
    at = [given[[a.name for a in abi.args].index(name)] for name in decode.PARAMETERS]
    assert (at == [x.A_log.data_ptr(), x.dt_bias.data_ptr()]) == is_read
    assert (decode.record_decode(p, x, x) is not None) == is_read
    behind = tuple(torch.cat([t, t])[1 : 1 + t.shape[0]] for t in (x.A_log, x.dt_bias))  # at an odd multiple of two bytes
    if is_read:
        again = x._replace(A_log=behind[0], dt_bias=behind[1])
        assert replay(decode.record_decode(p, x, x), again) is not None


class LightningRows(NamedTuple):
    """Inputs of a family that has no gates, in an order of its own."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    state: torch.Tensor
    state_indices: torch.Tensor | None
    out: torch.Tensor | None


def test_tensors_are_taken_by_name(launched):
    p, x = make(Case(T=4, mode="lightning"), "cpu")
    own = LightningRows(*(getattr(x, name) for name in LightningRows._fields))
    decode.decode(p, x)
    decode.decode(p, own)
    o, state = replay(decode.record_decode(p, own, own), own)
    assert o is x.out and state is x.state
    assert launched[0] == launched[1] == launched[2]


def moved(t: torch.Tensor, by: int) -> torch.Tensor:
    """A copy that begins so many elements behind a multiple of 64 bytes."""
    return torch.empty(t.numel() + by, dtype=t.dtype)[by:].view(t.shape).copy_(t)


@pytest.mark.parametrize(
    ("case", "name", "by", "fits"),
    [
        (Case(), "q", 1, False),
        (Case(), "k", 4, False),
        (Case(mode="lightning"), "k", 8, True),
        (Case(mode="lightning"), "decay", 1, True),
        (Case(), "v", 2, False),
        (Case(), "out", 3, False),
        (Case(), "g", 4, False),
        (Case(), "g", 8, True),
        (Case(g=F32), "g", 2, False),
        (Case(g=F32, has_scalar_gate=True), "g", 1, True),
        (Case(), "beta", 1, True),
        (Case(), "state", 2, False),
        (Case(pool=BF16), "state", 4, False),
        (Case(), "state_indices", 1, True),
        (Case(), "dt_bias", 1, True),
        (Case(T=1, pool=BF16), "dt_bias", 1, False),
        (Case(T=1, pool=BF16, has_scalar_gate=True), "dt_bias", 1, True),
        (Case(T=1, pool=BF16), "v", 4, True),
    ],
    ids=str,
)
def test_a_recorded_launch_is_for_addresses_that_need_no_copy(launched, case, name, by, fits):
    p, x = make(case, "cpu")
    again = decode.record_decode(p, x, x)
    assert (replay(again, x._replace(**{name: moved(getattr(x, name), by)})) is not None) == fits
    assert len(launched) == fits


def test_some_calls_are_not_recorded(launched):
    p, x = make(Case(layout="odd"), "cpu")
    assert decode.record_decode(p, x, x) is None
    assert not launched


# Dispatch


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"T": 8, "pool_dtype": BF16}, None),
        ({"T": 1, "pool_dtype": BF16}, None),
        ({"T": 1}, None),
        ({"T": 1, "has_float32_parameters": False}, "leaves one token with A_log or dt_bias in 16 bits"),
        ({"T": 1, "pool_dtype": BF16, "has_float32_parameters": False}, "leaves one token with A_log or dt_bias in 16 bits"),
        ({"has_float32_parameters": False}, None),
        ({"T": 1, "pool_dtype": BF16, "has_float32_parameters": False, "has_scalar_gate": True}, None),
        ({"T": 1, "pool_dtype": BF16, "has_scalar_gate": True}, None),
        ({"family": "gdn", "T": 1, "pool_dtype": BF16, "has_scalar_gate": True}, None),
        ({"family": "gdn", "has_scalar_gate": True}, None),
        ({"is_ragged": True}, None),
        ({"pool_dtype": torch.float16}, "this pool is in float16"),
        ({"K": 64, "V": 64}, "takes K = V = 128, and this call has K = 64, V = 64"),
        ({"sm": (8, 0)}, "needs compute capability {own}, and this GPU has 8.0"),
        ({"dtype": torch.float16}, "takes bfloat16, and this call has float16"),
        ({"g_dtype": torch.float16}, "takes g in bfloat16 or float32, and this call has float16"),
        ({"has_intermediate_states": True}, None),
        ({"has_token_indices": True}, None),
        ({"options": DecodeOptions(state_is_kv=True)}, "this one is [P, HV, K, V]"),
        ({"has_aligned_slots": False}, "slots of the pool do not begin at multiples"),
        ({"N": 2**16}, "fewer than 2^16 rows"),
        ({"family": "lightning", "T": 4, "g_dtype": None, "beta_dtype": None}, None),
        ({"family": "lightning", "T": 1, "pool_dtype": BF16, "g_dtype": None, "beta_dtype": None}, None),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("sm", "name", "own"),
    [((9, 0), "cute_sm90", "9.0"), ((10, 0), "cute_sm100", "10.0 or 10.3"), ((10, 3), "cute_sm100", "10.0 or 10.3")],
    ids=["sm90", "sm100", "sm103"],
)
def test_what_the_backends_take(monkeypatch, sm, name, own, change, reason):
    monkeypatch.setattr(loader, "missing", lambda arch: None)
    p = dataclasses.replace(make(Case(), "cpu")[0], **{"device": "cuda", "sm": sm, **change})
    choice = choose(f"{p.family}_decode", p)
    if reason is None:
        assert choice.name == name
    else:
        assert choice.name == "triton"
        assert reason.format(own=own) in dict(choice.passed_over)[name]


def test_a_launch_is_of_the_kernel_for_the_gpu(launched, monkeypatch):
    targets = []
    monkeypatch.setattr(decode, "load", lambda name, arch, load=decode.load: targets.append(arch) or load(name, arch))
    for sm in ((9, 0), (10, 0), (10, 3)):
        p, x = make(Case(), "cpu", sm)
        decode.decode(p, x)
        assert decode.record_decode(p, x, x) is not None
    assert targets == ["sm_90a", "sm_90a", "sm_100a", "sm_100a", "sm_103a", "sm_103a"]
    assert len(launched) == 3


# On a GPU


@pytest.fixture
def kernels():
    choice = choose("kda_decode", make(Case(), "cuda")[0])
    if not choice.name.startswith("cute_"):
        pytest.skip(str(choice))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_the_gpu(kernels, case):
    check(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("pool", [F32, BF16], ids=str)
def test_the_public_call_again_gives_the_same_bits(kernels, pool):
    _, x = make(Case(T=4, pool=pool, HV=2), "cuda")
    pools, outputs = [x.state.clone() for _ in range(3)], []
    for state, backend in zip(pools, ("auto", "auto", "triton")):
        o, _ = cula.cula_decode(
            x.q, x.k, x.v, state, state_indices=x.state_indices, g=x.g, beta=x.beta, A_log=x.A_log, dt_bias=x.dt_bias,
            use_gate_in_kernel=True, lower_bound=-5.0, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            backend=backend,
        )  # fmt: skip
        outputs.append(o)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(pools[0][2], pools[1][2])
    assert relative_error(outputs[0], outputs[2].double()) < 2 * TOLERANCE[BF16]
    assert relative_error(pools[0][2], pools[2][2].double()) < 5 * TOLERANCE[pool]
