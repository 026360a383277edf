"""The promise: bench/results/l2 says what was measured and what the model says of it, and where the
SMs' bytes are exact; bench/l2.py takes ncu's table apart without mixing up kernels.
"""

import json
import shutil

import lab_double
import pytest

from bench import l2
from bench.report import RESULTS

DATA = json.loads((RESULTS / "l2" / "h200.json").read_text())
PAGE = (RESULTS / "l2" / "h200.md").read_text()
KERNELS = l2.kernels(DATA)


@pytest.mark.parametrize("position", [2, 9, 17])  # of either shape, with a cluster and without
def test_the_committed_table_has_what_the_model_says(position):
    assert l2._line(l2.row(KERNELS[position])) in PAGE.splitlines()


@pytest.mark.slow
def test_the_whole_committed_page_has_what_the_model_says():
    assert l2.page(DATA) == PAGE


def test_what_sms_receive_is_the_bytes_of_whole_tiles():
    """Exact where the cluster divides the grid, but for some 200 kB of descriptors and the like."""
    exact = 0
    for case in KERNELS:
        (predicted,) = l2.predictions(case, ("row-major",)).values()
        more = case["metrics"][l2.DELIVERED] - predicted.requested_bytes
        assert 0 < more < 0.012 * predicted.requested_bytes
        exact += more < 500_000
    assert exact == 20 and len(KERNELS) == 24


def test_algorithms_differ_where_they_should():
    """At least three, of different tiles and rasters, with hit rates far apart."""
    first = [case for case in KERNELS if case["m"] == 37_810]
    rates = [1 - c["metrics"][l2.FETCHED] / c["metrics"][l2.DELIVERED] for c in first]
    assert len({case["tile"] for case in first}) >= 6
    assert min(rates) < 0.70 and max(rates) > 0.85


TABLE = """noise before
"ID","Kernel Name","Push/Pop_Range","dram__bytes_read.sum","lts__t_sectors_op_read.sum"
"","","","byte","sector"
"0","nvjet_a","<default domain>:bench=1:none","123,456","77"
"1","nvjet_b","<default domain>:bench=0:none","5","6"
"""
TWO = (l2.CASES[0], l2.CASES[1])


def test_ncus_table_is_taken_apart_by_case():
    found = l2.measured(TABLE, TWO)
    assert found[1] == {"kernel": "nvjet_a", "metrics": {l2.FETCHED: 123456, l2.READS: 77}}
    assert found[0]["kernel"] == "nvjet_b"
    with pytest.raises(ValueError, match="case 1 has another kernel: nvjet_a"):
        l2.measured(TABLE, TWO[:1])
    with pytest.raises(ValueError, match="case 0 has another kernel"):
        l2.measured(TABLE.replace("bench=1", "bench=0"), TWO)
    with pytest.raises(ValueError, match="a kernel outside every range: nvjet_a"):
        l2.measured(TABLE.replace("bench=1", "x"), TWO)


def test_every_case_is_launched_as_a_pin_makes_it(monkeypatch, tmp_path, capsys):
    own = shutil.copy(lab_double.build(), tmp_path)  # a double reads its rules once
    monkeypatch.setenv("NVFP4_CUBLASLT_LIBRARY", str(own))
    monkeypatch.setenv("LAB_DOUBLE", "")
    answers = tmp_path / "answers.json"
    assert l2.main(["run", "--quick", "--answers", str(answers)]) == 0
    assert json.loads(answers.read_text()) == [None]
    assert "1 of 1 launched" in capsys.readouterr().out
    for case in l2.CASES:
        algorithm = l2.algorithm_of(case, 130100)
        assert (algorithm.custom, algorithm.swizzle, algorithm.id) == (
            case.custom,
            case.swizzle,
            66,
        )
