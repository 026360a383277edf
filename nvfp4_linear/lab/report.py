"""A sweep's result for people: Markdown, one line for the console, and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..machine import cublaslt_version
from .candidates import ATTRIBUTES, describe, from_dict
from .sweep import Result
from .verdict import tflops

TOP = 12


def title(data: dict[str, Any]) -> str:
    p = data["problem"]
    return f"{p['type']} {p['m']:,} x {p['n']:,} x {p['k']:,}"


def where(data: dict[str, Any]) -> str:
    """The machine in words; a test double is called one."""
    m = data["machine"]
    chip = f"{m['gpu']}, compute capability {m['cc'][0]}.{m['cc'][1]}, {m['sm_count']} SMs"
    library = f"cuBLASLt {cublaslt_version(m['cublaslt'])}"
    if m["test_double"]:
        return (
            f"TEST DOUBLE of {library} on host memory ({chip}): its times say nothing of any chip"
        )
    return f"{chip}, {library}, torch {data['measured_with']['torch']}"


def summary(result: Result) -> str:
    """One line: what was tried and what came of it."""
    data = result.data
    accepted = sum(len(g["accepted"]) for g in data["generations"])
    checked = sum(g["checked"] for g in data["generations"])
    counts = f"{checked:,} checked, {accepted:,} accepted, {len(data['screened']):,} timed"
    verdict = data["verdict"]["reason"] if result.finished else "not finished"
    return f"{title(data)}: {counts}: {verdict}"


def markdown(result: Result) -> str:
    """The whole result, except for the samples, which are in the JSON file."""
    data = result.data
    lines = [
        f"# Sweep: {title(data)}",
        "",
        where(data) + f", {data['date']}.",
        "",
        f"**{summary(result)}**",
        "",
        *_final_lines(data),
        "## What was tried",
        "",
        *_tried_lines(data),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _final_lines(data: dict[str, Any]) -> list[str]:
    verdict, problem = data["verdict"], data["problem"]
    if verdict is None:
        return ["Not finished: run the same sweep again to go on.", ""]
    itself = verdict["itself"]
    base = itself["heuristic_s"]
    shape = (problem["m"], problem["n"], problem["k"])

    def row(name: str, seconds: float, ratio: str, wins: str, exact: str, algorithm: dict) -> str:
        nine = " / ".join(str(algorithm[key]) for key in ATTRIBUTES)
        return (
            f"| {name} | {seconds * 1e3:.4f} | {tflops(*shape, seconds):.1f} | {ratio} | {wins} "
            f"| {exact} | {nine} |"
        )

    lines = [
        f"p50 of {len(data['final']['rounds'])} rounds, AB/BA alternating, one process; noise "
        f"{verdict['noise']:.2%} (the heuristic against itself: p50 ratio {itself['ratio']:.4f}, "
        f"10th to 90th percentile {itself['low']:.4f} to {itself['high']:.4f}).",
        "",
        f"| algorithm | ms | TFLOP/s | x heuristic | rounds won | bytes | {' / '.join(ATTRIBUTES)} |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        row("heuristic", base, "1", "", "reference", data["heuristic"][0]["algorithm"]),
    ]
    for index, entry in enumerate(verdict["candidates"]):
        found, different = entry["comparison"], entry["difference"]
        name = describe(from_dict(entry["algorithm"]))
        lines.append(
            row(
                f"**{name}**" if index == verdict["winner"] else name,
                found["candidate_s"],
                f"{found['ratio']:.4f}",
                f"{found['wins']} of {found['rounds']}",
                f"{different['elements']:,} differ" if different else "equal",
                entry["algorithm"],
            )
        )
    settled = [f"- settled: {settled_text(e)}" for e in verdict["candidates"] if e["settled"]]
    return [*lines, *(["", *settled] if settled else []), ""]


def settled_text(entry: dict[str, Any]) -> str:
    """A candidate's settled rounds in words; empty where there are none."""
    settled = entry["settled"]
    if settled is None:
        return ""
    found = settled["comparison"]
    return (
        f"{describe(from_dict(entry['algorithm']))}: {found['ratio']:.4f} x heuristic, won "
        f"{found['wins']} of {found['rounds']} rounds, noise {settled['noise']:.2%}"
    )


