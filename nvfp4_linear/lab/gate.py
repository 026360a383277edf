"""The ladder a pinned algorithm climbs before it is promoted: isolated → block → trajectory.

    sweep       (where asked for) finds the candidates; lab/sweep.py
    isolated    one fc2's GEMM, and its producer + GEMM, on activations of the model itself
    block       whole blocks on what the model feeds them
    trajectory  whole trajectories, 2 and 12 steps: one pair each

In isolated and block every round measures heuristic, pinned and the heuristic again, in the other
order every other round: p50 of the rounds; the two heuristic samples give the noise (verdict.py).
Before a sample its arm runs until a GPU at its power limit has settled: its clock follows what ran
some 50 ms ago, and so an arm pays for the power of the one before it.
Only what ``fc2.forward_swiglu`` does differs between the arms. At every stage the outputs have to
be equal byte for byte; the first difference is named and ends the ladder. Faster beyond the noise
is demanded of the isolated GEMM, not slower beyond it of everything above.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor, nn

from .. import _cublaslt as lt
from ..console import CommandError, Console
from .arms import HEURISTIC, PINNED, Arms, Operands, produce
from .measure import POISON, Clock, difference, make_clock
from .session import Machine
from .verdict import compare, noise_of, tflops

FORMAT = "nvfp4_linear gate 1"
MAX_CALLS = 256
ARMS = (HEURISTIC, PINNED, HEURISTIC)  # the second heuristic sample is the A/A partner of the first


@dataclass(frozen=True)
class Ladder:
    """How far and how often. blocks: which to gate. steps: of the trajectories."""

    rounds: int = 20
    blocks: tuple[int, ...] = (0, 24, 49)
    steps: tuple[int, ...] = (2, 12)
    keep_going: bool = False


class Failed(Exception):
    """A stage that was not passed, and why."""


def run_gate(
    machine: Machine,
    model: nn.Module,
    arms: Arms,
    ladder: Ladder,
    console: Console,
    save: Callable[[dict[str, Any]], None] = lambda data: None,
) -> dict[str, Any]:
    """Climbs the ladder with a calibrated VideoTransformer; gives the report's data.

    save: given what there is after every measurement, without a verdict until the last.
    Raises CommandError where no pin takes the FC2 problem: there is nothing to promote then.
    """
    return _Gate(machine, model, arms, ladder, console, save).run()


class _Gate:
    def __init__(
        self,
        machine: Machine,
        model: nn.Module,
        arms: Arms,
        ladder: Ladder,
        console: Console,
        save: Callable[[dict[str, Any]], None],
    ) -> None:
        self._model, self._arms, self._ladder, self._console = model, arms, ladder, console
        self._save = save
        self._clock = make_clock(machine.device)
        config = model.config
        self._shape = (config.tokens, config.hidden, config.ffn)
        bad = [index for index in ladder.blocks if not 0 <= index < config.blocks]
        if bad:
            raise CommandError(
                f"--gate-blocks must be below --blocks, which is {config.blocks}, got {bad[0]}"
            )
        self._noise = 0.0  # the largest seen so far
        self.data: dict[str, Any] = {
            "format": FORMAT,
            "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
            "machine": {
                "gpu": machine.name,
                "cc": list(machine.chip.cc),
                "sm_count": machine.chip.sm_count,
                "cublaslt": lt.Planner(machine.library).library["version"],
                "test_double": machine.test_double,
                "clock": self._clock.name,
                "torch": torch.__version__,
            },
            "model": {**asdict(config), "dtype": str(config.dtype), "tokens": config.tokens},
            "ladder": asdict(ladder),
            "arms": {},
            "isolated": None,
            "blocks": [],
            "trajectories": [],
            "verdict": None,
        }

    def run(self) -> dict[str, Any]:
        failures: list[str] = []
        with torch.inference_mode(), self._routed():
            self._describe_arms()
            inputs = self._capture()
            for stage in (self._isolated, self._blocks, self._trajectories):
                try:
                    stage(inputs)
                except Failed as failed:
                    failures.append(str(failed))
                    if not self._ladder.keep_going:
                        break
        self.data["verdict"] = {
            "promoted": not failures,
            "noise": self._noise,
            "reasons": failures
            or ["byte-exact at every stage, faster in isolation, slower nowhere"],
        }
        self._save(self.data)
        return self.data

    # --------------------------------------------------------------------------- preparations

    @contextmanager
    def _routed(self) -> Iterator[None]:
        """Every fc2.forward_swiglu of the model goes through the selected arm."""

        def through(fc2: Any) -> Callable[[Tensor], Tensor]:
            return lambda gate_up: self._arms.forward_swiglu(fc2, gate_up)

        layers = [block.fc2 for block in self._model.blocks]
        for fc2 in layers:
            fc2.forward_swiglu = through(fc2)
        try:
            yield
        finally:
            for fc2 in layers:
                del fc2.forward_swiglu

    def _describe_arms(self) -> None:
        for name in (HEURISTIC, PINNED):
            self._arms.select(name)
            self.data["arms"][name] = self._arms.describe(*self._shape)
        pinned = self.data["arms"][PINNED]
        if not pinned["pinned"]:
            m, n, k = self._shape
            raise CommandError(
                f"no pin takes the FC2 problem {m} x {n} x {k}, so there is nothing to promote; "
                f"--pins names a pin file, --sweep finds a candidate "
                f"({'; '.join(pinned['refusals'])})"
            )

    def _capture(self) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """What the gated blocks are called with in the first step, in the heuristic arm."""
        inputs: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

        def keep(index: int) -> Callable[..., None]:
            return lambda _, arguments: inputs.__setitem__(
                index, tuple(tensor.clone() for tensor in arguments)
            )

        hooks = [
            self._model.blocks[index].register_forward_pre_hook(keep(index))
            for index in self._ladder.blocks
        ]
        self._arms.select(HEURISTIC)
        self._model.sample(self._model.noise(), 1)
        for hook in hooks:
            hook.remove()
        return inputs

    # ----------------------------------------------------------------------------- the stages

    def _isolated(self, inputs: dict[int, tuple[Tensor, Tensor, Tensor]]) -> None:
        index = self._ladder.blocks[len(self._ladder.blocks) // 2]
        fc2, gate_up = self._gate_up(index, inputs[index])
        operands = Operands.produce(fc2, gate_up)
        rounds = self._ladder.rounds
        producer = [
            self._clock.seconds(lambda: produce(fc2, gate_up), 1) for _ in range(rounds + 1)
        ][1:]
        gemm = self._alternate("GEMM", lambda: self._arms.gemm(operands))
        whole = self._alternate("producer + GEMM", lambda: self._arms.forward_swiglu(fc2, gate_up))
        self.data["isolated"] = {
            "of_block": index,
            "producer_s": producer,
            "gemm": gemm,
            "producer_and_gemm": whole,
            "tflops": {
                name: tflops(*self._shape, gemm["comparison"][f"{key}_s"])
                for name, key in ((HEURISTIC, "heuristic"), (PINNED, "candidate"))
            },
        }
        self._save(self.data)
        self._demand_same("isolated GEMM", gemm)
        self._demand_same("isolated producer + GEMM", whole)
        if not gemm["faster"]:
            raise Failed(
                f"isolated GEMM: the pinned algorithm is {gemm['comparison']['ratio']:.4f} times "
                f"as fast, not beyond the noise of {gemm['noise']:.2%}"
            )
        self._demand_not_slower("isolated producer + GEMM", whole)

    def _gate_up(self, index: int, arguments: tuple[Tensor, Tensor, Tensor]) -> tuple[Any, Tensor]:
        """A block's fc2 and what it is called with."""
        block = self._model.blocks[index]
        kept: list[Tensor] = []
        through = block.fc2.forward_swiglu

        def keep(gate_up: Tensor) -> Tensor:
            kept.append(gate_up)
            return through(gate_up)

        block.fc2.forward_swiglu = keep
        block(*arguments)
        block.fc2.forward_swiglu = through
        return block.fc2, kept[0]

    def _blocks(self, inputs: dict[int, tuple[Tensor, Tensor, Tensor]]) -> None:
        for index in self._ladder.blocks:
            block, arguments = self._model.blocks[index], inputs[index]
            found = self._alternate(f"block {index}", lambda: block(*arguments))  # noqa: B023
            self.data["blocks"].append({"block": index, **found})
            self._save(self.data)
            self._demand_same(f"block {index}", found)
            self._demand_not_slower(f"block {index}", found)

    def _trajectories(self, _: Any) -> None:
        for steps in self._ladder.steps:
            seconds, latents = {}, {}
            for name in (HEURISTIC, PINNED):
                seconds[name], latents[name] = self._trajectory(name, steps)
            different = difference(latents[PINNED], latents[HEURISTIC])
            self.data["trajectories"].append(
                {"steps": steps, "seconds": seconds, "difference": different}
            )
            self._save(self.data)
            what = f"{steps}-step trajectory"
            self._demand_same(what, {"difference": different, "itself": None})
            if seconds[PINNED] > seconds[HEURISTIC] * (1 + self._noise):
                raise Failed(
                    f"{what}: {seconds[PINNED]:.3f} s pinned, {seconds[HEURISTIC]:.3f} s with the "
                    f"heuristic, more than the noise of {self._noise:.2%} slower"
                )

    def _trajectory(self, name: str, steps: int) -> tuple[float, Tensor]:
        bar = iter(self._console.progress(range(steps), f"{name}, {steps} steps"))
        start = self._model.noise()
        self._arms.select(name)
        result: list[Tensor] = []

        def run() -> None:
            result.append(self._model.sample(start, steps, lambda _: next(bar, None)))

        seconds = self._clock.seconds(run, 1)
        next(bar, None)  # closes it
        return seconds, result[0]

    # ---------------------------------------------------------------------------- measurement

    def _alternate(self, what: str, call: Callable[[], Tensor]) -> dict[str, Any]:
        rounds = self._console.progress(range(self._ladder.rounds), what)
        found = alternate(self._arms, self._clock, rounds, call)
        self._noise = max(self._noise, found["noise"])
        return found

    def _demand_same(self, what: str, found: dict[str, Any]) -> None:
        if found["itself"]:
            raise Failed(
                f"{what}: the heuristic's own output varies from run to run, so byte-exactness "
                f"can't be shown: {_first(found['itself'])}"
            )
        if found["difference"]:
            raise Failed(f"{what}: the outputs differ: {_first(found['difference'])}")

    def _demand_not_slower(self, what: str, found: dict[str, Any]) -> None:
        if found["slower"]:
            raise Failed(
                f"{what}: the pinned arm is {found['comparison']['ratio']:.4f} times as fast, "
                f"slower by more than the noise of {found['noise']:.2%}"
            )


