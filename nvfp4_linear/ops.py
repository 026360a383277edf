"""The ops of ``torch.ops.nvfp4``, typed, each with its fake and its gradient directly below it.

    x ≈ e2m1 · block_scale · global_scale          D = out(alpha · A · Bᵀ + bias)

A wrong type or dtype is a TypeError (of the wrapper, else of the op itself); shapes and values
are checked by the op itself (csrc/ops.cpp), and by the fake where an op is only traced: ValueError.
The raw ops take the same arguments and carry no autograd, which would cost every call several
microseconds; gradients are the wrappers' business:

    gemm           bias.grad = Σ_rows dY
    gemm_a16w4     the same, and x.grad = dY · (alpha · B), B decoded
    gemm_a4w16     the same, and w.grad = dYᵀ · (alpha · A), A decoded
    the others     an input that requires grad is refused, never answered with a silent None

``data`` is uint8 (or float4_e2m1fn_x2), ``block_scale`` float8_e4m3fn; ``global_scale`` and
``alpha`` are FP32 tensors of one element, on the operands' device or 0-d on the CPU (then a host
scalar: no device read). Leading dimensions ``(..., K)`` are rows. Every op is asynchronous on
CUDA's current stream.
"""

from __future__ import annotations

import torch
from torch import SymInt, Tensor

from .arguments import (
    BLOCK_SIZE,
    CODES_PER_BYTE,
    check_bias,
    check_dense,
    check_out_dtype,
    check_packed,
    check_scalar,
    check_scale,
    new_scale,
    refuse_gradient,
    require,
    require_columns,
    require_device,
    require_one,
    require_packed,
    require_scale,
    requires_grad,
    round_up,
    row_count,
)

_ops = torch.ops.nvfp4


# ------------------------------------------------------------------------------------- producers


def quantize(
    x: Tensor, global_scale: Tensor | None = None, *, swizzled: bool = True
) -> tuple[Tensor, Tensor]:
    """x → ``(data, block_scale)``; without a global scale g is 1.

    x: (..., K) float32, bfloat16 or float16, K % 16 == 0; strided is fine.
    global_scale: FP32, one element, decode direction; finite and > 0 (ValueError where the host
    knows it; on the device it makes every scale byte 0x7F, NaN).
    data: (..., K/2) uint8. block_scale: float8_e4m3fn, (..., K/16), or swizzled
    (round_up(rows, 128), round_up(K/16, 4)) with its padding 0x00.

    A block that holds a NaN or an Inf gets scale byte 0x7F; no other block changes.
    """
    check_dense("x", x)
    check_scalar("global_scale", global_scale)
    refuse_gradient("quantize", x=x, global_scale=global_scale)
    return _ops.quantize(x, global_scale, swizzled=swizzled)


