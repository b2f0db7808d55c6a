# SPDX-License-Identifier: Apache-2.0
"""KDA prefill on the CuTe kernels: pools that the kernels read and write, and the states inside of sequences that they keep.

Memory that is nobody's is NaN, and must be the same bits afterwards: slots that no sequence has, those whose state is not to be
read, gaps between slots, and rows without a checkpoint.
"""

import dataclasses
from dataclasses import dataclass

import pytest
import torch

import cula
from cula import reference
from cula.core.kernels import Checkpoints, Pool
from cula.core.replay import record
from cula.kda.problem import KdaInputs, KdaProblem
from cula.ops.cute import kda
from cula.ops.cute.kda_abi import Kept
from cula.ops.cute.kda_schedule import fused, split_into
from cula.reference import relative_error
from tests.ops.cute.test_kda import (  # noqa: F401  (fixtures)
    BLACKWELL_SM,
    HOPPER_SM,
    NUM_SMS,
    STATE_TOLERANCE,
    TOLERANCE,
    WORKSPACE,
    Case,
    interpreted,
    kernels,
    launched,
    make,
    schedule_of,
)
from tests.support.orders import in_each_order

D, CHUNK = 128, 64
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ROUNDING = {F32: 0.0, BF16: 2.5e-3, F16: 4e-4}  # what a state that is kept in that dtype loses


@dataclass(frozen=True)
class Served:
    """A case with a pool, with states that are kept, or both."""

    case: Case
    pool: torch.dtype | None = F32
    index: torch.dtype = torch.int32
    null_is_nonpositive: bool = False
    has_mask: bool = False
    is_strided: bool = False  # indices and mask
    kept: Kept = Kept.NOTHING
    every: int = 1  # chunks
    kept_dtype: torch.dtype = F32

    def __str__(self) -> str:
        return f"{self.case},pool={self.pool},{self.kept.name}".replace("torch.", "")


# Between them: fused and split, whole sequences, segments that warm up and that are chained, sequences with a state beside ones
# without, all dtypes of states and of indices, both null conventions.
SERVED = [
    Served(
        Case((70, 5, 64, 0, 200, 1), clusters=2, HV=2, shift=-4.0),
        pool=BF16, index=torch.int64, null_is_nonpositive=True, has_mask=True, kept=Kept.OFFSETS, kept_dtype=F16,
    ),
    Served(Case((130, 0, 192), HV=2, shift=-4.0), has_mask=True, is_strided=True, kept=Kept.EVERY),
    Served(
        Case((330, 70), per_segment=2),
        pool=F16, index=torch.int64, is_strided=True, kept=Kept.EVERY, every=2, kept_dtype=BF16,
    ),
    Served(Case((390,), per_segment=1, per_chained=3, shift=-8.0), pool=BF16, kept=Kept.STARTS),
    Served(Case((400, 390), per_segment=2, shift=-8.0), null_is_nonpositive=True, kept=Kept.OFFSETS),
    Served(Case((200, 200), is_packed=False, clusters=2, shift=-8.0), pool=F16, has_mask=True, kept=Kept.EVERY),
    Served(Case((100, 330), per_segment=1, shift=-6.0, is_normalised=False), pool=F16, has_mask=True, kept=Kept.STARTS),
    Served(Case((130, 130), is_packed=False, clusters=2, has_state=False), pool=None, kept=Kept.STARTS),
    Served(Case((192, 64, 20), shift=-4.0, size=1e6), pool=F32, kept=Kept.EVERY),
    *(  # even, and not
        Served(Case((130, 70, 100), clusters=2, longest=longest, shift=-4.0), pool=BF16, has_mask=True, kept=Kept.EVERY)
        for longest in (130, 129)
    ),
]  # fmt: skip


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8)


