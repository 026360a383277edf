"""CUDA graphs, streams, threads and two GPUs: the same bytes as one eager call after another."""

import copy
import threading

import pytest
import torch
from compare import assert_same_bytes
from helpers import cuda_missing, poison
from torch import nn

from nvfp4_linear import Nvfp4Linear, explain, ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda_missing() is not None, reason=str(cuda_missing())),
]
needs_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs two GPUs, found {torch.cuda.device_count()}"
)

N, K = 264, 512
# A kernel each: few rows of A, tens to thousands, and decoded operands through cuBLASLt: on a Hopper
# only beyond the rows that a fused kernel takes.
DECODED_ROWS = 2100
ROWS = [1, 16, 33, 64, 130, 256, 600, DECODED_ROWS]
OPS = [
    "quantize",
    "swiglu_quantize",
    "dequantize",
    "global_scale",
    "swizzle_scales",
    "gemm",
    "gemm_a16w4",
    "gemm_a4w16",
    "grouped_gemm",
]


class Problem:
    """Inputs of every op for m rows; `fill` overwrites them with another seed's values."""

    def __init__(self, m: int, device: str):
        self.m = m
        generator = torch.Generator().manual_seed(99)
        self.w = torch.randn(N, K, generator=generator).bfloat16().to(device)
        self.b, self.b_scale = ops.quantize(self.w)
        self.bias = torch.randn(N, generator=generator).to(device)
        self.offs = torch.tensor([m // 3, m // 3, m], dtype=torch.int32, device=device)
        self.x = torch.empty(m, 2 * K, dtype=torch.bfloat16, device=device)
        self.half = torch.empty(m, K, dtype=torch.bfloat16, device=device)
        self.alpha = torch.empty((), device=device)
        self.data = self.scale = None
        self.fill(0)

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x.copy_(torch.randn(self.m, 2 * K, generator=generator))
        self.half.copy_(self.x[:, :K])
        self.alpha.fill_(0.25 + seed)
        data, scale = ops.quantize(self.half)
        if self.data is None:
            self.data, self.scale = data, scale
        else:
            self.data.copy_(data)
            self.scale.copy_(scale)

    def run(self, op: str) -> tuple[torch.Tensor, ...]:
        p = self
        calls = {
            "quantize": lambda: ops.quantize(p.half, p.alpha),
            "swiglu_quantize": lambda: ops.swiglu_quantize(p.x, p.alpha),
            "dequantize": lambda: ops.dequantize(p.data, p.scale, out_dtype=torch.bfloat16),
            "global_scale": lambda: ops.global_scale(p.x),
            "swizzle_scales": lambda: ops.swizzle_scales(p.scale),
            "gemm": lambda: ops.gemm(p.data, p.b, p.scale, p.b_scale, p.alpha, p.bias),
            "gemm_a16w4": lambda: ops.gemm_a16w4(p.half, p.b, p.b_scale, p.alpha),
            "gemm_a4w16": lambda: ops.gemm_a4w16(p.data, p.w, p.scale, p.alpha),
            "grouped_gemm": lambda: torch.ops.nvfp4.grouped_gemm(
                p.half, p.b.expand(3, -1, -1), None, p.b_scale.expand(3, -1, -1), p.offs, p.alpha
            ),
        }
        with torch.inference_mode():
            result = calls[op]()
        return result if isinstance(result, tuple) else (result,)


def test_the_rows_reach_cublaslt():
    kernel = explain(DECODED_ROWS, N, K, bias_dtype=torch.float32).kernel
    assert "cublasLtMatmul" in kernel, f"{DECODED_ROWS} rows are {kernel}'s by now: take more"


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("op", OPS)
def test_a_replayed_graph_gives_the_bytes_of_an_eager_call(op, m):
    p = Problem(m, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        p.run(op)  # plans, function attributes
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = p.run(op)
    poison("cuda")
    for seed in (1, 2):
        p.fill(seed)
        graph.replay()
        graph.replay()  # right behind itself: nothing of the first is left or missing
        for got, expected in zip(captured, p.run(op), strict=True):
            assert_same_bytes(got, expected)


@pytest.mark.parametrize("m", ROWS)
def test_two_streams_at_once_and_one_after_the_other(m):
    problems = [Problem(m, "cuda") for _ in range(2)]
    problems[1].fill(5)
    expected = [[p.run(op) for op in OPS] for p in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for op in OPS:
            for i, (p, stream) in enumerate(zip(problems, streams, strict=True)):
                with torch.cuda.stream(stream):
                    results.append((i, op, p.run(op)))
    torch.cuda.synchronize()
    for i, op, got in results:
        for x, y in zip(got, expected[i][OPS.index(op)], strict=True):
            assert_same_bytes(x, y)


def run_in_threads(problems: list[Problem], rounds: int) -> list[list[tuple[torch.Tensor, ...]]]:
    """Every op of each problem in a thread of its own, all at once; the last round's results."""
    results: list = [None] * len(problems)
    errors: list[BaseException] = []
    start = threading.Barrier(len(problems))

    def work(i: int, p: Problem) -> None:
        try:
            device = p.x.device
            with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
                start.wait()
                for _ in range(rounds):
                    results[i] = [p.run(op) for op in OPS]
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)
            start.abort()

    threads = [threading.Thread(target=work, args=item) for item in enumerate(problems)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def test_threads_share_the_planner():
    problems = [Problem(m, "cuda") for m in (16, 64, 256, DECODED_ROWS)]
    expected = [[p.run(op) for op in OPS] for p in problems]
    torch.cuda.synchronize()
    for got, wanted in zip(run_in_threads(problems, 10), expected, strict=True):
        for xs, ys in zip(got, wanted, strict=True):
            for x, y in zip(xs, ys, strict=True):
                assert_same_bytes(x, y)


@needs_two_gpus
@pytest.mark.parametrize("m", ROWS)
def test_the_second_gpu_gives_the_bytes_of_the_first(m):
    """Called while the first is current: each op makes its operands' GPU current, then restores."""
    first, second = Problem(m, "cuda:0"), Problem(m, "cuda:1")
    for op in OPS:
        ours = second.run(op)
        assert torch.cuda.current_device() == 0
        for x, y in zip(first.run(op), ours, strict=True):
            assert y.device.index == 1
            assert_same_bytes(y.cpu(), x.cpu())


@needs_two_gpus
def test_both_gpus_at_once_from_two_threads():
    problems = [Problem(m, f"cuda:{i}") for m in (16, 256, DECODED_ROWS) for i in (0, 1)]
    results = run_in_threads(problems, 10)
    for i in range(0, len(problems), 2):
        for xs, ys in zip(results[i], results[i + 1], strict=True):
            for x, y in zip(xs, ys, strict=True):
                assert_same_bytes(x.cpu(), y.cpu())


@needs_two_gpus
@pytest.mark.parametrize("m", [33, DECODED_ROWS])
@pytest.mark.parametrize("op", OPS)
def test_a_graph_on_the_second_gpu(op, m):
    p = Problem(m, "cuda:1")
    with torch.cuda.device(1):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            p.run(op)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # torch's own capture stream is on the GPU that captured first in this process.
        with torch.cuda.graph(graph, stream=stream):
            captured = p.run(op)
    p.fill(3)
    torch.cuda.synchronize(1)
    with torch.cuda.device(1):  # a replay goes to the current device's stream
        graph.replay()
        torch.cuda.current_stream().synchronize()
    for got, expected in zip(captured, p.run(op), strict=True):
        assert_same_bytes(got, expected)


@needs_two_gpus
def test_a_layer_moves_to_the_second_gpu():
    layer = Nvfp4Linear.from_linear(nn.Linear(K, N)).to("cuda:0")
    moved = copy.deepcopy(layer).to("cuda:1")
    x = torch.randn(7, K, device="cuda:0")
    with torch.no_grad():
        assert_same_bytes(moved(x.to("cuda:1")).cpu(), layer(x).cpu())
        # Back again: what was derived from the weights follows them.
        assert_same_bytes(moved.to("cuda:0")(x), layer(x))


@needs_two_gpus
def test_operands_on_two_gpus_are_refused():
    p = Problem(16, "cuda:0")
    with pytest.raises(ValueError, match=r"b must be on the device of a, got cuda:1 and cuda:0"):
        ops.gemm(p.data, p.b.to("cuda:1"), p.scale, p.b_scale.to("cuda:1"))
