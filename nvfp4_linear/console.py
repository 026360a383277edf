"""What every command prints with: text or one JSON document on stdout, everything else on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")

# Said before a plan for a chip that was described to the planner: cuBLASLt answers for the GPU that
# it runs on, whatever it is asked about.
HYPOTHETICAL_NOTE = (
    "A question about another chip. The ladder is the planner's, but cuBLASLt answers only for the "
    "GPU\nof this machine: what it would say on that chip is not known here."
)


class CommandError(Exception):
    """A command can't do its job: one line for the user, with the remedy in it."""


class Console:
    """Where a command's words go.

    as_json: stdout is kept for the one document that ``document`` prints; ``say`` is silent.
    """

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json

    def say(self, *lines: str) -> None:
        """Text for people, on stdout, at once."""
        if lines and not self.as_json:
            print("\n".join(lines), flush=True)

    def title(self, text: str) -> None:
        """A heading, set off from what was said before."""
        self.say("", text, "-" * len(text))

    def document(self, value: dict[str, Any]) -> None:
        """The JSON document; printed only where one was asked for."""
        if self.as_json:
            print(json.dumps(_finite(value), indent=2), flush=True)

    def error(self, text: str) -> None:
        """One line on stderr."""
        print(f"nvfp4_linear: error: {text}", file=sys.stderr, flush=True)

    def progress(self, items: Iterable[T], what: str, total: int | None = None) -> Iterable[T]:
        """``items`` behind a progress bar on stderr; without a bar where stderr is no terminal."""
        return tqdm(items, desc=what, total=total, leave=False, disable=not sys.stderr.isatty())

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Shows ``what`` on a terminal's stderr for as long as the block takes."""
        with tqdm(desc=what, bar_format="{desc} ...", leave=False, disable=not sys.stderr.isatty()):
            yield


def _finite(value: Any) -> Any:
    """``value`` with null for NaN and infinities, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def table(rows: Iterable[Sequence[str]], indent: str = "  ") -> list[str]:
    """Rows of text as lines with aligned columns; the last column may be of any length."""
    rows = [tuple(row) for row in rows]
    columns = max(map(len, rows), default=0)
    widths = [max(len(row[i]) for row in rows if i < len(row) - 1) for i in range(columns - 1)]
    return [
        indent
        + "  ".join(
            text.ljust(widths[i]) if i < len(row) - 1 else text for i, text in enumerate(row)
        ).rstrip()
        for row in rows
    ]
