"""swap_linears: what goes, what stays and why, and that an error leaves the model as it was."""

import json

import pytest
import torch
from compare import assert_same_bytes
from torch import nn
from torch.nn.utils import parametrizations

import nvfp4_linear.swap
from nvfp4_linear import Nvfp4Linear, SwapReport, swap_linears


class Scaled(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x):
        return 2 * super().forward(x)


class Plain(nn.Linear):
    """A subclass that only adds state."""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)
        )
        self.odd = nn.Linear(30, 16)
        self.head = nn.Linear(32, 48, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def by_name(report):
    return {record.name: record for record in report.records}


def test_swaps_in_place_and_says_why_not():
    torch.manual_seed(0)
    model = Model()
    tokens = torch.arange(10)
    before = model(tokens)
    first = model.blocks[0][0]
    expected = Nvfp4Linear.from_linear(first)
    report = swap_linears(model)
    records = by_name(report)
    swapped = ["blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2"]
    assert list(records) == [*swapped, "odd", "head"]
    assert [r.name for r in report.swapped] == swapped
    assert records["odd"].reason == "K = 30 is no multiple of 16"
    assert records["head"].reason == "weight is tied to embed.weight"
    assert model.head.weight is model.embed.weight
    assert type(model.odd) is type(model.head) is nn.Linear
    layer = model.blocks[0][0]
    assert isinstance(layer, Nvfp4Linear)
    for name in ("weight", "weight_scale", "weight_scale_2"):
        assert_same_bytes(getattr(layer, name), getattr(expected, name))
    error = (model(tokens) - before).norm() / before.norm()
    assert 0 < error < 0.2  # four layers of 4-bit noise on a residual stream


def test_the_bias_stays_the_same_parameter():
    model = Model()
    bias = model.blocks[0][0].bias
    swap_linears(model)
    assert model.blocks[0][0].bias is bias


@pytest.mark.parametrize("activation", ["dynamic", "static", "unit", "none"])
def test_activation_is_handed_on(activation):
    model = nn.Sequential(nn.Linear(32, 16))
    report = swap_linears(model, activation=activation)
    assert model[0].activation == report.activation == activation


def test_training_mode_and_gradients_are_kept():
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 16)).eval()
    model[1].bias.requires_grad_(False)
    swap_linears(model)
    assert not model[0].training
    assert model[0].bias.requires_grad
    assert not model[1].bias.requires_grad


@pytest.mark.parametrize(
    ("include", "exclude", "swapped"),
    [
        (None, None, ["blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2"]),
        ("blocks.0.*", None, ["blocks.0.0", "blocks.0.2"]),
        (["blocks.0.0", "blocks.1.0"], None, ["blocks.0.0", "blocks.1.0"]),
        (None, "*.2", ["blocks.0.0", "blocks.1.0"]),
        ("blocks.0.*", ["*.2"], ["blocks.0.0"]),
        (lambda name, module: module.in_features == 64, None, ["blocks.0.2", "blocks.1.2"]),
        (None, [lambda name, module: module.in_features == 64, "blocks.1.*"], ["blocks.0.0"]),
        ([], None, []),
    ],
)
def test_include_and_exclude(include, exclude, swapped):
    report = swap_linears(Model(), include=include, exclude=exclude)
    assert [r.name for r in report.swapped] == swapped


def test_exclusions_are_named():
    records = by_name(
        swap_linears(
            Model(), include=["blocks.*", "head"], exclude=["blocks.0.*", lambda n, _: "1.2" in n]
        )
    )
    assert records["blocks.0.0"].reason == "excluded by 'blocks.0.*'"
    assert records["blocks.1.2"].reason == "excluded by a callable"
    assert records["odd"].reason == "not included"


def test_a_pattern_that_matches_nothing_is_noted():
    report = swap_linears(Model(), exclude=["lm_head", "odd"])
    assert report.notes == ("exclude 'lm_head' matched no linear layer",)
    assert str(report).endswith("note: exclude 'lm_head' matched no linear layer")


def test_a_second_swap_finds_nothing_left():
    model = Model()
    first = swap_linears(model)
    layer = model.blocks[0][0]
    second = swap_linears(model)
    assert not second.swapped
    assert by_name(second)["blocks.0.0"].reason == "already an Nvfp4Linear"
    assert model.blocks[0][0] is layer
    assert second.bytes_before == second.bytes_after == first.bytes_after


# --- shared layers


def shared_model():
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Sequential(nn.Linear(32, 32))})
    model["c"] = model["a"]
    model["b"].append(model["a"])
    return model


