# SPDX-License-Identifier: Apache-2.0
"""Calls with one mistake in them: an error that names the function, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cula.api import cula_decode
from cula.core.family import FAMILIES
from cula.fuzz.draw import Draw
from cula.fuzz.family import fuzz_of

Keywords = dict[str, Any]


def _some_tensor(draw: Draw, kw: Keywords) -> str:
    return draw.one_of([name for name, x in kw.items() if isinstance(x, Tensor) and x.is_floating_point()])


def wrong_rank(draw: Draw, kw: Keywords) -> str:
    name = _some_tensor(draw, {n: x for n, x in kw.items() if n != "A_log"})  # which may have any shape
    kw[name] = kw[name][None, None]
    return f"{name} has two dimensions too many"


def wrong_dtype(draw: Draw, kw: Keywords) -> str:
    name = _some_tensor(draw, kw)
    kw[name] = kw[name].to(draw.one_of((torch.int32, torch.float64)))
    return f"{name} is {kw[name].dtype}"


def one_token_more(draw: Draw, kw: Keywords) -> str:
    B, _, *heads = kw["v"].shape
    kw["v"] = torch.cat([kw["v"], kw["v"].new_zeros(B, 1, *heads)], 1)
    return "v has a token more than q"


def one_head_more(draw: Draw, kw: Keywords) -> str:
    kw["k"] = torch.cat([kw["k"], kw["k"][:, :, :1]], 2)
    return "k has a head more than q"


def misspelt(draw: Draw, kw: Keywords) -> str:
    kw["initial_sate"] = None
    return "a keyword is misspelt"


def not_a_tensor(draw: Draw, kw: Keywords) -> str:
    name = _some_tensor(draw, kw)
    kw[name] = kw[name].tolist()
    return f"{name} is a list"


def unknown_backend(draw: Draw, kw: Keywords) -> str:
    kw["backend"] = "tritn"
    return "the backend does not exist"


def bad_scale(draw: Draw, kw: Keywords) -> str:
    kw["scale"] = "large"
    return "scale is a word"


MISTAKES: tuple[Callable[[Draw, Keywords], str], ...] = (
    wrong_rank, wrong_dtype, one_token_more, one_head_more, misspelt, not_a_tensor, unknown_backend, bad_scale,
)  # fmt: skip


def judge_bad_input(draw: Draw, family: str, keywords: Keywords, is_decode: bool) -> tuple[str, str | None]:
    """Make one mistake in a right call: what it is, and what is wrong with the answer, or None."""
    kw = dict(keywords)
    mistake = draw.one_of(MISTAKES)(draw, kw)
    if is_decode:
        who, function = "cula_decode", cula_decode
    else:
        who, function = FAMILIES[family].function, FAMILIES[family].load_entry()
        for old, new in zip(("q", "k", "v"), fuzz_of(family).arguments):
            kw[new] = kw.pop(old)
    try:
        function(**kw)
    except (TypeError, ValueError) as error:
        if who not in str(error) and "backend" not in str(error):
            return mistake, f"the error does not name {who}: {type(error).__name__}: {error}"
    except Exception as error:
        return mistake, f"expected a TypeError or ValueError, got {type(error).__name__}: {error}"
    else:
        return mistake, "no error was raised"
    for buffer in draw.buffers.values():
        if not buffer.is_untouched():
            return mistake, f"{buffer.name} was changed by a call that raised"
    return mistake, None
