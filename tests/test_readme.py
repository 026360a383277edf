"""The promise: what README.md shows runs as it stands there, and what there is, it names."""

import re
from pathlib import Path

import pytest
import torch

from nvfp4_linear import __all__ as public_names
from nvfp4_linear import cli, machine

README = Path(__file__).parents[1] / "README.md"
TEXT = README.read_text(encoding="utf-8") if README.exists() else ""
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.S | re.M)

pytestmark = pytest.mark.skipif(not TEXT, reason="needs README.md, found none beside tests/")


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_code_runs(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    scope = {}
    exec(compile(code, "README.md", "exec"), scope)
    assert torch.isfinite(scope["y"]).all()


def test_there_is_code():
    assert len(BLOCKS) >= 2


def test_names_what_there_is():
    qualified = torch._C._dispatch_get_all_op_names()
    ops = [name.removeprefix("nvfp4::") for name in qualified if name.startswith("nvfp4::")]
    ops = [name for name in ops if not name.startswith("_")]
    assert "gemm" in ops
    names = [*public_names, *machine.ENVIRONMENT, *ops]
    assert [name for name in names if not re.search(rf"\b{name}\b", TEXT)] == []
    assert [name for name in cli.COMMANDS if not re.search(rf"`{name}[ `]", TEXT)] == []
