# SPDX-License-Identifier: Apache-2.0
"""Shapes, dtypes, strides, packing and gates drawn at random: the API against the float64 recurrence."""

import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import cula
from cula import reference
from cula.reference import relative_error
from tests.support.calls import GRADIENT_TOLERANCE, TOLERANCE, KdaCall, LightningCall


def settings(max_examples):
    """The same examples every time: a failure in CI is a failure on the desk."""
    return hypothesis_settings(max_examples=max_examples, deadline=None, derandomize=True)


heads = st.tuples(st.integers(1, 2), st.integers(1, 3)).map(lambda h: {"H": h[0], "HV": h[0] * h[1]})
lengths = st.lists(st.integers(0, 70), min_size=1, max_size=5).map(tuple)
dims = st.sampled_from([1, 8, 16, 24])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])

kda_calls = st.builds(
    lambda heads, **rest: KdaCall(**heads, **rest),
    heads=heads,
    lens=st.none() | lengths,
    T=st.integers(1, 80),
    K=dims,
    V=dims,
    dtype=dtypes,
    gate=st.sampled_from(["log", "softplus", "bounded"]),
    decay=st.sampled_from([0.0, 0.01, 1.0, 5.0, 50.0]),
    scalar_gate=st.booleans(),
    norm=st.booleans(),
    beta=st.sampled_from(["plain", "one", "sigmoid", "negative"]),
    same_keys=st.booleans(),
    initial_state=st.booleans(),
    seed=st.integers(0, 1000),
)
lightning_calls = st.builds(
    lambda heads, **rest: LightningCall(**heads, **rest),
    heads=heads,
    lens=st.none() | lengths,
    T=st.integers(1, 80),
    K=dims,
    V=dims,
    dtype=dtypes,
    decay=st.sampled_from([0.0, 0.1, 5.0]),
    initial_state=st.booleans(),
    seed=st.integers(0, 1000),
)


def restride(t, kind):
    """The same values behind other strides."""
    if t is None or t.dim() < 3:
        return t
    if kind == "padded":
        return torch.nn.functional.pad(t, (0, 3))[..., : t.shape[-1]]
    if kind == "head first":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "dim first":
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    return t


def ill_conditioned(call):
    """Equal keys written with strength up to 2: the state grows and cancels, and float32 holds fewer digits of it."""
    return call.same_keys and call.beta == "negative"


def gradients_vanish(call):
    """Equal keys written with strength 1 overwrite all that came before: gradients are what is left of a cancellation.

    (tests/ops/test_kda.py holds one such call to 1e-5.)
    """
    return call.same_keys and call.beta in ("one", "negative")


strides = st.sampled_from(["plain", "padded", "head first", "dim first"])


@settings(max_examples=60)
@given(call=kda_calls, stride=strides)
def test_kda_is_the_recurrence(call, stride):
    tensors = {n: restride(t, stride) if n in ("q", "k", "v", "g", "beta") else t for n, t in call.tensors().items()}
    o, state = cula.cula_kda(**tensors, **call.switches(), output_final_state=True)
    want_o, want_state = reference.kda(**tensors, **call.switches())
    tolerance = TOLERANCE[call.dtype] * (100 if ill_conditioned(call) else 1)
    assert relative_error(o, want_o) < tolerance
    assert relative_error(state, want_state) < tolerance


@settings(max_examples=25)
@given(call=kda_calls.filter(lambda c: not gradients_vanish(c) and (c.lens is None or sum(c.lens) > 0)))
def test_kda_gradients_are_those_of_the_recurrence(call):
    call = call.with_(dtype=torch.float32, K=max(call.K, 8))  # a normalised key of one channel has no gradient to speak of
    tensors = {n: t.requires_grad_() if t is not None and t.is_floating_point() else t for n, t in call.tensors().items()}
    names = [n for n, t in tensors.items() if t is not None and t.requires_grad]
    leaves = [tensors[n] for n in names]
    o, state = cula.cula_kda(**tensors, **call.switches(), output_final_state=True)
    want_o, want_state = reference.kda(**tensors, **call.switches())
    got = torch.autograd.grad(o.double().cos().sum() + state.double().cos().sum(), leaves)
    want = torch.autograd.grad(want_o.cos().sum() + want_state.cos().sum(), leaves)
    largest = max(float(w.norm()) for w in want)  # a gradient that cancels to nothing beside the others has few digits left
    for name, a, b in zip(names, got, want):
        error = float((a.double() - b.double()).norm()) / max(float(b.norm()), 1e-2 * largest, 1e-30)
        assert error < 2 * GRADIENT_TOLERANCE[torch.float32], f"d{name}: {error:.1e}"


