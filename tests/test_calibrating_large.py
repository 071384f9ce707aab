"""bayesianize_ on layers that are too large for a method: they get a small form, and the patch stays within its limit."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import patchbayes as pb
from calibrated_networks import batches, inputs, labels_from
from patchbayes.bayesianizing.layers import BYTES, SHARE
from patchbayes.cli.bayesianize_page import bayesianize_page
from patchbayes.errors import CheckpointMismatch, PatchbayesError
from patchbayes.patching.checkpoint import patch_tensors
from patchbayes.posteriors import LowRank, RankOne, Spread

HEAD = "2 has RankOne(5, unit) in place of Spread(5): its 260,000 bytes would take the patch above its limit of 200,000"


def thousand_classes() -> nn.Sequential:
    """A head of 260,000 bytes, 99 % of the network."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 1000)).eval()
    with torch.no_grad():
        net[2].weight.mul_(25)
    return net


@pytest.fixture(scope="module")
def held_out() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Labels from the average of a network whose head is drawn as RankOne draws it."""
    planted, x = thousand_classes(), inputs(500)
    pb.patch_(planted, RankOne(5, jitter=0.4), "output")
    return batches(x, labels_from(pb.predict(planted, x, 200).probs))


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_a_large_head_gets_a_small_form_within_the_limit(held_out, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    net = thousand_classes()
    report = pb.bayesianize_(net, held_out, budget=6000)
    assert report.chosen == "learned"
    assert {one.layers for one in report.tried} == {"first layers", "all layers"}  # and held-out data took the second
    assert {name: site.method for name, site in pb.patched_sites(net).items()} == {"0": Spread(), "2": RankOne()}
    assert HEAD in str(report)
    assert HEAD in bayesianize_page(report)
    assert report.gain > 0
    limit = max(SHARE * report.model_bytes, BYTES)
    assert 4 * 5 * 1064 < report.patch_bytes < 4 * 5 * 1064 + 100 < limit
    pb.save(net, tmp_path / "patch.safetensors")
    assert (tmp_path / "patch.safetensors").stat().st_size < report.patch_bytes + 6000  # and a description
    other, x = thousand_classes(), held_out[0][0]
    pb.load_(other, tmp_path / "patch.safetensors")
    assert torch.equal(pb.predict(other, x).probs, pb.predict(net, x).probs)
    assert patch_tensors(other).keys() == patch_tensors(net).keys()  # as small when it is saved again
    pb.save_pretrained(net, tmp_path / "folder")
    again = pb.from_pretrained(thousand_classes, tmp_path / "folder")
    assert torch.equal(pb.predict(again, x).probs, pb.predict(net, x).probs)
    pb.unpatch_(other, keep="mean")
    assert torch.allclose(other[2].weight, thousand_classes()[2].weight, rtol=1e-5)


def test_a_patch_without_the_layers_own_weights_goes_on_no_other_network(held_out, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    net = thousand_classes()
    pb.bayesianize_(net, held_out, budget=4000, predict_cost=19.9)
    assert "2.weight" not in patch_tensors(net)
    pb.save(net, tmp_path / "patch.safetensors")
    other = thousand_classes()
    with torch.no_grad():
        other[2].weight[0, 0] += 1
    kept = copy.deepcopy(other)
    with pytest.raises(CheckpointMismatch, match=r"2\.weight is not the one that the patch was trained on"):
        pb.load_(other, tmp_path / "patch.safetensors")
    assert same_weights(other, kept)
    with torch.no_grad():
        pb.patched_sites(net)["2"].module._parameters["weight"][0, 0] += 1  # trained further: the file has to hold it
    assert "2.weight" in patch_tensors(net)
    pb.save(net, tmp_path / "trained.safetensors")
    pb.load_(other, tmp_path / "trained.safetensors")
    assert torch.equal(pb.predict(other, held_out[0][0]).probs, pb.predict(net, held_out[0][0]).probs)


def test_the_same_seed_gives_the_same_small_form(held_out) -> None:  # type: ignore[no-untyped-def]
    found = []
    for seed in (0, 0, 1):
        net = thousand_classes()
        pb.bayesianize_(net, held_out, budget=4000, predict_cost=19.9, seed=seed)
        found.append(pb.predict(net, held_out[0][0]).probs)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_the_small_form_and_the_limit_can_be_chosen(held_out) -> None:  # type: ignore[no-untyped-def]
    def methods(**options: object) -> tuple[dict[str, object], str]:
        net = thousand_classes()
        report = pb.bayesianize_(net, held_out, budget=1000, **options)  # type: ignore[arg-type]
        return {site.name: site.method for site in report.patch.sites}, str(report)

    assert methods(small=None)[0] == {"0": "Spread(5)"}
    assert methods(patch_bytes=300_000)[0] == {"0": "Spread(5)", "2": "Spread(5)"}
    assert methods(predict_cost=19.9)[0] == {"2": "RankOne(5, unit)"}
    assert methods(predict_cost=19.9, small=LowRank(2, 3))[0] == {"2": "LowRank(2, 3)"}
    assert methods(predict_cost=19.9, small=None)[0] == {"2": "Spread(5)"}  # one layer at least, whatever its size
    whole, text = methods(method=pb.ECMP(5, jitter=0.05), predict_cost=20.0, patch_bytes=21_500)
    assert whole == {"2": "RankOne(5, unit)"}
    assert "0 is left out: it would take the patch above its limit of 21,500 bytes" in text
    for options in ({"patch_bytes": 0}, {"patch_bytes": 1.5}, {"patch_bytes": True}):
        with pytest.raises(PatchbayesError, match="expected a whole number"):
            methods(**options)
    for options in ({"small": None, "sites": "output"}, {"patch_bytes": 9, "method": {"output": Spread()}}):
        with pytest.raises(PatchbayesError, match="go with sites"):
            methods(**options)


@pytest.mark.parametrize("method", [RankOne(), LowRank(2, 3)], ids=str)
def test_small_forms_that_do_not_help_leave_the_network_as_it_was(method, held_out) -> None:  # type: ignore[no-untyped-def]
    """To the last bit, and after an error too: the mean of small forms is the layer only up to rounding."""
    net, x = thousand_classes(), inputs(500)
    with torch.no_grad():
        y = labels_from(torch.softmax(net(x) / 1.5, -1))
    report = pb.bayesianize_(net, batches(x, y), budget=2000, predict_cost=19.9, small=method)
    assert report.chosen == "none"
    assert report.patch_bytes == 0
    assert same_weights(net, thousand_classes())
    assert torch.allclose(pb.predict(net, x).probs, torch.softmax(net(x) / report.temperature, -1), atol=1e-5)
    net = thousand_classes()

    def failing(stage: str, left: float) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        pb.bayesianize_(net, held_out, budget=2000, predict_cost=19.9, small=method, progress=failing)
    assert not pb.is_patched(net)
    assert same_weights(net, thousand_classes())
