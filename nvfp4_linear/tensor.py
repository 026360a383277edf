"""`Nvfp4Tensor`: a packed matrix together with the description that gives its bytes a meaning.

    logical[i, j] = e2m1 · block_scale · global_scale

A physical shape never implies a logical one: ``[32, 64]`` bytes packed along dimension 1 are a
logical (32, 128), packed along dimension 0 a logical (64, 64). So the packing axis is part of the
description: pairs of codes lie along ``packed_dim``, and the 16 elements that share a block scale
along ``block_dim``, nearly always the same one. Where a tensor is transposed both swap with the data.

``a @ b`` contracts K, a's dimension 1 and b's dimension 0, and a GEMM reads pairs and blocks along K:

    pairs along K,  blocks along K    as they are
    pairs across,   blocks along K    nibbles are repacked: the same codes and scales, nothing rounded
    any pairs,      blocks across     no GEMM has such scales: the operand is decoded to BF16, exactly,
                                      and multiplied as a dense side
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import ops
from .arguments import (
    BLOCK_SIZE,
    CODES_PER_BYTE,
    TILE_COLS,
    TILE_ROWS,
    check_dense,
    check_packed,
    check_scalar,
    check_scale,
    round_up,
)

MXFP4_GROUP = 32


def _text(shape: tuple[int, ...]) -> str:
    return str(tuple(shape))


@dataclass(frozen=True, eq=False)
class Nvfp4Tensor:
    """An NVFP4 matrix of logical ``shape`` (rows, columns).

    data: uint8 or float4_e2m1fn_x2; `shape` with ``shape[packed_dim]`` halved, in any strides; the
    even index along packed_dim in the low nibble.
    block_scale: float8_e4m3fn. Row-major: `shape` with ``shape[block_dim]`` divided by 16.
    Swizzled: the 128×4 tiles of (size of the other dimension, K/16), K = ``shape[block_dim]``,
    whichever dimension that is.
    global_scale: FP32, one element, decode direction; None is 1.
    packed_dim, block_dim: 0 or 1; block_dim None means packed_dim. swizzled: how block_scale is laid
    out.

    Raises TypeError for a wrong dtype; ValueError where shapes contradict each other, with the
    arithmetic where the scales are those of another group size than 16.
    """

    data: Tensor
    block_scale: Tensor
    global_scale: Tensor | None
    shape: tuple[int, int]
    packed_dim: int = 1
    swizzled: bool = True
    block_dim: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if self.block_dim is None:
            object.__setattr__(self, "block_dim", self.packed_dim)
        check_packed("data", self.data)
        check_scale("block_scale", self.block_scale)
        check_scalar("global_scale", self.global_scale)
        if self.global_scale is not None and self.global_scale.numel() != 1:
            raise ValueError(
                f"global_scale must have one element, got {_text(self.global_scale.shape)}"
            )
        _check_dim("packed_dim", self.packed_dim, "two codes share a byte")
        _check_dim("block_dim", self.block_dim, "16 elements share a scale")
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
                f"shape[block_dim] must be a multiple of {BLOCK_SIZE}, got shape "
                f"{_text(self.shape)} with blocks along {self.block_dim}: pad it"
            )
        _check_pairs(self.shape, self.packed_dim)
        expected = self._divided(self.packed_dim, CODES_PER_BYTE)
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
            expected = self._divided(self.block_dim, BLOCK_SIZE)
            layout = f"row-major, {_text(self.shape)} with {self.k} / {BLOCK_SIZE} = {cols}"
        if got == expected:
            return
        raise ValueError(
            f"block_scale ({layout}) must have shape {_text(expected)}, got {_text(got)}"
            f"{self._group_arithmetic(got, expected)}: give the scales of this data, and swizzled= "
            f"as they are laid out"
        )

    def _group_arithmetic(self, got: tuple[int, ...], expected: tuple[int, ...]) -> str:
        """What group size scales of shape `got` belong to; empty where it is not that."""
        along = 1 if self.swizzled else self.block_dim
        if len(got) != 2 or got[along] in (0, expected[along]):
            return ""
        scales, least = got[along], " or more" if self.swizzled else ""  # swizzled: padded
        group = self.k / scales
        text = (
            f"; {self.k} elements / {scales} scales = {group:g}{least} a group along dimension "
            f"{self.block_dim}, and NVFP4's group is {BLOCK_SIZE}"
        )
        mxfp4 = self.k // MXFP4_GROUP
        if scales == (round_up(mxfp4, TILE_COLS) if self.swizzled else mxfp4):
            text += f" (groups of {MXFP4_GROUP} are MXFP4, which is not supported)"
        return text

    def _divided(self, dim: int, divisor: int) -> tuple[int, ...]:
        sizes = list(self.shape)
        sizes[dim] //= divisor
        return tuple(sizes)

    @property
    def k(self) -> int:
        """Size of the dimension that blocks lie along."""
        return self.shape[self.block_dim]

    @property
    def rows(self) -> int:
        """Size of the other dimension."""
        return self.shape[1 - self.block_dim]

    @property
    def device(self) -> torch.device:
        return self.data.device

    @classmethod
    def quantize(
        cls,
        x: Tensor,
        global_scale: Tensor | None = None,
        *,
        packed_dim: int = 1,
        swizzled: bool = True,
    ) -> Nvfp4Tensor:
        """Quantizes x (rows, columns); without a global scale with the dynamic one of x.

        x: float32, bfloat16 or float16, x.shape[packed_dim] % 16 == 0. Raises as `ops.quantize`.
        packed_dim: 1, or 0 for pairs and blocks along the rows' dimension: the bytes are then those
        of x.t(), under the transposed description.
        """
        _check_dim("packed_dim", packed_dim, "two codes share a byte")
        check_dense("x", x)
        if x.dim() != 2:
            raise ValueError(f"x must be 2-D, got {_text(x.shape)}: x.flatten(0, -2) makes it so")
        if packed_dim == 0:
            return cls.quantize(x.t(), global_scale, swizzled=swizzled).t()
        if global_scale is None:
            global_scale = ops.global_scale(x)
        data, block_scale = ops.quantize(x, global_scale, swizzled=swizzled)
        return cls(data, block_scale, global_scale, tuple(x.shape), 1, swizzled)

    def dequantize(self, out_dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix, `shape`, in float32, bfloat16 or float16, rounded once; a transposed view where
        blocks lie along dimension 0."""
        if self.block_dim == 0:
            return self.t().dequantize(out_dtype).t()
        return ops.dequantize(
            self.repack(1).data,
            self.block_scale,
            self.global_scale,
            swizzled=self.swizzled,
            out_dtype=out_dtype,
        )

    def t(self) -> Nvfp4Tensor:
        """The transpose: description, packing axis and block axis swap, and no byte moves."""
        return replace(
            self,
            data=self.data.t(),
            block_scale=self.block_scale if self.swizzled else self.block_scale.t(),
            shape=self.shape[::-1],
            packed_dim=1 - self.packed_dim,
            block_dim=1 - self.block_dim,
        )

    def repack(self, packed_dim: int) -> Nvfp4Tensor:
        """The same matrix with its pairs along `packed_dim`: nibbles move, scales stay; self where
        they lie there already. ValueError where shape[packed_dim] is odd."""
        _check_dim("packed_dim", packed_dim, "two codes share a byte")
        if packed_dim == self.packed_dim:
            return self
        _check_pairs(self.shape, packed_dim)
        data, old, new = self.data.view(torch.uint8), self.packed_dim, packed_dim
        codes = torch.stack((data & 0xF, data >> 4), dim=old + 1).flatten(old, old + 1)
        pairs = codes.unflatten(new, (self.shape[new] // CODES_PER_BYTE, CODES_PER_BYTE))
        low, high = pairs.unbind(new + 1)
        return replace(self, data=low | high << 4, packed_dim=new)

    def matmul(
        self,
        other: Nvfp4Tensor | Tensor,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """self (M, K) · other (K, N) + bias: (M, N). Also ``self @ other`` and ``dense @ self``.

        other: an Nvfp4Tensor, or dense bfloat16 or float16. One side's blocks lie along K.
        bias: (N,) float32, bfloat16 or float16. out_dtype: None means a dense operand's, else
        bfloat16.

        Whatever the packing axes, the product is that of the logical matrices: see the head of this
        file for what is repacked and what is decoded. Exact on the CPU as `ops.gemm` and
        `ops.gemm_a16w4` are. Gradients as theirs.
        """
        return _product(self, other, bias, out_dtype)

    def __matmul__(self, other: Nvfp4Tensor | Tensor) -> Tensor:
        return _product(self, other)

    def __rmatmul__(self, other: Tensor) -> Tensor:
        return _product(other, self)

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
        blocks = "" if self.block_dim == self.packed_dim else f"block_dim={self.block_dim}, "
        return (
            f"Nvfp4Tensor(shape={self.shape}, packed_dim={self.packed_dim}, {blocks}{layout} "
            f"scales, device={str(self.device)!r})"
        )


def _check_dim(name: str, value: int, meaning: str) -> None:
    if value not in (0, 1):
        raise ValueError(
            f"{name} must be 0 or 1, the dimension of shape (rows, columns) along which {meaning}, "
            f"got {value}"
        )


def _check_pairs(shape: tuple[int, int], packed_dim: int) -> None:
    if shape[packed_dim] % CODES_PER_BYTE:
        raise ValueError(
            f"shape[packed_dim] must be even, got shape {_text(shape)} packed along {packed_dim}: "
            f"two codes share a byte, pad it"
        )


def _along_k(operand: Nvfp4Tensor | Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A side (rows, K) as the ops take it: data, swizzled scales (None: dense), global scale."""
    if isinstance(operand, Tensor):
        return operand, None, None
    if operand.block_dim == 1:
        scale = operand.block_scale
        scale = scale if operand.swizzled else ops.swizzle_scales(scale)
        return operand.repack(1).data, scale, operand.global_scale
    # e2m1 · block_scale is exact in BF16; the global scale stays apart, in alpha.
    unscaled = replace(operand, global_scale=None)
    return unscaled.dequantize(torch.bfloat16), None, operand.global_scale


def _product(
    a: Nvfp4Tensor | Tensor,
    b: Nvfp4Tensor | Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    for name, side in (("a", a), ("b", b)):
        if not isinstance(side, Nvfp4Tensor):
            check_dense(name, side, (torch.bfloat16, torch.float16))
        if len(side.shape) != 2:
            raise ValueError(f"{name} must be 2-D, got {_text(side.shape)}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a and b must be (M, K) and (K, N), got {_text(a.shape)} and {_text(b.shape)}: .t() "
            f"transposes either"
        )
    a_data, a_scale, a_g = _along_k(a)
    b_data, b_scale, b_g = _along_k(b.t())
    alpha = None
    if a_g is not None or b_g is not None:
        alpha = math.prod(g.reshape(()) for g in (a_g, b_g) if g is not None)
    if a_scale is None and b_scale is None:
        raise ValueError(
            "neither a nor b has its blocks along K, the dimension that a product sums over: "
            "quantize one of them with packed_dim along K, or multiply what they dequantize() to"
        )
    if a_scale is None:
        return ops.gemm_a16w4(a_data, b_data, b_scale, alpha, bias, out_dtype)
    if b_scale is None:
        return ops.gemm_a4w16(a_data, b_data, a_scale, alpha, bias, out_dtype)
    return ops.gemm(a_data, b_data, a_scale, b_scale, alpha, bias, out_dtype)
