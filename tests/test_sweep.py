"""The promise: a sweep tries what the library knows, survives what kills or hangs a process, pins
only what is byte-exact and faster beyond the noise, and can be killed and resumed at any moment.

Runs on a test double with a temper (lab_double): its heuristic is slow, as in the study, and rules
say which algorithms crash, hang, are refused or give other bytes.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import lab_double
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench import traffic
from nvfp4_linear import _cublaslt as lt
from nvfp4_linear import algorithms, cli
from nvfp4_linear.algorithms import Algorithm, Device, Pin
from nvfp4_linear.console import CommandError, Console
from nvfp4_linear.lab import (
    candidates,
    commands,
    measure,
    prediction,
    promote,
    report,
    session,
    sweep,
    verdict,
)
from nvfp4_linear.lab.children import Child, ChildLost
from nvfp4_linear.lab.session import Session, find_machine, kernel_of

# A slow stream-K answer first, as the study saw it; then one that is quick. Tiles of 8x32 have few
# neighbours.
ANSWERS = "set:heuristic_answers=70:4:37:-2:4194304 70:4:36:1:0"
SLOW_HEURISTIC = "run:split_k=-2:slow=4000"
ONLY_TILE_4 = "check:tile=4,split_k=1,reduction=0:pass;check:split_k=-2,cluster=0,tile=4:pass"
ONLY_TILE_4 += ";check::refuse"
CALM = f"{ANSWERS};{ONLY_TILE_4};{SLOW_HEURISTIC}"
QUICK = sweep.Options(rounds=5, finalists=3, budget_s=0.6)
SHAPE = ("nvfp4", 16, 64, 64)


RANGES_OF = ((4, 5, 9), (35, 36, 37), (0, 2, 3, 5, 6, 7, 8))
RANGES = candidates.Ranges(*RANGES_OF)


@pytest.fixture(autouse=True)
def small_space(monkeypatch):
    """A neighbourhood of a hundred."""
    monkeypatch.setattr(candidates.Ranges, "of", lambda version: RANGES)
    monkeypatch.setattr(candidates, "CUSTOM_OPTIONS", range(8))
    monkeypatch.setattr(candidates, "SWIZZLES", range(3))
    monkeypatch.setattr(candidates, "SPLIT_K", (2, 4))
    monkeypatch.setattr(candidates, "near_tiles", lambda tile, ranges: [5, 9])


@pytest.fixture
def double(monkeypatch):
    """Loads the double in children, with rules: ``machine = double(rules)``."""

    def load(rules=CALM, chip=None):
        monkeypatch.setenv("NVFP4_CUBLASLT_LIBRARY", lab_double.build())
        monkeypatch.setenv("LAB_DOUBLE", rules)
        return find_machine(chip=chip)

    return load


def run(machine, path, options=QUICK, shape=SHAPE, **keywords):
    with Session(machine) as open_session:
        problem = sweep.make_problem(machine, *shape)
        return sweep.sweep(open_session, problem, options, path, Console(), **keywords)


DIFFERENCE = {"elements": 1, "of": 1024, "first": [15, 63], "got": "1.0", "expected": "0.5",
              "largest": "0.5"}  # fmt: skip


class Scripted:
    """A session without processes: `time(algorithm)` in seconds, `wrong(algorithm)` for its bytes."""

    heuristic_first = Algorithm(70, 4, 37, -2, inner=0, cluster=0)

    def __init__(self, time=lambda a: 1.0, wrong=lambda a: False, dies=lambda calls: False):
        self.machine = session.Machine("/nowhere", session.DOUBLE_CHIP, test_double=True)
        self.time, self.wrong, self.dies = time, wrong, dies
        self.calls, self.asked, self.jitter = [], [], itertools.cycle((1.0, 1.004, 0.997, 1.002))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def version(self):
        return 130100

    def heuristic(self, problem, count):
        quick = sweep.asdict(Algorithm(70, 4, 36, inner=0, cluster=0))
        answers = (sweep.asdict(self.heuristic_first), quick)
        return [{"algorithm": a, "workspace_bytes": 0, "waves": 1.0} for a in answers]

    def capabilities(self, problem):
        return {70: {"tile_ids": [], "stages_ids": []}, 1: {"tile_ids": [1], "stages_ids": [2]}}

    def check(self, problem, asked, losses):
        self.asked += [algorithm for _, algorithm in asked]
        answer = {"workspace_bytes": 0, "waves": 1.0}
        kept = [(n, a) for n, a in asked if a.tile == 4 and a.reduction == 0]
        accepted = [(n, {"algorithm": sweep.asdict(a), **answer}) for n, a in kept]
        return accepted, {"refused": len(asked) - len(accepted)}, []

    def prepare(self, problem, seed):
        first = sweep.asdict(self.heuristic_first)
        return {"baseline": first, "reproducible": True, "torch": "2.0"}

    def _pair(self, algorithm):
        times = (self.time(self.heuristic_first), self.time(algorithm))
        base, own = (t * next(self.jitter) for t in times)
        return {"heuristic_s": base, "s": own,
                "difference": DIFFERENCE if self.wrong(algorithm) else None}  # fmt: skip

    def screen(self, algorithm, samples):
        pair = self._pair(algorithm)
        return {**pair, "heuristic_s": [pair["heuristic_s"]], "s": [pair["s"]]}

    def round(self, finalists, number):
        self.calls.append(number)
        if self.dies(self.calls):
            raise ChildLost("killed by SIGBUS", 1)
        return [self._pair(algorithm) for algorithm in (self.heuristic_first, *finalists)]

    def settled(self, algorithm, number):
        return {**self._pair(algorithm), "again_s": self.time(self.heuristic_first)}


def fast(algorithm):
    """The second answer's cluster 5 is best, everything without split-K beats the heuristic."""
    if algorithm.split_k != 1:
        return 1.0
    return 0.4 if algorithm.cluster == 5 else 0.5


def scripted(path, opened, options=None, shape=SHAPE, **keywords):
    problem = sweep.make_problem(opened.machine, *shape)
    return sweep.sweep(opened, problem, options or QUICK, path, Console(), **keywords)


def alive(process_id):
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children_of(process_id):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == process_id:
            found.append(int(stat.parent.name))
    return found


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)
    return value


# ---- The whole ----------------------------------------------------------------------------------


def test_a_sweep_finds_the_fast_algorithm_and_proves_it(double, tmp_path):
    result = run(double(), tmp_path / "s.json")
    winner = result.winner
    assert winner["faster"] and winner["difference"] is None
    assert winner["comparison"]["ratio"] > 2
    assert winner["algorithm"]["split_k"] == 1 and winner["algorithm"]["tile"] == 4
    data = json.loads((tmp_path / "s.json").read_text())
    assert data == result.data and data["finished"]
    assert data["heuristic"][0]["algorithm"]["split_k"] == -2
    first, second = data["generations"]
    assert first["checked"] == first["total"] > 60 and second["checked"] == second["total"]
    assert sum(first["refused"].values()) + len(first["accepted"]) <= first["total"]
    assert first["refused"]["AlgoCheck CUBLAS_STATUS_NOT_SUPPORTED"] > 20
    assert len(data["final"]["rounds"]) == 5
    assert all(
        len(pairs) == 1 + len(data["final"]["finalists"]) for pairs in data["final"]["rounds"]
    )
    text = report.markdown(result)
    assert "TEST DOUBLE" in text and "times say nothing of any chip" in text
    assert os.uname().nodename not in text + json.dumps(data)
    assert str(tmp_path) not in text + json.dumps(data)


