"""``python -m nvfp4_linear sweep`` and ``gate``: their arguments, and what they say."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

from ..algorithms import Device
from ..console import CommandError, Console
from . import gate_report, report
from .arms import make_arms
from .gate import Ladder, run_gate
from .promote import NothingToPin, pin_of, read_rows, write_pin
from .route import problems_behind
from .session import Machine, Session, find_machine
from .sweep import TYPES, Options, make_problem, sweep, write_whole

MIB = 1 << 20


def size(text: str) -> int:
    """A positive whole number of the command line."""
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text}")
    return value


def seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def m_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if not (first.isdigit() and last.isdigit()) or not 0 < int(first) <= int(last):
        raise argparse.ArgumentTypeError(f"must look like 2049:4096, got {text!r}")
    return int(first), int(last)


def capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise argparse.ArgumentTypeError(f"must look like 12.1, got {text!r}")
    return int(major), int(minor)


def machine_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to measure: for both commands."""
    parser.add_argument("--device", help="cuda:0 (default: the current GPU)")
    double = parser.add_argument_group("test double", "the chip that a double of cuBLASLt plays")
    double.add_argument("--cc", type=capability, metavar="MAJOR.MINOR", help="(default: 12.1)")
    double.add_argument("--sms", type=size, metavar="COUNT", help="(default: 48)")


def machine_of(args: argparse.Namespace) -> Machine:
    if (args.cc is None) != (args.sms is None):
        raise CommandError("--cc and --sms go together: for example --cc 12.1 --sms 48 for a GB10")
    chip = Device(args.cc, args.sms, name="a chip, described") if args.cc else None
    return find_machine(args.device, chip=chip)


# ---------------------------------------------------------------------------------------- sweep


def sweep_arguments(parser: argparse.ArgumentParser) -> None:
    for name, what in (
        ("m", "rows of the activation"),
        ("n", "out_features"),
        ("k", "in_features"),
    ):
        parser.add_argument(f"--{name}", type=size, required=True, metavar=name.upper(), help=what)
    parser.add_argument("--type", choices=TYPES, default="nvfp4", help="(default: nvfp4)")
    parser.add_argument("--out-dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--workspace-mib", type=int, default=32, help="limit (default: 32)")
    search = parser.add_argument_group("search")
    search.add_argument("--rounds", type=size, default=20, help="of the final (default: 20)")
    search.add_argument("--finalists", type=size, default=8, help="(default: 8)")
    search.add_argument("--exhaustive", action="store_true", help="the whole range of ids too")
    search.add_argument(
        "--budget",
        type=seconds,
        metavar="SECONDS",
        help="of screening (default: 40; none with --exhaustive)",
    )
    search.add_argument("--seed", type=int, default=0, help="of the operands (default: 0)")
    files = parser.add_argument_group("files")
    files.add_argument(
        "--out", type=Path, metavar="FILE.json", help="(default: named by the shape)"
    )
    files.add_argument("--restart", action="store_true", help="begin anew, overwrite the file")
    files.add_argument("--no-plot", action="store_true", help="write no FILE.png")
    files.add_argument("--pin", type=Path, metavar="FILE", help="write the winner to a pin file")
    files.add_argument("--m-range", type=m_range, metavar="FIRST:LAST", help="M to pin it for")
    files.add_argument(
        "--allow-inexact", action="store_true", help="pin other bytes too; recorded in the pin"
    )
    machine_arguments(parser)


