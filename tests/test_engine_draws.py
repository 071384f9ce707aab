"""Draws on their way through the engine: enumeration, heads, as many as an error needs, batches one by one."""

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError, TooManyOutcomes
from patchbayes.nets import cifar_resnet20, mlp, small_cnn
from test_engine import assert_same


def test_few_outcomes_are_enumerated_instead_of_sampled():
    model = mlp(4).double()
    pb.patch_(model, pb.EMP(5, jitter=0.5), "norm")
    x = torch.randn(6, 4, dtype=torch.float64)
    prediction = pb.predict(model, x, 10_000, likelihood=pb.likelihoods.Gaussian(0.1))
    assert prediction.num_draws == 25
    assert prediction.standard_error_kind == "exact"
    assert prediction.plan.exact
    assert not prediction.standard_error.any()
    exact = pb.predict(model, x, "exact", likelihood=pb.likelihoods.Gaussian(0.1), engine="loop")
    torch.testing.assert_close(prediction.mean, exact.mean, rtol=1e-12, atol=0)
    assert pb.predict(model, x, 24, likelihood=pb.likelihoods.Gaussian(0.1)).standard_error_kind != "exact"


def test_exact_is_refused_with_the_count_where_there_are_too_many():
    model = cifar_resnet20(7)
    pb.patch_(model, pb.EMP(5))
    with pytest.raises(TooManyOutcomes, match=r"10\^15"):
        pb.predict(model, torch.rand(1, 3, 8, 8), "exact")


# ---- heads


def test_heads_average_over_the_output_layer_exactly():
    """Every drawn trunk with all components of the head, weighted with p: by hand and by the loop on the same draws."""
    model = small_cnn(size=8).double()
    pb.patch_(model, {"norm": pb.EMP(4, jitter=0.5), "output": pb.EMP(3, jitter=0.5, probabilities=(0.5, 0.3, 0.2))})
    x = torch.rand(3, 1, 8, 8, dtype=torch.float64)
    trunk = pb.Draws.stratified(model, 8)
    crossed = trunk.with_heads("fc", 3)
    assert len(crossed) == 24
    assert crossed.heads == 3
    groups = trunk.layout.num_groups
    head = crossed.head_groups.start
    assert len(crossed.head_groups) == 1
    rows = crossed.assignments()
    assert rows[:, head].tolist() == [0, 1, 2] * 8
    rest = [g for g in range(groups) if g != head]
    assert torch.equal(rows[:, rest], trunk.assignments()[:, rest].repeat_interleave(3, 0))
    torch.testing.assert_close(crossed.weights, torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).repeat(8) / 8)
    assert_same(pb.predict(model, x, crossed, engine="graph"), pb.predict(model, x, crossed, engine="loop"), 1e-10)


def test_heads_are_unbiased_by_enumeration():
    """Averaged over all trunks, draws with heads give the exact predictive."""
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 2)).double()
    pb.patch_(model, pb.EMP(3, jitter=1.0))
    x = torch.randn(4, 2, dtype=torch.float64)
    exact = pb.predict(model, x, "exact").probs
    block = pb.predict(model, x, pb.Draws.stratified(model, 3).with_heads("2", 3))
    torch.testing.assert_close(block.probs, exact, rtol=1e-12, atol=1e-14)


def test_a_cheap_head_is_marginalized_by_itself_and_counted():
    model = cifar_resnet20(7)
    pb.patch_(model, pb.EMP(5))
    prediction = pb.predict(model, torch.rand(2, 3, 16, 16), 10, engine="graph")
    assert prediction.plan.heads == 5
    assert prediction.num_draws == len(prediction.draws) == 50
    assert "10 stratified, each with 5 heads" in str(prediction.plan)
    assert prediction.standard_error_kind == "upper estimate"  # two blocks tell no spread
    loop = pb.predict(model, torch.rand(2, 3, 16, 16), 10, engine="loop")
    assert loop.num_draws == 10


