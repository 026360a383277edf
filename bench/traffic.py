"""L2 traffic of a tiled GEMM: the study's table, ours beside it, and predictions for any problem.

tiles.py has the exact bytes, traversal.py the model and its limits.
"""

import argparse
import json
import math
import re
import sys
from dataclasses import asdict, dataclass, replace

from bench.tiles import ELEMENTS, MIB, Problem
from bench.traversal import CHIPS, Chip, TrafficPrediction, simulate

# The study: FC2 on a GB10, M padded by the producer, 128×128 tiles, K steps of 256.
CANONICAL = Problem(m=37_824, n=5_376, k=14_336)

# (the study's figure, ours). The study's operand reads are 3,072 bytes more than the sum of its own
# two rows above; no whole number of tiles gives that, so it is kept as it stands and not explained.
STUDY_EXACT = {
    "activation data + scales": (305_012_736, CANONICAL.a_bytes),
    "weight data + scales": (43_352_064, CANONICAL.b_bytes),
    "padded BF16 output": (406_683_648, CANONICAL.output_bytes),
    "one-pass total": (755_048_448, CANONICAL.one_pass_bytes),
    "weight bytes requested": (12_832_210_944, CANONICAL.requested_b_bytes),
    "activation bytes requested": (12_832_210_944, CANONICAL.requested_a_bytes),
    "operand reads at L2": (25_664_424_960, CANONICAL.requested_bytes),
    "CTAs": (12_432, CANONICAL.ctas),
    "row tiles (weight reuse)": (296, CANONICAL.tiles_m),
    "column tiles": (42, CANONICAL.tiles_n),
}
STUDY_SLIP = {"operand reads at L2": -3_072}


@dataclass(frozen=True)
class Profile:
    """What the study's profiler printed, to the digits it printed, and the order that explains it.

    pinned, grouped:8: the 48 running CTAs form an 8 × 6 block, the squarest there is. Eight rows of
    A stay (8.3 MB); B (43 MB) passes once a strip, 296/8 = 37 times: 37·B + A = 1.909 GB. Strips
    8 wide the other way (column-major+grouped:8) give 1.898: near enough not to be excluded.
    heuristic, stream-k-tail: 12,432 tiles are 259 whole waves of 48, so nothing is left to cut
    and this is row-major: 48 CTAs span all 42 columns, B passes once a wave and never fits.
    Both were picked by comparing a handful of orders with the profile; the study records none.
    Neither leans on the exact L2 size: the same bytes from 16 to 48 MiB for the first and from 12
    to 42 MiB for the second. Skew of two whole tiles leaves the first as it is; half of K already
    takes the second to 13.4 GB, as the last SMs no longer find what the first have read.
    """

    order: str
    hit_rate: float
    miss_gb: float
    amplification: float


PROFILES = {
    "heuristic": Profile("stream-k-tail", 0.5332, 11.762, 16.12),
    "pinned": Profile("grouped:8", 0.9110, 1.909, 3.07),
}

DEFAULT_ORDERS = (
    "row-major",
    "column-major",
    "grouped:2",
    "grouped:4",
    "grouped:8",
    "grouped:16",
    "column-major+grouped:8",
    "clustered:2x1",
    "stream-k",
    "stream-k+column-major",
    "stream-k-tail",
)


def _table(header: list[str], rows: list[list[str]]) -> str:
    """First column to the left, figures to the right."""
    width = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * w for w in width], *rows]
    return "\n".join(
        "  ".join(
            c.rjust(w) if i else c.ljust(w)
            for i, (c, w) in enumerate(zip(line, width, strict=True))
        )
        for line in lines
    )


def _predictions_text(predictions: list[dict]) -> str:
    rows = [
        [
            p["order"],
            f"{p['l2_bytes'] / MIB:g}",
            f"{p['hit_rate']:.2%}",
            f"{p['miss_bytes'] / 1e9:.3f}",
            f"{p['amplification']:.2f}x",
        ]
        for p in predictions
    ]
    header = ["order (predicted)", "L2 MiB", "hit rate", "read-miss GB", "amplification"]
    return _table(header, rows)


def _canonical(order: str) -> TrafficPrediction:
    return simulate(CANONICAL, order, sms=CHIPS["gb10"].sms, l2_bytes=CHIPS["gb10"].l2_bytes)


