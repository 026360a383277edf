"""The promise, on the real cuBLASLt and a GPU: pins are accepted and refused by its own word, the
ladder ends where it should, and pinned and heuristic plans without split-K give the same bytes.
"""

import pytest

from nvfp4_linear import _cublaslt as lt

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA GPU, found none that torch can use"
    ),
]

STUDIED = dict(id=70, tile=20, stages=37, split_k=1, reduction=0, swizzle=0, custom=0)
WORKSPACE = 32 << 20
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def device():
    properties = torch.cuda.get_device_properties(0)
    return lt.DeviceInfo(properties.major, properties.minor, properties.multi_processor_count)


@pytest.fixture
def planner():
    torch.cuda.init()
    planner = lt.Planner()
    if planner.library["unavailable"]:
        pytest.skip(f"needs cuBLASLt: {planner.library['unavailable']}")
    return planner


def problem(m=2048, n=5376, k=14336, type="bf16", **keywords):
    keywords.setdefault("workspace_limit", WORKSPACE)
    return lt.Problem(type, m, n, k, device(), **keywords)


class Matmul:
    """Operands of one problem on the GPU; the output is poisoned before every run."""

    def __init__(self, problem, seed=0):
        p = problem.as_dict()
        generator = torch.Generator("cuda").manual_seed(seed)

        def random(*shape):
            return torch.randn(*shape, generator=generator, device="cuda").to(DTYPES[p["type"]])

        self.a, self.b = random(p["m"], p["k"]), random(p["n"], p["k"])
        self.bias = random(p["n"]) if p["bias"] else None
        self.d = torch.empty(p["m"], p["n"], dtype=DTYPES[p["out"]], device="cuda")
        self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
        self.alpha = torch.tensor([0.5], device="cuda")
        self.zero = torch.zeros(1, device="cuda")
        self.on_device = p["alpha"] == "device"

    def run(self, plan):
        self.d.view(torch.uint8).fill_(0x7F)
        pointers = dict(alpha=0.5)
        if self.on_device:
            pointers = dict(alpha_pointer=self.alpha.data_ptr(), beta_pointer=self.zero.data_ptr())
        plan.run(
            lt.Operands(
                a=self.a.data_ptr(),
                b=self.b.data_ptr(),
                d=self.d.data_ptr(),
                bias=self.bias.data_ptr() if self.bias is not None else 0,
                workspace=self.workspace.data_ptr(),
                workspace_bytes=WORKSPACE,
                stream=torch.cuda.current_stream().cuda_stream,
                **pointers,
            )
        )
        torch.cuda.synchronize()
        return self.d.clone()

    def reference(self):
        exact = 0.5 * (self.a.double() @ self.b.double().T)
        return exact + self.bias.double() if self.bias is not None else exact


def assert_close(actual, exact, k):
    """Half an output ulp, plus FP32 accumulation of k products of unit-variance values."""
    ulp = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}[actual.dtype]
    bound = exact.abs() * ulp + k * 2**-22
    assert ((actual.double() - exact).abs() <= bound).all()


def plain_answers(planner, asked):
    """The heuristic's answers without split-K, best first."""
    answers = planner.heuristic(asked, 32)["answers"]
    plain = [a for a in answers if a["ok"] and a["algorithm"]["split_k"] == 1]
    assert plain, answers
    return plain


@pytest.mark.parametrize("keywords", [
    dict(), dict(bias="bf16"), dict(alpha="device"), dict(alpha="device", bias="bf16"),
    dict(out="fp32"), dict(type="fp16", out="fp16", bias="fp16"),
], ids=str)  # fmt: skip
def test_matmul_is_right(planner, keywords):
    asked = problem(333, 256, 1024, **keywords)
    plan = planner.plan(asked)
    assert plan.ok, plan.refusals
    matmul = Matmul(asked)
    first = matmul.run(plan)
    assert_close(first, matmul.reference(), 1024)
    assert torch.equal(first.view(torch.uint8), matmul.run(plan).view(torch.uint8))


