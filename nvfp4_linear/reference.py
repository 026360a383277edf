"""NVFP4 in readable PyTorch: what every backend's bytes are held to.

    x ≈ e2m1 · block_scale · global_scale

    data          uint8 (rows, K/2)            two E2M1 codes a byte, even K index in the low nibble
    block_scale   float8_e4m3fn                one UE4M3 scale per 16 consecutive K, never negative
    global_scale  one FP32, decode direction   usually amax(|x|) / (6·448)

    amax   = max |x_i| over the block
    s      = e4m3_rn_satfinite((amax / 6) / g)
    t_i    = x_i / (float(s) · g)
    code_i = round-to-nearest-even(t_i) on the E2M1 grid, saturating at ±6
    D      = out( fma(alpha, Σ_k A·B, bias) )    the sum exact, rounded once to FP32

Every FP32 step is one IEEE operation, rounded once to nearest even, subnormals kept; a fused
multiply-add is emulated exactly (`fma`). Scales are laid out row-major ("linear", `(rows, K/16)`)
or swizzled (`swizzle_scales`).

Nothing here is fast and nothing here calls the compiled extension: it is pure PyTorch on CPU
tensors, for tests and for people.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_SIZE = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MAX_BYTE = 0x7E
E4M3_NAN_BYTE = 0x7F
E4M3_MIN_EXPONENT = -6  # of a normal; below it the spacing stays at 2⁻⁹
E4M3_MANTISSA_BITS = 3
GLOBAL_SCALE_MIN = 2.0**-126  # the smallest normal FP32

# The swizzled scale layout: tiles of 128 rows × 4 scales, in which rows r, r+32, r+64 and r+96 lie
# side by side.
TILE_ROWS = 128
TILE_COLS = 4
TILE_ROW_STRIDE = 32
ROW_GROUPS = TILE_ROWS // TILE_ROW_STRIDE

# A decoded operand, e2m1 · block_scale, is a whole multiple of 2⁻¹⁰, at most 6·448 in magnitude.
OPERAND_FRACTION_BITS = 10
OPERAND_MAX_UNITS = int(E2M1_MAX * E4M3_MAX) << OPERAND_FRACTION_BITS
FLOAT64_EXACT = (
    2**53
)  # whole numbers up to here are exact in FP64, in whatever order they are added
INT64_SAFE = 2**62

_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CANONICAL_NAN = {
    torch.float32: (torch.int32, 0x7FC00000),
    torch.bfloat16: (torch.int16, 0x7FC0),
    torch.float16: (torch.int16, 0x7E00),
}
_DENSE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# -------------------------------------------------------------------------------------------------
# FP32 arithmetic, rounded once
# -------------------------------------------------------------------------------------------------


def _round_to_odd(value: Tensor, error: Tensor) -> Tensor:
    """`value` is the FP64 nearest to `value + error`; returns that sum rounded to odd instead.

    Where something was lost and the last bit is even, that is the odd neighbour on the lost part's
    side. A sum so rounded can be rounded again, to FP32, as if it were exact.
    """
    bits = value.view(torch.int64)
    lost = torch.isfinite(error) & (error != 0) & (bits & 1 == 0)
    away_from_zero = (error > 0) == (value > 0)
    step = torch.where(away_from_zero, 1, -1)
    return torch.where(lost, bits + step, bits).view(torch.float64)


def fma(a: Tensor | float, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a · b + c of FP32 values, rounded once to FP32.

    In FP64 the product is exact; the sum's rounding error is recovered (Knuth's TwoSum) and kept
    as a sticky bit.
    """
    a, b, c = (torch.as_tensor(v, dtype=torch.float32).double() for v in (a, b, c))
    product, c = torch.broadcast_tensors(a * b, c)
    total = product + c
    from_c = total - product
    error = (product - (total - from_c)) + (c - from_c)
    return _round_to_odd(total, error).float()