@torch.library.register_fake("nvfp4::quantize")
def _(x, global_scale=None, *, swizzled=True):
    check_dense("x", x)
    require_columns("x", x, BLOCK_SIZE)
    require_one("global_scale", global_scale, x)
    leading, k = x.shape[:-1], x.shape[-1]
    data = x.new_empty((*leading, k // CODES_PER_BYTE), dtype=torch.uint8)
    return data, new_scale(x, row_count(x), k // BLOCK_SIZE, leading, swizzled)


def swiglu_quantize(
    gate_up: Tensor,
    global_scale: Tensor | None = None,
    *,
    swizzled: bool = True,
    pad_rows_to: int = 1,
) -> tuple[Tensor, Tensor]:
    """``quantize`` of ``silu(gate) · up``, which is FP32 and never rounded to a narrower type.

    gate_up: (..., 2K) = [gate | up] float32, bfloat16 or float16, K % 16 == 0.
    pad_rows_to: ≥ 1; rows added up to a multiple of it are zero. Other than 1, data is 2-D:
    (padded rows, K/2).
    """
    check_dense("gate_up", gate_up)
    check_scalar("global_scale", global_scale)
    refuse_gradient("swiglu_quantize", gate_up=gate_up, global_scale=global_scale)
    return _ops.swiglu_quantize(gate_up, global_scale, swizzled=swizzled, pad_rows_to=pad_rows_to)


@torch.library.register_fake("nvfp4::swiglu_quantize")
def _(gate_up, global_scale=None, *, swizzled=True, pad_rows_to=1):
    check_dense("gate_up", gate_up)
    require_columns("gate_up", gate_up, 2 * BLOCK_SIZE)
    require_one("global_scale", global_scale, gate_up)
    require(pad_rows_to >= 1, lambda: f"pad_rows_to must be at least 1, got {pad_rows_to}")
    leading, k = gate_up.shape[:-1], gate_up.shape[-1] // 2
    rows = round_up(row_count(gate_up), pad_rows_to)
    if pad_rows_to != 1:
        leading = (rows,)
    data = gate_up.new_empty((*leading, k // CODES_PER_BYTE), dtype=torch.uint8)
    return data, new_scale(gate_up, rows, k // BLOCK_SIZE, leading, swizzled)


def global_scale(x: Tensor) -> Tensor:
    """The dynamic global scale, ``max(amax / 2688, 2⁻¹²⁶)`` over finite elements; 1 if all are 0.

    x: float32, bfloat16 or float16, any shape. Returns a 0-d FP32 tensor on x's device; no sync.
    It is a constant to autograd: x may require grad.
    """
    check_dense("x", x)
    return _ops.global_scale(x.detach())


@torch.library.register_fake("nvfp4::global_scale")
def _(x):
    check_dense("x", x)
    return x.new_empty((), dtype=torch.float32)


def swiglu_global_scale(gate_up: Tensor) -> Tensor:
    """``global_scale`` of ``silu(gate) · up`` as `swiglu_quantize` computes it, which is not written.

    gate_up: (..., 2K) = [gate | up] float32, bfloat16 or float16, K % 16 == 0. As `global_scale`.
    """
    check_dense("gate_up", gate_up)
    return _ops.swiglu_global_scale(gate_up.detach())


@torch.library.register_fake("nvfp4::swiglu_global_scale")
def _(gate_up):
    check_dense("gate_up", gate_up)
    require_columns("gate_up", gate_up, 2 * BLOCK_SIZE)
    return gate_up.new_empty((), dtype=torch.float32)


def dequantize(
    data: Tensor,
    block_scale: Tensor,
    global_scale: Tensor | None = None,
    *,
    swizzled: bool = True,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``e2m1 · block_scale · global_scale``, the last product in FP32, rounded once to out_dtype.

    data: (..., K/2) uint8 or float4_e2m1fn_x2. block_scale: as `quantize` gives it.
    out_dtype: float32, bfloat16 or float16; in each of them exact without a global scale.
    Returns (..., K).
    """
    check_packed("data", data)
    check_scale("block_scale", block_scale)
    check_scalar("global_scale", global_scale)
    check_out_dtype(out_dtype)
    refuse_gradient("dequantize", block_scale=block_scale, global_scale=global_scale)
    return _ops.dequantize(data, block_scale, global_scale, swizzled=swizzled, out_dtype=out_dtype)


@torch.library.register_fake("nvfp4::dequantize")
def _(data, block_scale, global_scale=None, *, swizzled=True, out_dtype=None):
    k = require_packed("data", data)
    require_scale("block_scale", block_scale, row_count(data), k // BLOCK_SIZE, swizzled)
    require_device("block_scale", block_scale, data)
    require_one("global_scale", global_scale, data)
    check_out_dtype(out_dtype)
    return data.new_empty((*data.shape[:-1], k), dtype=out_dtype or torch.float32)


# -------------------------------------------------------------------------------- scale layout


def swizzle_scales(scales: Tensor) -> Tensor:
    """(rows, K/16) float8_e4m3fn, row-major → the 128×4 tiles of the GEMM, padded with 0x00.

    Returns (round_up(rows, 128), round_up(K/16, 4)) float8_e4m3fn, contiguous.
    """
    check_scale("scales", scales)
    refuse_gradient("swizzle_scales", scales=scales)
    return _ops.swizzle_scales(scales)


@torch.library.register_fake("nvfp4::swizzle_scales")
def _(scales):
    check_scale("scales", scales)
    require(scales.dim() == 2, lambda: f"scales must be (rows, K/16), got {tuple(scales.shape)}")
    return new_scale(scales, scales.shape[0], scales.shape[1], (), swizzled=True)


def unswizzle_scales(scales: Tensor, rows: int, cols: int) -> Tensor:
    """The inverse of `swizzle_scales`: (rows, cols) row-major, padding dropped; cols is K/16."""
    check_scale("scales", scales)
    refuse_gradient("unswizzle_scales", scales=scales)
    return _ops.unswizzle_scales(scales, rows, cols)


@torch.library.register_fake("nvfp4::unswizzle_scales")
def _(scales, rows, cols):
    require_scale("scales", scales, rows, cols, swizzled=True)
    return scales.new_empty((rows, cols))


# -------------------------------------------------------------------------------------- products


def bias_gradient(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Σ over rows of dY (..., N), summed in FP32: (N,) in `dtype`."""
    rows = grad.reshape(row_count(grad), grad.shape[-1])
    return rows.sum(0, dtype=torch.float32).to(dtype)


def input_gradient(
    grad: Tensor, b: Tensor, b_scale: Tensor, alpha: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """dY (..., N) · (alpha · B): (..., K) in `dtype`.

    B (N, K) is decoded in FP32 and rounded once to the wider of the two dtypes, in which the
    product is taken: what a dense layer with that weight would do.
    """
    wide = torch.promote_types(grad.dtype, dtype)
    weight = _ops.dequantize(b, b_scale)
    if alpha is not None:
        weight = weight * alpha
    return (grad.to(wide) @ weight.to(wide)).to(dtype)


def gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    alpha: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = torch.bfloat16,
) -> Tensor:
    """``out(alpha · A · Bᵀ + bias)`` of two NVFP4 operands: (..., N) in out_dtype.

    a: (..., K/2), b: (N, K/2) uint8 or float4_e2m1fn_x2; both scales swizzled.
    alpha: g_A · g_B, FP32, one element. bias: (N,) float32, bfloat16 or float16.
    out_dtype: bfloat16 (also what None means), float16 or float32.

    CPU: the sum is exact and rounded once. CUDA: summed in FP32. Differentiable in bias.
    """
    check_packed("a", a)
    check_packed("b", b)
    check_scale("a_scale", a_scale)
    check_scale("b_scale", b_scale)
    check_scalar("alpha", alpha)
    check_bias(bias)
    check_out_dtype(out_dtype)
    if torch.is_grad_enabled():
        refuse_gradient("gemm", a_scale=a_scale, b_scale=b_scale, alpha=alpha)
        if requires_grad(bias):
            return _Gemm.apply(bias, a, b, a_scale, b_scale, alpha, out_dtype)
    return _ops.gemm(a, b, a_scale, b_scale, alpha, bias, out_dtype)


def _require_bias(bias: Tensor | None, n: int | SymInt, operand: Tensor) -> None:
    check_bias(bias)
    if bias is not None:
        require(bias.dim() == 1, lambda: f"bias must be (N,), got {tuple(bias.shape)}")
        require(bias.shape[0] == n, lambda: f"bias must be ({n},), got {tuple(bias.shape)}")
        require_device("bias", bias, operand)


def _require_product(
    name: str,
    operand: Tensor,
    k: int | SymInt,
    b: Tensor,
    b_scale: Tensor,
    alpha: Tensor | None,
    bias: Tensor | None,
) -> int | SymInt:
    """N, once everything that both products share has been checked."""
    b_k = require_packed("b", b)
    require(b.dim() == 2, lambda: f"b must be (N, K/2), got {tuple(b.shape)}")
    require(k == b_k, lambda: f"{name} and b must have the same K, got {k} and {b_k}")
    n = b.shape[0]
    require_scale("b_scale", b_scale, n, k // BLOCK_SIZE, swizzled=True)
    require_device("b", b, operand)
    require_device("b_scale", b_scale, operand)
    require_one("alpha", alpha, operand)
    _require_bias(bias, n, operand)
    return n


@torch.library.register_fake("nvfp4::gemm")
def _(a, b, a_scale, b_scale, alpha=None, bias=None, out_dtype=None):
    k = require_packed("a", a)
    require_scale("a_scale", a_scale, row_count(a), k // BLOCK_SIZE, swizzled=True)
    require_device("a_scale", a_scale, a)
    n = _require_product("a", a, k, b, b_scale, alpha, bias)
    check_out_dtype(out_dtype)
    return a.new_empty((*a.shape[:-1], n), dtype=out_dtype or torch.bfloat16)


class _Gemm(torch.autograd.Function):
    """`gemm` where bias requires grad."""

    @staticmethod
    def forward(ctx, bias, a, b, a_scale, b_scale, alpha, out_dtype):
        ctx.bias_dtype = bias.dtype
        return _ops.gemm(a, b, a_scale, b_scale, alpha, bias, out_dtype)

    @staticmethod
    def backward(ctx, grad):
        return bias_gradient(grad, ctx.bias_dtype), None, None, None, None, None, None


def gemm_a16w4(
    x: Tensor,
    b: Tensor,
    b_scale: Tensor,
    alpha: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``out(alpha · x · Bᵀ + bias)`` of a dense activation and an NVFP4 weight: (..., N).

    x: (..., K) bfloat16 or float16, K % 16 == 0. b: (N, K/2); b_scale: swizzled. alpha: g_B, FP32.
    bias: (N,) float32, bfloat16 or float16. out_dtype: None means x's.

    Differentiable in x and bias.
    """
    check_dense("x", x, (torch.bfloat16, torch.float16))
    check_packed("b", b)
    check_scale("b_scale", b_scale)
    check_scalar("alpha", alpha)
    check_bias(bias)
    check_out_dtype(out_dtype)
    if torch.is_grad_enabled():
        refuse_gradient("gemm_a16w4", b_scale=b_scale, alpha=alpha)
        if x.requires_grad or requires_grad(bias):
            return _MixedGemm.apply(x, bias, b, b_scale, alpha, out_dtype, False)
    return _ops.gemm_a16w4(x, b, b_scale, alpha, bias, out_dtype)


@torch.library.register_fake("nvfp4::gemm_a16w4")
def _(x, b, b_scale, alpha=None, bias=None, out_dtype=None):
    check_dense("x", x, (torch.bfloat16, torch.float16))
    require_columns("x", x, BLOCK_SIZE)
    n = _require_product("x", x, x.shape[-1], b, b_scale, alpha, bias)
    check_out_dtype(out_dtype)
    return x.new_empty((*x.shape[:-1], n), dtype=out_dtype or x.dtype)


class _MixedGemm(torch.autograd.Function):
    """A product of one dense and one packed side where the dense one or bias requires grad.

    transposed: `gemm_a4w16`, the same product with its sides swapped, else `gemm_a16w4`.
    """

    @staticmethod
    def forward(ctx, dense, bias, packed, scale, alpha, out_dtype, transposed):
        ctx.save_for_backward(packed, scale, alpha)
        ctx.dense_dtype, ctx.transposed = dense.dtype, transposed
        ctx.bias_dtype = None if bias is None else bias.dtype
        if transposed:
            return _ops.gemm_a4w16(packed, dense, scale, alpha, bias, out_dtype)
        return _ops.gemm_a16w4(dense, packed, scale, alpha, bias, out_dtype)

    @staticmethod
    def backward(ctx, grad):
        dense_grad = bias_grad = None
        if ctx.needs_input_grad[0]:
            packed, scale, alpha = ctx.saved_tensors
            rows = grad
            if ctx.transposed:  # dYᵀ · (alpha · A), the rows of Y as its columns
                rows = grad.reshape(row_count(grad), grad.shape[-1]).t()
                packed = packed.reshape(row_count(packed), packed.shape[-1])
            dense_grad = input_gradient(rows, packed, scale, alpha, ctx.dense_dtype)
        if ctx.needs_input_grad[1]:
            bias_grad = bias_gradient(grad, ctx.bias_dtype)
        return dense_grad, bias_grad, None, None, None, None, None


def gemm_a4w16(
    a: Tensor,
    w: Tensor,
    a_scale: Tensor,
    alpha: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``out(alpha · A · wᵀ + bias)`` of an NVFP4 activation and a dense weight: (..., N).

    a: (..., K/2); a_scale: swizzled. w: (N, K) bfloat16 or float16. alpha: g_A, FP32. bias: (N,).
    out_dtype: None means w's. The same product as ``gemm_a16w4`` with its sides swapped, byte for
    byte: (A · wᵀ)ᵀ = w · Aᵀ. Differentiable in w and bias.
    """
    check_packed("a", a)
    check_dense("w", w, (torch.bfloat16, torch.float16))
    check_scale("a_scale", a_scale)
    check_scalar("alpha", alpha)
    check_bias(bias)
    check_out_dtype(out_dtype)
    if torch.is_grad_enabled():
        refuse_gradient("gemm_a4w16", a_scale=a_scale, alpha=alpha)
        if w.requires_grad or requires_grad(bias):
            return _MixedGemm.apply(w, bias, a, a_scale, alpha, out_dtype, True)
    return _ops.gemm_a4w16(a, w, a_scale, alpha, bias, out_dtype)


@torch.library.register_fake("nvfp4::gemm_a4w16")
def _(a, w, a_scale, alpha=None, bias=None, out_dtype=None):
    k = require_packed("a", a)
    require_scale("a_scale", a_scale, row_count(a), k // BLOCK_SIZE, swizzled=True)
    require_device("a_scale", a_scale, a)
    check_dense("w", w, (torch.bfloat16, torch.float16))
    require(w.dim() == 2, lambda: f"w must be (N, K), got {tuple(w.shape)}")
    require(w.shape[1] == k, lambda: f"a and w must have the same K, got {k} and {w.shape[1]}")
    require_device("w", w, a)
    require_one("alpha", alpha, a)
    _require_bias(bias, w.shape[0], a)
    check_out_dtype(out_dtype)
    return a.new_empty((*a.shape[:-1], w.shape[0]), dtype=out_dtype or w.dtype)
