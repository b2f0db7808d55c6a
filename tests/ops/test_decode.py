# SPDX-License-Identifier: Apache-2.0
"""Decode on every backend: against the recurrence, against prefill, and with a pool whose other slots are poisoned."""

import pytest
import torch

import cula
from cula import reference
from cula.core.family import FAMILIES
from cula.reference import relative_error
from tests.support.calls import TOLERANCE, KdaCall, LightningCall

SLOTS = 7


def kda_arguments(call: KdaCall, device):
    tensors = call.tensors(device)
    tensors.pop("initial_state")
    tensors.pop("cu_seqlens")
    return tensors, call.switches()


def poisoned_pool(call, rows, device, dtype=torch.float32):
    """A pool that is NaN in every slot that no row names, and first states for the rows that name one."""
    gen = torch.Generator().manual_seed(7)
    pool = torch.full((SLOTS, call.HV, call.V, call.K), float("nan"))
    for slot in rows:
        if slot >= 0:
            pool[slot] = torch.randn(call.HV, call.V, call.K, generator=gen)
    return pool.to(device, dtype)


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


CALLS = [
    KdaCall(T=1, B=3),
    KdaCall(T=1, B=3, H=2, HV=4, K=64, V=32),
    KdaCall(T=1, B=3, gate="softplus", norm=True, beta="sigmoid"),
    KdaCall(T=1, B=3, gate="bounded", norm=True, beta="negative"),
    KdaCall(T=1, B=3, gate="bounded", no_A_log=True),
    KdaCall(T=1, B=3, scalar_gate=True, gate="softplus"),
    KdaCall(T=4, B=3),
    KdaCall(T=8, B=3, decay=50.0),
    KdaCall(T=1, B=3, dtype=torch.bfloat16, gate="softplus", norm=True, beta="sigmoid", gate_dtype=torch.bfloat16),
    KdaCall(T=2, B=3, dtype=torch.float16),
    KdaCall(T=1, B=3, K=60, V=100, gate="softplus", norm=True, beta="sigmoid"),
    KdaCall(T=3, B=3, K=33, V=12),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_kda_decode_matches_the_recurrence(backend, device, call, layout):
    tensors, switches = kda_arguments(call, device)
    rows = [5, -1, 2]
    pool = poisoned_pool(call, rows, device)
    before = pool.clone()
    stored = pool.transpose(-1, -2).contiguous() if layout == "kv" else pool
    o, returned = cula.cula_decode(
        **tensors, **switches, state=stored, state_indices=torch.tensor(rows, device=device), state_layout=layout, backend=backend
    )
    assert returned is stored
    pool = stored.transpose(-1, -2) if layout == "kv" else stored
    first = before[[5, 2, 2]]
    want_o, want_state = reference.kda(**tensors, **switches, initial_state=first)
    live = [0, 2]
    assert relative_error(o[live], want_o[live]) < TOLERANCE[call.dtype]
    assert relative_error(pool[[5, 2]], want_state[live]) < TOLERANCE[call.dtype]
    assert not o[1].any(), "a padded row's output is zero"
    others = [0, 1, 3, 4, 6]
    assert same_bits(pool[others], before[others]), "slots that no row names are untouched"


@pytest.mark.parametrize(("T", "norm"), [(1, False), (5, False), (2, True)])
def test_lightning_decode_matches_the_recurrence(backend, device, T, norm):
    call = LightningCall(T=T, B=3, H=2, HV=4)
    tensors = call.tensors(device)
    q, k, v, decay = (tensors[n] for n in ("q", "k", "v", "decay"))
    rows = [0, 3, -1]
    pool = poisoned_pool(call, rows, device)
    before = pool.clone()
    indices = torch.tensor(rows, device=device, dtype=torch.int32)
    o, _ = cula.cula_decode(
        q, k, v, pool, mode="lightning", decay=decay, state_indices=indices, use_qk_l2norm_in_kernel=norm, backend=backend
    )
    if norm:
        q, k = (t / (t.double().square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    want_o, want_state = reference.lightning(q, k, v, decay, initial_state=before[[0, 3, 3]])
    assert relative_error(o[:2], want_o[:2]) < TOLERANCE[call.dtype]
    assert relative_error(pool[[0, 3]], want_state[:2]) < TOLERANCE[call.dtype]
    assert not o[2].any()
    assert same_bits(pool[[1, 2, 4, 5, 6]], before[[1, 2, 4, 5, 6]])


def test_many_states_take_other_tiles(backend, device, monkeypatch):
    if backend != "triton":
        pytest.skip("tiles are Triton's")
    from cula.ops.triton import decode

    sizes = []
    tiles = lambda problem, BK, of=decode._tiles: sizes.append(of(problem, BK)) or sizes[-1]
    monkeypatch.setattr(decode, "_tiles", tiles)
    call = LightningCall(T=1, B=2, H=1, HV=1, K=128, V=128)
    q, k, v, decay = (call.tensors(device)[n] for n in ("q", "k", "v", "decay"))
    start = torch.randn(2, 1, 128, 128, generator=torch.Generator().manual_seed(3)).to(device, torch.bfloat16)
    want_o, want_state = reference.lightning(q, k, v, decay, initial_state=start)
    for many in (decode.MANY_STATES, 1):
        monkeypatch.setattr(decode, "MANY_STATES", many)
        for family in FAMILIES.values():  # records with the other tiles are not for these
            family.decode.replay.forget()
        pool = start.transpose(-1, -2).contiguous()
        o, _ = cula.cula_decode(q, k, v, pool, mode="lightning", decay=decay, state_layout="kv", backend=backend)
        assert relative_error(o, want_o) < TOLERANCE[torch.float32]
        assert relative_error(pool.transpose(-1, -2), want_state) < TOLERANCE[torch.bfloat16]
    assert len(set(sizes)) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("call", [c for c in CALLS if c.gate == "softplus"], ids=str)
def test_parameters_in_16_bits_are_read_exactly(backend, device, call, dtype):
    """As engines have them, and A_log in Kimi-Linear's shape: the same bits as with these numbers in float32."""
    tensors, switches = kda_arguments(call, device)
    A_log, dt_bias = tensors["A_log"].to(dtype), tensors["dt_bias"].to(dtype)
    results = []
    for parameters in (
        {"A_log": A_log.view(1, 1, -1, 1), "dt_bias": dt_bias.flatten()},
        {"A_log": A_log.float(), "dt_bias": dt_bias.float()},
    ):
        pool = poisoned_pool(call, [0, 1, 2], device)[:3]
        o, _ = cula.cula_decode(**tensors | parameters, **switches, state=pool, backend=backend)
        results.append((o, pool))
    assert same_bits(results[0][0], results[1][0]) and same_bits(results[0][1], results[1][1])


def test_packed_rows_equal_rows(backend, device):
    call = KdaCall(T=1, B=3)
    tensors, switches = kda_arguments(call, device)
    packed = {n: t.transpose(0, 1) if n in ("q", "k", "v", "g", "beta") and t is not None else t for n, t in tensors.items()}
    pools = [poisoned_pool(call, [5, 1, 2], device) for _ in range(2)]
    indices = torch.tensor([5, 1, 2], device=device)
    o, _ = cula.cula_decode(**tensors, **switches, state=pools[0], state_indices=indices, backend=backend)
    o_packed, _ = cula.cula_decode(**packed, **switches, state=pools[1], state_indices=indices, backend=backend)
    assert o_packed.shape == (1, 3, call.HV, call.V)
    assert torch.equal(o_packed.transpose(0, 1), o)
    assert same_bits(pools[0], pools[1])


def test_without_indices_row_n_is_slot_n(backend, device):
    call = KdaCall(T=1, B=SLOTS)
    tensors, switches = kda_arguments(call, device)
    pool = poisoned_pool(call, range(SLOTS), device)
    want_o, want_state = reference.kda(**tensors, **switches, initial_state=pool)
    o, _ = cula.cula_decode(**tensors, **switches, state=pool, backend=backend)
    assert relative_error(o, want_o) < TOLERANCE[call.dtype]
    assert relative_error(pool, want_state) < TOLERANCE[call.dtype]


def test_slot_zero_may_mark_padding(backend, device):
    call = KdaCall(T=1, B=3)
    tensors, switches = kda_arguments(call, device)
    pool = poisoned_pool(call, [4], device)
    before = pool.clone()
    o, _ = cula.cula_decode(
        **tensors,
        **switches,
        state=pool,
        state_indices=torch.tensor([0, 4, -1], device=device),
        null_index="nonpositive",
        backend=backend,
    )
    assert not o[[0, 2]].any()
    assert o[1].any()
    assert same_bits(pool[[0, 1, 2, 3, 5, 6]], before[[0, 1, 2, 3, 5, 6]])


@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float16])
def test_a_pool_may_have_a_padded_slot_stride_and_half_states(backend, device, pool_dtype):
    call = KdaCall(T=1, B=2)
    tensors, switches = kda_arguments(call, device)
    size = call.HV * call.V * call.K
    storage = torch.full((SLOTS, size + 32), 3.0, device=device, dtype=pool_dtype)
    pool = storage[:, :size].view(SLOTS, call.HV, call.V, call.K)
    pool.normal_(generator=torch.Generator(device).manual_seed(3))
    want_o, want_state = reference.kda(**tensors, **switches, initial_state=pool[[6, 1]])
    strided = torch.tensor([6, 0, 0, 1, 0, 0], device=device, dtype=torch.int32)[::3]
    o, _ = cula.cula_decode(**tensors, **switches, state=pool, state_indices=strided, backend=backend)
    assert relative_error(o, want_o) < TOLERANCE[torch.float32]
    assert relative_error(pool[[6, 1]], want_state) < TOLERANCE[pool_dtype]
    assert bool((storage[:, size:] == 3).all()), "the padding between slots is untouched"


def test_the_stride_of_a_single_head_is_never_taken(backend, device):
    """A pool of one head with heads in front of slots has contiguous slots, whatever the stride of that head."""
    tensors, switches = kda_arguments(KdaCall(T=1, B=3, HV=1), device)
    heads_first = torch.randn(1, SLOTS, 32, 32, device=device)
    pools = [heads_first.clone().transpose(0, 1), heads_first[0, :, None].clone()]
    assert pools[0].stride(1) != pools[1].stride(1)
    slots = torch.tensor([5, -1, 2], device=device)
    outputs = [
        cula.cula_decode(**tensors, **switches, state=pool, state_indices=slots, backend=backend)[0] for pool in pools
    ]  # fmt: skip
    assert torch.equal(*outputs) and torch.equal(*pools)


def test_out_takes_the_result(backend, device):
    call = KdaCall(T=2, B=2)
    tensors, switches = kda_arguments(call, device)
    pools = [poisoned_pool(call, [0, 1], device) for _ in range(2)]
    indices = torch.tensor([0, 1], device=device)
    out = torch.full((2, 2, call.HV, 2 * call.V), 9.0, device=device)[..., : call.V]  # rows are strided
    o, _ = cula.cula_decode(**tensors, **switches, state=pools[0], state_indices=indices, out=out, backend=backend)
    want, _ = cula.cula_decode(**tensors, **switches, state=pools[1], state_indices=indices, backend=backend)
    assert o is out
    assert torch.equal(out, want)


def test_commit_false_leaves_the_pool_alone(backend, device):
    call = KdaCall(T=3, B=2)
    tensors, switches = kda_arguments(call, device)
    pool = poisoned_pool(call, [3, 6], device)
    before = pool.clone()
    buffer = torch.full((2, 3, call.HV, call.V, call.K), float("nan"), device=device)
    o, _ = cula.cula_decode(
        **tensors,
        **switches,
        state=pool,
        state_indices=torch.tensor([3, 6], device=device),
        intermediate_states=buffer,
        commit=False,
        backend=backend,
    )
    assert same_bits(pool, before)
    for t in range(3):
        so_far = {n: x[:, : t + 1] if n in ("q", "k", "v", "g", "beta") else x for n, x in tensors.items()}
        want_o, want_state = reference.kda(**so_far, **switches, initial_state=before[[3, 6]])
        assert relative_error(buffer[:, t], want_state) < TOLERANCE[call.dtype]
    assert relative_error(o, want_o) < TOLERANCE[call.dtype]


@pytest.mark.parametrize("slots", ["buffer", "token slots"])
def test_rejected_drafts_roll_back(backend, device, slots):
    """Two calls of 3 drafts; of the first call's drafts, rows accept 1, all, and 2."""
    call = KdaCall(T=3, B=3)
    tensors, switches = kda_arguments(call, device)
    later, _ = kda_arguments(call.with_(seed=5), device)
    accepted = [1, 3, 2]
    indices = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8]], device=device)
    pool = torch.randn(9, call.HV, call.V, call.K, generator=torch.Generator().manual_seed(2)).to(device)
    first_states = pool[indices[:, 0]].clone()
    kwargs = {"state_indices": indices}
    if slots == "buffer":
        buffer = torch.full((3, 3, call.HV, call.V, call.K), float("nan"), device=device)
        kwargs = {"state_indices": indices[:, 0], "intermediate_states": buffer}
    cula.cula_decode(**tensors, **switches, state=pool, backend=backend, **kwargs)
    count = torch.tensor(accepted, device=device, dtype=torch.int32)
    o, _ = cula.cula_decode(**later, **switches, state=pool, num_accepted_tokens=count, backend=backend, **kwargs)
    for n, a in enumerate(accepted):
        joined = {
            name: torch.cat([tensors[name][n : n + 1, :a], later[name][n : n + 1]], 1) for name in ("q", "k", "v", "g", "beta")
        }
        want_o, want_state = reference.kda(**joined, **switches, initial_state=first_states[n : n + 1])
        assert relative_error(o[n], want_o[0, a:]) < TOLERANCE[call.dtype]
        last = pool[indices[n, 0]] if slots == "buffer" else pool[indices[n, 2]]
        assert relative_error(last, want_state[0]) < TOLERANCE[call.dtype]


