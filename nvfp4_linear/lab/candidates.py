"""Which algorithms a sweep asks cuBLASLt about.

    near        one attribute moved away from a seed (tiles up to twice and half its sides, stages,
                cluster, custom option, swizzle, split-K with each reduction, id), and tile and
                cluster moved together
    exhaustive  `near`, then every id x tile x stages x cluster, the rest as a seed has it; then
                `near` of what turned out best

A seed is an answer of the heuristic (split-K answers also without their split-K), and for NVFP4 the
study's algorithm. Orders are deterministic: a sweep resumes by position. The new engines list no
capabilities, so the ids are those that the library's own header knows, and AlgoCheck decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any

from .. import _cublaslt as lt
from ..algorithms import Algorithm

ATTRIBUTES = tuple(field.name for field in fields(Algorithm))
ATTRIBUTES_OF = attrgetter(*ATTRIBUTES)

SPLIT_K = (2, 3, 4, 6, 8, 12, 16, 32)
REDUCTIONS = (1, 2, 4)  # in place, compute type, output type
CUSTOM_OPTIONS = range(32)
SWIZZLES = range(17)


@dataclass(frozen=True)
class Ranges:
    """Every id that this version of cuBLASLt may be given: outside them it can kill the process."""

    tiles: tuple[int, ...]
    stages: tuple[int, ...]
    clusters: tuple[int, ...]

    @staticmethod
    @lru_cache
    def of(library_version: int) -> Ranges:
        """library_version: as cublasLtGetVersion gives it."""

        def known(name: str, end: int, first: int = 0) -> tuple[int, ...]:
            values = {"id": 0, "tile": 1, "stages": 1}
            return tuple(
                value
                for value in range(first, end)
                if not lt.out_of_range(lt.Algorithm(**{**values, name: value}), library_version)
            )

        return Ranges(
            known("tile", lt.TILE_END, 1),  # 0 is "undefined", which AlgoCheck never takes
            known("stages", lt.STAGES_END, 1),
            known("cluster", lt.CLUSTER_END),
        )


@cache
def tile_shape(tile: int) -> tuple[int, int] | None:
    """Sides of a tile as cuBLASLt names it: along our N, along our M. None where it has none."""
    rows, cross, columns = lt.tile_name(tile).partition("x")
    return (int(rows), int(columns)) if cross else None


def near_tiles(tile: int, ranges: Ranges) -> list[int]:
    """Tiles whose sides are within a factor of two of this one's, itself left out."""
    shape = tile_shape(tile)
    if shape is None:
        return []

    def close(other: tuple[int, int] | None) -> bool:
        return other is not None and all(
            a <= 2 * b and b <= 2 * a for a, b in zip(shape, other, strict=True)
        )

    return [other for other in ranges.tiles if other != tile and close(tile_shape(other))]


def seeds(answers: Iterable[Algorithm], problem_type: str) -> list[Algorithm]:
    """The heuristic's answers, best first, then what belongs beside them; no duplicates."""
    found = list(answers)
    found += [replace(a, split_k=1, reduction=0) for a in found if a.split_k != 1]
    if problem_type == "nvfp4":
        found.append(from_dict(lt.studied_pin().as_dict()["algorithm"]))
    return list(dict.fromkeys(found))


def near(seed: Algorithm, ranges: Ranges, ids: Iterable[int]) -> Iterator[Algorithm]:
    """The neighbours of one seed, nearest first. See the module docstring."""
    tiles = near_tiles(seed.tile, ranges)
    yield from (replace(seed, cluster=cluster) for cluster in ranges.clusters)
    yield from (replace(seed, tile=tile) for tile in tiles)
    yield from (replace(seed, stages=stages) for stages in ranges.stages)
    yield from (replace(seed, custom=custom) for custom in CUSTOM_OPTIONS)
    yield from (replace(seed, swizzle=swizzle) for swizzle in SWIZZLES)
    yield replace(seed, split_k=1, reduction=0)
    for split_k in SPLIT_K:
        yield from (replace(seed, split_k=split_k, reduction=r) for r in REDUCTIONS)
    yield from (replace(seed, id=other) for other in ids)
    for tile in tiles:
        yield from (replace(seed, tile=tile, cluster=cluster) for cluster in ranges.clusters)


