"""NAME_sweep.md and NAME_sweep.png: what bench.sweeps found, to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nvfp4_linear.lab import report
from nvfp4_linear.lab.arms import PINNED
from nvfp4_linear.lab.candidates import describe, from_dict
from nvfp4_linear.lab.verdict import tflops


def page(data: dict[str, Any]) -> str:
    """NAME_sweep.md"""
    sweeps = list(data["sweeps"].values())
    lines = ["# Sweeps", ""]
    if sweeps:
        lines += [f"{report.where({**sweeps[0], 'machine': data['machine']})}.", ""]
    lines += [
        "p50 of alternating rounds in one process; noise is the heuristic against itself; a winner "
        "is byte-exact with the heuristic and faster by more than the noise "
        "(nvfp4_linear/lab/judgement.py). The rounds change algorithm every few milliseconds, so "
        "both run at one clock; settled is what is left of a gain where each runs alone.",
        "",
        "| sweep | heuristic ms | TFLOP/s | best byte-exact ms | TFLOP/s | ratio | noise | settled | winner |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *map(_sweep_row, sweeps),
    ]
    if data["verified"]:
        lines += [
            "",
            "`torch.ops.nvfp4.gemm` of NVFP4 operands, and for small M `gemm_a4w16` with a BF16 "
            "weight, with the winners and without, each arm run "
            "until the GPU has settled before it is timed. Where it is not faster by more than the "
            "noise the winners behind it are taken out of the pin file, and both arms are the same "
            "call from then on:",
            "",
            "| case | rung | winners behind it | without ms | with ms | ratio | noise | |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
            *map(_verified_row, data["verified"]),
        ]
    return "\n".join(lines)


def _sweep_row(entry: dict[str, Any]) -> str:
    verdict, problem = entry["verdict"], entry["problem"]
    shape = (problem["m"], problem["n"], problem["k"])
    base = verdict["itself"]["heuristic_s"]
    exact = [one for one in verdict["candidates"] if not one["difference"]]
    cells = [entry["title"], f"{base * 1e3:.4f}", f"{tflops(*shape, base):.1f}"]
    if exact:
        found = exact[0]["comparison"]
        cells += [
            f"{found['candidate_s'] * 1e3:.4f}",
            f"{tflops(*shape, found['candidate_s']):.1f}",
            f"{found['ratio']:.4f}",
        ]
    else:
        cells += ["", "", ""]
    cells.append(f"{verdict['noise']:.2%}")
    settled = [one["settled"] for one in exact if one.get("settled")]
    cells.append(f"{settled[-1]['comparison']['ratio']:.4f}" if settled else "")
    winner = verdict["winner"]
    text = "none: the heuristic's stands"
    if winner is not None:
        text = describe(from_dict(verdict["candidates"][winner]["algorithm"]))
        text += f" (taken out: {entry['dropped']})" if entry["dropped"] else " (pinned)"
    return "| " + " | ".join([*cells, text]) + " |"


def _verified_row(entry: dict[str, Any]) -> str:
    case, found = entry["case"], entry["comparison"]
    word = "faster" if entry["faster"] else "slower" if entry["slower"] else "within noise"
    cells = [
        f"{entry['op']}, {case['name']}: {case['m']} x {case['n']} x {case['k']}",
        f"{entry['arms'][PINNED]['rung']}: {entry['arms'][PINNED]['kernel']}",
        str(entry["pins"]),
        f"{found['heuristic_s'] * 1e3:.4f}",
        f"{found['candidate_s'] * 1e3:.4f}",
        f"{found['ratio']:.4f}",
        f"{entry['noise']:.2%}",
        f"{word}, {'DIFFERENT BYTES' if entry['difference'] else 'same bytes'}"
        + (", taken out" if entry.get("dropped") else ""),
    ]
    return "| " + " | ".join(cells) + " |"


def draw(data: dict[str, Any], path: Path) -> str:
    """every sweep's best byte-exact algorithm over the heuristic, and its noise."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed (pip install matplotlib)"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    entries = list(reversed(data["sweeps"].values()))
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.3 * len(entries)), layout="constrained")
    for index, entry in enumerate(entries):
        verdict = entry["verdict"]
        exact = [one for one in verdict["candidates"] if not one["difference"]]
        axes.barh(index, 2 * verdict["noise"], left=1 - verdict["noise"], color="0.85")
        if exact:
            color = "tab:green" if verdict["winner"] is not None else "tab:gray"
            axes.plot(exact[0]["comparison"]["ratio"], index, "o", color=color)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(entries)), [entry["title"] for entry in entries], fontsize=7)
    axes.set(
        xlabel="best byte-exact algorithm, x the heuristic (grey: noise; green: pinned)",
        title=data["machine"]["gpu"],
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return f"wrote {path.name}"
