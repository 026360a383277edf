"""What the rungs of a GPU's ladder compute: evidence, not speed.

    exact        gemm (emulated on an H200) against the exact CPU answer, every element within
                     one BF16 ulp + K 2^-22 sum |a b|,   and the fraction of equal bytes
    repeat       five calls, one in a captured graph, one on each of two streams at once: same bytes
    pins         every split-K-1 algorithm that cuBLASLt's heuristic offers for the BF16 problem
                 inside the emulated rung, pinned in turn: explain says it runs, and gemm gives the
                 bytes that it gave unpinned; on a GPU a check that finds nothing to pin fails
    refusals     what the rungs above say, as explain tells it; a pin whose tile id is out of range
                 is refused by us

A failure is written down, and the exit status is 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from bench.check import (
    WrongOutput,
    agreement,
    ops,
    quantized,
    require_same_bytes,
    sample_rows,
)
from bench.report import Record, Run, parser
from bench.timing import normal
from nvfp4_linear import Algorithm, Plan, algorithms, explain

# (m, n, k): both kernels of the emulated rung, one element, ragged in every dimension, long k
EXACT = (
    (1, 1, 16),
    (1, 5376, 14336),
    (7, 129, 528),
    (16, 1000, 4096),
    (32, 520, 2064),
    (33, 520, 2064),
    (129, 257, 48),
    (200, 1000, 4096),
    (256, 1024, 14336),
)
QUICK_EXACT = ((1, 1, 16), (33, 40, 48))
# One chunk of decoded operands: the plan that explain shows. On a Hopper a fused kernel takes up to
# 2048 rows where K is a multiple of 32.
PINNED = (3200, 5376, 14336)
QUICK_PINNED = (40, 48, 80)
REPEATED = ((16, 1000, 4096), (200, 1000, 4096))
QUICK_REPEATED = ((16, 24, 48),)
CHECKED_ROWS, CHECKED_COLUMNS = 256, 1024  # of larger ones a sample is compared
ALPHA = 0.37
HEURISTICS = 16  # asked of cuBLASLt
STUDY_SHAPE = (37_824, 5_376, 14_336)
OUT_OF_RANGE_TILE = 100_000


class Ladder:
    """One problem: operands on the device, and gemm on them."""

    def __init__(self, run: Run, m: int, n: int, k: int):
        self.run, self.shape = run, (m, n, k)
        self.a = quantized(normal(m, k, run.device, seed=m))
        self.b = quantized(normal(n, k, run.device, seed=n + 1))
        self.alpha = torch.tensor(ALPHA)

    def __str__(self) -> str:
        return "x".join(map(str, self.shape))

    def gemm(self) -> Tensor:
        return ops.gemm(self.a.data, self.b.data, self.a.scale, self.b.scale, self.alpha)

    def gemm_a16w4(self) -> Tensor:
        return ops.gemm_a16w4(self.a.decode(), self.b.data, self.b.scale, self.alpha)

    def plan(self) -> Plan:
        return explain(*self.shape, device=self.run.device)


def add(run: Run, case: str, passed: bool | None, **extra: Any) -> None:
    """A record without a time; `passed` None: not tried, see `skipped`."""
    facts = [f"{k} {v:.6g}" for k, v in extra.items() if isinstance(v, float)]
    facts += [f"{k}: {extra[k]}" for k in ("skipped", "reason") if k in extra]
    verdict = {True: "pass", False: "FAIL", None: "not tried"}[passed]
    note = ", ".join([verdict, *facts])
    run.add(Record(case, extra={"passed": passed, **extra, "note": note}))


@contextmanager
def reported(run: Run, case: str) -> Iterator[None]:
    """A wrong output inside becomes a failed record."""
    try:
        yield
    except WrongOutput as error:
        add(run, case, False, reason=str(error))


def check_exact(run: Run, shape: tuple[int, int, int]) -> None:
    ladder = Ladder(run, *shape)
    rows, columns = (
        sample_rows(shape[0], CHECKED_ROWS),
        sample_rows(shape[1], CHECKED_COLUMNS),
    )
    b = ladder.b.take(columns)
    a = {"gemm": ladder.a.take(rows)}
    a["gemm_a16w4"] = a["gemm"].decode()
    for op, operand in a.items():
        case = f"{op} {ladder} against the exact answer"
        with reported(run, case):
            y = getattr(ladder, op)().cpu()[rows][:, columns]
            agreed = agreement(y, operand, b, ALPHA)
            plan = ladder.plan()
            add(
                run,
                case,
                True,
                equal_to_exact=agreed.equal,
                of_bound=agreed.worst,
                elements=y.numel(),
                rung=plan.rung if op == "gemm" else None,
                kernel=plan.kernel if op == "gemm" else None,
            )


def check_repeat(run: Run, shape: tuple[int, int, int]) -> None:
    ladder = Ladder(run, *shape)
    case = f"gemm {ladder}, repeated"
    with reported(run, case):
        first = ladder.gemm()
        for number in range(4):
            require_same_bytes(f"call {number + 2}", ladder.gemm(), first)
        if run.device == "cuda":
            require_same_bytes("replay of a graph", replayed(ladder), first)
            for number, y in enumerate(on_two_streams(ladder)):
                require_same_bytes(f"stream {number + 1}", y, first)
        add(run, case, True, graph_and_streams=run.device == "cuda")


def replayed(ladder: Ladder) -> Tensor:
    """gemm's output from a graph, its memory poisoned between capture and replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ladder.gemm()
    y.view(torch.uint8).fill_(0x7F)
    graph.replay()
    torch.cuda.synchronize()
    return y


