"""Nvfp4Linear: what it computes, what it stores, and that nothing but a load changes those bytes."""

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from compare import assert_same_bytes, make_input
from helpers import poison
from torch import nn
from torch._dynamo.testing import CompileCounter

from nvfp4_linear import Nvfp4Linear, calibrate, ops, reference

raw = torch.ops.nvfp4
N, K = 40, 96
E4M3 = torch.float8_e4m3fn
DENSE = [torch.float32, torch.bfloat16, torch.float16]
MODES = ["dynamic", "static", "unit", "none"]
QUANTIZED = MODES[:-1]
INPUT_SCALE = 0.0017
STORED = ["weight", "weight_scale", "weight_scale_2"]


def make(activation="dynamic", *, bias=True, dtype=torch.float32, device="cpu", n=N, k=K):
    torch.manual_seed(0)
    linear = nn.Linear(k, n, bias=bias, dtype=dtype)
    scale = INPUT_SCALE if activation == "static" else None
    layer = Nvfp4Linear.from_linear(linear, activation=activation, input_scale=scale)
    return layer.to(device)


def activations(*shape, dtype=torch.bfloat16, device="cpu", seed=1):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rng).to(dtype).to(device)


def stored(layer):
    """The layer's own bytes, bias left out."""
    return {k: v.clone() for k, v in layer.state_dict().items() if k != "bias"}


def assert_stored(layer, expected):
    actual = stored(layer)
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert_same_bytes(actual[name], value, name)


# --- forward


def expected_forward(layer, x, *, swiglu=False, g=None):
    """By reference.py, the format page in PyTorch: (M, K) or (M, 2K) on the CPU → (M, N)."""
    weight, scale = layer.weight, reference.swizzle_scales(layer.weight_scale)
    out, bias = x.dtype, layer.bias.detach()
    if layer.activation == "none":
        if swiglu:
            gate, up = x.float().chunk(2, dim=-1)
            x = F.silu(gate) * up
        x = x.to(torch.bfloat16 if out == torch.float32 else out)
        return reference.gemm_a16w4(x, weight, scale, layer.weight_scale_2, bias, out)
    if g is None:
        g = {"dynamic": reference.global_scale, "static": lambda _: layer.input_scale}.get(
            layer.activation, lambda _: torch.tensor(1.0)
        )(x)
    quantize = reference.swiglu_quantize if swiglu else reference.quantize
    data, block_scale = quantize(x, g)
    alpha = g * layer.weight_scale_2
    return reference.gemm(data, weight, block_scale, scale, alpha, bias, out)


@pytest.mark.parametrize("dtype", DENSE)
@pytest.mark.parametrize("activation", MODES)
def test_forward_is_quantize_then_gemm(activation, dtype):
    layer = make(activation)
    x = activations(5, K, dtype=dtype)
    poison("cpu")
    with torch.no_grad():
        y = layer(x)
    assert_same_bytes(y, expected_forward(layer, x))


@pytest.mark.parametrize("dtype", DENSE)
@pytest.mark.parametrize("activation", MODES)
def test_forward_swiglu_is_the_producer_then_gemm(activation, dtype):
    layer = make(activation)
    gate_up = activations(5, 2 * K, dtype=dtype)
    poison("cpu")
    with torch.no_grad():
        y = layer.forward_swiglu(gate_up)
    g = None
    if activation == "dynamic":
        g = reference.swiglu_global_scale(gate_up)
    assert_same_bytes(y, expected_forward(layer, gate_up, swiglu=True, g=g))


@pytest.mark.parametrize("activation", MODES)
def test_forward_on_a_device_is_the_ops_in_a_row(device, activation):
    layer = make(activation, device=device)
    x = activations(5, K, device=device)
    scale = ops.swizzle_scales(layer.weight_scale)
    with torch.no_grad():
        y = layer(x)
        if activation == "none":
            expected = ops.gemm_a16w4(x, layer.weight, scale, layer.weight_scale_2, layer.bias)
        else:
            g = {"dynamic": ops.global_scale(x), "static": layer.input_scale}.get(activation)
            data, block_scale = ops.quantize(x, g)
            alpha = layer.weight_scale_2 if g is None else g * layer.weight_scale_2
            operands = (data, layer.weight, block_scale, scale)
            expected = ops.gemm(*operands, alpha, layer.bias, torch.bfloat16)
    assert_same_bytes(y, expected)


