"""The matrix: what each operand may be, times how its rows move, times who computes it.

A test case is a dispatch condition: a shape that crosses a tile, a layout, a mode and a routing
reach code together that each alone does not. So a few `Case`s expand over

    tile       the planner's own, or one that it is given
    rows       none, gather, scatter, both; and slices of K with padding between them
    gamma      without, with
    schedule   the planner's own kernel for the groups, or one of the four that it chooses from
    backend    cpu, cuda

A combination outside the contract is skipped by name: the first of `RULES` that applies, with its
reason. Everything else runs and is compared with the dense product in FP64. Per case the counts of
collected, executed and skipped are part of the contract too: test_matrix.py asserts them.

    python -m tests.matrix [--json FILE]     runs all that this machine can, prints the counts

Rows of K. `offs` are ends, so padding between two slices is a group of its own: every other group is
one. It is poisoned on the operand that the variant names (scale byte 0x7F, or NaN where dense) and
ordinary on the other; a kernel that reads on past its slice, or that starts early, meets a NaN. What
the padding's own groups give is NaN throughout, and is compared as well.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import torch
from torch import Tensor

if __package__:  # python -m tests.matrix: pytest puts this folder on the path by itself
    sys.path.insert(0, str(Path(__file__).parent))

from compare import assert_same_bytes
from helpers import cuda_missing, poison

from nvfp4_linear import Nvfp4Tensor, ops, reference
from nvfp4_linear.grouped import grouped_gemm

BLOCK = reference.BLOCK_SIZE
E4M3 = torch.float8_e4m3fn
SMALL_M = 32  # rows up to which gemm_small_m takes a packed b on CUDA
DENSE_WEIGHT_ROWS = 17  # rows a group from which dense takes dense weights on a Hopper

TILES = ("default", "explicit")
ROWS = ("none", "gather", "scatter", "both", "k-padded-a", "k-padded-b")
GAMMA = (False, True)
SCHEDULES = ("default", "general", "small", "wgmma", "dense")
BACKENDS = ("cpu", "cuda")

# Legal wherever a kernel takes one. strips, k_warps and cluster are gemm_small_m's, stages the
# general grouped kernel's.
SCHEDULE_VARIABLE = "NVFP4_GROUPED_KERNEL"
EXPLICIT_TILE = "strips=4 k_warps=1 cluster=1 stages=2"


@dataclass(frozen=True)
class Case:
    """One row of the matrix.

    mode: "plain" is gemm, gemm_a16w4 or gemm_a4w16; "axes" is `a @ b` of Nvfp4Tensors; "ragged" is
    grouped_gemm, of `groups` experts.
    a, b: "nvfp4", or the dtype of a dense side. a_scale, b_scale: "swizzled" or "linear".
    a_axes, b_axes: of "axes", where pairs and where blocks lie: k along K, x across it.
    """

    name: str
    mode: str
    shape: tuple[int, int, int]  # M, N, K
    a: str
    b: str
    out: str = "bfloat16"
    a_scale: str = "swizzled"
    b_scale: str = "swizzled"
    a_axes: str = "kk"
    b_axes: str = "kk"
    groups: int = 1
    bias: str | None = "float32"


CASES = [
    # Small and plain: what everything else is measured against.
    Case("plain-128", "plain", (128, 128, 128), "nvfp4", "nvfp4"),
    Case("plain-128-bf16-weight", "plain", (128, 128, 128), "nvfp4", "bfloat16"),
    Case("plain-128-fp16-weight", "plain", (128, 128, 128), "nvfp4", "float16"),
    Case("plain-128-bf16-activation", "plain", (128, 128, 128), "bfloat16", "nvfp4", bias=None),
    Case("plain-decode", "plain", (5, 136, 80), "float16", "nvfp4", "float32", bias="float16"),
    Case("plain-decode-long-k", "plain", (32, 64, 24576), "bfloat16", "nvfp4"),
    # The study's two: the tile boundary × swizzled activation scales × ragged × a dense weight.
    Case("ragged-256-bf16-weight", "ragged", (256, 256, 128), "nvfp4", "bfloat16", groups=4),
    Case("ragged-256-fp16-weight", "ragged", (256, 256, 128), "nvfp4", "float16", groups=4),
    Case("ragged-256-bf16-activation", "ragged", (256, 256, 128), "bfloat16", "nvfp4", groups=4),
    # The other operands, layouts and out types; sizes that divide by nothing.
    Case(
        "ragged-nvfp4",
        "ragged",
        (150, 136, 160),
        "nvfp4",
        "nvfp4",
        "float32",
        a_scale="linear",
        groups=5,
        bias="bfloat16",
    ),
    Case(
        "ragged-linear-scales",
        "ragged",
        (40, 24, 80),
        "nvfp4",
        "nvfp4",
        a_scale="linear",
        b_scale="linear",
        groups=3,
    ),
    Case("ragged-dense", "ragged", (40, 72, 96), "float16", "float16", "float16", groups=3),
    Case("ragged-decode", "ragged", (64, 64, 128), "bfloat16", "nvfp4", groups=64, bias=None),
    Case("ragged-decode-fp16", "ragged", (20, 136, 80), "float16", "nvfp4", "float16", groups=8),
    # Packing axes. The first is the study's: a logical (32, 128) in [32, 64] bytes.
    Case("axes-b-pairs-along-n", "axes", (8, 128, 32), "nvfp4", "nvfp4", b_axes="xk"),
    Case("axes-a-pairs-along-m", "axes", (24, 40, 96), "nvfp4", "nvfp4", a_axes="xk"),
    Case("axes-square", "axes", (64, 64, 64), "nvfp4", "nvfp4", a_axes="xk", b_axes="xk"),
    Case(
        "axes-b-along-n",
        "axes",
        (40, 96, 48),
        "nvfp4",
        "nvfp4",
        a_scale="linear",
        b_scale="linear",
        b_axes="xx",
    ),
    Case("axes-a-along-m", "axes", (48, 40, 96), "nvfp4", "nvfp4", "float32", a_axes="xx"),
    Case(
        "axes-b-blocks-along-n", "axes", (24, 48, 64), "nvfp4", "nvfp4", b_axes="kx", bias="float16"
    ),
    Case(
        "axes-fp16-activation",
        "axes",
        (24, 48, 64),
        "float16",
        "nvfp4",
        "float16",
        b_scale="linear",
        b_axes="xk",
        bias=None,
    ),
    Case("axes-bf16-weight", "axes", (64, 48, 96), "nvfp4", "bfloat16", a_axes="xk"),
]


@dataclass(frozen=True)
class Variant:
    """One combination of a case's axes."""

    tile: str
    rows: str
    gamma: bool
    schedule: str
    backend: str

    def __str__(self) -> str:
        gamma = "gamma" if self.gamma else "no gamma"
        return f"{self.backend}, {self.rows}, {gamma}, tile {self.tile}, schedule {self.schedule}"


