"""Numbers that were wrong in 0.1.0, each with the value it should have."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import patchbayes as pb
from patchbayes.patching.drawing import DrawnOutputs
from patchbayes.patching.network import network_of


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Enumerated draws weigh what their probabilities say


def unequal(probabilities=(0.9, 0.1)) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2)).double()
    pb.patch_(model, pb.EMP(2, probabilities=probabilities, jitter=3), "0")
    x = torch.randn(6, 2, dtype=torch.float64)
    return model, x, torch.tensor([0, 1, 0, 1, 0, 1])


def test_the_elbo_of_enumerated_draws_is_the_expectation_under_p():
    model, x, y = unequal()
    draws = pb.Draws.enumerate(model)
    outputs = pb.forward_draws(model, x, draws)
    exact = 0.0
    for k, p in enumerate((0.9, 0.1)):
        with pb.use_draw(model, next(d for d in draws if int(d.assignments()) == k)):
            exact = exact + p * F.cross_entropy(model(x), y)
    found = pb.objective.negative_elbo(outputs, y, 0.0, num_data=6)
    torch.testing.assert_close(found, exact)
    even = torch.stack([F.cross_entropy(output, y) for output in outputs]).mean()
    assert abs(float((found - even).detach())) > 0.01  # what it was


def test_the_weights_survive_a_cast_and_the_gradient_is_weighted_too():
    model, x, y = unequal()
    draws = pb.Draws.enumerate(model)
    outputs = pb.forward_draws(model, x, draws).float()
    assert isinstance(outputs, DrawnOutputs)
    pb.objective.negative_elbo(outputs, y, 0.0, num_data=6).backward()
    found = pb.patched_sites(model)["0"].posterior.components["weight"].grad
    model.zero_grad()
    for draw, weight in zip(draws, draws.weights, strict=True):
        with pb.use_draw(model, draw):
            (weight * F.cross_entropy(model(x), y)).backward()
    expected = pb.patched_sites(model)["0"].posterior.components["weight"].grad
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_one_of_several_outputs_has_no_weights_any_more():
    model, x, _ = unequal((0.7, 0.3))
    outputs = pb.forward_draws(model, x, pb.Draws.enumerate(model))
    assert type(outputs[0]) is torch.Tensor
    assert type(outputs.sum()) is torch.Tensor


def test_equal_probabilities_need_no_weights():
    model, x, _ = unequal((0.5, 0.5))
    assert type(pb.forward_draws(model, x, pb.Draws.enumerate(model))) is torch.Tensor


# Sharing gradients with the penalty in the loss keeps the optimum; with the optimizer's decay it does not


def ridge(share: float, decay_in_loss: bool) -> torch.Tensor:
    """The mean weight of a linear regression with EMP after training to rest by gradient descent over all components."""
    torch.manual_seed(0)
    x = torch.randn(40, 3, dtype=torch.float64)
    y = x @ torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)
    model = nn.Sequential(nn.Linear(3, 1, bias=False)).double()
    pb.patch_(model, pb.EMP(5, jitter=0.1), "0")
    penalty = 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.0 if decay_in_loss else penalty)
    draws = pb.Draws.enumerate(model)
    components = pb.patched_sites(model)["0"].posterior.components["weight"]
    for _ in range(800):
        optimizer.zero_grad()
        loss = (pb.forward_draws(model, x, draws)[..., 0] - y).square().mean()
        if decay_in_loss:
            loss = loss + penalty / 2 * components.square().sum()
        loss.backward()
        pb.objective.share_gradients_(model, share)
        optimizer.step()
    return components.detach().mean(0).flatten()


def test_sharing_gradients_keeps_the_optimum_when_the_penalty_is_in_the_loss():
    plain, shared = ridge(0.0, True), ridge(0.5, True)
    torch.testing.assert_close(shared, plain, rtol=2e-3, atol=2e-3)
    assert not torch.allclose(ridge(0.5, False), plain, rtol=2e-2, atol=2e-2)  # the optimizer's decay is not shared


# Where methods are put


@pytest.mark.parametrize(
    ("method", "sites"),
    [
        (pb.EMP(), "norm+output"),
        (pb.ECMP(), "norm+output"),
        (pb.Dropout(0.1), "norm"),
        (pb.posteriors.DropConnect(0.1), "linear+conv"),
        (pb.Ensemble(), "all"),
        (pb.posteriors.MeanField(), "all"),
    ],
)
def test_methods_are_put_where_table_2_puts_them(method, sites):
    assert method.default_sites == sites


# The KL counts what is trained


def base() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def test_frozen_parameters_do_not_count_unless_asked_for():
    model = base().requires_grad_(False)
    pb.patch_(model, pb.EMP(3), "1")
    for parameter in model[1].parameters():
        parameter.requires_grad_(True)
    patches = pb.kl(model)
    torch.testing.assert_close(patches, pb.kl(model, shared=False))
    rest = sum(0.5 * p.square().sum() for p in [*model[0].parameters(), *model[2].parameters()])
    torch.testing.assert_close(pb.kl(model, frozen=True), patches + rest)


def test_a_network_without_anything_to_train_has_a_kl_of_zero():
    model = base().requires_grad_(False)
    pb.patch_(model, pb.EMP(3), "1")
    assert float(pb.kl(model)) == 0.0


def test_a_site_that_was_replaced_is_noticed_and_counts_no_more():
    model = base()
    pb.patch_(model, pb.ECMP(3), "norm+output")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model[2] = nn.Linear(8, 5)
        found = pb.kl(model)
    assert [str(w.message) for w in caught if '"2"' in str(w.message)]
    other = base()
    pb.patch_(other, pb.ECMP(3), "1")
    other[2] = model[2]
    torch.testing.assert_close(found, pb.kl(other))
    assert list(pb.patched_sites(model)) == ["1"]
    assert pb.predict(model, torch.randn(2, 4), draws=3).probs.shape == (2, 5)


# Optimizers that decay by the number of axes


def decayed_by_axes(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.dim() >= 2}


def test_components_of_norms_and_biases_have_one_axis():
    plain = base()
    before = decayed_by_axes(plain)
    pb.patch_(plain, pb.ECMP(4), "norm+output")
    after = {name.replace("patchbayes.components.", "") for name in decayed_by_axes(plain)}
    assert after == before == {"0.weight", "2.weight"}


def test_names_that_are_not_decayed():
    model = base()
    pb.patch_(model, {"norm": pb.EMP(3), "output": pb.posteriors.MeanField()})
    assert set(pb.no_decay_names(model)) == {
        "0.bias",
        "1.patchbayes.components.weight",
        "1.patchbayes.components.bias",
        "2.bias",
        "2.patchbayes.before_softplus.weight",
        "2.patchbayes.before_softplus.bias",
    }


# Draws fit a network whatever its probabilities have become


def test_draws_keep_their_probabilities_and_fit_a_network_that_has_others(tmp_path):
    model, _, _ = unequal((0.9, 0.1))
    draws = pb.Draws.sample(model, 200, seeded(1))
    share = float((draws.assignments() == 0).double().mean())
    assert share > 0.8
    network_of(model).sites[0].posterior._log_p = torch.tensor([0.1, 0.9], dtype=torch.float64).log()
    network_of(model).check(draws)
    assert float((draws.assignments() == 0).double().mean()) == share
    assert float((pb.Draws.sample(model, 200, seeded(1)).assignments() == 0).double().mean()) < 0.2
    draws.save(tmp_path / "draws.json")
    again = pb.Draws.load(tmp_path / "draws.json", model)
    assert torch.equal(again.assignments(), draws.assignments())
    assert again.law.probabilities == ((0.9, 0.1),)
