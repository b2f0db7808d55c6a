# SPDX-License-Identifier: Apache-2.0
"""Kernels that never ran on hardware are compared with torch where they first meet it; here with made-up GPUs and figures.

That the comparison itself tells right from wrong is tested with the kernels, in test_kda_waits.py and test_decode.py.
"""

import dataclasses
import warnings
from fnmatch import fnmatchcase

import pytest
import torch

from cula.core.dispatch import choose, choose_prefill
from cula.ops.cute import decode, decode_self_check, kda, kda_self_check, lightning_self_check
from cula.ops.cute.arch import Arch
from cula.ops.cute.backend import BACKENDS
from cula.ops.cute.sm90.arch import HOPPER as HOPPER_ARCH
from cula.ops.cute.toolchain import loader, self_check
from tests.ops.cute.test_kda_dispatch import EITHER, HOPPER
from tests.ops.cute.test_lightning import HOPPER as LIGHTNING_HOPPER

BLACKWELL = dataclasses.replace(HOPPER, sm=(10, 0))
NAME = "kda_bf16_gate_bf16"
HOPPER_BACKEND = next(b for b in BACKENDS if b.name == "cute_sm90")


@pytest.fixture
def new_on_hopper(monkeypatch):
    """Some kernels of Hopper as if nobody had recorded that they ran."""
    listed, of_hopper = Arch.is_new, ("bwd_*", "kda_*", "fused_kda_*")
    monkeypatch.setattr(
        Arch,
        "is_new",
        lambda arch, name: any(fnmatchcase(name, of) for of in of_hopper) if arch is HOPPER_ARCH else listed(arch, name),
    )


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A Blackwell, and a function that says what the comparison would find on it. Returns the list of those made."""
    made = []

    def finds(**found):
        for cached in (self_check._objection, self_check._warn, self_check._gpu_with):
            cached.cache_clear()

        def measure(name, arch, gpu):
            made.append((name, arch, gpu))
            return found

        monkeypatch.setattr(self_check, "_measure", measure)
        return made

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(loader, "missing", lambda arch: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i=0: ((9, 0), (10, 0))[i])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i=0: ("NVIDIA H200", "NVIDIA B200")[i])
    yield finds
    finds()


def test_a_kernel_that_agrees_is_used_and_says_once_that_it_is_new(gpu):
    made = gpu(error=1.8e-3)
    with pytest.warns(UserWarning, match=r"sm_100a kernels.*never run on hardware, but agree .* on this NVIDIA B200"):
        assert choose("kda_fwd", BLACKWELL).name == "cute_sm100"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose("kda_fwd", BLACKWELL).name == "cute_sm100"
    assert made == [(NAME, "sm_100a", 1)]


@pytest.mark.parametrize("error", [3e-2, float("nan"), float("inf")])
def test_one_that_is_off_is_not_used_and_the_figure_is_said(gpu, error):
    gpu(error=error)
    choice = choose("kda_fwd", BLACKWELL)
    assert choice.name == "triton"
    sentence = f"on this GPU {NAME} differs from the torch backend by {error:.1e} (limit 1e-02)"
    assert dict(choice.passed_over)["cute_sm100"] == sentence


def test_a_machine_compares_once(gpu):
    made = gpu(error=3e-2)
    choose("kda_fwd", BLACKWELL)
    gpu(error=0.0)  # as a new process would, were it asked
    assert choose("kda_fwd", BLACKWELL).name == "triton"
    assert len(made) == 1
    with pytest.warns(UserWarning, match="never run on hardware"):
        assert choose("kda_fwd", dataclasses.replace(BLACKWELL, g_dtype=torch.float32)).name == "cute_sm100", "another kernel"
    assert len(made) == 2


def test_a_failure_is_said_and_not_kept(gpu):
    gpu(failure="CUDA error: an illegal memory access was encountered")
    reason = dict(choose("kda_fwd", BLACKWELL).passed_over)["cute_sm100"]
    assert reason == "its first run on this GPU failed: CUDA error: an illegal memory access was encountered"
    gpu(error=1e-3)
    with pytest.warns(UserWarning, match="never run on hardware"):
        assert choose("kda_fwd", BLACKWELL).name == "cute_sm100"


def test_half_a_result_is_none(gpu):
    """As a full disk or a process that was ended in between would leave it: neither raised, nor kept."""
    path = self_check._path(NAME, "sm_100a", "NVIDIA B200")
    path.parent.mkdir(parents=True)
    path.write_text('{"err')
    assert self_check.known(NAME, "sm_100a", "NVIDIA B200") is None
    made = gpu(error=1e-3)
    with pytest.warns(UserWarning, match="never run on hardware"):
        assert choose("kda_fwd", BLACKWELL).name == "cute_sm100"
    assert len(made) == 1
    assert self_check.known(NAME, "sm_100a", "NVIDIA B200") == {"error": 1e-3}


def test_torch_is_compared_with_without_tf32(monkeypatch, tmp_path):
    """Which TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, set in some containers, would have its float32 products be."""
    seen = []
    monkeypatch.setattr(self_check, "worst_error", lambda *_: seen.append(torch.get_float32_matmul_precision()) or 0.0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        self_check.main([NAME, "0", str(tmp_path / "found.json")])
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == ["highest"]


def test_explaining_a_call_starts_nothing(gpu):
    """It goes by what this machine has found before; until then the kernel is named, which will compare itself."""
    made = gpu(error=3e-2)
    assert choose("kda_fwd", BLACKWELL, may_run=False).name == "cute_sm100"
    assert not made
    choose("kda_fwd", BLACKWELL)
    assert len(made) == 1
    gpu(error=0.0)
    reason = dict(choose("kda_fwd", BLACKWELL, may_run=False).passed_over)["cute_sm100"]
    assert "differs from the torch backend by 3.0e-02" in reason
    assert len(made) == 1


def test_it_can_be_switched_off(gpu, monkeypatch):
    made = gpu(error=1.0)
    monkeypatch.setenv("CULA_SELF_CHECK", "0")
    with pytest.warns(UserWarning, match="never run on hardware, and CULA_SELF_CHECK=0 leaves out comparing"):
        assert choose("kda_fwd", BLACKWELL).name == "cute_sm100"
    assert not made


def test_hardware_with_recorded_runs_is_not_compared(gpu):
    made = gpu(error=1.0)
    assert choose("lightning_fwd", LIGHTNING_HOPPER).name == "cute_sm90"
    assert not made


TRAINING = dataclasses.replace(LIGHTNING_HOPPER, device="cuda", needs_grad=True)


def test_a_new_kernel_of_hardware_with_recorded_runs_is(new_on_hopper, gpu):
    made = gpu(error=1.4e-3)
    with pytest.warns(UserWarning, match=r"sm_90a kernels.*never run on hardware, but agree .* on this NVIDIA H200"):
        choice = choose_prefill(TRAINING)
    assert (choice.name, choice.backward.name) == ("cute_sm90", "cute_sm90")
    assert made == [("bwd_lightning_d128", "sm_90a", 0)]
    gpu(error=2e-2)
    other = choose_prefill(dataclasses.replace(TRAINING, K=64, V=64))
    assert (other.name, other.backward.name) == ("cute_sm90", "triton")
    assert "bwd_lightning_d64 differs" in dict(other.backward.passed_over)["cute_sm90"]


def test_each_kind_of_kernel_that_a_call_may_take_is_compared(new_on_hopper, gpu, monkeypatch):
    made = gpu(error=1.4e-3)
    names = [f"{kind}kda_f16_gate_bf16" for kind in ("fused_", "")]
    with pytest.warns(UserWarning, match=r"sm_90a kernels.*never run on hardware, but agree"):
        assert choose("kda_fwd", EITHER).name == "cute_sm90"
    assert [name for name, _, _ in made] == names
    for wrong in names:
        finds = {name: {"error": 3e-2 if name == wrong else 0.0} for name in names}
        with monkeypatch.context() as patched:
            patched.setattr(self_check, "_objection", lambda name, *_, finds=finds: self_check.judge(name, finds[name]))
            assert f"on this GPU {wrong} differs" in dict(choose("kda_fwd", EITHER).passed_over)["cute_sm90"]


def test_whoever_explains_a_call_reads_that_its_kernel_is_new(new_on_hopper):
    said = HOPPER_BACKEND.how("lightning_bwd", TRAINING)
    assert "never ran on hardware" in said and "compared with torch" in said
    assert "never ran" not in str(HOPPER_BACKEND.how("lightning_fwd", TRAINING))


def test_they_can_be_declined(new_on_hopper, gpu, monkeypatch):
    made = gpu(error=0.0)
    monkeypatch.setenv("CULA_SELF_CHECK", "decline")
    choice = choose_prefill(TRAINING)
    assert (choice.name, choice.backward.name) == ("cute_sm90", "triton")
    assert "never ran on hardware" in dict(choice.backward.passed_over)["cute_sm90"]
    assert choose("kda_fwd", BLACKWELL).name == "triton"
    assert not made
    monkeypatch.setenv("CULA_SELF_CHECK", "2")
    with pytest.raises(ValueError, match="CULA_SELF_CHECK is 1, 0 or decline; got '2'"):
        choose("kda_fwd", BLACKWELL)


def test_a_call_that_is_only_described_is_not_compared(gpu):
    made = gpu(error=1.0)
    assert choose("kda_fwd", dataclasses.replace(BLACKWELL, sm=(10, 3))).name == "cute_sm100", "no such GPU here"
    assert not made


def test_the_process_that_cannot_run_is_a_failure(monkeypatch):
    monkeypatch.setattr(loader, "locate", lambda *arguments: None)
    found = self_check._measure("no_such_kernel", "sm_100a", 99)
    assert list(found) == ["failure"]
    assert found["failure"]


def test_a_name_says_what_calls_a_kernel_takes():
    for name, want in (
        ("kda_bf16_log_f32", (False, "log", torch.float32, False)),
        ("kda_bf16_safe_bf16", (False, "safe", torch.bfloat16, False)),
        ("kda_f16_softplus_bf16", (True, "softplus", torch.bfloat16, False)),
        ("kda_f16_gate_bf16_scalar", (True, "gate", torch.bfloat16, True)),
    ):
        flags = kda_self_check.Flags.of(name)
        assert flags == want
        p, _ = kda_self_check.make(kda_self_check.CALLS[0], flags, torch.device("cpu"), (10, 0))
        assert kda.variant(p) == name


DECODE = decode_self_check.make(
    decode_self_check.CALLS[0], decode_self_check.Kernel.of("decode_4_bf16"), torch.device("cpu"), (10, 0)
)[0]


def test_decode_compares_itself_too(gpu):
    made = gpu(error=3e-2)
    on_gpu = dataclasses.replace(DECODE, device="cuda")
    choice = choose("kda_decode", on_gpu)
    assert choice.name == "triton"
    assert "decode_4_bf16 differs from the torch backend by 3.0e-02" in dict(choice.passed_over)["cute_sm100"]
    assert made == [("decode_4_bf16", "sm_100a", 1)]
    gpu(error=1e-3)
    with pytest.warns(UserWarning, match="never run on hardware"):
        assert choose("kda_decode", dataclasses.replace(on_gpu, T=8)).name == "cute_sm100", "another kernel"
    assert made[1:] == [("decode_8_bf16", "sm_100a", 1)]


@pytest.mark.parametrize(
    "name",
    ["decode_1_bf16", "decode_1_bf16_scalar", "decode_8_f32", "decode_8_bf16_lightning", "decode_steps_f32_scalar",
     "decode_steps_bf16"],
)  # fmt: skip
def test_calls_of_a_decode_kernel_are_those_that_it_takes(name):
    """But for its shape, which their small size does not ask for: they are told the kernel's name."""
    kernel = decode_self_check.Kernel.of(name)
    problems = [decode_self_check.make(call, kernel, torch.device("cpu"), (10, 0))[0] for call in decode_self_check.CALLS]
    assert all(decode.why_not("decode", p) is None and p.pool_dtype == kernel.pool for p in problems)
    assert {decode.variant(dataclasses.replace(p, T=kernel.tokens)).replace("_wide", "") for p in problems} == {name}
    assert kernel.tokens == 1 or {p.T for p in problems} == {kernel.tokens, kernel.tokens - 1}
    if kernel.family == "kda":
        assert {p.gate for p in problems} == {"bounded", "softplus", "log"}
        assert {p.g_dtype for p in problems} == {p.beta_dtype for p in problems} == {torch.bfloat16, torch.float32}
        assert any(p.has_scalar_gate for p in problems) == kernel.takes_scalar_gates
        assert all(p.has_scalar_gate for p in problems) != kernel.takes_channel_gates


