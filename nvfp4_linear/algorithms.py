"""Which backend and algorithm a GEMM takes, why, and how to have another: explain, pins, backends.

The planner lives in the ops binary; everything here asks the one that ``torch.ops.nvfp4.gemm``
itself uses, so what is explained is what runs.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .pin_file import Algorithm, Pin, PinFileReport, read_pin_file, write_pin_file

RUNGS = ("cublaslt-pinned", "cublaslt-heuristic", "emulated", "cpu")
POLICIES = ("validated", "always", "never")


@dataclass(frozen=True)
class Refusal:
    """One rung that said no, and why, in cuBLASLt's own words where they are its own."""

    rung: str
    reason: str


@dataclass(frozen=True)
class Device:
    """A GPU as the planner sees it; give one to ``explain`` to ask about a chip that isn't here."""

    cc: tuple[int, int]
    sm_count: int
    index: int = 0
    name: str = ""

    def __str__(self) -> str:
        major, minor = self.cc
        where = self.name or f"cuda:{self.index}"
        return f"{where} (compute capability {major}.{minor}, {self.sm_count} multiprocessors)"


@dataclass(frozen=True)
class Plan:
    """What a gemm call would do. ``print`` it, or read the fields.

    rung: the backend that takes the call, None where all refuse. kernel: what runs on it.
    algorithm: cuBLASLt's, where one runs. workspace_bytes: beside the output. refusals: every rung
    above, with its reason. evidence: of the pin, where one was taken.
    """

    m: int
    n: int
    k: int
    device: str
    rung: str | None
    kernel: str
    algorithm: Algorithm | None = None
    workspace_bytes: int = 0
    refusals: tuple[Refusal, ...] = ()
    evidence: str = ""
    details: dict[str, Any] = field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain types for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"gemm m={self.m} n={self.n} k={self.k} on {self.device}"]
        if self.details.get("note"):
            lines.append(f"  note {self.details['note']}")
        lines += [f"  no   {refusal.rung}: {refusal.reason}" for refusal in self.refusals]
        if self.rung is None:
            return "\n".join([*lines, "  no rung takes this call: it raises an error"])
        lines.append(f"  yes  {self.rung}: {self.kernel}")
        if self.algorithm:
            lines.append(f"       algorithm: {self.algorithm}")
        if self.evidence:
            lines.append(f"       evidence: {self.evidence}")
        for refusal in self.details.get("inner_refusals", ()):
            lines.append(f"       inside it, no {refusal['rung']}: {refusal['reason']}")
        return "\n".join([*lines, f"       workspace: {self.workspace_bytes:,} bytes"])


def _control(command: str) -> dict[str, Any]:
    return json.loads(torch.ops.nvfp4._control(command))


