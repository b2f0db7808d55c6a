# SPDX-License-Identifier: Apache-2.0
import sys

from cula.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
