"""The test double with a temper, for tests of the lab: see lab_double.cpp.

path = lab_double.build()
monkeypatch.setenv("NVFP4_CUBLASLT_LIBRARY", path)
monkeypatch.setenv("LAB_DOUBLE", "check:tile=18:crash; …")
"""

import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import fake_cublaslt

SOURCE = Path(__file__).with_name("lab_double.cpp")


@functools.cache
def build():
    """Path of the library, compiled once per content."""
    content = SOURCE.read_bytes() + fake_cublaslt.SOURCE.read_bytes()
    content += fake_cublaslt.header().read_bytes()
    folder = Path(tempfile.gettempdir()) / f"nvfp4_lab_double_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"liblab_double_{hashlib.sha256(content).hexdigest()[:16]}.so"
    if not library.exists():
        partial = library.with_suffix(f".{os.getpid()}")
        command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O2", "-Wall", "-Wextra"]
        command += ["-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-Bsymbolic"]
        command += [f"-I{folder}" for folder in fake_cublaslt.include_folders()]
        subprocess.run([*command, str(SOURCE), "-o", str(partial)], check=True)
        partial.rename(library)
    return str(library)
