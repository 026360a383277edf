"""What the ops demand of their arguments, said in words: a wrong type or dtype is a TypeError, a
wrong shape or value a ValueError. Shapes may be symbolic where an op is only traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import SymBool, SymInt, Tensor

BLOCK_SIZE = 16  # elements along K that share a block scale
CODES_PER_BYTE = 2
TILE_ROWS, TILE_COLS = 128, 4  # of the swizzled scale layout

DENSE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PACKED_DTYPES = (torch.uint8, torch.float4_e2m1fn_x2)


def check_dtype(name: str, value: Any, dtypes: tuple[torch.dtype, ...], remedy: str) -> None:
    """TypeError unless `value` is a tensor of one of `dtypes`."""
    if isinstance(value, Tensor) and value.dtype in dtypes:
        return
    expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a {expected} tensor, got {type(value).__name__}: {remedy}")
    got = str(value.dtype).removeprefix("torch.")
    raise TypeError(f"{name}.dtype must be {expected}, got {got}: {remedy}")


def check_dense(name: str, value: Any, dtypes: tuple[torch.dtype, ...] = DENSE_DTYPES) -> None:
    check_dtype(name, value, dtypes, "convert it with .to(torch.bfloat16)")


def check_packed(name: str, value: Any) -> None:
    check_dtype(name, value, PACKED_DTYPES, "quantize it first")


def check_scale(name: str, value: Any) -> None:
    remedy = "view it with .view(torch.float8_e4m3fn) if its bytes are UE4M3"
    if isinstance(value, Tensor) and value.dtype == torch.float8_e8m0fnu:
        remedy = (
            "these are MXFP4's, one for 32 elements, which is not supported: quantize the values"
        )
    check_dtype(name, value, (torch.float8_e4m3fn,), remedy)


def check_scalar(name: str, value: Any) -> None:
    """An optional FP32 scalar; its bytes are never reinterpreted."""
    if value is not None:
        remedy = "torch.tensor(value) of a float makes one, .float() converts a tensor"
        check_dtype(name, value, (torch.float32,), remedy)


def check_bias(value: Any) -> None:
    if value is not None:
        check_dense("bias", value)


def check_out_dtype(value: Any) -> None:
    if value is not None and value not in DENSE_DTYPES:
        raise TypeError(f"out_dtype must be float32, bfloat16 or float16, got {value}")


def requires_grad(value: Tensor | None) -> bool:
    return value is not None and value.requires_grad


def refuse_gradient(op: str, **inputs: Tensor | None) -> None:
    """RuntimeError where autograd would expect a gradient that `op` does not have."""
    if not torch.is_grad_enabled():
        return
    for name, value in inputs.items():
        if requires_grad(value):
            raise RuntimeError(
                f"nvfp4 {op} has no gradient for {name}, which requires one: pass "
                f"{name}.detach(), call it under torch.no_grad(), or use Nvfp4Linear, whose "
                f"gradient passes straight through the quantization"
            )


def require(condition: bool | SymBool, message: Callable[[], str]) -> None:
    """ValueError unless `condition`; of a symbolic one the tracer keeps a guard or an assertion."""
    if condition is not True:
        torch._check_value(condition, message)


def round_up(value: int | SymInt, multiple: int) -> int | SymInt:
    return (value + multiple - 1) // multiple * multiple


def row_count(tensor: Tensor) -> int | SymInt:
    return math.prod(tensor.shape[:-1])


def require_columns(name: str, tensor: Tensor, multiple: int) -> None:
    require(tensor.dim() >= 1, lambda: f"{name} must have at least one dimension, got a scalar")
    columns = tensor.shape[-1]
    require(
        columns > 0 and columns % multiple == 0,
        lambda: f"{name}.shape[-1] must be a multiple of {multiple}, got {columns}: pad K",
    )


def require_packed(name: str, data: Tensor) -> int | SymInt:
    """K of packed data."""
    check_packed(name, data)
    require(data.dim() >= 2, lambda: f"{name} must be (rows, K/2), got {tuple(data.shape)}")
    require_columns(name, data, BLOCK_SIZE // CODES_PER_BYTE)
    return data.shape[-1] * CODES_PER_BYTE


def require_scale(
    name: str, scale: Tensor, rows: int | SymInt, cols: int | SymInt, swizzled: bool
) -> None:
    check_scale(name, scale)
    if swizzled:
        padded = (round_up(rows, TILE_ROWS), round_up(cols, TILE_COLS))
        require(scale.dim() == 2, lambda: f"{name} must be 2-D, got {tuple(scale.shape)}")
        for got, expected in zip(scale.shape, padded, strict=True):
            require(
                got == expected,
                lambda: (
                    f"{name} must be swizzled with shape {padded}, got {tuple(scale.shape)}: "
                    f"swizzle_scales makes it from row-major ({rows}, {cols})"
                ),
            )
        return
    require(
        scale.dim() >= 1 and scale.shape[-1] == cols,
        lambda: f"{name} must be row-major ({rows}, {cols}), got {tuple(scale.shape)}",
    )
    require(
        row_count(scale) == rows,
        lambda: f"{name} must be row-major ({rows}, {cols}), got {tuple(scale.shape)}",
    )


def require_one(name: str, value: Tensor | None, operand: Tensor) -> None:
    check_scalar(name, value)
    if value is not None:
        require(
            value.numel() == 1,
            lambda: f"{name} must have one element, got shape {tuple(value.shape)}",
        )
        if value.device.type != "cpu":
            require_device(name, value, operand)


def require_device(name: str, value: Tensor, operand: Tensor) -> None:
    require(
        value.device == operand.device,
        lambda: f"{name} must be on {operand.device}, got {value.device}: move it with .to()",
    )


def new_scale(
    like: Tensor, rows: int | SymInt, cols: int | SymInt, leading: tuple, swizzled: bool
) -> Tensor:
    shape = (*leading, cols)
    if swizzled:
        shape = (round_up(rows, TILE_ROWS), round_up(cols, TILE_COLS))
    return like.new_empty(shape, dtype=torch.float8_e4m3fn)
