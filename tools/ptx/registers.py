# SPDX-License-Identifier: Apache-2.0
"""The registers of a run of warps, as generated code sees them."""

import numpy as np

from tools.ptx.values import F32, S16, S32, S64, U16, U32, U64

# The rows of each view: those of a register file, all words of them or every other one, as numbers of a kind.
ROWS = {
    "U": ("U", U32, slice(None)), "S": ("U", S32, slice(None)), "F": ("U", F32, slice(None)),
    "U0": ("U", U16, slice(0, None, 2)), "U1": ("U", U16, slice(1, None, 2)),
    "D": ("D", U64, slice(None)), "L": ("D", S64, slice(None)), "DF": ("D", F32, slice(None)),
    "D0": ("D", U32, slice(0, None, 2)), "D1": ("D", U32, slice(1, None, 2)),
    "H": ("H", U16, slice(None)), "G": ("H", S16, slice(None)), "P": ("P", bool, slice(None)),
}  # fmt: skip


class Rows(dict):
    """Registers of a file seen in one way, by number. A row is made when it is first asked for: of thousands of registers most
    are seen in one way, and by few of the warps."""

    def __init__(self, file, lanes, dtype, words):
        super().__init__()
        self.file, self.lanes, self.dtype, self.words = file, lanes, dtype, words

    def __missing__(self, number):
        row = self[number] = self.file[number, self.lanes].view(self.dtype)[self.words]
        return row


class Views:
    """The registers of warps `first` to `end` of a block, one `Rows` for each way of looking at them."""

    def __init__(self, block, first, end):
        self.block, self.start, self.stop = block, 32 * first, 32 * end
        self.threads = self.stop - self.start
        lanes = slice(self.start, self.stop)
        for view, (file, dtype, words) in ROWS.items():
            setattr(self, view, Rows(block.registers[file], lanes, dtype, words))
        t = np.arange(self.start, self.stop, dtype=U32)
        x, y, _ = (U32(n) for n in block.program.block)
        self.special = {"%tid.x": t % x, "%tid.y": t // x % y, "%tid.z": t // (x * y), "%laneid": t % U32(32)}

    def enter(self, index, grid):
        """Begin block `index` of a grid."""
        block = self.block
        for axis, name in enumerate("xyz"):
            along = block.cluster.shape[axis]
            self.special[f"%ctaid.{name}"], self.special[f"%nctaid.{name}"] = U32(index[axis]), U32(grid[axis])
            self.special[f"%clusterid.{name}"] = U32(index[axis] // along)
            self.special[f"%nclusterid.{name}"] = U32(grid[axis] // along)
            self.special[f"%cluster_ctaid.{name}"] = U32(index[axis] % along)
            self.special[f"%cluster_nctaid.{name}"] = U32(along)
            self.special[f"%ntid.{name}"] = U32(block.program.block[axis])
        self.special["%cluster_ctarank"] = U32(block.rank)
        self.special["%cluster_nctarank"] = U32(len(block.cluster.blocks))

    def parameter(self, offset, width):
        """A number in the kernel's parameters."""
        return int.from_bytes(self.block.parameters[offset : offset + width], "little")

    def row(self, file, number):
        """A register of a file (U, D, H or P)."""
        return getattr(self, file)[number]
