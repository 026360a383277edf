"""grouped_gemm: on the CPU against plain loops, to the byte; on a GPU within FP32 accumulation.

Bound of a GPU result against the exact one: K · 2⁻²² · |gamma · alpha| · Σ|a·b|, and one unit in the
last place of out. Zeros and NaN are exact, and two runs agree to the byte.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from compare import assert_same_bytes, random_operand
from helpers import cuda_missing, poison

from nvfp4_linear import reference
from nvfp4_linear.grouped import grouped_gemm

ops = torch.ops.nvfp4

KINDS = ["swizzled", "linear", "bfloat16", "float16"]
PAIRS = [
    (a, b)
    for a, b in itertools.product(KINDS, KINDS)
    if {a, b} != {"bfloat16", "float16"}  # two dense sides have one type
]
MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
MIN_EXPONENT = {torch.float32: -126, torch.bfloat16: -126, torch.float16: -14}


@dataclass
class Matrix:
    """An operand as the op takes it, and its values: (…, rows, k) FP64."""

    data: torch.Tensor
    scale: torch.Tensor | None
    swizzled: bool
    values: torch.Tensor

    @staticmethod
    def make(kind: str, stack: int | None, rows: int, k: int, seed: int) -> Matrix:
        count = 1 if stack is None else stack
        if kind in ("bfloat16", "float16"):
            rng = torch.Generator().manual_seed(seed)
            data = torch.randn(count, rows, k, generator=rng).to(getattr(torch, kind))
            scale, values = None, data.double()
        else:
            data, linear = random_operand(count * rows, k, seed, lowest=0x20, highest=0x58)
            values = reference.dequantize(data, linear, swizzled=False).double()
            data, linear = (x.reshape(count, rows, -1) for x in (data, linear))
            values = values.reshape(count, rows, k)
            scale = linear
            if kind == "swizzled":
                scale = torch.stack([reference.swizzle_scales(one) for one in linear])
        if stack is None:
            data, values = data[0], values[0]
            scale = None if scale is None else scale[0]
        return Matrix(data, scale, kind == "swizzled", values)

    def set_nan(self, *index: int) -> None:
        """A NaN scale: of (row, block), of (group, row, block) in a stack."""
        *lead, row, block = index
        scale = (self.scale[lead[0]] if lead else self.scale).view(torch.uint8)
        if self.swizzled:
            tiles = scale.shape[-1] // 4
            at = (row // 128 * tiles + block // 4) * 512
            at += row % 32 * 16 + row % 128 // 32 * 4 + block % 4
            scale.view(-1)[at] = 0x7F
        else:
            scale[row, block] = 0x7F
        self.values[(*lead, row, slice(16 * block, 16 * block + 16))] = torch.nan


@dataclass
class Problem:
    a: Matrix
    b: Matrix
    offs: list[int]
    alpha: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    options: dict = field(default_factory=dict)

    def call(self, device: str = "cpu", **changed) -> torch.Tensor:
        def there(x):
            return x.to(device) if isinstance(x, torch.Tensor) else x

        a, b = self.a, self.b
        options = {"a_scale_swizzled": a.swizzled, "b_scale_swizzled": b.swizzled}
        options |= self.options | changed
        return grouped_gemm(
            *(there(x) for x in (a.data, b.data, a.scale, b.scale)),
            torch.tensor(self.offs, dtype=torch.int32, device=device),
            there(self.alpha),
            there(self.bias),
            **{key: there(value) for key, value in options.items()},
        )

    @property
    def rows(self) -> int:
        gather = self.options.get("gather")
        return self.a.values.shape[0] if gather is None else len(gather)

    def groups(self):
        """(group, problem rows, source rows, A's values, B's values) of each group, plainly."""
        sliced = self.options.get("ragged") == "k"
        gather = self.options.get("gather")
        source = torch.arange(self.rows) if gather is None else gather.long()
        begin = 0
        for e, end in enumerate(self.offs):
            if sliced:
                rows = torch.arange(self.rows)
                yield e, rows, self.a.values[:, begin:end], self.b.values[:, begin:end]
            else:
                rows = torch.arange(begin, end)
                yield e, rows, self.a.values[source[begin:end]], self.b.values[e]
            begin = end

    def plain(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(FP32 result before the last rounding, its bound's Σ|a·b| · |alpha · gamma|)."""
        sliced, n = self.options.get("ragged") == "k", self.b.values.shape[-2]
        shape = (len(self.offs), self.rows, n) if sliced else (self.rows, n)
        out, magnitude = torch.zeros(shape), torch.zeros(shape, dtype=torch.float64)
        scatter, gamma = self.options.get("scatter"), self.options.get("gamma")
        for e, rows, a, b in self.groups():
            alpha = torch.ones(()) if self.alpha is None else self.alpha.reshape(-1)[
                e if self.alpha.numel() > 1 else 0
            ]  # fmt: skip
            bias = torch.zeros(n) if self.bias is None else self.bias[e].float()
            y = reference.fma(alpha, (a @ b.T).float(), bias)
            size = (a.abs() @ b.abs().T) * alpha.abs().double()
            if gamma is not None:
                y = gamma[rows, None] * y
                size = gamma[rows, None].abs().double() * size
            if sliced:
                out[e], magnitude[e] = y, size
                continue
            target = rows if scatter is None else scatter[rows].long()
            kept = target >= 0
            out[target[kept]], magnitude[target[kept]] = y[kept], size[kept]
        return out, magnitude


