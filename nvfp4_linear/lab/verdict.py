"""What a measurement says: medians, noise, and when a candidate counts as faster.

    p50          median of the samples of the alternating rounds
    ratio        p50 of the heuristic / p50 of the candidate: above 1 the candidate is faster
    noise        how far the heuristic strays from itself: for the A/A pairs of the same rounds,
                 the larger of |p50 ratio - 1| and half the width between the 10th and the 90th
                 percentile of the rounds' ratios
    faster       ratio - 1 > noise, and the candidate won at least 3 of 4 rounds
    slower       1 - ratio > noise, and it lost at least 3 of 4

The noise is that of single rounds while ratio is a median of many, so a winner stands clear of it:
with R rounds of independent noise a median strays about 1 / sqrt(R) as far, and being the best of a
few finalists adds less than that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

WINS = 0.75  # of the rounds


@dataclass(frozen=True)
class Comparison:
    """A candidate against the heuristic over paired rounds. Seconds."""

    heuristic_s: float  # p50
    candidate_s: float  # p50
    ratio: float
    wins: float  # fraction of the rounds in which the candidate was faster
    low: float  # 10th and 90th percentile of the rounds' ratios
    high: float

    def faster(self, noise: float) -> bool:
        return self.ratio - 1 > noise and self.wins >= WINS

    def slower(self, noise: float) -> bool:
        return 1 - self.ratio > noise and self.wins <= 1 - WINS


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
        wins=sum(ratio > 1 for ratio in ratios) / len(ratios),
        low=percentile(ratios, 10),
        high=percentile(ratios, 90),
    )


def noise_of(itself: Comparison) -> float:
    """The noise, from the heuristic against itself."""
    return max(abs(itself.ratio - 1), (itself.high - itself.low) / 2)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest values."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
    return low + (high - low) * (at - math.floor(at))


def tflops(m: int, n: int, k: int, seconds: float) -> float:
    return 2 * m * n * k / seconds / 1e12