def make_pool(served: Served, h0: torch.Tensor, device: str) -> tuple[Pool, torch.Tensor, torch.Tensor]:
    """(The pool, its whole memory, which sequences start from their slot): sequence 1 of several has no slot, and sequence 2
    is not to read its own."""
    N, HV = h0.shape[:2]
    P, pad = N + 3, HV * D * D + 32
    memory = torch.full((P * pad,), torch.nan, dtype=served.pool, device=device)
    states = memory.as_strided((P, HV, D, D), (pad, D * D, D, 1))
    first = int(served.null_is_nonpositive)
    slots = torch.randperm(P - first, generator=torch.Generator().manual_seed(1))[:N] + first
    has_state = torch.ones(N, dtype=torch.bool)
    if N > 1:
        slots[1] = 0 if served.null_is_nonpositive else -1
    if N > 2 and served.has_mask:
        has_state[2] = False
    starts = has_state & (slots >= first)
    for n in range(N):
        if starts[n]:
            states[slots[n]] = h0[n].to(served.pool)
    slots, has_state = slots.to(device, served.index), has_state.to(device)
    if served.is_strided:
        slots, has_state = torch.stack([slots, slots - 7], 1)[:, 0], torch.stack([has_state, ~has_state], 1)[:, 0]
    return Pool(states, slots, has_state if served.has_mask else None, served.null_is_nonpositive), memory, starts


