"""The ablations: what each variant is, that training keeps it so, and that a study goes on where it was."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from command_line import command
from patchbayes.data import read
from patchbayes.draws.draws import Draws
from patchbayes.errors import PatchbayesError
from patchbayes.nets.named import build_net
from patchbayes.patching.drawing import forward_draws
from patchbayes.patching.patch import patch_, patched_sites
from patchbayes.posteriors import EMP
from patchbayes_reproduce import ablations, registry, summary
from patchbayes_reproduce.ablations import (
    EQUAL_COMPUTE,
    EQUAL_TITLE,
    GROUPS,
    VARIANTS,
    Ablation,
    AblationPlan,
    mean_cross_entropy,
    train_variant,
)
from patchbayes_reproduce.experiment import Workspace, read_record, reproduce

SHORT = AblationPlan(residual="small_cnn", epochs=1, batch_size=300)


@pytest.fixture(scope="module")
def digits():
    pytest.importorskip("sklearn")
    return read("digits", held_out=0.0)


def some(digits, number=40):
    raw, targets = digits.train.fetch(torch.arange(number))
    return digits.preparation.inputs(raw), targets


def test_exact_marginalization_is_the_average_over_all_networks(digits):
    inputs, targets = some(digits)
    network = build_net("mlp", 10, digits.input_shape)
    plain = build_net("mlp", 10, digits.input_shape)
    patch_(network, EMP(3, jitter=0.5), "norm")
    sites = patched_sites(network)
    exact = mean_cross_entropy(network, inputs, targets, Draws.enumerate(network))
    exact.backward()
    losses = []
    gradients = {name: torch.zeros_like(site.components("weight")) for name, site in sites.items()}
    for chosen in itertools.product(range(3), repeat=2):
        for (name, site), k in zip(sites.items(), chosen, strict=True):
            for part in ("weight", "bias"):
                getattr(plain.get_submodule(name), part).data = site.components(part)[k].detach()
        plain.zero_grad()
        loss = F.cross_entropy(plain(inputs), targets)
        loss.backward()
        losses.append(loss.detach())
        for name, k in zip(sites, chosen, strict=True):
            gradients[name][k] += plain.get_submodule(name).weight.grad / 9
    assert len(set(map(float, losses))) == 9
    torch.testing.assert_close(exact.detach(), torch.stack(losses).mean())
    for name, site in sites.items():
        learned = dict(site.posterior.named_parameters())["components.weight"]
        torch.testing.assert_close(learned.grad.view_as(gradients[name]), gradients[name])


def test_variants_are_compared_on_the_same_networks_and_data():
    assert set(itertools.chain(*GROUPS.values())) == set(VARIANTS)
    for labels in GROUPS.values():
        assert len({VARIANTS[label].network for label in labels}) == 1
    assert {v.method.components for v in VARIANTS.values()} == {1, 2, 3, 4, 5, 7, 10}
    assert {v.method.outcomes for v in VARIANTS.values() if v.method.zero} == {5}  # as many as of the one without


@pytest.mark.parametrize("label", [label for label in VARIANTS if "zero" in label])
def test_a_component_at_zero_stays_there(label, digits):
    variant = VARIANTS[label]
    start = train_variant(variant, replace(SHORT, epochs=0), digits, 0)
    network = train_variant(variant, SHORT, digits, 0)
    for name, site in patched_sites(network).items():
        posterior, stored = site.posterior, site.components("weight")
        assert len(stored) == 4
        assert not torch.equal(stored, patched_sites(start)[name].components("weight"))
        assert (posterior.component(4)["weight"] == 0).all()
        assert not (posterior.component(3)["weight"] == 0).all()
        assert ("bias" in posterior.names) == ("weight" not in label)  # else the bias is not mixed
    inputs, _ = some(digits)
    draws = Draws.sample(network.eval(), 300)
    with torch.no_grad():
        logits = forward_draws(network, inputs[:2], draws)
    if variant.method.tie == "site":
        dead = draws.assignments()[:, -1] == 4  # the output layer is zero: all inputs look the same
        assert 20 < int(dead.sum()) < 120
        assert (logits[dead] == 0).all() if "weight" not in label else (logits[dead, 0] == logits[dead, 1]).all()
        assert not (logits[~dead, 0] == logits[~dead, 1]).all()


def test_one_component_is_the_network_without_patches(digits):
    network = train_variant(VARIANTS["EMP, K = 1"], SHORT, digits, 0).eval()
    plain = build_net("small_cnn", 10, digits.input_shape, 0).eval()
    assert [p.numel() for p in network.parameters()] == [p.numel() for p in plain.parameters()]
    inputs, _ = some(digits)
    with torch.no_grad():
        assert forward_draws(network, inputs, 5).std(0).max() == 0


def test_running_statistics_do_not_depend_on_the_number_of_draws(digits):
    plan = replace(SHORT, batch_size=10_000)  # one step
    means = [
        train_variant(replace(VARIANTS["S = 1"], draws=s), plan, digits, 0).norm0.running_mean for s in (1, 4, "exact")
    ]
    torch.testing.assert_close(means[1], means[0])
    torch.testing.assert_close(means[2], means[0])


def test_what_a_training_is_given_decides_it(digits):
    def trained(variant=VARIANTS["S = 1"], seed=0, **changes):
        network = train_variant(variant, replace(SHORT, **changes), digits, seed)
        return torch.cat([p.detach().flatten() for p in network.parameters()])

    first = trained()
    assert torch.equal(first, trained())
    others = [trained(seed=1), trained(replace(VARIANTS["S = 1"], draws=2)), trained(epochs=2), trained(batch_size=200)]
    assert all(not torch.equal(first, other) for other in others)


def test_the_residual_network_takes_gray_images_and_has_all_sites(digits):
    variant = Ablation(EMP(2), "norm+output+input")
    network = train_variant(variant, AblationPlan(epochs=0), digits, 0)
    names = list(patched_sites(network))
    assert names[0] == "conv1"
    assert names[-1] == "fc"
    assert len(names) == 11
    with torch.no_grad():
        assert network(some(digits)[0]).shape == (40, 10)


def test_smoke_scale_by_the_command_goes_on_from_its_files(tmp_path, monkeypatch, digits):
    pytest.importorskip("matplotlib")
    out = command("reproduce ablations --scale smoke --results", tmp_path).out
    assert "Draws in a training step: digits, 1 epochs, 2 seeds" in out
    result = read_record(tmp_path, "ablations", "smoke")["result"]
    assert set(result["variants"]) == set(VARIANTS)
    found = registry.experiment("ablations")
    assert found.rows(result) == []
    tables = found.tables(result)
    assert [line[0] for line in tables.pop(EQUAL_TITLE)[1]] == list(EQUAL_COMPUTE)
    assert {one["train_accuracy"] > 0 and one["temperature"] > 0 for one in result["regimes"]} == {True}
    for title, (header, lines) in tables.items():
        labels = GROUPS[title.partition(":")[0]]
        assert [line[0] for line in lines] == list(labels)
        assert f"NLL against {labels[0]}" in header
        assert all(len(line) == len(header) for line in lines)
    assert summary.svg(found.figures(result)["ablations_components"]).startswith(b"<?xml")

    trained = []

    def counted(variant, *rest):
        trained.append(variant)
        return train_variant(variant, *rest)

    monkeypatch.setattr(ablations, "train_variant", counted)
    work = tmp_path / "work"
    (work / "ablations-smoke" / "S=2-1.json").unlink()
    finished = reproduce(found, "smoke", Workspace(work_dir=work, finished=True), tmp_path)["result"]
    assert trained == []
    assert finished["plan"]["seeds"] == 1
    assert finished["variants"]["EMP"] == result["variants"]["EMP"][:1]
    again = reproduce(found, "smoke", Workspace(work_dir=work), tmp_path)["result"]
    assert trained == [VARIANTS["S = 2"]]
    assert again["variants"]["EMP"] == result["variants"]["EMP"]
    assert again["variants"]["S = 2"][1]["nll"] == pytest.approx(result["variants"]["S = 2"][1]["nll"])

    path = work / "ablations-smoke" / "EMP-0.json"
    content = json.loads(path.read_text())
    content["settings"]["plan"]["epochs"] = 7
    path.write_text(json.dumps(content))
    with pytest.raises(PatchbayesError, match=r"EMP-0.json was made with other settings"):
        reproduce(found, "smoke", Workspace(work_dir=work), tmp_path)
    path.write_text("{")
    with pytest.raises(PatchbayesError, match=r"EMP-0.json is not a result of this experiment"):
        reproduce(found, "smoke", Workspace(work_dir=work), tmp_path)
    with pytest.raises(PatchbayesError, match="a record of ablations is made in one go; leave --add out"):
        reproduce(found, "smoke", Workspace(work_dir=work), tmp_path, add=True)
    with pytest.raises(PatchbayesError, match="no seed is finished yet"):
        reproduce(found, "smoke", Workspace(work_dir=tmp_path / "empty", finished=True), tmp_path)


def test_a_verdict_needs_differences_beyond_chance():
    score = {
        "accuracy": 0.9,
        "ece": 0.1,
        "ece_floor": 0.1,
        "corrupted_nll": 1.0,
        "parameters": 1,
        "training_seconds": 1.0,
    }
    variants = {label: [{**score, "nll": 0.5 + 0.1 * seed} for seed in range(5)] for label in VARIANTS}
    variants["EMP, one zero"] = [
        {**score, "nll": 0.6 + 0.1001 * seed, "accuracy": 0.8 + 0.001 * seed} for seed in range(5)
    ]
    variants["EMP, one zero weight"] = [{**score, "nll": 0.6 + 0.2 * seed * (-1) ** seed} for seed in range(5)]
    equal = {label: [{"train_nll": 0.1, "nll": 0.2}] * 2 for label in EQUAL_COMPUTE}
    regimes = [{"train_accuracy": 0.99, "temperature": 1.5}]
    plan = {"data": "digits", "epochs": 1, "seeds": 5}
    result = {"variants": variants, "plan": plan, "regimes": regimes, "equal_compute": equal}
    header, lines = next(iter(ablations.tables(result).values()))
    columns = [header.index("NLL against EMP"), header.index("error % against EMP")]
    assert [lines[0][column] for column in columns] == ["-", "-"]
    assert [lines[1][column] for column in columns] == ["+0.1 (worse)", "+9.8 (worse)"]
    assert "no significant difference" in lines[2][columns[0]]
    regimes[0]["temperature"] = 1.0
    _, lines = next(iter(ablations.tables(result).values()))
    assert [lines[1][column] for column in columns] == ["not comparable", "not comparable"]


def test_shares_of_the_epochs_cost_the_same():
    """S draws in an S-th of the epochs: as many passes through the network."""
    assert all(variant.draws * variant.share == pytest.approx(1) for variant in EQUAL_COMPUTE.values())