def run_sweep(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    budget = args.budget or (None if args.exhaustive else Options.budget_s)
    options = Options(args.rounds, args.exhaustive, args.finalists, budget, args.seed)
    path = args.out or Path(f"sweep_{args.type}_{args.m}x{args.n}x{args.k}.json")
    if path.suffix != ".json":
        raise CommandError(f"--out must end in .json, got {path}: the page and plot go beside it")
    with Session(machine_of(args)) as session:
        problem = make_problem(
            session.machine,
            args.type,
            args.m,
            args.n,
            args.k,
            out=args.out_dtype,
            workspace_bytes=args.workspace_mib * MIB,
        )
        result = sweep(session, problem, options, path, console, restart=args.restart)
    console.say(report.where(result.data), report.summary(result))
    console.say(*report.write(result, plot=not args.no_plot))
    document = {
        "ok": True,
        "result": str(path),
        "summary": report.summary(result),
        "verdict": result.data["verdict"],
        "pin": None,
    }
    if args.pin is not None:
        document |= _pin(result, args, console)
    return document


def _pin(result: Any, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Writes the pin. That the heuristic is best is an answer, not a failure: it is said."""
    try:
        pin = pin_of(result, allow_inexact=args.allow_inexact, m_range=args.m_range)
    except NothingToPin as nothing:
        console.say(f"no pin written: {nothing}")
        return {"no_pin": str(nothing)}
    write_pin(args.pin, pin)
    console.say(f"pinned in {args.pin}: {pin.to_text()}")
    return {"pin": pin.to_text()}


# ----------------------------------------------------------------------------------------- gate


SMALL = {"grid": (2, 4, 5), "hidden": 64, "ffn": 128, "heads": 2, "blocks": 3}
SMALL_ROUNDS = 6


def gate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--canonical",
        action="store_true",
        help="print the GB10 study's table beside this machine's own",
    )
    candidate = parser.add_argument_group("candidate (default: the pins in force)")
    candidate.add_argument("--pins", type=Path, metavar="FILE", help="rows to gate")
    candidate.add_argument(
        "--sweep",
        action="store_true",
        help="sweep the FC2 problem first and write its winners into --pins",
    )
    candidate.add_argument(
        "--budget", type=seconds, default=40.0, metavar="SECONDS", help="of each sweep's screen"
    )
    sizes = parser.add_argument_group("sizes (default: the study's)")
    sizes.add_argument("--small", action="store_true", help="what a CPU runs in seconds")
    sizes.add_argument("--grid", metavar="FxHxW", help="their product is M (10x19x199)")
    for name in ("hidden", "ffn", "heads", "blocks"):
        sizes.add_argument(f"--{name}", type=size)
    ladder = parser.add_argument_group("ladder")
    ladder.add_argument("--rounds", type=size, help="(default: 20)")
    ladder.add_argument("--gate-blocks", type=numbers, metavar="I,I", help="(first, middle, last)")
    ladder.add_argument("--steps", type=numbers, default=(2, 12), metavar="S,S", help="(2,12)")
    ladder.add_argument("--keep-going", action="store_true", help="past a stage that failed")
    ladder.add_argument("--out", type=Path, default=Path("gate.json"), metavar="FILE.json")
    machine_arguments(parser)


def numbers(text: str) -> tuple[int, ...]:
    """ "0,24,49" """
    if not all(part.isdigit() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"must look like 2,12, got {text!r}")
    return tuple(map(int, text.split(",")))


def run_gate_command(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    transformer = _transformer()
    config = _config(args, transformer)
    ladder = Ladder(
        rounds=args.rounds or (SMALL_ROUNDS if args.small else Ladder.rounds),
        blocks=args.gate_blocks or gated_blocks(config.blocks),
        steps=args.steps,
        keep_going=args.keep_going,
    )
    if args.out.suffix != ".json":
        raise CommandError(f"--out must end in .json, got {args.out}: the page goes beside it")
    if args.sweep and args.pins is None:
        raise CommandError("--sweep needs --pins FILE to write its winners to")
    machine = machine_of(args)
    if args.sweep:
        _sweep_fc2(machine, config, args, console)

    def save(data: dict[str, Any]) -> None:
        write_whole(args.out, json.dumps(data, indent=1) + "\n")

    arms = make_arms(machine, read_rows(args.pins) if args.pins else ())
    try:
        model = transformer.VideoTransformer(config, device=machine.device)
        model.calibrate()
        data = run_gate(machine, model, arms, ladder, console, save)
    finally:
        arms.close()
    page = gate_report.markdown(data, canonical=args.canonical)
    args.out.with_suffix(".md").write_text(page)
    console.say(page.rstrip(), "", f"wrote {args.out} and {args.out.with_suffix('.md').name}")
    document = {"ok": data["verdict"]["promoted"], "result": str(args.out), **data}
    if not document["ok"]:
        document["error"] = "not promoted: " + "; ".join(data["verdict"]["reasons"])
    return document


def gated_blocks(blocks: int) -> tuple[int, ...]:
    """The first, the middle and the last: of the study's 50, 0, 24 and 49."""
    return tuple(dict.fromkeys((0, (blocks - 1) // 2, blocks - 1)))


def _transformer() -> Any:
    """bench/video_transformer.py: the model to gate is no part of the installed package."""
    try:
        return importlib.import_module("bench.video_transformer")
    except ModuleNotFoundError:
        raise CommandError(
            "gate needs bench/video_transformer.py, which is in the source tree and not in the "
            "installed package: run it in the root of the source tree"
        ) from None


def _config(args: argparse.Namespace, transformer: Any) -> Any:
    values = dict(SMALL) if args.small else {}
    if args.grid:
        values["grid"] = transformer.parse_grid(args.grid)
    for name in ("hidden", "ffn", "heads", "blocks"):
        if getattr(args, name):
            values[name] = getattr(args, name)
    return transformer.Config(**values)


def _sweep_fc2(machine: Machine, config: Any, args: argparse.Namespace, console: Console) -> None:
    """Sweeps every cuBLASLt problem behind FC2; their winners go into --pins."""
    behind = problems_behind(machine, config.tokens, config.hidden, config.ffn)
    options = Options(budget_s=args.budget)
    with Session(machine) as session:
        for problem in behind:
            shape = "{type}_{m}x{n}x{k}".format(**problem)
            path = args.out.with_name(f"{args.out.stem}_sweep_{shape}.json")
            result = sweep(session, problem, options, path, console)
            report.write(result, plot=False)
            console.say(report.summary(result))
            try:
                write_pin(args.pins, pin_of(result))
            except NothingToPin as nothing:
                console.say(f"no pin written: {nothing}")
