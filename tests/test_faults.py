"""Faults that people met in software of this kind: each row an input, and what is right.

The number in a test's name is its row. Rows about architectures, rungs, scale pointers, plan keys
and benchmarks (33 to 37, 50) are in the tests of the planner and of bench/; 49 is test_install.py.
Every scale and output allocation comes full of 0x7F.
"""

import copy

import pytest
import torch
from compare import TIES, assert_same_bytes, bits
from helpers import poison
from torch import nn

from nvfp4_linear import Nvfp4Linear, Nvfp4Tensor, ops, reference, swap_linears
from nvfp4_linear.grouped import grouped_gemm

raw = torch.ops.nvfp4
E4M3 = torch.float8_e4m3fn
NAN_BYTE = 0x7F


@pytest.fixture(autouse=True)
def dirty_memory():
    poison("cpu")


def zeros_are(tensor):
    return tensor.view(torch.uint8).count_nonzero() == 0


def dense(*shape, dtype=torch.bfloat16, device="cpu", seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rng).to(dtype).to(device)


def unit_blocks(values):
    """Rows of one block each with the given values, zeros, and a 6.0 that makes the scale 1."""
    x = torch.zeros(len(values), 16)
    x[:, 0], x[:, 15] = torch.tensor(values), 6.0
    return x


# --- 1, 2: zero


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
def test_01_zero_tensor(device, bias_dtype):
    x = torch.zeros(4, 32, dtype=torch.bfloat16, device=device)
    poison(device)
    g = ops.global_scale(x)
    data, scale = ops.quantize(x, g)
    assert g.item() == 1.0
    assert zeros_are(data)
    assert zeros_are(scale)
    bias = dense(24, dtype=bias_dtype, device=device)
    b, b_scale = ops.quantize(dense(24, 32, device=device))
    y = ops.gemm(data, b, scale, b_scale, g, bias, bias_dtype)
    assert_same_bytes(y, bias.expand(4, 24))


def test_01_zero_tensor_through_the_module(device):
    layer = Nvfp4Linear.from_linear(nn.Linear(32, 24, dtype=torch.bfloat16)).to(device)
    y = layer(torch.zeros(4, 32, dtype=torch.bfloat16, device=device))
    assert_same_bytes(y.detach(), layer.bias.expand(4, 24))
    zero = nn.Linear(32, 24, device=device)
    nn.init.zeros_(zero.weight)
    layer = Nvfp4Linear.from_linear(zero)
    y = layer(dense(4, 32, dtype=torch.float32, device=device))
    assert_same_bytes(y.detach(), layer.bias.expand(4, 24))


def test_02_zero_block_in_a_nonzero_weight(device):
    w = torch.zeros(1, 32, device=device)
    w[0, 16:] = torch.linspace(-0.5, 0.5, 16)
    poison(device)
    _, scale = ops.quantize(w, ops.global_scale(w), swizzled=False)
    assert bits(scale).tolist() == [[0x00, 0x7E]]
    layer = Nvfp4Linear(32, 1, bias=False, device=device)
    layer.load_state_dict(Nvfp4Linear.from_linear(linear_of(w)).state_dict())
    assert NAN_BYTE not in bits(layer.weight_scale)
    assert torch.isfinite(layer(torch.ones(1, 32, device=device))).all()


def linear_of(weight):
    n, k = weight.shape
    linear = nn.Linear(k, n, bias=False, device=weight.device, dtype=weight.dtype)
    linear.weight.data.copy_(weight)
    return linear


@pytest.mark.parametrize("amax", [2688.0, 464.0 * 6, 1e6, 3e38])
def test_02_the_scale_saturates(device, amax):
    x = torch.full((1, 16), amax, device=device)
    data, scale = ops.quantize(x, swizzled=False)
    assert bits(scale).item() == 0x7E
    assert (bits(data) == 0x77).all()


# --- 5, 6, 28: codes


