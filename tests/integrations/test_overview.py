# SPDX-License-Identifier: Apache-2.0
"""`cula.integrations.enable()`, what `python -m cula` says of it, and that importing changes nothing."""

import importlib.util
import subprocess
import sys

import pytest

import cula.integrations
from cula import __main__ as command
from cula.integrations import overview
from tests.integrations.absent import hide


@pytest.fixture(autouse=True)
def disabled():
    yield
    cula.integrations.disable()


def test_importing_changes_nothing():
    """Neither the package nor its integrations import what they go into, or leave anything in the import system."""
    code = (
        "import sys; finders = list(sys.meta_path); import cula; assert 'cula.integrations' not in sys.modules; "
        "import cula.integrations, cula.layers; assert sys.meta_path == finders; "
        "assert not {'fla', 'transformers', 'kernels', 'vllm', 'sglang'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_enable_says_what_it_did_and_disable_undoes_it():
    pytest.importorskip("fla.layers", reason="needs flash-linear-attention")
    pytest.importorskip("transformers")
    from fla.ops.simple_gla import chunk as simple_gla

    before = simple_gla.ChunkSimpleGLAFunction
    done = cula.integrations.enable()
    assert "fla.ops.kda.chunk.chunk_kda" in done["fla"] and done["transformers"].startswith("on")
    for engine, words in (("vllm", "CULA_VLLM=1"), ("sglang", "--linear-attn-backend cula")):
        assert (words in done[engine]) if importlib.util.find_spec(engine) else done[engine] == "not installed"
    assert cula.integrations.fla.is_registered() and cula.integrations.transformers.is_patched()
    assert simple_gla.ChunkSimpleGLAFunction is not before
    assert {cula.integrations.enable()[name] for name in ("fla", "transformers")} == {"was on"}
    cula.integrations.disable()
    assert not cula.integrations.fla.is_registered() and not cula.integrations.transformers.is_patched()
    assert simple_gla.ChunkSimpleGLAFunction is before


def test_enable_adds_what_was_left_off(monkeypatch):
    """FLA registered by itself, without what its models need on a CPU: on a machine without a GPU, `enable` brings that."""
    pytest.importorskip("fla.backends", reason="needs flash-linear-attention 0.6")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    cula.integrations.fla.register()
    assert "fla.modules.norm.l2norm.l2norm_fwd" in cula.integrations.enable()["fla"]
    assert cula.integrations.enable()["fla"] == "was on"


def test_enable_says_that_the_environment_turns_it_off(monkeypatch):
    pytest.importorskip("fla.layers", reason="needs flash-linear-attention")
    monkeypatch.setenv("FLA_CULA", "0")
    try:
        assert cula.integrations.enable()["fla"].endswith("; but FLA_CULA=0 in the environment makes FLA pass it over")
        assert "but FLA_CULA=0" in overview.describe()[0]
    finally:
        cula.integrations.disable()


def test_enable_without_any_of_them(monkeypatch):
    for package in ("fla", "transformers", "vllm", "sglang"):
        hide(monkeypatch, package)
    assert set(cula.integrations.enable().values()) == {"not installed"}


def test_the_command_lists_them(capsys, monkeypatch):
    hide(monkeypatch, "vllm")
    command.main([])
    listed = capsys.readouterr().out.split("integrations, and what turns them on\n")[1].split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in listed] == [integration.package for integration in overview.INTEGRATIONS]
    assert "not installed" in listed[2]
    if importlib.util.find_spec("transformers"):
        assert listed[1].endswith("off: cula.integrations.transformers.patch()")
        cula.integrations.transformers.patch()
        assert overview.describe()[1].endswith(", on")
