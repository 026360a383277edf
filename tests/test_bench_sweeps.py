"""The promise: one command sweeps every shape that is not done yet, within its time, and keeps a pin
only where ``gemm`` itself is byte-exact and not slower with it.

Sessions, arms and clock are scripted (test_sweep, test_gate).
"""

import json

import pytest
import test_gate
import test_sweep
from test_sweep import fast, small_space  # noqa: F401 (a fixture for every test)

from bench import sweeps
from nvfp4_linear import algorithms
from nvfp4_linear.console import CommandError, Console
from nvfp4_linear.lab.promote import read_rows


class Opened(test_sweep.Scripted):
    made = 0

    def __init__(self, machine):
        super().__init__(fast)
        Opened.made += 1


@pytest.fixture
def run(monkeypatch, tmp_path):
    machine = test_sweep.session.Machine("/nowhere", test_sweep.session.DOUBLE_CHIP, True)
    monkeypatch.setattr(sweeps, "find_machine", lambda device: machine)
    monkeypatch.setattr(sweeps, "Session", Opened)

    def go(timed=None, *arguments, status=0):
        timed = timed or test_gate.Scripted()
        monkeypatch.setattr(sweeps, "make_arms", lambda machine, pins: timed)
        monkeypatch.setattr(sweeps, "make_clock", lambda device: test_gate.ScriptedClock(timed))
        common = ("--out", tmp_path, "--work", tmp_path / "work", "--rounds", 6, "--seconds", 30)
        assert sweeps.main([str(a) for a in (*common, *arguments)]) == status
        return json.loads((tmp_path / "double_sweep.json").read_text())

    return go


def test_every_case_is_swept_pinned_and_verified(run, tmp_path, capsys):
    data = run()
    keys = ["nvfp4_40x64x128", "bf16_24x32x64", "fp8_e4m3_24x32x64"]
    assert list(data["sweeps"]) == keys
    pins = read_rows(tmp_path / "double.pins")
    assert [(pin.type, pin.m_min, pin.m_max, pin.n, pin.k) for pin in pins] == [
        ("nvfp4", 40, 40, 64, 128), ("bf16", 24, 24, 32, 64), ("fp8_e4m3", 24, 24, 32, 64),
    ]  # fmt: skip
    assert all(pin.evidence.startswith("double_sweep.json, ") for pin in pins)
    assert all(pin.algorithm.cluster == 5 for pin in pins)
    (verified,) = data["verified"]
    assert verified["faster"] and verified["difference"] is None and verified["pins"] == 1
    page = (tmp_path / "double_sweep.md").read_text()
    assert "TEST DOUBLE" in page and "| gemm, small FC2: 40 x 64 x 128 |" in page
    assert "same bytes" in page and page.count("cluster 1x2x1") == 3
    for entry in data["sweeps"].values():
        assert len(entry["rounds"]) == 1 + len(entry["verdict"]["candidates"])
        assert entry["generations"][0]["accepted"] > 10
    assert str(tmp_path) not in json.dumps(data) + page
    assert "3 pins in" in capsys.readouterr().out


def test_what_is_done_is_not_swept_again(run, tmp_path, monkeypatch):
    first = run()
    monkeypatch.setattr(sweeps, "sweep", None)
    assert run()["sweeps"] == first["sweeps"]
    monkeypatch.undo()
    book = json.loads((tmp_path / "double_sweep.json").read_text())
    book["machine"]["cublaslt"] = 130600
    (tmp_path / "double_sweep.json").write_text(json.dumps(book))
    machine = {**book["machine"], "cublaslt": 130100}
    with pytest.raises(CommandError, match="of another machine, library or format"):
        sweeps.Book(tmp_path, "double", machine)


def test_chunks_that_gemm_no_longer_makes_are_left_out(run, tmp_path, monkeypatch, capsys):
    run()
    monkeypatch.setattr(sweeps, "DOUBLE_CASES", sweeps.DOUBLE_CASES[1:])
    assert list(run()["sweeps"]) == ["bf16_24x32x64", "fp8_e4m3_24x32x64"]
    assert "left out, gemm makes other chunks now: nvfp4_40x64x128" in capsys.readouterr().out
    assert [pin.type for pin in read_rows(tmp_path / "double.pins")] == ["bf16", "fp8_e4m3"]


def test_work_of_another_machine_is_begun_anew(run, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "bf16_24x32x64.json").write_text("{}")
    assert len(run()["sweeps"]) == 3