def test_a_shared_layer_is_swapped_once_and_stays_shared():
    model = shared_model()
    report = swap_linears(model)
    assert isinstance(model["a"], Nvfp4Linear)
    assert model["a"] is model["c"] is model["b"][1]
    assert model["a"] is not model["b"][0]
    records = by_name(report)
    assert records["c"].reason == records["b.1"].reason == "the same layer as a"
    assert records["c"].bytes_before == records["c"].bytes_after == 0
    assert len(report.swapped) == 4


def test_excluding_one_name_of_a_shared_layer_keeps_it_everywhere():
    model = shared_model()
    records = by_name(swap_linears(model, exclude="c"))
    assert type(model["a"]) is nn.Linear
    assert model["a"] is model["c"]
    assert records["a"].reason == "shared with c, which is excluded by 'c'"


def test_a_shared_block_is_swapped_in_both_places():
    block = nn.Sequential(nn.Linear(32, 32))
    model = nn.Sequential(block, nn.ReLU(), block)
    report = swap_linears(model)
    assert model[0] is model[2]
    assert isinstance(model[0][0], Nvfp4Linear)
    assert [r.name for r in report.records] == ["0.0", "2.0"]


# --- tied weights


def test_two_linears_with_one_weight():
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32), "c": nn.Linear(32, 32)})
    model["b"].weight = model["a"].weight
    records = by_name(swap_linears(model))
    assert records["a"].reason == "weight is tied to b.weight"
    assert records["b"].reason == "weight is tied to a.weight"
    assert records["c"].action == "swapped"


def test_a_weight_that_views_another_is_tied():
    model = nn.ModuleDict({"embed": nn.Embedding(64, 32), "head": nn.Linear(32, 16)})
    model["head"].weight = nn.Parameter(model["embed"].weight.detach()[16:32])
    assert by_name(swap_linears(model))["head"].reason == "weight is tied to embed.weight"


def test_neighbours_in_one_storage_are_not_tied():
    """As a checkpoint that was read or mapped in one piece gives them."""
    storage = torch.randn(4 * 32 * 32)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    for i, linear in enumerate(model):
        linear.weight = nn.Parameter(storage[i * 1024 : (i + 1) * 1024].view(32, 32))
    assert len(swap_linears(model).swapped) == 4


# --- layers that cannot go


def parametrized():
    return parametrizations.weight_norm(nn.Linear(32, 16))


def hooked(kind):
    linear = nn.Linear(32, 16)
    getattr(linear, f"register_{kind}")(lambda *args: None)
    return linear


def own_forward():
    linear = nn.Linear(32, 16)
    linear.forward = lambda x: x
    return linear


def bias_of(dtype):
    linear = nn.Linear(32, 16)
    linear.bias = nn.Parameter(linear.bias.detach().to(dtype))
    return linear


def transposed():
    linear = nn.Linear(32, 16)
    linear.weight = nn.Parameter(linear.weight.detach().t())
    return linear


@pytest.mark.parametrize(
    ("linear", "reason"),
    [
        (lambda: nn.Linear(8, 16), "K = 8 is no multiple of 16"),
        (lambda: nn.Linear(32, 16, dtype=torch.float64), "weight is float64"),
        (lambda: nn.Linear(32, 16, device="meta"), "weight is on the meta device"),
        (lambda: bias_of(torch.float64), "bias is float64"),
        (lambda: Scaled(32, 16), "Scaled has a forward of its own"),
        (own_forward, "Linear has a forward of its own"),
        (parametrized, "parametrized (weight)"),
        (lambda: hooked("forward_hook"), "has forward_hooks"),
        (lambda: hooked("forward_pre_hook"), "has forward_pre_hooks"),
        (lambda: hooked("full_backward_hook"), "has backward_hooks"),
        (transposed, "weight is (32, 16), not (out_features, in_features)"),
    ],
)
def test_a_layer_that_cannot_go_is_kept(linear, reason):
    model = nn.Sequential(linear(), nn.Linear(32, 16))
    kept = model[0]
    report = swap_linears(model)
    assert by_name(report)["0"].reason == reason
    assert model[0] is kept
    assert isinstance(model[1], Nvfp4Linear)
    assert report.records[0].bytes_before == report.records[0].bytes_after > 0


def test_a_subclass_that_keeps_linears_forward_goes():
    model = nn.Sequential(Plain(32, 16))
    assert swap_linears(model).swapped


