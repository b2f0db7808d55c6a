# SPDX-License-Identifier: Apache-2.0
"""Run compiled CuTe kernels on a CPU: their PTX, and the host code that launches it, in numpy. No GPU is needed.

    simulate("kda_fwd", q, k, v, o, order="late")       # torch tensors or numpy arrays; o is written
    simulate(..., races=True)                           # looks for accesses that no barrier, or no proxy fence, orders
    simulate(compiled("kda_fwd").edited(ptx=...), ...)  # the same kernel, broken on purpose
    interpret(monkeypatch, backend_module)              # a whole backend on CPU tensors

A correct kernel gives the same result in every order of `ORDERS`. `README.md` says what is modelled and what is not, how to run a
new kernel, how orders and races work, how to write a mutation test, and how to add an instruction.

| module                              | what                                                                          |
|-------------------------------------|-------------------------------------------------------------------------------|
| `simulate.py`                       | the entry: compile, place tensors, run                                        |
| `mutate.py`                         | edits that break a kernel, for mutation tests                                 |
| `host.py`, `_operations`, `_types`  | the host code: arguments, TMA descriptors, launches                           |
| `instruction.py`, `program.py`      | PTX parsed                                                                    |
| `translate.py`                      | instructions turned into Python                                               |
| `operations.py`, `registers.py`     | what that Python calls and sees                                               |
| `launch.py`                         | the grid                                                                      |
| `cluster.py`, `block.py`            | the scheduler: of the blocks of a cluster, of the warps of a block; orders    |
| `barriers.py`, `copies.py`          | named barriers and mbarriers; TMA, bulk copies, cp.async                      |
| `wgmma.py`, `tcgen05.py`            | tensor cores of Hopper and Blackwell, tensor memory                           |
| `races.py`                          | what barriers order, and accesses of shared memory that they do not           |
| `flight.py`                         | reads of shared memory that a barrier does not wait for                       |
| `proxies.py`                        | proxy fences: accesses that barriers alone do not order                       |
| `memory.py`, `values.py`            | global memory, TMA descriptors, operands in shared memory; number formats     |
| `example/`                          | the kernel of `README.md`                                                     |
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