def study() -> dict:
    """The study's figures beside ours, and every order at its shape and chip."""
    predicted = {order: _canonical(order) for order in DEFAULT_ORDERS}
    profiles = {}
    for name, profile in PROFILES.items():
        p = predicted.get(profile.order) or _canonical(profile.order)
        profiles[name] = {
            "study": asdict(profile),
            "from_its_miss_bytes": {  # arithmetic: do the study's three figures agree?
                "hit_rate": CANONICAL.hit_rate(profile.miss_gb * 1e9),
                "amplification": CANONICAL.amplification(profile.miss_gb * 1e9),
            },
            "predicted": asdict(p),
        }
    exact = {k: {"study": s, "ours": o, "difference": o - s} for k, (s, o) in STUDY_EXACT.items()}
    return {
        "exact": exact,
        "activation_reuse": CANONICAL.requested_a_bytes / CANONICAL.a_bytes,
        "profiles": profiles,
        "orders": [asdict(p) for p in predicted.values()],
    }


def _profile_rows(name: str, profile: dict) -> list[list[str]]:
    seen, implied, predicted = (profile[c] for c in ("study", "from_its_miss_bytes", "predicted"))
    gb = predicted["miss_bytes"] / 1e9
    rate, ratio = "hit_rate", "amplification"
    figures = {
        "read-miss GB": ("{:.3f}", seen["miss_gb"], None, gb),
        "hit rate": ("{:.2%}", seen[rate], implied[rate], predicted[rate]),
        "amplification": ("{:.2f}x", seen[ratio], implied[ratio], predicted[ratio]),
    }
    rows = []
    for figure, (form, study_figure, *ours) in figures.items():
        off = ours[-1] - study_figure
        off = f"{100 * off:+.2f} points" if figure == "hit rate" else f"{off / study_figure:+.2%}"
        cells = [form.format(study_figure), *("" if o is None else form.format(o) for o in ours)]
        rows.append([f"{name}: {figure}", *cells, off])
    return rows


def _study_text(result: dict) -> str:
    p, chip = CANONICAL, CHIPS["gb10"]
    exact = [
        [name, *(f"{row[c]:,}" for c in ("study", "ours", "difference"))]
        for name, row in result["exact"].items()
    ]
    profiles = [row for item in result["profiles"].items() for row in _profile_rows(*item)]
    explained = "; ".join(f"{name} as {profile.order}" for name, profile in PROFILES.items())
    return f"""\
Exact: {p.m} x {p.n} x {p.k} {p.element}, {p.tile_m}x{p.tile_n} CTAs; activation reuse \
{result["activation_reuse"]:.2f}x

{_table(["bytes", "study", "ours", "difference"], exact)}

The study's operand reads exceed the sum of its own two rows by the difference shown.

Profiles: GB10, {chip.sms} SMs, {chip.l2_bytes // MIB} MiB L2; {explained}

{_table(["profile", "study", "its misses imply", "predicted", "difference"], profiles)}

These orders were picked among those below by comparing them with the profiles; the study recorded
none. A match shows an order is consistent. All work cut evenly (stream-k) would miss more than the
heuristic's profile shows. Not modelled: polling, the exchange of partial sums, any L2 but an LRU.

{_predictions_text(result["orders"])}"""