def device_of(device: torch.device | str | int | Device | None = None) -> torch.device | Device:
    """A GPU's properties, or ``torch.device("cpu")``. None: the current GPU, else the CPU."""
    if isinstance(device, Device):
        return device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ValueError(f"device must be cpu or cuda, got {device}")
    if not torch.cuda.is_available():
        raise ValueError(
            f"device is {device}, but {_why_no_gpu()}: ask about a Device(cc, sm_count)"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = torch.cuda.get_device_properties(index)
    return Device(
        cc=(properties.major, properties.minor),
        sm_count=properties.multi_processor_count,
        index=index,
        name=f"cuda:{index} {properties.name}",
    )


def _why_no_gpu() -> str:
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is a CPU build"
    return "torch sees no CUDA GPU"


def explain(
    m: int,
    n: int,
    k: int,
    *,
    device: torch.device | str | int | Device | None = None,
    activation: str = "nvfp4",
    weight: str = "nvfp4",
    out_dtype: torch.dtype = torch.bfloat16,
    bias_dtype: torch.dtype | None = None,
    alpha_on_device: bool = False,
) -> Plan:
    """What ``torch.ops.nvfp4.gemm`` does for this problem, and why not something faster.

    m, n, k: logical sizes of D (m, n) = A (m, k) . B (n, k)^T; k % 16 == 0. device: None is the
    current GPU, or the CPU where there is none; a ``Device`` asks about another chip (cuBLASLt
    itself needs a GPU to answer; without one its refusal says so). activation: "nvfp4", or
    "bfloat16"/"float16" for ``gemm_a16w4``; weight: the same for ``gemm_a4w16``. alpha_on_device: alpha is a CUDA tensor.

    Raises ValueError for sizes or names that no gemm takes.
    """
    for argument, type in (("activation", activation), ("weight", weight)):
        if type not in ("nvfp4", "bfloat16", "float16"):
            raise ValueError(f"{argument} must be nvfp4, bfloat16 or float16, got {type!r}")
    if "nvfp4" not in (activation, weight):
        raise ValueError(
            f"activation or weight must be nvfp4, got {activation!r} and {weight!r}: torch's own "
            f"linear takes two dense operands"
        )
    where = device_of(device)
    if isinstance(where, torch.device):
        needs = "the operands are on the CPU: it needs CUDA operands"
        refused = tuple(Refusal(rung, needs) for rung in RUNGS[:-1])
        forced = _control("backend")["forced"] or "cpu"
        if m < 0 or n < 0 or k <= 0 or k % 16:
            raise ValueError(
                f"m, n >= 0 and k a positive multiple of 16 expected, got {m}, {n}, {k}"
            )
        if forced != "cpu":
            refused += (Refusal("cpu", f"NVFP4_BACKEND={forced} forces another rung"),)
            return Plan(m, n, k, "cpu", None, "none", refusals=refused)
        return Plan(m, n, k, "cpu", "cpu", "exact GEMM, rounded once", refusals=refused)
    name = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
    for argument, dtype in (("out_dtype", out_dtype), ("bias_dtype", bias_dtype)):
        if dtype is not None and dtype not in name:
            raise ValueError(f"{argument} must be bfloat16, float16 or float32, got {dtype}")
    command = (
        f"explain m={m} n={n} k={k} a={activation} b={weight} out={name[out_dtype]}"
        f" bias={name[bias_dtype] if bias_dtype else 'none'}"
        f" alpha={'device' if alpha_on_device else 'host'}"
        f" cc={10 * where.cc[0] + where.cc[1]} sm={where.sm_count} device={where.index}"
    )
    guard = (
        torch.cuda.device(where.index) if torch.cuda.is_available() else contextlib.nullcontext()
    )
    with guard:
        answer = _control(command)
    plan = answer["plan"] or {}
    return Plan(
        m=m,
        n=n,
        k=k,
        device=str(where),
        rung=answer["rung"],
        kernel=answer["kernel"],
        algorithm=_algorithm(plan.get("algorithm")),
        workspace_bytes=answer["workspace_bytes"],
        refusals=tuple(Refusal(**refusal) for refusal in answer["refusals"]),
        evidence=plan.get("evidence", ""),
        details={
            "m_chunk": answer["m_chunk"],
            "n_chunk": answer["n_chunk"],
            "plan": plan,
            "note": _why_hypothetical(where),
            "inner_refusals": plan.get("refusals", []) if answer["rung"] == "emulated" else [],
        },
    )


def _why_hypothetical(where: Device) -> str:
    """Why cuBLASLt can't be asked about `where` on this machine; empty where it can."""
    if where.name.startswith("cuda:"):
        return ""
    if not torch.cuda.is_available():
        return f"{_why_no_gpu()}, so cuBLASLt could not be asked: on such a chip it may answer otherwise"
    return "cuBLASLt answers for the GPU that is here, not for the chip asked about"


def _algorithm(values: dict[str, Any] | None) -> Algorithm | None:
    if not values:
        return None
    return Algorithm(**{f.name: values[f.name] for f in fields(Algorithm)})


# ------------------------------------------------------------------------------------------ pins


def pin(algorithm: Algorithm | Pin, **conditions: Any) -> Pin:
    """Pins an algorithm in this process; the newest pin is asked first. Gives the pin.

    Who calls this vouches for the pin: policy "validated" asks no evidence of it, as it does of the
    rows that ``load_pins`` reads.

    algorithm: a whole ``Pin``, or an ``Algorithm`` with ``Pin``'s other fields as keywords; ``cc``
    defaults to the current GPU's. Raises ValueError where an attribute is out of the range that
    the loaded cuBLASLt knows (inside cuBLASLt it could kill the process).
    """
    if isinstance(algorithm, Algorithm):
        if "cc" not in conditions:
            here = device_of()
            if not isinstance(here, Device):
                raise ValueError(f"cc must be given, since {_why_no_gpu()}: for example cc=(12, 1)")
            conditions["cc"] = here.cc
        row = Pin(algorithm, **conditions)
    else:
        row = replace(algorithm, **conditions)
    _control(f"pin {row.to_text()}")
    return row


def unpin(row: Pin) -> bool:
    """Takes a pin back. Gives whether it was there."""
    return bool(_control(f"unpin {row.to_text()}")["ok"])


def pins() -> list[Pin]:
    """Every pin in force, in the order they are asked; the built-in one is last."""
    return [Pin.from_text(text) for text in _control("pins")["pins"]]


def pin_policy(value: str | None = None) -> str:
    """The policy in force, set first where ``value`` is given.

    "validated": pins on the chip that they are for, and of a pin file only rows with evidence.
    "always": rows without it too, and the built-in pin on every chip from compute capability 10.0.
    "never": no pin.
    """
    if value is not None and value not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {value!r}")
    return _control("policy" if value is None else f"policy value={value}")["policy"]


def load_pins(path: str | os.PathLike[str]) -> PinFileReport:
    """Loads a pin file. A row that can't be read is refused by line number; the others count.

    A row without evidence is loaded, and skipped with that reason under policy "validated".

    Raises what ``read_pin_file`` raises where the file as a whole is no pin file. Nothing is pinned
    then.
    """
    loaded, refused = [], []
    for number, line in enumerate(read_pin_file(path).splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        try:
            row = Pin.from_text(line)
            _control(f"row {row.to_text()}")
            loaded.append(row)
        except (ValueError, TypeError, OverflowError) as error:
            refused.append((number, str(error)))
    return PinFileReport(str(path), tuple(loaded), tuple(refused))


def save_pins(path: str | os.PathLike[str], rows: Iterable[Pin] | None = None) -> None:
    """Writes pins (default: all but the built-in one) to a file, whole or not at all."""
    rows = pins()[:-1] if rows is None else list(rows)
    write_pin_file(path, rows)


# -------------------------------------------------------------------------------------- backends


@dataclass(frozen=True)
class Backend:
    """One rung on one device: whether it can run here and, where it can't, why."""

    name: str
    device: str
    available: bool
    reason: str = ""


def build() -> dict[str, Any]:
    """Of the ops binary: its ``version``, and whether it was built with the ``cuda`` kernels."""
    return _control("build")


def library() -> dict[str, Any]:
    """The cuBLASLt in use: ``version``, ``path``, and ``unavailable`` (a reason) where there is none."""
    return _control("library")


def heuristic_queries() -> int:
    """How often this process's ops have asked cuBLASLt's heuristic: once a problem without a pin,
    when it is planned, and never by a call whose plan is there."""
    return _control("queries")["heuristic"]


def backends() -> list[Backend]:
    """What this machine can run and, for what it can't, why. Probes each GPU with a small gemm."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    rows = []
    if not gpus:
        rows += [Backend(rung, "cuda", False, _why_no_gpu()) for rung in RUNGS[:-1]]
    for index in gpus:
        # The last dimensions fill any chip, so that a pin is not refused for its size alone.
        plan = explain(8192, 8192, 4096, device=index)
        reasons: dict[str, list[str]] = {}
        for refusal in plan.refusals:
            reasons.setdefault(refusal.rung, []).append(refusal.reason)
        for rung in RUNGS[:-1]:
            taken = plan.rung is not None and RUNGS.index(plan.rung) <= RUNGS.index(rung)
            available = rung not in reasons and taken
            rows.append(Backend(rung, f"cuda:{index}", available, "; ".join(reasons.get(rung, ()))))
    return [*rows, Backend("cpu", "cpu", True)]


def _start() -> None:
    """At import: where nvidia-cublas keeps its library, and the pins that NVFP4_PINS names."""
    spec = find_spec("nvidia")
    for base in (spec.submodule_search_locations or ()) if spec else ():
        candidate = Path(base) / "cu13" / "lib" / "libcublasLt.so.13"
        if candidate.exists():
            _control(f"fallback {candidate}")
            break
    pin_file = os.environ.get("NVFP4_PINS")
    if not pin_file:
        return
    import warnings

    try:
        report = load_pins(pin_file)
    except (OSError, ValueError) as error:
        warnings.warn(f"NVFP4_PINS ignored: {error}", stacklevel=3)
        return
    if report.refused:
        warnings.warn(f"NVFP4_PINS: {report}", stacklevel=3)
