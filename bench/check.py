"""Outputs are checked before anything is timed: nothing is reported of a wrong result.

    producers   the bytes of the CPU op on a sample of rows (first, last, random), zero padding, and
                on the GPU all bytes of the same formula in plain torch, where that is exact
    gemm        a sample of rows and columns against the exact CPU answer,
                    |y - exact| <= one BF16 ulp of exact + K 2^-22 sum |a b|     (format.md)
                and all of it against torch's BF16 product of the decoded operands, with twice that:
                it too rounds once to BF16 and sums K products in FP32

WrongOutput says what is wrong, and where.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import nvfp4_linear  # noqa: F401  (registers torch.ops.nvfp4)
from nvfp4_linear.reference import BLOCK_SIZE

ops = torch.ops.nvfp4
BF16_MANTISSA_BITS = 7
BF16_MIN_EXPONENT = -126
ACCUMULATION = 2.0**-22  # of sum |a b|, for each of the K additions of an FP32 sum
# torch's sum |a b| is itself rounded to BF16 and summed in FP32: a few 2^-8 below the true one.
MAGNITUDE_SLACK = 1.02


class WrongOutput(RuntimeError):
    """What was about to be timed gives a wrong result."""


def bits(tensor: Tensor) -> Tensor:
    """All bytes of a tensor, in one row, where they are."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def require_same_bytes(what: str, actual: Any, expected: Any) -> None:
    """Both tensors, or tuples of them, have the same dtypes, shapes and bytes."""
    if isinstance(actual, (tuple, list)):
        for number, (a, e) in enumerate(zip(actual, expected, strict=True)):
            require_same_bytes(f"{what}[{number}]", a, e)
        return
    for name in ("dtype", "shape"):
        got, wanted = getattr(actual, name), getattr(expected, name)
        if got != wanted:
            raise WrongOutput(f"{what}: {name} {got}, expected {wanted}")
    a, e = bits(actual), bits(expected).to(actual.device)
    if torch.equal(a, e):
        return
    wrong = a != e
    first = int(wrong.to(torch.uint8).argmax())
    raise WrongOutput(
        f"{what}: {int(wrong.sum()):,} of {a.numel():,} bytes differ, the first at {first:,}: "
        f"{int(a[first]):#04x}, expected {int(e[first]):#04x}"
    )


def equal_fraction(actual: Tensor, expected: Tensor) -> float:
    """Of the elements, how many have the same bits."""
    width = actual.element_size()
    same = (bits(actual) == bits(expected).to(actual.device)).reshape(-1, width).all(dim=1)
    return float(same.double().mean()) if same.numel() else 1.0


def sample_rows(rows: int, count: int, seed: int = 0) -> Tensor:
    """Row numbers in order: the first, the last and random ones, `count` at most."""
    if rows <= count:
        return torch.arange(rows)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(rows, generator=generator)[: count - 2]
    return torch.cat((torch.tensor([0, rows - 1]), drawn)).unique()


