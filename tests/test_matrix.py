"""The matrix of matrix.py: every case agrees with FP64, by its counts; and each known fault is seen.

The negative controls switch one fault on and assert which variants fail: those that can tell, all of
them, and no other. A fault lives where the behaviour does: in C++ behind csrc/faults_for_tests.h, in
Python as a replaced method, in the tile planner as a device whose shared memory is endless.
"""

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace

import matrix
import pytest
import torch
from matrix import CASES, RULES, Case, Variant
from test_kernels_on_cpu import TESTS, compile_cxx

from nvfp4_linear import Nvfp4Tensor, ops
from nvfp4_linear.grouped import grouped_gemm

RECORDS = TESTS.parent / "bench" / "results" / "matrix" / "h200.json"
NAMES = [case.name for case in CASES]
BY_NAME = {case.name: case for case in CASES}

# Executed, and skipped by rule, of the 120 variants a case has on one backend.
VARIANTS = 120
PLAIN = {"rows-are-grouped": 100, "gamma-is-grouped": 10}
PLAIN_CPU = (1, PLAIN | {"cpu-has-one-tile": 5, "cpu-has-one-schedule": 4})
PLAIN_CUDA = (1, PLAIN | {"plain-has-one-schedule": 8, "tile-is-gemm-small-ms": 1})
SMALL_M_CUDA = (2, PLAIN | {"plain-has-one-schedule": 8})
# The planner's own schedule and the general one, that one with a tile too: 3 of 6 rows × gamma; and
# dense, where M is ragged.
GROUPED = {"tile-is-the-general-kernels": 48, "dense-needs-ragged-m": 4}
GENERAL_CUDA = (44, GROUPED | {"schedule-needs-packed-weights": 24})
# And small and wgmma, where M is ragged.
PACKED_CUDA = (60, GROUPED | {"schedule-needs-packed-weights": 8})
COUNTS = {
    ("cpu", "plain"): PLAIN_CPU,
    ("cpu", "axes"): PLAIN_CPU,
    ("cpu", "ragged"): (12, {"cpu-has-one-tile": 60, "cpu-has-one-schedule": 48}),
    ("cuda", "plain"): PLAIN_CUDA,
    ("cuda", "axes"): PLAIN_CUDA,
    ("cuda", "plain-decode"): SMALL_M_CUDA,
    ("cuda", "plain-decode-long-k"): SMALL_M_CUDA,
    ("cuda", "ragged"): GENERAL_CUDA,
    ("cuda", "ragged-256-bf16-activation"): PACKED_CUDA,
    ("cuda", "ragged-nvfp4"): PACKED_CUDA,
    ("cuda", "ragged-decode"): PACKED_CUDA,
}
WGMMA = 8  # variants of wgmma, and of dense: four rows × gamma


def counts(case: Case, device: str) -> tuple[int, dict[str, int]]:
    """What `COUNTS` says, less wgmma and dense where the GPU has no wgmma."""
    executed, skip_rules = COUNTS.get((device, case.name), COUNTS[device, case.mode])
    schedules = {GENERAL_CUDA[0]: 1, PACKED_CUDA[0]: 2}.get(executed, 0)
    if device == "cpu" or not schedules or matrix.is_hopper():
        return executed, skip_rules
    skipped = schedules * WGMMA
    return executed - skipped, skip_rules | {"wgmma-is-hoppers": skipped}


@pytest.mark.parametrize("name", NAMES)
def test_case(device, name):
    outcome = matrix.run(BY_NAME[name], (device,))
    print(outcome)
    assert outcome.failures == {}
    assert (outcome.executed, outcome.skip_rules) == counts(BY_NAME[name], device)
    assert outcome.collected == outcome.executed + outcome.skipped == VARIANTS