def test_zero_accepted_starts_from_the_slot(backend, device):
    call = KdaCall(T=2, B=2)
    tensors, switches = kda_arguments(call, device)
    pool = poisoned_pool(call, [0, 1], device)
    buffer = torch.full((2, 2, call.HV, call.V, call.K), float("nan"), device=device)
    want_o, _ = reference.kda(**tensors, **switches, initial_state=pool[:2])
    o, _ = cula.cula_decode(
        **tensors,
        **switches,
        state=pool,
        state_indices=torch.tensor([0, 1], device=device),
        num_accepted_tokens=torch.zeros(2, dtype=torch.int64, device=device),
        intermediate_states=buffer,
        backend=backend,
    )
    assert relative_error(o, want_o) < TOLERANCE[call.dtype]


def test_decode_continues_a_prefill(backend, device):
    call = KdaCall(T=20, B=2, gate="softplus", norm=True, beta="sigmoid", initial_state=False)
    tensors, switches = kda_arguments(call, device)
    want_o, want_state = reference.kda(**tensors, **switches)
    cut = {n: t[:, :15] if n in ("q", "k", "v", "g", "beta") else t for n, t in tensors.items()}
    _, state = cula.cula_kda(**cut, **switches, output_final_state=True, backend=backend)
    outputs = []
    for t in range(15, 20):
        token = {n: x[:, t : t + 1] if n in ("q", "k", "v", "g", "beta") else x for n, x in tensors.items()}
        o, _ = cula.cula_decode(**token, **switches, state=state, backend=backend)
        outputs.append(o)
    assert relative_error(torch.cat(outputs, 1), want_o[:, 15:]) < TOLERANCE[call.dtype]
    assert relative_error(state, want_state) < TOLERANCE[call.dtype]


