# SPDX-License-Identifier: Apache-2.0
"""Hand-tuned kernels: a backend for each architecture of `archs.py`, and what none of their kernels takes.

What the kernels of a family take is said beside their host code: `why_not` of `kda.py`, `gdn.py` and `lightning.py`.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from cula.core.checks import dtype_name
from cula.core.dispatch import AnyProblem, Backend
from cula.ops.cute.arch import ALL, Arch
from cula.ops.cute.archs import ARCHS
from cula.ops.cute.toolchain import loader


def why_not(arch: Arch, op: str, problem: AnyProblem) -> str | None:
    """What no kernel of an architecture takes, as a sentence."""
    if op.removesuffix("_fwd") not in arch.serves and not (op.endswith("_decode") and "decode" in arch.serves):
        return f"has no kernel for {op}"
    if problem.sm not in arch.targets:
        where = f"the tensors are on {problem.device}" if problem.sm is None else f"this GPU has {problem.sm[0]}.{problem.sm[1]}"
        return f"needs compute capability {' or '.join(f'{major}.{minor}' for major, minor in arch.targets)}, and {where}"
    if problem.dtype != torch.bfloat16:
        return f"takes bfloat16, and this call has {dtype_name(problem.dtype)}"
    if not problem.T or not problem.N:
        return "takes at least one token"
    return None


def self_check(arch: Arch, op: str, problem: AnyProblem, may_run: bool) -> str | None:
    """What is missing to load kernels, whether those of a call compile where they have to, and whether those that have never run
    on hardware do as they should on this machine."""
    assert problem.sm is not None
    reason = loader.missing(arch.targets[problem.sm])
    if reason is None and may_run:
        reason = _uncompiled(arch.targets[problem.sm], op, problem)
    if reason is not None or not (names := _new_kernels(arch, op, problem)):
        return reason
    from cula.ops.cute.toolchain import self_check as checking  # with the kernels' host code, which most machines have no use for

    reasons = (checking.objection(name, problem.sm, may_run) for name in names)
    return next((reason for reason in reasons if reason is not None), None)


def _new_kernels(arch: Arch, op: str, problem: AnyProblem) -> tuple[str, ...]:
    """The kernels whose agreement with torch stands for all that a call launches, the last of each kind, but for those that have
    run."""
    launched = kernels(op, problem, _num_sms(problem) or arch.num_sms[-1])
    return tuple(name for name in {name.split("_")[0]: name for name in launched}.values() if arch.is_new(name))


def kernels(op: str, problem: AnyProblem, num_sms: int) -> tuple[str, ...]:
    """The names of the kernels that a call launches on a GPU with so many SMs."""
    return _host(problem).kernels(op, problem, num_sms)


def takes(arch: Arch, op: str, problem: AnyProblem) -> bool:
    """Whether there are kernels for a call and no other backend is known to be faster, whether they are compiled here or not."""
    host = _host(problem)
    has_kernels = why_not(arch, op, problem) is None and host.why_not(op, problem) is None
    return has_kernels and host.yields_to(op, problem) is None


def _host(problem: AnyProblem) -> Any:
    """The module that launches a family's kernels."""
    return importlib.import_module(f"cula.ops.cute.{problem.family}")


@functools.lru_cache(maxsize=1024)
def _uncompiled(target: str, op: str, problem: AnyProblem) -> str | None:
    """Why a kernel of a call cannot be compiled here, as a sentence; compiles those that are not there."""
    num_sms = _num_sms(problem)
    if num_sms is None:
        return None  # the call is only described; nothing will run
    reasons = (loader.uncompiled(name, target) for name in kernels(op, problem, num_sms))
    return next((reason for reason in reasons if reason is not None), None)


def _num_sms(problem: AnyProblem) -> int | None:
    """SMs of the GPU at hand; None where it is not one that the problem is for."""
    gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
    if gpu is None or torch.cuda.get_device_capability(gpu) != problem.sm:
        return None
    return torch.cuda.get_device_properties(gpu).multi_processor_count


def how(arch: Arch, op: str, problem: AnyProblem) -> str | None:
    """What a call does on the GPU at hand, for `cula.explain`."""
    num_sms = _num_sms(problem)
    found = None if num_sms is None else _host(problem).spread(op, problem, num_sms)
    if not _new_kernels(arch, op, problem) or arch.new == ALL:  # otherwise its summary says it
        return found
    new = "by a kernel that never ran on hardware: it is compared with torch at its first use on a machine"
    return new if found is None else f"{found}; {new}"


def keeps(problem: AnyProblem) -> bool:
    """Whether a forward saves more for a backward of these kernels than its inputs."""
    return _host(problem).keeps(problem)


def backend_of(arch: Arch) -> Backend:
    return Backend(
        f"cute_{arch.name}",
        "cula.ops.cute",
        arch.summary,
        functools.partial(why_not, arch),
        device="cuda",
        requires=("tvm_ffi",),
        install="pip install 'cuda-linear-attention[cute]'",
        keeps=keeps,
        how=functools.partial(how, arch),
        self_check=functools.partial(self_check, arch),
    )


BACKENDS: tuple[Backend, ...] = tuple(backend_of(arch) for arch in ARCHS)
