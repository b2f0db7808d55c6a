# SPDX-License-Identifier: Apache-2.0
"""Lightning prefill by the names existing code imports: scale 1 by default, pool updated in place."""

import pytest
import torch

from cula import reference
from cula.lightning import lightning_attn_fwd, lightning_attn_fwd_varlen
from cula.reference import relative_error
from tests.support.calls import LightningCall


def test_lightning_attn_fwd():
    t = LightningCall(T=70, H=2, HV=2).tensors()
    want_o, want_state = reference.lightning(**t, scale=1.0)
    o, state = lightning_attn_fwd(t["q"], t["k"], t["v"], t["decay"], initial_state=t["initial_state"], output_final_state=True)
    assert relative_error(o, want_o) < 1e-5
    assert relative_error(state, want_state) < 1e-5
    assert lightning_attn_fwd(t["q"], t["k"], t["v"], t["decay"])[1] is None


def test_varlen_updates_the_pool_it_is_given():
    t = LightningCall(lens=(10, 0, 30), H=2, HV=2).tensors()
    pool = torch.randn(4, 2, 32, 32)
    want_o, want_state = reference.lightning(**t | {"initial_state": pool[[3, 1, 0]]}, scale=1.0)
    slots = torch.tensor([3, 1, 0], dtype=torch.int32)
    o, returned = lightning_attn_fwd_varlen(
        t["q"], t["k"], t["v"], t["decay"], t["cu_seqlens"], state_pool=pool, initial_state_indices=slots
    )
    assert returned is pool
    assert relative_error(o, want_o) < 1e-5
    assert relative_error(pool[[3, 1, 0]], want_state) < 1e-5


def test_varlen_makes_a_pool():
    t = LightningCall(lens=(10, 30), initial_state=False).tensors()
    want_o, want_state = reference.lightning(**t, scale=1.0)
    o, pool = lightning_attn_fwd_varlen(t["q"], t["k"], t["v"], t["decay"], t["cu_seqlens"])
    assert relative_error(o, want_o) < 1e-5
    assert relative_error(pool, want_state) < 1e-5


def test_level_0_is_strict_about_offsets():
    t = LightningCall(lens=(10, 30)).tensors()
    with pytest.raises(TypeError, match="int32"):
        lightning_attn_fwd_varlen(t["q"], t["k"], t["v"], t["decay"], t["cu_seqlens"].long())
    with pytest.raises(ValueError, match="state_pool"):
        lightning_attn_fwd_varlen(t["q"], t["k"], t["v"], t["decay"], t["cu_seqlens"], initial_state_indices=torch.tensor([0, 1]))
    with pytest.raises(TypeError, match="lightning_attn_fwd_varlen: cu_seqlens is NoneType"):
        lightning_attn_fwd_varlen(*[t[n] for n in ("q", "k", "v", "decay")], None)


def test_varlen_names_what_has_another_rank():
    t = LightningCall(lens=(10, 30)).tensors()
    tokens = {"Q": t["q"], "K": t["k"], "V": t["v"]}
    for name, x in tokens.items():
        with pytest.raises(ValueError, match=f"lightning_attn_fwd_varlen: {name} has shape .*; expected four dimensions"):
            lightning_attn_fwd_varlen(**tokens | {name: x[0]}, decay=t["decay"], cu_seqlens=t["cu_seqlens"])
    with pytest.raises(ValueError, match=r"lightning_attn_fwd_varlen: cu_seqlens has shape \[\]; expected \[N \+ 1\]"):
        lightning_attn_fwd_varlen(**tokens, decay=t["decay"], cu_seqlens=t["cu_seqlens"][0])