def _canonical_nan(value: Tensor) -> Tensor:
    """Every NaN becomes the one without sign or payload: 0x7FC00000, BF16 0x7FC0, FP16 0x7E00."""
    bits_dtype, nan_bits = _CANONICAL_NAN[value.dtype]
    bits = value.contiguous().view(bits_dtype)
    return bits.masked_fill(torch.isnan(value), nan_bits).view(value.dtype)


def silu(v: Tensor) -> Tensor:
    """v / (1 + exp(−v)) in FP32, within 2 ulp of the exact value, gradual underflow kept.

    The exact steps, the same in every backend: all FP32, nearest even, no contraction but the fma
    written here. The two clamps are selects, so that NaN goes through. There is no other special
    case: ±0, ±inf, NaN and underflow fall out.

        w = v < -112 ? -112 : v                      further down the result is −0 either way
        t = w > 40 ? 40 : w                          further up 1 + exp(−t) is 1
        j = fma(t, -0x1.715476p+0, 0x1.8p+23)        −log2(e); + 1.5·2²³ rounds to a whole number
        n = j - 0x1.8p+23                            exp(−t) = 2ⁿ · (1 + u), n in −58 … 162
        r = fma(n, -0x1.62e4p-1, -t)                 ln 2, its upper 15 bits: exact
        r = fma(n, -0x1.7f7d1cp-20, r)               ln 2, the rest; |r| ≤ ln(2)/2
        h = fma(0x1.6a4f88p-10, r, 0x1.123988p-7)    1 + r + r²·h(r) = exp(r) · (1 ± 2^-28.2)
        h = fma(h, r, 0x1.5558aep-5)
        h = fma(h, r, 0x1.555492p-3)
        h = fma(h, r, 0x1.fffffcp-2)
        u = fma(h * r, r, r)                         the multiply is rounded
        k = v < 0 ? 0x1p-64 : 1                      keeps w / d normal where the result underflows
        s = from_bits((bits(j) << 23) + bits(k))     2ⁿ · k: the low 9 bits of 0x4B400000 are 0
        d = s + fma(u, s, k)                         k · (1 + exp(−t)), fma first
        silu = (w / d) * k

    Measured on every FP32 value from 2⁻³⁰ in magnitude up to the clamps: at most 1.998 ulp
    (v = 0xBA0003FE); closer to zero 0.5 ulp.

    v: FP32/BF16/FP16, any shape → FP32.
    """
    v = v.float()
    w = torch.where(v < -112.0, -112.0, v)
    t = torch.where(w > 40.0, 40.0, w)
    rounder = float.fromhex("0x1.8p+23")
    j = fma(t, float.fromhex("-0x1.715476p+0"), rounder)
    n = j - rounder
    r = fma(n, float.fromhex("-0x1.62e4p-1"), -t)
    r = fma(n, float.fromhex("-0x1.7f7d1cp-20"), r)
    h = fma(float.fromhex("0x1.6a4f88p-10"), r, float.fromhex("0x1.123988p-7"))
    h = fma(h, r, float.fromhex("0x1.5558aep-5"))
    h = fma(h, r, float.fromhex("0x1.555492p-3"))
    h = fma(h, r, float.fromhex("0x1.fffffcp-2"))
    u = fma(h * r, r, r)
    k = torch.where(v < 0, 2.0**-64, 1.0).float()
    s = (j.view(torch.int32).bitwise_left_shift(23) + k.view(torch.int32)).view(torch.float32)
    d = s + fma(u, s, k)
    return (w / d) * k


# -------------------------------------------------------------------------------------------------
# The two small element types
# -------------------------------------------------------------------------------------------------


def e2m1_encode(t: Tensor) -> Tensor:
    """t FP32 → E2M1 codes (uint8, 0 … 15), nearest even, saturating at ±6; zero keeps its sign.

    Ties: ±0.25→0, 0.75→1, 1.25→1, 1.75→2, 2.5→2, 3.5→4, 5→4. NaN has no code: replace it first.
    """
    magnitude = t.abs().double().clamp(max=E2M1_MAX)
    spacing = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    rounded = torch.round(magnitude / spacing) * spacing  # torch.round: ties to even
    grid = torch.tensor(_E2M1_MAGNITUDES, dtype=torch.float64)
    code = torch.searchsorted(grid, rounded).to(torch.uint8)
    return code | (torch.signbit(t).to(torch.uint8) << 3)


