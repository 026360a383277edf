"""Sweeps the shapes that matter on this GPU, pins the winners, and shows what the pins are worth.

    python -m bench.sweeps                       8 minutes; run again, it goes on where it stopped
    python -m bench.sweeps --finals              also measures again what is there: the best of each
                                                 screen in new rounds, a new verdict and pin

1. sweep   BF16: the study's FC2 and its FC1, four LLM shapes, two small M; FP8: two. On a chip
           without FP4 tensor cores also the problems that ``torch.ops.nvfp4.gemm`` makes of the
           BF16 shapes: its emulated rung multiplies decoded operands in chunks, and a pin has to
           match a chunk.
2. pin     the byte-exact winners that are faster beyond the noise
3. verify  ``torch.ops.nvfp4.gemm`` with these pins and without, alternating rounds of settled
           arms, NVFP4 operands; for small M, where its own kernels take it, ``gemm_a4w16`` too,
           which gives cuBLASLt the weight as it is: byte-exact and faster beyond the noise, or the pins behind that
           shape are taken out again and it is recorded. A sweep's rounds change algorithm every
           few milliseconds, so both see the same clock; what a power limit leaves of a gain shows
           here alone

Writes NAME_sweep.json (all sweeps, and what was verified), NAME_sweep.md, NAME_sweep.png where
matplotlib is there, and NAME.pins; NAME is the GPU's. Each is written whole after every shape. A
sweep that is under way keeps its own file in --work.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import nvfp4_linear  # noqa: F401  (registers torch.ops.nvfp4)
from bench.sweeps_page import draw, page
from nvfp4_linear.algorithms import Pin, save_pins
from nvfp4_linear.console import CommandError, Console
from nvfp4_linear.lab import report
from nvfp4_linear.lab.arms import HEURISTIC, PINNED, Operands, make_arms
from nvfp4_linear.lab.gate import alternate
from nvfp4_linear.lab.measure import make_clock
from nvfp4_linear.lab.promote import NothingToPin, pin_of
from nvfp4_linear.lab.route import problems_behind
from nvfp4_linear.lab.session import Machine, Session, find_machine
from nvfp4_linear.lab.sweep import FORMAT as SWEEP_FORMAT
from nvfp4_linear.lab.sweep import Options, OtherFile, Result, make_problem, sweep, write_whole

FORMAT = "nvfp4_linear sweeps 1"
RESULTS = Path(__file__).parent / "results" / "sweeps"
WORK = Path("build") / "sweeps"
TOTAL_S = 480.0
VERIFY_S = 4.0  # a shape's share of what is kept back for verification
FINAL_S = 8.0  # the same of finals measured again
OVERHEAD_S = 8.0  # of a sweep beside its screen: a first guess, then what was seen
LEAST_SCREEN_S = 2.0
UNPINNED_ROUNDS = 5  # where both arms make the same call
FINALISTS = 5  # of a final that is measured again
BEST_KEPT = 24  # of a screen, in the committed file
DIGITS = 6


@dataclass(frozen=True)
class Case:
    """A shape. verify: ops to run at it."""

    name: str
    type: str
    m: int
    n: int
    k: int
    verify: tuple[str, ...] = ()


GEMM, A4W16 = "gemm", "gemm_a4w16"
WEIGHT = {GEMM: "nvfp4", A4W16: "bfloat16"}  # as explain() calls it
CASES = (
    Case("study FC2", "bf16", 37_810, 5_376, 14_336, verify=(GEMM,)),
    Case("study FC1", "bf16", 37_810, 28_672, 5_376, verify=(GEMM,)),
    Case("8B down", "bf16", 8_192, 4_096, 14_336, verify=(GEMM,)),
    Case("8B gate and up", "bf16", 8_192, 28_672, 4_096, verify=(GEMM,)),
    Case("70B down", "bf16", 4_096, 8_192, 28_672, verify=(GEMM,)),
    Case("70B qkv", "bf16", 4_096, 10_240, 8_192, verify=(GEMM,)),
    Case("small M, 8B down", "bf16", 64, 4_096, 14_336, verify=(GEMM, A4W16)),
    Case("small M, 70B down", "bf16", 128, 8_192, 28_672, verify=(GEMM, A4W16)),
    Case("study FC2", "fp8_e4m3", 37_810, 5_376, 14_336),
    Case("8B gate and up", "fp8_e4m3", 8_192, 28_672, 4_096),
)
# What a test double computes in seconds: it plays a chip with FP4 tensor cores.
DOUBLE_CASES = (
    Case("small FC2", "nvfp4", 40, 64, 128, verify=(GEMM,)),
    Case("small", "bf16", 24, 32, 64),
    Case("small", "fp8_e4m3", 24, 32, 64),
)


@dataclass(frozen=True)
class Job:
    """One sweep: a problem, and the case it belongs to."""

    case: Case
    problem: dict[str, Any]

    @property
    def key(self) -> str:
        """What a pin tells apart."""
        return "{type}_{m}x{n}x{k}".format(**self.problem)

    @property
    def title(self) -> str:
        own = (self.case.type, self.case.m, self.case.n, self.case.k)
        chunk = tuple(self.problem[key] for key in ("type", "m", "n", "k")) != own
        return f"{self.case.name}{', chunk of gemm' if chunk else ''}: {self.key}"


def jobs_of(machine: Machine, cases: tuple[Case, ...]) -> list[Job]:
    """Each case, followed by the problems that gemm makes of it; no problem twice."""
    jobs: dict[str, Job] = {}
    for case in cases:
        problems = [make_problem(machine, case.type, case.m, case.n, case.k)]
        for op in case.verify:
            problems += problems_behind(machine, case.m, case.n, case.k, WEIGHT[op])
        for problem in problems:
            job = Job(case, problem)
            jobs.setdefault(job.key, job)
    return list(jobs.values())


class Book:
    """The committed files: sweeps by key, what was verified, the pins that follow."""

    def __init__(self, folder: Path, name: str, machine: dict[str, Any]) -> None:
        self.folder, self.name = folder, name
        self.path = folder / f"{name}_sweep.json"
        self.data: dict[str, Any] = {
            "format": FORMAT,
            "machine": machine,
            "sweeps": {},
            "verified": [],
        }
        if self.path.exists():
            known = json.loads(self.path.read_text())
            if known.get("format") != FORMAT or known.get("machine") != machine:
                raise CommandError(
                    f"{self.path} is of another machine, library or format: give another --out, or "
                    f"take it away"
                )
            self.data = known

    def add(self, job: Job, result: Result, seconds: float) -> None:
        entry = {"title": job.title, "seconds": round(seconds, 1), **trimmed(result)}
        self.data["sweeps"][job.key] = entry | self._pin(result)

    def renew(self, key: str, result: Result) -> None:
        """Puts a final that was measured again in place of the one that is there."""
        entry = self.data["sweeps"][key]
        entry.pop("no_pin", None)
        final = ("measured_with", "lost", "verdict", "rounds")
        new = trimmed(result)
        entry |= {name: new[name] for name in final} | self._pin(result)

    def _pin(self, result: Result) -> dict[str, Any]:
        try:
            return {"pin": pin_of(result, source=self.path.name).to_text(), "dropped": None}
        except NothingToPin as nothing:
            return {"pin": None, "dropped": None, "no_pin": str(nothing)}

    def reopened(self, key: str) -> dict[str, Any]:
        """A finished sweep as it was before its final, from what the book keeps of it."""
        entry = self.data["sweeps"][key]
        kept = ("date", "problem", "measured_with", "heuristic", "lost")
        return {
            "format": SWEEP_FORMAT,
            "finished": False,
            **{name: entry[name] for name in kept},
            "machine": self.data["machine"],
            "options": entry["options"],
            "generations": [
                {**one, "capabilities": None, "accepted": [], "complete": True}
                for one in entry["generations"]
            ],
            "screened": entry["best_of_screen"],
            "final": None,
            "settled": [],
            "verdict": None,
        }

    def pins(self, keys: list[str] | None = None) -> list[Pin]:
        """The pins in the file; of `keys` alone where given."""
        sweeps = self.data["sweeps"]
        chosen = sweeps if keys is None else [key for key in keys if key in sweeps]
        return [
            Pin.from_text(sweeps[key]["pin"])
            for key in chosen
            if sweeps[key]["pin"] and not sweeps[key]["dropped"]
        ]

    def forget_all_but(self, keys: set[str]) -> list[str]:
        """Leaves out sweeps of problems that nobody has any more; gives their keys."""
        gone = [key for key in self.data["sweeps"] if key not in keys]
        for key in gone:
            del self.data["sweeps"][key]
        return gone

    def drop(self, key: str, reason: str) -> None:
        """Takes the pin of a sweep out of the pin file, where it has one."""
        if key in self.data["sweeps"] and self.data["sweeps"][key]["pin"]:
            self.data["sweeps"][key]["dropped"] = reason

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = _rounded(self.data)  # the page's digits are those of the file
        write_whole(self.path, json.dumps(kept, separators=(",", ":")) + "\n")
        write_whole(self.path.with_suffix(".md"), page(kept) + "\n")
        save_pins(self.folder / f"{self.name}.pins", self.pins())


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value


def trimmed(result: Result) -> dict[str, Any]:
    """A finished result without what only a resumed sweep needs."""
    data = result.data
    generations = [
        {
            **{key: generation[key] for key in ("total", "checked", "refused", "seeds")},
            "accepted": len(generation["accepted"]),
        }
        for generation in data["generations"]
    ]
    screened = sorted(data["screened"], key=lambda entry: -entry["ratio"])
    rounds = data["final"]["rounds"]
    final = [
        {name: [pairs[position][name] for pairs in rounds] for name in ("heuristic_s", "s")}
        for position in range(len(rounds[0]))
    ]
    kept = ("date", "problem", "options", "measured_with", "heuristic", "lost", "verdict")
    return {
        **{key: data[key] for key in kept},
        "generations": generations,
        "screened": len(screened),
        "best_of_screen": screened[:BEST_KEPT],
        "rounds": final,
    }


# ---------------------------------------------------------------------------------------- sweep


def sweep_all(
    session: Session, jobs: list[Job], book: Book, work: Path, until: float, console: Console
) -> None:
    """Sweeps what the book does not have yet, sharing out the time that is left."""
    work.mkdir(parents=True, exist_ok=True)
    waiting = [job for job in jobs if job.key not in book.data["sweeps"]]
    overhead = OVERHEAD_S
    for position, job in enumerate(waiting):
        share = (until - time.monotonic()) / (len(waiting) - position)
        if share < LEAST_SCREEN_S:
            console.say(f"{len(waiting) - position} sweeps left for another run: no time")
            return
        budget = max(LEAST_SCREEN_S, share - overhead)
        start = time.monotonic()
        path = work / f"{job.key}.json"
        try:
            result = _sweep_one(session, job, Options(budget_s=budget), path, console)
        except CommandError as error:
            console.say(f"{job.title}: {error}")
            continue
        seconds = time.monotonic() - start
        overhead = max(1.0, (overhead + seconds - budget) / 2)
        book.add(job, result, seconds)
        book.save()
        console.say(f"{job.title}, {seconds:.1f} s: {report.summary(result)}")


def _sweep_one(
    session: Session, job: Job, options: Options, path: Path, console: Console
) -> Result:
    try:
        return sweep(session, job.problem, options, path, console)
    except OtherFile:  # of an earlier run, on another machine: the work folder is ours to overwrite
        return sweep(session, job.problem, options, path, console, restart=True)


def finals_again(
    session: Session, keys: list[str], book: Book, work: Path, until: float, console: Console
) -> None:
    """New rounds, verdict and pin for sweeps that the book has, from the best of their screens."""
    work.mkdir(parents=True, exist_ok=True)
    for position, key in enumerate(keys):
        if time.monotonic() > until:
            console.say(f"{len(keys) - position} finals not measured again: no time")
            return
        start = time.monotonic()
        path = work / f"{key}_final.json"
        path.write_text(json.dumps(book.reopened(key)))
        problem = book.data["sweeps"][key]["problem"]
        try:
            result = sweep(session, problem, Options(finalists=FINALISTS), path, console)
        except CommandError as error:
            console.say(f"{key}, final again: {error}")
            continue
        book.renew(key, result)
        book.save()
        seconds = time.monotonic() - start
        reason = result.data["verdict"]["reason"]
        console.say(f"{key}, final again, {seconds:.1f} s: {reason}")


# --------------------------------------------------------------------------------------- verify


def verify_all(
    machine: Machine, cases: tuple[Case, ...], book: Book, rounds: int, console: Console
) -> bool:
    """gemm with the pins and without; those that don't help are taken out. False where they harm."""
    book.data["verified"] = []
    good = True
    for case, op in [(one, op) for one in cases for op in one.verify]:
        problems = problems_behind(machine, case.m, case.n, case.k, WEIGHT[op])
        keys = [Job(case, problem).key for problem in problems]
        pins = len(book.pins(keys))
        found = _verify(
            machine,
            case,
            op,
            book.pins(),
            rounds if pins else min(rounds, UNPINNED_ROUNDS),
            console,
        )
        entry = {"case": asdict(case), "op": op, "problems": keys, "pins": pins, **found}
        harm = found["difference"] or found["itself"] or found["slower"]
        if pins and (harm or not found["faster"]):
            word = "slower" if found["slower"] else "other bytes" if harm else "no faster"
            entry["dropped"] = f"{op} at {case.m} x {case.n} x {case.k}: {word}"
            for key in keys:
                book.drop(key, entry["dropped"])
            good = good and not harm
        book.data["verified"].append(entry)
        book.save()
        console.say(_verified_line(entry))
    return good


