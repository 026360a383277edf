"""What the hardware counters say of the main kernels: drives ncu, and boils its table down.

    python -m bench.profile ncu      profile, parse, write ncu.json and ncu.md
    python -m bench.profile run      the calls alone, each in an NVTX range "bench=CASE"
    python -m bench.profile parse F  a table made with `ncu --import ... --page raw --csv`

ncu runs each kernel several times, one at a time, caches flushed, clocks as they are; its durations
are of single launches and no benchmark. Metrics are looked up by name in whatever the sections of
the installed ncu collect: one that is missing is null.

    instructions_per_element   warp instructions executed x 32 / elements produced
    tensor_pipe_pct            the busiest tensor pipe, of its peak while the SM is active
"""

from __future__ import annotations

import argparse
import csv
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.check import ops, quantized
from bench.report import RESULTS, Record, environment, to_json, to_markdown, write_whole
from bench.timing import normal

SECTIONS = (
    "SpeedOfLight",
    "MemoryWorkloadAnalysis",
    "MemoryWorkloadAnalysis_Chart",
    "ComputeWorkloadAnalysis",
    "InstructionStats",
    "WarpStateStats",
    "LaunchStats",
    "Occupancy",
)
# What no section of this ncu need have.
ASKED_FOR = (
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
)
TIMEOUT_S = 240
RANGE = "bench="
ROWS, K, N = 37_810, 14_336, 5_376
QUICK_ROWS, QUICK_K, QUICK_N = 130, 80, 48
GEMM_M = (1, 16, 32, 64, 512, 4096)  # the last: decode, then cuBLASLt
WARP = 32

# our key -> what the column's name must match; the first that is there is taken
METRICS = {
    "duration_us": (r"^gpu__time_duration\.sum$",),
    "dram_pct": (r"^(gpu__dram_|dram__)throughput\.avg\.pct_of_peak_sustained_elapsed$",),
    "dram_bytes_s": (r"^dram__bytes\.sum\.per_second$",),
    "dram_read_bytes": (r"^dram__bytes_read\.sum$",),
    "dram_write_bytes": (r"^dram__bytes_write\.sum$",),
    "l2_hit_pct": (r"^lts__t_sector_hit_rate\.pct$",),
    "sm_pct": (r"^sm__throughput\.avg\.pct_of_peak_sustained_elapsed$",),
    "issue_active_pct": (
        r"^sm__inst_issued\.avg\.pct_of_peak_sustained_active$",
        r"^smsp__issue_active\.avg\.pct_of_peak_sustained_active$",
    ),
    "occupancy_pct": (r"^sm__warps_active\.avg\.pct_of_peak_sustained_active$",),
    "registers": (r"^launch__registers_per_thread$",),
    "shared_bytes": (r"^launch__shared_mem_per_block$",),
    "warp_instructions": (r"^smsp__inst_executed\.sum$", r"^sm__inst_executed\.sum$"),
}
TENSOR_PIPE = r"pipe_tensor.*\.avg\.pct_of_peak_sustained_(active|elapsed)$"
STALL = r"^smsp__average_warps?_(?:latency_)?issue_stalled_(\w+?)(?:_per_issue_active)?\.ratio$"
TOP_STALLS = 3
UNITS = {  # of time, in microseconds
    "ns": 1e-3,
    "nsecond": 1e-3,
    "us": 1.0,
    "usecond": 1.0,
    "ms": 1e3,
    "msecond": 1e3,
    "s": 1e6,
    "second": 1e6,
}


@dataclass(frozen=True)
class Case:
    """A call to profile, and how many elements it produces."""

    name: str
    elements: int
    call: Callable[[], Any]


# -------------------------------------------------------------------------------------------------
# The calls
# -------------------------------------------------------------------------------------------------


def sizes(quick: bool) -> tuple[int, int, int]:
    return (QUICK_ROWS, QUICK_K, QUICK_N) if quick else (ROWS, K, N)