@pytest.mark.parametrize("mode", ["kda", "gdn", "lightning"])
@pytest.mark.parametrize("keeps", ["nothing", "buffer", "token slots"])
def test_ragged_rows_equal_their_definition(backend, device, mode, keeps):
    """Rows of 2, 0, 3 and 1 tokens behind each other, the last of them padding; states of drafts kept by row numbers."""
    call = KdaCall(lens=(2, 0, 3, 1), H=1, scalar_gate=mode == "gdn", gate="softplus", norm=True, beta="sigmoid")
    tensors = call.tensors(device)
    own = {n: tensors[n] for n in ("q", "k", "v")}
    if mode == "lightning":
        own["decay"] = torch.tensor([0.1, 0.5], device=device)
    else:
        own |= {n: tensors[n] for n in ("g", "beta", "A_log", "dt_bias")}
        own |= {n: v for n, v in call.switches().items() if n != "lower_bound"}
    gen = torch.Generator().manual_seed(2)
    normal = lambda *shape: torch.randn(*shape, generator=gen).to(device)
    slots = torch.tensor([9, 0, 6, -1], device=device)
    common = {"mode": mode, "cu_seqlens": tensors["cu_seqlens"], "state_indices": slots}
    if keeps == "token slots":
        common["state_indices"] = torch.tensor([[9, 8, 7], [0, 1, 2], [6, 5, 4], [-1, 3, 10]], device=device)
    if keeps == "buffer":
        common["intermediate_states"] = normal(7, 5, call.HV, call.V, call.K)
        common["intermediate_state_indices"] = torch.tensor([6, 2, -1, 3], device=device, dtype=torch.int32)
    if keeps != "nothing":
        common["num_accepted_tokens"] = torch.tensor([2, 1, 1, 0], device=device)
    pool = normal(11, call.HV, call.V, call.K)
    want_o, want_pool, want_kept = reference.decode(**own, state=pool, **common)
    o, _ = cula.cula_decode(**own, state=pool, **common, backend=backend)
    assert relative_error(o, want_o) < TOLERANCE[call.dtype] and not o[:, 5].any()
    assert relative_error(pool, want_pool) < TOLERANCE[call.dtype]
    if keeps == "buffer":
        assert relative_error(common["intermediate_states"], want_kept) < TOLERANCE[call.dtype]


