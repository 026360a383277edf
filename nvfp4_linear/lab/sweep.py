"""A sweep: every candidate through AlgoCheck, the survivors timed, the best proved; resumable.

    check    AlgoCheck of the heuristic's answers and of their neighbours (candidates.py), in a
             child that may die of one: a recorded rejection
    screen   each accepted one: output compared by bytes, then up to 3 pairs with the heuristic;
             until the time budget is used up, nearest to the heuristic's answers first
    again    check and screen the neighbours of the best four
    final    the best of the screen, `rounds` alternating rounds in one process, A/A among them
    settled  who may win by these rounds, alone with the heuristic: each runs until the GPU has
             settled before it is timed, since a power limit can take back what one clock gave
    verdict  judgement.py; the winner is the fastest that is byte-exact and faster beyond the noise
             in both

The result file is written whole every two seconds and after every round of the final, so that it
is usable at any moment, and a sweep started again with the same question goes on from it. A file of
another question, library or chip is never overwritten unless told to.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ..algorithms import Algorithm
from ..console import CommandError, Console
from . import candidates as space
from . import session
from .candidates import from_dict
from .children import ChildLost
from .judgement import contenders, judge
from .measure import OPS_ANSWERS
from .session import Machine, Session, kernel_of
from .verdict import compare

FORMAT = "nvfp4_linear sweep 2"
TYPES = ("nvfp4", "bf16", "fp16", "fp8_e4m3")
SEED_ANSWERS = 32
CHECK_BATCH = 4096
SAVE_S = 2.0  # between writes: what a killed sweep loses at most
SCREEN_SAMPLES = 3
SEEDS_OF_BEST = 4
ALIKE = 2
TIE = 0.005
SETTLED_ROUNDS = 8
INEXACT_FINALISTS = 2  # shown beside the exact ones, for who can live with them
FIRST_SHARE = 0.65  # of the screen's time; the rest is for the neighbours of the best


@dataclass(frozen=True)
class Options:
    """How to search. budget_s: seconds of screening, None without end."""

    rounds: int = 20
    exhaustive: bool = False
    finalists: int = 8
    budget_s: float | None = 40.0
    seed: int = 0

    def question(self) -> dict[str, Any]:
        """What may not change when a sweep is resumed."""
        return {"exhaustive": self.exhaustive, "seed": self.seed}


def make_problem(
    machine: Machine,
    type: str,
    m: int,
    n: int,
    k: int,
    *,
    out: str = "bf16",
    ldd: int | None = None,
    alpha: str = "host",
    workspace_bytes: int = 32 << 20,
) -> dict[str, Any]:
    """The problem as `_cublaslt.Problem.as_dict` has it: pointers on 256-byte boundaries."""
    return {
        "type": type,
        "m": m,
        "n": n,
        "k": k,
        "lda": k,
        "ldb": k,
        "ldd": n if ldd is None else ldd,
        "out": out,
        "bias": None,
        "alpha": alpha,
        "alignment": 256,
        "workspace_limit": workspace_bytes,
        "device": machine.device_info(),
        "skip_pins": False,
    }


def write_whole(path: Path, text: str) -> None:
    """Whole or not at all. The partial file has a fixed name: a killed process leaves one."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(text)
    os.replace(partial, path)


class OtherFile(CommandError):
    """The result file that is there belongs to something else; nothing was changed."""


class Result:
    """A result file: a dict of plain types and where it is kept."""

    def __init__(self, path: Path, data: dict[str, Any]) -> None:
        self.path, self.data = path, data

    @staticmethod
    def read(path: Path) -> Result:
        """Raises OtherFile where the file is no sweep result."""
        try:
            data = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise OtherFile(
                f"{path} is not a sweep result ({error}): give another --out, or --restart to "
                f"overwrite it"
            ) from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise OtherFile(
                f"{path} is not a sweep result (its format is not {FORMAT!r}): give another --out, "
                f"or --restart to overwrite it"
            )
        return Result(path, data)

    def save(self) -> None:
        write_whole(self.path, json.dumps(self.data, indent=1) + "\n")

    @property
    def finished(self) -> bool:
        return self.data["finished"]

    @property
    def winner(self) -> dict[str, Any] | None:
        """The entry of verdict["candidates"] that may be pinned as it is."""
        index = self.data["verdict"]["winner"] if self.finished else None
        return None if index is None else self.data["verdict"]["candidates"][index]


