# SPDX-License-Identifier: Apache-2.0
"""Compile every Triton kernel that a Python function launches, for GPUs that are not there.

    with dry_run(90) as reports:
        lightning_fwd(problem, inputs)            # CPU or meta tensors; nothing is executed
    assert all(r.fits and not r.spill_bytes for r in reports)

Each launch is compiled with the specialisation a real one gets: alignment, integers divisible by 16 or equal to 1, None
pointers, heuristics, every autotune config. Outputs keep what their allocation holds, so a function under `dry_run` must
not branch on them. Written for triton 3.6.0, whose wheel carries ptxas and cuobjdump: no driver and no CUDA is needed.

`TRITON_INTERPRET` must be unset when triton is imported: interpreting and compiling take two processes.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

ARCHS = (80, 90, 100, 103, 120)
# Bytes of shared memory that one block may ask for, by the CUDA programming guide.
MAX_SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376}
MAX_TMEM_COLUMNS = 512
NUM_SMS = {80: 108, 90: 132, 100: 148, 103: 160, 120: 170}
TENSOR_INSTRUCTIONS = ("wgmma.mma_async", "tcgen05.mma", "mma.sync")


@dataclass(frozen=True)
class Report:
    """What one compiled kernel takes of an SM."""

    name: str
    arch: int
    registers: int  # a thread
    spill_bytes: int  # a thread, stored; the stack frame where ptxas' own log was lost to the disk cache
    shared_bytes: int  # a block
    tmem_columns: int
    num_warps: int
    num_stages: int
    kernel: Any = field(repr=False, compare=False)  # triton's CompiledKernel

    @property
    def fits(self) -> bool:
        return self.shared_bytes <= MAX_SHARED[self.arch] and self.tmem_columns <= MAX_TMEM_COLUMNS

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that registers and shared memory let reside on one SM (64 Ki registers; a block costs 1 KiB more)."""
        by_registers = 65536 // (-(-self.registers // 8) * 8 * 32 * self.num_warps)
        return min(by_registers, (MAX_SHARED[self.arch] + 1024) // (self.shared_bytes + 1024))

    def count(self, text: str, stage: str = "ptx") -> int:
        """How many lines of a stage (`ttir`, `ttgir`, `llir`, `ptx`, `sass`) hold this text."""
        return sum(text in line for line in self.kernel.asm[stage].splitlines())

    def __str__(self) -> str:
        tensor = " ".join(f"{name}x{n}" for name in TENSOR_INSTRUCTIONS if (n := self.count(name)))
        return (
            f"{self.name} sm_{self.arch}: {self.num_warps} warps, {self.num_stages} stages, {self.registers} registers, "
            f"{self.spill_bytes} B spilled, {self.shared_bytes} B shared{'' if self.fits else ' (TOO MUCH)'}, "
            f"{self.blocks_per_sm} blocks an SM {tensor}"
        )


@contextlib.contextmanager
def dry_run(arch: int) -> Iterator[list[Report]]:
    """Inside, `kernel[grid](...)` compiles for `arch` and runs nothing; yields the reports, one a distinct kernel."""
    if knobs.runtime.interpret or not isinstance(triton.language.cumsum, JITFunction):
        raise RuntimeError("TRITON_INTERPRET is set, so triton.language is interpreted here; compile in another process")
    reports: list[Report] = []
    seen: set[str] = set()
    run, tune, active = JITFunction.run, Autotuner.run, driver._active

    def compile_only(self: JITFunction, *args: Any, grid: Any = None, warmup: bool = True, **kwargs: Any) -> Any:
        kernel, log = _with_log(lambda: run(self, *args, grid=grid, warmup=True, **kwargs))
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            reports.append(_report(kernel, arch, log))
        return kernel

    def compile_configs(self: Autotuner, *args: Any, grid: Any = None, warmup: bool = True, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        for config in self.prune_configs(kwargs):
            self.fn.run(*args, grid=grid, warmup=True, **kwargs, **config.all_kwargs())

    JITFunction.run, Autotuner.run = compile_only, compile_configs
    driver.set_active(_AbsentGpu(arch))
    try:
        with knobs.nvidia.scope():
            knobs.nvidia.dump_ptxas_log = True
            yield reports
    finally:
        JITFunction.run, Autotuner.run = run, tune
        driver._active = active


class _AbsentGpu:
    """Answers what triton's launch path asks of a driver."""

    def __init__(self, arch: int):
        self.arch = arch
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # a JITFunction keeps its kernels by device: this keeps the architectures apart

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_device_properties(self, device: Any = None) -> dict[str, int]:
        return {
            "max_shared_mem": MAX_SHARED[self.arch],
            "multiprocessor_count": NUM_SMS.get(self.arch, 132),
            "max_num_regs": 65536,
            "warpSize": 32,
        }

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def _with_log(compile: Callable[[], Any]) -> tuple[Any, str]:
    """The compiled kernel, and what ptxas printed (on a failure that is the whole PTX; the exception says enough)."""
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        kernel = compile()
    return kernel, log.getvalue()


def _report(kernel: Any, arch: int, log: str) -> Report:
    use = _resource_usage(kernel.asm["cubin"], kernel.name)
    spilled = re.search(r"(\d+) bytes spill stores", log)
    return Report(
        name=kernel.name,
        arch=arch,
        registers=use["REG"],
        spill_bytes=int(spilled[1]) if spilled else use["STACK"],
        shared_bytes=kernel.metadata.shared,
        tmem_columns=kernel.metadata.tmem_size or 0,
        num_warps=kernel.metadata.num_warps,
        num_stages=kernel.metadata.num_stages,
        kernel=kernel,
    )


@functools.cache
def _cuobjdump() -> str:
    return knobs.nvidia.cuobjdump.path


def _resource_usage(cubin: bytes, name: str) -> dict[str, int]:
    """`{"REG": ..., "STACK": ..., ...}` of one kernel in a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_cuobjdump(), "--dump-resource-usage", file.name]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    line = re.search(rf"Function {re.escape(name)}:\s*\n\s*(.*)", out)
    if line is None:
        raise RuntimeError(f"cuobjdump says nothing of {name}:\n{out}")
    return {key: int(value) for key, value in re.findall(r"([A-Z]+)(?:\[\d+\])?:(\d+)", line[1])}
