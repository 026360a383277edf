"""torch's side of every op: opcheck, fakes, compile, export, strides, errors, gradients.

The bytes that the ops compute are test_byte_exact.py's and test_gemm.py's.
"""

import itertools
import resource
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from compare import assert_same_bytes, bits
from helpers import poison
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

from nvfp4_linear import grouped, ops

raw = torch.ops.nvfp4
F4 = torch.float4_e2m1fn_x2
E4M3 = torch.float8_e4m3fn
DENSE = [torch.float32, torch.bfloat16, torch.float16]


@dataclass
class Call:
    """One call of an op, on CPU tensors."""

    op: str
    args: tuple
    kwargs: dict = field(default_factory=dict)

    def with_tensors(self, change):
        """The same call of `change` of every tensor; None and numbers as they are."""

        def changed(value):
            return change(value) if isinstance(value, torch.Tensor) else value

        kwargs = {name: changed(value) for name, value in self.kwargs.items()}
        return Call(self.op, tuple(map(changed, self.args)), kwargs)

    def on(self, device):
        return self.with_tensors(lambda tensor: moved(tensor, device))

    def raw(self):
        return getattr(raw, self.op)(*self.args, **self.kwargs)

    def wrapped(self):
        wrapper = grouped.grouped_gemm if self.op == "grouped_gemm" else getattr(ops, self.op)
        return wrapper(*self.args, **self.kwargs)