def _verify(
    machine: Machine, case: Case, op: str, pins: list[Pin], rounds: int, console: Console
) -> dict[str, Any]:
    operands = _operands(case, op, machine.device)
    arms = make_arms(machine, pins)
    try:
        described = {}
        for name in (HEURISTIC, PINNED):
            arms.select(name)
            described[name] = arms.describe(case.m, case.n, case.k, WEIGHT[op])
        numbers = console.progress(range(rounds), f"verify {op}, {case.name}")
        found = alternate(arms, make_clock(machine.device), numbers, lambda: arms.gemm(operands))
    finally:
        arms.close()
    return {"arms": described, **found}


def _operands(case: Case, op: str, device: str) -> Operands:
    generator = torch.Generator(device).manual_seed(0)

    def normal(rows: int) -> torch.Tensor:
        return torch.randn(rows, case.k, generator=generator, device=device, dtype=torch.bfloat16)

    def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        g = torch.ops.nvfp4.global_scale(x)
        return *torch.ops.nvfp4.quantize(x, g), g

    data, scale, g_x = quantized(normal(case.m))
    if op == A4W16:
        return Operands(data, scale, normal(case.n), None, g_x)
    weight, weight_scale, g_w = quantized(normal(case.n))
    return Operands(data, scale, weight, weight_scale, g_x * g_w)


