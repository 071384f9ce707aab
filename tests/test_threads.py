"""Several threads at once, on one network or each on its own: every answer is the one that a single thread gets."""

import copy
import gc
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import patchbayes as pb
from patchbayes.patching.network import network_of
from patchbayes.posteriors.learned_sigma import GaussianMixture

THREADS, ROUNDS = 8, 6


class Recurrent(nn.Module):
    """An LSTM keeps its weights in a list of its own, which a patch must not fill for all threads."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.norm, self.fc = nn.LSTM(4, 6, batch_first=True), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.lstm(x)[0][:, -1]))


def recurrent() -> nn.Module:
    model = Recurrent()
    pb.patch_(model, pb.ECMP(3, jitter=1.0), "all")
    return model


def own_statistics() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    pb.patch_(model, pb.EMP(5, jitter=1.0, statistics="per_component"))
    with torch.no_grad():
        for _ in range(20):
            model(torch.randn(8, 4) + 2)
    return model


def with_noise() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))
    pb.patch_(model, {"norm": pb.ECMP(2, sigma=0.5), "0": pb.Dropout(0.4), "output": pb.posteriors.MeanField(1.0)})
    return model


NETWORKS = {"LSTM": recurrent, "own statistics": own_statistics, "noise and masks": with_noise}


@pytest.fixture(params=NETWORKS)
def model(request) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[request.param]().eval()


@pytest.fixture(autouse=True)
def _switch_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def inputs(model: nn.Module, seed: int) -> Tensor:
    shape = (5, 7, 4) if isinstance(model, Recurrent) else (5, 4)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def together(tasks: list[Callable[[], Any]]) -> list[Any]:
    """The results of tasks that start at the same moment, each in a thread of its own."""
    barrier = threading.Barrier(len(tasks))

    def run(task: Callable[[], Any]) -> Any:
        barrier.wait()
        return task()

    with ThreadPoolExecutor(len(tasks)) as pool:
        return [future.result() for future in [pool.submit(run, task) for task in tasks]]


def mean_of(model: nn.Module, x: Tensor) -> Tensor:
    clone = copy.deepcopy(model)
    pb.unpatch_(clone, keep="mean")
    return clone.eval()(x)


def draws_of(model: nn.Module, seed: int, number: int = 3) -> pb.Draws:
    return pb.Draws.sample(model, number, torch.Generator().manual_seed(seed))


def ask_predict(model: nn.Module, seed: int) -> Tensor:
    return pb.predict(model, inputs(model, seed), draws_of(model, seed), engine="loop").probs


def ask_use_draw(model: nn.Module, seed: int) -> Tensor:
    found = []
    with torch.no_grad():
        for one in draws_of(model, seed):
            with pb.use_draw(model, one):
                first = model(inputs(model, seed))
                found += [first, model(inputs(model, seed)) - first]  # the draw is held
    return torch.stack(found)


def ask_forward_draws(model: nn.Module, seed: int) -> Tensor:
    """Outputs, and the gradient of their sum of squares with respect to the input."""
    x = inputs(model, seed).requires_grad_()
    outputs = pb.forward_draws(model, x, draws_of(model, seed))
    (gradient,) = torch.autograd.grad(outputs.square().sum(), x)
    return torch.cat([outputs.detach().flatten(), gradient.flatten()])


def ask_mean(model: nn.Module, seed: int) -> Tensor:
    with torch.no_grad():
        return model(inputs(model, seed))


def ask_nested(model: nn.Module, seed: int) -> Tensor:
    """A prediction inside a block that holds a draw; afterwards the block's draw is back."""
    with torch.no_grad(), pb.use_draw(model, draws_of(model, seed)[0]):
        before = model(inputs(model, seed))
        pb.forward_draws(model, inputs(model, seed), draws_of(model, seed + 1))
        return torch.stack([before, model(inputs(model, seed))])


