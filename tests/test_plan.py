"""The promise: a problem gets the pinned algorithm where cuBLASLt accepts it, else the heuristic's,
else a list of reasons; what is refused is never run, and what was planned is never asked again.

Everything here runs against the test double of a GB10 (`fake_cublaslt`), without a GPU.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading

import fake_cublaslt
import pytest
from fake_cublaslt import (
    ARCH_MISMATCH,
    EXECUTION_FAILED,
    INTERNAL_ERROR,
    INVALID_VALUE,
    NOT_INITIALIZED,
    NOT_SUPPORTED,
)

from nvfp4_linear import _cublaslt as lt

GB10 = lt.DeviceInfo(12, 1, 48)
B200 = lt.DeviceInfo(10, 0, 148)
B300 = lt.DeviceInfo(10, 3, 148)
H200 = lt.DeviceInfo(9, 0, 132)

# The study's FC2, and its pin's attributes by cuBLASLt's attribute number.
M, N, K = 37824, 5376, 14336
ID, TILE, SPLIT_K, REDUCTION, SWIZZLE, CUSTOM, STAGES, INNER, CLUSTER = range(9)
STUDIED = dict(id=70, tile=20, stages=37, split_k=1, reduction=0, swizzle=0, custom=0)


@pytest.fixture
def fake():
    return fake_cublaslt.Fake()


@pytest.fixture
def planner(fake):
    return lt.Planner(fake.path)


def problem(m=M, n=N, k=K, device=GB10, type="nvfp4", **keywords):
    return lt.Problem(type, m, n, k, device, **keywords)


def bf16(m=2048, n=5376, k=14336, device=H200, **keywords):
    return problem(m, n, k, device, "bf16", **keywords)


def reasons(plan, rung):
    return [reason for name, reason in plan.refusals if name == rung]


def asked(fake):
    """How often cuBLASLt was asked to judge or to choose."""
    return len(fake.calls("cublasLtMatmulAlgoCheck")) + len(
        fake.calls("cublasLtMatmulAlgoGetHeuristic")
    )


# ---- The pinned rung ------------------------------------------------------------------------------


def test_studied_pin_is_asked_for_with_exactly_its_attributes(fake, planner):
    plan = planner.plan(problem())

    assert (plan.rung, plan.workspace_bytes, plan.refusals) == ("cublaslt-pinned", 0, [])
    assert "GB10 study" in plan.evidence
    (init,) = fake.calls("cublasLtMatmulAlgoInit")
    assert init["id"] == 70
    # CUBLAS_COMPUTE_32F, CUDA_R_32F, CUDA_R_4F_E2M1, CUDA_R_16BF
    assert [init[key] for key in ("compute", "scale", "a_type", "b_type", "c_type", "d_type")] == [
        68, 0, 33, 33, 14, 14,
    ]  # fmt: skip
    set_calls = fake.calls("cublasLtMatmulAlgoConfigSetAttribute")
    assert {call["attribute"]: call["value"] for call in set_calls} == {
        TILE: 20, STAGES: 37, SPLIT_K: 1, REDUCTION: 0, SWIZZLE: 0, CUSTOM: 0,
    }  # fmt: skip
    assert {call["bytes"] for call in set_calls} == {4}
    (check,) = fake.calls("cublasLtMatmulAlgoCheck")
    assert check["algo"] == [70, 20, 1, 0, 0, 0, 37, 0, 0]
    assert fake.calls("cublasLtMatmulAlgoGetHeuristic") == []
    order = [call["call"] for call in fake.records()]
    assert order[0] == "cublasLtCreate" and order[-1] == "cublasLtMatmulAlgoCheck"


def test_inner_and_cluster_are_left_as_algo_init_gives_them_and_recorded(fake, planner):
    fake.configure(inner=4, cluster=3)
    plan = planner.plan(problem())
    assert plan.algorithm == dict(STUDIED, inner=4, cluster=3)


def test_inner_and_cluster_are_set_in_16_bits_where_a_pin_names_them(fake, planner):
    planner.pin(lt.Pin(lt.Algorithm(**STUDIED, inner=4, cluster=5), 12, 1))
    plan = planner.plan(problem())
    assert plan.algorithm == dict(STUDIED, inner=4, cluster=5)
    set_calls = fake.calls("cublasLtMatmulAlgoConfigSetAttribute")
    assert {
        call["attribute"]: (call["bytes"], call["value"])
        for call in set_calls
        if call["attribute"] in (INNER, CLUSTER)
    } == {INNER: (2, 4), CLUSTER: (2, 5)}


def test_operands_swap_sides_together_with_their_leading_dimensions(fake, planner):
    planner.plan(problem(lda=K + 32, ldb=K + 64, ldd=N + 8))
    (check,) = fake.calls("cublasLtMatmulAlgoCheck")
    # cuBLASLt's A is the weight (n rows), transposed; its B the activation; D is column-major.
    assert check["a"] == {"type": 33, "rows": K, "columns": N, "ld": K + 64}
    assert check["b"] == {"type": 33, "rows": K, "columns": M, "ld": K + 32}
    assert check["d"] == check["c"] == {"type": 14, "rows": N, "columns": M, "ld": N + 8}
    assert (check["descriptor"]["3"], check["descriptor"].get("4", 0)) == (1, 0)  # op T, op N


@pytest.mark.parametrize("question", ["cublasLtMatmulAlgoCheck", "cublasLtMatmulAlgoGetHeuristic"])
def test_block_scales_are_described_before_cublaslt_is_asked(fake, planner, question):
    planner.policy = "validated" if question == "cublasLtMatmulAlgoCheck" else "never"
    planner.plan(problem())
    (call,) = fake.calls(question)
    descriptor = call["descriptor"]
    assert descriptor["31"] == descriptor["32"] == 1  # A and B scale mode VEC16_UE4M3
    assert descriptor["17"] != 0 and descriptor["18"] != 0  # A and B scale pointers
    assert "19" not in descriptor and "20" not in descriptor  # none for C and D


def test_bias_is_described_with_type_and_a_pointer_of_the_promised_alignment(fake, planner):
    planner.plan(problem(bias="bf16", alignment=16))
    (call,) = fake.calls("cublasLtMatmulAlgoCheck")
    assert call["descriptor"]["7"] == 4  # CUBLASLT_EPILOGUE_BIAS
    assert call["descriptor"]["26"] == 14
    pointer = call["descriptor"]["8"]
    assert pointer % 16 == 0 and pointer % 32 != 0


def test_device_alpha_is_described(fake, planner):
    planner.plan(problem(alpha="device"))
    planner.plan(problem(alpha="host"))
    device, host = fake.calls("cublasLtMatmulAlgoCheck")
    assert device["descriptor"]["2"] == 1 and "2" not in host["descriptor"]


@pytest.mark.parametrize(
    "settings, reason",
    [
        (dict(init_status=NOT_SUPPORTED), "AlgoInit CUBLAS_STATUS_NOT_SUPPORTED"),
        (dict(set_status=INVALID_VALUE), "AlgoConfigSetAttribute tile=20 CUBLAS_STATUS_INVALID"),
        (dict(check_status=ARCH_MISMATCH), "AlgoCheck CUBLAS_STATUS_ARCH_MISMATCH"),
        (dict(check_status=NOT_SUPPORTED), "AlgoCheck CUBLAS_STATUS_NOT_SUPPORTED"),
        (dict(check_status=INVALID_VALUE), "AlgoCheck CUBLAS_STATUS_INVALID_VALUE"),
        (dict(check_status=99), "AlgoCheck cublasStatus_t 99"),
        (dict(check_state=NOT_SUPPORTED), "AlgoCheck state CUBLAS_STATUS_NOT_SUPPORTED"),
        (dict(check_state=-1), "AlgoCheck state CUBLAS_STATUS_NOT_INITIALIZED"),
        (dict(check_workspace=1), "needs 1 bytes of workspace, the limit is 0"),
    ],
)
def test_a_pin_that_is_refused_leaves_its_reason_and_the_next_rung(fake, planner, settings, reason):
    fake.configure(**settings)
    plan = planner.plan(problem())
    assert plan.rung == "cublaslt-heuristic"
    (given,) = reasons(plan, "cublaslt-pinned")
    assert given.startswith(reason)
    assert given.endswith(f"(m={M}, n={N}, k={K})")
    assert "id 70, tile 20 (128x128), stages " in given or "id 70" in given


def test_workspace_up_to_the_limit_is_accepted(fake, planner):
    fake.configure(check_workspace=4096)
    assert planner.plan(problem(workspace_limit=4095)).rung == "cublaslt-heuristic"
    plan = planner.plan(problem(workspace_limit=4096))
    assert (plan.rung, plan.workspace_bytes) == ("cublaslt-pinned", 4096)


@pytest.mark.parametrize("split_k", [2, 4, 8, 16])
def test_the_double_refuses_split_k_as_the_gb10_did(planner, split_k):
    answer = planner.check(problem(), lt.Algorithm(**dict(STUDIED, split_k=split_k)))
    assert (answer["ok"], answer["status"]) == (False, "CUBLAS_STATUS_NOT_SUPPORTED")


@pytest.mark.parametrize(
    "device, reason",
    [
        (lt.DeviceInfo(9, 0, 132), "pin is for compute capability 12.1, found 9.0"),
        (lt.DeviceInfo(12, 0, 48), "pin is for compute capability 12.1, found 12.0"),
        (lt.DeviceInfo(10, 0, 148), "pin is for compute capability 12.1, found 10.0"),
        (lt.DeviceInfo(13, 0, 48), "pin is for compute capability 12.1, found 13.0"),
    ],
)
def test_wrong_compute_capability_is_a_reason(fake, planner, device, reason):
    plan = planner.plan(problem(device=device))
    assert reasons(plan, "cublaslt-pinned") == [f"{reason} (m={M}, n={N}, k={K})"]
    assert fake.calls("cublasLtMatmulAlgoCheck") == []
    assert plan.rung == "cublaslt-heuristic"


# 48 multiprocessors: 6 x 8 tiles of 128x128 fill the chip once, one row of tiles less does not.
@pytest.mark.parametrize("m, n, fills", [(768, 1024, True), (641, 1024, True), (640, 1024, False),
                                         (768, 896, False), (1, 48 * 128, True)])  # fmt: skip
def test_studied_pin_is_only_for_grids_that_fill_the_chip(planner, m, n, fills):
    plan = planner.plan(problem(m, n, 512))
    assert plan.rung == ("cublaslt-pinned" if fills else "cublaslt-heuristic")
    if not fills:
        (reason,) = reasons(plan, "cublaslt-pinned")
        assert "128x128 tiles don't fill the chip: " in reason
        assert "for 48 multiprocessors" in reason


# ---- Policy and user pins -------------------------------------------------------------------------


def test_policy_always_tries_the_studied_pin_on_every_chip_with_fp4(fake, planner):
    planner.policy = "always"
    fake.configure(cc=100)
    assert planner.plan(problem(device=B200)).rung == "cublaslt-pinned"
    # The fill rule stands, and chips without FP4 stay out.
    assert "fill the chip" in reasons(planner.plan(problem(128, device=B200)), "cublaslt-pinned")[0]
    plan = planner.plan(problem(device=H200))
    assert "found 9.0" in reasons(plan, "cublaslt-pinned")[0]


def test_policy_never_asks_no_pin(fake, planner):
    planner.policy = "never"
    plan = planner.plan(problem())
    assert plan.rung == "cublaslt-heuristic"
    assert reasons(plan, "cublaslt-pinned")[0].startswith("pin policy is never")
    assert fake.calls("cublasLtMatmulAlgoInit") == []


def test_a_problem_may_skip_the_pins(fake, planner):
    plan = planner.plan(problem(skip_pins=True))
    assert plan.rung == "cublaslt-heuristic" and fake.calls("cublasLtMatmulAlgoInit") == []
    assert reasons(plan, "cublaslt-pinned")[0].startswith("the caller skips pins")
    assert planner.plan(problem()).rung == "cublaslt-pinned"


def test_a_changed_policy_makes_plans_anew(planner):
    assert planner.plan(problem()).rung == "cublaslt-pinned"
    planner.policy = "never"
    assert planner.plan(problem()).rung == "cublaslt-heuristic"


def test_unknown_policy_names_the_accepted_ones(planner):
    with pytest.raises(ValueError, match="validated, always or never, got 'sometimes'"):
        planner.policy = "sometimes"


@pytest.mark.parametrize("value, expected", [
    (None, "validated"), ("", "validated"), ("always", "always"), ("never", "never"),
    ("Always", "ValueError: NVFP4_PIN_POLICY must be validated, always or never, got 'Always'"),
])  # fmt: skip
def test_policy_comes_from_the_environment(fake, value, expected):
    environment = dict(os.environ, NVFP4_CUBLASLT_LIBRARY=fake.path)
    environment.pop("NVFP4_PIN_POLICY", None)
    if value is not None:
        environment["NVFP4_PIN_POLICY"] = value
    done = subprocess.run(
        [sys.executable, "-c",
         "from nvfp4_linear import _cublaslt; print(_cublaslt.planner().policy)"],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert expected in done.stdout + done.stderr


def test_user_pins_go_ahead_of_the_studied_one_newest_first(fake, planner):
    assert planner.plan(problem()).algorithm["tile"] == 20
    first = lt.Pin(lt.Algorithm(**dict(STUDIED, tile=23)), 12, 1, evidence="sweep 1")
    second = lt.Pin(lt.Algorithm(**dict(STUDIED, tile=24)), 12, 1, evidence="sweep 2")
    planner.pin(first)
    assert planner.plan(problem()).algorithm["tile"] == 23
    planner.pin(second)
    plan = planner.plan(problem())
    assert (plan.algorithm["tile"], plan.evidence) == (24, "sweep 2")
    assert planner.pins == [second, first, lt.studied_pin()]
    assert planner.unpin(second) and not planner.unpin(second)
    assert planner.plan(problem()).algorithm["tile"] == 23
    planner.reset()
    assert planner.pins == [lt.studied_pin()]
    assert planner.plan(problem()).algorithm["tile"] == 20


@pytest.mark.parametrize("row, matches", [
    (dict(), True),
    (dict(n=N, k=K), True),
    (dict(n=N + 8), False),
    (dict(k=K + 32), False),
    (dict(m_min=M, m_max=M), True),
    (dict(m_min=M + 1), False),
    (dict(m_max=M - 1), False),
    (dict(type="bf16"), False),
    (dict(sm_count=48), True),
    (dict(sm_count=20), "pin is for 20 multiprocessors, found 48"),
    (dict(version_min=130100, version_max=130100), True),
    (dict(version_min=130200), "pin is for cuBLASLt 13.2.0 to 13.99.99, found 13.1.0"),
    (dict(version_max=130099), "pin is for cuBLASLt 13.0.0 to 13.0.99, found 13.1.0"),
])  # fmt: skip
def test_a_pins_row_decides_where_it_applies(planner, row, matches):
    planner.pin(lt.Pin(lt.Algorithm(**dict(STUDIED, tile=23)), 12, 1, **row))
    plan = planner.plan(problem())
    assert plan.algorithm["tile"] == (23 if matches is True else 20)
    if isinstance(matches, str):
        assert matches in reasons(plan, "cublaslt-pinned")[0]


def test_a_problem_no_row_is_about_says_so(planner):
    plan = planner.plan(bf16())
    assert "none of 1 pins is for bf16 problems" in reasons(plan, "cublaslt-pinned")[0]


def test_a_pin_out_of_range_is_refused_at_once(planner):
    with pytest.raises(ValueError, match=r"pin: tile 635 is out of range: .* takes 0 to 634"):
        planner.pin(lt.Pin(lt.Algorithm(id=70, tile=635, stages=37), 12, 1))
    assert planner.pins == [lt.studied_pin()]


def test_pins_travel_as_text():
    pin = lt.Pin(
        lt.Algorithm(id=66, tile=23, stages=35, split_k=2, reduction=2, swizzle=1, custom=3,
                     inner=None, cluster=5),
        9, 0, type="bf16", sm_count=132, version_min=130100, version_max=130199, m_min=1, m_max=64,
        n=5376, k=14336, fills_chip=True, evidence="sweep of 2026, a = b",
    )  # fmt: skip
    assert lt.Pin.parse(str(pin)) == pin
    assert lt.Pin.parse(str(pin)).as_dict() == pin.as_dict()
    with pytest.raises(ValueError, match="unknown key 'tiles'"):
        lt.Pin.parse("tiles=20")
    with pytest.raises(ValueError, match="tile: expected an integer, got '128x128'"):
        lt.Pin.parse("tile=128x128")
    with pytest.raises(ValueError, match="type must be one of nvfp4, bf16, fp16, fp8_e4m3"):
        lt.Pin.parse("type=fp4")


# ---- The heuristic's rung -------------------------------------------------------------------------


def test_the_heuristic_is_told_workspace_and_alignment(fake, planner):
    planner.policy = "never"
    planner.plan(problem(workspace_limit=12345, alignment=32))
    (call,) = fake.calls("cublasLtMatmulAlgoGetHeuristic")
    assert call["preference"] == {"1": 12345, "5": 32, "6": 32, "7": 32, "8": 32}


def test_heuristic_queries_are_counted_and_a_plan_hit_makes_none(fake, planner):
    planner.policy = "never"
    for _ in range(3):
        planner.plan(problem())
    assert planner.heuristic_queries == len(fake.calls("cublasLtMatmulAlgoGetHeuristic")) == 1
    planner.plan(problem(m=M + 128))
    planner.heuristic(problem(), 4)
    assert planner.heuristic_queries == len(fake.calls("cublasLtMatmulAlgoGetHeuristic")) == 3
    planner.policy = "validated"  # plans are made anew, and a pin takes this one
    assert planner.plan(problem()).rung == "cublaslt-pinned"
    assert planner.heuristic_queries == 3


def test_the_heuristics_first_usable_answer_is_taken_with_all_nine_attributes(fake, planner):
    fake.configure(check_status=NOT_SUPPORTED)
    plan = planner.plan(problem(workspace_limit=1 << 26))
    assert plan.rung == "cublaslt-heuristic"
    assert plan.workspace_bytes == 4194304
    assert plan.algorithm == dict(
        id=70, tile=20, stages=37, split_k=-2, reduction=0, swizzle=0, custom=0, inner=0, cluster=0
    )


@pytest.mark.parametrize("settings, reason", [
    (dict(heuristic_answers=""), "heuristic returned 0 algorithms"),
    (dict(heuristic_status=NOT_SUPPORTED), "heuristic CUBLAS_STATUS_NOT_SUPPORTED"),
    (dict(heuristic_status=INTERNAL_ERROR), "heuristic CUBLAS_STATUS_INTERNAL_ERROR"),
    (dict(heuristic_state=NOT_SUPPORTED), "heuristic state CUBLAS_STATUS_NOT_SUPPORTED"),
])  # fmt: skip
def test_a_heuristic_that_refuses_ends_the_ladder_with_every_reason(
    fake, planner, settings, reason
):
    fake.configure(check_status=ARCH_MISMATCH, **settings)
    plan = planner.plan(problem())
    assert not plan.ok and plan.rung is None and plan.algorithm is None
    assert reasons(plan, "cublaslt-pinned")[0].startswith("AlgoCheck CUBLAS_STATUS_ARCH_MISMATCH")
    assert all(given.startswith(reason) for given in reasons(plan, "cublaslt-heuristic"))
    assert reasons(plan, "cublaslt-heuristic")
    for _, given in plan.refusals:
        assert given.endswith(f"(m={M}, n={N}, k={K})")


def test_on_hopper_both_rungs_refuse_nvfp4_as_the_real_library_does(fake, planner):
    fake.configure(cc=90)
    answer = planner.check(problem(device=H200), lt.Algorithm(**STUDIED))
    assert answer["status"] == "CUBLAS_STATUS_ARCH_MISMATCH"
    plan = planner.plan(problem(device=H200))
    assert not plan.ok
    assert "found 9.0" in reasons(plan, "cublaslt-pinned")[0]
    assert reasons(plan, "cublaslt-heuristic")[0].startswith(
        "heuristic CUBLAS_STATUS_NOT_SUPPORTED"
    )


# ---- Problems cuBLASLt must not be given ----------------------------------------------------------


@pytest.mark.parametrize("wrong, reason", [
    (dict(k=48), "k = 48 is not a multiple of 32"),
    (dict(n=12), "n = 12 is 24 bytes of bf16, not a multiple of 16"),
    (dict(n=10, out="fp32"), "n = 10 is 40 bytes of fp32, not a multiple of 16"),
    (dict(alignment=8), "16-byte boundaries, got 8"),
    (dict(lda=K + 16), f"lda = {K + 16} is not a multiple of 32"),
    (dict(ldb=K + 16), f"ldb = {K + 16} is not a multiple of 32"),
    (dict(ldd=N + 4), f"ldd = {N + 4} is {2 * N + 8} bytes of bf16, not a multiple of 16"),
    (dict(lda=K - 32), "leading dimensions must be at least k, k and n"),
    (dict(m=0), "m, n and k must be at least 1"),
    (dict(bias="fp32"), "bias must be bf16 for nvfp4 with output bf16, got fp32"),
    (dict(bias="bf16", out="fp16"), "bias must be fp16 for nvfp4 with output fp16, got bf16"),
    (dict(bias="fp32", out="fp32"), "bias must be bf16 for nvfp4 with output fp32, got fp32"),
    (dict(type="fp8_e4m3", k=24), "k = 24 is not a multiple of 16"),
    (dict(type="bf16", alignment=1), "1-byte boundaries, elements take 2"),
])  # fmt: skip
def test_a_malformed_problem_is_refused_by_us_with_its_numbers(fake, planner, wrong, reason):
    plan = planner.plan(problem(**wrong))
    assert not plan.ok
    for rung in ("cublaslt-pinned", "cublaslt-heuristic"):
        (given,) = reasons(plan, rung)
        assert reason in given and re.search(r"\(m=\d+, n=\d+, k=\d+\)$", given)
    assert fake.records() == []


@pytest.mark.parametrize("right", [
    dict(k=32), dict(n=8), dict(n=4, out="fp32"), dict(alignment=16), dict(m=1),
    dict(bias="bf16"), dict(bias="bf16", out="fp32"), dict(bias="fp16", out="fp16"),
    dict(type="bf16", k=17, n=3, alignment=2), dict(type="fp8_e4m3", k=16, n=8),
])  # fmt: skip
def test_the_smallest_well_formed_problems_are_asked_about(planner, right):
    assert planner.plan(problem(**right)).ok


# ---- Ids that would kill the process --------------------------------------------------------------


@pytest.mark.parametrize("attribute, value", [
    ("id", -1), ("tile", -1), ("tile", 635), ("tile", 10**6), ("stages", -1), ("stages", 29),
    ("stages", 30), ("stages", 39), ("split_k", 0), ("split_k", 10**6), ("reduction", -1),
    ("reduction", 3), ("reduction", 8), ("swizzle", -1), ("swizzle", 10**6), ("custom", -1),
    ("custom", 10**6), ("inner", -1), ("inner", 5), ("cluster", -1), ("cluster", 1),
    ("cluster", 52), ("cluster", 65536 + 3),
])  # fmt: skip
def test_out_of_range_attributes_never_reach_cublaslt(fake, planner, attribute, value):
    planner.plan(bf16())  # so that the handle is there
    fake.reset()
    answer = planner.check(problem(), lt.Algorithm(**dict(STUDIED, **{attribute: value})))
    assert not answer["ok"] and answer["plan"] is None
    assert answer["reason"].startswith(
        f"{attribute} {value} is out of range: cuBLASLt 13.1.0 takes"
    )
    assert fake.records() == []


@pytest.mark.parametrize("version, tile_end, stages_end", [
    (130000, 635, 38), (130100, 635, 39), (130600, 635, 39),
    (lt.HEADER_VERSION, lt.TILE_END, lt.STAGES_END),
    (lt.HEADER_VERSION + 100, lt.TILE_END, lt.STAGES_END),
])  # fmt: skip
def test_ranges_are_those_of_the_library_that_runs(version, tile_end, stages_end):
    if version == 130600 and version >= lt.HEADER_VERSION:
        pytest.skip("the header is no newer than 13.6.0")

    def ok(**attributes):
        return lt.out_of_range(lt.Algorithm(**dict(STUDIED, **attributes)), version) == ""

    assert ok(tile=tile_end - 1) and not ok(tile=tile_end)
    assert ok(stages=stages_end - 1) and not ok(stages=stages_end)


def test_the_double_dies_of_an_unknown_tile_as_the_real_library_does(fake):
    """What the range check is for: with the check told of a newer library, the process is lost."""
    code = f"""
