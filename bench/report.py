"""Results of a benchmark: records, the machine they were made on, the files they are written to.

A result file is a JSON list of records, one a line, each with at least

    case         what was run
    median_us    of ours
    limit_us     what the memory, the tensor cores or a launch allow; `limit` says which
    of_limit     limit_us / median_us: 1 is the limit
    vs_torch     time of torch eager / median_us: above 1, ours is faster
    vs_compile   the same of torch.compile

null where a figure does not apply, and `environment`: GPU, driver, clocks under load, versions,
copy rate. Beside it a Markdown table of the same. No host name, no path. Written whole or not at
all.

    python -m bench.report FILE.json...     the same as a short table
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from bench.timing import (
    ROUNDS,
    Samples,
    Timer,
    Variant,
    copy_rate,
    make_timer,
    matmul_rate,
    normal,
)
from nvfp4_linear import machine

RESULTS = Path(__file__).with_name("results")
SIGNIFICANT_DIGITS = 5
NVIDIA_SMI = {  # our name -> nvidia-smi's
    "gpu": "name",
    "driver": "driver_version",
    "sm_clock_mhz": "clocks.sm",
    "sm_clock_max_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
}


@dataclass
class Record:
    """One case. `extra`: further keys of its line. See the module docstring."""

    case: str
    median_us: float | None = None
    limit_us: float | None = None
    vs_torch: float | None = None
    vs_compile: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def of_limit(self) -> float | None:
        return self.limit_us / self.median_us if self.median_us and self.limit_us else None

    def to_dict(self) -> dict[str, Any]:
        names = ("case", "median_us", "limit_us", "of_limit", "vs_torch", "vs_compile")
        values = {name: getattr(self, name) for name in names} | self.extra
        return {key: _rounded(value) for key, value in values.items()}


def _rounded(value: Any) -> Any:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if isinstance(value, float) else value


def ratio(samples: dict[str, Samples], name: str, ours: str = "ours") -> float | None:
    """Time of `name` over time of ours, None where `name` was not run."""
    return samples[name].median / samples[ours].median if name in samples else None


# -------------------------------------------------------------------------------------------------
# The machine
# -------------------------------------------------------------------------------------------------


def environment(device: str) -> dict[str, Any]:
    """GPU, driver, clocks under load, versions, date and commit. Null where unknown."""
    values: dict[str, Any] = {"device": device}
    if device == "cuda":
        values |= _gpu_under_load()
    else:
        values["cpu"] = machine.cpu_name()
    now = datetime.now(timezone.utc)
    return values | machine.versions() | {"date": f"{now:%Y-%m-%d}", "commit": commit()}


def _gpu_under_load() -> dict[str, Any]:
    """What nvidia-smi reads while a second of matrix products is queued, so that clocks are up."""
    a = normal(8192, 8192, "cuda", 0)
    out = torch.empty_like(a)
    for _ in range(600):
        torch.mm(a, a, out=out)
    query = ",".join(NVIDIA_SMI.values())
    command = ["nvidia-smi", f"--id={torch.cuda.current_device()}", f"--query-gpu={query}"]
    text = _output([*command, "--format=csv,noheader,nounits"])
    torch.cuda.synchronize()
    values: dict[str, Any] = dict.fromkeys(NVIDIA_SMI)
    if text:
        values |= zip(NVIDIA_SMI, map(_number, text.splitlines()[0].split(", ")), strict=False)
    return values | {"gpu": torch.cuda.get_device_name()}


def _number(text: str) -> Any:
    """A whole or decimal number as such, anything else as text."""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else text


def commit() -> str | None:
    """The commit of this tree, "+" where it has changes; $BENCH_COMMIT where there is no git."""
    here = str(Path(__file__).parent)
    text = _output(["git", "-C", here, "rev-parse", "--short=12", "HEAD"])
    if not text:
        return os.environ.get("BENCH_COMMIT")
    changed = _output(["git", "-C", here, "status", "--porcelain", "--untracked-files=no"])
    return text.strip() + ("+" if changed else "")


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


# -------------------------------------------------------------------------------------------------
# Files
# -------------------------------------------------------------------------------------------------


def to_json(records: list[dict[str, Any]]) -> str:
    """A list, one record a line."""
    lines = [json.dumps(record, ensure_ascii=False, allow_nan=False) for record in records]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def to_markdown(title: str, records: list[Record], values: dict[str, Any]) -> str:
    """The environment, then a table of what every record has."""
    about = "; ".join(f"{key} {_rounded(value)}" for key, value in values.items() if value)
    head = "| case | median µs | p10 to p90 | limit µs | of limit | vs torch | vs compile | note |"
    rows = [f"# {title}", "", about, "", head, "| --- |" + " ---: |" * 6 + " --- |"]
    for r in records:
        low, high = r.extra.get("p10_us"), r.extra.get("p90_us")
        cells = [
            r.case,
            _cell(r.median_us),
            f"{_cell(low)} to {_cell(high)}" if low is not None else "",
            _cell(r.limit_us),
            "" if r.of_limit is None else f"{r.of_limit:.1%}",
            "" if r.vs_torch is None else f"{r.vs_torch:.2f}×",
            "" if r.vs_compile is None else f"{r.vs_compile:.2f}×",
            str(r.extra.get("note", "")),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join([*rows, ""])


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 100 else f"{value:.1f}"


def write_whole(path: Path, text: str) -> None:
    """Writes a file by renaming a finished one over it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


