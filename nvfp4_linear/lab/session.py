"""A sweep's machine and its two children: one that checks and may die often, one that measures.

Children are started when first needed and kept from problem to problem. What kills or hangs one is
reported for the candidate it had in hand; the next question goes to a fresh child.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .. import algorithms
from ..algorithms import Algorithm, Device
from ..console import CommandError
from .candidates import to_row
from .children import Child, ChildLost

START_S = 240.0  # the library's hundreds of megabytes may come from a cold disk
CHECK_S = 15.0  # without progress, a candidate hangs
PREPARE_S = 240.0  # imports torch, makes operands
MAX_LOST = 64  # children of a sweep
MAX_LOSSES = 2  # children that one kernel may take with it
NOT_ASKED = f"not asked: id, tile and stages had taken {MAX_LOSSES} children with them"
MEASURE_S = 30.0
DOUBLE_CHIP = Device((12, 1), 48, name="GB10, described")


@dataclass(frozen=True)
class Machine:
    """What is measured on. library: path of cuBLASLt. test_double: it computes on host memory."""

    library: str
    chip: Device
    test_double: bool

    @property
    def device(self) -> str:
        return "cpu" if self.test_double else "cuda"

    @property
    def name(self) -> str:
        """Of the chip, without its number on this machine."""
        name = self.chip.name
        return name.partition(" ")[2] if name.startswith("cuda:") else name

    def device_info(self) -> dict[str, int]:
        """Of `_cublaslt.DeviceInfo`, as a child sees the GPU: its only one."""
        major, minor = self.chip.cc
        return {
            "cc_major": major,
            "cc_minor": minor,
            "sm_count": self.chip.sm_count,
            "index": 0,
        }


def find_machine(
    device: str | int | None = None,
    library: str | None = None,
    chip: Device | None = None,
) -> Machine:
    """This machine's GPU and cuBLASLt; or a test double, on the CPU, as the chip described.

    library: None is NVFP4_CUBLASLT_LIBRARY, else the one that the ops use. chip: of a double alone;
    None is a GB10. Raises CommandError where neither a GPU nor a double is there.
    """
    path = library or os.environ.get("NVFP4_CUBLASLT_LIBRARY") or _own_library()
    if is_test_double(path):
        return Machine(path, chip or DOUBLE_CHIP, test_double=True)
    if chip is not None:
        raise CommandError(
            "a chip can be described to a test double only, and this is cuBLASLt itself, which "
            "answers for the GPU of this machine: leave out --cc and --sms"
        )
    try:
        found = algorithms.device_of(device)
    except ValueError as error:
        raise CommandError(str(error)) from None
    if not isinstance(found, Device):
        raise CommandError(
            "algorithms are timed on a CUDA GPU, and torch sees none here: run this on the GPU's "
            "machine, or name a test double in NVFP4_CUBLASLT_LIBRARY for a dry run"
        )
    return Machine(path, found, test_double=False)


def is_test_double(library: str) -> bool:
    """Whether the library at that path is the tests' double: it can be told what to answer."""
    try:
        return hasattr(ctypes.CDLL(library), "fake_configure")
    except OSError as error:
        raise CommandError(f"cuBLASLt could not be loaded: {error}") from None


def _own_library() -> str:
    own = algorithms.library()
    if own["unavailable"]:
        raise CommandError(own["unavailable"])
    return own["path"]


Kernel = tuple[int, int, int]


def kernel_of(algorithm: Algorithm) -> Kernel:
    """id, tile, stages: what else is set rarely decides whether cuBLASLt dies of it."""
    return algorithm.id, algorithm.tile, algorithm.stages


@dataclass(frozen=True)
class Lost:
    """A candidate that took a child with it."""

    number: int
    reason: str


