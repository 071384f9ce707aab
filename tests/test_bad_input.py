"""Bad input is refused in the user's words, with a remedy, and the network is left as it was."""

import gc
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import patchbayes as pb
from patchbayes.errors import (
    CheckpointMismatch,
    NothingToPatch,
    NotPatched,
    PatchbayesError,
    TooManyOutcomes,
    WrongDraws,
)
from zoo import assert_same, snapshot

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def patched(method=None) -> nn.Sequential:
    model = network()
    pb.patch_(model, method or pb.EMP(3))
    return model


def refuses(model: nn.Module, action, *texts: str, kind: type[Exception] = PatchbayesError) -> None:
    before = snapshot(model)
    state = torch.get_rng_state()
    with pytest.raises(kind) as error:
        action(model)
    assert isinstance(error.value, PatchbayesError)
    for text in texts:
        assert text in str(error.value)
    assert_same(before, model)
    assert torch.equal(torch.get_rng_state(), state)
    del error  # and with it what a generator that was left half way still held
    gc.collect()
    enabled, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    torch.set_grad_enabled(True)  # whatever was found, for the tests that follow
    assert enabled
    assert not inference


def test_all_errors_are_patchbayes_errors_and_value_errors():
    for kind in (NothingToPatch, NotPatched, TooManyOutcomes, WrongDraws, CheckpointMismatch):
        assert issubclass(kind, PatchbayesError)
    assert issubclass(PatchbayesError, ValueError)


# ---- methods

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (lambda: pb.EMP(0), ("components=0", "at least 1")),
        (lambda: pb.ECMP(-2), ("components=-2", "at least 1")),
        (lambda: pb.EMP(2.5), ("components=2.5", "integer")),
        (lambda: pb.EMP(True), ("components=True", "integer")),
        (lambda: pb.EMP("five"), ("components='five'", "integer")),
        (lambda: pb.Ensemble(0), ("components=0", "at least 1")),
        (lambda: pb.EMP(2, probabilities=(0.5, 0.6)), ("(0.5, 0.6)", "sum to 1", "their sum is 1.1")),
        (lambda: pb.EMP(2, probabilities=(1.5, -0.5)), ("(1.5, -0.5)", "at least 0")),
        (lambda: pb.EMP(2, probabilities=(NAN, 1.0)), ("nan", "sum to 1")),
        (lambda: pb.EMP(3, probabilities=(0.5, 0.5)), ("(0.5, 0.5)", "2 probabilities were given for 3 components")),
        (
            lambda: pb.posteriors.Mixture(components=1, zero=True, probabilities=(1.0,)),
            ("(1.0,)", "1 probabilities were given for 1 components and the zero component"),
        ),
        (lambda: pb.EMP(2, probabilities=0.5), ("probabilities=0.5", "a probability for each component")),
        (lambda: pb.EMP(2, sigma=-0.1), ("sigma=-0.1", "at least 0")),
        (lambda: pb.EMP(2, sigma=NAN), ("sigma=nan", "finite")),
        (lambda: pb.EMP(2, sigma=INF), ("sigma=inf", "finite")),
        (lambda: pb.EMP(2, sigma="0.1"), ("sigma='0.1'", "finite")),
        (lambda: pb.posteriors.GaussianNoise(-1.0), ("sigma=-1.0", "at least 0")),
        (lambda: pb.EMP(2, jitter=-1.0), ("jitter=-1.0", "at least 0")),
        (lambda: pb.EMP(2, jitter=NAN), ("jitter=nan", "finite")),
        (lambda: pb.EMP(2, norm_scale=INF), ("norm_scale=inf", "finite")),
        (lambda: pb.EMP(2, init="random"), ("init='random'", '"copies" or "independent"')),
        (lambda: pb.posteriors.Mixture(tie="layer"), ("tie='layer'", '"network", "site", "unit" or "element"')),
        (lambda: pb.EMP(2, statistics="both"), ("statistics='both'", '"shared" or "per_component"')),
        (lambda: pb.posteriors.Mixture(2, tie="network", per_example=True), ("per_example=True", 'tie="network"')),
        (lambda: pb.EMP(2, per_example=True, statistics="per_component"), ("per_example=True", "per_component")),
        (lambda: pb.Dropout(1.0), ("rate=1.0", "below 1")),
        (lambda: pb.Dropout(-0.1), ("rate=-0.1", "at least 0")),
        (lambda: pb.Dropout(NAN), ("rate=nan", "probability to drop")),
        (lambda: pb.Dropout("0.1"), ("rate='0.1'", "probability to drop")),
        (lambda: pb.posteriors.DropConnect(2.0), ("DropConnect(rate=2.0)", "below 1")),
        (lambda: pb.posteriors.MeanField(0.0), ("scale=0.0", "above 0")),
        (lambda: pb.posteriors.MeanField(NAN), ("scale=nan", "finite")),
        (lambda: pb.prior.Prior(tau=0.0), ("tau=0.0", "above 0")),
        (lambda: pb.prior.Prior(rho={"*": -1.0}), ("rho={'*': -1.0}", "above 0")),
        (lambda: pb.likelihoods.Gaussian(-1.0), ("precision=-1.0", "above 0")),
        (lambda: pb.objective.Lambdas(shared_biases=-1.0), ("shared_biases=-1.0", "at least 0")),
    ],
)
def test_a_method_or_prior_that_cannot_be(make, texts):
    with pytest.raises(PatchbayesError) as error:
        make()
    for text in texts:
        assert text in str(error.value)


