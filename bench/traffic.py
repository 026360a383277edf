"""What a tiled GEMM asks of L2, and a prediction of what L2 has to fetch from memory.

D (M, N) = A (M, K) · Bᵀ, B (N, K); D is BF16. Bytes of `rows` rows over a K span:

    nvfp4   rows · (k/2 + k/16)      data + one UE4M3 scale per 16
    fp8     rows · k                 per-tensor scale: nothing to stream
    bf16    rows · 2k

Exact (no model):

    one pass     = A + B + D, each once
    requested    = ceil(M/tile_m) · ceil(N/tile_n) CTAs · whole tiles of A and of B over whole K
    amplification = (read misses + D) / one pass

Predicted (`predict`): every SM runs one CTA (or a cluster runs on as many SMs as it has CTAs).
All advance along K in lock step, `skew` steps apart at most; each K step asks for one slice of A
(tile_m × tile_k) and one of B (tile_n × tile_k); L2 is one fully associative LRU over those
slices, in bytes. Requests made in the same step for the same slice are one fetch. Parts of a tile
outside the matrix are asked for but never fetched. A finished tile of D is written into L2 and
takes its room; it is never fetched.

    hit rate = 1 − (read misses + D) / (requested inside the matrices + D)

D counts as a miss because that is how the study's profiles add up: from their read-miss bytes this
gives 53.3 % and 91.1 %, with D as a hit or left out it gives neither.

What the model leaves out, so where to expect it wrong:
  - L2 is hashed, sectored, set-associative and not strictly LRU. Just past the size where a working
    set stops fitting, LRU drops all of it and hardware only some: the model is a cliff, the chip a
    slope.
  - Lock step. A real wave spreads out; `skew` bounds how much the answer depends on it.
  - Stream-K's partial tiles and its polling: no bytes here. Split sums are counted as work, their
    exchange is not.
  - Two L2 partitions (H200): see `CHIPS`.
  - cuBLASLt documents neither its traversal nor the meaning of its swizzle attribute. An order that
    reproduces a profile is consistent with it, not proved by it.
"""

import argparse
import json
import math
import re
import sys
from collections import Counter, OrderedDict
from dataclasses import asdict, dataclass, field, replace

import numpy as np

MIB = 1 << 20
OUTPUT_BYTES = 2  # BF16


@dataclass(frozen=True)
class Element:
    """Operand storage: bits a value, and how many consecutive K share one scale byte."""

    bits: int
    scale_block: int | None
    tile_k: int  # K elements a step by default: 128 bytes of data a row, one swizzled TMA row

    def row_bytes(self, k: int) -> int:
        return k * self.bits // 8 + (k // self.scale_block if self.scale_block else 0)


ELEMENTS = {
    "nvfp4": Element(bits=4, scale_block=16, tile_k=256),
    "fp8": Element(bits=8, scale_block=None, tile_k=128),
    "bf16": Element(bits=16, scale_block=None, tile_k=64),
}


@dataclass(frozen=True)
class Chip:
    sms: int
    l2_bytes: int
    # With two partitions a line that SMs of both sides read may be held twice. Data that everyone
    # reads then sees l2_bytes / partitions, data that one side reads sees more: two bounds.
    partitions: int


CHIPS = {
    "gb10": Chip(sms=48, l2_bytes=24 * MIB, partitions=1),
    "h200": Chip(sms=132, l2_bytes=60 * MIB, partitions=2),
}


def _positive(**values: int) -> None:
    for name, value in values.items():
        if type(value) is not int or value <= 0:
            raise ValueError(f"{name} must be a positive integer, got {value!r}: pass a whole size")