def test_05_e2m1_decode(device):
    data = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    scale = torch.ones(1, 1).to(E4M3)
    values = ops.dequantize(data.to(device), scale.to(device), swizzled=False)
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert_same_bytes(values, torch.tensor([magnitudes + [-m for m in magnitudes]]))


def test_06_ties_go_to_even(device):
    x = unit_blocks([*TIES, *(-t for t in TIES)]).to(device)
    poison(device)
    data, scale = ops.quantize(x, swizzled=False)
    assert (bits(scale) == 0x38).all()  # 1.0
    codes = [0, 2, 2, 4, 4, 6, 6]
    assert (data[:, 0] & 0xF).tolist() == codes + [8 + c for c in codes]


def test_28_even_index_in_the_low_nibble(device):
    x = unit_blocks([0.5]).to(device)
    x[0, 1] = 6.0
    data, _ = ops.quantize(x)
    assert data[0, 0].item() == 0x71


# --- 9: non-finite


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_09_a_non_finite_element_spoils_its_block_only(device, bad):
    clean = torch.ones(2, 32, device=device)
    clean[0, 3] = 0.0
    spoilt = clean.clone()
    spoilt[0, 3] = bad
    g, g_clean = ops.global_scale(spoilt), ops.global_scale(clean)
    assert_same_bytes(g, g_clean)
    poison(device)
    data, scale = ops.quantize(spoilt, g)
    data_clean, scale_clean = ops.quantize(clean, g)
    assert_same_bytes(data, data_clean)
    expected = bits(scale_clean).clone()
    expected[0, 0] = NAN_BYTE
    assert_same_bytes(scale, expected.view(E4M3))

    layer = Nvfp4Linear.from_linear(nn.Linear(32, 24)).to(device)
    with torch.no_grad():
        y = layer(spoilt)
        assert y[0].isnan().all()
        assert_same_bytes(y[1], layer(clean)[1])


# --- 10, 12, 45: global scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32])
def test_10_a_global_scale_of_another_dtype(device, dtype):
    x, g = dense(4, 64, device=device), torch.tensor(896).to(dtype).to(device)
    data, scale = ops.quantize(x)
    name = str(dtype).removeprefix("torch.")
    message = f"global_scale.dtype must be float32, got {name}"
    for call in (
        lambda: ops.quantize(x, g),
        lambda: ops.swiglu_quantize(x, g),
        lambda: ops.dequantize(data, scale, g),
        lambda: Nvfp4Tensor.quantize(x, g),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    for call in (
        lambda: ops.gemm(data, data, scale, scale, g),
        lambda: ops.gemm_a16w4(x, data, scale, g),
    ):
        with pytest.raises(TypeError, match=f"alpha.dtype must be float32, got {name}"):
            call()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32])
def test_10_the_raw_op_refuses_it_too(device, dtype):
    x, g = dense(4, 64, device=device), torch.tensor(896).to(dtype).to(device)
    with pytest.raises(TypeError, match=r"global_scale.dtype must be float32"):
        raw.quantize(x, g)


def test_12_no_global_scale(device):
    x = torch.full((1, 16), 4096.0, device=device)
    data, scale = ops.quantize(x, swizzled=False)
    assert bits(scale).item() == 0x7E
    assert (bits(data) == 0x77).all()
    assert (ops.dequantize(data, scale, swizzled=False) == 2688).all()
    q = Nvfp4Tensor.quantize(x)  # the dynamic one
    # g = fl32(4096 / 2688): 2688 · g is 4096 but for that rounding
    torch.testing.assert_close(q.dequantize(), x, rtol=2**-23, atol=0)


def modelopt_state(shape):
    weight = dense(24, 32, dtype=torch.float32)
    weight[0, 0] = 3.0
    weight.clamp_(-3, 3)
    state = dict(Nvfp4Linear.from_linear(linear_of(weight)).state_dict())
    state["weight_scale_2"] = state["weight_scale_2"].reshape(shape)
    return state


