"""The verdict on a sweep: who is faster than the heuristic, byte-exact, and stays so.

Two measurements decide. In the final's rounds the algorithms follow each other within milliseconds,
so all run at one clock: the ratio is that of the kernels. A GPU at its power limit then gives each
the clock that its power leaves, and an algorithm that is faster at one clock may be slower so: the
settled rounds say.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .verdict import Comparison, compare, noise_of

SETTLED = 2  # byte-exact ones that are measured settled, where the first does not stay faster


def judge(data: dict[str, Any]) -> dict[str, Any]:
    """The verdict on a finished final: noise, each finalist against the heuristic, the winner.

    An entry's `settled` is None until it was measured so.
    """
    rounds = data["final"]["rounds"]

    def comparison(position: int) -> Comparison:
        pairs = [pairs[position] for pairs in rounds]
        return compare([p["heuristic_s"] for p in pairs], [p["s"] for p in pairs])

    finalists = data["final"]["finalists"]
    itself, *comparisons = (comparison(position) for position in range(1 + len(finalists)))
    noise = noise_of(itself, comparisons)
    screened = {tuple(e["algorithm"].values()): e for e in data["screened"]}
    settled = {tuple(one["algorithm"].values()): one["rounds"] for one in data["settled"]}
    entries = []
    for position, (algorithm, found) in enumerate(zip(finalists, comparisons, strict=True), 1):
        screen = screened[tuple(algorithm.values())]
        own_settled = settled.get(tuple(algorithm.values()), [])
        differences = [screen["difference"], *(pairs[position]["difference"] for pairs in rounds)]
        differences += [one["difference"] for one in own_settled]
        entries.append(
            {
                "algorithm": algorithm,
                "workspace_bytes": screen["workspace_bytes"],
                "waves": screen["waves"],
                "comparison": asdict(found),
                "difference": next(filter(None, differences), None),
                # The heuristic's own first answer needs no pin, however lucky its rounds were.
                "faster": found.faster(noise) and algorithm != data["heuristic"][0]["algorithm"],
                "settled": _settled(own_settled),
            }
        )
    entries.sort(key=lambda entry: -entry["comparison"]["ratio"])
    reproducible = data["measured_with"]["reproducible"] and not any(
        pairs[0]["difference"] for pairs in rounds
    )
    winner = next(
        (
            index
            for index, entry in enumerate(entries)
            if reproducible and not entry["difference"] and faster_in_both(entry)
        ),
        None,
    )
    return {
        "noise": noise,
        "itself": asdict(itself),
        "reproducible": reproducible,
        "candidates": entries,
        "winner": winner,
        "reason": _reason(entries, winner, noise, reproducible),
    }


def faster_in_both(entry: dict[str, Any]) -> bool:
    """Whether a candidate is faster beyond the noise at one clock and settled."""
    return entry["faster"] and entry["settled"] is not None and entry["settled"]["faster"]


def contenders(verdict: dict[str, Any]) -> list[int]:
    """Who has to be measured settled: the fastest exact ones, and the fastest of all."""
    faster = [index for index, entry in enumerate(verdict["candidates"]) if entry["faster"]]
    exact = [index for index in faster if not verdict["candidates"][index]["difference"]]
    chosen = exact[:SETTLED] if verdict["reproducible"] else []
    return [*(index for index in faster[:1] if index not in chosen), *chosen]


def _settled(rounds: list[dict[str, Any]]) -> dict[str, Any] | None:
    if not rounds:
        return None
    base, own, again = ([one[key] for one in rounds] for key in ("heuristic_s", "s", "again_s"))
    found, noise = compare(base, own), noise_of(compare(base, again))
    return {"comparison": asdict(found), "noise": noise, "faster": found.faster(noise)}


def _reason(
    entries: list[dict[str, Any]], winner: int | None, noise: float, reproducible: bool
) -> str:
    """Why there is a winner, or none."""
    if winner is not None:
        ratio, settled = (e["comparison"]["ratio"] for e in _both(entries[winner]))
        return (
            f"byte-exact and {ratio:.4f} times as fast as the heuristic, noise {noise:.2%}; settled "
            f"{settled:.4f} times, noise {entries[winner]['settled']['noise']:.2%}"
        )
    if not reproducible:
        return "the heuristic's own output differs from run to run: byte-exactness can't be shown"
    exact = [entry for entry in entries if not entry["difference"]]
    if not exact:
        return "no candidate gives the heuristic's bytes"
    best = exact[0]["comparison"]
    tried = [entry for entry in exact if entry["faster"] and entry["settled"]]
    if tried:
        ratio, settled = (e["comparison"]["ratio"] for e in _both(tried[0]))
        return (
            f"no byte-exact candidate is faster once the GPU has settled: the best is {ratio:.4f} "
            f"times as fast as the heuristic at one clock, {settled:.4f} times settled, noise "
            f"{tried[0]['settled']['noise']:.2%}"
        )
    return (
        f"no byte-exact candidate is faster by more than the noise of {noise:.2%}: the best is "
        f"{best['ratio']:.4f} times as fast, and won {best['wins']} of {best['rounds']} rounds"
    )


def _both(entry: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return entry, entry["settled"]
