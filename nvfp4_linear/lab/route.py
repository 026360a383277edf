"""Which cuBLASLt problems stand behind a ``torch.ops.nvfp4.gemm``, or behind a ``gemm_a4w16``: those
a pin has to match.

On a chip with FP4 tensor cores it is the NVFP4 problem itself. On the emulated rung cuBLASLt is
given decoded operands, BF16, in chunks of D: whole chunks and what is left over in either direction.
"""

from __future__ import annotations

from typing import Any

from .. import algorithms
from ..console import CommandError
from .session import Machine
from .sweep import make_problem


def problems_behind(
    machine: Machine, m: int, n: int, k: int, weight: str = "nvfp4"
) -> list[dict[str, Any]]:
    """As `make_problem` gives them, largest first, with alpha on the device, as layers call it; empty
    where no cuBLASLt runs (small M). weight: as ``explain`` takes it.

    A test double stands for a chip with FP4 tensor cores. Raises CommandError where no rung takes
    the gemm.
    """
    if machine.test_double:
        return [make_problem(machine, "nvfp4", m, n, k, alpha="device")]
    plan = algorithms.explain(m, n, k, device=machine.chip, weight=weight, alpha_on_device=True)
    if plan.rung is None:
        raise CommandError(str(plan))
    if plan.rung != "emulated":
        return [make_problem(machine, "nvfp4", m, n, k, alpha="device")]
    if not plan.details["plan"]:
        return []
    sizes = [
        (rows, columns)
        for rows in _parts(m, plan.details["m_chunk"])
        for columns in _parts(n, plan.details["n_chunk"])
    ]
    return [
        make_problem(machine, "bf16", rows, columns, k, ldd=n, alpha="device")
        for rows, columns in sizes
    ]


def _parts(size: int, chunk: int) -> list[int]:
    """The sizes that chunks of `size` have: the whole ones', then the last one's."""
    return [part for part in dict.fromkeys((min(size, chunk), size % chunk)) if part]


def takes_pin(plan: algorithms.Plan) -> bool:
    """Whether a pin decides this call, on the first rung or inside the emulated one."""
    inner = plan.details.get("plan") or {}
    return "cublaslt-pinned" in (plan.rung, inner.get("rung"))
