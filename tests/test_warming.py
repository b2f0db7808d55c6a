# SPDX-License-Identifier: Apache-2.0
"""`cula.warmup`: which calls a model makes, which kernels they launch, and where those go."""

import pytest
import torch

import cula
from cula import __main__ as command
from cula import models, warming
from cula.ops.cute.archs import of_target
from cula.ops.cute.toolchain import build, loader
from cula.ops.cute.toolchain.variants import modules_of
from tests.support.cute import needs_dsl

HOPPER, BLACKWELL = of_target("sm_90a"), of_target("sm_100a")
NAMES = ("kimi-linear-48b", "kimi-k3", "qwen3-next", "qwen3.5", "minimax")


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """One that is quick and makes empty libraries; the cache is the test's own. What it was asked for."""
    asked = []

    def write(arch, modules, out, names, **_):
        assert modules == modules_of(arch)
        out.mkdir(parents=True, exist_ok=True)
        for name in names:
            asked.append(name)
            facts = build.Facts(name, arch, (build.KernelFacts(name, 128, 64, 0),), 0, {}, (), 0.1)
            (out / f"{name}.json").write_text(facts.to_json())
            (out / f"{name}.so").write_bytes(b"")
        return [build.read_facts(out, name) for name in names]

    monkeypatch.delenv("CULA_KERNEL_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "build", write)
    monkeypatch.setattr(build, "missing", lambda: None)
    monkeypatch.setattr(build, "dsl_version", lambda: build.DSL_VERSION)
    monkeypatch.setattr(warming, "copy_runtime", lambda out: (out / loader.RUNTIME).write_bytes(b""))
    return asked


def kernels(name: str, tp: int = 1, train: bool = False, arch=HOPPER, sm=(9, 0)) -> list[str]:
    cases = [c for c in warming.calls([name], tp, train) if c.N in (1, 8) and c.T <= 16384]
    return warming.kernel_names(cases, arch, sm, arch.num_sms)


def test_the_kernels_of_a_model():
    assert kernels("kimi-k3", 8) == [
        "decode_1_f32",
        "decode_steps_f32",  # drafts, whose states are kept
        "fused_kda_f16_gate_bf16",
        "fused_kda_f16_log_f32",
        "kda_f16_gate_bf16",
        "kda_f16_log_f32",
    ]
    assert {"gdn_plain_half", "gdn_norm_half", "decode_1_bf16_scalar", "decode_steps_bf16_scalar"} <= set(kernels("qwen3-next"))
    assert {"lightning_d128", "lightning_ends_d128"} <= set(kernels("minimax"))
    assert kernels("kimi-k3", 8, arch=BLACKWELL, sm=(10, 0)) == [
        "decode_1_f32",
        "decode_steps_f32",
        "kda_f16_gate_bf16",
        "kda_f16_log_f32",
    ]


def test_gradients_are_compiled_where_they_are_asked_for():
    assert not [name for name in kernels("kimi-k3", 8) if "bwd" in name]
    assert [name for name in kernels("kimi-k3", 8, train=True) if "bwd" in name]
    assert "bwd_lightning_d128" in kernels("minimax", train=True)


def test_names_are_found_by_their_beginnings():
    for name in NAMES:
        assert {m.family for m in models.find(name)} <= {"kda", "gdn", "lightning"}
    assert [m.name for m in models.find("QWEN3.5")] == ["Qwen3.5-397B", "Qwen3.5-35B", "Qwen3.5-27B"]
    with pytest.raises(ValueError, match="unknown model 'gpt'; there are kimi-linear-48b, kimi-k3"):
        models.find("gpt")
    with pytest.raises(ValueError, match=r"Kimi-K3 has 96 heads .* which 7 ranks cannot share evenly"):
        warming.calls(["kimi-k3"], 7)


def test_the_cache_gets_what_it_lacks(compiler, capsys):
    compiled, calls, _ = cula.warmup("minimax", tp=8, arch="sm_90a", jobs=2)
    assert (sorted(compiler), calls) == (sorted(compiled), 0)
    folder = loader.cache_folder("sm_90a", modules_of("sm_90a"))
    assert {path.stem for path in folder.glob("*.so")} == set(compiled)
    said = capsys.readouterr().err
    assert f"compiling {len(compiled)} kernels for sm_90a in 2 processes: about" in said
    assert f"[{len(compiled)}/{len(compiled)}]" in said
    assert cula.warmup("minimax", tp=8, arch="sm_90a", show=False).kernels == ()
    assert capsys.readouterr().err == ""


def test_a_folder_gathers_the_kernels_of_several_models(compiler, tmp_path, monkeypatch):
    first = cula.warmup("minimax", tp=8, arch="sm_90a", out=tmp_path / "kernels", show=False).kernels
    second = cula.warmup("ling", arch="sm_90a", out=tmp_path / "kernels", show=False).kernels
    assert first and second and not {*first} & {*second}
    manifest = loader.read_manifest(tmp_path / "kernels", "sm_90a")
    assert set(manifest["kernels"]) == {*first, *second}
    monkeypatch.setenv("CULA_KERNEL_DIR", str(tmp_path / "kernels"))
    assert loader.locate(first[0], "sm_90a", modules_of("sm_90a")).is_file()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert command.main(["warmup", "--model", "kimi-k3"]) == 2
    said = capsys.readouterr().err
    assert "torch sees no GPU here" in said
    assert "--arch" in said
    assert command.main(["warmup", "--model", "kimi-k4", "--arch", "sm_90a"]) == 2
    assert "unknown model 'kimi-k4'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="needs arch="):
        cula.warmup("kimi-k3", out="kernels")


def test_without_a_compiler_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(build, "missing", lambda: "no C compiler is installed")
    assert command.main(["warmup", "--model", "ling", "--arch", "sm_90a"]) == 2
    assert "cannot compile kernels for sm_90a: no C compiler is installed" in capsys.readouterr().err


@pytest.mark.slow
@needs_dsl
def test_kernels_are_compiled_and_found(tmp_path, monkeypatch):
    assert command.main(["warmup", "--model", "ling", "--arch", "sm_90a", "--out", str(tmp_path), "--jobs", "2"]) == 0
    monkeypatch.setenv("CULA_KERNEL_DIR", str(tmp_path))
    assert loader.load("decode_1_bf16", "sm_90a") is not None


@pytest.mark.gpu
def test_on_a_gpu_all_is_compiled_and_loaded():
    warmed = cula.warmup("ling", jobs=4)
    assert warmed.calls > 0
    assert cula.warmup("ling", jobs=4).kernels == ()


@needs_dsl
def test_a_negative_number_of_processes_is_refused(compiler):
    with pytest.raises(ValueError, match="jobs is -1; expected 1 or more processes"):
        cula.warmup("kimi-linear-48b", arch="sm_90a", jobs=-1, show=False)
    assert not compiler
