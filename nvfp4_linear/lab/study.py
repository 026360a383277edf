"""The GB10 study's figures, for reports that put a machine's own beside them.

NVFP4 at M = 37,810, N = 5,376, K = 14,336: FC2 of a video diffusion transformer with 50 blocks; the
activation comes from a fused SwiGLU + quantize producer. Milliseconds, but trajectories: seconds.
p50 of 20 rounds, AB/BA alternating; trajectories: one pair. (heuristic, pinned).
"""

from __future__ import annotations

M, N, K = 37_810, 5_376, 14_336
PADDED_M = 37_824  # rows that its producer writes and its GEMM has: a multiple of 64
CHIP = "GB10"
ALGORITHM = {"id": 70, "tile": 20, "stages": 37, "split_k": 1, "reduction": 0}
ALGORITHM |= {"custom": 0, "swizzle": 0}
WORKSPACE_BYTES = 0

GEMM_MS = (53.618, 15.636)
PRODUCER_AND_GEMM_MS = (76.737, 38.823)
BLOCK_MS = {0: (457.891, 420.536), 24: (459.928, 420.243), 49: (458.054, 417.364)}
TRAJECTORY_S = {2: (45.962, 42.516), 12: (278.201, 255.371)}

# What the study itself lists as needed for promotion; a gate here shows the first two.
PROMOTION_NEEDS = (
    "shape-specific AlgoCheck with a safe fallback",
    "integration behind Nvfp4Linear",
    "broader shape tests",
    "deployment validation",
)