QUESTIONS = {
    "predict": ask_predict,
    "use_draw": ask_use_draw,
    "forward_draws": ask_forward_draws,
    "eval mode": ask_mean,
    "nested": ask_nested,
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_threads_on_one_network_get_the_answers_of_a_single_thread(model, question):
    ask = QUESTIONS[question]
    expected = [ask(model, seed) for seed in range(THREADS)]
    assert len({tuple(answer.flatten().tolist()) for answer in expected}) == THREADS
    for _ in range(ROUNDS):
        answers = together([lambda seed=seed: ask(model, seed) for seed in range(THREADS)])
        for answer, wanted in zip(answers, expected, strict=True):
            assert torch.equal(answer, wanted)


def test_threads_that_ask_different_things_of_one_network(model):
    asked = [(name, seed) for seed, name in enumerate([*QUESTIONS, "predict", "eval mode", "use_draw"])]
    assert len(asked) == THREADS
    expected = [QUESTIONS[name](model, seed) for name, seed in asked]
    for _ in range(ROUNDS):
        answers = together([lambda name=name, seed=seed: QUESTIONS[name](model, seed) for name, seed in asked])
        for (name, _), answer, wanted in zip(asked, answers, expected, strict=True):
            assert torch.equal(answer, wanted), name


@pytest.mark.parametrize("question", QUESTIONS)
def test_threads_with_a_network_each(model, question):
    ask, models = QUESTIONS[question], [copy.deepcopy(model) for _ in range(THREADS)]
    expected = [ask(model, seed) for seed in range(THREADS)]
    for _ in range(2):
        answers = together([lambda m=m, seed=seed: ask(m, seed) for seed, m in enumerate(models)])
        for answer, wanted in zip(answers, expected, strict=True):
            assert torch.equal(answer, wanted)


def test_a_call_in_eval_mode_is_the_mean_network_while_others_hold_draws(model):
    x = inputs(model, 0)
    expected = mean_of(model, x)
    holding = [lambda seed=seed: ask_use_draw(model, seed) for seed in range(THREADS - 1)]
    for _ in range(ROUNDS):
        *_, answer = together([*holding, lambda: ask_mean(model, 0)])
        assert torch.equal(answer, expected)


def test_attributes_of_a_patched_layer_are_those_of_the_threads_own_draw(model):
    """`module.weight` outside a forward call: the held draw of this thread, the mean in another."""
    draws = draws_of(model, 0, 1)
    name, site = next(
        (n, s) for n, s in pb.patched_sites(model).items() if s.posterior.names and s.posterior.groups() is not None
    )
    module, parameter = model.get_submodule(name), site.posterior.names[0]
    with torch.no_grad():
        outside = getattr(module, parameter).clone()
        with pb.use_draw(model, draws):
            inside = getattr(module, parameter).clone()
            (elsewhere,) = together([lambda: getattr(module, parameter).clone()])
    assert torch.equal(elsewhere, outside)
    assert not torch.equal(inside, outside)


def train(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for step in range(steps):
        x = inputs(model, 100 + step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model.train()(x), torch.arange(len(x)) % 3) + pb.kl(model) / 1000
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_is_not_disturbed_by_prediction_on_other_networks(model):
    """Seven threads predict with copies while the eighth trains: nothing is shared but the classes and this process."""
    alone, trained = copy.deepcopy(model), copy.deepcopy(model)
    expected = train(alone, 12)
    others = [copy.deepcopy(model) for _ in range(THREADS - 1)]
    tasks = [lambda m=m, seed=seed: [ask_predict(m, seed) for _ in range(4)] for seed, m in enumerate(others)]
    losses, *answers = together([lambda: train(trained, 12), *tasks])
    assert losses == expected
    for (key, one), other in zip(alone.state_dict().items(), trained.state_dict().values(), strict=True):
        assert torch.equal(one, other), key
    for seed, several in enumerate(answers):
        assert all(torch.equal(answer, ask_predict(model, seed)) for answer in several)


def test_prediction_beside_training_of_one_network():
    """Parameters move under the prediction, so its numbers are those of some step; the training must not notice.

    The network has no mode or buffer that a prediction would have to change: LayerNorm, and nothing is updated in a pass.
    """
    torch.manual_seed(0)
    model = recurrent()
    alone = copy.deepcopy(model)
    weights = [torch.randn(5, 3, generator=torch.Generator().manual_seed(s)) for s in range(12)]

    def losses(network: nn.Module) -> list[Tensor]:
        found = []
        for step, weight in enumerate(weights):
            network.zero_grad()
            (network(inputs(network, step)) * weight).sum().backward()  # the network's own draws, in order
            found.append(torch.cat([p.grad.flatten() for p in network.parameters()]))
        return found

    draws = [draws_of(model, seed) for seed in range(THREADS - 1)]
    expected = losses(alone)
    answers = [pb.forward_draws(alone, inputs(model, s), d).detach() for s, d in enumerate(draws)]

    def ask(seed: int) -> list[Tensor]:
        with torch.no_grad():
            return [pb.forward_draws(model, inputs(model, seed), draws[seed]) for _ in range(6)]

    gradients, *found = together([lambda: losses(model), *(lambda s=s: ask(s) for s in range(THREADS - 1))])
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))
    for several, wanted in zip(found, answers, strict=True):
        assert all(torch.equal(answer, wanted) for answer in several)


