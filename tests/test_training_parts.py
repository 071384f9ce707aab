"""The parts of the training loop: loss, optimizer groups, turns, growing spread, held-out scores."""

import copy
import math

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.nets import mlp
from patchbayes.objective import share_gradients_
from patchbayes.runs import TrainingConfig
from patchbayes.runs.coordinate_descent import turn_length, turn_of
from patchbayes.runs.held_out import held_out_scores
from patchbayes.runs.loss import TrainingLoss, build_likelihood, build_optimizer
from patchbayes.runs.network import patch_with_, patched_net, spreading_sites
from patchbayes.runs.schedule import grow_spread_
from small_runs import table


def config(**settings):
    return TrainingConfig(**{"data": "npz:x.npz", "model": "mlp:6", **settings})


# ---- loss


def training_loss(task="classification", num_data=40, **settings):
    chosen = config(**settings)
    network, _ = patched_net(chosen, 3, (4,))
    return TrainingLoss(network, build_likelihood(task, chosen), chosen, num_data)


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(8) % 3


def test_the_elbo_of_a_patched_network():
    loss = training_loss(method="emp", prior_precision=3.0, draws_per_step=2)
    twin = copy.deepcopy(loss.network)
    value, nll, kl = loss(X, Y)
    total = pb.kl(twin, pb.prior.Prior(3.0, 3.0))
    expected = pb.objective.negative_elbo(pb.forward_draws(twin, X, 2), Y, total, num_data=40)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(kl, total)
    torch.testing.assert_close(nll + kl / 40, value)


@pytest.mark.parametrize("prior", ["gaussian", "laplace", "learned", "gamma"])
def test_the_prior_of_a_run_is_in_its_kl(prior):
    loss = training_loss(method="emp", prior=prior, prior_precision=3.0)
    if prior in ("learned", "gamma"):
        pb.objective.maximize_prior_(loss.network)
    made = {
        "gaussian": lambda: pb.prior.Prior(3.0, 3.0),
        "laplace": lambda: pb.prior.LaplacePrior(3.0, 3.0),
        "learned": lambda: pb.prior.LearnedPrior(loss.network),
        "gamma": lambda: pb.prior.GammaPrior(loss.network, 1.0, 1 / 3.0),
    }[prior]()
    if prior in ("learned", "gamma"):
        pb.objective.maximize_prior_(loss.network, made)
    torch.testing.assert_close(loss(X, Y)[2], pb.kl(loss.network, made).detach())
    assert not any(name.startswith("prior.") and p.requires_grad for name, p in loss.named_parameters())
    assert any(name.startswith("prior.") for name in loss.state_dict()) == (prior in ("learned", "gamma"))


def test_four_lambdas_are_four_penalties():
    """As weight decay of four groups; where components share gradients, those of patched layers are in the loss."""
    lambdas = (0.1, 0.2, 0.3, 0.4)
    for sharing in (0.0, 0.5):
        chosen = config(method="emp", objective="simplified", lambdas=lambdas, sharing=sharing)
        network, _ = patched_net(chosen, 3, (4,))
        likelihood = build_likelihood("classification", chosen)
        groups = {g["name"]: g["weight_decay"] for g in build_optimizer(chosen, network, likelihood).param_groups}
        names = ("patched_weights", "patched_biases", "shared_weights", "shared_biases")
        wanted = dict(zip(names, (0.2, 0.4, 0.6, 0.8), strict=True))
        loss, nll, _ = TrainingLoss(network, likelihood, chosen, 40)(X, Y)
        if sharing:
            wanted |= {"patched_weights": 0.0, "patched_biases": 0.0}
            penalty = pb.objective.l2_penalty(network, pb.objective.Lambdas(0.1, 0.2))
            torch.testing.assert_close(loss - nll, penalty)
        else:
            assert loss == nll
        assert groups == pytest.approx(wanted)


