"""A pin, its text form, and the file that keeps some: nothing here asks a planner.

``algorithms`` puts pins in force.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

PIN_FILE_HEADER = "# nvfp4_linear pins, version 1: one pin a line, key=value, evidence last"
_INT32_MAX, _INT64_MAX = 2**31 - 1, 2**63 - 1
MAX_PIN_FILE_BYTES = 1 << 20  # thousands of pins; anything larger is no pin file


@dataclass(frozen=True)
class Algorithm:
    """A cuBLASLt kernel configuration: the attributes of ``cublasLtMatmulAlgoConfigSet``.

    All are cuBLASLt's own ids. ``inner`` and ``cluster`` may be None: what AlgoInit gives is left.
    """

    id: int
    tile: int
    stages: int
    split_k: int = 1
    reduction: int = 0
    swizzle: int = 0
    custom: int = 0
    inner: int | None = None
    cluster: int | None = None

    def __str__(self) -> str:
        parts = ((f.name, getattr(self, f.name)) for f in fields(self))
        return ", ".join(f"{name} {'default' if value is None else value}" for name, value in parts)


@dataclass(frozen=True)
class Pin:
    """One row: for problems like this, on a chip like this, take that algorithm.

    A pin is a proposal. ``cublasLtMatmulAlgoCheck`` has the last word on every machine, and where
    it refuses, the next rung is taken and ``explain`` says so.

    cc: compute capability, e.g. (9, 0). sm_count, n, k, m_max: 0 is any. version_min/max: cuBLASLt
    versions as cublasLtGetVersion gives them (130100 is 13.1.0), both inclusive. type: "nvfp4",
    "bf16", "fp16" or "fp8_e4m3". fills_chip: only where the tile's grid has at least one tile per
    multiprocessor. evidence: free text, what shows that the pin is right and faster on this chip:
    ``sweep`` writes file, date and ratio. Policy "validated" takes no row of a pin file without it.
    """

    algorithm: Algorithm
    cc: tuple[int, int]
    type: str = "nvfp4"
    n: int = 0
    k: int = 0
    m_min: int = 1
    m_max: int = 0
    sm_count: int = 0
    version_min: int = 130000
    version_max: int = 139999
    fills_chip: bool = False
    evidence: str = ""

    def __post_init__(self) -> None:
        """ValueError for a number that would be read as another one, or a row that can't match."""
        for name, value, least, most in self._numbers():
            if type(value) is not int or not least <= value <= most:
                raise ValueError(
                    f"{name} of a pin must be an integer from {least} to {most}, "
                    f"got {_short(repr(value))}"
                )
        for low, high in (("m_min", "m_max"), ("version_min", "version_max")):
            first, last = getattr(self, low), getattr(self, high)
            if last < first and not (high == "m_max" and last == 0):
                raise ValueError(f"{high} of a pin must be at least {low}, got {last} and {first}")

    def _numbers(self) -> Iterable[tuple[str, Any, int, int]]:
        """(name, value, least, most) of every number; attributes are cuBLASLt's to judge further."""
        for name, value in zip(("cc_major", "cc_minor"), self.cc, strict=True):
            yield name, value, 0, _INT32_MAX
        for attribute in fields(self.algorithm):
            value = getattr(self.algorithm, attribute.name)
            if value is not None or attribute.name not in ("inner", "cluster"):
                yield attribute.name, value, -_INT32_MAX, _INT32_MAX
        yield "sm_count", self.sm_count, 0, _INT32_MAX
        for name, least in (("m_min", 1), ("m_max", 0), ("n", 0), ("k", 0)):
            yield name, getattr(self, name), least, _INT64_MAX
        for name in ("version_min", "version_max"):
            yield name, getattr(self, name), 0, _INT32_MAX

    def to_text(self) -> str:
        """The pin as one line of a pin file."""
        values: dict[str, Any] = {
            "type": self.type,
            "cc_major": self.cc[0],
            "cc_minor": self.cc[1],
            "sm_count": self.sm_count,
            "version_min": self.version_min,
            "version_max": self.version_max,
            "m_min": self.m_min,
            "m_max": self.m_max,
            "n": self.n,
            "k": self.k,
            **{
                name: "default" if value is None else value
                for name, value in asdict(self.algorithm).items()
            },
            "fills_chip": int(self.fills_chip),
            "evidence": " ".join(self.evidence.split()),
        }
        return " ".join(f"{key}={value}" for key, value in values.items())

    @classmethod
    def from_text(cls, text: str) -> Pin:
        """Reads one line as ``to_text`` writes it.

        Raises ValueError naming the word that is not understood.
        """
        head, _, evidence = text.partition("evidence=")
        values: dict[str, str] = {}
        for word in head.split():
            key, equals, value = word.partition("=")
            if not equals:
                raise ValueError(f"a pin is key=value words, got {_short(word)!r}")
            if key in values:
                raise ValueError(f"a pin says {_short(key)}= once, got it twice")
            values[key] = value
        kind = values.pop("type", "nvfp4")
        names = [f.name for f in fields(Algorithm)]

        def integer(key: str, default: int | None = None) -> int:
            if key not in values and default is None:
                raise ValueError(f"a pin needs {key}=")
            value = values.pop(key, str(default))
            if not re.fullmatch(r"-?[0-9]{1,19}", value):  # int() takes 7_0 and other scripts
                raise ValueError(f"{key} must be an integer, got {_short(value)!r}")
            return int(value)

        attributes: dict[str, int | None] = {}
        for name in names:
            if values.get(name) == "default" and name in ("inner", "cluster"):
                values.pop(name)
                continue
            if name in values or name in ("id", "tile", "stages"):
                attributes[name] = integer(name)
        pin = cls(
            algorithm=Algorithm(**attributes),  # type: ignore[arg-type]
            cc=(integer("cc_major"), integer("cc_minor")),
            type=kind,
            n=integer("n", 0),
            k=integer("k", 0),
            m_min=integer("m_min", 1),
            m_max=integer("m_max", 0),
            sm_count=integer("sm_count", 0),
            version_min=integer("version_min", 130000),
            version_max=integer("version_max", 139999),
            fills_chip=_flag("fills_chip", integer("fills_chip", 0)),
            evidence=evidence.strip(),
        )
        if values:
            raise ValueError(f"unknown key {_short(next(iter(values)))!r} in a pin")
        return pin