def moved(tensor, device):
    """To a device, with its strides."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.dtype == F4:  # has no copy of its own
        return copy.view(torch.uint8).copy_(tensor.view(torch.uint8)).view(F4)
    return copy.copy_(tensor)


def dense(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def scalar(value):
    return torch.tensor(value)


def packed(rows, k, seed=0, *, swizzled=True):
    """data (rows, K/2) and its block scales."""
    return raw.quantize(dense(rows, k, seed=seed), swizzled=swizzled)


def strided_columns(tensor):
    """The same values, as the first half of rows twice as long."""
    return torch.cat((tensor, tensor), dim=-1)[..., : tensor.shape[-1]]


def transposed(tensor):
    """The same values, column-major."""
    return tensor.t().contiguous().t()


def gemm_call(m, n, k, *, float4=False, out_dtype=None, bias=True, alpha=True):
    (a, a_scale), (b, b_scale) = packed(m, k, 1), packed(n, k, 2)
    if float4:
        a, b = a.view(F4), b.view(F4)
    optional = (scalar(0.5) if alpha else None, dense(n) if bias else None)
    return Call("gemm", (a, b, a_scale, b_scale, *optional, out_dtype))


def strided_gemm_call(layout):
    (a, a_scale), (b, b_scale) = packed(5, 48, 1), packed(24, 48, 2)
    args = (a, b, a_scale, b_scale)
    if layout == "float4":
        # float4 has no cat: its strides are made on the bytes
        a, b = (strided_columns(t).view(F4) for t in (a, b))
        return Call("gemm", (a, b, a_scale, b_scale))
    made = [strided_columns(t) if layout == "columns" else transposed(t) for t in args]
    return Call("gemm", (*made, scalar(0.5), strided_columns(dense(24))))


def leading_dequantize_call(swizzled):
    data, scale = raw.quantize(dense(2, 3, 32), swizzled=swizzled)
    return Call("dequantize", (data, scale, scalar(0.5)), {"swizzled": swizzled})


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def stack(groups, n, k):
    """Packed experts: data (E, N, K/2) and swizzled scales (E, ...)."""
    experts = [packed(n, k, seed) for seed in range(groups)]
    return tuple(torch.stack(parts) for parts in zip(*experts, strict=True))


def linear_scale(data, scale):
    rows, k = data.shape[0], data.shape[1] * 2
    return raw.unswizzle_scales(scale, rows, k // 16)


def grouped_calls():
    """Both ragged modes; every operand dense, packed, strided; every option, and none."""
    b, b_scale = stack(3, 24, 48)
    a, a_scale = packed(5, 48, swizzled=False)
    offs = int32(3, 3, 5)
    every = {"scatter": int32(1, -1, 0, 3, 4), "gamma": dense(5, dtype=torch.float32)}
    every["gather"] = int32(4, 0, 0, 2, 1)
    for out in (None, *DENSE):
        yield Call("grouped_gemm", (a, b, a_scale, b_scale, offs), {"out_dtype": out})
    vectors = (dense(3, dtype=torch.float32), dense(3, 24))
    yield Call("grouped_gemm", (a, b, a_scale, b_scale, offs, *vectors), every)
    for scale in (scalar(0.5), torch.ones(1)):
        yield Call("grouped_gemm", (a.view(F4), b.view(F4), a_scale, b_scale, offs, scale))
    for dtype in DENSE[1:]:
        x, w = dense(5, 48, dtype=dtype), dense(3, 24, 48, dtype=dtype)
        yield Call("grouped_gemm", (x, b, None, b_scale, offs), every)
        yield Call("grouped_gemm", (a, w, a_scale, None, offs), {"gamma": every["gamma"]})
        short = (x[:, :32], dense(3, 32, 24, dtype=dtype).mT)
        yield Call("grouped_gemm", (*short, None, None, offs, None, dense(3, 24)))
    rows = {"gather": int32(*range(5), 0, 1)[::2], "gamma": dense(8, dtype=torch.float32)[::2]}
    x = dense(5, 48)
    yield Call("grouped_gemm", (strided_columns(x), b, None, b_scale, int32(3, 3, 4)), rows)
    yield Call("grouped_gemm", (a[:0], b, a_scale[:0], b_scale, int32(0, 0, 0)))
    yield Call("grouped_gemm", (a, b[:, :0], a_scale, b_scale[:, :0], offs))
    yield Call("grouped_gemm", (a, b[:0], a_scale, b_scale[:0], offs[:0]))
    data, scale = packed(5, 48)
    layouts = {"a_scale_swizzled": True, "b_scale_swizzled": False}
    one = (data[None], linear_scale(data, scale)[None])
    yield Call("grouped_gemm", (data, one[0], scale, one[1], int32(5)), layouts)

    k_offs, gamma = int32(16, 16, 48), {"gamma": every["gamma"]}
    both = {"ragged": "k", "b_scale_swizzled": False}
    n, n_scale = packed(24, 48, swizzled=False)
    yield Call("grouped_gemm", (a, n, a_scale, n_scale, k_offs, *vectors), both | gamma)
    swizzled = {"ragged": "k", "a_scale_swizzled": True}
    w, w_scale = packed(24, 48)
    yield Call("grouped_gemm", (data, w, scale, w_scale, k_offs), swizzled)
    yield Call("grouped_gemm", (x, dense(24, 48), None, None, k_offs), {"ragged": "k"})
    yield Call("grouped_gemm", (x, n, None, n_scale, k_offs), both)
    yield Call("grouped_gemm", (a, dense(24, 48), a_scale, None, int32(48)), {"ragged": "k"})
    yield Call("grouped_gemm", (x, n, None, n_scale, offs[:0]), both)


def calls():
    """Every op: each dtype and option, strides, leading dimensions, no rows, one row, ragged rows."""
    x = dense(5, 48)
    for dtype in DENSE:
        yield Call("quantize", (dense(5, 48, dtype=dtype), scalar(0.01)))
        yield Call("swiglu_quantize", (dense(5, 96, dtype=dtype), scalar(0.01)))
        yield Call("global_scale", (dense(5, 48, dtype=dtype),))
        yield Call("swiglu_global_scale", (dense(5, 96, dtype=dtype),))
        yield Call("dequantize", packed(5, 48), {"out_dtype": dtype})
        yield gemm_call(5, 24, 48, out_dtype=dtype)
    for op, wide in (("quantize", 32), ("swiglu_quantize", 64)):
        yield Call(op, (dense(2, 3, wide),), {"swizzled": False})
        yield Call(op, (dense(0, wide),))
        yield Call(op, (dense(2, 0, wide),), {"swizzled": False})
        yield Call(op, (strided_columns(dense(5, wide)),))
        yield Call(op, (transposed(dense(5, wide)),))
        yield Call(op, (dense(wide),))
    yield Call("quantize", (dense(129, 16)[::2],))
    yield Call("swiglu_quantize", (dense(5, 96),), {"pad_rows_to": 8})
    yield Call("swiglu_quantize", (dense(2, 3, 96),), {"pad_rows_to": 4})
    yield Call("swiglu_quantize", (dense(2, 4, 96),), {"pad_rows_to": 4})
    for shape in ((0, 32), (), (7,), (2, 3, 5)):
        yield Call("global_scale", (dense(*shape),))
    yield Call("global_scale", (transposed(x),))
    for shape in ((0, 32), (32,), (2, 3, 64)):
        yield Call("swiglu_global_scale", (dense(*shape),))
    yield Call("swiglu_global_scale", (transposed(dense(5, 96)),))
    yield leading_dequantize_call(swizzled=True)
    yield leading_dequantize_call(swizzled=False)
    data, scale = packed(5, 48)
    yield Call("dequantize", (data.view(F4), scale))
    yield Call("dequantize", (transposed(data), transposed(scale)))
    yield Call("dequantize", packed(0, 48))
    linear = packed(129, 80, swizzled=False)[1]
    yield Call("swizzle_scales", (linear,))
    yield Call("swizzle_scales", (linear[:, 1:4],))
    yield Call("swizzle_scales", (linear[:0],))
    yield Call("unswizzle_scales", (raw.swizzle_scales(linear), 129, 5))
    yield Call("unswizzle_scales", (raw.swizzle_scales(linear[:0]), 0, 5))
    for m in (0, 1, 129):
        yield gemm_call(m, 24, 48)
        yield Call("gemm_a16w4", (dense(m, 48), *packed(24, 48), scalar(0.5), dense(24)))
    yield gemm_call(5, 0, 48)
    yield gemm_call(5, 24, 48, bias=False, alpha=False)
    for layout in ("columns", "transposed", "float4"):
        yield strided_gemm_call(layout)
    leading, leading_scale = raw.quantize(dense(2, 3, 48))
    yield Call("gemm", (leading, data, leading_scale, scale))
    for dtype, out in itertools.product(DENSE[1:], (None, *DENSE)):
        yield Call("gemm_a16w4", (dense(2, 3, 48, dtype=dtype), data, scale, None, None, out))
    yield Call("gemm_a16w4", (transposed(x), data.view(F4), scale))
    yield Call("gemm_a16w4", (strided_columns(x), data, scale))
    yield from a4w16_calls()
    yield from grouped_calls()


def a4w16_calls():
    for m in (0, 1, 129):
        a, a_scale = packed(m, 48)
        yield Call("gemm_a4w16", (a, dense(24, 48), a_scale, scalar(0.5), dense(24)))
    a, a_scale = raw.quantize(dense(2, 3, 48))
    for dtype, out in itertools.product(DENSE[1:], (None, *DENSE)):
        yield Call("gemm_a4w16", (a, dense(5, 48, dtype=dtype), a_scale, None, None, out))
    a, w = a[0], dense(5, 48)
    a_scale = packed(3, 48)[1]
    yield Call("gemm_a4w16", (a.view(F4), transposed(w), a_scale))
    yield Call("gemm_a4w16", (transposed(a), strided_columns(w), transposed(a_scale)))
    yield Call("gemm_a4w16", (a, w[:0], a_scale))


CALLS = list(calls())
IDS = [f"{i}-{call.op}" for i, call in enumerate(CALLS)]
OPS = sorted({call.op for call in CALLS})


def flat(result):
    return result if isinstance(result, tuple) else (result,)


def test_every_op_is_here():
    names = torch._C._dispatch_get_all_op_names()
    registered = {n.split("::")[1].split(".")[0] for n in names if n.startswith("nvfp4::")}
    assert registered - {"_control"} == set(OPS)


@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_fake_gives_what_the_op_gives(device, call):
    call = call.on(device)
    real = flat(call.raw())
    with FakeTensorMode() as mode:
        fake = flat(call.with_tensors(mode.from_tensor).raw())
    for made, expected in zip(fake, real, strict=True):
        for attribute in ("shape", "dtype", "device"):
            assert getattr(made, attribute) == getattr(expected, attribute)
        assert made.stride() == expected.stride()
        assert expected.is_contiguous()


def takes_float4(call):
    return any(isinstance(a, torch.Tensor) and a.dtype == F4 for a in call.args)


# opcheck traces every call: a few of each op
CHECKED = [call for op in OPS for call in [c for c in CALLS if c.op == op][::3]]
CHECKED += [call for call in CALLS if takes_float4(call)]


@pytest.mark.parametrize("call", CHECKED, ids=[f"{i}-{c.op}" for i, c in enumerate(CHECKED)])
def test_opcheck(device, monkeypatch, call):
    # test_schema looks for mutated inputs with torch.allclose, which knows neither float8 nor float4
    monkeypatch.setattr(torch, "allclose", lambda a, b, **_: torch.equal(bits(a), bits(b)))
    call = call.on(device)
    torch.library.opcheck(getattr(raw, call.op).default, call.args, call.kwargs)


@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_strides_and_wrapper_change_no_byte(device, call):
    call = call.on(device)
    contiguous = call.with_tensors(torch.Tensor.contiguous)
    poison(device)
    expected = flat(contiguous.raw())
    poison(device)
    for actual in (call.raw(), call.wrapped()):
        for got, want in zip(flat(actual), expected, strict=True):
            assert_same_bytes(got, want)


# --- compile and export


def network(x, b, b_scale, bias):
    """Every op but unswizzle_scales, in one graph."""
    g = ops.global_scale(x)
    data, scale = ops.quantize(x, g)
    y = ops.gemm(data, b, scale, b_scale, g, bias, torch.float32)
    dense_x = ops.dequantize(data, scale, g, out_dtype=torch.bfloat16)
    y = y + ops.gemm_a16w4(dense_x, b, b_scale)
    y = y + ops.gemm_a4w16(data, dense_x.new_ones(b.shape[0], 48), scale, g, bias)
    ends = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
    y = y + grouped.grouped_gemm(dense_x, b[None], None, b_scale[None], ends)
    hidden, hidden_scale = ops.swiglu_quantize(y, swizzled=False)
    return ops.dequantize(hidden, ops.swizzle_scales(hidden_scale))


ROWS = (1, 2, 127, 128, 129)


def weight(device, n=96, k=48):
    return [t.to(device) for t in (*packed(n, k, 3), dense(n))]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_fullgraph_with_dynamic_rows(device, backend):
    torch._dynamo.reset()
    counter = CompileCounter() if backend == "eager" else backend
    compiled = torch.compile(network, fullgraph=True, backend=counter)
    b = weight(device)
    for m in ROWS * 2:
        x = dense(m, 48, seed=m).to(device)
        assert_same_bytes(compiled(x, *b), network(x, *b))
    if backend == "eager":
        # once for M = 1, which torch always specializes, once for M = 2, and once for every M
        assert counter.frame_count <= 3


def test_scales_from_outside_the_graph_need_no_compile_a_shape(device):
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(ops.gemm, fullgraph=True, backend=counter, dynamic=True)
    b, b_scale, bias = weight(device)
    for m in (*ROWS, 130, 255, 256, 300):
        a, a_scale = ops.quantize(dense(m, 48, seed=m).to(device))
        args = (a, b, a_scale, b_scale, None, bias)
        assert_same_bytes(compiled(*args), ops.gemm(*args))
    assert counter.frame_count <= 3


def test_inductor(device):
    """The ops alone: with nothing to fuse, inductor calls no compiler, and the bytes stay the same."""

    def product(x, b, b_scale, bias):
        g = ops.global_scale(x)
        data, scale = ops.quantize(x, g)
        return ops.gemm(data, b, scale, b_scale, g, bias)

    torch._dynamo.reset()
    compiled = torch.compile(product, fullgraph=True, dynamic=True)
    b = weight(device)
    for m in (2, 129):
        x = dense(m, 48, seed=m).to(device)
        assert_same_bytes(compiled(x, *b), product(x, *b))


def test_export_with_dynamic_rows(device):
    class Network(torch.nn.Module):
        def forward(self, x, *rest):
            return network(x, *rest)

    b = weight(device)
    dynamic = {"x": {0: torch.export.Dim("m", min=2, max=4096)}, "rest": (None, None, None)}
    program = torch.export.export(
        Network(), (dense(5, 48).to(device), *b), dynamic_shapes=dynamic, strict=False
    )
    names = [str(n.target) for n in program.graph.nodes if "nvfp4" in str(n.target)]
    assert len(names) == len(set(names)) + 1 == 10  # dequantize twice, each op one opaque node
    for m in ROWS[1:]:
        x = dense(m, 48, seed=m).to(device)
        assert_same_bytes(program.module()(x, *b), network(x, *b))


# --- errors


def error_cases():
    """(call, error, what the message must name: argument, expected, got)."""
    x, (data, scale) = dense(5, 48), packed(5, 48)
    wrong_scalars = {"bfloat16": torch.tensor(896, dtype=torch.bfloat16), "int64": torch.tensor(1)}
    wrong_scalars["float64"] = torch.tensor(1.0, dtype=torch.float64)
    for name, g in wrong_scalars.items():
        message = f"global_scale.dtype must be float32, got {name}: "
        for op in ("quantize", "swiglu_quantize"):
            yield Call(op, (dense(4, 64), g)), TypeError, message
        yield Call("dequantize", (data, scale, g)), TypeError, message
        message = f"alpha.dtype must be float32, got {name}: "
        yield Call("gemm", (data, data, scale, scale, g)), TypeError, message
        yield Call("gemm_a16w4", (x, data, scale, g)), TypeError, message
    yield Call("quantize", (x, 0.5)), TypeError, "global_scale must be a float32 tensor, got float"
    message = "must have one element, got shape (2,)"
    yield Call("quantize", (x, torch.ones(2))), ValueError, f"global_scale {message}"
    yield Call("gemm", (data, data, scale, scale, torch.ones(2))), ValueError, f"alpha {message}"
    for g in (0.0, -1.0, torch.inf, torch.nan):
        message = "global_scale must be finite and > 0, got "
        yield Call("quantize", (x, scalar(g))), ValueError, message
        yield Call("swiglu_quantize", (dense(4, 64), scalar(g))), ValueError, message
        yield Call("dequantize", (data, scale, scalar(g))), ValueError, message

    yield Call("quantize", (x.double(),)), TypeError, "x.dtype must be float32 or bfloat16 or"
    yield Call("global_scale", (x.int(),)), TypeError, "got int32"
    yield Call("swiglu_global_scale", (x.double(),)), TypeError, "gate_up.dtype"
    message = "gate_up.shape[-1] must be a multiple of 32, got 48"
    yield Call("swiglu_global_scale", (x,)), ValueError, message
    yield Call("quantize", ([1.0],)), TypeError, "got list"
    yield Call("swiglu_quantize", (x.double(),)), TypeError, "gate_up.dtype"
    yield Call("quantize", (x[:, :30],)), ValueError, "x.shape[-1] must be a multiple of 16, got 30"
    yield Call("quantize", (x[:, :0],)), ValueError, "x.shape[-1] must be a multiple of 16, got 0"
    yield Call("quantize", (scalar(1.0),)), ValueError, "x must have at least one dimension"
    message = "gate_up.shape[-1] must be a multiple of 32, got 48"
    yield Call("swiglu_quantize", (x,)), ValueError, message
    padding = {"pad_rows_to": 0}
    yield Call("swiglu_quantize", (dense(4, 64),), padding), ValueError, "pad_rows_to must be at"

    yield Call("dequantize", (data.int(), scale)), TypeError, "data.dtype must be uint8 or float4"
    message = "block_scale.dtype must be float8_e4m3fn, got uint8"
    yield Call("dequantize", (data, scale.view(torch.uint8))), TypeError, message
    message = "block_scale must be swizzled (128x4 tiles) with shape (128, 4)"
    yield Call("dequantize", (data, scale[:5, :3])), ValueError, message
    linear = {"swizzled": False}
    message = "block_scale must be row-major with shape (5, 3)"
    yield Call("dequantize", (data, scale), linear), ValueError, message
    yield Call("dequantize", (data[:, :7], scale)), ValueError, "must be a multiple of 8, got 7"
    integer = {"out_dtype": torch.int8}
    yield Call("dequantize", (data, scale), integer), TypeError, "out_dtype must be float32, bfloat"

    yield Call("swizzle_scales", (x,)), TypeError, "scales.dtype must be float8_e4m3fn, got bfloat1"
    yield Call("swizzle_scales", (scale[0],)), ValueError, "scales must be (rows, K/16), got shape"
    message = "scales must be swizzled (128x4 tiles) with shape (256, 4) for 129 rows"
    yield Call("unswizzle_scales", (scale, 129, 3)), ValueError, message
    yield Call("unswizzle_scales", (scale, -1, 3)), ValueError, "rows and cols must be >= 0"

    wide, wide_scale = packed(5, 64)
    message = "b must have the same K, got 48 and 64"
    yield Call("gemm", (data, wide, scale, wide_scale)), ValueError, f"a and {message}"
    yield Call("gemm_a16w4", (x, wide, wide_scale)), ValueError, f"x and {message}"
    yield Call("gemm", (x, data, scale, scale)), TypeError, "a.dtype must be uint8 or float4_e2m1fn"
    message = "a_scale must be swizzled (128x4 tiles) with shape (128, 4)"
    yield Call("gemm", (data, data, scale[:5, :3], scale)), ValueError, message
    yield Call("gemm", (data, data, scale, scale[:5, :3])), ValueError, "b_scale must be swizzled"
    bias = dense(4)
    message = "bias must have shape (5,) = (N,), got (4,)"
    yield Call("gemm", (data, data, scale, scale, None, bias)), ValueError, message
    yield Call("gemm_a16w4", (x, data, scale, None, bias)), ValueError, message
    message = "bias.dtype must be float32 or bfloat16 or float16, got int32"
    yield Call("gemm", (data, data, scale, scale, None, bias.int())), TypeError, message
    yield Call("gemm", (data, data, scale, scale, None, None, E4M3)), TypeError, "out_dtype must be"
    yield Call("gemm_a16w4", (x.float(), data, scale)), TypeError, "x.dtype must be bfloat16 or fl"
    yield Call("gemm_a16w4", (x, data[None], scale)), ValueError, "got shape (1, 5, 24)"
    e8m0 = torch.zeros(128, 4, dtype=torch.float8_e8m0fnu)
    message = "got float8_e8m0fnu: these are MXFP4's, one for 32 elements, which is not supported"
    yield Call("gemm", (data, data, scale, e8m0)), TypeError, message

    w = dense(24, 48)
    yield Call("gemm_a4w16", (x, w, scale)), TypeError, "a.dtype must be uint8 or float4_e2m1fn_x2"
    yield Call("gemm_a4w16", (data, w.float(), scale)), TypeError, "w.dtype must be bfloat16 or fl"
    yield Call("gemm_a4w16", (data, dense(24, 64), scale)), ValueError, "same K, got 48 and 64"
    yield Call("gemm_a4w16", (data, w[None], scale)), ValueError, "got shape (1, 24, 48)"
    message = "a_scale must be swizzled (128x4 tiles) with shape (128, 4)"
    yield Call("gemm_a4w16", (data, w, scale[:5, :3])), ValueError, message
    message = "bias must have shape (24,) = (N,), got (4,)"
    yield Call("gemm_a4w16", (data, w, scale, None, bias)), ValueError, message
    yield from grouped_error_cases()


def grouped_error_cases():
    (a, a_scale), (b, b_scale), offs = (
        packed(5, 48, swizzled=False),
        stack(3, 24, 48),
        int32(3, 3, 5),
    )
    good = dict(a=a, b=b, a_scale=a_scale, b_scale=b_scale, offs=offs)
    cases = [
        ({"ragged": "n"}, ValueError, "ragged must be 'm' or 'k', got 'n'"),
        (
            {"a_scale": None},
            TypeError,
            "a.dtype must be bfloat16 or float16, got uint8: packed data",
        ),
        (
            {"b_scale": None},
            TypeError,
            "b.dtype must be bfloat16 or float16, got uint8: packed data",
        ),
        ({"a": dense(5, 48)}, TypeError, "a.dtype must be uint8 or float4_e2m1fn_x2, got bfloat16"),
        ({"offs": offs.long()}, TypeError, "offs.dtype must be int32, got int64"),
        ({"offs": offs[:2]}, ValueError, "offs must have shape (3,), got (2,)"),
        ({"offs": offs[None]}, ValueError, "offs must have shape (3,), got (1, 3)"),
        ({"b": b[0]}, ValueError, "b must have 3 dimensions, got shape (24, 24)"),
        ({"a": a[None]}, ValueError, "a must have 2 dimensions, got shape (1, 5, 24)"),
        (
            {"a_scale": a_scale[:4]},
            ValueError,
            "a_scale must be row-major with shape (5, 3), got (4",
        ),
        (
            {"a_scale_swizzled": True},
            ValueError,
            "a_scale must be swizzled (128x4 tiles) with shape (128, 4), got (5, 3): a_scale_swizz",
        ),
        (
            {"b_scale": b_scale[0]},
            ValueError,
            "b_scale must be swizzled (128x4 tiles) with shape (3, 128, 4), got (128, 4)",
        ),
        (
            {"a": dense(5, 64), "a_scale": None},
            ValueError,
            "a and b must have the same K, got 64 and 48",
        ),
        (
            {"a": dense(5, 48), "a_scale": None, "b": dense(3, 24, 48).half(), "b_scale": None},
            ValueError,
            "a and b, both dense, must have the same dtype, got",
        ),
        ({"gather": offs.long()}, TypeError, "gather.dtype must be int32, got int64"),
        ({"gather": offs[None]}, ValueError, "gather must have shape (rows,), got (1, 3)"),
        ({"scatter": offs}, ValueError, "scatter must have shape (5,), got (3,)"),
        ({"scatter": offs.float()}, TypeError, "scatter.dtype must be int32, got float32"),
        ({"gamma": dense(3).float()}, ValueError, "gamma must have shape (5,), got (3,)"),
        ({"gamma": dense(5)}, TypeError, "gamma.dtype must be float32, got bfloat16"),
        ({"alpha": torch.ones(2)}, ValueError, "alpha must have shape (3,), got (2,)"),
        ({"alpha": torch.ones(1).double()}, TypeError, "alpha.dtype must be float32, got float64"),
        ({"bias": dense(24)}, ValueError, "bias must have shape (3, 24) = (E, N), got (24,)"),
        (
            {"bias": dense(3, 24).int()},
            TypeError,
            "bias.dtype must be float32 or bfloat16 or float1",
        ),
        ({"out_dtype": E4M3}, TypeError, "out_dtype must be float32, bfloat16 or float16"),
        (
            {"ragged": "k", "gather": int32(0)},
            ValueError,
            "gather and scatter move rows of ragged M",
        ),
        ({"ragged": "k"}, ValueError, "b must have 2 dimensions, got shape (3, 24, 24)"),
        # what only the values of a tensor say
        ({"offs": int32(3, 2, 5)}, ValueError, "offs[1] must be in [3, 5], got 2"),
        ({"offs": int32(3, 3, 6)}, ValueError, "offs[2] must be in [3, 5], got 6"),
        (
            {"offs": int32(-1, 3, 5)},
            ValueError,
            "offs[0] must be in [0, 5], got -1",
        ),
        ({"gather": int32(0, 5, 0, 0, 0)}, ValueError, "gather[1] must be in [0, 5), got 5"),
        ({"scatter": int32(0, 1, -2, 3, 4)}, ValueError, "scatter[2] must be in [-1, 5), got -2"),
    ]
    for change, error, message in cases:
        yield Call("grouped_gemm", (), good | change), error, message
    n, n_scale = packed(24, 48)
    along_k = good | {"ragged": "k", "b": n, "b_scale": n_scale, "offs": int32(16, 24, 48)}
    message = "offs[1] must be a multiple of 16 in [16, 48], got 24"
    yield Call("grouped_gemm", (), along_k), ValueError, message


ERRORS = list(error_cases())


@pytest.mark.parametrize(
    ("call", "error", "message"), ERRORS, ids=[f"{i}-{e[0].op}" for i, e in enumerate(ERRORS)]
)
def test_error_names_argument_expected_and_got(call, error, message):
    with pytest.raises(error) as caught:
        call.wrapped()
    assert message in str(caught.value)
    # The op alone is the backstop: it refuses too, in its own words (what is no tensor at all is
    # torch's to refuse).
    with pytest.raises(RuntimeError if message.endswith(("got float", "got list")) else error):
        call.raw()


VALUES = ("global_scale must be finite", "offs[", "gather[", "scatter[")  # a fake has none to see
NO_ROWS = "rows and cols must be >= 0"  # a negative size never reaches a fake


@pytest.mark.parametrize(
    "case",
    [c for c in ERRORS if not c[2].startswith((*VALUES, NO_ROWS)) and "got list" not in c[2]],
    ids=lambda case: case[0].op,
)
def test_a_fake_refuses_what_the_op_refuses(case):
    """Compiled code meets the error when it is traced, not a wrong shape later."""
    call, error, message = case
    with FakeTensorMode() as mode, pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        call.with_tensors(mode.from_tensor).raw()
    name = message.split()[0].split(".")[0]
    assert name in str(caught.value), f"{error.__name__} without {name}"


# Of ops with other tensors, which say where to call them.
@pytest.mark.parametrize(
    "op", [op for op in OPS if "swizzle_scales" not in op and "global" not in op]
)
def test_none_in_place_of_a_tensor_is_refused_in_words(op):
    call = next(call for call in CALLS if call.op == op)
    with pytest.raises(TypeError, match="must be a tensor is None"):
        getattr(raw, op)(None, *call.args[1:], **call.kwargs)


def test_rows_may_have_any_number_of_dimensions(device):
    x = dense(2, 3, 64).to(device)
    flat, scale = raw.quantize(x.reshape(6, 64))
    many = (2, *[1] * 12, 3)
    data, scale_of_many = raw.quantize(x.reshape(*many, 64))
    assert data.shape == (*many, 32)
    assert_same_bytes(scale_of_many, scale)
    b, b_scale = raw.quantize(dense(8, 64, seed=1).to(device))
    y = raw.gemm(data, b, scale, b_scale)
    assert y.shape == (*many, 8)
    assert_same_bytes(y.reshape(6, 8), raw.gemm(flat, b, scale, b_scale))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_operands_on_two_devices_are_an_error(device):
    data, scale = packed(5, 48)
    with pytest.raises(ValueError, match=r"a_scale must be on the device of a, got cpu and cuda:0"):
        raw.gemm(data.to(device), data, scale, scale)
    with pytest.raises(ValueError, match=r"b must be on the device of a"):
        raw.gemm(data.to(device), data, scale.to(device), scale)


# --- gradients


def decoded(b, b_scale, alpha):
    return raw.dequantize(b, b_scale) * alpha


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
def test_gemm_a16w4_gradients(device, dtype, compiled):
    b, b_scale = packed(24, 48)
    alpha = scalar(-0.25)  # any sign is legal
    x, bias = dense(2, 3, 48, dtype=dtype), dense(24, dtype=torch.float32)
    b, b_scale, x, bias = (t.to(device) for t in (b, b_scale, x, bias))
    x.requires_grad_()
    bias.requires_grad_()
    f = ops.gemm_a16w4
    if compiled:
        torch._dynamo.reset()
        f = torch.compile(f, fullgraph=True, backend="aot_eager")
    grad = dense(2, 3, 24, dtype=dtype, seed=5).to(device)
    y = f(x, b, b_scale, alpha, bias)
    got = torch.autograd.grad(y, (x, bias), grad)

    twins = [t.detach().clone().requires_grad_() for t in (x, bias)]
    w = decoded(b, b_scale, alpha.to(device)).to(dtype)
    expected_y = twins[0] @ w.t() + twins[1]
    expected = torch.autograd.grad(expected_y, twins, grad.to(expected_y.dtype))
    assert got[0].dtype == dtype
    assert got[1].dtype == torch.float32
    # x.grad: the same product, rounded once to dtype at the end; bias.grad: six FP32 additions
    torch.testing.assert_close(got[0], expected[0], rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_gemm_a4w16_gradients(device, compiled):
    alpha = scalar(-0.25)
    a, a_scale = raw.quantize(dense(2, 3, 48))
    w, bias = dense(24, 48, dtype=torch.float16), dense(24, dtype=torch.float32)
    a, a_scale, w, bias = (t.to(device) for t in (a, a_scale, w, bias))
    w.requires_grad_()
    bias.requires_grad_()
    f = ops.gemm_a4w16
    if compiled:
        torch._dynamo.reset()
        f = torch.compile(f, fullgraph=True, backend="aot_eager")
    grad = dense(2, 3, 24, dtype=torch.float16, seed=5).to(device)
    got = torch.autograd.grad(f(a, w, a_scale, alpha, bias), (w, bias), grad)

    twins = [t.detach().clone().requires_grad_() for t in (w, bias)]
    x = decoded(a, a_scale, alpha.to(device)).half()
    expected_y = x @ twins[0].t() + twins[1]
    expected = torch.autograd.grad(expected_y, twins, grad.to(expected_y.dtype))
    # w.grad: FP16 sums over six rows, rounded at the end; bias.grad: six FP32 additions
    torch.testing.assert_close(got[0], expected[0], rtol=2**-9, atol=2**-9)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_gemm_bias_gradient(device, compiled):
    call = gemm_call(5, 24, 48).on(device)
    a, b, a_scale, b_scale, alpha, bias, _ = call.args
    bias.requires_grad_()
    f = ops.gemm
    if compiled:
        torch._dynamo.reset()
        f = torch.compile(f, fullgraph=True, backend="aot_eager")
    grad = dense(5, 24, seed=5).to(device)
    y = f(a, b, a_scale, b_scale, alpha, bias)
    y.backward(grad)
    assert_same_bytes(bias.grad, grad.sum(0, dtype=torch.float32).to(bias.dtype))
    assert_same_bytes(y.detach(), raw.gemm(a, b, a_scale, b_scale, alpha, bias.detach()))


def gradient_refusals():
    learning = dense(5, 64).requires_grad_()
    data, scale = packed(5, 64)
    g = scalar(0.5).requires_grad_()
    learning_scale = scale.clone().requires_grad_()
    yield Call("quantize", (learning,)), "x"
    yield Call("quantize", (learning.detach(), g)), "global_scale"
    yield Call("swiglu_quantize", (learning,)), "gate_up"
    yield Call("dequantize", (data, scale, g)), "global_scale"
    yield Call("dequantize", (data, learning_scale)), "block_scale"
    yield Call("swizzle_scales", (learning_scale,)), "scales"
    yield Call("unswizzle_scales", (learning_scale, 5, 4)), "scales"
    yield Call("gemm", (data, data, scale, scale, g)), "alpha"
    yield Call("gemm", (data, data, scale, learning_scale)), "b_scale"
    yield Call("gemm_a16w4", (learning, data, scale, g)), "alpha"
    yield Call("gemm_a4w16", (data, learning.detach(), scale, g)), "alpha"
    yield Call("gemm_a4w16", (data, learning.detach(), learning_scale)), "a_scale"
    experts, offs = (dense(5, 64), data[None], None, scale[None]), int32(5)
    learning_x = experts[0].clone().requires_grad_()
    gamma = {"gamma": torch.ones(5).requires_grad_()}
    yield Call("grouped_gemm", (learning_x, *experts[1:], offs)), "a"
    yield Call("grouped_gemm", (*experts, offs), gamma), "gamma"
    yield Call("grouped_gemm", (*experts, offs, g)), "alpha"


REFUSALS = list(gradient_refusals())


@pytest.mark.parametrize(
    ("call", "name"), REFUSALS, ids=[f"{call.op}-{name}" for call, name in REFUSALS]
)
def test_a_gradient_that_does_not_exist_is_refused(call, name):
    with pytest.raises(
        RuntimeError, match=rf"nvfp4 {call.op} has no gradient for {name}, .*detach"
    ):
        call.wrapped()
    with torch.no_grad():
        call.wrapped()


def test_global_scale_is_a_constant_to_autograd():
    x = dense(5, 48).requires_grad_()
    assert not ops.global_scale(x).requires_grad
    gate_up = dense(5, 96).requires_grad_()
    assert not ops.swiglu_global_scale(gate_up).requires_grad


def test_text_that_an_op_is_given_is_freed():
    def resident():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    def call():
        with pytest.raises(ValueError, match="unknown command"):
            torch.ops.nvfp4._control("nothing " + "x" * size)

    size, calls = 1 << 20, 64
    call()
    before = resident()
    for _ in range(calls):
        call()
    assert resident() - before < size * calls // 4
