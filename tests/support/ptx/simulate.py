# SPDX-License-Identifier: Apache-2.0
"""Compile a variant, run its host code and its kernels on the CPU."""

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np
import torch

from cula.ops.cute.toolchain import build, loader
from cula.ops.cute.toolchain.variants import modules_of
from tests.support.ptx import launch
from tests.support.ptx.host import Host, Tensor
from tests.support.ptx.memory import GlobalMemory


@dataclass(frozen=True)
class Compiled:
    """The text of a compiled variant."""

    name: str
    arch: str
    ptx: str
    host: str

    def edited(self, ptx=None, host=None):
        """The same with its text changed by functions, which must change it: to break it on purpose."""
        changed = {}
        for field, edit in (("ptx", ptx), ("host", host)):
            if edit is not None:
                changed[field] = edit(getattr(self, field))
                if changed[field] == getattr(self, field):
                    raise ValueError(f"{self.name}: the edit changes nothing")
        return dataclasses.replace(self, **changed)


@dataclass(frozen=True)
class Pointer:
    """A tensor whose address is the argument."""

    tensor: torch.Tensor


def text_folder(arch, modules=None):
    """Where compiled text is kept between runs, by the state of the sources."""
    return loader.cache_folder(arch, modules or modules_of(arch)) / "text"


def compile_all(arch, modules=None, part=(0, 1), names=None):
    """Compile every variant (or those named), or the i-th of n parts, in one process unless it has been; the facts of all."""
    modules = modules or modules_of(arch)
    return build.build(arch, modules, text_folder(arch, modules), names, keep_text=True, reuse=True, part=part)


# The variants of Blackwell's KDA kernels that tests run: between them they have every type and flag.
BLACKWELL_KDA = tuple(f"kda_{kind}" for kind in (
    "f16_gate_bf16", "f16_log_f32", "bf16_gate_f32", "bf16_log_bf16", "f16_gate_bf16_scalar",
))  # fmt: skip


@functools.cache
def compiled(name, arch="sm_90a", modules=None):
    """The text of a variant, compiled unless it has been already."""
    folder = text_folder(arch, modules)
    if not (folder / f"{name}.so").is_file():
        together = BLACKWELL_KDA if arch == "sm_100a" and name in BLACKWELL_KDA else [name]  # starting the DSL takes seconds
        build.build(arch, modules or modules_of(arch), folder, together, keep_text=True, reuse=True)
    return Compiled(name, arch, (folder / f"{name}.ptx").read_text(), (folder / f"{name}.host.mlir").read_text())


def simulate(kernel, *arguments, arch="sm_90a", modules=None, order="late", races=False):
    """Call a variant on the CPU, with the arguments a GPU call takes; outputs are written into the tensors.

    Args:
        kernel: a variant's name, or what `compiled` returned.
        arguments: torch tensors on the CPU or numpy arrays, `Pointer`s, numbers, None. A stream, if it comes last, is left out.
        arch, modules: where to find a name.
        order: in which order asynchronous work and warps go; see `ORDERS`.
        races: whether to look for accesses of shared memory that no barrier orders; see `races.py`.

    Raises:
        HostError: what the compiled function would raise: wrong shapes, dtypes, alignment.
        SimulationError: the kernel does what the machine does not allow, hangs, or has a race.
        Unsupported: the simulator does not know an instruction.
    """
    code = kernel if isinstance(kernel, Compiled) else compiled(kernel, arch, modules)
    given = [torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in arguments]
    tensors = [t for a in given if isinstance(t := a.tensor if isinstance(a, Pointer) else a, torch.Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    gmem = GlobalMemory.room_for([storage.nbytes() for storage in storages.values()])
    placed = {}
    for pointer, storage in storages.items():
        own = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        placed[pointer] = (*gmem.put(own), own)
    passed = [as_argument(a, placed) for a in given]
    for call in parsed_host(code.host).call(*passed):
        launch.run(code.ptx, call.kernel, call.parameters, call.grid, gmem, call.smem, order, call.block, call.cluster, races)
    for _, inside, own in placed.values():
        own[...] = inside


def interpret(monkeypatch, module):
    """Have the host side of a backend, a module of `cula.ops.cute`, launch on the CPU. Returns a function of an order of work,
    of one that breaks kernels' PTX on purpose, and of whether to look for races."""

    def use(order="late", edit=None, races=False):
        def load(name, arch):
            code = compiled(name, arch)
            code = code if edit is None else code.edited(ptx=edit)
            return lambda *arguments: simulate(code, *arguments[:-1], order=order, races=races)  # without the stream

        monkeypatch.setattr(module, "load", load)

    monkeypatch.setattr(module, "stream_of", lambda device: 0)
    monkeypatch.setattr(module, "address", lambda t: 0 if t is None else Pointer(t))
    use()
    return use


@functools.lru_cache(maxsize=64)
def parsed_host(text):
    return Host(text)


def as_argument(given, placed):
    tensor = given.tensor if isinstance(given, Pointer) else given
    if not isinstance(tensor, torch.Tensor):
        return given
    base = placed[tensor.untyped_storage().data_ptr()][0]
    address = base + tensor.storage_offset() * tensor.element_size()
    if isinstance(given, Pointer):
        return address
    return Tensor(address, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.stride())