# -------------------------------------------------------------------------------------------------
# A run
# -------------------------------------------------------------------------------------------------


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    p = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=description)
    p.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU, else the CPU")
    p.add_argument("--quick", action="store_true", help="tiny sizes: does it run, not how fast")
    p.add_argument("--rounds", type=int, help=f"samples a case (default {ROUNDS}; quick: 3)")
    p.add_argument("--only", metavar="REGEX", help="cases whose name matches")
    p.add_argument(
        "--out",
        type=Path,
        help="folder of the result files (default: bench/results on a GPU; printed only on a CPU)",
    )
    return p


class Run:
    """One benchmark, from its arguments to its files: rates of this run, records, output."""

    def __init__(self, name: str, p: argparse.ArgumentParser, argv: list[str] | None):
        self.name = name
        self.arguments = args = p.parse_args(argv)
        self.device: str = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if self.device == "cuda" and not torch.cuda.is_available():
            p.error("--device cuda needs a GPU, torch sees none: use --device cpu --quick")
        self.quick: bool = args.quick
        self.rounds: int = args.rounds or (3 if args.quick else ROUNDS)
        if self.rounds < 1:
            p.error(f"--rounds must be at least 1, got {self.rounds}")
        self.records: list[Record] = []
        self.environment = environment(self.device)
        self.timer: Timer = make_timer(self.device)
        self._rates: dict[str, float] = {}

    def wanted(self, case: str) -> bool:
        return not self.arguments.only or re.search(self.arguments.only, case) is not None

    @property
    def copy_rate(self) -> float:
        """Bytes a second, measured at first use."""
        if "copy" not in self._rates:
            self._rates["copy"] = copy_rate(self.timer, self.rounds)
            self.environment["copy_tb_s"] = self._rates["copy"] / 1e12
        return self._rates["copy"]

    @property
    def matmul_rate(self) -> float:
        """BF16 operations a second, measured at first use."""
        if "matmul" not in self._rates:
            self._rates["matmul"] = matmul_rate(self.timer, self.rounds)
            self.environment["bf16_tflop_s"] = self._rates["matmul"] / 1e12
        return self._rates["matmul"]

    def limit(self, moved_bytes: int, operations: int = 0, least_us: float = 0) -> dict[str, Any]:
        """{"limit_us", "limit"}: the largest of bytes over the copy rate, operations over the BF16
        rate, and a launch."""
        limits = {"bytes / copy rate": moved_bytes / self.copy_rate * 1e6}
        if operations:
            limits["operations / BF16 rate"] = operations / self.matmul_rate * 1e6
        if least_us:
            limits["an empty kernel"] = least_us
        name = max(limits, key=limits.__getitem__)
        return {"limit_us": limits[name], "limit": name}

    def measure(self, variants: list[Variant]) -> dict[str, Samples]:
        return self.timer.measure(variants, self.rounds)

    def add(self, record: Record) -> None:
        """Keeps a record and prints its line."""
        self.records.append(record)
        values = record.to_dict()
        keys = ("median_us", "limit_us", "of_limit", "vs_torch", "vs_compile", "note")
        parts = [f"{key} {values[key]}" for key in keys if values.get(key) is not None]
        print(f"{record.case}: {', '.join(parts)}", flush=True)

    def finish(self, title: str) -> None:
        """Measures the copy rate again (its drift is recorded) and writes the files."""
        if "copy" in self._rates:
            self.environment["copy_tb_s_at_end"] = copy_rate(self.timer, self.rounds) / 1e12
        about = {key: _rounded(value) for key, value in self.environment.items()}
        out = self.arguments.out or (RESULTS if self.device == "cuda" else None)
        if out is None:
            return
        rows = [record.to_dict() | {"environment": about} for record in self.records]
        write_whole(out / f"{self.name}.json", to_json(rows))
        write_whole(out / f"{self.name}.md", to_markdown(title, self.records, self.environment))


def short_table(rows: list[dict[str, Any]]) -> str:
    """A line a record: case, median, and the three ratios."""
    lines = []
    for r in rows:
        median = "" if r["median_us"] is None else f"{r['median_us']:.2f}"
        of_limit = "" if r["of_limit"] is None else f"{r['of_limit']:.1%}"
        ratios = ["" if r[key] is None else f"{r[key]:.2f}x" for key in ("vs_torch", "vs_compile")]
        if r["median_us"] is None:
            ratios = [str(r.get("note", ""))]
        cells = [f"{r['case'][:64]:<44}", f"{median:>9}", f"{of_limit:>7}"]
        lines.append(" ".join([*cells, *(f"{cell:>7}" for cell in ratios)]).rstrip())
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m bench.report", description="Short tables.")
    p.add_argument("results", nargs="+", type=Path)
    for path in p.parse_args(argv).results:
        rows = json.loads(path.read_text())
        print(f"{path.stem}: case, median us, of limit, vs torch, vs compile")
        print(short_table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
