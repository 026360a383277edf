"""The promise: nothing is promoted that is not byte-exact in isolation, in whole blocks and in whole
trajectories, and faster where it claims to be; only ``fc2.forward_swiglu`` differs between the arms;
and a report says on what it was measured.

The whole ladder runs here with the test double. What the ladder decides is tested with scripted
arms, whose clock is scripted too.
"""

import inspect
import itertools
import json
import math
import os
import shutil

import lab_double
import pytest
import torch

from bench import traffic, video_transformer
from bench.report import RESULTS
from bench.video_transformer import Config, VideoTransformer
from nvfp4_linear import algorithms, cli
from nvfp4_linear.algorithms import Algorithm, Device, Pin
from nvfp4_linear.console import CommandError, Console
from nvfp4_linear.lab import (
    arms,
    commands,
    gate,
    gate_report,
    measure,
    promote,
    route,
    study,
    verdict,
)
from nvfp4_linear.lab.session import Machine

CONFIG = Config(grid=(2, 3, 4), hidden=64, ffn=96, heads=2, blocks=3, channels=16)
LADDER = gate.Ladder(rounds=6, blocks=(0, 1, 2), steps=(1, 2))
DOUBLE = Machine("/nowhere", Device((12, 1), 48, name="GB10, described"), test_double=True)


@pytest.fixture(scope="module")
def model():
    built = VideoTransformer(CONFIG)
    built.calibrate()
    return built


class Scripted:
    """Arms whose arithmetic is the exact CPU's, and whose time is `cost[arm]` a GEMM.

    wrong(self) says whether this GEMM's last element is wrong.
    """

    def __init__(self, cost=(2.0, 1.0), wrong=lambda self: False, pinned=True, extra=0.0):
        self.costs = dict(zip((gate.HEURISTIC, gate.PINNED), cost, strict=True))
        self.wrong, self.pinned, self.extra = wrong, pinned, extra
        self.arm, self.gemms, self.now = gate.HEURISTIC, 0, 0.0
        self.seen = set()

    def select(self, name):
        self.arm = name

    def gemm(self, operands):
        self.gemms += 1
        self.now += self.costs[self.arm]
        out = torch.ops.nvfp4.gemm(
            operands.data,
            operands.weight,
            operands.block_scale,
            operands.weight_scale,
            operands.alpha,
        )
        if self.wrong(self):
            out.view(torch.int16)[-1, -1] ^= 1 << 7  # its exponent: residual sums don't hide it
        return out

    def forward_swiglu(self, fc2, gate_up):
        self.seen.add(id(fc2))
        self.now += self.extra
        return self.gemm(arms.Operands.produce(fc2, gate_up))

    def describe(self, m, n, k, weight="nvfp4"):
        algorithm = {"id": 70, "tile": 20, "stages": 37, "split_k": 1, "reduction": 0, "swizzle": 0,
                     "custom": 0, "inner": 0, "cluster": 0}  # fmt: skip
        if self.arm == gate.HEURISTIC:
            algorithm["split_k"] = -2
        return {"rung": f"cublaslt-{self.arm}", "kernel": "scripted", "pinned": self.pinned,
                "algorithm": algorithm, "evidence": "", "workspace_bytes": 0,
                "refusals": ["cublaslt-pinned: pin is for another problem"]}  # fmt: skip

    def close(self):
        pass


class ScriptedClock:
    """Time is what the arms say it is."""

    name = "scripted"
    settle_s = sample_s = 0.0

    def __init__(self, timed):
        self.timed, self.jitter = timed, 0

    def seconds(self, launch, launches):
        before = self.timed.now
        launch()
        self.jitter = (self.jitter + 1) % 5
        return (self.timed.now - before + 1e-3) * (1 + 0.001 * self.jitter)


@pytest.fixture
def climb(model, monkeypatch):
    def run(timed, ladder=LADDER):
        monkeypatch.setattr(gate, "make_clock", lambda device: ScriptedClock(timed))
        monkeypatch.setattr(gate.lt, "Planner", lambda path: type("P", (), {
            "library": {"version": 130100}}))  # fmt: skip
        return gate.run_gate(DOUBLE, model, timed, ladder, Console())

    return run


# ---- What the ladder decides ------------------------------------------------------------------------


