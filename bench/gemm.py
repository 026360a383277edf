"""gemm and gemm_a16w4 against their limit and torch's BF16 product on already-decoded operands.

    weight bytes  n (k/2 + k/16): data and scales
    limit_us      m <= 32: weight bytes / copy rate. Above: the larger of all bytes (A, B and D once)
                  / copy rate and 2 m n k / the BF16 rate; both rates of this run
    vs_torch      torch.nn.functional.linear(A, B) in BF16 over ours; decoding is in ours alone

Canonical: 37,824 x 5,376 x 14,336; then n = 5,376, k = 14,336 over m, and Llama-like shapes.
Weights rotate past L2, the activation does not: a layer's input has just been written. Outputs are
checked first (bench/check.py). `workspace_bytes` is what explain says, `workspace_measured` the peak
that torch's allocator saw beyond the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.check import (
    Agreement,
    Operand,
    agreement,
    check_whole,
    ops,
    quantized,
    sample_rows,
)
from bench.report import Record, Run, parser
from bench.timing import Samples, Variant, normal
from nvfp4_linear import explain

CANONICAL = (37_824, 5_376, 14_336)
SWEEP_NK = (5_376, 14_336)
SWEEP_M = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
LLAMA_NK = ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 28672))  # n, k
LLAMA_M = (1, 8, 32, 64, 128, 256)
QUICK_CANONICAL, QUICK_NK, QUICK_M = (130, 48, 160), (64, 96), (1, 8, 40)
WEIGHT_BOUND_M = 32  # up to here the weight's bytes are the limit
CHECKED_ROWS, CHECKED_COLUMNS = 8, 256
ALPHA = 0.5  # a power of two: the reference is scaled without rounding
OUT_BYTES = 2


@dataclass
class Weights:
    """A weight as ours and torch's variants read it, in as many copies as rotation needs."""

    packed: list[Operand]
    dense: list[Tensor]

    @staticmethod
    def make(run: Run, n: int, k: int) -> Weights:
        first = quantized(normal(n, k, run.device, seed=1))
        decoded = first.decode()
        packed = [first, *(first.clone() for _ in range(1, run.timer.sets(first.bytes)))]
        dense = [decoded, *(decoded.clone() for _ in range(1, run.timer.sets(2 * n * k)))]
        return Weights(packed, dense)

    @property
    def bytes(self) -> int:
        return self.packed[0].bytes


