"""reference.py against oracles written in another way: tables of distances, fractions, Python ints.

Every comparison is by bytes, but for silu, whose promise is an accuracy (2 ulp).
"""

import hashlib
import math
from fractions import Fraction

import pytest
import torch
from compare import (
    GOLDEN,
    TIES,
    assert_same_bytes,
    bits,
    bytes_from_hex,
    every_bf16,
    fp32_from_bits,
    fp32_from_hex,
    make_input,
    neighbours,
    random_operand,
    scales_onto_ties,
    to_hex,
)

from nvfp4_linear import reference

E2M1_GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FORMATS = {  # significand bits, exponents of the smallest and the largest normal
    torch.float32: (24, -126, 127),
    torch.bfloat16: (8, -126, 127),
    torch.float16: (11, -14, 15),
}


def nearest(value: Fraction, dtype: torch.dtype = torch.float32) -> float:
    """value rounded once to nearest even, by whole numbers; ±inf beyond the largest."""
    if value == 0:
        return 0.0
    precision, lowest, highest = FORMATS[dtype]
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    if abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, lowest) - precision + 1)
    rounded = round(value / quantum) * quantum  # Fraction rounds ties to even
    if abs(rounded) >= Fraction(2) ** (highest + 1):
        return math.copysign(math.inf, value)
    return math.copysign(float(rounded), value)


# --- the golden cases


@pytest.mark.parametrize("case", GOLDEN["quantize"], ids=lambda c: c["name"])
def test_golden_quantize(case):
    x = fp32_from_hex(case["x_bits"])[None]
    g = fp32_from_hex([case["global_scale_bits"]])
    data, scale = reference.quantize(x, g, swizzled=False)
    assert to_hex(data) == case["data"]
    assert to_hex(scale) == case["block_scale"]


@pytest.mark.parametrize("case", GOLDEN["gemm"], ids=lambda c: f"{c['m']}x{c['n']}x{c['k']}")
def test_golden_gemm(case):
    m, n = case["m"], case["n"]
    y = reference.gemm(
        bytes_from_hex(case["a"], m),
        bytes_from_hex(case["b"], n),
        reference.swizzle_scales(bytes_from_hex(case["a_scale_linear"], m)),
        reference.swizzle_scales(bytes_from_hex(case["b_scale_linear"], n)),
        out_dtype=torch.float32,
    )
    assert_same_bytes(y, fp32_from_hex(case["acc_fp32_bits"]).reshape(m, n))


@pytest.mark.parametrize("case", GOLDEN["scale_offsets"], ids=lambda c: str(c["offset"]))
def test_golden_scale_offsets(case):
    scales = torch.zeros(case["rows"], case["cols"], dtype=torch.uint8)
    scales[case["row"], case["col"]] = 1
    swizzled = reference.swizzle_scales(scales).flatten()
    assert swizzled.nonzero().flatten().tolist() == [case["offset"]]


# --- FP32 arithmetic


def fma_operands(kind: str) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, 4000, generator=rng)
    if kind == "any bits":
        return tuple(make_input("any_bits", 3, 4000, torch.float32))
    if kind == "cancelling":  # what is left of the sum is the rounding error of fl(a·b)
        return a, b, -(a * b)
    if kind == "beside a tie":  # ±2⁻²⁴·(1 − i²·2⁻⁴⁶): in FP64 the sum with an odd c is a tie
        i = torch.randint(1, 32, (4000,), generator=rng)
        sign = torch.where(b > 0, 1.0, -1.0)
        odd = 2 * torch.randint(1 << 22, 1 << 23, (4000,), generator=rng) + 1
        return sign * 2.0**-24 * (1 + i * 2.0**-23), 1 - i * 2.0**-23, odd * 2.0**-23
    assert kind == "subnormal results"
    return a * 2.0**-70, b * 2.0**-70, a * 2.0**-140


@pytest.mark.parametrize("kind", ["any bits", "cancelling", "beside a tie", "subnormal results"])
def test_fma_is_rounded_once(kind):
    operands = torch.stack(fma_operands(kind))
    operands = operands[:, operands.isfinite().all(dim=0)]
    exact = [Fraction(a) * Fraction(b) + Fraction(c) for a, b, c in operands.T.tolist()]
    actual = reference.fma(*operands)
    zero = torch.tensor([e == 0 for e in exact])  # whose sign a fraction does not carry
    assert (actual[zero] == 0).all()
    expected = torch.tensor([nearest(e) for e in exact])
    assert_same_bytes(actual[~zero], expected[~zero], "fma")


