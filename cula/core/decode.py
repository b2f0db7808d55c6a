# SPDX-License-Identifier: Apache-2.0
"""The life of a decode, for every family: look for a recorded launch, check (`decode_checks.py`), choose, run, record. It is that
of a prefill, which `core/prefill.py` draws.
"""

from __future__ import annotations

import functools
import operator as operators
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from cula import settings
from cula.core import checks, operator
from cula.core.choosing import check_and_choose
from cula.core.decode_checks import DecodeRequest, check_values, describe_decode, has_values
from cula.core.device import running_on
from cula.core.dispatch import Choice, choose_decode
from cula.core.explain import is_explaining
from cula.core.family import FAMILIES, Decode, Family, decode_modes
from cula.core.problem import DecodeOptions, needs_grad, with_settings
from cula.core.replay.torch_internals import modes


def decode(
    family: Family,
    x: Any,
    options: DecodeOptions,
    *,
    device: torch.device | str | None = None,
    backend: str = "auto",
    extra: dict[str, Any] | None = None,
    who: str = "cula_decode",
) -> Any:
    """Make a decode of a family: `(o, state)`, o of v's shape and the pool that was passed in.

    Args:
        x: the family's decode inputs.
        extra: keywords that the function does not know, for the backend; what that does not know either is refused.
        who: how errors call the function.
    """
    assert family.decode is not None
    if options.scale is not None:
        options = options._replace(scale=checks.as_number(who, "scale", options.scale))
    if is_dynamo_compiling() or (modes() and not is_explaining.get()):
        return operator.call_decode(family, x, options, device, backend, extra, who)
    options = with_settings(options)
    static_args, has_data = None, not checks.has_no_data(x.q)
    if has_data and not (extra or is_explaining.get()):
        static_args = (options, device, backend)
        done = family.decode.replay.run(x, static_args)
        if done is None:  # its record does not fit, and stays as it is
            static_args = None
        elif done is not NotImplemented:
            return done
        elif not needs_grad(x) and (found := family.decode.chosen.find(x, static_args)) is not None:
            request, kernel = found
            request = request._replace(x=x)
            if has_values(x):
                check_values(request)
            with running_on(x.q):
                o = kernel(request.problem, x)
            return (o if x.out is None else x.out), x.state
    if torch.compiler.is_compiling() or not (has_data or is_explaining.get()):
        # torch.export, by another way than dynamo; shapes without data
        return operator.call_decode(family, x, options, device, backend, extra, who)

    describe_this = functools.partial(describe_decode, family, x, options, device, who)
    known = family.decode.keywords() if extra else ()
    request, choice = check_and_choose(describe_this, choose_decode, backend, extra or (), known, who, x)
    if settings.check_values() or (x.q.device.type == "cpu" and has_values(x)):
        check_values(request)
    with running_on(x.q):
        kernel = choice.backend.load(family.name, f"{family.name}_decode")
        o = kernel(request.problem, request.x)
        if static_args is not None and x.q.device.type == "cpu" and all(a is b for a, b in zip(request.x, x)):
            family.decode.chosen.keep(x, static_args, (request._replace(x=None), kernel))  # without this call's tensors
        elif static_args is not None:
            family.decode.replay.keep(x, static_args, lambda: record(request, choice, x))
    if x.out is not None:
        return x.out, x.state
    return o.view(x.v.shape) if request.is_packed else o, x.state


def record(request: DecodeRequest, choice: Choice, given: Any) -> Any:
    """A record of launches for calls like this one, where the backend has one for it.

    It takes tensors as they come. They do for the kernel where normalising copied nothing: their addresses are the same, and so
    the strides that the checked ones have.
    """
    if any(a is not None and b is not None and a.data_ptr() != b.data_ptr() for a, b in zip(given, request.x)):
        return None
    make = choice.backend.find(request.family.name, f"record_{request.family.name}_decode")
    return None if make is None else make(request.problem, request.x, given)


# The tensors of `cula_decode`, of which each family takes those that it has.
CALL_FIELDS = (
    "q", "k", "v", "state", "state_indices", "g", "beta", "A_log", "dt_bias", "decay",
    "num_accepted_tokens", "intermediate_states", "intermediate_state_indices", "cu_seqlens", "out",
)  # fmt: skip


def call_decode(
    mode: str,
    tensors: tuple[Tensor | None, ...],
    options: tuple[Any, ...],
    device: torch.device | str | None,
    backend: str,
    extra: dict[str, Any],
    who: str,
) -> Any:
    """`decode` for `cula_decode`: takes plain tuples, of `CALL_FIELDS` and of `DecodeOptions`, so that a call seen before makes
    no others. Tensors of a family that have no name among the fields are taken out of `extra`."""
    family = FAMILIES.get(mode)
    traits: Decode | None = None if family is None else family.decode
    if family is None or traits is None:
        raise ValueError(f"{who}: mode is {mode!r}; expected one of {list(decode_modes())}")
    if extra or is_dynamo_compiling() or modes() or is_explaining.get() or settings.batch_invariant():
        return decode(
            family,
            _named_inputs(family, tensors, extra, who),
            DecodeOptions(*options),
            device=device,
            backend=backend,
            extra=extra,
            who=who,
        )
    pick, strays = _picks(traits.Inputs)
    for i in strays:
        if tensors[i] is not None:
            raise _stray(family, CALL_FIELDS[i], who)
    done = traits.replay.run(pick(tensors), (options, device, backend))
    if done is not None and done is not NotImplemented:
        return done
    return decode(family, traits.Inputs(*pick(tensors)), DecodeOptions(*options), device=device, backend=backend, who=who)


@functools.cache
def _picks(Inputs: Any) -> tuple[Callable[[tuple[Any, ...]], tuple[Any, ...]], tuple[int, ...]]:
    """How a family's inputs are picked from the call's, and the places of those that are none of its own."""
    places = [CALL_FIELDS.index(name) if name in CALL_FIELDS else len(CALL_FIELDS) for name in Inputs._fields]
    strays = tuple(i for i, name in enumerate(CALL_FIELDS) if name not in Inputs._fields)
    pick = operators.itemgetter(*places)
    if len(CALL_FIELDS) in places:  # a name that the call does not have: None, as long as it is not given
        return (lambda tensors: pick((*tensors, None))), strays
    return pick, strays


def _named_inputs(family: Family, tensors: tuple[Tensor | None, ...], extra: dict[str, Any], who: str) -> Any:
    """The family's inputs, with its own among the extra keywords."""
    assert family.decode is not None
    Inputs = family.decode.Inputs
    given = {name: t for name, t in zip(CALL_FIELDS, tensors) if t is not None}
    given |= {name: extra.pop(name) for name in family.decode.own if name in extra}
    for name in given:
        if name not in Inputs._fields:
            raise _stray(family, name, who)
    return Inputs(*[given.get(name) for name in Inputs._fields])


def _stray(family: Family, name: str, who: str) -> ValueError:
    takers = [f"{f.name!r}" for f in FAMILIES.values() if f.decode is not None and name in f.decode.own]
    assert family.decode is not None
    own = " and ".join(f"{n}=" for n in family.decode.own[:2])
    return ValueError(f"{who}: {name}= belongs to mode {' or '.join(takers) or 'no family'}; mode {family.name!r} takes {own}")
