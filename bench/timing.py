"""Device time of calls, variants interleaved: CUDA-graph replay on a GPU, the host's clock on a CPU.

    sample    = (time between two events around one replay) / calls in the graph
    round     = one sample of every variant of the case, AB in even rounds, BA in odd ones
    median_us = median over at least 20 rounds;  spread_us = 90th - 10th percentile
    copy rate = (bytes read + bytes written) / median time of one large device-to-device copy
    BF16 rate = 2 n^3 / median time of torch's n x n x n product, n = 8192, normal data

Inputs are cold: calls in a graph go round buffer sets that together exceed 4 x L2; where a set is
too small for that (at most 64 sets), no set is used twice in a replay and 4 x L2 of other data is
read before it, outside the events. Outputs rotate with the sets. What a previous replay left in L2
of inputs larger than that is a few percent of them at most.

A short spin kernel runs first, so that the replay is queued before the first event fires and no
launch latency of the host is timed. Every variant is called eagerly before capture; of one marked
`exact` the replay must give the same bytes as that call, or nothing is timed.

A launch alone (`alone`) is one call between two events, as a stream sees it, cold.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.check import require_same_bytes

ROUNDS = 20
WARM_ROUNDS = 2
ROTATION = 4  # times L2
MAX_SETS = 64
REPLAY_US = 1000.0  # work in a graph: long beside the resolution of events, about 0.5 us
MAX_CALLS = 128
QUEUE_CYCLES = 200_000  # of the spin kernel: 0.1 ms, longer than a graph launch takes the host
COPY_BYTES = {"cuda": 1 << 31, "cpu": 1 << 20}
MATMUL_SIZE = {"cuda": 8192, "cpu": 128}


@dataclass(frozen=True)
class Variant:
    """One contender of a case.

    call(i) runs once on buffer set i (0 <= i < sets) and returns what it wrote. set_bytes: what one
    call reads of its set. exact: a replay gives the same bytes as an eager call.
    """

    name: str
    call: Callable[[int], Any]
    sets: int = 1
    set_bytes: int = 0
    exact: bool = False


@dataclass(frozen=True)
class Samples:
    """Microseconds a call, one for each round."""

    us: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.us)

    def percentile(self, percent: float) -> float:
        """Linear between the two nearest samples."""
        ordered = sorted(self.us)
        at = (len(ordered) - 1) * percent / 100
        low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
        return low + (high - low) * (at - math.floor(at))

    def summary(self) -> dict[str, float]:
        """The keys of a record that describe the samples."""
        p10, p90 = self.percentile(10), self.percentile(90)
        return {
            "spread_us": p90 - p10,
            "p10_us": p10,
            "p90_us": p90,
            "min_us": min(self.us),
            "max_us": max(self.us),
            "rounds": len(self.us),
        }


def rotation_sets(set_bytes: int, l2_bytes: int) -> int:
    """Buffer sets of `set_bytes` that together reach 4 x L2, at most 64."""
    return min(MAX_SETS, max(1, math.ceil(ROTATION * l2_bytes / max(1, set_bytes))))


def plan_calls(variant: Variant, l2_bytes: int, estimate_us: float) -> tuple[int, bool]:
    """(calls in the graph, whether L2 is flushed before each replay). See the module docstring."""
    wanted = math.ceil(REPLAY_US / max(estimate_us, 1e-3))
    if variant.sets * variant.set_bytes >= ROTATION * l2_bytes:
        turns = max(1, min(wanted, MAX_CALLS) // variant.sets)
        return variant.sets * turns, False
    return max(1, min(wanted, variant.sets)), True


class GpuTimer:
    """Graph replays on the current GPU. `measure`, `alone` and `sets` are CpuTimer's too."""

    def __init__(self):
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.device = "cuda"
        self.l2_bytes = properties.L2_cache_size
        self.stream = torch.cuda.Stream()
        self._other_data = torch.ones(ROTATION * self.l2_bytes // 4, device="cuda")
        self._other_sum = torch.empty((), device="cuda")

    def sets(self, set_bytes: int) -> int:
        """How many buffer sets a case should have."""
        return rotation_sets(set_bytes, self.l2_bytes)

    def measure(self, variants: list[Variant], rounds: int = ROUNDS) -> dict[str, Samples]:
        """Samples of every variant by name. Raises WrongOutput where a replay differs."""
        replays = [_Replay(self, variant) for variant in variants]
        us: dict[str, list[float]] = {variant.name: [] for variant in variants}
        for number in range(-WARM_ROUNDS, rounds):
            for replay in replays if number % 2 == 0 else reversed(replays):
                sample = replay.time()
                if number >= 0:
                    us[replay.name].append(sample)
        return {name: Samples(tuple(values)) for name, values in us.items()}

    def alone(self, call: Callable[[], Any], samples: int = 50) -> Samples:
        """One call between two events, L2 flushed, the launch already queued."""
        us = []
        for _ in range(samples + WARM_ROUNDS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flush()
            torch.cuda._sleep(QUEUE_CYCLES)
            start.record()
            call()
            end.record()
            end.synchronize()
            us.append(start.elapsed_time(end) * 1e3)
        return Samples(tuple(us[WARM_ROUNDS:]))

    def flush(self) -> None:
        """Reads 4 x L2 of other data. Reads: dirty lines would be written back while timing."""
        torch.sum(self._other_data, dim=0, out=self._other_sum)


class _Replay:
    """A variant captured in a graph."""

    def __init__(self, timer: GpuTimer, variant: Variant):
        self.name = variant.name
        self._timer = timer
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        timer.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(timer.stream):
            eager, estimate_us = self._warm_up(variant)
            self.calls, self._flush = plan_calls(variant, timer.l2_bytes, estimate_us)
            outputs = self._capture(variant)
            self._graph.replay()
            timer.stream.synchronize()
        if variant.exact:
            require_same_bytes(f"{variant.name}, replayed", outputs, eager)

    def _warm_up(self, variant: Variant) -> tuple[Any, float]:
        """The outputs of an eager call where `exact`, and about how long a call takes."""
        for i in range(min(2, variant.sets)):
            variant.call(i)
        self._start.record()
        outputs = variant.call(0)
        self._end.record()
        self._end.synchronize()
        kept = outputs if variant.exact else None
        return kept, self._start.elapsed_time(self._end) * 1e3

    def _capture(self, variant: Variant) -> Any:
        """Captures `self.calls` calls; gives what the last call on set 0 wrote.

        Outputs of every set live until the capture ends, so that they have addresses of their own.
        """
        self._graph = torch.cuda.CUDAGraph()
        outputs: dict[int, Any] = {}
        gc.disable()  # a collection could free another graph, which a capture forbids
        try:
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                for number in range(self.calls):
                    outputs[number % variant.sets] = variant.call(number % variant.sets)
            finally:
                self._graph.capture_end()
        finally:
            gc.enable()
        return outputs[0]

    def time(self) -> float:
        """Microseconds a call."""
        with torch.cuda.stream(self._timer.stream):
            if self._flush:
                self._timer.flush()
            torch.cuda._sleep(QUEUE_CYCLES)
            self._start.record()
            self._graph.replay()
            self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) * 1e3 / self.calls


class CpuTimer:
    """The same flow where there is no GPU: its figures are the host's clock and mean little."""

    device = "cpu"
    l2_bytes = 0

    def sets(self, set_bytes: int) -> int:
        return 2

    def measure(self, variants: list[Variant], rounds: int = ROUNDS) -> dict[str, Samples]:
        us: dict[str, list[float]] = {variant.name: [] for variant in variants}
        for variant in variants:
            eager = variant.call(0)
            if variant.exact:
                require_same_bytes(f"{variant.name}, called again", variant.call(0), eager)
        for number in range(rounds):
            for variant in variants if number % 2 == 0 else reversed(variants):
                us[variant.name].append(_host_us(variant.call, number % variant.sets))
        return {name: Samples(tuple(values)) for name, values in us.items()}

    def alone(self, call: Callable[[], Any], samples: int = 5) -> Samples:
        return Samples(tuple(_host_us(call) for _ in range(samples)))


def _host_us(call: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter()
    call(*arguments)
    return (time.perf_counter() - start) * 1e6


Timer = GpuTimer | CpuTimer


def make_timer(device: str) -> Timer:
    """The timer of "cuda" or "cpu"."""
    return GpuTimer() if device == "cuda" else CpuTimer()


def empty_kernel(device: str) -> Callable[..., Any]:
    """Launches a kernel that does nothing: what any launch costs at least."""
    return (lambda *_: torch.cuda._sleep(0)) if device == "cuda" else (lambda *_: None)


COPIES = 4  # between two events


def copy_rate(timer: Timer, rounds: int = ROUNDS) -> float:
    """Bytes a second, read and written, of a device-to-device copy of random bytes.

    Eager on a GPU: as a node of a graph the same copy runs on a copy engine, at two thirds of the
    rate that kernels reach, and would be no limit.
    """
    size = COPY_BYTES[timer.device]
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    if timer.device != "cuda":
        copy = Variant("copy", lambda _: target.copy_(source), set_bytes=size)
        return 2 * size / (timer.measure([copy], rounds)["copy"].median * 1e-6)
    times = []
    for _ in range(max(rounds, 5)):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        target.copy_(source)  # keeps the GPU busy while the host queues the rest
        start.record()
        for _ in range(COPIES):
            target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / COPIES)
    return 2 * size / statistics.median(times)


def matmul_rate(timer: Timer, rounds: int = ROUNDS) -> float:
    """Operations a second of torch's BF16 matrix product."""
    n = MATMUL_SIZE[timer.device]
    a, b = (normal(n, n, timer.device, seed) for seed in (1, 2))
    product = Variant("matmul", lambda _: a @ b.T, set_bytes=4 * n * n)
    return 2 * n**3 / (timer.measure([product], rounds)["matmul"].median * 1e-6)


def normal(rows: int, columns: int, device: str, seed: int) -> Tensor:
    """(rows, columns) BF16, standard normal."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, device=device, dtype=torch.bfloat16)