def test_an_unpatched_network_has_the_prior_of_a_point():
    loss = training_loss(method="vanilla", prior_precision=2.0)
    value, nll, kl = loss(X, Y)
    torch.testing.assert_close(nll, nn.functional.cross_entropy(loss.network(X), Y))
    torch.testing.assert_close(kl, sum(p.square().sum() for p in loss.network.parameters()))
    torch.testing.assert_close(value, nll + kl / 40)


def test_the_simplified_loss_is_the_nll_and_weight_decay_is_the_optimizer_s():
    loss = training_loss(method="ecmp", objective="simplified")
    value, nll, kl = loss(X, Y)
    assert value == nll
    assert kl == 0


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_where_gradients_are_shared_the_decay_of_patched_parameters_is_in_the_loss(optimizer):
    """Else it would be added after sharing, unscaled, and move the point where training comes to rest."""
    settings = {"method": "emp(3)", "objective": "simplified", "weight_decay": 0.2, "optimizer": optimizer}
    gradients = {}
    for sharing in (0.0, 0.5):
        chosen = config(**settings, sharing=sharing)
        loss = training_loss(**settings, sharing=sharing)
        loss(X, Y)[0].backward()
        gradients[sharing] = dict(loss.network.named_parameters())
        groups = build_optimizer(chosen, loss.network, loss.likelihood).param_groups
        decay = {group["name"].partition("_")[0]: group["weight_decay"] for group in groups}
        assert decay == {"patched": 0.0 if sharing else 0.2, "shared": 0.2}
    inside = {name for name in gradients[0.0] if ".patchbayes." in f".{name}"}
    assert inside
    for name, plain in gradients[0.0].items():
        added = gradients[0.5][name].grad - (0 if plain.grad is None else plain.grad)
        torch.testing.assert_close(added, 0.2 * plain.detach() if name in inside else torch.zeros_like(plain))


