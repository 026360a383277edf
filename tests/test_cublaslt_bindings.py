"""The promise: through `_cublaslt` every knob of cuBLASLt can be read and set on raw pointers, and
a launch multiplies what it was given: D (m, n) = out(alpha * A (m, k) @ B (n, k).T + bias).

Runs on the test double, which computes on host memory. Values are small integers times powers of
two, so that FP32 sums are exact and results are compared by bytes.
"""

import threading

import fake_cublaslt
import numpy as np
import pytest
from fake_cublaslt import EXECUTION_FAILED, NOT_SUPPORTED

from nvfp4_linear import _cublaslt as lt

GB10 = lt.DeviceInfo(12, 1, 1)  # one multiprocessor: any grid fills it
STUDIED = dict(id=70, tile=20, stages=37)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# UE4M3 codes of 2^-2 … 2^2
SCALES = {0x28: 0.25, 0x30: 0.5, 0x38: 1.0, 0x40: 2.0, 0x48: 4.0}


@pytest.fixture
def fake():
    return fake_cublaslt.Fake()


@pytest.fixture
def planner(fake):
    return lt.Planner(fake.path)


def aligned(array, alignment=256, offset=0):
    """A copy of `array` on an `alignment`-byte boundary, plus `offset` bytes."""
    raw = np.full(array.nbytes + 2 * alignment, 0x7F, np.uint8)
    start = -raw.ctypes.data % alignment + offset
    view = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def address(array):
    return 0 if array is None else array.ctypes.data


def to_bf16(values):
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


ENCODE = {"bf16": to_bf16, "fp16": lambda v: v.astype(np.float16).view(np.uint16),
          "fp32": lambda v: v.astype(np.float32).view(np.uint32)}  # fmt: skip


