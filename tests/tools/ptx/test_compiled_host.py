# SPDX-License-Identifier: Apache-2.0
"""What the compiled host code of a variant hands to the CUDA runtime is what the simulator reads from its text.

The simulator never runs a variant's library: it interprets the code that the library was compiled from. Here the library runs, on
a stand-in of the runtime that writes launches down: same kernels, grids, attributes, TMA descriptors and other parameters.
"""

import json
import random
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from cula.ops.cute.toolchain import build
from cula.ops.cute.toolchain.variants import modules_of
from tests.support.cute import needs_dsl
from tests.support.slow import slow_but
from tests.support.variants import (
    BLACKWELL_GDN,
    BLACKWELL_KDA,
    DECODE_STEPS,
    HOPPER_DECODE,
    HOPPER_FUSED_KDA,
    HOPPER_GDN,
    HOPPER_GDN_BWD,
    HOPPER_KDA,
    HOPPER_KDA_BWD,
    HOPPER_LIGHTNING,
    HOPPER_LIGHTNING_BWD,
)
from tools.ptx import compiled
from tools.ptx.host import ATTRIBUTE_BYTES, BASE, CLUSTER_DIMENSION, Host
from tools.ptx.simulate import text_folder

HERE = Path(__file__).parent
DRAWS = 3  # calls of each variant
STREAM = 0x7700
CHOICES = ("has_", "home_of_", "makes")  # numbers that choose what is launched; others may be divisors
STARTS_EARLY = 6  # cudaLaunchAttributeProgrammaticStreamSerialization


class Filled(Host):
    """Host code whose new memory holds one byte everywhere: what differs between two fills, nobody wrote."""

    def __init__(self, text, fill):
        self.fill = fill
        super().__init__(text)

    def allocate(self, n, align=64):
        address = super().allocate(n, align)
        self.memory[address - BASE : address - BASE + n] = bytes([self.fill]) * n
        return address


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    """The stand-in, compiled."""
    library = tmp_path_factory.mktemp("runtime") / "runtime.so"
    command = [str(build.linker()), "-x", "c", "-shared", "-fPIC", "-O1", "-o", str(library), str(HERE / "runtime.c")]
    subprocess.run(command, check=True)
    return library


def draw(text, seed):
    """Arguments of the types that the compiled function names, but for the stream: addresses and small numbers."""
    random.seed(seed)
    signature = re.search(r"when calling: `\w+\((.*?), stream: ", text)[1]
    drawn = []
    for name, kind in re.findall(r"(\w+): (\w+)", signature):
        number = random.randint(0, 2) if name.startswith(CHOICES) else random.randint(1, 40)
        drawn.append({"int64": 256 * random.randint(1, 2**30), "int32": number, "float32": random.random()}[kind])
    return drawn


def attributes_of(raw):
    """The attributes of a launch that decide where its blocks run and when."""
    found = {}
    for at in range(0, len(raw), ATTRIBUTE_BYTES):
        kind, *words = struct.unpack_from("<i4x3i", raw, at)
        found[kind] = words
    return found


def same(raw, first, second):
    """Whether a parameter is what was interpreted twice, where the two agree."""
    return all(a != b or a == c for a, b, c in zip(first, second, raw, strict=True))


HOST_FUNCTIONS = [  # a variant of each
    *(("sm_90a", name) for name in (HOPPER_KDA[0], HOPPER_FUSED_KDA[0], HOPPER_KDA_BWD[0], HOPPER_GDN[2], HOPPER_GDN_BWD[0])),
    *(("sm_90a", name) for name in (HOPPER_LIGHTNING[1], HOPPER_LIGHTNING_BWD[0], HOPPER_DECODE[0], DECODE_STEPS[0])),
    *(("sm_100a", name) for name in (BLACKWELL_KDA[0], BLACKWELL_GDN[0])),
]
QUICK = [("sm_90a", name) for name in (HOPPER_KDA[0], HOPPER_GDN[2])]


def run(runtime, arch, name, calls):
    """What the library launches in each of the calls."""
    library = text_folder(arch, modules_of(arch)) / f"{name}.so"
    command = [sys.executable, str(HERE / "call_compiled.py"), str(runtime), str(library), name]
    done = subprocess.run(command, input=json.dumps(calls), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def differences(runtime, variant, text):
    """Where the launches of a variant's library differ from those of a text of its host code."""
    arch, name = variant
    calls = [draw(text, seed) for seed in range(DRAWS)]
    of_zeros, of_ones = [[host.call(*arguments) for arguments in calls] for host in (Filled(text, 0), Filled(text, 0xFF))]
    sizes = [{launch.kernel: [len(p) for p in launch.parameters] for launch in made} for made in of_zeros]
    launched = run(runtime, arch, name, [([*arguments, STREAM], of) for arguments, of in zip(calls, sizes)])
    assert any(launched)
    for launches, ours, again in zip(launched, of_zeros, of_ones, strict=True):
        for found, mine, other in zip(launches, ours, again, strict=True):
            attributes = attributes_of(bytes.fromhex(found["attributes"]))
            seen = {
                "kernel": found["kernel"] == mine.kernel,
                "stream": found["stream"] == STREAM,
                "grid": (tuple(found["grid"]), tuple(found["block"]), found["smem"]) == (mine.grid, mine.block, mine.smem),
                "cluster": tuple(attributes.get(CLUSTER_DIMENSION, (1, 1, 1))) == mine.cluster,
                "start": attributes[STARTS_EARLY][0] == 1,
            }
            yield from (what for what, is_same in seen.items() if not is_same)
            for raw, first, second in zip(found["parameters"], mine.parameters, other.parameters, strict=True):
                if not same(bytes.fromhex(raw), first, second):
                    yield "parameters"


@needs_dsl
@pytest.mark.parametrize("variant", slow_but(HOST_FUNCTIONS, QUICK), ids="-".join)
def test_a_library_launches_what_was_interpreted(runtime, variant):
    arch, name = variant
    assert not [*differences(runtime, variant, compiled(name, arch).host)]


@needs_dsl
@pytest.mark.parametrize(
    ("edit", "expected"),
    [(("llvm.sub", "llvm.add"), "parameters"), pytest.param(("llvm.sdiv", "llvm.mul"), "grid", marks=pytest.mark.slow)],
)
def test_another_text_is_noticed(runtime, edit, expected):
    name = HOPPER_KDA[0]
    assert expected in differences(runtime, ("sm_90a", name), compiled(name).host.replace(*edit))
