"""`Nvfp4Linear`: a linear layer whose weight is NVFP4, and whose activation may be.

    y = out( alpha · Q(x) · Wᵀ + bias )      alpha = g_x · weight_scale_2, on the device, no sync

    activation   Q(x)                                                          g_x
    "dynamic"    quantize(x, g_x)                                              global_scale(x)
    "static"     quantize(x, g_x)                                              input_scale
    "unit"       quantize(x)                                                   1
    "none"       x as it is (weight only); float32 x is rounded to bfloat16    1

Out is x's dtype, and autocast's where autocast is on. The weight is kept as ModelOpt names and lays
it out, so its checkpoints load with ``load_state_dict``:

    weight           uint8 (N, K/2), even K index in the low nibble
    weight_scale     float8_e4m3fn (N, K/16), row-major
    weight_scale_2   FP32 (), decode direction: amax / 2688
    input_scale      FP32 (), decode direction; used by "static", otherwise kept as it was loaded
    bias             (N,) float32, bfloat16 or float16

``.to(dtype)``, ``.half()``, autocast and ``deepcopy`` change none of the four above the bias. The
GEMM reads a swizzled copy of weight_scale, which is made from it and never saved.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import ops
from .arguments import (
    BLOCK_SIZE,
    CODES_PER_BYTE,
    DENSE_DTYPES,
    TILE_COLS,
    TILE_ROWS,
    check_bias,
    check_dense,
    check_packed,
    check_scalar,
    check_scale,
    round_up,
)

ACTIVATIONS = ("dynamic", "static", "unit", "none")
E2M1_E4M3_MAX = 6.0 * 448.0
GLOBAL_SCALE_MIN = 2.0**-126

_ops = torch.ops.nvfp4


def _swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up in FP32: (..., 2K) → (..., K)."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return F.silu(gate) * up


def _linear(
    x: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    swizzled_scale: Tensor,
    weight_scale_2: Tensor,
    input_scale: Tensor | None,
    activation: str,
    swiglu: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """All four activations; x is gate_up where `swiglu`."""
    if activation == "none":
        # The GEMM takes 16-bit activations. BF16 has FP32's range, and its rounding (2⁻⁹) is far
        # below that of the 4-bit weight.
        dense = torch.bfloat16 if out_dtype == torch.float32 else out_dtype
        x = (_swiglu(x) if swiglu else x).to(dense)
        return _ops.gemm_a16w4(x, weight, swizzled_scale, weight_scale_2, bias, out_dtype)
    g = None
    if activation == "static":
        g = input_scale
    elif activation == "dynamic":
        g = _ops.swiglu_global_scale(x) if swiglu else _ops.global_scale(x)
    data, block_scale = _ops.swiglu_quantize(x, g) if swiglu else _ops.quantize(x, g)
    alpha = weight_scale_2 if g is None else g * weight_scale_2
    return _ops.gemm(data, weight, block_scale, swizzled_scale, alpha, bias, out_dtype)


class _Linear(torch.autograd.Function):
    """`_linear` with its gradients: straight through the quantization of the activation.

    x.grad = dY · W with W decoded; through SwiGLU, in FP32, from the saved gate_up.
    """

    @staticmethod
    def forward(ctx, x, bias, weight, swizzled_scale, weight_scale_2, *rest):
        swiglu = rest[2]
        ctx.save_for_backward(weight, swizzled_scale, weight_scale_2, x if swiglu else None)
        ctx.x_dtype = x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _linear(x, bias, weight, swizzled_scale, weight_scale_2, *rest)

    @staticmethod
    def backward(ctx, grad):
        weight, swizzled_scale, weight_scale_2, gate_up = ctx.saved_tensors
        x_grad = bias_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = ops.input_gradient(grad, weight, swizzled_scale, weight_scale_2, ctx.x_dtype)
            if gate_up is not None:
                x_grad = _swiglu_gradient(x_grad, gate_up)
        if ctx.needs_input_grad[1]:
            bias_grad = ops.bias_gradient(grad, ctx.bias_dtype)
        return x_grad, bias_grad, None, None, None, None, None, None, None


def _swiglu_gradient(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient of `_swiglu` in FP32, in gate_up's dtype: (..., K) → (..., 2K)."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    grad, sigmoid = grad.float(), torch.sigmoid(gate)
    gate_grad = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((gate_grad, grad * gate * sigmoid), dim=-1).to(gate_up.dtype)


def _version(tensor: Tensor) -> int:
    """How often the tensor has been written to; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


