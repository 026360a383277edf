"""The promise: the ladder chooses, and explains, only kernels that the build has, and remembers a
route only as long as it is the one.

Its own text, which knows neither torch nor a GPU, compiled as builds with and without sm_90a.
"""

import functools
import json
import os
import shutil
import subprocess
from pathlib import Path

import fake_cublaslt
import pytest

CSRC = Path(__file__).parents[1] / "csrc"
MAIN = """
#include <cstdio>
#include "control.h"
int main(int, char** arguments) { std::puts(nvfp4::control(arguments[1]).c_str()); }
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The program of a build with these defines."""
    compiler = os.environ.get("CXX", "g++").split()[0]
    if shutil.which(compiler) is None:
        pytest.skip(f"needs a C++ compiler, found no {compiler}")
    folder = tmp_path_factory.mktemp("ladder")
    (folder / "main.cpp").write_text(MAIN)
    command = [compiler, "-std=c++20", "-O0", "-w", f"-I{CSRC}", '-DNVFP4_VERSION="0"']
    for include in fake_cublaslt.include_folders():
        command += [f"-I{include}"] + [f"-I{include / 'cccl'}"] * (include / "cccl").is_dir()

    def build(*sources: Path, name: str, defines: tuple[str, ...] = (), link=False) -> Path:
        target = folder / name
        what = [] if link else ["-c"]
        libraries = ["-ldl", "-lpthread"] if link else []
        done = subprocess.run(
            [*command, *what, *(f"-D{d}" for d in defines), *sources, "-o", target, *libraries],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return target

    shared = [
        build(source, name=source.stem + ".o")
        for source in sorted((CSRC / "cublaslt").glob("*.cpp"))
    ]

    @functools.cache
    def program(*defines: str, main: Path = folder / "main.cpp") -> Path:
        name = "-".join((main.stem, *defines))
        own = [
            build(CSRC / f"{unit}.cpp", name=f"{name}-{unit}.o", defines=defines)
            for unit in ("ladder", "control")
        ]
        return build(main, *shared, *own, name=name, link=True)

    return program


@pytest.mark.parametrize(
    "m, hopper, other",
    [(16, "gemm_small_m_hopper", "gemm_small_m"), (256, "gemm_mid_m", "decode + cublasLtMatmul")],
)
def test_a_build_without_hoppers_kernels_takes_what_it_has(compiled, m, hopper, other):
    request = f"explain m={m} n=5376 k=14336 cc=90 sm=132"
    environment = {
        **os.environ,
        "NVFP4_BACKEND": "emulated",
        "NVFP4_CUBLASLT_LIBRARY": str(fake_cublaslt.build()),
    }
    for defines, kernel in ((("NVFP4_WITH_HOPPER",), hopper), ((), other)):
        program = compiled("NVFP4_WITH_CUDA", *defines)
        done = subprocess.run(
            [program, request], capture_output=True, text=True, env=environment, check=True
        )
        assert json.loads(done.stdout)["kernel"] == kernel


def test_a_remembered_route_is_the_one_that_is_found(compiled):
    program = compiled(
        "NVFP4_WITH_CUDA", "NVFP4_WITH_HOPPER", main=Path(__file__).with_name("routes.cpp")
    )
    environment = {**os.environ, "NVFP4_CUBLASLT_LIBRARY": str(fake_cublaslt.build())}
    environment.pop("NVFP4_BACKEND", None)
    done = subprocess.run([program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
