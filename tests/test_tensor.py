"""Nvfp4Tensor: the description is checked against the bytes, and a transpose moves none of them."""

import dataclasses

import pytest
import torch
from compare import assert_same_bytes, make_input
from helpers import poison

from nvfp4_linear import Nvfp4Tensor, ops, reference

E4M3 = torch.float8_e4m3fn


def zero_scale(*shape):
    return torch.zeros(shape, dtype=E4M3)


def zero_data(*shape):
    return torch.zeros(shape, dtype=torch.uint8)


@pytest.mark.parametrize("swizzled", [True, False])
@pytest.mark.parametrize("name", ["normal", "hand_made"])
def test_quantize_and_dequantize(device, name, swizzled):
    x = make_input(name, 40, 272, torch.bfloat16)
    g = reference.global_scale(x)
    poison(device)
    q = Nvfp4Tensor.quantize(x.to(device), swizzled=swizzled)
    data, scale = reference.quantize(x, g, swizzled=swizzled)
    assert_same_bytes(q.data, data)
    assert_same_bytes(q.block_scale, scale)
    assert_same_bytes(q.global_scale, g)
    assert (q.shape, q.packed_dim, q.swizzled) == ((40, 272), 1, swizzled)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        expected = reference.dequantize(data, scale, g, swizzled=swizzled, out_dtype=dtype)
        assert_same_bytes(q.dequantize(out_dtype=dtype), expected)


def test_global_scale_given_or_none(device):
    x = make_input("normal", 3, 32, torch.float32).to(device)
    g = torch.tensor(0.25)
    assert Nvfp4Tensor.quantize(x, g).global_scale is g
    q = Nvfp4Tensor.quantize(x, g)
    unit = Nvfp4Tensor(q.data, q.block_scale, None, q.shape)
    assert_same_bytes(unit.dequantize() * 0.25, q.dequantize())  # a power of two: exact


@pytest.mark.parametrize("swizzled", [True, False])
def test_transpose_dequantizes_to_the_transpose(device, swizzled):
    x = make_input("hand_made", 24, 272, torch.bfloat16).to(device)
    q = Nvfp4Tensor.quantize(x, swizzled=swizzled)
    t = q.t()
    assert (t.shape, t.packed_dim, t.swizzled) == ((272, 24), 0, swizzled)
    assert_same_bytes(t.dequantize(), q.dequantize().t())
    back = t.t()
    assert (back.shape, back.packed_dim) == (q.shape, q.packed_dim)
    assert_same_bytes(back.dequantize(), q.dequantize())


@pytest.mark.parametrize("swizzled", [True, False])
def test_transpose_moves_no_byte(swizzled):
    q = Nvfp4Tensor.quantize(make_input("normal", 24, 48, torch.bfloat16), swizzled=swizzled)
    t = q.t()
    assert t.data.data_ptr() == q.data.data_ptr()
    assert t.block_scale.data_ptr() == q.block_scale.data_ptr()
    assert t.global_scale is q.global_scale
    assert t.data.shape == (24, 24)
    assert t.data.stride() == (1, 24)


def test_the_packing_axis_gives_the_same_bytes_another_meaning():
    """[32, 64] bytes: a logical (32, 128) packed along 1, a logical (64, 64) packed along 0."""
    data = torch.randint(0, 256, (32, 64), dtype=torch.uint8)
    one = torch.tensor(1.0)
    along_1 = Nvfp4Tensor(data, torch.ones(32, 8).to(E4M3), one, (32, 128), 1, False)
    along_0 = Nvfp4Tensor(data, torch.ones(4, 64).to(E4M3), one, (64, 64), 0, False)
    low, high = reference.e2m1_decode(data & 0xF), reference.e2m1_decode(data >> 4)
    assert_same_bytes(along_1.dequantize(), torch.stack((low, high), dim=2).reshape(32, 128))
    assert_same_bytes(along_0.dequantize(), torch.stack((low, high), dim=1).reshape(64, 64))
    with pytest.raises(ValueError, match=r"logical \(64, 64\) packed|it is packed along dimension"):
        Nvfp4Tensor(data, torch.ones(32, 8).to(E4M3), one, (64, 64), 1, False)
    with pytest.raises(ValueError, match="it is packed along dimension 1"):
        Nvfp4Tensor(data, torch.ones(32, 8).to(E4M3), one, (32, 128), 0, False)


