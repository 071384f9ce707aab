"""The estimators for scikit-learn: its own checks, pipelines and searches, frames, weights, and what each parameter does."""

import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import patchbayes as pb

sklearn = pytest.importorskip("sklearn", "1.6")

from sklearn.base import clone  # noqa: E402
from sklearn.datasets import load_diabetes, load_iris, make_friedman1  # noqa: E402
from sklearn.model_selection import GridSearchCV, cross_val_score  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.utils import estimator_checks  # noqa: E402

from patchbayes.integrations.sklearn import PatchBayesClassifier, PatchBayesRegressor  # noqa: E402

IRIS = load_iris(return_X_y=True)
BOTH = {"classifier": PatchBayesClassifier, "regressor": PatchBayesRegressor}


def small(name: str = "classifier", **settings):
    return BOTH[name](**{"max_iter": 20, "hidden": (16,), "draws": 6, "random_state": 0, **settings})


def numbers(rows: int = 120):
    return make_friedman1(rows, n_features=5, noise=0.5, random_state=0)


@pytest.fixture(scope="module")
def classifier():
    return small(max_iter=60, learning_rate=0.02).fit(*IRIS)


@pytest.fixture(scope="module")
def regressor():
    return small("regressor", max_iter=80, learning_rate=0.02).fit(*numbers(300))


