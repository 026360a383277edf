"""Every kernel once, at ragged sizes, for compute-sanitizer: memcheck, racecheck, initcheck.

Outputs are compared with the CPU's, so that a run which the sanitizer finds clean was also right.
Run it with PYTORCH_NO_CUDA_MEMORY_CACHING=1: each tensor is then an allocation of its own, and a
step past its end is seen. `--only` takes some of the parts: a sanitizer that stops in one says
nothing of the others. The part `decoded` goes through cuBLASLt (decode, product, epilogue), whose
own kernels memcheck can leave out by name; racecheck stops in them, and initcheck takes what they
write for never written. With NVFP4_CUBLASLT_LIBRARY at the double that
tests.fake_cublaslt.build_for_gpu makes, all three see our kernels on both sides of a plain product.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from bench.check import Operand, WrongOutput, agreement, ops, require_same_bytes
from nvfp4_linear import explain
from nvfp4_linear.algorithms import library
from nvfp4_linear.grouped import grouped_gemm

SIZES = ((1, 16), (5, 48), (33, 80), (129, 528))  # rows, k
GEMM_SIZES = (  # m, n, k; those with k in 32s are a kernel of their own on Hopper
    (1, 1, 16),
    (7, 33, 80),
    (16, 129, 528),
    (32, 72, 1040),
    (1, 1, 32),
    (8, 129, 1312),
    (16, 390, 544),
    (32, 72, 2080),
)
MID_SIZES = ((33, 24, 64), (64, 136, 544), (130, 72, 544), (257, 136, 544))
# Of weights so large that every block's ring of stages goes round: rows, and n, k.
LONG_ROWS, LONG_NK = (1, 8, 16, 32, 64, 128, 192, 257), (8192, 4096)
DECODED_SIZES = ((33, 24, 48), (97, 53, 80), (600, 72, 528))
GROUPED_SIZES = (((5, 0, 33), 136, 96), ((70, 1, 290), 264, 544))  # rows of each group, n, k
HOSTILE_ROWS = 100  # of problems that are small enough to try all that is hostile
CUT_SIZES = ((1, 40) * 6, 3584, 1056)  # more tiles than multiprocessors, so that some are cut
SLICED_SIZES = ((37, 136, 96), (130, 72, 544))  # m, n, k
GROUPED_VARIABLE = "NVFP4_GROUPED_KERNEL"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEED = 7


def values(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Normal, with zero, Inf and NaN among them, on the CPU."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(SEED))
    x[0, 0] = 0.0
    if rows > 2:
        x[1, 1], x[2, 2] = torch.inf, torch.nan
        x[-1] = 0.0
    return x.to(dtype)


def off_alignment(x: Tensor, device: str) -> Tensor:
    """x on the device, one element past an aligned address."""
    storage = torch.zeros(x.numel() + 1, dtype=x.dtype, device=device)
    storage[1:] = x.reshape(-1).to(device)
    return storage[1:].view(x.shape)


def producers(device: str) -> Iterator[str]:
    """quantize, swiglu_quantize, dequantize, global_scale and both swizzles; yields what ran."""
    for rows, k in SIZES:
        for dtype in DTYPES:
            x, gate_up = values(rows, k, dtype), values(rows, 2 * k, dtype)
            g = ops.global_scale(x)
            on_device = {"aligned": x.to(device), "unaligned": off_alignment(x, device)}
            for how, there in on_device.items():
                for swizzled in (True, False):
                    name = f"quantize {rows}x{k} {dtype} {how} swizzled={swizzled}"
                    got = ops.quantize(there, g.to(device), swizzled=swizzled)
                    require_same_bytes(name, got, ops.quantize(x, g, swizzled=swizzled))
                    yield name
                require_same_bytes("global_scale", ops.global_scale(there), g)
            for pad in (1, 128):
                name = f"swiglu_quantize {rows}x{2 * k} {dtype} pad_rows_to={pad}"
                got = ops.swiglu_quantize(gate_up.to(device), g.to(device), pad_rows_to=pad)
                expected = ops.swiglu_quantize(gate_up, g, pad_rows_to=pad)
                require_same_bytes(name, got, expected)
                yield name
            yield from scales_and_dequantize(x, g, dtype, device)


def scales_and_dequantize(x: Tensor, g: Tensor, dtype: torch.dtype, device: str) -> Iterator[str]:
    rows, cols = x.shape[0], x.shape[1] // 16
    for swizzled in (True, False):
        data, scale = ops.quantize(x, g, swizzled=swizzled)
        name = f"dequantize {rows}x{x.shape[1]} to {dtype} swizzled={swizzled}"
        options = {"swizzled": swizzled, "out_dtype": dtype}
        got = ops.dequantize(data.to(device), scale.to(device), g.to(device), **options)
        require_same_bytes(name, got, ops.dequantize(data, scale, g, **options))
        yield name
    swizzled_scale = ops.swizzle_scales(scale)
    require_same_bytes("swizzle_scales", ops.swizzle_scales(scale.to(device)), swizzled_scale)
    got = ops.unswizzle_scales(swizzled_scale.to(device), rows, cols)
    require_same_bytes("unswizzle_scales", got, scale)
    yield f"swizzle_scales and back {rows}x{cols}"


def gemms(device: str, sizes: tuple[tuple[int, int, int], ...]) -> Iterator[str]:
    """gemm and gemm_a16w4 with every output and bias type; yields what ran."""
    for m, n, k in sizes:
        a = Operand(*ops.quantize(torch.randn(m, k), None))
        b = Operand(*ops.quantize(torch.randn(n, k), None))
        y = device_gemm(a, b, device)
        agreement(y.cpu(), a, b)
        yield f"gemm {m}x{n}x{k}"
        dense = a.decode()
        there = ops.gemm_a16w4(dense.to(device), b.data.to(device), b.scale.to(device))
        agreement(there.cpu(), dense, b)
        yield f"gemm_a16w4 {m}x{n}x{k}"
        for out in DTYPES:
            for bias in DTYPES:
                with_bias = device_gemm(a, b, device, torch.ones(n, dtype=bias, device=device), out)
                off = (with_bias.float() - y.float() - 1).abs().max()
                if not off <= 0.02 * (1 + y.float().abs().max()):  # three roundings to 16 bits
                    raise WrongOutput(f"gemm {m}x{n}x{k}, {bias} bias, {out} out: off by {off}")
                yield f"gemm {m}x{n}x{k}, {bias} bias, {out} out"


def long(device: str) -> Iterator[str]:
    """gemm and gemm_a16w4 of large weights, against torch. Scales of 1: sums are exact."""
    rng = torch.Generator().manual_seed(SEED)
    n, k = LONG_NK if device == "cuda" else (64, 256)

    def operand(rows: int) -> Operand:
        scale = ops.swizzle_scales(unit_scales(rows, k // 16))
        return Operand(random_codes(rng, rows, k // 2), scale)

    b = operand(n)
    weights = b.decode().float().T
    b = Operand(b.data.to(device), b.scale.to(device))
    for m in LONG_ROWS:
        a = operand(m)
        dense = a.decode()
        expected = (dense.float() @ weights).bfloat16()
        y = ops.gemm(a.data.to(device), b.data, a.scale.to(device), b.scale)
        require_same_bytes(f"gemm {m}x{n}x{k}", y, expected)
        yield f"gemm {m}x{n}x{k}"
        y = ops.gemm_a16w4(dense.to(device), b.data, b.scale)
        require_same_bytes(f"gemm_a16w4 {m}x{n}x{k}", y, expected)
        yield f"gemm_a16w4 {m}x{n}x{k}"


def device_gemm(
    a: Operand,
    b: Operand,
    device: str,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    alpha: Tensor | None = None,
) -> Tensor:
    tensors = (t.to(device) for t in (a.data, b.data, a.scale, b.scale))
    alpha = torch.ones((), device=device) if alpha is None else alpha
    return ops.gemm(*tensors, alpha, bias, out_dtype)


def through_cublaslt(device: str) -> Iterator[str]:
    """The gemms that are decoded for cuBLASLt; also a dense B, and alpha on either side."""
    for m, n, k in DECODED_SIZES:
        if device == "cuda" and explain(m, n, k).kernel != "decode + cublasLtMatmul":
            raise WrongOutput(f"gemm {m}x{n}x{k} does not run on cuBLASLt: {library()}")
    yield from gemms(device, DECODED_SIZES)
    for m, n, k in DECODED_SIZES:
        a = Operand(*ops.quantize(torch.randn(m, k), None))
        b = Operand(*ops.quantize(torch.randn(n, k), None))
        dense = b.decode()
        y = ops.gemm_a4w16(a.data.to(device), dense.to(device), a.scale.to(device))
        agreement(y.cpu().T, dense, a)
        yield f"gemm_a4w16 {m}x{n}x{k}"
        for alpha in (torch.tensor(-2.0), torch.full((), -2.0, device=device)):
            # A bias of another type than the output's is our epilogue's.
            for bias in (None, torch.zeros(n, dtype=torch.float16, device=device)):
                y = device_gemm(a, b, device, bias, torch.bfloat16, alpha)
                agreement(y.cpu(), a, b, -2.0)
                yield f"gemm {m}x{n}x{k}, alpha on {alpha.device}, bias {bias is not None}"


def random_codes(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8)


def unit_scales(rows: int, cols: int) -> Tensor:
    return torch.ones(rows, cols).to(torch.float8_e4m3fn)


def decoded(codes: Tensor, scale: Tensor) -> Tensor:
    return ops.dequantize(codes, scale, swizzled=False, out_dtype=torch.bfloat16)


def grouped(device: str) -> Iterator[str]:
    """grouped_gemm by every kernel. Scales of 1 and few terms: sums are exact in any order."""
    for sizes, n, k in GROUPED_SIZES:
        yield from ragged_rows(device, sizes, n, k)
    yield from cut_tiles(device, *CUT_SIZES)
    for m, n, k in SLICED_SIZES:
        yield from ragged_slices(device, m, n, k)


def ragged_rows(device: str, sizes: tuple[int, ...], n: int, k: int) -> Iterator[str]:
    """By every kernel: plain, routed, and with offsets and indices that nobody may trust."""
    rng = torch.Generator().manual_seed(SEED)
    m = sum(sizes) + 3
    codes, b = random_codes(rng, m, k // 2), random_codes(rng, len(sizes), n, k // 2)
    a_scale = unit_scales(m, k // 16)
    b_scale = ops.swizzle_scales(unit_scales(n, k // 16)).view(torch.uint8)
    b_scale = b_scale.expand(len(sizes), -1, -1).contiguous().view(torch.float8_e4m3fn)
    index = torch.randperm(m, generator=rng).int()
    good = {"offs": torch.tensor(sizes).cumsum(0).int()}
    routed = good | {"gather": index, "scatter": torch.where(index % 5 == 0, -1, index)}
    # The call, and the one that it has to be equal to.
    calls = {"plain": (good, good), "routed": (routed, routed)}
    if m < HOSTILE_ROWS:
        for number, wild in enumerate(([m, 3, m // 2], [-9, 7, 1 << 30], [-(1 << 31), m + 1, 0])):
            for name, options in ((f"offs {number}", good), (f"all {number}", routed)):
                spoilt = hostile(options, torch.tensor(wild, dtype=torch.int32))
                calls[f"hostile {name}"] = (spoilt, meaning(spoilt, m))
    for name, a in (("packed", (codes, a_scale)), ("dense", (decoded(codes, a_scale), None))):
        operands = (a[0], b, a[1], b_scale)
        for how, (options, meant) in calls.items():
            expected = grouped_gemm(*operands, **meant)
            for kernel in ("general", "small", "wgmma", "dense"):
                what = f"grouped_gemm {sizes} {n}x{k}, a {name}, {how}, {kernel}"
                os.environ[GROUPED_VARIABLE] = kernel
                check_grouped(device, what, operands, options, expected, options is meant)
                del os.environ[GROUPED_VARIABLE]
                yield what


def cut_tiles(device: str, sizes: tuple[int, ...], n: int, k: int) -> Iterator[str]:
    """By wgmma, which shares tiles among blocks where groups differ, against `general`."""
    rng = torch.Generator().manual_seed(SEED)
    m, groups = sum(sizes), len(sizes)
    data, scale = random_codes(rng, m, k // 2), unit_scales(m, k // 16)
    b = random_codes(rng, groups, n, k // 2).to(device)
    tile = torch.full((groups, n, -(-k // 64) * 4), 0x38, dtype=torch.uint8, device=device)
    offs = torch.tensor(sizes).cumsum(0).int().to(device)
    operands = data.to(device), b, scale.to(device), tile.view(torch.float8_e4m3fn), offs
    results = []
    for kernel in ("general", "wgmma"):
        os.environ[GROUPED_VARIABLE] = kernel
        results.append(grouped_gemm(*operands))
        del os.environ[GROUPED_VARIABLE]
    what = f"grouped_gemm {sizes} {n}x{k}, wgmma"
    require_same_bytes(what, *results)
    yield what


def hostile(options: dict[str, Tensor], offs: Tensor) -> dict[str, Tensor]:
    """Other offsets, and every seventh index far out or just out of range."""
    spoilt = {**options, "offs": offs}
    for name in options.keys() - {"offs"}:
        index = options[name]
        wild = torch.tensor([-5, 1 << 30, -(1 << 31), len(index)], dtype=torch.int32)
        rows = torch.arange(len(index))
        spoilt[name] = torch.where(rows % 7 == 3, wild[rows % 4], index)
    return spoilt


def meaning(options: dict[str, Tensor], m: int) -> dict[str, Tensor]:
    """What a GPU makes of indices that it can't refuse: offsets inside the problem that never
    decrease; a row from nowhere is zero, which is as if it were dropped; a row to nowhere is."""
    meant = {"offs": options["offs"].clamp(0, m).cummax(0).values}
    if "gather" in options:
        gather, scatter = options["gather"], options["scatter"]
        dropped = (gather < 0) | (gather >= m) | (scatter < 0) | (scatter >= m)
        meant |= {"gather": gather.clamp(0, m - 1), "scatter": scatter.masked_fill(dropped, -1)}
    return meant


def check_grouped(
    device: str, what: str, operands: tuple, options: dict, expected: Tensor, trusted: bool
) -> None:
    """grouped_gemm on the device gives `expected`; the CPU refuses what can't be trusted."""
    there = [None if x is None else x.to(device) for x in operands]
    options = {k: x.to(device) if isinstance(x, Tensor) else x for k, x in options.items()}
    if trusted or device != "cpu":
        require_same_bytes(what, grouped_gemm(*there, **options), expected)
        return
    try:
        grouped_gemm(*there, **options)
    except ValueError:
        return
    raise WrongOutput(f"{what}: not refused on the CPU")