@settings(max_examples=200, deadline=None)
@given(p=st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=4), k=st.integers(-1, 4))
def test_any_probabilities_are_accepted_exactly_when_they_are_probabilities(p, k):
    valid = k >= 1 and len(p) == k and all(math.isfinite(x) and x >= 0 for x in p) and abs(sum(p) - 1) <= 1e-6
    if valid:
        assert pb.EMP(k, probabilities=tuple(p)).probabilities == tuple(p)
    else:
        with pytest.raises(PatchbayesError):
            pb.EMP(k, probabilities=tuple(p))


@settings(max_examples=50, deadline=None)
@given(weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=6))
def test_normalized_probabilities_are_accepted(weights):
    p = tuple(w / sum(weights) for w in weights)
    assert pb.ECMP(len(p), probabilities=p).probabilities == p


# ---- patching


@pytest.mark.parametrize(
    ("action", "texts"),
    [
        (lambda m: pb.patch_(m, pb.EMP), ("EMP (without parentheses)", "EMP(components=5)")),
        (lambda m: pb.patch_(m, pb.posteriors.MeanField), ("MeanField (without parentheses)",)),
        (lambda m: pb.patch_(m, "EMP"), ("'EMP' is not a method", "EMP(components=5)")),
        (lambda m: pb.patch_(m, {"norm": pb.Dropout}), ("Dropout (without parentheses)",)),
        (lambda m: pb.patch_(m, {}), ("rules is empty", "{sites: method}")),
        (lambda m: pb.patch_(m, pb.EMP(2), "head"), ('no module named "head"', '"0", "1"', "named_modules")),
        (lambda m: pb.patch_(m, pb.EMP(2), "norm+hea*"), ('"hea*"', "glob")),
        (lambda m: pb.patch_(m, {"norm": pb.EMP(2), "nothing": pb.ECMP(2)}), ('"nothing"',)),
        (lambda m: pb.patch_(m, pb.EMP(2), 7), ("sites=7", "predicate")),
        (
            lambda m: pb.patch_(m, pb.EMP(2), "conv"),
            ("no site in Sequential (5 modules)", "Linear x2", 'sites="output"'),
        ),
        (lambda m: pb.patch_(m, pb.EMP(2), tied="loosely"), ("tied='loosely'", '"together" or "separate"')),
        (
            lambda m: pb.patch_(m, pb.posteriors.Mixture(2, tie="element", statistics="per_component")),
            ('patch_ at "1"', 'tie="element"', 'tie="site"'),
        ),
        (lambda m: pb.patch_(m, pb.EMP(2, per_example=True)), ('patch_ at "3"', "Linear", 'sites="norm"')),
        (lambda m: pb.unpatch_(m), ("not a patched network", "patch_")),
        (lambda m: pb.predict(m, X, dropout=True), ("expected Sequential to have nn.Dropout", "got 0 layers")),
        (lambda m: pb.kl(m), ("not a patched network",)),
        (lambda m: pb.Draws.sample(m, 3), ("not a patched network",)),
        (lambda m: pb.forward_draws(m, X), ("not a patched network",)),
        (lambda m: pb.Predictor(m), ("not a patched network",)),
        (lambda m: pb.use_draw(m).__enter__(), ("not a patched network",)),
    ],
)
def test_an_ordinary_network_is_left_as_it_was(action, texts):
    refuses(network(), action, *texts)