class Packed:
    """A random NVFP4 matrix: its bytes as cuBLASLt reads them, and its values."""

    def __init__(self, rng, rows, k):
        codes = rng.integers(0, 16, (rows, k), np.uint8)
        self.data = aligned(codes[:, ::2] | codes[:, 1::2] << 4)
        scales = rng.choice(list(SCALES), (rows, k // 16)).astype(np.uint8)
        columns = -(-(k // 16) // 4)
        self.scale = aligned(np.zeros(-(-rows // 128) * columns * 512, np.uint8))
        for r in range(rows):
            for c in range(k // 16):
                tile = (r // 128) * columns + c // 4
                self.scale[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scales[r, c]
        decoded = np.vectorize(SCALES.get)(scales).astype(np.float32)
        self.values = E2M1[codes] * np.repeat(decoded, 16, axis=1)


def launch(planner, problem, a, b, d, *, bias=None, **keywords):
    plan = planner.plan(problem)
    assert plan.ok, plan.refusals
    operands = lt.Operands(
        a=address(a.data), b=address(b.data), d=address(d), a_scale=address(a.scale),
        b_scale=address(b.scale), bias=address(bias), **keywords,
    )  # fmt: skip
    plan.run(operands)
    return plan


@pytest.mark.parametrize("m, n, k", [(1, 8, 32), (5, 24, 96), (129, 136, 64), (130, 8, 1056)])
@pytest.mark.parametrize("out, bias", [("bf16", None), ("bf16", "bf16"), ("fp16", "fp16"),
                                       ("fp32", None), ("fp32", "bf16")])  # fmt: skip
def test_nvfp4_matmul(planner, m, n, k, out, bias):
    rng = np.random.default_rng(m * n * k)
    a, b = Packed(rng, m, k), Packed(rng, n, k)
    bias_values = rng.integers(-8, 9, n).astype(np.float32)
    bias_bytes = aligned(ENCODE[bias](bias_values)) if bias else None
    d = aligned(np.full((m, n), 0x7F7F, np.uint32 if out == "fp32" else np.uint16))

    problem = lt.Problem("nvfp4", m, n, k, GB10, out=out, bias=bias)
    plan = launch(planner, problem, a, b, d, bias=bias_bytes, alpha=0.125)

    exact = np.float32(0.125) * (a.values.astype(np.float64) @ b.values.T).astype(np.float32)
    expected = ENCODE[out](exact + bias_values if bias else exact)
    np.testing.assert_array_equal(d, expected)
    assert (plan.rung, plan.workspace_bytes) == ("cublaslt-pinned", 0)


def test_output_rows_may_be_padded(planner):
    rng = np.random.default_rng(0)
    a, b = Packed(rng, 3, 64), Packed(rng, 8, 64)
    d = aligned(np.full((3, 16), 0x7F7F, np.uint16))
    launch(planner, lt.Problem("nvfp4", 3, 8, 64, GB10, ldd=16), a, b, d)
    np.testing.assert_array_equal(d[:, :8], to_bf16(a.values @ b.values.T))
    assert (d[:, 8:] == 0x7F7F).all()


@pytest.mark.parametrize("type", ["bf16", "fp16", "fp8_e4m3"])
def test_dense_matmul(planner, type):
    rng = np.random.default_rng(1)
    m, n, k = 7, 16, 32
    values = [rng.integers(-4, 5, (rows, k)).astype(np.float32) for rows in (m, n)]
    fp8 = {0: 0, 1: 0x38, 2: 0x40, 3: 0x44, 4: 0x48}
    encode = dict(ENCODE, fp8_e4m3=lambda v: np.vectorize(
        lambda x: fp8[abs(int(x))] | (0x80 if x < 0 else 0))(v).astype(np.uint8))[type]  # fmt: skip
    a, b = (aligned(encode(v)) for v in values)
    d = aligned(np.full((m, n), 0x7F7F7F7F, np.uint32))
    problem = lt.Problem(type, m, n, k, GB10, out="fp32")
    planner.plan(problem).run(lt.Operands(a=address(a), b=address(b), d=address(d), alpha=2.0))
    np.testing.assert_array_equal(d, ENCODE["fp32"](2 * (values[0] @ values[1].T)))


def test_scales_of_fp8_swap_sides_with_their_operands(fake, planner):
    a = aligned(np.full((1, 16), 0x38, np.uint8))  # ones
    b = aligned(np.full((8, 16), 0x38, np.uint8))
    a_scale, b_scale = (aligned(np.array([s], np.float32)) for s in (2.0, 8.0))
    d = aligned(np.zeros((1, 8), np.float32))
    planner.plan(lt.Problem("fp8_e4m3", 1, 8, 16, GB10, out="fp32")).run(
        lt.Operands(a=address(a), b=address(b), d=address(d), a_scale=address(a_scale),
                    b_scale=address(b_scale))
    )  # fmt: skip
    assert (d == 16 * 2 * 8).all()
    (call,) = fake.calls("cublasLtMatmul")
    assert call["descriptor"]["17"] == address(b_scale)
    assert call["descriptor"]["18"] == address(a_scale)


def test_a_launch_hands_over_exactly_what_it_was_given(fake, planner):
    rng = np.random.default_rng(2)
    a, b = Packed(rng, 4, 64), Packed(rng, 8, 64)
    d = aligned(np.zeros((4, 8), np.uint16))
    bias = aligned(np.zeros(8, np.uint16))
    workspace = aligned(np.zeros(4096, np.uint8))
    alpha, beta = aligned(np.array([3.0], np.float32)), aligned(np.zeros(1, np.float32))
    fake.configure(check_workspace=1024)
    problem = lt.Problem("nvfp4", 4, 8, 64, GB10, bias="bf16", alpha="device",
                         workspace_limit=4096)  # fmt: skip
    launch(planner, problem, a, b, d, bias=bias, alpha_pointer=address(alpha),
           beta_pointer=address(beta), workspace=address(workspace), workspace_bytes=4096,
           stream=0x1234)  # fmt: skip
    (call,) = fake.calls("cublasLtMatmul")
    assert call["a"] == address(b.data) and call["b"] == address(a.data)  # sides swapped
    assert call["descriptor"]["17"] == address(b.scale)  # and scales with them
    assert call["descriptor"]["18"] == address(a.scale)
    assert call["descriptor"]["8"] == address(bias)
    assert (call["alpha"], call["beta"]) == (address(alpha), address(beta))
    assert (call["workspace"], call["workspace_bytes"]) == (address(workspace), 4096)
    assert (call["d"], call["stream"], call["c_is_d"]) == (address(d), 0x1234, True)
    (check,) = fake.calls("cublasLtMatmulAlgoCheck")
    assert call["algo"] == check["algo"]
    assert call["a_layout"] == check["a"] and call["b_layout"] == check["b"]
    np.testing.assert_array_equal(d, to_bf16(3 * (a.values @ b.values.T)))


def test_a_warm_launch_asks_nothing(fake, planner):
    rng = np.random.default_rng(3)
    a, b = Packed(rng, 4, 64), Packed(rng, 8, 64)
    d = aligned(np.zeros((4, 8), np.uint16))
    problem = lt.Problem("nvfp4", 4, 8, 64, GB10)
    launch(planner, problem, a, b, d)
    before = len(fake.records())
    launch(planner, problem, a, b, d)
    assert [record["call"] for record in fake.records()[before:]] == ["cublasLtMatmul"]


@pytest.mark.parametrize("change, message", [
    (dict(a=0), "a, b, d, alpha and beta must not be null"),
    (dict(d=0), "a, b, d, alpha and beta must not be null"),
    (dict(a_scale=0), "NVFP4 needs both block scale pointers, got null"),
    (dict(b_scale=0), "NVFP4 needs both block scale pointers, got null"),
    (dict(bias=0), "the plan has a bias, got null"),
    (dict(a=8), "the plan is for pointers on 16-byte boundaries, got 8"),
    (dict(b_scale=8), "the plan is for pointers on 16-byte boundaries, got 8"),
    (dict(bias=2), "the plan is for pointers on 16-byte boundaries, got 2"),
    (dict(workspace_bytes=1023), "the plan needs 1024 bytes of workspace, got 1023"),
    (dict(workspace=0), "the plan needs 1024 bytes of workspace, got 1024"),
    (dict(workspace=16), "workspace must be on a 256-byte boundary"),
    (dict(alpha_pointer=4096), "the plan takes alpha on the host, got alpha_pointer"),
])  # fmt: skip
def test_operands_that_do_not_fit_the_plan_never_reach_cublaslt(fake, planner, change, message):
    fake.configure(check_workspace=1024)
    rng = np.random.default_rng(4)
    a, b = Packed(rng, 4, 64), Packed(rng, 8, 64)
    d, bias = aligned(np.zeros((4, 8), np.uint16)), aligned(np.zeros(8, np.uint16))
    workspace = aligned(np.zeros(2048, np.uint8))
    addresses = dict(a=address(a.data), b=address(b.data), d=address(d), a_scale=address(a.scale),
                     b_scale=address(b.scale), bias=address(bias), workspace=address(workspace),
                     workspace_bytes=1024)  # fmt: skip
    plan = planner.plan(
        lt.Problem("nvfp4", 4, 8, 64, GB10, bias="bf16", alignment=16, workspace_limit=1024)
    )
    plan.run(lt.Operands(**addresses))
    fake.configure(matmul_status=EXECUTION_FAILED)  # would show
    changed = dict(addresses)
    for key, value in change.items():  # small numbers are offsets, 0 is null
        shift = 0 < value < 256 and not key.endswith("bytes")
        changed[key] = addresses[key] + value if shift else value
    with pytest.raises(ValueError) as error:
        plan.run(lt.Operands(**changed))
    assert message in str(error.value)
    assert len(fake.calls("cublasLtMatmul")) == 1


def test_unfit_operands_retire_no_plan(planner):
    problem = lt.Problem("nvfp4", 4, 8, 64, GB10)
    before = planner.plan(problem)
    with pytest.raises(ValueError, match="must not be null"):
        planner.matmul(problem, lt.Operands(a=0, b=0, d=0))
    assert planner.plan(problem) is before


def test_a_refused_plan_cannot_be_run(fake, planner):
    fake.configure(check_status=NOT_SUPPORTED, heuristic_status=NOT_SUPPORTED)
    plan = planner.plan(lt.Problem("nvfp4", 4, 8, 64, GB10))
    with pytest.raises(
        ValueError, match="no plan to run: cublaslt-pinned: AlgoCheck CUBLAS_STATUS"
    ):
        plan.run(lt.Operands(a=256, b=256, d=256))


def test_a_refused_launch_says_status_algorithm_and_shape(fake, planner):
    fake.configure(matmul_status=EXECUTION_FAILED)
    rng = np.random.default_rng(5)
    a, b = Packed(rng, 4, 64), Packed(rng, 8, 64)
    with pytest.raises(RuntimeError) as error:
        launch(planner, lt.Problem("nvfp4", 4, 8, 64, GB10), a, b, aligned(np.zeros(32, np.uint16)))
    assert str(error.value) == (
        "cublasLtMatmul CUBLAS_STATUS_EXECUTION_FAILED for id 70, tile 20 (128x128), "
        "stages 37 (256xAUTO), split-K 1, reduction 0, swizzle 0, custom 0, inner 0 (undefined), "
        "cluster 0 (auto) (m=4, n=8, k=64)"
    )


def test_matmul_goes_down_the_ladder_when_launches_are_refused(fake, planner):
    fake.configure(matmul_refuses_id=70)  # the pin and the heuristic's first two
    rng = np.random.default_rng(6)
    a, b = Packed(rng, 4, 64), Packed(rng, 8, 64)
    d = aligned(np.zeros((4, 8), np.uint16))
    problem = lt.Problem("nvfp4", 4, 8, 64, GB10, workspace_limit=1 << 23)
    workspace = aligned(np.zeros(1 << 23, np.uint8))
    operands = lt.Operands(a=address(a.data), b=address(b.data), d=address(d),
                           a_scale=address(a.scale), b_scale=address(b.scale),
                           workspace=address(workspace), workspace_bytes=1 << 23)  # fmt: skip
    plan = planner.matmul(problem, operands)
    assert (plan.rung, plan.algorithm["id"]) == ("cublaslt-heuristic", 66)
    retired = [reason for _, reason in plan.refusals]
    assert len(retired) == 3
    for reason in retired:
        assert reason.startswith("retired: cublasLtMatmul CUBLAS_STATUS_NOT_SUPPORTED for id 70")
    assert [call["algo"][0] for call in fake.calls("cublasLtMatmul")] == [70, 70, 70, 66]
    np.testing.assert_array_equal(d, to_bf16(a.values @ b.values.T))
    # Never tried again.
    planner.matmul(problem, operands)
    assert [call["algo"][0] for call in fake.calls("cublasLtMatmul")] == [70, 70, 70, 66, 66]

    fake.configure(matmul_status=NOT_SUPPORTED)
    with pytest.raises(RuntimeError) as error:
        planner.matmul(problem, operands)
    for rung in ("cublaslt-pinned: retired", "; cublaslt-heuristic: retired", "for id 66"):
        assert rung in str(error.value)


def test_threads_share_a_plan_and_keep_their_own_scales(fake, planner):
    """A descriptor shared by launches in flight would mix up their scale pointers."""
    m, n, k, rounds = 4, 8, 64, 50
    problem = lt.Problem("nvfp4", m, n, k, GB10)
    plan = planner.plan(problem)
    wrong = []

    def work(seed):
        rng = np.random.default_rng(seed)
        a, b = Packed(rng, m, k), Packed(rng, n, k)
        expected = to_bf16(a.values @ b.values.T)
        d = aligned(np.zeros((m, n), np.uint16))
        operands = lt.Operands(a=address(a.data), b=address(b.data), d=address(d),
                               a_scale=address(a.scale), b_scale=address(b.scale))  # fmt: skip
        for _ in range(rounds):
            d[...] = 0x7F7F
            plan.run(operands)
            if (d != expected).any():
                wrong.append(seed)
                return

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# ---- The lab's questions --------------------------------------------------------------------------


def test_every_attribute_can_be_set_and_is_read_back(planner):
    problem = lt.Problem("nvfp4", 128, 128, 128, GB10)
    asked = dict(id=66, tile=23, stages=36, split_k=3, reduction=2, swizzle=1, custom=7, inner=2,
                 cluster=5)  # fmt: skip
    answer = planner.check(problem, lt.Algorithm(**asked))
    assert answer["ok"] and answer["status"] == "CUBLAS_STATUS_SUCCESS" and answer["reason"] == ""
    assert answer["algorithm"] == asked
    assert answer["plan"].rung == "cublaslt-explicit"
    algorithm = lt.Algorithm(id=0, tile=0, stages=0)
    for name, value in asked.items():
        setattr(algorithm, name, value)
    assert algorithm == lt.Algorithm(**asked) and algorithm.as_dict() == asked
    assert "tile 23 (128x256)" in repr(algorithm) and "cluster 5 (1x2x1)" in repr(algorithm)


def test_a_checked_algorithm_can_be_run(fake, planner):
    rng = np.random.default_rng(7)
    a, b = Packed(rng, 4, 64), Packed(rng, 8, 64)
    d = aligned(np.zeros((4, 8), np.uint16))
    answer = planner.check(lt.Problem("nvfp4", 4, 8, 64, GB10), lt.Algorithm(**STUDIED, custom=3))
    answer["plan"].run(lt.Operands(a=address(a.data), b=address(b.data), d=address(d),
                                   a_scale=address(a.scale), b_scale=address(b.scale)))  # fmt: skip
    assert fake.calls("cublasLtMatmul")[0]["algo"][5] == 3
    np.testing.assert_array_equal(d, to_bf16(a.values @ b.values.T))


def test_heuristic_answers_are_listed_best_first_with_their_status(fake, planner):
    problem = lt.Problem("nvfp4", 128, 128, 128, GB10, workspace_limit=1 << 23)
    asked = planner.heuristic(problem, 8)
    assert asked["reason"] == ""
    assert [(x["algorithm"]["split_k"], x["workspace_bytes"]) for x in asked["answers"]] == [
        (-2, 4194304), (1, 0), (1, 0),
    ]  # fmt: skip
    assert all(x["ok"] and x["status"] == "CUBLAS_STATUS_SUCCESS" for x in asked["answers"])
    assert len(planner.heuristic(problem, 2)["answers"]) == 2
    fake.configure(heuristic_status=NOT_SUPPORTED)
    assert planner.heuristic(problem) == {
        "reason": "heuristic CUBLAS_STATUS_NOT_SUPPORTED", "answers": [],
    }  # fmt: skip
    with pytest.raises(ValueError, match="count must be at least 1"):
        planner.heuristic(problem, 0)


def test_a_heuristic_answer_can_be_asked_for_again_by_its_attributes(planner):
    problem = lt.Problem("nvfp4", 128, 128, 128, GB10, workspace_limit=1 << 23)
    for answer in planner.heuristic(problem)["answers"]:
        again = planner.check(problem, lt.Algorithm(**answer["algorithm"]))
        assert again["ok"] and again["algorithm"] == answer["algorithm"]


def test_algorithm_ids_and_capabilities(planner):
    problem = lt.Problem("nvfp4", 128, 128, 128, GB10)
    assert planner.algorithm_ids(problem) == {"reason": "", "ids": [66, 70, 71]}
    asked = planner.capabilities(problem, 70)
    assert asked["reason"] == ""
    assert asked["values"]["tile_ids"] == [] and asked["values"]["stages_ids"] == []
    assert asked["values"]["custom_max"] == [0]
    refused = planner.capabilities(problem, 9999)
    assert refused == {"reason": "AlgoInit CUBLAS_STATUS_INVALID_VALUE", "values": {}}


def test_problems_and_pins_survive_a_trip_through_dicts():
    device = lt.DeviceInfo(9, 0, 132, index=3)
    problem = lt.Problem("bf16", 5, 24, 96, device, lda=104, ldb=112, ldd=32, out="fp32",
                         bias="fp32", alpha="device", alignment=16, workspace_limit=7,
                         skip_pins=True)  # fmt: skip
    description = problem.as_dict()
    again = dict(description, device=lt.DeviceInfo(**description["device"]))
    assert lt.Problem(**again).as_dict() == description
    pin = lt.Pin(lt.Algorithm(**STUDIED), 9, 0, type="bf16", evidence="here")
    description = pin.as_dict()
    again = dict(description, algorithm=lt.Algorithm(**description["algorithm"]))
    assert lt.Pin(**again) == pin


@pytest.mark.parametrize("change, message", [
    (dict(type="fp4"), "type must be one of nvfp4, bf16, fp16, fp8_e4m3, got 'fp4'"),
    (dict(out="bfloat16"), "out must be one of bf16, fp16, fp32, got 'bfloat16'"),
    (dict(bias="int8"), "bias must be one of bf16, fp16, fp32, got 'int8'"),
    (dict(alpha="gpu"), "alpha must be one of host, device, got 'gpu'"),
    (dict(alignment=24), "alignment must be a power of two up to 256, got 24"),
    (dict(alignment=512), "alignment must be a power of two up to 256, got 512"),
])  # fmt: skip
def test_a_problem_of_unknown_words_is_a_value_error(change, message):
    words = {"type": "nvfp4", "m": 1, "n": 8, "k": 32, "device": GB10, **change}
    with pytest.raises(ValueError, match=message):
        lt.Problem(**words)


def test_a_planner_says_which_library_it_drives(fake, planner):
    assert planner.library == {
        "version": 130100, "version_text": "13.1.0", "path": fake.path, "unavailable": "",
        "header_version": lt.HEADER_VERSION,
    }  # fmt: skip