def test_the_studys_two_cases():
    """256 × 256 × 128 ragged, NVFP4 × dense, swizzled activation scales, BF16 out."""
    two = [c for c in CASES if c.shape == (256, 256, 128) and c.b != "nvfp4"]
    assert [(c.a, c.b, c.a_scale, c.out) for c in two] == [
        ("nvfp4", dense, "swizzled", "bfloat16") for dense in ("bfloat16", "float16")
    ]
    small = {(c.a, c.b) for c in CASES if c.mode == "plain" and c.shape == (128, 128, 128)}
    assert small >= {("nvfp4", "bfloat16"), ("nvfp4", "float16"), ("nvfp4", "nvfp4")}
    outcomes = [matrix.run(case, ("cpu",)) for case in two]
    assert [o.executed for o in outcomes] == [12, 12]
    assert all(c.mode == "ragged" for c in two)


def test_rules_and_cases_have_names_and_every_rule_is_used():
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert len(BY_NAME) == len(CASES)
    used = {name for _, skip_rules in COUNTS.values() for name in skip_rules}
    of_the_machine = {"backend-absent", "wgmma-is-hoppers"}
    assert used | of_the_machine == {rule.name for rule in RULES}
    assert {name for _, name in COUNTS} <= {"plain", "axes", "ragged", *NAMES}
    assert all(rule.reason for rule in RULES)