def test_a_second_generation_starts_from_the_best(tmp_path):
    """Cluster 5 is best: only then is a custom option tried together with it."""
    opened = Scripted(lambda a: fast(a) / (2 if (a.cluster, a.custom) == (5, 3) else 1))
    result = scripted(tmp_path / "s.json", opened)
    first, second = result.data["generations"]
    assert any(seed["cluster"] == 5 and seed["custom"] == 0 for seed in second["seeds"])
    winner = result.winner["algorithm"]
    assert (winner["cluster"], winner["custom"]) == (5, 3)
    found = [(a["algorithm"]["cluster"], a["algorithm"]["custom"]) for a in first["accepted"]]
    assert (5, 0) in found and (5, 3) not in found
    assert result.winner["comparison"]["ratio"] == pytest.approx(5, rel=0.02)


def test_finalists_are_different_kernels_and_ties_go_to_the_nearer(tmp_path):
    """Everything on cluster 5 is equally fast, whatever else is set: two of it are enough."""
    result = scripted(tmp_path / "s.json", Scripted(fast), sweep.Options(rounds=5, finalists=6))
    kernels = [(a["tile"], a["stages"], a["cluster"]) for a in result.data["final"]["finalists"]]
    assert len(kernels) == 6 and max(map(kernels.count, kernels)) == 2
    first = result.data["final"]["finalists"][0]
    assert first == sweep.asdict(Algorithm(70, 4, 36, inner=0, cluster=5))


