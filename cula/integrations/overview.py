# SPDX-License-Identifier: Apache-2.0
"""All integrations: which package is installed, whether cuLA is in it, what turns it on."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cula.integrations import fla, sglang, transformers, vllm
from cula.integrations.changes import logger


@dataclass(frozen=True)
class Integration:
    """One package that cuLA goes into."""

    package: str  # as it is imported
    distributions: tuple[str, ...]  # as it is installed
    line: str  # what turns cuLA on in it
    is_on: Callable[[], bool]
    turn_on: Callable[[], list[str]] | None = None  # None: the package itself does, when it starts
    turn_off: Callable[[], None] | None = None
    silenced: Callable[[], str | None] = lambda: None  # why the package leaves cuLA alone though it is on, if it does

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None

    @property
    def version(self) -> str | None:
        for name in self.distributions:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None


def _register_with_fla() -> list[str]:
    return fla.register(cpu_modules=not torch.cuda.is_available() and importlib.util.find_spec("fla.backends") is not None)


INTEGRATIONS = (
    Integration(
        "fla", ("flash-linear-attention", "fla-core"), "cula.integrations.fla.register()", fla.is_registered, _register_with_fla,
        fla.unregister, fla.silenced,
    ),
    Integration(
        "transformers", ("transformers",), "cula.integrations.transformers.patch()", transformers.is_patched, transformers.patch,
        transformers.unpatch,
    ),
    Integration("vllm", ("vllm",), "CULA_VLLM=1 in the environment of vLLM", vllm.is_registered),
    Integration("sglang", ("sglang",), "--linear-attn-backend cula of SGLang's server", sglang.is_registered),
)  # fmt: skip


def enable() -> dict[str, str]:
    """Put cuLA into every package that is installed and can be changed from here, and say what was done.

    flash-linear-attention (without a GPU also with what its models need on a CPU) and Hugging Face transformers. vLLM and SGLang
    find cuLA themselves when they start, and say how they are asked to use it.

    Returns:
        What was done, by package. The logger `cula` says the same at INFO.

    Example:
        >>> import cula.integrations
        >>> done = cula.integrations.enable()  # doctest: +SKIP
    """
    done = {}
    for integration in INTEGRATIONS:
        if not integration.is_installed:
            done[integration.package] = "not installed"
        elif integration.turn_on is None:
            done[integration.package] = f"on with {integration.line}"
        else:
            was_on = integration.is_on()  # maybe without all that is turned on here
            changed = integration.turn_on()
            otherwise = "was on" if was_on else "on, for models that are imported from now on"
            done[integration.package] = f"on: {', '.join(changed)}" if changed else otherwise
        if integration.is_on() and (reason := integration.silenced()):
            done[integration.package] += f"; but {reason}"
        logger.info("cula.integrations.enable: %s: %s", integration.package, done[integration.package])
    return done


def disable() -> None:
    """Undo `enable()`, and every `register()` and `patch()`."""
    for integration in INTEGRATIONS:
        if integration.turn_off is not None:
            integration.turn_off()


def describe() -> list[str]:
    """A line for each: whether it is installed and on, and what turns it on."""
    lines = []
    for integration in INTEGRATIONS:
        if not integration.is_installed:
            state = "not installed"
        else:
            state = f"{integration.version or 'installed'}, {'on' if integration.is_on() else f'off: {integration.line}'}"
            if integration.is_on() and (reason := integration.silenced()):
                state += f"; but {reason}"
        lines.append(f"{integration.package:<13} {state}")
    return lines
