"""The promise: a pin file can be wrong in any way, and the worst that happens is a refused row with
its line number and its reason. What is refused pins nothing, harms nothing and changes no result;
what is stale is kept out of every plan, and `explain`'s refusals say why.
"""

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fake_cublaslt
import numpy as np
import pytest
import torch
from fake_cublaslt import NOT_SUPPORTED
from hypothesis import given
from hypothesis import strategies as st
from test_cublaslt_bindings import Packed, address, aligned, to_bf16

from nvfp4_linear import _cublaslt as lt
from nvfp4_linear import algorithms, pin_file
from nvfp4_linear.algorithms import Algorithm, Pin

GB10 = lt.DeviceInfo(12, 1, 48)
GOOD = Pin(
    Algorithm(66, 23, 36, inner=0, cluster=0),
    cc=(12, 1),
    sm_count=48,
    version_min=130100,
    version_max=130100,
    m_min=100,
    m_max=200,
    n=64,
    k=128,
    evidence="sweep.json, 2026-01-02: 1.5x",
)
LINE = GOOD.to_text()


def changed(**values):
    """The good row with words replaced; None takes a word out."""
    line = LINE
    for key, value in values.items():
        assert re.search(rf"\b{key}=\S+ ", line), key
        new = "" if value is None else f"{key}={value} "
        line = re.sub(rf"\b{key}=\S+ ", lambda _, new=new: new, line, count=1)
    return line


# A row, and what its refusal names.
OUT_OF_RANGE = [
    (changed(tile=646), "tile 646 is out of range"),
    (changed(tile=10**9), "tile 1000000000 is out of range"),
    (changed(tile=-1), "tile -1 is out of range"),
    (changed(stages=39), "stages 39 is out of range"),
    (changed(stages=29), "stages 29 is out of range"),
    (changed(cluster=52), "cluster 52 is out of range"),
    (changed(cluster=1), "cluster 1 is out of range"),
    (changed(inner=5), "inner 5 is out of range"),
    (changed(split_k=0), "split_k 0 is out of range"),
    (changed(split_k=1025), "split_k 1025 is out of range"),
    (changed(reduction=3), "reduction 3 is out of range"),
    (changed(swizzle=256), "swizzle 256 is out of range"),
    (changed(custom=-1), "custom -1 is out of range"),
    (changed(id=-70), "id -70 is out of range"),
]
# 2^32 + 70 in 32 bits is 70: an algorithm that AlgoCheck might take.
TOO_LARGE = [
    (changed(id=2**32 + 70), "id"),
    (changed(tile=2**32 + 20), "tile"),
    (changed(cluster=2**32), "cluster"),
    (changed(cc_major=2**32 + 12), "cc_major"),
    (changed(sm_count=2**32 + 48), "sm_count"),
    (changed(version_min=-1), "version_min"),
    (changed(fills_chip=7), "fills_chip"),
    (changed(n=2**63), "n"),
    (changed(k="9" * 5000), "k"),
]
WRONG_TYPES = [
    (changed(type="int8"), "type"),
    (changed(type="NVFP4"), "type"),
    (changed(id="70.0"), "id must be an integer, got '70.0'"),
    (changed(tile="128x128"), "tile must be an integer, got '128x128'"),
    (changed(stages="0x25"), "stages must be an integer, got '0x25'"),
    (changed(n="7_0"), "n must be an integer, got '7_0'"),
    (changed(k="٧٠"), "k must be an integer"),
    (changed(id="default"), "id must be an integer, got 'default'"),
    (changed(swizzle="default"), "swizzle must be an integer, got 'default'"),
    (changed(m_min="nan"), "m_min must be an integer, got 'nan'"),
    (changed(fills_chip="yes"), "fills_chip must be an integer, got 'yes'"),
    (changed(sm_count=""), "sm_count must be an integer, got ''"),
]
MALFORMED = [
    ("id", "a pin is key=value words, got 'id'"),
    ("{}", "a pin is key=value words, got '{}'"),
    ('{"id": 70, "tile": 20}', "a pin is key=value words"),
    ("\x00\x01\x02", "a pin is key=value words"),
    ("=", "a pin needs "),
    ("evidence=only", "a pin needs "),
    (changed(id=None), "a pin needs id="),
    (changed(cc_minor=None), "a pin needs cc_minor="),
    (f"colour=red {LINE}", "unknown key 'colour'"),
    (f"id=66 {LINE}", "says id= once"),
    (changed(m_min=300), "m_max of a pin must be at least m_min, got 200 and 300"),
    (changed(version_min=130200), "version_max of a pin must be at least version_min"),
    (changed(m_min=0), "m_min of a pin must be an integer from 1"),
    (changed(n=-64), "n of a pin must be an integer from 0"),
    ("x" * 500_000, "a pin is key=value words, got 'xxxx"),
    (f"{'y' * 500_000}=1 {LINE}", "unknown key 'yyyy"),
]
HOSTILE = [*OUT_OF_RANGE, *TOO_LARGE, *WRONG_TYPES, *MALFORMED]


