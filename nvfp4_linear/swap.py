"""`swap_linears`: replaces the ``nn.Linear``s of a model by `Nvfp4Linear`, in place, and reports.

Every replacement is built before the first is assigned: an error leaves the model as it was. A
layer that can't go is skipped, and the report says why, layer by layer.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from .arguments import BLOCK_SIZE, DENSE_DTYPES
from .linear import ACTIVATIONS, Nvfp4Linear

Rule = str | Callable[[str, nn.Module], bool]
Rules = Rule | Iterable[Rule] | None

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@dataclass(frozen=True)
class LayerRecord:
    """What became of one linear layer.

    name: qualified name. action: "swapped" or "skipped". reason: why skipped, or what else there
    is to know. bytes_before/after: parameters and buffers of the layer (after: with the swizzled
    copy of the scales that the GEMM reads); 0 for a second name of a layer already counted.
    sqnr_db: signal to quantization noise of the weight, in dB; inf where nothing was lost.
    """

    name: str
    action: str
    reason: str = ""
    in_features: int = 0
    out_features: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    sqnr_db: float | None = None


@dataclass(frozen=True)
class SwapReport:
    """Every linear layer of the model, in its order, and what became of it."""

    records: tuple[LayerRecord, ...]
    activation: str
    notes: tuple[str, ...] = field(default=())

    @property
    def swapped(self) -> tuple[LayerRecord, ...]:
        return tuple(r for r in self.records if r.action == "swapped")

    @property
    def skipped(self) -> tuple[LayerRecord, ...]:
        return tuple(r for r in self.records if r.action == "skipped")

    @property
    def bytes_before(self) -> int:
        """Of all linear layers, skipped ones included."""
        return sum(r.bytes_before for r in self.records)

    @property
    def bytes_after(self) -> int:
        return sum(r.bytes_after for r in self.records)

    def to_dict(self) -> dict:
        """For JSON: an infinite SQNR becomes None."""
        records = []
        for record in self.records:
            values = asdict(record)
            if values["sqnr_db"] is not None and not math.isfinite(values["sqnr_db"]):
                values["sqnr_db"] = None
            records.append(values)
        return {
            "activation": self.activation,
            "swapped": len(self.swapped),
            "skipped": len(self.skipped),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "notes": list(self.notes),
            "layers": records,
        }

    def __str__(self) -> str:
        head = ("layer", "", "in", "out", "bytes before", "after", "SQNR dB", "")
        rows = [head]
        for r in self.records:
            sqnr = "" if r.sqnr_db is None else f"{r.sqnr_db:.1f}"
            sizes = (f"{r.in_features:,}", f"{r.out_features:,}")
            traffic = (f"{r.bytes_before:,}", f"{r.bytes_after:,}")
            rows.append((r.name, r.action, *sizes, *traffic, sqnr, r.reason))
        totals = (f"{self.bytes_before:,}", f"{self.bytes_after:,}")
        rows.append(("total", "", "", "", *totals, "", ""))
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = []
        for row in rows:
            cells = [
                cell.ljust(width) if i in (0, 1, 7) else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        lines.append(
            f"{len(self.swapped)} swapped, {len(self.skipped)} skipped, "
            f"activation {self.activation!r}"
        )
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def swap_linears(
    model: nn.Module,
    *,
    include: Rules = None,
    exclude: Rules = None,
    activation: str = "dynamic",
    progress: bool | None = None,
) -> SwapReport:
    """Replaces the ``nn.Linear``s inside `model` by `Nvfp4Linear`, in place.

    include, exclude: glob patterns on qualified names (``"encoder.*"``, ``"*.lm_head"``), callables
    ``(name, module) -> bool``, or lists of them. A layer goes if include (all, where None) takes
    it and exclude does not.
    activation: as in `Nvfp4Linear`; after "static" comes `calibrate`.
    progress: a progress bar; None shows one on a terminal.

    Skipped with a reason: excluded layers; a weight whose memory another module uses (tied
    embeddings); K % 16 ≠ 0; a weight that is not float32, bfloat16 or float16, or on the meta
    device; parametrized or hooked layers; layers whose owner or subclass reads the weight itself.
    A layer that stands in several places is swapped once and stays shared. Biases stay the same
    parameters.

    Raises TypeError if `model` is no module; ValueError if `model` is itself an ``nn.Linear``, or
    for an unknown activation.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.Linear):
        raise ValueError(
            "model is itself an nn.Linear, which cannot be replaced in place: use "
            "Nvfp4Linear.from_linear(model)"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")

    places = _linear_places(model)
    selection = _Selection(include, exclude)
    reasons = _reasons_to_skip(model, places, selection)
    replacements = {}
    chosen = [linear for linear in places if linear not in reasons]
    for linear in _progress(chosen, progress):
        replacements[linear] = _replace(linear, activation)

    for linear, (layer, _) in replacements.items():
        for parent, child, _ in places[linear]:
            setattr(parent, child, layer)
    records = _records(model, places, reasons, replacements)
    return SwapReport(records, activation, selection.notes())


Place = tuple[nn.Module, str, str]  # parent, the child's name in it, its qualified name
_LINEAR_TYPES = (nn.Linear, Nvfp4Linear)


def _linear_places(model: nn.Module) -> dict[nn.Module, list[Place]]:
    """Every linear layer, dense or swapped, with every place where it stands, in model order."""
    modules = dict(model.named_modules(remove_duplicate=False))
    places: dict[nn.Module, list[Place]] = {}
    for name, module in modules.items():
        if name and isinstance(module, _LINEAR_TYPES):
            parent, _, child = name.rpartition(".")
            places.setdefault(module, []).append((modules[parent], child, name))
    return places


class _Selection:
    """include and exclude, and which of their patterns never matched."""

    def __init__(self, include: Rules, exclude: Rules) -> None:
        self.include = None if include is None else _as_rules("include", include)
        self.exclude = [] if exclude is None else _as_rules("exclude", exclude)
        self.unmatched = {
            (kind, rule): None
            for kind, rules in (("include", self.include or []), ("exclude", self.exclude))
            for rule in rules
            if isinstance(rule, str)
        }

    def refusal(self, name: str, module: nn.Module) -> str | None:
        """Why this name is not to be swapped, or None."""
        excluding = self._matches("exclude", self.exclude, name, module)
        including = self.include is None or self._matches("include", self.include, name, module)
        if excluding:
            rule = excluding[0]
            return f"excluded by {rule!r}" if isinstance(rule, str) else "excluded by a callable"
        return None if including else "not included"

    def _matches(self, kind: str, rules: list[Rule], name: str, module: nn.Module) -> list[Rule]:
        hits = []
        for rule in rules:
            if fnmatchcase(name, rule) if isinstance(rule, str) else rule(name, module):
                hits.append(rule)
                self.unmatched.pop((kind, rule), None)
        return hits

    def notes(self) -> tuple[str, ...]:
        return tuple(f"{kind} {rule!r} matched no linear layer" for kind, rule in self.unmatched)


def _as_rules(name: str, rules: Rules) -> list[Rule]:
    listed = [rules] if isinstance(rules, str) or callable(rules) else list(rules)
    for rule in listed:
        if not isinstance(rule, str) and not callable(rule):
            raise TypeError(
                f"{name} must hold glob patterns or callables (name, module) -> bool, got "
                f"{type(rule).__name__}"
            )
    return listed


def _reasons_to_skip(
    model: nn.Module, places: dict[nn.Module, list[Place]], selection: _Selection
) -> dict[nn.Module, str]:
    tied = _tied_weights(model)
    reasons = {}
    for linear, where in places.items():
        refusals = [selection.refusal(name, linear) for _, _, name in where]
        reason = next((r for r in refusals if r), None)
        if reason is not None and not all(refusals):
            refused = where[refusals.index(reason)][2]
            reason = f"shared with {refused}, which is {reason}"
        reason = reason or _unfit(linear) or tied.get(id(linear))
        reason = reason or next((r for parent, _, _ in where if (r := _owner_reads(parent))), None)
        if reason:
            reasons[linear] = reason
    return reasons


def _unfit(linear: nn.Module) -> str | None:
    """Why this layer itself cannot be replaced, or None."""
    if isinstance(linear, Nvfp4Linear):
        return "already an Nvfp4Linear"
    kind = type(linear)
    if parametrize.is_parametrized(linear):
        return f"parametrized ({', '.join(linear.parametrizations)})"
    if isinstance(linear, NonDynamicallyQuantizableLinear):
        return f"{kind.__name__}: its owner reads the weight directly"
    if kind.forward is not nn.Linear.forward or "forward" in vars(linear):
        return f"{kind.__name__} has a forward of its own"
    hooks = [name.strip("_") for name in _HOOKS if getattr(linear, name)]
    if hooks:
        return f"has {', '.join(hooks)}"
    weight = linear.weight
    if weight.dtype not in DENSE_DTYPES:
        return f"weight is {str(weight.dtype).removeprefix('torch.')}"
    if weight.is_meta:
        return "weight is on the meta device"
    if linear.bias is not None and linear.bias.dtype not in DENSE_DTYPES:
        return f"bias is {str(linear.bias.dtype).removeprefix('torch.')}"
    if tuple(weight.shape) != (linear.out_features, linear.in_features):
        return f"weight is {tuple(weight.shape)}, not (out_features, in_features)"
    if linear.in_features % BLOCK_SIZE or not weight.numel():
        return f"K = {linear.in_features} is no multiple of {BLOCK_SIZE}"
    return None


def _owner_reads(parent: nn.Module) -> str | None:
    """Why a child's weight is read without its forward being called, or None."""
    if isinstance(parent, nn.MultiheadAttention):
        return "read directly by nn.MultiheadAttention"
    if isinstance(parent, nn.TransformerEncoderLayer) and torch.backends.mha.get_fastpath_enabled():
        return (
            "read directly by the fast path of nn.TransformerEncoderLayer "
            "(torch.backends.mha.set_fastpath_enabled(False) turns it off)"
        )
    return None


def _tied_weights(model: nn.Module) -> dict[int, str]:
    """id of a module → whom its weight shares memory with.

    Address ranges are compared, not storages: one storage may hold a whole checkpoint.
    """
    ranges = []
    for prefix, module in model.named_modules():
        named = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in named:
            if tensor.layout == torch.strided and tensor.numel() and not tensor.is_meta:
                begin, end = _address_range(tensor)
                full = f"{prefix}.{name}" if prefix else name
                ranges.append((str(tensor.device), begin, end, module, name, full))
    ranges.sort(key=lambda r: r[:3])

    tied: dict[int, str] = {}
    group: list[tuple] = []
    for entry in [*ranges, None]:
        if group and (
            entry is None or entry[0] != group[0][0] or entry[1] >= max(r[2] for r in group)
        ):
            _name_ties(group, tied)
            group = []
        if entry is not None:
            group.append(entry)
    return tied


def _address_range(tensor: Tensor) -> tuple[int, int]:
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size()


def _name_ties(group: list[tuple], tied: dict[int, str]) -> None:
    for _, _, _, module, name, _ in group:
        others = [full for *_, other, _, full in group if other is not module]
        if name == "weight" and others:
            tied[id(module)] = f"weight is tied to {', '.join(others)}"


def _replace(linear: nn.Linear, activation: str) -> tuple[Nvfp4Linear, float]:
    """The replacement, and the SQNR of its weight in dB."""
    layer = Nvfp4Linear.from_linear(linear, activation=activation)
    layer.bias = linear.bias  # the same parameter: an optimizer may hold it
    weight = linear.weight.detach().float()
    noise = float((weight - layer.dequantize()).square().sum(dtype=torch.float64))
    signal = float(weight.square().sum(dtype=torch.float64))
    return layer, 10 * math.log10(signal / noise) if signal and noise else math.inf


def _progress(layers: list[nn.Module], show: bool | None) -> Iterable[nn.Module]:
    if show is None:
        show = sys.stderr.isatty()
    if not show:
        return layers
    from tqdm import tqdm

    return tqdm(layers, desc="quantizing", unit="layer")


def _bytes(module: nn.Module) -> int:
    tensors = [*module.parameters(), *module.buffers()]
    if isinstance(module, Nvfp4Linear):
        tensors.append(module._swizzled_scale())
    return sum(t.numel() * t.element_size() for t in tensors)


def _records(
    model: nn.Module,
    places: dict[nn.Module, list[Place]],
    reasons: dict[nn.Module, str],
    replacements: dict[nn.Module, tuple[Nvfp4Linear, float]],
) -> tuple[LayerRecord, ...]:
    records = []
    for linear, where in places.items():
        layer, sqnr = replacements.get(linear, (linear, None))
        for i, (_, _, name) in enumerate(where):
            reason = reasons.get(linear, "")
            if i:
                reason = "; ".join(filter(None, (reason, f"the same layer as {where[0][2]}")))
            records.append(
                LayerRecord(
                    name=name,
                    action="skipped" if linear in reasons else "swapped",
                    reason=reason,
                    in_features=linear.in_features,
                    out_features=linear.out_features,
                    bytes_before=0 if i else _bytes(linear),
                    bytes_after=0 if i else _bytes(layer),
                    sqnr_db=sqnr,
                )
            )
    return tuple(records)
