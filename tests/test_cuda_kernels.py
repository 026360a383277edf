"""The fused GEMMs on a GPU, against the exact product: every M up to 64, ragged N, K (more: test_mid_m.py).

Its sums are FP32 in the tensor core's order, so a result may be off by the accumulation bound
K · 2⁻²² · Σ|a·b| and one rounding to BF16; two runs must agree to the byte. What other kernels owe is
in test_byte_exact.py, through the `device` fixture; memory behind outputs is watched by the emulator
(test_kernels_on_cpu.py).
"""

import pytest
import torch
from compare import assert_same_bytes
from helpers import cuda_missing, poison

from nvfp4_linear import Plan, explain, reference

ops = torch.ops.nvfp4
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda_missing() is not None, reason=str(cuda_missing())),
]

SHAPES = [(1, 16), (8, 48), (24, 96), (136, 4096), (5376, 96), (640, 14336), (1000, 2080)]  # N, K
ALPHA = torch.tensor(0.37)


def operand(rows: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed data and swizzled scales of normal values, and those values decoded, in FP64."""
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed))
    data, scale = reference.quantize(x)
    return data, scale, reference.dequantize(data, scale).double()


def assert_close(
    actual: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor
) -> None:
    """Within the accumulation bound and one BF16 rounding of alpha · a · bᵀ + bias."""
    exact = ALPHA.double() * (a @ b.T) + bias.double()
    bound = a.shape[1] * 2.0**-22 * ALPHA.double() * (a.abs() @ b.abs().T)
    allowed = bound + 2.0**-7 * exact.abs() + 1e-30
    excess = (actual.cpu().double() - exact).abs() - allowed
    assert not actual.isnan().any()
    assert excess.max() <= 0, f"worst excess {excess.max():.3g} at {excess.argmax().item()}"


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("kind", ["packed", torch.bfloat16, torch.float16], ids=str)
def test_every_m(kind, n, k):
    b_data, b_scale, b = operand(n, k, seed=1)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(2))
    weight = (b_data.cuda(), b_scale.cuda())
    for m in range(1, 65):
        a_data, a_scale, a = operand(m, k, seed=m)
        poison("cuda")
        if kind == "packed":
            arguments = (a_data.cuda(), weight[0], a_scale.cuda(), weight[1])
            results = [ops.gemm(*arguments, ALPHA.cuda(), bias.cuda()) for _ in range(2)]
        else:
            x = torch.randn(m, k + 8, generator=torch.Generator().manual_seed(m)).to(kind)
            x = x.cuda()[:, :k]  # rows further apart than k
            a = x.cpu().double()
            results = [
                ops.gemm_a16w4(x, *weight, ALPHA.cuda(), bias.cuda(), torch.bfloat16)
                for _ in range(2)
            ]
        assert_same_bytes(results[1], results[0], f"m = {m}: second run")
        assert_close(results[0], a, b, bias)


@pytest.mark.parametrize("m", [5, 12, 30, 50, 130])
def test_padding_of_scales_is_not_read(m):
    """K = 96: the last tile of scales has two columns that belong to no element."""
    n, k = 200, 96
    a_data, a_scale, _ = operand(m, k, seed=1)
    b_data, b_scale, _ = operand(n, k, seed=2)
    padding = torch.full((256, 8), 0x7F, dtype=torch.uint8)
    padding[:, : k // 16] = 0
    padding = reference.swizzle_scales(padding.view(torch.float8_e4m3fn)).view(torch.uint8)
    rows = [(a_data, a_scale), (b_data, b_scale)]
    results = []
    for poisoned in (False, True):
        (a, s_a), (b, s_b) = (
            (
                data.cuda(),
                (
                    scale.view(torch.uint8)
                    | padding.flatten()[: scale.numel()].view(scale.shape) * poisoned
                )
                .view(torch.float8_e4m3fn)
                .cuda(),
            )
            for data, scale in rows
        )
        results.append(ops.gemm(a, b, s_a, s_b))
        x = torch.ones(m, k, device="cuda", dtype=torch.bfloat16)
        results.append(ops.gemm_a16w4(x, b, s_b))
    assert_same_bytes(results[2], results[0], "gemm")
    assert_same_bytes(results[3], results[1], "gemm_a16w4")


@pytest.mark.parametrize("m", [3, 9, 20, 40, 130])
@pytest.mark.parametrize("kind", ["packed", torch.bfloat16], ids=str)
def test_nan_scales_stay_in_their_row_and_column(kind, m):
    n, k = 136, 256
    b_data, b_scale, _ = operand(n, k, seed=1)
    a_data, a_scale, _ = operand(m, k, seed=2)
    linear = reference.unswizzle_scales(b_scale, n, k // 16).view(torch.uint8).clone()
    linear[77, 3] = 0x7F
    bad = reference.swizzle_scales(linear.view(torch.float8_e4m3fn)).cuda()
    weight = b_data.cuda()
    if kind == "packed":
        good_y, y = (
            ops.gemm(a_data.cuda(), weight, a_scale.cuda(), s) for s in (b_scale.cuda(), bad)
        )
    else:
        x = torch.randn(m, k, device="cuda", dtype=kind)
        good_y, y = (ops.gemm_a16w4(x, weight, s) for s in (b_scale.cuda(), bad))
    column = torch.zeros(n, dtype=torch.bool)
    column[77] = True
    assert (y.cpu()[:, column].view(torch.int16) == 0x7FC0).all()
    assert_same_bytes(y.cpu()[:, ~column], good_y.cpu()[:, ~column], "the other columns")


@pytest.mark.parametrize("m", [1, 16, 32])
def test_a_kernel_reads_what_the_one_ahead_wrote(m):
    """Kernels may be launched before the one ahead has ended: results feed one another, and the
    memory of earlier ones is used again, with and without the host waiting in between."""
    n = 2048
    data, scale, _ = operand(n, n, seed=1)
    weight, scale = data.cuda(), scale.cuda()
    alpha = torch.tensor(0.02)

    def chain(wait: bool) -> torch.Tensor:
        y = torch.randn(m, n, generator=torch.Generator().manual_seed(m)).bfloat16().cuda()
        for _ in range(30):
            y = ops.gemm_a16w4(y, weight, scale, alpha)
            if wait:
                torch.cuda.synchronize()
        return y

    waited = chain(wait=True)
    assert waited.isfinite().all() and waited.abs().max() > 0
    for _ in range(5):
        assert_same_bytes(chain(wait=False), waited, "without waiting")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    y = torch.randn(m, n, generator=torch.Generator().manual_seed(m)).bfloat16().cuda()
    with torch.cuda.graph(graph):
        replayed = y
        for _ in range(30):
            replayed = ops.gemm_a16w4(replayed, weight, scale, alpha)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bytes(replayed, waited, "replayed")


def decoded_workspaces(plan: Plan) -> int:
    """What a gemm through cuBLASLt allocates: both sides decoded, and what its algorithm asks for."""
    return 2 + (plan.details["plan"]["workspace_bytes"] > 0)


@pytest.mark.parametrize("op", ["gemm", "gemm_a16w4"])
@pytest.mark.parametrize("m", [1, 16, 32, 33, 64, 256, 2048, 2100])
def test_a_warm_call_allocates_its_output_and_its_workspace(op, m):
    """By the counters of torch's allocator; what is asked for is the output and what `explain` says."""
    n, k, calls = 264, 512, 10
    b, b_scale, _ = operand(n, k, seed=1)
    a, a_scale, _ = operand(m, k, seed=2)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    packed = [t.cuda() for t in (a, b, a_scale, b_scale)]
    run = {
        "gemm": lambda: ops.gemm(*packed, ALPHA),
        "gemm_a16w4": lambda: ops.gemm_a16w4(x, packed[1], packed[3], ALPHA),
    }[op]
    plan = explain(m, n, k, activation="nvfp4" if op == "gemm" else "bfloat16")
    for _ in range(2):  # plans, and the allocator has blocks to give again
        run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    for _ in range(calls):
        run()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()

    def of_a_call(counter: str) -> float:
        return (after[counter] - before[counter]) / calls

    workspaces = min(plan.workspace_bytes, 1)
    if plan.rung == "emulated" and "cublasLtMatmul" in plan.kernel:
        workspaces = decoded_workspaces(plan) - (op == "gemm_a16w4")
    assert of_a_call("num_device_alloc") == 0
    assert 1 <= of_a_call("allocation.all.allocated") <= 1 + workspaces
    assert of_a_call("requested_bytes.all.allocated") <= m * n * 2 + plan.workspace_bytes