def test_only_networks_are_patched():
    for thing, name in ((nn.Linear, "type"), (X, "Tensor"), (None, "NoneType")):
        with pytest.raises(PatchbayesError, match=rf"expected a torch\.nn\.Module, got a {name}"):
            pb.patch_(thing, pb.EMP(2))


def test_an_initializer_that_is_not_there_is_missed():
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

    model = nn.Sequential(Scale())
    refuses(
        model,
        lambda m: pb.patch_(m, pb.EMP(2, init="independent"), "all"),
        'patch_ at "0"',
        "Scale",
        "reset_parameters",
        'init="copies"',
    )


def test_an_example_input_that_does_not_fit_changes_nothing():
    model = network()
    before = snapshot(model)
    with pytest.raises(RuntimeError):
        pb.patch_(model, pb.EMP(2), example_input=torch.zeros(2, 99))
    assert_same(before, model)


def test_a_wrapper_is_not_patched(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(network())
        refuses(
            wrapped,
            lambda m: pb.patch_(m, pb.EMP(2)),
            "DistributedDataParallel",
            "patch_(model.module, ...) before DDP",
        )
    finally:
        del wrapped
        gc.collect()
        torch.distributed.destroy_process_group()
    refuses(nn.DataParallel(network()), lambda m: pb.patch_(m, pb.EMP(2)), "DataParallel", "patch the network first")
    compiled = torch.compile(network())
    refuses(compiled, lambda m: pb.patch_(m, pb.EMP(2)), "OptimizedModule", "before torch.compile(model)")


def test_a_network_around_a_patched_one_is_not_patched():
    outer = nn.Sequential(nn.LayerNorm(3), patched())
    refuses(outer, lambda m: pb.patch_(m, pb.EMP(2)), 'the part "1" is a patched network already', "unpatch_")


def test_two_patched_parts_have_no_common_draw():
    outer = nn.Sequential(patched(), nn.Linear(2, 3), patched())
    refuses(
        outer, lambda m: pb.Draws.sample(m, 2), "contains 2 separately patched networks", "patch_ the whole network"
    )


def test_patching_twice_is_refused():
    refuses(
        patched(), lambda m: pb.patch_(m, pb.ECMP(2)), '"1": already patched', "unpatch_(model)", kind=NothingToPatch
    )


def test_a_prior_without_a_precision_for_a_layer():
    model = patched()
    refuses(model, lambda m: pb.kl(m, pb.prior.Prior(tau={"1": 2.0})), "no pattern matches the layer", 'add "*"')


# ---- prediction


def other_draws(number: int = 3) -> pb.Draws:
    with torch.random.fork_rng():
        return pb.Draws.sample(patched(pb.EMP(4)), number)


def with_nan() -> torch.Tensor:
    x = X.clone()
    x[2, 1] = NAN
    return x


@pytest.mark.parametrize(
    ("action", "texts"),
    [
        (lambda m: pb.predict(m, with_nan()), ("NaN", "1 of 24 values")),
        (lambda m: pb.predict(m, [X, with_nan()]), ("NaN", "1 of 24 values")),
        (lambda m: pb.predict(m, X / 0), ("not finite", "draw 0")),
        (lambda m: pb.predict(m, []), ("no batch", "empty")),
        (lambda m: pb.predict(m, torch.utils.data.DataLoader([])), ("no batch", "empty")),
        (lambda m: pb.predict(m, iter(())), ("no batch", "empty")),
        (lambda m: pb.predict(m, 3), ("int", "iterable of batches")),
        (lambda m: pb.predict(m, ["text"]), ("no tensor", "select=")),
        (lambda m: pb.predict(m, X, 0), ("draws=0", "at least 1")),
        (lambda m: pb.predict(m, X, -5), ("draws=-5", "at least 1")),
        (lambda m: pb.predict(m, X, True), ("draws=True", "integer")),
        (lambda m: pb.predict(m, X, 2.5), ("draws=2.5", "integer")),
        (lambda m: pb.predict(m, X, "many"), ("draws='many'", "expected a number")),
        (lambda m: pb.predict(m, X, other_draws()), ("another network", "2 draw groups", "Draws.sample(model, ...)")),
        (lambda m: pb.predict(m, X, pb.Draws.sample(m, 3)[:0]), ("hold no draw",)),
        (
            lambda m: pb.predict(m, X, pb.Draws.sample(m, 3), generator=torch.Generator()),
            ("generator=", "made already"),
        ),
        (lambda m: pb.predict(m, X, likelihood="softmax"), ("likelihood='softmax'", "Categorical()")),
        (
            lambda m: pb.predict(m, X, output=lambda y: y.unsqueeze(0), likelihood=pb.likelihoods.Gaussian()),
            ("(1, 8, 2)", "output="),
        ),
        (lambda m: pb.Predictor(m, 0), ("draws=0", "at least 1")),
        (lambda m: pb.Predictor(m, other_draws()), ("another network",)),
        (lambda m: pb.Draws.sample(m, 0), ("draws=0", "at least 1")),
        (lambda m: pb.Draws.stratified(m, 0), ("draws=0", "at least 1")),
        (lambda m: pb.Draws.enumerate(m, limit=8), ("9 outcomes", "limit=8", "Draws.sample")),
        (lambda m: pb.forward_draws(m, X, 0), ("draws=0", "at least 1")),
        (lambda m: pb.forward_draws(m, X, other_draws()), ("another network",)),
        (lambda m: pb.use_draw(m, pb.Draws.sample(m, 2)).__enter__(), ("got 2", "draws[i]")),
        (lambda m: pb.use_draw(m, other_draws(1)).__enter__(), ("another network",)),
        (lambda m: pb.kl(m, entropy="middle"), ("entropy='middle'", '"lower" or "upper"')),
        (lambda m: pb.kl(m, entropy="lower"), ("sigma is 0", "entropy=None")),
        (lambda m: pb.objective.maximize_prior_(m), ("fixed precisions", "LearnedPrior(model)")),
    ],
)
def test_a_patched_network_is_left_as_it_was(action, texts):
    model = patched()
    model(X)
    refuses(model.train(), action, *texts)
    refuses(model.eval(), action, *texts)


def test_a_network_that_fails_during_prediction_comes_back_as_it_was():
    model = patched(pb.EMP(3, statistics="per_component"))
    model(X)
    model[1].eval()
    before = snapshot(model)
    with pytest.raises(RuntimeError):
        pb.predict(model, [X, torch.zeros(2, 99)], 3)
    assert_same(before, model)


def test_an_ordinary_network_predicts_with_one_exact_pass_and_stays_as_it_was():
    model = network()
    before = snapshot(model)
    prediction = pb.predict(model, X)
    assert_same(before, model)
    with torch.no_grad():
        torch.testing.assert_close(prediction.probs, model.eval()(X).softmax(-1))
    assert prediction.num_draws == 1
    assert not prediction.standard_error.any()


def test_draws_of_a_network_with_other_sites_components_or_noise_do_not_fit():
    model = patched(pb.EMP(3))
    for method, sites in (
        (pb.EMP(2), "norm+output"),
        (pb.ECMP(3), "norm+output"),
        (pb.EMP(3), "norm"),
        (pb.EMP(3, sigma=0.1), "norm+output"),
    ):
        other = network()
        pb.patch_(other, method, sites)
        refuses(model, lambda m, other=other: pb.predict(m, X, pb.Draws.sample(other, 2)), "another", kind=WrongDraws)
    for same in (patched(pb.EMP(3, jitter=0.7)), patched(pb.EMP(3, probabilities=(0.5, 0.3, 0.2)))):
        assert pb.predict(model, X, pb.Draws.sample(same, 2)).num_draws == 2


def test_targets_of_the_wrong_shape_or_kind():
    outputs = pb.forward_draws(patched(), X, 2)
    for targets, texts in (
        (torch.zeros(8), ("class numbers as targets", "float32")),
        (torch.zeros(3, dtype=torch.long), ("(2, 8, 2)", "(3,)")),
    ):
        with pytest.raises(PatchbayesError) as error:
            pb.objective.negative_elbo(outputs, targets, 0.0, num_data=8)
        assert all(text in str(error.value) for text in texts)
    for num_data in (0, -1, 2.5):
        with pytest.raises(PatchbayesError, match=r"num_data"):
            pb.objective.negative_elbo(outputs, torch.zeros(8, dtype=torch.long), 0.0, num_data=num_data)
