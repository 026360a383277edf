"""What a tiled GEMM asks of L2: exact bytes, no model.

D (M, N) = A (M, K) · Bᵀ, B (N, K); D is BF16. Bytes of `rows` rows over a K span:

    nvfp4   rows · (k/2 + k/16)      data + one UE4M3 scale per 16
    fp8     rows · k                 per-tensor scale: nothing to stream
    bf16    rows · 2k

    one pass     = A + B + D, each once
    requested    = ceil(M/tile_m) · ceil(N/tile_n) CTAs · whole tiles of A and of B over whole K
    amplification = (read misses + D) / one pass

On an H200 the bytes that its SMs received are these to the fourth digit (bench/results/l2); where a
cluster does not divide the grid, the padding CTAs' too.
"""

from dataclasses import dataclass

MIB = 1 << 20
OUTPUT_BYTES = 2  # BF16


@dataclass(frozen=True)
class Element:
    """Operand storage: bits a value, and how many consecutive K share one scale byte."""

    bits: int
    scale_block: int | None
    tile_k: int  # K elements a step by default: 128 bytes of data a row, one swizzled TMA row

    def row_bytes(self, k: int) -> int:
        return k * self.bits // 8 + (k // self.scale_block if self.scale_block else 0)


ELEMENTS = {
    "nvfp4": Element(bits=4, scale_block=16, tile_k=256),
    "fp8": Element(bits=8, scale_block=None, tile_k=128),
    "bf16": Element(bits=16, scale_block=None, tile_k=64),
}


def positive(**values: int) -> None:
    """Raises ValueError for what is no whole size."""
    for name, value in values.items():
        if type(value) is not int or value <= 0:
            raise ValueError(f"{name} must be a positive integer, got {value!r}: pass a whole size")


@dataclass(frozen=True)
class Problem:
    """One GEMM cut into tiles; every property is exact."""

    m: int
    n: int
    k: int
    tile_m: int = 128
    tile_n: int = 128
    tile_k: int | None = None
    element: str = "nvfp4"

    def __post_init__(self):
        if self.element not in ELEMENTS:
            raise ValueError(
                f"element must be one of {', '.join(ELEMENTS)}, got {self.element!r}: "
                "name the operands' type"
            )
        if self.tile_k is None:
            object.__setattr__(self, "tile_k", ELEMENTS[self.element].tile_k)
        positive(m=self.m, n=self.n, k=self.k)
        positive(tile_m=self.tile_m, tile_n=self.tile_n, tile_k=self.tile_k)
        block = ELEMENTS[self.element].scale_block or 1
        for name in ("k", "tile_k"):
            if getattr(self, name) % block:
                raise ValueError(
                    f"{name} must be a multiple of {block} for {self.element}, "
                    f"got {getattr(self, name)}: a block scale covers {block} values, pad K"
                )

    @property
    def tiles_m(self) -> int:
        return -(-self.m // self.tile_m)

    @property
    def tiles_n(self) -> int:
        return -(-self.n // self.tile_n)

    @property
    def k_steps(self) -> int:
        return -(-self.k // self.tile_k)

    @property
    def ctas(self) -> int:
        return self.tiles_m * self.tiles_n

    @property
    def row_bytes(self) -> int:
        return ELEMENTS[self.element].row_bytes(self.k)

    @property
    def a_bytes(self) -> int:
        return self.m * self.row_bytes

    @property
    def b_bytes(self) -> int:
        return self.n * self.row_bytes

    @property
    def output_bytes(self) -> int:
        return self.m * self.n * OUTPUT_BYTES

    @property
    def one_pass_bytes(self) -> int:
        return self.a_bytes + self.b_bytes + self.output_bytes

    def requests(self, readers_of_a: int, readers_of_b: int) -> tuple[int, int]:
        """(A, B) bytes asked for in whole tiles, when so many CTAs ask for each slice."""
        row = ELEMENTS[self.element].row_bytes(self.k_steps * self.tile_k)
        return (
            readers_of_a * self.tiles_m * self.tile_m * row,
            readers_of_b * self.tiles_n * self.tile_n * row,
        )

    @property
    def requested_a_bytes(self) -> int:
        return self.requests(self.tiles_n, self.tiles_m)[0]

    @property
    def requested_b_bytes(self) -> int:
        return self.requests(self.tiles_n, self.tiles_m)[1]

    @property
    def requested_bytes(self) -> int:
        return self.requested_a_bytes + self.requested_b_bytes

    def amplification(self, read_miss_bytes: float) -> float:
        """Off-chip bytes over the one-pass total; D goes off chip once whatever the order."""
        return (read_miss_bytes + self.output_bytes) / self.one_pass_bytes

    def hit_rate(self, read_miss_bytes: float) -> float:
        """The profiler's hit rate that so many read-miss bytes imply, requests in whole tiles."""
        return 1 - (read_miss_bytes + self.output_bytes) / (
            self.requested_bytes + self.output_bytes
        )