class Nvfp4Linear(nn.Module):
    """``y = x · Wᵀ + bias`` with an NVFP4 weight: see the top of this file for its contract.

    in_features: K, a multiple of 16. out_features: N. activation: "dynamic", "static", "unit" or
    "none". dtype: the bias's (the default dtype if None); the weight has none to choose.

    A new layer holds zeros (and, for "static", a NaN input_scale) until it is loaded:
    `from_linear` makes one from an ``nn.Linear``, ``load_state_dict`` from a checkpoint.

    Gradients: bias.grad = Σ_rows dY, x.grad = dY · W, straight through the quantization. The
    weight is a constant.

    Raises ValueError for K % 16 ≠ 0 or an unknown activation.
    """

    weight: Tensor
    weight_scale: Tensor
    weight_scale_2: Tensor
    input_scale: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: str = "dynamic",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if in_features <= 0 or in_features % BLOCK_SIZE:
            raise ValueError(
                f"in_features must be a positive multiple of {BLOCK_SIZE}, got {in_features}: pad "
                f"K of the weight and of its input, or keep this layer dense"
            )
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in DENSE_DTYPES:
            raise TypeError(f"dtype must be float32, bfloat16 or float16 (the bias's), got {dtype}")
        self.in_features, self.out_features = in_features, out_features
        self.activation = activation

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        n, k = out_features, in_features
        self.register_buffer("weight", zeros((n, k // CODES_PER_BYTE), torch.uint8))
        self.register_buffer("weight_scale", zeros((n, k // BLOCK_SIZE), torch.float8_e4m3fn))
        self.register_buffer("weight_scale_2", zeros((), torch.float32).fill_(1.0))
        # NaN, so that a layer that was never calibrated answers NaN and not something plausible.
        uncalibrated = zeros((), torch.float32).fill_(math.nan) if activation == "static" else None
        self.register_buffer("input_scale", uncalibrated)
        self.register_parameter("bias", nn.Parameter(zeros((n,), dtype)) if bias else None)
        # weight_scale as it was swizzled, its version then, and the swizzled copy.
        self._swizzled: tuple[Tensor | None, int, Tensor | None] = (None, 0, None)
        self._observed_amax: Tensor | None = None
        self._calibrating = False

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        activation: str = "dynamic",
        input_scale: Tensor | float | None = None,
    ) -> Nvfp4Linear:
        """Quantizes the weight of `linear` with its dynamic global scale; the bias is copied.

        input_scale: for "static" only: FP32 of one element, or a number; without it the layer
        answers NaN until `calibrate` has set it.

        Raises TypeError for anything but an ``nn.Linear`` with a float32, bfloat16 or float16
        weight; ValueError for K % 16 ≠ 0, a weight that is not (N, K), or one on the meta device.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(
                f"linear must be an nn.Linear, got {type(linear).__name__}: give it an nn.Linear "
                f"whose weight is (out_features, in_features)"
            )
        weight = linear.weight.detach()
        check_dense("linear.weight", weight)
        expected = (linear.out_features, linear.in_features)
        if tuple(weight.shape) != expected:
            hint = ": it is transposed" if tuple(weight.shape) == expected[::-1] else ""
            raise ValueError(
                f"linear.weight must be (out_features, in_features) = {expected}, got "
                f"{tuple(weight.shape)}{hint}"
            )
        if weight.is_meta:
            raise ValueError(
                "linear.weight is on the meta device, it has no values to quantize: load it first, "
                "or build Nvfp4Linear(..., device='meta') and load an NVFP4 checkpoint"
            )
        if input_scale is not None and activation != "static":
            raise ValueError(f"input_scale needs activation='static', got {activation!r}")
        n, k = expected
        layer = cls(k, n, bias=False, activation=activation, device="meta")
        layer.weight_scale_2 = _ops.global_scale(weight)
        layer.weight, layer.weight_scale = _ops.quantize(
            weight, layer.weight_scale_2, swizzled=False
        )
        if linear.bias is not None:
            check_bias(linear.bias)
            copied = linear.bias.detach().clone()
            layer.bias = nn.Parameter(copied, requires_grad=linear.bias.requires_grad)
        if activation == "static":
            layer.input_scale = torch.full((), math.nan, dtype=torch.float32, device=weight.device)
        if input_scale is not None:
            layer.input_scale = _fp32_scalar("input_scale", input_scale).to(weight.device)
        layer._refresh()
        return layer.train(linear.training)

    # ------------------------------------------------------------------------------- forward

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., K) float32, bfloat16 or float16 → (..., N) in x's dtype (autocast's if on)."""
        return self._run("x", x, swiglu=False)

    def forward_swiglu(self, gate_up: Tensor) -> Tensor:
        """``forward(silu(gate) · up)`` with the fused producer: h is FP32, rounded only to NVFP4.

        gate_up: (..., 2K) = [gate | up] float32, bfloat16 or float16 → (..., N).

        "static", "unit" and "dynamic" never write h; "dynamic", which needs its amax first, computes
        it twice. "none" has no producer: h is computed in FP32 and rounded to x's dtype.
        """
        return self._run("gate_up", gate_up, swiglu=True)

    def _run(self, name: str, x: Tensor, *, swiglu: bool) -> Tensor:
        check_dense(name, x)
        expected = 2 * self.in_features if swiglu else self.in_features
        if x.dim() == 0 or x.shape[-1] != expected:
            what = "2 * in_features" if swiglu else "in_features"
            raise ValueError(f"{name} must be (..., {expected} = {what}), got {tuple(x.shape)}")
        if x.dim() == 1:
            return self._run(name, x[None], swiglu=swiglu)[0]
        if self._calibrating:
            self._observe(_swiglu(x) if swiglu else x)
        out_dtype = x.dtype
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):  # meta has no autocast
            out_dtype = torch.get_autocast_dtype(x.device.type)
        arguments = (
            x,
            self.bias,
            self.weight,
            self._swizzled_scale(),
            self.weight_scale_2,
            self.input_scale,
            "dynamic" if self._calibrating else self._checked_activation(),
            swiglu,
            out_dtype,
        )
        bias_learns = self.bias is not None and self.bias.requires_grad
        if torch.is_grad_enabled() and (x.requires_grad or bias_learns):
            return _Linear.apply(*arguments)
        return _linear(*arguments)

    def _checked_activation(self) -> str:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {ACTIVATIONS}, got {self.activation!r}")
        if self.activation == "static" and self.input_scale is None:
            raise ValueError(
                "activation is 'static' but input_scale is None: load one, or build the layer with "
                "activation='static' and use calibrate()"
            )
        return self.activation

    def _swizzled_scale(self) -> Tensor:
        """The swizzled copy, made anew if weight_scale was replaced or written to meanwhile."""
        source, version, swizzled = self._swizzled
        replaced = source is not self.weight_scale
        if torch.compiler.is_compiling():
            # A tracer must not keep what it makes. It sees a replaced weight_scale, but not one
            # written in place since the last eager call.
            return _ops.swizzle_scales(self.weight_scale) if replaced else swizzled
        return self._refresh() if replaced or version != _version(source) else swizzled

    def _refresh(self) -> Tensor:
        scale = self.weight_scale
        swizzled = _ops.swizzle_scales(scale)
        self._swizzled = (scale, _version(scale), swizzled)
        return swizzled

    # ---------------------------------------------------------------------------- conversions

    def dequantize(self, out_dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight as the GEMM sees it: (N, K) in out_dtype, rounded once."""
        return ops.dequantize(
            self.weight,
            self.weight_scale,
            self.weight_scale_2,
            swizzled=False,
            out_dtype=out_dtype,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Nvfp4Linear:
        """What ``.to()``, ``.half()``, ``.cuda()`` and their like call: buffers move, no more."""
        buffers = {id(buffer) for buffer in self._buffers.values() if buffer is not None}

        def keep_bytes(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if id(tensor) in buffers and moved.dtype != tensor.dtype:
                return tensor.to(moved.device)
            return moved

        super()._apply(keep_bytes, recurse)
        if self._swizzled[0] is not self.weight_scale:
            self._refresh()
        return self

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        problems = self._normalize(state_dict, prefix)
        if problems:
            error_msgs.extend(problems)
            return
        loaded = state_dict.get(prefix + "input_scale")
        if loaded is None and self.activation != "static":
            self.input_scale = None
        elif loaded is not None and self.input_scale is None:
            self.input_scale = torch.empty((), dtype=torch.float32, device=self.weight.device)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._refresh()

    def _normalize(self, state_dict: dict, prefix: str) -> list[str]:
        """Brings (1,) scalars to () and float4 data to uint8; gives what is wrong with the rest.

        Plain loading would convert a wrong dtype by value: 0x7E would become the scale 126.
        """
        problems = []
        for name, check in (
            ("weight", self._check_weight),
            ("weight_scale", self._check_weight_scale),
            ("weight_scale_2", _check_decode_scale),
            ("input_scale", _check_decode_scale),
        ):
            value = state_dict.get(prefix + name)
            if value is None:
                continue
            try:
                state_dict[prefix + name] = check(prefix + name, value)
            except (TypeError, ValueError) as error:
                problems.append(str(error))
        own = [prefix + name for name in ("weight", "weight_scale", "weight_scale_2")]
        missing = [name for name in own if name not in state_dict]
        if 0 < len(missing) < len(own):
            problems.append(f"{', '.join(missing)} missing: an NVFP4 weight is {', '.join(own)}")
        return problems

    def _check_weight(self, name: str, value: Tensor) -> Tensor:
        if value.dtype in DENSE_DTYPES:
            raise TypeError(
                f"{name} is {value.dtype}, a dense weight, where packed uint8 is expected: load it "
                f"into nn.Linear and convert with Nvfp4Linear.from_linear or swap_linears"
            )
        check_packed(name, value)
        expected = (self.out_features, self.in_features // CODES_PER_BYTE)
        if tuple(value.shape) != expected:
            hint = ", it is transposed" if tuple(value.shape) == expected[::-1] else ""
            raise ValueError(
                f"{name} must be (N, K/2) = {expected}, got {tuple(value.shape)}{hint}: check the "
                f"layer's in_features and out_features, and which library wrote the checkpoint"
            )
        return value if value.dtype == torch.uint8 else value.view(torch.uint8)

    def _check_weight_scale(self, name: str, value: Tensor) -> Tensor:
        check_scale(name, value)
        n, cols = self.out_features, self.in_features // BLOCK_SIZE
        if tuple(value.shape) != (n, cols):
            padded = (round_up(n, TILE_ROWS), round_up(cols, TILE_COLS))
            hint = "check which library wrote the checkpoint"
            if tuple(value.shape) == padded:
                hint = f"it has the swizzled shape: unswizzle_scales(scales, {n}, {cols}) undoes it"
            raise ValueError(
                f"{name} must be row-major (N, K/16) = {(n, cols)}, got {tuple(value.shape)}: {hint}"
            )
        return value

    def __getstate__(self) -> dict:
        # pickle knows no float8 storage: the scales travel as the bytes that they are.
        state = self.__dict__.copy()
        state["_buffers"] = {**self._buffers, "weight_scale": self.weight_scale.view(torch.uint8)}
        state["_swizzled"] = (None, 0, None)
        return state

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.weight_scale = self.weight_scale.view(torch.float8_e4m3fn)
        self._refresh()

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, activation={self.activation!r}"
        )

    # ---------------------------------------------------------------------------- calibration

    def _observe(self, x: Tensor) -> None:
        magnitude = x.detach().abs().float()
        magnitude = torch.where(torch.isfinite(magnitude), magnitude, 0.0)
        amax = magnitude.amax() if magnitude.numel() else magnitude.new_zeros(())
        seen = self._observed_amax
        self._observed_amax = amax if seen is None else torch.maximum(seen, amax)


def _fp32_scalar(name: str, value: Tensor | float) -> Tensor:
    """A usable 0-d FP32 tensor of its own."""
    if not isinstance(value, Tensor):
        value = torch.tensor(float(value), dtype=torch.float32)
    return _check_decode_scale(name, value).detach().clone()


def _check_decode_scale(name: str, value: Tensor) -> Tensor:
    """`value` as 0-d, if it is FP32 of one element and, where the host can see it, usable."""
    check_scalar(name, value)
    if value.numel() != 1:
        raise ValueError(
            f"{name} must have one element, got shape {tuple(value.shape)}: fused layers (q/k/v, "
            f"gate/up) with one scale each have to be requantized or kept apart"
        )
    if value.device.type == "cpu" and not (math.isfinite(float(value)) and float(value) > 0):
        raise ValueError(
            f"{name} must be finite and > 0 (decode direction, amax / 2688), got {float(value)}"
        )
    return value.reshape(())


@contextmanager
def calibrate(model: nn.Module) -> Iterator[None]:
    """Sets input_scale of every "static" Nvfp4Linear in `model` from the calls made inside.

        with calibrate(model):
            for batch in batches:
                model(batch)

    Inside, these layers run as "dynamic" and keep the amax of what they see, over finite elements;
    on leaving, ``input_scale = max(amax / 2688, 2⁻¹²⁶)`` (1 where all was zero). A layer that saw
    nothing keeps its input_scale, with a warning. Nothing is set if the block raises.

    Raises ValueError where no layer is "static".
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Nvfp4Linear) and module.activation == "static"
    }
    if not layers:
        raise ValueError(
            "no Nvfp4Linear with activation='static' in the model: there is nothing to calibrate"
        )
    for layer in layers.values():
        layer._calibrating, layer._observed_amax = True, None
    try:
        yield
        unseen = [name for name, layer in layers.items() if layer._observed_amax is None]
        for layer in layers.values():
            if layer._observed_amax is not None:
                layer.input_scale = _scale_of_amax(layer._observed_amax)
        if unseen:
            warnings.warn(f"not calibrated, never called: {', '.join(unseen)}", stacklevel=3)
    finally:
        for layer in layers.values():
            layer._calibrating, layer._observed_amax = False, None


def _scale_of_amax(amax: Tensor) -> Tensor:
    # By a tensor: CUDA turns the division by a Python number into a multiplication.
    scale = (amax / torch.full_like(amax, E2M1_E4M3_MAX)).clamp(min=GLOBAL_SCALE_MIN)
    return torch.where(amax > 0, scale, 1.0)
