"""grouped_gemm against its limit, torch's grouped BF16 product, and a loop of gemm_a16w4 calls.

    weight bytes  E n (k/2 + k/16): data and scales
    limit_us      m <= 64 rows a group: weight bytes / copy rate. Above: the larger of all bytes
                  (A, B and D once) / copy rate and 2 M n k / the BF16 rate; both rates of this run
    vs_torch      torch's grouped product of the decoded operands over ours
    vs_loop       a loop of gemm_a16w4, a call a group, over ours. It is captured in a graph like
                  the rest, so its 64 calls cost no Python

64 experts x 1, 8, 64 rows and mixed sizes of 1 ... 64; 8 experts x 4096 rows. A is dense BF16, or
packed with row-major scales (`a4`). Weights exceed L2, so they are cold in every call; A does not.
Outputs are checked first (bench/check.py).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.check import Agreement, Operand, agreement, check_whole, ops, quantized, sample_rows
from bench.report import Record, Run, parser
from bench.timing import Samples, Variant, normal
from nvfp4_linear.grouped import grouped_gemm

EXPERTS, NK = 64, ((4096, 4096), (2048, 7168))
ROWS = (1, 8, 64)
LARGE = (8, 4096, (4096, 4096))  # experts, rows each, (n, k)
QUICK_EXPERTS, QUICK_NK, QUICK_ROWS, QUICK_LARGE = 3, ((136, 96),), (1, 8), (2, 40, (64, 96))
WEIGHT_BOUND_ROWS = 64
CHECKED_GROUPS, CHECKED_ROWS, CHECKED_COLUMNS = 3, 8, 128
ALPHA = 0.5  # a power of two: the reference is scaled without rounding
OUT_BYTES = 2


@dataclass
class Weights:
    """A stack of experts: packed, and decoded (E, n, k)."""

    experts: list[Operand]
    data: Tensor
    scale: Tensor
    dense: Tensor

    @staticmethod
    def make(run: Run, groups: int, n: int, k: int) -> Weights:
        experts = [quantized(normal(n, k, run.device, seed=1 + e)) for e in range(groups)]
        data = torch.stack([x.data for x in experts])
        scale = torch.stack([x.scale.view(torch.uint8) for x in experts])
        dense = torch.stack([x.decode() for x in experts])
        scale = scale.view(torch.float8_e4m3fn)
        views = [Operand(d, s) for d, s in zip(data, scale, strict=True)]
        return Weights(views, data, scale, dense)

    @property
    def bytes(self) -> int:
        return sum(x.bytes for x in self.experts)


class Problem:
    """Groups of given sizes, and a call of every contender."""

    def __init__(self, run: Run, weights: Weights, sizes: list[int]):
        self.run, self.weights, self.sizes = run, weights, sizes
        self.m, (_, self.n, self.k) = sum(sizes), weights.dense.shape
        self.ends = list(itertools.accumulate(sizes))
        self.offs = torch.tensor(self.ends, dtype=torch.int32, device=run.device)
        self.a = quantized(normal(self.m, self.k, run.device, seed=99))
        self.a_scale = self.a.linear_scale()
        self.x = self.a.decode()
        self.alpha = torch.tensor(ALPHA)  # on the host: no device read

    def rows(self, e: int) -> slice:
        return slice(self.ends[e] - self.sizes[e], self.ends[e])

    def a16(self, _: int) -> Tensor:
        w = self.weights
        return grouped_gemm(self.x, w.data, None, w.scale, self.offs, self.alpha)

    def a4(self, _: int) -> Tensor:
        w = self.weights
        return grouped_gemm(self.a.data, w.data, self.a_scale, w.scale, self.offs, self.alpha)

    def loop(self, _: int) -> list[Tensor]:
        return [
            ops.gemm_a16w4(self.x[self.rows(e)], b.data, b.scale, self.alpha)
            for e, b in enumerate(self.weights.experts)
            if self.sizes[e]
        ]

    def torch(self, _: int) -> Tensor:
        b = self.weights.dense.transpose(1, 2)
        return torch._grouped_mm(self.x, b, offs=self.offs, out_dtype=torch.bfloat16)

    def check(self, name: str) -> Agreement:
        """Raises WrongOutput where it is not the product; else the worst group's agreement."""
        y = getattr(self, name)(0)
        groups = [e for e in range(len(self.sizes)) if self.sizes[e]]
        for e in groups:
            check_whole(y[self.rows(e)], self.x[self.rows(e)], self.weights.dense[e], ALPHA)
        found = []
        for i in sample_rows(len(groups), CHECKED_GROUPS).tolist():
            rows = sample_rows(self.sizes[groups[i]], CHECKED_ROWS)
            columns = sample_rows(self.n, CHECKED_COLUMNS)
            part = self.rows(groups[i])
            here = self.run.device
            got = y[part][rows.to(here)][:, columns.to(here)].cpu()
            a = self.x[part][rows.to(here)].cpu()
            found.append(agreement(got, a, self.weights.experts[groups[i]].take(columns), ALPHA))
        return max(found, key=lambda one: one.worst)

    def limit(self, name: str) -> dict[str, Any]:
        if self.m <= WEIGHT_BOUND_ROWS * len(self.sizes):
            return self.run.limit(self.weights.bytes) | {"limit": "weight bytes / copy rate"}
        a_bytes = self.a.bytes if name == "a4" else 2 * self.m * self.k
        moved = a_bytes + self.weights.bytes + OUT_BYTES * self.m * self.n
        return self.run.limit(moved, operations=2 * self.m * self.n * self.k)

    def variants(self, names: list[str], loop: bool) -> list[Variant]:
        packed, dense = self.weights.bytes, 2 * self.weights.dense.numel()
        found = [Variant(x, getattr(self, x), set_bytes=packed, exact=True) for x in names]
        if loop:
            found.append(Variant("loop", self.loop, set_bytes=packed))
        return [*found, Variant("torch", self.torch, set_bytes=dense)]

    def record(self, case: str, name: str, samples: dict[str, Samples], agreed: Agreement):
        ours, limit = samples[name], self.limit(name)
        seconds = ours.median * 1e-6
        loop_us = samples["loop"].median if "loop" in samples else None
        vs_loop = loop_us / ours.median if loop_us else None
        return Record(
            case,
            ours.median,
            limit["limit_us"],
            samples["torch"].median / ours.median,
            extra={
                "op": "grouped_gemm",
                "a": name,
                "groups": len(self.sizes),
                "m": self.m,
                "n": self.n,
                "k": self.k,
                "limit": limit["limit"],
                **ours.summary(),
                "torch_us": samples["torch"].median,
                "loop_us": loop_us,
                "vs_loop": vs_loop,
                "weight_tb_s": self.weights.bytes / seconds / 1e12,
                "tflop_s": 2 * self.m * self.n * self.k / seconds / 1e12,
                "equal_to_exact": agreed.equal,
                "of_bound": agreed.worst,
                "note": f"{vs_loop:.2f}x a loop of gemm_a16w4" if vs_loop else None,
            },
        )


