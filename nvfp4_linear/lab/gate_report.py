"""A gate's data as the promotion report: the study's own tables, and beside it the study's figures.

    | measured on … (p50 of 20 rounds, AB/BA alternating) | heuristic | pinned | speedup |

A stage that was not reached has no row. What a test double timed is called that in every table.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from .. import _cublaslt as lt
from ..machine import cublaslt_version
from . import study

Row = tuple[str, ...]


def markdown(data: dict[str, Any], *, canonical: bool = False) -> str:
    """The report. canonical: with the study's figures beside the machine's own."""
    verdict = data["verdict"]
    m, n, k = shape(data)
    lines = [
        f"# Gate: FC2 {m:,} x {n:,} x {k:,}",
        "",
        f"{where(data)}, {data['date']}.",
        "",
        f"**{'PROMOTED' if verdict['promoted'] else 'NOT PROMOTED'}**: "
        + "; ".join(verdict["reasons"]),
        "",
        *table(("field", "pinned", "heuristic"), algorithm_rows(data)),
        "",
        *table(*measured(data)),
        "",
        "Bytes: " + bytes_line(data),
        "",
    ]
    if canonical:
        lines += [*table(*beside_the_study(data)), "", *rows_note(data), *sizes_note(data)]
    lines += [
        "Promotion needs, in the study's own list: "
        + "; ".join(study.PROMOTION_NEEDS)
        + ". This gate shows the first two, at this shape.",
    ]
    return "\n".join(lines).rstrip() + "\n"


def where(data: dict[str, Any]) -> str:
    machine = data["machine"]
    chip = (
        f"{machine['gpu']}, compute capability {machine['cc'][0]}.{machine['cc'][1]}, "
        f"{machine['sm_count']} SMs"
    )
    library = f"cuBLASLt {cublaslt_version(machine['cublaslt'])}"
    if machine["test_double"]:
        return (
            f"TEST DOUBLE of {library} on host memory, playing a {chip}: it shows that the ladder "
            f"works, its times say nothing of any chip"
        )
    return f"{chip}, {library}, torch {machine['torch']}"


def shape(data: dict[str, Any]) -> tuple[int, int, int]:
    model = data["model"]
    return model["tokens"], model["hidden"], model["ffn"]


def algorithm_rows(data: dict[str, Any]) -> list[Row]:
    """The study's rows: what each arm runs."""
    arms = [data["arms"][name] for name in ("pinned", "heuristic")]

    def row(field: str, text: Any) -> Row:
        return field, *(text(arm["algorithm"]) if arm["algorithm"] else "none" for arm in arms)

    return [
        row(
            "algorithm id / tile id / stages id",
            lambda a: (
                f"{a['id']} / {a['tile']} (`{lt.tile_name(a['tile'])}`) / "
                f"{a['stages']} (`{lt.stages_name(a['stages'])}`)"
            ),
        ),
        row("split-K / reduction scheme", lambda a: f"{a['split_k']} / {a['reduction']}"),
        row("custom option / CTA swizzle", lambda a: f"{a['custom']} / {a['swizzle']}"),
        row(
            "cluster shape / inner shape",
            lambda a: (
                f"{a['cluster']} (`{lt.cluster_name(a['cluster'])}`) / "
                f"{a['inner']} (`{lt.inner_name(a['inner'])}`)"
            ),
        ),
        ("workspace", *(f"{arm['workspace_bytes']:,} bytes" for arm in arms)),
        ("rung", *(f"{arm['rung']}, {arm['kernel']}" for arm in arms)),
    ]


def measured(data: dict[str, Any]) -> tuple[Row, list[Row]]:
    """Header and rows of the study's table, from this machine."""
    machine, rounds = data["machine"], data["ladder"]["rounds"]
    place = "a TEST DOUBLE" if machine["test_double"] else machine["gpu"]
    header = (
        f"measured on {place} (p50 of {rounds} rounds, AB/BA alternating)",
        "heuristic",
        "pinned",
        "speedup",
    )
    rows: list[Row] = []
    isolated = data["isolated"]
    if isolated:
        base, own = p50s(isolated["gemm"])
        rate = isolated["tflops"]
        rows.append(
            (
                "GEMM",
                f"{ms(base)}, {rate['heuristic']:.2f} TFLOP/s",
                f"{ms(own)}, {rate['pinned']:.2f} TFLOP/s",
                f"{base / own:.3f}x",
            )
        )
        producer = ms(median(isolated["producer_s"]))
        rows.append(("producer", producer, producer, ""))
        rows.append(pair_row("producer + GEMM", isolated["producer_and_gemm"]))
    rows += [pair_row(f"whole block {block['block']}", block) for block in data["blocks"]]
    for one in data["trajectories"]:
        base, own = one["seconds"]["heuristic"], one["seconds"]["pinned"]
        name = f"{one['steps']}-step trajectory, one pair"
        rows.append((name, f"{base:.3f} s", f"{own:.3f} s", f"{base / own:.3f}x"))
    return header, rows