def alternate(
    arms: Arms, clock: Clock, rounds: Iterable[int], call: Callable[[], Tensor]
) -> dict[str, Any]:
    """p50s of both arms over alternating rounds, and an output of each against the heuristic's.

    call: what is timed; gives a 2-D output. The first of a sample's calls is the one compared: its
    memory was poisoned.
    """
    arms.select(HEURISTIC)
    reference = call().clone()
    warm, timed = _calls(clock, call)
    samples: list[list[float]] = [[] for _ in ARMS]
    differences: list[Any] = [None for _ in ARMS]
    for number in rounds:
        order = range(len(ARMS))
        for position in order if number % 2 == 0 else reversed(order):
            arms.select(ARMS[position])
            for _ in range(warm):
                call()  # plans, loads the kernel, and the GPU's clock settles
            _poison_next(reference)
            out: list[Tensor] = []

            def sample(out: list[Tensor] = out) -> None:
                out.append(call())
                for _ in range(timed - 1):
                    call()

            samples[position].append(clock.seconds(sample, timed) / timed)
            found = difference(out[0], reference)
            differences[position] = differences[position] or found
    comparison = compare(samples[0], samples[1])
    noise = noise_of(compare(samples[0], samples[2]))
    return {
        "calls": {"warm": warm, "timed": timed},
        "heuristic_s": samples[0],
        "pinned_s": samples[1],
        "heuristic_again_s": samples[2],
        "comparison": asdict(comparison),
        "noise": noise,
        "faster": comparison.faster(noise),
        "slower": comparison.slower(noise),
        "difference": differences[1],
        "itself": differences[0] or differences[2],
    }


def _calls(clock: Clock, call: Callable[[], Tensor]) -> tuple[int, int]:
    """How many calls settle an arm, and how many make a sample: the clock says how long."""
    if not clock.sample_s:
        return 1, 1
    once = min(clock.seconds(call, 1) for _ in range(2))
    warm, timed = (math.ceil(seconds / once) for seconds in (clock.settle_s, clock.sample_s))
    return min(MAX_CALLS, warm), min(MAX_CALLS, timed)


def _first(different: dict[str, Any]) -> str:
    row, column = different["first"]
    return (
        f"{different['elements']:,} of {different['of']:,} elements, the first at ({row}, {column}): "
        f"{different['got']}, the heuristic's is {different['expected']}"
    )


def _poison_next(like: Tensor) -> None:
    """Fills the block that torch's allocator on a GPU hands out next for an output like this."""
    if like.is_cuda:
        torch.full_like(like.view(torch.uint8), POISON)
