# SPDX-License-Identifier: Apache-2.0
"""Copies that run by themselves: TMA tensor copies, bulk copies of plain bytes, and cp.async.

With `.multicast::cluster` (PTX ISA 9.2, cp.async.bulk and cp.async.bulk.tensor) a load goes to the blocks of the cluster that a
mask of 16 bits names by their ranks, in each to the address that the destination has in the block that it is in, and signals the
mbarrier of the same address there.
"""

import functools

import numpy as np

from tools.ptx.instruction import WIDTH, Address, Vector, begins
from tools.ptx.memory import TensorMap
from tools.ptx.values import GMEM_BASE, PARAM_BASE, S64, SMEM_BASE, SMEM_WINDOW, SimulationError, Unsupported

# The method that carries out a `cp` instruction, by the beginning of its opcode; the first that fits counts.
METHODS = {
    "cp.async.bulk.commit_group": "commit_stores",
    "cp.async.bulk.wait_group": "wait_stores",
    "cp.async.bulk.tensor": "tensor",
    "cp.async.bulk.prefetch.L2": "hint",
    "cp.async.bulk.prefetch": "nothing",
    "cp.async.bulk": "plain",
    "cp.async.ca": "small",
    "cp.async.cg": "small",
    "cp.async.commit_group": "commit_loads",
    "cp.async.wait_group": "wait_loads",
    "cp.async.wait_all": "wait_all_loads",
}
TMA_ALIGNMENT, BULK_ALIGNMENT = 128, 16  # of addresses in shared memory, in bytes
TENSOR_MAP_BYTES = 128


@functools.cache
def method_of(op):
    found = next((method for beginning, method in METHODS.items() if begins(op, beginning)), None)
    if found is None:
        raise Unsupported(op)
    return found