def beside_the_study(data: dict[str, Any]) -> tuple[Row, list[Row]]:
    """The study's table with this machine's figures beside it: heuristic → pinned, speedup."""
    isolated = data["isolated"]
    blocks = {block["block"]: block for block in data["blocks"]}
    trajectories = {one["steps"]: one["seconds"] for one in data["trajectories"]}

    def own(pair: tuple[float, float] | None, unit: str, scale: float) -> str:
        if pair is None:
            return "not run"
        base, pinned = (value * scale for value in pair)
        return f"{base:.3f} → {pinned:.3f} {unit}, {base / pinned:.3f}x"

    def theirs(pair: tuple[float, float], unit: str) -> str:
        return f"{pair[0]:.3f} → {pair[1]:.3f} {unit}, {pair[0] / pair[1]:.3f}x"

    def timed(found: dict[str, Any] | None) -> tuple[float, float] | None:
        return p50s(found) if found else None

    producers = tuple(
        whole - gemm for whole, gemm in zip(study.PRODUCER_AND_GEMM_MS, study.GEMM_MS, strict=True)
    )
    rows = [
        ("GEMM", theirs(study.GEMM_MS, "ms"), own(timed(isolated and isolated["gemm"]), "ms", 1e3)),
        (
            "producer",
            f"about {sum(producers) / 2:.1f} ms (the difference of its neighbours)",
            ms(median(isolated["producer_s"])) if isolated else "not run",
        ),
        (
            "producer + GEMM",
            theirs(study.PRODUCER_AND_GEMM_MS, "ms"),
            own(timed(isolated and isolated["producer_and_gemm"]), "ms", 1e3),
        ),
    ]
    rows += [
        (f"whole block {index}", theirs(pair, "ms"), own(timed(blocks.get(index)), "ms", 1e3))
        for index, pair in study.BLOCK_MS.items()
    ]
    for steps, pair in study.TRAJECTORY_S.items():
        seconds = trajectories.get(steps)
        found = (seconds["heuristic"], seconds["pinned"]) if seconds else None
        rows.append((f"{steps}-step trajectory, one pair", theirs(pair, "s"), own(found, "s", 1.0)))
    here = "TEST DOUBLE" if data["machine"]["test_double"] else data["machine"]["gpu"]
    header = ("heuristic → pinned", f"{study.CHIP}, the study", f"{here}, here")
    return header, rows


def rows_note(data: dict[str, Any]) -> list[str]:
    """The one difference that there is at the study's sizes: `forward_swiglu` pads no rows."""
    if shape(data) != (study.M, study.N, study.K):
        return []
    more = study.PADDED_M / study.M - 1
    return [
        f"Rows: the study's producer pads M = {study.M:,} to {study.PADDED_M:,}, so its GEMM has "
        f"{more * 100:.2f} % more of them, in as many tiles; here M stays {study.M:,}.",
        "",
    ]


def sizes_note(data: dict[str, Any]) -> list[str]:
    """What makes this machine's column another experiment than the study's."""
    differ = []
    if shape(data) != (study.M, study.N, study.K):
        differ.append("the sizes are not the study's")
    if data["model"]["blocks"] != 50:
        differ.append(f"the model has {data['model']['blocks']} blocks, the study's 50")
    if data["arms"]["pinned"]["rung"] != "cublaslt-pinned":
        differ.append(
            f"NVFP4 runs on the {data['arms']['pinned']['rung']} rung here, so the pin is of "
            f"another GEMM"
        )
    if data["machine"]["test_double"]:
        differ.append("the times are a test double's")
    return ["Not comparable as it stands: " + "; ".join(differ) + ".", ""] if differ else []


def bytes_line(data: dict[str, Any]) -> str:
    """Which comparisons were made and how they ended."""
    stages: list[tuple[str, Any]] = []
    if data["isolated"]:
        stages += [
            (name.replace("_", " "), data["isolated"][name])
            for name in ("gemm", "producer_and_gemm")
        ]
    stages += [(f"block {block['block']}", block) for block in data["blocks"]]
    stages += [(f"{one['steps']}-step trajectory", one) for one in data["trajectories"]]
    return "; ".join(
        f"{name} {'DIFFERENT' if found['difference'] else 'equal'}" for name, found in stages
    )


def p50s(found: dict[str, Any]) -> tuple[float, float]:
    return found["comparison"]["heuristic_s"], found["comparison"]["candidate_s"]


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def pair_row(name: str, found: dict[str, Any]) -> Row:
    base, own = p50s(found)
    return name, ms(base), ms(own), f"{base / own:.3f}x"


def table(header: Row, rows: list[Row]) -> list[str]:
    """Markdown."""
    lines = [header, tuple("---" for _ in header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
