"""The `device` fixture: every test that takes it runs on the CPU and, where there is one, on a GPU."""

import pytest
from helpers import cuda_missing


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    if request.param == "cuda" and (reason := cuda_missing()):
        pytest.skip(reason)
    return request.param
