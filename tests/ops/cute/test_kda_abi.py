# SPDX-License-Identifier: Apache-2.0
"""What crosses from host to kernel for KDA: one description makes the call, what is compiled, and the workspace."""

import pytest
import torch

from cula.ops.cute import kda, kda_abi, launch
from cula.ops.cute.kda_schedule import fused, schedule, split_into
from cula.ops.cute.toolchain import build, variants
from tests.ops.cute.test_kda import CASES, NUM_SMS, Case, make
from tests.support.abi import swapped

needs_dsl = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
HOSTS = {"split": (kda_abi.SPLIT, "cula.ops.cute.sm90.kda"), "fused": (kda_abi.FUSED, "cula.ops.cute.sm90.kda_fused")}


@needs_dsl
@pytest.mark.parametrize("which", HOSTS)
@pytest.mark.parametrize(
    "names", [("q", "k"), ("v", "o"), ("q_token", "q_head"), ("T", "N"), ("scale", "lower"), ("H", "scale")], ids=str
)
def test_arguments_that_change_places_fail_before_any_launch(monkeypatch, which, names):
    """Nothing can be compiled, and compiled kernels are of other sources: the description is a part of their digest."""
    abi, module = HOSTS[which]
    variants.collect([module])
    monkeypatch.setattr(kda_abi, which.upper(), swapped(abi, *names))
    with pytest.raises(TypeError, match=f"the description has {names[1]}: .* where the host function has {names[0]}: "):
        variants.collect([module])


def test_the_description_is_a_part_of_the_digest_of_kernels():
    assert variants.CUTE / "kda_abi.py" in variants.SHARED


@pytest.fixture
def launched(monkeypatch):
    """The arguments of every launch by name, and the sizes of tensors by their addresses."""
    calls, sizes = [], {}

    def address(t):
        if t is None:
            return 0
        sizes[t.data_ptr()] = t.numel() * t.element_size()
        return t.data_ptr()

    def load(name, target):
        abi = kda_abi.FUSED if name.startswith("fused") else kda_abi.SPLIT
        return lambda *arguments: calls.append(dict(zip([a.name for a in abi.args], arguments, strict=False)))

    monkeypatch.setattr(launch, "address", address)
    monkeypatch.setattr(kda, "load", load)
    monkeypatch.setattr(kda, "stream_of", lambda device: 0)
    return calls, sizes


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[5], Case((390,), per_segment=1), Case((64, 64, 1000))], ids=str)
def test_the_workspace_ends_where_the_host_allocates_it(launched, case):
    p, x = make(case, "cpu")
    for made in (split_into(p, case.per_segment, NUM_SMS), schedule(p, NUM_SMS)):
        kda.run(p, x, made)
        (call,), sizes = launched[0][-1:], launched[1]
        if made.is_fused:
            assert "workspace" not in call
            continue
        # as `common/kda.py` lays it out, from the numbers that it is given
        records, segments = call["chunks"] * call["HV"], call["segments"] * call["HV"]
        counts = {"records": records, "segments": segments, "transitions": segments * call["has_transitions"]}
        assert sizes[call["workspace"]] == kda_abi.WORKSPACE.offsets(**counts)["end"] > 0


def test_sections_of_the_workspace_are_aligned():
    offsets = kda_abi.WORKSPACE.offsets(records=7, segments=5, transitions=5)
    assert all(at % 128 == 0 for at in offsets.values())
    assert offsets["end"] == 7 * (3 * 64 * 128 * 2 + 2 * 64 * 64 * 2 + 256 * 4) + 128 + 5 * (128 * 128 * 4 + 2 * 128 * 128 * 2)


def test_a_call_says_what_it_has(launched):
    p, x = make(Case((70, 5, 64), HV=2, beta=torch.bfloat16, has_state=False), "cpu")
    kda.run(p, x, split_into(p, 1, NUM_SMS))
    kda.run(p, x, fused(2))
    for call in launched[0]:
        assert (call["q"], call["k"], call["cu"]) == (x.q.data_ptr(), x.k.data_ptr(), x.cu_seqlens.data_ptr())
        assert (call["T"], call["N"], call["H"], call["HV"]) == (139, 3, 1, 2)
        assert (call["beta_bits"], call["has_h0"], call["has_ht"], call["length"]) == (16, 0, 0, 0)
        assert (call["v_token"], call["v_head"], call["beta_token"]) == (256, 128, 2)
        assert (call["lower"], call["beta_top"]) == (-5.0, 1.0)
    split, whole = launched[0]
    assert (split["halvings"], split["per_segment"], split["has_transitions"]) == (2, 1, 1)
    assert whole["clusters"] == 2
