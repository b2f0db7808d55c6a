# SPDX-License-Identifier: Apache-2.0
"""KDA prefill on the CuTe kernels: its numbers, split and fused; recorded calls.

The same cases run in the interpreter of compiled kernels (here, without a GPU) and on a GPU. Outputs start as NaN, and so does
the workspace: what a kernel reads before it was written shows.
"""

import dataclasses
import math
import threading
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from cula import reference
from cula.core.dispatch import choose
from cula.core.replay import record
from cula.kda.problem import KdaInputs, KdaOptions, KdaProblem, check_kda
from cula.ops.cute import kda, kda_abi
from cula.ops.cute.kda_abi import BOUND, VEC
from cula.ops.cute.kda_schedule import Schedule, fused, schedule, split_into
from cula.ops.cute.toolchain import build
from cula.reference import relative_error
from tests.support.replay import instead_of_launches, replay
from tests.support.slow import slow_but
from tests.support.variants import BLACKWELL_KDA, HOPPER_FUSED_KDA, HOPPER_KDA
from tools import ptx

D, NUM_SMS = 128, 132

# |o - o64| / |o64| is 1.7e-3 from rounding o to bf16 alone. fp16 operands add little to it; with bf16 ones it is what FLA has.
TOLERANCE = {"f16": 2.2e-3, "bf16": 8e-3}
STATE_TOLERANCE = {"f16": 1.5e-3, "bf16": 8e-3}


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    is_packed: bool = True
    H: int = 1
    HV: int = 1
    per_segment: int = 100  # chunks
    per_chained: int | None = None  # chunks of a segment where a sequence is chained; on Hopper
    clusters: int = 0  # of the fused kernel, Hopper's
    longest: int | None = None  # tokens up to which it serves the call, and the split kernels beyond; None: it does
    num_sms: int = NUM_SMS  # few: no helpers for transitions
    shift: float = 0.0  # of the raw gate: 0 forgets in some ten tokens, -8 in thousands
    slow: tuple[int, int] = (0, 0)  # from which token to which the gate, fast elsewhere, forgets in thousands
    gate: str = "bounded"  # or "softplus", or "log"
    has_scalar_gate: bool = False
    decays: str = "random"  # of log gates, within -5: or "alternating", "zero", "fastest"; or "steep", one of `STEEP`: no bound
    is_safe: bool = False  # the caller promises a bound of log gates
    is_normalised: bool = True  # in the kernel
    are_keys_alike: bool = False
    g: torch.dtype = torch.bfloat16
    beta: torch.dtype = torch.float32
    has_raw_beta: bool = True  # otherwise it comes as b, and every fifth is 0
    has_state: bool = True
    size: float = 1.0  # of v and the states

    @property
    def options(self) -> KdaOptions:
        return KdaOptions(
            lower_bound=-5.0 if self.gate == "bounded" else None,
            use_gate_in_kernel=self.gate != "log",
            use_qk_l2norm_in_kernel=self.is_normalised,
            use_beta_sigmoid_in_kernel=self.has_raw_beta,
            safe_gate=self.is_safe,
            output_final_state=True,
        )

    @property
    def kernel(self) -> str:
        """The name of the variant that serves it."""
        name = kda.variant(
            SimpleNamespace(options=self.options, gate=self.gate, g_dtype=self.g, has_scalar_gate=self.has_scalar_gate)
        )
        return f"fused_{name}" if self.clusters else name

    def __str__(self) -> str:
        default = Case(())
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return ",".join(f"{k}={v}" for k, v in given.items() if v != getattr(default, k)).replace("torch.", "")


