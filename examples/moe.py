"""A small mixture-of-experts layer on NVFP4 weights, from routing to the combined output.

    y[t] = Σ over t's top_k experts e of  p[t, e] · down[e]( silu(gate[e](x[t])) · up[e](x[t]) )

Nothing is sorted into place by hand and no size is read back to the host:

    routing       top_k experts a token, their probabilities; one row of the problem for each pair
    gate and up   grouped_gemm gathers each expert's rows straight out of x
    SwiGLU        one producer, which leaves NVFP4 rows
    down          grouped_gemm scales each row by its probability (gamma) and scatters it back to
                  its token (scatter)
    combine       a sum over each token's top_k rows

    python examples/moe.py [--device cuda]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from nvfp4_linear import ops
from nvfp4_linear.grouped import grouped_gemm


def quantize_experts(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(E, N, K) → data (E, N, K/2), swizzled scales (E, ...), and one global scale an expert (E,)."""
    experts = []
    for expert in weight:
        g = ops.global_scale(expert)
        experts.append((*ops.quantize(expert, g), g))
    return tuple(map(torch.stack, zip(*experts, strict=True)))


class MoE(nn.Module):
    """x (T, hidden) bfloat16 → (T, hidden); `experts` SwiGLU blocks, `top_k` of them a token."""

    def __init__(self, hidden: int, inner: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.experts, self.top_k = experts, top_k
        self.router = nn.Linear(hidden, experts, bias=False, dtype=torch.bfloat16)
        # In a real model these come from a checkpoint; rows of gate, then rows of up.
        gate_up = torch.randn(experts, 2 * inner, hidden) / hidden**0.5
        down = torch.randn(experts, hidden, inner) / inner**0.5
        for name, weight in (("gate_up", gate_up), ("down", down)):
            for part, value in zip(("data", "scale", "g"), quantize_experts(weight), strict=True):
                self.register_buffer(f"{name}_{part}", value)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(token, slot, probability) of every row, rows sorted by expert, and the experts' ends."""
        logits = self.router(x).float()
        probability, expert = logits.softmax(-1).topk(self.top_k)
        # Pair number t · top_k + i is token t's i-th choice. Stable: ties keep the tokens' order.
        slot = expert.flatten().argsort(stable=True)
        ids = torch.arange(self.experts, device=x.device)
        ends = (expert.flatten()[:, None] == ids).sum(0).cumsum(0)  # on the device
        return slot // self.top_k, slot, probability.flatten()[slot], ends

    def forward(self, x: Tensor) -> Tensor:
        token, slot, probability, ends = self.route(x)
        ends = ends.int()
        gate_up = grouped_gemm(
            x,
            self.gate_up_data,
            None,
            self.gate_up_scale,
            ends,
            self.gate_up_g,
            gather=token.int(),
        )
        hidden, hidden_scale = ops.swiglu_quantize(gate_up, swizzled=False)
        rows = grouped_gemm(
            hidden,
            self.down_data,
            hidden_scale,
            self.down_scale,
            ends,
            self.down_g,
            gamma=probability,
            scatter=slot.int(),
        )
        return rows.view(len(x), self.top_k, x.shape[1]).sum(1)

    def plain(self, x: Tensor) -> Tensor:
        """The same layer in ordinary PyTorch: token by token, on decoded weights, in FP64."""

        def decoded(name: str, e: int) -> Tensor:
            parts = (getattr(self, f"{name}_{part}")[e] for part in ("data", "scale", "g"))
            return ops.dequantize(*parts).double()

        y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        probability, expert = self.router(x).float().softmax(-1).topk(self.top_k)
        for t, e in ((t, e) for t in range(len(x)) for e in range(self.top_k)):
            chosen = int(expert[t, e])
            gate, up = (decoded("gate_up", chosen) @ x[t].double()).chunk(2)
            hidden = (nn.functional.silu(gate) * up).float()[None]
            hidden = ops.dequantize(*ops.quantize(hidden)).double()[0]  # 4-bit there, 4-bit here
            y[t] += probability[t, e] * (decoded("down", chosen) @ hidden)
        return y


def main(arguments: list[str] | None = None) -> float:
    """Runs the layer, prints and returns how far it is from the plain one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args(arguments).device
    torch.manual_seed(0)
    layer = MoE(hidden=128, inner=64, experts=8, top_k=2).to(device)
    x = torch.randn(40, 128, dtype=torch.bfloat16, device=device)
    with torch.inference_mode():
        *_, ends = layer.route(x)
        y, plain = layer(x), layer.plain(x)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    error = ((y - plain).norm() / plain.norm()).item()
    print(f"rows of each expert: {sizes}")
    print(f"{tuple(y.shape)} {y.dtype}, {error:.2%} from the plain layer: BF16 between the steps")
    return error


if __name__ == "__main__":
    main()