def test_sharing_gradients_does_not_move_the_optimum():
    """Linear regression with one patched layer: gradient descent with and without sharing ends in the same components."""
    x, y = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)).double(), torch.arange(20.0).double()[:, None]
    ends = []
    for sharing in (0.0, 0.5):
        chosen = config(
            method="linear: emp(2, jitter=0.5)", objective="simplified", weight_decay=0.2, sharing=sharing,
            optimizer="sgd", lr=0.1, momentum=0.0,
        )  # fmt: skip
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(3, 1)).double()
        patch_with_(network, chosen.rules())
        loss = TrainingLoss(network, pb.likelihoods.Gaussian(1.0), chosen, 20)
        loss.draws = pb.Draws.enumerate(network)  # the expectation itself
        optimizer = build_optimizer(chosen, network, loss.likelihood)
        for _ in range(500):
            optimizer.zero_grad()
            loss(x, y)[0].backward()
            if sharing:
                share_gradients_(network, sharing)
            optimizer.step()
        posterior = pb.patched_sites(network)["0"].posterior
        ends.append(torch.cat([posterior.component(k)["weight"] for k in range(2)]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["vanilla", "ecmp"])
def test_with_weight_decay_the_kl_leaves_the_shared_parameters_out(method):
    loss = training_loss(method=method, weight_decay=0.1)
    expected = torch.zeros(()) if method == "vanilla" else pb.kl(loss.network, shared=False)
    assert loss(X, Y)[2] == expected


def test_the_share_of_a_process_weighs_its_likelihood_only():
    loss = training_loss(method="vanilla")
    value, nll, kl = loss(X, Y, 0.5)
    torch.testing.assert_close(value, 0.5 * nll + kl / 40)


def test_a_step_takes_every_member_of_an_ensemble():
    loss = training_loss(method="ensemble(3)")
    draws = pb.Draws.enumerate(loss.network)
    outputs = pb.forward_draws(copy.deepcopy(loss.network), X, draws)
    torch.testing.assert_close(loss(X, Y)[1], pb.objective.negative_elbo(outputs, Y, 0.0, num_data=40))
    assert len(draws) == 3


def test_regression_has_a_gaussian_and_classes_refuse_its_settings():
    loss = training_loss("regression", method="vanilla", output_precision=4.0)
    targets = torch.zeros(8, 3)
    expected = -torch.distributions.Normal(loss.network(X), 0.5).log_prob(targets).sum(1).mean()
    torch.testing.assert_close(loss(X, targets)[1], expected)
    for settings in ({"output_precision": 1.0}, {"learn_precision": True}):
        with pytest.raises(PatchbayesError, match=r"are for regression, and npz:x.npz has classes"):
            build_likelihood("classification", config(**settings))


# ---- optimizers


def optimizer_of(**settings):
    chosen = config(**settings)
    network, _ = patched_net(chosen, 3, (4,))
    likelihood = build_likelihood("regression" if chosen.learn_precision else "classification", chosen)
    optimizer = build_optimizer(chosen, network, likelihood)
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    learned = [*network.parameters(), *(likelihood.parameters() if chosen.learn_precision else ())]
    assert sorted(held) == sorted(map(id, learned))
    return optimizer, {group["name"]: group for group in optimizer.param_groups}


def test_patched_parameters_have_a_group_of_their_own():
    _, groups = optimizer_of(lr=0.2, patch_lr=0.05)
    assert {name: group["lr"] for name, group in groups.items()} == {
        "patched_weights": 0.05,
        "patched_biases": 0.05,
        "shared_weights": 0.2,
        "shared_biases": 0.2,
    }
    assert all(group["initial_lr"] == group["lr"] for group in groups.values())
    assert {group["weight_decay"] for group in groups.values()} == {0.0}
    for optimizer in ("sgd", "adam"):
        assert {group["lr"] for group in optimizer_of(lr=0.2, optimizer=optimizer)[1].values()} == {0.2}


def test_turns_need_two_kinds_of_parameters():
    with pytest.raises(PatchbayesError, match=r'sites="all" leaves nothing to take turns with'):
        optimizer_of(sites="all", alternate=1.0)


def test_turns_last_as_long_as_they_should():
    chosen = config(alternate=0.5, epochs=3)
    assert turn_length(chosen, 3) == 2
    assert [turn_of(chosen, step, 3) for step in range(6)] == ["shared"] * 2 + ["patched"] * 2 + ["shared"] * 2
    assert turn_of(config(), 0, 3) is None
    assert {turn_of(config(learn="patches"), step, 3) for step in range(30)} == {"patched"}


def test_nothing_is_decayed_twice():
    """What the optimizer decays is exactly what the KL leaves out."""
    decays = {name: group["weight_decay"] for name, group in optimizer_of(weight_decay=0.1)[1].items()}
    assert decays == {"patched_weights": 0.0, "patched_biases": 0.0, "shared_weights": 0.1, "shared_biases": 0.1}
    simplified = optimizer_of(objective="simplified", weight_decay=0.1)[1]
    assert {group["weight_decay"] for group in simplified.values()} == {0.1}
    papers = optimizer_of(objective="simplified", batch_size=50)[1]  # weight decay 2 lambda with lambda = 0.001 / 50
    assert {group["weight_decay"] for group in papers.values()} == {2 * 0.001 / 50}
    assert optimizer_of(method="vanilla", weight_decay=0.1)[1]["weights"]["weight_decay"] == 0.1
    with pytest.raises(PatchbayesError, match="leaves no shared parameter to decay"):
        optimizer_of(method="ensemble", weight_decay=0.1)


def test_optimizers_by_name():
    assert type(optimizer_of()[0]) is torch.optim.Adam
    assert type(optimizer_of(optimizer="adamw")[0]) is torch.optim.AdamW
    sgd, groups = optimizer_of(optimizer="sgd")
    assert type(sgd) is torch.optim.SGD
    assert {(g["momentum"], g["nesterov"], g["lr"]) for g in groups.values()} == {(0.9, False, 0.1)}
    groups = optimizer_of(optimizer="sgd", momentum=0.5, nesterov=True)[1]
    assert {(g["momentum"], g["nesterov"]) for g in groups.values()} == {(0.5, True)}


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_the_optimizer_on_a_cpu_is_torch_s_own_in_one_pass(name):
    """Fused, and equal to the default to rounding, decay and several groups included."""
    settings = {"method": "ecmp(3)", "optimizer": name, "weight_decay": 0.01, "patch_lr": 5e-3}
    loss = training_loss(**settings)
    twin = copy.deepcopy(loss)
    fused = build_optimizer(config(**settings), loss.network, loss.likelihood)
    assert fused.defaults["fused"]
    groups = build_optimizer(config(**settings), twin.network, twin.likelihood).param_groups
    plain = type(fused)([{key: group[key] for key in ("params", "lr", "weight_decay")} for group in groups])
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        for own, other in zip(loss.network.parameters(), twin.network.parameters(), strict=True):
            own.grad = torch.randn(own.shape, generator=generator)
            other.grad = own.grad.clone()
        fused.step()
        plain.step()
    for own, other in zip(loss.network.parameters(), twin.network.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def test_a_learned_precision_is_optimized_without_decay():
    groups = optimizer_of(learn_precision=True, objective="simplified", weight_decay=0.5)[1]
    assert groups["output_precision"]["weight_decay"] == 0


# ---- patching


def test_default_sites_are_the_paper_s():
    def sites(method):
        return patched_net(config(method=method), 3, (4,))[1].sites

    methods = ("ecmp", "dropout(0.1)", "dropconnect(0.1)", "ensemble")
    assert {method: [site.name for site in sites(method)] for method in methods} == {
        "ecmp": ["norm0", "norm1", "output"],
        "dropout(0.1)": ["norm0", "norm1"],
        "dropconnect(0.1)": ["hidden1", "output"],  # table 2: on weight matrices
        "ensemble": ["norm0", "hidden1", "norm1", "output"],
    }


def test_rules_put_methods_on_several_kinds_of_layers():
    network, _ = patched_net(config(method="norm: emp(3); output: dropout(0.1)"), 3, (4,))
    labels = {name: site.method.label for name, site in pb.patched_sites(network).items()}
    assert labels == {"norm0": "EMP(K=3)", "norm1": "EMP(K=3)", "output": "Dropout(0.1)"}


def test_a_draw_for_each_example_is_taken_where_the_layer_allows():
    network = mlp(4, (6,), 3)
    patch_with_(network, {"norm+output": pb.ECMP(3, per_example=True)}, input_shape=(4,))
    sites = pb.patched_sites(network)
    assert {name: site.method.per_example for name, site in sites.items()} == {
        "norm0": True,
        "norm1": True,
        "output": False,
    }
    network = mlp(4, (6,), 3)
    patch_with_(network, {"norm": pb.ECMP(3, per_example=True)})
    assert list(pb.patched_sites(network)) == ["norm0", "norm1"]
    with pytest.raises(PatchbayesError, match='sites="output" has no norm layer'):
        patch_with_(mlp(4), {"output": pb.ECMP(3, per_example=True)})


def test_the_output_is_the_layer_that_runs_last():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(4, 3), nn.Linear(4, 4)

        def forward(self, x):
            return self.last(self.first(x))

    network = Backwards()
    patch_with_(network, {"output": pb.EMP(3)}, input_shape=(4,))
    assert list(pb.patched_sites(network)) == ["last"]
    network = Backwards()
    patch_with_(network, {"output": pb.EMP(3)})
    assert list(pb.patched_sites(network)) == ["first"]


def test_the_seed_reaches_the_patches():
    def patched(**options):
        network = mlp(4, (6,), 3)
        with torch.no_grad():
            network.output.weight.fill_(1.0)
        patch_with_(network, {"output": pb.EMP(3)}, **options)
        return network

    def weights(network):
        return pb.patched_sites(network)["output"].components("weight")

    assert torch.equal(weights(patched()), weights(patched(seed=0)))
    assert not torch.equal(weights(patched()), weights(patched(seed=1)))


# ---- a spread that grows


def test_components_start_together_and_end_as_far_apart_as_the_method_says():
    chosen = config(method="ecmp(4, jitter=0.2)", jitter_warmup=2.0, epochs=3)
    network, _ = patched_net(chosen, 3, (4,))
    sites = spreading_sites(network)
    assert len(sites) == 3
    start = components(network)
    distances = []
    for step in range(15):
        grow_spread_(sites, 2.0, step, steps_per_epoch=5)
        now = components(network)
        torch.testing.assert_close(now.mean(0), start.mean(0))
        distances.append(float((now - now.mean(0)).norm() / (start - start.mean(0)).norm()))
    assert distances == pytest.approx([(step + 1) / 10 for step in range(10)] + [1.0] * 5, rel=1e-4)
    torch.testing.assert_close(components(network), start)


def components(network):
    posterior = pb.patched_sites(network)["output"].posterior
    return torch.stack([posterior.component(k)["weight"] for k in range(posterior.num_components)]).detach().clone()


def test_a_spread_that_cannot_grow_is_refused():
    with pytest.raises(PatchbayesError, match="no patched layer has a spread that could grow"):
        patched_net(config(method="dropout(0.1)", jitter_warmup=1.0), 3, (4,))
    network, _ = patched_net(config(method="norm: dropout(0.1); output: emp(3)", jitter_warmup=1.0), 3, (4,))
    assert [site.name for site in spreading_sites(network)] == ["output"]


# ---- held-out scores


def test_held_out_scores_of_classes_are_those_of_the_averaged_prediction():
    dataset = table(10)
    network, _ = patched_net(config(method="ecmp"), 3, (3,))
    inputs, targets = next(dataset.batches(dataset.test, 10))
    prediction = pb.predict(network, inputs, 7)
    scores = held_out_scores(network, dataset, dataset.test, pb.likelihoods.Categorical(), 7, 10)
    assert scores["held_out_nll"] == pytest.approx(
        -float(prediction.log_probs.gather(1, targets[:, None]).mean()), rel=1e-5
    )
    assert scores["held_out_accuracy"] == float((prediction.predicted_class == targets).double().mean())
    assert held_out_scores(network, dataset, dataset.test, pb.likelihoods.Categorical(), 7, 3) == pytest.approx(
        scores, rel=1e-5
    )
    assert held_out_scores(network, dataset, dataset.test, pb.likelihoods.Categorical(), 1, 10) != pytest.approx(
        scores, rel=1e-5
    )
    answers = iter([False, False, True])
    assert (
        held_out_scores(network, dataset, dataset.test, pb.likelihoods.Categorical(), 7, 3, lambda: next(answers))
        is None
    )


@pytest.mark.parametrize("method", ["vanilla", "ecmp"])
def test_held_out_scores_of_a_regression_are_in_the_targets_own_units(method):
    dataset = table(10, "regression")
    network, _ = patched_net(config(method=method), 2, (3,))
    inputs, _ = next(dataset.batches(dataset.test, 10))
    raw = dataset.test.targets
    if method == "vanilla":
        means = network.eval()(inputs).detach()[None]
        network.train()
    else:
        means = pb.predict(network, inputs, 6, likelihood=pb.likelihoods.Gaussian(2.0), keep_draws=True).draw_means
    means = means.double() * torch.tensor([2.0, 4.0]) + torch.tensor([5.0, 6.0])
    scores = held_out_scores(network, dataset, dataset.test, pb.likelihoods.Gaussian(2.0), 6, 4)
    assert scores["held_out_rmse"] == pytest.approx(float((means.mean(0) - raw).square().mean().sqrt()), rel=1e-5)
    noise = torch.tensor([2.0, 4.0], dtype=torch.float64) / math.sqrt(2)
    density = torch.distributions.Normal(means, noise).log_prob(raw.double()).sum(-1).logsumexp(0) - math.log(
        len(means)
    )
    assert scores["held_out_nll"] == pytest.approx(-float(density.mean()), rel=1e-5)
    assert network.training