@dataclass(frozen=True)
class Operand:
    """A packed matrix: data (rows, k / 2) and swizzled block scales."""

    data: Tensor
    scale: Tensor

    @property
    def rows(self) -> int:
        return self.data.shape[0]

    @property
    def k(self) -> int:
        return 2 * self.data.shape[1]

    @property
    def bytes(self) -> int:
        """Of data and of one scale byte for 16 values; padding is not counted."""
        return self.rows * (self.k // 2 + self.k // BLOCK_SIZE)

    def clone(self) -> Operand:
        return Operand(self.data.clone(), self.scale.clone())

    def decode(self) -> Tensor:
        """(rows, k) BF16, exact."""
        return ops.dequantize(self.data, self.scale, out_dtype=torch.bfloat16)

    def linear_scale(self) -> Tensor:
        return ops.unswizzle_scales(self.scale, self.rows, self.k // BLOCK_SIZE)

    def take(self, index: Tensor) -> Operand:
        """Some rows, on the CPU."""
        where = index.to(self.data.device)
        scale = self.linear_scale().view(torch.uint8)[where].cpu().view(torch.float8_e4m3fn)
        return Operand(self.data[where].cpu(), ops.swizzle_scales(scale))


def quantized(x: Tensor) -> Operand:
    """x with its dynamic global scale, which is then left out: a decoded operand is e2m1 · scale."""
    return Operand(*ops.quantize(x, ops.global_scale(x)))


def require_padding_zero(what: str, operand: Operand) -> None:
    """Every scale byte outside (rows, k / 16) is 0x00."""
    require_same_bytes(
        f"{what}, scale padding", ops.swizzle_scales(operand.linear_scale()), operand.scale
    )


def check_rows(what: str, operand: Operand, expected: Operand, index: Tensor) -> None:
    """Rows `index` of a producer's output equal `expected`, which the CPU op made of these rows."""
    require_padding_zero(what, operand)
    got = operand.take(index)
    require_same_bytes(f"{what}, data of {len(index)} rows", got.data, expected.data)
    require_same_bytes(f"{what}, scales of {len(index)} rows", got.scale, expected.scale)


def bf16_ulp(value: Tensor) -> Tensor:
    """Distance of neighbouring BF16 values at |value|, FP64."""
    exponent = (torch.frexp(value.double()).exponent - 1).clamp(min=BF16_MIN_EXPONENT)
    return torch.ldexp(torch.ones_like(value, dtype=torch.float64), exponent - BF16_MANTISSA_BITS)


@dataclass(frozen=True)
class Agreement:
    """Of a BF16 product with the exact one: equal bytes, and how much of the bound was used."""

    equal: float
    worst: float  # max |y - exact| / bound; at most 1


def agreement(y: Tensor, a: Operand | Tensor, b: Operand, alpha: float | None = None) -> Agreement:
    """y (M, N) BF16 against the exact CPU answer of a (M, K) and b (N, K), all on the CPU.

    a: packed, or dense BF16. Raises WrongOutput where the bound is exceeded.
    """
    scalar = None if alpha is None else torch.tensor(alpha)
    if isinstance(a, Operand):
        exact = ops.gemm(a.data, b.data, a.scale, b.scale, scalar, None, torch.float32)
        decoded, k = a.decode(), a.k
    else:
        exact = ops.gemm_a16w4(a, b.data, b.scale, scalar, None, torch.float32)
        decoded, k = a, a.shape[1]
    magnitude = decoded.double().abs() @ b.decode().double().abs().T
    magnitude *= 1.0 if alpha is None else abs(alpha)
    bound = bf16_ulp(exact) + k * ACCUMULATION * magnitude
    used = (y.double() - exact.double()).abs() / bound
    worst = float(used.max())
    if not worst <= 1:  # NaN is wrong too
        raise WrongOutput(f"gemm: |y - exact| reaches {worst:.3g} of its bound, expected <= 1")
    return Agreement(equal_fraction(y, exact.to(torch.bfloat16)), worst)


def check_whole(y: Tensor, a: Tensor, b: Tensor, alpha: float, rows_at_once: int = 4096) -> None:
    """All of y (M, N) against torch's product of the decoded a (M, K) and b (N, K), on y's device.

    Raises WrongOutput: an element that nobody wrote, or a tile of the wrong operands, is seen.
    """
    b_magnitude = b.abs()
    for start in range(0, y.shape[0], rows_at_once):
        part, got = a[start : start + rows_at_once], y[start : start + rows_at_once].float()
        expected = (part @ b.T).float() * alpha
        magnitude = (part.abs() @ b_magnitude.T).float() * (abs(alpha) * MAGNITUDE_SLACK)
        larger = torch.maximum(got.abs(), expected.abs())
        bound = 2 * (larger * 2.0**-BF16_MANTISSA_BITS + a.shape[1] * ACCUMULATION * magnitude)
        wrong = ~((got - expected).abs() <= bound)
        if wrong.any():
            row, column = divmod(int(wrong.reshape(-1).to(torch.uint8).argmax()), y.shape[1])
            raise WrongOutput(
                f"gemm: {int(wrong.sum()):,} of {wrong.numel():,} elements are off, the first at "
                f"({start + row}, {column}): {got[row, column]:.6g}, "
                f"expected {expected[row, column]:.6g} within {bound[row, column]:.3g}"
            )
