"""The headline plot, from a committed result: time of a gemm over m, its limit, torch's BF16.

    python -m bench.plot                                 bench/results/gemm.json → gemm.svg
    python -m bench.plot FILE.json --out plot.png

The same input gives the same bytes, with one version of matplotlib: no date and no random ids.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.report import RESULTS

DEFAULT_NK = (5_376, 14_336)
LINES = {  # op -> label, colour, marker
    "gemm": ("nvfp4.gemm", "#1a7f37", "o"),
    "gemm_a16w4": ("nvfp4.gemm_a16w4", "#0969da", "s"),
}
TORCH, LIMIT = "#8b949e", "#1f2328"


def series(records: list[dict[str, Any]], op: str, nk: tuple[int, int]) -> list[dict[str, Any]]:
    """The records of an op at one (n, k), m ascending."""
    found = [r for r in records if r.get("op") == op and (r["n"], r["k"]) == nk]
    return sorted(found, key=lambda r: r["m"])


def pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("the plot needs matplotlib, found none: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "nvfp4_linear", "svg.fonttype": "path"})
    return matplotlib.pyplot


def draw(records: list[dict[str, Any]], out: Path, nk: tuple[int, int]) -> None:
    """Writes the plot; its kind goes by the name's ending (svg or png)."""
    plt = pyplot()
    lines = {op: rows for op in LINES if (rows := series(records, op, nk))}
    if not lines:
        raise ValueError(f"no record of n = {nk[0]}, k = {nk[1]}: run python -m bench.gemm")
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    for op, rows in lines.items():
        label, colour, marker = LINES[op]
        m, us = [r["m"] for r in rows], [r["median_us"] for r in rows]
        axes.plot(m, us, color=colour, marker=marker, markersize=5, label=label)
        axes.fill_between(
            m, [r["p10_us"] for r in rows], [r["p90_us"] for r in rows], color=colour, alpha=0.2
        )
    reference = next(iter(lines.values()))
    m = [r["m"] for r in reference]
    torch_us, limit_us = ([r[key] for r in reference] for key in ("torch_us", "limit_us"))
    axes.plot(m, torch_us, color=TORCH, marker="^", markersize=5, label="torch BF16 F.linear")
    axes.plot(m, limit_us, color=LIMIT, linestyle="--", linewidth=1, label="limit")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(m, [str(value) for value in m])
    gpu = reference[0]["environment"].get("gpu") or reference[0]["environment"].get("cpu")
    axes.set(xlabel="m (rows of the activation)", ylabel="time (µs)")
    axes.set_title(f"n = {nk[0]:,}, k = {nk[1]:,} on {gpu}", fontsize="medium")
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize="small")
    metadata = {"Date": None} if out.suffix == ".svg" else {"Software": None}
    figure.savefig(out, dpi=150, metadata=metadata)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__.split("\n\n")[0])
    p.add_argument("results", nargs="?", type=Path, default=RESULTS / "gemm.json")
    p.add_argument("--out", type=Path, help="svg or png (default: beside the results, svg)")
    p.add_argument("--n", type=int, default=DEFAULT_NK[0])
    p.add_argument("--k", type=int, default=DEFAULT_NK[1])
    args = p.parse_args(argv)
    out = args.out or args.results.with_suffix(".svg")
    if out.suffix not in (".svg", ".png"):
        p.error(f"--out must end in .svg or .png, got {out.name}")
    draw(json.loads(args.results.read_text()), out, (args.n, args.k))
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
