"""A build that can't be: one line says why, the next what to do. No compiler is started."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def build(tmp_path: Path, **environment: str) -> str:
    """What a build says that is expected to fail."""
    if not (ROOT / "setup.py").exists():
        pytest.skip("needs the source tree, found only the package")
    command = [sys.executable, str(ROOT / "setup.py"), "-q", "build_ext"]
    command += ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr, done.stderr
    assert "nvfp4_linear cannot be built: " in done.stderr
    assert "\nRemedy: " in done.stderr
    return done.stderr


def test_no_compiler(tmp_path):
    text = build(tmp_path, CXX="no-such-compiler")
    assert "no C++ compiler ('no-such-compiler' is not on the PATH)" in text
    assert "install g++" in text


def test_torch_too_old(tmp_path):
    stub = tmp_path / "site" / "torch"
    stub.mkdir(parents=True)
    (stub / "__init__.py").touch()
    (stub / "version.py").write_text("__version__ = '2.9.1'\n")
    text = build(tmp_path, PYTHONPATH=str(stub.parent), NVFP4_EXTENSIONS="_C")
    assert "torch 2.9 is too old, expected >= 2.11" in text
    assert "pip install 'torch>=2.11'" in text


def fake_nvcc(tmp_path: Path, release: str) -> str:
    """A CUDA_HOME whose nvcc knows little more than its version; it compiles to empty files."""
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    (home / "include").mkdir()
    (home / "include" / "cuda_runtime.h").touch()
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\n"
        f'case "$1" in --version) echo "Cuda compilation tools, release {release}, V{release}" ;;\n'
        '--list-gpu-code) echo "sm_75 sm_80 sm_90 sm_100 sm_120" ;;\n'
        f'--dryrun) echo "#\\$ TOP={home}" >&2 ;;\n'
        f"*) {COMPILES} ;; esac\n"
    )
    nvcc.chmod(0o755)
    return str(home)


# Writes its command line beside an empty output, the word after -o.
COMPILES = 'line="$*"; until [ "$1" = -o ]; do shift; done; echo "$line" >"$2.command"; : >"$2"'


@pytest.mark.parametrize("archs, has", [("80", False), ("80;90a", True), ("90", False)])
def test_the_kernels_for_hopper_are_there_where_their_architecture_is(tmp_path, archs, has):
    """Only sm_90a has them: without it the ladder must not choose them, on whatever GPU."""
    tree = tmp_path / "tree"  # a build of its own: objects of the real one stay
    shutil.copytree(ROOT / "csrc", tree / "csrc")
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree)
    cxx = tmp_path / "cxx"
    cxx.write_text(f"#!/bin/sh\n{COMPILES}\n")
    cxx.chmod(0o755)
    environment = {"CUDA_HOME": fake_nvcc(tmp_path, "13.0"), "CXX": str(cxx)}
    environment |= {"NVFP4_CUDA_ARCHS": archs, "NVFP4_EXTENSIONS": "_C"}
    command = [sys.executable, "setup.py", "-q", "build_ext"]
    command += ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    subprocess.run(command, cwd=tree, env=os.environ | environment, check=True)
    commands = {path.name: path.read_text() for path in tree.rglob("*.o.command")}
    for name in ("ladder.cpp", "gemm_mid_m.cu"):
        assert ("-DNVFP4_WITH_HOPPER" in commands[f"{name}.o.command"]) == has


@pytest.mark.parametrize(
    ("archs", "why"),
    [
        ("999", "has '999', which nvcc does not know (it knows 75, 80, 90, 100, 120"),
        ("90a;sm_90", "has 'sm_90', which nvcc does not know"),
        ("75", "has '75'; the kernels need compute capability >= 8.0"),
    ],
)
def test_an_architecture_that_cannot_be(tmp_path, archs, why):
    home = fake_nvcc(tmp_path, "13.0")
    text = build(tmp_path, CUDA_HOME=home, NVFP4_CUDA_ARCHS=archs, NVFP4_EXTENSIONS="_C")
    assert why in text


def test_nvcc_too_old(tmp_path):
    text = build(tmp_path, CUDA_HOME=fake_nvcc(tmp_path, "12.4"), NVFP4_EXTENSIONS="_C")
    assert "nvcc 12.4" in text and "expected >= 13.0" in text
    assert "NVFP4_CUDA=0" in text


def test_an_unknown_extension_or_switch(tmp_path):
    assert "NVFP4_EXTENSIONS has ['_D']" in build(tmp_path, NVFP4_EXTENSIONS="_D")
    text = build(tmp_path, NVFP4_CUDA="yes", NVFP4_EXTENSIONS="_C")
    assert "NVFP4_CUDA must be 0 or 1, got 'yes'" in text
