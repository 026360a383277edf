"""A model of what L2 fetches from memory while a tiled GEMM runs. A prediction, never a measurement.

Every SM runs one CTA (or a cluster runs on as many SMs as it has CTAs). All advance along K in lock
step, `skew` steps apart at most; each K step asks for one slice of A (tile_m × tile_k) and one of B
(tile_n × tile_k); L2 is one fully associative LRU over those slices, in bytes. Requests made in the
same step for the same slice are one fetch. Parts of a tile outside the matrix are asked for but never
fetched. A finished tile of D is written into L2 and takes its room; it is never fetched.

    hit rate = 1 − (read misses + D) / (requested inside the matrices + D)

D counts as a miss because that is how the study's profiles add up: from their read-miss bytes this
gives 53.3 % and 91.1 %, with D as a hit or left out it gives neither.

What the model leaves out, so where to expect it wrong (bench/results/l2/h200.md measures how much):
  - cuBLASLt documents neither its traversal nor the meaning of its swizzle attribute. An order that
    reproduces a profile is consistent with it, not proved by it; between orders the answer differs
    by a factor of up to 8.
  - L2 is hashed, sectored, set-associative and not strictly LRU. Just past the size where a working
    set stops fitting, LRU drops all of it and hardware only some: the model is a cliff, the chip a
    slope.
  - Lock step. A real wave spreads out; `skew` bounds how much the answer depends on it.
  - Stream-K's partial tiles and its polling: no bytes here. Split sums are counted as work, their
    exchange is not.
  - Two L2 partitions (H200): see `CHIPS`. Its counters also see other requests than the SMs made:
    simultaneous ones for a line are one, and a partition asks the other. Compare bytes fetched.
"""

import re
from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace

import numpy as np

from bench.tiles import ELEMENTS, MIB, OUTPUT_BYTES, Problem, positive


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
    positive(sms=sms)
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