def ragged_slices(device: str, m: int, n: int, k: int) -> Iterator[str]:
    """ragged="k": slices that end between two steps, an empty one, and hostile ones."""
    rng = torch.Generator().manual_seed(SEED)
    a, b = random_codes(rng, m, k // 2), random_codes(rng, n, k // 2)
    a_scale, b_scale = unit_scales(m, k // 16), unit_scales(n, k // 16)
    dense = decoded(a, a_scale), decoded(b, b_scale)
    swizzled = ops.swizzle_scales(b_scale)
    pairs = {
        "packed, packed": (a, b, a_scale, swizzled),
        "dense, packed": (dense[0], b, None, swizzled),
        "packed, dense": (a, dense[1], a_scale, None),
        "dense, dense": (*dense, None, None),
    }
    half = k // 32 * 16
    for ends in ([16, 16, half, k], [half + 5, 21, 1 << 30, -9, k - 1], [-(1 << 31), k + 16, half]):
        options = {"offs": torch.tensor(ends, dtype=torch.int32), "ragged": "k"}
        meant = [torch.tensor(one, dtype=torch.int32) for one in slices(ends, k)]
        trusted = [end for _, end in slices(ends, k)] == ends
        for name, operands in pairs.items():
            alone = [grouped_gemm(*operands, offs, ragged="k")[1] for offs in meant]
            what = f"grouped_gemm {m}x{n}, slices {ends} of {k}, {name}"
            check_grouped(device, what, operands, options, torch.stack(alone), trusted)
            yield what


def slices(ends: list[int], k: int) -> list[tuple[int, int]]:
    """Of K, as a GPU reads offsets: inside K and down to a block, empty where they decrease."""
    inside = [min(max(end, 0), k) // 16 * 16 for end in ends]
    begins = [0, *inside[:-1]]
    return [(begin, max(begin, end)) for begin, end in zip(begins, inside, strict=True)]


PARTS = {
    "producers": producers,
    "gemm": lambda device: gemms(device, GEMM_SIZES),
    "mid": lambda device: gemms(device, MID_SIZES),
    "long": long,
    "decoded": through_cublaslt,
    "grouped": grouped,
}


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m bench.sanitize", description=__doc__.split("\n\n")[0]
    )
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART")
    p.add_argument("--verbose", action="store_true", help="name what runs")
    args = p.parse_args(argv)
    torch.manual_seed(SEED)
    count = 0
    for part in args.only:
        for name in PARTS[part](args.device):
            count += 1
            if args.verbose:
                print(name, flush=True)
    if args.device == "cuda":
        torch.cuda.synchronize()
    print(f"{', '.join(args.only)}: {count} calls, every output right")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