def mixed_sizes(groups: int) -> list[int]:
    """1 ... 64, the same in every run."""
    return (torch.randint(1, 65, (groups,), generator=torch.Generator().manual_seed(3))).tolist()


def run_weights(run: Run, groups: int, n: int, k: int, problems: dict[str, list[int]]) -> None:
    def case(name: str, rows: str) -> str:
        return f"{name} {groups}x{rows}x{n}x{k}"

    wanted = {
        rows: names
        for rows in problems
        if (names := [x for x in ("a16", "a4") if run.wanted(case(x, rows))])
    }
    if not wanted:
        return
    weights = Weights.make(run, groups, n, k)
    for rows, names in wanted.items():
        problem = Problem(run, weights, problems[rows])
        agreed = {name: problem.check(name) for name in names}
        # A loop over large groups is no decode step: torch is the contender there.
        loop = problem.m <= WEIGHT_BOUND_ROWS * groups
        samples = run.measure(problem.variants(names, loop))
        for name in names:
            run.add(problem.record(case(name, rows), name, samples, agreed[name]))
    del weights
    if run.device == "cuda":
        torch.cuda.empty_cache()


def main(argv: list[str] | None = None) -> int:
    run = Run("grouped", parser("grouped", __doc__.split("\n\n")[0]), argv)
    experts = QUICK_EXPERTS if run.quick else EXPERTS
    for n, k in QUICK_NK if run.quick else NK:
        rows_each = QUICK_ROWS if run.quick else ROWS
        problems = {str(rows): [rows] * experts for rows in rows_each}
        problems["mixed"] = mixed_sizes(experts)
        run_weights(run, experts, n, k, problems)
    groups, rows, (n, k) = QUICK_LARGE if run.quick else LARGE
    run_weights(run, groups, n, k, {str(rows): [rows] * groups})
    run.finish("Grouped GEMM")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
