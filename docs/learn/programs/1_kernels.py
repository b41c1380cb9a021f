"""Chapter 1: kernels of one's own, on a GPU, or on one that the CPU emulates.

    python docs/learn/programs/1_kernels.py [FILE.cu]

It compiles kernels.cu (or a copy that you have changed) and compares each kernel with numpy. A GPU
takes nvcc (the extra `gpu` has it) and also tells the speeds; elsewhere any C++ compiler will do.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from dlsys.runtime import toolchain

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[2] / "src"
KERNELS = ("Add", "Transpose", "TransposeTiled", "Sum", "Product", "ProductTiled")
GPU = (  # CUDA_VISIBLE_DEVICES= hides it
    os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    and toolchain.gpu_present()
    and toolchain.find_nvcc() is not None
)
FLAGS = ["-std=c++17", "-shared"]


def build(source: Path, folder: str) -> ctypes.CDLL:
    """The library of a .cu file, compiled by nvcc, or as C++ with the sources of src/emulator."""
    library = str(Path(folder) / "kernels.so")
    if GPU:
        command = [toolchain.find_nvcc(), *FLAGS, "-O3", "-arch=native", "-Xcompiler", "-fPIC"]
        for flag, at in (("-I", toolchain.cuda_include_dir()), ("-L", toolchain.cuda_link_dir())):
            command += [flag + at] if at else []
    else:
        compilers = (os.environ.get("CXX", "g++"), "clang++", "c++")
        compiler = next(filter(shutil.which, compilers), None)
        if compiler is None:
            sys.exit("this needs a C++ compiler, or nvcc and a GPU: install g++ or clang++")
        command = [compiler, *FLAGS, "-O1", "-fPIC", "-pthread", "-w", "-x", "c++"]
        command += [f"-I{SOURCES / 'emulator'}", f"-I{SOURCES}", "-DDLSYS_EMULATED"]
        command += map(str, (SOURCES / "emulator").glob("*.cc"))
    subprocess.run([*command, str(source), "-o", library], check=True)
    made = ctypes.CDLL(library)
    made.run.restype = ctypes.c_float
    return made


def run(library, name, n, blocks, a, b, shape):
    """The kernel's result, and its milliseconds."""
    result = np.full(shape, np.nan, np.float32)
    arrays = [x for a in (a, b, result) for x in (a.ctypes.data_as(ctypes.c_void_p), a.size)]
    ms = library.run(KERNELS.index(name), 20 if GPU else 1, blocks, n, *arrays)
    if ms < 0:
        sys.exit(f"{name}: CUDA's status {-ms:.0f}")
    return result, ms


n = 4096 if GPU else 64
rng = np.random.default_rng(0)
a, b = rng.normal(size=(2, n, n)).astype(np.float32)
tiles, product = (n // 16) ** 2, a @ b
wanted = {  # elements or rows, blocks, shape of the result, the result, bytes, multiply-adds
    "Add": (n * n, 64, (n, n), a + b, 12 * n * n, 0),
    "Transpose": (n, tiles, (n, n), a.T, 8 * n * n, 0),
    "TransposeTiled": (n, tiles, (n, n), a.T, 8 * n * n, 0),
    "Sum": (n * n, 64, (64,), a.sum(), 4 * n * n, 0),
    "Product": (n, tiles, (n, n), product, 0, n**3),
    "ProductTiled": (n, tiles, (n, n), product, 0, n**3),
}
with tempfile.TemporaryDirectory() as folder:
    library = build(Path(sys.argv[1]) if sys.argv[1:] else HERE / "kernels.cu", folder)
    print(f"n = {n}, on {'a GPU' if GPU else 'the emulated GPU, which tells no speed'}")
    for name, (count, blocks, shape, correct, nbytes, flops) in wanted.items():
        result, ms = run(library, name, count, blocks, a, b, shape)
        found = result.sum(dtype=np.float64) if name == "Sum" else result
        right = np.allclose(found, correct, rtol=1e-3, atol=n * 1e-5)
        speed = f"{max(nbytes, 2 * flops) / ms * 1e-6:8.0f} {'GB/s' if nbytes else 'GFLOP/s'}"
        print(f"{name:15} {'right' if right else 'WRONG'} {speed if GPU else ''}".rstrip())
