# SPDX-License-Identifier: Apache-2.0
"""Hand-tuned kernels in CuTe DSL, one folder an architecture; `docs/cute.md` follows a kernel from source to launch.

| where                      | what                                                                                       |
|----------------------------|--------------------------------------------------------------------------------------------|
| `<family>.py`              | the host side: what the kernels serve, which of them a call takes, its launch              |
| `<family>_schedule.py`     | how a call is spread over a GPU, from sizes alone                                          |
| `<family>_abi.py`          | what crosses from host to kernel, described once by the classes of `abi.py`                |
| `<family>_self_check.py`   | the calls that its kernels are tried with at their first use on a machine                  |
| `launch.py`, `tensors.py`  | recorded launches; tensors in the form that kernels take                                   |
| `archs.py`, `arch.py`      | the list of architectures, and what each states about itself in its `arch.py`              |
| `common/`                  | device code that no architecture owns                                                      |
| `sm90/`, `sm100/`          | kernels of an architecture                                                                 |
| `toolchain/`               | compiling, keeping, loading and checking kernels                                           |

Kernel modules and what they share in `common/` import cutlass at their top. Nothing else here does, `__init__.py` files
included: a machine that has been given compiled kernels needs no DSL.
"""
