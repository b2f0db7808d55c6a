# SPDX-License-Identifier: Apache-2.0
"""Arrivals at mbarriers by whole warps."""

from __future__ import annotations

import cutlass.cute as cute


@cute.jit
def arrive(bar: cute.Pointer):
    """This warp has done it: after all its lanes have."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(bar)


@cute.jit
def publish(bar: cute.Pointer):
    """The same for what it has written, which products are to read."""
    cute.arch.fence_proxy("async.shared", space="cta")
    arrive(bar)
