"""Measured L2 traffic of cuBLASLt's BF16 algorithms: what bench/traversal.py is held against.

    python -m bench.l2 ncu      profiles every algorithm below with ncu, writes NAME.json
    python -m bench.l2 run      the launches alone, each in an NVTX range "bench=NUMBER"
    python -m bench.l2 table    NAME.md from NAME.json: measured, and predicted beside it

Each algorithm is launched once, as a pin makes it (AlgoInit, attributes, AlgoCheck), into a cold L2:
ncu flushes caches before a kernel. What AlgoCheck refuses is listed as refused. Metrics that this
ncu does not know are left out.

    delivered   l1tex__m_xbar2l1tex_read_bytes: what the SMs received
    fetched     dram__bytes_read: what L2 had to get from memory, the model's read misses
    hit rate    1 - fetched / delivered, as the model counts; L2's own counters count other things
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.profile import number, read_table
from bench.report import RESULTS, environment, write_whole
from bench.tiles import MIB, Problem
from bench.traversal import CHIPS, Order, TrafficPrediction, simulate
from nvfp4_linear.algorithms import Algorithm

TIMEOUT_S = 120
RANGE = "bench="
STEP = 1024  # K elements of a model step: the same waves as finer ones, in a second a kernel
STRIPS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
SHOWN = ("row-major", "grouped:8", "column-major+grouped:8")  # those that explain --predict prints
DELIVERED, FETCHED = "l1tex__m_xbar2l1tex_read_bytes.sum", "dram__bytes_read.sum"
READS, HITS = "lts__t_sectors_op_read.sum", "lts__t_sectors_op_read_lookup_hit.sum"
WORKSPACE_BYTES = 32 << 20
METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_sector_hit_rate.pct",
    "lts__t_sectors_op_read.sum",
    "lts__t_sectors_op_read_lookup_hit.sum",
    "lts__t_sectors_op_write.sum",
    "lts__t_sectors_srcunit_tex.sum",
    "lts__t_sectors_srcunit_tex_lookup_hit.sum",
    "lts__t_sectors_srcunit_tex_op_read.sum",
    "lts__t_sectors_srcunit_tex_op_read_lookup_hit.sum",
    "lts__t_sectors_srcunit_ltcfabric.sum",
    "lts__t_sectors_srcunit_ltcfabric_lookup_hit.sum",
    "l1tex__m_xbar2l1tex_read_bytes.sum",
)


@dataclass(frozen=True)
class Case:
    """A problem and one algorithm for it, tile and cluster as cuBLASLt names them."""

    m: int
    n: int
    k: int
    tile: str
    cluster: str
    custom: int
    swizzle: int = 0

    @property
    def name(self) -> str:
        swizzle = f", swizzle {self.swizzle}" if self.swizzle else ""
        return f"{self.tile}, cluster {self.cluster}, custom {self.custom}{swizzle}"


def _cases() -> tuple[Case, ...]:
    fc2, gate_up = (37_810, 5_376, 14_336), (8_192, 28_672, 4_096)
    plain = Case(*fc2, "128x256", "1x1x1", 0)
    found = [replace(plain, custom=custom) for custom in range(16)]
    found += [replace(plain, custom=7, swizzle=swizzle) for swizzle in (1, 4, 8)]
    for tile, cluster, customs in (
        ("192x208", "1x2x1", (7, 15)),
        ("192x208", "4x4x1", (7,)),
        ("192x192", "2x1x1", (4,)),
        ("128x160", "1x2x1", (1, 3, 7)),
        ("128x128", "1x1x1", (1, 7)),
        ("256x128", "1x2x1", (5, 7)),
        ("64x208", "1x2x1", (7,)),
    ):
        found += [Case(*fc2, tile, cluster, custom) for custom in customs]
    plain = Case(*gate_up, "128x256", "1x1x1", 0)
    found += [replace(plain, custom=custom) for custom in range(8)]
    for tile, cluster, customs in (
        ("192x192", "2x1x1", (4,)),
        ("176x128", "1x2x1", (2,)),
        ("160x256", "2x1x1", (4, 12)),
        ("128x128", "1x1x1", (1, 7)),
    ):
        found += [Case(*gate_up, tile, cluster, custom) for custom in customs]
    return tuple(found)


CASES = _cases()
QUICK_CASES = (Case(128, 128, 128, "64x64", "1x1x1", 0),)


def algorithm_of(case: Case, version: int) -> Algorithm:
    """The case's algorithm with cuBLASLt's own ids."""
    from nvfp4_linear import _cublaslt as lt
    from nvfp4_linear.lab.candidates import Ranges

    ranges = Ranges.of(version)
    tiles = {lt.tile_name(tile): tile for tile in ranges.tiles}
    clusters = {lt.cluster_name(cluster): cluster for cluster in ranges.clusters}
    return Algorithm(
        id=66,
        tile=tiles[case.tile],
        stages=35,
        swizzle=case.swizzle,
        custom=case.custom,
        inner=0,
        cluster=clusters[case.cluster],
    )


def run(cases: tuple[Case, ...]) -> list[str | None]:
    """Launches every case, inside the profiler's window; gives what AlgoCheck said, None for yes."""
    import torch

    from nvfp4_linear import _cublaslt as lt
    from nvfp4_linear.lab.measure import aligned, placed
    from nvfp4_linear.lab.session import find_machine

    machine = find_machine()
    workspace = aligned((WORKSPACE_BYTES,), torch.uint8, machine.device)  # also makes the context
    planner = lt.Planner(machine.library, "never")
    cuda = machine.device == "cuda"
    answers: list[str | None] = []
    todo: list[tuple[int, Any, Any]] = []
    kept: dict[tuple[int, int, int], list[torch.Tensor]] = {}
    for position, case in enumerate(cases):
        shape = (case.m, case.n, case.k)
        if shape not in kept:
            kept[shape] = [
                placed(torch.randn(rows, columns, device=machine.device, dtype=torch.bfloat16))
                for rows, columns in ((case.m, case.k), (case.n, case.k), (case.m, case.n))
            ]
        a, b, d = kept[shape]
        problem = lt.Problem(
            "bf16",
            *shape,
            lt.DeviceInfo(**machine.device_info()),
            workspace_limit=WORKSPACE_BYTES,
        )
        wanted = asdict(algorithm_of(case, planner.library["version"]))
        answer = planner.check(problem, lt.Algorithm(**wanted))
        answers.append(None if answer["ok"] else answer["reason"])
        if answer["ok"]:
            stream = torch.cuda.current_stream().cuda_stream if cuda else 0
            operands = lt.Operands(
                a=a.data_ptr(),
                b=b.data_ptr(),
                d=d.data_ptr(),
                workspace=workspace.data_ptr(),
                workspace_bytes=WORKSPACE_BYTES,
                stream=stream,
            )
            todo.append((position, answer["plan"], operands))
    if not cuda:
        for _, plan, operands in todo:
            plan.run(operands)
        return answers
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for position, plan, operands in todo:
        torch.cuda.nvtx.range_push(f"{RANGE}{position}")
        plan.run(operands)
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_pop()
    torch.cuda.profiler.stop()
    return answers