class Session:
    """The children of one machine. A context manager: it leaves no process behind."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._checker: Child | None = None
        self._timer: Child | None = None
        self._prepared: dict[str, Any] = {}
        self._torch_makes_context = False

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop_checker()
        self._drop_timer()

    # ------------------------------------------------------------------------------ questions

    def version(self) -> int:
        """cublasLtGetVersion of the library as a child loads it."""
        library = self._question("library")
        if library["unavailable"]:
            raise CommandError(library["unavailable"])
        return library["version"]

    def heuristic(self, problem: dict[str, Any], count: int) -> list[dict[str, Any]]:
        """The heuristic's usable answers, best first. Raises CommandError with its reason."""
        asked = self._question("heuristic", problem=problem, count=count)
        if asked["reason"].startswith("cublasLtCreate") and not self.machine.test_double:
            self._torch_makes_context = True
            self._drop_checker()
            asked = self._question("heuristic", problem=problem, count=count)
        usable = [answer for answer in asked["answers"] if answer["ok"]]
        if not usable:
            reasons = [asked["reason"], *(answer["reason"] for answer in asked["answers"])]
            raise CommandError(
                f"the heuristic has no answer for this problem, so there is nothing to compare "
                f"with: {'; '.join(filter(None, reasons))}"
            )
        return usable

    def capabilities(self, problem: dict[str, Any]) -> dict[int, dict[str, list[int]]]:
        """What each algorithm id of the problem's type says of itself."""
        asked = self._question("capabilities", problem=problem)
        if asked["reason"]:
            raise CommandError(asked["reason"])
        return {int(algorithm_id): own for algorithm_id, own in asked["values"].items()}

    def check(
        self,
        problem: dict[str, Any],
        candidates: Sequence[tuple[int, Algorithm]],
        losses: Counter[Kernel],
    ) -> tuple[list[tuple[int, dict[str, Any]]], Counter[str], list[Lost]]:
        """AlgoCheck of numbered candidates: accepted with what was read back, refusals counted.

        A candidate that the child dies of is skipped; those before it are asked again. losses: by
        kernel; counted up here, and one that has MAX_LOSSES is not asked about any more. After more
        than MAX_LOST in all nothing is asked: the library, not a candidate, is the trouble then.
        """
        accepted: list[tuple[int, dict[str, Any]]] = []
        refused: Counter[str] = Counter()
        lost: list[Lost] = []
        pending = [list(candidates)]
        while pending and losses.total() <= MAX_LOST:
            offered = pending.pop()
            part = offered
            if losses:
                part = [(n, a) for n, a in offered if losses[kernel_of(a)] < MAX_LOSSES]
            if len(part) < len(offered):
                refused[NOT_ASKED] += len(offered) - len(part)
            if not part:
                continue
            try:
                reply = self._ask_checker(
                    "check",
                    timeout=CHECK_S,
                    problem=problem,
                    rows=[to_row(algorithm) for _, algorithm in part],
                    numbers=[number for number, _ in part],
                )
            except ChildLost as failure:
                at = next((i for i, (n, _) in enumerate(part) if n == failure.number), None)
                if at is None:
                    raise CommandError(f"the child that checks algorithms: {failure}") from None
                losses[kernel_of(part[at][1])] += 1
                lost.append(Lost(failure.number, str(failure)))
                pending += [part[at + 1 :], part[:at]]
                continue
            accepted += [(number, answer) for number, answer in reply["accepted"]]
            refused.update(reply["refused"])
        return accepted, refused, lost

    # --------------------------------------------------------------------------- measurements

    def prepare(self, problem: dict[str, Any], seed: int) -> dict[str, Any]:
        """Has a child hold this problem's operands; gives how it measures. Idempotent."""
        key = {"problem": problem, "seed": seed}
        if self._timer is not None and self._prepared.get("key") == key:
            return self._prepared["description"]
        if self._timer is None:
            self._timer = self._start()
        try:
            description = self._timer.ask(
                "prepare",
                timeout=PREPARE_S,
                problem=problem,
                device=self.machine.device,
                seed=seed,
            )
        except ChildLost as failure:
            self._drop_timer()
            raise CommandError(f"the child that measures: {failure}") from None
        self._prepared = {"key": key, "description": description}
        return description

    def screen(self, algorithm: Algorithm, samples: int) -> dict[str, Any]:
        """`Measurement.screen` of the prepared problem. Raises ChildLost; prepare again then."""
        return self._measure("screen", row=to_row(algorithm), samples=samples)

    def round(self, candidates: Sequence[Algorithm], number: int) -> list[dict[str, Any]]:
        """`Measurement.round`. ChildLost.number is the position of the candidate in hand."""
        rows = [to_row(algorithm) for algorithm in candidates]
        return self._measure("round", rows=rows, number=number)["pairs"]

    def settled(self, algorithm: Algorithm, number: int) -> dict[str, Any]:
        """`Measurement.settled`. Raises ChildLost; prepare again then."""
        return self._measure("settled", row=to_row(algorithm), number=number)

    def child_ids(self) -> Iterator[int]:
        """Process ids of the children that are there."""
        for child in (self._checker, self._timer):
            if child is not None:
                yield child.process_id

    # ------------------------------------------------------------------------------- children

    def _start(self) -> Child:
        return Child(self.machine.library, self.machine.chip.index)

    def _question(self, op: str, **request: Any) -> Any:
        """One that no candidate is to blame for: if it costs the child, there is no going on."""
        try:
            return self._ask_checker(op, **request)
        except ChildLost as failure:
            raise CommandError(f"cuBLASLt could not be asked ({op}): {failure}") from None

    def _ask_checker(self, op: str, *, timeout: float = START_S, **request: Any) -> Any:
        if self._checker is None:
            self._checker = self._start()
            self._checker.ask("library", timeout=START_S)
            if self._torch_makes_context:
                self._checker.ask("initialize", timeout=PREPARE_S)
        try:
            return self._checker.ask(op, timeout=timeout, **request)
        except ChildLost:
            self._drop_checker()
            raise

    def _measure(self, op: str, **request: Any) -> Any:
        assert self._timer is not None, "prepare comes first"
        try:
            return self._timer.ask(op, timeout=MEASURE_S, **request)
        except ChildLost:
            self._drop_timer()
            raise

    def _drop_checker(self) -> None:
        if self._checker is not None:
            self._checker.close()
        self._checker = None

    def _drop_timer(self) -> None:
        if self._timer is not None:
            self._timer.close()
        self._timer = None
        self._prepared = {}
