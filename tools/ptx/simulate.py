# SPDX-License-Identifier: Apache-2.0
"""Compile a variant, run its host code and its kernels on the CPU.

This is all that the simulator knows of cuLA: variants are compiled, and their text kept, by `cula.ops.cute.toolchain`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from cula.ops.cute.toolchain import build, loader
from cula.ops.cute.toolchain.variants import modules_of
from tools.ptx import launch
from tools.ptx.host import Host, Tensor
from tools.ptx.memory import GlobalMemory
from tools.ptx.mutate import Edit

Modules = tuple[str, ...]


@dataclass(frozen=True)
class Compiled:
    """The text of a compiled variant."""

    name: str
    arch: str
    ptx: str
    host: str  # what the @cute.jit function was lowered to

    def edited(self, ptx: Edit | None = None, host: Edit | None = None) -> "Compiled":
        """The same with its text changed by functions, which must change it: to break it on purpose (see `mutate.py`)."""
        changed = {}
        for field, edit in (("ptx", ptx), ("host", host)):
            if edit is not None:
                changed[field] = edit(getattr(self, field))
                if changed[field] == getattr(self, field):
                    raise ValueError(f"{self.name}: the edit changes nothing")
        return dataclasses.replace(self, **changed)


@dataclass(frozen=True)
class Pointer:
    """An argument that is the address of a tensor, for kernels that take numbers instead of tensors."""

    tensor: torch.Tensor


def text_folder(arch: str, modules: Modules | None = None) -> Path:
    """Where compiled text is kept between runs, by the state of the sources."""
    return loader.cache_folder(arch, modules or modules_of(arch)) / "text"


def compile_all(
    arch: str, modules: Modules | None = None, part: tuple[int, int] = (0, 1), names: Iterable[str] | None = None
) -> list[build.Facts]:
    """Compile every variant (or those named), or the i-th of n parts, in one process unless it has been; the facts of all."""
    modules = modules or modules_of(arch)
    return build.build(arch, modules, text_folder(arch, modules), names, keep_text=True, reuse=True, part=part)


TOGETHER: dict[tuple[str, str], tuple[str, ...]] = {}  # (architecture, variant) -> the variants that are compiled with it


def compile_together(arch: str, names: Iterable[str]) -> None:
    """Have `compiled` compile all of these variants, which are of the package's own modules, when it is first asked for one:
    starting the DSL takes seconds."""
    names = tuple(names)
    TOGETHER.update(dict.fromkeys(((arch, name) for name in names), names))


@functools.cache
def compiled(name: str, arch: str = "sm_90a", modules: Modules | None = None) -> Compiled:
    """The text of a variant of the package's modules, or of those given; compiled unless it has been already."""
    folder = text_folder(arch, modules)
    if not (folder / f"{name}.so").is_file():
        names = TOGETHER.get((arch, name), (name,)) if modules is None else (name,)
        build.build(arch, modules or modules_of(arch), folder, names, keep_text=True, reuse=True)
    return Compiled(name, arch, (folder / f"{name}.ptx").read_text(), (folder / f"{name}.host.mlir").read_text())


def simulate(
    kernel: str | Compiled, *arguments: Any, arch: str = "sm_90a", modules: Modules | None = None, order: str = "late",
    races: bool | str = False,
) -> None:  # fmt: skip
    """Call a variant on the CPU, with the arguments a GPU call takes; outputs are written into the tensors.

    Args:
        kernel: a variant's name, or what `compiled` returned.
        arguments: torch tensors on the CPU or numpy arrays, `Pointer`s, numbers, None. A stream, if it comes last, is left out.
        arch, modules: where to find a name: modules with a function `variants()`, as `cula.ops.cute.toolchain.variants` describes
            it; None for the package's own.
        order: in which order asynchronous work and warps go; see `ORDERS`.
        races: whether to look for accesses of shared memory that no barrier orders (see `races.py`), and of any memory that no
            proxy fence orders (see `proxies.py`); with "fences" for the latter alone.

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


def interpret(monkeypatch: Any, module: ModuleType) -> Callable[..., None]:
    """Have the host side of a backend, a module of `cula.ops.cute`, launch its kernels in the simulator, on CPU tensors.

    Args:
        monkeypatch: pytest's. Replaced are `load` and `stream_of`, which the module has imported, and `address` where it is
            asked for.
        module: what launches.

    Returns:
        A function that sets how the launches after it run: `use(order="late", edit=None, races=False)`, with `order` and
        `races` as `simulate` takes them, and `edit` a function that breaks the PTX of every kernel.
    """

    def use(order: str = "late", edit: Edit | None = None, races: bool | str = False) -> None:
        def load(name, arch):
            code = compiled(name, arch)
            code = code if edit is None else code.edited(ptx=edit)
            return lambda *arguments: simulate(code, *arguments[:-1], order=order, races=races)  # without the stream

        monkeypatch.setattr(module, "load", load)

    monkeypatch.setattr(module, "stream_of", lambda device: 0)
    monkeypatch.setattr("cula.ops.cute.launch.address", lambda t: 0 if t is None else Pointer(t))
    use()
    return use


@functools.lru_cache(maxsize=64)
def parsed_host(text):
    """Host code, parsed once."""
    return Host(text)


def as_argument(given, placed):
    """An argument as the host code takes it, with tensors where they were placed in global memory."""
    tensor = given.tensor if isinstance(given, Pointer) else given
    if not isinstance(tensor, torch.Tensor):
        return given
    base = placed[tensor.untyped_storage().data_ptr()][0]
    address = base + tensor.storage_offset() * tensor.element_size()
    if isinstance(given, Pointer):
        return address
    return Tensor(address, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.stride())
