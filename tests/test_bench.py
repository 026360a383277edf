"""Promises of bench/: the whole flow of every benchmark runs at tiny sizes, its files have the keys
they promise and no host name or path, nothing is timed on a wrong output, the torch baselines do the
same arithmetic, and ncu's table is read right.

No assertion here is about a time.
"""

import json
import os
import re
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compare import INPUTS, assert_same_bytes, make_input
from helpers import cuda_missing

import bench.gemm
import bench.grouped
import bench.producer
from bench import ladder_check, overhead, plot, profile, report, sanitize, timing, traffic
from bench.baseline import Baseline
from bench.check import (
    Operand,
    WrongOutput,
    agreement,
    check_whole,
    equal_fraction,
    ops,
    quantized,
    require_same_bytes,
    sample_rows,
)
from bench.report import Record, Run
from bench.timing import Samples, Variant, plan_calls, rotation_sets
from nvfp4_linear import Plan, explain, reference
from nvfp4_linear.algorithms import Device

BENCH = Path(report.__file__).parent
KEYS = {"case", "median_us", "limit_us", "of_limit", "vs_torch", "vs_compile"}
QUICK = ["--device", "cpu", "--quick"]
MIB = 1 << 20


# --- the whole flow, and its files


@pytest.mark.parametrize(
    "module, name",
    [
        (bench.producer, "producer"),
        (bench.gemm, "gemm"),
        (bench.grouped, "grouped"),
        (overhead, "overhead"),
        (ladder_check, "ladder"),
    ],
)
def test_quick_run_writes_json_and_markdown(module, name, tmp_path):
    assert module.main([*QUICK, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / f"{name}.json").read_text())
    assert rows and all(row.keys() >= KEYS for row in rows)
    assert all(row["environment"]["torch"] == torch.__version__ for row in rows)
    assert len({row["case"] for row in rows}) == len(rows)
    markdown = (tmp_path / f"{name}.md").read_text()
    assert all(f"| {row['case']} |" in markdown for row in rows)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{name}.json", f"{name}.md"]


