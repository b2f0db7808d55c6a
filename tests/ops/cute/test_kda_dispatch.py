# SPDX-License-Identifier: Apache-2.0
"""KDA prefill on the CuTe kernels: which calls the backends take, when the fused kernel is chosen, how sequences are split.

Sizes only; numbers are in test_kda.py.
"""

import dataclasses
import types

import pytest
import torch

from cula.core.dispatch import choose
from cula.core.replay.sizes import by_chunks, resized
from cula.kda.problem import KdaOptions, KdaProblem
from cula.ops.cute import kda, kda_abi, kda_schedule, lightning_schedule
from cula.ops.cute.archs import ARCHS, arch_of, find_arch, of_target, target_of
from cula.ops.cute.kda_schedule import how, schedule
from cula.ops.cute.toolchain import loader

D, CHUNK, NUM_SMS = 128, 64, 132
HOPPER_SM, BLACKWELL_SM = (9, 0), (10, 0)
ANY = "of any length"

HOPPER = KdaProblem(
    device="cuda",
    sm=(9, 0),
    dtype=torch.bfloat16,
    g_dtype=torch.bfloat16,
    beta_dtype=torch.float32,
    B=1,
    T=8192,
    N=1,
    H=16,
    HV=16,
    K=D,
    V=D,
    is_packed=False,
    has_scalar_gate=False,
    has_initial_state=True,
    needs_grad=False,
    scale=1.0,
    options=KdaOptions(use_gate_in_kernel=True, lower_bound=-5.0, safe_gate=True),
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"needs_grad": True}, None),
        ({"options": KdaOptions(safe_gate=True)}, None),
        ({"dtype": torch.float16}, "takes bfloat16, and this call has float16"),
        ({"K": 64}, "takes K = V = 128, and this call has K = 64"),
        ({"has_scalar_gate": True}, None),
        ({"has_scalar_gate": True, "options": KdaOptions()}, None),
        ({"has_scalar_gate": True, "options": KdaOptions(use_gate_in_kernel=True)}, None),
        ({"options": KdaOptions()}, None),
        ({"options": KdaOptions(), "g_dtype": torch.float32}, None),
        ({"options": KdaOptions(use_gate_in_kernel=True)}, None),
        ({"beta_dtype": torch.float16}, "takes beta in bfloat16 or float32"),
        ({"options": KdaOptions(safe_gate=True, return_intermediate_states=True)}, None),
        ({"options": KdaOptions(use_qk_l2norm_in_kernel=True, disable_recompute=True), "needs_grad": True}, None),
        ({"options": KdaOptions(safe_gate=True, disable_recompute=True), "needs_grad": True}, None),
        (
            {"options": KdaOptions(use_gate_in_kernel=True, disable_recompute=True), "needs_grad": True},
            "not make this call's gradient",
        ),
        ({"options": KdaOptions(safe_gate=True, disable_recompute=True)}, None),
        ({"sm": (8, 0)}, "needs compute capability 9.0, and this GPU has 8.0"),
        ({"T": 0}, "at least one token"),
        ({"T": 2**22, "H": 1, "HV": 1}, "fewer than 2^22 tokens a call"),
        ({"T": 2**21, "H": 64, "HV": 64}, "fewer than 2^25 tokens times value heads"),
    ],
    ids=str,
)
def test_what_the_backend_takes(monkeypatch, change, reason):
    monkeypatch.setattr(loader, "missing", lambda arch: None)
    choice = choose("kda_fwd", dataclasses.replace(HOPPER, **change))
    if reason is None:
        assert choice.name == "cute_sm90"
    else:
        assert choice.name == "triton"
        assert reason in dict(choice.passed_over)["cute_sm90"]


@pytest.mark.parametrize("sm", [(10, 0), (10, 3)])
def test_blackwell_takes_what_hopper_does(monkeypatch, sm):
    monkeypatch.setattr(loader, "missing", lambda arch: None)
    blackwell = dataclasses.replace(HOPPER, sm=sm)
    choice = choose("kda_fwd", blackwell)
    assert choice.name == "cute_sm100"
    assert "never run on hardware" in choice.backend.summary
    for change, reason in (
        ({"dtype": torch.float16}, "takes bfloat16"),
        ({"K": 64}, "takes K = V = 128"),
        ({"beta_dtype": torch.float16}, "takes beta in bfloat16 or float32"),
        ({"sm": (12, 0)}, "needs compute capability 10.0 or 10.3, and this GPU has 12.0"),
    ):
        choice = choose("kda_fwd", dataclasses.replace(blackwell, **change))
        assert choice.name == "triton"
        assert reason in dict(choice.passed_over)["cute_sm100"]
    assert dict(choose("kda_bwd", blackwell).passed_over)["cute_sm100"] == "has no kernel for kda_bwd"
    monkeypatch.setattr(loader, "missing", lambda arch: f"no kernels for {arch}")
    arch = {(10, 0): "sm_100a", (10, 3): "sm_103a"}[sm]
    assert dict(choose("kda_fwd", blackwell).passed_over)["cute_sm100"] == f"no kernels for {arch}"


