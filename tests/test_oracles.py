"""quantize against other people's quantizers, byte for byte at the same global scale.

ModelOpt and comfy-kitchen agree on every block whose scale does not underflow. What they do where
format.md has its own policy (zero blocks, underflow, −0, Inf, NaN) is asserted as exactly that.
torchao multiplies by a reciprocal: it may differ where the quotient is at a tie, nowhere else.
"""

import pytest
import torch
from compare import TIES, assert_same_bytes, bits, every_bf16, make_input, neighbours

import nvfp4_linear  # noqa: F401  (registers torch.ops.nvfp4)
from nvfp4_linear import reference

np = pytest.importorskip("numpy", reason="needs numpy")
EXTRA = "needs the extra [oracles]: pip install nvfp4_linear[oracles]"
DTYPES = [torch.bfloat16, torch.float32, torch.float16]
PLAIN = [  # name, dtype: no block underflows under the tensor's own global scale
    *(("normal", dtype) for dtype in DTYPES),
    *(("heavy_tailed", dtype) for dtype in DTYPES),
    ("huge", torch.bfloat16),
    ("huge", torch.float32),
]
ROWS, K = 257, 1024
MIN_SCALE = 2.0**-9
ONE = 0x38  # the scale byte of 1.0


@pytest.fixture(params=["ops", "reference"])
def quantize(request):
    """x, g → data and linear scale bytes: the op, then its reference."""
    function = {"ops": torch.ops.nvfp4.quantize, "reference": reference.quantize}[request.param]

    def call(x, g):
        data, scale = function(x, g, swizzled=False)
        return data, bits(scale)

    return call


def unpack(data: torch.Tensor) -> torch.Tensor:
    """(rows, K/2) → codes (rows, K/16, 16)."""
    return torch.stack((data & 0xF, data >> 4), dim=-1).reshape(len(data), -1, 16)


def in_blocks(x: torch.Tensor) -> torch.Tensor:
    return x.float().reshape(len(x), -1, 16)


def small_blocks() -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks around and below the smallest scale, zero and −0 blocks, at g = 0.37."""
    rng = torch.Generator().manual_seed(3)
    g = torch.tensor(0.37)
    ratio = torch.exp2(torch.rand(64, 32, generator=rng) * 8 - 14)  # 2⁻¹⁴ … 2⁻⁶
    x = (torch.rand(64, 32, 16, generator=rng) * 2 - 1) * (ratio * 6 * g)[..., None]
    x[5], x[6], x[7, :, ::3], x[8, :, 1::2] = 0.0, -0.0, -0.0, 0.0
    return x.reshape(64, 512), g


# --- ModelOpt


@pytest.fixture(scope="module")
def modelopt():
    pytest.importorskip("modelopt", reason=EXTRA)  # a failure below this is one, not a skip
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    def call(x, g):
        packed, scale, _ = NVFP4QTensor.quantize(x.clone(), 16, weights_scaling_factor_2=g)
        return packed._quantized_data, bits(scale)

    return call


@pytest.mark.parametrize("name, dtype", PLAIN)
def test_modelopt_same_bytes(modelopt, quantize, name, dtype):
    x = make_input(name, ROWS, K, dtype)
    g = reference.global_scale(x)
    data, scale = quantize(x, g)
    peer_data, peer_scale = modelopt(x, g)
    assert_same_bytes(scale, peer_scale, "block_scale")
    assert_same_bytes(data, peer_data, "data")


@pytest.mark.parametrize("dtype", DTYPES)
def test_modelopt_same_bytes_at_ties_but_for_negative_zero(modelopt, quantize, dtype):
    x = make_input("on_ties", ROWS, K, dtype)
    g = torch.tensor(1.0)
    data, scale = quantize(x, g)
    peer_data, peer_scale = modelopt(x, g)
    assert_same_bytes(scale, peer_scale, "block_scale")
    is_minus_zero = ((in_blocks(x) == 0) & in_blocks(x).signbit()).reshape(unpack(data).shape)
    assert (unpack(data)[is_minus_zero] == 8).all()
    assert (unpack(peer_data)[is_minus_zero] == 0).all()
    assert is_minus_zero.any()
    assert torch.equal(unpack(data)[~is_minus_zero], unpack(peer_data)[~is_minus_zero])


def test_modelopt_policy_for_small_blocks(modelopt, quantize):
    """Its scale is 1.0 for a zero block and never below 2⁻⁹ otherwise; its −0 is code 0."""
    x, g = small_blocks()
    data, scale = quantize(x, g)
    peer_data, peer_scale = modelopt(x, g)
    codes, peer_codes, blocks = unpack(data), unpack(peer_data), in_blocks(x)
    amax = blocks.abs().amax(dim=-1)
    ratio = amax / (6 * g)

    zero = amax == 0
    assert (scale[zero] == 0).all() and (peer_scale[zero] == ONE).all()
    assert (peer_codes[zero] == 0).all()

    small = (ratio < MIN_SCALE) & ~zero
    assert small.any() and (peer_scale[small] == 0x01).all()
    assert torch.equal(scale[small], (ratio[small] > MIN_SCALE / 2).to(torch.uint8))
    underflowed = small & (scale == 0)
    assert underflowed.any()
    on_min_scale = reference.e2m1_encode(blocks[underflowed] / (MIN_SCALE * g) + 0.0)
    assert torch.equal(peer_codes[underflowed], on_min_scale)

    same_scale = ~zero & ~underflowed
    assert torch.equal(scale[same_scale], peer_scale[same_scale])
    minus_zero = (blocks == 0) & blocks.signbit()
    expected = torch.where(minus_zero, 0, codes)
    assert torch.equal(peer_codes[same_scale], expected[same_scale])


def check_saturates_on_infinity(peer, quantize, bad):
    """The peer's scale saturates on Inf, which then reads as finite; NaN marks the block as here."""
    x = make_input("normal", 2, 32, torch.float32)
    x[0, 3] = bad
    g = torch.tensor(1.0)
    data, scale = quantize(x, g)
    peer_data, peer_scale = peer(x, g)
    assert scale[0, 0] == 0x7F
    assert peer_scale[0, 0] == (0x7F if bad != bad else 0x7E)
    scale[0, 0] = peer_scale[0, 0]
    assert_same_bytes(scale, peer_scale, "other blocks' scales")
    assert_same_bytes(data[:, 8:], peer_data[:, 8:], "other blocks' data")
    assert_same_bytes(data[1], peer_data[1], "other blocks' data")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_modelopt_policy_for_non_finite(modelopt, quantize, bad):
    check_saturates_on_infinity(modelopt, quantize, bad)