class Problem:
    """One m of a weight: the activation packed and decoded, and a call of every contender."""

    def __init__(self, run: Run, weights: Weights, m: int):
        n, k = weights.packed[0].rows, weights.packed[0].k
        self.run, self.weights, self.m, self.n, self.k = run, weights, m, n, k
        self.a = quantized(normal(m, k, run.device, seed=2))
        self.x = self.a.decode()
        self.alpha = torch.tensor(ALPHA)  # on the host: no device read

    def gemm(self, i: int) -> Tensor:
        b = self.weights.packed[i]
        return ops.gemm(self.a.data, b.data, self.a.scale, b.scale, self.alpha)

    def gemm_a16w4(self, i: int) -> Tensor:
        b = self.weights.packed[i]
        return ops.gemm_a16w4(self.x, b.data, b.scale, self.alpha)

    def torch(self, i: int) -> Tensor:
        return F.linear(self.x, self.weights.dense[i])

    def check(self, op: str) -> Agreement:
        """Raises WrongOutput where `op` is not the product; else how near the exact one it is."""
        y = getattr(self, op)(0)
        check_whole(y, self.x, self.weights.dense[0], ALPHA)
        rows = sample_rows(self.m, CHECKED_ROWS)
        columns = sample_rows(self.n, CHECKED_COLUMNS)
        here = self.run.device
        part = y[rows.to(here)][:, columns.to(here)].cpu()
        a = self.a.take(rows) if op == "gemm" else self.x[rows.to(here)].cpu()
        return agreement(part, a, self.weights.packed[0].take(columns), ALPHA)

    def limit(self, op: str) -> dict[str, Any]:
        if self.m <= WEIGHT_BOUND_M:
            return self.run.limit(self.weights.bytes) | {"limit": "weight bytes / copy rate"}
        a_bytes = self.a.bytes if op == "gemm" else 2 * self.m * self.k
        moved = a_bytes + self.weights.bytes + OUT_BYTES * self.m * self.n
        return self.run.limit(moved, operations=2 * self.m * self.n * self.k)

    def variants(self, names: list[str]) -> list[Variant]:
        packed = {"sets": len(self.weights.packed), "set_bytes": self.weights.bytes}
        dense = {"sets": len(self.weights.dense), "set_bytes": 2 * self.n * self.k}
        ours = [Variant(op, getattr(self, op), exact=True, **packed) for op in names]
        return [*ours, Variant("torch", self.torch, **dense)]

    def route(self, op: str) -> dict[str, Any]:
        """Which rung and kernel take the call, and the workspace it needs."""
        activation = "nvfp4" if op == "gemm" else "bfloat16"
        plan = explain(self.m, self.n, self.k, device=self.run.device, activation=activation)
        inner = plan.details.get("plan") or {}
        return {
            "rung": plan.rung,
            "kernel": plan.kernel,
            "algorithm": str(plan.algorithm) if plan.algorithm else None,
            "algorithm_from": inner.get("rung"),
            "workspace_bytes": plan.workspace_bytes,
            "workspace_measured": self.workspace_measured(op),
        }

    def workspace_measured(self, op: str) -> int | None:
        """Peak bytes of one call beyond its output; None on a CPU."""
        if self.run.device != "cuda":
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = getattr(self, op)(0)
        peak = torch.cuda.max_memory_allocated() - before
        return peak - y.numel() * y.element_size()

    def record(self, op: str, samples: dict[str, Samples], agreed: Agreement) -> Record:
        ours, theirs, limit = samples[op], samples["torch"].median, self.limit(op)
        route = self.route(op)
        seconds = ours.median * 1e-6
        return Record(
            f"{op} {self.m}x{self.n}x{self.k}",
            ours.median,
            limit["limit_us"],
            theirs / ours.median,
            extra={
                "op": op,
                "m": self.m,
                "n": self.n,
                "k": self.k,
                "limit": limit["limit"],
                **ours.summary(),
                "torch_us": theirs,
                "weight_tb_s": self.weights.bytes / seconds / 1e12,
                "tflop_s": 2 * self.m * self.n * self.k / seconds / 1e12,
                "equal_to_exact": agreed.equal,
                "of_bound": agreed.worst,
                **route,
                "note": f"{route['rung']}: {route['kernel']}",
            },
        )


def run_problem(run: Run, weights: Weights, m: int, names: list[str]) -> None:
    problem = Problem(run, weights, m)
    names = [op for op in names if run.wanted(f"{op} {m}x{problem.n}x{problem.k}")]
    if not names:
        return
    agreed = {op: problem.check(op) for op in names}
    samples = run.measure(problem.variants(names))
    for op in names:
        run.add(problem.record(op, samples, agreed[op]))


def plan(quick: bool) -> list[tuple[tuple[int, int], list[tuple[int, list[str]]]]]:
    """[((n, k), [(m, ops)])]: a weight, and what is run with it."""
    both = ["gemm", "gemm_a16w4"]
    m, n, k = QUICK_CANONICAL if quick else CANONICAL
    shapes = [((n, k), [(m, ["gemm"])])]
    if quick:
        return [*shapes, (QUICK_NK, [(m, both) for m in QUICK_M])]
    shapes.append((SWEEP_NK, [(m, both) for m in SWEEP_M]))
    return shapes + [(nk, [(m, both) for m in LLAMA_M]) for nk in LLAMA_NK]


def main(argv: list[str] | None = None) -> int:
    run = Run("gemm", parser("gemm", __doc__.split("\n\n")[0]), argv)
    for (n, k), problems in plan(run.quick):
        names = [f"{op} {m}x{n}x{k}" for m, ops_of_m in problems for op in ops_of_m]
        if not any(map(run.wanted, names)):
            continue
        weights = Weights.make(run, n, k)
        for m, ops_of_m in problems:
            run_problem(run, weights, m, ops_of_m)
        del weights
        if run.device == "cuda":
            torch.cuda.empty_cache()
    run.finish("GEMM")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
