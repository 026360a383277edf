"""Build of the two native binaries, with ninja.

`_C.so`        the ops, on LibTorch's stable ABI: loads in every torch >= 2.11 and every Python.
`_cublaslt`    pybind11 module over csrc/cublaslt, free of torch, for one Python.

Environment:
  NVFP4_CUDA=0|1         leave the CUDA kernels out, or insist on them (default: built where nvcc is)
  NVFP4_CUDA_ARCHS=...   e.g. "90a;120f" (default: 80;90a;100f;120f)
  NVFP4_EXTENSIONS=...   "_C", "_cublaslt" or both, comma-separated (default: both)
  CUDA_HOME, CXX, MAX_JOBS as usual
"""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build"

# The stable ABI this library is compiled against: torch 2.11, the first with Float4_e2m1fn_x2.
TORCH_TARGET = (2, 11)
TORCH_TARGET_VERSION = f"0x{(TORCH_TARGET[0] << 56) | (TORCH_TARGET[1] << 48):016x}"
# Family targets ("100f") came with CUDA 12.9; the kernels here are written for CUDA 13.
NVCC_MINIMUM = (13, 0)
DEFAULT_ARCHS = "80;90a;100f;120f"

CXX_FLAGS = (
    "-std=c++17 -O2 -fPIC -fvisibility=hidden -fno-math-errno -Wall -Wextra -ffp-contract=off"
)
# -ffp-contract=off and --fmad=false: the only fused multiply-adds are the ones the format writes.
NVCC_FLAGS = (
    "-std=c++17 -O3 --threads 2 --fmad=false --expt-relaxed-constexpr -Xcompiler=-fPIC,-fvisibility=hidden"
    " -Xcudafe --diag_suppress=128"
)


class BuildError(SystemExit):
    """Stops the build with one readable line: what is wrong and what to do."""

    def __init__(self, what, remedy):
        super().__init__(f"\nnvfp4_linear cannot be built: {what}.\nRemedy: {remedy}.\n")


def find_cxx():
    """The C++ compiler, checked to exist."""
    cxx = os.environ.get("CXX", "g++")
    if shutil.which(cxx.split()[0]) is None:
        raise BuildError(
            f"no C++ compiler ({cxx!r} is not on the PATH)",
            "install g++ (Debian and Ubuntu: apt-get install g++) or set CXX",
        )
    return cxx


def find_torch():
    """(include directories, library directory) of a torch that is new enough."""
    spec = find_spec("torch")
    if spec is None:
        raise BuildError(
            "torch is not installed in this environment",
            "pip install 'torch>=2.11' first and build with --no-build-isolation, or use `make`",
        )
    root = Path(spec.origin).parent
    match = re.search(r"__version__ = '(\d+)\.(\d+)", (root / "version.py").read_text())
    found = tuple(map(int, match.groups()))
    if found < TORCH_TARGET:
        raise BuildError(
            f"torch {found[0]}.{found[1]} is too old, expected >= {TORCH_TARGET[0]}.{TORCH_TARGET[1]}",
            "pip install 'torch>=2.11'",
        )
    return root / "include", root / "lib"


def nvidia_package_include():
    """Headers of the nvidia-* packages (cublasLt.h, and the CUDA types it includes), or None."""
    spec = find_spec("nvidia")
    for base in spec.submodule_search_locations if spec else ():
        include = Path(base) / "cu13" / "include"
        if (include / "cublasLt.h").exists():
            return include
    return None


def find_nvcc():
    """Path of a usable nvcc, or None for a CPU-only build; says which in one line."""
    wanted = os.environ.get("NVFP4_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise BuildError(f"NVFP4_CUDA must be 0 or 1, got {wanted!r}", "unset it")
    if wanted == "0":
        print("nvfp4_linear: CPU-only build (NVFP4_CUDA=0)")
        return None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [Path(home) / "bin" / "nvcc"] if home else []
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path).resolve()] if on_path else []
    candidates += [Path("/usr/local/cuda/bin/nvcc")]
    nvcc = next((c for c in candidates if c.exists()), None)
    if nvcc is None:
        if wanted == "1":
            raise BuildError(
                "NVFP4_CUDA=1 but no nvcc was found", "install the CUDA 13 toolkit or set CUDA_HOME"
            )
        print("nvfp4_linear: CPU-only build (no nvcc found; CUDA kernels left out)")
        return None
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = tuple(map(int, re.search(r"release (\d+)\.(\d+)", text).groups()))
    if found < NVCC_MINIMUM:
        raise BuildError(
            f"nvcc {found[0]}.{found[1]} at {nvcc} is too old, expected >= 13.0",
            "install CUDA 13, or set NVFP4_CUDA=0 for a CPU-only build",
        )
    return nvcc