@pytest.mark.parametrize("swizzled", [True, False])
def test_quantize_along_rows(device, swizzled):
    """Blocks and pairs along dimension 0: x.t()'s bytes under the transposed description."""
    x = make_input("hand_made", 272, 24, torch.bfloat16)
    q = Nvfp4Tensor.quantize(x.to(device), packed_dim=0, swizzled=swizzled)
    data, scale = reference.quantize(x.t(), q.global_scale.cpu(), swizzled=swizzled)
    assert (q.shape, q.packed_dim, q.block_dim, q.swizzled) == ((272, 24), 0, 0, swizzled)
    assert_same_bytes(q.data.t(), data)
    assert_same_bytes(q.block_scale if swizzled else q.block_scale.t(), scale)
    expected = reference.dequantize(data, scale, q.global_scale.cpu(), swizzled=swizzled)
    assert_same_bytes(q.dequantize(), expected.t())


@pytest.mark.parametrize("packed_dim", [0, 1])
def test_repack_moves_nibbles_and_nothing_else(device, packed_dim):
    x = make_input("hand_made", 48, 32, torch.bfloat16).to(device)
    q = Nvfp4Tensor.quantize(x, packed_dim=packed_dim)
    other = q.repack(1 - packed_dim)
    assert (other.shape, other.packed_dim, other.block_dim) == (q.shape, 1 - packed_dim, packed_dim)
    assert other.data.shape == ((48, 16) if packed_dim == 0 else (24, 32))
    assert other.block_scale is q.block_scale
    assert_same_bytes(other.dequantize(), q.dequantize())
    assert_same_bytes(other.t().dequantize(), q.dequantize().t())
    assert_same_bytes(other.repack(packed_dim).data, q.data)
    assert q.repack(packed_dim) is q
    with pytest.raises(ValueError, match="packed_dim must be 0 or 1"):
        q.repack(2)


def test_repack_of_an_odd_dimension_is_an_error():
    q = Nvfp4Tensor.quantize(torch.ones(5, 48))
    message = r"shape\[packed_dim\] must be even, got shape \(5, 48\) packed along 0: two codes"
    with pytest.raises(ValueError, match=message):
        q.repack(0)
    with pytest.raises(ValueError, match=message):
        Nvfp4Tensor(zero_data(2, 48), q.block_scale, None, (5, 48), 0, True, 1)


def test_pairs_along_n_and_blocks_along_k():
    """A logical (32, 128) in [32, 64] bytes with two blocks of K a column: never a (64, 64)."""
    data = torch.randint(0, 256, (32, 64), dtype=torch.uint8)
    scale = torch.randint(0x30, 0x40, (2, 128), dtype=torch.uint8).view(E4M3)
    b = Nvfp4Tensor(data, scale, None, (32, 128), packed_dim=1, swizzled=False, block_dim=0)
    assert (b.k, b.rows) == (32, 128)
    low, high = reference.e2m1_decode(data & 0xF), reference.e2m1_decode(data >> 4)
    codes = torch.stack((low, high), dim=2).reshape(32, 128)
    expected = codes * reference.e4m3_decode(scale).repeat_interleave(16, dim=0)
    assert_same_bytes(b.dequantize(), expected)
    assert_same_bytes(b.repack(0).dequantize(), expected)
    assert "packed_dim=1, block_dim=0, row-major scales" in repr(b)
    # What became of it in another library: sides swapped without the packing axis, K doubled.
    with pytest.raises(
        ValueError, match=r"64 elements / 2 scales = 32 a group along dimension 1.*MXFP4"
    ):
        Nvfp4Tensor(data.t(), scale.t(), None, (64, 64), 1, False)


# --- the product; its numbers over all axes, layouts and dtypes are test_matrix.py's


