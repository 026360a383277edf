"""Operands of one problem, an algorithm's output compared by bytes, and its time. In the child.

    sample      time of some launches between two CUDA events / their number; on the CPU, where
                only a test double runs, the host's clock around one
    pair        one sample of the heuristic's plan and one of the candidate's, in either order
    round       a pair of every finalist, after a warm-up: a GPU that waited for the next question
                is up to 8 % slower in its first millisecond, and whoever comes first would pay
    exact       every byte of the output buffer equals the heuristic's, after the buffer and the
                workspace were filled with 0x7F: an element nobody wrote, or one written outside
                the matrix, is seen

The heuristic's own plan is timed as cuBLASLt returned it. A candidate is made as a pin makes it:
AlgoInit, every attribute, AlgoCheck. Launches go round copies of operands and output that together
exceed twice L2; where one set is larger than that, there is one. A spin kernel before the first
event lets the launches queue up behind it, so that the host's speed is not timed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import nvfp4_linear  # noqa: F401  (registers torch.ops.nvfp4, which quantizes the operands)

OPS_ANSWERS = 8  # as many as the ops ask the heuristic for; the first is what runs unpinned
POISON = 0x7F
ALIGNMENT = 256  # what a Problem promises cuBLASLt at most
SAMPLE_S = 1e-3  # work in a sample of a screen: long beside the resolution of events, 0.5 us
ROUND_SAMPLE_S = 4e-3  # of a round: the GPU's clock moves under load, and a longer mean moves less
WARM_S = 1e-2  # work before the first pair of a round
MAX_REPEATS = 64
ROTATION = 2  # times L2
MAX_COPIES = 16
SPIN_CYCLES_PER_LAUNCH = 40_000  # 20 us at 2 GHz: longer than a launch takes the host
HOPELESS = 1.25  # a candidate this much slower than the heuristic is not sampled again
E4M3_MAX = 448.0
# A launch refused like this has reached no GPU.
HARMLESS_AT_LAUNCH = (
    "cublasLtMatmul CUBLAS_STATUS_NOT_SUPPORTED",
    "cublasLtMatmul CUBLAS_STATUS_INVALID_VALUE",
    "cublasLtMatmul CUBLAS_STATUS_ARCH_MISMATCH",
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BITS = {2: torch.int16, 4: torch.int32}


class Measurement:
    """One problem on one device: operands, the heuristic's plan and its output.

    problem: a `_cublaslt.Problem`. device: "cuda" or "cpu"; on the CPU cuBLASLt must be a double
    that computes on host memory.
    """

    def __init__(self, lt: Any, planner: Any, problem: Any, *, device: str, seed: int) -> None:
        self._lt, self._planner, self._problem = lt, planner, problem
        self._shape = problem.as_dict()
        if device == "cuda":
            torch.cuda.empty_cache()  # of the problem before
        else:
            torch.set_num_threads(1)  # idle threads of torch's would spin beside the double
        self._clock = make_clock(device)
        answers = planner.heuristic(problem, OPS_ANSWERS)
        accepted = [answer for answer in answers["answers"] if answer["ok"]]
        if not accepted:
            raise ValueError(f"the heuristic has no answer to compare with: {answers['reason']}")
        self._buffers = _Buffers(self._shape, device, seed, self._clock.l2_bytes)
        self._baseline = self._runnable(accepted[0]["plan"])
        self._known: dict[str, _Runnable] = {}
        self._reference = self._output_of(self._baseline).clone()
        self._reproducible = difference(self._output_of(self._baseline), self._reference) is None
        warm = [self._sample(self._baseline, 1) for _ in range(4)]
        self._estimate = max(statistics.median(warm[1:]), 1e-7)

    def describe(self) -> dict[str, Any]:
        """What the result file keeps about how this was measured."""
        return {
            "baseline": self._baseline.plan.algorithm,
            "reproducible": self._reproducible,
            "repeats": self._repeats(SAMPLE_S),
            "round_repeats": self._repeats(ROUND_SAMPLE_S),
            "copies": len(self._baseline.launches),
            "clock": self._clock.name,
            "device": self._clock.device_name,
            "l2_bytes": self._clock.l2_bytes,
            "torch": torch.__version__,
        }

    def screen(self, algorithm: Any, samples: int) -> dict[str, Any]:
        """Compares one candidate's output, then times up to `samples` pairs, fewer if hopeless."""
        answer = self._planner.check(self._problem, algorithm)
        if not answer["ok"]:
            return {"refused": answer["reason"]}
        candidate = self._runnable(answer["plan"])
        try:
            wrong = difference(self._output_of(candidate), self._reference)
        except RuntimeError as error:
            if not any(status in str(error) for status in HARMLESS_AT_LAUNCH):
                raise  # the GPU's context may be lost: the parent starts another process
            return {"refused": str(error)}
        base, own = [], []
        for number in range(samples):
            pair = self._pair(candidate, self._repeats(SAMPLE_S), swap=number % 2 == 1)
            base.append(pair["heuristic_s"])
            own.append(pair["s"])
            wrong = wrong or pair["difference"]
            if own[-1] > HOPELESS * base[-1]:
                break
        return {"heuristic_s": base, "s": own, "difference": wrong}

    def round(
        self, algorithms: list[Any], number: int, at: Callable[[int], None]
    ) -> list[dict[str, Any]]:
        """One pair for the heuristic against itself, then one for each candidate.

        Even rounds go AB through the list, odd ones BA backwards. at: told each position in
        `algorithms`, -1 for the heuristic, before it runs.
        """
        contenders = [self._baseline, *map(self._finalist, algorithms)]
        pairs: list[dict[str, Any]] = [{} for _ in contenders]
        repeats = self._repeats(ROUND_SAMPLE_S)
        self._sample(self._baseline, self._repeats(WARM_S))
        order = range(len(contenders))
        for index in order if number % 2 == 0 else reversed(order):
            at(index - 1)
            pairs[index] = self._pair(contenders[index], repeats, swap=number % 2 == 1)
        return pairs

    def settled(self, algorithm: Any, number: int) -> dict[str, Any]:
        """A sample of the heuristic, one of the algorithm, another of the heuristic; odd rounds go
        backwards. Each runs until the GPU has settled before it is timed."""
        candidate = self._finalist(algorithm)
        contenders = [self._baseline, candidate, self._baseline]
        samples, wrong = [0.0] * len(contenders), None
        order = range(len(contenders))
        for index in order if number % 2 == 0 else reversed(order):
            self._mean(contenders[index], self._clock.settle_s)
            samples[index] = self._mean(contenders[index], self._clock.sample_s)
            if contenders[index] is candidate:
                wrong = difference(self._buffers.outputs[0], self._reference)
        base, own, again = samples
        return {"heuristic_s": base, "s": own, "again_s": again, "difference": wrong}

    def _mean(self, contender: _Runnable, seconds: float) -> float:
        """Mean time of a launch over samples that take so long together; one sample at least."""
        repeats, total, samples = self._repeats(seconds), 0.0, 0
        while samples == 0 or total * repeats < seconds:
            total += self._sample(contender, repeats)
            samples += 1
        return total / samples

    def _finalist(self, algorithm: Any) -> _Runnable:
        key = repr(algorithm)
        if key not in self._known:
            answer = self._planner.check(self._problem, algorithm)
            if not answer["ok"]:
                raise ValueError(f"AlgoCheck took it before and not now: {answer['reason']}")
            self._known[key] = self._runnable(answer["plan"])
        return self._known[key]

    def _runnable(self, plan: Any) -> _Runnable:
        """As the ops launch it: with exactly the workspace that it asks for."""
        launches = [
            self._lt.Operands(**addresses, stream=self._clock.stream)
            for addresses in self._buffers.addresses(plan.workspace_bytes)
        ]
        return _Runnable(plan, launches)

    def _repeats(self, seconds: float) -> int:
        """Launches that take so long, by the heuristic's speed; 1 where a double computes."""
        if self._clock.device_name == "cpu":
            return 1
        return min(MAX_REPEATS, max(1, math.ceil(seconds / self._estimate)))

    def _pair(self, contender: _Runnable, repeats: int, swap: bool) -> dict[str, Any]:
        """A sample of the heuristic and one of the contender, whose output is compared."""
        base = None if swap else self._sample(self._baseline, repeats)
        own = self._sample(contender, repeats)
        wrong = difference(self._buffers.outputs[0], self._reference)
        if base is None:
            base = self._sample(self._baseline, repeats)
        return {"heuristic_s": base, "s": own, "difference": wrong}

    def _sample(self, contender: _Runnable, repeats: int) -> float:
        self._buffers.poison(contender.plan.workspace_bytes)

        def launch() -> None:
            for number in range(repeats):
                contender.run(number)

        return self._clock.seconds(launch, repeats) / repeats

    def _output_of(self, contender: _Runnable) -> Tensor:
        """The output buffer after one run into poisoned memory; valid until the next run."""
        self._buffers.poison(contender.plan.workspace_bytes)
        contender.run(0)
        self._clock.wait()
        return self._buffers.outputs[0]


