"""The two arms of a gate: the same layers, with the heuristic's algorithm and with the pinned one.

An arm is selected, then warmed, then measured; selecting may throw plans away, and the first call
after that plans anew. `forward_swiglu` and `gemm` are the calls under test. The rest of a model is
the same in both arms, because nothing else plans with pins.

    OpsArms      on a GPU: the ops themselves; the pin policy is "never" or what it was
    DoubleArms   on the CPU with the test double: the layer's GEMM goes through `_cublaslt` on host
                 memory, one planner an arm, so that pin, AlgoCheck, fallback and launch are those
                 of a GPU, and only the arithmetic is a stand-in
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import _cublaslt as lt
from .. import algorithms
from ..algorithms import Pin
from ..console import CommandError
from ..linear import Nvfp4Linear
from .measure import POISON, aligned, placed
from .route import takes_pin
from .session import Machine

HEURISTIC, PINNED = "heuristic", "pinned"
WORKSPACE_BYTES = 32 << 20  # as the ops allow it

_ops = torch.ops.nvfp4


@dataclass(frozen=True)
class Operands:
    """What an fc2's GEMM is given: the activation as the producer made it, and the weight.

    weight_scale: swizzled; None for a dense weight (N, K), which only a GPU's arms take.
    """

    data: Tensor
    block_scale: Tensor
    weight: Tensor
    weight_scale: Tensor | None
    alpha: Tensor

    @staticmethod
    def produce(fc2: Nvfp4Linear, gate_up: Tensor) -> Operands:
        """gate_up: (tokens, 2K). Needs a "static" fc2, whose producer has no amax to find."""
        if fc2.activation != "static" or fc2.bias is not None:
            raise ValueError(
                f"fc2 must be static and without a bias, got {fc2.activation!r} and bias "
                f"{fc2.bias is not None}: the gate's transformer makes it so"
            )
        data, block_scale = produce(fc2, gate_up)
        alpha = fc2.input_scale * fc2.weight_scale_2
        return Operands(data, block_scale, fc2.weight, fc2._swizzled_scale(), alpha)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(m, n, k)"""
        return self.data.shape[0], self.weight.shape[0], 2 * self.data.shape[1]


def produce(fc2: Nvfp4Linear, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """The fused producer, which is the same in both arms: data and block scales."""
    return _ops.swiglu_quantize(gate_up, fc2.input_scale)


class Arms(Protocol):
    """See the module docstring."""

    def select(self, name: str) -> None: ...

    def gemm(self, operands: Operands) -> Tensor: ...

    def forward_swiglu(self, fc2: Nvfp4Linear, gate_up: Tensor) -> Tensor: ...

    def describe(self, m: int, n: int, k: int, weight: str = "nvfp4") -> dict[str, Any]: ...

    def close(self) -> None: ...


def make_arms(machine: Machine, pins: Iterable[Pin]) -> Arms:
    """The arms of a machine; the pinned one has `pins` beside those already in force."""
    return DoubleArms(machine, pins) if machine.test_double else OpsArms(machine, pins)


class OpsArms:
    def __init__(self, machine: Machine, pins: Iterable[Pin]) -> None:
        self._machine = machine
        self._policy = algorithms.pin_policy()
        if self._policy == "never":
            raise CommandError("NVFP4_PIN_POLICY is never, so no arm can be pinned: unset it")
        self._added = [algorithms.pin(row) for row in pins]

    def select(self, name: str) -> None:
        algorithms.pin_policy("never" if name == HEURISTIC else self._policy)

    def gemm(self, operands: Operands) -> Tensor:
        o, after = operands, (operands.alpha, None, torch.bfloat16)
        if o.weight_scale is None:
            return _ops.gemm_a4w16(o.data, o.weight, o.block_scale, *after)
        return _ops.gemm(o.data, o.weight, o.block_scale, o.weight_scale, *after)

    def forward_swiglu(self, fc2: Nvfp4Linear, gate_up: Tensor) -> Tensor:
        return Nvfp4Linear.forward_swiglu(fc2, gate_up)

    def describe(self, m: int, n: int, k: int, weight: str = "nvfp4") -> dict[str, Any]:
        plan = algorithms.explain(
            m, n, k, device=self._machine.chip, weight=weight, alpha_on_device=True
        )
        return {
            "rung": plan.rung,
            "kernel": plan.kernel,
            "pinned": takes_pin(plan),
            "algorithm": (plan.details["plan"] or {}).get("algorithm"),
            "evidence": plan.evidence,
            "workspace_bytes": plan.workspace_bytes,
            "refusals": [f"{refusal.rung}: {refusal.reason}" for refusal in plan.refusals]
            + [f"inside, {r['rung']}: {r['reason']}" for r in plan.details["inner_refusals"]],
        }

    def close(self) -> None:
        """Puts policy and pins back as they were."""
        algorithms.pin_policy(self._policy)
        for row in self._added:
            algorithms.unpin(row)


class DoubleArms:
    def __init__(self, machine: Machine, pins: Iterable[Pin]) -> None:
        self._device = lt.DeviceInfo(**machine.device_info())
        self._planners = {
            HEURISTIC: lt.Planner(machine.library, "never"),
            PINNED: lt.Planner(machine.library, "validated"),
        }
        for row in pins:
            self._planners[PINNED].pin(lt.Pin.parse(row.to_text()))
        self._planner = self._planners[HEURISTIC]
        self._workspace = aligned((WORKSPACE_BYTES,), torch.uint8, "cpu")

    def select(self, name: str) -> None:
        self._planner = self._planners[name]

    def gemm(self, operands: Operands) -> Tensor:
        m, n, k = operands.shape
        out = aligned((m, n), torch.bfloat16, "cpu")
        out.view(torch.uint8).fill_(POISON)
        tensors = {
            "a": operands.data,
            "b": operands.weight,
            "a_scale": operands.block_scale,
            "b_scale": operands.weight_scale,
        }
        placed_tensors = {name: placed(tensor.contiguous()) for name, tensor in tensors.items()}
        launch = lt.Operands(
            **{name: tensor.data_ptr() for name, tensor in placed_tensors.items()},
            d=out.data_ptr(),
            alpha=float(operands.alpha),
            workspace=self._workspace.data_ptr(),
            workspace_bytes=WORKSPACE_BYTES,
        )
        self._planner.matmul(self._problem(m, n, k), launch)
        return out

    def forward_swiglu(self, fc2: Nvfp4Linear, gate_up: Tensor) -> Tensor:
        return self.gemm(Operands.produce(fc2, gate_up))

    def describe(self, m: int, n: int, k: int, weight: str = "nvfp4") -> dict[str, Any]:
        plan = self._planner.plan(self._problem(m, n, k))
        return {
            "rung": plan.rung,
            "kernel": "test double on host memory",
            "pinned": plan.rung == "cublaslt-pinned",
            "algorithm": plan.algorithm,
            "evidence": plan.evidence,
            "workspace_bytes": plan.workspace_bytes,
            "refusals": [f"{rung}: {reason}" for rung, reason in plan.refusals],
        }

    def close(self) -> None:
        pass

    def _problem(self, m: int, n: int, k: int) -> Any:
        return lt.Problem("nvfp4", m, n, k, self._device, workspace_limit=WORKSPACE_BYTES)