def test_product_is_gemms(device):
    a = Nvfp4Tensor.quantize(make_input("normal", 8, 48, torch.bfloat16).to(device))
    w = Nvfp4Tensor.quantize(make_input("normal", 24, 48, torch.bfloat16, seed=1).to(device))
    bias = torch.ones(24, device=device)
    alpha = a.global_scale * w.global_scale
    sides = (a.data, w.data, a.block_scale, w.block_scale)
    assert_same_bytes(a @ w.t(), ops.gemm(*sides, alpha))
    expected = ops.gemm(*sides, alpha, bias, torch.float32)
    assert_same_bytes(a.matmul(w.t(), bias, torch.float32), expected)
    x = torch.ones(8, 48, dtype=torch.float16, device=device)
    assert_same_bytes(x @ w.t(), ops.gemm_a16w4(x, w.data, w.block_scale, w.global_scale))
    assert_same_bytes(w @ x.t(), ops.gemm_a4w16(w.data, x, w.block_scale, w.global_scale))


@pytest.mark.parametrize("missing", ["left", "right", "both"])
def test_product_without_global_scales(missing):
    a = Nvfp4Tensor.quantize(torch.ones(8, 48))
    w = Nvfp4Tensor.quantize(torch.ones(24, 48))
    if missing != "right":
        a = dataclasses.replace(a, global_scale=None)
    if missing != "left":
        w = dataclasses.replace(w, global_scale=None)
    assert_same_bytes((a @ w.t()).float(), (a.dequantize() @ w.dequantize().t()).bfloat16().float())


def test_product_passes_gradients_to_a_dense_side():
    w = Nvfp4Tensor.quantize(torch.ones(24, 48))
    x = torch.ones(8, 48, dtype=torch.bfloat16, requires_grad=True)
    (x @ w.t()).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 24.0))  # 24 ones, exact


def test_a_product_that_cannot_be_is_an_error():
    a = Nvfp4Tensor.quantize(torch.ones(16, 48))
    with pytest.raises(
        ValueError, match=r"\(M, K\) and \(K, N\), got \(16, 48\) and \(16, 48\): .t"
    ):
        a @ a
    across = Nvfp4Tensor.quantize(torch.ones(48, 32))
    with pytest.raises(ValueError, match="neither a nor b has its blocks along K"):
        Nvfp4Tensor.quantize(torch.ones(16, 48), packed_dim=0) @ across
    with pytest.raises(ValueError, match="neither a nor b has its blocks along K"):
        torch.ones(16, 48).bfloat16() @ across
    with pytest.raises(TypeError, match=r"a.dtype must be bfloat16 or float16, got float32"):
        torch.ones(16, 48) @ a.t()
    with pytest.raises(TypeError, match="b must be a bfloat16 or float16 tensor, got float"):
        a @ 2.0
    with pytest.raises(ValueError, match=r"b must be 2-D, got \(48,\)"):
        a @ torch.ones(48).bfloat16()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # scales of groups of 32, where 16 is meant
        (
            (zero_data(8, 32), zero_scale(8, 2), (8, 64), 1, False),
            r"64 elements / 2 scales = 32 a group along dimension 1, and NVFP4's group is 16 "
            r"\(groups of 32 are MXFP4, which is not supported\)",
        ),
        (
            (zero_data(8, 128), zero_scale(128, 8), (8, 256), 1, True),
            r"256 elements / 8 scales = 32 or more a group along dimension 1.*are MXFP4",
        ),
        (
            (zero_data(32, 8), zero_scale(2, 8), (64, 8), 0, False),
            r"64 elements / 2 scales = 32 a group along dimension 0",
        ),
        # scales of groups of 64: of no format we know
        ((zero_data(8, 64), zero_scale(8, 2), (8, 128), 1, False), r"= 64 a group .* is 16: give"),
        # scales counted from the packed shape: 32 bytes / 16
        (
            (zero_data(64, 1024), zero_scale(64, 64), (64, 2048), 1, False),
            r"2048 / 16 = 128\) must have shape \(64, 128\), got \(64, 64\); 2048 elements / 64",
        ),
        (
            (zero_data(8, 32), zero_scale(8, 4), (8, 64), 1, True),
            r"swizzled, of \(8, 64 / 16 = 4\)\) must have shape \(128, 4\), got \(8, 4\)",
        ),
        (
            (zero_data(8, 32), zero_scale(128, 4), (8, 64), 1, False),
            r"must have shape \(8, 4\), got \(128, 4\)",
        ),
        (
            (zero_data(32, 8), zero_scale(128, 4), (8, 64), 1, True),
            r"data.* must have shape \(8, 32\), got \(32, 8\).*: data.t\(\) has it",
        ),
        ((zero_data(8, 16), zero_scale(8, 4), (8, 64), 1, True), "belong to different tensors"),
        ((zero_data(8, 12), zero_scale(128, 4), (8, 24), 1, True), "must be a multiple of 16"),
        ((zero_data(8, 32), zero_scale(128, 4), (8, 64), 2, True), "packed_dim must be 0 or 1"),
        ((zero_data(8, 32), zero_scale(128, 4), (8, 64), 1, True, 2), "block_dim must be 0 or 1"),
        ((zero_data(2, 4, 32), zero_scale(128, 4), (8, 64), 1, True), "must be 2-D"),
    ],
)
def test_contradictions_are_errors(arguments, message):
    data, scale, *description = arguments
    with pytest.raises(ValueError, match=message):
        Nvfp4Tensor(data, scale, torch.tensor(1.0), *description)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"data": torch.zeros(8, 32)}, TypeError, "data.dtype must be uint8"),
        ({"block_scale": torch.zeros(128, 4)}, TypeError, "block_scale.dtype must be float8"),
        (
            {"block_scale": torch.zeros(128, 4, dtype=torch.float8_e8m0fnu)},
            TypeError,
            "got float8_e8m0fnu: these are MXFP4's, one for 32 elements, which is not supported",
        ),
        (
            {"global_scale": torch.tensor(1.0, dtype=torch.float64)},
            TypeError,
            "global_scale.dtype must be float32, got float64",
        ),
        ({"global_scale": 1.0}, TypeError, "global_scale must be a float32 tensor, got float"),
        ({"global_scale": torch.ones(2)}, ValueError, "global_scale must have one element"),
    ],
)
def test_wrong_types_are_errors(change, error, message):
    good = Nvfp4Tensor(zero_data(8, 32), zero_scale(128, 4), torch.tensor(1.0), (8, 64))
    with pytest.raises(error, match=message):
        dataclasses.replace(good, **change)


