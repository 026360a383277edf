"""Nvfp4Tensor: the description is checked against the bytes, and a transpose moves none of them."""

import dataclasses

import pytest
import torch
from compare import assert_same_bytes, make_input
from helpers import poison

from nvfp4_linear import Nvfp4Tensor, reference

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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # scales of groups of 32, where 16 is meant
        (
            (zero_data(8, 32), zero_scale(8, 2), (8, 64), 1, False),
            r"64 elements / 2 scales = 32 a group along dimension 1, and NVFP4's group is 16",
        ),
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
