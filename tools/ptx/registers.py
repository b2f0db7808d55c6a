# SPDX-License-Identifier: Apache-2.0
"""The registers of a run of warps, as generated code sees them."""

import numpy as np

from tools.ptx.values import F32, S16, S32, S64, U16, U32


class Views:
    """Rows of a block's register files for warps `first` to `end`, one list for each way of looking at them."""

    def __init__(self, block, first, end):
        self.block, self.start, self.stop = block, 32 * first, 32 * end
        self.threads = self.stop - self.start
        lanes = slice(self.start, self.stop)
        files = block.registers
        self.U = [row[lanes] for row in files["U"]]
        self.S, self.F = [row.view(S32) for row in self.U], [row.view(F32) for row in self.U]
        self.D = [row[lanes] for row in files["D"]]
        self.L, self.DF = [row.view(S64) for row in self.D], [row.view(F32) for row in self.D]
        self.H = [row[lanes] for row in files["H"]]
        self.G = [row.view(S16) for row in self.H]
        self.P = [row[lanes] for row in files["P"]]
        self.D0, self.D1 = [row.view(U32)[0::2] for row in self.D], [row.view(U32)[1::2] for row in self.D]
        self.U0, self.U1 = [row.view(U16)[0::2] for row in self.U], [row.view(U16)[1::2] for row in self.U]
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
