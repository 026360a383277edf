"""What this machine, this torch and this build are: for ``info``, and for whoever reports a result."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from . import algorithms

OPS_BINARY = Path(__file__).with_name("_C.so")

# Read when the library runs, and what each does.
ENVIRONMENT = {
    "NVFP4_CUBLASLT_LIBRARY": "path of the cuBLASLt to load",
    "NVFP4_BACKEND": "the one rung to take; refused with its reason where it can't run",
    "NVFP4_PINS": "a pin file to load at import",
    "NVFP4_PIN_POLICY": "validated (default), always or never",
    "NVFP4_LOG": "info or debug",
}
# Read by the build, or by tests.
OTHER_ENVIRONMENT = ("NVFP4_CUDA", "NVFP4_CUDA_ARCHS", "NVFP4_EXTENSIONS", "NVFP4_CPU_ISA")


def version() -> str:
    """The package's version; of the source tree where the package is not installed."""
    try:
        return metadata.version("nvfp4_linear")
    except metadata.PackageNotFoundError:
        project = Path(__file__).parents[1] / "pyproject.toml"
        found = re.search(r'^version = "(.+)"', project.read_text(), re.M)
        return f"{found.group(1)} (source tree)" if found else "unknown"


def has_cuda_kernels() -> bool:
    """Whether the ops binary was built with the CUDA kernels."""
    return bool(algorithms.build()["cuda"])


def cublaslt_version(number: int) -> str:
    """``cublasLtGetVersion``'s number as people write it: 130100 is 13.1.0."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def cpu_name() -> str:
    """The processor as Linux names it, else its architecture."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found.group(1) if found else platform.machine()


def devices() -> list[dict[str, Any]]:
    """The CPU, then every GPU that torch sees."""
    rows: list[dict[str, Any]] = [
        {"device": "cpu", "name": cpu_name(), "threads": torch.get_num_threads()}
    ]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        rows.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "memory_bytes": properties.total_memory,
            }
        )
    return rows


def versions() -> dict[str, str | None]:
    """Of this package, Python, torch, the CUDA that torch was built with, and cuBLASLt."""
    library = algorithms.library()
    return {
        "nvfp4_linear": version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cublaslt": cublaslt_version(library["version"]) if library["version"] else None,
    }


def describe() -> dict[str, Any]:
    """Everything that ``info`` says, as plain types."""
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "cublaslt": algorithms.library(),
        "build": {"ops_binary": str(OPS_BINARY), "cuda_kernels": has_cuda_kernels()},
        "devices": devices(),
        "backends": [asdict(backend) for backend in algorithms.backends()],
        "pin_policy": algorithms.pin_policy(),
        "pins": [asdict(row) for row in algorithms.pins()],
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
        "unknown_environment": sorted(
            name
            for name in os.environ
            if name.startswith("NVFP4_") and name not in (*ENVIRONMENT, *OTHER_ENVIRONMENT)
        ),
    }
