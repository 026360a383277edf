"""`grouped_gemm`: one GEMM a group, for experts of unequal size and for slices of K."""

from __future__ import annotations

import torch
from torch import SymInt, Tensor

from .arguments import (
    BLOCK_SIZE,
    TILE_COLS,
    TILE_ROWS,
    check_bias,
    check_dtype,
    check_out_dtype,
    check_packed,
    check_scale,
    refuse_gradient,
    require,
    require_columns,
    require_device,
    require_one,
    require_packed,
    round_up,
)


def _check_types(a, b, a_scale, b_scale, offs, alpha, bias, gather, scatter, gamma, out_dtype):
    """TypeError where an argument has another type than `grouped_gemm` takes."""
    for name, value, scale in (("a", a, a_scale), ("b", b, b_scale)):
        if scale is None:
            remedy = f"packed data needs its {name}_scale, other data .to(torch.bfloat16)"
            check_dtype(name, value, (torch.bfloat16, torch.float16), remedy)
        else:
            check_packed(name, value)
            check_scale(f"{name}_scale", scale)
    check_dtype("offs", offs, (torch.int32,), "convert it with .to(torch.int32)")
    for name, value, dtype in (
        ("gather", gather, torch.int32),
        ("scatter", scatter, torch.int32),
        ("gamma", gamma, torch.float32),
        ("alpha", alpha, torch.float32),
    ):
        if value is not None:
            check_dtype(name, value, (dtype,), f"convert it with .to({dtype})")
    check_bias(bias)
    check_out_dtype(out_dtype)


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    offs: Tensor,
    alpha: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    ragged: str = "m",
    gather: Tensor | None = None,
    scatter: Tensor | None = None,
    gamma: Tensor | None = None,
    out_dtype: torch.dtype | None = torch.bfloat16,
    a_scale_swizzled: bool = False,
    b_scale_swizzled: bool = True,
) -> Tensor:
    """One GEMM a group, the groups' sizes on the device: experts, or slices of K.

    ragged="m": group e takes rows [offs[e-1], offs[e]) of the problem with expert e:
    ``out[i] = out(gamma[i] · (alpha · A[gather[i]] · B[e]ᵀ + bias[e]))`` goes to row scatter[i].
        a: (rows, K/2) packed, or (rows, K) bfloat16 or float16 with a_scale None.
        b: (E, N, K/2) packed, or dense (E, N, K) with b_scale None; two dense sides have one dtype.
        Out: (M, N), M = len(gather), or a's rows. A row that nobody wrote is zero: those beyond
        offs[-1], and those that scatter leaves out.
    ragged="k": group e takes columns [offs[e-1], offs[e]) of K, multiples of 16.
        a: (M, K/2), b: (N, K/2), either dense as above. Out: (E, M, N); an empty group's sum is 0.

    offs: int32 (E,), cumulative ends; a group may be empty. gather, scatter: int32 (M,), ragged M
    only; scatter -1 drops the row, no two rows may share a target. gamma: FP32 (M,).
    alpha: FP32, one element or (E,). bias: (E, N) float32, bfloat16 or float16.
    a_scale: float8_e4m3fn row-major (rows, K/16), or swizzled where a_scale_swizzled says so;
    b_scale: swizzled per expert (E, round_up(N, 128), round_up(K/16, 4)), or row-major.

    On the CPU an offset or index out of range is a ValueError and nothing is written; on a GPU,
    where reading them would stall the stream, such a row is skipped. No gradients.
    """
    _check_types(a, b, a_scale, b_scale, offs, alpha, bias, gather, scatter, gamma, out_dtype)
    refuse_gradient("grouped_gemm", a=a, b=b, alpha=alpha, bias=bias, gamma=gamma)
    return torch.ops.nvfp4.grouped_gemm(
        a,
        b,
        a_scale,
        b_scale,
        offs,
        alpha,
        bias,
        ragged=ragged,
        gather=gather,
        scatter=scatter,
        gamma=gamma,
        out_dtype=out_dtype,
        a_scale_swizzled=a_scale_swizzled,
        b_scale_swizzled=b_scale_swizzled,
    )


