"""Comparison by bytes, naming the first that differs; and the inputs that the byte tests share."""

import json
from pathlib import Path

import torch
from torch import Tensor

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
GOLDEN = json.loads((Path(__file__).parent / "data" / "golden.json").read_text())


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bit patterns as integers, on the CPU: NaN equals itself, −0 differs from +0."""
    return tensor.detach().cpu().contiguous().view(BITS[tensor.element_size()])


def assert_same_bytes(actual: Tensor, expected: Tensor, what: str = "result") -> None:
    """Same dtype, shape and bits; otherwise an error with the count and the first coordinate."""
    assert actual.dtype == expected.dtype, (
        f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    )
    assert actual.shape == expected.shape, (
        f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    wrong = bits(actual) != bits(expected)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        mask = (1 << (8 * actual.element_size())) - 1
        got, want = (int(bits(t)[at]) & mask for t in (actual, expected))
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements differ, first at {at}: "
            f"{got:#x}, expected {want:#x}"
        )


def fp32_from_bits(words: list[int]) -> Tensor:
    """FP32 values from 32-bit patterns."""
    signed = [w - (1 << 32) if w >= 1 << 31 else w for w in words]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


def fp32_from_hex(words: list[str]) -> Tensor:
    return fp32_from_bits([int(w, 16) for w in words])


def to_hex(tensor: Tensor) -> str:
    """The bytes of a one-byte dtype, in order."""
    return bytes(bits(tensor).flatten().tolist()).hex()


def bytes_from_hex(text: str, rows: int) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8).reshape(rows, -1)


def every_bf16() -> Tensor:
    """All 65,536 BF16 values, NaNs included."""
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)


def neighbours(values: Tensor) -> Tensor:
    """FP32 values with the FP32 right below and right above each."""
    below = torch.nextafter(values, torch.tensor(-torch.inf))
    above = torch.nextafter(values, torch.tensor(torch.inf))
    return torch.cat((below, values, above))


def scales_onto_ties(value: float, dtype: torch.dtype) -> Tensor:
    """FP32 g for which value · g, inexact, rounds in FP32 to a tie of BF16 or FP16: two roundings
    and one give different results for about half of them."""
    explicit_bits = {torch.bfloat16: 7, torch.float16: 10}[dtype]
    odd = 2 * torch.arange(64) + 1
    ties = 1 + odd * 2.0 ** -(explicit_bits + 1)
    g = (ties / value).float()
    inexact = g.double() * value != ties.double()
    return g[inexact & (g * value == ties)]


# --- inputs: name → (rows, k, generator) FP32; cast to the dtype under test

TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]


def normal(rows: int, k: int, rng: torch.Generator) -> Tensor:
    return torch.randn(rows, k, generator=rng)


def heavy_tailed(rows: int, k: int, rng: torch.Generator) -> Tensor:
    """Cauchy-like: a few elements thousands of times the rest."""
    over = torch.randn(rows, k, generator=rng)
    return over / torch.randn(rows, k, generator=rng).abs().clamp(min=1e-4)


def tiny(rows: int, k: int, rng: torch.Generator) -> Tensor:
    """FP32 subnormals and their surroundings: underflowing scales, subnormal products."""
    exponent = torch.randint(-149, -110, (rows, k), generator=rng)
    return (torch.randn(rows, k, generator=rng) * 2.0 ** exponent.double()).float()


def huge(rows: int, k: int, rng: torch.Generator) -> Tensor:
    """Up to the largest FP32 (Inf once cast to FP16): scales saturate."""
    exponent = torch.randint(100, 128, (rows, k), generator=rng)
    return torch.randn(rows, k, generator=rng).clamp(-1.98, 1.98) * 2.0**exponent


def any_bits(rows: int, k: int, rng: torch.Generator) -> Tensor:
    """Uniform over FP32 bit patterns, NaN and Inf included."""
    words = torch.randint(-(1 << 31), 1 << 31, (rows, k), generator=rng)
    return words.to(torch.int32).view(torch.float32)


def on_ties(rows: int, k: int, rng: torch.Generator) -> Tensor:
    """Blocks whose scale is a power of two, whose elements are E2M1 ties and their neighbours."""
    points = neighbours(torch.tensor([*TIES, 0.0, 6.0]))
    points = torch.cat((points, -points))
    x = points[torch.randint(len(points), (rows, k), generator=rng)]
    x[:, ::16] = 6.0
    exponent = torch.randint(-8, 7, (rows, k // 16), generator=rng)
    return x * (2.0 ** exponent.float()).repeat_interleave(16, dim=1)


def hand_made(rows: int, k: int, rng: torch.Generator) -> Tensor:
    """Zero, −0, subnormal, largest, Inf and NaN blocks among ordinary ones, in turn."""
    subnormal, largest = 2.0**-149, torch.finfo(torch.float32).max
    blocks = [
        torch.zeros(16),
        torch.full((16,), -0.0),
        torch.tensor([0.0, -0.0] * 8),
        torch.full((16,), subnormal),
        torch.tensor([subnormal, -subnormal] * 7 + [2.0**-126, -(2.0**-127)]),
        torch.full((16,), largest),
        torch.tensor([largest, -1.0] * 8),
        torch.tensor([1.0] * 3 + [torch.inf] + [1.0] * 12),
        torch.tensor([1.0, -2.0] * 7 + [-torch.inf, 0.5]),
        torch.tensor([torch.nan] + [-3.0] * 15),
        torch.full((16,), torch.nan),
        torch.tensor([*TIES, *(-t for t in TIES), 6.0, -6.0]),
        torch.tensor([-(2.0**-12)] + [-(2.0**-20)] * 15),  # the scale underflows: −0 codes
        torch.tensor([6 * 2.0**-10] + [-(2.0**-12)] * 15),  # a tie between scale 0 and 2⁻⁹
        torch.tensor([448.0 * 6, -448.0] * 8),
        torch.tensor([464.0 * 6, -448.0] * 8),  # would round to NaN without saturation
        torch.randn(16, generator=rng),
    ]
    order = torch.arange(rows * k // 16) % len(blocks)
    return torch.stack(blocks)[order].reshape(rows, k)


INPUTS = {f.__name__: f for f in (normal, heavy_tailed, tiny, huge, any_bits, on_ties, hand_made)}


def make_input(name: str, rows: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return INPUTS[name](rows, k, rng).to(dtype)


def random_operand(rows: int, k: int, seed: int, *, lowest: int = 0, highest: int = 0x7E):
    """Random codes and linear scale bytes in lowest … highest: (rows, K/2) and (rows, K/16)."""
    rng = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows, k // 2), generator=rng, dtype=torch.uint8)
    scale = torch.randint(lowest, highest + 1, (rows, k // 16), generator=rng, dtype=torch.uint8)
    return data, scale.view(torch.float8_e4m3fn)