def test_lightning_is_checked_too(gpu):
    made = gpu(error=2.4e-3)
    problem = dataclasses.replace(LIGHTNING_HOPPER, sm=(10, 0))
    with pytest.warns(UserWarning, match=r"sm_100a kernels.*never run on hardware, but agree .* on this NVIDIA B200"):
        choice = choose("lightning_fwd", problem)
    assert choice.name == "cute_sm100" and "never run on hardware" in str(choice)
    assert choose("lightning_fwd", dataclasses.replace(problem, K=64, V=64)).name == "cute_sm100"
    assert made == [("lightning_d128", "sm_100a", 1), ("lightning_d64", "sm_100a", 1)]
    gpu(error=3e-2)
    other = choose("lightning_fwd", dataclasses.replace(problem, K=128, V=128), may_run=False)
    assert other.name == "cute_sm100", "what was found before holds"
    declined = choose("lightning_fwd", dataclasses.replace(problem, K=256, V=256))
    assert dict(declined.passed_over)["cute_sm100"].startswith("takes head dims K = V of")


def test_a_lightning_kernel_that_is_off_is_not_used(gpu):
    gpu(error=3e-2)
    choice = choose("lightning_fwd", dataclasses.replace(LIGHTNING_HOPPER, sm=(10, 0)))
    assert choice.name == "triton"
    sentence = "on this GPU lightning_d128 differs from the torch backend by 3.0e-02 (limit 1e-02)"
    assert dict(choice.passed_over)["cute_sm100"] == sentence


def test_a_difference_is_relative_and_never_hides_a_number_that_is_none():
    of, zeros = torch.tensor([3.0, 4.0]), torch.zeros(2)
    assert self_check.relative_difference(of, of) == 0.0
    assert self_check.relative_difference(1.01 * of, of) == pytest.approx(0.01, rel=1e-4)
    assert self_check.relative_difference(zeros, zeros) == 0.0, "what steep gates leave of a long sequence's transition"
    none, infinite = torch.full((2,), torch.nan), of / 0
    for got, want in ((of, zeros), (infinite, of), (of, infinite), (infinite, infinite), (none, of), (of, none), (none, none)):
        assert self_check.relative_difference(got, want) == torch.inf


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("lightning_d64", ("d64", 64)),
        ("lightning_d128_half", ("d128_half", 128)),
        ("lightning_ends_d128_half", ("d128_half", 128)),
        ("bwd_lightning_ends_d128", ("d128", 128)),
    ],
)
def test_every_kernel_of_lightning_is_known_by_its_name(name, kernel):
    assert lightning_self_check.kernel_of(name) == kernel
