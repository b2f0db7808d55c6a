# SPDX-License-Identifier: Apache-2.0
"""Pieces of a head in Gated DeltaNet's prefill on Hopper: how sequences are cut, how far warm-ups go back, and that it is enough.

A value of NaN shows who passed over it. What is expected is counted by `benchmarks/gdn_pieces.py`, in float64.
"""

import dataclasses
import itertools
import runpy
from pathlib import Path

import pytest
import torch

from cula.core.constants import CHUNK, LOG2_E
from cula.gdn.problem import GdnInputs, GdnOptions, GdnProblem, check_gdn
from cula.gdn.reference import gdn_gate
from cula.ops.cute import gdn_self_check
from cula.ops.cute.gdn_abi import WORKSPACE
from cula.ops.cute.gdn_schedule import Schedule
from cula.ops.cute.toolchain import loader
from cula.reference import relative_error
from tests.ops.cute import test_gdn
from tests.ops.cute.test_gdn import HOPPER_SM, STATE_TOLERANCE, TOLERANCE, D, computed, wanted
from tests.support.cute import skip_without_dsl
from tests.support.slow import slow_but
from tools.ptx import ORDERS, simulate
from tools.ptx.mutate import replace

interpreted = test_gdn.interpreted
counted = runpy.run_path(str(Path(__file__).resolve().parents[3] / "benchmarks" / "gdn_pieces.py"))
FORGOTTEN_IN_PTX = "0fC1C80000"  # -25


def call(
    bits: list[list[list[float]]], is_packed: bool = True, is_normalised: bool = True, device: str = "cpu"
) -> tuple[GdnProblem, GdnInputs]:
    """Sequences with heads whose chunks lose so many bits of a state: `bits[sequence][head][chunk]`. Their last chunks are ten
    tokens short. Keys are normalised in the kernel, or before."""
    random = torch.Generator().manual_seed(2)
    tokens, HV = [max(0, 64 * len(of[0]) - 10) for of in bits], len(bits[0])
    T = sum(tokens)
    q, k, v = (torch.randn(1, T, heads, D, generator=random) for heads in (1, 1, HV))
    if not is_normalised:
        q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
    g = torch.cat([torch.tensor(of).repeat_interleave(64, 1)[:, :n] for of, n in zip(bits, tokens)], 1).T / (-64 * LOG2_E)
    cu = torch.tensor([0, *itertools.accumulate(tokens)], dtype=torch.int32)
    x = GdnInputs(
        *(t.bfloat16() for t in (q, k, v)),
        g[None].contiguous(),
        torch.rand(1, T, HV, generator=random),
        initial_state=torch.randn(len(bits), HV, D, D, generator=random),
        cu_seqlens=cu,
    )
    if not is_packed:
        x = GdnInputs(*(t.unflatten(1, (len(bits), -1)).squeeze(0) for t in x[:5]), initial_state=x.initial_state)
    options = GdnOptions(use_qk_l2norm_in_kernel=is_normalised, output_final_state=True)
    p, x = check_gdn(GdnInputs(*(None if t is None else t.to(device) for t in x)), options)
    return dataclasses.replace(p, sm=HOPPER_SM), x


def even(needed: int, chunks: int, is_enough: bool = True) -> list[float]:
    """So many bits a chunk that as many chunks as are needed are just enough, or just not."""
    return [(25.02 if is_enough else 24.98) / needed] * chunks


def passed_over(cut, chunks: int, place: int) -> list[bool]:
    """Whose outputs are NaN where a value of a chunk is: by chunks."""
    if cut.is_mapped:
        return [t >= place for t in range(chunks)]
    walks = [cut.walk(piece, chunks) for piece in range(cut.pieces)]
    return [any(start <= place <= t and middle <= t < end for start, middle, end in walks) for t in range(chunks)]


# (Needed chunks, chunks, pieces). Of 5, 9 and 12 the first piece has more chunks than the others; in the last case it is shorter
# than the warm-up.
CUTS = [(1, 9, 2), (3, 16, 2), (5, 20, 2), (9, 40, 2), (12, 58, 2), (6, 16, 4)]


def check_walks(case: tuple[int, int, int], device: str = "cpu", is_normalised: bool = True) -> None:
    """Two heads for which chunks are just enough, with a NaN in front of a warm-up and in its first chunk, and one for which they
    are not; numbers of all that did not pass over one."""
    needed, chunks, pieces = case
    speeds = [even(needed, chunks), even(needed, chunks), even(needed, chunks, False)]
    p, x = call([speeds], device=device, is_normalised=is_normalised)
    cuts = [counted["cut"]([-bits for bits in of], pieces) for of in speeds]
    assert cuts[0].before == needed and not cuts[0].is_mapped
    assert cuts[2].is_mapped or cuts[2].before == needed + 1
    want_o, want_ht = wanted(p, x)
    start = cuts[0].walk(pieces - 1, chunks)[0]
    places = [start - 1, start, start - 1]
    for head, place in enumerate(places):
        x.v[0, 64 * place + 7, head] = torch.nan
    o, ht = computed(p, x, Schedule(0, pieces))
    for head, (cut, place) in enumerate(zip(cuts, places)):
        expected = passed_over(cut, chunks, place)
        assert [c.isnan().any().item() for c in o[0, :, head].split(64)] == expected
        kept = torch.tensor(expected).repeat_interleave(64)[: p.T].logical_not()
        assert relative_error(o[0, kept, head], want_o[0, kept, head]) < TOLERANCE
        assert ht[0, head].isnan().any() == expected[-1]
    assert relative_error(ht[0, 0], want_ht[0, 0]) < STATE_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("case", CUTS, ids=str)
