"""`grouped_gemm`: one GEMM a group, for experts of unequal size and for slices of K."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops


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
        b: (E, N, K/2) packed, or dense (E, N, K) with b_scale None. One side is packed.
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
    for name, value, scale in (("a", a, a_scale), ("b", b, b_scale)):
        if scale is None:
            ops.check_dense(name, value, (torch.bfloat16, torch.float16))
        else:
            ops.check_packed(name, value)
            ops.check_scale(f"{name}_scale", scale)
    ops.check_dtype("offs", offs, (torch.int32,), "convert it with .to(torch.int32)")
    for name, value, dtype in (
        ("gather", gather, torch.int32),
        ("scatter", scatter, torch.int32),
        ("gamma", gamma, torch.float32),
        ("alpha", alpha, torch.float32),
    ):
        if value is not None:
            ops.check_dtype(name, value, (dtype,), "convert it with .to()")
    ops.check_bias(bias)
    ops.check_out_dtype(out_dtype)
    ops.refuse_gradient("grouped_gemm", a=a, b=b, alpha=alpha, bias=bias, gamma=gamma)
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
    ops.check_out_dtype(out_dtype)
    rows = a.shape[0] if gather is None else gather.shape[0]
    n = b.shape[-2]
    shape = (rows, n) if ragged == "m" else (offs.shape[0], a.shape[0], n)
    return a.new_empty(shape, dtype=out_dtype or torch.bfloat16)
