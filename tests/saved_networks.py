"""Networks to save, with every method; files that were edited; and loads that must be refused without a trace."""

import json
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import patchbayes as pb
from patchbayes.digests import described
from patchbayes.errors import CheckpointMismatch
from patchbayes.patching.network import network_of
from zoo import assert_same, snapshot

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


def network(seed: int = 0, width: int = 4) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))


def trained(method=None, sites="norm+output", seed: int = 0, **options) -> nn.Sequential:
    """A patched network whose sites were trained for three steps; the shared weights are those of `network(seed)`."""
    model = network(seed)
    pb.patch_(model, method or pb.EMP(3), sites, **options)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(X).square().sum().backward()
        optimizer.step()
    return model


METHODS = {
    "EMP": pb.EMP(3),
    "ECMP": pb.ECMP(3, init="independent"),
    "p": pb.EMP(2, probabilities=(0.7, 0.3)),
    "sigma": pb.ECMP(2, sigma=0.1, norm_scale=0.2),
    "Dropout": pb.Dropout(0.2),
    "DropConnect": pb.posteriors.DropConnect(0.3),
    "units": pb.posteriors.Mixture(components=2, tie="unit", zero=True, mix_bias=True),
    "Ensemble": pb.Ensemble(2),
    "statistics": pb.EMP(3, statistics="per_component"),
    "per example": {"norm": pb.EMP(2, per_example=True), "output": pb.EMP(2)},
    "MeanField": pb.posteriors.MeanField(0.3),
    "rules": {"norm": pb.EMP(2), "output": pb.ECMP(4)},
}


def description_of(path: Path) -> dict:
    with safetensors.safe_open(path, "pt") as file:
        return described(file.metadata(), str(path))


def rewritten(path: Path, change) -> Path:
    """The file with its description changed by `change` (in place), and the tensors too if it takes two arguments."""
    tensors, description = load_file(path), description_of(path)
    change(description, tensors)
    other = path.with_name("edited.safetensors")
    save_file(tensors, other, metadata={"patchbayes": json.dumps(description)})
    return other


def refused(model: nn.Module, path: Path, *expected: str, **options) -> None:
    before = snapshot(model)
    patched = pb.is_patched(model)
    prior = network_of(model).prior if patched else None
    with pytest.raises(CheckpointMismatch) as error:
        pb.load_(model, path, **options)
    for text in expected:
        assert text in str(error.value)
    assert_same(before, model)
    assert pb.is_patched(model) == patched
    assert not patched or network_of(model).prior is prior
