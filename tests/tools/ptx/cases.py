# SPDX-License-Identifier: Apache-2.0
"""Small problems for the test kernels: run one in an order, and get the largest error relative to float64."""

import torch

from tools.ptx import compiled, simulate

HOPPER, BLACKWELL = ("tests.support.kernels.hopper",), ("tests.support.kernels.blackwell",)
NAN = float("nan")


def randn(*shape, scale=1.0, dtype=torch.bfloat16):
    return (torch.randn(*shape) * scale).to(dtype)


def error(got, want):
    """Relative to the largest element; NaN where anything is NaN."""
    return ((got.double() - want).abs().max() / want.abs().max()).item()


def scale(plus):
    def case(run):
        x, y = torch.randn(300), torch.full((300,), NAN)
        run(x, y, 2.0)
        return error(y, 2 * x.double() + plus)

    return case


def tma_pipeline(run):
    """Three tiles and a tail, two heads: more than there are stages, so buffers are used again."""
    T, H, n = 330, 2, 6
    x, y, s = randn(T, H, 128), torch.full((T, H, 128), NAN).bfloat16(), torch.full((n, H, 128), NAN)
    run(x, y, s, 0.5)
    want = (0.5 * x.double() + (torch.arange(T) / 64)[:, None, None]).bfloat16().double()
    padded = torch.zeros(64 * n, H, 128, dtype=torch.float64)
    padded[:T] = x.double()
    return max(error(y, want), error(s, padded.view(n, 64, H, 128).sum(1)))


def product(form, dtype=torch.bfloat16):
    def case(run):
        a, b = randn(2, 64, 128, dtype=dtype), randn(2, 64 if form == "tn" else 128, 128, dtype=dtype)
        A, B = a.double(), b.double()
        want = {"nt": lambda: A @ B.mT, "nn": lambda: A @ B, "tn": lambda: A.mT @ B}[form]()
        c = torch.full(want.shape, NAN)
        run(a, b, c)
        return error(c, want)

    return case


def warp_product(dtype):
    def case(run):
        a, b, c = (randn(2, 64, 64, dtype=dtype) for _ in range(3))
        want = a.double() @ b.double()
        run(a, b, c.fill_(NAN))
        return error(c, want.to(dtype).double())

    return case


def chain(run):
    T, H = 100, 2
    q, k, v = (randn(T, H, 128, scale=0.3) for _ in range(3))
    o = torch.full((T, H, 128), NAN)
    run(q, k, v, o)
    want = []
    for t in range(0, T, 64):
        a, b, c = (x[t : t + 64].double().transpose(0, 1) for x in (q, k, v))
        want.append(((a @ b.mT).tril().bfloat16().double() @ c).transpose(0, 1))
    return error(o, torch.cat(want))


def exchange(run):
    """Two clusters of two blocks, five rounds: barriers go through both phases more than once."""
    x, y = randn(4, 5, 64, 128), torch.full((4, 5, 64, 128), NAN)
    run(x, y)
    return error(y, (x.float() + x.float()[[1, 0, 3, 2]]).double())


def share(run):
    """Two clusters whose blocks load halves for each other, five rounds."""
    x, y = randn(2, 5, 64, 128), torch.full((4, 5, 64, 128), NAN)
    run(x, y)
    return error(y, x.double().repeat_interleave(2, 0))


def umma(has_second):
    def case(run):
        q, k, v = (randn(2, 128, 128, scale=0.3) for _ in range(3))
        o = torch.full((2, 128, 128), NAN)
        run(q, k, v, o)
        scores = q.double() @ k.double().mT
        return error(o, scores.bfloat16().double() @ v.double() if has_second else scores)

    return case


def umma_pair(run):
    """Two pairs: each has 256 rows of a, of which a block has 128, and 128 of b, of which it has 64."""
    a, b, c = randn(4, 128, 128, scale=0.3), randn(4, 64, 128, scale=0.3), torch.full((4, 128, 128), NAN)
    run(a, b, c)
    return error(c.view(2, 256, 128), a.double().view(2, 256, 128) @ b.double().view(2, 128, 128).mT)


# name: (modules, architecture, case, tolerance). A score that lies between two bf16 numbers may go either way.
CASES = {
    "scale": (HOPPER, "sm_90a", scale(0), 0.0),
    "two_kernels": (HOPPER, "sm_90a", scale(1), 1e-7),
    "tma_pipeline": (HOPPER, "sm_90a", tma_pipeline, 4e-3),
    **{f"product_{form}": (HOPPER, "sm_90a", product(form), 1e-6) for form in ("nt", "nn", "tn")},
    "product_nn_fp16": (HOPPER, "sm_90a", product("nn", torch.float16), 1e-6),
    "warp_product": (HOPPER, "sm_90a", warp_product(torch.bfloat16), 4e-3),
    "warp_product_fp16": (HOPPER, "sm_90a", warp_product(torch.float16), 5e-4),
    "chain": (HOPPER, "sm_90a", chain, 2e-3),
    "exchange": (HOPPER, "sm_90a", exchange, 0.0),
    "share": (HOPPER, "sm_90a", share, 0.0),
    "umma_product": (BLACKWELL, "sm_100a", umma(False), 1e-6),
    "umma_chain": (BLACKWELL, "sm_100a", umma(True), 2e-3),
    "umma_pair": (BLACKWELL, "sm_100a", umma_pair, 1e-6),
}


def orders_of(name):
    """The two orders that set loads and products apart are for kernels with products that run by themselves."""
    hopper = ("late", "early", "first", "last")
    return (*hopper, "products", "loads") if CASES[name][1] == "sm_100a" else hopper


def compiled_case(name):
    modules, arch, _, _ = CASES[name]
    return compiled(name, arch, modules)


def check(name, order, code=None, races=False):
    """Raise, or return whether the numbers are right. `code`: the kernel, edited. `races`: whether to look for them."""
    *_, case, tolerance = CASES[name]
    torch.manual_seed(0)
    code = compiled_case(name) if code is None else code
    return case(lambda *arguments: simulate(code, *arguments, order=order, races=races)) <= tolerance