def names(quick: bool) -> dict[str, int]:
    """Every case and its elements, in the order they run."""
    rows, k, n = sizes(quick)
    producers = {
        f"swiglu_quantize {rows}x{2 * k}": rows * k,
        f"quantize {rows}x{k}": rows * k,
        f"global_scale {rows}x{k}": rows * k,
        f"dequantize {rows}x{k}": rows * k,
    }
    return producers | {f"gemm {m}x{n}x{k}": m * n for m in GEMM_M}


def cases(device: str, quick: bool) -> list[Case]:
    """The calls behind `names`, their operands made."""
    rows, k, n = sizes(quick)
    gate_up = normal(rows, 2 * k, device, seed=1)
    x = gate_up[:, :k].contiguous()
    g = ops.global_scale(x)
    packed, weight = quantized(x), quantized(normal(n, k, device, seed=2))
    calls: list[Callable[[], Any]] = [
        lambda: ops.swiglu_quantize(gate_up, g),
        lambda: ops.quantize(x, g),
        lambda: ops.global_scale(x),
        lambda: packed.decode(),
    ]
    for m in GEMM_M:
        a = quantized(normal(m, k, device, seed=m))
        calls.append(
            lambda a=a: ops.gemm(a.data, weight.data, a.scale, weight.scale, out_dtype=None)
        )
    return [
        Case(name, elements, call)
        for (name, elements), call in zip(names(quick).items(), calls, strict=True)
    ]


def run(device: str, quick: bool) -> None:
    """Every case once, warm, inside the profiler's window."""
    todo = cases(device, quick)
    for case in todo:
        case.call()
    if device != "cuda":
        return
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for case in todo:
        torch.cuda.nvtx.range_push(RANGE + case.name)
        case.call()
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_pop()
    torch.cuda.profiler.stop()


# -------------------------------------------------------------------------------------------------
# ncu
# -------------------------------------------------------------------------------------------------


def ncu_commands(ncu: str, report: Path, quick: bool) -> tuple[list[str], list[str]]:
    """(the profiling run, the export of its report as a table on stdout)."""
    sections = [word for section in SECTIONS for word in ("--section", section)]
    sections += ["--metrics", ",".join(ASKED_FOR)]
    collect = [ncu, "--clock-control", "none", "--profile-from-start", "off", "--nvtx"]
    collect += ["--target-processes", "all", "--force-overwrite", "--export", str(report)]
    target = [sys.executable, "-m", "bench.profile", "run", *(["--quick"] if quick else [])]
    export = [ncu, "--import", str(report), "--page", "raw", "--csv"]
    return [*collect, *sections, *target], [*export, "--print-units", "base"]