@settings(max_examples=40)
@given(call=lightning_calls, stride=strides)
def test_lightning_is_the_recurrence(call, stride):
    tensors = {n: restride(t, stride) if n in ("q", "k", "v") else t for n, t in call.tensors().items()}
    q, k, v = (tensors.pop(n) for n in ("q", "k", "v"))
    o, state = cula.cula_lightning(q, k, v, **tensors, output_final_state=True)
    want_o, want_state = reference.lightning(**call.tensors())
    assert relative_error(o, want_o) < TOLERANCE[call.dtype]
    assert relative_error(state, want_state) < TOLERANCE[call.dtype]


@settings(max_examples=25)
@given(call=kda_calls.filter(lambda c: not ill_conditioned(c)), data=st.data())
def test_prefill_of_any_prefix_then_decode_is_prefill_of_all(call, data):
    call = call.with_(lens=None, B=2, dtype=torch.float32)
    tensors = call.tensors()
    cut = data.draw(st.integers(0, call.T - 1))
    end = min(call.T, cut + data.draw(st.integers(1, 8)))
    tokens = ("q", "k", "v", "g", "beta")
    whole = {n: t[:, :end] if n in tokens else t for n, t in tensors.items()}
    want_o, want_state = reference.kda(**whole, **call.switches())
    before = {n: t[:, :cut] if n in tokens else t for n, t in tensors.items()}
    _, state = cula.cula_kda(**before, **call.switches(), output_final_state=True)
    after = {n: t[:, cut:end] if n in tokens else t for n, t in tensors.items() if n not in ("initial_state", "cu_seqlens")}
    o, _ = cula.cula_decode(**after, **call.switches(), state=state)
    assert relative_error(o, want_o[:, cut:]) < 2 * TOLERANCE[torch.float32]
    assert relative_error(state, want_state) < 2 * TOLERANCE[torch.float32]


@st.composite
def decode_calls(draw):
    """Keyword arguments of a decode call on a small pool, with every way to name slots."""
    T, N, H, G = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    K, V = draw(dims), draw(dims)
    P = N * T + 2
    mode = draw(st.sampled_from(["kda", "gdn", "lightning"]))
    call = KdaCall(
        T=T,
        B=N,
        H=H,
        HV=H * G,
        K=K,
        V=V,
        gate=draw(st.sampled_from(["log", "softplus"] if mode == "gdn" else ["log", "softplus", "bounded"])),
        scalar_gate=mode == "gdn",
        seed=draw(st.integers(0, 99)),
    )
    tensors = call.tensors()
    arguments = {n: tensors[n] for n in ("q", "k", "v")} | {"mode": mode, "commit": draw(st.booleans())}
    if mode != "lightning":
        arguments |= {n: tensors[n] for n in ("g", "beta", "A_log", "dt_bias")} | call.switches()
    else:
        arguments["decay"] = torch.rand(H * G)
    gen = torch.Generator().manual_seed(call.seed)
    slots = torch.randperm(P, generator=gen)
    if mode == "gdn":
        del arguments["lower_bound"]  # the definition has none
    arguments["null_index"] = draw(st.sampled_from(["negative", "nonpositive"]))
    per_token = draw(st.booleans())
    indices = slots[: N * T].view(N, T) if per_token else slots[:N]
    padding = torch.tensor(draw(st.lists(st.booleans(), min_size=N, max_size=N)))
    arguments["state_indices"] = torch.where(padding[:, None] if per_token else padding, -1, indices)
    if draw(st.booleans()):
        arguments["intermediate_states"] = torch.randn(N, T, H * G, V, K, generator=gen)
    if per_token or "intermediate_states" in arguments:
        arguments["num_accepted_tokens"] = draw(st.none() | st.just(torch.randint(0, T + 1, (N,), generator=gen)))
    arguments["state"] = torch.randn(P, H * G, V, K, generator=gen)
    if draw(st.booleans()):  # ragged: of each row some tokens, behind each other
        lengths = draw(st.lists(st.integers(0, T), min_size=N, max_size=N).filter(any))
        of_rows = torch.cat([n * T + torch.arange(length) for n, length in enumerate(lengths)])
        for name in ("q", "k", "v", "g", "beta"):
            if name in arguments:
                arguments[name] = arguments[name].flatten(0, 1)[of_rows][None]
        arguments["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    return arguments


@settings(max_examples=60)
@given(arguments=decode_calls())
def test_decode_is_its_definition(arguments):
    want_o, want_pool, want_kept = reference.decode(**arguments)
    o, pool = cula.cula_decode(**arguments)
    assert relative_error(o, want_o) < 1e-5
    assert relative_error(pool, want_pool) < 1e-5
    if want_kept is not None:
        assert relative_error(arguments["intermediate_states"], want_kept) < 1e-5
