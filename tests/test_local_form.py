"""The local form: outputs of a linear layer drawn from the mean and variance that drawn weights give them."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import patchbayes as pb
from calibrated_networks import batches, classifier, inputs
from patchbayes.errors import NothingToPatch, PatchbayesError
from patchbayes.posteriors import Spread, local
from patchbayes.posteriors.text import parse_method, text_of

X = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
METHODS = {
    "ecmp(2, probabilities=(0.3, 0.7), jitter=0.5, form='local')": pb.ECMP(
        2, probabilities=(0.3, 0.7), jitter=0.5, form="local"
    ),
    "ecmp(1, jitter=0.5, zero=True, mix_bias=True, form='local')": pb.ECMP(
        1, jitter=0.5, zero=True, mix_bias=True, form="local"
    ),
    "dropconnect(0.3, form='local')": pb.DropConnect(0.3, form="local"),
    "spread(2, size=0.4, form='local')": Spread(2, 0.4, form="local"),
}


def linear(method: str) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(3, 2).double()).eval()
    pb.patch_(layer, parse_method(method), "all", generator=torch.Generator().manual_seed(0))
    return layer


def drawn(monkeypatch: pytest.MonkeyPatch, net: nn.Module, x: Tensor, eps: float) -> Tensor:
    """The output of a draw whose noise is `eps` everywhere."""
    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(local, "normal_like", lambda like, key: torch.full_like(like, eps))
        return pb.forward_draws(net, x, 1)[0]


@pytest.mark.parametrize("text", METHODS)
def test_mean_and_variance_are_those_of_all_networks(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of_weights = linear(text.replace("form='local'", "form='weights'"))
    every = pb.Draws.enumerate(of_weights)
    with torch.no_grad():
        outputs, weights = pb.forward_draws(of_weights, X, every).as_subclass(Tensor), every.weights
    mean = torch.einsum("s,sbo->bo", weights, outputs)
    variance = torch.einsum("s,sbo->bo", weights, (outputs - mean).square())
    net = linear(text)
    middle = drawn(monkeypatch, net, X, 0.0)
    torch.testing.assert_close(middle, mean, rtol=1e-10, atol=1e-12)
    for eps in (1.0, -2.0):
        deviation = (drawn(monkeypatch, net, X, eps) - middle) / eps
        torch.testing.assert_close(deviation.square(), variance, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(net(X), mean, rtol=1e-10, atol=1e-12)  # eval mode is the mean network
    between = torch.einsum("s,sbo,sbp->bop", weights, outputs - mean, outputs - mean)
    torch.testing.assert_close(
        between, torch.diag_embed(variance), rtol=1e-9, atol=1e-12
    )  # outputs of an input: independent
    both = torch.einsum("s,so,so->o", weights, (outputs - mean)[:, 0], (outputs - mean)[:, 1])
    assert (both.abs() > 1e-3).any()  # outputs of two inputs are not, which the local form does not have


def test_gaussian_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    net = linear("meanfield(0.3, form='local')")
    site = pb.patched_sites(net)["0"]
    deviation = {name: F.softplus(value) for name, value in site.posterior.before_softplus.items()}
    expected = (X.square() @ deviation["weight"].square().T + deviation["bias"].square()).sqrt()
    found = drawn(monkeypatch, net, X, 1.0) - drawn(monkeypatch, net, X, 0.0)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-10, atol=1e-12)


def test_the_same_law_of_gaussian_weights_in_either_form() -> None:
    """Standard errors of 20,000 draws: a difference of six in the mean, or in the variance, has a chance of 1e-8."""
    found = {}
    for form in ("weights", "local"):
        net, number = linear(f"meanfield(0.3, form='{form}')"), 20_000
        prediction = pb.predict(net, X, number, likelihood=pb.likelihoods.Gaussian(), sampling="iid")
        found[form] = prediction.mean, prediction.epistemic_variance
    mean, variance = found["weights"]
    assert ((found["local"][0] - mean).abs() < 6 * (2 * variance / number).sqrt()).all()
    assert ((found["local"][1] / variance - 1).abs() < 6 * (2 * 2 / number) ** 0.5).all()


@pytest.mark.parametrize("text", [*METHODS, "meanfield(0.3, form='local')"])
def test_text_file_and_engines(text: str, tmp_path: Path) -> None:
    method = parse_method(text)
    assert text_of(method) == text
    assert "local" in method.label
    net, other = (classifier(seed=seed) for seed in (0, 0))
    pb.patch_(net, method, "linear", generator=torch.Generator().manual_seed(3))
    x, draws = inputs(10), pb.Draws.sample(net, 6)
    by_loop, by_graph = (pb.predict(net, x, draws, engine=engine, keep_draws=True) for engine in ("loop", "graph"))
    torch.testing.assert_close(by_graph.draw_probs, by_loop.draw_probs, rtol=1e-5, atol=1e-6)
    assert by_graph.plan.engine == "graph"
    assert float(by_loop.draw_probs.var(0).max()) > 1e-4
    apart = pb.predict(net, [x[:3], x[3:]], draws, keep_draws=True)  # an example's noise does not depend on its batch
    torch.testing.assert_close(apart.draw_probs, by_loop.draw_probs, rtol=1e-5, atol=1e-6)
    assert float(pb.kl(net).detach()) == pytest.approx(float(pb.kl(_as_weights(text)).detach()), rel=1e-6)
    pb.save(net, tmp_path / "patch.safetensors")
    pb.load_(other, tmp_path / "patch.safetensors")
    assert torch.equal(pb.predict(other, x, draws).probs, pb.predict(net, x, draws).probs)


def _as_weights(text: str) -> nn.Module:
    net = classifier()
    pb.patch_(net, parse_method(text.replace("local", "weights")), "linear", generator=torch.Generator().manual_seed(3))
    return net


def test_all_draws_share_the_products() -> None:
    """A head in the local form: what the captured network computes for each draw is the noise, and no product."""
    net = classifier()
    pb.patch_(net, Spread(size=0.3, form="local"), "output")
    plan = pb.predict(net, inputs(10), 20, engine="graph").plan
    assert "5 % of the arithmetic of 20 passes" in str(plan)
    with_weights = classifier()
    pb.patch_(with_weights, Spread(size=0.3), "output")
    assert " 5 %" not in str(pb.predict(with_weights, inputs(10), 20, engine="graph").plan)


def test_gradients_reach_means_and_spreads_and_scaling_scales() -> None:
    net, x = classifier(), inputs(8)
    pb.patch_(net, pb.ECMP(3, jitter=0.5, form="local"), "linear")
    net.train()
    pb.forward_draws(net, x, 2).square().mean().backward()
    for parameter in net.parameters():
        if parameter.requires_grad and parameter.grad is not None:
            assert parameter.grad.isfinite().all()
    site = pb.patched_sites(net)["0"].posterior
    before = {name: value.detach().clone() for name, value in site.variance().items()}
    mean = {name: value.detach().clone() for name, value in site.mean().items()}
    site.scale_spread_(0.5)
    for name, value in site.variance().items():
        torch.testing.assert_close(value, 0.25 * before[name], rtol=1e-4, atol=1e-9)
        torch.testing.assert_close(site.mean()[name], mean[name], rtol=1e-5, atol=1e-6)


def test_what_needs_functions_is_refused(tmp_path: Path) -> None:
    net, x = classifier(), inputs(3)
    pb.patch_(net, pb.ECMP(2, form="local"), "output")
    draws = pb.Draws.sample(net, 1)
    said = "draws outputs for each example, and no function"
    with pytest.raises(PatchbayesError, match=said), pb.use_draw(net, draws):
        pass
    with pytest.raises(PatchbayesError, match=said):
        pb.forward_draws(net, x, draws)
    with pytest.raises(PatchbayesError, match=said):
        pb.unpatch_(net, keep=draws)
    with pytest.raises(PatchbayesError, match="a replicate needs one function"):
        pb.predict(net, x, 5, keep_draws=True).sample(3)
    with pytest.raises(PatchbayesError, match="draws anew for every example"):
        pb.export(net, tmp_path / "m.pt2", example_input=x)
    for method in (
        lambda: pb.posteriors.Mixture(tie="site", form="local"),
        lambda: pb.ECMP(form="nearby"),
        lambda: pb.MeanField(form="nearby"),
        lambda: Spread(form="nearby"),
    ):
        with pytest.raises(PatchbayesError, match="form="):
            method()
    norms = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    with pytest.raises(NothingToPatch, match="is for linear layers"):
        pb.patch_(norms, pb.ECMP(2, form="local"), "norm")


def test_its_spread_is_calibrated() -> None:
    """Planted: a regression whose every target has weights of its own, N(1, 0.6^2), found from a third of that."""
    torch.manual_seed(0)
    net, number = nn.Linear(6, 1, bias=False).eval(), 1500
    with torch.no_grad():
        net.weight.fill_(1.0)
    x = inputs(number) * torch.linspace(-1, 1, number)[torch.randperm(number)].exp().unsqueeze(1)
    y = (x * (1 + 0.6 * torch.randn(number, 6))).sum(1, keepdim=True) + 0.5 * torch.randn(number, 1)
    pb.patch_(net, Spread(size=0.2, form="local"), "all", likelihood=pb.likelihoods.Gaussian(precision=4.0))
    report = pb.calibrate_(net, batches(x, y), draws=20)
    assert report.chosen == "learned"
    assert report.spread[""] * report.temperature**0.5 == pytest.approx(0.6, rel=0.25)
    assert report.after.nll < report.temperature_scaled.nll - 0.05
    assert torch.equal(net(x), nn.functional.linear(x, net.weight))  # the mean network is the one given
