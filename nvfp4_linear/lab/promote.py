"""From a sweep's result to a row of a pin file.

A pin is written only of a finished sweep, and only where its winner is byte-exact with the
heuristic and faster beyond the noise; with ``allow_inexact`` the fastest may differ in bytes, and
its evidence says so. Its conditions are what was measured and no more: this compute capability and
SM count, exactly this version of cuBLASLt, this type, N, K and M (a range of M only where asked
for).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..algorithms import Pin, save_pins
from ..console import CommandError
from ..pin_file import PIN_FILE_HEADER, read_pin_file
from .candidates import from_dict
from .judgement import faster_in_both
from .sweep import Result


class NothingToPin(CommandError):
    """The sweep has no algorithm that may be pinned; the text says why."""


def pin_of(
    result: Result,
    *,
    allow_inexact: bool = False,
    m_range: tuple[int, int] | None = None,
    source: str | None = None,
) -> Pin:
    """The pin that a finished sweep stands for.

    m_range: first and last M to pin it for, around the one that was measured. source: the file that
    the evidence names, by default the result's. Raises NothingToPin.
    """
    if not result.finished:
        raise NothingToPin(f"{result.path} is not finished: run the same sweep again to go on")
    entry = result.winner
    if allow_inexact:
        faster = [e for e in result.data["verdict"]["candidates"] if faster_in_both(e)]
        entry = faster[0] if faster else None
    if entry is None:
        raise NothingToPin(f"nothing to pin: {result.data['verdict']['reason']}")
    machine, problem = result.data["machine"], result.data["problem"]
    m_min, m_max = m_range or (problem["m"], problem["m"])
    if not m_min <= problem["m"] <= m_max:
        raise CommandError(
            f"--m-range must hold the M that was measured, {problem['m']}, got {m_min}:{m_max}"
        )
    return Pin(
        algorithm=from_dict(entry["algorithm"]),
        cc=tuple(machine["cc"]),
        type=problem["type"],
        n=problem["n"],
        k=problem["k"],
        m_min=m_min,
        m_max=m_max,
        sm_count=machine["sm_count"],
        version_min=machine["cublaslt"],
        version_max=machine["cublaslt"],
        evidence=_evidence(result, entry, source or result.path.name),
    )


def _evidence(result: Result, entry: dict[str, Any], source: str) -> str:
    data, problem = result.data, result.data["problem"]
    found = entry["comparison"]
    text = (
        f"{source}, {data['date']}: {found['ratio']:.4f}x the heuristic at m={problem['m']}"
        f" ({found['candidate_s'] * 1e3:.4g} against {found['heuristic_s'] * 1e3:.4g} ms, noise"
        f" {data['verdict']['noise']:.2%}, {len(data['final']['rounds'])} rounds), "
        f"{entry['settled']['comparison']['ratio']:.4f}x settled (noise"
        f" {entry['settled']['noise']:.2%}), "
    )
    different = entry["difference"]
    if different:
        text += (
            f"NOT byte-exact: {different['elements']:,} of {different['of']:,} elements differ by "
            f"up to {different['largest']}, allowed by --allow-inexact"
        )
    elif data["verdict"]["reproducible"]:
        text += "byte-exact"
    else:
        text += (
            "NOT shown byte-exact: the heuristic's own output varies, allowed by --allow-inexact"
        )
    return text + (" (test double, no chip)" if data["machine"]["test_double"] else "")


def write_pin(path: Path, pin: Pin) -> None:
    """Puts a pin into a file, in place of the row for the same problem, chip and library.

    The newest pin is asked first, so it goes last in the file. Raises CommandError where the file
    has a line that is no pin: rewriting would lose it.
    """
    rows = [row for row in read_rows(path) if _conditions(row) != _conditions(pin)]
    save_pins(path, [*rows, pin])


def read_rows(path: Path) -> list[Pin]:
    """The rows of a pin file, none of them put in force; none where there is no file."""
    if not path.exists():
        return []
    try:
        text = read_pin_file(path)
    except (OSError, ValueError) as error:
        raise CommandError(f"{error}: name another file") from None
    rows = []
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if not line or line.startswith("#"):
            if line and line != PIN_FILE_HEADER:
                raise CommandError(
                    f"{path}, line {number} is a comment, which rewriting would lose: name another "
                    f"file, or take it out"
                )
            continue
        try:
            rows.append(Pin.from_text(line))
        except (ValueError, TypeError) as error:
            raise CommandError(f"{path}, line {number}: {error}: repair it first") from None
    return rows


def _conditions(pin: Pin) -> Pin:
    """The pin without what it says to do: two with equal conditions would shadow each other."""
    return replace(pin, algorithm=from_dict({"id": 0, "tile": 0, "stages": 0}), evidence="")