def test_records(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(matrix, "CASES", CASES[:1])
    target = tmp_path / "matrix.json"
    assert matrix.main(["--json", str(target)]) == 0
    assert f"{CASES[0].name} " in capsys.readouterr().out
    [record] = json.loads(target.read_text())
    assert list(record) == ["case", "collected", "executed", "skipped", "skip_rules"]
    assert record["collected"] == record["executed"] + record["skipped"] == 2 * VARIANTS
    assert record["skipped"] == sum(record["skip_rules"].values())


def test_the_committed_records_are_of_this_matrix(monkeypatch):
    """Of an H200, that is: made again whenever cases, axes or rules change (gpu_session's matrix)."""
    monkeypatch.setattr(matrix, "cuda_missing", lambda: None)
    monkeypatch.setattr(matrix, "is_hopper", lambda: True)
    monkeypatch.setattr(matrix, "run_variant", lambda *_: None)
    records = [matrix.run(case).record() for case in CASES]
    committed = json.loads(RECORDS.read_text())
    assert [r["case"] for r in committed] == [r["case"] for r in records]
    assert [r["collected"] for r in committed] == [r["collected"] for r in records]
    assert committed == records


def test_a_failure_is_the_exit_status(monkeypatch, capsys):
    def fails(*_):
        raise AssertionError("wrong")

    monkeypatch.setattr(matrix, "CASES", CASES[:1])
    monkeypatch.setattr(matrix, "run_variant", fails)
    assert matrix.main([]) == 1
    assert "AssertionError: wrong" in capsys.readouterr().out


# --- negative controls


def in_extension(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: torch.ops.nvfp4._control(f"fault {name}")


def axes_not_swapped(*axes: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Data, scales and shape swap sides, these axes stay: the operand is described as another."""
    proper = Nvfp4Tensor.t

    def t(self):
        return replace(proper(self), **{axis: getattr(self, axis) for axis in axes})

    return lambda monkeypatch: monkeypatch.setattr(Nvfp4Tensor, "t", t)


def bytes_transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repack that moves whole bytes into the new shape and calls it done."""

    def repack(self, packed_dim):
        if packed_dim == self.packed_dim:
            return self
        rows, columns = self.shape
        new = (rows // 2, columns) if packed_dim == 0 else (rows, columns // 2)
        return replace(self, data=self.data.reshape(new), packed_dim=packed_dim)

    monkeypatch.setattr(Nvfp4Tensor, "repack", repack)


@dataclass(frozen=True)
class Control:
    """A fault, and the variants that must fail under it."""

    name: str
    switch_on: Callable[[pytest.MonkeyPatch], None]
    fails: Callable[[Case, Variant], bool]
    backends: tuple[str, ...] = ("cpu", "cuda")
    error: str = ""  # a pattern of how each of them fails


def moves(*rows: str) -> Callable[[Case, Variant], bool]:
    return lambda case, variant: case.mode == "ragged" and variant.rows in rows


def transposes(case: Case, variant: Variant) -> bool:
    return case.mode == "axes" and (case.b == "nvfp4" or case.a_axes[1] == "x")


def repacks(case: Case, variant: Variant) -> bool:
    """Whether some packed operand's pairs don't lie along its blocks."""
    sides = ((case.a, case.a_axes), (case.b, case.b_axes))
    across = any(kind == "nvfp4" and axes in ("xk", "kx") for kind, axes in sides)
    return case.mode == "axes" and across


def has_a_capped_default(case: Case, variant: Variant) -> bool:
    """Whether a default of gemm_small_m that is over without its cap, or any of the general kernel."""
    long = case.name == "plain-decode-long-k" or matrix.takes_general(case, variant)
    return long and variant.tile == "default"


CONTROLS = [
    Control("gather-ignored", in_extension("gather-ignored"), moves("gather", "both")),
    Control("scatter-ignored", in_extension("scatter-ignored"), moves("scatter", "both")),
    # gather leaves two rows in no group, scatter drops two
    Control("rows-not-zeroed", in_extension("rows-not-zeroed"), moves("gather", "scatter", "both")),
    Control("stale-padding", in_extension("stale-padding"), moves("k-padded-a", "k-padded-b")),
    # A host that caps no tile: launches that no GPU can run. Where there is none, the planners'
    # answers are held to every GPU's memory below.
    Control(
        "planner-uncapped",
        in_extension("planner-uncapped"),
        has_a_capped_default,
        ("cuda",),
        r"failed: cudaError",
    ),
    # A transposed operand: b wherever it is packed, and what is decoded across its rows.
    Control("no-axis-swapped", axes_not_swapped("packed_dim", "block_dim"), transposes),
    Control("packing-axis-not-swapped", axes_not_swapped("packed_dim"), transposes),
    Control("bytes-transposed", bytes_transposed, repacks),
]


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_the_matrix_sees(device, control, monkeypatch):
    if device not in control.backends:
        pytest.skip(f"{control.name} is a fault of {control.backends[0]} alone")
    expected, failed = set(), {}
    try:
        control.switch_on(monkeypatch)
        for case in CASES:
            failures = matrix.run(case, (device,)).failures
            failed |= {(case.name, variant): error for variant, error in failures.items()}
            executed = [v for v in matrix.expand((device,)) if not matrix.rule_for(case, v)]
            expected |= {(case.name, v) for v in executed if control.fails(case, v)}
    finally:
        torch.ops.nvfp4._control("fault none")
    assert expected
    unseen, unexpected = expected - failed.keys(), failed.keys() - expected
    assert (unseen, unexpected) == (set(), set())
    assert [error for error in failed.values() if not re.search(control.error, error)] == []


def test_the_studys_cases_depend_on_the_planners_cap():
    """By the rules alone, wherever this runs: each has variants that an uncapped default fails."""
    for name in ("ragged-256-bf16-weight", "ragged-256-fp16-weight", "ragged-256-bf16-activation"):
        case = BY_NAME[name]
        fails = [v for v in matrix.expand(("cuda",)) if has_a_capped_default(case, v)]
        assert {v.rows for v in fails} == set(matrix.ROWS)
        assert {v.tile for v in fails} == {"default"}


def test_structure_tells_a_wrong_axis_and_numbers_tell_wrong_bytes(monkeypatch):
    """Not swapped, the description contradicts the data's shape. Moved by bytes, every shape is right."""
    case = BY_NAME["axes-b-pairs-along-n"]
    with monkeypatch.context() as patch:
        axes_not_swapped("packed_dim", "block_dim")(patch)
        [error] = matrix.run(case, ("cpu",)).failures.values()
        assert error.startswith(
            "ValueError: data of logical shape (128, 32) packed along dimension 1"
        )
    bytes_transposed(monkeypatch)
    [error] = matrix.run(case, ("cpu",)).failures.values()
    assert error.startswith("AssertionError: result: ")


def test_an_unknown_fault_is_an_error():
    with pytest.raises(ValueError, match=r"fault must be one of none, gather-ignored, .*got 'x'"):
        torch.ops.nvfp4._control("fault x")


# --- the tile planner: a default is capped, an explicit tile obeyed or refused

# SMs, bytes of shared memory a block, largest cluster
GPUS = {
    "A100": (108, 166912, 1),
    "RTX 4090": (128, 101376, 1),
    "H200": (132, 232448, 8),
    "GB10": (48, 101376, 8),
}
SYSTEM_BYTES = 1024  # of shared memory, a resident block: a multiprocessor has room for one more
SMALL_M_CASES = [case for case in CASES if matrix.takes_small_m(case)]


@pytest.fixture(scope="module")
def planner(tmp_path_factory):
    """ask(*words) → the answer's words."""
    program = tmp_path_factory.mktemp("planner") / "explicit_tile"
    compile_cxx(TESTS / "explicit_tile.cpp", "-o", program)

    def ask(*words):
        request = " ".join(map(str, words))
        done = subprocess.run([program], input=request, capture_output=True, text=True, check=True)
        return done.stdout.split()

    return ask


def small_m(planner, how, gpu, shape, *tile):
    return planner("small_m", how, *GPUS[gpu], *shape, *tile)


def general(planner, how, gpu, *stages):
    _, shared, _ = GPUS[gpu]
    return planner("general", how, shared, shared + SYSTEM_BYTES, *stages)


def plans(planner, how, gpu, shape):
    """(strips, k_warps, cluster, chunks, segment, blocks, bytes)."""
    word, *numbers = small_m(planner, how, gpu, shape)
    assert word == "plan"
    return list(map(int, numbers))


def fits(gpu, plan):
    return plan[-1] <= GPUS[gpu][1]


@pytest.mark.parametrize("gpu", GPUS)
def test_a_default_tile_fits_and_is_never_refused(planner, gpu):
    shapes = [(m, n, k) for m in (1, 9, 32) for n, k in ((1, 16), (136, 80), (5376, 14336))]
    for shape in shapes + [case.shape for case in SMALL_M_CASES]:
        assert fits(gpu, plans(planner, "default", gpu, shape))


@pytest.mark.parametrize("gpu", GPUS)
def test_without_its_cap_the_planner_fails_the_long_case(planner, gpu):
    """The negative control of the one above: the matrix has a case that a missing cap breaks."""
    uncapped = {c.name: plans(planner, "uncapped", gpu, c.shape) for c in SMALL_M_CASES}
    over = [name for name, plan in uncapped.items() if not fits(gpu, plan)]
    assert over == ["plain-decode-long-k"]


@pytest.mark.parametrize("gpu", GPUS)
def test_an_explicit_tile_is_obeyed(planner, gpu):
    given = [int(word.split("=")[1]) for word in matrix.EXPLICIT_TILE.split()[:3]]
    for case in SMALL_M_CASES:
        # The planner's own tile, given: the same plan to the last number.
        default = plans(planner, "default", gpu, case.shape)
        answer = small_m(planner, "explicit", gpu, case.shape, *default[:3])
        assert answer == ["plan", *map(str, default)]
        answer = small_m(planner, "explicit", gpu, case.shape, *given)
        assert answer[:4] == ["plan", *map(str, given)]


@pytest.mark.parametrize(
    ("gpu", "tile", "message"),
    [
        (
            "GB10",
            (16, 1, 1),
            "the explicit tile needs max(122880 for B + 1 * 8192 for A, 65536 for sums) = 131072 "
            "bytes of shared memory a block, this GPU has 101376: take a smaller one",
        ),
        (
            "H200",
            (1, 16, 1),
            "+ 16 * 8192 for A, 65536 for sums) = 253952 bytes of shared memory",
        ),
        ("H200", (4, 5, 1), "4 strips * 5 warps along k = 20 warps, a block has 1 to 16"),
        ("A100", (4, 1, 2), "cluster must be in [1, 1] on this GPU, got 2"),
        ("H200", (4, 1, 0), "cluster must be in [1, 8] on this GPU, got 0"),
    ],
)
def test_an_explicit_tile_that_cannot_fit_is_refused(planner, gpu, tile, message):
    word, *said = small_m(planner, "explicit", gpu, (32, 64, 24576), *tile)
    assert word == "refused"
    assert message in " ".join(said)


def test_an_explicit_tile_with_idle_warps_is_refused(planner):
    said = " ".join(small_m(planner, "explicit", "H200", (5, 136, 80), 2, 4, 1))
    assert "k = 80 has 1 chunks of 128, too few for cluster = 1 times k_warps = 4" in said


# Of the general grouped kernel: stages, blocks a multiprocessor, bytes.
GENERAL = {
    "A100": (3, 1, 104448),
    "RTX 4090": (2, 1, 73728),
    "H200": (3, 2, 104448),
    "GB10": (2, 1, 73728),
}


@pytest.mark.parametrize("gpu", GPUS)
def test_a_default_ring_fits_and_is_never_refused(planner, gpu):
    word, *plan = general(planner, "default", gpu)
    assert (word, tuple(map(int, plan))) == ("plan", GENERAL[gpu])
    assert fits(gpu, tuple(map(int, plan)))


@pytest.mark.parametrize("gpu", GPUS)
def test_without_its_cap_no_gpu_holds_the_ring(planner, gpu):
    """The negative control of the one above, by the switch that the kernel's host code asks."""
    word, *plan = general(planner, "uncapped", gpu)
    assert word == "plan"
    assert not fits(gpu, list(map(int, plan)))


@pytest.mark.parametrize("gpu", GPUS)
def test_explicit_stages_are_obeyed_or_refused(planner, gpu):
    given = int(matrix.EXPLICIT_TILE.split("stages=")[1])
    assert general(planner, "explicit", gpu, given)[:2] == ["plan", str(given)]
    stages, *_ = GENERAL[gpu]
    assert general(planner, "explicit", gpu, stages) == ["plan", *map(str, GENERAL[gpu])]
    for stages, total in ((99, 3250176), (1, 73728), (-3, 73728)):
        word, *said = general(planner, "explicit", gpu, stages)
        assert word == "refused"
        assert " ".join(said) == (
            f"grouped_gemm: the explicit tile needs 6144 + max({stages} (at least 2) * 32768, 67584 "
            f"for sums) = {total} bytes of shared memory a block, this GPU has {GPUS[gpu][1]}: take "
            "a smaller one, or leave it to the planner"
        )


def test_a_deeper_ring_is_obeyed_where_it_fits(planner):
    """An explicit choice is not the planner's to cap: six stages, one block a multiprocessor."""
    assert general(planner, "explicit", "H200", 6) == ["plan", "6", "1", str(6144 + 6 * 32768)]
    assert general(planner, "explicit", "H200", 7)[0] == "refused"


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("op", ["gemm_a16w4", "grouped_gemm"])
def test_the_ops_refuse_an_explicit_tile_that_cannot_fit(device, op, monkeypatch):
    x = torch.zeros(32, 2048, dtype=torch.bfloat16, device=device)
    w, w_scale = ops.quantize(x)
    offs = torch.tensor([32], dtype=torch.int32, device=device)

    def call():
        if op == "gemm_a16w4":
            return ops.gemm_a16w4(x, w, w_scale)
        return grouped_gemm(x, w[None], None, w_scale[None], offs)

    control = torch.ops.nvfp4._control
    monkeypatch.setenv(matrix.SCHEDULE_VARIABLE, "general")
    try:
        control("tile strips=1 k_warps=16 cluster=1 stages=99")
        with pytest.raises(ValueError, match=r"the explicit tile needs .* = \d+ bytes of shared"):
            call()
        control("tile")
        call()
    finally:
        control("tile")
