"""The producers against the copy rate, torch eager and torch.compile: quantize, dequantize to BF16,
global_scale, swiglu_quantize, and a dynamic activation (global_scale, then quantize).

    bytes     every input once, every output once, scale padding written included; a dynamic
              activation reads its input twice (its amax is known only after the whole of it)
    limit_us  bytes / copy rate of this run; below 64 MB not less than an empty kernel
    empty_us  an empty kernel in a graph; alone_us, empty_alone_us: one launch between two events

Canonical size: 37,810 x 14,336 BF16 (SwiGLU: 28,672 columns, rows padded to a multiple of 128),
then 1, 16, 256 and 4,096 rows. The other side is bench/baseline.py. Outputs are checked first
(bench/check.py): rows against the CPU op, and where eager torch is exact all bytes against it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.baseline import Baseline
from bench.check import (
    Operand,
    check_rows,
    equal_fraction,
    ops,
    quantized,
    require_same_bytes,
    sample_rows,
)
from bench.report import Record, Run, parser, ratio
from bench.timing import Samples, Variant, empty_kernel, normal

CANONICAL_ROWS, CANONICAL_K = 37_810, 14_336
SMALL_ROWS = (1, 16, 256, 4096)
QUICK_ROWS, QUICK_K, QUICK_SMALL_ROWS = 130, 80, (1, 16)
PAD_ROWS_TO = 128
CHECKED_ROWS = 64
LAUNCH_BOUND_BYTES = 64_000_000  # below, a launch may cost more than the bytes
COMPILED_SMALL_ROWS = 256  # the one small size that torch.compile is asked for, of SwiGLU
EMPTY_SETS = 64
SWIGLU_GLOBAL_SCALE = 2.0**-6  # normal gate and up: the largest scales stay below 448


@dataclass
class Contest:
    """One case: ours and torch's version of it, what they move, and a check of ours.

    ours(i), torch(i): a call on input i. check(): raises WrongOutput, or gives keys for the record.
    """

    name: str
    input_bytes: int
    moved_bytes: int
    ours: Callable[[int], Any]
    torch: Callable[..., Any]  # given what `arguments(i)` gives
    arguments: Callable[[int], tuple[Any, ...]]
    check: Callable[[], dict[str, Any]]


def total_bytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


class Maker:
    """Builds the contest of an op at a size; inputs are normal, as many sets as rotation needs."""

    def __init__(self, run: Run):
        self.run, self.device = run, run.device
        self.baseline = Baseline(run.device)

    def inputs(self, rows: int, columns: int) -> list[Tensor]:
        count = self.run.timer.sets(2 * rows * columns)
        return [normal(rows, columns, self.device, seed) for seed in range(count)]

    def quantize(self, rows: int, k: int) -> Contest:
        x = self.inputs(rows, k)
        g = ops.global_scale(x[0])

        def check() -> dict[str, Any]:
            got, index = Operand(*ops.quantize(x[0], g)), sample_rows(rows, CHECKED_ROWS)
            expected = Operand(*ops.quantize(x[0][index.to(self.device)].cpu(), g.cpu()))
            check_rows("quantize", got, expected, index)
            eager = self.baseline.quantize(x[0], g)
            require_same_bytes("quantize against eager torch", (got.data, got.scale), eager)
            return {}

        return Contest(
            f"quantize {rows}x{k} bf16",
            total_bytes(x[0]),
            total_bytes(x[0], *ops.quantize(x[0], g)),
            lambda i: ops.quantize(x[i], g),
            self.baseline.quantize,
            lambda i: (x[i], g),
            check,
        )

    def dequantize(self, rows: int, k: int) -> Contest:
        count = self.run.timer.sets(rows * k * 9 // 16)
        packed = [quantized(normal(rows, k, self.device, seed)) for seed in range(count)]

        def check() -> dict[str, Any]:
            got, index = packed[0].decode(), sample_rows(rows, CHECKED_ROWS)
            expected = packed[0].take(index).decode()
            require_same_bytes("dequantize", got[index.to(self.device)].cpu(), expected)
            eager = self.baseline.dequantize(packed[0].data, packed[0].scale)
            require_same_bytes("dequantize against eager torch", got, eager)
            return {}

        return Contest(
            f"dequantize {rows}x{k} to bf16",
            packed[0].bytes,
            packed[0].bytes + 2 * rows * k,
            lambda i: packed[i].decode(),
            self.baseline.dequantize,
            lambda i: (packed[i].data, packed[i].scale),
            check,
        )

    def global_scale(self, rows: int, k: int) -> Contest:
        x = self.inputs(rows, k)

        def check() -> dict[str, Any]:
            got, eager = ops.global_scale(x[0]), self.baseline.global_scale(x[0])
            require_same_bytes("global_scale against eager torch", got, eager)
            return {}

        return Contest(
            f"global_scale {rows}x{k} bf16",
            total_bytes(x[0]),
            total_bytes(x[0], ops.global_scale(x[0])),
            lambda i: ops.global_scale(x[i]),
            self.baseline.global_scale,
            lambda i: (x[i],),
            check,
        )

    def dynamic(self, rows: int, k: int) -> Contest:
        x = self.inputs(rows, k)

        def ours(i: int) -> tuple[Tensor, Tensor]:
            return ops.quantize(x[i], ops.global_scale(x[i]))

        def check() -> dict[str, Any]:
            eager = self.baseline.dynamic_quantize(x[0])
            require_same_bytes("global_scale + quantize against eager torch", ours(0), eager)
            return {}

        return Contest(
            f"global_scale + quantize {rows}x{k} bf16",
            total_bytes(x[0]),
            2 * total_bytes(x[0]) + total_bytes(*ours(0)),
            ours,
            self.baseline.dynamic_quantize,
            lambda i: (x[i],),
            check,
        )

    def swiglu_quantize(self, rows: int, k: int) -> Contest:
        x = self.inputs(rows, 2 * k)
        g = torch.tensor(SWIGLU_GLOBAL_SCALE, device=self.device)

        def ours(i: int) -> tuple[Tensor, Tensor]:
            return ops.swiglu_quantize(x[i], g, pad_rows_to=PAD_ROWS_TO)

        def check() -> dict[str, Any]:
            data, scale = ours(0)
            padding = data[rows:]
            require_same_bytes("swiglu_quantize, padded rows", padding, torch.zeros_like(padding))
            got, index = Operand(data[:rows], scale), sample_rows(rows, CHECKED_ROWS)
            expected = ops.swiglu_quantize(x[0][index.to(self.device)].cpu(), g.cpu())
            check_rows("swiglu_quantize", got, Operand(*expected), index)
            eager = self.baseline.swiglu_quantize(x[0], g, PAD_ROWS_TO)
            return {"equal_to_torch": equal_fraction(data, eager[0])}

        return Contest(
            f"swiglu_quantize {rows}x{2 * k} bf16",
            total_bytes(x[0]),
            total_bytes(x[0], *ours(0)),
            ours,
            lambda x, g: self.baseline.swiglu_quantize(x, g, PAD_ROWS_TO),
            lambda i: (x[i], g),
            check,
        )


OPS = ("quantize", "dequantize", "global_scale", "dynamic", "swiglu_quantize")


def compiled(contest: Contest, backend: str) -> Variant | None:
    """torch.compile of torch's version, compiled already; None, and why on stderr, where it fails."""
    function = torch.compile(contest.torch, fullgraph=True, dynamic=False, backend=backend)
    try:
        function(*contest.arguments(0))
    except Exception as error:  # of the compiler's many kinds; the benchmark goes on without it
        print(f"torch.compile of {contest.name} failed: {error}", file=sys.stderr)
        return None
    return Variant("compile", lambda i: function(*contest.arguments(i)))