def _tried_lines(data: dict[str, Any]) -> list[str]:
    timed = {tuple(entry["algorithm"].values()) for entry in data["screened"]}
    lines = []
    for number, generation in enumerate(data["generations"]):
        what = "the heuristic's answers and around them" if number == 0 else "around the best"
        if generation["capabilities"] is not None:
            what += ", and the whole range of ids, tiles, stages and clusters"
        accepted = [tuple(a["algorithm"].values()) for a in generation["accepted"]]
        lines.append(
            f"- {what}: {generation['checked']:,} of {generation['total']:,} candidates checked, "
            f"{len(accepted):,} accepted, {sum(a in timed for a in accepted):,} of these timed"
        )
        for reason, count in sorted(generation["refused"].items(), key=lambda item: -item[1]):
            lines.append(f"  - {count:,}: {reason}")
    for one in data["lost"]:
        algorithm = describe(from_dict(one["algorithm"]))
        lines.append(f"- rejected in {one['stage']}: {algorithm}: {one['reason']}")
    best = sorted(data["screened"], key=lambda entry: -entry["ratio"])[:TOP]
    if best:
        lines += ["", f"Best {len(best)} of the screen (a few samples each, x heuristic):", ""]
    for entry in best:
        different = entry["difference"]
        note = f", {different['elements']:,} elements differ" if different else ""
        lines.append(f"- {entry['ratio']:.4f}: {describe(from_dict(entry['algorithm']))}{note}")
    return lines


def write(result: Result, plot: bool = True) -> list[str]:
    """Writes FILE.md and, where matplotlib is there, FILE.png; gives what was written or not."""
    page = result.path.with_suffix(".md")
    page.write_text(markdown(result))
    said = [f"wrote {result.path} and {page.name}"]
    if plot and result.finished:
        picture = result.path.with_suffix(".png")
        try:
            draw(result, picture)
            said.append(f"wrote {picture.name}")
        except ImportError:
            said.append("no plot: matplotlib is not installed (pip install matplotlib)")
    return said


def draw(result: Result, path: Path) -> None:
    """The screen, fastest first, and the finalists over their rounds. ImportError: no matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    data, verdict = result.data, result.data["verdict"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    screened = sorted(data["screened"], key=lambda entry: -entry["ratio"])
    for exact, color in ((True, "tab:blue"), (False, "tab:red")):
        points = [
            (index, entry["ratio"])
            for index, entry in enumerate(screened)
            if (entry["difference"] is None) == exact
        ]
        if points:
            label = "same bytes" if exact else "other bytes"
            left.scatter(*zip(*points, strict=True), s=8, color=color, label=label)
    left.axhline(1, color="black", linewidth=0.8)
    left.set(xlabel="algorithm, fastest first", ylabel="x heuristic", title="screen")
    left.legend()
    noise = verdict["noise"]
    right.axvspan(1 - noise, 1 + noise, color="0.85", label=f"noise {noise:.2%}")
    for index, entry in enumerate(reversed(verdict["candidates"])):
        found = entry["comparison"]
        color = "tab:red" if entry["difference"] else "tab:blue"
        right.plot([found["low"], found["high"]], [index, index], color=color)
        right.plot(found["ratio"], index, "o", color=color)
    names = [describe(from_dict(e["algorithm"])) for e in reversed(verdict["candidates"])]
    right.set_yticks(range(len(names)), names, fontsize=7)
    right.set(xlabel="x heuristic: p50, 10th to 90th percentile", title="final")
    right.legend()
    double = ", TEST DOUBLE" if data["machine"]["test_double"] else ""
    figure.suptitle(f"{title(data)}, {data['machine']['gpu']}{double}")
    figure.savefig(path, dpi=150)
    plt.close(figure)