def test_fma_keeps_ieee_zeros_infinities_and_nan():
    inf, nan = math.inf, math.nan
    largest = torch.finfo(torch.float32).max
    table = [
        (-1.0, 0.0, 0.0, 0.0),
        (-1.0, 0.0, -0.0, -0.0),
        (1.0, 1.0, -1.0, 0.0),
        (largest, largest, -largest, inf),
        (largest, largest, -inf, -inf),
        (inf, 0.0, 1.0, nan),
        (inf, 1.0, -inf, nan),
        (nan, 1.0, 1.0, nan),
    ]
    a, b, c, expected = (torch.tensor(column) for column in zip(*table, strict=True))
    actual = reference.fma(a, b, c)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert_same_bytes(actual.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


SILU_BITS = {
    0x00000000: 0x00000000,
    0x80000000: 0x80000000,
    0x00000001: 0x00000000,
    0x80000001: 0x80000000,
    0x80000003: 0x80000002,
    0x3F000000: 0x3E9F597F,
    0xBF000000: 0xBE414D03,
    0x3F800000: 0x3F3B26A8,
    0xBF800000: 0xBE89B2B1,
    0xBA0003FE: 0xB97FF7FD,
    0x40FE2319: 0x40FE0BFB,
    0xC18591F3: 0xB57B662C,
    0x42200000: 0x42200000,
    0xC2AF0000: 0x83949C5D,  # −87.5 → −8.73e-37
    0xC2B20000: 0x8286E978,  # −89 → −1.98e-37
    0xC2CE0000: 0x80000088,
    0xC2D90000: 0x80000001,
    0xC2DA0000: 0x80000000,
    0xFF7FFFFF: 0x80000000,
    0x7F7FFFFF: 0x7F7FFFFF,
    0x7F800000: 0x7F800000,
    0xFF800000: 0x80000000,
}


def test_silu_bits():
    """Fixed results of the fixed steps: what another implementation has to give as well."""
    actual = reference.silu(fp32_from_bits(list(SILU_BITS)))
    assert_same_bytes(actual, fp32_from_bits(list(SILU_BITS.values())), "silu")
    # and of every finite BF16 value
    finite = fp32_from_bits([word << 16 for word in range(1 << 16) if word & 0x7F80 != 0x7F80])
    digest = hashlib.sha256(to_hex(bits(reference.silu(finite)).view(torch.uint8)).encode())
    assert digest.hexdigest()[:16] == "306a90ae72379560"
    assert reference.silu(torch.tensor(torch.nan)).isnan()


def silu_float64(v: torch.Tensor) -> torch.Tensor:
    v = v.double()
    z = torch.exp(-v.abs())
    return torch.where(v < 0, v * z, v) / (1 + z)


def silu_samples() -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(2)
    spread = torch.rand(400_000, generator=rng)
    bf16 = every_bf16().float()
    return {
        "every BF16": bf16[torch.isfinite(bf16)],
        "uniform, -115 to 45": spread * 160 - 115,
        "subnormal results": spread * 25 - 110,
        "log-uniform magnitude": torch.exp2(spread * 160 - 149) * (1 - 2 * (spread > 0.5).float()),
        "reduction boundaries": neighbours((torch.arange(-324, 117) / 2 * math.log(2)).float()),
        "around the clamps": neighbours(torch.tensor([-112.0, -108.65, -87.3, 0.0, 40.0])),
    }


@pytest.mark.parametrize("name", silu_samples())
def test_silu_is_within_2_ulp(name):
    v = silu_samples()[name]
    actual, exact = reference.silu(v), silu_float64(v)
    error = (actual.double() - exact).abs()
    spacing = 2.0 ** (torch.frexp(exact).exponent.clamp(min=-125) - 24).double()
    worst = (error / spacing).argmax()
    assert error[worst] <= 2 * spacing[worst], f"silu({v[worst].item().hex()}): {actual[worst]}"
    assert torch.equal(actual.signbit(), v.signbit())


# --- E2M1


def e2m1_by_distance(t: torch.Tensor) -> torch.Tensor:
    """Nearest of the eight magnitudes, the even code at equal distance. Above 5 only 6 is near."""
    magnitude = t.double().abs().clamp(max=8.0)
    distance = (magnitude[:, None] - torch.tensor(E2M1_GRID).double()).abs()
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # argmin takes the first: even codes first
    code = torch.tensor(order)[distance[:, order].argmin(dim=1)]
    return (code + 8 * t.signbit().long()).to(torch.uint8)


def test_e2m1_every_bf16_value():
    t = every_bf16().float()
    t = t[~t.isnan()]
    assert_same_bytes(reference.e2m1_encode(t), e2m1_by_distance(t), "E2M1 code")


def test_e2m1_every_boundary_and_its_neighbours():
    t = neighbours(torch.tensor([*TIES, *E2M1_GRID, 8.0, 1e30]))
    t = torch.cat((t, -t, torch.tensor([torch.inf, -torch.inf])))
    assert_same_bytes(reference.e2m1_encode(t), e2m1_by_distance(t), "E2M1 code")


def test_e2m1_ties_go_to_even():
    ties = torch.tensor(TIES)
    assert reference.e2m1_encode(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert reference.e2m1_encode(-ties).tolist() == [8, 10, 10, 12, 12, 14, 14]


def test_e2m1_decode():
    expected = torch.tensor([*E2M1_GRID, *(-v for v in E2M1_GRID)])
    assert_same_bytes(reference.e2m1_decode(torch.arange(16)), expected)
    assert_same_bytes(reference.e2m1_encode(expected), torch.arange(16, dtype=torch.uint8))


# --- UE4M3


def test_e4m3_all_256_decodes():
    byte = torch.arange(256, dtype=torch.uint8)
    expected = byte.view(torch.float8_e4m3fn).float()
    actual = reference.e4m3_decode(byte)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert_same_bytes(actual.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))
    assert expected[0x01] == 2.0**-9 and expected[0x7E] == 448 and expected[0x7F].isnan()


def e4m3_boundaries() -> torch.Tensor:
    """Every value, every midpoint, beyond the largest, and the FP32 on both sides of each."""
    grid = reference.e4m3_decode(torch.arange(127, dtype=torch.uint8))
    middles = (grid[1:] + grid[:-1]) / 2
    beyond = torch.tensor([464.0, 480.0, 496.0, 512.0, 1e30, 2.0**-149, 2.0**-126])
    points = neighbours(torch.cat((grid, middles, beyond)))
    return torch.cat((points[points >= 0], torch.tensor([torch.inf])))


def e4m3_by_distance(value: torch.Tensor) -> torch.Tensor:
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    distance = (value.double().clamp(max=512.0)[:, None] - grid).abs()
    order = [*range(0, 127, 2), *range(1, 127, 2)]  # argmin takes the first: even bytes first
    return torch.tensor(order)[distance[:, order].argmin(dim=1)].to(torch.uint8)


def test_e4m3_every_boundary_and_its_neighbours():
    value = e4m3_boundaries()
    actual = reference.e4m3_encode(value)
    assert_same_bytes(actual, e4m3_by_distance(value), "against distances")
    torch_cast = value.clamp(max=448.0).to(torch.float8_e4m3fn)
    assert_same_bytes(actual, torch_cast.view(torch.uint8), "against torch's cast")


def test_e4m3_every_bf16_value():
    value = every_bf16().float()
    value = value[value >= 0]
    assert_same_bytes(reference.e4m3_encode(value), e4m3_by_distance(value))


def test_e4m3_nan_and_sign():
    assert reference.e4m3_encode(torch.tensor([torch.nan, 464.0, 0.0])).tolist() == [0x7F, 0x7E, 0]
    with pytest.raises(ValueError, match="unsigned"):
        reference.e4m3_encode(torch.tensor([-1.0]))


# --- scale layout


def swizzle_by_offset(scales: torch.Tensor) -> torch.Tensor:
    rows, cols = scales.shape
    padded_rows, padded_cols = -(-rows // 128) * 128, -(-cols // 4) * 4
    tiles = -(-cols // 4)
    out = torch.zeros(padded_rows * padded_cols, dtype=torch.uint8)
    for r in range(rows):
        for c in range(cols):
            tile = (r // 128) * tiles + c // 4
            out[tile * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4] = scales[r, c]
    return out.reshape(padded_rows, padded_cols)


@pytest.mark.parametrize("rows, cols", [(1, 1), (33, 3), (128, 4), (129, 5), (260, 9), (0, 4)])
def test_swizzle(rows, cols):
    scales = torch.randint(1, 127, (rows, cols), dtype=torch.uint8)
    swizzled = reference.swizzle_scales(scales)
    assert_same_bytes(swizzled, swizzle_by_offset(scales))
    assert_same_bytes(reference.unswizzle_scales(swizzled, rows, cols), scales)
    as_fp8 = reference.swizzle_scales(scales.view(torch.float8_e4m3fn))
    assert_same_bytes(as_fp8, swizzled.view(torch.float8_e4m3fn))


def test_unswizzle_refuses_unpadded_scales():
    with pytest.raises(ValueError, match=r"\(128, 4\).*got \(5, 4\)"):
        reference.unswizzle_scales(torch.zeros(5, 4, dtype=torch.uint8), 5, 4)


# --- quantize


def quantize_by_fractions(x: list[float], g: float) -> tuple[list[int], int]:
    """One block of finite values by the numbered steps, each exact and then rounded once."""
    g = Fraction(g)
    amax = max(abs(v) for v in x)
    sixth = nearest(Fraction(amax) / 6)
    ratio = nearest(Fraction(sixth) / g)
    byte = int(e4m3_by_distance(torch.tensor([ratio]))[0])
    s = Fraction(float(torch.tensor(byte, dtype=torch.uint8).view(torch.float8_e4m3fn)))
    s32 = Fraction(nearest(s * g))
    codes = []
    for v in x:
        negative = math.copysign(1.0, v) < 0
        t = nearest(abs(Fraction(v)) / s32) if s else 0.0
        codes.append(int(e2m1_by_distance(torch.tensor([t]))[0]) + 8 * negative)
    return codes, byte


@pytest.mark.parametrize("name", ["normal", "heavy_tailed", "tiny", "huge", "on_ties"])
@pytest.mark.parametrize("g", [1.0, 0.0123, 2.0**-126, 2.0**-149 * 3, 1e35])
def test_quantize_against_fractions(name, g):
    x = make_input(name, 3, 64, torch.float32, seed=7)
    g = torch.tensor(g)
    data, scale = reference.quantize(x, g, swizzled=False)
    for row in range(x.shape[0]):
        for block in range(x.shape[1] // 16):
            values = x[row, block * 16 : block * 16 + 16].tolist()
            codes, byte = quantize_by_fractions(values, g.item())
            packed = [lo + 16 * hi for lo, hi in zip(codes[::2], codes[1::2], strict=True)]
            assert bits(scale)[row, block] == byte, (name, row, block)
            assert data[row, block * 8 : block * 8 + 8].tolist() == packed, (name, row, block)


def test_amax_is_divided_by_six_and_then_by_g():
    """Amaxes beside the boundaries of the scale, where dividing once by 6·g gives other bytes."""
    rng = torch.Generator().manual_seed(8)
    g = torch.rand(400, generator=rng) + 0.5
    grid = torch.arange(0x30, 0x40, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (grid[1:] + grid[:-1]) / 2
    amax = g * 6 * middles[torch.arange(400) % len(middles)]
    other_scales = reference.e4m3_encode(amax / (6 * g))
    differ = 0
    for a, one_g, other in zip(amax.tolist(), g.tolist(), other_scales.tolist(), strict=True):
        scale = reference.quantize(torch.full((1, 16), a), one_g, swizzled=False)[1]
        ratio = nearest(Fraction(nearest(Fraction(a) / 6)) / Fraction(one_g))
        assert bits(scale).item() == e4m3_by_distance(torch.tensor([ratio])).item()
        differ += bits(scale).item() != other
    assert differ > 20


def test_division_is_not_multiplication_by_a_reciprocal():
    """The two differ in BF16 data: a reference that took the short cut would not be one."""
    x = make_input("normal", 512, 1024, torch.bfloat16).float()
    g = reference.global_scale(x)
    data, scale = reference.quantize(x, g, swizzled=False)
    s32 = (reference.e4m3_decode(scale) * g).repeat_interleave(16, dim=1)
    short_cut = reference.e2m1_encode(x * (1 / s32))
    codes = torch.stack((data & 0xF, data >> 4), dim=-1).flatten(1)
    one_in = x.numel() / (short_cut != codes).sum().item()
    assert 3_000 < one_in < 12_000, f"they differ in one code in {one_in:.0f}"


def test_first_byte_holds_even_index_low():
    x = torch.tensor([[0.5, 6.0] + [0.0] * 14])
    data, scale = reference.quantize(x)
    assert data[0, 0] == 0x71
    assert bits(scale)[0, 0] == 0x38


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_poisons_its_block_only(bad):
    x = torch.ones(2, 32)
    clean_data, clean_scale = reference.quantize(x, swizzled=False)
    x[0, 3] = bad
    data, scale = reference.quantize(x, swizzled=False)
    assert bits(scale)[0, 0] == 0x7F
    expected_scale, expected_data = bits(clean_scale).clone(), clean_data.clone()
    expected_scale[0, 0] = 0x7F
    expected_data[0, 1] &= 0x0F  # the element itself counts as 0
    assert_same_bytes(bits(scale), expected_scale)
    assert_same_bytes(data, expected_data)


def test_zero_scale_keeps_signs():
    x = torch.tensor([[2.0**-30, -(2.0**-30), 0.0, -0.0] * 4])
    data, scale = reference.quantize(x, swizzled=False)
    assert bits(scale).tolist() == [[0]]
    assert data.tolist() == [[0x80] * 8]


@pytest.mark.parametrize("g", [0.0, -1.0, torch.nan, torch.inf])
def test_bad_global_scale_is_an_error(g):
    with pytest.raises(ValueError, match="global_scale"):
        reference.quantize(torch.ones(1, 16), g)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32])
def test_global_scale_of_another_dtype_is_an_error(dtype):
    with pytest.raises(TypeError, match="global_scale"):
        reference.quantize(torch.ones(1, 16), torch.tensor(896, dtype=dtype))


@pytest.mark.parametrize(
    "x, expected",
    [
        ([0.0, -0.0], 1.0),
        ([torch.nan, torch.inf], 1.0),
        ([2688.0, torch.inf, torch.nan], 1.0),
        ([-3.0, 1.0], nearest(Fraction(3, 2688))),
        ([2.0**-140], 2.0**-126),
        ([torch.finfo(torch.float32).max], nearest((2 - Fraction(2) ** -23) * 2**127 / 2688)),
    ],
)
def test_global_scale(x, expected):
    assert_same_bytes(reference.global_scale(torch.tensor(x)), torch.tensor(expected))


def test_swiglu_is_rounded_nowhere_before_the_block_scale():
    gate_up = make_input("normal", 64, 1024, torch.bfloat16)
    gate_up[0] = 0.5 + 2.5 * (torch.arange(1024) >= 512)  # (0.5, 3.0)
    gate_up[1] = 1.5
    h = reference.silu(gate_up[:, :512].float()) * gate_up[:, 512:].float()
    data, scale = reference.swiglu_quantize(gate_up, 0.01)
    expected_data, expected_scale = reference.quantize(h, 0.01)
    assert_same_bytes(data, expected_data)
    assert_same_bytes(scale, expected_scale)
    assert not torch.equal(data, reference.quantize(h.bfloat16(), 0.01)[0])  # the data can tell


@pytest.mark.parametrize("swizzled", [True, False])
def test_swiglu_padding_rows_are_zero(swizzled):
    gate_up = make_input("normal", 5, 96, torch.bfloat16)
    data, scale = reference.swiglu_quantize(gate_up, swizzled=False)
    padded, padded_scale = reference.swiglu_quantize(gate_up, swizzled=swizzled, pad_rows_to=4)
    if swizzled:
        padded_scale = reference.unswizzle_scales(padded_scale, 8, 3)
    assert padded.shape == (8, 24) and padded_scale.shape == (8, 3)
    assert_same_bytes(padded[:5], data)
    assert_same_bytes(padded_scale[:5], scale)
    assert not padded[5:].any() and not bits(padded_scale)[5:].any()


# --- dequantize


def every_code_and_scale() -> tuple[torch.Tensor, torch.Tensor]:
    """128 rows, one for each scale byte, each of the 16 codes once."""
    data = torch.tensor([[lo + 16 * (lo + 1) for lo in range(0, 16, 2)]] * 128, dtype=torch.uint8)
    return data, torch.arange(128, dtype=torch.uint8)[:, None].view(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", list(FORMATS))
@pytest.mark.parametrize("g", [None, 1.0, 0.00111607, 3e38, 2.0**-140, -1.0, torch.nan])
def test_dequantize_every_code_and_scale(dtype, g):
    data, scale = every_code_and_scale()
    actual = reference.dequantize(data, scale, g, swizzled=False, out_dtype=dtype)
    canonical_nan = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
    scales = scale.float().flatten().tolist()
    factor = None if g is None else torch.tensor(g).item()
    for row, s in enumerate(scales):
        for code, value in enumerate([*E2M1_GRID, *(-v for v in E2M1_GRID)]):
            got = actual[row, code]
            if math.isnan(s) or (factor is not None and math.isnan(factor)):
                assert bits(got) == canonical_nan[dtype]
                continue
            exact = Fraction(value) * Fraction(s) * Fraction(1 if factor is None else factor)
            once = nearest(exact)
            want = once if math.isinf(once) else nearest(Fraction(once), dtype)
            assert got.item() == want
            if factor is None:
                assert Fraction(got.item()) == exact  # exact in all three dtypes
            negative = (code >= 8) != (factor is not None and factor < 0)
            assert got.signbit() == negative


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dequantize_is_rounded_to_fp32_and_then_to_the_output(dtype):
    data = torch.full((1, 8), 0x55, dtype=torch.uint8)  # 3
    scale = torch.tensor([[0x38]], dtype=torch.uint8)
    differ = 0
    for g in scales_onto_ties(3.0, dtype):
        exact = 3 * Fraction(g.item())
        actual = reference.dequantize(data, scale, g, swizzled=False, out_dtype=dtype)
        assert actual[0, 0].item() == nearest(Fraction(nearest(exact)), dtype)
        differ += actual[0, 0].item() != nearest(exact, dtype)
    assert differ >= 8


# --- GEMM


def decode(data: torch.Tensor, scale: torch.Tensor) -> list[list[Fraction | None]]:
    """Rows of fractions; None for NaN."""
    grid = [*map(Fraction, E2M1_GRID), *(-Fraction(v) for v in E2M1_GRID)]
    rows = []
    for data_row, scale_row in zip(data.tolist(), scale.float().tolist(), strict=True):
        codes = [c for byte in data_row for c in (byte & 15, byte >> 4)]
        s = [None if math.isnan(v) else Fraction(v) for v in scale_row]
        rows.append(
            [None if s[k // 16] is None else grid[c] * s[k // 16] for k, c in enumerate(codes)]
        )
    return rows


def gemm_by_fractions(a_rows, b_rows, alpha, bias, dtype):
    out = []
    for a in a_rows:
        for n, b in enumerate(b_rows):
            if None in a or None in b:
                out.append(math.nan)
                continue
            acc = nearest(sum((x * y for x, y in zip(a, b, strict=True)), Fraction(0)))
            if math.isinf(acc):
                out.append(acc * alpha)
                continue
            value = nearest(Fraction(alpha) * Fraction(acc) + Fraction(bias[n]))
            out.append(value if math.isinf(value) else nearest(Fraction(value), dtype))
    return torch.tensor(out, dtype=torch.float64).reshape(len(a_rows), -1).to(dtype)


def random_epilogue(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    alpha = torch.rand((), generator=rng) * 2.0 ** -(seed % 24)
    bias = torch.randn(n, generator=rng) * 2.0 ** (seed % 13)
    return alpha, bias


@pytest.mark.parametrize("dtype", list(FORMATS))
@pytest.mark.parametrize("seed", range(6))
def test_gemm_against_fractions(dtype, seed):
    m, n, k = [(3, 4, 16), (2, 5, 48), (1, 3, 256), (4, 4, 64), (2, 2, 1040), (3, 3, 32)][seed]
    a, a_scale = random_operand(m, k, seed=2 * seed)
    b, b_scale = random_operand(n, k, seed=2 * seed + 1)
    alpha, bias = random_epilogue(n, seed)
    if seed == 5:
        a_scale.view(torch.uint8)[1, 0] = b_scale.view(torch.uint8)[2, 1] = 0x7F
    scales = reference.swizzle_scales(a_scale), reference.swizzle_scales(b_scale)
    actual = reference.gemm(a, b, *scales, alpha, bias, dtype)
    expected = gemm_by_fractions(
        decode(a, a_scale), decode(b, b_scale), alpha.item(), bias.tolist(), dtype
    )
    assert torch.equal(actual.isnan(), expected.isnan())
    assert_same_bytes(actual.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


def test_gemm_sum_is_exact_where_fp32_would_lose_it():
    """Big terms that cancel leave one unit of 2⁻²⁰, and ties of the final rounding go to even."""
    a = torch.full((1, 24), 0x22, dtype=torch.uint8)  # all 1.0
    a_scale = torch.tensor([[0x7E, 0x7E, 0x01]], dtype=torch.uint8)
    b = torch.zeros(1, 24, dtype=torch.uint8)
    b[0, 0], b[0, 8], b[0, 16] = 0x07, 0x0F, 0x01  # 6, −6 and 0.5
    b_scale = torch.tensor([[0x7E, 0x7E, 0x01]], dtype=torch.uint8)
    scales = reference.swizzle_scales(a_scale), reference.swizzle_scales(b_scale)
    y = reference.gemm(a, b, *scales, out_dtype=torch.float32)
    assert y.item() == 2.0**-19
    y = reference.gemm(a, b, *scales, alpha=2.0**-40, out_dtype=torch.float32)
    assert y.item() == 2.0**-59


def test_int64_to_fp32_rounds_once():
    around_ties = [
        base + tie + d
        for base in (1 << 60, (1 << 60) + (1 << 37), 1 << 54, (1 << 54) + (1 << 31))
        for tie in (0, 1 << 36, 1 << 30)
        for d in (-1, 0, 1)
    ]
    values = [*around_ties, *(-v for v in around_ties), 0, 1, -1, (1 << 24) + 1]
    actual = reference._int64_to_fp32(torch.tensor(values), -20)
    expected = [nearest(Fraction(v, 1 << 20)) for v in values]
    assert_same_bytes(actual, torch.tensor(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spread", [0, 6, 10])
def test_gemm_a16w4_is_exact_for_ordinary_activations(dtype, spread):
    """spread: how many exponents up and down from a normal distribution's."""
    rng = torch.Generator().manual_seed(spread)
    exponent = torch.randint(-spread, spread + 1, (4, 64), generator=rng)
    x = (torch.randn(4, 64, generator=rng) * 2.0**exponent).to(dtype)
    b, b_scale = random_operand(3, 64, seed=9)
    b_scale.view(torch.uint8)[2, 1] = 0x7F
    alpha, bias = random_epilogue(3, 4)
    operands = x, b, reference.swizzle_scales(b_scale), alpha, bias
    x_rows = [[Fraction(v) for v in row] for row in x.double().tolist()]
    exact = x_rows, decode(b, b_scale), alpha.item(), bias.tolist()
    for out_dtype in (None, torch.float32):
        actual = reference.gemm_a16w4(*operands, out_dtype)
        expected = gemm_by_fractions(*exact, out_dtype or dtype)
        assert torch.equal(actual.isnan(), expected.isnan())
        assert_same_bytes(actual.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


def test_gemm_a16w4_adds_in_the_order_of_k():
    """Terms that FP64 cannot hold together: 2⁶⁰ + 1 − 2⁶⁰ is 0 and 2⁶⁰ − 2⁶⁰ + 1 is 1."""
    x = torch.zeros(2, 16, dtype=torch.bfloat16)
    x[0, :3] = torch.tensor([2.0**60, 1.0, -(2.0**60)])
    x[1, :3] = torch.tensor([2.0**60, -(2.0**60), 1.0])
    b = torch.full((1, 8), 0x22, dtype=torch.uint8)
    scale = reference.swizzle_scales(torch.tensor([[0x38]], dtype=torch.uint8))
    assert reference.gemm_a16w4(x, b, scale).flatten().tolist() == [0, 1]


def test_gemm_a16w4_infinities():
    x = torch.ones(3, 16, dtype=torch.bfloat16)
    x[0, 0], x[1, 1], x[2, 0], x[2, 2] = torch.inf, torch.inf, torch.inf, -torch.inf
    b = torch.tensor([[0x02, 0x02] + [0] * 6], dtype=torch.uint8)  # 1, 0, 1, 0, …
    scale = reference.swizzle_scales(torch.tensor([[0x38]], dtype=torch.uint8))
    y = reference.gemm_a16w4(x, b, scale)
    assert y[0, 0] == torch.inf and bits(y)[1:].tolist() == [[0x7FC0], [0x7FC0]]
