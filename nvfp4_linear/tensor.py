"""`Nvfp4Tensor`: a packed matrix together with the description that gives its bytes a meaning.

    logical[i, j] = e2m1 · block_scale · global_scale

A physical shape never implies a logical one: ``[32, 64]`` bytes packed along dimension 1 are a
logical (32, 128), packed along dimension 0 a logical (64, 64). So the packing axis is part of the
description: pairs of codes, and the 16 elements that share a block scale, lie along ``packed_dim``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import ops
from .ops import BLOCK_SIZE, CODES_PER_BYTE, TILE_COLS, TILE_ROWS, round_up


def _text(shape: tuple[int, ...]) -> str:
    return str(tuple(shape))


@dataclass(frozen=True, eq=False)
class Nvfp4Tensor:
    """An NVFP4 matrix of logical ``shape`` (rows, columns).

    data: uint8 or float4_e2m1fn_x2; `shape` with ``shape[packed_dim]`` halved, in any strides.
    block_scale: float8_e4m3fn. Row-major: `shape` with ``shape[packed_dim]`` divided by 16.
    Swizzled: the 128×4 tiles of (size of the other dimension, K/16), K = ``shape[packed_dim]``,
    whichever dimension is packed.
    global_scale: FP32, one element, decode direction; None is 1.
    packed_dim: 0 or 1. swizzled: how block_scale is laid out.

    Raises TypeError for a wrong dtype; ValueError where shapes contradict each other.
    """

    data: Tensor
    block_scale: Tensor
    global_scale: Tensor | None
    shape: tuple[int, int]
    packed_dim: int = 1
    swizzled: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        ops.check_packed("data", self.data)
        ops.check_scale("block_scale", self.block_scale)
        ops.check_scalar("global_scale", self.global_scale)
        if self.global_scale is not None and self.global_scale.numel() != 1:
            raise ValueError(
                f"global_scale must have one element, got {_text(self.global_scale.shape)}"
            )
        if self.packed_dim not in (0, 1):
            raise ValueError(
                f"packed_dim must be 0 or 1, the dimension of shape (rows, columns) along which "
                f"two codes share a byte, got {self.packed_dim}"
            )
        self._check_data()
        self._check_scale()

    def _check_data(self) -> None:
        got = tuple(self.data.shape)
        if len(self.shape) != 2 or len(got) != 2:
            raise ValueError(
                f"shape and data must be 2-D, got {_text(self.shape)} and {_text(got)}: "
                f"flatten the leading dimensions"
            )
        if self.k % BLOCK_SIZE:
            raise ValueError(
                f"shape[packed_dim] must be a multiple of {BLOCK_SIZE}, got shape "
                f"{_text(self.shape)} packed along {self.packed_dim}: pad it"
            )
        expected = self._physical(CODES_PER_BYTE)
        if got == expected:
            return
        logical = list(got)
        logical[self.packed_dim] *= CODES_PER_BYTE
        other = list(got)
        other[1 - self.packed_dim] *= CODES_PER_BYTE
        hint = "shape and data belong to different tensors"
        if tuple(other) == self.shape:
            hint = f"it is packed along dimension {1 - self.packed_dim}"
        elif got[::-1] == expected:
            hint = "data.t() has it"
        raise ValueError(
            f"data of logical shape {_text(self.shape)} packed along dimension {self.packed_dim} "
            f"must have shape {_text(expected)}, got {_text(got)}, which is a logical "
            f"{_text(tuple(logical))}: {hint}"
        )

    def _check_scale(self) -> None:
        got, cols = tuple(self.block_scale.shape), self.k // BLOCK_SIZE
        if self.swizzled:
            expected = (round_up(self.rows, TILE_ROWS), round_up(cols, TILE_COLS))
            layout = f"swizzled, of ({self.rows}, {self.k} / {BLOCK_SIZE} = {cols})"
        else:
            expected = self._physical(BLOCK_SIZE)
            layout = f"row-major, {_text(self.shape)} with {self.k} / {BLOCK_SIZE} = {cols}"
        if got == expected:
            return
        arithmetic = ""
        groups = got[self.packed_dim] if len(got) == 2 else 0
        if not self.swizzled and groups and groups != cols:
            arithmetic = (
                f"; {self.k} elements / {groups} scales = {self.k / groups:g} a group along "
                f"dimension {self.packed_dim}, and NVFP4's group is {BLOCK_SIZE}"
            )
        raise ValueError(
            f"block_scale ({layout}) must have shape {_text(expected)}, got {_text(got)}"
            f"{arithmetic}: give the scales of this data, and swizzled= as they are laid out"
        )

    def _physical(self, divisor: int) -> tuple[int, ...]:
        sizes = list(self.shape)
        sizes[self.packed_dim] //= divisor
        return tuple(sizes)

    @property
    def k(self) -> int:
        """Size of the packed dimension."""
        return self.shape[self.packed_dim]

    @property
    def rows(self) -> int:
        """Size of the other dimension."""
        return self.shape[1 - self.packed_dim]

    @property
    def device(self) -> torch.device:
        return self.data.device

    @classmethod
    def quantize(
        cls, x: Tensor, global_scale: Tensor | None = None, *, swizzled: bool = True
    ) -> Nvfp4Tensor:
        """Quantizes x (rows, K) along K; without a global scale with the dynamic one of x.

        x: float32, bfloat16 or float16, K % 16 == 0. Raises as `ops.quantize`.
        """
        ops.check_dense("x", x)
        if x.dim() != 2:
            raise ValueError(f"x must be 2-D, got {_text(x.shape)}: x.flatten(0, -2) makes it so")
        if global_scale is None:
            global_scale = ops.global_scale(x)
        data, block_scale = ops.quantize(x, global_scale, swizzled=swizzled)
        return cls(data, block_scale, global_scale, tuple(x.shape), 1, swizzled)

    def dequantize(self, out_dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix, `shape`, in float32, bfloat16 or float16, rounded once; a view if packed
        along dimension 0."""
        if self.packed_dim == 0:
            return self.t().dequantize(out_dtype).t()
        return ops.dequantize(
            self.data,
            self.block_scale,
            self.global_scale,
            swizzled=self.swizzled,
            out_dtype=out_dtype,
        )

    def t(self) -> Nvfp4Tensor:
        """The transpose: the description and the packing axis swap, and no byte moves."""
        return replace(
            self,
            data=self.data.t(),
            block_scale=self.block_scale if self.swizzled else self.block_scale.t(),
            shape=self.shape[::-1],
            packed_dim=1 - self.packed_dim,
        )

    def to(self, device: torch.device | str | int) -> Nvfp4Tensor:
        """The same bytes on another device. The format has no other dtype: TypeError for one."""
        if isinstance(device, torch.dtype):
            raise TypeError(
                f"to() takes a device, got {device}: dequantize(out_dtype={device}) converts"
            )
        g = self.global_scale
        return replace(
            self,
            data=self.data.to(device),
            block_scale=self.block_scale.to(device),
            global_scale=None if g is None else g.to(device),
        )

    def __repr__(self) -> str:
        layout = "swizzled" if self.swizzled else "row-major"
        return (
            f"Nvfp4Tensor(shape={self.shape}, packed_dim={self.packed_dim}, {layout} scales, "
            f"device={str(self.device)!r})"
        )
