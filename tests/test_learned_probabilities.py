"""Learned mixing probabilities: every estimate of the gradient against enumeration, and what keeps p out of the corners."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.draws.draws import law_of
from patchbayes.draws.layout import Series
from patchbayes.errors import PatchbayesError
from patchbayes.patching.assignment import site_by_site
from patchbayes.patching.drawing import forward_draws
from patchbayes.patching.network import network_of

START = {"0": (0.6, 0.4), "2": (0.2, 0.5, 0.3)}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    rules = {name: pb.EMP(len(p), jitter=1.0, probabilities=p, learn_probabilities=True) for name, p in START.items()}
    pb.patch_(model, rules)
    return model


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (5,), generator=generator)


def logits_of(model):
    return [site.posterior.logits for site in pb.patched_sites(model).values()]


def table(model, batch):
    """log p(y | x, w(z)) of the batch, a mean over examples, for each of the 2 x 3 networks; without our objective."""
    x, y = batch
    found = torch.zeros(2, 3, dtype=torch.float64)
    for one in pb.Draws.enumerate(model):
        i, j = one.assignments()[0].tolist()
        with torch.no_grad(), pb.use_draw(model, one):
            found[i, j] = torch.log_softmax(model(x), -1)[torch.arange(5), y].mean()
    return found


def exact(model, batch):
    """The expected log-likelihood and its gradient with respect to both logits."""
    values = table(model, batch)
    logits = [p.detach().clone().requires_grad_() for p in logits_of(model)]
    p, q = (torch.softmax(one, 0) for one in logits)
    total = p @ values @ q
    return total.detach(), torch.autograd.grad(total, logits)


def estimate(model, batch, draws):
    """Value and gradient (as of the log-likelihood) by the public path."""
    x, y = batch
    value = -pb.objective.negative_elbo(forward_draws(model, x, draws), y, 0.0, num_data=1)
    return value.detach(), torch.autograd.grad(value, logits_of(model))


def trunks(model, per_outcome: int):
    """Independent draws that come out as given: (i, j) -> some series."""
    law = law_of(model)
    found: dict[tuple[int, ...], list[pb.Draws]] = {}
    seeds = itertools.count()
    while len(found) < 6 or any(len(some) < per_outcome for some in found.values()):
        one = pb.Draws(law, [Series("iid", next(seeds), range(1))])
        some = found.setdefault(tuple(one.assignments()[0].tolist()), [])
        if len(some) < per_outcome:
            some.append(one)
    return found


def probability(z) -> float:
    return START["0"][z[0]] * START["2"][z[1]]


def test_enumerated_draws_give_the_exact_value_and_gradient(batch):
    model = network()
    value, gradients = estimate(model, batch, pb.Draws.enumerate(model))
    expected, wanted = exact(model, batch)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-14)


def test_site_by_site_is_unbiased_over_all_draws_of_the_rest(batch):
    model = network()
    total, sums = 0.0, [0.0, 0.0]
    for z, (trunk,) in trunks(model, 1).items():
        draws = pb.Draws.concatenate([trunk.with_heads("0", 2), trunk.with_heads("2", 3)])
        value, gradients = estimate(model, batch, draws)
        total = total + probability(z) * value
        sums = [s + probability(z) * g for s, g in zip(sums, gradients, strict=True)]
    expected, wanted = exact(model, batch)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(tuple(sums), wanted, rtol=1e-10, atol=1e-14)


def test_site_by_site_runs_over_every_learned_site():
    draws = site_by_site(network(), torch.Generator().manual_seed(3))
    z = draws.assignments()
    assert len(draws) == 5
    assert z[:2, 0].tolist() == [0, 1]
    assert len(set(z[:2, 1].tolist())) == 1
    assert z[2:, 1].tolist() == [0, 1, 2]


def test_the_score_function_of_two_draws_is_unbiased_and_its_baseline_saves_variance(batch):
    model = network()
    expected, wanted = exact(model, batch)
    values = table(model, batch)
    total, sums = 0.0, [0.0, 0.0]
    second, second_without = 0.0, 0.0
    some = trunks(model, 2)
    for z, u in itertools.product(some, some):
        weight = probability(z) * probability(u)
        value, gradients = estimate(model, batch, some[z][0] + some[u][1])
        total = total + weight * value
        sums = [s + weight * g for s, g in zip(sums, gradients, strict=True)]
        second += weight * float(gradients[1].square().sum())
        p = torch.tensor(START["2"], dtype=torch.float64)
        scores = [torch.eye(3, dtype=torch.float64)[one[1]] - p for one in (z, u)]
        plain = 0.5 * (values[z] * scores[0] + values[u] * scores[1])
        second_without += weight * float(plain.square().sum())
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(tuple(sums), wanted, rtol=1e-10, atol=1e-13)
    assert second < 0.5 * second_without


def test_marginalizing_one_site_and_sampling_the_other_is_unbiased(batch):
    model = network()
    sums = [0.0, 0.0]
    some = trunks(model, 2)
    for z, u in itertools.product(some, some):
        draws = some[z][0].with_heads("2", 3) + some[u][1].with_heads("2", 3)
        _, gradients = estimate(model, batch, draws)
        sums = [s + probability(z) * probability(u) * g for s, g in zip(sums, gradients, strict=True)]
    torch.testing.assert_close(tuple(sums), exact(model, batch)[1], rtol=1e-10, atol=1e-13)


def test_a_number_of_draws_gives_the_same_estimate_as_the_draws_it_makes(batch):
    """And components get the gradient of the ordinary objective."""
    model, x, y = network(), *batch
    outputs = forward_draws(model, x, 4)
    assert outputs.law.log_prob.shape == (4,)
    loss = pb.objective.negative_elbo(outputs, y, 0.0, num_data=1)
    plain = -torch.log_softmax(outputs.as_subclass(torch.Tensor), -1)[:, torch.arange(5), y].mean()
    torch.testing.assert_close(loss.detach(), plain.detach())
    weights = [site.posterior.components["weight"] for site in pb.patched_sites(model).values()]
    ours = torch.autograd.grad(loss, weights, retain_graph=True)
    torch.testing.assert_close(ours, torch.autograd.grad(plain, weights))


def test_examples_that_draw_for_themselves_have_scores_of_their_own(batch):
    torch.manual_seed(0)
    x, y = batch
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)).double().train()
    pb.patch_(model, pb.EMP(2, jitter=1.0, per_example=True, learn_probabilities=True), "norm")
    logits = pb.patched_sites(model)["1"].posterior.logits
    values = []
    for number in range(2):
        with torch.no_grad(), pb.use_draw(model, pb.Draws.enumerate(model)[number]):
            values.append(torch.log_softmax(model(x), -1)[torch.arange(5), y])
    wanted = 0.25 * (values[0] - values[1]).mean()  # d/dlogit_0 of sum_k p_k L_k, a mean over examples
    found = []
    for _ in range(600):
        outputs = forward_draws(model, x, 2)
        loss = pb.objective.negative_elbo(outputs, y, 0.0, num_data=1)
        found.append(-torch.autograd.grad(loss, logits)[0][0])
    assert outputs.law.log_prob.shape == (2, 5)
    found = torch.stack(found)
    error = found.std() / math.sqrt(len(found))
    assert abs(found.mean() - wanted) < 5 * error
    assert error < 0.3 * abs(wanted)


def test_kl_holds_the_divergence_of_every_independent_draw():
    torch.manual_seed(0)
    p = (0.7, 0.2, 0.1)
    divergence = math.log(3) + sum(x * math.log(x) for x in p)
    for method, draws in ((pb.EMP, 1), (pb.ECMP, 4 * 2 + 2)):
        values = []
        for learned in (True, False):
            model = nn.Sequential(nn.Linear(4, 2)).double()
            model[0].load_state_dict({"weight": torch.ones(2, 4), "bias": torch.ones(2)})
            pb.patch_(model, method(3, probabilities=p, learn_probabilities=learned), "0")
            values.append(pb.kl(model))
        assert (values[0] - values[1]).item() == pytest.approx(draws * divergence, rel=1e-9)


def test_an_ensemble_has_one_law_for_the_whole_network(tmp_path, batch):
    torch.manual_seed(0)
    method = pb.Ensemble(2, init="copies", jitter=1.0, probabilities=(0.8, 0.2), learn_probabilities=True)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    plain = copy.deepcopy(model)
    pb.patch_(model, method, "all")
    first, second = (site.posterior for site in pb.patched_sites(model).values())
    assert first.logits is second.logits
    assert len([name for name, _ in model.named_parameters() if "logits" in name]) == 1
    fixed = copy.deepcopy(plain)
    pb.patch_(fixed, pb.Ensemble(2, init="copies", jitter=1.0, probabilities=(0.8, 0.2)), "all")
    divergence = math.log(2) + 0.8 * math.log(0.8) + 0.2 * math.log(0.2)
    assert (pb.kl(model) - pb.kl(fixed)).item() == pytest.approx(divergence, rel=1e-9)
    first.logits.data.copy_(torch.tensor([0.0, 1.0]))
    pb.save(model, tmp_path / "ensemble.safetensors")
    pb.load_(plain, tmp_path / "ensemble.safetensors")
    assert law_of(plain).probabilities == law_of(model).probabilities
    again, other = (site.posterior for site in pb.patched_sites(plain).values())
    assert again.logits is other.logits
    clone = copy.deepcopy(model)
    one, two = (site.posterior for site in pb.patched_sites(clone).values())
    assert one.logits is two.logits
    assert one.logits is not first.logits


@pytest.mark.parametrize("with_kl", [True, False])
def test_kl_keeps_p_inside_and_without_it_p_runs_into_a_corner(with_kl):
    """One layer, two components, of which one is better: the best p is the softmax of the summed log-likelihoods.

    Without the KL the objective is linear in p, and its best p a corner.
    """
    model = nn.Sequential(nn.Linear(1, 1, bias=False)).double()
    pb.patch_(model, pb.EMP(2, jitter=0.0, learn_probabilities=True), "0", likelihood=pb.likelihoods.Gaussian(1.0))
    posterior = pb.patched_sites(model)["0"].posterior
    posterior.components["weight"].data.copy_(torch.tensor([[[1.0]], [[0.2]]]))
    x = torch.ones(4, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD([posterior.logits], lr=10.0)
    for _ in range(200):
        outputs = forward_draws(model, x, pb.Draws.enumerate(model))
        total = pb.kl(model) if with_kl else 0.0
        loss = pb.objective.negative_elbo(outputs, x, total, num_data=4, likelihood=pb.likelihoods.Gaussian(1.0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = torch.softmax(posterior.logits, 0).detach()
    right, wrong = 0.0 - 0.5 * 1.0**2, -4 * 0.5 * 0.8**2 - 0.5 * 0.2**2  # log-likelihood of all four, and the prior
    expected = torch.softmax(torch.tensor([right, wrong], dtype=torch.float64), 0)
    if with_kl:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        assert expected.max() < 0.7
    else:
        assert found[0] > 0.99


def test_draws_and_means_follow_the_learned_law():
    model = network()
    with torch.no_grad():
        logits_of(model)[0].copy_(torch.tensor([0.0, 50.0]))
    assert set(pb.Draws.sample(model, 50).assignments()[:, 0].tolist()) == {1}
    posterior = pb.patched_sites(model)["0"].posterior
    torch.testing.assert_close(posterior.mean()["weight"], posterior.stored("weight")[1])
    assert posterior.roles()["logits"] == "law"


def test_what_would_be_biased_is_refused(batch):
    model, (x, y) = network(), batch
    with pytest.raises(PatchbayesError, match="independent draws"):
        forward_draws(model, x, pb.Draws.stratified(model, 4))
    with pytest.raises(PatchbayesError, match="at least two independent draws"):
        pb.objective.negative_elbo(forward_draws(model, x, 1), y, 0.0, num_data=1)
    old = pb.Draws.sample(model, 4)
    with torch.no_grad():
        logits_of(model)[0].add_(torch.tensor([0.0, 1.0]))
    with pytest.raises(PatchbayesError, match="other mixing probabilities"):
        forward_draws(model, x, old)
    trunk = pb.Draws.sample(model, 1)
    with pytest.raises(PatchbayesError, match="without an unbiased estimate"):
        forward_draws(model, x, trunk.with_heads("2", 3) + trunk.with_heads("2", 3))
    with torch.no_grad():  # nothing is learned here: any draws will do
        assert forward_draws(model, x, pb.Draws.stratified(model, 4)).shape == (4, 5, 3)


def test_logits_that_are_not_finite_are_named():
    model = network()
    with torch.no_grad():
        logits_of(model)[0].fill_(math.nan)
    with pytest.raises(PatchbayesError, match="not finite"):
        model.train()(torch.zeros(1, 3, dtype=torch.float64))


def test_a_rate_that_is_not_finite_is_named():
    model = nn.Sequential(nn.Linear(3, 2)).train()
    pb.patch_(model, pb.Dropout(0.3, learn_rate=True), "0")
    pb.patched_sites(model)["0"].posterior.logit.data.fill_(math.nan)
    with pytest.raises(PatchbayesError, match="probability to keep is nan"):
        model(torch.zeros(1, 3))


@pytest.mark.parametrize("options", [{"components": 1}, {"components": 2, "probabilities": (1.0, 0.0)}])
def test_probabilities_that_cannot_be_learned_are_refused(options):
    with pytest.raises(PatchbayesError, match="cannot be learned"):
        pb.EMP(learn_probabilities=True, **options)


def test_unequal_laws_tied_over_the_network_are_refused_and_nothing_is_changed():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for second in (pb.Ensemble(3, init="copies"), pb.Ensemble(2, init="copies")):
        with pytest.raises(PatchbayesError, match='tie="network"'):
            pb.patch_(model, {"0": pb.Ensemble(2, init="copies", learn_probabilities=True), "1": second})
        assert not pb.is_patched(model)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_divergence_counts_once_where_draws_are_enumerated_in_training(batch):
    """The objective of all six networks, by hand."""
    model, (x, y) = network(), batch
    loss = pb.objective.negative_elbo(forward_draws(model, x, pb.Draws.enumerate(model)), y, pb.kl(model), num_data=5)
    p = [torch.softmax(one, 0) for one in logits_of(model)]
    by_hand = -(p[0] @ table(model, batch) @ p[1])
    for site, q in zip(pb.patched_sites(model).values(), p, strict=True):
        by_hand = by_hand + (q * (q.log() + math.log(len(q)))).sum() / 5
        for name in ("weight", "bias"):
            by_hand = by_hand + 0.5 * (q @ site.components(name).square().flatten(1).sum(1)) / 5
    torch.testing.assert_close(loss, by_hand)
    ours, theirs = (torch.autograd.grad(one, logits_of(model), retain_graph=True) for one in (loss, by_hand))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert len(network_of(model).owners) == 2


@pytest.mark.parametrize("tie", ["activation", "unit"])
def test_the_learned_rate_of_dropout_has_an_unbiased_gradient(monkeypatch, tie):
    """Over all pairs of masks of two inputs: the score, and the inverted scaling through which the rate acts directly."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3)).double().train()
    pb.patch_(model, pb.Dropout(0.3, tie=tie, learn_rate=True), "0")
    posterior = pb.patched_sites(model)["0"].posterior
    x, y = torch.randn(1, 2, dtype=torch.float64), torch.tensor([1])
    weight, bias = (model[0]._parameters[name] for name in ("weight", "bias"))
    masks = [torch.tensor([m], dtype=torch.float64) for m in itertools.product((0.0, 1.0), repeat=2)]

    def log_prob(mask, keep):
        return torch.log_softmax(x * mask / keep @ weight.T + bias, -1)[0, 1]

    def probability_of(mask, keep):
        return torch.where(mask > 0, keep, 1 - keep).prod()

    keep = torch.sigmoid(-posterior.logit)
    number = keep.detach()
    exact_value = sum(probability_of(mask, keep) * log_prob(mask, keep) for mask in masks)
    (wanted,) = torch.autograd.grad(exact_value, posterior.logit)
    found = without_score = 0.0
    for pair in itertools.product(masks, masks):
        shown = iter(pair)
        monkeypatch.setattr("patchbayes.posteriors.dropout.bernoulli_like", lambda *_, shown=shown: next(shown))
        outputs = forward_draws(model, x, 2)
        (gradient,) = torch.autograd.grad(-pb.objective.negative_elbo(outputs, y, 0.0, num_data=1), posterior.logit)
        chance = float(probability_of(pair[0], number) * probability_of(pair[1], number))
        found += chance * float(gradient)
        plain = sum(log_prob(mask, torch.sigmoid(-posterior.logit)) for mask in pair) / 2
        without_score += chance * float(torch.autograd.grad(plain, posterior.logit)[0])
    assert found == pytest.approx(float(wanted), rel=1e-9)
    assert abs(without_score - float(wanted)) > 0.05 * abs(float(wanted))  # the path alone is not the gradient


