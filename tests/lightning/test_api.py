# SPDX-License-Identifier: Apache-2.0
"""`cula_lightning` by either spelling of its tokens."""

import pytest
import torch

import cula

Q, K, V = (torch.randn(1, 40, 2, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
DECAY = torch.tensor([0.1, 0.5])


def test_either_spelling():
    want, _ = cula.cula_lightning(Q, K, V, DECAY)
    for o, _ in (
        cula.cula_lightning(Q=Q, K=K, V=V, decay=DECAY),
        cula.cula_lightning(q=Q, k=K, v=V, decay=DECAY),
        cula.cula_lightning(Q, K, v=V, decay=DECAY),
    ):
        assert torch.equal(o, want)
    assert cula.explain("lightning", q=Q, k=K, v=V, decay=DECAY).name == "torch"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"Q": Q, "q": Q, "k": K, "v": V, "decay": DECAY}, "got 'Q' and 'q', which are the same argument"),
        ({"q": Q, "v": V, "decay": DECAY}, "missing argument 'K' or 'k'"),
        ({"q": Q, "k": K, "v": V}, "missing argument 'decay'"),
        ({}, "missing argument 'Q' or 'q'"),
    ],
    ids=["both", "no k", "no decay", "nothing"],
)
def test_what_is_missing_or_given_twice_is_said(arguments, said):
    with pytest.raises(TypeError, match=f"cula_lightning: {said}"):
        cula.cula_lightning(**arguments)


def test_either_spelling_in_a_graph():
    compiled = torch.compile(lambda q, k, v: cula.cula_lightning(q=q, k=k, v=v, decay=DECAY)[0], backend="eager", fullgraph=True)
    assert torch.allclose(compiled(Q, K, V), cula.cula_lightning(Q, K, V, DECAY)[0])
