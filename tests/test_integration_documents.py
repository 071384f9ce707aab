"""docs/integrations.md, decisions.md and migration.md are run, block by block; both sides of a migration agree."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import patchbayes as pb

DOCS = Path(__file__).resolve().parent.parent / "docs"


def blocks(page: str, title: str) -> list[tuple[str, str]]:
    """(what it needs, code) of the Python blocks of a section."""
    section = re.search(
        rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE
    )
    assert section, title
    return re.findall(r"```python ?(\w*)\n(.*?)```", section[1], re.DOTALL)


def run(code: str, names: dict, page: str) -> None:
    exec(compile(code, page, "exec"), names)


def make_network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(4, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)]
        return nn.Sequential(*layers)


@pytest.fixture
def names():
    """What a reader has: a trained classifier, held-out data, new inputs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 4, generator=generator)
    y = (x[:, :3] + 0.7 * torch.randn(600, 3, generator=generator)).argmax(-1)
    model = make_network()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for _ in range(150):
            optimizer.zero_grad()
            F.cross_entropy(model(x[:150]), y[:150]).backward()
            optimizer.step()
    model.eval()
    sets = {"loader": (0, 150), "train_loader": (0, 150), "held_out": (150, 500)}
    made = {
        name: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[a:b], y[a:b]), 50)
        for name, (a, b) in sets.items()
    }
    return made | {"model": model, "x": x[500:], "labels_of_x": y[500:], "torch": torch, "F": F, "pb": pb}


def test_temperature_scaling_gives_the_same_temperature(names):
    before, after = (code for _, code in blocks("migration.md", "Temperature scaling"))
    run(before, names, "migration.md")
    rival = names["probs"]
    run(after, names, "migration.md")
    temperature = float(names["log_temperature"].exp())
    assert temperature > 1.05  # there is something to scale
    assert names["report"].mean_temperature == pytest.approx(temperature, rel=0.05)  # ours is shrunk towards 1
    torch.testing.assert_close(names["probs"], rival.detach(), atol=0.02, rtol=0)


def test_mc_dropout_gives_the_same_average(names):
    before, after = (code for _, code in blocks("migration.md", "MC dropout"))
    with torch.random.fork_rng():
        torch.manual_seed(2)
        run(before, names, "migration.md")
    rival, plain = names["probs"], names["model"](names["x"]).softmax(-1).detach()
    run(after, names, "migration.md")
    assert float((names["probs"] - rival).abs().mean()) < 0.01
    assert float((plain - rival).abs().mean()) > 0.01


@pytest.mark.parametrize(
    ("title", "needed"), [("laplace-torch", "laplace"), ("torch-uncertainty", "torch_uncertainty")]
)
def test_both_sides_run_and_ours_is_no_worse(names, title, needed):
    (kind, before), (_, after) = blocks("migration.md", title)
    assert kind == needed
    plain = float(F.cross_entropy(names["model"](names["x"]), names["labels_of_x"]))
    rival = None
    if importlib.util.find_spec(needed) is not None:
        from torchvision_names import torchvision_operators

        names["_operators"] = torchvision_operators()
        run(before, names, "migration.md")
        rival = float(F.nll_loss(names["probs"].detach().log(), names["labels_of_x"]))
        assert names["probs"].shape == (100, 3)
    run(after, names, "migration.md")
    ours = float(F.nll_loss(names["probs"].log(), names["labels_of_x"]))
    assert ours < plain
    if rival is not None:
        assert ours < rival + 0.1


def test_decisions(names):
    pairs = names["held_out"].dataset.tensors
    pb.patch_(names["model"], pb.ECMP(3))
    names |= {"held_out_x": pairs[0], "held_out_y": pairs[1], "draws": pb.Draws.stratified(names["model"], 10)}
    (_, code), _ = blocks("decisions.md", "Sets and intervals that keep a promise")
    run(code, names, "decisions.md")
    assert names["sets"].shape == (100, 3)
    assert float(names["sets"].gather(1, names["labels_of_x"][:, None]).double().mean()) > 0.75
    ((_, code),) = blocks("decisions.md", "Answer only where it is sure")
    run(code, names, "decisions.md")
    assert 0 <= int(names["answered"].sum()) < 100
    ((_, code),) = blocks("decisions.md", "As NumPy arrays")
    run(code, names, "decisions.md")
    assert names["arrays"]["probs"].shape == (350, 3)


@pytest.mark.slow
def test_mapie_takes_the_estimator(names):
    pytest.importorskip("mapie")
    from patchbayes.integrations.sklearn import PatchBayesClassifier

    (X, y), (held_out, labels) = (names[name].dataset.tensors for name in ("loader", "held_out"))
    classifier = PatchBayesClassifier(max_iter=20, random_state=0).fit(X.numpy(), y.numpy())
    mine = {
        "classifier": classifier,
        "X_held_out": held_out.numpy(),
        "y_held_out": labels.numpy(),
        "X": names["x"].numpy(),
    }
    _, (kind, code) = blocks("decisions.md", "Sets and intervals that keep a promise")
    assert kind == "mapie"
    run(code, mine, "decisions.md")
    theirs = mine["mapie_sets"][:, :, 0]
    network, draws = classifier.network_, classifier.predictor_.draws
    found = pb.conformal(pb.predict(network, held_out.double(), draws), labels, level=0.9)
    ours = found.sets(pb.predict(network, names["x"].double(), draws)).numpy()
    assert (ours == theirs).mean() > 0.98  # the same method; ties and empty sets may be treated otherwise


def test_processes(names):
    pb.patch_(names["model"], pb.ECMP(3))
    ((_, code),) = blocks("integrations.md", "Processes")
    run(code, names, "integrations.md")


@pytest.mark.slow
def test_scikit_learn(names):
    pytest.importorskip("sklearn", "1.6")
    X, y = (part.numpy() for part in names["loader"].dataset.tensors)
    ((_, code),) = blocks("integrations.md", "scikit-learn")
    mine = {"X": X, "y": y, "numbers": X[:, 0] * 100, "weights": np.ones(150)}
    run(code, mine, "integrations.md")
    assert mine["probs"].shape == (150, 3)
    assert (mine["low"] < mine["mean"]).all()
    assert len(mine["search"].cv_results_["params"]) == 2


@pytest.mark.filterwarnings("ignore")
def test_lightning(names, tmp_path, monkeypatch):
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    from lightning_modules import Classifier

    monkeypatch.chdir(tmp_path)
    module = Classifier()
    module.model = make_network()
    ((_, code),) = blocks("integrations.md", "Lightning")
    run(code, names | {"module": module, "make_network": make_network}, "integrations.md")
    assert (tmp_path / "patch.safetensors").exists()
