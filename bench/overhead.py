"""Host time of warm op calls, and what a call allocates.

    median_us         median over chunks of (host time of a chunk of calls) / calls. Calls are queued,
                      the device is waited for between chunks only; problems are so small that it
                      keeps up, so no call waits for room in the queue
    limit_us          10 µs, the target of a warm gemm; null where none is set
    allocations       blocks asked of torch's caching allocator a call: output and workspace
    device_mallocs    of these, how many reached the driver: 0 when warm
    heuristic_queries of all timed calls together: 0, as their plans are there
    first call        at an m never seen before, the same kernels warm: it plans, and asks the
                      heuristic where cuBLASLt runs. A plan hit that asked again would cost this
                      every time

torch's BF16 F.linear at the same sizes, measured in turn, is `torch_us`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from bench.check import Operand, agreement, ops, quantized, require_same_bytes
from bench.report import Record, Run, parser
from bench.timing import Samples, normal
from nvfp4_linear import explain
from nvfp4_linear.algorithms import heuristic_queries

TARGET_US = 10.0
N = 256
# m, k: on Hopper one launch; one of two slices of rows; a workspace and two launches. The fused
# kernels there want k in 32s: with another k operands are decoded for cuBLASLt, on every GPU.
FUSED_K, DECODED_K = 256, 272
CASES = ((16, FUSED_K), (64, FUSED_K), (512, FUSED_K), (64, DECODED_K))
FRESH_M = range(513, 523)  # m of the first calls
CALLS, QUICK_CALLS = 100, 3  # a chunk
CHUNKS, QUICK_CHUNKS = 30, 3

Call = Callable[[], Any]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Operands:
    """Small operands of one size; every method is a call with the arguments looked up already."""

    def __init__(self, device: str, m: int, k: int):
        self.x = normal(m, k, device, seed=1)
        self.gate_up = normal(m, 2 * k, device, seed=2)
        self.a = quantized(self.x)
        self.b = quantized(normal(N, k, device, seed=3))
        self.w = self.b.decode()
        self.g = ops.global_scale(self.x)
        self.alpha = torch.tensor(0.5)
        self.bias = normal(1, N, device, seed=4)[0]

    def gemm(self, op: Callable[..., Any] = ops.gemm, **options: Any) -> Call:
        arguments = (self.a.data, self.b.data, self.a.scale, self.b.scale)
        return lambda: op(*arguments, **options)

    def calls(self) -> dict[str, Call]:
        """Every op by its name in the report; the gemms have a target."""
        x, b, g, a = self.x, self.b, self.g, self.a
        return {
            "gemm": self.gemm(),
            "gemm, alpha on the host": self.gemm(alpha=self.alpha),
            "gemm, alpha on the device, bias": self.gemm(alpha=self.g, bias=self.bias),
            "gemm.default": self.gemm(ops.gemm.default),
            "gemm_a16w4": lambda: ops.gemm_a16w4(x, b.data, b.scale),
            "quantize": lambda: ops.quantize(x, g),
            "swiglu_quantize": lambda: ops.swiglu_quantize(self.gate_up, g),
            "dequantize": lambda: ops.dequantize(a.data, a.scale, out_dtype=torch.bfloat16),
            "global_scale": lambda: ops.global_scale(x),
        }

    def torch_linear(self) -> Call:
        return lambda: F.linear(self.x, self.w)


def check(operands: Operands) -> None:
    """The calls compute what they should, before their time means anything."""
    y = operands.gemm(alpha=operands.alpha)()
    a, b = (Operand(o.data.cpu(), o.scale.cpu()) for o in (operands.a, operands.b))
    agreement(y.cpu(), a, b, float(operands.alpha))
    x, g = operands.x.cpu(), operands.g.cpu()
    require_same_bytes("quantize", ops.quantize(operands.x, operands.g), ops.quantize(x, g))


def host_time(calls: dict[str, Call], run: Run) -> tuple[dict[str, Samples], dict[str, int]]:
    """Microseconds of host time a call, a sample a chunk, and the heuristic queries of all of them.

    The calls take turns chunk by chunk.
    """
    count = QUICK_CALLS if run.quick else CALLS
    us: dict[str, list[float]] = {name: [] for name in calls}
    queries = dict.fromkeys(calls, 0)
    for number in range(-2, QUICK_CHUNKS if run.quick else CHUNKS):
        for name, call in calls.items():
            synchronize(run.device)
            asked = heuristic_queries()
            start = time.perf_counter()
            for _ in range(count):
                call()
            elapsed = time.perf_counter() - start
            if number >= 0:
                us[name].append(elapsed / count * 1e6)
                queries[name] += heuristic_queries() - asked
    synchronize(run.device)
    return {name: Samples(tuple(values)) for name, values in us.items()}, queries


def allocations(call: Call, device: str, calls: int = 10) -> dict[str, float | None]:
    """Of one warm call, from torch's own counters; None on a CPU, which has none."""
    names = {"allocations": "allocation.all.allocated", "device_mallocs": "num_device_alloc"}
    if device != "cuda":
        return dict.fromkeys(names)
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    return {name: (after[key] - before[key]) / calls for name, key in names.items()}