Size = int | SymInt


def _require_shape(name: str, value: Tensor | None, shape: tuple[Size, ...], like: Tensor) -> None:
    if value is None:
        return
    text = str(shape)
    require(value.dim() == len(shape), lambda: f"{name} must be {text}, got {tuple(value.shape)}")
    for got, expected in zip(value.shape, shape, strict=True):
        require(got == expected, lambda: f"{name} must be {text}, got {tuple(value.shape)}")
    require_device(name, value, like)


def _require_side(
    name: str, data: Tensor, scale: Tensor | None, dims: int, swizzled: bool
) -> tuple[Size, Size]:
    """(rows, K) of one side, of each group where it is a stack."""
    shape = tuple(data.shape)
    require(len(shape) == dims, lambda: f"{name} must have {dims} dimensions, got shape {shape}")
    rows = shape[-2]
    if scale is None:
        require_columns(name, data, BLOCK_SIZE)
        return rows, shape[-1]
    k = require_packed(name, data)
    scale_rows, scale_cols = rows, k // BLOCK_SIZE
    layout = "row-major"
    if swizzled:
        scale_rows, scale_cols = round_up(scale_rows, TILE_ROWS), round_up(scale_cols, TILE_COLS)
        layout = "swizzled"
    expected = (*shape[:-2], scale_rows, scale_cols)
    _require_shape(f"{name}_scale, {layout},", scale, expected, data)
    return rows, k


@torch.library.register_fake("nvfp4::grouped_gemm")
def _(
    a,
    b,
    a_scale,
    b_scale,
    offs,
    alpha=None,
    bias=None,
    *,
    ragged="m",
    gather=None,
    scatter=None,
    gamma=None,
    out_dtype=None,
    a_scale_swizzled=False,
    b_scale_swizzled=True,
):
    if ragged not in ("m", "k"):
        raise ValueError(f"ragged must be 'm' or 'k', got {ragged!r}")
    if ragged == "k" and (gather is not None or scatter is not None):
        raise ValueError("gather and scatter move rows of ragged M; with ragged = 'k' pass None")
    _check_types(a, b, a_scale, b_scale, offs, alpha, bias, gather, scatter, gamma, out_dtype)
    rows, k = _require_side("a", a, a_scale, 2, a_scale_swizzled)
    n, b_k = _require_side("b", b, b_scale, 2 if ragged == "k" else 3, b_scale_swizzled)
    require_device("b", b, a)
    require(k == b_k, lambda: f"a and b must have the same K, got {k} and {b_k}")
    if a_scale is None and b_scale is None and a.dtype != b.dtype:
        raise ValueError(f"a and b, both dense, must have one dtype, got {a.dtype} and {b.dtype}")
    require(offs.dim() == 1, lambda: f"offs must be (E,), got {tuple(offs.shape)}")
    groups = offs.shape[0] if ragged == "k" else b.shape[0]
    _require_shape("offs", offs, (groups,), a)
    if gather is not None:
        require(gather.dim() == 1, lambda: f"gather must be (M,), got {tuple(gather.shape)}")
        require_device("gather", gather, a)
        rows = gather.shape[0]
    _require_shape("scatter", scatter, (rows,), a)
    _require_shape("gamma", gamma, (rows,), a)
    if alpha is not None and alpha.dim() == 1 and alpha.shape[0] != 1:
        _require_shape("alpha", alpha, (groups,), a)
    else:
        require_one("alpha", alpha, a)
    _require_shape("bias", bias, (groups, n), a)
    shape = (rows, n) if ragged == "m" else (groups, rows, n)
    return a.new_empty(shape, dtype=out_dtype or torch.bfloat16)
