"""The producers in plain torch: what ours is timed against, eager and through torch.compile.

The same arithmetic as format.md, on the device of x, with fewer cases: no handling of NaN and Inf,
one global scale on the device. `quantize`, `dequantize` and `global_scale` give our bytes in eager
mode. `swiglu_quantize` uses torch's own sigmoid, and compiled code may divide approximately: their
bytes are close, not equal.

Divisions are by tensors: by a Python number, eager CUDA multiplies with the rounded reciprocal.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nvfp4_linear.reference import (
    BLOCK_SIZE,
    E2M1_MAX,
    E4M3_MAX,
    GLOBAL_SCALE_MIN,
    ROW_GROUPS,
    TILE_COLS,
    TILE_ROW_STRIDE,
    TILE_ROWS,
)

# Adding one of these rounds to a multiple of 0.5, 1 or 2 and leaves the multiple in the low bits.
ROUND_TO_HALF, ROUND_TO_ONE, ROUND_TO_TWO = 1.5 * 2.0**22, 1.5 * 2.0**23, 1.5 * 2.0**24


class Baseline:
    """The formulas, with their constants on `device`."""

    def __init__(self, device: str):
        self.e2m1_max = torch.tensor(E2M1_MAX, device=device)
        self.largest = torch.tensor(E2M1_MAX * E4M3_MAX, device=device)
        grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=device)
        self.grid = torch.cat((grid, -grid))

    def global_scale(self, x: Tensor) -> Tensor:
        """max(amax / 2688, 2^-126), 0-d FP32; x is not all zero."""
        return (x.abs().amax().float() / self.largest).clamp(min=GLOBAL_SCALE_MIN)

    def quantize(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """x (M, K) → (data, swizzled scales)."""
        return self._quantize(x.float(), g)

    def dynamic_quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.quantize(x, self.global_scale(x))

    def swiglu_quantize(self, gate_up: Tensor, g: Tensor, pad_to: int = 1) -> tuple[Tensor, Tensor]:
        """gate_up (M, 2K) → (data, swizzled scales) of silu(gate)·up, rows padded with zeros."""
        gate, up = gate_up.chunk(2, dim=1)
        data, scale = self._quantize(F.silu(gate.float()) * up.float(), g)
        return F.pad(data, (0, 0, 0, -gate_up.shape[0] % pad_to)), scale

    def dequantize(self, data: Tensor, scale: Tensor) -> Tensor:
        """(data, swizzled scales) → (M, K) BF16."""
        rows, cols = data.shape[0], data.shape[1] // (BLOCK_SIZE // 2)
        tiles = scale.view(torch.uint8).view(
            -1, scale.shape[1] // TILE_COLS, TILE_ROW_STRIDE, ROW_GROUPS, TILE_COLS
        )
        linear = tiles.permute(0, 3, 2, 1, 4).reshape(scale.shape)[:rows, :cols]
        codes = torch.stack((data & 0xF, data >> 4), dim=-1).view(rows, cols, BLOCK_SIZE)
        value = self.grid[codes.int()] * linear.view(torch.float8_e4m3fn).float()[..., None]
        return value.to(torch.bfloat16).view(rows, cols * BLOCK_SIZE)

    def _quantize(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        rows, k = x.shape
        blocks = x.view(rows, k // BLOCK_SIZE, BLOCK_SIZE)
        s = (blocks.abs().amax(dim=-1) / self.e2m1_max / g).clamp(max=E4M3_MAX)
        s = s.to(torch.float8_e4m3fn)
        s32 = s.float() * g
        s32 = torch.where(s32 == 0, torch.inf, s32)  # x / inf is ±0: the codes of a zero scale
        codes = _e2m1_codes(blocks / s32[..., None]).view(rows, k // 2, 2)
        return codes[..., 0] | (codes[..., 1] << 4), _swizzle(s)


def _e2m1_codes(t: Tensor) -> Tensor:
    """FP32 → codes 0 … 15, nearest even, saturating."""
    magnitude = t.abs().clamp(max=E2M1_MAX)
    below_2, below_4 = magnitude < 2, magnitude < 4
    rounder = torch.where(
        below_2, ROUND_TO_HALF, torch.where(below_4, ROUND_TO_ONE, ROUND_TO_TWO)
    ).float()
    steps = ((magnitude + rounder).view(torch.int32) & 0x7).to(torch.uint8)
    steps = steps + 2 * (~below_2).to(torch.uint8) + 2 * (~below_4).to(torch.uint8)
    return steps | (torch.signbit(t).to(torch.uint8) << 3)


def _swizzle(scale: Tensor) -> Tensor:
    """(rows, cols) → the padded 128×4 layout."""
    rows, cols = scale.shape
    padded = F.pad(scale.view(torch.uint8), (0, -cols % TILE_COLS, 0, -rows % TILE_ROWS))
    tiles = padded.view(
        padded.shape[0] // TILE_ROWS, ROW_GROUPS, TILE_ROW_STRIDE, -1, TILE_COLS
    ).permute(0, 3, 2, 1, 4)
    return tiles.reshape(padded.shape).view(torch.float8_e4m3fn)