@pytest.mark.parametrize("shape", [(), (1,)])
def test_45_decode_direction_whatever_the_shape(shape):
    state = modelopt_state(shape)
    assert state["weight_scale_2"].item() == pytest.approx(0.00111607, rel=1e-5)
    layer = Nvfp4Linear(32, 24, bias=False)
    layer.load_state_dict(state)
    # the encode direction that others store, 448 · 6 / amax, is its inverse
    assert 1 / layer.weight_scale_2.item() == pytest.approx(896, rel=1e-6)
    assert layer.dequantize()[0, 0].item() == pytest.approx(3.0, rel=2**-22)  # two FP32 roundings


# --- 15: roundings


def test_15_h_is_rounded_once(device):
    """(gate, up) = (0.5, 3.0), (1.5, 1.5): h stays FP32 on its way to the block scale."""
    gate_up = torch.zeros(1, 32, dtype=torch.bfloat16)
    gate_up[0, :2] = torch.tensor([0.5, 1.5])
    gate_up[0, 16:18] = torch.tensor([3.0, 1.5])
    gate, up = gate_up.float().chunk(2, dim=1)
    h = reference.silu(gate) * up
    assert not torch.equal(h, h.bfloat16().float())
    poison(device)
    for g in (None, torch.tensor(0.0007)):
        data, scale = ops.swiglu_quantize(gate_up.to(device), g)
        expected_data, expected_scale = reference.quantize(h, g)
        assert_same_bytes(data, expected_data)
        assert_same_bytes(scale, expected_scale)


# --- 17, 19, 20: shapes


@pytest.mark.parametrize("leading", [(0,), (2, 0)])
def test_17_no_rows(device, leading):
    x = dense(*leading, 64, device=device)
    b, b_scale = ops.quantize(dense(24, 64, device=device))
    bias = dense(24, device=device)
    poison(device)
    g = ops.global_scale(x)
    assert g.item() == 1.0
    for swizzled in (True, False):
        data, scale = ops.quantize(x, g, swizzled=swizzled)
        assert data.shape == (*leading, 32)
        assert data.dtype == torch.uint8
        assert scale.shape == ((0, 4) if swizzled else (*leading, 4))
        assert scale.dtype == E4M3
        back = ops.dequantize(data, scale, g, swizzled=swizzled)
        assert back.shape == (*leading, 64)
    half, _ = ops.swiglu_quantize(x)
    assert half.shape == (*leading, 16)
    data, scale = ops.quantize(x)
    y = ops.gemm(data, b, scale, b_scale, g, bias, torch.float16)
    assert (y.shape, y.dtype) == ((*leading, 24), torch.float16)
    y = ops.gemm_a16w4(x, b, b_scale, None, bias)
    assert (y.shape, y.dtype) == ((*leading, 24), torch.bfloat16)
    empty = ops.swizzle_scales(ops.quantize(x.reshape(0, 64), swizzled=False)[1])
    assert ops.unswizzle_scales(empty, 0, 4).shape == (0, 4)
    for activation in ("dynamic", "static", "unit", "none"):
        scale = 0.01 if activation == "static" else None
        linear = nn.Linear(64, 24, device=device)
        layer = Nvfp4Linear.from_linear(linear, activation=activation, input_scale=scale)
        assert layer(x).shape == (*leading, 24)
        assert layer.forward_swiglu(torch.cat((x, x), -1)).dtype == torch.bfloat16
    # the next launch is unharmed
    after = dense(3, 64, device=device)
    data, scale = ops.quantize(after)
    expected_data, expected_scale = reference.quantize(after.cpu())
    assert_same_bytes(data, expected_data)
    assert_same_bytes(scale, expected_scale)


