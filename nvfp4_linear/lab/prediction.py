"""What bench/traffic.py predicts of an algorithm's L2 traffic, for ``explain --predict``.

cuBLASLt documents neither the order in which tiles are taken nor what its swizzle means, so the
algorithm's tile is put through several orders: the spread is part of the answer. A prediction, never
a measurement.
"""

from __future__ import annotations

import importlib
from dataclasses import asdict
from typing import Any

import torch

from ..algorithms import Algorithm, Device, Plan
from ..console import CommandError
from .candidates import tile_shape

ORDERS = ("row-major", "grouped:8", "column-major+grouped:8")
SPLIT_ORDERS = ("stream-k-tail", "stream-k")
ELEMENTS = {"nvfp4": "nvfp4", "bf16": "bf16", "fp16": "bf16", "fp8_e4m3": "fp8"}
MAX_STEPS = 4_000_000  # CTAs x K steps of an order: some seconds


def predictions(plan: Plan, device: Device) -> list[dict[str, Any]]:
    """Of the cuBLASLt GEMM that a plan runs (on the emulated rung: of one chunk), an order each.

    Empty where no cuBLASLt algorithm runs. Raises CommandError without bench/traffic.py, for a chip
    whose L2 is not known, and where the grid is too large to walk through.
    """
    inner = plan.details.get("plan") or {}
    tile = tile_shape(plan.algorithm.tile) if plan.algorithm else None
    if tile is None:
        return []
    traffic = _traffic()
    problem = inner["problem"]
    chip = _l2(traffic, device)
    grid = traffic.Problem(
        problem["m"], problem["n"], problem["k"],
        # Tiles are named in cuBLASLt's column-major view: the first side runs along our N.
        tile_m=tile[1], tile_n=tile[0], element=ELEMENTS[problem["type"]],
    )  # fmt: skip
    if grid.ctas * grid.k_steps > MAX_STEPS:
        raise CommandError(
            f"the prediction walks through {grid.ctas:,} tiles x {grid.k_steps:,} K steps, at most "
            f"{MAX_STEPS:,}: ask about a smaller problem, or python -m bench.traffic --tile-k"
        )
    return [
        {
            "rung": inner.get("rung"),
            **asdict(traffic.simulate(grid, order, sms=device.sm_count, l2_bytes=chip)),
        }
        for order in _orders(plan.algorithm)
    ]


def compare(
    pinned: Plan,
    heuristic: Plan,
    of_pinned: list[dict[str, Any]],
    of_heuristic: list[dict[str, Any]],
) -> dict[str, Any]:
    """Which of two plans the model favours, and why: by the bytes that their L2 misses read.

    Nobody knows the orders, so one is favoured only where neither end of its spread is worse. What
    the model leaves out, and so this, is in bench/traversal.py: polling and the exchange of partial
    sums, which cost a stream-K kernel more than it says, and any limit but memory.
    """
    arms = {
        name: {
            "algorithm": asdict(plan.algorithm) if plan.algorithm else None,
            "miss_bytes": [end(one["miss_bytes"] for one in found) for end in (min, max)],
        }
        for name, plan, found in (
            ("pinned", pinned, of_pinned),
            ("heuristic", heuristic, of_heuristic),
        )
    }
    own, other = (arm["miss_bytes"] for arm in arms.values())
    faster, verdict = None, "the model can't tell: it depends on the order"
    if own == other:
        verdict = "the model sees no difference"
    elif all(mine <= theirs for mine, theirs in zip(own, other, strict=True)):
        faster, verdict = "pinned", "the pinned algorithm should be faster"
    elif all(mine >= theirs for mine, theirs in zip(own, other, strict=True)):
        faster, verdict = "heuristic", "the heuristic's algorithm should be faster"
    text = (
        f"a prediction: {verdict}; L2 misses read {_gigabytes(own)} with the pin, "
        f"{_gigabytes(other)} with the heuristic's choice"
    )
    return {"basis": "prediction", "faster": faster, **arms, "text": text}


def _gigabytes(ends: list[int]) -> str:
    return " to ".join(f"{end / 1e9:.3f}" for end in ends) + " GB"


def text(found: list[dict[str, Any]]) -> list[str]:
    """Lines for people."""
    return [
        f"       predicted, not measured, {one['order']}: L2 hit rate {one['hit_rate']:.1%}, "
        f"{one['miss_bytes'] / 1e9:.3f} GB read misses, {one['amplification']:.2f}x one pass"
        for one in found
    ]


def _orders(algorithm: Algorithm) -> tuple[str, ...]:
    """Stream-K kernels carry a negative split-K (the study's finding; cuBLASLt doesn't say)."""
    return SPLIT_ORDERS if algorithm.split_k < 0 else ORDERS


def _traffic() -> Any:
    try:
        return importlib.import_module("bench.traffic")
    except ModuleNotFoundError:
        raise CommandError(
            "--predict needs bench/traffic.py, which is in the source tree and not in the installed "
            "package: run it in the root of the source tree"
        ) from None


def _l2(traffic: Any, device: Device) -> int:
    """Bytes of L2: a chip's of bench/traffic.py by its SM count, else this machine's."""
    for chip in traffic.CHIPS.values():
        if chip.sms == device.sm_count:
            return chip.l2_bytes
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(device.index).L2_cache_size
    raise CommandError(
        f"the L2 of {device} is not known: ask on a machine that has it, or python -m bench.traffic"
    )