def toolkit_root(nvcc):
    """The toolkit that nvcc belongs to, asked of nvcc itself: what is on the PATH may be a wrapper."""
    command = [nvcc, "--dryrun", "-c", "-x", "cu", "/dev/null", "-o", "/dev/null"]
    text = subprocess.run(command, capture_output=True, text=True).stderr
    match = re.search(r"^#\$ TOP=(.+)$", text, re.M)
    root = (Path(match.group(1)) if match else Path(nvcc).parent.parent).resolve()
    if not (root / "include" / "cuda_runtime.h").exists():
        raise BuildError(
            f"the CUDA toolkit of {nvcc} has no include/cuda_runtime.h under {root}",
            "install the whole CUDA 13 toolkit, or set NVFP4_CUDA=0 for a CPU-only build",
        )
    return root


def gencode_flags(nvcc):
    """-gencode flags of the architectures asked for, each one checked against what nvcc knows."""
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True)
    known = [code.removeprefix("sm_") for code in listed.stdout.split()]
    archs = os.environ.get("NVFP4_CUDA_ARCHS", DEFAULT_ARCHS).replace(",", ";").split(";")
    flags, lowest = [], 1000
    for arch in filter(None, (a.strip() for a in archs)):
        if not re.fullmatch(r"\d+[af]?", arch) or arch.rstrip("af") not in known:
            raise BuildError(
                f"NVFP4_CUDA_ARCHS has {arch!r}, which nvcc does not know"
                f" (it knows {', '.join(known)}, some with the suffix a or f)",
                f"use a list like {DEFAULT_ARCHS!r}",
            )
        if int(arch.rstrip("af")) < 80:
            raise BuildError(
                f"NVFP4_CUDA_ARCHS has {arch!r}; the kernels need compute capability >= 8.0",
                "leave it out: such a GPU has no BF16 tensor cores",
            )
        flags.append(f"-gencode=arch=compute_{arch},code=sm_{arch}")
        lowest = min(lowest, int(arch)) if arch.isdigit() else lowest
    if lowest < 1000:
        # PTX of one plain architecture, so that a chip none of the others covers can still run.
        flags.append(f"-gencode=arch=compute_{lowest},code=compute_{lowest}")
    return " ".join(flags)


def version():
    return re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M).group(1)


class Ninja:
    """A build.ninja in the making: one rule per compiler, one edge per file."""

    def __init__(self):
        self.lines = [
            "ninja_required_version = 1.5",
            "rule cxx",
            "  command = $cxx -MMD -MF $out.d $flags -c $in -o $out",
            "  description = c++  $name",
            "  depfile = $out.d",
            "  deps = gcc",
            "rule nvcc",
            "  command = $nvcc -MMD -MF $out.d $flags -c $in -o $out",
            "  description = nvcc $name",
            "  depfile = $out.d",
            "  deps = gcc",
            "rule link",
            "  command = $cxx -shared -o $out $in $libs",
            "  description = link $out",
        ]
        self.outputs = []

    def compile(self, rule, compiler, sources, flags, group):
        objects = []
        for source in sources:
            obj = BUILD / "obj" / group / (str(source.relative_to(ROOT)) + ".o")
            self.lines += [f"build {obj}: {rule} {source}"]
            name = "nvcc" if rule == "nvcc" else "cxx"
            self.lines += [f"  {name} = {compiler}", f"  flags = {flags}"]
            self.lines += [f"  name = {source.relative_to(ROOT)}"]
            objects.append(obj)
        return objects

    def link(self, cxx, objects, libs, output):
        self.lines += [f"build {output}: link {' '.join(map(str, objects))}"]
        self.lines += [f"  cxx = {cxx}", f"  libs = {libs}"]
        self.outputs.append(output)

    def run(self):
        BUILD.mkdir(exist_ok=True)
        (BUILD / "build.ninja").write_text("\n".join([*self.lines, ""]))
        ninja = shutil.which("ninja")
        if ninja is None and find_spec("ninja") is not None:
            import ninja as ninja_package

            ninja = os.path.join(ninja_package.BIN_DIR, "ninja")
        if ninja is None:
            raise BuildError("ninja is not installed in this environment", "pip install ninja")
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        command = [ninja, "-C", str(BUILD), "-j", jobs, *map(str, self.outputs)]
        if subprocess.run(command).returncode:
            raise BuildError("a compiler failed", "read its first error above")


def sources(*patterns):
    return sorted(path for pattern in patterns for path in (ROOT / "csrc").glob(pattern))