def test_heads_do_not_depend_on_what_was_predicted_before():
    """Whether heads are averaged over follows from the call: also where another call has captured the network."""
    model, x = cifar_resnet20(7), torch.rand(2, 3, 16, 16)
    pb.patch_(model, pb.EMP(5))
    first = pb.predict(model, x, 10)
    pb.predict(model, x, 10, engine="graph")
    again = pb.predict(model, x, 10)
    assert first.plan.engine == "loop"
    assert again.plan.engine == "graph"
    assert first.num_draws == again.num_draws == 10
    torch.testing.assert_close(first.probs, again.probs, rtol=1e-4, atol=1e-6)


def test_a_head_of_many_elements_is_marginalized_only_beside_much_work():
    model = cifar_resnet20(7)
    pb.patch_(model, pb.ECMP(5))
    assert pb.predict(model, torch.rand(1, 3, 8, 8), 10, engine="graph").plan.heads == 1
    assert pb.predict(model, torch.rand(8, 3, 32, 32), 10, engine="graph").plan.heads > 1


def test_element_wise_heads_share_their_trunk():
    model = small_cnn(size=8)
    pb.patch_(model, pb.ECMP(3, jitter=0.5))
    draws = pb.Draws.stratified(model, 6).with_heads("fc", 4)
    rows, groups = draws.assignments(), draws.head_groups
    trunk = [g for g in range(draws.layout.num_groups) if g not in groups]
    assert torch.equal(rows[0::4][:, trunk], rows[3::4][:, trunk])
    assert not torch.equal(rows[0::4][:, list(groups)], rows[3::4][:, list(groups)])
    x = torch.rand(2, 1, 8, 8)
    assert_same(pb.predict(model, x, draws, engine="graph"), pb.predict(model, x, draws, engine="loop"), 1e-5)
    with pytest.raises(PatchbayesError, match="once"):
        draws.with_heads("fc", 2)


@pytest.mark.parametrize("head", [pb.EMP(4, jitter=0.5), pb.ECMP(4, jitter=0.5)])
def test_heads_share_the_masks_of_their_trunk(head):
    """MC dropout has no components, so its place among them is that of the output layer: heads must not be told apart there."""
    model = small_cnn(size=8).double()
    pb.patch_(model, {"norm": pb.Dropout(0.3), "output": head})
    x = torch.rand(3, 1, 8, 8, dtype=torch.float64)
    draws = pb.Draws.stratified(model, 6).with_heads("fc", 4)
    prediction = pb.predict(model, x, draws, engine="graph")
    masked = [stage for stage in prediction.plan.stages if stage.sites and "fc" not in stage.sites]
    assert masked
    assert {stage.distinct for stage in masked} == {6}
    assert_same(prediction, pb.predict(model, x, draws, engine="loop"), 1e-10)


def test_heads_survive_slicing_and_saving(tmp_path):
    model = small_cnn(size=8)
    pb.patch_(model, pb.EMP(3))
    draws = pb.Draws.stratified(model, 6).with_heads("fc", 3)
    draws.save(tmp_path / "draws.json")
    loaded = pb.Draws.load(tmp_path / "draws.json", model)
    assert torch.equal(loaded.assignments(), draws.assignments())
    assert torch.equal(loaded.weights, draws.weights)
    assert torch.equal(draws[4:11].assignments(), draws.assignments()[4:11])


# ---- as many draws as an error needs


def test_inputs_that_are_sure_stop_early_and_the_error_is_within_the_tolerance():
    model = small_cnn(size=8).double()
    pb.patch_(model, pb.EMP(5, jitter=0.7))
    x = torch.cat([torch.rand(6, 1, 8, 8), 1e-3 * torch.rand(6, 1, 8, 8)]).double()
    exact = pb.predict(model, x, "exact").probs
    top = exact.argmax(1, keepdim=True)
    errors, used = [], []
    tolerance = 0.006
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        prediction = pb.predict(model, x, "auto", tolerance=tolerance, sampling="iid", generator=generator)
        errors.append((prediction.probs - exact).gather(1, top).squeeze(1))
        used.append(prediction.draws_used)
        sure = prediction.draws_used < prediction.num_draws
        se = prediction.standard_error.gather(1, prediction.probs.argmax(1, keepdim=True)).squeeze(1)
        assert (se[sure] <= tolerance).all()
    used = torch.stack(used)
    assert used.min() < used.max()
    reached = (used < prediction.num_draws).double()
    squares = torch.stack(errors).square()
    assert float(((squares * reached).sum() / reached.sum()).sqrt()) < 1.25 * tolerance


