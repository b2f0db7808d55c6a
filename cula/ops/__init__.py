# SPDX-License-Identifier: Apache-2.0
"""Raw kernels: tensors in, tensors out. No autograd, no choice of backend, no checks of user input.

Every backend is a folder here, with a `backend.py` that says what it is and what it serves, and a module for each family; the
functions of those are listed in `cula/core/kernels.py`. Swapping one backend for another is importing another module.
"""
