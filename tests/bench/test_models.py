# SPDX-License-Identifier: Apache-2.0
"""The suite "models": calls on pools, with float32 gates, drafts that keep states; and peers that have no pools."""

from dataclasses import replace

import pytest
import torch

from cula.bench import check, floor, suites
from cula.bench.cases import Case
from cula.bench.inputs import make
from cula.bench.ours import Cula
from cula.bench.peers import on_a_pool

CPU = torch.device("cpu")
SMALL = Case("models", "kda_prefill", (40, 40), 2, 2, 16, 16, "fast", "float32", ("norm", "pool", "f32"), True, model="a model")


def test_every_model_is_called_for_prompts_tokens_and_drafts():
    cases = suites.build(["models"], "cuda")
    assert {c.op for c in cases} >= {"kda_prefill", "kda_decode", "lightning_prefill", "lightning_decode"}
    names = {c.model.split(" TP")[0] for c in cases}
    assert {"Kimi-Linear-48B", "Kimi-K3", "Ling-3.0-Flash", "MiniMax-Text-01"} <= names
    for name in names:
        of_model = [c for c in cases if c.model.startswith(name)]
        assert {(c.N, c.lens[0]) for c in of_model if c.is_decode} == {(1, 1), (64, 1), (256, 1), (64, 4)}
        assert {(c.N, c.lens[0]) for c in of_model if not c.is_decode} == {(1, 8192), (8, 2048), (1, 65536)}
        assert all(c.has("keep") == (c.lens[0] > 1) for c in of_model if c.is_decode)
    assert all(c.label.startswith(c.model) for c in cases)


@pytest.mark.parametrize("op", ["kda_prefill", "lightning_prefill"])
def test_a_prefill_on_a_pool_is_right(op):
    x = make(replace(SMALL, op=op), CPU)
    part = check.choose_slice(x.case, CPU)
    call = Cula().prepare(x)
    found = check.errors(call.read(call.run()), check.expected(x, part), x.case, part)
    assert set(found) == {"o", "state"}
    assert max(found.values()) < 1e-5


def test_a_peer_without_pools_gathers_and_scatters():
    x = make(SMALL, CPU)
    part = check.choose_slice(x.case, CPU)
    ours = Cula()

    def forward(h0):
        function, args, options = ours.call(x)
        del options["state_pool"], options["initial_state_indices"]
        return function(*args, **options, initial_state=h0, output_final_state=True)

    call = on_a_pool(x, forward)
    assert "gathered" in call.note
    found = check.errors(call.read(call.run()), check.expected(x, part), x.case, part)
    assert max(found.values()) < 1e-5


def test_drafts_keep_their_states():
    case = Case("models", "kda_decode", (4, 4), 2, 2, 16, 16, "fast", "float32", ("gate", "norm", "keep"))
    x = make(case, CPU)
    part = check.choose_slice(case, CPU)
    call = Cula().prepare(x)
    assert max(check.errors(call.read(call.run()), check.expected(x, part), case, part).values()) < 1e-5


def test_qwens_bias_has_the_dtype_of_its_tokens():
    of_qwen = [c for c in suites.build(["models"], "cuda") if c.model.startswith("Qwen")]
    assert all(c.has("bias") == c.is_decode for c in of_qwen)
    case = Case("models", "gdn_decode", (1, 1), 2, 4, 16, 16, "init", "bfloat16", ("gate", "sigmoid", "norm", "bias"))
    x = make(case, CPU)
    assert x.dt_bias.dtype == torch.bfloat16 and x.A_log.dtype == torch.float32
    part = check.choose_slice(case, CPU)
    call = Cula().prepare(x)
    errors = check.errors(call.read(call.run()), check.expected(x, part), case, part)
    assert errors["o"] < 2.2e-3 and errors["state"] < 1e-5


def test_floors_count_what_moves():
    plain = replace(SMALL, flags=("norm", "h0", "ht"), dtype="bfloat16")
    pool = replace(plain, flags=("norm", "pool"))
    assert floor.floor_bytes(pool) == floor.floor_bytes(plain)
    gates = 80 * 2 * (16 + 1)  # tokens, heads, channels and beta
    assert floor.floor_bytes(replace(plain, flags=(*plain.flags, "f32"))) == floor.floor_bytes(plain) + gates * (4 - 2)
    halved = replace(pool, pool="bfloat16")
    assert floor.floor_bytes(pool) - floor.floor_bytes(halved) == 2 * 2 * 2 * 16 * 16 * 2
    drafts = Case("models", "kda_decode", (4, 4), 2, 2, 16, 16)
    kept = replace(drafts, flags=(*drafts.flags, "keep"))
    assert floor.floor_bytes(kept) - floor.floor_bytes(drafts) == 2 * 4 * 2 * 16 * 16 * 4