def title(value):
    return value[:60] if isinstance(value, str) else None


@pytest.fixture(autouse=True)
def clean():
    """Each test leaves the pins as it found them."""
    before = algorithms.pins()
    yield
    for row in algorithms.pins():
        if row not in before:
            assert algorithms.unpin(row)
    assert algorithms.pins() == before


def write(path, *lines):
    path.write_text("\n".join([pin_file.PIN_FILE_HEADER, *lines, ""]))
    return path


# ---- Refused by name --------------------------------------------------------------------------------


@pytest.mark.parametrize("line, named", HOSTILE, ids=title)
def test_a_bad_row_is_refused_by_line_and_reason_and_the_good_ones_count(tmp_path, line, named):
    before = algorithms.pins()
    report = algorithms.load_pins(write(tmp_path / "p", LINE, line, changed(n=72)))
    assert [row.n for row in report.loaded] == [64, 72]
    ((number, reason),) = report.refused
    assert number == 3 and named in reason
    assert len(reason) < 300  # says what is wrong, not all that was read
    assert f"line 3: {reason}" in str(report)
    assert len(algorithms.pins()) == len(before) + 2


@pytest.mark.parametrize("line, named", [*OUT_OF_RANGE, *TOO_LARGE], ids=title)
def test_the_planner_itself_refuses_them_too(line, named):
    """Who brings a row past algorithms.py, through `_cublaslt`, meets the same answer."""
    planner = lt.Planner(fake_cublaslt.Fake().path)
    with pytest.raises(ValueError, match=named.split()[0]):
        planner.pin(lt.Pin.parse(line))
    assert len(planner.pins) <= 1


@pytest.mark.parametrize(
    "content, message",
    [
        (
            random.Random(0).randbytes(10 << 20),
            "has 10,485,760 bytes, a pin file at most 1,048,576",
        ),
        (b"\n".join([LINE.encode()] * 50_000), "bytes, a pin file at most 1,048,576"),
        (b"\xff\xfe\x00", "is not a pin file: 'utf-8' codec can't decode"),
        (random.Random(1).randbytes(1 << 20), "is not a pin file"),
        (LINE.encode("utf-16"), "is not a pin file"),
    ],
    ids=["10 MB of junk", "10 MB of pins", "not UTF-8", "1 MB of junk", "UTF-16"],
)
def test_what_is_no_pin_file_is_refused_whole(tmp_path, content, message):
    before = algorithms.pins()
    path = tmp_path / "p"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        algorithms.load_pins(path)
    assert str(path) in str(error.value) and len(str(error.value)) < 500
    assert algorithms.pins() == before


def test_a_file_that_cannot_be_read_is_an_os_error(tmp_path):
    before = algorithms.pins()
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(OSError, match=re.escape(str(path))):
            algorithms.load_pins(path)
    assert algorithms.pins() == before


def import_with_pins(path):
    """stderr of an import with NVFP4_PINS, which has 60 s and 4 GB of address space over its own."""
    code = """
import resource, torch
from pathlib import Path
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), resource.RLIM_INFINITY))
import nvfp4_linear
print(len(nvfp4_linear.algorithms.pins()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NVFP4_PINS": str(path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    return done.stderr


def test_what_is_no_regular_file_is_refused_and_not_read(tmp_path):
    """A device has no end and a FIFO nobody writes to has no beginning; both say size 0."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (Path("/dev/zero"), fifo):
        said = import_with_pins(path)
        assert f"NVFP4_PINS ignored: {path} is not a regular file, so no pin file" in said


def test_no_more_is_read_than_a_pin_file_can_have(tmp_path, monkeypatch):
    """Whatever size it says: as of a file that grows while it is read."""
    path = tmp_path / "p"
    path.write_bytes(b"#" * ((1 << 20) + 4096))
    real = os.fstat

    def small(file):
        values = list(real(file))
        values[6] = 0  # st_size
        return os.stat_result(values)

    monkeypatch.setattr(os, "fstat", small)
    with pytest.raises(ValueError, match="has more than 1,048,576 bytes, the most of a pin file"):
        algorithms.load_pins(path)