def profile(ncu: str, folder: Path, quick: bool) -> str:
    """Runs ncu; gives its table, also kept in `folder` with the report."""
    report = folder / "profile.ncu-rep"
    collect, export = ncu_commands(ncu, report, quick)
    subprocess.run(collect, check=True, timeout=TIMEOUT_S)
    done = subprocess.run(export, timeout=TIMEOUT_S, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ncu could not export its report: {done.stdout} {done.stderr}")
    (folder / "profile.csv").write_text(done.stdout)
    return done.stdout


def read_table(text: str) -> list[dict[str, tuple[str, str]]]:
    """Rows of {column: (value, unit)}; what ncu prints around its table is passed over."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError('no line that starts with "ID": export with --page raw --csv')
    header, units, *rows = csv.reader(line for line in lines[start:] if line.startswith('"'))
    return [
        {name: (value, unit) for name, value, unit in zip(header, row, units, strict=True)}
        for row in rows
    ]


def number(cell: tuple[str, str]) -> float | None:
    """A cell as a number, times in microseconds; None where it is not one."""
    value, unit = cell
    try:
        parsed = float(value.replace(",", ""))
    except ValueError:
        return None
    return parsed * UNITS.get(unit, 1.0)


def boil_down(row: dict[str, tuple[str, str]], elements: dict[str, int]) -> dict[str, Any]:
    """The few figures of one kernel."""
    everything = " ".join(value for value, _ in row.values())
    tagged = re.search(RANGE + r"([\w.,+ -]+)", everything)
    case = tagged.group(1).strip() if tagged else None
    figures: dict[str, Any] = {"range": case, "kernel": short_name(row["Kernel Name"][0])}
    for key, patterns in METRICS.items():
        found = (row[c] for p in patterns for c in row if re.search(p, c))
        figures[key] = next((n for cell in found if (n := number(cell)) is not None), None)
    tensor = [number(row[c]) for c in row if re.search(TENSOR_PIPE, c)]
    figures["tensor_pipe_pct"] = max((t for t in tensor if t is not None), default=None)
    figures["stalls"] = stalls(row)
    executed, made = figures["warp_instructions"], elements.get(case or "")
    per_element = executed * WARP / made if executed and made else None
    figures["instructions_per_element"] = per_element
    return figures


def stalls(row: dict[str, tuple[str, str]]) -> dict[str, float]:
    """What warps wait for most: warps stalled so, for each instruction issued."""
    found = {m[1]: number(row[c]) for c in row if (m := re.search(STALL, c))}
    known = {name: value for name, value in found.items() if value is not None}
    return dict(sorted(known.items(), key=lambda item: -item[1])[:TOP_STALLS])


def short_name(kernel: str) -> str:
    """`void ns::(anonymous namespace)::f<T, (bool)1>(Args)` → `f<T, (bool)1>`."""
    name = re.sub(r"^(void|__global__)\s+", "", kernel)
    name = re.sub(r"<unnamed>::|\(anonymous namespace\)::|\(\w*anonymous\w*\)::", "", name)
    template = name.find("<")
    call = name.find("(", name.rfind(">") if template >= 0 else 0)
    name = name[:call] if call > 0 else name
    head, bracket, rest = name.partition("<")
    return head.split("::")[-1] + bracket + rest


def records(text: str, quick: bool) -> list[Record]:
    """One for each kernel of the table, in the order they ran."""
    elements, made = names(quick), []
    for row in read_table(text):
        figures = boil_down(row, elements)
        made.append(
            Record(
                f"{figures['range'] or 'no range'}: {figures['kernel']}",
                extra={**figures, "note": note(figures)},
            )
        )
    return made


def note(figures: dict[str, Any]) -> str:
    """A line for people."""
    shown = {
        "duration_us": "{:.2f} µs",
        "dram_pct": "dram {:.1f} %",
        "dram_bytes_s": "{:.3g} B/s",
        "tensor_pipe_pct": "tensor pipe {:.1f} %",
        "l2_hit_pct": "L2 hits {:.1f} %",
        "issue_active_pct": "issue {:.1f} %",
        "registers": "{:.0f} registers",
        "instructions_per_element": "{:.1f} instructions an element",
    }
    parts = [form.format(figures[k]) for k, form in shown.items() if figures[k] is not None]
    return ", ".join(parts)


def write(text: str, out: Path, quick: bool) -> None:
    found = records(text, quick)
    values = environment("cuda" if torch.cuda.is_available() else "cpu")
    rows = [record.to_dict() | {"environment": values} for record in found]
    write_whole(out / "ncu.json", to_json(rows))
    write_whole(out / "ncu.md", to_markdown("Hardware counters", found, values))
    for record in found:
        print(f"{record.case}: {record.extra['note']}")


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m bench.profile", description=__doc__.split("\n\n")[0]
    )
    p.add_argument("action", choices=("ncu", "run", "parse"))
    p.add_argument("table", nargs="?", type=Path, help="for parse: the exported table")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="for run")
    p.add_argument("--quick", action="store_true", help="tiny sizes")
    p.add_argument("--out", type=Path, default=RESULTS, help="folder of ncu.json and ncu.md")
    p.add_argument("--raw", type=Path, help="folder that keeps ncu's report and table")
    args = p.parse_args(argv)
    if args.action == "run":
        run(args.device, args.quick)
    elif args.action == "parse":
        if args.table is None:
            p.error("parse needs the exported table")
        write(args.table.read_text(), args.out, args.quick)
    else:
        ncu = shutil.which("ncu")
        if ncu is None:
            p.error("ncu is not on the PATH: install Nsight Compute")
        with tempfile.TemporaryDirectory() as folder:
            raw = args.raw or Path(folder)
            raw.mkdir(parents=True, exist_ok=True)
            write(profile(ncu, raw, args.quick), args.out, args.quick)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
