"""gemm_mid_m, the fused GEMM on Hopper's wgmma: its text on an emulator, and the kernel on a GPU.

Its sums are FP32 in the tensor core's order, so a result may be off by the accumulation bound
K · 2⁻²² · Σ|a·b| and one rounding; two runs must agree to the byte, however the blocks that share a
tile come in.
"""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from compare import assert_same_bytes
from helpers import cuda_missing, poison

from nvfp4_linear import explain, reference

ops = torch.ops.nvfp4
ALPHA = 0.37
SPACING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-22}


def test_on_the_emulator(tmp_path):
    compiler = os.environ.get("CXX", "g++").split()[0]
    if shutil.which(compiler) is None:
        pytest.skip(f"needs a C++ compiler, found no {compiler}")
    tests = Path(__file__).resolve().parent
    cuda = tests.parent / "csrc" / "cuda"
    includes = [tests / "cuda_emulator", tests.parent / "csrc", cuda]
    ahead = [tests / "cuda_emulator" / "ptx.cuh", tests / "cuda_emulator" / "hopper.cuh"]
    command = [compiler, "-std=c++17", "-O2", "-ffp-contract=off", "-w"]
    command += [f"-I{path}" for path in includes]
    command += [x for path in ahead for x in ("-include", str(path))]
    command += ["-x", "c++", *(str(cuda / f"{name}.cu") for name in ("device", "gemm_mid_m"))]
    command += [str(tests / "mid_m_emulator" / "main.cpp"), "-o", str(tmp_path / "emulated")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([tmp_path / "emulated"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def on_hopper() -> bool:
    return cuda_missing() is None and torch.cuda.get_device_capability() == (9, 0)


needs_hopper = pytest.mark.skipif(not on_hopper(), reason="needs a GPU of compute capability 9.0")


@cache
def operand(rows: int, k: int, seed: int):
    """Packed data and scales of normal values, and those values decoded, in FP64."""
    data, scale = reference.quantize(
        torch.randn(rows, k, generator=torch.Generator().manual_seed(seed))
    )
    return data.cuda(), scale.cuda(), reference.dequantize(data, scale).double().cuda()


class Problem:
    """Operands on the GPU, and what they stand for in FP64. kind: "packed" or x's dtype."""

    def __init__(self, m: int, n: int, k: int, kind, seed: int = 0):
        rng = torch.Generator().manual_seed(seed)
        self.kind, self.k = kind, k
        *self.weight, self.b = operand(n, k, seed)
        if kind == "packed":
            *self.x, self.a = operand(m, k, seed + 1)
        else:  # rows further apart than k
            self.x = torch.randn(m, k + 8, generator=rng).to(kind).cuda()[:, :k]
            self.a = self.x.double()
        self.bias = torch.randn(n, generator=rng).cuda()

    def run(self, alpha, bias, out_dtype):
        if self.kind == "packed":
            (a, a_scale), (b, b_scale) = self.x, self.weight
            return ops.gemm(a, b, a_scale, b_scale, alpha, bias, out_dtype)
        return ops.gemm_a16w4(self.x, *self.weight, alpha, bias, out_dtype)

    def check(self, actual, bias) -> None:
        exact = ALPHA * (self.a @ self.b.T) + (0 if bias is None else bias.double())
        bound = self.k * 2.0**-22 * ALPHA * (self.a.abs() @ self.b.abs().T)
        allowed = bound + SPACING[actual.dtype] * exact.abs() + 1e-30
        assert not actual.isnan().any()
        excess = (actual.double() - exact).abs() - allowed
        assert excess.max() <= 0, f"worst excess {excess.max():.3g} at {excess.argmax().item()}"


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    ("n", "k"),
    [
        (8, 32),
        (24, 96),
        (136, 4096),
        (257, 160),
        (1000, 2080),
        (5376, 96),
        (640, 14336),
        (4096, 4096),  # up to 384 rows most tiles are a pair of blocks'
    ],
)
@pytest.mark.parametrize("kind", ["packed", torch.bfloat16, torch.float16], ids=str)
def test_products(kind, n, k):
    """Every tile of rows, ragged sizes, tiles in one piece and in many; every output and bias.

    Fewer rows of the smallest n are gemm_small_m_hopper's, in slices.
    """
    for i, m in enumerate((65, 96, 128, 129, 192, 200, 256, 257, 300, 384, 385, 512)):
        p = Problem(m, n, k, kind)
        out_dtype = list(SPACING)[i % 3]
        bias = None if i % 4 == 0 else p.bias.to(list(SPACING)[i // 3 % 3])
        alpha = torch.tensor(ALPHA)  # on the host
        if i % 2:
            alpha = alpha.cuda()
        poison("cuda")
        first = p.run(alpha, bias, out_dtype)
        assert first.dtype == out_dtype
        p.check(first, bias)
        for run in range(2):
            poison("cuda")
            again = p.run(alpha, bias, out_dtype)
            assert_same_bytes(again, first, f"m = {m}: run {run + 2}")


@pytest.mark.gpu
@needs_hopper
def test_pairs_of_the_largest_tile():
    """On 132 multiprocessors 64 tiles of 256 rows, each a pair of blocks'."""
    p = Problem(256, 8192, 8192, "packed")
    first = p.run(torch.tensor(ALPHA), p.bias, torch.float32)
    p.check(first, p.bias)
    for run in range(3):
        poison("cuda")
        again = p.run(torch.tensor(ALPHA), p.bias, torch.float32)
        assert_same_bytes(again, first, f"run {run + 2}")


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("m", [100, 200, 256, 500])
@pytest.mark.parametrize("kind", ["packed", torch.bfloat16], ids=str)
def test_replay_and_streams(kind, m):
    """A graph's replay, calls behind each other's backs and on two streams: the same bytes."""
    alpha, sets = torch.tensor(ALPHA).cuda(), 3
    problems = [Problem(m, 1024, 4096, kind, seed=i) for i in range(0, 2 * sets, 2)]
    eager = [p.run(alpha, p.bias, torch.bfloat16) for p in problems]
    for p, y in zip(problems, eager, strict=True):
        p.check(y, p.bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scratch = torch.zeros(1 << 16, device="cuda")  # a node that isn't a kernel
        replayed = [p.run(alpha, p.bias, torch.bfloat16) for p in problems]
        scratch.zero_()
        replayed += [p.run(alpha, p.bias, torch.bfloat16) for p in problems]
    for turn in range(3):
        for y in replayed:
            y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for i, y in enumerate(replayed):
            assert_same_bytes(y, eager[i % sets], f"replay {turn}, call {i}")
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for turn in range(10):
        for i, p in enumerate(problems):
            with torch.cuda.stream(streams[(turn + i) % 2]):
                results.append((i, p.run(alpha, p.bias, torch.bfloat16)))
    torch.cuda.synchronize()
    for i, y in results:
        assert_same_bytes(y, eager[i], "one of two streams")


@pytest.mark.gpu
@needs_hopper
def test_what_the_kernel_ahead_wrote():
    """Operands that the kernels right before have written, again and again."""
    m, n, k = 256, 4096, 4096
    alpha = torch.tensor(ALPHA).cuda()
    problems = [Problem(m, n, k, "packed", seed=i) for i in (0, 2)]
    expected = [p.run(alpha, None, torch.bfloat16) for p in problems]
    buffers = [t.clone() for t in (*problems[0].x, *problems[0].weight)]
    results = []
    for turn in range(20):
        p = problems[turn % 2]
        for buffer, source in zip(buffers, (*p.x, *p.weight), strict=True):
            buffer.copy_(source)
        a, a_scale, b, b_scale = buffers
        results.append(ops.gemm(a, b, a_scale, b_scale, alpha, None, torch.bfloat16))
    for turn, y in enumerate(results):
        assert_same_bytes(y, expected[turn % 2], f"turn {turn}")


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("m", [130, 400])
@pytest.mark.parametrize("kind", ["packed", torch.bfloat16, torch.float16], ids=str)
def test_a_nan_scale_stays_in_its_row(kind, m):
    n, k, bad = 264, 8192, 77
    p = Problem(m, n, k, kind)
    good = p.run(None, None, torch.bfloat16)
    linear = reference.unswizzle_scales(p.weight[1].cpu(), n, k // 16).view(torch.uint8).clone()
    linear[bad, 300] = 0x7F
    p.weight = (p.weight[0], reference.swizzle_scales(linear.view(torch.float8_e4m3fn)).cuda())
    y = p.run(None, None, torch.bfloat16)
    others = torch.arange(n, device="cuda") != bad
    assert (y[:, bad].view(torch.int16) == 0x7FC0).all()
    assert_same_bytes(y[:, others], good[:, others], "the other columns")


@pytest.mark.gpu
@needs_hopper
def test_the_plan_says_so():
    assert "gemm_mid_m" in explain(256, 5376, 14336).kernel
    for m, kernel in ((64, "gemm_small_m_hopper"), (65, "gemm_mid_m")):
        assert explain(m, 1024, 4096).kernel == kernel
    assert explain(8, 4096, 14336).kernel == "gemm_small_m_hopper"