def neighbourhood(
    start: Iterable[Algorithm], ranges: Ranges, ids: Iterable[int]
) -> Iterator[Algorithm]:
    """`near` of every seed in turn, none twice, no seed among them."""
    start, ids = list(start), list(ids)
    seen = set(start)
    for seed in start:
        for candidate in near(seed, ranges, ids):
            if candidate not in seen:
                seen.add(candidate)
                yield candidate


@dataclass(frozen=True)
class Grid:
    """Every tile x stages x cluster of one id; `base` has the rest."""

    base: Algorithm
    tiles: tuple[int, ...]
    stages: tuple[int, ...]
    clusters: tuple[int | None, ...]

    def __len__(self) -> int:
        return len(self.tiles) * len(self.stages) * len(self.clusters)

    def __iter__(self) -> Iterator[Algorithm]:
        for tile, stages, cluster in itertools.product(self.tiles, self.stages, self.clusters):
            yield replace(self.base, tile=tile, stages=stages, cluster=cluster)

    def __contains__(self, candidate: Algorithm) -> bool:
        tile, stages, cluster = candidate.tile, candidate.stages, candidate.cluster
        return (
            tile in self.tiles
            and stages in self.stages
            and cluster in self.clusters
            and replace(self.base, tile=tile, stages=stages, cluster=cluster) == candidate
        )


def grids(
    start: Iterable[Algorithm], ranges: Ranges, capabilities: dict[int, dict[str, list[int]]]
) -> list[Grid]:
    """One an id; the first seed of an id, else AlgoInit, gives the rest.

    capabilities: what each id of this problem's type says of itself. An engine that lists tiles and
    stages is given those alone, at the cluster shape of its AlgoInit: it knows no others.
    """
    bases = {seed.id: seed for seed in reversed(list(start))}
    return [
        Grid(
            bases.get(algorithm_id, Algorithm(algorithm_id, 0, 0)),
            tuple(own.get("tile_ids") or ranges.tiles),
            tuple(own.get("stages_ids") or ranges.stages),
            (None,) if own.get("tile_ids") else ranges.clusters,
        )
        for algorithm_id, own in capabilities.items()
    ]


def exhaustive(
    start: Iterable[Algorithm],
    ranges: Ranges,
    ids: Iterable[int],
    capabilities: dict[int, dict[str, list[int]]],
) -> Iterator[Algorithm]:
    """`neighbourhood` of the seeds, then the `grids`; none twice, no seed among them."""
    start = list(start)
    seen = set(start)
    for candidate in neighbourhood(start, ranges, ids):
        seen.add(candidate)
        yield candidate
    for grid in grids(start, ranges, capabilities):
        yield from (candidate for candidate in grid if candidate not in seen)


def exhaustive_count(
    start: Iterable[Algorithm],
    ranges: Ranges,
    ids: Iterable[int],
    capabilities: dict[int, dict[str, list[int]]],
) -> int:
    """How many `exhaustive` yields. The grids have millions: they are counted, not walked through."""
    start = list(start)
    near = list(neighbourhood(start, ranges, ids))
    every = grids(start, ranges, capabilities)
    twice = sum(candidate in grid for grid in every for candidate in (*start, *near))
    return len(near) + sum(map(len, every)) - twice


def from_dict(values: dict[str, Any]) -> Algorithm:
    """An algorithm from its nine attributes by name."""
    return Algorithm(**values)


def to_row(algorithm: Algorithm) -> list[int | None]:
    """The nine attributes in order, as they travel to a child process."""
    return list(ATTRIBUTES_OF(algorithm))


def from_row(row: list[int | None]) -> Algorithm:
    return Algorithm(*row)  # type: ignore[arg-type]


def describe(algorithm: Algorithm) -> str:
    """Short text with the names of the ids: "66, 128x256, 64xAUTO, cluster 2x1x1"."""
    parts = [str(algorithm.id), lt.tile_name(algorithm.tile), lt.stages_name(algorithm.stages)]
    if algorithm.cluster is not None:
        parts.append(f"cluster {lt.cluster_name(algorithm.cluster)}")
    if algorithm.split_k != 1:
        parts.append(f"split-K {algorithm.split_k}, reduction {algorithm.reduction}")
    for name in ("swizzle", "custom", "inner"):
        if getattr(algorithm, name):
            parts.append(f"{name} {getattr(algorithm, name)}")
    return ", ".join(parts)