def test_the_kl_of_a_learned_rate_is_that_of_concrete_dropout():
    """Gal, Hron and Kendall (2017), Eq. 4: (1 - rate) tau / 2 ||W||^2 - K H(rate), here against a fair coin."""
    model = nn.Sequential(nn.Linear(4, 3)).double()
    pb.patch_(model, pb.Dropout(0.3, learn_rate=True), "0")
    weight, bias = (model[0]._parameters[name] for name in ("weight", "bias"))
    entropy = -(0.3 * math.log(0.3) + 0.7 * math.log(0.7))
    expected = 0.5 * 0.7 * weight.square().sum() + 0.5 * bias.square().sum() + 4 * (math.log(2) - entropy)
    torch.testing.assert_close(pb.kl(model), expected, rtol=1e-6, atol=0)
    assert pb.patched_sites(model)["0"].posterior.roles() == {"logit": "law"}


def test_a_learned_rate_before_batch_norm_scores_the_batch_as_a_whole():
    """An example's output depends there on what the other examples dropped."""
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).train()
    pb.patch_(model, pb.Dropout(0.3, learn_rate=True), "linear")
    x = torch.randn(6, 4)
    assert forward_draws(model, x, 3).law.log_prob.shape == (3,)
    model[1].eval()
    assert forward_draws(model, x, 3).law.log_prob.shape == (3, 6)