import sys; sys.path.insert(0, {os.path.dirname(fake_cublaslt.__path__[0])!r})
import fake_cublaslt
from nvfp4_linear import _cublaslt as lt
fake = fake_cublaslt.Fake(); fake.configure(version=lt.HEADER_VERSION)
planner = lt.Planner(fake.path)
fake.configure(version=130100)
planner.check(lt.Problem("nvfp4", 128, 128, 128, lt.DeviceInfo(12, 1, 1)),
              lt.Algorithm(id=70, tile=lt.TILE_END - 1, stages=37))
"""
    if lt.TILE_END <= 635:
        pytest.skip(f"needs a header with tile ids above 634, found TILE_END {lt.TILE_END}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGFPE, done.stderr


# ---- Known wrong results --------------------------------------------------------------------------


@pytest.mark.parametrize("version, device, type, n, fault", [
    (130299, B300, "nvfp4", 72, True),
    (130300, B300, "nvfp4", 72, False),
    (130299, B300, "nvfp4", 128, False),
    (130299, B200, "nvfp4", 72, False),
    (130299, B300, "bf16", 72, False),
])  # fmt: skip
def test_b300_needs_n_in_64s_before_13_3(fake, version, device, type, n, fault):
    fake.configure(version=version, cc=103)
    plan = lt.Planner(fake.path).plan(problem(n=n, device=device, type=type))
    assert plan.ok != fault
    if fault:
        assert len(plan.refusals) == 2
        for _, reason in plan.refusals:
            assert "known fault: NVFP4 on compute capability 10.3 with n % 64 != 0" in reason


@pytest.mark.parametrize("version, device, stages, type, fault", [
    (130500, B300, 38, "nvfp4", False),
    (130501, B300, 38, "nvfp4", True),
    (130601, B300, 38, "nvfp4", True),
    (130602, B300, 38, "nvfp4", False),
    (130700, B300, 38, "nvfp4", True),
    (130800, B300, 38, "nvfp4", False),
    (130601, lt.DeviceInfo(10, 7, 148), 38, "nvfp4", True),
    (130601, B200, 38, "nvfp4", False),
    (130601, B300, 37, "nvfp4", False),
    (130601, B300, 38, "fp8_e4m3", False),
])  # fmt: skip
def test_algorithm_66_with_768_stages_is_known_wrong(version, device, stages, type, fault):
    algorithm = lt.Algorithm(id=66, tile=20, stages=stages)
    found = lt.known_fault(problem(device=device, type=type), algorithm, version)
    assert found.startswith("known fault: algorithm 66 with stages 768xAUTO") == fault
    other = lt.Algorithm(id=70, tile=20, stages=stages)
    assert lt.known_fault(problem(device=device, type=type), other, version) == ""


# Three slices of 75 stages of 64 each, and one element over.
UNEVEN_K = 3 * 75 * 64 + 1


@pytest.mark.parametrize("version, device, split_k, k, stages, fault", [
    (130799, H200, 3, UNEVEN_K, 35, True),
    (130799, B200, 3, UNEVEN_K, 35, True),
    (130799, lt.DeviceInfo(11, 0, 20), 3, UNEVEN_K, 35, True),
    (130799, H200, 3, UNEVEN_K, 0, True),  # stages that say no size
    (130800, H200, 3, UNEVEN_K, 35, False),
    (130799, GB10, 3, UNEVEN_K, 35, False),
    (130799, H200, 3, UNEVEN_K - 1, 35, False),  # the slices are even
    (130799, H200, 3, UNEVEN_K + 3, 35, False),  # not whole stages
    (130799, H200, 3, UNEVEN_K, 36, False),  # nor of 128
    (130799, H200, 1, UNEVEN_K, 35, False),
])  # fmt: skip
def test_algorithm_66_with_uneven_split_k_is_known_wrong(
    version, device, split_k, k, stages, fault
):
    asked = bf16(k=k, device=device)
    algorithm = lt.Algorithm(id=66, tile=20, stages=stages, split_k=split_k)
    found = lt.known_fault(asked, algorithm, version)
    assert found.startswith("known fault: algorithm 66 with a split-K") == fault
    other = lt.Algorithm(id=67, tile=20, stages=stages, split_k=split_k)
    assert lt.known_fault(asked, other, version) == ""


def test_faulty_answers_of_the_heuristic_are_passed_over(fake, planner):
    fake.configure(heuristic_answers="66:23:35:3:0 66:24:35:1:0")
    plan = planner.plan(bf16(k=UNEVEN_K))
    assert (plan.rung, plan.algorithm["tile"]) == ("cublaslt-heuristic", 24)
    assert "known fault: algorithm 66 with a split-K" in reasons(plan, "cublaslt-heuristic")[0]


def test_faulty_pins_are_refused(planner):
    planner.pin(lt.Pin(lt.Algorithm(id=66, tile=23, stages=35, split_k=3), 9, 0, type="bf16"))
    assert planner.plan(bf16(k=UNEVEN_K - 1)).rung == "cublaslt-pinned"
    plan = planner.plan(bf16(k=UNEVEN_K))
    assert plan.rung == "cublaslt-heuristic"
    assert "known fault" in reasons(plan, "cublaslt-pinned")[0]


@pytest.mark.parametrize(
    "version, breaks", [(130500, False), (130501, True), (130600, True), (130601, False)]
)
def test_versions_whose_heuristic_breaks_a_graph_capture(version, breaks):
    assert lt.heuristic_breaks_capture(version) == breaks


# ---- The cache ------------------------------------------------------------------------------------


def test_a_hit_asks_cublaslt_nothing(fake, planner):
    assert planner.cached(problem()) is None
    first = planner.plan(problem())
    before = fake.records()
    for _ in range(3):
        assert planner.plan(problem()) is first
        assert planner.cached(problem()) is first
    assert fake.records() == before


def test_a_refusal_is_remembered_too(fake, planner):
    fake.configure(check_status=NOT_SUPPORTED, heuristic_status=NOT_SUPPORTED)
    first = planner.plan(problem())
    count = asked(fake)
    assert planner.plan(problem()) is first and asked(fake) == count
    planner.clear()
    planner.plan(problem())
    assert asked(fake) == 2 * count


@pytest.mark.parametrize("change", [
    dict(m=M + 1), dict(n=N - 8, ldd=N), dict(k=K - 32, lda=K, ldb=K), dict(lda=K + 32), dict(ldb=K + 32),
    dict(ldd=N + 8), dict(out="fp16"), dict(out="fp32"), dict(bias="bf16"), dict(alpha="device"),
    dict(alignment=16), dict(workspace_limit=1 << 20), dict(type="bf16"), dict(type="fp16"),
    dict(device=(12, 1, 48, 1)), dict(device=(12, 0, 48)), dict(device=(11, 1, 48)),
    dict(device=(12, 1, 47)),
], ids=lambda change: next(f"{key}={value}" for key, value in change.items()))  # fmt: skip
def test_everything_a_plan_depends_on_is_in_its_key(fake, planner, change):
    if "device" in change:
        change = {"device": lt.DeviceInfo(*change["device"])}
    first = planner.plan(problem())
    count = asked(fake)
    other = planner.plan(problem(**change))
    assert other is not first and asked(fake) > count
    assert planner.plan(problem()) is first


def test_bias_types_are_told_apart(planner):
    bf16_bias = planner.plan(problem(out="fp32", bias="bf16"))
    assert bf16_bias.ok
    assert not planner.plan(problem(out="fp32", bias="fp16")).ok


def test_each_device_has_a_handle_of_its_own_made_on_first_use(fake, planner):
    assert fake.calls("cublasLtCreate") == []
    for index in (0, 1, 0, 1):
        planner.plan(problem(m=M + index, device=lt.DeviceInfo(12, 1, 48, index=index)))
    assert len(fake.calls("cublasLtCreate")) == 2
    first, second = fake.calls("cublasLtMatmulAlgoCheck")
    assert first["handle"] != second["handle"]


def test_a_handle_that_fails_is_asked_for_again(fake, planner):
    fake.configure(create_status=NOT_INITIALIZED)
    plan = planner.plan(problem())
    for rung in ("cublaslt-pinned", "cublaslt-heuristic"):
        assert reasons(plan, rung)[0].startswith("cublasLtCreate CUBLAS_STATUS_NOT_INITIALIZED")
    fake.configure(create_status=0)
    assert planner.plan(problem()).rung == "cublaslt-pinned"


def test_nothing_is_leaked(fake):
    planner = lt.Planner(fake.path)
    planner.plan(problem())  # whatever the library keeps for itself
    before = fake.live()
    for m in range(M + 1, M + 21):
        planner.plan(problem(m))
    fake.configure(check_status=NOT_SUPPORTED, heuristic_status=NOT_SUPPORTED)
    planner.plan(problem(M + 100))
    assert fake.live() == before + 20 * 3  # three layouts a plan, no descriptor, no preference
    planner.clear()
    assert fake.live() == before - 3
    del planner
    assert len(fake.calls("cublasLtDestroy")) == 1


# ---- Retirement -----------------------------------------------------------------------------------


def test_a_retired_plan_is_never_tried_again(fake, planner):
    fake.configure(heuristic_answers="70:20:36:1:0 66:23:37:1:0")
    seen = []
    while (plan := planner.plan(problem())).ok:
        assert plan.algorithm not in seen
        seen.append(plan.algorithm)
        planner.retire(problem(), plan, f"launch {len(seen)} refused")
    assert [(a["id"], a["tile"], a["stages"]) for a in seen] == [
        (70, 20, 37), (70, 20, 36), (66, 23, 37),
    ]  # fmt: skip
    assert reasons(plan, "cublaslt-pinned")[0].startswith("retired: launch 1 refused")
    assert [reason[:25] for reason in reasons(plan, "cublaslt-heuristic")] == [
        "retired: launch 2 refused", "retired: launch 3 refused",
    ]  # fmt: skip

    # It stays so when pins or policy change, and for this problem only.
    planner.pin(lt.Pin(lt.Algorithm(**STUDIED), 12, 1))
    assert not planner.plan(problem()).ok
    assert planner.plan(problem(M + 1)).rung == "cublaslt-pinned"
    planner.clear()
    assert planner.plan(problem()).rung == "cublaslt-pinned"


def test_a_pin_retired_is_not_taken_from_the_heuristic_either(fake, planner):
    fake.configure(heuristic_answers="70:20:37:1:0 66:23:37:1:0")
    planner.retire(problem(), planner.plan(problem()), "refused")
    assert planner.plan(problem()).algorithm["id"] == 66


# ---- Threads --------------------------------------------------------------------------------------


def test_threads_that_meet_a_new_problem_ask_once(fake, planner):
    barrier = threading.Barrier(8)
    plans = []

    def ask():
        barrier.wait()
        plans.append(planner.plan(problem()))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(plans) == 8 and len({id(plan) for plan in plans}) == 1
    assert len(fake.calls("cublasLtMatmulAlgoCheck")) == 1


# ---- What explain reads ---------------------------------------------------------------------------


def test_json_of_a_plan(fake, planner):
    fake.configure(check_status=ARCH_MISMATCH, inner=4, cluster=3)
    asked_for = problem(bias="bf16", workspace_limit=1 << 26)
    plan = planner.plan(asked_for)
    read = json.loads(plan.to_json(asked_for))
    assert read["ok"] is True and read["rung"] == plan.rung == "cublaslt-heuristic"
    assert read["algorithm"] == dict(
        plan.algorithm, tile_name="128x128", stages_name="256xAUTO", inner_name="mma16816",
        cluster_name="2x1x1",
    )  # fmt: skip
    assert read["workspace_bytes"] == 4194304
    assert [(r["rung"], r["reason"]) for r in read["refusals"]] == plan.refusals
    assert read["problem"] == asked_for.as_dict()
    assert read["waves"] == 0.5


def test_json_of_a_refusal_escapes_what_it_quotes(fake, planner):
    plan = planner.plan(problem())
    planner.retire(problem(), plan, 'said "no"\n\tand \\ more')
    fake.configure(heuristic_status=EXECUTION_FAILED)
    read = json.loads(planner.plan(problem()).to_json(problem()))
    assert read["ok"] is False and read["rung"] is None and read["algorithm"] is None
    assert 'said "no"\n\tand \\ more' in read["refusals"][0]["reason"]