def test_text_junk_within_the_limit_is_refused_line_by_line(tmp_path):
    """A megabyte of words: every line has its reason, none costs more than the others."""
    generator = random.Random(2)
    words = ["id=70", "tile=20", "=", "evidence", "x" * 90, "cc_major=12", "\x07", "id=", "☃=☃"]
    lines = [" ".join(generator.choices(words, k=8)) for _ in range(3000)]
    report = algorithms.load_pins(write(tmp_path / "p", *lines))
    assert report.loaded == () and len(report.refused) == len(lines)


@given(st.text(max_size=200))
def test_any_line_is_a_pin_or_a_value_error(line):
    """Never another exception, whatever the text: load_pins would not survive it."""
    for read in (Pin.from_text, lt.Pin.parse):
        try:
            read(line)
        except ValueError as error:
            assert str(error)


@given(
    numbers=st.lists(st.integers(-(2**70), 2**70), min_size=19, max_size=19),
    evidence=st.text(max_size=40),
)
def test_any_numbers_are_kept_as_they_are_or_refused(numbers, evidence):
    """A row that is taken says afterwards what it said before: no number is read as another."""
    keys = re.findall(r"(\w+)=", LINE)[1:-1]
    line = " ".join(f"{k}={v}" for k, v in zip(keys, numbers, strict=True))
    line = f"type=bf16 {line} evidence={' '.join(evidence.split())}"
    for read, text in ((Pin.from_text, Pin.to_text), (lt.Pin.parse, str)):
        try:
            row = read(line)
        except ValueError:
            continue
        assert text(row).split()[:20] == line.split()[:20]


