"""warm_up_: training without draws until held-out data show that the network is overconfident."""

import copy

import pytest
import torch
from torch import nn

import patchbayes as pb
from calibrated_networks import batches, classifier, inputs, labels_from
from patchbayes.errors import PatchbayesError
from patchbayes.likelihoods import Gaussian


def patched() -> nn.Sequential:
    net = classifier(scale=12.0)
    pb.patch_(net, pb.mixed(), generator=torch.Generator().manual_seed(0))
    return net.train()


def answered(net: nn.Module, x: torch.Tensor, sharper: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Held-out examples whose best temperature is 1 / sharper for the mean network."""
    with torch.no_grad():
        logits = copy.deepcopy(net).eval()(x)
    return batches(x, labels_from(torch.softmax(sharper * logits, -1)))


def drawn_among(net: nn.Module, x: torch.Tensor, calls: int = 20) -> int:
    mean = copy.deepcopy(net).eval()(x)
    return sum(not torch.equal(net(x), mean) for _ in range(calls))


def test_it_draws_as_far_as_held_out_data_show_it_overconfident():
    net, x = patched(), inputs(1500)
    assert drawn_among(net, x) == 20
    assert pb.warm_up_(net, answered(net, x, 0.4)) == 0  # the first call begins the warm-up, whatever the data say
    assert drawn_among(net, x) == 0
    assert pb.warm_up_(net, answered(net, x, 3.0)) == 0
    assert drawn_among(net, x) == 0
    share = pb.warm_up_(net, answered(net, x, 0.8))  # the best temperature is near 1.25
    assert 0.3 < share < 0.7
    assert drawn_among(net, x) in (int(20 * share), int(20 * share) + 1)
    assert pb.warm_up_(net, answered(net, x, 0.4)) == 1
    assert drawn_among(net, x) == 20
    assert pb.warm_up_(net, answered(net, x, 3.0)) == 0
    assert drawn_among(net, x) == 0


def test_a_network_that_knows_nothing_does_not_draw():
    """Its best temperature is high, since all that it says is wrong, and noise would not help it."""
    net, x = patched(), inputs(1000)
    guessed = torch.randint(4, (1000,), generator=torch.Generator().manual_seed(0))
    pb.warm_up_(net, batches(x, guessed))
    assert pb.calibrate_(copy.deepcopy(net), batches(x, guessed), budget=100).mean_temperature > 2
    assert pb.warm_up_(net, batches(x, guessed)) == 0


def test_training_in_the_warm_up_is_that_of_the_unpatched_network():
    """Adam does not see that a component has a K-th of the gradient, and equal components stay equal."""
    x = inputs(64)
    y = labels_from(torch.softmax(classifier(seed=1)(x), -1).detach())
    plain, net = classifier().train(), classifier().train()
    pb.patch_(net, pb.mixed() | {"norm+output": pb.ECMP(5, jitter=0.0)})
    pb.warm_up_(net, batches(x, y))
    for model in (plain, net):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(20):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    torch.testing.assert_close(net.eval()(x), plain.eval()(x), rtol=1e-3, atol=1e-3)
    components = pb.patched_sites(net)["4"].components("weight")
    torch.testing.assert_close(components, components[:1].expand_as(components), rtol=0, atol=1e-6)


def test_a_compiled_network_draws_in_all_steps_or_none():
    net, x = patched(), inputs(1500)
    compiled = torch.compile(net, backend="eager")
    pb.warm_up_(compiled, answered(net, x, 0.4))
    mean = copy.deepcopy(net).eval()(x)
    assert torch.allclose(compiled(x), mean)
    assert pb.warm_up_(compiled, answered(net, x, 0.4)) == 1
    assert not any(torch.allclose(compiled(x), mean) for _ in range(3))


def test_components_keep_their_distances_in_the_warm_up():
    net, x = patched(), inputs(64)
    y = labels_from(torch.softmax(classifier(seed=1)(x), -1).detach())
    pb.warm_up_(net, batches(x, y))
    before = pb.patched_sites(net)["4"].components("weight").detach().clone()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    moved = pb.patched_sites(net)["4"].components("weight").detach() - before
    assert float(moved.abs().max()) > 0.01
    torch.testing.assert_close(moved, moved[:1].expand_as(moved), rtol=0, atol=1e-5)


def test_held_out_data_of_any_form():
    net, x = patched(), inputs(1000)
    pairs = answered(net, x, 0.4)
    pb.warm_up_(net, pairs)
    assert pb.warm_up_(net, [{"a": x, "b": y} for x, y in pairs], select=lambda batch: (batch["a"], batch["b"])) > 0
    assert pb.warm_up_(net, pairs, output=lambda logits: 0.05 * logits) == 0
    regression = nn.Linear(6, 1)
    pb.patch_(regression, pb.ECMP(3), "all")
    numbers = [(x, regression.eval()(x).detach() + torch.randn(1000, 1, generator=torch.Generator().manual_seed(0)))]
    pb.warm_up_(regression, numbers, likelihood=Gaussian())
    assert pb.warm_up_(regression, numbers, likelihood=Gaussian(precision=25.0)) > 0  # it says 0.2, and misses by 1
    assert pb.warm_up_(regression, numbers, likelihood=Gaussian(precision=0.04)) == 0


def test_calibrate_says_that_it_was_trained_without_draws():
    net, x = patched(), inputs(1000)
    held_out = answered(net, x, 3.0)
    pb.warm_up_(net, held_out)
    report = pb.calibrate_(net, held_out, budget=2000)
    assert "trained without draws to the end" in str(report)
    pb.warm_up_(net, answered(net, x, 0.4))
    assert "without draws" not in str(pb.calibrate_(net, held_out, budget=2000))


@pytest.mark.parametrize("method", [pb.Ensemble(2), pb.EMP(2, statistics="per_component")])
def test_components_that_are_trained_one_by_one_are_refused(method):
    net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    pb.patch_(net, method, "norm" if method.tie == "site" else "all")
    with pytest.raises(PatchbayesError, match="one by one"):
        pb.warm_up_(net, [])
    assert pb.patched_sites(net)["1"].network.share is None