def test_attention_keeps_the_projection_it_reads_itself():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(32, 4, batch_first=True)})
    report = swap_linears(model)
    assert "reads the weight directly" in report.records[0].reason
    model["attention"].out_proj = nn.Linear(32, 32)
    report = swap_linears(model)
    assert report.records[0].reason == "read directly by nn.MultiheadAttention"
    x = torch.randn(2, 3, 32)
    assert model["attention"](x, x, x)[0].shape == (2, 3, 32)


@pytest.mark.parametrize("training", [True, False])
def test_encoder_layers_go_only_without_their_fast_path(training):
    """In eval mode nn.TransformerEncoderLayer hands its weights to one fused op."""

    def encoder():
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)

    kept = encoder()
    report = swap_linears(kept)
    assert not report.swapped
    assert "set_fastpath_enabled(False)" in by_name(report)["layers.0.linear1"].reason
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        model = encoder()
        assert [r.name for r in swap_linears(model).swapped] == [
            f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)
        ]
        with torch.no_grad():
            assert model.eval()(torch.randn(2, 5, 32)).shape == (2, 5, 32)
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


# --- errors leave the model alone


def test_an_error_half_way_leaves_the_model_as_it_was(monkeypatch):
    model = Model()
    before = list(model.modules())
    made = []

    def fail_at_the_third(linear, activation):
        if len(made) == 2:
            raise MemoryError("no room")
        made.append(original(linear, activation))
        return made[-1]

    original = nvfp4_linear.swap._replace
    monkeypatch.setattr(nvfp4_linear.swap, "_replace", fail_at_the_third)
    with pytest.raises(MemoryError):
        swap_linears(model)
    assert len(made) == 2
    assert list(model.modules()) == before


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (lambda: nn.Linear(32, 16), {}, ValueError, "use Nvfp4Linear.from_linear"),
        (lambda: "model", {}, TypeError, "model must be an nn.Module, got str"),
        (Model, {"activation": "int8"}, ValueError, "activation must be one of .*got 'int8'"),
        (Model, {"include": [3]}, TypeError, "include must hold glob patterns or callables"),
    ],
)
def test_errors(model, options, error, message):
    with pytest.raises(error, match=message):
        swap_linears(model(), **options)


# --- the report


def test_bytes_and_sqnr():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128, dtype=torch.bfloat16))
    w = model[0].weight.detach().float()
    (record,) = swap_linears(model).records
    assert record.bytes_before == 256 * 128 * 2 + 128 * 2
    # data, row-major scales and their swizzled copy (no padding at this size), two bytes a bias
    assert record.bytes_after == 256 * 128 // 2 + 2 * 256 * 128 // 16 + 4 + 128 * 2
    error = w - model[0].dequantize()
    expected = 10 * torch.log10(w.square().sum() / error.square().sum()).item()
    assert record.sqnr_db == pytest.approx(expected, abs=1e-3)  # FP32 sums here, FP64 there
    assert 19 < record.sqnr_db < 22  # E2M1 on a uniform weight


def test_a_weight_that_loses_nothing():
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(32, 16))
    for linear, value in zip(model, (0.0, 2688.0), strict=True):
        nn.init.constant_(linear.weight, value)
    report = swap_linears(model)
    assert [r.sqnr_db for r in report.records] == [torch.inf, torch.inf]
    assert [layer["sqnr_db"] for layer in report.to_dict()["layers"]] == [None, None]


def test_report_as_json_and_table():
    report = swap_linears(Model())
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert (values["swapped"], values["skipped"]) == (4, 2)
    assert values["bytes_before"] == report.bytes_before
    assert values["layers"][4]["reason"] == "K = 30 is no multiple of 16"
    lines = str(report).splitlines()
    assert len(lines) == 1 + 6 + 1 + 1
    assert lines[-1] == "4 swapped, 2 skipped, activation 'dynamic'"
    column = lines[0].index("bytes before") + len("bytes before")
    for line, record in zip(lines[1:], report.records, strict=False):
        assert line[:column].endswith(f" {record.bytes_before:,}")
        assert line.endswith(record.reason)


def test_no_linear_at_all():
    report = swap_linears(nn.Sequential(nn.ReLU()))
    assert isinstance(report, SwapReport)
    assert report.records == ()
    assert "0 swapped, 0 skipped" in str(report)


def test_progress_bar_on_request_only(capsys):
    swap_linears(Model())
    assert capsys.readouterr().err == ""
    swap_linears(Model(), progress=True)
    assert "quantizing" in capsys.readouterr().err


def test_on_a_device(device):
    model = Model().to(device)
    swap_linears(model)
    with torch.no_grad():
        assert model(torch.arange(10, device=device)).device.type == device