def test_what_was_measured_is_kept_after_every_measurement(model, monkeypatch):
    """A gate takes minutes; one that is killed has not lost what it measured."""
    timed, kept = Scripted(), []
    monkeypatch.setattr(gate, "make_clock", lambda device: ScriptedClock(timed))
    monkeypatch.setattr(gate.lt, "Planner", lambda path: type("P", (), {
        "library": {"version": 130100}}))  # fmt: skip
    save = kept.append
    gate.run_gate(DOUBLE, model, timed, LADDER, Console(), lambda data: save(json.dumps(data)))
    seen = [json.loads(text) for text in kept]
    assert [(len(d["blocks"]), len(d["trajectories"])) for d in seen] == [
        (0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (3, 2), (3, 2),
    ]  # fmt: skip
    assert all(d["isolated"] for d in seen)
    assert [bool(d["verdict"]) for d in seen] == [False] * 6 + [True]


def test_an_arm_settles_before_it_is_timed():
    """Short calls are repeated: so many before a sample, so many in it, one long one suffices."""
    costs = {(32, 16): 2**-8, (1, 1): 0.5, (256, 256): 2**-20}

    class Clock:
        settle_s, sample_s = 2**-3, 2**-4

        def seconds(self, launch, launches):
            return launch()

    for expected, cost in costs.items():
        assert gate._calls(Clock(), lambda cost=cost: cost) == expected
    assert gate._calls(measure.HostClock(), None) == (1, 1)


def test_every_sample_comes_after_its_own_arm_has_run():
    timed, ran = Scripted(), []

    class Clock:
        settle_s, sample_s = 3.0, 2.0

        def seconds(self, launch, launches):
            ran.append("timed")
            launch()
            return launches

    def call():
        ran.append(timed.arm)
        return torch.zeros(1, 1, dtype=torch.bfloat16)

    found = gate.alternate(timed, Clock(), range(2), call)
    assert found["calls"] == {"warm": 3, "timed": 2}
    arms = [ran[i : i + 6] for i in range(len(ran) - 36, len(ran), 6)]
    heuristic, pinned = ([*[arm] * 3, "timed", arm, arm] for arm in (gate.HEURISTIC, gate.PINNED))
    assert arms == [heuristic, pinned, heuristic] * 2
    assert found["pinned_s"] == [1.0, 1.0] and not found["faster"]


def test_a_faster_byte_exact_pin_is_promoted(climb, model):
    timed = Scripted()
    data = climb(timed)
    assert data["verdict"]["promoted"], data["verdict"]
    gemm = data["isolated"]["gemm"]
    assert gemm["comparison"]["ratio"] == pytest.approx(2, rel=0.01)
    assert len(gemm["heuristic_s"]) == len(gemm["pinned_s"]) == len(gemm["heuristic_again_s"]) == 6
    assert [block["block"] for block in data["blocks"]] == [0, 1, 2]
    assert [one["steps"] for one in data["trajectories"]] == [1, 2]
    assert data["trajectories"][1]["seconds"]["heuristic"] == pytest.approx(12, rel=0.01)
    assert data["trajectories"][1]["seconds"]["pinned"] == pytest.approx(6, rel=0.01)
    assert timed.seen == {id(block.fc2) for block in model.blocks}
    assert all("forward_swiglu" not in vars(block.fc2) for block in model.blocks)  # put back


@pytest.mark.parametrize("stage, function, reached", [
    ("isolated GEMM", "_isolated", (0, 0)),
    ("block 0", "_blocks", (1, 0)),
    ("1-step trajectory", "_trajectories", (3, 1)),
])  # fmt: skip
def test_other_bytes_end_the_ladder_where_they_show(climb, stage, function, reached):
    """One bit of one element of fc2's output; its first coordinate is named."""

    def wrong(timed):
        callers = {frame.function for frame in inspect.stack(context=0)}
        return timed.arm == gate.PINNED and function in callers

    data = climb(Scripted(wrong=wrong))
    reasons = data["verdict"]["reasons"]
    assert not data["verdict"]["promoted"] and len(reasons) == 1
    assert reasons[0].startswith(f"{stage}: the outputs differ: ")
    if stage == "isolated GEMM":
        assert "1 of 1,536 elements, the first at (23, 63): " in reasons[0]
    assert (len(data["blocks"]), len(data["trajectories"])) == reached
    text = gate_report.markdown(data)
    assert "**NOT PROMOTED**" in text and "DIFFERENT" in text


def test_bytes_that_differ_in_one_round_only_are_different(climb):
    class Once(Scripted):
        pinned_calls = 0

        def gemm(self, operands):
            self.pinned_calls += self.arm == gate.PINNED
            self.wrong = lambda _: self.arm == gate.PINNED and self.pinned_calls == 4
            return super().gemm(operands)

    reasons = climb(Once())["verdict"]["reasons"]
    assert reasons[0].startswith("isolated GEMM: the outputs differ: 1 of 1,536 elements")


def test_as_fast_as_the_heuristic_is_not_promoted(climb):
    data = climb(Scripted(cost=(1.0, 1.0)))
    assert not data["verdict"]["promoted"] and data["blocks"] == []
    assert data["verdict"]["reasons"][0].startswith("isolated GEMM: the pinned algorithm is ")
    assert "not beyond the noise of" in data["verdict"]["reasons"][0]


def test_keep_going_measures_the_rest_and_promotes_nothing(climb):
    data = climb(Scripted(cost=(1.0, 1.0)), gate.Ladder(6, (0,), (1,), keep_going=True))
    assert len(data["blocks"]) == len(data["trajectories"]) == 1
    assert not data["verdict"]["promoted"]


def test_slower_blocks_or_trajectories_are_not_promoted(climb):
    class Slower(Scripted):
        """The GEMM is faster alone, and whatever calls it through the layer pays more."""

        def forward_swiglu(self, fc2, gate_up):
            self.extra = 2.5 if self.arm == gate.PINNED else 0.0
            return super().forward_swiglu(fc2, gate_up)

    data = climb(Slower(), gate.Ladder(6, (0,), (1,), keep_going=True))
    reasons = data["verdict"]["reasons"]
    assert [reason.split(":")[0] for reason in reasons] == [
        "isolated producer + GEMM", "block 0", "1-step trajectory",
    ]  # fmt: skip
    assert all("slower" in reason for reason in reasons)


def test_a_heuristic_that_varies_can_prove_nothing(climb):
    data = climb(Scripted(wrong=lambda timed: timed.gemms % 7 == 0))
    assert not data["verdict"]["promoted"]
    assert "the heuristic's own output varies from run to run" in data["verdict"]["reasons"][0]


def test_without_a_pin_there_is_nothing_to_promote(climb):
    with pytest.raises(
        CommandError, match=r"no pin takes the FC2 problem 24 x 64 x 96.*--pins.*--s"
    ):
        climb(Scripted(pinned=False))


def test_a_block_that_is_not_there_is_named(climb):
    with pytest.raises(
        CommandError, match="--gate-blocks must be below --blocks, which is 3, got 49"
    ):
        climb(Scripted(), gate.Ladder(blocks=(0, 49)))


# ---- The study's figures ----------------------------------------------------------------------------


def test_the_studys_figures_agree_with_each_other():
    shape = (study.M, study.N, study.K)
    rates = [verdict.tflops(*shape, ms * 1e-3) for ms in study.GEMM_MS]
    assert rates == pytest.approx([108.70, 372.74], abs=0.01)  # its times have five digits
    assert round(study.GEMM_MS[0] / study.GEMM_MS[1], 2) == 3.43
    producers = [w - g for w, g in zip(study.PRODUCER_AND_GEMM_MS, study.GEMM_MS, strict=True)]
    assert all(23.1 < ms < 23.2 for ms in producers)  # "about 23.2 ms"
    assert list(study.BLOCK_MS) == [0, 24, 49] and list(study.TRAJECTORY_S) == [2, 12]
    pinned = algorithms.asdict(algorithms.pins()[-1].algorithm)
    assert pinned | study.ALGORITHM == pinned


def test_the_default_sizes_are_the_studys():
    config = Config()
    assert (config.tokens, config.hidden, config.ffn) == (study.M, study.N, study.K)
    assert config.blocks == 50 and config.head_dim == 128
    assert traffic.CANONICAL.m == study.PADDED_M
    assert study.PADDED_M % 64 == 0 and -(-study.PADDED_M // 128) == -(-study.M // 128)
    assert gate.Ladder() == gate.Ladder(20, (0, 24, 49), (2, 12))


def canonical_data(climb):
    data = climb(Scripted(cost=(0.053618, 0.015636)))
    data["model"] |= {"tokens": study.M, "hidden": study.N, "ffn": study.K, "blocks": 50}
    data["machine"] |= {"test_double": False, "gpu": "NVIDIA GB10"}
    for block, index in zip(data["blocks"], (0, 24, 49), strict=True):
        block["block"] = index
    data["trajectories"][0]["steps"], data["trajectories"][1]["steps"] = 2, 12
    return data


def test_the_report_has_the_studys_rows_with_the_machines_figures(climb):
    data = canonical_data(climb)
    comparison = data["isolated"]["gemm"]["comparison"]
    comparison |= {"heuristic_s": 0.053618, "candidate_s": 0.015636}
    data["isolated"]["tflops"] = {"heuristic": 108.7, "pinned": 372.74}
    text = gate_report.markdown(data, canonical=True)
    for row in (
        "| algorithm id / tile id / stages id | 70 / 20 (`128x128`) / 37 (`256xAUTO`) |",
        "| split-K / reduction scheme | 1 / 0 | -2 / 0 |",
        "| custom option / CTA swizzle | 0 / 0 |",
        "measured on NVIDIA GB10 (p50 of 6 rounds, AB/BA alternating)",
        "| GEMM | 53.618 ms, 108.70 TFLOP/s | 15.636 ms, 372.74 TFLOP/s | 3.429x |",
        "| GEMM | 53.618 → 15.636 ms, 3.429x | 53.618 → 15.636 ms, 3.429x |",
        "| whole block 24 | 459.928 → 420.243 ms, 1.094x |",
        "| 12-step trajectory, one pair | 278.201 → 255.371 s, 1.089x |",
        "GB10, the study | NVIDIA GB10, here |",
        "shape-specific AlgoCheck with a safe fallback",
    ):
        assert row in text, row
    assert "Not comparable" not in text and "TEST DOUBLE" not in text
    assert (
        "Rows: the study's producer pads M = 37,810 to 37,824, so its GEMM has 0.04 % more of them, in "
        "as many tiles; here M stays 37,810."
    ) in text


def test_what_was_not_reached_or_is_another_experiment_is_called_that(climb):
    data = climb(Scripted(cost=(1.0, 1.0)))
    text = gate_report.markdown(data, canonical=True)
    assert "Rows: " not in text  # of other sizes altogether
    assert "| whole block 49 | 458.054 → 417.364 ms, 1.097x | not run |" in text
    assert "the sizes are not the study's; the model has 3 blocks" in text
    assert "the times are a test double's" in text and "TEST DOUBLE" in text
    emulated = canonical_data(climb)
    emulated["arms"]["pinned"]["rung"] = "emulated"
    text = gate_report.markdown(emulated, canonical=True)
    assert "NVFP4 runs on the emulated rung here, so the pin is of another GEMM" in text


def test_the_committed_report_is_of_the_studys_sizes_and_says_what_came_of_it():
    path = RESULTS / "gate" / "h200.json"
    data = json.loads(path.read_text())
    page = path.with_suffix(".md").read_text()
    assert gate_report.markdown(data, canonical=True) == page
    assert gate_report.shape(data) == (study.M, study.N, study.K)
    assert [block["block"] for block in data["blocks"]] == [0, 24, 49]
    assert [one["steps"] for one in data["trajectories"]] == [2, 12]
    assert "DIFFERENT" not in page and page.count(" equal") == 7
    assert "**NOT PROMOTED**" in page and not data["machine"]["test_double"]


# ---- The model --------------------------------------------------------------------------------------


def test_the_transformer_is_deterministic_and_calibrated(model):
    with torch.inference_mode():
        first, second = (model.sample(model.noise(), 2) for _ in range(2))
    assert torch.equal(first.view(torch.int16), second.view(torch.int16))
    assert first.shape == (24, 16) and torch.isfinite(first.float()).all()
    again = VideoTransformer(CONFIG)
    again.calibrate()
    for name, tensor in model.state_dict().items():
        other = again.state_dict()[name]
        same = (t.reshape(-1).view(torch.uint8) for t in (tensor, other))
        assert torch.equal(*same), name
    assert all(float(block.fc2.input_scale) > 0 for block in model.blocks)


def test_every_block_reaches_the_output(model):
    """A transformer that ignores a block would pass any gate of it."""
    with torch.inference_mode():
        latent, t = model.noise(), torch.tensor(0.5)
        plain = model(latent, t)
        for block in model.blocks:
            hook = block.fc2.register_buffer, block.fc2.forward_swiglu
            block.fc2.forward_swiglu = lambda gate_up: torch.zeros(
                len(gate_up), CONFIG.hidden, dtype=CONFIG.dtype
            )
            changed = model(latent, t)
            del block.fc2.forward_swiglu
            assert hook and not torch.equal(plain, changed)
        assert not torch.equal(plain, model(latent, torch.tensor(0.25)))


def test_positions_are_rotated_and_lengths_kept():
    rope = video_transformer._rope(CONFIG, "cpu")
    assert rope.shape == (24, 16)
    assert len({tuple(row) for row in torch.view_as_real(rope).flatten(1).tolist()}) == 24
    x = torch.randn(2, 24, 32)
    turned = video_transformer._rotate(x, rope)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(turned[:, 0], x[:, 0])


@pytest.mark.parametrize("text", ["10x19", "0x1x1", "axbxc", "10x19x199x1"])
def test_a_grid_is_three_sizes(text):
    with pytest.raises(Exception, match="expected FRAMESxHEIGHTxWIDTH"):
        video_transformer.parse_grid(text)


def test_sizes_that_make_no_heads_are_refused():
    with pytest.raises(ValueError, match="hidden must be an even multiple of heads, got 64 and 5"):
        Config(hidden=64, heads=5)


# ---- The double's arms, and the route ------------------------------------------------------------------


@pytest.fixture
def double(monkeypatch, tmp_path):
    """Loads the double into this process. It reads its rules once, so each time it is a copy."""
    number = itertools.count()

    def load(rules):
        library = shutil.copy(lab_double.build(), tmp_path / f"double{next(number)}.so")
        monkeypatch.setenv("NVFP4_CUBLASLT_LIBRARY", str(library))
        monkeypatch.setenv("LAB_DOUBLE", rules)
        return Machine(str(library), Device((12, 1), 48, name="GB10, described"), True)

    return load


PIN = Pin(Algorithm(70, 4, 37), (12, 1), n=64, k=96, evidence="here")


def test_the_doubles_arms_differ_in_algorithm_and_agree_in_bytes(double, model):
    both = arms.make_arms(double(""), [PIN])
    fc2 = model.blocks[0].fc2
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(24, 192, generator=generator).bfloat16()
    outputs = {}
    for name in (gate.HEURISTIC, gate.PINNED):
        both.select(name)
        outputs[name] = both.forward_swiglu(fc2, gate_up)
        described = both.describe(24, 64, 96)
        assert described["pinned"] == (name == gate.PINNED)
        assert described["rung"] == f"cublaslt-{name}"
    assert described["algorithm"]["tile"] == 4 and described["evidence"] == "here"
    assert measure.difference(outputs[gate.PINNED], outputs[gate.HEURISTIC]) is None
    # ... and with the CPU's exact answer, but for the order of FP32 sums.
    exact = type(fc2).forward_swiglu(fc2, gate_up)
    torch.testing.assert_close(outputs[gate.PINNED], exact, rtol=2**-7, atol=1e-5)


def test_only_a_static_fc2_without_bias_is_gated(model):
    fc2 = model.blocks[0].fc2
    gate_up = torch.randn(4, 192).bfloat16()
    fc2.activation = "dynamic"
    with pytest.raises(ValueError, match="fc2 must be static and without a bias, got 'dynamic'"):
        arms.Operands.produce(fc2, gate_up)
    fc2.activation = "static"


def test_ops_arms_toggle_the_policy_and_put_everything_back():
    before = (algorithms.pin_policy(), algorithms.pins())
    both = arms.OpsArms(DOUBLE, [PIN])
    assert algorithms.pins()[0] == PIN
    both.select(gate.HEURISTIC)
    assert algorithms.pin_policy() == "never"
    both.select(gate.PINNED)
    assert algorithms.pin_policy() == before[0]
    both.select(gate.HEURISTIC)
    both.close()
    assert (algorithms.pin_policy(), algorithms.pins()) == before
    algorithms.pin_policy("never")
    with pytest.raises(CommandError, match="NVFP4_PIN_POLICY is never, so no arm can be pinned"):
        arms.OpsArms(DOUBLE, [PIN])
    algorithms.pin_policy(before[0])


def plan(rung, m_chunk=0, n_chunk=0, inner=None):
    details = {"m_chunk": m_chunk, "n_chunk": n_chunk, "plan": inner, "inner_refusals": []}
    return algorithms.Plan(1, 1, 1, "cuda:0", rung, "kernel", details=details)


def test_a_dense_weight_is_what_gemm_a4w16_is_given(monkeypatch):
    """Both the problems behind it and the arms' call and description."""
    h200 = Machine("/nowhere", Device((9, 0), 132, name="cuda:0 NVIDIA H200"), test_double=False)
    asked = []

    def explain(m, n, k, *, weight, **options):
        asked.append(weight)
        return plan("emulated", m, n, {"rung": "cublaslt-heuristic"})

    monkeypatch.setattr(algorithms, "explain", explain)
    (problem,) = route.problems_behind(h200, 64, 96, 128, "bfloat16")
    assert (problem["type"], problem["m"], problem["n"], problem["k"]) == ("bf16", 64, 96, 128)
    both = arms.OpsArms(h200, [])
    both.describe(64, 96, 128, "bfloat16")
    assert asked == ["bfloat16", "bfloat16"]
    x, weight = (torch.randn(rows, 128).bfloat16() for rows in (64, 96))
    packed, alpha = torch.ops.nvfp4.quantize(x), torch.tensor(0.5)
    operands = arms.Operands(packed[0], packed[1], weight, None, alpha)
    assert operands.shape == (64, 96, 128)
    expected = torch.ops.nvfp4.gemm_a4w16(packed[0], weight, packed[1], alpha)
    assert torch.equal(both.gemm(operands), expected)


def test_the_problems_behind_a_gemm_are_its_chunks_on_the_emulated_rung(monkeypatch):
    h200 = Machine("/nowhere", Device((9, 0), 132, name="cuda:0 NVIDIA H200"), test_double=False)
    found = plan("emulated", 2816, 5376, {"rung": "cublaslt-heuristic"})
    monkeypatch.setattr(algorithms, "explain", lambda *a, **k: found)

    def shapes(m, n, k):
        return [
            (p["type"], p["m"], p["n"], p["k"], p["ldd"])
            for p in route.problems_behind(h200, m, n, k)
        ]

    assert shapes(37810, 5376, 14336) == [
        ("bf16", 2816, 5376, 14336, 5376), ("bf16", 1202, 5376, 14336, 5376),
    ]  # fmt: skip
    found = plan("emulated", 5376, 16384, {"rung": "cublaslt-heuristic"})
    assert shapes(37810, 28672, 5376) == [
        ("bf16", rows, columns, 5376, 28672) for rows in (5376, 178) for columns in (16384, 12288)
    ]
    found = plan("emulated", 0, 0, {})
    assert shapes(16, 5376, 14336) == []  # the fused kernel
    found = plan("cublaslt-heuristic")
    assert shapes(37810, 5376, 14336) == [("nvfp4", 37810, 5376, 14336, 5376)]
    found = plan(None)
    with pytest.raises(CommandError, match="no rung takes this call"):
        shapes(37810, 5376, 14336)


def test_a_pin_counts_on_the_first_rung_and_inside_the_emulated_one():
    assert route.takes_pin(plan("cublaslt-pinned"))
    assert route.takes_pin(plan("emulated", inner={"rung": "cublaslt-pinned"}))
    assert not route.takes_pin(plan("emulated", inner={"rung": "cublaslt-heuristic"}))
    assert not route.takes_pin(plan("emulated", inner={}))
    assert not route.takes_pin(plan("cublaslt-heuristic"))


# ---- The command ------------------------------------------------------------------------------------

ANSWERS = "set:heuristic_answers=70:4:37:-2:4194304 70:4:36:1:0"
ONLY_TILE_4 = "check:tile=4,split_k=1,reduction=0,cluster=0:pass;check::refuse"
RULES = f"{ANSWERS};{ONLY_TILE_4};run:split_k=-2:slow=20000"
TINY = ("--small", "--steps", "1,2", "--rounds", "6")


def command(*arguments):
    return cli.main(["gate", *map(str, arguments)])


@pytest.mark.slow
def test_the_whole_ladder_with_the_double(double, tmp_path, monkeypatch, capsys):
    """Sweep, isolated, blocks, trajectories, report; the pin file it leaves is then gated again."""
    monkeypatch.chdir(tmp_path)
    double(RULES)
    pins = tmp_path / "fc2.pins"
    arguments = (*TINY, "--pins", pins, "--canonical")
    assert command(*arguments, "--sweep", "--budget", 1, "--keep-going") == 0
    out = capsys.readouterr().out
    assert "**PROMOTED**" in out and "GB10, the study" in out and "TEST DOUBLE" in out
    (row,) = promote.read_rows(pins)
    assert (row.n, row.k, row.m_min, row.m_max) == (64, 128, 40, 40) and row.algorithm.split_k == 1
    data = json.loads((tmp_path / "gate.json").read_text())
    assert data["arms"]["pinned"]["evidence"] == row.evidence
    assert data["arms"]["heuristic"]["algorithm"]["split_k"] == -2
    assert data["isolated"]["gemm"]["comparison"]["ratio"] > 3
    assert (tmp_path / "gate.md").read_text().rstrip() in out
    assert (tmp_path / "gate_sweep_nvfp4_40x64x128.json").exists()
    assert os.uname().nodename not in json.dumps(data)

    # The pinned algorithm gives other bytes from now on: not promoted, and the exit status says so.
    double(f"{RULES};run::wrong")
    assert command(*arguments, "--out", "second.json", "--json") == 1
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["ok"] is False and document["blocks"] == []
    assert "isolated GEMM: the outputs differ: 1 of 2,560 elements, the first at (39, 63)" in (
        captured.err
    )


@pytest.mark.slow
def test_the_one_command_for_a_gb10_needs_no_pin_file(double, tmp_path, monkeypatch, capsys):
    """The built-in pin is gated: here on a chip that a single of its tiles fills."""
    monkeypatch.chdir(tmp_path)
    double("set:heuristic_answers=70:20:37:-2:4194304;run:split_k=-2:slow=20000")
    status = command("--canonical", *TINY, "--cc", "12.1", "--sms", 1)
    out = capsys.readouterr().out
    assert status == 0, out
    data = json.loads((tmp_path / "gate.json").read_text())
    assert data["arms"]["pinned"]["evidence"].startswith("GB10 study")
    assert "| algorithm id / tile id / stages id | 70 / 20 (`128x128`) / 37 (`256xAUTO`) |" in out
    assert "GB10, the study" in out and "TEST DOUBLE" in out and "Not comparable" in out


def test_a_command_that_can_not_start_says_what_is_missing(double, tmp_path, monkeypatch, capsys):
    double(RULES)
    monkeypatch.chdir(tmp_path)
    for arguments, message in (
        (("--sweep",), "--sweep needs --pins FILE to write its winners to"),
        (("--out", "gate.txt"), "--out must end in .json, got gate.txt"),
        (("--cc", "12.1"), "--cc and --sms go together"),
        (("--small", "--gate-blocks", "0,3"), "--gate-blocks must be below --blocks, which is 3"),
        (
            ("--small",),
            "no pin takes the FC2 problem 40 x 64 x 128, so there is nothing to promote",
        ),
    ):
        assert command(*arguments) == 1
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command("--steps", "two")
    assert "must look like 2,12, got 'two'" in capsys.readouterr().err
    monkeypatch.setattr(commands.importlib, "import_module", lambda name: (_ for _ in ()).throw(
        ModuleNotFoundError(name)))  # fmt: skip
    assert command("--small") == 1
    assert "run it in the root of the source tree" in capsys.readouterr().err


def test_default_gated_blocks_are_the_first_the_middle_and_the_last():
    for blocks, expected in ((50, (0, 24, 49)), (3, (0, 1, 2)), (2, (0, 1)), (1, (0,))):
        assert commands.gated_blocks(blocks) == expected
    assert math.prod(commands.SMALL["grid"]) == 40
