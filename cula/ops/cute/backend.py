# SPDX-License-Identifier: Apache-2.0
"""Hand-tuned kernels, one backend an architecture."""

from __future__ import annotations

import torch

from cula.core.checks import word
from cula.core.dispatch import AnyProblem, Backend
from cula.core.problem import DecodeProblem
from cula.kda.problem import KdaProblem
from cula.ops.cute.toolchain import loader

CUTE_LIGHTNING_HEAD_DIMS = (64, 128)


def _cute_sm90_why_not(op: str, problem: AnyProblem) -> str | None:
    if op not in ("kda_fwd", "lightning_fwd", "decode"):
        return f"has no kernel for {op}"
    reason = _cute_why_not(problem, ((9, 0),))
    if reason is None and isinstance(problem, KdaProblem):
        reason = _cute_why_not_kda(problem)
    elif reason is None and isinstance(problem, DecodeProblem):
        reason = _cute_why_not_decode(problem)
    elif reason is None and (problem.K != problem.V or problem.K not in CUTE_LIGHTNING_HEAD_DIMS):
        reason = f"takes head dims K = V of {CUTE_LIGHTNING_HEAD_DIMS}, and this call has K = {problem.K}, V = {problem.V}"
    return reason or loader.missing("sm_90a")


def _cute_sm100_why_not(op: str, problem: AnyProblem) -> str | None:
    if op != "kda_fwd" or not isinstance(problem, KdaProblem):
        return f"has no kernel for {op}"
    from cula.ops.cute import kda  # with the kernels' host side, which most machines have no use for
    from cula.ops.cute.toolchain import self_check

    reason = _cute_why_not(problem, ((10, 0), (10, 3))) or _cute_why_not_kda(problem)
    return reason or loader.missing(kda.ARCH_OF[problem.sm]) or self_check.objection(problem)


def _cute_how(op: str, problem: AnyProblem) -> str | None:
    gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
    if not isinstance(problem, KdaProblem) or gpu is None or torch.cuda.get_device_capability(gpu) != problem.sm:
        return None
    from cula.ops.cute import kda  # see above

    return kda.how(problem, torch.cuda.get_device_properties(gpu).multi_processor_count)


def _cute_why_not(problem: AnyProblem, sms: tuple[tuple[int, int], ...]) -> str | None:
    """What no CuTe kernel for these compute capabilities takes."""
    if problem.sm not in sms:
        where = f"the tensors are on {problem.device}" if problem.sm is None else f"this GPU has {problem.sm[0]}.{problem.sm[1]}"
        return f"needs compute capability {' or '.join(f'{major}.{minor}' for major, minor in sms)}, and {where}"
    if problem.dtype != torch.bfloat16:
        return f"takes bfloat16, and this call has {word(problem.dtype)}"
    if not problem.T or not problem.N:
        return "takes at least one token"
    return None


def _cute_why_not_kda(p: KdaProblem) -> str | None:
    if p.K != 128 or p.V != 128:
        return f"takes K = V = 128, and this call has K = {p.K}, V = {p.V}"
    if p.gate == "softplus":
        return "has no softplus gate: pass lower_bound, or log decays"
    if p.gate == "log" and not p.options.safe_gate and not p.has_scalar_gate:
        return "needs decays of -5 or more a token: lower_bound with the gate in the kernel, or safe_gate=True with log decays"
    for name, dtype in (("g", p.g_dtype), ("beta", p.beta_dtype)):
        if dtype not in (torch.bfloat16, torch.float32):
            return f"takes {name} in bfloat16 or float32, and this call has {word(dtype)}"
    if p.B * p.T // 64 + p.N >= 2**16:
        return "numbers chunks of 64 tokens with 16 bits: fewer than 2^22 tokens a call"
    if (p.B * p.T + 64 * p.N) * p.HV >= 2**25:
        return "indexes its workspace with 32 bits: fewer than 2^25 tokens times value heads a call"
    if p.options.return_intermediate_states:
        return "does not return intermediate states"
    if p.options.disable_recompute and p.needs_grad:
        return "keeps nothing for the backward, which disable_recompute=True asks for"
    return None


def _cute_why_not_decode(p: DecodeProblem) -> str | None:
    if p.T == 1 and p.pool_dtype == torch.float32:
        return "takes 2 to 8 tokens a row on float32 states: with one, Triton's kernel runs at the memory's speed"
    if p.T == 1 and p.has_scalar_gate:
        return "takes one gate a channel where a row has one token"
    if p.K != 128 or p.V != 128:
        return f"takes K = V = 128, and this call has K = {p.K}, V = {p.V}"
    if p.has_token_indices or p.has_accepted or p.has_intermediate_states:
        return "does not keep the states of draft tokens"
    if p.options.state_is_kv:
        return "takes pools [P, HV, V, K], and this one is [P, HV, K, V]"
    for name, dtype in (("g", p.g_dtype), ("beta", p.beta_dtype)):
        if dtype not in (None, torch.bfloat16, torch.float32):
            return f"takes {name} in bfloat16 or float32, and this call has {word(dtype)}"
    if not p.has_aligned_slots:
        return "reads 16 bytes at a time, and slots of the pool do not begin at multiples of that"
    if p.N >= 2**16 or p.HV >= 2**16:
        return "takes fewer than 2^16 rows and value heads a call"
    return None


BACKENDS: tuple[Backend, ...] = (
    Backend(
        "cute_sm90",
        "cula.ops.cute",
        "hand-tuned kernels for Hopper, CuTe DSL",
        _cute_sm90_why_not,
        device="cuda",
        requires=("tvm_ffi",),
        install="pip install 'cuda-linear-attention[cute]'",
        how=_cute_how,
    ),
    Backend(
        "cute_sm100",
        "cula.ops.cute",
        "KDA prefill for Blackwell, CuTe DSL; never run on hardware: checks itself at first use",
        _cute_sm100_why_not,
        device="cuda",
        requires=("tvm_ffi",),
        install="pip install 'cuda-linear-attention[cute]'",
        how=_cute_how,
    ),
)
