# SPDX-License-Identifier: Apache-2.0
"""Run the host side of a compiled variant: what cute.compile lowered the @cute.jit function to.

The lowered code (LLVM dialect, as text) checks and unpacks the arguments, computes the grid and builds every TMA descriptor
word by word; nothing of it needs a GPU. Interpreting it gives the kernel's real parameters, so no box, stride or layout is
typed by hand, and the calling convention's own checks run too:

    host = Host(text)
    launches = host.call(Tensor(address, shape, "bfloat16"), ..., 0.5)      # a last argument, the stream, may be left out

Known is what DSL 4.8.1 emits; anything else raises Unsupported with the operation.
"""

import re
import struct
from dataclasses import dataclass
from enum import IntEnum

from tools.ptx.host_operations import decode
from tools.ptx.host_types import unescape
from tools.ptx.values import HostError, Unsupported


class Dl(IntEnum):
    """What DLPack calls the kinds of numbers."""

    INT, UINT, FLOAT, BFLOAT, BOOL = 0, 1, 2, 4, 6


class Ffi(IntEnum):
    """What tvm-ffi calls the types of arguments."""

    NONE, INT, BOOL, FLOAT, OPAQUE_POINTER, TENSOR = 0, 1, 2, 3, 4, 7


DTYPES = {
    "bfloat16": (Dl.BFLOAT, 16), "float16": (Dl.FLOAT, 16), "float32": (Dl.FLOAT, 32), "float64": (Dl.FLOAT, 64),
    "int8": (Dl.INT, 8), "int16": (Dl.INT, 16), "int32": (Dl.INT, 32), "int64": (Dl.INT, 64), "uint8": (Dl.UINT, 8),
    "bool": (Dl.BOOL, 8),
}  # fmt: skip
DL_CUDA = 2  # the device that tensors are said to be on
# DLTensor: data, device, rank, dtype (kind, bits, lanes), shape, strides, byte offset.
DL_TENSOR = struct.Struct("<QiiiBBHQQQ")
# cudaLaunchConfig_t: grid, block, bytes of shared memory, stream, attributes and their number; the size of cudaLaunchAttribute.
LAUNCH_CONFIG, ATTRIBUTE_BYTES = struct.Struct("<3i3iQQQI"), 72
STREAM = object()  # stands for the stream argument
BASE = 0x5000_0000_0000  # where host memory is
MAX_STEPS = 500_000  # operations of one function: more is a loop that does not end
CLUSTER_DIMENSION = 4  # cudaLaunchAttributeClusterDimension


@dataclass
class Tensor:
    """A tensor argument; strides in elements, None for compact."""

    address: int
    shape: tuple
    dtype: str
    strides: tuple | None = None


@dataclass
class Launch:
    """A kernel that the host code has launched."""

    kernel: str
    parameters: list  # bytes
    grid: tuple
    block: tuple
    smem: int
    cluster: tuple


class Function:
    """A function of the host code: basic blocks by name, each with its parameters and lines."""

    def __init__(self, arguments):
        self.arguments, self.blocks = arguments, {"^bb0": ([], [])}


