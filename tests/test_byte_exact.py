"""Every op gives reference.py's bytes, on every device, layout, dtype, stride and thread count.

CUDA's `gemm` is not here: it sums in FP32 in the tensor core's order, which is not exact.
"""

import pytest
import torch
from compare import (
    GOLDEN,
    INPUTS,
    TIES,
    assert_same_bytes,
    bits,
    bytes_from_hex,
    every_bf16,
    fp32_from_hex,
    make_input,
    neighbours,
    random_operand,
    scales_onto_ties,
    to_hex,
)
from helpers import poison

import nvfp4_linear  # noqa: F401  (registers torch.ops.nvfp4)
from nvfp4_linear import reference

ops = torch.ops.nvfp4
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RAGGED = [(1, 16), (5, 48), (33, 80), (127, 128), (129, 144), (300, 32)]  # rows, K
FINITE_SCALES = {"lowest": 0x00, "highest": 0x7E}


def on(device: str, *values):
    """Tensors moved to the device; None and numbers as they are."""
    return [v.to(device) if isinstance(v, torch.Tensor) else v for v in values]


def check_quantize(x, g, device, *, swizzled=True):
    expected_data, expected_scale = reference.quantize(x, g, swizzled=swizzled)
    arguments = on(device, x, g)
    poison(device)
    data, scale = ops.quantize(*arguments, swizzled=swizzled)
    assert_same_bytes(scale, expected_scale, "block_scale")
    assert_same_bytes(data, expected_data, "data")


def check_swiglu(gate_up, g, device, *, swizzled=True, pad_rows_to=1):
    options = {"swizzled": swizzled, "pad_rows_to": pad_rows_to}
    expected_data, expected_scale = reference.swiglu_quantize(gate_up, g, **options)
    arguments = on(device, gate_up, g)
    poison(device)
    data, scale = ops.swiglu_quantize(*arguments, **options)
    assert_same_bytes(scale, expected_scale, "block_scale")
    assert_same_bytes(data, expected_data, "data")


# --- quantize