def steep_decays(kind: str, T: int) -> torch.Tensor:
    """Log decays [T, D] that are no product of factors within float32, in one way or another."""
    random = torch.Generator().manual_seed(1)
    share, t, c = torch.rand(T, D, generator=random), torch.arange(T)[:, None], torch.arange(D)
    if kind == "to -50":
        return -50.0 * share
    if kind == "all -50":
        return torch.full((T, D), -50.0)
    if kind == "resets":  # of single entries
        return torch.where(share < 0.1, -math.inf, 0.0)
    if kind == "tokens reset":
        return torch.where(t % 16 == t // 16 % 16, -50.0, -0.003).expand(T, D)
    if kind == "runs":  # within a block of 16 rows
        return torch.where((t % 16 >= 4) & (t % 16 < 8), -50.0, -0.01).expand(T, D)
    if kind == "channels":
        return torch.where(c % 2 == 0, -50.0, -0.01).expand(T, D)
    assert kind == "huge"
    return -1e30 * share.round()


STEEP = ("to -50", "all -50", "resets", "tokens reset", "runs", "channels", "huge")


# Between them they take variants that have every type and flag, and every pair of those that go together. A segment is chained
# where more than four chunks come before it and gates forget slowly.
CASES = [
    Case((70, 5, 64), HV=2),
    Case((1, 15, 16, 17, 0, 63, 65), shift=-4.0),
    Case((300,), per_segment=2, is_packed=False, H=2, HV=2),
    Case((350, 130), per_segment=1, shift=-6.0),
    Case((390,), per_segment=1, num_sms=8, shift=-8.0, are_keys_alike=True),
    Case((400, 0, 1), per_segment=2, shift=-8.0, has_state=False),
    Case((100, 100), per_segment=1, shift=-8.0, is_packed=False, HV=2, beta=torch.bfloat16),
    Case((330,), per_segment=1, gate="log", decays="alternating", g=torch.float32),
    Case((330,), per_segment=1, gate="log", decays="zero", g=torch.float32),
    Case((130,), per_segment=1, gate="log", decays="fastest", g=torch.float32, is_safe=True),
    Case((400,), per_segment=2, shift=-8.0, size=1e6),
    Case((400,), per_segment=2, shift=-8.0, size=1e-7),
    Case((150, 70), per_segment=1, shift=-6.0, HV=2, has_scalar_gate=True),
    Case((150,), per_segment=1, shift=-2.0, gate="log", g=torch.float32, has_scalar_gate=True, is_packed=False),
    Case((150, 20), per_segment=1, shift=-3.0, gate="log", decays="steep", has_scalar_gate=True),
    Case((150,), per_segment=1, shift=-6.0, gate="log", decays="steep", has_scalar_gate=True, is_normalised=False),
    Case((40, 400), per_segment=2, shift=-8.0, is_normalised=False, g=torch.float32),
    Case((130,), per_segment=1, is_normalised=False, gate="log", beta=torch.bfloat16, is_safe=True),
]

# Gates without a bound.
UNBOUNDED = [
    *(Case((200,), per_segment=1, gate="log", decays=decays, g=torch.float32) for decays in STEEP),
    Case((70, 5, 64), per_segment=1, gate="log", decays="resets", HV=2, H=2),
    Case((330, 40), per_segment=1, gate="softplus", shift=1.0, HV=2),
    Case((390,), per_segment=1, num_sms=8, gate="softplus", shift=-14.0, are_keys_alike=True, g=torch.float32),
    Case((150, 20), per_segment=1, gate="softplus", shift=-2.0, has_scalar_gate=True),
    Case((130, 40), per_segment=1, gate="softplus", shift=1.0, is_normalised=False),
    Case((200,), per_segment=1, gate="log", decays="to -50", is_normalised=False, is_packed=False),
]

# Sequences that are split anew because some segment is chained, with helpers and without, some into a single segment.
CHAINED = [
    ANEW := Case((600,), per_segment=1, per_chained=3, shift=-8.0),
    Case((600,), per_segment=1, per_chained=3, num_sms=8, shift=-8.0, has_state=False),
    Case((600,), per_segment=2, per_chained=3, num_sms=8, shift=-8.0, is_packed=False, HV=2, H=2),
    Case((50, 700, 0, 130), per_segment=1, per_chained=4, shift=-8.0),
    Case((390, 390), per_segment=1, per_chained=3, shift=-8.0, is_packed=False, has_state=False),
    Case((390,), per_segment=1, per_chained=7, shift=-8.0),
    Case((390,), per_segment=1, per_chained=100, num_sms=8, shift=-8.0, has_state=False),
    Case((450,), per_segment=1, per_chained=2, shift=-8.0, is_normalised=False),
    Case((450,), per_segment=1, per_chained=5, num_sms=8, shift=-8.0, is_normalised=False, has_state=False),
    Case((690,), per_segment=1, per_chained=3, slow=(256, 576)),
    Case((690,), per_segment=1, per_chained=3, num_sms=8, slow=(256, 576), has_state=False),
    Case((690,), per_segment=1, per_chained=6, slow=(256, 576)),  # at none of its own boundaries
]


# The fused kernel: clusters that have a head, several, or none; both gates; tails.
FUSED = [
    Case((330,), clusters=3, is_packed=False, H=2, HV=4, shift=-8.0),
    Case((70, 5, 64, 0, 200, 1), clusters=2, HV=2, shift=-4.0),
    Case((128, 128), clusters=2, is_packed=False, has_state=False, beta=torch.bfloat16),
    Case((390,), clusters=1, shift=-8.0, are_keys_alike=True),
    Case((330,), clusters=1, gate="log", decays="alternating"),
    Case((330,), clusters=1, gate="log", decays="zero"),
    Case((130,), clusters=1, gate="log", decays="fastest"),
    Case((400,), clusters=1, shift=-8.0, size=1e6),
    Case((400,), clusters=1, shift=-8.0, size=1e-7),
    Case((150, 70, 0, 64), clusters=2, shift=-6.0, HV=2, has_scalar_gate=True),
    Case((200,), clusters=1, shift=-6.0, g=torch.float32, has_scalar_gate=True, is_packed=False),
    Case((150, 20), clusters=1, shift=-3.0, gate="log", decays="steep", has_scalar_gate=True),
    Case((150,), clusters=1, shift=-2.0, gate="log", g=torch.float32, has_scalar_gate=True, is_packed=False),
    Case((150, 20), clusters=1, gate="softplus", shift=-2.0, has_scalar_gate=True),
    Case((70, 5, 64, 0, 200, 1), clusters=2, HV=2, gate="softplus", shift=1.0),
    Case((390,), clusters=1, gate="softplus", shift=-14.0, are_keys_alike=True),
    Case((130,), clusters=1, gate="log", decays="fastest", is_safe=True),
    *(Case((200,), clusters=1, gate="log", decays=decays) for decays in ("resets", "huge")),
    *(Case((150, 70), clusters=1, gate="log", decays=decays, g=torch.float32) for decays in ("to -50", "resets", "runs")),
    Case((200,), clusters=2, HV=2, shift=-4.0, g=torch.float32),
]


def make(case: Case, device: str, sm: tuple[int, int] = (9, 0)) -> tuple[KdaProblem, KdaInputs]:
    """A call; on a CPU, for the kernels of `sm`."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    B, T = (1, sum(case.lengths)) if case.is_packed else (len(case.lengths), case.lengths[0])
    q, k, v, g = normal(B, T, case.H, D), normal(B, T, case.H, D), normal(B, T, case.HV, D), normal(B, T, case.HV, D)
    beta = normal(B, T, case.HV)
    g[:, slice(*case.slow)] -= 8.0
    if case.are_keys_alike:
        beta += 6.0
        for t in range(1, T):
            k[:, t] = 0.9 * k[:, t - 1] + 0.3 * k[:, t]
    if not case.has_raw_beta:
        beta = torch.where(torch.arange(T)[:, None] % 5 == 3, 0.0, beta.sigmoid())
    if not case.is_normalised:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    A_log = dt_bias = None
    if case.has_scalar_gate:
        g = g[..., 0]
    if case.gate != "log":
        A_log, dt_bias = 0.1 * normal(case.HV), 0.1 * normal(case.HV, D) + case.shift
        dt_bias = dt_bias[:, 0].contiguous() if case.has_scalar_gate else dt_bias
        A_log = A_log + math.log(16.0) if case.gate == "softplus" else A_log
    elif case.decays in ("random", "steep"):
        g = (-5.0 if case.decays == "random" else -2000.0) * torch.sigmoid(g + case.shift)
    elif case.decays in STEEP:
        g = steep_decays(case.decays, T)[:, None].expand_as(g)
    else:
        odd = (torch.arange(T)[:, None, None] + torch.arange(D)) % 2 == 1
        g = {"alternating": -5.0 * odd, "zero": 0.0 * odd, "fastest": -5.0 + 0.0 * odd}[case.decays].expand_as(g)
    h0 = 0.5 * case.size * normal(len(case.lengths), case.HV, D, D) if case.has_state else None
    offsets = torch.tensor([0, *case.lengths]).cumsum(0).int() if case.is_packed else None
    x = KdaInputs(
        q.bfloat16(), k.bfloat16(), (case.size * v).bfloat16(), g.to(case.g), beta.to(case.beta), A_log, dt_bias, h0, offsets
    )
    p, x = check_kda(KdaInputs(*(None if t is None else t.to(device) for t in x)), case.options)
    return dataclasses.replace(p, sm=p.sm or sm), x


def schedule_of(case: Case, p: KdaProblem) -> Schedule:
    made = split_into(p, case.per_segment, case.num_sms, case.per_chained)
    if case.longest is not None:
        return made._replace(clusters=case.clusters, longest=case.longest)
    return fused(case.clusters) if case.clusters else made


def errors(case: Case, device: str, sm: tuple[int, int] = (9, 0)) -> tuple[float, float]:
    p, x = make(case, device, sm)
    assert case.kernel.endswith(kda.variant(p))
    o = torch.full((p.B, p.T, p.HV, D), torch.nan, dtype=torch.bfloat16, device=device)
    ht = torch.full((p.N, p.HV, D, D), torch.nan, device=device)
    kda.run(p, x, schedule_of(case, p), ht, o)
    want_o, want_ht = wanted(p, x)
    return relative_error(o, want_o), relative_error(ht, want_ht)


def wanted(p: KdaProblem, x: KdaInputs) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.kda(
        *x[:5],
        initial_state=x.initial_state,
        cu_seqlens=x.cu_seqlens,
        A_log=x.A_log,
        dt_bias=x.dt_bias,
        lower_bound=p.options.lower_bound,
        use_gate_in_kernel=p.options.use_gate_in_kernel,
        use_qk_l2norm_in_kernel=p.options.use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=True,
    )


def check(case: Case, device: str, sm: tuple[int, int] = (9, 0)) -> None:
    dtype = "f16" if case.is_normalised else "bf16"
    of_o, of_state = errors(case, device, sm)
    assert of_o < TOLERANCE[dtype]
    assert of_state < STATE_TOLERANCE[dtype]


# What a chunk forgets


def section_of_workspace(name: str, p: KdaProblem, x: KdaInputs, made: Schedule, monkeypatch) -> tuple[torch.Tensor, ...]:
    """(o, the last states, the bytes of the workspace from a section on), behind a call."""
    kept, empty = [], torch.empty

    def keep(*shape, **kwargs):
        t = empty(*shape, **kwargs)
        kept.extend([t] if t.dtype == torch.uint8 else [])
        return t

    ht = torch.full((p.N, p.HV, D, D), torch.nan, device=x.q.device)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", keep)
        o = kda.run(p, x, made, ht)
    work = kept[0]
    transitions = made.segments * p.HV if made.has_transitions else 0
    offsets = kda_abi.WORKSPACE.offsets(records=made.chunks * p.HV, segments=made.segments * p.HV, transitions=transitions)
    return o, ht, work[offsets[name] :]


def chunk_bounds(p: KdaProblem, x: KdaInputs, made: Schedule, monkeypatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(o, the last states, the bounds [chunk number, HV] that the intra-chunk kernel left in the workspace)."""
    o, ht, work = section_of_workspace("vec", p, x, made, monkeypatch)
    vec = work[: made.chunks * p.HV * VEC * 4].view(torch.float32).view(made.chunks, p.HV, VEC)
    return o, ht, vec[..., BOUND : BOUND + 4].sum(-1)


def forgetful_chunks() -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Log decays [64, D], keys and write strengths of chunks that a bound may be wrong about."""
    random = torch.Generator().manual_seed(5)
    normal, share = (lambda *s: torch.randn(*s, generator=random)), (lambda *s: torch.rand(*s, generator=random))
    t, c = torch.arange(64)[:, None], torch.arange(D)
    keys, b = normal(64, D), share(64)
    alike, one_hot = 1 + 0.1 * normal(64, D), torch.nn.functional.one_hot(torch.randint(0, D, (64,), generator=random), D).float()
    fast, rotating = -5 * torch.sigmoid(normal(64, D)), torch.where(c // 2 == t % 64, 0.0, -5.0)
    handed = torch.zeros(64, D)  # reflections that hand the state on from one slow channel to the next
    handed[torch.arange(64), 2 * torch.arange(64)], handed[torch.arange(64), 2 * (torch.arange(64) + 1) % D] = 1.0, -1.0
    chunks = {f"speed {s}": (torch.full((64, D), s), keys, b) for s in (-0.2, -0.25, -0.3, -0.4)}
    chunks |= {f"speed {s}, alike": (torch.full((64, D), s), alike, torch.ones(64)) for s in (-0.003, -0.25, -0.35)}
    chunks |= {f"slopes {A}": (-5 * torch.sigmoid(math.exp(A) * (normal(64, D) + share(D))), keys, b) for A in (0.0, 1.0, 2.0)}
    return chunks | {
        "fast": (fast, keys, b),
        "fast, reflections": (fast, alike, 2 * share(64)),
        "fast, one-hot": (fast, one_hot, 2 * share(64)),
        "a slow channel that rotates": (rotating, keys, b),
        "and is handed on": (rotating, handed, torch.full((64,), 2.0)),
        "slow channels": (torch.where(c < 8, -0.001, fast), keys, b),
        "bursts": (torch.where(t % 16 == 3, -5.0, -0.01).expand(64, D), keys, b),
        "resets": (torch.where(share(64, D) < 0.3, -math.inf, -0.01), keys, 2 * share(64)),
    }


def exact_transition(g: torch.Tensor, k: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """M of S -> M S + B, in float64, token by token."""
    M = torch.eye(D, dtype=torch.float64, device=g.device)
    for g_t, k_t, b_t in zip(g.double(), torch.nn.functional.normalize(k.double(), dim=-1), b.double()):
        M = g_t.exp()[:, None] * M
        M = M - b_t * k_t[:, None] * (k_t @ M)[None]
    return M


def of_decays(q, k, v, g, beta, h0=None, lengths=None, sm=(9, 0), **options) -> tuple[KdaProblem, KdaInputs]:
    """A call with activated gates and betas, [T, ...] of one head."""
    offsets = None if lengths is None else torch.tensor([0, *lengths], device=q.device).cumsum(0).int()
    x = KdaInputs(
        *(t[None, :, None].bfloat16() for t in (q, k, v)), g[None, :, None], beta[None, :, None], None, None, h0, offsets
    )
    p, x = check_kda(x, KdaOptions(use_qk_l2norm_in_kernel=True, output_final_state=True, **options))
    return dataclasses.replace(p, sm=p.sm or sm), x


def check_bounds(monkeypatch, device: str, sm: tuple[int, int] = (9, 0)) -> None:
    """No chunk keeps more of any state than its bound says, and those that models have are found to forget."""
    chunks = forgetful_chunks()
    g, k, b = (torch.cat(parts).to(device) for parts in zip(*chunks.values()))
    p, x = of_decays(torch.ones_like(k), k, torch.ones_like(k), g, b, lengths=[64] * len(chunks), sm=sm)
    _, _, bounds = chunk_bounds(p, x, split_into(p, 100, NUM_SMS), monkeypatch)
    for n, name in enumerate(chunks):
        rows = slice(64 * n, 64 * n + 64)
        norm = torch.linalg.matrix_norm(exact_transition(g[rows], x.k[0, rows, 0], b[rows]), 2).item()
        bound = bounds[2 * n, 0].item()  # the numbers of a sequence's chunks begin at cu // 64 + n
        assert norm <= 1.02 * bound + 2.0**-24, (name, norm, bound)
        if name.startswith(("fast", "slopes", "a slow channel that rotates")):
            assert bound < 2.0**-24, (name, bound)
        if name in ("and is handed on", "slow channels", "speed -0.003, alike"):
            assert norm > 0.5, (name, norm)


def check_that_what_is_forgotten_does_not_matter(monkeypatch, device: str, sm: tuple[int, int] = (9, 0)) -> None:
    """Four chunks leave a state 2^12 times as large as what comes after; the next is only just called forgetful, so that the last
    segment starts from zero before it. Its outputs and its state are as right as without the cut."""
    random = torch.Generator().manual_seed(7)
    T, late = 384, slice(320, 384)
    q, k, v = (torch.randn(T, D, generator=random) for _ in range(3))
    g, b = torch.full((T, D), -0.003), torch.rand(T, generator=random)
    g[256:320], v[:256] = -0.35, 4096.0 * v[:256]
    p, x = of_decays(*(t.to(device) for t in (q, k, v, g, b)), sm=sm)
    o, ht, bounds = chunk_bounds(p, x, split_into(p, 1, NUM_SMS), monkeypatch)
    assert -28.0 < bounds[4, 0].log2().item() < -24.0
    assert bounds[3, 0].item() > 1.0
    whole_ht = torch.empty_like(ht)
    whole = kda.run(p, x, split_into(p, 100, NUM_SMS), whole_ht)
    want, want_ht = reference.kda(*x[:5], use_qk_l2norm_in_kernel=True)
    assert want[:, late].norm() < 2.0**-9 * want[:, :256].norm()
    for got, right, tolerance in ((o[:, late], want[:, late], 2.0e-3), (ht, want_ht, 7e-4)):
        assert relative_error(got, right) < tolerance
    assert relative_error(o[:, late], want[:, late]) < 1.1 * relative_error(whole[:, late], want[:, late])
    assert relative_error(ht, want_ht) < 1.1 * relative_error(whole_ht, want_ht)
    assert not torch.equal(ht, whole_ht)


# In the interpreter


@pytest.fixture
def interpreted(monkeypatch):
    """`kda.run` on CPU tensors, its kernels in the interpreter; for the function returned see `ptx.interpret`."""
    if build.missing() is not None:
        pytest.skip(str(build.missing()))

    def empty(*shape, **kwargs):
        made = full(*shape, **kwargs)
        return made.fill_(0xFF) if made.dtype == torch.uint8 else made

    full = torch.empty
    monkeypatch.setattr(torch, "empty", empty)  # NaN in any of the types that the workspace is read as
    return ptx.interpret(monkeypatch, kda)


HOPPER_SM, BLACKWELL_SM = (9, 0), (10, 0)


def of_each_with(cases: list[Case]):
    """Cases on both architectures."""
    return pytest.mark.parametrize(("case", "sm"), [*parameters(cases, HOPPER_SM), *parameters(cases, BLACKWELL_SM)])


def parameters(cases: list[Case], sm: tuple[int, int]) -> list:
    """Those that take another kernel than the few that the quick tests compile are slow. On Blackwell these are fewer: gates are
    the business of steps that are Hopper's, too. Long sequences are slow there as well."""
    quick, longest, name = (
        ((*HOPPER_KDA, *HOPPER_FUSED_KDA), math.inf, "sm90") if sm == HOPPER_SM else (BLACKWELL_KDA, 100, "sm100")
    )
    slow = lambda case: [] if case.kernel in quick and sum(case.lengths) <= longest else [pytest.mark.slow]
    return [pytest.param(case, sm, id=f"{case}-{name}", marks=slow(case)) for case in cases]


@of_each_with(CASES)
def test_interpreted(interpreted, case, sm):
    check(case, "cpu", sm)


@of_each_with(UNBOUNDED)
def test_gates_without_a_bound_interpreted(interpreted, case, sm):
    check(case, "cpu", sm)


@pytest.mark.parametrize("sm", [HOPPER_SM, pytest.param(BLACKWELL_SM, marks=pytest.mark.slow)], ids=["sm90", "sm100"])
def test_no_chunk_keeps_more_than_its_bound(interpreted, monkeypatch, sm):
    check_bounds(monkeypatch, "cpu", sm)


@pytest.mark.parametrize("sm", [HOPPER_SM, pytest.param(BLACKWELL_SM, marks=pytest.mark.slow)], ids=["sm90", "sm100"])
def test_what_is_forgotten_does_not_matter(interpreted, monkeypatch, sm):
    check_that_what_is_forgotten_does_not_matter(monkeypatch, "cpu", sm)


@pytest.mark.parametrize("case", slow_but(CHAINED, [ANEW, CHAINED[6], CHAINED[8], CHAINED[9]]), ids=str)
def test_chained_segments_interpreted(interpreted, case):
    check(case, "cpu")


@pytest.mark.parametrize("num_sms", slow_but([8, NUM_SMS], [NUM_SMS]))
def test_a_chained_sequence_is_split_anew(interpreted, num_sms):
    """It gives the bits of a call with the longer segments, whoever computes transitions, and not those with the shorter."""
    p, x = make(Case((600,), shift=-8.0), "cpu")
    results = []
    for per_segment, per_chained in ((1, 3), (3, 3), (1, 1)):
        o, ht = torch.empty_like(x.v), torch.empty_like(x.initial_state)
        kda.run(p, x, split_into(p, per_segment, num_sms, per_chained), ht, o)
        results.append((o, ht))
    anew, coarse, fine = results
    assert all(torch.equal(a, b) for a, b in zip(anew, coarse))
    assert not any(torch.equal(a, b) for a, b in zip(anew, fine))


@pytest.mark.parametrize(("case", "sm"), parameters(FUSED, HOPPER_SM))
def test_fused_interpreted(interpreted, case, sm):
    check(case, "cpu", sm)


@pytest.mark.slow
@pytest.mark.parametrize("shift", [-8.0, 0.0], ids=["chained", "warm-up"])
@pytest.mark.parametrize("clusters", [0, 1], ids=["split", "fused"])
def test_segments_of_one_length_give_the_same_bits_packed_and_alone(interpreted, clusters, shift):
    """What batch-invariant schedules rely on."""
    lengths = (200, 64, 130)
    p, x = make(Case(lengths, shift=shift), "cpu")

    def run(p, x):
        o, ht = torch.empty_like(x.v), torch.empty(p.N, p.HV, D, D)
        kda.run(p, x, fused(clusters) if clusters else split_into(p, 1, NUM_SMS, 2)._replace(helpers=0), ht, o)
        return o, ht

    o, ht = run(p, x)
    for n, (start, length) in enumerate(zip((0, 200, 264), lengths)):
        tokens = slice(start, start + length)
        of_one = {name: getattr(x, name)[:, tokens] for name in ("q", "k", "v", "g", "beta")}
        of_one |= {"initial_state": x.initial_state[n : n + 1].clone(), "cu_seqlens": None}
        alone_o, alone_ht = run(dataclasses.replace(p, T=length, N=1, is_packed=False), x._replace(**of_one))
        assert torch.equal(alone_o, o[:, tokens]) and torch.equal(alone_ht[0], ht[n])


@pytest.mark.parametrize("way", ["split", "fused", "sm100"])
def test_the_next_sequence_in_a_pack_does_not_matter(interpreted, way):
    """However large its values are: the first's last chunk is loaded with some of them."""
    p, x = make(Case((70, 64), shift=-4.0), "cpu", BLACKWELL_SM if way == "sm100" else HOPPER_SM)
    made = fused(1) if way == "fused" else split_into(p, 100, NUM_SMS)
    results = []
    for size in (1.0, 1e9):
        v, o, ht = x.v.clone(), torch.empty_like(x.v), torch.empty_like(x.initial_state)
        v[:, 70:] *= size
        kda.run(p, x._replace(v=v), made, ht, o)
        results.append((o[:, :70], ht[0]))
    assert all(torch.equal(a, b) for a, b in zip(*results))


# Recorded calls

NOT_SERVED = (None,) * 5  # tensors of a call behind `out`
O, HT, WORKSPACE = [[a.name for a in kda_abi.SPLIT.addresses].index(name) for name in ("o", "ht", "workspace")]


@pytest.fixture(params=["python", "c"])
def launched(monkeypatch, request):
    """The arguments of every launch, instead of launches."""
    calls = instead_of_launches(monkeypatch, kda, request.param, lambda *launched: launched)
    monkeypatch.setattr(kda, "schedule_on", lambda problem, device: schedule(problem, NUM_SMS))
    monkeypatch.setattr(kda, "sms_of", lambda device: NUM_SMS)
    return calls


@pytest.mark.parametrize(
    "case",
    [CASES[0], CASES[2], CASES[6], CASES[-1], Case((70,) * 66, is_packed=False), Case((130, *(550,) * 7), HV=16)],
    ids=str,
)
def test_a_recorded_call_launches_what_a_call_launches(launched, case):
    p, x = make(case, "cpu")
    out = torch.empty(p.B, p.T, p.HV, D, dtype=torch.bfloat16)
    first = kda.kda_fwd(p, x, out)
    repeat = kda.record_kda_fwd(p, x, out)
    o, final_state = replay(repeat, (*x, out, *NOT_SERVED))
    assert o is out
    assert final_state.shape == first.final_state.shape
    are_the_same(launched, fresh=(HT,))


def are_the_same(launches, fresh):
    """Whether a call and its repetition, in a list of their launches, launch the same kernels with the same arguments, but for
    tensors that are new each time; the workspace is, if there is one."""
    half, odd = divmod(len(launches), 2)
    assert half and not odd
    for (name, arguments), (same_name, same) in zip(launches[:half], launches[half:]):
        assert name == same_name
        new = fresh if "fused" in name else (*fresh, WORKSPACE)
        assert [a for i, a in enumerate(arguments) if i not in new] == [a for i, a in enumerate(same) if i not in new]


@pytest.mark.parametrize(
    ("case", "others"),
    [
        (Case((70, 5, 130)), [Case((30,) * 7), Case((300, 0, 1, 40)), Case((70, 5, 130))]),
        (Case((200, 200), is_packed=False), [Case((165,) * 3, is_packed=False), Case((1000,), is_packed=False)]),
        (Case((70,) * 66, is_packed=False), [Case((40,) * 132, is_packed=False), Case((512,) * 66, is_packed=False)]),
        (
            Case((550,) * 8, HV=16),
            [Case((550, 600, 560, 500, 510, 570, 585, 520), HV=16), Case((4000, *range(7)), HV=16), Case((1000,) * 4, HV=16)],
        ),
    ],
    ids=["packed", "batch", "fused", "either"],
)
def test_a_recorded_call_serves_other_lengths(launched, case, others):
    """What one record launches for each of these is what a call of that length launches."""
    p, x = make(case, "cpu")
    repeat = record.replayer((*x, None, *NOT_SERVED), kda.record_kda_fwd(p, x))
    for other in others:
        p, x = make(other, "cpu")
        launched.clear()
        want = kda.kda_fwd(p, x)
        o, final_state = repeat((*x, None, *NOT_SERVED))
        assert o.shape == want.o.shape and o.stride() == want.o.stride()
        assert final_state.shape == want.final_state.shape and final_state.is_contiguous()
        are_the_same(launched, fresh=(O, HT))
        assert len(launched) == (4 if case.HV == 16 else 2)


def test_lengths_that_another_kernel_serves_are_not_the_records(launched):
    p, x = make(Case((70,) * 66, is_packed=False), "cpu")
    assert kda.schedule_on(p, x.q.device).is_fused
    repeat = record.replayer((*x, None, *NOT_SERVED), kda.record_kda_fwd(p, x))
    _, few = make(Case((500,), is_packed=False), "cpu")
    assert repeat((*few, None, *NOT_SERVED)) is NotImplemented
    assert not launched
    p, x = make(Case((550,) * 8, HV=16), "cpu")
    repeat = record.replayer((*x, None, *NOT_SERVED), kda.record_kda_fwd(p, x))
    _, others = make(Case((550,) * 6, HV=16), "cpu")  # the second wave would leave many clusters idle
    assert repeat((*others, None, *NOT_SERVED)) is NotImplemented
    assert not launched


def test_a_recorded_call_keeps_its_workspace(launched):
    """A call and the next have the same; one that runs in another thread at the same time has another."""
    p, x = make(CASES[0], "cpu")
    tensors = (*x, None, *NOT_SERVED)
    repeat = record.replayer(tensors, kda.record_kda_fwd(p, x))
    results = [repeat(tensors) for _ in range(3)]
    thread = threading.Thread(target=lambda: results.append(repeat(tensors)))
    thread.start()
    thread.join()
    assert len({o.data_ptr() for o, _ in results}) == 4
    first, second, third, other = (arguments[WORKSPACE] for _, arguments in launched)
    assert first == second == third != other


def test_a_call_is_recorded_for_tensors_that_need_no_copy(launched):
    p, x = make(Case((100, 100), is_packed=False), "cpu")
    repeat = kda.record_kda_fwd(p, x)
    o, final_state = replay(repeat, (*x, None, *NOT_SERVED))
    assert o.shape == x.v.shape and o.is_contiguous() and o.dtype == torch.bfloat16
    assert final_state.shape == x.initial_state.shape and final_state.is_contiguous()
    odd = torch.empty(x.q.numel() + 1, dtype=x.q.dtype)[1:].view(x.q.shape)
    assert replay(repeat, (*x._replace(q=odd), None, *NOT_SERVED)) is None
    odd_state = torch.empty(x.initial_state.numel() + 1)[1:].view(x.initial_state.shape)
    assert replay(repeat, (*x._replace(initial_state=odd_state), None, *NOT_SERVED)) is None
    longer = torch.cat([x.q, x.q], dim=1)
    assert kda.record_kda_fwd(p, x._replace(q=longer[:, :100])) is None  # the second sequence does not follow the first
    assert kda.record_kda_fwd(p, x._replace(q=longer[:, ::2])) is not None


# On a GPU


@pytest.fixture
def kernels():
    problem, _ = make(CASES[0], "cuda")
    choice = choose("kda_fwd", problem)
    if choice.name not in ("cute_sm90", "cute_sm100"):
        pytest.skip(str(choice))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *UNBOUNDED, *CHAINED], ids=str)