def boundaries(served: Served, lengths: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(Row, sequence, tokens before) of each state that is kept."""
    found, row = [], 0
    for n, length in enumerate(lengths):
        if served.kept == Kept.OFFSETS:
            at = [offset_of(n, length)] if offset_of(n, length) else []
        elif served.kept == Kept.STARTS:
            at = list(range(0, length, CHUNK))
        else:
            at = list(range(CHUNK * served.every, length + 1, CHUNK * served.every)) if served.kept else []
        for i, tokens in enumerate(at):
            found.append((n if served.kept == Kept.OFFSETS else row + i, n, tokens))
        row += len(at)
    return found


def offset_of(n: int, length: int) -> int:
    """The last whole chunk of every other sequence, the first of others."""
    return length // CHUNK * CHUNK if n % 2 == 0 else min(CHUNK, length // CHUNK * CHUNK)


def reference_of(p: KdaProblem, x: KdaInputs, h0: torch.Tensor | None, n: int, start: int, tokens: int):
    """(o, state) of the first tokens of a sequence."""
    row = slice(0, 1) if p.is_packed else slice(n, n + 1)
    return reference.kda(
        *(t[row, start : start + tokens] for t in x[:5]),
        initial_state=None if h0 is None else h0[n : n + 1],
        A_log=x.A_log,
        dt_bias=x.dt_bias,
        lower_bound=p.options.lower_bound,
        use_gate_in_kernel=p.options.use_gate_in_kernel,
        use_qk_l2norm_in_kernel=p.options.use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=True,
    )


def check_served(served: Served, device: str, sm: tuple[int, int] = HOPPER_SM) -> None:
    case = served.case
    p, x = make(case, device, sm)
    h0, pool, memory, before = x.initial_state, None, None, None
    if served.pool is not None:
        pool, memory, starts = make_pool(served, h0, device)
        before = memory.clone()
        h0 = torch.stack([pool.states[s].float() if live else torch.zeros_like(h0[0]) for s, live in zip(pool.indices, starts)])
        x = x._replace(initial_state=None)
    made = boundaries(served, case.lengths)
    rows = (max((row for row, _, _ in made), default=0)) + 3
    buffer = torch.full((rows, p.HV, D, D), torch.nan, dtype=served.kept_dtype, device=device)
    offsets = None
    if served.kept == Kept.OFFSETS:
        offsets = torch.tensor([offset_of(n, length) for n, length in enumerate(case.lengths)], dtype=torch.int32, device=device)
    kept = (
        None
        if served.kept == Kept.NOTHING
        else kda.KeptStates(buffer, served.kept, served.every if offsets is None else 0, offsets)
    )
    o = torch.full((p.B, p.T, p.HV, D), torch.nan, dtype=BF16, device=device)
    kda.run(p, x, schedule_of(case, p), None, o, pool, kept)

    dtype = "f16" if case.is_normalised else "bf16"
    lengths, start, wants = case.lengths, 0, {}
    for n, length in enumerate(lengths):
        want_o, wants[n] = reference_of(p, x, h0, n, start if p.is_packed else 0, length)
        got = o[0, start : start + length] if p.is_packed else o[n]
        if length:
            assert relative_error(got, want_o[0]) < TOLERANCE[dtype]
        for row, _, tokens in (b for b in made if b[1] == n):
            want = reference_of(p, x, h0, n, start if p.is_packed else 0, tokens)[1][0]
            if tokens == 0:
                assert torch.equal(buffer[row].double(), want)
            else:
                assert relative_error(buffer[row], want) < STATE_TOLERANCE[dtype] + ROUNDING[served.kept_dtype]
        start += length
    untouched = [row for row in range(rows) if row not in {row for row, _, _ in made}]
    assert bool(buffer[untouched].isnan().all())
    if pool is None:
        return
    after = memory.as_strided(pool.states.shape, pool.states.stride())
    for n, slot in enumerate(pool.indices.tolist()):
        if slot >= pool.first_slot:
            assert relative_error(after[slot], wants[n][0]) < STATE_TOLERANCE[dtype] + ROUNDING[served.pool]
            memory.as_strided(after[slot].shape, after[slot].stride(), after[slot].storage_offset()).copy_(
                before.as_strided(after[slot].shape, after[slot].stride(), after[slot].storage_offset())
            )
    assert torch.equal(bits(memory), bits(before)), "nothing else is written"


@pytest.mark.parametrize("served", SERVED, ids=str)
def test_served_interpreted(interpreted, served):  # noqa: F811
    check_served(served, "cpu")


def split(served: Served) -> Served:
    """As an architecture without a fused kernel serves it."""
    return dataclasses.replace(served, case=dataclasses.replace(served.case, clusters=0, longest=None))


QUICK = (1,)  # on Blackwell


@pytest.mark.parametrize(
    "served",
    [
        pytest.param(split(served), marks=[] if i in QUICK else [pytest.mark.slow], id=str(split(served)))
        for i, served in enumerate(SERVED)
    ],
)
def test_served_on_blackwell_interpreted(interpreted, served):  # noqa: F811
    check_served(served, "cpu", BLACKWELL_SM)


@pytest.mark.parametrize(
    ("index", "sm"), [(torch.int32, HOPPER_SM), (torch.int64, HOPPER_SM), (torch.int64, BLACKWELL_SM)], ids=str
)
def test_indices_beyond_the_pool_are_no_slots(interpreted, index, sm):  # noqa: F811
    """Nothing raises on a GPU; what has no slot starts from zero, and nothing is written."""
    p, x = make(Case((70, 20), has_state=False), "cpu", sm)
    pool = torch.full((2, 1, D, D), torch.nan)
    o, want = torch.empty_like(x.v), torch.empty_like(x.v)
    made = fused(2) if sm == HOPPER_SM else split_into(p, 100, NUM_SMS)
    kda.run(p, x, made, None, o, Pool(pool, torch.tensor([2, 2**31 - 1], dtype=index), None))
    kda.run(p, x, made, None, want)
    assert torch.equal(o, want) and bool(pool.isnan().all())


def test_checkpoints_beyond_the_buffer_are_dropped(interpreted):  # noqa: F811
    """Lengths of packed sequences are not known on the host."""
    p, x = make(Case((130, 192), has_state=False), "cpu")
    memory = torch.full((4, 1, D, D), torch.nan)
    kda.run(p, x, split_into(p, 1, NUM_SMS), None, torch.empty_like(x.v), None, kda.KeptStates(memory[:3], Kept.EVERY, 1, None))
    assert bool(memory[:3].isfinite().all()) and bool(memory[3].isnan().all())


@in_each_order
def test_order_of_asynchronous_work_does_not_matter(interpreted, order):  # noqa: F811
    """(Not for SERVED[4]: a block that waits for transitions of its own spins, and `first` runs no other warp meanwhile.)"""
    interpreted(order)
    check_served(SERVED[5], "cpu")
    check_served(SERVED[3], "cpu")


@pytest.mark.slow
def test_there_are_no_races(interpreted):  # noqa: F811
    interpreted("late", races=True)
    check_served(SERVED[5], "cpu")
    check_served(SERVED[3], "cpu")


# What is served, and recorded calls


def test_which_pools_and_checkpoints_the_kernels_take():
    p, _ = make(Case((70,)), "cpu")
    for changes, pool, checkpoints in (
        ({"pool_dtype": F16, "checkpoint_dtype": BF16}, None, None),
        ({"has_aligned_slots": False}, "it reads states in pairs", None),
        ({"has_aligned_checkpoints": False}, None, "it writes states in pairs"),
    ):
        changed = dataclasses.replace(p, **changes)
        for found, reason in ((kda.pool_why_not(changed), pool), (kda.checkpoints_why_not(changed), checkpoints)):
            assert found is None if reason is None else found.startswith(reason)


def serving(p: KdaProblem, every: int | None, index: torch.dtype, has_mask: bool):
    """(Pool, checkpoints) of a call."""
    pool = Pool(
        torch.zeros(9, p.HV, D, D, dtype=BF16),
        torch.stack([torch.arange(p.N), torch.arange(p.N)], 1).to(index)[:, 0],
        torch.ones(p.N, dtype=torch.bool) if has_mask else None,
    )
    offsets = torch.full((p.N,), 64, dtype=torch.int32) if every is None else None
    return pool, Checkpoints(torch.zeros(20, p.HV, D, D), every, offsets)


@pytest.mark.parametrize("every", [64, None])
@pytest.mark.parametrize(("index", "has_mask"), [(torch.int32, False), (torch.int64, True)])
def test_a_recorded_call_launches_what_a_call_launches(launched, index, has_mask, every):  # noqa: F811
    """For other lengths too, with the pool's indices and mask as they come."""
    on_pool = kept = None
    for case in (Case((70, 5, 130), HV=2), Case((30, 164), HV=2), Case((300, 0, 1, 40), HV=2)):
        p, x = make(dataclasses.replace(case, has_state=False), "cpu")
        pool, checkpoints = serving(p, every, index, has_mask)
        out = torch.empty(p.B, p.T, p.HV, D, dtype=BF16)
        plain = (*x, out, *pool[:3], None, None)
        kda.kda_fwd_pool(p, x, pool, out)
        on_pool = on_pool or record.replayer(plain, kda.record_kda_fwd_pool(p, x, pool, out))
        assert on_pool(plain) == (out, None)
        with_checkpoints = (*x, out, *pool[:3], checkpoints.states, checkpoints.offsets)
        kda.kda_fwd_checkpoints(p, x, pool, checkpoints, out)
        kept = kept or record.replayer(with_checkpoints, kda.record_kda_fwd_checkpoints(p, x, pool, checkpoints, out))
        assert kept(with_checkpoints) == (out, None)
        for (name, arguments), (same_name, same) in (launched[:2], launched[2:]):
            work = [] if "fused" in name else [WORKSPACE]
            assert name == same_name
            assert [a for i, a in enumerate(arguments) if i not in work] == [a for i, a in enumerate(same) if i not in work]
        launched.clear()


def test_a_recorded_call_with_checkpoints_makes_the_final_state(launched):  # noqa: F811
    p, x = make(Case((70, 130)), "cpu")
    _, checkpoints = serving(p, 64, torch.int32, False)
    given = (*x, None, None, None, None, checkpoints.states, None)
    o, state = record.replayer(given, kda.record_kda_fwd_checkpoints(p, x, None, checkpoints, None))(given)
    assert o.shape == x.v.shape and state.shape == x.initial_state.shape
    assert kda.record_kda_fwd(dataclasses.replace(p, options=p.options._replace(return_intermediate_states=True)), x) is None
    apart = Checkpoints(checkpoints.states, None, torch.zeros(4, dtype=torch.int32)[::2])
    assert kda.record_kda_fwd_checkpoints(p, x, None, apart, None) is None  # offsets would have to be copied


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("served", SERVED, ids=str)
def test_served_on_a_gpu(kernels, served):  # noqa: F811
    if served.case.clusters and torch.cuda.get_device_capability() != HOPPER_SM:
        pytest.skip("the fused kernel needs compute capability 9.0")
    check_served(served, "cuda")


def public_call(lengths: tuple[int, ...], is_packed: bool, H: int) -> dict[str, object]:
    p, x = make(Case(lengths, is_packed=is_packed, H=H, HV=H, shift=-4.0, has_state=False), "cuda")
    switches = ("lower_bound", "use_gate_in_kernel", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel")
    return {name: t for name, t in x._asdict().items() if t is not None} | {n: getattr(p.options, n) for n in switches}


LAYOUTS = [((512,) * 8, False, 8), ((2048,), False, 16), ((300, 64, 0, 1000), True, 4)]


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "is_packed", "H"), LAYOUTS, ids=["fused", "segments", "packed"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("index", "null_index"), [(torch.int32, "negative"), (torch.int64, "nonpositive")])
def test_the_public_call_on_a_pool(kernels, lengths, is_packed, H, dtype, index, null_index):  # noqa: F811
    """The first time, and recorded: the numbers of a call with plain states, bit for bit where all have one."""
    call, N = public_call(lengths, is_packed, H), len(lengths)
    pool = torch.randn(N + 2, H, D, D, device="cuda").to(dtype)
    slots = torch.arange(N, 0, -1, device="cuda").to(index)
    before = pool.clone()
    with torch.no_grad():
        first = before[slots.long()].float()
        want, state = cula.cula_kda(**call, initial_state=first, output_final_state=True)
        for mask in (None, torch.ones(N, dtype=torch.bool, device="cuda")):
            for _ in range(3):
                pool.copy_(before)
                o, none = cula.cula_kda(
                    **call, state_pool=pool, initial_state_indices=slots, has_initial_state=mask, null_index=null_index
                )
                assert none is None and torch.equal(o, want)
                assert torch.equal(pool[slots.long()], state.to(dtype))
                assert torch.equal(pool[[0, N + 1]], before[[0, N + 1]])
        slots[0] = 0 if null_index == "nonpositive" else -1
        first[0] = 0
        pool.copy_(before)
        want, state = cula.cula_kda(**call, initial_state=first, output_final_state=True)
        o, _ = cula.cula_kda(**call, state_pool=pool, initial_state_indices=slots, null_index=null_index)
        assert relative_error(o, want.double()) < TOLERANCE["f16"]
        assert torch.equal(pool[[0, N, N + 1]], before[[0, N, N + 1]])


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "is_packed", "H"), LAYOUTS, ids=["fused", "segments", "packed"])
def test_checkpoints_are_captured_by_a_graph(kernels, lengths, is_packed, H):  # noqa: F811
    """Without a copy to the host; the states are those of another backend."""
    call, N = public_call(lengths, is_packed, H), len(lengths)
    rows = sum(length // 128 for length in lengths)
    buffer, other = (torch.full((rows + 1, H, D, D), torch.nan, device="cuda") for _ in range(2))
    offsets = torch.tensor([length // CHUNK * CHUNK for length in lengths], dtype=torch.int32, device="cuda")
    one, other_one = (torch.zeros(N, H, D, D, device="cuda") for _ in range(2))

    def run(buffer, one, backend="auto"):
        cula.cula_kda(**call, checkpoint_every=128, checkpoint_states=buffer, backend=backend)
        cula.cula_kda(**call, checkpoint_offsets=offsets, checkpoint_states=one, backend=backend)

    with torch.no_grad():
        run(other, other_one, "triton")
        run(buffer, one)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            run(buffer, one)
        buffer.fill_(torch.nan)
        one.zero_()
        graph.replay()
        h, want_h = (cula.cula_kda(**call, return_intermediate_states=True, backend=b)[2] for b in ("auto", "triton"))
    assert relative_error(buffer[:rows], other[:rows].double()) < 8e-3 and bool(buffer[rows].isnan().all())
    assert relative_error(one, other_one.double()) < 8e-3
    assert h.shape == want_h.shape and relative_error(h, want_h.double()) < 8e-3