def test_one_token_of_several_ragged_rows(backend, device):
    """As many heads as the rows have tokens in all."""
    gen = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 1, 2, 16, generator=gen).to(device) for _ in range(3))
    offsets, decay = torch.tensor([0, 0, 1, 1], device=device), torch.tensor([0.1, 0.5], device=device)
    pool = torch.randn(3, 2, 16, 16, generator=gen).to(device)
    given = {"mode": "lightning", "decay": decay, "cu_seqlens": offsets}
    want_o, want_pool, _ = reference.decode(q, k, v, pool, **given)
    o, _ = cula.cula_decode(q, k, v, pool, **given, backend=backend)
    assert relative_error(o, want_o) < 1e-5 and relative_error(pool, want_pool) < 1e-5


@pytest.mark.parametrize("mode", ["kda", "gdn", "lightning"])
def test_a_call_of_no_rows_does_nothing(backend, device, mode):
    """An engine's rank that has no requests at the moment."""
    pool = torch.randn(3, 2, 32, 16, device=device)
    before = pool.clone()
    qk, v = torch.empty(0, 1, 2, 16, device=device), torch.empty(0, 1, 2, 32, device=device)
    own = {"decay": torch.ones(2, device=device)} if mode == "lightning" else {"g": v[..., 0], "beta": v[..., 0]}
    slots = torch.empty(0, dtype=torch.int32, device=device)
    o, _ = cula.cula_decode(qk, qk, v, pool, mode=mode, **own, state_indices=slots, backend=backend)
    assert o.shape == v.shape and torch.equal(pool, before)