@dataclass(frozen=True)
class _Runnable:
    """A plan and its launches, one for each copy of the buffers."""

    plan: Any
    launches: list[Any]

    def run(self, number: int) -> None:
        self.plan.run(self.launches[number % len(self.launches)])


def difference(output: Tensor, reference: Tensor) -> dict[str, Any] | None:
    """None where all bytes are equal; else how many elements differ, the first, and by how much.

    Both (rows, columns) of one dtype and device.
    """
    bits = BITS[output.element_size()]
    a, b = output.view(bits), reference.view(bits)
    if torch.equal(a, b):
        return None
    wrong = a != b
    row, column = divmod(int(wrong.reshape(-1).to(torch.uint8).argmax()), wrong.shape[1])
    got, expected = output[row, column].item(), reference[row, column].item()
    largest = (output.float() - reference.float()).abs().nan_to_num(math.inf, math.inf).max()
    return {
        "elements": int(wrong.sum()),
        "of": wrong.numel(),
        "first": [row, column],
        "got": repr(got),
        "expected": repr(expected),
        "largest": repr(largest.item()),
    }


class _Buffers:
    """Operands with random values, output and workspace, in as many copies as rotation needs."""

    def __init__(self, shape: dict[str, Any], device: str, seed: int, l2_bytes: int) -> None:
        self._device = device
        generator = torch.Generator(device).manual_seed(seed)
        first = [
            _operand(shape["type"], rows, shape["k"], shape[ld], device, generator)
            for rows, ld in ((shape["m"], "lda"), (shape["n"], "ldb"))
        ]
        out = (shape["m"], shape["ldd"])
        out_dtype = DTYPES[shape["out"]]
        used = sum(_bytes(t) for operand in first for t in operand if t is not None)
        used += math.prod(out) * out_dtype.itemsize
        copies = max(1, min(MAX_COPIES, math.ceil(ROTATION * l2_bytes / used)))
        self._operands = [first, *([_copy(o) for o in first] for _ in range(copies - 1))]
        self.outputs = [aligned(out, out_dtype, device) for _ in range(copies)]
        self._workspace = aligned((shape["workspace_limit"],), torch.uint8, device)
        self._bias = None
        if shape["bias"]:
            values = torch.randn(shape["n"], generator=generator, device=device)
            self._bias = placed(values.to(DTYPES[shape["bias"]]))
        # alpha on the device wants a zero beside it
        scalars = torch.tensor([1.0, 0.0], device=device)
        self._scalars = [placed(value.reshape(1)) for value in scalars]
        self._alpha_on_device = shape["alpha"] == "device"

    def addresses(self, workspace_bytes: int) -> list[dict[str, int]]:
        """Keywords of `_cublaslt.Operands`, one set a copy."""
        common = {
            "workspace": self._workspace.data_ptr() if workspace_bytes else 0,
            "workspace_bytes": workspace_bytes,
            "bias": _address(self._bias),
        }
        if self._alpha_on_device:
            common["alpha_pointer"], common["beta_pointer"] = map(_address, self._scalars)
        return [
            {
                "a": _address(a[0]),
                "b": _address(b[0]),
                "a_scale": _address(a[1]),
                "b_scale": _address(b[1]),
                "d": _address(d),
                **common,
            }
            for (a, b), d in zip(self._operands, self.outputs, strict=True)
        ]

    def poison(self, workspace_bytes: int) -> None:
        """Fills all outputs and so much of the workspace."""
        for tensor in (*self.outputs, self._workspace[:workspace_bytes]):
            tensor.view(torch.uint8).fill_(POISON)