@pytest.mark.parametrize("m", [1, 5, 129])
@pytest.mark.parametrize("k", [48, 96])
@pytest.mark.parametrize("n", [1, 8, 24, 136])
def test_19_odd_n_and_k(device, n, k, m):
    a, a_scale = reference.quantize(dense(m, k, seed=1))
    b, b_scale = reference.quantize(dense(n, k, seed=2))
    bias, alpha = dense(n, dtype=torch.float32), torch.tensor(0.5)
    expected = reference.gemm(a, b, a_scale, b_scale, alpha, bias, torch.bfloat16)
    operands = [t.to(device) for t in (a, b, a_scale, b_scale, alpha, bias)]
    poison(device)
    y = ops.gemm(*operands)
    assert y.is_contiguous()
    if device == "cpu":
        assert_same_bytes(y, expected)
    else:  # summed in FP32 in another order, then one BF16 rounding
        torch.testing.assert_close(y.cpu(), expected, rtol=2**-7, atol=2**-10)


@pytest.mark.parametrize(
    "view", [lambda t: t[:, :64], lambda t: t[::2], lambda t: t.t()], ids=["columns", "rows", "t"]
)
def test_20_strided_input(device, view):
    big = dense(16 if view(torch.empty(4, 128)).shape[0] == 128 else 4, 128, device=device)
    x = view(big)
    poison(device)
    for op in (ops.quantize, ops.swiglu_quantize):
        if op is ops.swiglu_quantize and x.shape[1] % 32:
            continue
        for actual, expected in zip(op(x), op(x.contiguous()), strict=True):
            assert_same_bytes(actual, expected)
    assert_same_bytes(ops.global_scale(x), ops.global_scale(x.contiguous()))
    data, scale = ops.quantize(x)
    b, b_scale = ops.quantize(dense(24, x.shape[1], device=device))
    y = ops.gemm_a16w4(x, b, b_scale)
    assert_same_bytes(y, ops.gemm_a16w4(x.contiguous(), b, b_scale))
    strided = [t.t().contiguous().t() for t in (data, b, scale, b_scale)]
    assert_same_bytes(ops.gemm(*strided), ops.gemm(data, b, scale, b_scale))
    layer = Nvfp4Linear.from_linear(nn.Linear(x.shape[1], 8, device=device))
    assert_same_bytes(layer(x), layer(x.contiguous()))


# --- 24, 26: scale padding


def padding_of(scale, rows, cols):
    """The bytes of swizzled scales that belong to no scale of (rows, cols)."""
    used = torch.zeros(scale.shape, dtype=torch.uint8)
    used[:rows, :cols] = 1
    return bits(scale)[reference.swizzle_scales(used) == 0]