@pytest.mark.parametrize("T", [1, 64, 65, 1000, 8192, 131072])
@pytest.mark.parametrize(("N", "HV"), [(1, 1), (1, 8), (2, 64), (7, 96), (300, 4)])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_schedule_has_room_for_every_sequence(T, N, HV, is_packed):
    shape = {"B": 1, "T": T * N} if is_packed else {"B": N, "T": T}
    made = schedule(dataclasses.replace(HOPPER, **shape, N=N, H=HV, HV=HV, is_packed=is_packed), NUM_SMS)
    chunks = -(-T // CHUNK)
    per_sequence = -(-chunks // made.per_segment)
    assert made.chunks >= N * chunks
    assert made.segments >= N * per_sequence
    assert made.has_transitions or per_sequence == 1
    # where a chained sequence has longer segments, its blocks are enough for a B or an M each, of all but the last
    assert made.per_chained_segment >= made.per_segment
    if made.per_chained_segment > made.per_segment:
        segments, blocks = -(-chunks // made.per_chained_segment), per_sequence + made.helpers
        assert made.has_transitions and 2 * (segments - 1) <= blocks and made.per_segment <= 2 * per_sequence
    # at most one segment more than there are SMs for, packed or not
    assert made.segments * HV <= max(NUM_SMS + N * HV, N * HV)
    # helpers compute transitions of a single sequence where SMs are idle, and never more than there are
    assert 0 <= made.helpers <= max(made.segments - 1, 0)
    if made.helpers:
        assert N == 1 and made.has_transitions and (made.segments + made.helpers) * HV <= NUM_SMS


@pytest.mark.parametrize(
    ("change", "clusters"),
    [
        ({"H": 64, "HV": 64}, 64),
        ({"B": 2, "N": 2, "H": 64, "HV": 64}, 66),
        ({"B": 8, "N": 8, "H": 48, "HV": 96}, 66),
        ({"H": 96, "HV": 96}, 0),  # the second wave would leave many idle
        ({"H": 16, "HV": 16}, 0),
        ({"B": 4, "N": 4, "T": 2048, "H": 12, "HV": 12}, 48),  # few, but short
        ({"B": 4, "N": 4, "T": 2049, "H": 12, "HV": 12}, 0),
        ({"T": 2048, "H": 46, "HV": 46}, 0),
        ({"T": 128, "H": 4, "HV": 4}, 4),  # so few tokens that a launch counts
        ({"T": 128, "N": 8, "H": 2, "HV": 4, "is_packed": True}, 32),
        ({"T": 129, "H": 4, "HV": 4}, 0),
        ({"T": 128, "N": 40, "H": 2, "HV": 4, "is_packed": True}, 0),  # would take several waves
        ({"N": 4, "H": 24, "HV": 24, "is_packed": True}, 0),  # lengths that are not known, and whatever they are
        ({"N": 6, "H": 96, "HV": 96, "is_packed": True}, 66),  # so many that they average out
        ({"N": 5, "H": 64, "HV": 64, "is_packed": True}, 64),  # a cluster has the same heads of each
        ({"N": 5, "H": 128, "HV": 128, "is_packed": True}, 64),
        ({"H": 64, "HV": 64, "g_dtype": torch.float32}, 64),
        ({"H": 64, "HV": 64, "g_dtype": torch.float32, "has_scalar_gate": True}, 64),
        ({"H": 64, "HV": 64, "sm": (10, 0)}, 0),
        ({"H": 64, "HV": 64, "options": HOPPER.options}, 0),  # keys as they come
    ],
    ids=str,
)
def test_fused_where_it_fills_the_gpu(change, clusters):
    problem = dataclasses.replace(HOPPER, **{"options": HOPPER.options._replace(use_qk_l2norm_in_kernel=True), **change})
    made = schedule(problem, NUM_SMS)
    assert made.clusters == clusters
    assert (made.workspace_bytes(problem.HV) == 0) == (clusters > 0)
    assert how(problem, NUM_SMS).startswith(f"fused: one kernel on {clusters} clusters" if clusters else "split: two kernels, ")


EITHER = dataclasses.replace(
    HOPPER, T=8 * 2048, N=8, is_packed=True, options=HOPPER.options._replace(use_qk_l2norm_in_kernel=True)
)


@pytest.mark.parametrize(
    ("change", "clusters", "longest"),
    [
        ({}, 66, 37),  # two waves
        ({"T": 4 * 2048, "N": 4, "H": 12, "HV": 12}, 48, 37),  # one that is not full
        ({"T": 4 * 2049, "N": 4, "H": 12, "HV": 12}, 0, None),  # and not short enough for that
        ({"T": 3 * 2000, "N": 3, "H": 10, "HV": 20, "has_scalar_gate": True}, 60, 37),
        ({"T": 8 * 512, "g_dtype": torch.float32}, 66, 10),
        ({"T": 8 * 448}, 0, None),  # over before the other kernels have been launched
        ({"N": 5, "T": 8192, "H": 96, "HV": 96}, 66, 30),
        ({"N": 6, "H": 96, "HV": 96}, 66, ANY),  # so many that lengths average out
        ({"N": 1, "T": 2048, "H": 48, "HV": 48}, 48, 37),
        ({"N": 6}, 0, None),  # 96 heads: the second wave would leave many clusters idle
        ({"sm": BLACKWELL_SM}, 0, None),
        ({"options": HOPPER.options}, 0, None),  # keys as they come
        ({"options": EITHER.options._replace(batch_invariant=True)}, 0, None),
        ({"B": 8, "T": 2048, "is_packed": False}, 66, ANY),
    ],
    ids=str,
)
def test_packed_sequences_that_may_be_of_one_length_are_the_fused_kernels_if_they_are(change, clusters, longest):
    """Up to `longest` chunks. The split kernels are those of a call of which nothing is known."""
    problem = dataclasses.replace(EITHER, **change)
    made = schedule(problem, NUM_SMS)
    assert made.clusters == clusters
    if longest in (None, ANY):
        assert made.kernels == (("split",) if longest is None else ("fused",))
        assert made.longest == (kda_abi.NO_LENGTH if longest is None else kda_abi.ANY_LENGTH)
        return
    assert made.kernels == ("fused", "split") and made.longest == longest * CHUNK
    assert made._replace(clusters=0, longest=kda_abi.NO_LENGTH) == kda_schedule.split(problem, NUM_SMS)
    assert made.longest >= kda_schedule.EVEN * problem.T / problem.N
    assert made.workspace_bytes(problem.HV) > 0
    said = how(problem, NUM_SMS)
    assert said.startswith(f"fused, one kernel on {clusters} clusters of two SMs, if no sequence has more than {made.longest} ")
    assert "; otherwise split: two kernels, " in said
    split_kernel = kda.variant(problem)
    assert kda.kernels("kda_fwd", problem, NUM_SMS) == (f"fused_{split_kernel}", split_kernel)


def test_a_choice_says_how_a_call_is_done(monkeypatch):
    monkeypatch.setattr(loader, "missing", lambda arch: None)
    for name, value in {
        "is_available": True,
        "current_device": 0,
        "get_device_capability": HOPPER_SM,
        "get_device_properties": types.SimpleNamespace(multi_processor_count=NUM_SMS),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    problem = dataclasses.replace(HOPPER, H=96, HV=96, options=HOPPER.options._replace(use_qk_l2norm_in_kernel=True))
    choice = choose("kda_fwd", problem)
    choice = dataclasses.replace(choice, how=choice.backend.how("kda_fwd", problem))  # as `cula.explain` does
    line = "  split: two kernels, whole sequences, 780 MiB of workspace: N HV = 96 would leave many of 66 clusters idle"
    assert str(choice).splitlines()[1] == line
    assert choice.backend.how("kda_fwd", dataclasses.replace(problem, sm=(10, 0))) is None  # of a GPU that is not here


def test_how_a_call_is_done_names_both_lengths_of_segments(monkeypatch):
    for per_chained, text in (
        (32, "segments of 16 chunks of 64 tokens, of 32 where gates forget slowly, "),
        (16, "of 64 tokens, 146 MiB"),
    ):
        monkeypatch.setattr(kda_schedule, "chained_segment", lambda problem, made, mean, per_chained=per_chained: per_chained)
        assert text in how(HOPPER, NUM_SMS)


@pytest.mark.parametrize("HV", [4, 32, 64])
@pytest.mark.parametrize("norm", [False, True])
def test_a_batch_invariant_sequence_is_split_by_its_own_length(HV, norm):
    """The same kernel and the same segments in calls of any size, with room for all of them; not so otherwise."""

    def made(is_invariant):
        options = HOPPER.options._replace(use_qk_l2norm_in_kernel=norm, batch_invariant=is_invariant)
        shapes = [{"B": 1, "T": 500}, {"B": 1, "T": 8192}, {"B": 16, "T": 2048}, {"B": 1, "T": 40000, "is_packed": True}]
        calls = [{"N": 5 if shape.get("is_packed") else shape["B"], **shape} for shape in shapes]
        problems = [dataclasses.replace(HOPPER, H=HV, HV=HV, options=options, **call) for call in calls]
        return [(p, schedule(p, NUM_SMS)) for p in problems]

    invariant = made(True)
    assert len({(s.is_fused, s.per_segment, s.per_chained_segment, s.helpers) for _, s in invariant}) == 1
    assert invariant[0][1].is_fused == (norm and HV == 64)
    assert (len({(s.is_fused, s.per_segment) for _, s in made(False)}) > 1) == (HV < 64 or not norm)
    for p, s in invariant:
        assert how(p, NUM_SMS).startswith("fused" if s.is_fused else "split")
        if not s.is_fused and not p.is_packed:
            assert s.segments == p.N * -(-p.T // (CHUNK * s.per_segment)) and s.has_transitions == (s.segments > p.N)


def test_only_hopper_splits_chained_sequences_otherwise():
    assert schedule(HOPPER, NUM_SMS).per_chained_segment > schedule(HOPPER, NUM_SMS).per_segment
    blackwell = schedule(dataclasses.replace(HOPPER, sm=BLACKWELL_SM), NUM_SMS)
    assert blackwell.per_chained_segment == blackwell.per_segment


def test_a_packed_sequence_that_is_all_there_is_stays_whole_where_nothing_is_split():
    problem = dataclasses.replace(HOPPER, B=1, T=6400, N=64, is_packed=True)
    made = schedule(problem, NUM_SMS)
    assert not made.has_transitions
    assert made.per_segment * CHUNK >= problem.T


def test_what_a_kernel_serves_is_said_beside_it():
    assert kda.why_not("kda_fwd", HOPPER) is None
    assert kda.why_not("kda_fwd", dataclasses.replace(HOPPER, V=64)) == "takes K = V = 128, and this call has K = 128, V = 64"


def test_architectures():
    assert [arch.name for arch in ARCHS] == ["sm90", "sm100"]
    assert (target_of((9, 0)), target_of((10, 3))) == ("sm_90a", "sm_103a")
    assert arch_of((10, 0)) is arch_of((10, 3)) is of_target("sm_103a")
    assert find_arch((8, 0)) is None and find_arch(None) is None
    with pytest.raises(ValueError, match=r"no CuTe kernels for compute capability \(8, 0\)"):
        arch_of((8, 0))


@pytest.mark.parametrize("is_packed", [False, True])
def test_schedules_found_by_chunks_are_those_of_the_length(is_packed):
    """Whatever lengths came before: two calls on the same input take the same schedule, and give the same bits."""
    few = dataclasses.replace(HOPPER, is_packed=is_packed, H=4, HV=4)
    either = dataclasses.replace(EITHER, is_packed=is_packed, H=48, HV=48)
    assert len({schedule(resized(either, 1, T, 5), NUM_SMS).kernels for T in range(64, 3000, 64)}) == 1 + is_packed
    makers = [lambda p: schedule(p, NUM_SMS), lambda p: lightning_schedule.choose_schedule(p, NUM_SMS)]
    for make, problem in ((makers[0], few), (makers[1], few), (makers[0], either)):
        of_length = lambda B, T, N, make=make, problem=problem: make(resized(problem, B, T, N))
        found = by_chunks(of_length)
        for N in (1, 2, 5, 7):
            for T in range(1, 3000, 1 if N == 5 else 3):
                B, length = (1, T) if is_packed else (N, T)
                assert found(B, length, N) == of_length(B, length, N), (T, N)
