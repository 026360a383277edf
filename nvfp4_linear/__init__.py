"""NVFP4 (4-bit) linear layers for PyTorch: exact, explainable, on the machine you have.

Importing loads the ops into ``torch.ops.nvfp4``. It needs neither a GPU nor cuBLASLt: the library
is looked for when the first CUDA ``gemm`` is planned.
"""

import re
from pathlib import Path

import torch

TORCH_MINIMUM = (2, 11)  # the first whose stable ABI has Float4_e2m1fn_x2


def _load_ops(library: Path, torch_version: str) -> None:
    """Loads the ops binary, or raises an ImportError that says what to do."""
    found = tuple(map(int, re.match(r"(\d+)\.(\d+)", torch_version).groups()))
    if found < TORCH_MINIMUM:
        wanted = ".".join(map(str, TORCH_MINIMUM))
        raise ImportError(
            f"nvfp4_linear needs torch >= {wanted}, found {torch_version}: "
            f"pip install 'torch>={wanted}'"
        )
    if not library.exists():
        raise ImportError(
            f"nvfp4_linear is not built, {library} is missing: run `make`, or "
            f"`python setup.py build_ext --inplace` in the source tree"
        )
    try:
        torch.ops.load_library(str(library))
    except (OSError, RuntimeError) as error:
        raise ImportError(
            f"nvfp4_linear's ops could not be loaded with torch {torch_version} ({error}): rebuild "
            f"them with `python setup.py build_ext --inplace`"
        ) from error


_load_ops(Path(__file__).with_name("_C.so"), torch.__version__)

# These look their ops up as they are imported, so they come after the load.
from . import algorithms, grouped, ops  # noqa: E402
from .algorithms import Algorithm, Plan, backends, explain  # noqa: E402
from .linear import Nvfp4Linear, calibrate  # noqa: E402
from .swap import LayerRecord, SwapReport, swap_linears  # noqa: E402
from .tensor import Nvfp4Tensor  # noqa: E402

algorithms._start()

__all__ = [
    "Algorithm",
    "LayerRecord",
    "Nvfp4Linear",
    "Nvfp4Tensor",
    "Plan",
    "SwapReport",
    "algorithms",
    "backends",
    "calibrate",
    "explain",
    "grouped",
    "ops",
    "swap_linears",
]
