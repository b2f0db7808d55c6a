# SPDX-License-Identifier: Apache-2.0
"""What crosses from host to kernel, described once for each CuTe host function. Free of cutlass.

An `Abi` lists the arguments of a host function by name, in order, with their types:

    ABI = Abi("kda", addresses(q=16, k=16, ..., cu=4), i64("q_token", "q_head"), i32("T", "N"), f32("scale"))

Everything that handles those arguments is made from it: the host call (`pack_addresses`, `pack_numbers`), the function that is
compiled (`common/arguments.py`), the recorded launch (`alignment`), and the simulator's arguments, which are the host call's.

A `Workspace` lists what kernels of one call hand on to each other, section by section. Its offsets are computed by the same
function on the host, with numbers, and in the host function, with the DSL's own integers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

ADDRESS, I64, I32, F32 = "address", "i64", "i32", "f32"
RANGES = {I64: 2**63, I32: 2**31}
TMA_BYTES = 16  # addresses and strides that TMA reads from are multiples of this


class Arg(NamedTuple):
    """One argument."""

    name: str
    type: str
    align: int = 1  # of an address: bytes that it is a multiple of


def addresses(**align: int) -> tuple[Arg, ...]:
    """Addresses of tensors, each with its alignment in bytes."""
    return tuple(Arg(name, ADDRESS, of) for name, of in align.items())


def i64(*names: str) -> tuple[Arg, ...]:
    return tuple(Arg(name, I64) for name in names)


def i32(*names: str) -> tuple[Arg, ...]:
    return tuple(Arg(name, I32) for name in names)


def f32(*names: str) -> tuple[Arg, ...]:
    return tuple(Arg(name, F32) for name in names)


class Abi:
    """The arguments of one host function: addresses first, then numbers. A stream comes last and is not listed."""

    def __init__(self, name: str, *parts: tuple[Arg, ...]):
        self.name = name
        self.args = tuple(itertools.chain.from_iterable(parts))
        names = [a.name for a in self.args]
        if len(set(names)) < len(names):
            raise ValueError(f"{name}: an argument is named twice in {names}")
        is_address = [a.type == ADDRESS for a in self.args]
        if is_address != sorted(is_address, reverse=True):
            raise ValueError(f"{name}: addresses come before numbers")
        self.addresses = tuple(a for a in self.args if a.type == ADDRESS)
        self.numbers = tuple(a for a in self.args if a.type != ADDRESS)
        self.alignment = {a.name: a.align for a in self.addresses}  # in bytes, by name
        self._wanted = tuple(float if a.type == F32 else int for a in self.numbers)
        self._limits = tuple(RANGES.get(a.type, 0) for a in self.numbers)

    def with_alignment(self, **align: int) -> Abi:
        """The same arguments, some addresses with another alignment: variants of a kernel may read a tensor in other pieces."""
        unknown = [name for name in align if name not in self.alignment]
        if unknown:
            raise ValueError(f"{self.name}: {unknown} are not addresses; there are {list(self.alignment)}")
        return Abi(self.name, tuple(a._replace(align=align.get(a.name, a.align)) for a in self.args))

    def pack_addresses(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        """The addresses in order; every one is named, 0 stands for a tensor that a call does not have. What stands for an address
        where kernels are simulated is handed on as it is."""
        return tuple(self.in_order(self.addresses, given))

    def pack_numbers(self, given: Mapping[str, int | float | bool]) -> tuple[int | float, ...]:
        """The numbers in order, as the types they are described by."""
        values = self.in_order(self.numbers, given)
        # Most are of their type already, and a call has some thirty of them: no function is called for those.
        return tuple(
            [
                x if type(x) is wanted and (wanted is float or -limit <= x < limit) else self._number(a, x)
                for a, wanted, limit, x in zip(self.numbers, self._wanted, self._limits, values)
            ]
        )

    def in_order(self, args: tuple[Arg, ...], given: Mapping[str, Any]) -> list[Any]:
        """What is given for some of the arguments, in their order; TypeError unless that is exactly these."""
        try:
            found = [given[a.name] for a in args]
        except KeyError:
            found = []
        if len(given) != len(args) or len(found) != len(args):
            wanted = [a.name for a in args]
            missing, unknown = [n for n in wanted if n not in given], [n for n in given if n not in wanted]
            raise TypeError(f"{self.name}: arguments missing: {missing or 'none'}; unknown: {unknown or 'none'}")
        return found

    def _number(self, a: Arg, x: int | float | bool) -> int | float:
        if a.type == F32:
            return float(x)
        if isinstance(x, float):
            raise TypeError(f"{self.name}: {a.name} is {x!r}; expected an integer ({a.type})")
        if not -RANGES[a.type] <= x < RANGES[a.type]:
            raise OverflowError(f"{self.name}: {a.name} is {x}, which does not fit {a.type}")
        return int(x)


@dataclass(frozen=True)
class Section:
    """One part of a workspace."""

    name: str
    count: str  # of what there is one each: a name that `Workspace.offsets` is given a number for
    bytes: int  # of each
    align: int = 128  # the next section begins at a multiple of this


@dataclass(frozen=True)
class InTurns:
    """Groups of sections that have one place, since a group is written only when nobody reads those before it any more."""

    groups: tuple[tuple[Section, ...], ...]


@dataclass(frozen=True)
class Workspace:
    """What the kernels of a call hand on to each other, one section behind the other."""

    sections: tuple[Section | InTurns, ...]

    def offsets(self, **counts: Any) -> dict[str, Any]:
        """Where each section begins, and the `"end"`."""
        return self.laid_out(counts, max)

    def laid_out(self, counts: Mapping[str, Any], largest: Callable[..., Any]) -> dict[str, Any]:
        """The same where counts may be the DSL's integers, for which `max` is not the function that finds the largest."""
        found: dict[str, Any] = {}
        found["end"] = _lay_out(self.sections, 0, counts, largest, found)
        return found


def _lay_out(
    sections: tuple[Section | InTurns, ...],
    at: Any,
    counts: Mapping[str, Any],
    largest: Callable[..., Any],
    found: dict[str, Any],
) -> Any:
    """The end of sections that begin at an offset; where each of them begins is `found`."""
    for s in sections:
        if isinstance(s, InTurns):
            at = largest(*[_lay_out(group, at, counts, largest, found) for group in s.groups])
            continue
        found[s.name] = at
        size = counts[s.count] * s.bytes
        if s.bytes % s.align:
            size = (size + (s.align - 1)) // s.align * s.align
        at = at + size
    return at