class Host:
    """The host code of a variant, with a memory of its own."""

    def __init__(self, text):
        self.functions, self.globals, self.kernels, self.decoded = {}, {}, {}, {}
        self.memory, self.sizes = bytearray(64), {}
        self.launches, self.error = [], None
        self.read(text)
        self.entry = next((name for name in self.functions if re.match(r"__tvm_ffi_[^_]", name)), None)
        if not self.entry:
            raise Unsupported("host code without a tvm-ffi entry: compile with --enable-tvm-ffi")

    def read(self, text):
        """Functions, their blocks and globals, line by line."""
        function = lines = None
        for line in map(str.strip, text.splitlines()):
            if m := re.match(r'llvm\.mlir\.global .*?@("(?:[^"\\]|\\.)*"|[\w.$]+)\((.*)\)', line):
                self.read_global(m[1], m[2])
            elif function is None:
                if line.startswith("llvm.func ") and line.endswith("{"):
                    function = self.functions[re.search(r"@([\w.$]+)\(", line)[1]] = Function(re.findall(r"(%arg\d+): ", line))
                    lines = function.blocks["^bb0"][1]
            elif line == "}":
                function = None
            elif m := re.match(r"(\^bb\d+)(?:\((.*)\))?:", line):
                lines = []
                function.blocks[m[1]] = (re.findall(r"(%\w+): ", m[2] or ""), lines)
            else:
                lines.append(line)

    def read_global(self, name, text):
        """A string, or room for something that is set up at run time."""
        body = re.match(r'"((?:[^"\\]|\\.)*)"', text)
        raw = unescape(body[1]) if body else bytes(64)
        address = self.allocate(len(raw) + 64)
        self.memory[address - BASE : address - BASE + len(raw)] = raw
        self.globals[name] = address
        if name.startswith("kernels_"):  # would hold the loaded kernel: let it hold its own address
            self.memory[address - BASE : address - BASE + 8] = address.to_bytes(8, "little")
            self.kernels[address] = name.removeprefix("kernels_")

    # Memory.

    def allocate(self, n, align=64):
        at = len(self.memory)
        at += -at % align
        self.memory.extend(bytes(at + n + 64 - len(self.memory)))
        return BASE + at

    def offset(self, address, n=1):
        """Where n bytes at an address are in `memory`."""
        if not BASE <= address <= BASE + len(self.memory) - n:
            raise HostError(f"host access at {address:#x}")
        return address - BASE

    def text(self, address):
        """A string that ends with a zero."""
        at = self.offset(address)
        return self.memory[at : self.memory.index(0, at)].decode()

    def words(self, address, n):
        return struct.unpack_from(f"<{n}Q", self.memory, self.offset(address, 8 * n))

    # A call.

    def call(self, *arguments):
        """The launches of one call, with the arguments that the compiled function takes."""
        top = len(self.memory)
        self.sizes, self.launches, self.error = {}, [], None
        if len(arguments) + 1 == self.argument_count():
            arguments = (*arguments, STREAM)
        packed = b"".join(self.pack_argument(a) for a in arguments)
        address = self.allocate(len(packed))
        self.memory[address - BASE : address - BASE + len(packed)] = packed
        code = self.run(self.entry, [0, address, len(arguments), self.allocate(16)])
        launches = self.launches
        del self.memory[top:]
        if self.error or code:
            raise HostError(self.error or f"the host function returned {code}")
        return launches

    def argument_count(self):
        """How many arguments the entry takes, from the comparison that it begins with."""
        lines = self.functions[self.entry].blocks["^bb0"][1]
        compared = next((m[1] for line in lines if (m := re.search(r'icmp "eq" %arg2, (%\w+)', line))), None)
        constant = next((line for line in lines if line.startswith(f"{compared} = llvm.mlir.constant")), None)
        if constant is None:
            raise Unsupported("a host entry that does not check how many arguments it is given")
        return int(re.search(r"constant\((\d+)", constant)[1])

    def pack_argument(self, argument):
        """A tvm-ffi value: a type's number, padding, eight bytes."""
        if isinstance(argument, Tensor):
            return struct.pack("<iiQ", Ffi.TENSOR, 0, self.pack_tensor(argument))
        if isinstance(argument, float):
            return struct.pack("<iid", Ffi.FLOAT, 0, argument)
        if argument is None:
            return struct.pack("<iiQ", Ffi.NONE, 0, 0)
        if argument is STREAM:
            return struct.pack("<iiQ", Ffi.OPAQUE_POINTER, 0, 0)
        if isinstance(argument, bool):
            return struct.pack("<iiq", Ffi.BOOL, 0, argument)
        return struct.pack("<iiq", Ffi.INT, 0, int(argument))

    def pack_tensor(self, tensor):
        """The address of a DLTensor, on the first GPU."""
        rank, strides = len(tensor.shape), tensor.strides
        if strides is None:
            strides, n = [], 1
            for size in reversed(tensor.shape):
                strides.insert(0, n)
                n *= size
        sizes_at, strides_at, at = (self.allocate(8 * rank), self.allocate(8 * rank), self.allocate(64))
        struct.pack_into(f"<{rank}q", self.memory, sizes_at - BASE, *tensor.shape)
        struct.pack_into(f"<{rank}q", self.memory, strides_at - BASE, *strides)
        fields = (tensor.address, DL_CUDA, 0, rank, *DTYPES[tensor.dtype], 1, sizes_at, strides_at, 0)
        DL_TENSOR.pack_into(self.memory, at - BASE, *fields)
        return at

    # Execution.

    def run(self, name, arguments):
        """Call a function; what it returns."""
        function = self.functions.get(name)
        if function is None:
            return self.external(name, arguments)
        env = dict(zip(function.arguments, arguments))
        block, steps = "^bb0", 0
        while True:
            code = self.block(name, block)
            for operation in code:
                jump = operation(self, env)
                if jump is not None:
                    break
            else:
                raise HostError(f"block {block} of {name} has no end")
            steps += len(code)
            if steps > MAX_STEPS:
                raise HostError("host code does not end")
            block, values = jump
            if block is None:
                return values
            env.update(zip(self.functions[name].blocks[block][0], values))

    def block(self, function, block):
        """The operations of a basic block, decoded when it is first entered."""
        if (function, block) not in self.decoded:
            self.decoded[(function, block)] = [decode(line) for line in self.functions[function].blocks[block][1]]
        return self.decoded[(function, block)]

    def external(self, name, a):
        """Functions of the runtime."""
        if name == "_cudaLaunchKernelEx":
            config = LAUNCH_CONFIG.unpack_from(self.memory, self.offset(a[0], LAUNCH_CONFIG.size))
            grid, block, (smem, _, attributes, count) = config[:3], config[3:6], config[6:]
            # The list of pointers to the parameters, and what each points at, are allocas of known size.
            pointers = self.words(a[2], self.sizes[a[2]] // 8)
            parameters = [bytes(self.memory[self.offset(p) : self.offset(p) + self.sizes[p]]) for p in pointers]
            cluster = self.cluster_size(attributes, count)
            self.launches.append(Launch(self.kernels.get(a[1], "?"), parameters, grid, block, smem, cluster))
        elif name.startswith("TVMFFIErrorSetRaisedFromCStrParts"):
            self.error = f"{self.text(a[0])}: " + "".join(self.text(p) for p in self.words(a[1], a[2]) if p)
        elif name == "TVMFFIErrorSetRaisedFromCStr":
            self.error = f"{self.text(a[0])}: {self.text(a[1])}"
        elif name not in ("printf", "TVMFFIEnvGetStream", "_cudaSetDevice", "cuda_dialect_init_library_once", "_cudaGetDevice"):
            raise Unsupported(f"host call to {name}")
        return 0

    def cluster_size(self, attributes, count):
        """Blocks of a cluster along x, y, z: one of the launch's attributes, a list of structures at an address."""
        for k in range(count):
            at = self.offset(attributes + ATTRIBUTE_BYTES * k, ATTRIBUTE_BYTES)
            kind, *size = struct.unpack_from("<i4x3i", self.memory, at)
            if kind == CLUSTER_DIMENSION:
                return tuple(size)
        return (1, 1, 1)
