# SPDX-License-Identifier: Apache-2.0
"""Every CuTe kernel compiles and fits, for every architecture of the table, without a GPU."""

import re
from pathlib import Path

import pytest

from cula.ops.cute.toolchain import build
from cula.ops.cute.toolchain.variants import MODULES
from tests.support.cute import needs_dsl
from tests.support.variants import BLACKWELL_DECODE, BLACKWELL_KDA, HOPPER_KDA_BWD, MORE_BLACKWELL_KDA
from tools.ptx import compile_all, compiled
from tools.ptx.simulate import text_folder
from tools.sass.scoreboards import NONE, Instruction, instructions, work_before

MAX_SMEM = 227 * 1024  # of a block, on each of these architectures
REGISTERS_OF_SM = 65536
MAX_REGISTERS = 255  # of a thread, without setmaxnreg
TENSOR_MEMORY = 512  # columns of an SM
# Bytes of stack a thread of kernels that spill and are faster so, by the beginning of their names: `docs/log/kda-backward.md`.
# One keeps a word that it reads once a head.
STACK = {"gdn_norm_whole": 8, "bwd_kda": 256, "bwd_gdn_log_bf16_plain": 16, "bwd_gdn_log_f32_plain": 16}

TEST_KERNELS = {"sm_90a": ("tests.support.kernels.hopper",), "sm_100a": ("tests.support.kernels.blackwell",)}
PARTS = 4  # of the package's own kernels, for workers to share
MANY = ("cula.ops.cute.sm90.kda_bwd",)  # modules with so many variants that most are for those who have time
# All of them take minutes: `make test-slow` has those. What other tests simulate compiles there.
CASES = [
    pytest.param(arch, others, (i, PARTS), id=f"{arch}-{i}", marks=pytest.mark.slow)
    for arch, modules in MODULES.items()
    if (others := tuple(m for m in modules if m not in MANY))
    for i in range(PARTS)
]
CASES += [pytest.param("sm_90a", MANY, (i, PARTS), id=f"sm_90a-many-{i}", marks=pytest.mark.slow) for i in range(PARTS)]
CASES += [pytest.param(arch, modules, (0, 1), id=f"{arch}-test-kernels") for arch, modules in TEST_KERNELS.items()]


def complaints(facts: build.Facts) -> list[str]:
    """What is wrong with a kernel that compiled."""
    known = STACK if facts.arch == "sm_90a" else {}
    found, allowed = [], max([0, *(most for name, most in known.items() if facts.name.startswith(name))])
    for kernel in facts.kernels:
        if kernel.stack_bytes > allowed:
            found.append(f"{kernel.stack_bytes} bytes of stack a thread: spills, or an array indexed at run time")
        if kernel.registers > MAX_REGISTERS or kernel.registers * kernel.threads > REGISTERS_OF_SM:
            found.append(f"{kernel.registers} registers in {kernel.threads} threads: more than an SM has")
    if facts.smem_bytes is None:
        found.append("the size of its shared memory is not a constant")
    elif facts.smem_bytes > MAX_SMEM:
        found.append(f"{facts.smem_bytes} bytes of shared memory, of {MAX_SMEM}")
    if facts.tmem_columns > TENSOR_MEMORY:
        found.append(f"{facts.tmem_columns} columns of tensor memory, of {TENSOR_MEMORY}")
    if "tcgen05" in facts.instructions and not facts.tmem_columns:
        found.append("products in tensor memory that nobody allocates")
    found += [f"declares {name}, and its code has none" for name in facts.uses if not facts.instructions.get(name)]
    return found


@needs_dsl
@pytest.mark.parametrize(("arch", "modules", "part"), CASES)
def test_kernels_compile_and_fit(arch, modules, part):
    wrong = {facts.name: found for facts in compile_all(arch, modules, part) if (found := complaints(facts))}
    assert not wrong


@pytest.mark.slow
@needs_dsl
def test_those_of_many_that_are_simulated_fit():
    wrong = {facts.name: found for facts in compile_all("sm_90a", names=HOPPER_KDA_BWD) if (found := complaints(facts))}
    assert not wrong