def canonical(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = value.to(dtype)
    out[value.isnan()] = torch.nan
    return out


def assert_within_bound(got: torch.Tensor, problem: Problem, exact: torch.Tensor) -> None:
    """`exact`: the FP32 result of the CPU op."""
    _, magnitude = problem.plain()
    k = problem.a.values.shape[-1]
    got, dtype = got.cpu(), got.dtype
    assert_same_bytes(got.isnan(), exact.isnan(), "where NaN is")
    assert_same_bytes(
        got[exact.isnan()], canonical(exact, dtype)[exact.isnan()], "the bytes of NaN"
    )
    exact = exact.double()
    exponent = (torch.frexp(exact).exponent - 1).clamp(min=MIN_EXPONENT[dtype])
    ulp = torch.ldexp(torch.ones_like(exact), exponent - MANTISSA_BITS[dtype])
    bound = k * 2.0**-22 * magnitude + ulp
    limit = torch.finfo(dtype).max
    excess = (got.double() - exact.clamp(-limit, limit)).abs() - bound
    excess[exact.isnan() | (exact.abs() > limit)] = -1
    assert excess.max() <= 0, (
        f"worst excess {excess.max():.3g} at {divmod(int(excess.argmax()), excess.shape[-1])}"
    )
    assert (got[exact == 0][magnitude[exact == 0] == 0] == 0).all(), "zero is exact"


def check(problem: Problem, device: str, out_dtype: torch.dtype = torch.bfloat16) -> None:
    exact = problem.call(out_dtype=torch.float32)
    poison(device)
    y = problem.call(device, out_dtype=out_dtype)
    if device == "cpu":
        plain, _ = problem.plain()
        both_packed = problem.a.scale is not None and problem.b.scale is not None
        if both_packed:  # FP64 sums of these are exact in any order
            assert_same_bytes(exact, canonical(plain, torch.float32), "FP32")
            assert_same_bytes(y, canonical(plain, out_dtype))
        else:
            assert_within_bound(y, problem, plain)
        return
    assert_within_bound(y, problem, exact)
    poison(device)
    assert_same_bytes(problem.call(device, out_dtype=out_dtype), y, "second run")


def ends(sizes: list[int]) -> list[int]:
    return list(itertools.accumulate(sizes))


def ragged_m(
    a: str, b: str, n: int, k: int, sizes: list[int], seed: int = 0, extra_rows: int = 3
) -> Problem:
    """Options by seed: every combination comes up over a few seeds."""
    rng = torch.Generator().manual_seed(seed)
    m, groups = sum(sizes) + extra_rows, len(sizes)
    gathered, scattered, scaled, alphas, biased = (seed >> i & 1 for i in range(5))
    source_rows = m // 2 + 1 if gathered else m
    p = Problem(
        Matrix.make(a, None, source_rows, k, seed),
        Matrix.make(b, groups, n, k, seed + 1),
        ends(sizes),
    )
    if gathered:
        p.options["gather"] = torch.randint(0, source_rows, (m,), generator=rng).int()
    if scattered:
        to = torch.randperm(m, generator=rng)
        p.options["scatter"] = torch.where(torch.rand(m, generator=rng) < 0.2, -1, to).int()
    if scaled:
        p.options["gamma"] = torch.randn(m, generator=rng)
    p.alpha = torch.randn(groups, generator=rng) if alphas else torch.tensor(0.37)
    if biased:
        dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
        p.bias = torch.randn(groups, n, generator=rng).to(dtype)
    return p


def ragged_k(a: str, b: str, m: int, n: int, sizes: list[int], k: int, seed: int = 0) -> Problem:
    rng = torch.Generator().manual_seed(seed)
    p = Problem(Matrix.make(a, None, m, k, seed), Matrix.make(b, None, n, k, seed + 1), ends(sizes))
    p.options["ragged"] = "k"
    p.alpha = torch.randn(len(sizes), generator=rng) if seed & 1 else None
    if seed & 2:
        p.bias = torch.randn(len(sizes), n, generator=rng)
    if seed & 4:
        p.options["gamma"] = torch.randn(m, generator=rng)
    return p


NS, KS = (8, 24, 136), (48, 96, 256)
# Every pair sees every N and every K, in another combination than the pair before it.
SEEDED = [
    (a, b, NS[j], KS[(i + j) % 3], 11 * (3 * i + j) + 7)
    for i, (a, b) in enumerate(PAIRS)
    for j in range(3)
]


@pytest.mark.parametrize(("a", "b", "n", "k", "seed"), SEEDED)
def test_rows(device, a, b, n, k, seed):
    out_dtype = (torch.bfloat16, torch.float16, torch.float32)[seed % 3]
    check(ragged_m(a, b, n, k, [0, 5, 1, 33, 0, 17, 0], seed), device, out_dtype)


@pytest.mark.parametrize(("a", "b", "n", "k", "seed"), SEEDED)
def test_slices_of_k(device, a, b, n, k, seed):
    sizes = [0, 16, k // 16 // 2 * 16 - 16, 0, k // 16 // 2 * 16]
    out_dtype = (torch.bfloat16, torch.float16, torch.float32)[seed % 3]
    check(ragged_k(a, b, 37, n, sizes, k, seed), device, out_dtype)


@pytest.mark.parametrize("seed", range(32))
def test_every_option(device, seed):
    check(ragged_m("linear", "swizzled", 40, 96, [3, 0, 9, 1], seed), device)


@pytest.mark.parametrize("b", ["swizzled", "linear", "bfloat16"])
@pytest.mark.parametrize("a", ["linear", "bfloat16"])
@pytest.mark.parametrize(
    ("sizes", "n", "k"),
    [
        ([1] * 9, 264, 1056),  # a row an expert
        ([8, 0, 1, 7], 520, 2048),
        ([64, 3, 17, 40], 392, 544),
        ([200, 1, 130], 264, 320),  # several tiles of rows
        ([0, 0, 0], 40, 64),  # nothing at all
    ],
)
def test_tiles(device, a, b, sizes, n, k):
    check(ragged_m(a, b, n, k, sizes, seed=31), device)
    check(ragged_m(a, b, n, k, sizes, seed=0), device)


def test_many_groups(device):
    sizes = [i % 3 for i in range(1100)]
    check(ragged_m("linear", "swizzled", 8, 32, sizes, seed=29), device)


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_nan_scales(device, a, b):
    for p in (ragged_m(a, b, 136, 96, [5, 0, 40], 6), ragged_k(a, b, 20, 40, [48, 16, 32], 96, 0)):
        stacked = p.b.values.dim() == 3
        if p.a.scale is not None:
            p.a.set_nan(2, 4)
        if p.b.scale is not None:
            p.b.set_nan(*([2, 35, 5] if stacked else [35, 5]))
        check(p, device)


def test_same_bytes_as_gemm():
    """A group is a gemm: packed, a16w4 and a4w16."""
    n, k, sizes = 40, 96, [5, 0, 9]
    for a, b in (("swizzled", "swizzled"), ("bfloat16", "swizzled"), ("linear", "float16")):
        p = ragged_m(a, b, n, k, sizes, seed=24, extra_rows=0)
        y = p.call()
        begin = 0
        for e, end in enumerate(p.offs):
            rows = slice(begin, end)
            alpha, bias = p.alpha[e], p.bias[e]
            if end == begin:
                continue
            if a == "bfloat16":
                one = ops.gemm_a16w4(p.a.data[rows], p.b.data[e], p.b.scale[e], alpha, bias)
            else:
                linear = p.a.scale
                if p.a.swizzled:
                    linear = reference.unswizzle_scales(linear, sum(sizes), k // 16)
                scale = reference.swizzle_scales(linear.view(torch.uint8)[rows].view(linear.dtype))
                if b == "swizzled":
                    data = (p.a.data[rows], p.b.data[e], scale, p.b.scale[e])
                    one = ops.gemm(*data, alpha, bias)
                else:
                    data = (p.a.data[rows], p.b.data[e], scale)
                    one = ops.gemm_a4w16(*data, alpha, bias, torch.bfloat16)
            assert_same_bytes(y[rows], one, f"{a} x {b}, group {e}")
            begin = end


def test_unaligned_data(device):
    """A dense operand with rows further apart than K, starting off a 16-byte boundary."""
    p = ragged_m("bfloat16", "swizzled", 24, 96, [5, 9], seed=0)
    expected = p.call(out_dtype=torch.float32)
    wide = torch.randn(p.rows, 96 + 7).to(torch.bfloat16)
    wide[:, 3 : 3 + 96] = p.a.data
    there = wide.to(device)[:, 3 : 3 + 96]
    offs = torch.tensor(p.offs, dtype=torch.int32, device=device)
    b, scale = p.b.data.to(device), p.b.scale.to(device)
    y = grouped_gemm(there, b, None, scale, offs, p.alpha.to(device))
    assert_within_bound(y, p, expected)


def test_kernels_on_the_emulator(tmp_path):
    """A sample of grouped_emulator's cases: all of them take minutes."""
    compiler = os.environ.get("CXX", "g++").split()[0]
    if shutil.which(compiler) is None:
        pytest.skip(f"needs a C++ compiler, found no {compiler}")
    tests = Path(__file__).resolve().parent
    cuda = tests.parent / "csrc" / "cuda"
    kernels = ("device", "grouped_dense", "grouped_gemm", "grouped_small_m", "grouped_unpack")
    kernels += ("grouped_wgmma",)
    includes = [tests / "cuda_emulator", tests.parent / "csrc", cuda]
    ahead = [tests / "cuda_emulator" / "ptx.cuh"]
    ahead += [tests / "grouped_emulator" / f"{name}.cuh" for name in ("hopper", "tensor_copy")]
    command = [compiler, "-std=c++17", "-O2", "-ffp-contract=off", "-w"]
    command += [f"-I{path}" for path in includes]
    command += [x for path in ahead for x in ("-include", str(path))]
    command += ["-x", "c++", *(str(cuda / f"{name}.cu") for name in kernels)]
    command += [str(tests / "grouped_emulator" / "main.cpp"), "-o", str(tmp_path / "emulated")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [tmp_path / "emulated", "quick"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_out_of_range_on_the_cpu():
    p = ragged_m("linear", "swizzled", 8, 32, [2, 3], seed=0)
    bad = torch.tensor([0, 1, 99, 0, 0, 0, 0, 0], dtype=torch.int32)
    for changed, name in (({"gather": bad}, "gather"), ({"scatter": bad}, "scatter")):
        with pytest.raises(ValueError, match=rf"{name}\[2\]"):
            p.call(**changed)
    for offs in ([3, 2], [-1, 2], [2, 99]):
        p.offs = offs
        with pytest.raises(ValueError, match="offs"):
            p.call()


HOSTILE_SLICES = [
    [40, 96, 72],  # no multiples of 16
    [64, 32, 96],  # decreasing
    [16, 112, 1 << 30],  # beyond K
    [-(1 << 31), (1 << 31) - 1, -7],
    [95, 17, 95],
]


def slices_of(ends: list[int], k: int) -> list[tuple[int, int]]:
    """Both ends inside K and down to a block, and nothing between ends that decrease."""
    inside = [min(max(end, 0), k) // 16 * 16 for end in ends]
    return [(b, max(b, e)) for b, e in zip([0, *inside[:-1]], inside, strict=True)]


def slice_alone(p: Problem, e: int, begin: int, end: int, device: str) -> torch.Tensor:
    """Group e as the second of two, its slice named rightly."""
    one = Problem(p.a, p.b, [begin, end], p.alpha[[e, e]], p.bias[[e, e]], p.options)
    return one.call(device)[1]


@pytest.mark.parametrize("offs", HOSTILE_SLICES)
def test_slices_out_of_range_on_the_cpu(offs):
    p = ragged_k("linear", "swizzled", 5, 8, [16, 0, 48], 96, seed=7)
    p.offs = offs
    with pytest.raises(ValueError, match=r"offs\[\d\] must be a multiple of 16 in"):
        p.call()


def test_a_slice_alone():
    """What a GPU's hostile slices are compared with is right where nothing is hostile."""
    p = ragged_k("linear", "swizzled", 5, 8, [16, 0, 48], 96, seed=7)
    alone = [slice_alone(p, e, *s, "cpu") for e, s in enumerate(slices_of(p.offs, 96))]
    assert_same_bytes(torch.stack(alone), p.call())


needs_cuda = pytest.mark.skipif(cuda_missing() is not None, reason=str(cuda_missing()))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("kernel", ["", "general", "small", "wgmma", "dense"])
def test_out_of_range_on_a_gpu(monkeypatch, kernel):
    """Such rows are zero or dropped, and no other row is any different."""
    monkeypatch.setenv("NVFP4_GROUPED_KERNEL", kernel)
    device = "cuda"
    for a, b, n, sizes in (
        ("linear", "swizzled", 264, [20, 30]),
        ("bfloat16", "swizzled", 264, [20, 30]),
        ("bfloat16", "linear", 24, [2, 3]),
    ):
        p = ragged_m(a, b, n, 96, sizes, seed=0)
        index = torch.arange(p.rows, dtype=torch.int32)
        good = p.call(device)
        hostile = index.clone()
        hostile[[1, 2, 3]] = torch.tensor([-5, 1 << 30, p.rows], dtype=torch.int32)
        expected = good.clone()
        expected[[1, 2, 3]] = 0
        assert_same_bytes(p.call(device, gather=hostile), expected, "gather")
        assert_same_bytes(p.call(device, scatter=hostile), expected, "scatter")
        for offs in ([1 << 30, 5], [-7, -9], [-(1 << 31), (1 << 31) - 1], [p.rows, 0]):
            p.offs = offs
            p.call(device)
        torch.cuda.synchronize()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("offs", HOSTILE_SLICES)
@pytest.mark.parametrize(
    ("a", "b"),
    [("swizzled", "linear"), ("bfloat16", "swizzled"), ("linear", "float16"), ("float16",) * 2],
)
def test_slices_out_of_range_on_a_gpu(a, b, offs):
    """Nothing outside K is read, and a group is the product of what its two offsets leave."""
    p = ragged_k(a, b, 37, 136, [16, 0, 48], 96, seed=7)
    p.offs = offs
    poison("cuda")
    y = p.call("cuda")
    alone = [slice_alone(p, e, *s, "cuda") for e, s in enumerate(slices_of(offs, 96))]
    assert_same_bytes(y, torch.stack(alone))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("kernel", ["", "dense"])
def test_graph_and_no_host_sync(monkeypatch, kernel):
    """Captured once, replayed with other group sizes: nothing is read on the host."""
    monkeypatch.setenv("NVFP4_GROUPED_KERNEL", kernel)
    p = ragged_m("bfloat16", "swizzled", 264, 256, [9, 1, 22], seed=0)
    other = ragged_m("bfloat16", "swizzled", 264, 256, [0, 30, 2], seed=0)
    a, b, scale, alpha = (x.cuda() for x in (p.a.data, p.b.data, p.b.scale, p.alpha))
    offs = torch.tensor(p.offs, dtype=torch.int32, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        grouped_gemm(a, b, None, scale, offs, alpha)
        stream.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            grouped_gemm(a, b, None, scale, offs, alpha)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = grouped_gemm(a, b, None, scale, offs, alpha)
    torch.cuda.synchronize()
    for problem in (p, other):
        problem.a = p.a
        problem.b = p.b
        offs.copy_(torch.tensor(problem.offs, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bytes(y, problem.call("cuda"))
        assert_within_bound(y, problem, problem.call(out_dtype=torch.float32))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("seed", [0, 15, 31])
@pytest.mark.parametrize("a", ["linear", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("sizes", "n", "k"),
    [
        ([5, 0, 1, 33, 0, 17, 0], 136, 96),
        ([64, 3, 17, 40], 392, 544),
        ([200, 1, 130, 0, 300], 520, 1056),
        ([1] * 600, 8, 64),
    ],
)
@pytest.mark.parametrize("kernel", ["general", "small", "wgmma", "dense"])
def test_every_kernel(monkeypatch, kernel, sizes, n, k, a, seed):
    """Each where the sizes would not pick it."""
    monkeypatch.setenv("NVFP4_GROUPED_KERNEL", kernel)
    out_dtype = (torch.bfloat16, torch.float16, torch.float32)[len(a) % 3]
    check(ragged_m(a, "swizzled", n, k, sizes, seed), "cuda", out_dtype)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("kernel", ["general", "dense"])
@pytest.mark.parametrize(("a", "b"), [(a, b) for a, b in PAIRS if b != "swizzled"])
def test_other_weights(monkeypatch, a, b, kernel):
    """Dense ones and row-major scales, in groups of more than a tile's rows."""
    monkeypatch.setenv("NVFP4_GROUPED_KERNEL", kernel)
    for seed in (0, 15, 31):
        check(ragged_m(a, b, 264, 144, [300, 0, 7, 257], seed), "cuda")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(
    ("sizes", "n", "k", "a"),
    [
        ([900, 0, 1500, 3, 800, 1100, 2, 700, 600, 1000], 4096, 4096, "bfloat16"),  # B in parts
        ([20000, 0, 13000, 4000], 264, 4096, "nvfp4"),  # A in parts
        ([1500, 700], 20000, 8192, "nvfp4"),  # a part of one group's columns at a time
    ],
)
def test_parts_of_a_workspace(monkeypatch, sizes, n, k, a):
    """What is decoded exceeds the workspace."""
    operands = exact_operands(sizes, n, k, a)
    results = []
    for kernel in ("general", "dense"):
        monkeypatch.setenv("NVFP4_GROUPED_KERNEL", kernel)
        poison("cuda")
        results.append(grouped_gemm(*operands))
    assert_same_bytes(*results)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("a", ["nvfp4", "bfloat16"])
@pytest.mark.parametrize(
    ("rows", "groups", "n"),
    [((1, 64), 14, 4096), ((1, 5, 9), 14, 4096), ((64, 0, 3, 130), 8, 8192), ((40, 17), 64, 1024)],
)
def test_tiles_of_two_blocks(monkeypatch, rows, groups, n, a):
    """Groups that differ, on more tiles than multiprocessors: on an H200's 132 wgmma cuts some."""
    sizes = [rows[e % len(rows)] for e in range(groups)]
    left, *others = exact_operands(sizes, n, 1296, a)
    m, dropped = len(left), torch.arange(len(left), device="cuda", dtype=torch.int32)
    options = {
        "alpha": torch.linspace(-1, 2, groups, device="cuda"),
        "bias": torch.ones(groups, n, device="cuda"),
        "gamma": torch.linspace(0.5, 2, m, device="cuda"),
        "scatter": torch.where(dropped % 7 == 3, -1, dropped.flip(0)),
    }
    for out_dtype in (torch.bfloat16, torch.float32):
        results = []
        for kernel in ("general", "wgmma", "wgmma", "wgmma"):
            monkeypatch.setenv("NVFP4_GROUPED_KERNEL", kernel)
            poison("cuda")
            results.append(grouped_gemm(left, *others, **options, out_dtype=out_dtype))
        for result in results[1:]:
            assert_same_bytes(result, results[0])


def exact_operands(sizes, n, k, a):
    """Of grouped_gemm, on the GPU. Scales of 1 and few terms: sums are exact in any order."""
    rng = torch.Generator("cuda").manual_seed(0)

    def packed(*shape):
        data = torch.randint(0, 256, (*shape, k // 2), generator=rng, device="cuda")
        return data.to(torch.uint8)

    def ones(*shape):
        return torch.full(shape, 0x38, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)

    m, groups = sum(sizes) + 5, len(sizes)
    b, b_scale = packed(groups, n), ones(groups, (n + 127) // 128 * 128, -(-k // 64) * 4)
    left, left_scale = packed(m), ones(m, k // 16)
    if a != "nvfp4":
        left = ops.dequantize(left, left_scale, swizzled=False, out_dtype=torch.bfloat16)
        left_scale = None
    offs = torch.tensor(ends(sizes), dtype=torch.int32, device="cuda")
    return left, b, left_scale, b_scale, offs