def _pyplot():
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(
            "--plot needs matplotlib, found none: pip install matplotlib, or use --json"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def plot(path: str, problem: Problem, orders: list[str], sms: int, **options) -> None:
    """Read-miss bytes over L2 size, a line an order; the study's two profiles at its shape."""
    plt = _pyplot()
    p = replace(problem, tile_k=4 * problem.tile_k)  # coarser steps: same waves, a quarter the time
    sizes = [6, 9, 12, 16, 20, 24, 30, 40, 50, 60, 80]
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for order in orders:
        miss = [
            simulate(p, order, sms=sms, l2_bytes=s * MIB, **options).miss_bytes / 1e9 for s in sizes
        ]
        axes.plot(sizes, miss, marker=".", label=order)
    if problem == CANONICAL and sms == CHIPS["gb10"].sms:
        for name, profile in PROFILES.items():
            axes.plot(24, profile.miss_gb, "k*", markersize=11)
            axes.annotate(
                f"{name}, measured", (24, profile.miss_gb), (6, 6), textcoords="offset points"
            )
    axes.set(
        xlabel="L2 (MiB)",
        ylabel="predicted L2 read misses (GB)",
        yscale="log",
        title=f"{problem.m} x {problem.n} x {problem.k} {problem.element}, "
        f"{problem.tile_m}x{problem.tile_n} tiles, {sms} SMs",
    )
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _pair(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"expected MxN, got {text!r}: e.g. 128x256")
    return int(match[1]), int(match[2])


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.traffic",
        description="L2 traffic of a tiled GEMM: exact bytes and a prediction of the misses. "
        "Without a problem: the study's table, ours beside it.",
    )
    sizes = parser.add_argument_group("problem (what is left out is the study's)")
    for name in ("m", "n", "k"):
        sizes.add_argument(f"--{name}", type=int, help=f"{name.upper()} of D (M, N) = A · Bᵀ")
    sizes.add_argument("--element", choices=ELEMENTS, help="operand type (default nvfp4)")
    sizes.add_argument(
        "--tile", type=_pair, metavar="MxN", help="CTA tile as D has it; cuBLASLt names it NxM"
    )
    sizes.add_argument("--tile-k", type=int, help="K elements a step (default 128 bytes of data)")
    sizes.add_argument("--chip", choices=CHIPS, help="SMs and L2 of (default gb10)")
    sizes.add_argument("--sms", type=int, help="SMs that run CTAs (default the chip's)")
    sizes.add_argument(
        "--l2-mb",
        type=float,
        help="L2 in MiB (default the chip's, and what each of its partitions has)",
    )
    sizes.add_argument(
        "--order",
        action="append",
        help="row-major, column-major, grouped:W, "
        "clustered:MxN, stream-k, stream-k-tail, joined by +; repeatable",
    )
    sizes.add_argument("--skew", type=int, help="K steps between first and last SM (default 0)")
    sizes.add_argument(
        "--multicast",
        action="store_true",
        default=None,
        help="one request a cluster for a shared slice",
    )
    sizes.add_argument(
        "--no-writes",
        action="store_true",
        default=None,
        help="leave D out of L2 and of the hit rate",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--plot", metavar="FILE", help="draw misses over L2 size (matplotlib)")
    args = parser.parse_args(argv)
    args.study = all(
        value is None for key, value in vars(args).items() if key not in ("json", "plot")
    )
    return args


def _l2_sizes(args: argparse.Namespace, chip: Chip) -> list[int]:
    if args.l2_mb is None:
        return sorted({chip.l2_bytes // p for p in (1, chip.partitions)}, reverse=True)
    if not math.isfinite(args.l2_mb) or args.l2_mb < 0:
        raise ValueError(f"--l2-mb must be finite and >= 0, got {args.l2_mb}: give MiB")
    return [int(args.l2_mb * MIB)]


def _compare(problem: Problem, orders: list[str], sms: int, l2_sizes: list[int], options: dict):
    exact = (
        *("ctas", "k_steps", "a_bytes", "b_bytes", "output_bytes", "one_pass_bytes"),
        *("requested_a_bytes", "requested_b_bytes", "requested_bytes"),
    )
    return {
        "problem": asdict(problem),
        "sms": sms,
        "options": options,
        "exact": {name: getattr(problem, name) for name in exact},
        "orders": [
            asdict(simulate(problem, order, sms=sms, l2_bytes=l2_bytes, **options))
            for order in orders
            for l2_bytes in l2_sizes
        ],
    }


def _compare_text(result: dict, l2_sizes: list[int]) -> str:
    exact = [[name, f"{value:,}"] for name, value in result["exact"].items()]
    text = f"{_table(['exact', 'value'], exact)}\n\n{_predictions_text(result['orders'])}"
    if len(l2_sizes) > 1:
        text += "\n\nTwo L2 sizes: two partitions may both hold a shared line; expect between."
    return text


def _run(args: argparse.Namespace) -> int:
    chip = CHIPS[args.chip or "gb10"]
    orders = args.order or list(DEFAULT_ORDERS)
    tile_m, tile_n = args.tile or (CANONICAL.tile_m, CANONICAL.tile_n)
    m, n, k = (getattr(CANONICAL if getattr(args, d) is None else args, d) for d in "mnk")
    problem = Problem(m, n, k, tile_m, tile_n, args.tile_k, args.element or CANONICAL.element)
    sms = chip.sms if args.sms is None else args.sms
    options = {
        "skew": args.skew or 0,
        "output_writes": not args.no_writes,
        "multicast": bool(args.multicast),
    }
    if args.plot:
        _pyplot()  # refuse before the work, not after it
    failed = False
    if args.study:
        result = study()
        differences = {k: v["difference"] for k, v in result["exact"].items() if v["difference"]}
        failed = differences != STUDY_SLIP
        text = _study_text(result)
    else:
        l2_sizes = _l2_sizes(args, chip)
        result = _compare(problem, orders, sms, l2_sizes, options)
        text = _compare_text(result, l2_sizes)
    print(json.dumps(result, indent=2) if args.json else text)
    if args.plot:
        plot(args.plot, problem, orders, sms, **options)
    return int(failed)


def main(argv: list[str] | None = None) -> int:
    try:
        return _run(_arguments(argv))
    except (ValueError, OSError) as error:
        print(f"bench.traffic: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
