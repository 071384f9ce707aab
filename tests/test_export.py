"""The averaged predictor as one file: what `predict` says with the same draws, read by other programs."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.nets import cifar_resnet20, mlp, small_cnn
from zoo import ZOO

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
# Older versions lack translations (of batch norms, say); the extra "export" asks for this one.
ONNX = pytest.mark.skipif(torch.__version__ < TorchVersion("2.13"), reason="ONNX is written with torch 2.13 or newer")


def read(path, feeds):
    """The outputs of a file by name."""
    if path.suffix == ".pt2":
        described = {"patchbayes": ""}
        program = torch.export.load(path, extra_files=described)
        values = program.module()(*feeds.values())
        return dict(zip(json.loads(described["patchbayes"])["outputs"], values, strict=True))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options)
    assert [i.name for i in session.get_inputs()] == list(feeds)
    values = session.run(None, {name: value.numpy() for name, value in feeds.items()})
    return {o.name: torch.from_numpy(v) for o, v in zip(session.get_outputs(), values, strict=True)}


def assert_agrees(found, prediction):
    for name, value in found.items():
        torch.testing.assert_close(value, getattr(prediction, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("suffix", [pytest.param(".onnx", marks=ONNX), ".pt2"])
def test_a_classifier_with_a_temperature_in_batches_of_any_size(tmp_path, suffix):
    torch.manual_seed(0)
    model = small_cnn(size=8).eval()
    pb.patch_(model, pb.ECMP(3, jitter=0.5))
    likelihood = pb.likelihoods.Categorical().set_temperature_(0.7, draw_temperature=2.5)
    draws = pb.Draws.stratified(model, 6)
    path = tmp_path / f"m{suffix}"
    exported = pb.export(
        model,
        path,
        draws,
        example_input=torch.rand(4, 1, 8, 8),
        likelihood=likelihood,
        classes=[str(number) for number in range(10)],
        metadata={"ece": 0.02},
    )
    assert exported.outputs == ("probs", "entropy", "mutual_information")
    assert exported.size == path.stat().st_size
    for size in (1, 4, 9):
        x = torch.rand(size, 1, 8, 8)
        found = read(path, {exported.inputs[0]: x})
        assert tuple(found) == exported.outputs
        assert_agrees(found, pb.predict(model, x, draws, likelihood=likelihood))
    if suffix == ".onnx":
        described = json.loads(onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map["patchbayes"])
        assert described["draws"] == 6
        assert described["temperature"] == pytest.approx(0.7)
        assert described["classes"][3] == "3"
        assert described["ece"] == 0.02
        assert described["methods"]["fc"]["components"] == 3


@ONNX
@pytest.mark.parametrize("views", [pb.views.mirror, pb.views.shifts(1, False), pb.views.crops(0.8)], ids=str)
def test_every_draw_sees_its_view(tmp_path, views):
    torch.manual_seed(0)
    model = small_cnn(size=8).eval()
    pb.patch_(model, pb.EMP(3, jitter=0.5), "output")
    draws = pb.Draws.stratified(model, 6)
    exported = pb.export(model, tmp_path / "m.onnx", draws, example_input=torch.rand(4, 1, 8, 8), views=views)
    x = torch.rand(3, 1, 8, 8)
    found = read(exported.path, {exported.inputs[0]: x})
    assert_agrees(found, pb.predict(model, x, draws, views=views))
    assert (found["probs"] - pb.predict(model, x, draws).probs).abs().max() > 1e-4
    with pytest.raises(PatchbayesError, match="a function that makes a view for each draw"):
        pb.export(model, tmp_path / "n.onnx", draws, example_input=x, views=lambda inputs, generator: inputs)


@ONNX
def test_a_regression_is_exact_where_few_networks_exist(tmp_path):
    torch.manual_seed(0)
    model = mlp(5).eval()
    pb.patch_(model, pb.EMP(3, jitter=0.5), "norm")
    x, likelihood = torch.randn(7, 5), pb.likelihoods.Gaussian(2.0)
    exported = pb.export(model, tmp_path / "m.onnx", 32, example_input=x, likelihood=likelihood)
    assert exported.networks == exported.num_draws == 9
    prediction = pb.predict(model, x, "exact", likelihood=likelihood)
    found = read(exported.path, {exported.inputs[0]: x})
    assert set(found) == {"mean", "variance", "epistemic_variance"}
    assert_agrees(found, prediction)


@ONNX
def test_keywords_and_sequences_of_any_length(tmp_path):
    entry = ZOO["transformer"]
    model = entry.build().eval()
    pb.patch_(model, pb.ECMP(3, jitter=0.5), "norm+output")
    draws = pb.Draws.sample(model, 4)
    exported = pb.export(model, tmp_path / "m.onnx", draws, example_input={"tokens": entry.inputs()})
    assert exported.inputs == ("tokens",)
    tokens = torch.randint(11, (3, 9))
    assert_agrees(read(exported.path, {"tokens": tokens}), pb.predict(model, tokens, draws))


def test_draws_that_are_shared_are_written_once(tmp_path):
    """An output layer of 3 components in 32 draws: its weights are there three times, and the rest of the network once."""
    model = nn.Sequential(nn.Linear(6, 400), nn.ReLU(), nn.LayerNorm(400), nn.Linear(400, 4)).eval()
    plain = 4 * sum(p.numel() for p in model.parameters())
    pb.patch_(model, pb.EMP(3, jitter=0.5), "output")
    x = torch.randn(3, 6)
    exported = pb.export(model, tmp_path / "m.onnx", pb.Draws.sample(model, 32), example_input=x)
    assert exported.networks == 3
    assert exported.size < plain + 3 * 4 * 401 * 4 + 20_000
    assert_agrees(read(exported.path, {exported.inputs[0]: x}), pb.predict(model, x, pb.Draws.sample(model, 32)))


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
@pytest.mark.parametrize("name", ["bert", "vit"])
def test_networks_of_other_libraries(tmp_path, name, suffix):
    from test_zoo_extras import TRANSFORMERS, build_transformer

    inputs = TRANSFORMERS[name][1]
    model = build_transformer(name).eval()
    pb.patch_(model, pb.ECMP(3, jitter=0.3), "norm+output", example_input=inputs)
    draws = pb.Draws.stratified(model, 3)
    exported = pb.export(model, tmp_path / f"m{suffix}", draws, example_input=inputs)
    for size in (1, 3):
        some = {key: value[:size] for key, value in inputs.items()}
        assert_agrees(read(exported.path, some), pb.predict(model, some, draws))


@pytest.mark.slow
def test_the_file_holds_the_network_once(tmp_path):
    model = cifar_resnet20(10).eval()
    plain = 4 * sum(p.numel() for p in model.parameters())
    pb.patch_(model, pb.EMP(5), "layer3.2.bn2+output")
    x = torch.rand(2, 3, 32, 32)
    exported = pb.export(model, tmp_path / "m.onnx", pb.Draws.sample(model, 32), example_input=x)
    assert exported.size < 1.3 * plain
    found = read(exported.path, {exported.inputs[0]: x})
    assert_agrees(found, pb.predict(model, x, pb.Draws.sample(model, 32)))


def test_what_cannot_be_exported_is_named(tmp_path):
    x = torch.randn(4, 3)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    pb.patch_(model, pb.Dropout(0.3), "linear")
    with pytest.raises(PatchbayesError, match=r'"0" \(Dropout\(0.3\)\) draws anew for every example'):
        pb.export(model, tmp_path / "m.onnx", example_input=x)
    pb.unpatch_(model)
    pb.patch_(model, pb.EMP(3), "output")
    with pytest.raises(PatchbayesError, match=r'ends in ".onnx" or ".pt2"'):
        pb.export(model, tmp_path / "m.bin", example_input=x)
    assert list(tmp_path.iterdir()) == []


def test_an_operation_without_a_form_in_onnx_is_named(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 3)

        def forward(self, x):
            return self.fc(self.norm(torch.special.bessel_j1(x)))

    model, x = Odd().eval(), torch.randn(3, 4)
    pb.patch_(model, pb.EMP(2, jitter=0.5))
    with pytest.raises(PatchbayesError, match=r'bessel_j1(?s:.)*do       export to ".pt2"'):
        pb.export(model, tmp_path / "m.onnx", "exact", example_input=x)
    assert list(tmp_path.iterdir()) == []
    exported = pb.export(model, tmp_path / "m.pt2", "exact", example_input=x)
    assert_agrees(read(exported.path, {"x": x}), pb.predict(model, x, "exact"))


def test_the_average_survives_probabilities_of_zero(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)).eval()
    pb.patch_(model, pb.EMP(2, jitter=0.5))
    with torch.no_grad():
        pb.patched_sites(model)["2"].components("weight").mul_(1e4)
    x = torch.randn(5, 3)
    exported = pb.export(model, tmp_path / "m.onnx", "exact", example_input=x)
    found = read(exported.path, {exported.inputs[0]: x})
    assert all(np.isfinite(value.numpy()).all() for value in found.values())
    assert_agrees(found, pb.predict(model, x, "exact"))


def test_draws_are_chosen_as_in_predict(tmp_path):
    torch.manual_seed(0)
    model = mlp(4, (6,), 3).eval()
    pb.patch_(model, pb.ECMP(3, jitter=0.5))
    x = torch.rand(5, 4)
    probs = []
    for number, (sampling, seed) in enumerate((("balanced", 0), ("iid", 0), ("iid", 3))):
        path = tmp_path / f"{number}.pt2"
        one, other = (torch.Generator().manual_seed(seed) for _ in range(2))
        exported = pb.export(model, path, 7, example_input=x, sampling=sampling, generator=one)
        found = read(path, {exported.inputs[0]: x})
        assert_agrees(found, pb.predict(model, x, 7, sampling=sampling, generator=other))
        probs.append(found["probs"])
    assert (probs[0] - probs[1]).abs().max() > 1e-3
    assert (probs[1] - probs[2]).abs().max() > 1e-3


def test_the_output_of_a_network_with_several(tmp_path):
    torch.manual_seed(0)

    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.one, self.other = nn.LayerNorm(4), nn.Linear(4, 3), nn.Linear(4, 2)

        def forward(self, x):
            x = self.norm(x)
            return {"one": self.one(x), "other": self.other(x)}

    model, x = TwoHeads().eval(), torch.rand(5, 4)
    pb.patch_(model, pb.EMP(3, jitter=0.5), "norm")
    for name, classes in (("one", 3), ("other", 2)):
        exported = pb.export(model, tmp_path / "m.pt2", 6, example_input=x, output=lambda y, name=name: y[name])
        found = read(tmp_path / "m.pt2", {exported.inputs[0]: x})
        assert found["probs"].shape == (5, classes)
        assert_agrees(found, pb.predict(model, x, 6, output=lambda y, name=name: y[name]))


def test_a_network_that_has_predicted_can_be_exported(tmp_path):
    """What a prediction remembers was made in inference mode, and serves where gradients are on."""
    torch.manual_seed(0)
    model = small_cnn(size=8).eval()
    pb.patch_(model, pb.ECMP(3, jitter=0.3))
    x = torch.rand(3, 1, 8, 8)
    draws = pb.Draws.sample(model, 4)
    pb.predict(model, x, draws, engine="graph")
    pb.export(model, tmp_path / "network.pt2", draws, example_input=x)
    assert_agrees(read(tmp_path / "network.pt2", {"x": x}), pb.predict(model, x, draws, engine="loop"))