def e2m1_decode(codes: Tensor) -> Tensor:
    """E2M1 codes 0 … 15 → FP32: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, −0 included."""
    magnitudes = torch.tensor(_E2M1_MAGNITUDES)
    return torch.cat((magnitudes, -magnitudes))[codes.long()]


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in FP64, by writing the exponent field: a vectorised pow may be an ulp off."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def _e4m3_table() -> Tensor:
    """All 128 non-negative E4M3 values by byte, FP64; byte 0x7F is NaN, there is no infinity."""
    byte = torch.arange(128)
    exponent_field, mantissa = byte >> E4M3_MANTISSA_BITS, byte & 0x7
    hidden_bit = torch.where(exponent_field > 0, 8, 0)
    exponent = exponent_field.clamp(min=1) + (E4M3_MIN_EXPONENT - 1) - E4M3_MANTISSA_BITS
    values = (hidden_bit + mantissa) * _power_of_two(exponent)
    values[E4M3_NAN_BYTE] = torch.nan
    return values


def e4m3_encode(value: Tensor) -> Tensor:
    """value FP32 ≥ 0 → UE4M3 bytes (uint8), nearest even, saturating at 448 = 0x7E; NaN → 0x7F."""
    if (value < 0).any():
        raise ValueError("value must be ≥ 0: a block scale is unsigned")
    magnitude = value.double().nan_to_num(nan=0.0).clamp(max=E4M3_MAX)
    exponent = (torch.frexp(magnitude).exponent - 1).clamp(min=E4M3_MIN_EXPONENT)
    spacing = _power_of_two(exponent - E4M3_MANTISSA_BITS)
    rounded = torch.round(magnitude / spacing) * spacing  # torch.round: ties to even
    byte = torch.searchsorted(_e4m3_table()[: E4M3_MAX_BYTE + 1], rounded).to(torch.uint8)
    return byte.masked_fill(torch.isnan(value), E4M3_NAN_BYTE)


def e4m3_decode(scales: Tensor) -> Tensor:
    """E4M3 bytes (uint8 or float8_e4m3fn) → FP32. Bit 7, never set by `quantize`, is the sign."""
    byte = scales.view(torch.uint8).long()
    magnitude = _e4m3_table().float()[byte & 0x7F]
    return torch.where(byte >= 0x80, -magnitude, magnitude)