@needs_dsl
def test_two_blocks_of_the_backward_fit_an_sm():
    """Of the kernel inside of chunks, by 64 bytes: an SM has 228 KB, of which a block costs 1 KB more than it asks for."""
    constants = [int(n) for n in re.findall(r"constant\((\d+) : i64\)", compiled(HOPPER_KDA_BWD[0], "sm_90a").host)]
    (asked_for,) = [n for n in constants if 110_000 < n < 120_000]  # others ask for less, or more
    assert 2 * (-(-asked_for // 128) * 128 + 1024) <= 228 * 1024


@needs_dsl
@pytest.mark.slow
def test_one_code_serves_both_blackwells():
    """So what is shown of sm_100a holds for sm_103a."""
    one, other = (compiled(BLACKWELL_KDA[0], arch).ptx for arch in ("sm_100a", "sm_103a"))
    assert one != other
    assert one.replace(".target sm_100a", ".target sm_103a") == other


def accesses_before_waiting(ptx: str) -> list[str]:
    """Of each kernel in a text, what it does with global memory before it waits for the kernel in front of it, and whether it
    lets the next one start before."""
    found = []
    for body in re.split(r"\.entry\b", ptx)[1:]:
        before, waits, _ = body.partition("griddepcontrol.wait")
        found += ["never waits"] if not waits else []
        found += re.findall(r"\b(?:(?:ld|st|atom|red)\.[\w.:]*global|cp\.async|griddepcontrol\.launch)[\w.:]*", before)
    return found


@needs_dsl
@pytest.mark.parametrize("name", ["decode_1_bf16", "decode_4_f32", "decode_8_bf16_lightning", "bwd_kda_f16_gate_bf16",
                                  "bwd_gdn_log_bf16", "bwd_gdn_softplus_f32", "fused_kda_f16_gate_bf16", "kda_f16_gate_bf16",
                                  "lightning_d128", "lightning_ends_d64", "bwd_lightning_d64", "bwd_lightning_ends_d64",
                                  "gdn_norm_whole", "gdn_plain_whole", "gdn_norm_half", "gdn_plain_half", "decode_steps_f32",
                                  "decode_steps_bf16_scalar"])  # fmt: skip
def test_kernels_wait_before_they_touch_memory(name):
    """They may be launched while the one in front still runs. One token of decode has the slot fetched that is named then, and
    reads it again."""
    first, *others = re.split(r"(?=\.entry\b)", compiled(name, "sm_90a").ptx)[1:]
    hints = ["ld.relaxed.gpu.global.b32", "cp.async.bulk.prefetch.L2.global"] if "decode_1_" in name else []
    if name.startswith("kda_f16"):
        # Both kernels first look at lengths, where the fused one is in front of them, which has waited before it let them start.
        # They end there, or go on to a wait of their own.
        bodies = [body.partition(" exit;") for body in (first, *others)]
        loads = ["ld.relaxed.gpu.global.b32"] * 2
        assert [accesses_before_waiting(look) for look, _, _ in bodies] == [[*loads, "griddepcontrol.launch_dependents"], loads]
        first, *others = [f".entry {rest}" for _, _, rest in bodies]
    assert accesses_before_waiting(first) == hints
    # The walk of KDA's forward reads where sequences begin: who wrote that has ended, since the kernel in front has waited before
    # it let the walk start. Others touch nothing; sections of a backward's workspace come in turns.
    early = {"ld.global.b32"} if name.startswith("kda_f16") else set()
    assert all(set(accesses_before_waiting(other)) <= early for other in others)


def decode_kernels(of_hopper: str, of_blackwell: tuple[str, ...]):
    hopper = [("sm_90a", f"decode_{kind}") for kind in of_hopper.split()]
    return pytest.mark.parametrize(("arch", "name"), hopper + [("sm_100a", name) for name in of_blackwell])


@needs_dsl
@decode_kernels("1_bf16 4_bf16_tall 4_f32_wide 8_bf16_lightning", BLACKWELL_DECODE)
def test_decode_makes_addresses_before_it_waits_for_the_kernel_in_front(arch, name):
    """What the compiler would do behind the wait, ACQBULK, with a hundred instructions between it and the first loads."""
    compiled(name, arch)
    code = [x.text for x in instructions(text_folder(arch) / f"{name}.cubin")]
    wait = code.index("ACQBULK")
    loads = [i for i in range(wait, len(code)) if re.search(r"\bLDG", code[i])]
    assert wait > 60 and loads[0] < wait + 20


@needs_dsl
@decode_kernels("1_bf16 2_bf16 4_bf16 4_bf16_tall 8_bf16 2_f32 4_f32", BLACKWELL_DECODE[:-1])
def test_decode_prepares_while_the_state_is_on_its_way(arch, name):
    """Norms and decays of one token; of several all up to the barrier. That PTX has the loads first is not enough."""
    compiled(name, arch)
    before = work_before(instructions(text_folder(arch) / f"{name}.cubin"), r"LDG\.E\.128")
    enough = "MUFU.LG2" if "_1_" in name else "BAR.SYNC"
    assert any(enough in x.text for x in before), f"waits for the state after {len(before)} instructions"


def test_shared_scoreboards_are_noticed():
    load = lambda at, takes: Instruction(f"LDG.E.128 R4, desc[UR4][R8.64+{at}]", takes, frozenset())
    use = Instruction("FMUL R0, R1, R2", NONE, frozenset({5}))
    code = [load("0x0", 5), load("0x200", 5), Instruction("BAR.SYNC 0x0", NONE, frozenset({3})), use]
    assert work_before(code, r"LDG\.E\.128") == code[2:3]
    assert work_before([*code[:2], use, *code[2:]], r"LDG\.E\.128") == []


@needs_dsl
@pytest.mark.parametrize("name", [*BLACKWELL_KDA, *(pytest.param(n, marks=pytest.mark.slow) for n in MORE_BLACKWELL_KDA)])
def test_blackwells_kernels_wait_before_they_touch_memory(name):
    assert accesses_before_waiting(compiled(name, "sm_100a").ptx) == []


def test_a_kernel_that_does_not_wait_is_noticed():
    text = ".entry a( ) { ld.global.b32 %r1, [%rd1]; griddepcontrol.wait; st.global.b32 [%rd1], %r1; } .entry b( ) { ret; }"
    assert accesses_before_waiting(text) == ["ld.global.b32", "never waits"]


def test_what_does_not_fit_is_noticed():
    kernel = build.KernelFacts("k", threads=384, registers=176, stack_bytes=8)
    facts = build.Facts("bad", "sm_90a", (kernel,), MAX_SMEM + 1, {"tma_load": 2}, ("tma_load", "wgmma"), 0.0, 768)
    text = "\n".join(complaints(facts))
    for part in ("8 bytes of stack", "176 registers in 384 threads", "bytes of shared memory", "768 columns", "declares wgmma"):
        assert part in text
    assert "declares tma_load" not in text


def test_the_release_of_the_dsl_is_stated_once_more_in_pyproject():
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert f'"{build.DSL}=={build.DSL_VERSION}"' in text
