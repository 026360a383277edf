"""What test files share: dirty memory, and the reason why a CUDA test cannot run here.

Comparison by bytes is in compare.py.
"""

import ctypes
from functools import cache

import torch

POISON = 0x7F
M_PERTURB = -6  # malloc.h
# Bytes. A fresh allocation of up to the largest of these is served from what `poison` freed.
BLOCK_SIZES = [1 << n for n in range(4, 21)]
BLOCK_COPIES = 4  # the outputs of one op live at the same time


def poison(device: str | torch.device) -> None:
    """Makes fresh allocations come full of 0x7F, so that a byte which nobody writes is seen.

    0x7F7F7F7F is 3.4e38 in FP32 and BF16, 0x7F is NaN in UE4M3. On the CPU glibc does it from here
    on, for every allocation; elsewhere, as on a GPU, memory is filled and handed back to the
    caching allocator.
    """
    device = torch.device(device)
    if device.type == "cpu" and _perturb_malloc():
        return
    blocks = [
        torch.full((size,), POISON, dtype=torch.uint8, device=device)
        for size in BLOCK_SIZES
        for _ in range(BLOCK_COPIES)
    ]
    if device.type == "cuda":
        torch.cuda.synchronize()
    del blocks


@cache
def _perturb_malloc() -> bool:
    """Tells glibc to fill every allocation; False where the C library is another one."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(M_PERTURB, POISON ^ 0xFF) == 1


@cache
def cuda_missing() -> str | None:
    """Why the CUDA tests cannot run here, or None where they can."""
    if not torch.cuda.is_available():
        return f"needs a CUDA GPU, found none (torch {torch.__version__})"
    import nvfp4_linear  # noqa: F401  (registers torch.ops.nvfp4)

    try:
        torch.ops.nvfp4.global_scale(torch.ones(16, device="cuda"))
    except (RuntimeError, ValueError) as error:
        return f"needs the CUDA kernels in the build: {error}"
    return None
