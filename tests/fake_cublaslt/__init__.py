"""A cuBLASLt that needs no GPU: builds `fake_cublaslt.cpp` and drives it.

fake = Fake()                       # the double of a GB10's library, reset
fake.configure(check_status=15)     # the next AlgoChecks say NOT_SUPPORTED
planner = _cublaslt.Planner(fake.path)
fake.calls("cublasLtMatmulAlgoCheck")

build_for_gpu()                     # path of one that multiplies in a GPU's memory, built by nvcc
"""

import ctypes
import functools
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_cublaslt.cpp")
GPU_SOURCES = (SOURCE.with_name("gpu_product.cu"), SOURCE.with_name("gpu_product.h"))

# cublasStatus_t
SUCCESS, NOT_INITIALIZED, ALLOC_FAILED = 0, 1, 3
INVALID_VALUE, ARCH_MISMATCH = 7, 8
EXECUTION_FAILED, INTERNAL_ERROR, NOT_SUPPORTED = 13, 14, 15


def cublas_package():
    """Folder of the installed nvidia-cublas, the parent of its include/ and lib/, or None."""
    spec = find_spec("nvidia")
    for base in spec.submodule_search_locations if spec else ():
        if (Path(base) / "cu13" / "include" / "cublasLt.h").exists():
            return Path(base) / "cu13"
    return None


def include_folders():
    """Where cublasLt.h and the CUDA types it includes may be, best first."""
    package = cublas_package()
    roots = [package] if package else []
    roots += [Path(home) for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    return [root / "include" for root in roots if (root / "include").is_dir()]


def header():
    """Path of the cublasLt.h to build against."""
    for folder in include_folders():
        if (folder / "cublasLt.h").exists():
            return folder / "cublasLt.h"
    raise FileNotFoundError("no cublasLt.h: install nvidia-cublas>=13.0,<14 or set CUDA_HOME")


def compiled(name, contents, command):
    """Path of what `command` makes, once per content; it ends before its output."""
    digest = hashlib.sha256(b"".join(contents) + repr(command).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"nvfp4_fake_cublaslt_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    stem, suffix = os.path.splitext(name)
    output = folder / f"{stem}_{digest}{suffix}"
    if not output.exists():
        partial = output.with_suffix(f".{os.getpid()}{suffix}")
        subprocess.run([*command, "-o", str(partial)], check=True)
        partial.rename(output)
    return output


def compile_command(*defines):
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O2", "-Wall", "-Wextra"]
    command += ["-fPIC", "-fvisibility=hidden", *(f"-D{define}" for define in defines)]
    return [*command, *(f"-I{folder}" for folder in include_folders()), str(SOURCE)]


@functools.cache
def build(*defines):
    """Path of the double, compiled once per content: `build("FAKE_WITHOUT_ALGO_CHECK")`."""
    contents = [SOURCE.read_bytes(), header().read_bytes()]
    # -Bsymbolic: its calls to itself stay inside, also beside the real library.
    command = [*compile_command(*defines), "-shared", "-Wl,-Bsymbolic"]
    return compiled("libfake_cublasLt.so", contents, command)


@functools.cache
def build_for_gpu(arch="native"):
    """Path of the double whose operands are in a GPU's memory: takes nvcc."""
    contents = [path.read_bytes() for path in (SOURCE, *GPU_SOURCES, header())]
    entry_points = compiled("fake_cublasLt.o", contents, [*compile_command("FAKE_ON_GPU"), "-c"])
    command = [os.environ.get("NVCC", "nvcc"), "-std=c++17", f"-arch={arch}", "-shared"]
    command += ["-Xcompiler=-fPIC,-fvisibility=hidden", "-Xlinker=-Bsymbolic"]
    command += [str(GPU_SOURCES[0]), str(entry_points)]
    return compiled("libgpu_fake_cublasLt.so", contents, command)


class Fake:
    """One instance of the double. `own=True`: a copy with its own state, beside the shared one."""

    def __init__(self, *defines, own=None):
        path = build(*defines)
        if own is not None:  # the loader tells libraries apart by file
            path = shutil.copy(path, own)
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)
        self._library.fake_records.restype = ctypes.c_char_p
        self.reset()

    def reset(self):
        self._library.fake_reset()

    def configure(self, **settings):
        for key, value in settings.items():
            if self._library.fake_configure(key.encode(), str(value).encode()) != 0:
                raise KeyError(key)

    def records(self):
        """Every call so far, in order: a list of dicts."""
        return json.loads(self._library.fake_records())

    def live(self):
        """Descriptors created and not yet destroyed."""
        return self._library.fake_live()

    def calls(self, name):
        return [record for record in self.records() if record["call"] == name]