@pytest.mark.parametrize("timed, harm", [
    (test_gate.Scripted(cost=(1.0, 2.0)), "slower"),
    (test_gate.Scripted(wrong=lambda timed: timed.arm == "pinned"), "other bytes"),
    (test_gate.Scripted(cost=(1.0, 1.0)), "no faster"),
])  # fmt: skip
def test_a_pin_that_harms_gemm_or_does_nothing_is_taken_out(run, tmp_path, timed, harm):
    data = run(timed, status=int(harm != "no faster"))
    dropped = f"gemm at 40 x 64 x 128: {harm}"
    assert data["sweeps"]["nvfp4_40x64x128"]["dropped"] == dropped
    assert data["verified"][0]["dropped"] == dropped
    assert [pin.type for pin in read_rows(tmp_path / "double.pins")] == ["bf16", "fp8_e4m3"]
    page = (tmp_path / "double_sweep.md").read_text()
    assert f"(taken out: {dropped})" in page and "bytes, taken out |" in page.lower()
    # From now on both arms are the same call: fewer rounds, and nothing more to take out.
    again = run(test_gate.Scripted(cost=(1.0, 1.0)))
    assert again["verified"][0]["pins"] == 0 and "dropped" not in again["verified"][0]
    assert len(again["verified"][0]["heuristic_s"]) == sweeps.UNPINNED_ROUNDS < 6


def test_finals_are_measured_again_from_the_best_of_the_screen(run, tmp_path, monkeypatch):
    first = run()
    monkeypatch.setattr(test_sweep.Scripted, "check", None)  # nothing is searched for any more
    monkeypatch.setattr(test_sweep.Scripted, "screen", None)
    assert run(None, "--finals")["sweeps"].keys() == first["sweeps"].keys()

    class Changed(Opened):
        """A machine on which what was fast is no longer."""

        def __init__(self, machine):
            super().__init__(machine)
            self.time = lambda algorithm: 1.0

    monkeypatch.setattr(sweeps, "Session", Changed)
    data = run(None, "--finals")
    for key, entry in data["sweeps"].items():
        assert first["sweeps"][key]["pin"] and not entry["pin"]
        assert "faster by more than the noise" in entry["no_pin"]
        for kept in ("problem", "heuristic", "best_of_screen", "screened", "generations"):
            assert entry[kept] == first["sweeps"][key][kept]
    assert read_rows(tmp_path / "double.pins") == []


def test_time_that_is_up_leaves_sweeps_for_another_run(run, tmp_path, capsys):
    data = run(None, "--seconds", 1, status=1)
    assert data["sweeps"] == {}
    out = capsys.readouterr().out
    assert "3 sweeps left for another run: no time" in out
    assert len(run()["sweeps"]) == 3


def test_the_cases_are_those_of_the_issue():
    dense = [case for case in sweeps.CASES if case.type == "bf16"]
    assert len(dense) == 8 and all("gemm" in case.verify for case in dense)
    assert (dense[0].m, dense[0].n, dense[0].k) == (37_810, 5_376, 14_336)
    assert (dense[1].m, dense[1].n, dense[1].k) == (37_810, 28_672, 5_376)
    assert sum(case.m <= 128 for case in dense) == 2
    assert sum(case.type == "fp8_e4m3" for case in sweeps.CASES) == 2


def test_chunks_of_gemm_are_swept_too_and_none_twice(monkeypatch):
    h200 = test_gate.Machine("/nowhere", algorithms.Device((9, 0), 132, name="H200"), False)
    found = test_gate.plan("emulated", 2816, 5376, {"rung": "cublaslt-heuristic"})
    monkeypatch.setattr(algorithms, "explain", lambda *a, **k: found)
    case = sweeps.Case("FC2", "bf16", 37810, 5376, 14336, verify=("gemm",))
    small = sweeps.Case("small", "bf16", 64, 5376, 14336, verify=("gemm",))
    jobs = sweeps.jobs_of(h200, (case, small, small))
    assert [job.title for job in jobs] == [
        "FC2: bf16_37810x5376x14336",
        "FC2, chunk of gemm: bf16_2816x5376x14336",
        "FC2, chunk of gemm: bf16_1202x5376x14336",
        "small: bf16_64x5376x14336",
    ]


def test_the_committed_book_has_every_case_its_page_and_its_pins():
    path = sweeps.RESULTS / "h200_sweep.json"
    book = sweeps.Book(path.parent, "h200", json.loads(path.read_text())["machine"])
    for case in sweeps.CASES:
        assert f"{case.type}_{case.m}x{case.n}x{case.k}" in book.data["sweeps"]
    assert sweeps.page(book.data) + "\n" == path.with_suffix(".md").read_text()
    assert read_rows(path.parent / "h200.pins") == book.pins()
    assert len(book.data["verified"]) == sum(len(case.verify) for case in sweeps.CASES)
    for entry in book.data["verified"]:
        assert entry["difference"] is None and entry["itself"] is None
        assert entry["faster"] or not entry["pins"] or entry["dropped"]


def test_a_name_comes_from_the_gpu():
    for gpu, name in (
        ("NVIDIA H200", "h200"),
        ("NVIDIA GB10", "gb10"),
        ("NVIDIA B200 SXM", "b200_sxm"),
    ):
        chip = algorithms.Device((9, 0), 132, name=f"cuda:0 {gpu}")
        assert sweeps._short_name(test_gate.Machine("/nowhere", chip, False)) == name
    assert Console().as_json is False