Operand = tuple[Tensor, "Tensor | None"]


def _operand(
    type: str, rows: int, k: int, ld: int, device: str, generator: torch.Generator
) -> Operand:
    """(data, scale) of standard normal values; rows lie `ld` elements apart."""
    dense = torch.float16 if type == "fp16" else torch.bfloat16
    values = torch.randn(rows, ld, generator=generator, device=device, dtype=dense)
    if type in ("bf16", "fp16"):
        return placed(values), None
    if type == "fp8_e4m3":
        scale = values.abs().max().float().reshape(1) / E4M3_MAX
        return placed((values / scale.to(dense)).to(torch.float8_e4m3fn)), placed(scale)
    if ld != k:
        raise ValueError(f"lda and ldb must be k for nvfp4, got {ld}: measure packed rows")
    data, scale = torch.ops.nvfp4.quantize(values, torch.ops.nvfp4.global_scale(values))
    return placed(data), placed(scale)


def aligned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """An uninitialized tensor on a 256-byte boundary: torch's CPU allocator promises only 64."""
    size = math.prod(shape) * dtype.itemsize
    raw = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + size].view(dtype).view(shape)


def placed(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it on a 256-byte boundary."""
    if tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return aligned(tuple(tensor.shape), tensor.dtype, tensor.device.type).copy_(tensor)


def _copy(operand: Operand) -> Operand:
    data, scale = operand
    return placed(data.clone()), None if scale is None else placed(scale.clone())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def make_clock(device: str) -> Clock:
    """The clock of "cuda" or "cpu"."""
    return EventClock() if device == "cuda" else HostClock()


class EventClock:
    """CUDA events on torch's current stream.

    settle_s, sample_s: how long an arm runs before it is timed, and while it is, where a GPU at its
    power limit is to settle: its clock follows what ran some 50 ms ago.
    """

    name = "CUDA events"
    settle_s, sample_s = 0.2, 0.1

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.device_name = properties.name
        self.l2_bytes = properties.L2_cache_size
        self.stream = torch.cuda.current_stream().cuda_stream
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def seconds(self, launch: Callable[[], None], launches: int) -> float:
        start, end = self._events
        torch.cuda._sleep(SPIN_CYCLES_PER_LAUNCH * launches)
        start.record()
        launch()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3

    def wait(self) -> None:
        torch.cuda.synchronize()


class HostClock:
    """The host's clock, for a double that computes while it is called."""

    name = "host clock around a test double"
    settle_s = sample_s = 0.0
    device_name = "cpu"
    l2_bytes = 0
    stream = 0

    def seconds(self, launch: Callable[[], None], launches: int) -> float:
        start = time.perf_counter()
        launch()
        return time.perf_counter() - start

    def wait(self) -> None:
        pass


Clock = EventClock | HostClock