@pytest.mark.parametrize("activation", MODES)
def test_error_against_dense_is_that_of_four_bits(activation):
    torch.manual_seed(0)
    linear = nn.Linear(512, 256)
    scale = ops.global_scale(activations(64, 512, dtype=torch.float32))
    scale = scale if activation == "static" else None
    layer = Nvfp4Linear.from_linear(linear, activation=activation, input_scale=scale)
    x = activations(64, 512, dtype=torch.float32)
    with torch.no_grad():
        error = (layer(x) - linear(x)).norm() / linear(x).norm()
    # E2M1 with a scale per 16: about 9.5 % RMS an operand on normal data, √2 that for two
    assert error < (0.11 if activation == "none" else 0.16)


@pytest.mark.parametrize("activation", MODES)
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0,), (2, 0), (3, 1, 2)])
def test_leading_dimensions_are_rows(device, activation, shape):
    layer = make(activation, device=device)
    x = activations(*shape, K, device=device)
    gate_up = activations(*shape, 2 * K, device=device)
    for call, value in ((layer, x), (layer.forward_swiglu, gate_up)):
        y = call(value)
        assert y.shape == (*shape, N)
        assert y.dtype == value.dtype
        rows = call(value.reshape(x.numel() // K, value.shape[-1]))
        assert_same_bytes(y, rows.reshape(y.shape))


@pytest.mark.parametrize("activation", MODES)
def test_strided_input(device, activation):
    layer = make(activation, device=device)
    wide = activations(6, 2 * K, device=device)
    for x in (wide[:, :K], wide[::2, K:], activations(K, 6, device=device).t()):
        assert_same_bytes(layer(x), layer(x.contiguous()))


@pytest.mark.parametrize("bias_dtype", DENSE)
@pytest.mark.parametrize("dtype", DENSE)
@pytest.mark.parametrize("activation", MODES)
def test_out_is_xs_dtype_whatever_the_bias(device, activation, dtype, bias_dtype):
    layer = make(activation, dtype=bias_dtype, device=device)
    assert layer.bias.dtype == bias_dtype
    assert layer(activations(2, K, dtype=dtype, device=device)).dtype == dtype


@pytest.mark.parametrize("dtype", DENSE)
@pytest.mark.parametrize("activation", MODES)
def test_autocast_sets_the_output_dtype_only(device, activation, dtype):
    layer = make(activation, device=device)
    before = stored(layer)
    x = activations(2, K, dtype=dtype, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = layer(x)
        gated = layer.forward_swiglu(activations(2, 2 * K, dtype=dtype, device=device))
    assert y.dtype == gated.dtype == torch.bfloat16
    assert_stored(layer, before)
    if activation != "none" and dtype == torch.float32:
        # x itself is quantized as it came, not rounded to BF16 first; only the output is
        assert_same_bytes(y, layer(x).bfloat16())


def test_weight_only_rounds_float32_input_to_bfloat16(device):
    layer = make("none", device=device)
    x = activations(3, K, dtype=torch.float32, device=device)
    operands = (layer.weight, ops.swizzle_scales(layer.weight_scale), layer.weight_scale_2)
    with torch.no_grad():
        expected = ops.gemm_a16w4(x.bfloat16(), *operands, layer.bias, torch.float32)
        assert_same_bytes(layer(x), expected)


@pytest.mark.parametrize("activation", MODES)
def test_compiles_whole_with_any_number_of_rows(device, activation):
    torch._dynamo.reset()
    counter = CompileCounter()
    layer = make(activation, device=device).requires_grad_(False)

    def block(x):
        return layer(x), layer.forward_swiglu(torch.cat((x, x), dim=-1))

    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for m in (1, 2, 127, 128, 129):
        x = activations(m, K, device=device, seed=m)
        for y, expected in zip(compiled(x), block(x), strict=True):
            assert_same_bytes(y, expected)
    assert counter.frame_count <= 3  # M = 1, M = 2, every M


@pytest.mark.parametrize("strict", [False, True])
def test_export(device, strict):
    layer = make("dynamic", device=device).requires_grad_(False)
    rows = {"x": {0: torch.export.Dim("m", min=2, max=4096)}}
    example = (activations(5, K, device=device),)
    program = torch.export.export(layer, example, dynamic_shapes=rows, strict=strict)
    x = activations(129, K, device=device)
    assert_same_bytes(program.module()(x), layer(x))


# --- what is stored


@pytest.mark.parametrize("activation", MODES)
def test_state_dict_is_modelopts(activation):
    layer = make(activation, dtype=torch.bfloat16)
    found = {k: (v.dtype, tuple(v.shape)) for k, v in layer.state_dict().items()}
    expected = {
        "weight": (torch.uint8, (N, K // 2)),
        "weight_scale": (E4M3, (N, K // 16)),
        "weight_scale_2": (torch.float32, ()),
        "bias": (torch.bfloat16, (N,)),
    }
    if activation == "static":
        expected["input_scale"] = (torch.float32, ())
    assert found == expected


def test_from_linear_stores_the_formats_bytes(device):
    torch.manual_seed(0)
    for name in ("normal", "hand_made"):
        linear = nn.Linear(K, N, dtype=torch.bfloat16, device=device)
        w = make_input(name, N, K, torch.bfloat16)
        linear.weight.data.copy_(w)
        poison(device)
        layer = Nvfp4Linear.from_linear(linear)
        g = reference.global_scale(w)
        data, scale = reference.quantize(w, g, swizzled=False)
        assert_same_bytes(layer.weight, data)
        assert_same_bytes(layer.weight_scale, scale)
        assert_same_bytes(layer.weight_scale_2, g)
        assert_same_bytes(layer.bias, linear.bias)
        assert_same_bytes(layer.dequantize(), reference.dequantize(data, scale, g, swizzled=False))


def test_from_linear_copies_the_bias():
    linear = nn.Linear(K, N)
    linear.bias.requires_grad_(False)
    layer = Nvfp4Linear.from_linear(linear.eval()).half()
    assert linear.bias.dtype == torch.float32
    assert not layer.bias.requires_grad
    assert not layer.training


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("activation", MODES)
def test_state_dict_makes_the_same_layer(device, activation, assign):
    layer = make(activation, device=device)
    other = Nvfp4Linear(K, N, activation=activation, device=device)
    other.load_state_dict(layer.state_dict(), assign=assign)
    assert_stored(other, stored(layer))
    x = activations(3, K, device=device)
    assert_same_bytes(other(x), layer(x))


@pytest.mark.parametrize("activation", MODES)
def test_meta_layer_is_loaded_by_assignment(device, activation):
    layer = make(activation, device=device)
    with torch.device("meta"):
        other = Nvfp4Linear(K, N, activation=activation)
    assert all(t.is_meta for t in (*other.buffers(), *other.parameters()))
    assert other(torch.empty(3, K, device="meta")).shape == (3, N)
    other.load_state_dict(layer.state_dict(), assign=True)
    assert_stored(other, stored(layer))
    x = activations(3, K, device=device)
    assert_same_bytes(other(x), layer(x))


def test_meta_layer_is_loaded_after_to_empty(device):
    layer = make("static", device=device)
    other = Nvfp4Linear(K, N, activation="static", device="meta").to_empty(device=device)
    other.load_state_dict(layer.state_dict())
    assert_stored(other, stored(layer))
    x = activations(3, K, device=device)
    assert_same_bytes(other(x), layer(x))


def test_safetensors_round_trip(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    layer = make("static")
    safetensors.save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other = Nvfp4Linear(K, N, activation="static")
    other.load_state_dict(safetensors.load_file(tmp_path / "layer.safetensors"))
    assert_stored(other, stored(layer))


CONVERSIONS = {
    "to(bfloat16)": lambda m: m.to(torch.bfloat16),
    "to(float64)": lambda m: m.to(torch.float64),
    "to(device, dtype)": lambda m: m.to("cpu", torch.float16),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "float": lambda m: m.float(),
    "type": lambda m: m.type(torch.bfloat16),
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "share_memory": lambda m: m.share_memory(),
    "eval": lambda m: m.eval(),
    "requires_grad_": lambda m: m.requires_grad_(),
}


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("activation", ["static", "none"])
def test_conversions_change_no_stored_byte(activation, conversion):
    model = nn.Sequential(make(activation))
    model[0].bias.requires_grad_(False)
    before = stored(model[0])
    expected = model(activations(3, K))
    bias = model[0].bias.clone()
    model = CONVERSIONS[conversion](model)
    assert_stored(model[0], before)
    if model[0].bias.dtype == bias.dtype:
        assert_same_bytes(model(activations(3, K)).detach(), expected)
    else:
        assert_same_bytes(model[0].bias, bias.to(model[0].bias.dtype))


def test_bias_follows_a_conversion():
    assert make().half().bias.dtype == torch.float16
    assert make().to(torch.bfloat16).bias.dtype == torch.bfloat16
    assert make().to(torch.bfloat16)(activations(2, K)).dtype == torch.bfloat16


def test_torch_save_of_the_module():
    layer, file = make(), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert_same_bytes(other(activations(3, K)), layer(activations(3, K)))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_moving_to_a_gpu_and_back(device):
    layer = make("static")
    before, x = stored(layer), activations(3, K)
    expected = layer(x)
    layer.to(device)
    assert_stored(layer, before)
    assert layer(x.to(device)).device.type == "cuda"
    assert_same_bytes(layer.cpu()(x), expected)


# --- the swizzled copy is never stale


def other_scale():
    return make().weight_scale.view(torch.uint8).flip(0).view(E4M3)


def replaced_in_place(layer, scale):
    layer.weight_scale.copy_(scale)


def replaced_by_attribute(layer, scale):
    layer.weight_scale = scale


def replaced_in_buffers(layer, scale):
    layer._buffers["weight_scale"] = scale  # as loaders for big models do


def replaced_by_loading(layer, scale):
    layer.load_state_dict({**layer.state_dict(), "weight_scale": scale})


def replaced_by_assignment(layer, scale):
    layer.load_state_dict({**layer.state_dict(), "weight_scale": scale}, assign=True)


REPLACED = [
    replaced_in_place,
    replaced_by_attribute,
    replaced_in_buffers,
    replaced_by_loading,
    replaced_by_assignment,
]


@pytest.mark.parametrize("replace", REPLACED)
def test_new_scales_are_used(device, replace):
    layer, fresh = make("none", device=device), make("none", device=device)
    x = activations(3, K, device=device)
    before = layer(x)
    scale = other_scale().to(device)
    replace(layer, scale)
    fresh.weight_scale = scale.clone()
    fresh._swizzled = (None, 0, None)
    assert_same_bytes(layer(x), fresh(x))
    assert not torch.equal(layer(x), before)


@pytest.mark.parametrize("replace", REPLACED[1:])
def test_new_scales_are_used_by_compiled_code(device, replace):
    torch._dynamo.reset()
    layer = make("none", device=device).requires_grad_(False)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    x = activations(3, K, device=device)
    assert_same_bytes(compiled(x), layer(x))
    before = layer(x)
    replace(layer, other_scale().to(device))
    after = compiled(x)
    assert not torch.equal(after, before)
    assert_same_bytes(after, layer(x))


def test_layers_made_under_inference_mode():
    with torch.inference_mode():
        layer = make()
        y = layer(activations(3, K))
        assert_same_bytes(layer(activations(3, K)), y)


# --- loading: what is accepted, and what is refused


def loadable(activation="static"):
    return dict(make(activation).state_dict())


def test_scalars_of_shape_1_are_accepted():
    state = loadable()
    for name in ("weight_scale_2", "input_scale"):
        state[name] = state[name].reshape(1)
    for assign in (False, True):
        layer = Nvfp4Linear(K, N, activation="static")
        layer.load_state_dict(state, assign=assign)
        assert layer.weight_scale_2.shape == layer.input_scale.shape == ()
        assert_stored(layer, stored(make("static")))


def test_float4_weights_are_accepted():
    state = loadable()
    state["weight"] = state["weight"].view(torch.float4_e2m1fn_x2)
    layer = Nvfp4Linear(K, N, activation="static")
    layer.load_state_dict(state, assign=True)
    assert_stored(layer, stored(make("static")))


@pytest.mark.parametrize("activation", ["dynamic", "unit", "none"])
def test_a_calibrated_checkpoint_loads_in_every_mode(activation):
    """input_scale is kept as it was loaded, for the next save, and is not used."""
    state = loadable("static")
    layer = Nvfp4Linear(K, N, activation=activation)
    layer.load_state_dict(state)
    assert_stored(layer, stored(make("static")))
    expected = make(activation)
    assert_same_bytes(layer(activations(3, K)), expected(activations(3, K)))
    layer.load_state_dict(loadable("none"))  # and a checkpoint without one takes it away again
    assert layer.input_scale is None
    layer.activation = "static"
    with pytest.raises(ValueError, match="activation is 'static' but input_scale is None"):
        layer(activations(3, K))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.zeros(N, K)}, r"weight is torch.float32, a dense weight.*from_linear"),
        ({"weight": torch.zeros(N, K // 2, dtype=torch.int8)}, "weight.dtype must be uint8 or"),
        (
            {"weight": torch.zeros(K // 2, N, dtype=torch.uint8)},
            r"weight must be \(N, K/2\) = \(40, 48\), got \(48, 40\), it is transposed",
        ),
        (
            {"weight": torch.zeros(N, K, dtype=torch.uint8)},
            r"weight must be \(N, K/2\) = \(40, 48\), got \(40, 96\)",
        ),
        (
            {"weight_scale": torch.zeros(N, K // 16, dtype=torch.uint8)},
            r"weight_scale.dtype must be float8_e4m3fn, got uint8: view it",
        ),
        (
            {"weight_scale": torch.zeros(128, 8, dtype=torch.uint8).view(E4M3)},
            r"\(N, K/16\) = \(40, 6\), got \(128, 8\): it has the swizzled shape: unswizzle_scales",
        ),
        (
            {"weight_scale": torch.zeros(N, K // 32).to(E4M3)},
            r"weight_scale must be row-major \(N, K/16\) = \(40, 6\), got \(40, 3\)",
        ),
        (
            {"weight_scale_2": torch.tensor(0.1, dtype=torch.bfloat16)},
            "weight_scale_2.dtype must be float32, got bfloat16",
        ),
        ({"weight_scale_2": torch.ones(3)}, r"weight_scale_2 must have one element, .*q/k/v"),
        ({"weight_scale_2": torch.tensor(0.0)}, "weight_scale_2 must be finite and > 0"),
        ({"input_scale": torch.tensor(torch.inf)}, "input_scale must be finite and > 0"),
        (
            {"input_scale": torch.tensor(0.1, dtype=torch.float64)},
            "input_scale.dtype must be float32, got float64",
        ),
    ],
)
@pytest.mark.parametrize("assign", [False, True])
def test_a_wrong_checkpoint_is_refused_by_name(changes, message, assign):
    model = nn.ModuleDict({"proj": Nvfp4Linear(K, N, activation="static")})
    before = stored(model["proj"])
    state = {f"proj.{k}": v for k, v in {**loadable(), **changes}.items()}
    with pytest.raises(RuntimeError, match=f"proj.*{message}"):
        model.load_state_dict(state, assign=assign)
    assert_stored(model["proj"], before)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", STORED)
def test_a_missing_piece_is_named(name, strict):
    state = loadable()
    del state[name]
    with pytest.raises(RuntimeError, match=name):
        Nvfp4Linear(K, N, activation="static").load_state_dict(state, strict=strict)


def test_static_needs_its_input_scale():
    with pytest.raises(RuntimeError, match=r'Missing key.*"input_scale"'):
        Nvfp4Linear(K, N, activation="static").load_state_dict(loadable("dynamic"))


# --- construction


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((30, 8), {}, ValueError, "in_features must be a positive multiple of 16, got 30: pad K"),
        ((0, 8), {}, ValueError, "in_features must be a positive multiple of 16, got 0"),
        ((32, 8), {"activation": "w4a4"}, ValueError, "activation must be one of .*got 'w4a4'"),
        ((32, 8), {"dtype": torch.uint8}, TypeError, "dtype must be float32, bfloat16 or float16"),
    ],
)
def test_constructor_errors(arguments, options, error, message):
    with pytest.raises(error, match=message):
        Nvfp4Linear(*arguments, **options)


def transposed_linear():
    linear = nn.Linear(K, N)
    linear.weight = nn.Parameter(linear.weight.detach().t())
    return linear


@pytest.mark.parametrize(
    ("linear", "options", "error", "message"),
    [
        (lambda: nn.Linear(30, 8), {}, ValueError, "multiple of 16, got 30"),
        (lambda: nn.Conv1d(16, 16, 1), {}, TypeError, "linear must be an nn.Linear, got Conv1d"),
        (
            lambda: nn.Linear(32, 8, dtype=torch.float64),
            {},
            TypeError,
            "linear.weight.dtype must be float32 or bfloat16 or float16, got float64",
        ),
        (lambda: nn.Linear(32, 8, device="meta"), {}, ValueError, "is on the meta device"),
        (
            transposed_linear,
            {},
            ValueError,
            r"must be \(out_features, in_features\) = \(40, 96\), got \(96, 40\): it is transposed",
        ),
        (
            lambda: nn.Linear(32, 8),
            {"input_scale": 0.1},
            ValueError,
            "input_scale needs activation='static', got 'dynamic'",
        ),
        (
            lambda: nn.Linear(32, 8),
            {"activation": "static", "input_scale": torch.tensor(0.1, dtype=torch.bfloat16)},
            TypeError,
            "input_scale.dtype must be float32, got bfloat16",
        ),
        (
            lambda: nn.Linear(32, 8),
            {"activation": "static", "input_scale": 0.0},
            ValueError,
            "input_scale must be finite and > 0",
        ),
        (
            lambda: nn.Linear(32, 8),
            {"activation": "static", "input_scale": torch.ones(2)},
            ValueError,
            "input_scale must have one element",
        ),
    ],
)
def test_from_linear_errors(linear, options, error, message):
    with pytest.raises(error, match=message):
        Nvfp4Linear.from_linear(linear(), **options)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.ones(2, 80), ValueError, r"x must be \(..., 96 = in_features\), got \(2, 80\)"),
        (torch.tensor(1.0), ValueError, r"x must be \(..., 96 = in_features\), got \(\)"),
        (torch.ones(2, K).double(), TypeError, "x.dtype must be float32 or bfloat16 or float16"),
        (torch.ones(2, K, dtype=torch.uint8), TypeError, "got uint8: convert it with .to"),
    ],
)
@pytest.mark.parametrize("activation", MODES)
def test_forward_errors(activation, x, error, message):
    with pytest.raises(error, match=message):
        make(activation)(x)


def test_forward_swiglu_needs_gate_and_up():
    with pytest.raises(ValueError, match=r"gate_up must be \(..., 192 = 2 \* in_features\)"):
        make().forward_swiglu(torch.ones(2, K))


def test_an_unknown_activation_set_later_is_refused():
    layer = make()
    layer.activation = "dynamo"
    with pytest.raises(ValueError, match="activation must be one of"):
        layer(activations(2, K))


def test_a_new_layer_holds_zeros():
    layer = Nvfp4Linear(K, N, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.bias.normal_()
        assert_same_bytes(layer(activations(3, K)), layer.bias.expand(3, N))
    assert Nvfp4Linear(K, N, bias=False)(activations(3, K)).count_nonzero() == 0


def test_repr():
    expected = "Nvfp4Linear(in_features=96, out_features=40, bias=True, activation='static')"
    assert repr(make("static")) == expected


# --- calibration


def test_calibration_takes_the_amax_over_every_call(device):
    model = nn.Sequential(
        Nvfp4Linear.from_linear(nn.Linear(K, 48), activation="static"),
        nn.ReLU(),
        Nvfp4Linear.from_linear(nn.Linear(48, 16), activation="static"),
    ).to(device)
    batches = [activations(3, K, seed=seed, device=device) for seed in range(3)]
    batches[1] *= 4  # the largest is neither the first nor the last
    batches[1][0, 5] = torch.inf  # is not counted
    seen = [[], []]
    model[0].register_forward_pre_hook(lambda _, args: seen[0].append(args[0]))
    model[2].register_forward_pre_hook(lambda _, args: seen[1].append(args[0]))
    with torch.no_grad(), calibrate(model):
        for batch in batches:
            model(batch)
    for layer, inputs in ((model[0], seen[0]), (model[2], seen[1])):
        assert_same_bytes(layer.input_scale, ops.global_scale(torch.cat(inputs)))
    y = model(activations(3, K, device=device))
    assert torch.isfinite(y).all()


def test_calibration_of_swiglu_input():
    layer = Nvfp4Linear.from_linear(nn.Linear(K, N), activation="static")
    gate_up = activations(3, 2 * K)
    with calibrate(layer):
        layer.forward_swiglu(gate_up)
    gate, up = gate_up.float().chunk(2, dim=-1)
    assert_same_bytes(layer.input_scale, ops.global_scale(F.silu(gate) * up))


def test_calibration_with_zeros_and_nothing_else():
    layer = Nvfp4Linear.from_linear(nn.Linear(K, N), activation="static")
    with calibrate(layer):
        layer(torch.zeros(3, K))
        layer(torch.zeros(0, K))
    assert layer.input_scale == 1.0


def test_calibration_runs_as_dynamic():
    layer, dynamic = make("static"), make("dynamic")
    with calibrate(layer):
        assert_same_bytes(layer(activations(3, K)), dynamic(activations(3, K)))


def test_calibration_names_the_layers_it_never_saw():
    model = nn.ModuleDict({"used": make("static"), "idle": make("static")})
    with pytest.warns(UserWarning, match="not calibrated, never called: idle"), calibrate(model):
        model["used"](activations(3, K))
    assert model["idle"].input_scale == torch.tensor(INPUT_SCALE)


def test_a_failed_calibration_sets_nothing():
    layer = make("static")
    with pytest.raises(ZeroDivisionError), calibrate(layer):
        layer(activations(3, K))
        _ = 1 / 0
    assert layer.input_scale == torch.tensor(INPUT_SCALE)
    assert_same_bytes(layer(activations(3, K)), make("static")(activations(3, K)))


def test_calibration_needs_a_static_layer():
    with (
        pytest.raises(ValueError, match="no Nvfp4Linear with activation='static'"),
        calibrate(make()),
    ):
        pass


def test_an_uncalibrated_layer_is_loud(device):
    layer = Nvfp4Linear.from_linear(nn.Linear(K, N), activation="static").to(device)
    x = activations(3, K, device=device)
    if device == "cpu":  # the host sees the NaN
        with pytest.raises(ValueError, match="global_scale must be finite and > 0, got nan"):
            layer(x)
    else:
        assert layer(x).isnan().all()


# --- gradients: of the decoded weight, straight through the activation's quantization


def dense_twin(layer, x, *, swiglu=False):
    """y of the same layer in FP32 with the decoded weight, differentiable in x and bias."""
    x = x.float()
    if swiglu:
        gate, up = x.chunk(2, dim=-1)
        x = F.silu(gate) * up
    return x @ layer.dequantize().t() + layer.bias.float()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("activation", MODES)
def test_gradients(device, activation, swiglu, compiled):
    layer = make(activation, device=device)
    x = activations(2, 3, 2 * K if swiglu else K, dtype=torch.float32, device=device)
    x.requires_grad_()
    grad = activations(2, 3, N, dtype=torch.float32, seed=7, device=device)
    expected = torch.autograd.grad(dense_twin(layer, x, swiglu=swiglu), (x, layer.bias), grad)

    call = layer.forward_swiglu if swiglu else layer.forward
    with torch.no_grad():
        plain = call(x)
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    y = call(x)
    assert_same_bytes(y.detach(), plain)  # grad mode changes no output
    got = torch.autograd.grad(y, (x, layer.bias), grad)
    # the same FP32 products, summed in another order
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("swiglu", [False, True])
def test_gradients_in_16_bits(device, swiglu, dtype):
    layer = make("dynamic", dtype=dtype, device=device)
    x = activations(5, 2 * K if swiglu else K, dtype=dtype, device=device).requires_grad_()
    grad = activations(5, N, dtype=dtype, seed=7, device=device)
    twin = dense_twin(layer, x, swiglu=swiglu)
    expected = torch.autograd.grad(twin, (x, layer.bias), grad.float())
    y = layer.forward_swiglu(x) if swiglu else layer(x)
    got = torch.autograd.grad(y, (x, layer.bias), grad)
    assert got[0].dtype == got[1].dtype == dtype
    # the weight and each result are rounded to BF16 (2⁻⁹) where the twin's are FP32
    torch.testing.assert_close(got[0].float(), expected[0].float(), rtol=2**-5, atol=2**-5)
    torch.testing.assert_close(got[1].float(), expected[1].float(), rtol=2**-8, atol=2**-8)


def test_only_what_requires_grad_gets_one(device):
    layer = make(device=device)
    x = activations(3, K, device=device)
    layer(x).float().sum().backward()
    assert x.grad is None
    assert torch.equal(layer.bias.grad, torch.full((N,), 3.0, device=device))
    layer.requires_grad_(False)
    assert not layer(x).requires_grad
    x.requires_grad_()
    layer(x).float().sum().backward()
    assert x.grad is not None
    assert all(not t.requires_grad for t in layer.buffers())


def test_gradient_with_no_rows(device):
    layer = make(device=device)
    x = activations(2, 0, K, device=device).requires_grad_()
    layer(x).float().sum().backward()
    assert x.grad.shape == x.shape
    assert layer.bias.grad.count_nonzero() == 0


def test_gradient_flows_through_a_stack(device):
    model = nn.Sequential(make(n=K), nn.GELU(), make(activation="none")).to(device)
    x = activations(3, K, device=device).requires_grad_()
    model(x).float().sum().backward()
    assert torch.isfinite(x.grad).all()
    assert x.grad.count_nonzero() > 0
    assert model[0].bias.grad is not None


def test_second_derivative_of_the_linear_part():
    """dY · W is linear in dY: its own gradient with respect to dY is the weight again."""
    layer = make(k=16, n=8)
    x = activations(2, 16, dtype=torch.float32).requires_grad_()
    grad = torch.ones(2, 8, requires_grad=True)
    (first,) = torch.autograd.grad(layer(x), x, grad, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), grad)
    # sums of 16 FP32 terms in another order
    torch.testing.assert_close(second, layer.dequantize().sum(1).expand(2, 8), rtol=1e-5, atol=1e-6)


def test_no_warning_from_autograd():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = activations(3, K).requires_grad_()
        make()(x).float().sum().backward()