def test_on_a_gpu(kernels, case):
    check(case, "cuda")


@pytest.mark.gpu
def test_no_chunk_keeps_more_than_its_bound_on_a_gpu(kernels, monkeypatch):
    check_bounds(monkeypatch, "cuda")


@pytest.mark.gpu
def test_what_is_forgotten_does_not_matter_on_a_gpu(kernels, monkeypatch):
    check_that_what_is_forgotten_does_not_matter(monkeypatch, "cuda")


@pytest.fixture
def fused_kernel(kernels):
    sm = torch.cuda.get_device_capability()
    if sm != HOPPER_SM:
        pytest.skip(f"the fused kernel needs compute capability 9.0, and this GPU has {sm[0]}.{sm[1]}")


@pytest.mark.gpu
@pytest.mark.parametrize("case", FUSED, ids=str)
def test_fused_on_a_gpu(fused_kernel, case):
    check(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "H", "shift"), [((1000,) * 8, 16, 0.0), ((1000,) * 8, 16, -8.0), ((256,) * 4, 64, -4.0)])
def test_the_fused_kernel_is_repeatable_and_chosen_for_a_full_gpu(fused_kernel, lengths, H, shift):
    """Thirty runs give the same bits, and the numbers of the split kernels."""
    p, x = make(Case(lengths, is_packed=False, H=H, HV=H, shift=shift), "cuda")
    made = schedule(p, NUM_SMS)
    assert made.clusters == NUM_SMS // 2
    two, first, o = (torch.empty_like(x.v) for _ in range(3))
    of_two, of_first, state = (torch.empty_like(x.initial_state) for _ in range(3))
    kda.run(p, x, split_into(p, 100, NUM_SMS), of_two, two)
    kda.run(p, x, made, of_first, first)
    for _ in range(29):
        kda.run(p, x, made, state.fill_(math.nan), o.fill_(math.nan))
        assert torch.equal(o, first) and torch.equal(state, of_first)
    assert relative_error(first, two.double()) < 2e-3
    assert relative_error(of_first, of_two.double()) < 1e-3