def known_metrics(ncu: str) -> list[str]:
    """Those of METRICS that this ncu has for the GPU's chip."""
    listed = subprocess.run(
        [ncu, "--query-metrics"], timeout=TIMEOUT_S, capture_output=True, text=True
    ).stdout
    bases = {line.split()[0] for line in listed.splitlines() if line.strip()}
    return [metric for metric in METRICS if metric.split(".")[0] in bases] or list(METRICS)


def profile(ncu: str, folder: Path) -> tuple[str, list[str | None]]:
    """Runs ncu; gives its table and AlgoCheck's answers. Both stay in `folder`."""
    report, answers = folder / "l2.ncu-rep", folder / "answers.json"
    collect = [ncu, "--clock-control", "none", "--profile-from-start", "off", "--nvtx"]
    collect += ["--force-overwrite", "--export", str(report)]
    collect += ["--metrics", ",".join(known_metrics(ncu))]
    target = [sys.executable, "-m", "bench.l2", "run", "--answers", str(answers)]
    subprocess.run([*collect, *target], check=True, timeout=TIMEOUT_S)
    export = [ncu, "--import", str(report), "--page", "raw", "--csv", "--print-units", "base"]
    done = subprocess.run(export, timeout=TIMEOUT_S, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ncu could not export its report: {done.stdout} {done.stderr}")
    (folder / "l2.csv").write_text(done.stdout)
    return done.stdout, json.loads(answers.read_text())


def measured(text: str, cases: tuple[Case, ...]) -> dict[int, dict[str, Any]]:
    """ncu's table by case: kernel and metrics; several kernels of a case are an error."""
    found: dict[int, dict[str, Any]] = {}
    for row in read_table(text):
        everything = " ".join(value for value, _ in row.values())
        tagged = re.search(RANGE + r"(\d+)", everything)
        if tagged is None:
            raise ValueError(f"a kernel outside every range: {row['Kernel Name'][0]}")
        position = int(tagged[1])
        if position in found or position >= len(cases):
            raise ValueError(f"case {position} has another kernel: {row['Kernel Name'][0]}")
        metrics = {name: number(row[name]) for name in METRICS if name in row}
        found[position] = {"kernel": row["Kernel Name"][0], "metrics": metrics}
    return found


def document(text: str, answers: list[str | None], cases: tuple[Case, ...]) -> dict[str, Any]:
    """What NAME.json holds."""
    rows = measured(text, cases)
    return {
        "environment": environment("cuda"),
        "cases": [
            {**asdict(case), "refused": refused, **rows.get(position, {})}
            for position, (case, refused) in enumerate(zip(cases, answers, strict=True))
        ],
    }


# ---------------------------------------------------------------------------------------- table


def kernels(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The measured cases, one a kernel and shape: the first."""
    first: dict[tuple[Any, ...], dict[str, Any]] = {}
    for case in data["cases"]:
        if "kernel" in case:
            first.setdefault((case["m"], case["n"], case["k"], case["kernel"]), case)
    return list(first.values())


def predictions(case: dict[str, Any], orders: tuple[str, ...]) -> dict[str, TrafficPrediction]:
    """What the model says of a case, by order. Names are cuBLASLt's: the first side is along N."""
    tile_n, tile_m = map(int, case["tile"].split("x"))
    cluster_n, cluster_m = map(int, case["cluster"].split("x")[:2])
    problem = Problem(case["m"], case["n"], case["k"], tile_m, tile_n, STEP, "bf16")
    chip = CHIPS["h200"]
    return {
        order: simulate(
            problem,
            replace(Order.parse(order), cluster=(cluster_m, cluster_n)),
            sms=chip.sms,
            l2_bytes=chip.l2_bytes,
        )
        for order in orders
    }


def all_orders() -> tuple[str, ...]:
    """Both rasters in strips of every width."""
    rasters = ("row-major", "column-major")
    return tuple(str(Order(raster=raster, width=width)) for raster in rasters for width in STRIPS)


def row(case: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table."""
    metrics, predicted = case["metrics"], predictions(case, all_orders())
    delivered, fetched = metrics[DELIVERED], metrics[FETCHED]

    def error(order: str) -> float:
        return predicted[order].miss_bytes / fetched - 1

    closest = min(predicted, key=lambda order: abs(math.log1p(error(order))))
    best = predicted[closest]
    return (
        case["kernel"].split("(")[0].removeprefix("nvjet_sm90_tst_"),
        f"{best.requested_bytes / 1e9:.2f}",
        f"{delivered / 1e9:.2f}",
        f"{fetched / 1e9:.2f}",
        *(f"{predicted[order].miss_bytes / 1e9:.2f}" for order in SHOWN),
        f"{closest}: {best.miss_bytes / 1e9:.2f}, {error(closest):+.0%}",
        f"{1 - fetched / delivered:.1%}",
        f"{1 - best.miss_bytes / best.in_bounds_bytes:.1%}",
        f"{metrics[HITS] / metrics[READS]:.1%}",
        f"{metrics['gpu__time_duration.sum'] / 1e3:.2f}",
    )


HEADER = (
    "kernel",
    "asked for, GB",
    "delivered",
    "fetched",
    *(f"predicted, {order}" for order in SHOWN),
    "closest order, its error",
    "hit rate",
    "closest order's",
    "L2's counters'",
    "ms",
)


def page(data: dict[str, Any]) -> str:
    """NAME.md, without the words around the tables."""
    gpu = data["environment"]["gpu"]
    lines = [
        f"# L2 traffic of cuBLASLt's BF16 kernels, measured on {gpu} and predicted",
        "",
        "One launch each, cold L2 (`python -m bench.l2`, where the columns are explained). Predictions "
        f"are bench/traversal.py's at {CHIPS['h200'].l2_bytes // MIB} MiB and "
        f"{CHIPS['h200'].sms} SMs; the closest is of {len(all_orders())} orders: both rasters in "
        f"strips {STRIPS[0]} to {STRIPS[-1]} wide.",
    ]
    for shape in dict.fromkeys((case["m"], case["n"], case["k"]) for case in kernels(data)):
        lines += ["", f"## {shape[0]:,} x {shape[1]:,} x {shape[2]:,}", "", _line(HEADER)]
        lines.append(_line(("---", *("---:" for _ in HEADER[1:]))))
        cases = [case for case in kernels(data) if (case["m"], case["n"], case["k"]) == shape]
        lines += [_line(row(case)) for case in cases]
    return "\n".join([*lines, "", *remarks(data)]) + "\n"


def remarks(data: dict[str, Any]) -> list[str]:
    """What the tables show, and where the model is wrong."""
    measured = kernels(data)
    asked = [next(iter(predictions(case, SHOWN[:1]).values())).requested_bytes for case in measured]
    delivered = [
        case["metrics"][DELIVERED] / own for case, own in zip(measured, asked, strict=True)
    ]
    equal = sum(abs(ratio - 1) < 1e-4 for ratio in delivered)
    shown = [predictions(case, SHOWN) for case in measured]
    factors = {
        order: [
            p[order].miss_bytes / c["metrics"][FETCHED]
            for p, c in zip(shown, measured, strict=True)
        ]
        for order in SHOWN
    }
    below = [
        1 - metrics[FETCHED] / metrics[DELIVERED] - metrics[HITS] / metrics[READS]
        for metrics in (case["metrics"] for case in measured)
    ]
    worst = "; ".join(
        f"{order} {min(ratios):.2f} to {max(ratios):.2f}" for order, ratios in factors.items()
    )
    return [
        "What holds:",
        "",
        f"- Asked for: the bytes of whole tiles, {equal} of {len(delivered)} kernels to the fourth "
        f"digit. The others' clusters don't divide the grid, and the padding asks too: at most "
        f"{max(delivered) - 1:.1%} more.",
        f"- The same kernel launched again, with attributes that turned out to change nothing (bit 3 "
        f"of the custom option; swizzle 1, 4 and 8), fetches within {_again(data):.1%}.",
        "- Bit 1 of the custom option changes the raster that the kernel's name has (v to h), and "
        "with it the fetched bytes by up to 2 times at one tile: traversal matters as much as the "
        "model says.",
        "",
        "Where the model is wrong:",
        "",
        f"- It has to be told the order, and nobody says which one cuBLASLt walks. Fixed beforehand, "
        f"an order predicts this many times the fetched bytes: {worst}. So a prediction for an "
        f"algorithm is worth its spread over the orders, no more.",
        "- The closest order is picked after the fact from 18 that lie close together, so a small "
        "error there proves little. It is not one order: neither the raster in the name nor the tile "
        "fixes the width that fits.",
        "- Some kernels fetch more than any width of the raster that fits their neighbours: real CTAs "
        "leave lock step, and what one has read is gone when the next asks.",
        f"- L2's own hit rate is another number: {100 * min(below):.0f} to {100 * max(below):.0f} "
        f"points below. Its counters don't see all that SMs asked for at the same time (such requests "
        f"reach L2 as one) and see what one partition asks of the other. On the study's GB10 the "
        f"model's rate is the counters'; here it is not.",
    ]


def _again(data: dict[str, Any]) -> float:
    """Largest spread of fetched bytes among launches of one kernel at one shape."""
    fetched: dict[tuple[Any, ...], list[float]] = {}
    for case in data["cases"]:
        if "kernel" in case:
            key = (case["m"], case["n"], case["k"], case["kernel"])
            fetched.setdefault(key, []).append(case["metrics"][FETCHED])
    return max(max(values) / min(values) - 1 for values in fetched.values())


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.l2", description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=("ncu", "run", "table"))
    parser.add_argument("--out", type=Path, default=RESULTS / "l2", help="folder of NAME.json")
    parser.add_argument("--name", default="h200", help="(default: h200)")
    parser.add_argument("--raw", type=Path, help="folder that keeps ncu's report and table")
    parser.add_argument("--answers", type=Path, help="for run: file for what AlgoCheck said")
    parser.add_argument("--quick", action="store_true", help="one tiny case")
    args = parser.parse_args(argv)
    cases = QUICK_CASES if args.quick else CASES
    if args.action == "run":
        answers = run(cases)
        if args.answers:
            args.answers.write_text(json.dumps(answers))
        print(f"{answers.count(None)} of {len(answers)} launched")
        return 0
    source = args.out / f"{args.name}.json"
    if args.action == "ncu":
        ncu = shutil.which("ncu")
        if ncu is None:
            parser.error("ncu is not on the PATH: install Nsight Compute")
        with tempfile.TemporaryDirectory() as folder:
            raw = args.raw or Path(folder)
            raw.mkdir(parents=True, exist_ok=True)
            text, answers = profile(ncu, raw)
        args.out.mkdir(parents=True, exist_ok=True)
        made = document(text, answers, cases)
        write_whole(source, json.dumps(made, indent=1) + "\n")
        print(f"{sum('kernel' in case for case in made['cases'])} kernels measured")
        return 0
    write_whole(source.with_suffix(".md"), page(json.loads(source.read_text())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