@pytest.fixture(scope="module")
def after_five():
    return small(max_iter=5).fit(*IRIS).predict_proba(IRIS[0])


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [PatchBayesClassifier(), PatchBayesRegressor()], ids=BOTH)
def test_every_check_of_scikit_learn_passes(estimator):
    """None is expected to fail, and none is skipped but for what an estimator does not offer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = estimator_checks.check_estimator(estimator, on_fail=None, on_skip=None)
    wrong = [(one["check_name"], one["exception"]) for one in found if one["status"] not in ("passed", "skipped")]
    assert wrong == []
    assert sum(one["status"] == "passed" for one in found) > 40


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    "check",
    [
        "check_estimators_pickle",
        "check_sample_weight_equivalence_on_dense_data",
        "check_methods_subset_invariance",
        "check_no_attributes_set_in_init",
        "check_fit2d_1sample",
        "check_dict_unchanged",
    ],
)
def test_checks_that_are_easily_broken(name, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        getattr(estimator_checks, check)(type(small(name)).__name__, small(name, max_iter=2, draws=2))


def test_a_classifier_learns_and_its_probabilities_are_those_of_the_predictor(classifier):
    X, y = IRIS
    probs = classifier.predict_proba(X)
    assert classifier.score(X, y) > 0.93
    np.testing.assert_allclose(probs.sum(1), 1, rtol=0, atol=1e-12)
    expected = pb.predict(classifier.network_, torch.tensor(X), classifier.predictor_.draws).probs
    np.testing.assert_allclose(probs, expected.numpy(), atol=1e-9)
    assert (classifier.predict(X) == classifier.classes_[probs.argmax(1)]).all()
    assert set(pb.patched_sites(classifier.network_)) == {"norm0", "norm1", "output"}
    assert [site.method.per_example for site in pb.patched_sites(classifier.network_).values()] == [True, True, False]


def test_labels_may_be_texts_and_frames_have_names(classifier):
    pandas = pytest.importorskip("pandas")
    X, y = IRIS
    frame = pandas.DataFrame(X, columns=["a", "b", "c", "d"])
    names = pandas.Series(np.array(["setosa", "versicolor", "virginica"])[y])
    found = small(max_iter=60, learning_rate=0.02).fit(frame, names)
    assert list(found.classes_) == ["setosa", "versicolor", "virginica"]
    assert list(found.feature_names_in_) == ["a", "b", "c", "d"]
    np.testing.assert_allclose(found.predict_proba(frame), classifier.predict_proba(X), rtol=1e-9)
    with pytest.raises(ValueError, match="feature names"):
        found.predict(frame[["b", "a", "c", "d"]])


def test_a_regressor_says_how_sure_it_is_in_the_units_of_the_target(regressor):
    X, y = numbers(300)
    assert regressor.score(X, y) > 0.8
    mean, deviation = regressor.predict(X, return_std=True)
    np.testing.assert_array_equal(mean, regressor.predict(X))
    assert mean.shape == deviation.shape == (300,)
    inside, wide = regressor.predict_interval(X, 0.5), regressor.predict_interval(X, 0.95)
    assert inside.shape == (300, 2)
    assert (wide[:, 0] < inside[:, 0]).all()
    assert (inside[:, 1] < wide[:, 1]).all()
    covered = ((wide[:, 0] <= y) & (y <= wide[:, 1])).mean()
    assert 0.85 < covered <= 1
    prediction = pb.predict(regressor.network_, torch.tensor(X), regressor.predictor_.draws)
    ratio = deviation / prediction.variance.sqrt().numpy()[:, 0]
    np.testing.assert_allclose(ratio, y.std(), rtol=1e-9)
    with pytest.raises(ValueError, match="between 0 and 1"):
        regressor.predict_interval(X, 1.5)


def test_units_and_offsets_of_targets_do_not_matter():
    X, y = numbers(60)
    one, other = (
        small("regressor", max_iter=5).fit(X, targets).predict(X, return_std=True) for targets in (y, 1000 * y + 7)
    )
    np.testing.assert_allclose(other[0], 1000 * one[0] + 7, rtol=1e-6)
    np.testing.assert_allclose(other[1], 1000 * one[1], rtol=1e-6)


def test_several_targets_at_once():
    X, y = numbers(80)
    both = small("regressor", max_iter=5).fit(X, np.column_stack([y, -y]))
    mean, deviation = both.predict(X, return_std=True)
    assert mean.shape == deviation.shape == (80, 2)
    assert both.predict_interval(X[:3]).shape == (3, 2, 2)


@pytest.mark.parametrize("name", BOTH)
def test_weights_are_multiplicities_and_the_order_of_rows_does_not_matter(name):
    X, y = IRIS if name == "classifier" else numbers(60)
    weights = np.random.RandomState(0).randint(0, 3, len(y))
    order = np.random.RandomState(1).permutation(len(y))
    weighted = small(name, max_iter=5).fit(X, y, sample_weight=weights)
    repeated = small(name, max_iter=5).fit(np.repeat(X, weights, 0)[::-1], np.repeat(y, weights)[::-1])
    shuffled = small(name, max_iter=5).fit(X[order], y[order], sample_weight=weights[order].astype(float))
    for other in (repeated, shuffled):
        np.testing.assert_allclose(other.predict(X), weighted.predict(X), rtol=1e-12)
    assert not np.array_equal(
        small(name, max_iter=5).fit(X, y).network_[1].weight.detach(), weighted.network_[1].weight.detach()
    )
    with pytest.raises(ValueError, match=r"non-zero|weights are 0"):
        small(name).fit(X, y, sample_weight=np.zeros(len(y)))


@pytest.mark.parametrize("name", BOTH)
def test_partial_fit_goes_on_from_where_it_was(name):
    X, y = IRIS if name == "classifier" else numbers(150)
    order = np.random.RandomState(0).permutation(150)
    X, y = X[order], y[order]
    found = small(name, learning_rate=0.02)
    first = {"classes": [0, 1, 2]} if name == "classifier" else {}
    found.partial_fit(X[:60], y[:60], **first)
    early = found.score(X, y)
    for part in range(40):
        rows = slice(part % 3 * 50, part % 3 * 50 + 50)
        found.partial_fit(X[rows], y[rows])
    assert found.n_iter_ == 41
    assert found.score(X, y) > max(early, 0.6)
    again = pickle.loads(pickle.dumps(found))  # noqa: S301 our own bytes
    np.testing.assert_array_equal(again.partial_fit(X, y).predict(X), found.partial_fit(X, y).predict(X))


def test_fit_begins_anew_and_partial_fit_goes_on_from_it():
    X, y = IRIS
    found = small(max_iter=5).partial_fit(X, y, classes=[0, 1, 2])
    found.fit(X, y)
    np.testing.assert_array_equal(found.predict_proba(X), small(max_iter=5).fit(X, y).predict_proba(X))
    before = found.network_[1].weight.detach().clone()
    found.partial_fit(X, y)
    assert found.n_iter_ == 6
    assert not torch.equal(found.network_[1].weight, before)


def test_partial_fit_knows_its_classes():
    X, y = IRIS
    with pytest.raises(ValueError, match="first call needs classes"):
        small().partial_fit(X, y)
    found = small().partial_fit(X[:40], y[:40], classes=[0, 1, 2])
    assert found.predict_proba(X).shape == (150, 3)
    with pytest.raises(ValueError, match="not among the classes"):
        found.partial_fit(X, y + 1)
    with pytest.raises(ValueError, match="not those of the first call"):
        found.partial_fit(X, y, classes=[0, 1])


def test_states_seeds_and_the_global_state():
    X, y = IRIS
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    one, same, other = (
        small(max_iter=5, random_state=s).fit(X, y).predict_proba(X) for s in (1, 1, np.random.RandomState(2))
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    np.testing.assert_array_equal(one, same)
    assert not np.allclose(one, other)


@pytest.mark.parametrize(
    "setting",
    [
        {"hidden": (8, 8)}, {"max_iter": 6}, {"batch_size": 40}, {"learning_rate": 0.03}, {"prior_precision": 30.0},
        {"held_out": 0.3}, {"draws": 2}, {"method": pb.EMP(2)}, {"module": nn.Linear},
    ],
    ids=lambda setting: next(iter(setting)),
)  # fmt: skip
def test_every_parameter_changes_the_answer(setting, after_five):
    X, y = IRIS
    assert not np.array_equal(small(**{"max_iter": 5, **setting}).fit(X, y).predict_proba(X), after_five)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_iter": 0}, "max_iter=0"), ({"batch_size": 1}, "at least 2"), ({"learning_rate": -1}, "above 0"),
        ({"held_out": 1.0}, "from 0 to below 1"), ({"prior_precision": "a"}, "prior_precision='a'"),
        ({"draws": 2.5}, "draws=2.5"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused_when_fitting(setting, message):
    with pytest.raises(ValueError, match=message):
        small(**setting).fit(*IRIS)


def test_held_out_rows_calibrate_if_they_are_enough(classifier):
    assert classifier.calibration_.num_held_out == 22  # 15 % of each class; one row is there twice
    assert float(classifier.predictor_.likelihood.temperature) == classifier.calibration_.temperature
    few = small().fit(IRIS[0][::3], IRIS[1][::3])
    assert few.calibration_ is None


def test_a_network_of_ones_own_is_copied_and_its_patches_kept():
    X, y = IRIS
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    before = {key: value.clone() for key, value in network.state_dict().items()}
    found = small(module=network, method=pb.EMP(2)).fit(X, y)
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert not pb.is_patched(network)
    assert {site.method.label for site in pb.patched_sites(found.network_).values()} == {"EMP(K=2)"}
    assert found.predict_proba(X).dtype == np.float64
    pb.patch_(network, pb.Dropout(0.1), "linear")
    kept = small(module=network).fit(X, y)
    assert list(pb.patched_sites(kept.network_)) == ["0", "3"]
    assert clone(kept).module is not network


def test_a_network_that_says_means_alone_learns_its_noise():
    X, y = numbers(80)
    found = small("regressor", module=lambda features, outputs: nn.Linear(features, outputs // 2), held_out=0).fit(X, y)
    noise = float(pb.predict(found.network_, torch.tensor(X).float()).noise_variance[0, 0])
    assert noise != 1.0
    with pytest.raises(ValueError, match=r"1 outputs \(means\) or 2"):
        small("regressor", module=nn.Linear(5, 3)).fit(X, y)


@pytest.mark.slow
def test_pipelines_and_a_grid_search_in_two_processes():
    X, y = load_diabetes(return_X_y=True)
    search = GridSearchCV(
        make_pipeline(StandardScaler(), small("regressor")),
        {"patchbayesregressor__prior_precision": [1.0, 10.0], "patchbayesregressor__hidden": [(8,), (16,)]},
        n_jobs=2,
        cv=2,
    )
    assert search.fit(X, y).best_score_ > 0.1
    assert len(search.cv_results_["params"]) == 4
    scores = cross_val_score(small(), *IRIS, cv=3, scoring="neg_log_loss", n_jobs=2)
    assert scores.shape == (3,)
    assert (scores > -1.1).all()


@pytest.mark.slow
def test_a_patched_network_inside_skorch():
    skorch = pytest.importorskip("skorch")
    X, y = IRIS[0].astype(np.float32), IRIS[1]
    net = skorch.NeuralNetClassifier(
        patched_network,
        criterion=nn.CrossEntropyLoss,
        max_epochs=60,
        lr=0.1,
        verbose=0,
        train_split=None,
        iterator_train__shuffle=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net.fit(X, y)
    assert net.score(X, y) > 0.7
    again = pickle.loads(pickle.dumps(net))  # noqa: S301 our own bytes
    np.testing.assert_allclose(again.predict_proba(X), net.predict_proba(X), rtol=1e-5)
    assert pb.predict(net.module_, torch.tensor(X)).probs.shape == (150, 3)


def patched_network() -> nn.Module:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    pb.patch_(model, pb.ECMP(3))
    return model
