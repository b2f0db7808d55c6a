# SPDX-License-Identifier: Apache-2.0
"""What is measured: the default shapes, any shape from the command line, and the bytes each must move."""

import itertools
import json
from dataclasses import replace

import pytest

from cula.bench.cases import ALL_FLAGS, Case
from cula.bench.floor import floor_bytes
from cula.bench.suites import Custom, build, known, parse_flags


def prefill(lens, H, HV=None, **options) -> Case:
    return Case("kda-prefill", "kda_prefill", lens, H, HV or H, **options)


def test_the_eighteen_shapes_at_three_gates():
    cases = build(["kda-prefill"], "cuda")
    assert len(cases) == 54
    assert {c.gate for c in cases} == {"fast", "slow", "init"}
    fast = [c.shape for c in cases if c.gate == "fast"]
    assert len(set(fast)) == 18
    for shape in ("H=12, 4x2048", "H=16, 8x2048", "H=96, [1300,547,2048,963,271,3063]", "H=8, 1x131072", "H=64, 2x16384"):
        assert shape in fast
    assert all(c.dtype == "bfloat16" and c.flags == ALL_FLAGS for c in cases)


def test_other_gates_at_the_same_shapes():
    cases = build(["kda-gates"], "cuda")
    assert {c.gate for c in cases} == {"slopes", "mixed", "softplus"}
    assert {c.shape for c in cases} == {c.shape for c in build(["kda-prefill"], "cuda")}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("suite", known())
def test_cases_have_distinct_names_and_survive_json(suite, device):
    cases = build([suite], device)
    assert cases and len({c.id for c in cases}) == len(cases)
    for case in cases:
        assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case
    assert build([suite], device, limit=1) == cases[:1]


def test_the_shapes_that_speed_is_claimed_for():
    """Measured by default and first, so that a cut budget leaves them."""
    shapes = {suite: [c.shape for c in build([suite], "cuda")] for suite in ("kda-train", "lightning")}
    assert shapes["kda-train"][:3] == ["H=32, 1x8192", "H=64, 2x4096", "H=16, 1x32768"]
    assert shapes["lightning"][:5] == ["H=64, 1x8192", "H=64, 2x16384", "H=16, 1x32768", "H=8, 1x131072", "H=32, 1x2048"]
    decode = {(c.op, c.N, c.lens[0], c.pool) for c in build(["decode"], "cuda") if c.H == 32}
    ops, pools = ("kda_decode", "lightning_decode"), ("float32", "bfloat16")
    assert decode == set(itertools.product(ops, (1, 8, 64, 256), (1, 4), pools))


def test_a_shape_from_the_command_line():
    custom = Custom(t=(8192,), h=(16,), hv=32, gates=("slow",), dtype="float16", flags=("h0",))
    (case,) = build(["kda-prefill"], "cuda", custom)
    assert (case.lens, case.H, case.HV, case.gate, case.dtype) == ((8192,), 16, 32, "slow", "float16")
    assert case.flags == ("h0",)
    packed, _ = build(["kda-train"], "cuda", Custom(lens=(1300, 547, 2048), h=(4,), gates=("fast",)))
    assert packed.packed and packed.lens == (1300, 547, 2048) and packed.op == "kda_train"
    sweep = build(["kda-prefill"], "cpu", Custom(t=(64, 128), h=(1, 2), gates=("init",)))
    assert {(c.T, c.H) for c in sweep} == {(64, 1), (64, 2), (128, 1), (128, 2)}
    assert {c.N for c in build(["decode"], "cuda", Custom(b=32))} == {32}


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="unknown suite"):
        build(["prefil"], "cpu")
    with pytest.raises(ValueError, match="leave out --t"):
        build(["kda-prefill"], "cpu", Custom(t=(64,), lens=(1, 2)))
    with pytest.raises(ValueError, match="not a multiple"):
        prefill((64,), 3, 4)
    with pytest.raises(ValueError, match="unknown flags"):
        prefill((64,), 4, flags=parse_flags("gate,nrom"))
    with pytest.raises(ValueError, match="must be packed"):
        prefill((64, 65), 4)


def test_the_floor_by_hand():
    # H=12, 1x2048, bf16: T (2 H K 2 + HV (2 V 2 + K 2 + 2)) + 2 N HV V K 4
    expected = 2048 * (2 * 12 * 128 * 2 + 12 * (2 * 128 * 2 + 128 * 2 + 2)) + 2 * 12 * 128 * 128 * 4
    assert floor_bytes(prefill((2048,), 12)) == expected == 33079296
    no_states = prefill((2048,), 12, flags=("gate", "sigmoid", "norm"))
    assert floor_bytes(no_states) == expected - 2 * 12 * 128 * 128 * 4
    grouped = prefill((512,) * 16, 16, 32)
    assert floor_bytes(grouped) == 8192 * (2 * 16 * 256 + 32 * (512 + 256 + 2)) + 2 * 16 * 32 * 65536
    scalar = prefill((64,), 2, flags=("scalar",), dtype="float32", K=32, V=16)
    assert floor_bytes(scalar) == 64 * (2 * 2 * 32 * 4 + 2 * (2 * 16 * 4 + 4 + 4))


def test_the_floor_of_the_other_operations_by_hand():
    lightning = Case("lightning", "lightning_prefill", (8192,), 64, 64, gate="slopes", flags=())
    assert floor_bytes(lightning) == 8192 * 64 * 128 * 4 * 2
    decode = Case("decode", "kda_decode", (1,) * 64, 32, 32)
    states = 2 * 64 * 32 * 128 * 128 * 4
    assert floor_bytes(decode) == states + 64 * 32 * (5 * 128 + 1) * 2
    half = replace(decode, pool="bfloat16")
    assert floor_bytes(half) == floor_bytes(decode) - states // 2 and half.id != decode.id and half.label != decode.label
    train = Case("kda-train", "kda_train", (128,), 1, 1, flags=())
    inputs, o = 128 * (4 * 128 + 1) * 2, 128 * 128 * 2
    assert floor_bytes(train) == (inputs + o) + (inputs + o) + inputs