@dataclass(frozen=True)
class Problem:
    """One GEMM cut into tiles; every property is exact."""

    m: int
    n: int
    k: int
    tile_m: int = 128
    tile_n: int = 128
    tile_k: int | None = None
    element: str = "nvfp4"

    def __post_init__(self):
        if self.element not in ELEMENTS:
            raise ValueError(
                f"element must be one of {', '.join(ELEMENTS)}, got {self.element!r}: "
                "name the operands' type"
            )
        if self.tile_k is None:
            object.__setattr__(self, "tile_k", ELEMENTS[self.element].tile_k)
        _positive(m=self.m, n=self.n, k=self.k)
        _positive(tile_m=self.tile_m, tile_n=self.tile_n, tile_k=self.tile_k)
        block = ELEMENTS[self.element].scale_block or 1
        for name in ("k", "tile_k"):
            if getattr(self, name) % block:
                raise ValueError(
                    f"{name} must be a multiple of {block} for {self.element}, "
                    f"got {getattr(self, name)}: a block scale covers {block} values, pad K"
                )

    @property
    def tiles_m(self) -> int:
        return -(-self.m // self.tile_m)

    @property
    def tiles_n(self) -> int:
        return -(-self.n // self.tile_n)

    @property
    def k_steps(self) -> int:
        return -(-self.k // self.tile_k)

    @property
    def ctas(self) -> int:
        return self.tiles_m * self.tiles_n

    @property
    def row_bytes(self) -> int:
        return ELEMENTS[self.element].row_bytes(self.k)

    @property
    def a_bytes(self) -> int:
        return self.m * self.row_bytes

    @property
    def b_bytes(self) -> int:
        return self.n * self.row_bytes

    @property
    def output_bytes(self) -> int:
        return self.m * self.n * OUTPUT_BYTES

    @property
    def one_pass_bytes(self) -> int:
        return self.a_bytes + self.b_bytes + self.output_bytes

    def requests(self, readers_of_a: int, readers_of_b: int) -> tuple[int, int]:
        """(A, B) bytes asked for in whole tiles, when so many CTAs ask for each slice."""
        row = ELEMENTS[self.element].row_bytes(self.k_steps * self.tile_k)
        return (
            readers_of_a * self.tiles_m * self.tile_m * row,
            readers_of_b * self.tiles_n * self.tile_n * row,
        )

    @property
    def requested_a_bytes(self) -> int:
        return self.requests(self.tiles_n, self.tiles_m)[0]

    @property
    def requested_b_bytes(self) -> int:
        return self.requests(self.tiles_n, self.tiles_m)[1]

    @property
    def requested_bytes(self) -> int:
        return self.requested_a_bytes + self.requested_b_bytes

    def amplification(self, read_miss_bytes: float) -> float:
        """Off-chip bytes over the one-pass total; D goes off chip once whatever the order."""
        return (read_miss_bytes + self.output_bytes) / self.one_pass_bytes

    def hit_rate(self, read_miss_bytes: float) -> float:
        """The profiler's hit rate that so many read-miss bytes imply, requests in whole tiles."""
        return 1 - (read_miss_bytes + self.output_bytes) / (
            self.requested_bytes + self.output_bytes
        )


@dataclass(frozen=True)
class Order:
    """In which order output tiles are taken up. As text, parts joined by `+`:

    row-major        along N first (D's rows); the default
    column-major     along M first
    clustered:MxN    the unit is M × N CTAs that start together and stay together; else one CTA
    grouped:W        strips W units high walked along N, M first inside the strip; with
                     column-major, strips W units wide walked along M. grouped:1 changes nothing
    stream-k         all K steps of all tiles in one line, cut evenly among the SMs
    stream-k-tail    whole waves tile by tile; only the last, partial wave's K steps are cut
    """

    raster: str = "row-major"
    width: int = 1
    cluster: tuple[int, int] = (1, 1)
    stream_k: str | None = None

    @staticmethod
    def parse(text: str) -> "Order":
        order = Order()
        for part in text.split("+"):
            if part in ("row-major", "column-major"):
                order = replace(order, raster=part)
            elif part in ("stream-k", "stream-k-tail"):
                order = replace(order, stream_k=part)
            elif match := re.fullmatch(r"grouped:([1-9]\d{0,8})", part):
                order = replace(order, width=int(match[1]))
            elif match := re.fullmatch(r"clustered:([1-9]\d?)x([1-9]\d?)", part):
                order = replace(order, cluster=(int(match[1]), int(match[2])))
            else:
                raise ValueError(
                    "order must be row-major, column-major, grouped:W, clustered:MxN, stream-k or "
                    f"stream-k-tail, joined by +, got {part!r} in {text!r}: e.g. grouped:8"
                )
        return order

    def __str__(self) -> str:
        parts = [self.raster] if self.raster != "row-major" else []
        parts += [self.stream_k] if self.stream_k else []
        parts += [f"grouped:{self.width}"] if self.width != 1 else []
        parts += ["clustered:{}x{}".format(*self.cluster)] if self.cluster != (1, 1) else []
        return "+".join(parts) or "row-major"

    def walk(self, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
        """(row, col) of every unit of a rows × cols grid, first taken first."""
        if self.raster == "column-major":
            col, row = replace(self, raster="row-major").walk(cols, rows)
            return row, col
        row, col = np.divmod(np.arange(rows * cols), cols)
        taken = np.lexsort((row, col, row // self.width))  # strip, then column, then row
        return row[taken], col[taken]


@dataclass(frozen=True)
class TrafficPrediction:
    """A model's answer, never a measurement. Bytes; `hit_rate` in 0..1."""

    requested_bytes: int  # by CTAs, in whole tiles (once a cluster with multicast)
    in_bounds_bytes: int  # of these, inside the matrices: what a cache of no size would fetch
    hit_rate: float  # as a profiler has it: D counts as a miss where output_writes
    miss_bytes: int  # reads that L2 fetches
    one_pass_bytes: int  # A + B + D
    amplification: float  # (miss_bytes + D) / one_pass_bytes
    order: str
    sms: int
    l2_bytes: int
    basis: str = field(default="prediction", init=False)

    def __str__(self) -> str:
        return (
            f"predicted, not measured: {self.order}: L2 hit rate {self.hit_rate:.2%}, "
            f"{self.miss_bytes / 1e9:.3f} GB read misses, {self.amplification:.2f}x one pass"
        )


class _Lru:
    """Bytes, least recently used out first. What is larger than the cache empties it and leaves."""

    def __init__(self, capacity: int):
        self.capacity, self.used, self.sizes = capacity, 0, OrderedDict()

    def touch(self, key: int, size: int) -> bool:
        if key in self.sizes:
            self.sizes.move_to_end(key)
            return True
        self.sizes[key] = size
        self.used += size
        while self.used > self.capacity:
            self.used -= self.sizes.popitem(last=False)[1]
        return False


def _timeline(units: int, steps: int, workers: int, stream_k: str | None, skew: int):
    """Chunks of (unit, k), each (time, worker): what every worker does in every step; −1 is idle.

    Tile by tile, worker w takes unit w, w + workers, …; K steps left after the tile-by-tile waves
    are cut into one contiguous run a worker. Worker w starts w·skew/(workers − 1) steps late.
    """
    waves = {None: -(-units // workers), "stream-k": 0, "stream-k-tail": units // workers}[stream_k]
    split_from = waves * steps
    left = max(0, units * steps - split_from * workers)
    worker = np.arange(workers)
    start = split_from * workers + worker * left // workers
    stop = split_from * workers + (worker + 1) * left // workers
    late = worker * skew // max(1, workers - 1)
    length = split_from + -(-left // workers) + skew
    chunk = max(1, (1 << 18) // workers)  # bounds memory, nothing else
    for t in range(0, length, chunk):
        at = np.arange(t, min(length, t + chunk))[:, None] - late
        whole = at < split_from
        step = np.where(
            whole, (at // steps * workers + worker) * steps + at % steps, start + at - split_from
        )
        busy = (at >= 0) & (step < np.where(whole, units * steps, stop))
        yield np.where(busy, step // steps, -1), step % steps


def _slice_sizes(problem: Problem) -> list[int]:
    """Bytes of every slice of A, of B (K steps of a tile adjacent), then of every tile of D."""

    def clipped(count, tile, size):
        return np.minimum(tile, size - np.arange(count) * tile)

    rows = clipped(problem.tiles_m, problem.tile_m, problem.m)
    cols = clipped(problem.tiles_n, problem.tile_n, problem.n)
    element = ELEMENTS[problem.element]
    step = np.array(
        [element.row_bytes(int(k)) for k in clipped(problem.k_steps, problem.tile_k, problem.k)]
    )
    operands = np.concatenate([rows, cols])[:, None] * step
    return np.concatenate([operands.ravel(), np.outer(rows, cols).ravel() * OUTPUT_BYTES]).tolist()


def _accesses(problem: Problem, order: Order, sms: int, skew: int, multicast: bool):
    """Yields, a K step at a time, the slices asked for and the tiles of D written, as indices into
    `_slice_sizes`; −1 stands for none."""
    cm, cn = order.cluster
    tiles_m, tiles_n, steps = problem.tiles_m, problem.tiles_n, problem.k_steps
    unit_row, unit_col = order.walk(-(-tiles_m // cm), -(-tiles_n // cn))
    workers = sms // (cm * cn)
    for unit, k in _timeline(len(unit_row), steps, workers, order.stream_k, skew):
        read, written = [], []
        for i, j in np.ndindex(cm, cn):
            row, col = unit_row[unit] * cm + i, unit_col[unit] * cn + j
            # A grid that is no multiple of the cluster is padded: those CTAs leave at once.
            runs = (unit >= 0) & (row < tiles_m) & (col < tiles_n)
            if j == 0 or not multicast:
                read.append(np.where(runs, row * steps + k, -1))
            if i == 0 or not multicast:
                read.append(np.where(runs, (tiles_m + col) * steps + k, -1))
            tile = (tiles_m + tiles_n) * steps + row * tiles_n + col
            written.append(np.where(runs & (k == steps - 1), tile, -1))
        yield from zip(np.hstack(read).tolist(), np.hstack(written).tolist(), strict=True)


def _read_misses(problem, order, sms, l2_bytes, skew, output_writes, multicast) -> int:
    size, cache, missed = _slice_sizes(problem), _Lru(l2_bytes), 0
    for read, written in _accesses(problem, order, sms, skew, multicast):
        for key, readers in Counter(read).items():
            if key < 0:
                continue
            if size[key] > l2_bytes:  # cannot be shared: every reader fetches it
                missed += size[key] * readers
                cache.touch(key, size[key])
            elif not cache.touch(key, size[key]):
                missed += size[key]
        if output_writes:
            for key in written:
                if key >= 0:
                    cache.touch(key, size[key])
    return missed


def simulate(
    problem: Problem,
    order: str | Order,
    *,
    sms: int,
    l2_bytes: int,
    skew: int = 0,
    output_writes: bool = True,
    multicast: bool = False,
) -> TrafficPrediction:
    """`predict` for a problem already cut into tiles."""
    order = Order.parse(str(order))  # an Order built by hand is checked by the same rules
    _positive(sms=sms)
    for name, value in {"l2_bytes": l2_bytes, "skew": skew}.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} must be an integer >= 0, got {value!r}: round it")
    cm, cn = order.cluster
    if cm * cn > sms:
        raise ValueError(
            f"order's cluster must fit {sms} SMs, got {cm}x{cn}: use a smaller cluster"
        )
    missed = _read_misses(problem, order, sms, l2_bytes, skew, output_writes, multicast)
    readers_of_a = -(-problem.tiles_n // cn) if multicast else problem.tiles_n
    readers_of_b = -(-problem.tiles_m // cm) if multicast else problem.tiles_m
    in_bounds = readers_of_a * problem.a_bytes + readers_of_b * problem.b_bytes
    writes = problem.output_bytes if output_writes else 0
    return TrafficPrediction(
        requested_bytes=sum(problem.requests(readers_of_a, readers_of_b)),
        in_bounds_bytes=in_bounds,
        hit_rate=1 - (missed + writes) / (in_bounds + writes),
        miss_bytes=missed,
        one_pass_bytes=problem.one_pass_bytes,
        amplification=problem.amplification(missed),
        order=str(order),
        sms=sms,
        l2_bytes=l2_bytes,
    )


def predict(
    m: int,
    n: int,
    k: int,
    tile_m: int,
    tile_n: int,
    *,
    element: str = "nvfp4",
    order: str | Order = "row-major",
    sms: int,
    l2_bytes: int,
    tile_k: int | None = None,
    skew: int = 0,
    output_writes: bool = True,
    multicast: bool = False,
) -> TrafficPrediction:
    """Predicts the L2 traffic of one GEMM (module docstring: the model and its limits).

    Sizes are D's: tile_m along M (rows of A), tile_n along N (rows of B). cuBLASLt computes
    Dᵀ = B·Aᵀ, so its tile "128x256" is tile_n = 128, tile_m = 256, its cluster "2x1" is
    clustered:1x2, and its raster along m is row-major here.

    order: an `Order` or its text. tile_k: K elements a step; None is 128 bytes of data a row.
    skew: K steps between the first and the last worker. output_writes: D takes room in L2 and
    counts in the hit rate. multicast: one request a cluster for a slice that several of its CTAs
    read (TMA multicast), instead of one a CTA.
    Time goes with CTAs · K steps: under a second at the study's shape.
    Raises ValueError for a size, element or order it cannot model.
    """
    return simulate(
        Problem(m, n, k, tile_m, tile_n, tile_k, element),
        order,
        sms=sms,
        l2_bytes=l2_bytes,
        skew=skew,
        output_writes=output_writes,
        multicast=multicast,
    )


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