def sweep(
    opened: Session,
    problem: dict[str, Any],
    options: Options,
    path: Path,
    console: Console,
    *,
    restart: bool = False,
) -> Result:
    """Runs a sweep, or the rest of one, and gives its result. See the module docstring."""
    result = _open(opened, problem, options, path, restart)
    if not result.finished:
        _Sweep(opened, result, options, console).run()
    return result


def _open(
    opened: Session, problem: dict[str, Any], options: Options, path: Path, restart: bool
) -> Result:
    question = {
        "problem": problem,
        "machine": {
            "gpu": opened.machine.name,
            "cc": list(opened.machine.chip.cc),
            "sm_count": opened.machine.chip.sm_count,
            "cublaslt": opened.version(),
            "test_double": opened.machine.test_double,
        },
        "options": options.question(),
    }
    if path.exists() and not restart:
        result = Result.read(path)
        for key, value in question.items():
            if result.data.get(key) != value:
                raise OtherFile(
                    f"{path} is of another {key} ({_unequal(result.data.get(key), value)}): give "
                    f"another --out, or --restart to overwrite it"
                )
        return result
    data = {
        "format": FORMAT,
        "finished": False,
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        **question,
        "measured_with": {"torch": torch.__version__},
        "heuristic": [],
        "generations": [],
        "lost": [],
        "screened": [],
        "final": None,
        "settled": [],
        "verdict": None,
    }
    return Result(path, data)


def _unequal(old: Any, new: Any) -> str:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return f"there {old}, now {new}"
    key = next(key for key in {**old, **new} if old.get(key) != new.get(key))
    return f"{key}: there {old.get(key)}, now {new.get(key)}"