def test_pieces_warm_up_over_as_many_chunks_as_are_needed(interpreted, case):
    check_walks(case)


@pytest.mark.parametrize("case", slow_but([CUTS[3], CUTS[5]], [CUTS[5]]), ids=str)
def test_so_they_do_with_keys_that_come_normalised(interpreted, case):
    check_walks(case, is_normalised=False)


@pytest.mark.gpu
@pytest.mark.parametrize("is_normalised", [True, False])
@pytest.mark.parametrize("case", CUTS, ids=str)
def test_on_a_gpu(case, is_normalised):
    if torch.cuda.get_device_capability() != HOPPER_SM or loader.missing("sm_90a"):
        pytest.skip(loader.missing("sm_90a") or "needs a Hopper GPU")
    check_walks(case, "cuda", is_normalised)


def longer(x: GdnInputs, token: int, head: int) -> None:
    """b |k|^2 of a head is 18, so that a state with this key's direction alone would be 17 times as large."""
    x.k[0, token] *= 1.3
    x.beta[0, token] /= 1.3**2
    x.beta[0, token, head] = 18.0 / 1.3**2


def negative(x: GdnInputs, token: int, head: int) -> None:
    """Seven tokens whose keys double what a state has in their direction, as far as the bound knows."""
    x.beta[0, token // 64 * 64 :][:7, head] = -1.0


def hardly(x: GdnInputs, token: int, head: int) -> None:
    """Strengths of 2, and keys of unit length, but rounded."""
    x.beta[0, token // 64 * 64 :][:64, head] = 2.0


def long_and_weak(x: GdnInputs, token: int, head: int) -> None:
    """b |k|^2 is as it was, of a key that is far longer than others, whose strengths would do for such a key."""
    x.beta[0, token // 64 * 64 :][:64] *= 0.03
    x.k[0, token] *= 8.0
    x.beta[0, token] *= 1 / (64.0 * 0.03)


@pytest.mark.parametrize(
    "change", slow_but([longer, negative, hardly, long_and_weak], [longer]), ids=lambda change: change.__name__
)
def test_a_piece_begins_at_the_start_if_its_warm_up_has_a_token_that_may_make_a_state_larger(interpreted, change):
    """Pieces begin at chunks 0, 6 and 12, and look at the chunks before: at no other, at 5, and at 11."""
    grows = change in (longer, negative)
    places = [64 * 9 + 40, 64 * 5 + 63, 64 * 11]
    p, x = call([[even(1, 16)] * 3], is_normalised=False)
    for head, token in enumerate(places):
        change(x, token, head)
    want, _ = wanted(p, x)
    x.v[0, 7] = torch.nan
    o, _ = computed(p, x, Schedule(0, 3))
    for head, pieces in enumerate([(0,), (0, 1) if grows else (0,), (0, 2) if grows else (0,)]):
        expected = [min(chunk // 6, 2) in pieces for chunk in range(16)]
        assert [c.isnan().any().item() for c in o[0, :, head].split(64)] == expected
        kept = torch.tensor(expected).repeat_interleave(64)[: p.T].logical_not()
        assert relative_error(o[0, kept, head], want[0, kept, head]) < TOLERANCE


@pytest.mark.parametrize("chunks", slow_but([(8,), (17, 5, 1)], [(8,)]), ids=str)
def test_pieces_that_have_nothing_to_do_read_nothing(interpreted, chunks):
    """Keys end with the last sequence, which has chunks for fewer pieces than there are."""
    p, x = call([[[30.0] * n] for n in chunks], is_normalised=False)
    (o, ht), (want_o, want_ht) = computed(p, x, Schedule(0, 4)), wanted(p, x)
    assert relative_error(o, want_o) < TOLERANCE
    assert relative_error(ht, want_ht) < STATE_TOLERANCE


@pytest.mark.slow
def test_fewer_pieces_hand_states_on_than_warm_up(interpreted, monkeypatch):
    p, x = call([[[0.1] * 32, [30.0] * 32]])
    cuts = [counted["cut"]([-bits] * 32, 8) for bits in (0.1, 30.0)]
    assert [(cut.is_mapped, cut.pieces) for cut in cuts] == [(True, 7), (False, 8)]
    kept, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **kwargs: kept.append(empty(*shape, **kwargs)) or kept[-1])
    (o, ht), (want_o, want_ht) = computed(p, x, Schedule(0, 8)), wanted(p, x)
    assert relative_error(o, want_o) < TOLERANCE
    assert relative_error(ht, want_ht) < STATE_TOLERANCE
    work = next(t for t in kept if t.dtype == torch.uint8)
    done = work[WORKSPACE.offsets(records=32)["done"] :][: 4 * 32].view(torch.int32).view(2, 8, 2)  # [head, piece, block]
    assert done.tolist() == [[[int(0 < piece < 7)] * 2 for piece in range(8)], [[0, 0]] * 8]


# Chunks that lose 3 bits, and one that loses 13: four of them are not enough behind it, and with it they are.
STEEP_AT = 20
ONE_STEEP = [13.1 if chunk == STEEP_AT else 3.0 for chunk in range(40)]


def error_behind_a_large_state() -> float:
    """The largest of a chunk. Up to the first chunk that the warm-up needs, values are 2^12 times as large as behind it."""
    assert counted["cut"]([-bits for bits in ONE_STEEP], 2).walk(1, 40) == (STEEP_AT, STEEP_AT + 5, 40)
    p, x = call([[ONE_STEEP]])
    x.v[:, : 64 * (STEEP_AT + 1)] *= 2.0**12
    (o, _), (want, _) = computed(p, x, Schedule(0, 2)), wanted(p, x)
    return max(relative_error(*both) for both in zip(o.split(64, 1), want.split(64, 1)))


@pytest.mark.slow
def test_what_is_dropped_is_forgotten(interpreted):
    assert error_behind_a_large_state() < TOLERANCE


def test_a_warm_up_that_is_too_short_is_noticed(interpreted):
    interpreted(edit=replace(FORGOTTEN_IN_PTX, "0fC0000000"))  # -2
    assert error_behind_a_large_state() > 5 * TOLERANCE


@pytest.mark.parametrize("is_packed", slow_but([True, False], [True]))
def test_sequences_of_a_call_are_cut_by_themselves(interpreted, is_packed):
    """Warm, mapped and whole ones, with heads of several speeds, and without tokens."""
    bits = [[even(3, 12), [0.5] * 12], [[9.0] * 12, even(2, 12)]]
    if is_packed:
        bits = [bits[0], [[], []], [[3.0], [0.0]], [[0.1] * 8, [30.0] * 8]]
    p, x = call(bits, is_packed=is_packed)
    (o, ht), (want_o, want_ht) = computed(p, x, Schedule(0, 3)), wanted(p, x)
    assert relative_error(o, want_o) < TOLERANCE
    assert relative_error(ht, want_ht) < STATE_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("order", [order for order in ORDERS if order != "late"])
def test_all_orders_give_the_same_bits(interpreted, order):
    p, x = call([[even(5, 20), even(2, 20)]])
    first = computed(p, x, Schedule(0, 2))
    interpreted(order, races=True)
    assert all(torch.equal(a, b) for a, b in zip(first, computed(p, x, Schedule(0, 2))))


@pytest.mark.slow
def test_boundaries_are_counted_by_all_warps_in_turns(interpreted):
    """More of them than warps, and the slowest is the last."""
    bits = [30.0] * 76
    bits[-5] = 0.5
    cut = counted["cut"]([-b for b in bits], 19)
    assert (cut.before, cut.is_mapped) == (2, False)
    p, x = call([[bits]])
    (o, ht), (want_o, want_ht) = computed(p, x, Schedule(0, 19)), wanted(p, x)
    assert relative_error(o, want_o) < TOLERANCE
    assert relative_error(ht, want_ht) < STATE_TOLERANCE


def test_the_comparison_at_first_use_has_pieces_of_every_kind():
    """Mapped; warm over fewer chunks than are asked for at once; warm over more, with a longer first piece."""
    found = []
    for made in gdn_self_check.IN_PIECES:
        _, x = gdn_self_check.make(made, True, torch.device("cpu"), HOPPER_SM)
        g = LOG2_E * gdn_gate(x.g, x.A_log, x.dt_bias)[0, : made.lengths[0], 0]
        found.append(counted["cut"]([c.sum().item() for c in g.split(CHUNK)], made.blocks))
    slow, fast, mild = found
    assert slow.is_mapped and not fast.is_mapped and not mild.is_mapped
    assert fast.before < counted["AHEAD"] < mild.before and mild.more > 0


ORDERED = [  # lengths, and sequences as they are to come
    ([1300, 547, 2048, 963, 271, 3063], [5, 2, 0, 3, 1, 4]),
    ([7, 7, 0, 9, 7], [3, 0, 1, 4, 2]),
    ([5], [0]),
    (list(range(100, 132)), list(range(31, -1, -1))),
    (list(range(100, 133)), list(range(33))),  # more than a warp has lanes
]


@pytest.mark.parametrize(("lengths", "order"), ORDERED, ids=lambda x: str(len(x)))
def test_heads_of_longer_sequences_come_first(lengths, order):
    skip_without_dsl()
    HV, modules = 3, ("tests.support.kernels.items",)
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    for length, expected in ((0, order), (64, list(range(len(lengths))))):
        got = torch.full((len(lengths) * HV,), -1, dtype=torch.int32)
        simulate("longest_first", cu, got, HV, length, modules=modules)
        assert got.tolist() == [HV * seq + hv for seq in expected for hv in range(HV)]
