"""As test_byte_exact.py, on drawn inputs: any FP32 pattern, any usable global scale."""

import pytest
import torch
from compare import fp32_from_bits
from test_byte_exact import DTYPES, check_gemm, check_quantize, check_swiglu, gemm_operands

pytest.importorskip("hypothesis", reason="needs hypothesis (the extra [test])")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

few_examples = settings(
    max_examples=50,
    deadline=None,  # a shared machine stalls now and then
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
fp32_patterns = st.one_of(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1 << 31, 1, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF, 0x00800000]),
    st.integers(0x3E000000, 0x41000000),  # 0.125 … 8: where E2M1's boundaries are at s = 1
)


@few_examples
@given(data=st.data())
def test_quantize_any_block(device, data):
    """Any FP32 patterns, any usable global scale."""
    count = data.draw(st.integers(1, 3))
    words = data.draw(st.lists(fp32_patterns, min_size=16 * count, max_size=16 * count))
    g = fp32_from_bits([data.draw(st.integers(1, 0x7F7FFFFF))])
    check_quantize(fp32_from_bits(words)[None], g, device, swizzled=data.draw(st.booleans()))


@few_examples
@given(data=st.data())
def test_swiglu_any_block(device, data):
    words = data.draw(st.lists(fp32_patterns, min_size=32, max_size=32))
    g = fp32_from_bits([data.draw(st.integers(1, 0x7F7FFFFF))])
    check_swiglu(fp32_from_bits(words)[None], g, device)


@few_examples
@given(data=st.data())
def test_gemm_any_operands(data):
    m, n, blocks = (data.draw(st.integers(1, top)) for top in (20, 40, 12))
    lowest = data.draw(st.integers(0, 0x7E))
    scales = {"lowest": lowest, "highest": data.draw(st.integers(lowest, 0x7F))}
    operands = gemm_operands(m, n, 16 * blocks, data.draw(st.integers(0, 10_000)), **scales)
    alpha = data.draw(st.one_of(st.none(), st.floats(width=32, allow_nan=False)))
    bias = data.draw(st.one_of(st.none(), st.floats(width=32, allow_nan=False)))
    check_gemm(
        operands,
        None if alpha is None else torch.tensor(alpha),
        None if bias is None else torch.full((n,), bias),
        data.draw(st.sampled_from(DTYPES)),
    )