@pytest.mark.parametrize("swizzled", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", INPUTS)
def test_quantize(device, name, dtype, swizzled):
    for seed, (rows, k) in enumerate(RAGGED):
        x = make_input(name, rows, k, dtype, seed)
        for g in (None, reference.global_scale(x)):
            check_quantize(x, g, device, swizzled=swizzled)


@pytest.mark.parametrize("g", [2.0**-149, 2.0**-126, 1e-20, 0.37, 1.0, 3e5, 3e38])
@pytest.mark.parametrize("name", ["tiny", "huge", "any_bits", "hand_made"])
def test_quantize_at_extreme_global_scales(device, name, g):
    x = make_input(name, 40, 272, torch.float32, seed=11)
    check_quantize(x, torch.tensor(g), device)


def test_quantize_every_bf16_value_at_every_exponent_of_scale(device):
    """Each BF16 value beside a block amax from far below to far above it."""
    x = every_bf16().reshape(-1, 16)
    x = torch.cat([torch.cat((x[:, :15], x[:, 15:].roll(step, 0)), dim=1) for step in (0, 640)])
    for g in (None, torch.tensor(2.0**-100), torch.tensor(1.7e4)):
        check_quantize(x, g, device, swizzled=False)


def test_quantize_every_scale_boundary_and_its_neighbours(device):
    """Block amaxes whose sixth lies on, right below and right above every UE4M3 boundary."""
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    points = torch.cat((grid, (grid[1:] + grid[:-1]) / 2, torch.tensor([464.0, 480.0, 512.0])))
    amax = neighbours(neighbours(points * 6))
    x = torch.linspace(-1, 1, 16) * amax[:, None]
    check_quantize(x, None, device, swizzled=False)
    check_quantize(x * 0.3, torch.tensor(0.3), device, swizzled=False)


@pytest.mark.parametrize("swizzled", [True, False])
def test_quantize_normal_data_in_bulk(device, swizzled):
    """Enough BF16 elements that a reciprocal in place of a division shows some forty times."""
    x = make_input("normal", 257, 1024, torch.bfloat16)
    check_quantize(x, reference.global_scale(x), device, swizzled=swizzled)


def strided_views(big: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of a (128, 192) tensor, none contiguous."""
    return {
        "columns": big[:, 32:96],
        "rows": big[::2],
        "transposed": big.t(),
        "every other column": big[:, ::2],
        "expanded row": big[:1].expand(7, -1),
        "offset": big.flatten()[1:].as_strided((40, 64), (65, 1)),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", strided_views(torch.empty(128, 192)))
def test_strided_input(device, name, dtype):
    view = strided_views(make_input("normal", 128, 192, dtype).to(device))[name]
    assert not view.is_contiguous()
    for op in (ops.quantize, ops.swiglu_quantize):
        expected = op(view.contiguous())
        poison(device)
        for actual, want in zip(op(view), expected, strict=True):
            assert_same_bytes(actual, want, f"{op}")
    for op in (ops.global_scale, ops.swiglu_global_scale):
        assert_same_bytes(op(view), op(view.contiguous()))
    check_quantize(view.cpu(), None, device)


@pytest.mark.parametrize("rows", [1, 5, 127, 129])
@pytest.mark.parametrize("k", [48, 80, 512])
def test_scale_padding_is_zero_over_poison(device, rows, k):
    x = make_input("normal", rows, k, torch.bfloat16).to(device)
    gate_up = make_input("normal", rows, 2 * k, torch.bfloat16).to(device)
    linear = ops.quantize(x, swizzled=False)[1]
    producers = {
        "quantize": lambda: ops.quantize(x)[1],
        "swiglu_quantize": lambda: ops.swiglu_quantize(gate_up)[1],
        "swizzle_scales": lambda: ops.swizzle_scales(linear),
    }
    padding = reference.swizzle_scales(torch.ones(rows, k // 16, dtype=torch.uint8)) == 0
    for name, produce in producers.items():
        poison(device)
        assert not bits(produce())[padding].any(), name


def test_quantize_no_rows(device):
    x = torch.empty(0, 64, dtype=torch.bfloat16)
    check_quantize(x, None, device)
    check_quantize(x, None, device, swizzled=False)
    check_swiglu(torch.empty(0, 64), None, device)
    assert_same_bytes(ops.global_scale(x.to(device)), torch.tensor(1.0))


# --- global scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", INPUTS)
def test_global_scale(device, name, dtype):
    for rows, k in [*RAGGED, (257, 1024)]:
        x = make_input(name, rows, k, dtype)
        assert_same_bytes(ops.global_scale(x.to(device)), reference.global_scale(x), name)


def test_global_scale_special_tensors(device):
    tensors = {
        "zeros": torch.zeros(4, 32),
        "negative zeros": torch.full((4, 32), -0.0),
        "nothing finite": torch.tensor([[torch.nan, torch.inf] * 8]),
        "underflow": torch.full((1, 16), 2.0**-149),
        "one element": torch.tensor([[-5.0]]),
        "largest": torch.full((1, 16), torch.finfo(torch.float32).max),
    }
    for name, x in tensors.items():
        assert_same_bytes(ops.global_scale(x.to(device)), reference.global_scale(x), name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", INPUTS)
def test_swiglu_global_scale(device, name, dtype):
    """The producer's silu, so that no byte depends on whose exp it is."""
    for rows, k in [*RAGGED, (257, 1024)]:
        gate_up = make_input(name, rows, 2 * k, dtype)
        expected = reference.swiglu_global_scale(gate_up)
        assert_same_bytes(ops.swiglu_global_scale(gate_up.to(device)), expected, name)


def test_swiglu_global_scale_special_tensors(device):
    nan, inf = torch.nan, torch.inf
    pairs = {  # gate, up: the largest finite |silu(gate) · up| is silu(1)'s, or the only one
        "zeros": [(0.0, 3.0), (5.0, 0.0)],
        "a NaN or Inf on either side": [(nan, 1.0), (1.0, inf), (inf, 2.0), (2.0, nan), (1.0, 1.0)],
        "minus infinity is a zero": [(-inf, 1e30), (1.0, -1.0)],
        "nothing finite": [(inf, 1.0), (nan, nan)],
        "overflow": [(3e38, 3e38), (1.0, 1.0)],
        "the exception of the short division": [(2.0**-23, 2.0**20)],
        "underflow": [(-88.0, 2.0**-20)],
    }
    for name, values in pairs.items():
        gate_up = torch.zeros(3, 2, 48)
        for i, (gate, up) in enumerate(values):
            gate_up[i % 3, :, 7 * i] = torch.tensor([gate, up])
        for dtype in DTYPES:
            x = gate_up.flatten(1).to(dtype)
            expected = reference.swiglu_global_scale(x)
            assert_same_bytes(ops.swiglu_global_scale(x.to(device)), expected, name)


@pytest.mark.parametrize("bad", [0.0, -0.0, -1.0, torch.nan, torch.inf, -torch.inf])
def test_bad_global_scale(device, bad):
    """Known on the host it is an error; on a GPU it makes every scale byte NaN, never silence."""
    x = make_input("normal", 5, 64, torch.bfloat16)
    arguments = on(device, x, torch.tensor(bad))
    calls = {
        "quantize": lambda: ops.quantize(*arguments, swizzled=False),
        "swiglu_quantize": lambda: ops.swiglu_quantize(*arguments, swizzled=False),
    }
    for name, call in calls.items():
        if device == "cpu":
            with pytest.raises(Exception, match="global_scale"):
                call()
        else:
            assert (bits(call()[1]) == 0x7F).all(), name
    for op in (ops.quantize, ops.swiglu_quantize):  # beside a GPU's operands, a host scalar
        with pytest.raises(Exception, match="global_scale"):
            op(arguments[0], torch.tensor(bad))


def test_host_scalar_beside_device_operands(device):
    x = make_input("normal", 5, 64, torch.bfloat16)
    data, scale = reference.quantize(x, 0.37)
    g = torch.tensor(0.37)
    assert_same_bytes(ops.quantize(x.to(device), g)[0], data, "data")
    assert_same_bytes(ops.quantize(x.to(device), g)[1], scale, "block_scale")
    decoded = ops.dequantize(*on(device, data, scale), g)
    assert_same_bytes(decoded, reference.dequantize(data, scale, g), "dequantize")


# --- SwiGLU producer


@pytest.mark.parametrize("swizzled", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", INPUTS)
def test_swiglu_quantize(device, name, dtype, swizzled):
    for seed, (rows, k) in enumerate(RAGGED):
        gate_up = make_input(name, rows, 2 * k, dtype, seed)
        check_swiglu(gate_up, None, device, swizzled=swizzled)
        check_swiglu(gate_up, torch.tensor(0.0123), device, swizzled=swizzled, pad_rows_to=8)


@pytest.mark.parametrize("pad_rows_to", [1, 2, 16, 128, 200])
def test_swiglu_padding_rows(device, pad_rows_to):
    for rows in (0, 1, 127, 129):
        gate_up = make_input("normal", rows, 96, torch.bfloat16) if rows else torch.empty(0, 96)
        for swizzled in (True, False):
            check_swiglu(gate_up, None, device, swizzled=swizzled, pad_rows_to=pad_rows_to)


def swiglu_blocks(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate, up (n,) → gate_up (rows, 32): 15 pairs a block, after one that makes h = 6, s = 1.

    silu(128) is 128 exactly.
    """
    count = len(gate) // 15 * 15
    gate, up = gate[:count].reshape(-1, 15), up[:count].reshape(-1, 15)
    first = torch.ones(len(gate), 1)
    return torch.cat((128 * first, gate, 6 / 128 * first, up), dim=1)


def gates_for_silu() -> torch.Tensor:
    rng = torch.Generator().manual_seed(5)
    spread = torch.rand(20_000, generator=rng) * 160 - 115
    return torch.cat((every_bf16().float(), spread, torch.randn(20_000, generator=rng) * 4))


def test_every_bit_of_silu_shows_in_the_codes(device):
    """up is chosen to put h on a tie of the E2M1 grid or an ulp beside it: an h that is an ulp off,
    from silu, from a contraction or from a rounding to BF16, rounds to another code."""
    gate = gates_for_silu()
    tie = torch.tensor(TIES)[torch.arange(len(gate)) % len(TIES)]
    up = tie / reference.silu(gate)
    usable = up.isfinite() & (up != 0)
    up = neighbours(up[usable])
    gate_up = swiglu_blocks(gate[usable].repeat(3), up)
    sample = gate_up[::20]  # the premise: one ulp of h changes many codes
    nudged = torch.cat((sample[:, :16], torch.nextafter(sample[:, 16:], torch.tensor(9e9))), dim=1)
    codes, other = (reference.swiglu_quantize(t, swizzled=False)[0] for t in (sample, nudged))
    assert (codes != other).float().mean() > 0.2
    check_swiglu(gate_up, None, device, swizzled=False)


def test_silu_underflow_and_specials(device):
    """Subnormal silu made visible by a tiny global scale; ±inf and NaN gates."""
    gate = torch.cat(
        (torch.linspace(-112, -80, 2048), neighbours(torch.tensor([-87.5, -89.0, -108.65])))
    )
    gate = torch.cat((gate, torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 2.0**-149])))
    gate = torch.nn.functional.pad(gate, (0, -len(gate) % 16)).reshape(-1, 16)
    for up in (1.0, -3.0, 2.0**20):
        gate_up = torch.cat((gate, torch.full_like(gate, up)), dim=1)
        for g in (2.0**-149, 2.0**-140, 2.0**-126, 1.0):
            check_swiglu(gate_up, torch.tensor(g), device)


# --- dequantize


def every_code_and_scale() -> tuple[torch.Tensor, torch.Tensor]:
    """128 rows, one for each scale byte, each of the 16 codes once."""
    row = [lo + 16 * (lo + 1) for lo in range(0, 16, 2)]
    data = torch.tensor([row] * 128, dtype=torch.uint8)
    return data, torch.arange(128, dtype=torch.uint8)[:, None].view(torch.float8_e4m3fn)


@pytest.mark.parametrize("g", [None, 1.0, 0.00111607, 3e38, 2.0**-140, 2.0**-149])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_every_code_and_scale(device, dtype, g):
    data, scale = every_code_and_scale()
    g = None if g is None else torch.tensor(g)
    for swizzled in (True, False):
        s = reference.swizzle_scales(scale) if swizzled else scale
        expected = reference.dequantize(data, s, g, swizzled=swizzled, out_dtype=dtype)
        arguments = on(device, data, s, g)
        poison(device)
        actual = ops.dequantize(*arguments, swizzled=swizzled, out_dtype=dtype)
        assert_same_bytes(actual, expected, f"swizzled={swizzled}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_ragged(device, dtype):
    for seed, (rows, k) in enumerate([*RAGGED, (0, 32)]):
        data, scale = random_operand(rows, k, seed, highest=0x7F)
        scale, g = reference.swizzle_scales(scale), torch.tensor(0.3 + seed)
        expected = reference.dequantize(data, scale, g, out_dtype=dtype)
        arguments = on(device, data, scale, g)
        poison(device)
        assert_same_bytes(ops.dequantize(*arguments, out_dtype=dtype), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dequantize_is_rounded_to_fp32_and_then_to_the_output(device, dtype):
    """Global scales whose product with 3 (code 5, scale 1) rounds to a tie of the output dtype."""
    data = torch.full((1, 8), 0x55, dtype=torch.uint8)
    scale = torch.tensor([[0x38]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    for g in scales_onto_ties(3.0, dtype):
        expected = reference.dequantize(data, scale, g, swizzled=False, out_dtype=dtype)
        arguments = on(device, data, scale, g)
        actual = ops.dequantize(*arguments, swizzled=False, out_dtype=dtype)
        assert_same_bytes(actual, expected, f"g={g.item().hex()}")


def test_dequantize_default_is_fp32_swizzled_without_global_scale(device):
    data, scale = random_operand(5, 32, seed=1)
    swizzled = reference.swizzle_scales(scale)
    actual = ops.dequantize(*on(device, data, swizzled))
    assert_same_bytes(actual, reference.dequantize(data, swizzled))
    assert actual.dtype == torch.float32


def test_dequantize_strided(device):
    data, scale = random_operand(12, 64, seed=3)
    expected = reference.dequantize(data, scale, swizzled=False)
    wide = torch.full((24, 40), 0xFF, dtype=torch.uint8, device=device)
    wide[::2, 4:36] = data.to(device)
    transposed = scale.to(device).view(torch.uint8).t().contiguous().t().view(scale.dtype)
    actual = ops.dequantize(wide[::2, 4:36], transposed, swizzled=False)
    assert_same_bytes(actual, expected)


def test_float4_dtype_is_accepted(device):
    data, scale = random_operand(5, 64, seed=4)
    scale = reference.swizzle_scales(scale)
    as_bytes = on(device, data, scale)
    as_float4 = on(device, data.view(torch.float4_e2m1fn_x2), scale)
    assert_same_bytes(ops.dequantize(*as_float4), ops.dequantize(*as_bytes))


def test_round_trip_is_stable(device):
    """Quantizing what was decoded gives the same values: the grid is its own nearest."""
    x = make_input("normal", 33, 256, torch.bfloat16).to(device)
    g = ops.global_scale(x)
    once = ops.dequantize(*ops.quantize(x, g), g)
    twice = ops.dequantize(*ops.quantize(once, g), g)
    assert_same_bytes(twice, once)


# --- scale layout


@pytest.mark.parametrize("rows, cols", [(1, 1), (33, 3), (128, 4), (129, 5), (300, 7), (1025, 32)])
def test_swizzle_and_back(device, rows, cols):
    rng = torch.Generator().manual_seed(rows)
    scales = torch.randint(0, 256, (rows, cols), generator=rng, dtype=torch.uint8)
    scales = scales.view(torch.float8_e4m3fn)
    expected = reference.swizzle_scales(scales)
    on_device = scales.to(device)
    poison(device)
    swizzled = ops.swizzle_scales(on_device)
    assert_same_bytes(swizzled, expected, "swizzled")
    poison(device)
    assert_same_bytes(ops.unswizzle_scales(swizzled, rows, cols), scales, "unswizzled")
    strided = on_device.view(torch.uint8).t().contiguous().t().view(scales.dtype)
    assert_same_bytes(ops.swizzle_scales(strided), expected, "strided")


def test_swizzle_no_rows(device):
    scales = torch.empty(0, 4, dtype=torch.uint8).view(torch.float8_e4m3fn)
    swizzled = ops.swizzle_scales(scales.to(device))
    assert_same_bytes(swizzled, reference.swizzle_scales(scales))
    assert_same_bytes(ops.unswizzle_scales(swizzled, 0, 4), scales)


@pytest.mark.parametrize("case", GOLDEN["scale_offsets"], ids=lambda c: str(c["offset"]))
def test_golden_scale_offsets(device, case):
    scales = torch.zeros(case["rows"], case["cols"], dtype=torch.uint8)
    scales[case["row"], case["col"]] = 1
    swizzled = ops.swizzle_scales(scales.view(torch.float8_e4m3fn).to(device))
    assert bits(swizzled).flatten().nonzero().flatten().tolist() == [case["offset"]]


# --- golden cases


@pytest.mark.parametrize("case", GOLDEN["quantize"], ids=lambda c: c["name"])
def test_golden_quantize(device, case):
    x = fp32_from_hex(case["x_bits"])[None]
    g = fp32_from_hex([case["global_scale_bits"]])
    arguments = on(device, x, g)
    poison(device)
    data, scale = ops.quantize(*arguments, swizzled=False)
    assert to_hex(data) == case["data"]
    assert to_hex(scale) == case["block_scale"]


@pytest.mark.parametrize("case", GOLDEN["gemm"], ids=lambda c: f"{c['m']}x{c['n']}x{c['k']}")
def test_golden_gemm(case):
    m, n = case["m"], case["n"]
    y = ops.gemm(
        bytes_from_hex(case["a"], m),
        bytes_from_hex(case["b"], n),
        *(
            ops.swizzle_scales(bytes_from_hex(case[name], rows).view(torch.float8_e4m3fn))
            for name, rows in (("a_scale_linear", m), ("b_scale_linear", n))
        ),
        out_dtype=torch.float32,
    )
    assert_same_bytes(y, fp32_from_hex(case["acc_fp32_bits"]).reshape(m, n))


# --- GEMM: the CPU's is exact


def gemm_operands(m: int, n: int, k: int, seed: int, **scale_range):
    a, a_scale = random_operand(m, k, 2 * seed, **scale_range)
    b, b_scale = random_operand(n, k, 2 * seed + 1, **scale_range)
    return a, b, reference.swizzle_scales(a_scale), reference.swizzle_scales(b_scale)


def check_gemm(operands, alpha=None, bias=None, out_dtype=torch.bfloat16):
    expected = reference.gemm(*operands, alpha, bias, out_dtype)
    poison("cpu")
    assert_same_bytes(ops.gemm(*operands, alpha, bias, out_dtype), expected, "gemm")


GEMM_SHAPES = [
    (1, 1, 16),
    (1, 8, 48),
    (5, 24, 96),
    (7, 136, 272),
    (33, 65, 1040),
    (129, 127, 512),
    (2, 3, 16384),
    (64, 256, 4096),
]


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("m, n, k", GEMM_SHAPES)
def test_gemm(m, n, k, out_dtype):
    """Random codes with scales over all of their range, then around 1 as in real data."""
    bias = torch.randn(n, generator=torch.Generator().manual_seed(n))
    for scale_range in (FINITE_SCALES, {"lowest": 0x28, "highest": 0x48}):
        operands = gemm_operands(m, n, k, seed=m + n, **scale_range)
        check_gemm(operands, out_dtype=out_dtype)
        check_gemm(operands, torch.tensor(0.00317), bias, out_dtype)


@pytest.mark.parametrize("alpha", [None, 0.0, -1.0, 1e-44, 2.0**-120, 3e38, torch.inf, torch.nan])
@pytest.mark.parametrize("bias_dtype", [None, *DTYPES])
def test_gemm_alpha_and_bias(alpha, bias_dtype):
    operands = gemm_operands(6, 9, 64, seed=5, **FINITE_SCALES)
    bias = None
    if bias_dtype is not None:
        bias = torch.tensor([0.0, -0.0, 1.5, torch.inf, -torch.inf, torch.nan, 6e4, -6e4, 1e-7])
        bias = bias.to(bias_dtype)
    for out_dtype in DTYPES:
        check_gemm(operands, None if alpha is None else torch.tensor(alpha), bias, out_dtype)


def test_gemm_default_out_dtype_and_shape_of_alpha():
    operands = gemm_operands(3, 4, 32, seed=6)
    alpha = torch.tensor(0.7)
    expected = reference.gemm(*operands, alpha)
    assert_same_bytes(ops.gemm(*operands, alpha), expected)
    assert_same_bytes(ops.gemm(*operands, alpha.reshape(1)), expected)


def cancelling_operands(m: int, n: int, k: int):
    """Rows whose second half undoes the first, but for a last block of the smallest values."""
    half = (k - 16) // 2
    a, a_scale = random_operand(m, half, seed=21)
    b, b_scale = random_operand(n, half, seed=22)
    a_tail, b_tail = (torch.full((r, 8), 0x11, dtype=torch.uint8) for r in (m, n))
    a_data = torch.cat((a, a ^ 0x88, a_tail), dim=1)
    b_data = torch.cat((b, b, b_tail), dim=1)
    scales = []
    for scale, rows in ((a_scale, m), (b_scale, n)):
        scale = scale.view(torch.uint8)
        one = torch.ones(rows, 1, dtype=torch.uint8)
        scales.append(torch.cat((scale, scale, one), dim=1).view(torch.float8_e4m3fn))
    return a_data, b_data, *(reference.swizzle_scales(s) for s in scales)


@pytest.mark.parametrize("k", [48, 1040, 4112])
def test_gemm_where_the_sum_cancels(k):
    operands = cancelling_operands(5, 17, k)
    check_gemm(operands, out_dtype=torch.float32)
    y = ops.gemm(*operands, out_dtype=torch.float32)
    assert (y == 16 * 2.0**-20).all()


@pytest.mark.parametrize("sign", [0x77, 0xFF])
def test_gemm_largest_sum(sign):
    """Every product at its largest: the accumulator's upper end, far beyond 32 bits."""
    k = 1 << 15
    a, b = torch.full((2, k // 2), 0x77, dtype=torch.uint8), torch.full((3, k // 2), sign)
    scales = (torch.full((rows, k // 16), 0x7E, dtype=torch.uint8) for rows in (2, 3))
    scales = [reference.swizzle_scales(s.view(torch.float8_e4m3fn)) for s in scales]
    operands = (a, b.to(torch.uint8), *scales)
    check_gemm(operands, out_dtype=torch.float32)
    y = ops.gemm(*operands, out_dtype=torch.float32)
    assert (y.double().abs() == float(2688 * 2688 * k)).all()


def test_gemm_beside_rounding_ties():
    """acc = 2²⁴ units and a little: FP32 ties and their neighbours on both sides, both signs."""
    m = 12
    a = torch.zeros(m, 16, dtype=torch.uint8)
    a[:, 0] = 0x77  # 6 · 448 twice
    a[:, 8] = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 0x21, 0x31], dtype=torch.uint8)
    a_scale = torch.tensor([[0x7E, 0x01]], dtype=torch.uint8).repeat(m, 1)
    b = torch.zeros(4, 16, dtype=torch.uint8)
    b[:, 0] = torch.tensor([0x07, 0x0F, 0x12, 0x65], dtype=torch.uint8)
    b[:, 8] = 0x11
    b_scale = torch.tensor([[0x7E, s] for s in (0x01, 0x02, 0x08, 0x30)], dtype=torch.uint8)
    scales = [reference.swizzle_scales(s.view(torch.float8_e4m3fn)) for s in (a_scale, b_scale)]
    for out_dtype in DTYPES:
        check_gemm((a, b, *scales), out_dtype=out_dtype)
        check_gemm((a, b, *scales), torch.tensor(1.0 + 2.0**-23), torch.rand(4), out_dtype)


def columns_of_blocks(rows: list[list[tuple[int, int]]]):
    """Rows of (code, scale byte), one block each, the code in the block's first place."""
    codes = torch.tensor([[code for code, _ in row] for row in rows], dtype=torch.uint8)
    scale = torch.tensor([[byte for _, byte in row] for row in rows], dtype=torch.uint8)
    data = torch.nn.functional.pad(codes[..., None], (0, 7)).flatten(1)
    return data, reference.swizzle_scales(scale.view(torch.float8_e4m3fn))


def test_gemm_epilogue_is_one_fused_multiply_add():
    """alpha · acc = 2⁻²⁴·(1 − i²·2⁻⁴⁶) beside an odd bias: a tie to whoever rounds the product or
    adds in FP64."""
    one, smallest = 0x38, 0x01  # scales 1 and 2⁻⁹
    a, a_scale = columns_of_blocks([[(6, one), (1, smallest)]])  # 4 and 2⁻¹⁰
    bias = torch.tensor([1 + 2.0**-23, -1 - 2.0**-23, 1.5 + 2.0**-23, 2 - 2.0**-23])
    for i, code in {1: 10, 2: 12, 3: 13, 4: 14, 6: 15}.items():  # −1, −2, −3, −4, −6
        b, b_scale = columns_of_blocks([[(6, one), (code, smallest)]] * len(bias))
        acc = ops.gemm(a, b, a_scale, b_scale, out_dtype=torch.float32)
        assert (acc == 16 * (1 - i * 2.0**-23)).all()
        for sign in (1, -1):
            alpha = torch.tensor(sign * 2.0**-28 * (1 + i * 2.0**-23))
            check_gemm((a, b, a_scale, b_scale), alpha, bias, torch.float32)
            fused = ops.gemm(a, b, a_scale, b_scale, alpha, bias, torch.float32)
            assert torch.equal(fused[0], bias)  # to which the exact sum is nearest


def test_gemm_accumulator_is_rounded_once():
    """acc = 2⁵⁵ units, an FP32 tie, and one unit: FP64 would drop the unit and find the tie."""
    big = [(6, 0x78)] * (1 << 11)  # 1024, in all 16 places below; its square is 2⁴⁰ units of 2⁻²⁰
    one_32, one_64, zero = (2, 0x60), (2, 0x68), (0, 0x38)
    unit, minus_unit = (1, 0x01), (9, 0x01)  # ±2⁻¹⁰
    a, a_scale = columns_of_blocks([[*big, one_32, one_64, unit]])
    b, b_scale = columns_of_blocks(
        [
            [*big, one_64, odd, last]  # 32 · 64 is the tie, 2³¹ units; 64 · 64 one step, 2³²
            for odd in (one_64, zero)
            for last in (unit, minus_unit, zero)
        ]
    )
    a[:, : 8 * len(big)] = b[:, : 8 * len(big)] = 0x66
    check_gemm((a, b, a_scale, b_scale), out_dtype=torch.float32)
    acc = ops.gemm(a, b, a_scale, b_scale, out_dtype=torch.float32)[0].double() * 2.0**20
    assert ((acc - 2.0**55) / 2.0**32).tolist() == [2, 1, 2, 1, 0, 0]


def test_gemm_nan_scales_stay_in_their_row_and_column():
    a, b, a_scale, b_scale = gemm_operands(6, 10, 96, seed=8)
    linear = [reference.unswizzle_scales(s, rows, 6) for s, rows in ((a_scale, 6), (b_scale, 10))]
    for scale, row in zip(linear, (2, 7), strict=True):
        scale.view(torch.uint8)[row, 3] = 0x7F
    operands = (a, b, *(reference.swizzle_scales(s) for s in linear))
    for out_dtype in DTYPES:
        check_gemm(operands, torch.tensor(0.5), torch.ones(10), out_dtype)
    y = ops.gemm(*operands)
    expected = torch.zeros(6, 10, dtype=torch.bool)
    expected[2], expected[:, 7] = True, True
    assert torch.equal(y.isnan(), expected)


def test_gemm_no_rows():
    operands = gemm_operands(4, 8, 32, seed=1)
    none = torch.empty(0, 16, dtype=torch.uint8)
    no_scale = reference.swizzle_scales(
        torch.empty(0, 2, dtype=torch.uint8).view(torch.float8_e4m3fn)
    )
    a, b, a_scale, b_scale = operands
    assert ops.gemm(none, b, no_scale, b_scale).shape == (0, 8)
    assert ops.gemm(a, none, a_scale, no_scale).shape == (4, 0)
    check_gemm(operands)


def test_gemm_strided_operands():
    a, b, a_scale, b_scale = gemm_operands(12, 20, 64, seed=12)
    expected = reference.gemm(a, b, a_scale, b_scale)
    wide = torch.full((24, 40), 0xFF, dtype=torch.uint8)
    wide[::2, 4:36] = a
    transposed = b.t().contiguous().t()
    scale = b_scale.view(torch.uint8).t().contiguous().t().view(torch.float8_e4m3fn)
    bias = torch.zeros(40)[::2]
    assert_same_bytes(ops.gemm(wide[::2, 4:36], transposed, a_scale, scale, None, bias), expected)


# --- dense activation


def check_a16w4(x, operands, alpha=None, bias=None, out_dtype=None):
    expected = reference.gemm_a16w4(x, *operands, alpha, bias, out_dtype)
    poison("cpu")
    assert_same_bytes(ops.gemm_a16w4(x, *operands, alpha, bias, out_dtype), expected, "gemm_a16w4")


def weight(n: int, k: int, seed: int, **scale_range):
    b, b_scale = random_operand(n, k, seed, **scale_range)
    return b, reference.swizzle_scales(b_scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m, n, k", GEMM_SHAPES)
def test_gemm_a16w4(m, n, k, dtype):
    x = make_input("normal", m, k, dtype)
    operands = weight(n, k, seed=n)
    check_a16w4(x, operands)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(n))
    for out_dtype in DTYPES:
        check_a16w4(x, operands, torch.tensor(0.0123), bias, out_dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", INPUTS)
def test_gemm_a16w4_every_kind_of_activation(name, dtype):
    """Exponents far apart, sums that overflow, Inf and NaN."""
    x = make_input(name, 40, 272, dtype)
    check_a16w4(x, weight(24, 272, seed=3, highest=0x7F), out_dtype=torch.float32)


def test_gemm_a16w4_adds_in_the_order_of_k():
    """Terms that FP64 cannot hold together: 2⁶⁰ + 1 − 2⁶⁰ is 0 and 2⁶⁰ − 2⁶⁰ + 1 is 1."""
    k = 1040
    x = torch.zeros(6, k)
    for row, (first, second, third) in enumerate([(0, 1, 2), (0, 2, 1), (5, 700, 1039)] * 2):
        x[row, first], x[row, second], x[row, third] = 2.0**60, 1.0, -(2.0**60)
    x[3:] *= -1
    b = torch.full((70, k // 2), 0x22, dtype=torch.uint8)
    scale = torch.full((70, k // 16), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    operands = (b, reference.swizzle_scales(scale))
    check_a16w4(x.bfloat16(), operands, out_dtype=torch.float32)
    y = ops.gemm_a16w4(x.bfloat16(), *operands, out_dtype=torch.float32)
    assert y[:, 0].tolist() == [0, 1, 0, 0, -1, 0]


def test_gemm_a16w4_strided():
    x = make_input("normal", 64, 24, torch.bfloat16).t()
    operands = weight(16, 64, seed=1)
    expected = reference.gemm_a16w4(x, *operands)
    assert_same_bytes(ops.gemm_a16w4(x, *operands), expected)
    assert ops.gemm_a16w4(x[:0], *operands).shape == (0, 16)


# --- threads


@pytest.fixture
def restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_same_bytes_at_every_thread_count(restore_threads):
    x = make_input("heavy_tailed", 301, 512, torch.bfloat16)
    gate_up = make_input("normal", 301, 1024, torch.bfloat16)
    a, a_scale = ops.quantize(x)
    b, b_scale = ops.quantize(make_input("normal", 203, 512, torch.bfloat16, seed=1))
    calls = {
        "quantize": lambda: ops.quantize(x),
        "swiglu_quantize": lambda: ops.swiglu_quantize(gate_up),
        "global_scale": lambda: (ops.global_scale(x),),
        "swiglu_global_scale": lambda: (ops.swiglu_global_scale(gate_up),),
        "dequantize": lambda: (ops.dequantize(a, a_scale),),
        "gemm": lambda: (ops.gemm(a, b, a_scale, b_scale, out_dtype=torch.float32),),
        "gemm_a16w4": lambda: (ops.gemm_a16w4(x, b, b_scale, out_dtype=torch.float32),),
    }
    torch.set_num_threads(1)
    expected = {name: call() for name, call in calls.items()}
    assert_same_bytes(
        expected["gemm"][0], reference.gemm(a, b, a_scale, b_scale, out_dtype=torch.float32)
    )
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        for name, call in calls.items():
            poison("cpu")
            for actual, want in zip(call(), expected[name], strict=True):
                assert_same_bytes(actual, want, f"{name} at {threads} threads")