@pytest.mark.parametrize("engine", ["loop", "auto"])
def test_threads_predict_with_a_network_in_training_mode_which_stays_so(model, engine):
    expected = [ask_predict(model, seed) for seed in range(THREADS)]
    modules = list(model.train().modules())
    before = {key: value.clone() for key, value in model.state_dict().items()}

    def ask(seed: int) -> Tensor:
        return pb.predict(model, inputs(model, seed), draws_of(model, seed), engine=engine).probs

    for _ in range(2):
        for answer, wanted in zip(together([lambda s=s: ask(s) for s in range(THREADS)]), expected, strict=True):
            torch.testing.assert_close(answer, wanted, rtol=0 if engine == "loop" else 1e-5, atol=1e-6)
        assert all(module.training for module in modules)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("loader", [False, True], ids=["one batch", "a list of batches"])
def test_training_of_a_batch_norm_network_does_not_notice_predictions_with_it(loader):
    """Running statistics, the mode and the own draws of the trained network are those of training alone."""
    torch.manual_seed(0)
    model = own_statistics()
    alone = copy.deepcopy(model)
    expected = train(alone, 15)
    stop = threading.Event()

    def keep_asking(seed: int) -> int:
        x, number = inputs(model, seed), 0
        while not stop.is_set():
            pb.predict(model, [x, x] if loader else x, draws_of(model, seed), engine="loop")
            number += 1
        return number

    def train_and_stop() -> list[float]:
        try:
            return train(model, 15)
        finally:
            stop.set()

    losses, *asked = together([train_and_stop, *(lambda s=s: keep_asking(s) for s in range(3))])
    assert sum(asked) >= 3
    assert losses == expected
    for (key, one), other in zip(alone.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(one, other), key


def test_threads_that_draw_from_one_networks_generator_never_draw_the_same():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    pb.patch_(model, pb.posteriors.MeanField(1.0), "all")
    alone = copy.deepcopy(model)
    x = torch.ones(1, 4)
    number = 25

    def outputs(network: nn.Module) -> list[tuple[float, ...]]:
        with torch.no_grad():
            return [tuple(network(x)[0].tolist()) for _ in range(number)]

    several = together([lambda: outputs(model)] * THREADS)
    found = [output for one in several for output in one]
    assert int(network_of(model).generator[1]) == THREADS * number
    assert len(set(found)) == THREADS * number
    in_order = [output for _ in range(THREADS) for output in outputs(alone)]
    assert sorted(found) == sorted(in_order)


def test_a_thread_that_fails_leaves_no_draw_behind(model):
    x, expected = inputs(model, 0), mean_of(model, inputs(model, 0))

    def fail() -> None:
        with pb.use_draw(model, draws_of(model, 1)[0]):
            model(x.new_zeros(2, 99, 99))

    def try_and_ask() -> Tensor:
        with pytest.raises((RuntimeError, ValueError)):
            fail()
        return ask_mean(model, 0)

    for answer in together([try_and_ask] * THREADS):
        assert torch.equal(answer, expected)


def test_the_draw_of_an_estimated_kl_is_that_of_the_threads_own_forward():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    pb.patch_(model, GaussianMixture(3), "linear")
    assert any(site.posterior.kl_draws for site in pb.patched_sites(model).values())
    model(inputs(model, 0))
    before = pb.kl(model)
    (other,) = together([lambda: (ask_forward_draws(model, 5), pb.kl(model))[1]])
    assert torch.equal(pb.kl(model), before)
    assert not torch.equal(other, before)


def test_blocks_that_end_in_another_order_than_they_began_leave_no_draw_behind():
    model = nn.Sequential(nn.Linear(3, 2))
    pb.patch_(model, pb.EMP(3), "linear")
    draws, network = draws_of(model, 1, 2), network_of(model)
    first, second = pb.use_draw(model, draws[0]), pb.use_draw(model, draws[1])
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert torch.equal(network.held.key, draws[1].keys()[0])
    second.__exit__(None, None, None)
    assert network.held is None
    assert network.compiling.is_mean


def test_a_block_that_was_given_up_may_end_while_another_begins():
    """It ends when it is collected, which can happen anywhere: here inside the lock that the other block has taken."""
    model = nn.Sequential(nn.Linear(3, 2))
    pb.patch_(model, pb.EMP(3), "linear")
    draws, network = draws_of(model, 1, 2), network_of(model)

    class Collecting(list):
        def append(self, held):
            gc.collect()
            super().append(held)

    def give_up_and_begin() -> None:
        given_up = [pb.use_draw(model, draws[0])]
        given_up[0].__enter__()
        given_up.append(given_up)  # a cycle: only the collector ends it
        network.holds = Collecting(network.holds)
        del given_up
        with pb.use_draw(model, draws[1]):
            pass

    thread = threading.Thread(target=give_up_and_begin, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert network.held is None