def test_a_bf16_pin_is_accepted_and_equals_the_heuristics_plan_byte_for_byte(planner):
    asked = problem()
    chosen = planner.plan(asked)
    assert chosen.rung == "cublaslt-heuristic"
    answers = plain_answers(planner, asked)
    other = next(a["algorithm"] for a in answers if a["algorithm"] != answers[0]["algorithm"])
    info = device()
    planner.pin(lt.Pin(lt.Algorithm(**other), info.cc_major, info.cc_minor, type="bf16"))
    pinned = planner.plan(asked)
    assert (pinned.rung, pinned.algorithm, pinned.refusals) == ("cublaslt-pinned", other, [])
    matmul = Matmul(asked)
    heuristic = matmul.run(answers[0]["plan"])
    assert_close(heuristic, matmul.reference(), 14336)
    assert torch.equal(heuristic.view(torch.uint8), matmul.run(pinned).view(torch.uint8))


def test_a_bf16_pin_is_refused_by_algo_check_and_the_heuristic_takes_over(planner):
    asked = problem()
    algorithm = plain_answers(planner, asked)[0]["algorithm"]
    refused = lt.Algorithm(**dict(algorithm, tile=1))  # 8x8: no tensor core kernel has it
    info = device()
    planner.pin(lt.Pin(refused, info.cc_major, info.cc_minor, type="bf16"))
    plan = planner.plan(asked)
    assert plan.rung == "cublaslt-heuristic"
    (reason,) = (reason for rung, reason in plan.refusals if rung == "cublaslt-pinned")
    assert reason.startswith("AlgoCheck CUBLAS_STATUS_")
    assert reason.endswith("(m=2048, n=5376, k=14336)")


def test_an_out_of_range_tile_is_refused_by_us(planner):
    """Inside cuBLASLt 13.1.0 it would raise SIGFPE."""
    planner.plan(problem())
    for tile in (635 if planner.library["version"] < lt.HEADER_VERSION else lt.TILE_END, 10**6):
        algorithm = lt.Algorithm(id=66, tile=tile, stages=35)
        assert f"tile {tile} is out of range" in planner.check(problem(), algorithm)["reason"]


def test_nvfp4_is_refused_by_both_rungs_before_blackwell(planner):
    info = device()
    if info.cc_major >= 10:
        pytest.skip(f"needs cc < 10.0, found {info.cc_major}.{info.cc_minor}")
    asked = problem(type="nvfp4")
    ids = planner.algorithm_ids(asked)
    assert ids["reason"] == "" and {66, 70} <= set(ids["ids"])
    answer = planner.check(asked, lt.Algorithm(**STUDIED))
    assert answer["status"] == "CUBLAS_STATUS_ARCH_MISMATCH", answer

    planner.pin(lt.Pin(lt.Algorithm(**STUDIED), info.cc_major, info.cc_minor))
    plan = planner.plan(asked)
    assert not plan.ok
    pinned, studied = (reason for rung, reason in plan.refusals if rung == "cublaslt-pinned")
    assert pinned.startswith("AlgoCheck CUBLAS_STATUS_ARCH_MISMATCH for id 70, tile 20 (128x128)")
    assert studied.startswith("pin is for compute capability 12.1, found ")
    (heuristic,) = (reason for rung, reason in plan.refusals if rung == "cublaslt-heuristic")
    assert heuristic.startswith("heuristic CUBLAS_STATUS_NOT_SUPPORTED")


def test_the_studied_pin_runs_on_the_chip_it_is_for(planner):
    info = device()
    if (info.cc_major, info.cc_minor) != (12, 1):
        pytest.skip(f"needs cc 12.1, found {info.cc_major}.{info.cc_minor}")
    asked = problem(37824, type="nvfp4", workspace_limit=0)
    plan = planner.plan(asked)
    assert (plan.rung, plan.workspace_bytes) == ("cublaslt-pinned", 0), plan.refusals
    for key, value in STUDIED.items():
        assert plan.algorithm[key] == value
    for split_k in (2, 4, 8, 16):
        assert not planner.check(asked, lt.Algorithm(**dict(STUDIED, split_k=split_k)))["ok"]


def test_capabilities_and_read_back_on_the_real_library(planner):
    asked = problem()
    for algorithm_id in planner.algorithm_ids(asked)["ids"]:
        answer = planner.capabilities(asked, algorithm_id)
        assert answer["reason"] == "" and answer["values"]["custom_max"][0] >= 0
    for answer in planner.heuristic(asked, 32)["answers"]:
        again = planner.check(asked, lt.Algorithm(**answer["algorithm"]))
        assert again["algorithm"] == answer["algorithm"]
        assert again["ok"] == answer["ok"], (again, answer)