def plan_ops(ninja, cxx, output):
    """`_C.so`: no link to Python, none to torch's CUDA libraries, static CUDA runtime."""
    torch_include, torch_lib = find_torch()
    nvcc = find_nvcc()
    defines = f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION} -DNVFP4_VERSION='\"{version()}\"'"
    includes = [f"-I{ROOT / 'csrc'}", f"-isystem {torch_include}"]
    libs = f"-L{torch_lib} -Wl,--no-as-needed -ltorch -Wl,--as-needed -ldl -lpthread"
    toolkit = None
    if nvcc:
        root = toolkit_root(nvcc)
        toolkit = root / "include"
        defines += " -DNVFP4_WITH_CUDA"
        gencode = gencode_flags(nvcc)
        if "code=sm_90a" in gencode:
            defines += " -DNVFP4_WITH_HOPPER"
        libs += f" -L{root / 'lib64'} -lcudart_static -lrt"
    host_flags = f"{CXX_FLAGS} {defines} {' '.join(includes)} {cuda_headers(toolkit)}"
    cpp = sources("*.cpp", "cpu/*.cpp", "cublaslt/*.cpp") + (sources("cuda/*.cpp") if nvcc else [])
    objects = ninja.compile("cxx", cxx, cpp, host_flags, "C")
    if nvcc:
        flags = f"{NVCC_FLAGS} -ccbin {cxx.split()[0]} {defines} {' '.join(includes)} {gencode}"
        objects += ninja.compile("nvcc", nvcc, sources("cuda/*.cu"), flags, "C")
    ninja.link(cxx, objects, libs, output)


def plan_cublaslt(ninja, cxx, output):
    """`_cublaslt`: the planner on raw pointers, for one Python, free of torch."""
    import sysconfig

    import pybind11

    nvcc = shutil.which("nvcc")
    includes = [
        f"-I{ROOT / 'csrc'}",
        f"-isystem {pybind11.get_include()}",
        f"-isystem {sysconfig.get_paths()['include']}",
        cuda_headers(toolkit_root(nvcc) / "include" if nvcc else None),
    ]
    tag = f"cublaslt-{sys.implementation.cache_tag}"
    flags = f"{CXX_FLAGS} {' '.join(includes)}"
    objects = ninja.compile(
        "cxx", cxx, sources("cublaslt/*.cpp", "bindings/cublaslt.cpp"), flags, tag
    )
    ninja.link(cxx, objects, "-ldl -lpthread", output)


def cuda_headers(toolkit):
    """Include flags for cublasLt.h and the CUDA types it uses: one toolkit's where there is one."""
    package = nvidia_package_include()
    directories = [d for d in (toolkit, package) if d]
    if not any((d / "cublasLt.h").exists() for d in directories):
        raise BuildError(
            "cublasLt.h was not found", "pip install 'nvidia-cublas>=13.0,<14' (or use `make`)"
        )
    if not any((d / "driver_types.h").exists() for d in directories):
        raise BuildError(
            "the CUDA headers that cublasLt.h includes were not found",
            "pip install nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl (or use `make`)",
        )
    # CUDA 13 toolkits keep nv/target under include/cccl; g++ has to be told.
    directories += [d / "cccl" for d in directories if (d / "cccl").exists()]
    return " ".join(f"-isystem {d}" for d in directories)


PLANS = {"_C": plan_ops, "_cublaslt": plan_cublaslt}


class NinjaBuildExt(build_ext):
    """Builds every extension in one ninja run; objects are kept in build/ between runs."""

    def get_ext_filename(self, fullname):
        # `_C` is no Python module: one file for every Python, loaded by torch.ops.load_library.
        if fullname.split(".")[-1] == "_C":
            return os.path.join(*fullname.split(".")) + ".so"
        return super().get_ext_filename(fullname)

    def get_export_symbols(self, ext):
        return []

    def build_extensions(self):
        cxx = find_cxx()
        ninja = Ninja()
        for ext in self.extensions:
            output = Path(self.get_ext_fullpath(ext.name)).resolve()
            output.parent.mkdir(parents=True, exist_ok=True)
            PLANS[ext.name.split(".")[-1]](ninja, cxx, output)
        ninja.run()


wanted = os.environ.get("NVFP4_EXTENSIONS", ",".join(PLANS)).split(",")
unknown = [name for name in wanted if name not in PLANS]
if unknown:
    raise BuildError(f"NVFP4_EXTENSIONS has {unknown}, expected some of {list(PLANS)}", "unset it")

setup(
    ext_modules=[Extension(f"nvfp4_linear.{name}", sources=[]) for name in wanted],
    cmdclass={"build_ext": NinjaBuildExt},
)