def first_calls(device: str, k: int) -> tuple[Samples, int]:
    """Host time of the first gemm at each of several m that were never planned, and their queries."""
    us, asked = [], heuristic_queries()
    for m in FRESH_M:
        call = Operands(device, m, k).gemm()
        synchronize(device)
        start = time.perf_counter()
        call()
        us.append((time.perf_counter() - start) * 1e6)
        synchronize(device)
    return Samples(tuple(us)), heuristic_queries() - asked


def record(
    name: str, m: int, k: int, ours: Samples, theirs: Samples, extra: dict[str, Any]
) -> Record:
    has_target = name.startswith("gemm")
    return Record(
        f"{name}, m={m} n={N} k={k}" if has_target else f"{name}, m={m} k={k}",
        ours.median,
        TARGET_US if has_target else None,
        theirs.median / ours.median if has_target else None,
        extra={
            "limit": "target" if has_target else None,
            **ours.summary(),
            "torch_us": theirs.median,
            **extra,
            "note": note(extra),
        },
    )


def note(extra: dict[str, Any]) -> str:
    parts = [f"{extra['heuristic_queries']} heuristic queries"]
    if extra.get("allocations") is not None:
        parts.insert(0, f"{extra['allocations']:g} allocations")
    if "kernel" in extra:
        parts.append(extra["kernel"])
    return ", ".join(parts)


def main(argv: list[str] | None = None) -> int:
    run = Run("overhead", parser("overhead", __doc__.split("\n\n")[0]), argv)
    for m, k in CASES:
        operands = Operands(run.device, m, k)
        check(operands)
        calls = {name: call for name, call in operands.calls().items() if run.wanted(name)}
        samples, queries = host_time(calls | {"torch": operands.torch_linear()}, run)
        kernel = explain(m, N, k, device=run.device).kernel
        for name, call in calls.items():
            extra = allocations(call, run.device) | {"heuristic_queries": queries[name]}
            if name == "gemm":
                extra |= {"kernel": kernel}
            run.add(record(name, m, k, samples[name], samples["torch"], extra))
    if run.wanted("first call"):
        for k in (FUSED_K, DECODED_K):
            first, queries = first_calls(run.device, k)
            extra = {
                "heuristic_queries": queries,
                "kernel": explain(FRESH_M[0], N, k, device=run.device).kernel,
            }
            case = f"gemm, first call at each of {len(FRESH_M)} m, n={N} k={k}"
            summary = first.summary() | extra | {"note": note(extra)}
            run.add(Record(case, first.median, extra=summary))
    run.finish("Host time of a call")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