def _pack(codes: Tensor) -> Tensor:
    """(rows, K) codes → (rows, K/2) bytes, even K index in the low nibble."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _unpack(data: Tensor) -> Tensor:
    """(rows, K/2) bytes → (rows, K) codes."""
    data = data.view(torch.uint8)
    return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)


# -------------------------------------------------------------------------------------------------
# The scale layout
# -------------------------------------------------------------------------------------------------


def _round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


def swizzle_scales(scales: Tensor) -> Tensor:
    """(rows, cols) row-major → (round_up(rows, 128), round_up(cols, 4)) swizzled, padded with 0x00.

    offset(r, c) = ((r // 128)·C + c // 4)·512 + (r % 32)·16 + ((r % 128) // 32)·4 + c % 4
    with C = ceil(cols / 4).

    scales: (rows, K/16) float8_e4m3fn or uint8; the dtype is kept.
    """
    rows, cols = scales.shape
    padded_rows, padded_cols = _round_up(rows, TILE_ROWS), _round_up(cols, TILE_COLS)
    padded = F.pad(scales.view(torch.uint8), (0, padded_cols - cols, 0, padded_rows - rows))
    tiles = padded.reshape(
        padded_rows // TILE_ROWS, ROW_GROUPS, TILE_ROW_STRIDE, padded_cols // TILE_COLS, TILE_COLS
    )
    swizzled = tiles.permute(0, 3, 2, 1, 4).reshape(padded_rows, padded_cols)
    return swizzled.contiguous().view(scales.dtype)


def unswizzle_scales(scales: Tensor, rows: int, cols: int) -> Tensor:
    """The inverse of `swizzle_scales`: (rows, cols) row-major, padding dropped. cols is K/16.

    Raises ValueError where `scales` does not have the padded shape of (rows, cols).
    """
    padded_rows, padded_cols = _round_up(rows, TILE_ROWS), _round_up(cols, TILE_COLS)
    if tuple(scales.shape) != (padded_rows, padded_cols):
        raise ValueError(
            f"swizzled scales of ({rows}, {cols}) have shape ({padded_rows}, {padded_cols}), "
            f"got {tuple(scales.shape)}"
        )
    tiles = scales.contiguous().view(torch.uint8)
    tiles = tiles.reshape(
        padded_rows // TILE_ROWS, padded_cols // TILE_COLS, TILE_ROW_STRIDE, ROW_GROUPS, TILE_COLS
    )
    linear = tiles.permute(0, 3, 2, 1, 4).reshape(padded_rows, padded_cols)
    return linear[:rows, :cols].contiguous().view(scales.dtype)


# -------------------------------------------------------------------------------------------------
# Quantize and dequantize
# -------------------------------------------------------------------------------------------------


def _scalar(name: str, value: Tensor | float | None, default: float) -> Tensor:
    """A 0-d FP32 tensor from a one-element FP32 tensor, a Python number (rounded) or None."""
    if value is None:
        value = default
    if isinstance(value, Tensor) and value.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, got {value.dtype}: convert it with .float()")
    value = torch.as_tensor(value, dtype=torch.float32)
    if value.numel() != 1:
        raise ValueError(f"{name} must have one element, got shape {tuple(value.shape)}")
    return value.reshape(())


def _usable_global_scale(global_scale: Tensor | float | None) -> Tensor:
    g = _scalar("global_scale", global_scale, 1.0)
    if not (torch.isfinite(g) and g > 0):
        raise ValueError(
            f"global_scale must be finite and > 0, got {g.item()}: use global_scale(x)"
        )
    return g


def _check_matrix(name: str, x: Tensor) -> None:
    if x.dtype not in _DENSE_DTYPES:
        raise TypeError(f"{name} must be float32, bfloat16 or float16, got {x.dtype}")
    if x.dim() != 2:
        raise ValueError(f"{name} must be 2-D, got shape {tuple(x.shape)}")


def _gate_and_up(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    _check_matrix("gate_up", gate_up)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must have an even number of columns, got {gate_up.shape[1]}")
    gate, up = gate_up.float().chunk(2, dim=1)
    return gate, up


def global_scale(x: Tensor) -> Tensor:
    """max(fl32(amax / 2688), 2⁻¹²⁶), amax over the finite elements; 1.0 where that amax is 0.

    x: FP32/BF16/FP16, any shape → 0-d FP32.
    """
    magnitude = x.float().abs()
    magnitude = torch.where(torch.isfinite(magnitude), magnitude, 0.0)
    amax = magnitude.max() if magnitude.numel() else torch.tensor(0.0)
    if amax == 0:
        return torch.tensor(1.0)
    return (amax / (E2M1_MAX * E4M3_MAX)).clamp(min=GLOBAL_SCALE_MIN)


def _quantize_fp32(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, K) FP32 → codes packed (rows, K/2) and scale bytes (rows, K/16), both uint8."""
    rows, k = x.shape
    if k % BLOCK_SIZE:
        raise ValueError(f"K must be a multiple of {BLOCK_SIZE}, got {k}: pad K")
    blocks = x.reshape(rows, k // BLOCK_SIZE, BLOCK_SIZE)
    finite = torch.isfinite(blocks)
    blocks = torch.where(finite, blocks, 0.0)

    amax = blocks.abs().amax(dim=-1)
    s = e4m3_encode((amax / E2M1_MAX) / g)
    s32 = (e4m3_decode(s) * g).unsqueeze(-1)
    t = torch.where(s32 == 0, torch.copysign(torch.zeros(()), blocks), blocks / s32)
    codes = e2m1_encode(t)

    s = torch.where(finite.all(dim=-1), s, E4M3_NAN_BYTE)
    return _pack(codes.reshape(rows, k)), s


def quantize(
    x: Tensor, global_scale: Tensor | float | None = None, *, swizzled: bool = True
) -> tuple[Tensor, Tensor]:
    """x → (data, block_scale). Without a global scale g is 1.0.

    A block that holds a NaN or an Inf gets scale byte 0x7F, its codes as if the non-finite elements
    were 0; no other block changes. Where s is 0 (a zero block, or a scale that underflows) every
    code is ±0 with x's sign.

    x: (M, K) FP32/BF16/FP16, K % 16 == 0.
    data: (M, K/2) uint8. block_scale: float8_e4m3fn, (M, K/16) or swizzled (`swizzle_scales`).
    Raises ValueError for a global scale that is not finite and > 0.
    """
    _check_matrix("x", x)
    data, s = _quantize_fp32(x.float(), _usable_global_scale(global_scale))
    s = s.view(torch.float8_e4m3fn)
    return data, swizzle_scales(s) if swizzled else s


def swiglu_global_scale(gate_up: Tensor) -> Tensor:
    """`global_scale` of h = silu(gate) · up, the FP32 values that `swiglu_quantize` quantizes.

    gate_up: (M, 2K) = [gate | up], FP32/BF16/FP16 → 0-d FP32.
    """
    gate, up = _gate_and_up(gate_up)
    return global_scale(silu(gate) * up)


def swiglu_quantize(
    gate_up: Tensor,
    global_scale: Tensor | float | None = None,
    *,
    swizzled: bool = True,
    pad_rows_to: int = 1,
) -> tuple[Tensor, Tensor]:
    """Quantizes h = silu(gate) · up: FP32 from the widened inputs, rounded to no narrower type.

    gate_up: (M, 2K) = [gate | up], FP32/BF16/FP16, K % 16 == 0.
    As `quantize`, with rows added up to a multiple of `pad_rows_to`, all their bytes 0x00.
    """
    gate, up = _gate_and_up(gate_up)
    if pad_rows_to < 1:
        raise ValueError(f"pad_rows_to must be ≥ 1, got {pad_rows_to}")
    data, s = _quantize_fp32(silu(gate) * up, _usable_global_scale(global_scale))

    rows = data.shape[0]
    row_padding = (0, 0, 0, _round_up(rows, pad_rows_to) - rows)
    data, s = F.pad(data, row_padding), F.pad(s, row_padding).view(torch.float8_e4m3fn)
    return data, swizzle_scales(s) if swizzled else s


def _decode(data: Tensor, block_scale: Tensor, *, swizzled: bool) -> Tensor:
    """e2m1 · block_scale, exact in FP32: (rows, K)."""
    codes = _unpack(data)
    rows, k = codes.shape
    if k % BLOCK_SIZE:
        raise ValueError(f"K must be a multiple of {BLOCK_SIZE}, got {k}")
    if swizzled:
        block_scale = unswizzle_scales(block_scale, rows, k // BLOCK_SIZE)
    if tuple(block_scale.shape) != (rows, k // BLOCK_SIZE):
        raise ValueError(
            f"block_scale must be ({rows}, {k // BLOCK_SIZE}), got {tuple(block_scale.shape)}"
        )
    scale = e4m3_decode(block_scale).repeat_interleave(BLOCK_SIZE, dim=1)
    return e2m1_decode(codes) * scale


def dequantize(
    data: Tensor,
    block_scale: Tensor,
    global_scale: Tensor | float | None = None,
    *,
    swizzled: bool = True,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """(e2m1 · block_scale) · g: the first product exact, the second rounded to FP32; out.

    Without a global scale the result is exact in FP32, BF16 and FP16. NaN is canonical.

    data: (M, K/2) uint8 or float4_e2m1fn_x2. Returns (M, K).
    """
    value = _decode(data, block_scale, swizzled=swizzled)
    if global_scale is not None:
        value = value * _scalar("global_scale", global_scale, 1.0)
    return _canonical_nan(value.to(out_dtype))


# -------------------------------------------------------------------------------------------------
# GEMM
# -------------------------------------------------------------------------------------------------


def _exact_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a (M, K) · b (N, K)ᵀ of operands in units of 2⁻¹⁰, held in FP64 → int64 (M, N), exact.

    K is cut so that every partial sum in FP64 stays a whole number below 2⁵³: exact in any order.
    """
    largest_product = OPERAND_MAX_UNITS**2
    if largest_product * a.shape[1] >= INT64_SAFE:
        raise ValueError(f"K = {a.shape[1]} is too long for an exact 64-bit sum")
    chunk = FLOAT64_EXACT // largest_product
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.int64)
    for start in range(0, a.shape[1], chunk):
        total += (a[:, start : start + chunk] @ b[:, start : start + chunk].T).long()
    return total


def _int64_to_fp32(value: Tensor, exponent: int) -> Tensor:
    """value · 2^exponent, |value| < 2⁶², rounded once to FP32."""
    nearest = value.double()
    odd = _round_to_odd(nearest, (value - nearest.long()).double())
    return (odd * 2.0**exponent).float()


def _operand_units(decoded: Tensor) -> tuple[Tensor, Tensor]:
    """Decoded rows → whole multiples of 2⁻¹⁰ in FP64 (NaN as 0), and which rows hold a NaN."""
    nan = torch.isnan(decoded)
    units = torch.where(nan, 0.0, decoded.double()) * 2.0**OPERAND_FRACTION_BITS
    return units, nan.any(dim=1)


def _epilogue(
    acc: Tensor,
    alpha: Tensor | float | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """out( fma(alpha, acc, bias) ); alpha absent is 1.0, bias absent is +0.0. acc: (M, N) FP32."""
    if bias is None:
        bias = torch.zeros(acc.shape[1])
    if tuple(bias.shape) != (acc.shape[1],):
        raise ValueError(f"bias must be ({acc.shape[1]},), got {tuple(bias.shape)}")
    result = fma(_scalar("alpha", alpha, 1.0), acc, bias.float())
    return _canonical_nan(result.to(out_dtype))


def gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    alpha: Tensor | float | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """out(alpha · A·Bᵀ + bias): the sum over K exact, rounded once to FP32; one FP32 fma; out.

    a: (M, K/2), b: (N, K/2) uint8; both scales swizzled; alpha = g_A · g_B, FP32;
    bias: (N,) FP32/BF16/FP16.
    A NaN block scale makes NaN of every output that its row takes part in, and of no other.
    """
    a_units, a_nan = _operand_units(_decode(a, a_scale, swizzled=True))
    b_units, b_nan = _operand_units(_decode(b, b_scale, swizzled=True))
    total = _exact_matmul(a_units, b_units)
    acc = _int64_to_fp32(total, -2 * OPERAND_FRACTION_BITS)
    acc = acc.masked_fill(a_nan[:, None] | b_nan[None, :], torch.nan)
    return _epilogue(acc, alpha, bias, out_dtype)


def gemm_a16w4(
    x: Tensor,
    b: Tensor,
    b_scale: Tensor,
    alpha: Tensor | float | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`gemm` of a dense activation: Σ_k x·B in FP64 in the order of k, rounded to FP32; fma; out.

    Each product is exact in FP64. So is the sum, whatever its order, unless the exponents in a row
    lie some thirty apart: x, unlike a quantized operand, has a wide range, and no 64-bit fixed
    point holds it. Inf and NaN act as in IEEE arithmetic: ∞ · 0 is NaN, ∞ − ∞ is NaN.

    x: (M, K) BF16/FP16; b: (N, K/2) uint8, scale swizzled; alpha = g_B; out_dtype None means x's.
    """
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"x must be bfloat16 or float16, got {x.dtype}")
    weight = _decode(b, b_scale, swizzled=True).double()
    acc = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64)
    for x_k, weight_k in zip(x.double().T, weight.T, strict=True):
        acc += torch.outer(x_k, weight_k)
    return _epilogue(acc.float(), alpha, bias, x.dtype if out_dtype is None else out_dtype)
