# SPDX-License-Identifier: Apache-2.0
"""`python -m cula`: version, devices, which backends this machine has (with what to install for the others), and integrations."""

from __future__ import annotations

import platform

import torch

import cula
from cula.core.dispatch import BACKENDS
from cula.integrations import overview
from cula.utils import describe_device


def main() -> None:
    print(f"cuLA {cula.__version__}  (Python {platform.python_version()}, torch {torch.__version__})")
    print("\ndevices")
    for i in range(torch.cuda.device_count()):
        print(f"  {describe_device(f'cuda:{i}')}")
    print(f"  cpu ({torch.get_num_threads()} threads)")
    print("\nbackends, best first")
    for b in BACKENDS:
        status = b.unavailable() or "ready"
        print(f"  {b.name:<11} {b.summary}\n  {'':<11} {status}")
    print("\nintegrations, and what turns them on")
    for line in overview.describe():
        print(f"  {line}")


if __name__ == "__main__":
    main()
