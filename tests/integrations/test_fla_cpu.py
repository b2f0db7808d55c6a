# SPDX-License-Identifier: Apache-2.0
"""What FLA's layers need around the recurrence, on a CPU: each of FLA's modules beside PyTorch's own functions in float64."""

import pytest
import torch
import torch.nn.functional as F

from cula.integrations import fla as cula_fla
from cula.reference import relative_error

pytest.importorskip("fla.layers", reason="needs flash-linear-attention")


@pytest.fixture(autouse=True)
def registered():
    cula_fla.register(cpu_modules=True)
    yield
    cula_fla.unregister()


def rand(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def compare(ours, theirs, *inputs, tolerance=2e-6):
    """Values, and the gradients of all inputs for the same random direction, of two functions of tensors."""
    results = []
    for function, dtype in ((ours, torch.float32), (theirs, torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = sum((y * rand(*y.shape, seed=100 + i).to(dtype)).sum() for i, y in enumerate(outputs))
        results.append([*outputs, *torch.autograd.grad(loss, leaves)])
    for i, (got, want) in enumerate(zip(*results, strict=True)):
        assert got.shape == want.shape and relative_error(got.detach(), want.detach()) < tolerance, f"output or gradient {i}"


@pytest.mark.parametrize("kind", ["rms", "layer", "group"])
@pytest.mark.parametrize("residual", [False, True])
def test_norms(kind, residual):
    from fla.modules.norm.layernorm import group_norm, layer_norm, rms_norm

    x, res, w, b = rand(2, 5, 24), rand(2, 5, 24, seed=1), rand(24, seed=2), rand(24, seed=3)

    def theirs(x, w, b, res=None):
        x = x if res is None else x + res
        if kind == "rms":
            y = F.rms_norm(x, (24,), w, 1e-5) + b
        elif kind == "layer":
            y = F.layer_norm(x, (24,), w, b, 1e-5)
        else:
            y = F.group_norm(x.reshape(-1, 24), 3, w, b, 1e-5).view(x.shape)
        return y if res is None else (y, x)

    def ours(x, w, b, res=None):
        named = {"residual": res, "prenorm": res is not None}
        if kind == "group":
            return group_norm(x, w, b, num_groups=3, **named)
        return (rms_norm if kind == "rms" else layer_norm)(x, w, b, **named)

    compare(ours, theirs, x, w, b, *([res] if residual else []))


@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
@pytest.mark.parametrize("is_rms", [True, False])
def test_gated_norms(activation, is_rms):
    from fla.modules.norm.fused_norm_gate import layer_norm_gated, rms_norm_gated

    def theirs(x, g, w):
        y = F.rms_norm(x, (24,), w, 1e-5) if is_rms else F.layer_norm(x, (24,), w, None, 1e-5)
        return y * (torch.sigmoid(g) if activation == "sigmoid" else F.silu(g))

    ours = rms_norm_gated if is_rms else layer_norm_gated
    compare(
        lambda x, g, w: ours(x, g, w, None, activation=activation, eps=1e-5),
        theirs,
        rand(7, 24),
        rand(7, 24, seed=1),
        rand(24, seed=2),
    )


def test_l2norm():
    from fla.modules.norm.l2norm import l2norm

    compare(l2norm, lambda x: x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6), rand(2, 5, 3, 24))


def test_activations():
    from fla.modules import activations as A

    x, y, w = 3 * rand(2, 5, 24), rand(2, 5, 24, seed=1), rand(10, 24, seed=2)
    compare(A.sigmoid, torch.sigmoid, x)
    compare(A.swish, F.silu, x)
    compare(A.logsigmoid, F.logsigmoid, x)
    compare(lambda x: A.logsigmoid(x, temperature=3.0), lambda x: F.logsigmoid(x) / 3, x)
    compare(A.swiglu, lambda x, y: F.silu(x) * y, x, y)
    compare(lambda x, y, w: A.swiglu_linear(x, y, w, None), lambda x, y, w: F.linear(F.silu(x) * y, w), x, y, w)


def convolution(x, w, past):
    """SiLU of a causal convolution by channel of [T, D] after [W, D] inputs."""
    padded = torch.cat([past[1:], x]).t().unsqueeze(0)
    return F.silu(F.conv1d(padded, w.unsqueeze(1), groups=w.shape[0])[0].t())


@pytest.mark.parametrize("cuts", [None, [0, 5, 5, 12]])
@pytest.mark.parametrize("has_state", [False, True])
def test_short_convolution(cuts, has_state):
    """Dense and packed (an empty sequence too), from states and to states; states hold the last W inputs."""
    from fla.modules.causal_conv1d import causal_conv1d

    B, T, D, W = 1 if cuts else 2, 12, 6, 4
    N = len(cuts) - 1 if cuts else B
    x, w, h = rand(B, T, D), rand(D, W, seed=1), rand(N, D, W, seed=2)
    cu_seqlens = torch.tensor(cuts) if cuts else None

    def theirs(x, w, h=None):
        parts = [x[0, a:b] for a, b in zip(cuts, cuts[1:])] if cuts else list(x)  # noqa: RUF007
        pasts = [torch.zeros(W, D, dtype=x.dtype) if h is None else h[n].t() for n in range(N)]
        ys = [convolution(p, w, past) for p, past in zip(parts, pasts) if len(p)]
        states = torch.stack([torch.cat([past, p])[-W:].t() for p, past in zip(parts, pasts)])
        return torch.cat(ys)[None] if cuts else torch.stack(ys), states

    def ours(x, w, h=None):
        return causal_conv1d(
            x, w, initial_state=h, output_final_state=True, activation="silu", backend="triton", cu_seqlens=cu_seqlens
        )

    compare(ours, theirs, x, w, *([h] if has_state else []))


def test_short_convolution_by_steps():
    from fla.modules import ShortConvolution

    conv = ShortConvolution(6, 4, activation="silu")
    x = rand(2, 9, 6)
    with torch.no_grad():
        want, want_state = conv(x, output_final_state=True)
        y, state = conv(x[:, :5], output_final_state=True)
        steps = [y]
        for t in range(5, 9):
            y, state = conv(x[:, t : t + 1], cache=state, output_final_state=True)
            steps.append(y)
    assert relative_error(torch.cat(steps, 1), want) < 1e-6 and torch.equal(state, want_state)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"reduction": "sum"}], ids=str)
