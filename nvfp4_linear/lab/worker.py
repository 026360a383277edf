"""The child process of the lab: asks cuBLASLt, which may kill it, and reports line by line.

    worker.py EXTENSION LIBRARY PARENT REQUESTS REPLIES PROGRESS

EXTENSION: path of the `_cublaslt` module. LIBRARY: of cuBLASLt. PARENT: process id that must be our
parent. REQUESTS, REPLIES: pipes, a JSON object a line. PROGRESS: a file of 8 bytes, mapped by both
sides, that holds the number of the candidate in hand: after a crash the parent reads there which
one it was.

Never outlives its parent: the kernel kills it when the parent's thread that started it ends, and an
end of file on REQUESTS ends it too. Imports no torch until it is asked to measure, so that a fresh
child after a crash costs little; for the same reason it is run by path, not as a module.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import mmap
import os
import re
import signal
import struct
import sys
from collections import Counter
from typing import Any

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """SIGKILL from the kernel when `parent` is gone; at once where it already is."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def load_extension(path: str) -> Any:
    """`nvfp4_linear._cublaslt`, without the package around it and so without torch.

    Under its full name, for the package may come later, and its types can be registered only once.
    """
    name = "nvfp4_linear._cublaslt"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Progress:
    """The number of the candidate in hand, readable by the parent when this process is dead."""

    def __init__(self, file: int) -> None:
        self._map = mmap.mmap(file, 8)
        self._write = struct.Struct("<q").pack_into

    def at(self, number: int) -> None:
        self._write(self._map, 0, number)


class Worker:
    """Answers requests: a method for each `op`."""

    def __init__(self, extension: str, library: str, progress: Progress) -> None:
        self._lt = load_extension(extension)
        self._planner = self._lt.Planner(library, "never")
        self._progress = progress
        self._measurement: Any = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        op = request.pop("op")
        return getattr(self, f"_{op}")(**request)

    def _problem(self, problem: dict[str, Any]) -> Any:
        device = self._lt.DeviceInfo(**problem["device"])
        return self._lt.Problem(**{**problem, "device": device})

    def _algorithm(self, row: list[Any]) -> Any:
        id, tile, stages, split_k, reduction, swizzle, custom, inner, cluster = row
        return self._lt.Algorithm(
            id=id,
            tile=tile,
            stages=stages,
            split_k=split_k,
            reduction=reduction,
            swizzle=swizzle,
            custom=custom,
            inner=inner,
            cluster=cluster,
        )

    def _library(self) -> dict[str, Any]:
        return dict(self._planner.library)

    def _initialize(self) -> dict[str, Any]:
        """Lets torch make the GPU's context, where cuBLASLt can't by itself."""
        import torch

        torch.cuda.init()
        torch.empty(1, device="cuda")
        return {}

    def _heuristic(self, problem: dict[str, Any], count: int) -> dict[str, Any]:
        asked = self._planner.heuristic(self._problem(problem), count)
        for answer in asked["answers"]:
            del answer["plan"]
        return dict(asked)

    def _capabilities(self, problem: dict[str, Any]) -> dict[str, Any]:
        asked = self._problem(problem)
        ids = self._planner.algorithm_ids(asked)
        if ids["reason"]:
            return {"reason": ids["reason"], "values": {}}
        values = {}
        for algorithm_id in ids["ids"]:
            own = self._planner.capabilities(asked, algorithm_id)
            if not own["reason"]:
                values[algorithm_id] = own["values"]
        return {"reason": "", "values": values}

    def _check(
        self, problem: dict[str, Any], rows: list[list[Any]], numbers: list[int]
    ) -> dict[str, Any]:
        """numbers: the candidates' own, which go to Progress. Refusals are counted, not listed."""
        asked = self._problem(problem)
        accepted, refused = [], Counter()
        for number, row in zip(numbers, rows, strict=True):
            self._progress.at(number)
            answer = self._planner.check(asked, self._algorithm(row))
            if answer["ok"]:
                kept = {key: answer[key] for key in ("algorithm", "workspace_bytes", "waves")}
                accepted.append([number, kept])
            else:
                refused[_kind(answer["reason"])] += 1
        self._progress.at(-1)
        return {"accepted": accepted, "refused": refused}

    def _prepare(self, problem: dict[str, Any], **options: Any) -> dict[str, Any]:
        from nvfp4_linear.lab.measure import Measurement

        self._measurement = None  # frees the last problem's memory first
        self._measurement = Measurement(self._lt, self._planner, self._problem(problem), **options)
        return self._measurement.describe()

    def _screen(self, row: list[Any], samples: int) -> dict[str, Any]:
        return self._measurement.screen(self._algorithm(row), samples)

    def _round(self, rows: list[list[Any]], number: int) -> dict[str, Any]:
        """Progress holds the position in `rows`; -1 is the heuristic itself."""
        algorithms = [self._algorithm(row) for row in rows]
        pairs = self._measurement.round(algorithms, number, self._progress.at)
        self._progress.at(-1)
        return {"pairs": pairs}

    def _settled(self, row: list[Any], number: int) -> dict[str, Any]:
        return self._measurement.settled(self._algorithm(row), number)


def _kind(reason: str) -> str:
    """A refusal without what is particular to one algorithm."""
    return re.sub(r"needs \d+ bytes", "needs more bytes", reason.split(" for id ")[0])


def main(arguments: list[str]) -> None:
    extension, library = arguments[:2]
    parent, requests, replies, progress = map(int, arguments[2:])
    die_with(parent)
    del sys.path[0]  # this file's folder: nothing is imported from there by bare name
    worker = Worker(extension, library, Progress(progress))
    with os.fdopen(requests) as incoming, os.fdopen(replies, "w") as outgoing:
        for line in incoming:
            try:
                reply = worker.answer(json.loads(line))
            except Exception as error:  # the parent decides what it means
                reply = {"error": f"{type(error).__name__}: {error}"}
            outgoing.write(json.dumps(reply) + "\n")
            outgoing.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
