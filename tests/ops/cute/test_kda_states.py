# SPDX-License-Identifier: Apache-2.0
"""KDA prefill on the CuTe kernels: state pools that the kernels read and write, and the states inside of sequences that they keep.

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
    Case,
    fused_kernel,
    interpreted,
    kernels,
    launched,
    make,
)

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
    Served(Case((330, 70), per_segment=2), pool=F16, index=torch.int64, is_strided=True, kept=Kept.EVERY, every=2, kept_dtype=BF16),
    Served(Case((390,), per_segment=1, per_chained=3, shift=-8.0), pool=BF16, kept=Kept.STARTS),
    Served(Case((400, 390), per_segment=2, shift=-8.0), null_is_nonpositive=True, kept=Kept.OFFSETS),
    Served(Case((200, 200), is_packed=False, clusters=2, shift=-8.0), pool=F16, has_mask=True, kept=Kept.EVERY),
    Served(Case((100, 330), per_segment=1, shift=-6.0, is_normalised=False), pool=F16, has_mask=True, kept=Kept.STARTS),
    Served(Case((130, 130), is_packed=False, clusters=2, has_state=False), pool=None, kept=Kept.STARTS),
    Served(Case((192, 64, 20), shift=-4.0, size=1e6), pool=F32, kept=Kept.EVERY),
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
    kept = None if served.kept == Kept.NOTHING else kda.KeptStates(buffer, served.kept, served.every if offsets is None else 0, offsets)
    o = torch.full((p.B, p.T, p.HV, D), torch.nan, dtype=BF16, device=device)
    schedule = fused(case.clusters) if case.clusters else split_into(p, case.per_segment, case.num_sms, case.per_chained)
    kda.run(p, x, schedule, None, o, pool, kept)

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


@pytest.mark.parametrize("served", [SERVED[1], SERVED[3], SERVED[4]], ids=str)
def test_served_on_blackwell_interpreted(interpreted, served):  # noqa: F811
    check_served(served, "cpu", BLACKWELL_SM)
