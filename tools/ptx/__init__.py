# SPDX-License-Identifier: Apache-2.0
"""Run compiled CuTe kernels on the CPU: their PTX, and the host code that launches it, against numpy. No GPU.

    simulate("kda_fwd", q, k, v, o, order="late")       # torch tensors or numpy arrays; o is written
    simulate(compiled("kda_fwd").edited(ptx=...), ...)  # the same, broken on purpose
    simulate(..., races=True)                           # looks for accesses of shared memory that no barrier orders
    interpret(monkeypatch, backend_module)              # a whole backend on CPU tensors

It is not a timing model, nor a memory model. What it does check: indices, swizzles, descriptors of wgmma, tcgen05 and TMA (as
the host code really builds them), fragments of ldmatrix, stmatrix and mma, clipping of boxes, phases and counts of mbarriers
(a wrong count hangs, and is reported), named barriers, tails, tensor memory. Not initialised memory reads as NaN; an access
between arrays, beyond the launch's shared memory or misaligned is an error.

A correct kernel gives the same result in every order of `ORDERS`; between them these expose most missing waits. Not seen:
proxy and tcgen05 fences, bank conflicts, registers, and races that no order happens to expose, unless they are looked for.
Sums of products are exact and then rounded to fp32: once a chain for wgmma, once an instruction for tcgen05.

It is fast because straight-line PTX is translated once into Python functions of numpy calls, and all warps that stand at the
same place go through them together. Instructions that no kernel has used yet raise `Unsupported` with their text.

| module                              | what                                                                          |
|-------------------------------------|-------------------------------------------------------------------------------|
| `simulate.py`                       | the entry: compile, place tensors, run                                        |
| `host.py`, `_operations`, `_types`  | the host code: arguments, TMA descriptors, launches                           |
| `instruction.py`, `program.py`      | PTX parsed                                                                    |
| `translate.py`                      | instructions turned into Python                                               |
| `operations.py`, `registers.py`     | what that Python calls and sees                                               |
| `block.py`, `cluster.py`            | the scheduler of a block's warps; of the blocks of a cluster                  |
| `launch.py`                         | the grid                                                                      |
| `barriers.py`, `copies.py`          | named barriers and mbarriers; TMA, bulk copies, cp.async                      |
| `races.py`                          | what barriers order, and accesses of shared memory that they do not           |
| `flight.py`                         | reads of shared memory that a barrier does not wait for                       |
| `wgmma.py`, `tcgen05.py`            | tensor cores of Hopper and Blackwell, tensor memory                           |
| `memory.py`, `values.py`            | global memory, TMA descriptors, operands in shared memory; number formats     |
"""

import os

# Products here are small: BLAS threads only cost, and much on a busy machine. It works if numpy is not imported yet; a caller
# that imports numpy first sets the variable itself.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from tools.ptx.block import ORDERS
from tools.ptx.simulate import Compiled, Pointer, compile_all, compile_together, compiled, interpret, simulate
from tools.ptx.values import HostError, SimulationError, Unsupported

__all__ = [
    "ORDERS",
    "Compiled",
    "HostError",
    "Pointer",
    "SimulationError",
    "Unsupported",
    "compile_all",
    "compile_together",
    "compiled",
    "interpret",
    "simulate",
]
