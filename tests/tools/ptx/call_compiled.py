# SPDX-License-Identifier: Apache-2.0
"""A process that calls a compiled variant with nothing but a stand-in of the CUDA runtime below it: what it launches, as JSON.

    python call_compiled.py RUNTIME LIBRARY NAME < calls.json

A call is the arguments and, by the names of kernels, the bytes of each parameter.
"""

import ctypes
import json
import sys


class Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_int32), ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("smem", ctypes.c_uint32),
        ("count", ctypes.c_uint32), ("attributes", ctypes.c_ubyte * (8 * 72)), ("stream", ctypes.c_uint64),
    ]  # fmt: skip


def main():
    runtime = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
    runtime.launch_of.restype, runtime.parameters.restype = ctypes.POINTER(Launch), ctypes.POINTER(ctypes.c_ubyte)
    runtime.set_size.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_uint64
    import tvm_ffi

    function, found = getattr(tvm_ffi.load_module(sys.argv[2]), sys.argv[3]), []
    for arguments, sizes in json.load(sys.stdin):
        numbers = {runtime.number_of(name.encode()): (name, of) for name, of in sizes.items()}
        for number, (_, of) in numbers.items():
            for i, size in enumerate([*of, 0]):
                runtime.set_size(number, i, size)
        runtime.forget()
        function(*arguments)
        found.append(list(read(runtime, numbers)))
    json.dump(found, sys.stdout)


def read(runtime, numbers):
    """What has been launched."""
    at, raw = 0, runtime.parameters()
    for i in range(runtime.launched()):
        launch = runtime.launch_of(i).contents
        name, sizes = numbers[launch.kernel]
        parameters = []
        for size in sizes:
            parameters.append(bytes(raw[at : at + size]).hex())
            at += size
        yield {
            "kernel": name, "parameters": parameters, "grid": list(launch.grid), "block": list(launch.block), "smem": launch.smem,
            "attributes": bytes(launch.attributes[: 72 * launch.count]).hex(), "stream": launch.stream,
        }  # fmt: skip


if __name__ == "__main__":
    main()