class _Sweep:
    """One run over a result, from wherever it stands."""

    def __init__(self, opened: Session, result: Result, options: Options, console: Console) -> None:
        self._session, self._result, self._options = opened, result, options
        self._console = console
        self._data = result.data
        self._problem = result.data["problem"]
        self._ranges = space.Ranges.of(result.data["machine"]["cublaslt"])
        self._saved = 0.0

    def run(self) -> None:
        self._demand_few_lost()
        if not self._data["heuristic"]:
            self._data["heuristic"] = self._ask_heuristic()
            self._result.save()
        budget = self._options.budget_s
        self._generation(0, None if budget is None else budget * FIRST_SHARE)
        self._generation(1, None if budget is None else budget * (1 - FIRST_SHARE))
        self._final()
        self._settle()
        self._data["verdict"] = judge(self._data)
        self._data["finished"] = True
        self._result.save()

    def _ask_heuristic(self) -> list[dict[str, Any]]:
        """Usable answers, the one that the ops run first, none twice."""
        answers = self._session.heuristic(self._problem, OPS_ANSWERS)
        for answer in self._session.heuristic(self._problem, SEED_ANSWERS):
            if all(answer["algorithm"] != known["algorithm"] for known in answers):
                answers.append(answer)
        return answers

    # ---------------------------------------------------------------------------------- check

    def _generation(self, number: int, budget_s: float | None) -> None:
        generations = self._data["generations"]
        if number == len(generations):
            generations.append(self._new_generation(number))
        generation = generations[number]
        if not generation["complete"]:
            self._check(generation)
            self._screen(generation, budget_s)
            generation["complete"] = True
            self._result.save()

    def _new_generation(self, number: int) -> dict[str, Any]:
        generation: dict[str, Any] = {
            "seeds": [],
            "capabilities": None,
            "total": 0,
            "checked": 0,
            "accepted": [],
            "refused": {},
            "complete": False,
        }
        if number == 0:
            answers = [from_dict(answer["algorithm"]) for answer in self._data["heuristic"]]
            start = space.seeds(answers, self._problem["type"])
            if self._options.exhaustive:
                capabilities = self._session.capabilities(self._problem)
                generation["capabilities"] = {
                    str(algorithm_id): {key: own.get(key, []) for key in ("tile_ids", "stages_ids")}
                    for algorithm_id, own in capabilities.items()
                }
        else:
            start = self._best(SEEDS_OF_BEST)
        generation["seeds"] = [asdict(seed) for seed in start]
        if generation["capabilities"] is None:
            generation["total"] = sum(1 for _ in self._candidates(generation, number))
        else:
            count = space.exhaustive_count(start, self._ranges, _ids(start), capabilities)
            generation["total"] = len(start) + count
        return generation

    def _candidates(self, generation: dict[str, Any], number: int) -> Iterable[Algorithm]:
        """All candidates of a generation, always in the same order."""
        start = [from_dict(seed) for seed in generation["seeds"]]
        if number > 0:
            return space.neighbourhood(start, self._ranges, ())
        if generation["capabilities"] is not None:
            own = {int(key): value for key, value in generation["capabilities"].items()}
            return itertools.chain(start, space.exhaustive(start, self._ranges, _ids(start), own))
        return itertools.chain(start, space.neighbourhood(start, self._ranges, _ids(start)))

    def _check(self, generation: dict[str, Any]) -> None:
        number = self._data["generations"].index(generation)
        known = {from_dict(a["algorithm"]) for a in self._all_accepted()}
        gone = [from_dict(lost["algorithm"]) for lost in self._data["lost"]]
        known.update(gone)
        losses = Counter(map(kernel_of, gone))
        rest = itertools.islice(
            enumerate(self._candidates(generation, number)), generation["checked"], None
        )
        left = generation["total"] - generation["checked"]
        batches = -(-left // CHECK_BATCH)
        what = f"AlgoCheck, {left:,} candidates"
        for batch in self._console.progress(_batches(rest, CHECK_BATCH), what, batches):
            asked = [(index, candidate) for index, candidate in batch if candidate not in known]
            accepted, refused, lost = self._session.check(self._problem, asked, losses)
            for _, answer in accepted:
                algorithm = from_dict(answer["algorithm"])
                if algorithm not in known:  # cuBLASLt may read two back as one
                    known.add(algorithm)
                    generation["accepted"].append(answer)
            for reason, count in refused.items():
                generation["refused"][reason] = generation["refused"].get(reason, 0) + count
            by_index = dict(asked)
            for one in lost:
                self._lose(by_index[one.number], "check", one.reason)
            generation["checked"] += len(batch)
            self._save_if_due()
        self._save()

    def _lose(self, algorithm: Algorithm, stage: str, reason: str) -> None:
        entry = {"algorithm": asdict(algorithm), "stage": stage, "reason": reason}
        self._data["lost"].append(entry)
        self._demand_few_lost()

    def _demand_few_lost(self) -> None:
        lost = self._data["lost"]
        if len(lost) > session.MAX_LOST:
            self._result.save()
            raise CommandError(
                f"{len(lost)} candidates took their process with them, the last in "
                f"{lost[-1]['stage']}: {lost[-1]['reason']}. The library or the driver is not "
                f"usable; see {self._result.path}, and --restart when it is"
            )

    def _all_accepted(self) -> Iterator[dict[str, Any]]:
        for generation in self._data["generations"]:
            yield from generation["accepted"]

    # --------------------------------------------------------------------------------- screen

    def _screen(self, generation: dict[str, Any], budget_s: float | None) -> None:
        """Times a generation, nearest to its seeds first, then what earlier ones left."""
        done = {from_dict(entry["algorithm"]) for entry in self._data["screened"]}
        done |= {from_dict(lost["algorithm"]) for lost in self._data["lost"]}
        earlier = [g for g in self._data["generations"] if g is not generation]
        waiting = [
            answer
            for one in (generation, *earlier)
            for answer in sorted(
                one["accepted"], key=lambda answer: _distance(answer, one["seeds"])
            )
            if from_dict(answer["algorithm"]) not in done
        ]
        if not waiting:
            return
        self._prepare()
        until = None if budget_s is None else time.monotonic() + budget_s
        what = f"screen, {len(waiting):,} algorithms"
        for answer in self._console.progress(waiting, what):
            if until is not None and time.monotonic() > until:
                break
            self._screen_one(answer)
            self._save_if_due()
        self._save()

    def _screen_one(self, answer: dict[str, Any]) -> None:
        algorithm = from_dict(answer["algorithm"])
        try:
            measured = self._session.screen(algorithm, SCREEN_SAMPLES)
        except ChildLost as failure:
            self._lose(algorithm, "screen", str(failure))
            self._prepare()
            return
        if "refused" in measured:
            self._lose(algorithm, "screen", measured["refused"])
            return
        ratio = compare(measured["heuristic_s"], measured["s"]).ratio
        entry = {
            "algorithm": answer["algorithm"],
            "workspace_bytes": answer["workspace_bytes"],
            "waves": answer["waves"],
            "ratio": ratio,
            **measured,
        }
        self._data["screened"].append(entry)

    def _prepare(self) -> None:
        description = self._session.prepare(self._problem, self._options.seed)
        first = self._data["heuristic"][0]["algorithm"]
        if description["baseline"] != first:
            raise OtherFile(
                f"the heuristic's first answer is not the one that {self._result.path} was begun "
                f"with: --restart begins anew"
            )
        self._data["measured_with"] = description

    def _save_if_due(self) -> None:
        if time.monotonic() - self._saved > SAVE_S:
            self._save()

    def _save(self) -> None:
        self._result.save()
        self._saved = time.monotonic()

    def _best(self, count: int, exact: bool = True) -> list[Algorithm]:
        """The fastest of the screen, with output equal to the heuristic's or, else, different.

        Ratios within TIE of each other are one: then what is nearer to the heuristic's answers goes
        first. Of one kernel at one cluster shape there are at most ALIKE: many differ only in an
        attribute that it ignores.
        """
        answers = [answer["algorithm"] for answer in self._data["heuristic"]]
        entries = [e for e in self._data["screened"] if (e["difference"] is None) == exact]
        entries.sort(key=lambda e: (-round(e["ratio"] / TIE), _distance(e, answers), -e["ratio"]))
        taken: Counter[tuple[Any, ...]] = Counter()
        best = []
        for algorithm in (from_dict(entry["algorithm"]) for entry in entries):
            like = (*kernel_of(algorithm), algorithm.cluster)
            if taken[like] < ALIKE and len(best) < count:
                taken[like] += 1
                best.append(algorithm)
        return best

    # ---------------------------------------------------------------------------------- final

    def _final(self) -> None:
        """Alternating rounds of the finalists, begun anew where they were interrupted."""
        final = self._data["final"]
        if final is not None and len(final["rounds"]) >= self._options.rounds:
            return
        lost = [entry["algorithm"] for entry in self._data["lost"]]
        finalists = self._best(self._options.finalists)
        finalists += self._best(INEXACT_FINALISTS, exact=False)
        finalists = [algorithm for algorithm in finalists if asdict(algorithm) not in lost]
        self._prepare()
        while True:
            try:
                return self._rounds(finalists)
            except ChildLost as failure:
                if failure.number < 0:
                    raise CommandError(f"the heuristic's own algorithm: {failure}") from None
                self._lose(finalists.pop(failure.number), "final", str(failure))
                self._prepare()

    def _rounds(self, finalists: list[Algorithm]) -> None:
        final: dict[str, Any] = {
            "finalists": [asdict(algorithm) for algorithm in finalists],
            "rounds": [],
        }
        self._session.round(finalists, -1)  # warm: loads kernels
        numbers = range(self._options.rounds)
        for number in self._console.progress(numbers, f"final, {len(finalists)} algorithms"):
            final["rounds"].append(self._session.round(finalists, number))
            self._data["final"] = final
            self._save()

    def _settle(self) -> None:
        """Settled rounds of those that may win, fastest first, until one does."""
        for index in contenders(judge(self._data)):
            verdict = judge(self._data)
            entry = verdict["candidates"][index]
            if verdict["winner"] is not None:
                return
            if entry["settled"] is not None:  # before this sweep was resumed
                continue
            self._prepare()
            algorithm = from_dict(entry["algorithm"])
            numbers = range(min(self._options.rounds, SETTLED_ROUNDS))
            try:
                rounds = [
                    self._session.settled(algorithm, number)
                    for number in self._console.progress(numbers, "settled")
                ]
            except ChildLost as failure:
                self._lose(algorithm, "settled", str(failure))
                continue
            self._data["settled"].append({"algorithm": entry["algorithm"], "rounds": rounds})
            self._save()


def _ids(seeds: Iterable[Algorithm]) -> list[int]:
    return sorted({seed.id for seed in seeds})


def _distance(answer: dict[str, Any], seeds: list[dict[str, Any]]) -> int:
    """How many attributes separate an accepted algorithm from the nearest seed."""
    own = answer["algorithm"]
    return min(sum(own[name] != seed[name] for name in own) for seed in seeds)


def _batches(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    items = iter(items)
    while batch := list(itertools.islice(items, size)):
        yield batch