def test_a_pin_made_in_python_is_held_to_the_same_rules():
    for change, message in (
        ({"n": "64"}, "n of a pin must be an integer from 0 to .*, got '64'"),
        ({"m_min": 1.0}, "m_min of a pin must be an integer"),
        ({"sm_count": True}, "sm_count of a pin must be an integer"),
        ({"cc": (12, -1)}, "cc_minor of a pin must be an integer"),
        ({"m_max": 50}, "m_max of a pin must be at least m_min"),
        ({"algorithm": Algorithm(None, 1, 1)}, "id of a pin must be an integer .*, got None"),
        ({"algorithm": Algorithm(1, 2**40, 1)}, "tile of a pin must be an integer"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(GOOD, **change)


# ---- Nothing harmed, no result changed --------------------------------------------------------------


def test_a_hostile_file_in_the_environment_is_a_warning_and_changes_no_result(tmp_path):
    """The import survives, the one good row is in force, and a gemm gives the bytes it gave."""
    code = """
import sys, torch, nvfp4_linear as nv
x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
q = torch.ops.nvfp4.quantize(x, None)
y = torch.ops.nvfp4.gemm(q[0], q[0], q[1], q[1])
print(len(nv.algorithms.pins()), y.view(torch.int16).tolist())
"""

    def run(path):
        environment = {key: v for key, v in os.environ.items() if key != "NVFP4_PINS"}
        if path is not None:
            environment["NVFP4_PINS"] = str(path)
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        count, _, bytes_ = done.stdout.partition(" ")
        return int(count), bytes_, done.stderr

    count, plain, quiet = run(None)
    assert count == 1 and "pins" not in quiet
    lines = [line for line, _ in HOSTILE if len(line) < 10_000]
    count, bytes_, said = run(write(tmp_path / "p", *lines, LINE))
    assert (count, bytes_) == (2, plain)
    assert f"1 pins loaded, {len(lines)} rows refused" in said
    assert "line 2: " in said and "tile 646 is out of range" in said
    (tmp_path / "junk").write_bytes(random.Random(0).randbytes(10 << 20))
    count, bytes_, said = run(tmp_path / "junk")
    assert (count, bytes_) == (1, plain)
    assert "NVFP4_PINS ignored: " in said and "a pin file at most 1,048,576" in said
    count, bytes_, said = run(tmp_path / "absent")
    assert (count, bytes_) == (1, plain) and "NVFP4_PINS ignored: " in said


class Gemm:
    """One NVFP4 gemm through a planner over the double: its bytes, and the plan that gave them."""

    M, N, K = 130, 64, 128

    def __init__(self):
        self.fake = fake_cublaslt.Fake()
        self.planner = lt.Planner(self.fake.path)
        rng = np.random.default_rng(0)
        self.a, self.b = Packed(rng, self.M, self.K), Packed(rng, self.N, self.K)
        self.expected = to_bf16(self.a.values @ self.b.values.T)

    def run(self):
        d = aligned(np.full((self.M, self.N), 0x7F7F, np.uint16))
        operands = lt.Operands(a=address(self.a.data), b=address(self.b.data), d=address(d),
                               a_scale=address(self.a.scale), b_scale=address(self.b.scale))  # fmt: skip
        plan = self.planner.matmul(lt.Problem("nvfp4", self.M, self.N, self.K, GB10), operands)
        np.testing.assert_array_equal(d, self.expected)
        return plan

    def pin(self, line):
        self.planner.pin(lt.Pin.parse(line))


def test_a_good_row_is_taken_and_gives_the_same_bytes():
    gemm = Gemm()
    assert gemm.run().rung == "cublaslt-heuristic"
    gemm.pin(LINE)
    plan = gemm.run()
    assert (plan.rung, plan.evidence) == ("cublaslt-pinned", GOOD.evidence)
    assert plan.algorithm["tile"] == 23


@pytest.mark.parametrize(
    "line, reason",
    [
        (changed(version_min=130200, version_max=130200),
         "pin is for cuBLASLt 13.2.0 to 13.2.0, found 13.1.0"),
        (changed(version_min=130000, version_max=130000),
         "pin is for cuBLASLt 13.0.0 to 13.0.0, found 13.1.0"),
        (changed(cc_major=9, cc_minor=0), "pin is for compute capability 9.0, found 12.1"),
        (changed(sm_count=20), "pin is for 20 multiprocessors, found 48"),
    ],
)  # fmt: skip
def test_a_row_of_another_library_or_chip_is_not_applied_and_explain_says_so(line, reason):
    gemm = Gemm()
    gemm.pin(line)
    plan = gemm.run()
    assert plan.rung == "cublaslt-heuristic"
    pinned = [text for rung, text in plan.refusals if rung == "cublaslt-pinned"]
    assert f"{reason} (m=130, n=64, k=128)" in pinned
    assert all(call["algo"][1] != 23 for call in gemm.fake.calls("cublasLtMatmulAlgoCheck"))


WITHOUT_EVIDENCE = LINE.partition("evidence=")[0] + "evidence="


@pytest.mark.parametrize("line", [WITHOUT_EVIDENCE, WITHOUT_EVIDENCE + "  ", WITHOUT_EVIDENCE[:-9]])
def test_policy_validated_skips_a_files_row_without_evidence_and_says_so(line):
    gemm = Gemm()
    row = lt.Pin.parse(line)
    row.from_file = True
    gemm.planner.pin(row)
    plan = gemm.run()
    assert plan.rung == "cublaslt-heuristic"
    (reason, _) = [text for rung, text in plan.refusals if rung == "cublaslt-pinned"]
    assert reason.startswith("pin has no evidence, which policy validated asks of a pin file's row")
    assert all(call["algo"][1] != 23 for call in gemm.fake.calls("cublasLtMatmulAlgoCheck"))
    gemm.planner.policy = "always"
    assert gemm.run().algorithm["tile"] == 23


def test_who_pins_by_hand_vouches_for_the_pin():
    gemm = Gemm()
    gemm.pin(WITHOUT_EVIDENCE)
    assert gemm.run().rung == "cublaslt-pinned"


def test_explain_says_of_a_loaded_row_that_it_has_no_evidence(tmp_path):
    """As a user meets it: the file in the environment, each policy, then the same row by hand."""
    code = """
import json
from nvfp4_linear import algorithms
found = []
def ask():
    plan = algorithms.explain(130, 64, 128, device=algorithms.Device((12, 1), 48))
    found.append([plan.rung, [refusal.reason for refusal in plan.refusals]])
ask()
algorithms.pin_policy("always")
ask()
algorithms.pin_policy("validated")
algorithms.pin(algorithms.pins()[0])
ask()
print(json.dumps(found))
"""
    environment = {"NVFP4_PINS": str(write(tmp_path / "p", WITHOUT_EVIDENCE)),
                   "NVFP4_CUBLASLT_LIBRARY": fake_cublaslt.Fake().path}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    validated, always, by_hand = json.loads(done.stdout)
    assert validated[0] == "cublaslt-heuristic" and "pin has no evidence" in validated[1][0]
    assert always == by_hand == ["cublaslt-pinned", []]


@pytest.mark.parametrize(
    "change", [{"type": "bf16"}, {"n": 72}, {"k": 256}, {"m_max": 129}], ids=str
)
def test_a_row_of_another_problem_is_not_applied(change):
    gemm = Gemm()
    gemm.pin(changed(**change))
    assert gemm.run().rung == "cublaslt-heuristic"
    assert all(call["algo"][1] != 23 for call in gemm.fake.calls("cublasLtMatmulAlgoCheck"))


@pytest.mark.parametrize(
    "settings, line, reason",
    [
        ({"check_status": NOT_SUPPORTED}, LINE, "AlgoCheck CUBLAS_STATUS_NOT_SUPPORTED for id 66"),
        ({"check_state": NOT_SUPPORTED}, LINE, "AlgoCheck state CUBLAS_STATUS_NOT_SUPPORTED for id"),
        ({"check_workspace": 1 << 20}, LINE, "needs 1048576 bytes of workspace, the limit is 0"),
        ({}, changed(id=9999), "AlgoInit CUBLAS_STATUS_INVALID_VALUE for id 9999"),
        ({}, changed(tile=0), "AlgoCheck CUBLAS_STATUS_INVALID_VALUE for id 66, tile 0"),
    ],
)  # fmt: skip
def test_a_row_that_algo_check_rejects_is_skipped_with_its_reason(settings, line, reason):
    gemm = Gemm()
    gemm.fake.configure(**settings)
    gemm.pin(line)
    plan = gemm.run()
    assert plan.rung == "cublaslt-heuristic"
    pinned = [text for rung, text in plan.refusals if rung == "cublaslt-pinned"]
    assert any(text.startswith(reason) for text in pinned), pinned


def test_every_row_that_gets_past_the_reader_still_gives_the_same_bytes():
    """Rows at random within the ranges: AlgoCheck takes some and refuses others, bytes stay."""
    gemm = Gemm()
    generator = random.Random(3)
    for _ in range(60):
        change = {
            "id": generator.choice([0, 66, 70, 71, 9999]),
            "tile": generator.randrange(635),
            "stages": generator.choice([0, 20, 35, 37]),
            "split_k": generator.choice([-1024, -1, 1, 2, 1024]),
            "reduction": generator.choice([0, 1, 2, 4]),
            "swizzle": generator.randrange(256),
            "custom": generator.randrange(256),
            "cluster": generator.choice(["default", 0, 3, 51]),
        }
        gemm.pin(changed(**change))
        gemm.run()
    rungs = {gemm.run().rung}
    assert rungs <= {"cublaslt-pinned", "cublaslt-heuristic"}


# ---- What is written can be read ---------------------------------------------------------------------


def test_a_saved_file_is_read_back_whole_and_unpinned_again(tmp_path):
    rows = [GOOD, replace(GOOD, type="bf16", cc=(9, 0), m_max=0, evidence="a  b\n c=d evidence=e")]
    algorithms.save_pins(tmp_path / "p", rows)
    report = algorithms.load_pins(tmp_path / "p")
    assert report.refused == ()
    assert report.loaded == (rows[0], replace(rows[1], evidence="a b c=d evidence=e"))
    assert algorithms.pins()[:2] == list(reversed(report.loaded))  # the newest is asked first
    algorithms.save_pins(tmp_path / "q")
    assert Pin.from_text((tmp_path / "q").read_text().splitlines()[1]) == report.loaded[1]
    for row in report.loaded:
        assert algorithms.unpin(row)
        assert not algorithms.unpin(row)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "p"
    algorithms.save_pins(path, [GOOD])
    kept = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        algorithms.save_pins(path, [replace(GOOD, n=72)])
    assert path.read_bytes() == kept and os.listdir(tmp_path) == ["p"]


def test_pins_do_not_touch_what_they_are_not_for():
    """The policy and the pins of this process decide nothing on the CPU."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    data, scale = torch.ops.nvfp4.quantize(x, None)
    before = torch.ops.nvfp4.gemm(data, data, scale, scale)
    algorithms.pin(replace(GOOD, n=0, k=0, m_min=1, m_max=0))
    after = torch.ops.nvfp4.gemm(data, data, scale, scale)
    assert torch.equal(before.view(torch.int16), after.view(torch.int16))