def _flag(name: str, value: int) -> bool:
    if value not in (0, 1):
        raise ValueError(f"{name} must be 0 or 1, got {value}")
    return bool(value)


def _short(text: str, limit: int = 40) -> str:
    return text if len(text) <= limit else text[:limit] + "..."


@dataclass(frozen=True)
class PinFileReport:
    """What ``load_pins`` did: the pins in force now, and the rows refused with their reasons."""

    path: str
    loaded: tuple[Pin, ...]
    refused: tuple[tuple[int, str], ...]  # line number, reason

    def __str__(self) -> str:
        lines = [f"{self.path}: {len(self.loaded)} pins loaded, {len(self.refused)} rows refused"]
        return "\n".join([*lines, *(f"  line {line}: {reason}" for line, reason in self.refused)])


def read_pin_file(path: str | os.PathLike[str]) -> str:
    """The text of a pin file, none of whose size, kind or content is trusted.

    Raises ValueError where it can be no pin file (too large, not text, a device), OSError where it
    can't be read.
    """
    # A FIFO that nobody writes to is refused, not waited for.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError(f"{path} is not a regular file, so no pin file")
        if facts.st_size > MAX_PIN_FILE_BYTES:
            raise ValueError(
                f"{path} has {facts.st_size:,} bytes, a pin file at most {MAX_PIN_FILE_BYTES:,}"
            )
        content = file.read(MAX_PIN_FILE_BYTES + 1) or b""
    if len(content) > MAX_PIN_FILE_BYTES:
        raise ValueError(
            f"{path} has more than {MAX_PIN_FILE_BYTES:,} bytes, the most of a pin file"
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a pin file: {error}") from None


def write_pin_file(path: str | os.PathLike[str], rows: Iterable[Pin]) -> None:
    """Whole or not at all."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write("\n".join([PIN_FILE_HEADER, *(row.to_text() for row in rows), ""]))
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