def on_two_streams(ladder: Ladder, calls: int = 8) -> list[Tensor]:
    """gemm's outputs with two streams busy at the same time."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outputs = []
    for _ in range(calls):
        for stream in streams:
            with torch.cuda.stream(stream):
                outputs.append(ladder.gemm())
    torch.cuda.synchronize()
    return outputs


def offered(plan: Plan) -> list[Algorithm]:
    """Split-K-1 algorithms that cuBLASLt's heuristic offers for the problem inside `plan`; the one
    that runs alone where `_cublaslt` was not built for this Python."""
    found = [plan.algorithm]
    try:
        from nvfp4_linear import _cublaslt as lt
    except ImportError:
        lt = None
    if lt is not None:
        problem = dict(plan.details["plan"]["problem"])
        problem["device"] = lt.DeviceInfo(**problem["device"])
        planner = lt.Planner(algorithms.library()["path"])
        names = [f.name for f in fields(Algorithm)]
        for answer in planner.heuristic(lt.Problem(**problem), HEURISTICS)["answers"]:
            algorithm = Algorithm(**{name: answer["algorithm"][name] for name in names})
            if answer["ok"] and algorithm not in found:
                found.append(algorithm)
    return [algorithm for algorithm in found if algorithm.split_k == 1]


def inner_plan(ladder: Ladder) -> dict[str, Any]:
    """The plan of the 16-bit product inside the emulated rung; empty where there is none."""
    plan = ladder.plan()
    return plan.details.get("plan") or {} if plan.rung == "emulated" else {}


def check_pins(run: Run, shape: tuple[int, int, int]) -> None:
    """The bytes of all pins are those of the unpinned plan, or of the first pin where that plan
    splits K. A pin that is refused is written down with the reason; one at least must be taken."""
    ladder = Ladder(run, *shape)
    plan, inner, case = ladder.plan(), inner_plan(ladder), f"gemm {ladder}, pinned and unpinned"
    if plan.algorithm is None or not inner:
        reason = f"needs a BF16 plan inside the emulated rung, got {plan.rung}, {plan.kernel}"
        if run.device == "cuda":
            remedy = "NVFP4_BACKEND=emulated forces the rung"
            add(run, case, False, reason=f"{reason}: {remedy}")
        else:
            add(run, case, None, skipped=reason)
        return
    expected = ladder.gemm() if plan.algorithm.split_k == 1 else None
    accepted = 0
    for algorithm in offered(plan):
        name = f"{case}: {algorithm}"
        row = algorithms.pin(algorithm, type=inner["problem"]["type"], k=shape[2])
        try:
            taken = inner_plan(ladder)
            if taken["rung"] != "cublaslt-pinned":
                add(run, name, None, skipped=f"the pin was refused: {taken['refusals']}")
                continue
            accepted += 1
            with reported(run, name):
                pinned = ladder.gemm()
                expected = pinned if expected is None else expected
                require_same_bytes("pinned against unpinned", pinned, expected)
                add(run, name, True, unpinned_split_k=plan.algorithm.split_k)
        finally:
            algorithms.unpin(row)
    add(run, f"{case}: pins taken", accepted > 0, accepted=accepted)


def check_refusals(run: Run) -> None:
    """What each policy's rungs say of the study's shape, and an id that we must not pass on."""
    before = algorithms.pin_policy()
    try:
        for policy in ("validated", "always"):
            algorithms.pin_policy(policy)
            plan = explain(*STUDY_SHAPE, device=run.device)
            reasons = {refusal.rung: refusal.reason for refusal in plan.refusals}
            case = f"rungs of the study's shape, policy {policy}"
            add(run, case, plan.rung is not None, rung=plan.rung, refusals=reasons)
    finally:
        algorithms.pin_policy(before)
    bad = Algorithm(id=66, tile=OUT_OF_RANGE_TILE, stages=35)
    try:
        algorithms.unpin(algorithms.pin(bad, cc=(9, 0), type="bf16"))
        add(run, "a tile id out of range", False, reason="the pin was accepted")
    except (ValueError, RuntimeError) as error:
        add(run, "a tile id out of range", True, reason=str(error).splitlines()[0])


def main(argv: list[str] | None = None) -> int:
    run = Run("ladder", parser("ladder_check", __doc__.split("\n\n")[0]), argv)
    for shape in QUICK_EXACT if run.quick else EXACT:
        if run.wanted("exact"):
            check_exact(run, shape)
    for shape in QUICK_REPEATED if run.quick else REPEATED:
        if run.wanted("repeat"):
            check_repeat(run, shape)
    if run.wanted("pins"):
        check_pins(run, QUICK_PINNED if run.quick else PINNED)
    if run.wanted("refusals"):
        check_refusals(run)
    run.finish("What the rungs compute")
    return int(any(record.extra["passed"] is False for record in run.records))


if __name__ == "__main__":
    raise SystemExit(main())