def test_cross_entropy(options):
    from fla.modules import FusedCrossEntropyLoss, FusedLinearCrossEntropyLoss

    target = torch.tensor([3, 0, -100, 9, 1])
    compare(lambda z: FusedCrossEntropyLoss(**options)(z, target), lambda z: F.cross_entropy(z, target, **options), rand(5, 10))
    compare(
        lambda x, w, b: FusedLinearCrossEntropyLoss(**options)(x, target, w, b),
        lambda x, w, b: F.cross_entropy(F.linear(x, w, b), target, **options),
        rand(5, 8), rand(10, 8, seed=1), rand(10, seed=2),
    )  # fmt: skip


def test_cross_entropy_with_scaled_and_capped_logits():
    from fla.modules import FusedCrossEntropyLoss

    target = torch.tensor([3, 0, -100, 9, 1])
    loss = FusedCrossEntropyLoss(logit_scale=0.7, logit_softcapping=2.0, lse_square_scale=0.1)

    def theirs(z):
        z = 2 * torch.tanh(0.7 * z / 2)
        counts = target != -100
        return (F.cross_entropy(z, target, reduction="sum") + 0.1 * z.logsumexp(-1).square()[counts].sum()) / counts.sum()

    compare(lambda z: loss(z, target), theirs, rand(5, 10))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offset", [0, torch.tensor([0, 3])], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_rotary_embedding(interleaved, offset, packed):
    from fla.modules.rotary.ops import rotary_embedding, rotary_embedding_ref

    T, R = 7, 4
    angles = rand(12, R, seed=1)
    cuts = torch.tensor([0, 3, 7])
    starts = offset if isinstance(offset, torch.Tensor) else torch.full((2,), offset)
    if packed:
        at = torch.cat([torch.arange(3) + starts[0], torch.arange(4) + starts[1]])[None]
    else:
        at = torch.arange(T)[None] + starts[:, None]

    def theirs(x):
        cos, sin = angles.double().cos()[at], angles.double().sin()[at]
        return torch.stack([rotary_embedding_ref(x[b], cos[b], sin[b], interleaved) for b in range(x.shape[0])])

    def ours(x):
        named = {"seqlen_offsets": offset, "cu_seqlens": cuts if packed else None, "interleaved": interleaved}
        return rotary_embedding(x, angles.cos(), angles.sin(), **named)

    compare(ours, theirs, rand(1 if packed else 2, T, 3, 10))


def test_a_gpu_keeps_flas_kernels():
    from cula.integrations.fla_cpu import _is_on_cpu

    assert _is_on_cpu(eps=1, x=torch.empty(1)) == (True, "only for CPU tensors")
    assert not _is_on_cpu(torch.empty(1, device="meta"))[0]
