"""A video diffusion transformer in plain PyTorch, with the study's FC2 in each block.

    latent (tokens, channels) → embed → blocks → norm → velocity (tokens, channels)

    block    x + g1 · proj(attention(rope(qkv(n1))))        n1 = norm(x) · (1 + s1) + b1
             x + g2 · fc2.forward_swiglu(fc1(n2))           n2 = norm(x) · (1 + s2) + b2

s, b, g come from the time step (one projection for all blocks) plus a table of the block's own.
Attention is full, over frames × height × width positions with a rotary embedding an axis. Everything
is BF16, but fc2: an NVFP4 weight (hidden, ffn) and a static activation scale. A trajectory is Euler
steps of the velocity from noise to data. Weights are random: what is measured is time and bytes, not
pictures.

The default sizes are the study's: 10 x 19 x 199 = 37,810 tokens, hidden 5,376, FFN 14,336, 50 blocks.

    python -m bench.video_transformer --grid 2x3x5 --hidden 64 --ffn 128 --heads 2 --blocks 2
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvfp4_linear import Nvfp4Linear, calibrate

TIME_FEATURES = 256
ROPE_BASE = 10_000.0
MODULATIONS = 6  # scale, shift and gate of attention and of the MLP
CALIBRATION_FRAMES = 1


@dataclass(frozen=True)
class Config:
    """Sizes. grid: frames, height, width; their product is the number of tokens, the GEMM's M."""

    grid: tuple[int, int, int] = (10, 19, 199)
    hidden: int = 5376
    ffn: int = 14336
    heads: int = 42
    blocks: int = 50
    channels: int = 64
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise ValueError(
                f"hidden must be an even multiple of heads, got {self.hidden} and {self.heads}: "
                f"each head rotates pairs of its elements"
            )

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class Block(nn.Module):
    def __init__(self, config: Config, device: str) -> None:
        super().__init__()
        self.heads, self.hidden = config.heads, config.hidden

        def linear(k: int, n: int) -> nn.Linear:
            return nn.Linear(k, n, bias=False, device=device, dtype=config.dtype)

        self.qkv = linear(config.hidden, 3 * config.hidden)
        self.proj = linear(config.hidden, config.hidden)
        self.fc1 = linear(config.hidden, 2 * config.ffn)  # [gate | up]
        self.fc2: nn.Module = linear(config.ffn, config.hidden)  # NVFP4 once it has its values
        table = torch.empty(MODULATIONS, config.hidden, device=device, dtype=config.dtype)
        self.modulation = nn.Parameter(table)

    def forward(self, x: Tensor, modulation: Tensor, rope: Tensor) -> Tensor:
        """x: (tokens, hidden). modulation: (6, hidden). rope: (tokens, head_dim / 2) complex."""
        s1, b1, g1, s2, b2, g2 = modulation + self.modulation
        x = x + g1 * self.proj(self._attention(self.qkv(self._norm(x, s1, b1)), rope))
        return x + g2 * self.fc2.forward_swiglu(self.fc1(self._norm(x, s2, b2)))

    def _norm(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return torch.addcmul(shift, F.layer_norm(x, (self.hidden,)), 1 + scale)

    def _attention(self, qkv: Tensor, rope: Tensor) -> Tensor:
        tokens = qkv.shape[0]
        q, k, v = qkv.view(tokens, 3, self.heads, -1).permute(1, 2, 0, 3)  # (heads, tokens, d)
        q, k = _rotate(q, rope), _rotate(k, rope)
        out = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        return out.transpose(0, 1).reshape(tokens, self.hidden)


class VideoTransformer(nn.Module):
    """See the module docstring."""

    def __init__(self, config: Config, *, device: str = "cpu", seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Linear(config.channels, config.hidden, device=device, dtype=config.dtype)
        width = MODULATIONS * config.hidden
        self.time = nn.Linear(TIME_FEATURES, width, device=device, dtype=config.dtype)
        self.blocks = nn.ModuleList()
        self.out = nn.Linear(config.hidden, config.channels, device=device, dtype=config.dtype)
        generator = torch.Generator(device).manual_seed(seed)
        for layer in (self.embed, self.time, self.out):
            _initialize(layer, generator)
        for _ in range(config.blocks):  # one dense fc2 at a time
            block = Block(config, device)
            _initialize(block, generator)
            block.fc2 = Nvfp4Linear.from_linear(block.fc2, activation="static")
            self.blocks.append(block)
        self.register_buffer("rope", _rope(config, device), persistent=False)
        self.requires_grad_(False)
        self.eval()

    def forward(self, latent: Tensor, t: Tensor) -> Tensor:
        """Velocity at time t (0-d FP32, 1 is noise): (tokens, channels) → (tokens, channels)."""
        modulation = self.modulation(t)
        x = self.embed(latent)
        for block in self.blocks:
            x = block(x, modulation, self.rope[: len(x)])
        return self.out(F.layer_norm(x, (self.config.hidden,)))

    def modulation(self, t: Tensor) -> Tensor:
        """(6, hidden) of a time."""
        frequencies = torch.arange(TIME_FEATURES // 2, device=t.device) / (TIME_FEATURES // 2)
        angles = 1000.0 * t * ROPE_BASE**-frequencies
        features = torch.cat((angles.cos(), angles.sin())).to(self.config.dtype)
        return self.time(F.silu(features)).view(MODULATIONS, self.config.hidden)

    def noise(self, seed: int = 1) -> Tensor:
        """A latent to start from: (tokens, channels)."""
        device = self.embed.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        shape = (self.config.tokens, self.config.channels)
        return torch.randn(shape, generator=generator, device=device).to(self.config.dtype)

    def sample(
        self, latent: Tensor, steps: int, on_step: Callable[[int], None] | None = None
    ) -> Tensor:
        """The trajectory: `steps` Euler steps from t = 1 to 0; gives the last latent."""
        for step in range(steps):
            t = torch.tensor(1 - step / steps, device=latent.device)
            latent = latent - self(latent, t) / steps
            if on_step is not None:
                on_step(step)
        return latent

    def calibrate(self) -> None:
        """Sets every fc2's activation scale from a pass over the first frame."""
        tokens = self.config.tokens // self.config.grid[0] * CALIBRATION_FRAMES
        with calibrate(self):
            self(self.noise(seed=2)[:tokens], torch.tensor(1.0, device=self.rope.device))


def _initialize(module: nn.Module, generator: torch.Generator) -> None:
    """Normal weights of variance 1 / fan-in, so that no block drowns or starves the next."""
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.detach().zero_()
        else:
            parameter.detach().normal_(0, parameter.shape[-1] ** -0.5, generator=generator)


def _rope(config: Config, device: str) -> Tensor:
    """Rotations (tokens, head_dim / 2), complex: the pairs of a head shared out to three axes."""
    pairs = config.head_dim // 2
    share = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    axes = [torch.arange(size, device=device) for size in config.grid]
    angles = []
    for position, count in zip(torch.meshgrid(*axes, indexing="ij"), share, strict=True):
        frequencies = ROPE_BASE ** -(torch.arange(count, device=device) / max(count, 1))
        angles.append(position.reshape(-1, 1) * frequencies)
    angle = torch.cat(angles, dim=1)
    return torch.polar(torch.ones_like(angle), angle)


def _rotate(x: Tensor, rope: Tensor) -> Tensor:
    """x: (heads, tokens, head_dim), neighbours are a pair."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rope).flatten(-2).to(x.dtype)


def parse_grid(text: str) -> tuple[int, int, int]:
    """ "10x19x199" → (10, 19, 199)."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"expected FRAMESxHEIGHTxWIDTH, got {text!r}: 10x19x199")
    return int(match[1]), int(match[2]), int(match[3])


def size_arguments(parser: argparse.ArgumentParser, defaults: Config | None = None) -> None:
    """--grid, --hidden, --ffn, --heads, --blocks; None where `defaults` is."""
    known = (lambda name: getattr(defaults, name)) if defaults else (lambda name: None)
    parser.add_argument(
        "--grid", type=parse_grid, default=known("grid"), help="FRAMESxHEIGHTxWIDTH"
    )
    for name in ("hidden", "ffn", "heads", "blocks"):
        parser.add_argument(f"--{name}", type=int, default=known(name))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.video_transformer", description=__doc__)
    size_arguments(parser, Config())
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    config = Config(args.grid, args.hidden, args.ffn, args.heads, args.blocks)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.inference_mode():
        model = VideoTransformer(config, device=device)
        model.calibrate()
        start = time.perf_counter()
        latent = model.sample(model.noise(), args.steps)
        spread = float(latent.float().std())  # waits for the GPU
    seconds = time.perf_counter() - start
    print(f"{config.tokens} tokens, {args.steps} steps: {seconds:.3f} s, spread {spread:.4f}")


if __name__ == "__main__":
    main()