def expand(backends: tuple[str, ...] = BACKENDS) -> list[Variant]:
    return [Variant(*v) for v in itertools.product(TILES, ROWS, GAMMA, SCHEDULES, backends)]


# ------------------------------------------------------------------------------- what is left out


@dataclass(frozen=True)
class Rule:
    """Combinations outside the contract."""

    name: str
    reason: str
    applies: Callable[[Case, Variant], bool]


def takes_small_m(case: Case) -> bool:
    """Whether a plain product is gemm_small_m's on every GPU."""
    dense_a = case.mode == "plain" and case.a != "nvfp4"
    return dense_a and case.b == "nvfp4" and case.shape[0] <= SMALL_M


def takes_packed_weights(case: Case, variant: Variant) -> bool:
    """What the grouped kernels for packed weights ask for; else the planner takes the general one."""
    weights = case.b == "nvfp4" and case.b_scale == "swizzled" and case.shape[2] % 32 == 0
    return weights and not variant.rows.startswith("k-padded")


def takes_general(case: Case, variant: Variant) -> bool:
    """Whether a ragged product is the general grouped kernel's, on the GPU that this runs on."""
    if case.mode != "ragged" or variant.schedule not in ("default", "general"):
        return False
    if variant.schedule == "general" or variant.rows.startswith("k-padded"):
        return True
    rows = -(-case.shape[0] // case.groups)
    if is_hopper() and case.b != "nvfp4" and rows >= DENSE_WEIGHT_ROWS:
        return False  # dense's
    return not takes_packed_weights(case, variant)


def is_hopper() -> bool:
    return cuda_missing() is None and torch.cuda.get_device_capability()[0] == 9


RULES = [
    Rule(
        "backend-absent",
        "this machine has no such backend",
        lambda case, v: v.backend == "cuda" and cuda_missing() is not None,
    ),
    Rule(
        "rows-are-grouped",
        "gather, scatter and slices of K are grouped_gemm's",
        lambda case, v: case.mode != "ragged" and v.rows != "none",
    ),
    Rule(
        "gamma-is-grouped",
        "gamma is grouped_gemm's",
        lambda case, v: case.mode != "ragged" and v.gamma,
    ),
    Rule(
        "cpu-has-one-tile",
        "the CPU backend's sums are exact: its one tiling can't be told from another",
        lambda case, v: v.backend == "cpu" and v.tile != "default",
    ),
    Rule(
        "cpu-has-one-schedule",
        "the CPU backend has one order of tiles",
        lambda case, v: v.backend == "cpu" and v.schedule != "default",
    ),
    Rule(
        "plain-has-one-schedule",
        "a plain product is one problem: there is nothing to schedule",
        lambda case, v: case.mode != "ragged" and v.schedule != "default",
    ),
    Rule(
        "tile-is-gemm-small-ms",
        "of the kernels for plain products only gemm_small_m takes a tile; a pin is cuBLASLt's",
        lambda case, v: case.mode != "ragged" and v.tile != "default" and not takes_small_m(case),
    ),
    Rule(
        "tile-is-the-general-kernels",
        "of the grouped kernels only the general one takes a tile",
        lambda case, v: case.mode == "ragged" and v.tile != "default" and v.schedule != "general",
    ),
    Rule(
        "schedule-needs-packed-weights",
        "small and wgmma read NVFP4 experts with swizzled scales, K % 32 == 0, ragged M",
        lambda case, v: v.schedule in ("small", "wgmma") and not takes_packed_weights(case, v),
    ),
    Rule(
        "dense-needs-ragged-m",
        "dense makes tiles of groups of rows",
        lambda case, v: v.schedule == "dense" and v.rows.startswith("k-padded"),
    ),
    Rule(
        "wgmma-is-hoppers",
        "this GPU has no wgmma, which wgmma and dense use",
        lambda case, v: v.schedule in ("wgmma", "dense") and not is_hopper(),
    ),
]


def rule_for(case: Case, variant: Variant) -> Rule | None:
    """The first rule that leaves this variant out; None: it runs."""
    return next((rule for rule in RULES if rule.applies(case, variant)), None)


# ------------------------------------------------------------------------------------- operands

# UE4M3 bytes for scales of 1/4 … 4. With dense values in steps of 2⁻⁵ below 4 every product is a
# multiple of 2⁻⁸ below 2⁷, and so every sum here is exact in FP64 in any order.
LOWEST_SCALE, HIGHEST_SCALE = 0x28, 0x48
DENSE_STEP = 2.0**-5
NAN_SCALE = 0x7F


def generator(*key: int | str) -> torch.Generator:
    seed = 0
    for part in key:
        for byte in str(part).encode():
            seed = (seed * 131 + byte) % 2**31
    return torch.Generator().manual_seed(seed)


@dataclass
class Side:
    """An operand as the ops take it, and its exact values."""

    data: Tensor
    scale: Tensor | None
    value: Tensor  # FP64, NaN where poisoned


def dense_values(shape: tuple[int, ...], dtype: str, rng: torch.Generator) -> Tensor:
    whole = torch.randint(-127, 128, shape, generator=rng)
    return (whole * DENSE_STEP).to(getattr(torch, dtype))


def pack(codes: Tensor, dim: int) -> Tensor:
    """Two codes a byte along `dim`, the even index in the low nibble; here without the library."""
    even, odd = (codes.index_select(dim, torch.arange(i, codes.shape[dim], 2)) for i in (0, 1))
    return even | odd << 4


def random_scales(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.randint(
        LOWEST_SCALE, HIGHEST_SCALE + 1, shape, generator=rng, dtype=torch.uint8
    ).view(E4M3)


def make_side(
    kind: str, rows: int, k: int, layout: str, rng: torch.Generator, bad: Tensor | None = None
) -> Side:
    """(rows, K) along K. bad: (rows, K/16), the blocks to poison."""
    if kind != "nvfp4":
        data = dense_values((rows, k), kind, rng)
        if bad is not None:
            data[bad.repeat_interleave(BLOCK, dim=1)] = torch.nan
        return Side(data, None, data.double())
    codes = torch.randint(0, 16, (rows, k), generator=rng, dtype=torch.uint8)
    scale = random_scales((rows, k // BLOCK), rng)
    if bad is not None:
        scale.view(torch.uint8)[bad] = NAN_SCALE
    value = reference.e2m1_decode(codes) * block_values(scale, 1)
    if layout == "swizzled":
        scale = reference.swizzle_scales(scale)
    return Side(pack(codes, 1), scale, value.double())


def block_values(scale: Tensor, dim: int) -> Tensor:
    return reference.e4m3_decode(scale).repeat_interleave(BLOCK, dim=dim)


def make_stack(case: Case, rng: torch.Generator) -> Side:
    """b of ragged M: one (N, K) an expert."""
    _, n, k = case.shape
    sides = [make_side(case.b, n, k, case.b_scale, rng) for _ in range(case.groups)]
    scale = None if sides[0].scale is None else torch.stack([s.scale for s in sides])
    return Side(torch.stack([s.data for s in sides]), scale, torch.stack([s.value for s in sides]))


def make_tensor(
    shape: tuple[int, int], k_dim: int, axes: str, layout: str, g: Tensor, rng: torch.Generator
) -> tuple[Nvfp4Tensor, Tensor]:
    """A tensor whose pairs and blocks lie as `axes` says, and its values without g."""
    packed_dim, block_dim = (k_dim if axis == "k" else 1 - k_dim for axis in axes)
    codes = torch.randint(0, 16, shape, generator=rng, dtype=torch.uint8)
    sizes = list(shape)
    sizes[block_dim] //= BLOCK
    scale = random_scales(tuple(sizes), rng)
    value = reference.e2m1_decode(codes) * block_values(scale, block_dim)
    if layout == "swizzled":
        scale = reference.swizzle_scales(scale if block_dim == 1 else scale.t())
    tensor = Nvfp4Tensor(
        pack(codes, packed_dim), scale, g, shape, packed_dim, layout == "swizzled", block_dim
    )
    return tensor, value.double()


# ------------------------------------------------------------------------------------- problems


@dataclass
class Problem:
    """A call, on whatever device, and what it has to give."""

    call: Callable[[str], Tensor]
    acc: Tensor  # the sums, FP64, exact, in the result's shape
    size: Tensor  # Σ |a·b|, what FP32 sums may be off by is measured in
    k: int
    alpha: Tensor  # FP32, this and the next two broadcast to the result's shape
    bias: Tensor
    gamma: Tensor
    out: torch.dtype
    written: Tensor = field(default_factory=lambda: torch.tensor(True))

    @cached_property
    def expected(self) -> Tensor:
        """out(gamma · fma(alpha, acc, bias)), acc rounded once to FP32; unwritten rows are zero."""
        value = reference.fma(self.alpha, self.acc.float(), self.bias)
        value = torch.where(self.written, self.gamma * value, 0.0)
        return value.to(self.out).masked_fill(value.isnan(), torch.nan)

    def check(self, actual: Tensor, backend: str) -> None:
        """Byte for byte on the CPU, whose sums are exact; elsewhere within `allowed`."""
        expected = self.expected
        if backend == "cpu":
            assert_same_bytes(actual, expected)
            return
        actual = actual.cpu()
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        nan = expected.isnan()
        assert torch.equal(actual.isnan(), nan), "NaN where there is none, or none where there is"
        exact = (self.gamma * (self.alpha * self.acc + self.bias)).masked_fill(~self.written, 0.0)
        excess = (actual.double() - exact).abs() - self.allowed(exact)
        worst = excess.masked_fill(nan, -torch.inf).max()
        assert worst <= 0, f"{worst:.3g} beyond the bound at {excess.argmax().item()}"

    def allowed(self, exact: Tensor) -> Tensor:
        """What FP32 sums on tensor cores may be off by, unwritten rows by nothing.

        Each of K additions loses at most 2⁻²² of Σ |a·b| (products are exact; a tensor core
        truncates where FP32 would round); alpha, bias and gamma round once each, in FP32; the
        result once more, to out.
        """
        epilogue = (self.alpha * self.acc).abs() + self.bias.abs()
        sums = self.k * 2.0**-22 * self.alpha.double().abs() * self.size + 2.0**-22 * epilogue
        rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
        allowed = self.gamma.abs() * sums * (1 + 2.0**-7) + rounding[self.out] * exact.abs()
        if self.out == torch.float16:
            allowed = allowed + 2.0**-25  # half of its smallest subnormal
        return allowed.masked_fill(~self.written, 0.0)


def vector(count: int, rng: torch.Generator) -> Tensor:
    """FP32 factors of either sign, none of them near 0 or a power of two."""
    return torch.randint(3, 40, (count,), generator=rng) / 33 * (-1.0) ** torch.arange(count)


def bias_of(case: Case, shape: tuple[int, ...], rng: torch.Generator) -> Tensor | None:
    return None if case.bias is None else dense_values(shape, case.bias, rng)


def on(device: str, *values: Tensor | None) -> list[Tensor | None]:
    return [None if value is None else value.to(device) for value in values]


@cache
def problem(case: Case, rows: str, gamma: bool) -> Problem:
    rng = generator(case.name, rows)
    if case.mode == "plain":
        return plain_problem(case, rng)
    if case.mode == "axes":
        return axes_problem(case, rng)
    if rows.startswith("k-padded"):
        return sliced_problem(case, rows[-1], gamma, rng)
    return ragged_problem(case, rows, gamma, rng)


def full(values: Tensor | None) -> Tensor:
    return torch.zeros(()) if values is None else values.float()


def plain_problem(case: Case, rng: torch.Generator) -> Problem:
    m, n, k = case.shape
    a, b = make_side(case.a, m, k, "swizzled", rng), make_side(case.b, n, k, "swizzled", rng)
    alpha, bias = torch.tensor(0.37), bias_of(case, (n,), rng)
    out = getattr(torch, case.out)
    if a.scale is None:
        function, operands = ops.gemm_a16w4, (a.data, b.data, b.scale)
    elif b.scale is None:
        function, operands = ops.gemm_a4w16, (a.data, b.data, a.scale)
    else:
        function, operands = ops.gemm, (a.data, b.data, a.scale, b.scale)
    one = torch.ones(())
    return Problem(
        lambda device: function(*on(device, *operands, alpha, bias), out),
        a.value @ b.value.T,
        a.value.abs() @ b.value.abs().T,
        k,
        alpha,
        full(bias),
        one,
        out,
    )


def axes_problem(case: Case, rng: torch.Generator) -> Problem:
    m, n, k = case.shape
    alpha, sides, values = torch.ones(()), [], []
    for kind, shape, k_dim, axes, layout, g in (
        (case.a, (m, k), 1, case.a_axes, case.a_scale, 0.75),
        (case.b, (k, n), 0, case.b_axes, case.b_scale, 0.4),
    ):
        if kind == "nvfp4":
            g = torch.tensor(g)
            side, value = make_tensor(shape, k_dim, axes, layout, g, rng)
            alpha = alpha * g
        else:
            side = dense_values(shape, kind, rng)
            value = side.double()
        sides.append(side)
        values.append(value)
    bias, out = bias_of(case, (n,), rng), getattr(torch, case.out)

    def call(device: str) -> Tensor:
        a, b = (side.to(device) for side in sides)
        if isinstance(a, Tensor):  # has no `matmul` of ours, which takes bias and out
            assert bias is None and out == a.dtype
            return a @ b
        return a.matmul(b, *on(device, bias), out_dtype=out)

    a, b = values
    return Problem(call, a @ b, a.abs() @ b.abs(), k, alpha, full(bias), torch.ones(()), out)


def group_sizes(case: Case, tail: int, rng: torch.Generator) -> Tensor:
    """Rows of each expert: half of them the first's, none the second's, `tail` nobody's."""
    m, groups = case.shape[0] - tail, case.groups
    expert = torch.randint(2, groups, (m,), generator=rng)
    expert[torch.rand(m, generator=rng) < 0.5] = 0
    return torch.bincount(expert, minlength=groups)


def ragged_problem(case: Case, rows: str, gamma: bool, rng: torch.Generator) -> Problem:
    """Ragged M. Gathered: from a few more rows than there are, those without use poisoned, and with
    two rows at the end in no group. Scattered: a permutation, of which two rows are dropped."""
    m, n, k = case.shape
    gathered, scattered = rows in ("gather", "both"), rows in ("scatter", "both")
    a_rows = m + 3 if gathered else m
    source, target = torch.arange(m), torch.arange(m)
    bad = None
    if gathered:
        source = torch.randint(0, a_rows, (m,), generator=rng)
        bad = torch.ones(a_rows, k // BLOCK, dtype=torch.bool)
        bad[source] = False
    if scattered:
        target = torch.randperm(m, generator=rng)
        target[1], target[m // 2] = -1, -1
    sizes = group_sizes(case, 2 if gathered else 0, rng)
    ends = sizes.cumsum(0)
    a = make_side(case.a, a_rows, k, case.a_scale, rng, bad)
    b = make_stack(case, rng)
    # One alpha for all where there is no gamma, one a group where there is.
    alpha = vector(case.groups if gamma else 1, rng)
    bias, scale = bias_of(case, (case.groups, n), rng), vector(m, rng) if gamma else None

    # By the result's row: the problem's row that it holds, and that row's group; -1 for none.
    row = torch.full((m,), -1)
    kept = torch.arange(m)[(target >= 0) & (torch.arange(m) < ends[-1])]
    row[target[kept]] = kept
    group = torch.bucketize(row, ends, right=True).clamp(max=case.groups - 1)
    acc, size = torch.zeros(2, m, n, dtype=torch.float64)
    for e, (begin, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        left, right = a.value[source[begin:end]], b.value[e].T
        acc[begin:end] = left @ right
        size[begin:end] = left.abs() @ right.abs()
    out = getattr(torch, case.out)

    def call(device: str) -> Tensor:
        routing = {
            "gather": source.int().to(device) if gathered else None,
            "scatter": target.int().to(device) if scattered else None,
            "gamma": on(device, scale)[0],
        }
        return grouped_gemm(
            *on(device, a.data, b.data, a.scale, b.scale, ends.int(), alpha, bias),
            **routing,
            out_dtype=out,
            a_scale_swizzled=case.a_scale == "swizzled",
            b_scale_swizzled=case.b_scale == "swizzled",
        )

    return Problem(
        call,
        acc[row],
        size[row],
        k,
        alpha.expand(case.groups)[group][:, None],
        full(bias).expand(case.groups, n)[group],
        torch.ones(()) if scale is None else scale[row][:, None],
        out,
        (row >= 0)[:, None],
    )


def slice_ends(k: int) -> list[int]:
    """Three slices, the second empty, with a block of padding after each."""
    blocks = k // BLOCK - 3  # of the slices
    last = max(1, (blocks - 1) // 2)
    return [end * BLOCK for end in itertools.accumulate([blocks - last, 1, 0, 1, last, 1])]


def sliced_problem(case: Case, padded: str, gamma: bool, rng: torch.Generator) -> Problem:
    """Ragged K: every other group is padding, poisoned on the side `padded`."""
    m, n, k = case.shape
    ends = slice_ends(k)
    pad = torch.zeros(k // BLOCK, dtype=torch.bool)
    for begin, end in zip(ends[::2], ends[1::2], strict=True):
        pad[begin // BLOCK : end // BLOCK] = True
    a = make_side(case.a, m, k, case.a_scale, rng, pad.expand(m, -1) if padded == "a" else None)
    b = make_side(case.b, n, k, case.b_scale, rng, pad.expand(n, -1) if padded == "b" else None)
    groups = len(ends)
    alpha = vector(groups if gamma else 1, rng)
    bias, scale = bias_of(case, (groups, n), rng), vector(m, rng) if gamma else None
    slices = [slice(begin, end) for begin, end in itertools.pairwise([0, *ends])]
    out = getattr(torch, case.out)
    offs = torch.tensor(ends, dtype=torch.int32)
    return Problem(
        lambda device: grouped_gemm(
            *on(device, a.data, b.data, a.scale, b.scale, offs, alpha, bias),
            ragged="k",
            gamma=on(device, scale)[0],
            out_dtype=out,
            a_scale_swizzled=case.a_scale == "swizzled",
            b_scale_swizzled=case.b_scale == "swizzled",
        ),
        torch.stack([a.value[:, s] @ b.value[:, s].T for s in slices]),
        torch.stack([a.value[:, s].abs() @ b.value[:, s].abs().T for s in slices]),
        k,
        alpha[:, None, None],
        torch.zeros(()) if bias is None else bias.float()[:, None],
        torch.ones(()) if scale is None else scale[:, None],
        out,
    )


# ---------------------------------------------------------------------------------------- running


@contextmanager
def chosen(variant: Variant) -> Iterator[None]:
    """The planners told what the variant says, their own choice again afterwards."""
    try:
        if variant.tile == "explicit":
            torch.ops.nvfp4._control(f"tile {EXPLICIT_TILE}")
        if variant.schedule != "default":
            os.environ[SCHEDULE_VARIABLE] = variant.schedule
        yield
    finally:
        torch.ops.nvfp4._control("tile")
        os.environ.pop(SCHEDULE_VARIABLE, None)


@contextmanager
def one_thread() -> Iterator[None]:
    """For the plain side: small tensors, which threads that share their cores only slow down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run_variant(case: Case, variant: Variant) -> None:
    """AssertionError where the result is wrong; the op's own error where it refuses."""
    with one_thread():
        expected = problem(case, variant.rows, variant.gamma)
    with chosen(variant):
        poison(variant.backend)
        actual = expected.call(variant.backend)
    with one_thread():
        expected.check(actual, variant.backend)


@dataclass
class Outcome:
    """What became of one case."""

    case: str
    executed: int = 0
    skip_rules: Counter = field(default_factory=Counter)
    failures: dict[Variant, str] = field(default_factory=dict)

    @property
    def skipped(self) -> int:
        return sum(self.skip_rules.values())

    @property
    def collected(self) -> int:
        return self.executed + self.skipped

    def record(self) -> dict:
        return {
            "case": self.case,
            "collected": self.collected,
            "executed": self.executed,
            "skipped": self.skipped,
            "skip_rules": dict(sorted(self.skip_rules.items())),
        }

    def __str__(self) -> str:
        rules = ", ".join(f"{name} {count}" for name, count in sorted(self.skip_rules.items()))
        counts = f"{self.collected:4} collected {self.executed:4} executed {self.skipped:4} skipped"
        return f"{self.case:26} {counts}  {rules}"


def run(case: Case, backends: tuple[str, ...] = BACKENDS) -> Outcome:
    """Every variant of one case: run, or skipped by its rule."""
    outcome = Outcome(case.name)
    for variant in expand(backends):
        rule = rule_for(case, variant)
        if rule is not None:
            outcome.skip_rules[rule.name] += 1
            continue
        outcome.executed += 1
        try:
            run_variant(case, variant)
        except (AssertionError, ValueError, RuntimeError) as error:
            outcome.failures[variant] = f"{type(error).__name__}: {error}"
    return outcome


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.matrix", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    options = parser.parse_args(arguments)
    outcomes = []
    for case in CASES:
        outcomes.append(run(case))
        print(outcomes[-1], flush=True)
        for variant, error in outcomes[-1].failures.items():
            print(f"    {variant}: {error}")
    total = Outcome(
        "total", sum(o.executed for o in outcomes), sum((o.skip_rules for o in outcomes), Counter())
    )
    print(total)
    if options.json:
        options.json.write_text(json.dumps([o.record() for o in outcomes], indent=1) + "\n")
    return 1 if any(o.failures for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
