# SPDX-License-Identifier: Apache-2.0
"""Tools for those who write kernels. They are run from a clone and are no part of the installed package.

| folder  | what                                                                                                   |
|---------|--------------------------------------------------------------------------------------------------------|
| `ptx/`  | a simulator: runs the PTX of compiled CuTe kernels on a CPU, and finds missing waits and races         |
| `sass/` | reads machine code: what ptxas did that neither PTX nor a simulator shows                              |

`compare_code.py` compares compiled kernels of two states of the sources, `fla_tests.py` runs FLA's own tests on cuLA, `wheel.py`
makes a wheel and `try_wheel.py` tries it far from the sources, and `compatibility.py` tries releases of other packages.
"""