@pytest.mark.parametrize("k", [48, 80, 512])
@pytest.mark.parametrize("m", [1, 5, 127, 129])
def test_24_padding_is_zero_whoever_writes_it(device, m, k):
    x = dense(m, k, device=device)
    linear = ops.quantize(x, swizzled=False)[1]
    gate_up = torch.cat((x, x), dim=1)
    for make in (
        lambda: ops.quantize(x)[1],
        lambda: ops.swiglu_quantize(gate_up)[1],
        lambda: ops.swizzle_scales(linear),
        lambda: ops.swizzle_scales(linear.t().contiguous().t()),
    ):
        poison(device)
        assert (padding_of(make(), m, k // 16) == 0).all()
    poison(device)
    _, padded = ops.swiglu_quantize(gate_up, pad_rows_to=256)
    assert padded.shape[0] == 256
    assert (padding_of(padded, m, k // 16) == 0).all()


def test_24_outputs_do_not_depend_on_padding(device):
    """Whatever lies in it: another library's scales may come with stale padding."""
    (a, a_scale), (b, b_scale) = (ops.quantize(dense(r, 48, device=device)) for r in (5, 24))
    expected = ops.gemm(a, b, a_scale, b_scale)
    used = torch.zeros(128, 4, dtype=torch.uint8, device=device)
    used[:5, :3] = 1
    used = reference.swizzle_scales(used)
    stale = torch.where(used == 0, NAN_BYTE, a_scale.view(torch.uint8)).view(E4M3)
    assert_same_bytes(ops.gemm(a, b, stale, b_scale), expected)
    assert_same_bytes(ops.dequantize(a, stale), ops.dequantize(a, a_scale))


GUARD = 0x5A


def guards_of(size, count, device):
    return [torch.full((size,), GUARD, dtype=torch.uint8, device=device) for _ in range(count)]


@pytest.mark.parametrize("swizzled", [True, False])
def test_26_nothing_is_written_behind_the_scales(device, swizzled):
    """M = 1025, K = 512. The op allocates its scales: what lies behind them in memory stays put."""
    x = dense(1025, 512)
    data, expected = reference.quantize(x, swizzled=swizzled)
    x = x.to(device)
    _, scale = ops.quantize(x, swizzled=swizzled)
    assert_same_bytes(scale, expected)
    size = 1025 * 32 if not swizzled else 1152 * 32
    assert scale.numel() == scale.untyped_storage().nbytes() == size
    for made_of, right in enumerate((data, expected)):
        # Buffers with guards behind them, handed out by the allocator in turn: none is touched.
        guards = guards_of(right.numel(), 16, device)
        freed = {guards[i].data_ptr() for i in range(0, 16, 2)}
        made = []
        for i in range(0, 16, 2):
            guards[i] = None
            made.append(ops.quantize(x, swizzled=swizzled)[made_of])
        assert all((g == GUARD).all() for g in guards if g is not None)
        for tensor in made:
            assert_same_bytes(tensor, right)
        if device == "cuda":  # torch's allocator gives what was freed last again, where it fits
            assert freed & {tensor.data_ptr() for tensor in made}


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize(("m", "n", "k"), [(5, 24, 48), (33, 136, 96), (129, 72, 272)])
def test_26_nothing_is_written_round_operands_and_results(device, m, n, k):
    """Operands cut from the middle of blocks of torch's allocator, and guards round the results."""

    def between_guards(tensor):
        edge = 256  # bytes, as the allocator aligns
        raw = tensor.contiguous().view(torch.uint8).reshape(-1)
        block = torch.full((raw.numel() + 2 * edge,), GUARD, dtype=torch.uint8, device=device)
        block[edge : edge + raw.numel()] = raw.to(device)
        blocks.append((block, edge, raw))
        return block[edge : edge + raw.numel()].view(tensor.dtype).view(tensor.shape)

    blocks = []
    x = dense(m, k)
    (a, a_scale), (b, b_scale) = (reference.quantize(dense(r, k, seed=r)) for r in (m, n))
    linear = reference.quantize(x, swizzled=False)[1]
    offs, index = torch.tensor([2, m - 1], dtype=torch.int32), torch.arange(m, dtype=torch.int32)
    stack, stack_scale = (torch.stack([t.view(torch.uint8)] * 2) for t in (b, b_scale))
    x, a, a_scale, b, b_scale, linear, offs, index, stack, stack_scale = map(
        between_guards,
        (x, a, a_scale, b, b_scale, linear, offs, index, stack, stack_scale.view(E4M3)),
    )
    calls = (
        lambda: ops.quantize(x),
        lambda: ops.swiglu_quantize(x[:, : k // 32 * 32]),
        lambda: ops.dequantize(a, a_scale),
        lambda: ops.swizzle_scales(linear),
        lambda: ops.global_scale(x),
        lambda: ops.gemm(a, b, a_scale, b_scale),
        lambda: ops.gemm_a16w4(x, b, b_scale),
        lambda: ops.gemm_a4w16(a, x, a_scale),
        lambda: grouped_gemm(x, stack, None, stack_scale, offs, gather=index, scatter=index),
    )
    for call in calls:
        results = call()
        results = results if isinstance(results, tuple) else (results,)
        sizes = [r.untyped_storage().nbytes() for r in results]
        rings = [guards_of(size, 9, device) for size in sizes]
        for ring in rings:
            ring[1::2] = [None] * 4
        again = [call() for _ in range(4)]
        for guards in rings:
            assert all((g == GUARD).all() for g in guards if g is not None)
        for got in again:
            got = got if isinstance(got, tuple) else (got,)
            for one, other in zip(got, results, strict=True):
                assert_same_bytes(one, other)
    for block, edge, raw in blocks:
        assert torch.equal(block[edge:-edge].cpu(), raw)
        assert (block[:edge] == GUARD).all()
        assert (block[-edge:] == GUARD).all()


# --- 31, 32: orientation and K


def test_31_wrong_orientation_is_named():
    x, (b, b_scale) = dense(4, 64), ops.quantize(dense(24, 64))
    with pytest.raises(ValueError, match=r"same K, got 64 and 48 \(b has shape \(32, 24\)"):
        ops.gemm_a16w4(x, b.t(), b_scale)
    a, a_scale = ops.quantize(x)
    with pytest.raises(ValueError, match=r"both are row-major along K"):
        ops.gemm(a, b.t(), a_scale, b_scale)
    layer = Nvfp4Linear(64, 24)
    state = dict(Nvfp4Linear.from_linear(nn.Linear(64, 24)).state_dict())
    state["weight"] = state["weight"].t().contiguous()
    with pytest.raises(
        RuntimeError, match=r"weight must be \(N, K/2\) = \(24, 32\), got \(32, 24\)"
    ):
        layer.load_state_dict(state)
    with pytest.raises(ValueError, match=r"data.t\(\) has it"):
        Nvfp4Tensor(b.t(), b_scale, None, (24, 64))


def test_31_the_square_case_is_caught_by_content(device):
    """(N, K/2) with N = K/2: shapes say nothing, so every element does."""
    w = dense(32, 64, device=device)
    q = Nvfp4Tensor.quantize(w)
    x = torch.eye(64, dtype=torch.bfloat16, device=device)
    y = ops.gemm_a16w4(x, q.data, q.block_scale, q.global_scale, None, torch.float32)
    assert_same_bytes(y, q.dequantize().t() + 0.0)  # a sum has no −0


def test_32_k_comes_from_the_packed_shape(device):
    data = torch.zeros(2048, 1024, dtype=torch.uint8, device=device)
    scale = torch.zeros(2048, 128, dtype=torch.uint8, device=device).view(E4M3)
    assert ops.dequantize(data, scale, swizzled=False).shape == (2048, 2048)
    with pytest.raises(ValueError, match=r"row-major with shape \(2048, 128\)"):
        ops.dequantize(data, scale[:, :64], swizzled=False)
    fake_data, fake_scale = data.to("meta"), scale.to("meta")
    assert ops.dequantize(fake_data, fake_scale, swizzled=False).shape == (2048, 2048)
    with pytest.raises(ValueError, match=r"row-major \(2048, 128\), got \(2048, 64\)"):
        ops.dequantize(fake_data, fake_scale[:, :64], swizzled=False)


# --- 38, 39, 40: compile, graphs, streams


def test_38_compile(device):
    """One opaque op a call, fake shapes as the real ones, no compilation a shape."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append([n.target for n in graph.graph.nodes if n.op == "call_function"])
        return graph.forward

    layer = Nvfp4Linear.from_linear(nn.Linear(64, 24), activation="unit").to(device)
    layer.requires_grad_(False)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for m in (1, 2, 127, 128, 129):
        x = dense(m, 64, device=device, seed=m)
        assert_same_bytes(compiled(x), layer(x))
    assert len(graphs) <= 3
    for targets in graphs:
        names = [str(t) for t in targets]
        assert sum("nvfp4.quantize" in name for name in names) == 1
        assert sum("nvfp4.gemm" in name for name in names) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("activation", ["dynamic", "none"])
def test_39_cuda_graph_replay(device, activation):
    layer = Nvfp4Linear.from_linear(nn.Linear(256, 128), activation=activation).to(device)
    layer.requires_grad_(False)
    x = dense(1, 256, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    layer(dense(300, 256, device=device))  # a larger M, eagerly
    poison(device)
    churn = [torch.empty(1 << n, dtype=torch.uint8, device=device) for n in range(10, 24)]
    del churn
    for seed in range(3):
        x.copy_(dense(1, 256, device=device, seed=seed))
        graph.replay()
        assert_same_bytes(y, layer(x))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_40_alpha_is_not_shared_between_streams(device):
    a, a_scale = ops.quantize(dense(64, 256, device=device))
    b, b_scale = ops.quantize(dense(128, 256, device=device))
    alphas = [torch.tensor(value, device=device) for value in (1.0, 1000.0)]
    expected = [ops.gemm(a, b, a_scale, b_scale, alpha) for alpha in alphas]
    streams = [torch.cuda.Stream() for _ in alphas]
    torch.cuda.synchronize()
    results = []
    torch.cuda.set_sync_debug_mode("error")  # a host sync raises
    try:
        for _ in range(100):
            for stream, alpha in zip(streams, alphas, strict=True):
                with torch.cuda.stream(stream):
                    results.append(ops.gemm(a, b, a_scale, b_scale, alpha))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for i, y in enumerate(results):
        assert_same_bytes(y, expected[i % 2])


def test_40_two_layers_do_not_share_alpha(device):
    small = Nvfp4Linear.from_linear(nn.Linear(64, 24, bias=False), activation="unit").to(device)
    large = copy.deepcopy(small)
    large.weight_scale_2.mul_(1024)  # a power of two: exact
    x = dense(4, 64, dtype=torch.float32, device=device)
    y = small(x)
    assert_same_bytes(large(x), y * 1024)
    assert_same_bytes(small(x), y)


# --- 43: gradients


@pytest.mark.parametrize("activation", ["dynamic", "unit", "none"])
def test_43_gradients(device, activation):
    layer = Nvfp4Linear.from_linear(nn.Linear(64, 24), activation=activation).to(device)
    x = dense(5, 64, dtype=torch.float32, device=device).requires_grad_()
    grad = dense(5, 24, dtype=torch.float32, device=device, seed=3)
    layer(x).backward(grad)
    assert_same_bytes(layer.bias.grad, grad.sum(0))
    # FP32 sums of 24 terms in another order
    torch.testing.assert_close(x.grad, grad @ layer.dequantize(), rtol=1e-5, atol=1e-5)


def test_43_a_clear_refusal():
    x = dense(5, 64).requires_grad_()
    with pytest.raises(RuntimeError, match="quantize has no gradient for x, which requires one"):
        ops.quantize(x)


# --- 47, 48: checkpoints and tied weights


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_2"])
@pytest.mark.parametrize("strict", [True, False])
def test_47_a_missing_piece_is_named(name, strict):
    model = nn.ModuleDict({"proj": Nvfp4Linear(32, 24, bias=False)})
    state = {f"proj.{k}": v for k, v in modelopt_state(()).items() if k != name}
    with pytest.raises(RuntimeError, match=f"proj.{name}"):
        model.load_state_dict(state, strict=strict)


def test_48_tied_embeddings_are_skipped_with_a_reason():
    model = nn.ModuleDict({"embed": nn.Embedding(48, 32), "head": nn.Linear(32, 48, bias=False)})
    model["head"].weight = model["embed"].weight
    (record,) = swap_linears(model).records
    assert (record.action, record.reason) == ("skipped", "weight is tied to embed.weight")
    assert model["head"].weight is model["embed"].weight