def test_modelopt_reads_these_bytes(modelopt, quantize):
    """Its dequantizer and ours give the same values from the same bytes."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    x = make_input("heavy_tailed", 64, 256, torch.float32)
    g = reference.global_scale(x)
    data, scale = quantize(x, g)
    scale = scale.view(torch.float8_e4m3fn)
    peer = NVFP4QTensor(x.shape, torch.float32, data).dequantize(
        dtype=torch.float32, scale=scale, double_scale=g, block_sizes={-1: 16}
    )
    ours = reference.dequantize(data, scale, g, swizzled=False)
    # It multiplies scale · g first and the code second, so one rounding may fall otherwise.
    torch.testing.assert_close(peer, ours, rtol=2.0**-22, atol=0)
    power_of_two = torch.tensor(2.0**-7)  # where nothing is rounded the bytes are the same
    peer = NVFP4QTensor(x.shape, torch.float32, data).dequantize(
        dtype=torch.float32, scale=scale, double_scale=power_of_two, block_sizes={-1: 16}
    )
    ours = reference.dequantize(data, scale, power_of_two, swizzled=False)
    assert_same_bytes(peer, ours + 0.0)  # it decodes code 8 as +0; −0 + 0 is +0


# --- comfy-kitchen, eager backend


@pytest.fixture(scope="module")
def comfy():
    pytest.importorskip("comfy_kitchen", reason=EXTRA)
    from comfy_kitchen.backends import eager

    def call(x, g):
        data, swizzled = eager.quantize_nvfp4(x, g, hi_first=False)
        scale = reference.unswizzle_scales(swizzled, x.shape[0], x.shape[1] // 16)
        return data, bits(scale)

    return call


@pytest.mark.parametrize("name, dtype", [*PLAIN, *(("on_ties", dtype) for dtype in DTYPES)])
def test_comfy_same_bytes(comfy, quantize, name, dtype):
    x = make_input(name, ROWS, K, dtype)
    g = reference.global_scale(x)
    data, scale = quantize(x, g)
    peer_data, peer_scale = comfy(x, g)
    assert_same_bytes(scale, peer_scale, "block_scale")
    assert_same_bytes(data, peer_data, "data")


def test_comfy_swizzled_scales_and_high_nibble_first(comfy):
    """Its own layouts: scales swizzled and padded as ours, nibbles the other way round."""
    from comfy_kitchen.backends import eager

    x = make_input("normal", ROWS, K, torch.bfloat16)
    g = reference.global_scale(x)
    peer_data, peer_scale = eager.quantize_nvfp4(x, g)
    data, scale = torch.ops.nvfp4.quantize(x, g)
    assert_same_bytes(scale, peer_scale, "block_scale")
    assert_same_bytes((data >> 4) | (data << 4), peer_data, "data")


def test_comfy_policy_for_small_blocks(comfy, quantize):
    """Where the scale is 0 its codes are all +0; ours keep the sign. No other difference."""
    x, g = small_blocks()
    data, scale = quantize(x, g)
    peer_data, peer_scale = comfy(x, g)
    assert_same_bytes(scale, peer_scale, "block_scale")
    zero_scale = scale == 0
    assert zero_scale.any() and not zero_scale.all()
    codes, peer_codes = unpack(data), unpack(peer_data)
    assert torch.equal(codes[zero_scale], 8 * in_blocks(x)[zero_scale].signbit().to(torch.uint8))
    assert (peer_codes[zero_scale] == 0).all()
    assert torch.equal(codes[~zero_scale], peer_codes[~zero_scale])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_comfy_policy_for_non_finite(comfy, quantize, bad):
    check_saturates_on_infinity(comfy, quantize, bad)


# --- torchao: a reciprocal, and a floor under the scale


@pytest.fixture(scope="module")
def torchao():
    pytest.importorskip("torchao", reason=EXTRA)
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    def call(x, g):
        scale, data = nvfp4_quantize(x, 16, g)
        return data, bits(scale)

    return call


def beside_a_tie(quotient: torch.Tensor) -> torch.Tensor:
    """Within two roundings of a relative 2⁻²⁴ of an E2M1 tie."""
    ties = torch.tensor(TIES).double()
    distance = (quotient.double().abs()[..., None] - ties).abs()
    return (distance <= ties * 2.0**-22).any(dim=-1)


@pytest.mark.parametrize("name", ["normal", "heavy_tailed"])
def test_torchao_differs_at_ties_only(torchao, quantize, name):
    x = make_input(name, 512, K, torch.bfloat16)
    g = reference.global_scale(x)
    data, scale = quantize(x, g)
    peer_data, peer_scale = torchao(x, g)
    floor = 2.0**-6  # its smallest scale
    same_policy = reference.e4m3_decode(scale) > floor
    assert_same_bytes(scale[same_policy], peer_scale[same_policy], "block_scale")
    s32 = (reference.e4m3_decode(scale) * g)[..., None]
    differs = (unpack(data) != unpack(peer_data)) & same_policy[..., None]
    assert differs.any(), "a reciprocal shows in this much data"
    assert beside_a_tie(in_blocks(x).double() / s32.double())[differs].all()


# --- compressed-tensors: the reciprocal direction of the global scale


@pytest.fixture(scope="module")
def compressed_tensors():
    pytest.importorskip("compressed_tensors", reason=EXTRA)
    from compressed_tensors.compressors.nvfp4 import helpers

    return helpers


def test_compressed_tensors_same_data_at_an_exact_global_scale(compressed_tensors, quantize):
    """g = 2⁻⁵, whose 1/g is exact: the same codes and nibble order, but for the sign of zero."""
    x = make_input("normal", ROWS, K, torch.float32) * 3
    x[0, :8] = -0.0
    data, scale = quantize(x, torch.tensor(2.0**-5))
    peer = compressed_tensors.quantize_and_pack_fp4(
        x,
        reference.e4m3_decode(scale),
        global_scale=torch.tensor([2.0**5]),
        zero_point=None,
        group_size=16,
    )
    assert (peer[0, :4] == 0x00).all() and (data[0, :4] == 0x88).all()
    peer[0, :4] = 0x88
    assert_same_bytes(data, peer, "data")


def test_compressed_tensors_decodes_the_same_values(compressed_tensors):
    data = torch.arange(256, dtype=torch.uint8).reshape(1, -1)
    peer = compressed_tensors.unpack_fp4_from_uint8(data, 1, 512, torch.float32)
    one = torch.full((1, 32), ONE, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert_same_bytes(reference.dequantize(data, one, swizzled=False), peer)


# --- ml_dtypes: the element types themselves


@pytest.fixture(scope="module")
def ml_dtypes():
    return pytest.importorskip("ml_dtypes", reason=EXTRA)


def test_ml_dtypes_decode_tables(ml_dtypes):
    codes = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert_same_bytes(reference.e2m1_decode(torch.arange(16)), torch.from_numpy(codes))
    scales = np.arange(128, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ours = reference.e4m3_decode(torch.arange(128, dtype=torch.uint8))
    assert np.isnan(scales[127]) and ours[127].isnan()
    assert_same_bytes(ours[:127], torch.from_numpy(scales)[:127])


def test_ml_dtypes_e2m1_rounding(ml_dtypes):
    values = every_bf16().float()
    values = torch.cat((values[~values.isnan()], neighbours(torch.tensor([*TIES, 0.0, 6.0]))))
    values = torch.cat((values, -values))
    peer = values.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert_same_bytes(reference.e2m1_encode(values), torch.from_numpy(peer))


def test_ml_dtypes_e4m3_rounding(ml_dtypes):
    """Up to 464, where its cast, which does not saturate, turns to NaN."""
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = neighbours(torch.cat((grid, (grid[1:] + grid[:-1]) / 2)))
    values = values[values >= 0]
    peer = values.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert_same_bytes(reference.e4m3_encode(values), torch.from_numpy(peer))
