"""The CUDA kernels without a GPU: their arithmetic, and their own text on an emulator.

kernel_math.cpp holds csrc/cuda/block_math.h to csrc/nvfp4.h. cuda_emulator compiles csrc/cuda/*.cu
with the C++ compiler, runs every thread as a fiber, and compares bytes; it ends where a kernel
touches memory past a buffer or misses a barrier.
"""

import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
CSRC = TESTS.parent / "csrc"
EMULATOR = TESTS / "cuda_emulator"
KERNELS = ["device", "dequantize", "gemm_small_m", "global_scale", "quantize"]
BLACKWELL_QUANTIZE = "quantize for Blackwell"
# As in setup.py: no contraction but what the source writes. -Werror keeps the harness itself clean.
FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Werror"]
CXX = os.environ.get("CXX", "g++").split()[0]


def compile_cxx(*arguments: str | Path) -> None:
    if shutil.which(CXX) is None:
        pytest.skip(f"needs a C++ compiler, found no {CXX}")
    done = subprocess.run(
        [CXX, *FLAGS, f"-I{CSRC}", *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def run(program: Path, *arguments: str) -> None:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=600)
    print(done.stdout)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}{done.stderr}"


def test_kernel_math(tmp_path):
    """The quantizers' fast division, rounding, block scale and silu equal the plain forms."""
    fma = ["-mfma"] if platform.machine() in ("x86_64", "AMD64") and _has_fma() else []
    compile_cxx(*fma, TESTS / "kernel_math.cpp", "-o", tmp_path / "kernel_math")
    run(tmp_path / "kernel_math")


def _has_fma() -> bool:
    """Whether this x86 has the instruction; without it fma() is a slow, equal call."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and " fma " in cpuinfo.read_text()


def test_kernels_on_the_emulator(tmp_path):
    """Every kernel's every byte, over poisoned memory that ends at an unreadable page.

    quantize twice: as it is, and as for Blackwell, whose conversion is replaced by its definition,
    and where no kernel may start while the one ahead runs.
    """
    # -Wno-clobbered: fibers swap contexts; GCC reads that as longjmp.
    includes = [f"-I{CSRC / 'cuda'}", f"-I{EMULATOR}", "-Wno-unused-parameter", "-Wno-clobbered"]
    includes += ["-DNVFP4_WITH_HOPPER"]  # as a build that could start kernels early

    def build(name: str) -> Path:
        target = tmp_path / f"{name}.o"
        if name in KERNELS:
            source = ["-include", EMULATOR / "ptx.cuh", "-x", "c++", CSRC / "cuda" / f"{name}.cu"]
        elif name == BLACKWELL_QUANTIZE:
            source = ["-include", EMULATOR / "blackwell.h", "-include", EMULATOR / "ptx.cuh"]
            source += ["-x", "c++", CSRC / "cuda" / "quantize.cu"]
        else:
            source = [EMULATOR / f"{name}.cpp"]
        compile_cxx(*includes, "-Wno-unknown-pragmas", "-c", *source, "-o", target)
        return target

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        names = [*KERNELS, BLACKWELL_QUANTIZE, "emulator", "main"]
        objects = dict(zip(names, pool.map(build, names), strict=True))
    blackwell = objects.pop(BLACKWELL_QUANTIZE)
    compile_cxx(*objects.values(), "-o", tmp_path / "emulated")
    run(tmp_path / "emulated")
    objects["quantize"] = blackwell
    compile_cxx(*objects.values(), "-o", tmp_path / "emulated_blackwell")
    run(tmp_path / "emulated_blackwell", "blackwell")


def test_small_m_hopper_on_the_emulator(tmp_path):
    """gemm_small_m_hopper's every result, its rings, barriers and clusters included."""
    here = TESTS / "small_m_hopper_emulator"
    includes = [f"-I{CSRC / 'cuda'}", f"-I{EMULATOR}", "-Wno-unused-parameter", "-Wno-clobbered"]
    headers = ["-include", EMULATOR / "ptx.cuh", "-include", EMULATOR / "hopper.cuh"]

    def build(source: Path, *before: str | Path) -> Path:
        target = tmp_path / f"{source.stem}.o"
        flags = [*includes, "-Wno-unknown-pragmas", "-c", *before]
        compile_cxx(*flags, source, "-o", target)
        return target

    kernel = build(CSRC / "cuda" / "gemm_small_m_hopper.cu", *headers, "-x", "c++")
    device = build(CSRC / "cuda" / "device.cu", *headers[:2], "-x", "c++")
    compile_cxx(kernel, device, build(here / "main.cpp"), "-o", tmp_path / "emulated")
    run(tmp_path / "emulated")
