"""Where CUDA is: the compiler, its headers and libraries, and whether a GPU is there at all.

Standard library only and no import of the package, so that the Makefile can run this file:
`python python/dlsys/runtime/toolchain.py nvcc|include|libs|nccl|gpu` prints one line or nothing.
The wheels of `cuda-toolkit[nvcc,...]` unpack to site-packages/nvidia/cu13/{bin,include,lib}; their
nvcc looks for lib64, which wheels lack, so a link needs -L with what `libs` prints.
"""

from __future__ import annotations

import ctypes
import glob
import os
import re
import sys

_LIBRARY_FOLDERS = ("lib64", "lib", "targets/*/lib", "lib/*-linux-gnu")


def _import_folders() -> list[str]:
    return [entry for entry in dict.fromkeys(sys.path) if os.path.isabs(entry)]


def _wheel_folders() -> list[str]:
    # site-packages/nvidia/*: the folders of whole toolkits (cu13) first, the newest of them first.
    folders = [
        folder
        for entry in _import_folders()
        for folder in sorted(glob.glob(os.path.join(glob.escape(entry), "nvidia", "*")))
    ]

    def rank(folder: str) -> int:
        toolkit = re.fullmatch(r"cu(\d+)", os.path.basename(folder))
        return -int(toolkit[1]) if toolkit else 0

    return sorted(folders, key=rank)


def _system_roots() -> list[str]:
    named = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return [root for root in named if root and os.path.isdir(root)]


def find_nvcc() -> str | None:
    """The CUDA compiler: from PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda, or installed wheels."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    folders += [os.path.join(root, "bin") for root in _system_roots() + _wheel_folders()]
    for folder in folders:
        nvcc = os.path.join(folder, "nvcc")
        if os.path.isfile(nvcc) and os.access(nvcc, os.X_OK):
            return nvcc
    return None


def _compiler_roots() -> list[str]:
    # nvcc's own toolkit first; the others serve an nvcc on PATH that is a script in /usr/local/bin.
    nvcc = find_nvcc()
    if nvcc is None:
        return []
    own = os.path.dirname(os.path.dirname(os.path.realpath(nvcc)))
    return [own, *_system_roots(), *_wheel_folders()]


def cuda_include_dir() -> str | None:
    """The folder with cuda_runtime.h that belongs to `find_nvcc()`."""
    for root in _compiler_roots():
        for folder in ("include", "targets/*/include"):
            for header in glob.glob(os.path.join(glob.escape(root), folder, "cuda_runtime.h")):
                return os.path.dirname(header)
    return None


def cuda_link_dir() -> str | None:
    """The folder with libcudart_static.a that belongs to `find_nvcc()`."""
    for root in _compiler_roots():
        for folder in _LIBRARY_FOLDERS:
            for archive in glob.glob(os.path.join(glob.escape(root), folder, "libcudart_static.a")):
                return os.path.dirname(archive)
    return None


def nccl_include_dir() -> str | None:
    """The folder with nccl_device.h, which NCCL has from 2.28 on: of NCCL_HOME, or of its wheel."""
    named = os.environ.get("NCCL_HOME")
    for root in [*([named] if named else []), *_wheel_folders()]:
        folder = os.path.join(root, "include")
        if os.path.isfile(os.path.join(folder, "nccl_device.h")):
            return folder
    return None


def cuda_library_dirs() -> list[str]:
    """Folders with cuBLAS, cuDNN, NVRTC, NCCL: those of wheels, of torch and of the toolkit."""
    folders = [os.path.join(folder, "lib") for folder in _wheel_folders()]
    folders += [os.path.join(entry, "torch", "lib") for entry in _import_folders()]
    folders += [os.path.join(root, "lib64") for root in _system_roots()]
    return [folder for folder in folders if os.path.isdir(folder)]


def gpu_present() -> bool:
    """True where this machine shows an NVIDIA GPU. Cheap: it asks for device files first."""
    device_files = ("/dev/nvidia[0-9]*", "/proc/driver/nvidia/gpus/*")
    if any(glob.glob(pattern) for pattern in device_files):
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    # A driver without device files: WSL has a GPU then, a container of a GPU image may have none.
    count = ctypes.c_int(0)
    found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return found and count.value > 0


def _main(arguments: list[str]) -> int:
    answers = {
        "nvcc": find_nvcc,
        "include": cuda_include_dir,
        "libs": cuda_link_dir,
        "nccl": nccl_include_dir,
        "gpu": lambda: "yes" if gpu_present() else None,
    }
    if len(arguments) != 1 or arguments[0] not in answers:
        print(f"usage: toolchain.py {'|'.join(answers)}", file=sys.stderr)
        return 2
    answer = answers[arguments[0]]()
    if answer:
        print(answer)
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
