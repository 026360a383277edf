"""Importing: on any machine with a new enough torch, fast, and with a readable error otherwise."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nvfp4_linear

PACKAGE = Path(nvfp4_linear.__file__).parent
OPS_BINARY = PACKAGE / "_C.so"


def run_python(code, tmp_path, **environment):
    """Standard output of a fresh interpreter, away from the source tree."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), **environment}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def tool(name):
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"needs {name} (binutils), found none on the PATH")
    return path


def test_no_undefined_symbol_of_torchs_cpp_abi():
    """Only the stable ABI: one binary for every torch from 2.11 on."""
    command = [tool("nm"), "-D", "--undefined-only", "--demangle", OPS_BINARY]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    assert any("aoti_torch" in s for s in symbols)
    assert [s for s in symbols if "at::" in s or "c10::" in s or " Py" in s] == []


def test_links_to_neither_cuda_nor_python():
    command = [tool("readelf"), "-d", OPS_BINARY]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = [line.split("[")[1].rstrip("]") for line in text.splitlines() if "(NEEDED)" in line]
    allowed = ("libtorch.so", "libstdc++.so", "libgcc_s.so", "libc.so", "libm.so", "ld-linux")
    allowed += ("libdl.so", "libpthread.so", "librt.so")  # of a glibc that still has them apart
    assert [name for name in needed if not name.startswith(allowed)] == []


def test_works_without_cublaslt_or_gpu(tmp_path):
    code = """
import torch, nvfp4_linear
layer = nvfp4_linear.Nvfp4Linear.from_linear(torch.nn.Linear(32, 8))
print(tuple(layer(torch.ones(2, 32)).shape))
"""
    missing = {"NVFP4_CUBLASLT_LIBRARY": "/nonexistent/libcublasLt.so", "CUDA_VISIBLE_DEVICES": ""}
    assert run_python(code, tmp_path, **missing) == "(2, 8)\n"


def test_import_is_light(tmp_path):
    """No cuBLASLt, no CUDA context, none of the optional parts, nothing from outside torch."""
    code = """
import sys, torch
before = set(sys.modules)
import nvfp4_linear
new = set(sys.modules) - before
print(*sorted(m for m in new if m.startswith("nvfp4_linear.")))
known = {"torch", "nvfp4_linear", *sys.stdlib_module_names}
print(*sorted(m for m in new if m.split(".")[0] not in known))
print(torch.cuda.is_initialized())
print("cublasLt" in open("/proc/self/maps").read())
"""
    own, foreign, initialized, mapped = run_python(code, tmp_path).split("\n")[:4]
    for name in ("cli", "demo", "reference", "checkpoints", "_cublaslt"):
        assert f"nvfp4_linear.{name}" not in own.split()
    assert foreign == ""
    assert initialized == "False"
    if torch.version.cuda is None:  # a CUDA build of torch loads its own
        assert mapped == "False"


def test_public_names():
    for name in nvfp4_linear.__all__:
        assert getattr(nvfp4_linear, name) is not None
    assert sorted(nvfp4_linear.__all__) == nvfp4_linear.__all__


@pytest.mark.parametrize("version", ["2.10.1+cu128", "1.13.1", "2.9.0a0+git1234"])
def test_too_old_torch_is_named(version):
    with pytest.raises(
        ImportError, match=rf"needs torch >= 2.11, found {version[:4]}.*pip install"
    ):
        nvfp4_linear._load_ops(OPS_BINARY, version)


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.12.0a0+git1234", "3.0.0.dev2026"])
def test_newer_torch_is_welcome(version):
    nvfp4_linear._load_ops(OPS_BINARY, version)


def test_a_missing_binary_is_named(tmp_path):
    with pytest.raises(ImportError, match=r"is not built, .*_C.so is missing: run `make`"):
        nvfp4_linear._load_ops(tmp_path / "_C.so", torch.__version__)


def test_a_broken_binary_is_named(tmp_path):
    (tmp_path / "_C.so").write_bytes(b"not a library")
    with pytest.raises(ImportError, match=r"could not be loaded with torch .*rebuild"):
        nvfp4_linear._load_ops(tmp_path / "_C.so", torch.__version__)


def test_is_typed():
    assert (PACKAGE / "py.typed").exists()