def test_time_goes_to_what_is_near_the_seeds_first(tmp_path, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(sweep.time, "monotonic", lambda: next(clock))
    options = sweep.Options(rounds=5, finalists=3, budget_s=30)
    result = scripted(tmp_path / "s.json", Scripted(fast), options)
    screened = [entry["algorithm"] for entry in result.data["screened"]]
    first, second = result.data["generations"]
    accepted = [a["algorithm"] for g in (first, second) for a in g["accepted"]]
    assert 5 < len(screened) < len(accepted)
    in_first = [a for a in screened if any(a == b["algorithm"] for b in first["accepted"])]
    near = [sweep._distance({"algorithm": a}, first["seeds"]) for a in in_first]
    assert near[0] == 0 and near == sorted(near) and 0 < len(in_first) < len(screened)


def test_no_answer_of_the_heuristic_is_a_reason(double, tmp_path):
    machine = double(f"set:heuristic_status=15;{CALM}")
    with pytest.raises(
        CommandError, match="nothing to compare with: heuristic CUBLAS_STATUS_NOT_S"
    ):
        run(machine, tmp_path / "s.json")
    assert not (tmp_path / "s.json").exists()


# ---- What kills, hangs, refuses -------------------------------------------------------------------


def test_a_crash_and_a_hang_in_algo_check_are_recorded_and_the_sweep_goes_on(
    double, tmp_path, monkeypatch
):
    monkeypatch.setattr(session, "CHECK_S", 1.0)
    rules = f"check:tile=4,stages=36,cluster=7:crash;check:tile=9,cluster=3,stages=36:hang;{CALM}"
    result = run(double(rules), tmp_path / "s.json")
    lost = {(e["algorithm"]["tile"], e["algorithm"]["cluster"]): e for e in result.data["lost"]}
    assert lost[4, 7]["reason"] == "killed by SIGSEGV" and lost[4, 7]["stage"] == "check"
    assert lost[9, 3]["reason"] == "hung: no answer within 1 s, killed"
    assert result.winner is not None
    first = result.data["generations"][0]
    assert first["checked"] == first["total"]
    assert "rejected in check" in report.markdown(result)


def test_a_kernel_that_kills_twice_is_not_asked_about_again(double, tmp_path):
    machine = double(f"check:tile=9:crash;{CALM}")
    with Session(machine) as open_session:
        problem = sweep.make_problem(machine, *SHAPE)
        asked = [(i, Algorithm(70, tile, 36, cluster=i % 50 + 2)) for tile in (9, 4) for i in
                 (range(40) if tile == 9 else range(40, 50))]  # fmt: skip
        losses = sweep.Counter()
        accepted, refused, lost = open_session.check(problem, asked, losses)
    assert [one.reason for one in lost] == ["killed by SIGSEGV"] * 2
    assert refused[session.NOT_ASKED] == 38
    assert [number for number, _ in accepted] == list(range(40, 50))
    assert losses == {kernel_of(asked[0][1]): 2}


def test_no_candidate_is_skipped_or_asked_twice_around_crashes(double):
    """The crashing ones at the start, the end and side by side; the rest all answered, in a batch."""
    bad = (0, 1, 7, 8, 19)
    rules = ";".join(f"check:custom={i}:crash" for i in bad)
    machine = double(f"{rules};{ANSWERS};check:tile=4:pass;check:tile=5:pass;check::refuse")
    asked = [(i, Algorithm(70, 4 + i % 2, 30 + i, custom=i)) for i in range(20)]
    asked = [(i, Algorithm(70, a.tile, 1 + i, custom=i)) for i, a in asked]
    with Session(machine) as open_session:
        problem = sweep.make_problem(machine, *SHAPE)
        accepted, refused, lost = open_session.check(problem, asked, sweep.Counter())
    assert sorted(one.number for one in lost) == list(bad)
    assert sorted(number for number, _ in accepted) == [i for i in range(20) if i not in bad]
    assert not refused


@pytest.mark.slow
def test_a_crash_and_a_hang_at_launch_are_recorded_and_the_sweep_goes_on(
    double, tmp_path, monkeypatch
):
    monkeypatch.setattr(session, "MEASURE_S", 1.5)
    rules = f"run:cluster=5:crash;run:cluster=6:hang;run:cluster=8:refuse;{CALM}"
    result = run(double(rules), tmp_path / "s.json", sweep.Options(5, budget_s=None, finalists=2))
    reasons = {(e["algorithm"]["cluster"], e["stage"]): e["reason"] for e in result.data["lost"]}
    assert reasons[5, "screen"] == "killed by SIGSEGV"
    assert reasons[6, "screen"] == "hung: no answer within 1.5 s, killed"
    assert reasons[8, "screen"].startswith("cublasLtMatmul CUBLAS_STATUS_NOT_SUPPORTED for id 70")
    assert result.winner is not None
    timed = [entry["algorithm"]["cluster"] for entry in result.data["screened"]]
    assert not {5, 6, 8} & set(timed)


def test_a_finalist_that_dies_leaves_the_final_and_the_others_start_it_anew(tmp_path):
    opened = Scripted(fast, dies=lambda calls: len(calls) == 3)
    result = scripted(tmp_path / "s.json", opened)
    (lost,) = result.data["lost"]
    assert (lost["stage"], lost["reason"]) == ("final", "killed by SIGBUS")
    assert lost["algorithm"] not in result.data["final"]["finalists"]
    assert opened.calls == [-1, 0, 1, -1, 0, 1, 2, 3, 4]
    assert result.winner is not None


def test_a_library_that_always_dies_ends_the_sweep_with_a_reason(double, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "MAX_LOST", 3)
    with pytest.raises(CommandError, match="4 candidates took their process with them"):
        run(double(f"check::crash;{CALM}"), tmp_path / "s.json")
    kept = json.loads((tmp_path / "s.json").read_text())
    assert len(kept["lost"]) == 4
    with pytest.raises(CommandError, match="4 candidates took their process with them"):
        run(double(), tmp_path / "s.json")  # not taken for checked when it is resumed
    assert json.loads((tmp_path / "s.json").read_text()) == kept


def test_a_question_that_kills_the_child_is_a_reason(double, monkeypatch):
    machine = double()
    monkeypatch.setattr(session, "Child", lambda *_: (_ for _ in ()).throw(ChildLost("gone", -1)))
    with (
        Session(machine) as open_session,
        pytest.raises(CommandError, match=r"could not be asked \(library\): gone"),
    ):
        open_session.version()


def test_where_cublaslt_makes_no_context_torch_makes_it(monkeypatch):
    """A fresh child is told to, once, and the question is asked again."""
    asked = []

    class Stub:
        def ask(self, op, timeout, **request):
            asked.append(op)
            reason = "" if "initialize" in asked else "cublasLtCreate CUBLAS_STATUS_NOT_INITIALIZED"
            answer = {"ok": not reason, "reason": reason}
            return {"reason": reason, "answers": [answer] if not reason else []}

        def close(self):
            asked.append("close")

    monkeypatch.setattr(session, "Child", lambda *_: Stub())
    chip = Device((9, 0), 132, name="cuda:0 NVIDIA H200")
    with Session(session.Machine("/nowhere", chip, test_double=False)) as open_session:
        assert len(open_session.heuristic({}, 8)) == 1
    assert asked == [
        "library", "heuristic", "close", "library", "initialize", "heuristic", "close",
    ]  # fmt: skip


# ---- Bytes and noise ------------------------------------------------------------------------------


def test_other_bytes_do_not_win(tmp_path):
    """Everything that is fast is wrong in its last bit: no pin, and the coordinate is named."""
    opened = Scripted(fast, wrong=lambda a: a.split_k == 1)
    result = scripted(tmp_path / "s.json", opened)
    assert result.winner is None
    entry = result.data["verdict"]["candidates"][0]
    assert entry["faster"] and entry["difference"]["first"] == [15, 63]
    assert "no byte-exact candidate is faster" in result.data["verdict"]["reason"]
    with pytest.raises(promote.NothingToPin, match="no byte-exact candidate is faster"):
        promote.pin_of(result)
    pin = promote.pin_of(result, allow_inexact=True)
    assert "NOT byte-exact: 1 of 1,024 elements differ by up to 0.5" in pin.evidence
    assert "--allow-inexact" in pin.evidence
    everything = scripted(tmp_path / "t.json", Scripted(fast, wrong=lambda a: True))
    assert everything.winner is None
    everything.data["measured_with"]["reproducible"] = True
    for pairs in everything.data["final"]["rounds"]:
        pairs[0]["difference"] = None  # the heuristic's own
    reason = sweep.judge(everything.data)["reason"]
    assert reason == "no candidate gives the heuristic's bytes"


def test_bytes_that_differ_in_one_round_only_are_different(tmp_path):
    class Late(Scripted):
        def round(self, finalists, number):
            pairs = super().round(finalists, number)
            if number == 3:
                pairs[1]["difference"] = DIFFERENCE
            return pairs

    result = scripted(tmp_path / "s.json", Late(fast))
    first = result.data["final"]["finalists"][0]
    entry = next(e for e in result.data["verdict"]["candidates"] if e["algorithm"] == first)
    assert entry["difference"] and result.winner["algorithm"] != first


def test_as_fast_as_the_heuristic_is_not_faster(tmp_path):
    result = scripted(tmp_path / "s.json", Scripted())
    assert result.winner is None
    assert (
        "no byte-exact candidate is faster by more than the noise"
        in (result.data["verdict"]["reason"])
    )


class Throttled(Scripted):
    """What is fast at one clock draws more power: alone it is as slow as `alone(algorithm)`."""

    def __init__(self, alone, **options):
        super().__init__(fast, **options)
        self.alone, self.measured = alone, []

    def settled(self, algorithm, number):
        self.measured.append(algorithm)
        times = {
            "heuristic_s": 1.0,
            "s": self.alone(algorithm),
            "again_s": 1.0 + 0.01 * (number % 2),
        }
        return {**times, "difference": DIFFERENCE if self.wrong(algorithm) else None}


def test_a_gain_that_a_power_limit_takes_back_is_none(tmp_path):
    opened = Throttled(lambda a: 1.03)
    result = scripted(tmp_path / "s.json", opened)
    assert result.winner is None and len(set(opened.measured)) == 2  # the next best had its chance
    reason = result.data["verdict"]["reason"]
    assert "no byte-exact candidate is faster once the GPU has settled: the best is 2.4" in reason
    assert "0.9709 times settled" in reason
    for allow in (False, True):
        with pytest.raises(promote.NothingToPin, match="once the GPU has settled"):
            promote.pin_of(result, allow_inexact=allow)
    assert report.markdown(result).count("- settled: ") == 2


def test_the_next_best_wins_where_it_stays_faster(tmp_path):
    opened = Throttled(lambda a: 1.03 if len(set(opened.measured)) == 1 else 0.9)
    result = scripted(tmp_path / "s.json", opened)
    first, second = dict.fromkeys(opened.measured)
    assert result.winner["algorithm"] == sweep.asdict(second) != sweep.asdict(first)
    evidence = promote.pin_of(result).evidence
    assert "1.1111x settled (noise 0.50%), byte-exact" in evidence


def test_bytes_that_differ_settled_are_different(tmp_path):
    class Wrong(Throttled):
        def settled(self, algorithm, number):
            return {**super().settled(algorithm, number), "difference": DIFFERENCE}

    assert scripted(tmp_path / "s.json", Wrong(lambda a: 0.5)).winner is None


def test_a_candidate_that_dies_settled_is_recorded_and_the_next_is_measured(tmp_path):
    class Dies(Throttled):
        def settled(self, algorithm, number):
            if not self.measured:
                self.measured.append(algorithm)
                raise ChildLost("killed by SIGBUS", 0)
            return super().settled(algorithm, number)

    opened = Dies(lambda a: 0.9)
    result = scripted(tmp_path / "s.json", opened)
    (lost,) = result.data["lost"]
    assert (lost["stage"], lost["reason"]) == ("settled", "killed by SIGBUS")
    assert lost["algorithm"] == sweep.asdict(opened.measured[0]) != result.winner["algorithm"]


def test_what_was_measured_settled_is_not_measured_again(tmp_path):
    class Interrupted(Throttled):
        def settled(self, algorithm, number):
            if len(set(self.measured)) == 1 and algorithm != self.measured[0]:
                raise KeyboardInterrupt
            return super().settled(algorithm, number)

    path, first = tmp_path / "s.json", Interrupted(lambda a: 1.03)
    with pytest.raises(KeyboardInterrupt):
        scripted(path, first)
    assert len(read(path)["settled"]) == 1 and not read(path)["finished"]
    opened = Throttled(lambda a: 0.9)
    result = scripted(path, opened)
    assert first.measured[0] not in opened.measured and opened.calls == []  # nor the final
    assert result.winner["algorithm"] == sweep.asdict(opened.measured[0])


def test_the_heuristics_own_algorithm_never_wins():
    """It was lucky in every round; a pin for it would pin nothing."""
    own = {"id": 1, "tile": 4, "stages": 1}
    pair = {"heuristic_s": 2.0, "s": 1.0, "difference": None}
    data = {
        "heuristic": [{"algorithm": own}],
        "screened": [{"algorithm": own, "difference": None, "workspace_bytes": 0, "waves": 1}],
        "final": {"finalists": [own], "rounds": [[dict(pair, s=2.0), pair]] * 5},
        "settled": [{"algorithm": own, "rounds": [dict(pair, again_s=2.0)] * 5}],
        "measured_with": {"reproducible": True},
    }
    assert sweep.judge(data)["winner"] is None
    data["heuristic"] = [{"algorithm": {**own, "tile": 5}}]
    assert sweep.judge(data)["winner"] == 0
    data["measured_with"]["reproducible"] = False
    assert sweep.judge(data)["winner"] is None
    assert "differs from run to run" in sweep.judge(data)["reason"]


@given(st.lists(st.floats(0.5, 2.0), min_size=5, max_size=40))
def test_a_candidate_that_is_the_heuristic_again_is_within_its_own_noise(samples):
    """Whatever the samples: A/A is never faster and never slower than its own noise."""
    again = samples[1:] + samples[:1]
    itself = verdict.compare(samples, again)
    noise = verdict.noise_of(itself)
    assert not itself.faster(noise) and not itself.slower(noise)
    # ... and a candidate four times as fast is, where the noise is below that.
    quarter = verdict.compare(samples, [s / 4 for s in samples])
    assert quarter.faster(1.0) and not quarter.slower(1.0)


def test_faster_needs_ratio_and_rounds():
    mostly = verdict.compare([1.0] * 20, [0.5] * 15 + [2.0] * 5)
    assert (mostly.ratio, mostly.wins, mostly.losses) == (2, 15, 5)
    assert mostly.faster(0.5) and not mostly.faster(1.0) and not mostly.slower(0)
    barely = verdict.compare([1.0] * 20, [0.5] * 14 + [2.0] * 6)
    assert barely.ratio == 2 and not barely.faster(0.5)
    back = verdict.compare([0.5] * 15 + [2.0] * 5, [1.0] * 20)
    assert back.slower(0.4) and not back.slower(0.5) and not back.faster(0)
    assert verdict.compare([1.0] * 5, [0.5] * 5).faster(0.5)
    assert not verdict.compare([1.0] * 4, [0.5] * 4).faster(0.5)
    with pytest.raises(ValueError, match="rounds must be pairs, got 2 of the heuristic and 1"):
        verdict.compare([1, 2], [1])


def test_noise_is_the_spread_of_rounds_the_shift_of_medians_or_a_drift():
    assert verdict.noise_of(verdict.compare([1.0] * 11, [1.0] * 11)) == 0
    base = [1.0] * 11
    spread = verdict.compare(base, [1 + 0.01 * (i - 5) for i in range(11)])
    assert verdict.noise_of(spread) == pytest.approx(0.04, rel=0.05)
    shifted = verdict.compare(base, [1.25] * 11)
    assert verdict.noise_of(shifted) == pytest.approx(0.2)
    # The machine was slower while a finalist ran: the heuristic beside it shows that.
    loaded = verdict.compare([1.5] * 11, [1.0] * 11)
    itself = verdict.compare(base, base)
    assert verdict.noise_of(itself, [itself, loaded]) == pytest.approx(0.5)


# ---- The measurement itself -----------------------------------------------------------------------


def measurement(machine, shape, **changes):
    planner = lt.Planner(machine.library, "never")
    values = {**sweep.make_problem(machine, *shape), **changes}
    values["device"] = lt.DeviceInfo(**values["device"])
    problem = lt.Problem(**values)
    return measure.Measurement(lt, planner, problem, device="cpu", seed=3)


@pytest.mark.parametrize(
    "shape",
    [("nvfp4", 5, 24, 96), ("bf16", 5, 24, 40), ("fp16", 5, 24, 40), ("fp8_e4m3", 5, 24, 48)],
)
@pytest.mark.parametrize(
    "changes", [{}, {"ldd": 32}, {"bias": "bf16"}, {"alpha": "device"}], ids=str
)
def test_operands_are_random_and_the_reference_is_their_product(double, shape, changes):
    rules = ANSWERS if shape[0] == "nvfp4" else ANSWERS.replace("70:", "66:")
    own = measurement(double(rules), shape, **changes)
    kind, _, n, _ = shape
    buffers = own._buffers
    (a, a_scale), (b, b_scale) = buffers._operands[0]
    if kind == "nvfp4":
        dense = [
            torch.ops.nvfp4.dequantize(data, scale, None, swizzled=True).double()
            for data, scale in ((a, a_scale), (b, b_scale))
        ]
    else:
        dense = [
            t.double() * (1 if s is None else s.double()) for t, s in ((a, a_scale), (b, b_scale))
        ]
    assert all(tensor.unique().numel() > 10 for tensor in dense)
    expected = dense[0] @ dense[1].T
    if changes.get("bias"):
        expected = expected + buffers._bias.double()
    torch.testing.assert_close(own._reference[:, :n].double(), expected, rtol=2**-7, atol=1e-3)
    outside = own._reference[:, n:].contiguous().view(torch.uint8)
    assert (outside == measure.POISON).all()
    assert own.describe()["reproducible"]
    addresses = [value for value in buffers.addresses(64)[0].values() if value]
    assert all(value % 256 == 0 for value in addresses if value > 1 << 16)


def test_what_a_run_leaves_unwritten_is_seen(double):
    own = measurement(double(ANSWERS), SHAPE)
    baseline = own._baseline

    class Lazy:
        plan = type("Plan", (), {"workspace_bytes": 0})()

        def run(self, number):
            pass  # returns at once, as a kernel that was never launched

    pair = own._pair(Lazy(), 1, swap=False)
    assert pair["difference"]["elements"] == 16 * 64
    assert own._pair(baseline, 1, swap=True)["difference"] is None


def test_a_difference_is_counted_located_and_sized():
    reference = torch.zeros(3, 5, dtype=torch.bfloat16)
    output = reference.clone()
    assert measure.difference(output, reference) is None
    output[1, 2], output[2, 0] = 0.5, -2.0
    assert measure.difference(output, reference) == {
        "elements": 2, "of": 15, "first": [1, 2], "got": "0.5", "expected": "0.0", "largest": "2.0",
    }  # fmt: skip
    # By bytes: -0 is not 0, and a NaN equals itself.
    output = reference.clone()
    output[0, 0] = -0.0
    assert measure.difference(output, reference)["elements"] == 1
    reference[0, 0] = output[0, 0] = float("nan")
    assert measure.difference(output, reference) is None


def test_rounds_alternate_and_the_heuristic_is_among_them(double):
    own = measurement(double(ANSWERS), SHAPE)
    order = []
    own._sample = lambda contender, _: order.append(contender.plan.algorithm["stages"]) or 1.0
    quick = lt.Algorithm(id=70, tile=4, stages=36)
    other = lt.Algorithm(id=70, tile=4, stages=35)
    at = []
    own.round([quick, other], 0, at.append)
    assert order == [37, 37, 37, 37, 36, 37, 35] and at == [-1, 0, 1]  # the first is the warm-up
    order.clear(), at.clear()
    own.round([quick, other], 1, at.append)
    assert order == [37, 35, 37, 36, 37, 37, 37] and at == [1, 0, -1]


def test_settled_rounds_time_each_arm_after_it_has_run_alone(double):
    own = measurement(double(ANSWERS), SHAPE)
    order = []
    own._sample = lambda contender, repeats: order.append(contender.plan.algorithm["stages"]) or 0.4
    quick = lt.Algorithm(id=70, tile=4, stages=36)
    even, odd = own.settled(quick, 0), own.settled(quick, 1)
    assert order[:6] == order[6:] == [37, 37, 36, 36, 37, 37]
    assert even.keys() == odd.keys() == {"heuristic_s", "s", "again_s", "difference"}
    own._clock.settle_s, own._clock.sample_s = 2.0, 1.0  # as long as asked for, then the mean
    order.clear()
    assert own.settled(quick, 0)["s"] == pytest.approx(0.4)
    assert order == [37] * 8 + [36] * 8 + [37] * 8


# ---- Candidates -----------------------------------------------------------------------------------


@pytest.fixture
def whole_space(monkeypatch, small_space):
    monkeypatch.undo()


def test_neighbours_are_in_range_unique_and_in_a_fixed_order(whole_space):
    ranges = candidates.Ranges.of(130100)
    assert (ranges.tiles[0], ranges.tiles[-1]) == (1, 634)
    assert 29 not in ranges.stages and 30 not in ranges.stages and 1 not in ranges.clusters
    seeds = [Algorithm(66, 20, 35, cluster=3, inner=0), Algorithm(66, 23, 35, cluster=5, inner=0)]
    found = list(candidates.neighbourhood(seeds, ranges, (66, 67)))
    assert len(found) == len(set(found)) > 5000
    assert found == list(candidates.neighbourhood(seeds, ranges, (66, 67)))
    assert not set(seeds) & set(found)
    for candidate in found:
        values = dict(zip(candidates.ATTRIBUTES, candidates.to_row(candidate), strict=True))
        assert lt.out_of_range(lt.Algorithm(**values), 130100) == ""
    # One of each kind of move, and tile together with cluster.
    for change in ({"tile": 23}, {"stages": 36}, {"cluster": 2}, {"custom": 1}, {"swizzle": 1},
                   {"split_k": 4, "reduction": 2}, {"id": 67}, {"tile": 23, "cluster": 2}):  # fmt: skip
        assert sweep.from_dict({**sweep.asdict(seeds[0]), **change}) in found
    shapes = {candidates.tile_shape(c.tile) for c in found}
    assert (128, 128) in shapes and (256, 256) in shapes and (64, 64) in shapes
    assert (8, 8) not in shapes and (768, 64) not in shapes


def test_the_whole_range_is_the_neighbours_then_every_id_tile_stages_and_cluster(whole_space):
    ranges = candidates.Ranges((4, 5, 6), (35, 36), (0, 2))
    own = {66: {"tile_ids": [], "stages_ids": []}, 7: {"tile_ids": [1, 2], "stages_ids": [3]}}
    seeds = [Algorithm(66, 4, 35, swizzle=2, inner=1, cluster=2), Algorithm(67, 5, 36, cluster=0)]
    ids = (66, 67)
    found = list(candidates.exhaustive(seeds, ranges, ids, own))
    near = list(candidates.neighbourhood(seeds, ranges, ids))
    assert found[: len(near)] == near  # what is likeliest is asked first
    assert len(found) == len(set(found)) == candidates.exhaustive_count(seeds, ranges, ids, own)
    assert not set(seeds) & set(found)
    every = {
        Algorithm(66, tile, stages, swizzle=2, inner=1, cluster=cluster)
        for tile, stages, cluster in itertools.product((4, 5, 6), (35, 36), (0, 2))
    }
    every |= {Algorithm(7, tile, 3) for tile in (1, 2)}
    assert {*seeds, *near, *every} == {*seeds, *found}
    everything = candidates.Ranges.of(130100)
    assert candidates.exhaustive_count([], everything, (), {66: {}}) == 634 * 36 * 51


def test_an_exhaustive_sweep_checks_the_whole_range(tmp_path):
    options = sweep.Options(rounds=5, exhaustive=True, finalists=2, budget_s=None)
    opened = Scripted(fast)
    result = scripted(tmp_path / "s.json", opened, options)
    first = result.data["generations"][0]
    assert set(first["capabilities"]) == {"70", "1"}
    assert first["checked"] == first["total"] == len(set(opened.asked[: first["total"]]))
    asked = {(a.tile, a.stages, a.cluster) for a in opened.asked if a.id == 70}
    assert asked >= set(itertools.product(*RANGES_OF))
    assert result.winner is not None
    assert "the whole range" in report.markdown(result)


def test_an_exhaustive_sweep_asks_all_that_a_sweep_without_it_asks(tmp_path):
    """Custom options, swizzles and split-K of the seeds too; and the bar counts what is asked."""

    bars = []

    class Recording(Console):
        def progress(self, items, what, total=None):
            bars.append((what, total))
            return items

    def asked_first(path, options):
        opened = Scripted(fast)
        problem = sweep.make_problem(opened.machine, *SHAPE)
        result = sweep.sweep(opened, problem, options, path, Recording())
        return set(opened.asked[: result.data["generations"][0]["total"]])

    default = asked_first(tmp_path / "s.json", QUICK)
    options = sweep.Options(rounds=5, exhaustive=True, finalists=2, budget_s=None)
    bars.clear()
    whole = asked_first(tmp_path / "t.json", options)
    assert default < whole
    assert bars[0] == (f"AlgoCheck, {len(whole):,} candidates", 1)  # one batch
    for change in ({"custom": 7}, {"swizzle": 2}, {"split_k": 4, "reduction": 2}):
        assert sweep.from_dict({**sweep.asdict(Scripted.heuristic_first), **change}) in whole


def test_seeds_are_the_answers_then_without_split_k_then_the_studys(whole_space):
    answers = [Algorithm(66, 20, 35, split_k=4, reduction=2), Algorithm(66, 23, 35)]
    assert candidates.seeds(answers, "bf16") == [*answers, Algorithm(66, 20, 35)]
    studied = candidates.seeds(answers, "nvfp4")[-1]
    assert (studied.id, studied.tile, studied.stages, studied.split_k) == (70, 20, 37, 1)


def test_an_algorithm_travels_and_is_described():
    algorithm = Algorithm(66, 23, 35, 2, 1, 1, 3, None, 3)
    assert candidates.from_row(candidates.to_row(algorithm)) == algorithm
    assert candidates.describe(algorithm) == (
        "66, 128x256, 64xAUTO, cluster 2x1x1, split-K 2, reduction 1, swizzle 1, custom 3"
    )


# ---- Killed, resumed, refused ---------------------------------------------------------------------

PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from nvfp4_linear.console import Console
from nvfp4_linear.lab import candidates, sweep
from nvfp4_linear.lab.session import Session, find_machine
candidates.near_tiles = lambda tile, ranges: [5, 9]
candidates.Ranges.of = lambda version: candidates.Ranges((4, 5, 9), tuple(range(1, 29)), (0, 2, 3, 5))
machine = find_machine()
sweep.CHECK_BATCH = 16
sweep.SAVE_S = 0
{hold}
with Session(machine) as session:
    problem = sweep.make_problem(machine, *{shape!r})
    sweep.sweep(session, problem, sweep.Options(rounds=30, finalists=2, budget_s=2), Path({path!r}),
                Console())
"""


def start(path, hold=""):
    tests = str(Path(__file__).parent)
    code = PROGRAM.format(tests=tests, shape=SHAPE, path=str(path), hold=hold)
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)


def read(path):
    return json.loads(path.read_text()) if path.exists() else None


# Stays in the first question, in the middle of the first save, and in the settled rounds.
HOLD_QUESTION = """
def heuristic(self, *_):
    while True:
        self.version()
Session.heuristic = heuristic
"""
HOLD_SAVE = "import time; sweep.os.replace = lambda *_: time.sleep(600)"
HOLD_SETTLED = """
def settled(self, *arguments, measure=Session.settled):
    Path({marker!r}).touch()
    while True:
        measure(self, *arguments)
Session.settled = settled
"""

# (what holds the sweep there, how far its file says that it is)
STAGES = {
    "asking": (HOLD_QUESTION, None),
    "saving": (HOLD_SAVE, None),
    "checking": ("", lambda d: d["generations"] and d["generations"][0]["checked"] > 60),
    "screening": ("", lambda d: len(d["screened"]) > 3),
    "final": ("", lambda d: d["final"] and len(d["final"]["rounds"]) > 1),
    "settled": (HOLD_SETTLED, lambda d: len(d["final"]["rounds"]) == 30),
}


@pytest.mark.slow
def test_killed_at_any_moment_the_file_is_usable_no_process_is_left_and_it_resumes(
    double, tmp_path
):
    """One sweep, killed in each of its stages in turn; then it finishes from where it stood."""
    double()
    path, partial, marker = (tmp_path / name for name in ("s.json", "s.json.part", "settled"))
    before = None

    def there(stage, process):
        if stage == "asking":
            return children_of(process.pid)
        if stage == "saving":
            return partial.exists()
        if stage == "settled" and not marker.exists():
            return False
        return (data := read(path)) and STAGES[stage][1](data)

    for stage, (hold, _) in STAGES.items():
        process = start(path, hold.format(marker=str(marker)))
        wait_for(lambda: process.poll() is not None or there(stage, process))  # noqa: B023
        assert process.poll() is None, process.stderr.read()
        children = children_of(process.pid)
        assert children and all(map(alive, children))
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_for(lambda: not any(map(alive, children)), seconds=10)  # noqa: B023
        if stage in ("asking", "saving"):  # nothing, not half of a file
            assert not path.exists()
            continue
        data = sweep.Result.read(path).data  # whole, and of the right format
        assert not data["finished"]
        if before is not None:  # nothing that was done is done again
            for old, new in zip(before["generations"], data["generations"], strict=False):
                assert new["checked"] >= old["checked"]
                assert new["accepted"][: len(old["accepted"])] == old["accepted"]
            assert data["screened"][: len(before["screened"])] == before["screened"]
        before = data
    assert "Not finished" in report.markdown(sweep.Result(path, before))
    with pytest.raises(promote.NothingToPin, match="is not finished: run the same sweep again"):
        promote.pin_of(sweep.Result(path, before))
    process = start(path)
    assert process.wait(120) == 0, process.stderr.read()
    data = read(path)
    assert data["finished"] and data["verdict"]["winner"] is not None
    for generation in data["generations"]:
        answered = sum(generation["refused"].values()) + len(generation["accepted"])
        assert answered <= generation["checked"] == generation["total"]
    assert data["screened"][: len(before["screened"])] == before["screened"]
    assert len(data["final"]["rounds"]) == 30 and data["final"] == before["final"]
    assert len(data["settled"][0]["rounds"]) == sweep.SETTLED_ROUNDS
    seen = [tuple(e["algorithm"].values()) for e in data["screened"]]
    assert len(seen) == len(set(seen))


def test_children_die_with_a_parent_even_where_they_hang(double, tmp_path):
    double(f"check::hang;{CALM}")
    process = start(tmp_path / "s.json")
    children = wait_for(lambda: children_of(process.pid))
    time.sleep(0.5)
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(alive, children)), seconds=10)


def test_a_finished_sweep_is_read_and_not_run_again(tmp_path, monkeypatch):
    path = tmp_path / "s.json"
    first = scripted(path, Scripted(fast))
    stamp = path.stat().st_mtime_ns
    monkeypatch.setattr(sweep, "_Sweep", None)
    again = scripted(path, Scripted(fast), sweep.Options(rounds=99))
    assert again.data == first.data and path.stat().st_mtime_ns == stamp


@pytest.mark.parametrize("content, message", [
    (b"{", "is not a sweep result"),
    (b"[1, 2]", "its format is not"),
    (b"\xff\x00junk", "is not a sweep result"),
    (b'{"format": "nvfp4_linear gate 1"}', "its format is not"),
])  # fmt: skip
def test_a_file_that_is_no_result_is_not_overwritten(tmp_path, content, message):
    path = tmp_path / "s.json"
    path.write_bytes(content)
    with pytest.raises(CommandError, match=message):
        scripted(path, Scripted(fast))
    assert path.read_bytes() == content
    assert scripted(path, Scripted(fast), restart=True).finished


def test_a_result_of_another_question_or_machine_is_not_overwritten(tmp_path):
    path = tmp_path / "s.json"
    scripted(path, Scripted(fast))
    kept = path.read_bytes()
    with pytest.raises(
        CommandError, match=r"of another problem .m: there 16, now 17.: give another"
    ):
        scripted(path, Scripted(fast), shape=("nvfp4", 17, 64, 64))
    newer = Scripted(fast)
    newer.version = lambda: 130600
    with pytest.raises(CommandError, match=r"another machine .cublaslt: there 130100, now 130600"):
        scripted(path, newer)
    with pytest.raises(CommandError, match=r"another options .exhaustive: there False, now True"):
        scripted(path, Scripted(fast), sweep.Options(exhaustive=True))
    other = Scripted(fast)
    chip = Device((12, 0), 188, name="another chip")
    other.machine = session.Machine("/nowhere", chip, test_double=True)
    with pytest.raises(CommandError, match=r"of another problem .device"):
        scripted(path, other)
    assert path.read_bytes() == kept


# ---- Children -------------------------------------------------------------------------------------


def test_a_child_reports_death_silence_and_errors(double):
    machine = double(f"check:custom=1:crash;{CALM}")
    problem = sweep.make_problem(machine, *SHAPE)
    rows = [candidates.to_row(Algorithm(70, 4, 36, custom=custom)) for custom in (0, 1)]
    with (
        Child(machine.library) as child,
        pytest.raises(ChildLost, match="killed by SIGSEGV") as lost,
    ):
        child.ask("check", timeout=20, problem=problem, rows=rows, numbers=[30, 31])
    assert lost.value.number == 31
    with (
        Child(machine.library) as child,
        pytest.raises(ChildLost, match="AttributeError: 'Worker' object has no attribute '_sing'"),
    ):
        child.ask("sing", timeout=20)
    with Child(machine.library) as child:
        os.kill(child.process_id, signal.SIGSTOP)
        with pytest.raises(ChildLost, match=r"hung: no answer within 0.5 s, killed"):
            child.ask("library", timeout=0.5)
    with pytest.raises(ChildLost, match="killed by SIGKILL"), Child(machine.library) as child:
        assert child.ask("library", timeout=20)["version"] == 130100
        os.kill(child.process_id, signal.SIGKILL)
        child.ask("library", timeout=20)


def test_a_session_leaves_no_process_behind(double, tmp_path):
    machine = double()
    with Session(machine) as open_session:
        problem = sweep.make_problem(machine, *SHAPE)
        open_session.heuristic(problem, 1)
        open_session.prepare(problem, 0)
        ids = list(open_session.child_ids())
        assert len(ids) == 2 and all(map(alive, ids))
    assert not any(map(alive, ids))


def test_a_checking_child_does_not_import_torch(double):
    machine = double()
    with Session(machine) as open_session:
        open_session.heuristic(sweep.make_problem(machine, *SHAPE), 1)
        (process_id,) = open_session.child_ids()
        assert "libtorch" not in Path(f"/proc/{process_id}/maps").read_text()


# ---- The command and the pin ----------------------------------------------------------------------


def command(*arguments):
    return cli.main(["sweep", *map(str, arguments)])


@pytest.fixture
def quick(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    size = ("--m", 16, "--n", 64, "--k", 64)
    return (*size, "--rounds", 5, "--finalists", 2, "--budget", 0.5)


def test_the_command_sweeps_reports_and_pins(double, tmp_path, quick, capsys):
    double()
    pins = tmp_path / "my.pins"
    other = Pin(Algorithm(1, 2, 3), (9, 0), type="bf16", n=8, k=16, evidence="kept")
    algorithms.save_pins(pins, [other])
    assert command(*quick, "--pin", pins, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] and document["result"] == "sweep_nvfp4_16x64x64.json"
    assert (
        (tmp_path / "sweep_nvfp4_16x64x64.md").read_text().startswith("# Sweep: nvfp4 16 x 64 x 64")
    )
    kept, pin = promote.read_rows(pins)
    assert kept == other and pin == Pin.from_text(document["pin"])
    winner = document["verdict"]["candidates"][document["verdict"]["winner"]]
    assert sweep.asdict(pin.algorithm) == winner["algorithm"]
    assert None not in winner["algorithm"].values() and len(winner["algorithm"]) == 9
    assert (pin.cc, pin.sm_count, pin.type, pin.n, pin.k) == ((12, 1), 48, "nvfp4", 64, 64)
    assert (pin.m_min, pin.m_max) == (16, 16)
    assert (pin.version_min, pin.version_max) == (130100, 130100)
    date = json.loads((tmp_path / "sweep_nvfp4_16x64x64.json").read_text())["date"]
    assert pin.evidence.startswith(f"sweep_nvfp4_16x64x64.json, {date}: ")
    assert "x the heuristic at m=16" in pin.evidence and "byte-exact (test double" in pin.evidence
    # It is a pin that the planner takes, for that problem and no other.
    planner = lt.Planner(lab_double.build())
    planner.pin(lt.Pin.parse(pin.to_text()))
    gb10 = lt.DeviceInfo(12, 1, 48)
    assert planner.plan(lt.Problem("nvfp4", 16, 64, 64, gb10)).rung == "cublaslt-pinned"
    assert planner.plan(lt.Problem("nvfp4", 17, 64, 64, gb10)).rung == "cublaslt-heuristic"
    # Pinned again with a range: replaces nothing but its own conditions, and needs no new sweep.
    assert command(*quick, "--pin", pins, "--m-range", "9:16") == 0
    assert [row.m_min for row in promote.read_rows(pins)] == [1, 16, 9]
    assert command(*quick, "--pin", pins, "--m-range", "9:16") == 0
    assert [row.m_min for row in promote.read_rows(pins)] == [1, 16, 9]
    assert command(*quick, "--pin", pins, "--m-range", "1:8") == 1
    assert "must hold the M that was measured, 16, got 1:8" in capsys.readouterr().err


@pytest.fixture
def script(monkeypatch):
    """The command's sessions are scripted."""

    def use(*arguments, **keywords):
        opened = Scripted(*arguments, **keywords)
        monkeypatch.setattr(commands, "machine_of", lambda args: opened.machine)
        monkeypatch.setattr(commands, "Session", lambda machine: opened)

    return use


def test_no_pin_is_written_where_nothing_is_better(script, tmp_path, quick, capsys):
    script()
    pins = tmp_path / "my.pins"
    assert command(*quick, "--pin", pins) == 0
    assert "no pin written: nothing to pin: no byte-exact candidate" in capsys.readouterr().out
    assert not pins.exists()


def test_inexact_pins_are_asked_for_by_name_and_say_so(script, tmp_path, quick, capsys):
    script(fast, wrong=lambda a: a.split_k == 1)
    pins = tmp_path / "my.pins"
    assert command(*quick, "--pin", pins) == 0 and not pins.exists()
    assert command(*quick, "--pin", pins, "--allow-inexact") == 0
    assert "NOT byte-exact" in promote.read_rows(pins)[0].evidence


@pytest.mark.parametrize("content, message", [
    (b"# my notes\n", "line 1 is a comment, which rewriting would lose"),
    (b"id=1\n", "line 1: a pin needs "),
    (b"\xff\xfe", "is not a pin file"),
    (b"x" * (2 << 20), "has 2,097,152 bytes, a pin file at most 1,048,576"),
])  # fmt: skip
def test_a_pin_file_that_cannot_be_kept_whole_is_not_rewritten(
    script, tmp_path, quick, capsys, content, message
):
    script(fast)
    pins = tmp_path / "my.pins"
    pins.write_bytes(content)
    assert command(*quick, "--pin", pins) == 1
    assert message in capsys.readouterr().err
    assert pins.read_bytes() == content


def test_a_pin_file_that_is_no_regular_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(CommandError, match="is not a regular file"):
        promote.read_rows(tmp_path / "fifo")
    assert promote.read_rows(tmp_path / "absent") == []


def test_without_matplotlib_the_plot_is_left_out_with_a_remedy(
    script, tmp_path, quick, capsys, monkeypatch
):
    script(fast)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command(*quick) == 0
    out = capsys.readouterr().out
    assert "no plot: matplotlib is not installed (pip install matplotlib)" in out
    assert not list(tmp_path.glob("*.png"))


def test_the_plot_shows_screen_and_final(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    result = scripted(tmp_path / "s.json", Scripted(fast, wrong=lambda a: a.cluster == 3))
    assert report.write(result)[-1] == "wrote s.png"
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


def test_where_nothing_can_be_timed_the_reason_and_remedy_are_said(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU, found one")
    monkeypatch.delenv("NVFP4_CUBLASLT_LIBRARY", raising=False)
    if algorithms.library()["unavailable"]:
        pytest.skip("needs a cuBLASLt, found none")
    with pytest.raises(CommandError, match=r"timed on a CUDA GPU.*name a test double"):
        find_machine()
    with pytest.raises(CommandError, match="described to a test double only"):
        find_machine(chip=Device((12, 1), 48))
    with pytest.raises(CommandError, match="could not be loaded"):
        find_machine(library="/nowhere/libcublasLt.so.13")


@pytest.mark.parametrize("arguments, message", [
    (("--m", "0", "--n", 64, "--k", 64), "must be a positive integer, got 0"),
    (("--m", 16, "--n", 64, "--k", 64, "--budget", "-1"), "must be above 0, got -1"),
    (("--m", 16, "--n", 64, "--k", 64, "--m-range", "9"), "must look like 2049:4096, got '9'"),
    (("--m", 16, "--n", 64, "--k", 64, "--cc", "12"), "must look like 12.1, got '12'"),
    (("--m", 16, "--n", 64, "--k", 64, "--type", "int8"), "invalid choice"),
    (("--m", 16, "--n", 64), "required: --k"),
])  # fmt: skip
def test_a_command_line_that_makes_no_sense_is_refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as left:
        command(*arguments)
    assert left.value.code == 2 and message in capsys.readouterr().err


def test_out_must_be_json_and_a_chip_whole(double, quick, capsys):
    double()
    assert command(*quick, "--out", "x.txt") == 1
    assert "--out must end in .json, got x.txt" in capsys.readouterr().err
    assert command(*quick, "--cc", "12.1") == 1
    assert "--cc and --sms go together" in capsys.readouterr().err


# ---- On a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, found none")
@pytest.mark.parametrize("kind", ["bf16", "fp8_e4m3", "nvfp4"])
def test_a_sweep_on_the_gpu(tmp_path, whole_space, kind):
    """The real library, its children and CUDA events, at a size of a few seconds."""
    machine = find_machine()
    needed = {"bf16": (8, 0), "fp8_e4m3": (8, 9), "nvfp4": (10, 0)}[kind]
    options = sweep.Options(rounds=6, finalists=3, budget_s=4)
    if machine.chip.cc < needed:
        with pytest.raises(CommandError, match="the heuristic has no answer for this problem"):
            run(machine, tmp_path / "s.json", options, (kind, 2048, 1024, 4096))
        return
    result = run(machine, tmp_path / "s.json", options, (kind, 2048, 1024, 4096))
    data, first = result.data, result.data["heuristic"][0]["algorithm"]
    assert result.finished and data["verdict"]["reproducible"]
    assert data["generations"][0]["checked"] == data["generations"][0]["total"] > 1000
    rebuilt = next(e for e in data["screened"] if e["algorithm"] == first)
    assert rebuilt["difference"] is None and rebuilt["ratio"] > 0
    assert data["measured_with"]["clock"] == "CUDA events" and data["verdict"]["noise"] >= 0
    assert data["machine"]["gpu"] == torch.cuda.get_device_name()


# ---- The prediction -------------------------------------------------------------------------------


def planned(algorithm, kind="nvfp4", shape=(37824, 5376, 14336)):
    m, n, k = shape
    problem = {"type": kind, "m": m, "n": n, "k": k}
    return algorithms.Plan(m, n, k, "a chip", "cublaslt-pinned", "cuBLASLt", algorithm=algorithm,
                           details={"plan": {"problem": problem}})  # fmt: skip


GB10 = Device((12, 1), 48, name="GB10")


def test_explain_predicts_traffic_and_calls_it_a_prediction(monkeypatch):
    """The study's two algorithms, in the orders that are consistent with its profiles."""
    monkeypatch.setattr(prediction, "ORDERS", prediction.ORDERS[1:2])
    monkeypatch.setattr(prediction, "SPLIT_ORDERS", prediction.SPLIT_ORDERS[:1])
    for split_k, order, rate in ((1, "grouped:8", 0.911), (-2, "stream-k-tail", 0.533)):
        (one,) = prediction.predictions(planned(Algorithm(70, 20, 37, split_k)), GB10)
        assert (one["order"], one["basis"]) == (order, "prediction")
        assert one["hit_rate"] == pytest.approx(rate, abs=0.001)
        (line,) = prediction.text([one])
        assert f"predicted, not measured, {order}: L2 hit rate {rate:.1%}" in line


@pytest.mark.parametrize("pinned, heuristic, faster, words", [
    ((1, 4), (3, 9), "pinned", "the pinned algorithm should be faster; L2 misses read 1.000 to 4.000"),
    ((3, 4), (3, 5), "pinned", "3.000 to 4.000 GB with the pin, 3.000 to 5.000 GB with the heuristic's"),
    ((3, 9), (1, 4), "heuristic", "the heuristic's algorithm should be faster"),
    ((1, 4), (1, 4), None, "the model sees no difference"),
    ((1, 9), (2, 4), None, "the model can't tell: it depends on the order"),
])  # fmt: skip
def test_a_prediction_decides_only_where_every_order_agrees(pinned, heuristic, faster, words):
    """Both ends of the spread have to be no worse."""

    def arm(ends):
        return [{"miss_bytes": end * 10**9, "order": "row-major"} for end in ends]

    plans = [planned(Algorithm(70, 20, 37, split_k)) for split_k in (1, -2)]
    found = prediction.compare(*plans, arm(pinned), arm(heuristic))
    assert found["faster"] == faster and found["basis"] == "prediction"
    assert found["pinned"]["miss_bytes"] == [end * 10**9 for end in pinned]
    assert found["text"].startswith("a prediction: ") and words in found["text"]


def test_a_tile_is_turned_to_our_side():
    """cuBLASLt's 128x256 has 256 along M: one row of tiles here, and B is read once."""
    shape = (200, 4096, 512)
    wide, tall = (
        prediction.predictions(planned(Algorithm(66, tile, 36), "bf16", shape), GB10)[0]
        for tile in (23, 24)  # 128x256, 256x128
    )
    own = traffic.simulate(traffic.Problem(*shape, tile_m=256, tile_n=128, element="bf16"),
                           "row-major", sms=48, l2_bytes=24 << 20)  # fmt: skip
    assert wide["in_bounds_bytes"] == own.in_bounds_bytes != tall["in_bounds_bytes"]


def test_nothing_is_predicted_without_an_algorithm_an_l2_or_patience(monkeypatch):
    assert prediction.predictions(planned(None), GB10) == []
    with pytest.raises(CommandError, match="ask about a smaller problem"):
        prediction.predictions(planned(Algorithm(66, 1, 36), "bf16"), GB10)
    if not torch.cuda.is_available():
        with pytest.raises(CommandError, match=r"the L2 of another .* is not known"):
            unknown = Device((9, 0), 131, name="another")
            prediction.predictions(planned(Algorithm(66, 23, 36)), unknown)
    missing = ModuleNotFoundError("bench.traffic")
    monkeypatch.setattr(prediction.importlib, "import_module",
                        lambda name: (_ for _ in ()).throw(missing))  # fmt: skip
    with pytest.raises(CommandError, match="run it in the root of the source tree"):
        prediction.predictions(planned(Algorithm(66, 23, 36)), GB10)
