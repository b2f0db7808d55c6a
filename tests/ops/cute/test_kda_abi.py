# SPDX-License-Identifier: Apache-2.0
"""What crosses from host to kernel for KDA: one description makes the call, what is compiled, and the workspace."""

import json

import pytest
import torch

from cula.ops.cute import kda, kda_abi, launch
from cula.ops.cute.kda_schedule import fused, schedule, split_into
from cula.ops.cute.toolchain import loader, variants
from tests.ops.cute.test_kda import CASES, NUM_SMS, Case, make

ARCH, KERNEL = "sm_90a", "kda_f16_gate_bf16"


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A folder of compiled kernels, as their manifest says of just these sources."""
    (tmp_path / ARCH).mkdir()
    manifest = {"sources": variants.source_hash(variants.modules_of(ARCH)), "kernels": {KERNEL: {}}}
    (tmp_path / ARCH / loader.MANIFEST).write_text(json.dumps(manifest))
    (tmp_path / ARCH / f"{KERNEL}.so").touch(0o600)
    monkeypatch.setenv("CULA_KERNEL_DIR", str(tmp_path))
    yield tmp_path
    variants.source_hash.cache_clear()


@pytest.mark.parametrize("names", [("q=", "k="), ("h0=", "ht="), ('"T"', '"N"'), ('"scale"', '"lower"')], ids=str)
def test_kernels_whose_arguments_changed_places_are_refused_before_any_launch(monkeypatch, folder, names):
    """The call and the function that is compiled are made from one description, so only kernels that were compiled before could
    differ from it. They are of other sources then: the description is a part of their digest."""
    assert loader.locate(KERNEL, ARCH, variants.modules_of(ARCH)) == folder / ARCH / f"{KERNEL}.so"
    monkeypatch.setattr(variants, "SHARED", tuple(with_names_swapped(path, folder, *names) for path in variants.SHARED))
    variants.source_hash.cache_clear()
    with pytest.raises(RuntimeError, match="was compiled from other sources"):
        loader.locate(KERNEL, ARCH, variants.modules_of(ARCH))


def with_names_swapped(path, folder, one, other):
    """KDA's description with two arguments exchanged; other files as they are."""
    text = path.read_text()
    if path.name != "kda_abi.py":
        return path
    assert text.count(one) > 0 < text.count(other)
    copy = folder / path.name
    copy.write_text(text.replace(one, "\0").replace(other, one).replace("\0", other))
    return copy


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
