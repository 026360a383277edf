"""What a measurement says: medians, noise, and when a candidate counts as faster.

    p50      median of the samples of the alternating rounds
    ratio    p50 of the heuristic / p50 of the candidate: above 1 the candidate is faster
    noise    how far the heuristic strays from itself in the same rounds, the largest of
               |ratio - 1| of its A/A pairs
               half the width between the 10th and 90th percentile of the A/A rounds' ratios
               how far its p50 beside any finalist is from its p50 beside itself
    faster   ratio - 1 > noise, and it won so many rounds that chance gives as many in 1 of 20
             trials at most (one-sided sign test: 15 of 20, 5 of 5, never below 5)
    slower   1 - ratio > noise, and it lost so many

The width is that of single rounds while ratio is a median of many, so a winner stands well clear of
it: with R rounds of independent noise a median strays about 1 / sqrt(R) as far, and being the best
of a few finalists adds less than that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

CHANCE = 0.05


@dataclass(frozen=True)
class Comparison:
    """A candidate against the heuristic over paired rounds. Seconds."""

    heuristic_s: float  # p50
    candidate_s: float  # p50
    ratio: float
    rounds: int
    wins: int  # rounds in which the candidate was faster
    losses: int
    low: float  # 10th and 90th percentile of the rounds' ratios
    high: float

    def faster(self, noise: float) -> bool:
        return self.ratio - 1 > noise and not by_chance(self.wins, self.rounds)

    def slower(self, noise: float) -> bool:
        return 1 - self.ratio > noise and not by_chance(self.losses, self.rounds)


def by_chance(wins: int, rounds: int) -> bool:
    """Whether a fair coin gives `wins` or more in `rounds` more often than CHANCE."""
    as_many = sum(math.comb(rounds, number) for number in range(wins, rounds + 1))
    return as_many / 2**rounds > CHANCE


def compare(heuristic_s: Sequence[float], candidate_s: Sequence[float]) -> Comparison:
    """Both from the same rounds, in the same order. Raises ValueError where they are no pairs."""
    if len(heuristic_s) != len(candidate_s) or not heuristic_s:
        raise ValueError(
            f"rounds must be pairs, got {len(heuristic_s)} of the heuristic and "
            f"{len(candidate_s)} of the candidate: measure both in each round"
        )
    ratios = [base / own for base, own in zip(heuristic_s, candidate_s, strict=True)]
    base, own = median(heuristic_s), median(candidate_s)
    return Comparison(
        heuristic_s=base,
        candidate_s=own,
        ratio=base / own,
        rounds=len(ratios),
        wins=sum(ratio > 1 for ratio in ratios),
        losses=sum(ratio < 1 for ratio in ratios),
        low=percentile(ratios, 10),
        high=percentile(ratios, 90),
    )


def noise_of(itself: Comparison, beside: Iterable[Comparison] = ()) -> float:
    """The noise, from the heuristic against itself and beside every finalist."""
    drift = (abs(other.heuristic_s / itself.heuristic_s - 1) for other in beside)
    return max(abs(itself.ratio - 1), (itself.high - itself.low) / 2, *drift)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest values."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
    return low + (high - low) * (at - math.floor(at))


def tflops(m: int, n: int, k: int, seconds: float) -> float:
    return 2 * m * n * k / seconds / 1e12