def run_contest(run: Run, contest: Contest, sets: int, backend: str | None) -> Record:
    """Checks, then times ours, torch eager, torch.compile and, where small, an empty kernel."""
    notes = contest.check()
    small = contest.moved_bytes < LAUNCH_BOUND_BYTES
    shared = {"sets": sets, "set_bytes": contest.input_bytes}
    variants = [
        Variant("ours", contest.ours, exact=True, **shared),
        Variant("torch", lambda i: contest.torch(*contest.arguments(i)), **shared),
    ]
    if backend and (variant := compiled(contest, backend)):
        variants.append(Variant(variant.name, variant.call, **shared))
    if small:
        variants.append(Variant("empty", empty_kernel(run.device), sets=EMPTY_SETS))
    samples = run.measure(variants)
    if small:
        notes |= launch_keys(run, contest, samples)
    least_us = notes.get("empty_us", 0.0)
    limit = run.limit(contest.moved_bytes, least_us=least_us)
    return Record(
        contest.name,
        samples["ours"].median,
        limit["limit_us"],
        ratio(samples, "torch"),
        ratio(samples, "compile"),
        {
            "limit": limit["limit"],
            **samples["ours"].summary(),
            "bytes": contest.moved_bytes,
            "tb_s": contest.moved_bytes / samples["ours"].median / 1e6,
            "torch_us": samples["torch"].median,
            "compile_us": samples["compile"].median if "compile" in samples else None,
            **notes,
        },
    )


def launch_keys(run: Run, contest: Contest, samples: dict[str, Samples]) -> dict[str, Any]:
    """Ours beside an empty kernel, in a graph and alone."""
    alone = run.timer.alone(lambda: contest.ours(0)).median
    empty_alone = run.timer.alone(empty_kernel(run.device)).median
    empty = samples["empty"].median
    return {
        "empty_us": empty,
        "alone_us": alone,
        "empty_alone_us": empty_alone,
        "note": f"empty kernel {empty:.2f} µs; alone {alone:.1f} µs, empty {empty_alone:.1f} µs",
    }


def sizes(quick: bool) -> list[tuple[str, int, int, bool]]:
    """(op, rows, k, whether torch.compile runs too), the canonical size first."""
    rows, k = (QUICK_ROWS, QUICK_K) if quick else (CANONICAL_ROWS, CANONICAL_K)
    small = QUICK_SMALL_ROWS if quick else SMALL_ROWS
    cases = [(op, rows, k, True) for op in OPS]
    for m in small:
        cases += [(op, m, k, op == "swiglu_quantize" and m == COMPILED_SMALL_ROWS) for op in OPS]
    return cases


def main(argv: list[str] | None = None) -> int:
    p = parser("producer", __doc__.split("\n\n")[0])
    p.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    run = Run("producer", p, argv)
    backend = None if run.arguments.no_compile else "eager" if run.quick else "inductor"
    maker = Maker(run)
    for op, rows, k, compile_too in sizes(run.quick):
        if not run.wanted(f"{op} {rows}x{k}"):
            continue
        contest = getattr(maker, op)(rows, k)
        sets = run.timer.sets(contest.input_bytes)
        run.add(run_contest(run, contest, sets, backend if compile_too else None))
        del contest
        if run.device == "cuda":
            torch.cuda.empty_cache()
    run.finish("Producers")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
