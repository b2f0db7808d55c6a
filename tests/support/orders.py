# SPDX-License-Identifier: Apache-2.0
"""Orders of asynchronous work and of warps that a kernel is simulated in, besides `late`, which all other tests use.

Loads that happen at once show a buffer that is handed back too early. One warp at a time takes longer, and a missing barrier that
it would show is, in most tests, a race too.
"""

import pytest

in_each_order = pytest.mark.parametrize(
    "order", ["early", pytest.param("first", marks=pytest.mark.slow), pytest.param("last", marks=pytest.mark.slow)]
)