@pytest.mark.parametrize("name", ["gemm", "overhead"])
def test_results_name_no_host_and_no_path(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = {"gemm": bench.gemm, "overhead": overhead}[name]
    module.main([*QUICK, "--only", "^gemm", "--out", str(tmp_path)])
    text = (tmp_path / f"{name}.json").read_text() + (tmp_path / f"{name}.md").read_text()
    assert socket.gethostname() not in text
    assert not re.search(r"/(home|root|tmp|work|usr|opt|mnt)\b", text)


def test_a_cpu_run_leaves_the_committed_results_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert bench.gemm.main([*QUICK, "--only", "gemm 1x"]) == 0
    assert not list(tmp_path.iterdir())


def test_session_has_a_section_for_each_benchmark():
    listed = session("--list").stdout.split()
    assert {"producer", "gemm", "grouped", "overhead", "ladder", "matrix"} <= set(listed)


def test_only_selects_cases(tmp_path):
    bench.producer.main(
        [*QUICK, "--no-compile", "--only", "global_scale 1x", "--out", str(tmp_path)]
    )
    rows = json.loads((tmp_path / "producer.json").read_text())
    assert [row["case"] for row in rows] == [f"global_scale 1x{bench.producer.QUICK_K} bf16"]


def test_a_gpu_that_is_not_there_is_said(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        bench.gemm.main(["--device", "cuda"])
    assert stopped.value.code == 2
    assert "use --device cpu --quick" in capsys.readouterr().err


def test_committed_results_have_the_keys():
    for path in (BENCH / "results").glob("*.json"):
        rows = json.loads(path.read_text())
        assert rows and all(row.keys() >= KEYS for row in rows), path.name


# --- nothing is timed on a wrong output


class Corrupted:
    """torch.ops.nvfp4 in which one op flips a bit of its first output, for inputs of many rows."""

    def __init__(self, op: str, rows: int):
        self._op, self._rows = op, rows

    def __getattr__(self, name):
        op = getattr(ops, name)
        if name != self._op:
            return op

        def corrupted(first, *arguments, **options):
            result = op(first, *arguments, **options)
            if first.shape[0] == self._rows:
                out = result[0] if isinstance(result, tuple) else result
                out.view(torch.uint8)[-1, -1] ^= 0x40
            return result

        return corrupted


@pytest.fixture
def never_timed(monkeypatch):
    def refuse(*_):
        raise AssertionError("timed before it was checked")

    monkeypatch.setattr(Run, "measure", refuse)


@pytest.mark.parametrize("op", ["quantize", "swiglu_quantize"])
def test_a_wrong_producer_is_not_timed(op, monkeypatch, never_timed):
    monkeypatch.setattr(bench.producer, "ops", Corrupted(op, bench.producer.QUICK_ROWS))
    with pytest.raises(WrongOutput, match="bytes differ"):
        bench.producer.main([*QUICK, "--no-compile", "--only", f"^{op} 130"])


@pytest.mark.parametrize("op", ["gemm", "gemm_a16w4"])
def test_a_wrong_gemm_is_not_timed(op, monkeypatch, never_timed):
    monkeypatch.setattr(bench.gemm, "ops", Corrupted(op, 8))
    with pytest.raises(WrongOutput, match="gemm"):
        bench.gemm.main([*QUICK, "--only", f"^{op} 8x"])


def test_a_result_that_changes_is_not_timed():
    numbers = iter(range(10))
    unsteady = Variant("unsteady", lambda _: torch.tensor(next(numbers)), exact=True)
    with pytest.raises(WrongOutput, match="unsteady"):
        timing.CpuTimer().measure([unsteady], rounds=1)


def test_a_failed_ladder_check_is_recorded_and_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(ladder_check, "ops", Corrupted("gemm", 33))
    arguments = [*QUICK, "--only", "exact", "--out", str(tmp_path)]
    assert ladder_check.main(arguments) == 1
    rows = json.loads((tmp_path / "ladder.json").read_text())
    assert {row["passed"] for row in rows if row["case"].startswith("gemm 33x")} == {False}


@pytest.mark.parametrize(("device", "passed"), [("cuda", False), ("cpu", None)])
def test_pins_that_cannot_be_tried_fail_on_a_gpu(device, passed, monkeypatch):
    class Fused:
        def __init__(self, run, *shape):
            self.shape = shape

        def plan(self):
            return Plan(*self.shape, "cuda:0", "emulated", "gemm_mid_m")

    records = []
    monkeypatch.setattr(ladder_check, "Ladder", Fused)
    ladder_check.check_pins(SimpleNamespace(device=device, add=records.append), (64, 64, 64))
    (record,) = records
    assert record.extra["passed"] is passed
    assert "got emulated, gemm_mid_m" in record.extra["note"]


@pytest.mark.parametrize(
    "shape",
    [
        ladder_check.PINNED,
        ladder_check.QUICK_PINNED,
        *((m, overhead.N, k) for m, k in overhead.CASES if k == overhead.DECODED_K),
    ],
)
def test_what_is_to_go_through_cublaslt_is_no_fused_kernels_on_an_h200(shape):
    plan = explain(*shape, device=Device((9, 0), 132))
    assert plan.kernel not in ("gemm_small_m", "gemm_small_m_hopper", "gemm_mid_m")


def test_byte_comparison_names_the_first_difference():
    expected = torch.zeros(4, 8, dtype=torch.uint8)
    actual = expected.clone()
    actual[1, 2] = 0x7F
    with pytest.raises(WrongOutput, match=r"1 of 32 bytes differ, the first at 10: 0x7f"):
        require_same_bytes("x", (expected, actual), (expected, expected))
    with pytest.raises(WrongOutput, match="dtype"):
        require_same_bytes("x", expected.to(torch.int8), expected)
    assert equal_fraction(actual, expected) == 31 / 32


def operands(m: int, n: int, k: int) -> tuple[Operand, Operand]:
    return quantized(timing.normal(m, k, "cpu", 1)), quantized(timing.normal(n, k, "cpu", 2))


@pytest.mark.parametrize("bad", [torch.nan, 1e4, 0.0])
def test_gemm_checks_see_one_wrong_element(bad):
    a, b = operands(9, 12, 64)
    y = ops.gemm(a.data, b.data, a.scale, b.scale)
    assert agreement(y, a, b).equal == 1
    check_whole(y, a.decode(), b.decode(), 1.0)
    y[8, 11] = bad
    with pytest.raises(WrongOutput):
        agreement(y, a, b)
    with pytest.raises(WrongOutput, match=r"\(8, 11\)"):
        check_whole(y, a.decode(), b.decode(), 1.0)


def test_operand_rows_are_taken_with_their_scales():
    x = timing.normal(300, 80, "cpu", 3)
    g = ops.global_scale(x)
    index = sample_rows(300, 20)
    assert {0, 299} <= set(index.tolist()) and len(index) <= 20
    taken, expected = Operand(*ops.quantize(x, g)).take(index), ops.quantize(x[index], g)
    require_same_bytes("rows", (taken.data, taken.scale), expected)


def test_operand_bytes_are_the_studys():
    problem = traffic.CANONICAL
    data = torch.empty(problem.n, problem.k // 2, dtype=torch.uint8, device="meta")
    assert Operand(data, data).bytes == problem.b_bytes == 43_352_064


# --- the other side does the same arithmetic


@pytest.mark.parametrize("name", [n for n in INPUTS if n not in ("any_bits", "hand_made", "huge")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_baseline_quantize_is_exact(name, dtype):
    x = make_input(name, 33, 144, dtype)
    baseline, g = Baseline("cpu"), reference.global_scale(x)
    assert_same_bytes(baseline.global_scale(x), g)
    for got, expected in zip(baseline.quantize(x, g), reference.quantize(x, g), strict=True):
        assert_same_bytes(got, expected)


def test_baseline_dequantize_is_exact():
    data, scale = reference.quantize(make_input("normal", 130, 80, torch.bfloat16))
    expected = reference.dequantize(data, scale, out_dtype=torch.bfloat16)
    assert_same_bytes(Baseline("cpu").dequantize(data, scale), expected)


def test_baseline_swiglu_pads_and_nearly_agrees():
    x = timing.normal(130, 160, "cpu", 4)
    g = torch.tensor(2.0**-6)
    data, scale = Baseline("cpu").swiglu_quantize(x, g, 128)
    expected = reference.swiglu_quantize(x, g, pad_rows_to=128)
    assert data.shape == expected[0].shape and scale.shape == expected[1].shape
    # torch's own sigmoid: an ulp may move a code at a tie
    assert equal_fraction(data, expected[0]) > 0.999


# --- timing and records: arithmetic


def test_samples():
    samples = Samples((5.0, 1.0, 3.0, 2.0, 4.0))
    assert samples.median == 3
    assert (samples.percentile(0), samples.percentile(100)) == (1, 5)
    assert samples.percentile(10) == pytest.approx(1.4)
    assert samples.summary()["spread_us"] == pytest.approx(3.2)
    assert samples.summary()["rounds"] == 5


def test_rotation_exceeds_four_times_l2():
    l2 = 60 * MIB
    assert rotation_sets(43_352_064, l2) == 6 and 4 * l2 < 6 * 43_352_064
    assert rotation_sets(2_168_176_640, l2) == 1
    assert rotation_sets(100, l2) == timing.MAX_SETS


@pytest.mark.parametrize(
    "sets, set_bytes, estimate_us, expected",
    [
        (6, 43_352_064, 15.0, (66, False)),  # about a millisecond, whole turns
        (6, 43_352_064, 900.0, (6, False)),  # at least one turn: every set
        (1, 2_168_176_640, 3_000.0, (1, False)),
        (64, 28_672, 3.0, (64, True)),  # too small to rotate past L2: flushed, no set used twice
        (64, 28_672, 100.0, (10, True)),
        (64, 0, 1.0, (64, True)),
    ],
)
def test_calls_in_a_graph(sets, set_bytes, estimate_us, expected):
    variant = Variant("v", lambda _: None, sets, set_bytes)
    assert plan_calls(variant, 60 * MIB, estimate_us) == expected


def test_variants_take_turns():
    order = []
    variants = [Variant(name, lambda _, name=name: order.append(name)) for name in "ab"]
    timing.CpuTimer().measure(variants, rounds=3)
    assert "".join(order[-6:]) == "abbaab"


def test_record_ratios():
    assert Record("x", 20.0, 15.0).of_limit == 0.75
    assert Record("x", 20.0).of_limit is None
    row = Record("x", 1 / 3, None, 2.0, extra={"op": "gemm"}).to_dict()
    assert row["median_us"] == 0.33333 and row["limit_us"] is None and row["op"] == "gemm"
    samples = {"ours": Samples((2.0,)), "torch": Samples((6.0,))}
    assert report.ratio(samples, "torch") == 3 and report.ratio(samples, "compile") is None


def test_limit_is_the_largest():
    run = Run("x", report.parser("x", ""), QUICK)
    run._rates |= {"copy": 4e12, "matmul": 8e14}
    assert run.limit(4_000_000)["limit_us"] == 1
    assert run.limit(4_000_000, 1_600_000_000)["limit"] == "operations / BF16 rate"
    assert run.limit(4_000_000, least_us=2.5) == {"limit_us": 2.5, "limit": "an empty kernel"}


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "gemm.json"
    report.write_whole(path, "old")
    monkeypatch.setattr(report.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        report.write_whole(path, "new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["gemm.json"]


def test_json_has_one_record_a_line_and_no_nan():
    text = report.to_json([{"case": "a", "median_us": None}, {"case": "b", "median_us": 1.0}])
    assert len(json.loads(text)) == 2 and text.count("\n") == 4
    with pytest.raises(ValueError):
        report.to_json([{"median_us": float("nan")}])


def test_short_table(tmp_path, capsys):
    rows = [Record("gemm 1x2x3", 20.0, 15.0, 2.0).to_dict(), Record("y", extra={"note": "pass"})]
    rows[1] = rows[1].to_dict()
    path = tmp_path / "gemm.json"
    path.write_text(report.to_json(rows))
    assert report.main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"gemm 1x2x3 +20\.00 +75\.0% +2\.00x", printed) and "pass" in printed


# --- ncu's table

NVTX = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
NCU_COLUMNS = {  # name: (unit, value of the first kernel, of the second)
    "ID": ("", "0", "1"),
    "Host Name": ("", "127.0.0.1", "127.0.0.1"),
    "Kernel Name": (
        "",
        "void nvfp4::cuda::<unnamed>::quantize_kernel<__nv_bfloat16, (bool)1, (bool)1>(QuantizeArgs)",
        "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT",
    ),
    NVTX: ("", "0 <default domain>:bench=swiglu_quantize 130x160:none:none:none:none:none", ""),
    "gpu__time_duration.sum": ("nsecond", "650,432", "451600"),
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "91.25", "20"),
    "dram__bytes.sum.per_second": ("byte/second", "4,100,000,000,000", "n/a"),
    "lts__t_sector_hit_rate.pct": ("%", "33.1", "90.5"),
    "launch__registers_per_thread": ("register/thread", "80", "168"),
    "smsp__inst_executed.sum": ("inst", "11,700", "5"),
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": ("%", "0", "3"),
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active": ("%", "0", "92.5"),
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": ("", "3.5", "1"),
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": ("", "1.5", "2"),
}


def ncu_table() -> str:
    rows = [list(NCU_COLUMNS), *map(list, zip(*NCU_COLUMNS.values(), strict=True))]
    lines = [",".join(f'"{cell}"' for cell in row) for row in rows]
    return "\n".join(["==PROF== Connected to process 1", *lines, ""])


def test_ncu_table_is_boiled_down(tmp_path):
    path = tmp_path / "profile.csv"
    path.write_text(ncu_table())
    arguments = ["parse", str(path), "--quick", "--out", str(tmp_path)]
    assert profile.main(arguments) == 0
    ours, cublaslt = json.loads((tmp_path / "ncu.json").read_text())
    assert ours.keys() >= KEYS
    assert ours["range"] == "swiglu_quantize 130x160"
    assert ours["kernel"] == "quantize_kernel<__nv_bfloat16, (bool)1, (bool)1>"
    assert ours["duration_us"] == 650.43 and ours["dram_bytes_s"] == 4.1e12
    assert ours["instructions_per_element"] == 11_700 * 32 / (130 * 80)
    assert list(ours["stalls"]) == ["long_scoreboard", "wait"]
    assert cublaslt["range"] is None and cublaslt["dram_bytes_s"] is None
    assert cublaslt["tensor_pipe_pct"] == 92.5 and cublaslt["registers"] == 168
    assert "127.0.0.1" not in (tmp_path / "ncu.json").read_text()


def test_ncu_text_without_a_table_is_refused():
    with pytest.raises(ValueError, match="--page raw --csv"):
        profile.read_table("==ERROR== No kernels were profiled.")


def test_ncu_leaves_the_clocks_alone():
    collect, export = profile.ncu_commands("ncu", Path("r.ncu-rep"), quick=True)
    assert collect[collect.index("--clock-control") + 1] == "none"
    assert collect[-3:] == ["bench.profile", "run", "--quick"] and "--csv" in export


def test_profiled_and_sanitized_calls_run():
    profile.run("cpu", quick=True)
    assert sanitize.main(["--device", "cpu"]) == 0


# --- the plot, and the session script


def test_plot_is_deterministic(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib, found none")
    bench.gemm.main([*QUICK, "--only", "x64x96", "--out", str(tmp_path)])
    drawn = []
    for name in ("a.svg", "b.svg"):
        out = str(tmp_path / name)
        assert plot.main([str(tmp_path / "gemm.json"), "--n", "64", "--k", "96", "--out", out]) == 0
        drawn.append((tmp_path / name).read_bytes())
    assert drawn[0] == drawn[1] and b"<svg" in drawn[0]


def session(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(BENCH / "gpu_session.sh"), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
    )


def test_session_lists_its_sections_and_refuses_others():
    listed = session("--list")
    assert listed.returncode == 0 and "racecheck 90" in listed.stdout
    refused = session("nothing")
    assert refused.returncode == 2 and "no section 'nothing'" in refused.stdout


def test_session_goes_on_after_a_failure_and_packs(tmp_path):
    done = session("ladder", "overhead", OUT=str(tmp_path), PYTHON="false")
    assert done.returncode == 1
    summary = (tmp_path / "summary.txt").read_text()
    assert summary.count("failed (1)") == 2 and "overhead" in summary
    assert sorted(p.name for p in tmp_path.iterdir()) == ["session.tar.gz", "summary.txt"]


def test_every_sanitizer_sees_every_part_and_ours_without_cublaslt(tmp_path):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f'#!/bin/sh\necho "$NVFP4_CUBLASLT_LIBRARY" "$@" >>{tmp_path}/calls\n')
    tool.chmod(0o755)
    python = tmp_path / "python"  # asked for the double's path; the tool above runs nothing
    python.write_text("#!/bin/sh\necho /double.so\n")
    python.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    for name in ("memcheck", "racecheck", "initcheck"):
        (tmp_path / "calls").write_text("")
        done = session(name, OUT=str(tmp_path / "out"), PATH=path, PYTHON=str(python))
        assert done.returncode == 0, done.stdout
        parts = {"": set(), "/double.so": set()}
        for call in (tmp_path / "calls").read_text().splitlines():
            library, _, arguments = call.partition(" ")
            assert f"--tool {name}" in arguments
            named = arguments.partition("--only ")[2].split()
            parts[library] |= set(named or sanitize.PARTS)
        assert parts["/double.so"] == {"decoded"}
        assert parts[""] | {"decoded"} == set(sanitize.PARTS)


def test_scripts_never_change_the_gpus_settings():
    for path in [*BENCH.glob("*.py"), BENCH / "gpu_session.sh"]:
        text = path.read_text()
        assert not re.search(r"nvidia-smi[^\n]* -(pm|pl|ac|rac|lgc|rgc|lmc|r|c|mig)\b", text), path


# --- on a GPU: the graph timer itself

needs_gpu = pytest.mark.skipif(bool(cuda_missing()), reason=str(cuda_missing()))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("module", [bench.producer, bench.gemm, overhead, ladder_check])
def test_quick_run_on_the_gpu(module, tmp_path):
    options = ["--no-compile"] if module is bench.producer else []
    arguments = ["--device", "cuda", "--quick", "--out", str(tmp_path), *options]
    assert module.main(arguments) == 0
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())


@pytest.mark.gpu
@needs_gpu
def test_a_warm_gemm_through_cublaslt_asks_no_heuristic(tmp_path):
    torch.ops.nvfp4._control("clear")  # of what other tests have planned
    arguments = [
        "--device",
        "cuda",
        "--quick",
        "--only",
        "^gemm|first call",
        "--out",
        str(tmp_path),
    ]
    assert overhead.main(arguments) == 0
    rows = {row["case"]: row for row in json.loads((tmp_path / "overhead.json").read_text())}
    first = {case: row for case, row in rows.items() if "first call" in case}
    assert {row["heuristic_queries"] for case, row in rows.items() if case not in first} == {0}
    decoded = rows["gemm, m=64 n=256 k=272"]
    assert "cublasLtMatmul" in decoded["kernel"], "the case no longer goes through cuBLASLt"
    (asked,) = (row["heuristic_queries"] for case, row in first.items() if "k=272" in case)
    assert asked >= len(overhead.FRESH_M), "or the count is no count"


@pytest.mark.gpu
@needs_gpu
def test_a_replay_that_differs_is_not_timed_on_the_gpu():
    counter = torch.zeros((), device="cuda")
    unsteady = Variant("unsteady", lambda _: counter.add_(1).clone(), exact=True)
    with pytest.raises(WrongOutput, match="unsteady"):
        timing.GpuTimer().measure([unsteady], rounds=1)
