"""A patched network travels between processes: pickled in memory, for spawn, loky, joblib and DDP. Files stay safetensors."""

import copy
import multiprocessing
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import patchbayes as pb
from outside_posteriors import LearnedLaw
from patchbayes.nets import mlp
from patchbayes.patching.network import network_of
from test_family import METHODS
from zoo import ZOO, assert_same, snapshot

OURS = {name: method for name, (method, _) in METHODS.items()} | {
    "EMP": pb.EMP(3),
    "Ensemble": pb.Ensemble(3),
    "MeanField": pb.posteriors.MeanField(),
    "Dropout": pb.Dropout(0.2),
    "LearnedLaw": LearnedLaw(3, jitter=0.5),
}
X = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 2, 0, 1, 2])


def travelled(thing):
    return pickle.loads(pickle.dumps(thing))  # noqa: S301 our own bytes


def patched(method=None, sites="norm+output") -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = mlp(5, (7,), 3)
    pb.patch_(model, method or pb.ECMP(3, jitter=0.5), sites)
    return model


def tempered(temperature: float) -> pb.likelihoods.Categorical:
    likelihood = pb.likelihoods.Categorical()
    likelihood.set_temperature_(temperature)
    return likelihood


def step(model: nn.Module) -> list[torch.Tensor]:
    """One step of training, and what the parameters are after it."""
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    optimizer.zero_grad()
    (F.cross_entropy(model(X), Y) + pb.kl(model) / 100).backward()
    optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def in_part(names, fast):
    """All names, those that are not in `fast` marked slow."""
    return [pytest.param(name, marks=[] if name in fast else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", in_part(ZOO, ("mlp", "lstm", "transformer", "tied")))
def test_networks_of_many_kinds_arrive_whole_and_independent(name):
    entry = ZOO[name]
    plain, inputs = entry.build(), entry.inputs()
    model = copy.deepcopy(plain)
    pb.patch_(model, pb.ECMP(3, jitter=0.3), entry.sites)
    other = travelled(model)
    assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
    assert torch.equal(entry.predict(other, inputs).probs, entry.predict(model, inputs).probs)
    first, second = (entry.logits(network.train(), inputs) for network in (model, other))
    assert torch.equal(first, second)  # the generator came along
    before = entry.predict(model, inputs).probs
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    assert torch.equal(entry.predict(model, inputs).probs, before)
    pb.unpatch_(model)
    again = travelled(model)
    pb.patch_(again, pb.ECMP(3), entry.sites)  # nothing of the first patch is left in it
    pb.unpatch_(again)
    assert_same(snapshot(model), again)


@pytest.mark.parametrize("name", in_part(OURS, ("EMP", "MeanField", "Flow", "LearnedLaw")))
def test_every_posterior_goes_on_training_to_the_same_bits(name):
    model = patched(OURS[name], "linear")
    step(model)
    other = travelled(model)
    for mine, theirs in zip(step(model), step(other), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(pb.predict(model, X).probs, pb.predict(other, X).probs)


def test_record_prior_likelihood_and_tied_tensors_come_along():
    model = patched()
    pb.patch_(model, pb.EMP(2), "hidden1", prior=pb.prior.Prior(3.0, 2.0), likelihood=tempered(1.7))
    pb.set_eval_(model, "error")
    model.train()(X)
    other = network_of(travelled(model))
    mine = network_of(model)
    assert other.prior.config() == mine.prior.config() == pb.prior.Prior(3.0, 2.0).config()
    assert other.likelihood.temperature == 1.7
    assert other.eval == "error"
    assert torch.equal(other.generator, mine.generator)
    assert [site.name for site in other.sites] == ["norm0", "hidden1", "norm1", "output"]
    tied = ZOO["tied"].build()
    pb.patch_(tied, pb.ECMP(3, jitter=0.4), "output")
    tied = travelled(tied)
    assert torch.equal(tied.embedding.weight, tied.decoder.weight)
    with torch.no_grad():
        pb.patched_sites(tied)["decoder"].components("weight").zero_()
    assert not tied.embedding.weight.any()


def test_a_part_and_an_optimizer_with_its_network_stay_together():
    model = patched()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = travelled((model, optimizer))
    before = pb.predict(model, X).probs
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    assert not torch.equal(pb.predict(model, X).probs, before)
    held = travelled(nn.ModuleDict({"inner": patched()}))
    assert pb.is_patched(held)


def test_a_copy_of_a_copy_of_a_recurrent_network():
    entry = ZOO["lstm"]
    model = entry.build()
    pb.patch_(model, pb.ECMP(3), entry.sites)
    again = copy.deepcopy(travelled(copy.deepcopy(model)))
    assert torch.equal(entry.predict(again, entry.inputs()).probs, entry.predict(model, entry.inputs()).probs)
    pb.unpatch_(again)
    assert copy.deepcopy(again).lstm(torch.zeros(1, 2, 6))[0].shape == (1, 2, 10)


def test_a_draw_that_is_held_stays_behind():
    model = patched().eval()
    with pb.use_draw(model):
        other = travelled(model)
        held = model(X)
    assert torch.equal(other(X), model(X))  # the mean network
    assert not torch.equal(other(X), held)


def test_a_predictor_answers_the_same_elsewhere():
    model = patched()
    predictor = pb.Predictor(model, 7, likelihood=tempered(2.0))
    answer = predictor(X)  # by now it keeps weights and a lock
    other = travelled(predictor)
    assert torch.equal(other(X), answer)
    assert torch.equal(other.draws.weights, predictor.draws.weights)


def test_unpatching_what_arrived_leaves_an_ordinary_network():
    plain = ZOO["mlp"].build()
    before = snapshot(plain)
    pb.patch_(plain, pb.ECMP(3))
    other = travelled(plain)
    pb.unpatch_(other)
    assert_same(before, other)
    assert type(other) is nn.Sequential


class WithItsOwnReduce(nn.Linear):
    """As networks that make their class anew when they are unpickled, such as graph modules of torch.fx."""

    def __reduce__(self):
        return _remake, (self.in_features, self.out_features), self.__dict__


def _remake(*sizes):
    return WithItsOwnReduce(*sizes)


def test_a_class_that_says_itself_how_it_travels_is_asked():
    model = nn.Sequential(WithItsOwnReduce(5, 3))
    pb.patch_(model, pb.EMP(3, jitter=0.5), "all")
    other = travelled(model)
    assert isinstance(other[0], WithItsOwnReduce)
    assert torch.equal(pb.predict(other, X).probs, pb.predict(model, X).probs)


def in_another_process(model: nn.Module, predictor: pb.Predictor, inputs: torch.Tensor):
    """What a spawned worker answers: the averaged prediction, the predictor's, and a training step's parameters."""
    return pb.predict(model, inputs).probs.numpy(), predictor(inputs).numpy(), [p.numpy() for p in step(model)]


def test_a_spawned_process_answers_and_trains_the_same():
    model = patched()
    predictor = pb.Predictor(patched(pb.EMP(3, jitter=0.5)), 6)
    expected = in_another_process(*copy.deepcopy((model, predictor)), X)
    with multiprocessing.get_context("spawn").Pool(
        1
    ) as pool:  # torch lets a worker share the tensors, as with any network
        found = pool.apply_async(in_another_process, (model, predictor, X)).get(timeout=240)
    for mine, theirs in zip(expected[2], found[2], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(expected[:2], found[:2], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_joblib_sends_networks_to_loky_and_gets_trained_ones_back():
    joblib = pytest.importorskip("joblib")
    models = [patched(pb.ECMP(k, jitter=0.5)) for k in (2, 3)]
    run = joblib.Parallel(n_jobs=2, backend="loky", timeout=240)
    trained = run(joblib.delayed(trained_elsewhere)(model) for model in models)
    for model, other in zip(models, trained, strict=True):
        step(model)
        torch.testing.assert_close(pb.predict(other, X).probs, pb.predict(model, X).probs)


def trained_elsewhere(model: nn.Module) -> nn.Module:
    step(model)
    model.zero_grad()
    return model


def halve(model: nn.Module) -> None:
    with torch.no_grad():
        pb.patched_sites(model)["output"].components("bias").mul_(0.5)


@pytest.mark.slow
def test_shared_memory_is_shared():
    """As several workers train one network (torch.multiprocessing): the tensors are the same, not copies."""
    model = patched().share_memory()
    before = pb.patched_sites(model)["output"].components("bias").detach().clone()
    process = torch.multiprocessing.get_context("spawn").Process(target=halve, args=(model,))
    process.start()
    process.join(240)
    assert process.exitcode == 0
    assert torch.equal(pb.patched_sites(model)["output"].components("bias"), before / 2)