def test_tolerance_changes_the_work_and_fits_regression_too():
    model = mlp(3, hidden=(8, 8)).double()
    pb.patch_(model, pb.ECMP(5, jitter=0.5), "norm")
    x = torch.randn(5, 3, dtype=torch.float64)
    options = {"likelihood": pb.likelihoods.Gaussian(4.0), "sampling": "iid"}
    loose = pb.predict(model, x, "auto", tolerance=0.2, **options)
    tight = pb.predict(model, x, "auto", tolerance=0.015, **options)
    usual = pb.predict(model, x, "auto", **options)
    assert loose.draws_used.max() < tight.draws_used.max() <= usual.draws_used.max() <= 400
    assert (loose.standard_error <= 0.2 * loose.variance.sqrt()).all()
    full = pb.predict(
        model, x, pb.Draws.sample(model, int(tight.draws_used[0])), likelihood=pb.likelihoods.Gaussian(4.0)
    )
    torch.testing.assert_close(tight.mean[0], full.mean[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(tight.epistemic_covariance[0], full.epistemic_covariance[0], rtol=1e-7, atol=1e-9)
    with pytest.raises(PatchbayesError, match="above 0"):
        pb.predict(model, x, "auto", tolerance=0.0, **options)
    with pytest.raises(PatchbayesError, match='for draws="auto"'):
        pb.predict(model, x, 20, tolerance=0.1, **options)
    with pytest.raises(PatchbayesError, match="keep_draws"):
        pb.predict(model, x, "auto", keep_draws=True, **options)


def test_few_networks_are_enumerated_instead_of_drawn_until_sure():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    pb.patch_(model, pb.EMP(5, jitter=0.5))
    prediction = pb.predict(model, torch.randn(6, 3), "auto")
    assert prediction.plan.exact
    assert prediction.num_draws == 25


# ---- streaming, sampling, limits


def test_batches_stream_one_by_one_and_leave_the_network_usable_between_them():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    pb.patch_(model, pb.EMP(3))
    x = torch.rand(10, 1, 8, 8)
    taken = []

    def loader():
        for batch in x.split(4):
            taken.append(len(batch))
            yield batch

    stream = pb.prediction.predict_batches(model, loader(), 6, likelihood=pb.likelihoods.Categorical())
    assert taken == []
    first = next(stream)
    assert taken == [4]
    assert model.training
    model(x).sum().backward()
    rest = list(stream)
    assert [len(part) for part in (first, *rest)] == [4, 4, 2]
    joined = type(first).concatenate([first, *rest])
    torch.testing.assert_close(joined.probs, pb.predict(model, loader(), 6).probs)
    assert not joined.probs.is_inference()


def test_stratified_draws_are_the_default_and_iid_is_the_papers():
    model = small_cnn(size=8)
    pb.patch_(model, pb.ECMP(3))
    x = torch.rand(2, 1, 8, 8)
    assert pb.predict(model, x, 6).draws.schemes == {"stratified"}
    iid = pb.predict(model, x, 6, sampling="iid", engine="loop")
    torch.testing.assert_close(iid.probs, pb.predict(model, x, pb.Draws.sample(model, 6), engine="loop").probs)
    with pytest.raises(PatchbayesError, match="sampling"):
        pb.predict(model, x, 6, sampling="sobol")
    with pytest.raises(PatchbayesError, match="engine"):
        pb.predict(model, x, 6, engine="warp")


def test_thread_counts_do_not_matter():
    model = small_cnn(size=8).double()
    pb.patch_(model, pb.ECMP(3))
    x = torch.rand(3, 1, 8, 8, dtype=torch.float64)
    draws = pb.Draws.stratified(model, 9)
    one = pb.predict(model, x, draws)
    torch.set_num_threads(2)
    try:
        assert_same(pb.predict(model, x, draws), one, 1e-10)
    finally:
        torch.set_num_threads(1)
