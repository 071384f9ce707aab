"""Prediction in several threads, beside training: the serial answers, and nothing global is changed."""

import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.nets import mlp, small_cnn
from zoo import ZOO


@pytest.fixture(autouse=True)
def switch_often():
    """Threads take turns a hundred times more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


def patched(seed=0, method=None):
    torch.manual_seed(seed)
    model = small_cnn(size=8).double().eval()
    pb.patch_(model, method or pb.ECMP(3, jitter=0.5))
    return model


def images(seed, size=3):
    return torch.rand(size, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("engine", ["graph", "loop"])
@pytest.mark.parametrize("method", [pb.EMP(3, jitter=0.5), pb.Dropout(0.3)], ids=["emp", "dropout"])
def test_eight_threads_on_one_network_give_the_serial_answers(engine, method):
    model = patched(method=method)
    draws = pb.Draws.sample(model, 6)
    batches = [images(seed, 1 + seed % 4) for seed in range(48)]
    serial = [pb.predict(model, x, draws, engine="loop").log_probs for x in batches]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda x: pb.predict(model, x, draws, engine=engine).log_probs, batches))
    for mine, expected in zip(found, serial, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-10)


def test_a_pool_serves_one_predictor():
    model = patched()
    predictor = pb.Predictor(model, pb.Draws.sample(model, 6))
    batches = [images(seed, 1 + seed % 4) for seed in range(64)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(predictor, batches))
    for mine, x in zip(found, batches, strict=True):
        torch.testing.assert_close(mine, predictor(x), rtol=0, atol=1e-12)


def test_threads_with_networks_of_their_own():
    models = [patched(seed) for seed in range(6)]
    draws = [pb.Draws.sample(model, 5) for model in models]
    serial = [pb.predict(m, images(0), d, engine="loop").log_probs for m, d in zip(models, draws, strict=True)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda m, d: pb.predict(m, images(0), d, engine="graph").log_probs, models, draws))
    for mine, expected in zip(found, serial, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-10)


def training(model, x, steps, stop):
    """Losses of a deterministic training run, as long as `steps` or until stopped."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    while len(losses) < steps and not stop.is_set():
        loss = model(x).square().mean()
        for (
            parameter
        ) in model.parameters():  # `zero_grad` of torch 2.13 fails now and then in two threads: a global "custom"
            parameter.grad = None
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("is_patched", [False, True])
def test_capturing_beside_training_changes_no_step(is_patched):
    """Another network, plain or patched, trains in two threads while this one is captured again and again."""

    def make():
        torch.manual_seed(1)
        model = mlp(4, (8,), 3).double()
        if is_patched:
            pb.patch_(model, pb.ECMP(3, jitter=0.5))
        return model

    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    stop = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(training, make(), x, 100_000, stop) for _ in range(2)]
        for seed in range(3):
            pb.predict(patched(seed), images(seed), 4, engine="graph")
        stop.set()
        found = [future.result() for future in running]
    alone = training(make(), x, max(map(len, found)), threading.Event())
    for losses in found:
        assert losses
        assert losses == alone[: len(losses)]


@pytest.mark.parametrize("kind", ["convolutions", "lstm"])
def test_capturing_warns_of_nothing_and_leaves_the_filters_alone(kind, monkeypatch):
    """Filters of warnings belong to all threads. Another thread looks at them while torch traces."""
    model, x = (patched(0), images(0)) if kind == "convolutions" else (ZOO["lstm"].build(), ZOO["lstm"].inputs(0))
    if kind == "lstm":
        pb.patch_(model, pb.ECMP(3))
    export, seen = torch.export.export, []

    def watched(*args, **kwargs):
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(lambda: (warnings.filters is filters, list(warnings.filters))).result())
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", watched)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        filters, before = warnings.filters, list(warnings.filters)
        plan = pb.predict(model, x, 4, engine="graph").plan
        assert (plan.engine, warnings.filters is filters, list(warnings.filters)) == ("graph", True, before)
    assert seen == [(True, before)]
    assert [str(warning.message) for warning in caught] == []


def test_prediction_beside_training_of_the_same_network_sees_some_state_of_it():
    """Every answer is that of evaluation mode, and training goes on in training mode."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    pb.patch_(model, pb.EMP(3, jitter=0.5))
    x = torch.randn(6, 4, dtype=torch.float64)
    stop, modes = threading.Event(), []
    model[2].register_forward_pre_hook(lambda module, _: modes.append(module.training))

    def train():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        while not stop.is_set():
            model(x).square().mean().backward()
            optimizer.step()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(20):
            pb.predict(model, x, 4, engine="loop")
    finally:
        stop.set()
        thread.join()
    assert model.training
    assert sum(modes) > 0
    assert modes.count(False) == 20 * 4
