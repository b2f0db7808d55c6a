# SPDX-License-Identifier: Apache-2.0
"""How many steps the pieces of Gated DeltaNet's heads take on a Hopper.

    python benchmarks/gdn_pieces.py [--sms 132]

Counted on a CPU, in float64, for the gates and shapes of `cula/gdn/bench.py`, with keys that are normalised, in the kernel or
before; nothing is timed. A step is a chunk of a pair of blocks, 1.9 us on an H200. To hand a state on counts as one, too.
For each gate: steps of the slowest head and, in brackets, of a head on average, when warm-ups had four chunks -> now.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from cula.bench.cases import Case
from cula.bench.inputs import make
from cula.bench.shapes import TRAINING, batch
from cula.core.constants import CHUNK, LOG2_E
from cula.gdn.bench import GATES, TABLE
from cula.gdn.problem import GdnInputs, GdnOptions, GdnProblem, check_gdn
from cula.gdn.reference import gdn_gate
from cula.ops.cute.gdn_abi import FEWEST_CHUNKS
from cula.ops.cute.gdn_schedule import schedule

AHEAD, MAX_WARM_UP, FORGOTTEN, MOST_MAPPED = 4, 64, -25.0, 1.3  # of `cula/ops/cute/sm90/gdn_segments.py`, which needs the DSL
SHAPES = (*TABLE, *(((T, 1), (2, 4)) for T in (2048, 4096, 8192)), ((32768, 1), (1, 1)))  # 2/4: an eighth of 16/32


class Cut(NamedTuple):
    """How a head's sequence is cut into pieces."""

    pieces: int
    length: int  # chunks of a piece's own
    more: int  # chunks that the first has besides
    before: int  # chunks that the others walk over first
    is_mapped: bool

    def walk(self, piece: int, chunks: int) -> tuple[int, int, int]:
        """The chunk where a piece begins, the first with output, and the end."""
        middle = self.more + piece * self.length if piece else 0
        end = min(self.more + (piece + 1) * self.length, chunks)
        return (max(middle - self.before, 0), middle, end) if middle < end else (0, 0, 0)

    @property
    def steps(self) -> int:
        """Of the longest piece, and of what it waits for."""
        return self.length + max(self.more, self.before) + (self.pieces - 1 if self.is_mapped else 0)


def mapped(chunks: int, pieces: int) -> Cut:
    pieces = min(pieces, most_mapped(chunks))
    segment = -(-chunks // (pieces + 1))
    return Cut(pieces, segment, segment, segment, True)


def most_mapped(chunks: int) -> int:
    return int(MOST_MAPPED * chunks**0.5 + 0.5)


def cut(decays: Sequence[float], pieces: int) -> Cut:
    """How the kernel cuts a sequence of whose chunks these are the log2 decays."""
    chunks = len(decays)
    pieces = max(1, min(pieces, chunks // FEWEST_CHUNKS))
    if pieces == 1:
        return Cut(1, chunks, 0, 0, False)
    most = min(mapped(chunks, pieces).steps - -(-chunks // pieces), MAX_WARM_UP)
    more = before = 0
    while True:
        length = -(-(chunks - more) // pieces)
        before = max(chunks_to_forget(decays[:at], most) for at in range(more + length, chunks, length))
        if before > most:
            return mapped(chunks, pieces)
        if before - more < 2 * pieces:
            return Cut(pieces, length, more, before, False)
        more = before


def chunks_to_forget(decays: Sequence[float], most: int) -> int:
    """How many of these, from the last on, forget what came before them; all if they do not, or seem to need more than `most`."""
    total = 0.0
    for seen, decay in enumerate(reversed(decays), start=1):
        total += decay
        if total < FORGOTTEN:
            return seen
        if seen >= AHEAD and total * most > FORGOTTEN * seen:
            break
    return len(decays)


def steps_before(decays: Sequence[float], pieces: int) -> int:
    """What it was while all pieces of a head warmed up over four chunks, or were mapped, and there were no more than for maps."""
    chunks = len(decays)
    pieces = max(1, min(pieces, chunks // FEWEST_CHUNKS, most_mapped(chunks)))
    length = -(-chunks // pieces)
    if pieces == 1:
        return chunks
    is_warm = all(at <= 4 or sum(decays[at - 4 : at]) < FORGOTTEN for at in range(length, chunks, length))
    return length + 4 if is_warm else mapped(chunks, pieces).steps


def decays_of(case: Case) -> tuple[GdnProblem, list[list[float]]]:
    """The problem of a call on a Hopper, and log2 decays of the chunks of its heads."""
    x = make(case, torch.device("cpu"))
    options = GdnOptions(use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
    problem, _ = check_gdn(GdnInputs(x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias), options)
    g = torch.nn.functional.pad(LOG2_E * gdn_gate(x.g, x.A_log, x.dt_bias), (0, 0, 0, -case.lens[0] % CHUNK))
    return replace(problem, sm=(9, 0)), g.unflatten(1, (-1, CHUNK)).sum(2).mT.flatten(0, 1).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sms", type=int, default=132, help="of the GPU (default: 132)")
    parser.add_argument("--tokens", type=int, default=10**9, help="of a shape, at most")
    args = parser.parse_args()
    print("| heads, tokens | pieces | mapped | " + " | ".join(GATES) + " |\n" + "|---" * (3 + len(GATES)) + "|")
    for (total, N), (H, HV) in SHAPES:
        if total > args.tokens:
            continue
        cells = []
        for gate in GATES:
            case = batch("gdn-train", "gdn_train", total, H, N, HV=HV, flags=TRAINING, gate=gate)
            problem, heads = decays_of(case)
            made = schedule(problem, args.sms)
            assert made is not None
            if made.pieces < 2:
                break
            was, now = [steps_before(of, made.pieces) for of in heads], [cut(of, made.pieces).steps for of in heads]
            cells.append(f"{max(was)} -> {max(now)} ({statistics.mean(was):.0f} -> {statistics.mean(now):.0f})")
        if cells:
            longest = mapped(len(heads[0]), made.pieces).steps
            print(f"| {H}/{HV} {N}x{total // N} | {made.pieces} | {longest} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
