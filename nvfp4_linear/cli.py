"""The command line, ``python -m nvfp4_linear COMMAND``.

Each command is one function ``run(args, console) -> dict``: it says what people read through the
console and gives the document that ``--json`` prints; ``document["ok"]`` is False where the command
did its work and the answer is a failure. To add one: write the function in its own module, its
arguments here, and a row in COMMANDS.

Exit status: 0 done; 1 failed, with one line on stderr that says why (NVFP4_LOG=debug adds the
traceback); 2 the command line was not understood; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from . import algorithms, machine
from .console import HYPOTHETICAL_NOTE, CommandError, Console, table

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


# ----------------------------------------------------------------------------------------- demo


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu or cuda:0 (default: the GPU where there is one)")


def _demo(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    from . import demo

    return demo.run(args, console)


# ----------------------------------------------------------------------------------------- info


def _info(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    facts = machine.describe()
    for line in _info_lines(facts):
        console.say(line)
    return {"ok": True, **facts}


def _info_lines(facts: dict[str, Any]) -> list[str]:
    versions, library, build = facts["versions"], facts["cublaslt"], facts["build"]
    cuda = versions["torch_cuda"]
    cublaslt = f"{versions['cublaslt']} at {library['path']}"
    kernels = "with CUDA kernels" if build["cuda_kernels"] else "CPU only, no CUDA kernels built in"
    return [
        f"nvfp4_linear {versions['nvfp4_linear']}",
        *table(
            [
                ("Python", f"{versions['python']} on {facts['platform']}"),
                ("torch", f"{versions['torch']} ({f'CUDA {cuda}' if cuda else 'CPU build'})"),
                ("cuBLASLt", library["unavailable"] or cublaslt),
                ("ops", f"{build['ops_binary']} ({kernels})"),
            ]
        ),
        "",
        "Devices",
        *table((row["device"], _device_text(row)) for row in facts["devices"]),
        "",
        "Backends, tried from the top",
        *table(
            ("yes" if row["available"] else "no", row["device"], row["name"], row["reason"])
            for row in facts["backends"]
        ),
        "",
        f"Pins, asked from the top (policy: {facts['pin_policy']})",
        *(line for row in facts["pins"] for line in _pin_lines(row)),
        "",
        "Environment",
        *table(
            (name, "not set" if value is None else value)
            for name, value in facts["environment"].items()
        ),
        *(
            f"  {name}  set, but not a variable that is read"
            for name in facts["unknown_environment"]
        ),
    ]


def _device_text(row: dict[str, Any]) -> str:
    if "threads" in row:
        return f"{row['name']}, {row['threads']} threads"
    return (
        f"{row['name']}, compute capability {row['compute_capability']}, "
        f"{row['multiprocessors']} multiprocessors, {row['memory_bytes'] / 2**30:.1f} GiB"
    )


def _pin_lines(row: dict[str, Any]) -> list[str]:
    def within(low: int, high: int) -> str:
        return f"{low} to {high}" if high else f">= {low}"

    where = [f"compute capability {row['cc'][0]}.{row['cc'][1]}"]
    where += [f"{row['sm_count']} multiprocessors"] if row["sm_count"] else []
    where += [f"{name}={row[name]}" for name in ("n", "k") if row[name]]
    if row["m_min"] > 1 or row["m_max"]:
        where.append(f"m {within(row['m_min'], row['m_max'])}")
    where += ["a tile or more per multiprocessor"] if row["fills_chip"] else []
    lines = [
        f"  {row['type']}, {', '.join(where)}",
        f"    takes {algorithms.Algorithm(**row['algorithm'])}",
    ]
    return [
        *lines,
        f"    evidence: {row['evidence'] or 'none, so policy validated skips it in a file'}",
    ]


# -------------------------------------------------------------------------------------- explain


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    for name, what in (
        ("m", "rows of the activation"),
        ("n", "out_features"),
        ("k", "in_features"),
    ):
        parser.add_argument(name, metavar=name.upper(), type=_size, help=what)
    parser.add_argument(
        "--activation",
        choices=("nvfp4", "bfloat16", "float16"),
        default="nvfp4",
        help="type of the activation: nvfp4 is gemm, the others gemm_a16w4 (default: nvfp4)",
    )
    parser.add_argument(
        "--weight",
        choices=("nvfp4", "bfloat16", "float16"),
        default="nvfp4",
        help="type of the weight: the others are gemm_a4w16 (default: nvfp4)",
    )
    parser.add_argument(
        "--out-dtype", choices=DTYPES, default="bfloat16", help="(default: bfloat16)"
    )
    parser.add_argument("--bias", action="store_true", help="with a bias of the output's dtype")
    parser.add_argument(
        "--predict",
        action="store_true",
        help="and what a model says of its L2 traffic; of a pin, beside the heuristic's choice",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--device", help="cpu or cuda:0 (default: the GPU where there is one)")
    where.add_argument(
        "--cc",
        type=_compute_capability,
        metavar="MAJOR.MINOR",
        help="ask about a chip that isn't here, with --sms: --cc 12.1 --sms 48 is a GB10",
    )
    parser.add_argument("--sms", type=_size, metavar="COUNT", help="multiprocessors of that chip")


def _explain(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    if (args.cc is None) != (args.sms is None):
        raise CommandError("--cc and --sms go together: for example --cc 12.1 --sms 48 for a GB10")
    if args.device and args.device.startswith("cuda") and not torch.cuda.is_available():
        raise CommandError(
            f"torch sees no GPU here, so not {args.device}: ask about one with --cc and --sms"
        )
    out_dtype = DTYPES[args.out_dtype]
    device = algorithms.Device(args.cc, args.sms, name="a chip") if args.cc else args.device
    ask = partial(
        algorithms.explain,
        args.m,
        args.n,
        args.k,
        device=device,
        activation=args.activation,
        weight=args.weight,
        out_dtype=out_dtype,
        bias_dtype=out_dtype if args.bias else None,
    )
    plan = ask()
    if args.cc:
        console.say(HYPOTHETICAL_NOTE)
    console.say(str(plan))
    document = {"ok": plan.rung is not None, "hypothetical": bool(args.cc), **plan.to_dict()}
    if plan.rung is None:
        document["error"] = "no rung takes this call: the plan lists every rung's reason"
    if args.predict:
        document |= _predictions(plan, ask, algorithms.device_of(device), console)
    return document


def _predictions(
    plan: algorithms.Plan,
    ask: Callable[[], algorithms.Plan],
    chip: algorithms.Device | torch.device,
    console: Console,
) -> dict[str, Any]:
    """Of the plan and, where a pin decides it, of what `ask` gives without pins; which should win."""
    from .lab import prediction, route

    found = prediction.predictions(plan, chip) if isinstance(chip, algorithms.Device) else []
    console.say(*(prediction.text(found) or ["       no cuBLASLt algorithm to predict for"]))
    if not found or not route.takes_pin(plan):
        return {"predictions": found, "predicted_comparison": None}
    heuristic = _without_pins(ask)
    instead = prediction.predictions(heuristic, chip)
    if not instead:
        console.say("       the heuristic has no algorithm to compare with")
        return {"predictions": found, "predicted_comparison": None}
    comparison = prediction.compare(plan, heuristic, found, instead)
    console.say(
        f"       the heuristic would take: {heuristic.algorithm}",
        *prediction.text(instead),
        f"       {comparison['text']}",
    )
    return {"predictions": [*found, *instead], "predicted_comparison": comparison}


def _without_pins(ask: Callable[[], algorithms.Plan]) -> algorithms.Plan:
    policy = algorithms.pin_policy()
    algorithms.pin_policy("never")
    try:
        return ask()
    finally:
        algorithms.pin_policy(policy)


def _size(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text}")
    return value


def _compute_capability(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"\d+\.\d", text):
        raise argparse.ArgumentTypeError(f"must look like 12.1, got {text!r}")
    major, minor = text.split(".")
    return int(major), int(minor)


# ---------------------------------------------------------------------------------- sweep, gate


def _sweep_arguments(parser: argparse.ArgumentParser) -> None:
    from .lab import commands

    commands.sweep_arguments(parser)


def _sweep(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    from .lab import commands

    return commands.run_sweep(args, console)


def _gate_arguments(parser: argparse.ArgumentParser) -> None:
    from .lab import commands

    commands.gate_arguments(parser)


def _gate(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    from .lab import commands

    return commands.run_gate_command(args, console)


# ----------------------------------------------------------------------------------------- main


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    pass


@dataclass(frozen=True)
class Command:
    """A row of ``--help``: what the command is for, its arguments, and the function that does it."""

    summary: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Console], dict[str, Any]]


COMMANDS = {
    "demo": Command(
        "quantize a real network, compare it with itself in FP32, check bytes",
        _demo_arguments,
        _demo,
    ),
    "info": Command("versions, devices, backends and why, pins, environment", _no_arguments, _info),
    "explain": Command(
        "which backend and algorithm a GEMM of M x N x K takes, and why none above it",
        _explain_arguments,
        _explain,
    ),
    "sweep": Command(
        "find the fastest cuBLASLt algorithm for a shape, prove its bytes, pin it",
        _sweep_arguments,
        _sweep,
    ),
    "gate": Command(
        "climb the validation ladder with a pin: isolated, whole blocks, whole trajectories",
        _gate_arguments,
        _gate,
    ),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nvfp4_linear",
        description="NVFP4 (4-bit) linear layers for PyTorch.",
    )
    parser.add_argument("--version", action="version", version=machine.version())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        child = commands.add_parser(name, help=command.summary, description=command.summary)
        command.arguments(child)
        child.add_argument(
            "--json", action="store_true", help="print one JSON document and nothing else"
        )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; gives the exit status."""
    args = _parser().parse_args(arguments)
    console = Console(as_json=args.json)
    try:
        document = COMMANDS[args.command].run(args, console)
        console.document(document)
        if not document["ok"]:
            console.error(document.get("error", f"{args.command} failed"))
        return 0 if document["ok"] else 1
    except KeyboardInterrupt:
        console.error("interrupted")
        return 130
    except BrokenPipeError:  # the reader has left, as `| head` does: nothing to tell it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("NVFP4_LOG") == "debug":
            traceback.print_exc()
        message = _one_line(error)
        console.document({"ok": False, "error": message})
        console.error(message)
        return 1


def _one_line(error: Exception) -> str:
    """The error's first line; its type too where the text alone would say little."""
    text = str(error).strip()
    first = text.splitlines()[0] if text else ""
    if isinstance(error, (CommandError, ValueError, TypeError, RuntimeError)) and first:
        return first
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