def test_float4_data():
    q = Nvfp4Tensor.quantize(make_input("normal", 8, 48, torch.bfloat16), swizzled=False)
    as_float4 = dataclasses.replace(q, data=q.data.view(torch.float4_e2m1fn_x2))
    assert_same_bytes(as_float4.dequantize(), q.dequantize())
    assert_same_bytes(as_float4.t().dequantize(), q.t().dequantize())


def test_to_moves_every_part_and_converts_none(device):
    q = Nvfp4Tensor.quantize(make_input("normal", 8, 48, torch.bfloat16))
    moved = q.to(device)
    for name in ("data", "block_scale", "global_scale"):
        assert getattr(moved, name).device.type == device
        assert_same_bytes(getattr(moved, name), getattr(q, name))
    assert_same_bytes(moved.dequantize(), q.dequantize())
    with pytest.raises(TypeError, match=r"to\(\) takes a device, got torch.bfloat16: dequantize"):
        q.to(torch.bfloat16)


def test_is_frozen():
    q = Nvfp4Tensor.quantize(torch.ones(8, 48))
    with pytest.raises(dataclasses.FrozenInstanceError):
        q.packed_dim = 0


def test_quantize_needs_a_matrix():
    with pytest.raises(ValueError, match=r"x must be 2-D, got \(2, 3, 16\): x.flatten"):
        Nvfp4Tensor.quantize(torch.ones(2, 3, 16))


def test_no_rows():
    q = Nvfp4Tensor.quantize(torch.ones(0, 48))
    assert q.dequantize().shape == (0, 48)
    assert q.t().dequantize().shape == (48, 0)


def test_repr_tells_the_description():
    q = Nvfp4Tensor.quantize(torch.ones(8, 48)).t()
    expected = "Nvfp4Tensor(shape=(48, 8), packed_dim=0, swizzled scales, device='cpu')"
    assert repr(q) == expected