@pytest.mark.gpu
def test_kept_workspaces_on_a_gpu(kernels):
    """Streams, threads and a graph that take turns: each result is that of the long way, bit for bit."""
    calls = []
    p, given = make(Case((200, 200), is_packed=False), "cuda")
    for factor in (1, 2, 3):
        x = given._replace(v=factor * given.v)
        tensors = (*x, None, *NOT_SERVED)
        calls.append((record.replayer(tensors, kda.record_kda_fwd(p, x)), tensors, kda.kda_fwd(p, x)))

    def is_right(done, want):
        return torch.equal(done[0], want.o) and torch.equal(done[1], want.final_state)

    streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(2))]
    torch.cuda.synchronize()
    done = []
    for turn in range(30):
        repeat, tensors, want = calls[turn % len(calls)]
        with torch.cuda.stream(streams[turn * 7 % 5 % len(streams)]):
            done.append((repeat(tensors), want))
    torch.cuda.synchronize()
    assert all(is_right(*pair) for pair in done)

    shared, wrong = torch.cuda.Stream(), []

    def work(repeat, tensors, want):
        with torch.cuda.stream(shared):
            results = [repeat(tensors) for _ in range(100)]
        shared.synchronize()
        wrong.append(sum(not is_right(result, want) for result in results))

    threads = [threading.Thread(target=work, args=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0, 0, 0]

    (captured, tensors, want), (between, others, _) = calls[:2]
    with torch.cuda.stream(shared):
        captured(tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=shared):
        result = captured(tensors)
    for _ in range(3):
        with torch.cuda.stream(shared):
            between(others)
        for t in result:
            t.fill_(float("nan"))
        torch.cuda.synchronize()
        between(others)  # on another stream, while the graph runs
        graph.replay()
        between(others)
        torch.cuda.synchronize()
        assert is_right(result, want)


@pytest.mark.gpu
@pytest.mark.parametrize("shift", [0.0, -8.0])
def test_long_and_repeatable(kernels, shift):
    """Two runs give the same bits, split or not; whole sequences and segments the same numbers."""
    p, x = make(Case((20000,), is_packed=False, H=2, HV=4, shift=shift), "cuda")
    whole = kda.run(p, x, Schedule(313, 1, 313, 313, False))
    made = schedule(p, NUM_SMS)
    assert made.has_transitions
    first = kda.run(p, x, made)
    assert torch.equal(first, kda.run(p, x, made))
    assert relative_error(first, whole.double()) < TOLERANCE["f16"]
