# SPDX-License-Identifier: Apache-2.0
"""Hand-tuned kernels in CuTe DSL, one folder an architecture; `docs/cute.md` follows a kernel from source to launch.

| module        | what                                                                                            |
|---------------|-------------------------------------------------------------------------------------------------|
| `variants.py` | what a kernel module exports, and the one table of them                                         |
| `build.py`    | variants compiled in a process of their own, no GPU needed: `.so` files and facts about each    |
| `loader.py`   | a kernel by its name: from `CULA_KERNEL_DIR`, or from the cache, compiled first if it is not there |

Kernel modules import cutlass at their top. Nothing else here does, `__init__.py` files included: a machine that has been
given compiled kernels needs no DSL.
"""