class Copies:
    """What `cp` instructions do.

    A load that signals an mbarrier happens at issue or when nothing else can go on, as the order says. A store reads shared
    memory when it is waited for, so what is overwritten too early is seen; cp.async writes when it is waited for. A copy
    to another block of the cluster is like a load: its source is read when it happens.
    """

    def __init__(self, block):
        self.block = block

    def start(self):
        n = self.block.warps
        self.maps = {}
        self.stores, self.store_groups = [[] for _ in range(n)], [[] for _ in range(n)]
        self.loads, self.load_groups = [[] for _ in range(n)], [[] for _ in range(n)]

    def finish(self):
        if any(self.stores) or any(self.store_groups):
            raise SimulationError("a bulk store may still be reading shared memory at exit: nothing waited for it")

    def execute(self, i, warp, lanes):
        """An instruction of a warp's active lanes."""
        getattr(self, method_of(i.op))(i, warp, lanes)

    # Groups: what a warp has issued is gathered by a commit, and waited for in the order of the commits.

    def commit_stores(self, i, warp, lanes):
        self.store_groups[warp].append(self.stores[warp])
        self.stores[warp] = []
        if self.block.races is not None:
            self.block.races.proxies.commit(self.block, warp)

    def wait_stores(self, i, warp, lanes):
        run_down(self.store_groups[warp], int(i.args[0]))
        if self.block.races is not None and "read" not in i.parts:
            self.block.races.proxies.complete(self.block, warp, int(i.args[0]))

    def commit_loads(self, i, warp, lanes):
        self.load_groups[warp].append(self.loads[warp])
        self.loads[warp] = []

    def wait_loads(self, i, warp, lanes):
        run_down(self.load_groups[warp], int(i.args[0]))

    def wait_all_loads(self, i, warp, lanes):
        self.commit_loads(i, warp, lanes)
        run_down(self.load_groups[warp], 0)

    # Copies.

    def tensor(self, i, warp, lanes):
        """A TMA copy of a box: cp.async.bulk.tensor.2d.TO.FROM..."""
        is_load, block = i.parts[5].startswith("shared"), self.block
        if any(word in i.op for word in ("im2col", "cta_group", "prefetch")):
            raise Unsupported(i.op)
        # The DSL elects a lane for loads but not for stores, which become one uniform instruction a warp: done once.
        if is_load and lanes.sum() != 1:
            raise SimulationError("a TMA load is issued by more than one lane")
        lane = int(np.argmax(lanes))
        pick = lambda operand: int(block.address(operand, warp)[lane])
        descriptor, shared = (i.args[1], pick(i.args[0])) if is_load else (i.args[0], pick(i.args[1]))
        tensor_map = self.tensor_map(pick(descriptor))
        coordinates = [int(block.value(x, "S", warp)[lane]) for x in descriptor.coordinates]
        if len(coordinates) != tensor_map.rank:
            raise SimulationError(f"{len(coordinates)} TMA coordinates for a descriptor of rank {tensor_map.rank}")
        n = tensor_map.bytes
        if block.races is not None:
            self.look_global(i, warp, *tensor_map.rows(coordinates), is_load)
        move = lambda owner, shared: self.move(tensor_map, coordinates, owner, shared, is_load)
        if is_load:
            for owner, at, barrier in self.targets(i, warp, lane, i.parts[5], shared, *i.args[2:4]):
                owner.check_shared(at, n, TMA_ALIGNMENT, "TMA")
                self.load_later(i, warp, functools.partial(move, owner, at), n, owner, at, barrier)
        else:
            self.block.check_shared(shared, n, TMA_ALIGNMENT, "TMA")
            self.store_later(i, warp, functools.partial(move, self.block, shared), n, shared)

    def tensor_map(self, address):
        """The TMA descriptor at an address of the kernel's parameters."""
        if address not in self.maps:
            start = address - PARAM_BASE
            if not 0 <= start < len(self.block.parameters):
                raise Unsupported("a TMA descriptor outside the kernel's parameters")
            self.maps[address] = TensorMap(bytes(self.block.parameters[start : start + TENSOR_MAP_BYTES]))
        return self.maps[address]

    def targets(self, i, warp, lane, space, shared, barrier, mask=None):
        """(Block, address there, the mbarrier's address in the cluster) of each place that a load goes to."""
        block = self.block
        barrier = int(block.address(barrier, warp)[lane])
        if "multicast::cluster" not in i.parts:
            return [(*self.owner(space, shared), barrier)]
        named = block.cluster.named(int(block.value(mask, "H", warp)[lane]), shared)
        there, beside = (block.cluster.owner(block, address)[1] for address in (shared, barrier))
        return [(owner, there, beside + SMEM_WINDOW * (owner.rank + 1)) for owner in named]

    def owner(self, space, address):
        """The block that a shared address of an instruction is in, and the address there."""
        return self.block.cluster.owner(self.block, address) if space == "shared::cluster" else (self.block, address)

    def move(self, tensor_map, coordinates, block, shared, is_load):
        """Copy a box between global memory and the shared memory of a block."""
        element = tensor_map.element
        offset, inside, smem_address = tensor_map.place(coordinates, shared)
        offset += tensor_map.address - GMEM_BASE
        block.gmem.check(offset[inside], element, f"TMA ({tensor_map})")
        smem, there = block.smem_words[element], (smem_address - SMEM_BASE) // element
        gmem, here = block.gmem.words[element], offset // element
        if is_load:  # what is outside reads as zero
            smem[there] = np.where(inside, gmem[np.where(inside, here, 0)], gmem.dtype.type(0))
        else:
            gmem[here[inside]] = smem[there[inside]]

    def look(self, i, warp, owner, address, n, is_write, is_issue=True):
        """Look for a race of n bytes that a copy of this warp's reads or writes."""
        if self.block.races is not None:
            self.block.races.copy(i, self.block, warp, owner, address, n, is_write, is_issue=is_issue)

    def look_global(self, i, warp, start, n, is_load):
        """Take note of bytes of global memory that a copy reads or writes."""
        proxies = self.block.races.proxies
        (proxies.copy_from_global if is_load else proxies.copy_to_global)(i, self.block, warp, start, n)

    def store_later(self, i, warp, move, n, shared):
        """Read n bytes of shared memory when they are waited for."""

        def leave():
            self.look(i, warp, self.block, shared, n, False, is_issue=False)
            move()

        self.look(i, warp, self.block, shared, n, False)
        self.stores[warp].append(leave)

    def load_later(self, i, warp, move, n, owner, shared, barrier_address):
        """Write n bytes of shared memory of a block, and tell an mbarrier there."""
        block = self.block
        beside, there = block.cluster.owner(block, barrier_address)
        if beside is not owner:
            raise SimulationError(f"bytes go to block {owner.index}, and the mbarrier that counts them is in {beside.index}")
        barrier = owner.barriers.find(there)
        clock = None
        if block.races is not None:
            block.races.copy(i, block, warp, owner, shared, n, True, barrier)
            clock = block.races.issue(block, warp, i.place, barrier)

        def arrive():
            if owner is not block and (owner.has_ended() or block.has_ended()):
                raise SimulationError(f"bytes go from block {block.index} to {owner.index} when one of them has ended")
            move()
            barrier.know(clock)
            barrier.expect(-n)
            barrier.settle()

        if block.order.late_loads:
            block.cluster.events.append(arrive)
        else:
            arrive()

    def plain(self, i, warp, lanes):
        """cp.async.bulk.TO.FROM... of n bytes, either way."""
        block, is_load = self.block, i.parts[3].startswith("shared")
        if any(word in i.op for word in ("cp_mask", "reduce", "ignore_oob")):
            raise Unsupported(i.op)
        if i.parts[3:5] == ["shared::cluster", "shared::cta"]:
            self.push(i, warp, lanes)
            return
        if i.parts[4].startswith("shared") == is_load:
            raise Unsupported(i.op)
        for lane in np.flatnonzero(lanes):
            to, source = (int(block.address(a, warp)[lane]) for a in i.args[:2])
            n = int(block.value(i.args[2], "U", warp)[lane])
            shared, offset = (to, source - GMEM_BASE) if is_load else (source, to - GMEM_BASE)
            if n % BULK_ALIGNMENT or offset % BULK_ALIGNMENT:
                raise SimulationError(f"a bulk copy of {n} bytes at {offset + GMEM_BASE:#x}: both must be multiples of 16")
            self.check_global(offset, n, "bulk copy")
            gmem = block.gmem.bytes[offset : offset + n]
            if block.races is not None:
                self.look_global(i, warp, np.array([offset]), n, is_load)
            if is_load:
                for owner, at, barrier in self.targets(i, warp, lane, i.parts[3], shared, *i.args[3:5]):
                    owner.check_shared(at, n, BULK_ALIGNMENT, "bulk copy")
                    move = functools.partial(np.copyto, owner.shared_bytes(at, n), gmem)
                    self.load_later(i, warp, move, n, owner, at, barrier)
            else:
                block.check_shared(shared, n, BULK_ALIGNMENT, "bulk copy")
                self.store_later(i, warp, functools.partial(np.copyto, gmem, block.shared_bytes(shared, n)), n, shared)

    def hint(self, i, warp, lanes):
        """A prefetch of n bytes: nothing happens, but they must be there."""
        block = self.block
        for lane in np.flatnonzero(lanes):
            offset = int(block.address(i.args[0], warp)[lane]) - GMEM_BASE
            n = int(block.value(i.args[1], "U", warp)[lane])
            self.check_global(offset, n, "prefetch")

    def nothing(self, i, warp, lanes):
        """A prefetch of a box: what it names is checked when it is copied."""

    def check_global(self, offset, n, what):
        """Every piece of n bytes of global memory lies in an array."""
        pieces = np.arange(offset, offset + n, BULK_ALIGNMENT, dtype=S64)
        self.block.gmem.check(pieces, BULK_ALIGNMENT, what)

    def push(self, i, warp, lanes):
        """cp.async.bulk of n bytes of one's own shared memory to another block's."""
        block = self.block
        for lane in np.flatnonzero(lanes):
            to, source, barrier = (int(block.address(i.args[k], warp)[lane]) for k in (0, 1, 3))
            n = int(block.value(i.args[2], "U", warp)[lane])
            if n % BULK_ALIGNMENT:
                raise SimulationError(f"a bulk copy of {n} bytes: must be a multiple of 16")
            owner, to = block.cluster.owner(block, to)
            if owner is block:
                raise SimulationError(f"{i.op} to the block's own shared memory: it is for another's")
            block.check_shared(source, n, BULK_ALIGNMENT, "source of a bulk copy")
            owner.check_shared(to, n, BULK_ALIGNMENT, "bulk copy")
            parts = owner.shared_bytes(to, n), block.shared_bytes(source, n)
            self.look(i, warp, block, source, n, False)
            self.load_later(i, warp, lambda parts=parts: np.copyto(*parts), n, owner, to, barrier)

    def store_async(self, i, warp, lanes):
        """st.async: registers to another block's shared memory."""
        if not i.starts("st.async") or "mbarrier::complete_tx::bytes" not in i.parts:
            raise Unsupported(i.text[:120])
        block, (to, values, barrier), width = self.block, i.args, WIDTH[i.parts[-1]]
        values = values.items if isinstance(values, Vector) else (values,)
        rows = np.stack([block.value(x, {4: "U", 8: "D"}[width], warp) for x in values], 1)  # a copy
        n = rows[0].nbytes
        for lane in np.flatnonzero(lanes):
            owner, at = block.cluster.owner(block, block.address(to, warp)[lane])
            owner.check_shared(at, n, n, i.text[:120])
            parts = owner.shared_bytes(at, n), rows[lane].view(np.uint8)
            where = block.address(barrier, warp)[lane]
            self.load_later(i, warp, lambda parts=parts: np.copyto(*parts), n, owner, at, where)

    def small(self, i, warp, lanes):
        """cp.async of 4, 8 or 16 bytes a lane; what is beyond the source size is zero."""
        block, n = self.block, int(i.args[2])
        to, source = (block.address(a, warp)[lanes] for a in i.args[:2])
        sizes = np.full(32, n, S64)
        if len(i.args) > 3 and not isinstance(i.args[3], Address):
            sizes = block.value(i.args[3], "U", warp).astype(S64)
        sizes = sizes[lanes]
        words, at = block.locate("shared", to, min(n, 8), max(1, n // 8))
        del words, at  # checked; bytes are moved below
        read = sizes > 0
        if read.any():
            block.locate("global", source[read], min(n, 8), max(1, n // 8))
        data = np.zeros((len(to), n), np.uint8)
        each = np.arange(n)
        data[read] = block.gmem.bytes[source[read][:, None] - GMEM_BASE + each]
        data[each[None, :] >= sizes[:, None]] = 0

        def look():
            for address in to if block.races is not None else ():
                self.look(i, warp, block, address, n, True)
            if block.races is not None:
                block.races.proxies.write(block.view(warp, warp + 1), lanes)

        def land():
            look()
            block.smem[to[:, None] - SMEM_BASE + each] = data

        look()
        self.loads[warp].append(land)


def run_down(groups, left):
    """Do the oldest groups until so many are left."""
    while len(groups) > left:
        for do in groups.pop(0):
            do()