def test_dropout_of_rate_zero_cannot_be_learned():
    with pytest.raises(PatchbayesError, match="a rate above 0 to learn"):
        pb.Dropout(0.0, learn_rate=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        {"norm": pb.EMP(3, per_example=True, learn_probabilities=True)},
        {"linear": pb.Dropout(0.2, learn_rate=True)},
        {"linear": pb.EMP(3, learn_probabilities=True)},
    ],
    ids=["per example", "dropout", "site"],
)
def test_compiled_code_learns_probabilities_as_eager_code_does(method):
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    pb.patch_(model, method)
    eager = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizers = [torch.optim.SGD(m.parameters(), 0.5) for m in (model, eager)]
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    for _ in range(4):
        for network, called, optimizer in zip((model, eager), (compiled, eager), optimizers, strict=True):
            optimizer.zero_grad()
            pb.objective.negative_elbo(forward_draws(called, x, 3), y, pb.kl(network), num_data=50).backward()
            optimizer.step()
        torch.testing.assert_close(compiled(x), eager(x), rtol=1e-4, atol=1e-5)
    for (name, one), other in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5, msg=name)
    laws = [p for n, p in model.named_parameters() if n.endswith(("logits", "logit"))]
    assert laws
    assert all(p.grad.abs().sum() > 0 for p in laws)
    torch._dynamo.reset()