def _verified_line(entry: dict[str, Any]) -> str:
    case, found = entry["case"], entry["comparison"]
    word = "faster" if entry["faster"] else "SLOWER" if entry["slower"] else "equal within noise"
    same = "DIFFERENT BYTES" if entry["difference"] else "same bytes"
    return (
        f"{entry['op']} {case['m']} x {case['n']} x {case['k']} ({entry['arms'][PINNED]['rung']}), "
        f"{entry['pins']} pins behind it: {found['ratio']:.4f}x, {word} ({entry['noise']:.2%}), {same}"
    )


# ----------------------------------------------------------------------------------------- main


def run(args: argparse.Namespace, console: Console) -> bool:
    start = time.monotonic()
    machine = find_machine(args.device)
    cases = DOUBLE_CASES if machine.test_double else CASES
    with Session(machine) as session:
        about = {
            "gpu": machine.name,
            "cc": list(machine.chip.cc),
            "sm_count": machine.chip.sm_count,
            "cublaslt": session.version(),
            "test_double": machine.test_double,
        }
        book = Book(args.out, args.name or _short_name(machine), about)
        jobs = jobs_of(machine, cases)
        gone = book.forget_all_but({job.key for job in jobs})
        if gone:
            console.say(f"left out, gemm makes other chunks now: {', '.join(gone)}")
        known = [key for key in book.data["sweeps"] if args.finals]
        until = start + args.seconds - VERIFY_S * sum(len(case.verify) for case in cases)
        sweep_all(session, jobs, book, args.work, until - FINAL_S * len(known), console)
        finals_again(session, known, book, args.work, until, console)
    good = True
    if not args.no_verify:
        good = verify_all(machine, cases, book, args.rounds, console)
    book.save()
    console.say(draw(book.data, book.path.with_suffix(".png")))
    left = sum(job.key not in book.data["sweeps"] for job in jobs)
    console.say(
        f"{len(book.pins())} pins in {book.folder / (book.name + '.pins')}, {left} sweeps left, "
        f"{time.monotonic() - start:.0f} s"
    )
    return good and not left


def _short_name(machine: Machine) -> str:
    """ "NVIDIA H200" → "h200"."""
    if machine.test_double:
        return "double"
    return re.sub(r"[^a-z0-9]+", "_", machine.name.lower().replace("nvidia", "")).strip("_")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sweeps", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="in all (default: 480)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="(default: bench/results/sweeps)")
    parser.add_argument("--work", type=Path, default=WORK, help="unfinished sweeps (build/sweeps)")
    parser.add_argument("--name", help="of the files (default: the GPU's)")
    parser.add_argument("--rounds", type=int, default=20, help="of the verification")
    parser.add_argument("--finals", action="store_true", help="measure finished sweeps again")
    parser.add_argument("--no-verify", action="store_true", help="sweep and pin alone")
    parser.add_argument("--device", help="cuda:0 (default: the current GPU)")
    try:
        return 0 if run(parser.parse_args(argv), Console()) else 1
    except CommandError as error:
        print(f"bench.sweeps: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
