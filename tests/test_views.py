"""Views: what they show, how draws are assigned to them, and that prediction averages over both."""

import warnings

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.likelihoods import Bernoulli, Categorical
from patchbayes.posteriors import Spread
from patchbayes.prediction import split_information
from patchbayes.views import Views, crops, mirror, shifts


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).eval()


X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_ready_views_show_what_they_say() -> None:
    assert torch.equal(mirror.view(X, 0), X)
    assert torch.equal(mirror.view(X, 1), X.flip(-1))
    views = shifts(2, mirrored=False)
    assert len(views) == 5
    assert torch.equal(views.view(X, 0), X)
    down, up, right, left = (views.view(X, k) for k in range(1, 5))
    assert torch.equal(down[:, :, 2:], X[:, :, :-2])
    assert torch.equal(up[:, :, :-2], X[:, :, 2:])
    assert torch.equal(right[..., 2:], X[..., :-2])
    assert torch.equal(left[..., :-2], X[..., 2:])
    assert not down[:, :, :2].any()
    assert not left[..., -2:].any()
    assert torch.equal(shifts(1).view(X, 1), X.flip(-1))
    assert len(crops()) == 10
    assert torch.equal(crops(1.0, mirrored=False).view(X, 3), X)
    corner = crops(0.5, mirrored=False).view(X, 1)
    assert corner.shape == X.shape
    assert float(corner.max()) <= float(X[..., :4, :4].max())


def test_every_view_has_as_many_draws_and_whole_blocks() -> None:
    assert mirror.assigned(20, 5) == [0] * 5 + [1] * 5 + [0] * 5 + [1] * 5
    assert mirror.assigned(4, 5) == [0, 1, 0, 1]
    for number in (10, 20, 40):
        counts = torch.bincount(torch.tensor(shifts().assigned(number, 5)), minlength=10)
        assert bool((counts == number // 10).all())


@pytest.mark.parametrize("engine", ["loop", "graph"])
def test_each_draw_sees_its_view(engine) -> None:  # type: ignore[no-untyped-def]
    net = network()
    pb.patch_(net, Spread(size=0.3), "all")
    draws = pb.Draws.stratified(net, 20)
    with torch.no_grad():
        sides = [torch.softmax(pb.forward_draws(net, x, draws), -1) for x in (X, X.flip(-1))]
    expected = torch.stack([sides[view][draw] for draw, view in enumerate(mirror.assigned(20, 5))]).mean(0)
    prediction = pb.predict(net, X, draws, views=mirror, engine=engine)
    assert torch.allclose(prediction.probs, expected, atol=1e-6)
    assert prediction.num_draws == 20
    answer = pb.Predictor(net, draws, views=mirror)(X)
    assert torch.allclose(answer.exp(), expected, atol=1e-6)


def test_uncertainty_splits_into_views_and_draws() -> None:
    net = network()
    pb.patch_(net, Spread(size=0.3), "all")
    prediction = pb.predict(net, X, 20, views=mirror, keep_draws=True)
    parts = split_information(prediction, mirror)
    assert torch.allclose(parts["views"] + parts["draws"], prediction.mutual_information, atol=1e-5)
    assert bool((parts["draws"] > 0).all())
    for likelihood in (Categorical(), Bernoulli()):  # softened draws say the same of what they disagree on
        plain, softened = (
            pb.predict(
                net, X, 20, likelihood=likelihood.set_temperature_(draw_temperature=t), views=mirror, keep_draws=True
            )
            for t in (1.0, 3.0)
        )
        expected, found = split_information(plain, mirror), split_information(softened, mirror)
        for name in ("views", "draws"):
            assert torch.allclose(found[name], expected[name], atol=1e-5)
        assert torch.allclose(found["views"] + found["draws"], softened.mutual_information, atol=1e-5)
        assert not torch.allclose(softened.draw_probs, plain.draw_probs, atol=0.01)
    symmetric = X + X.flip(-1)  # both views are the same: what is left of their part is the noise of ten draws
    same = split_information(pb.predict(net, symmetric, 400, views=mirror, keep_draws=True), mirror)
    assert float(same["views"].max()) < 0.1 * float(same["draws"].min())
    with pytest.raises(PatchbayesError, match="keep_draws=True"):
        split_information(pb.predict(net, X, 20, views=mirror), mirror)
    with pytest.raises(PatchbayesError, match="10 draws on 10 views"):
        split_information(pb.predict(net, X, 10, views=shifts(), keep_draws=True), shifts())


def test_a_network_without_draws_takes_a_pass_for_each_view() -> None:
    net = network()
    with torch.no_grad():
        expected = (torch.softmax(net(X), -1) + torch.softmax(net(X.flip(-1)), -1)) / 2
    assert torch.allclose(pb.predict(net, X, views=mirror).probs, expected, atol=1e-6)
    pb.patch_(net, Spread(size=0.3), "all")
    assert torch.allclose(pb.predict(net, X, "mean", views=mirror).probs, expected, atol=1e-6)


def test_a_function_makes_a_view_for_each_draw() -> None:
    net = network()
    pb.patch_(net, Spread(size=0.0), "all")
    seeds = []

    def noisy(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        seeds.append(generator.initial_seed())
        return x + torch.randn(x.shape, generator=generator)

    one, again = (pb.predict(net, X, 6, views=noisy).probs for _ in range(2))
    assert torch.equal(one, again)
    assert sorted(set(seeds)) == list(range(6))
    assert not torch.allclose(one, pb.predict(net, X, 6).probs, atol=1e-3)


def test_what_is_no_view_is_refused() -> None:
    net = network()
    pb.patch_(net, Spread(), "all")
    with pytest.raises(PatchbayesError, match=r"expected a view of shape \(4, 3, 8, 8\)"):
        pb.predict(net, X, views=Views([lambda x: x[..., 1:]]))
    with pytest.raises(PatchbayesError, match="expected a view of shape"):
        pb.predict(net, X, views=lambda x, generator: x[:2])
    with pytest.raises(PatchbayesError, match="expected images"):
        mirror.view(torch.zeros(2, 3), 0)
    with pytest.raises(PatchbayesError, match=r"expected patchbayes\.views\.mirror"):
        pb.predict(net, X, views="mirror")  # type: ignore[arg-type]
    with pytest.raises(PatchbayesError, match="views go with a number of draws"):
        pb.predict(net, X, "auto", views=mirror)
    for make in (lambda: shifts(0), lambda: crops(0.0), lambda: Views([])):
        with pytest.raises(PatchbayesError, match="expected"):
            make()


def test_views_that_it_was_calibrated_with_are_missed() -> None:
    net = network()
    targets = torch.arange(4)
    pb.calibrate_(net, [(X, targets)], views=mirror, examples=4, budget=100)
    with pytest.warns(UserWarning, match=r"calibrated with views \(mirror.*give the same views"):
        pb.predict(net, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pb.predict(net, X, views=mirror)
        pb.calibrate_(net, [(X, targets)], examples=4, budget=100)  # anew, without: what it knew is forgotten
        pb.predict(net, X)


def test_an_error_keeps_what_is_known_of_the_views() -> None:
    net = network()
    targets = torch.arange(4)
    pb.calibrate_(net, [(X, targets)], views=mirror, examples=4, budget=100)
    with pytest.raises(PatchbayesError):
        pb.calibrate_(net, [(X, targets + 100)], examples=4, budget=100)
    with pytest.warns(UserWarning, match="calibrated with views"):
        pb.predict(net, X)
