# SPDX-License-Identifier: Apache-2.0
"""`python -m cula.fuzz`: `run.py`, which processes of its own can import; they could not import this."""

import sys

from cula.fuzz.run import main

if __name__ == "__main__":
    sys.exit(main())
