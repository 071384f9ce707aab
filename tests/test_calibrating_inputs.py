"""calibrate_ and bayesianize_: every form of batch, what they refuse, and how they are interrupted."""

import copy
import math
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

import patchbayes as pb
from calibrated_networks import batches, classifier, inputs, labels_from
from patchbayes.bayesianizing.held_out import HeldOut, pair_of
from patchbayes.bayesianizing.spread import SpreadSearch
from patchbayes.bayesianizing.tries import Tried
from patchbayes.errors import PatchbayesError
from patchbayes.likelihoods import Bernoulli, Gaussian
from patchbayes.patching.network import network_of
from patchbayes.posteriors import Spread


class Dictionary(nn.Module):
    """As networks of transformers are: keywords in, something with `.logits` out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = classifier(scale=3.0)

    def forward(self, input_values: torch.Tensor, mask: torch.Tensor):  # type: ignore[no-untyped-def]
        return type("Output", (), {"logits": self.body(input_values * mask)})()


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = classifier(scale=3.0)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.body(torch.cat([left, right], 1))


def test_every_form_of_batch_gives_the_same() -> None:
    x = inputs(200)
    y = labels_from(torch.softmax(classifier(scale=2.0)(x), -1).detach())
    pairs = batches(x, y)
    plain = pb.bayesianize_(classifier(scale=3.0), pairs, budget=2000)
    forms = {
        "lists": (classifier(scale=3.0), [[a, b] for a, b in pairs], {}),
        "mappings": (
            Dictionary(),
            [{"input_values": a, "mask": torch.ones(len(a), 1), "labels": b} for a, b in pairs],
            {},
        ),
        "several inputs": (TwoInputs(), [(a[:, :2], a[:, 2:], b) for a, b in pairs], {}),
        "select": (classifier(scale=3.0), [{"x": a, "z": b} for a, b in pairs], {"select": lambda q: (q["x"], q["z"])}),
    }
    for name, (net, form, options) in forms.items():
        report = pb.bayesianize_(net, form, budget=2000, **options)
        assert report.after.nll == pytest.approx(plain.after.nll, abs=1e-5), name


def test_held_out_keeps_padded_batches_apart() -> None:
    pieces = [({"ids": torch.full((3, n), n)}, torch.full((3,), n)) for n in (4, 5, 6)]
    held = HeldOut.read(pieces, 100, 2, torch.Generator().manual_seed(0))
    assert len(held) == 9
    for mapping, targets in held.batches:
        assert bool((mapping["ids"] == targets.unsqueeze(1)).all())
        assert mapping["ids"].shape[1] == int(targets[0])


class Changing:
    """Batches that are others when they are read again: one is missing, or comes twice."""

    def __init__(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], change: int) -> None:
        self.pairs, self.change, self.read = pairs, change, 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.read += 1
        if self.read == 1:
            return iter(self.pairs)
        return iter(self.pairs[:-1] if self.change < 0 else [*self.pairs, self.pairs[0]])


def bad(kind: str) -> tuple[object, str]:
    x, y = inputs(60), torch.arange(60) % 4
    return {
        "labels out of range": (batches(x, y + 1), "classes 0 to 3"),
        "empty": ([], "no example"),
        "one class": (batches(x, torch.zeros_like(y)), "all 60 labels are 0"),
        "NaN": (batches(x.masked_fill(x > 2, math.nan), y), "NaN"),
        "a label below 0": (batches(x, y.where(torch.arange(60) != 55, -1)), "got numbers from -1 to 3"),
        "infinite": (batches(x.masked_fill(x > 2, math.inf), y), "not finite"),
        "shrinks": (Changing(batches(x, y), -1), "60 examples when read first and 50 when read again"),
        "grows": (Changing(batches(x, y), 1), "60 examples when read first and 110 when read again"),
        "a generator": ((pair for pair in batches(x, y)), "read again"),
        "no targets": ([x], "expected batches"),
        "numbers for classes": (batches(x, torch.randn(60)), "class numbers"),
        "no labels": ([{"x": x}], "without labels"),
        "one tensor": (x, "iterable of batches"),
        "other sizes": ([(x, y[:3])], "3 targets"),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    ["labels out of range", "empty", "one class", "NaN", "a generator", "no targets", "numbers for classes", "no labels",
     "one tensor", "other sizes", "a label below 0", "infinite", "shrinks", "grows"],
)  # fmt: skip
def test_bad_input_is_one_sentence_and_the_network_is_untouched(kind: str) -> None:
    net = classifier()
    before = copy.deepcopy(net.state_dict())
    held_out, message = bad(kind)
    with pytest.raises(PatchbayesError, match=message):
        pb.bayesianize_(net, held_out)  # type: ignore[arg-type]
    assert not pb.is_patched(net)
    assert list(net.state_dict()) == list(before)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    pb.patch_(net, pb.ECMP(3), "all")
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(PatchbayesError, match=message):
        pb.calibrate_(net, bad(kind)[0])  # type: ignore[arg-type]
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert float(network_of(net).likelihood.temperature) == 1


def narrower(x: torch.Tensor, _generator: torch.Generator) -> torch.Tensor:
    return x[:, :3]


def turned_bad(x: torch.Tensor, _generator: torch.Generator) -> torch.Tensor:
    return x * math.nan


@pytest.mark.parametrize(("view", "message"), [(narrower, r"a view of shape \(60, 6\)"), (turned_bad, "not finite")])
def test_a_bad_view_is_refused_and_the_network_is_untouched(view: object, message: str) -> None:
    held_out = [(inputs(60), torch.arange(60) % 4)]
    net = classifier()
    before = copy.deepcopy(net.state_dict())
    for patched in (False, True):
        with pytest.raises(PatchbayesError, match=message):
            (pb.calibrate_ if patched else pb.bayesianize_)(net, held_out, views=view)  # type: ignore[operator]
        assert pb.is_patched(net) == patched
        assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
        if not patched:
            pb.patch_(net, pb.ECMP(3), "all")
            before = copy.deepcopy(net.state_dict())


def test_options_out_of_range_are_refused() -> None:
    x, y = inputs(60), torch.arange(60) % 4
    for options in ({"draws": 0}, {"budget": 0}, {"examples": True}, {"draws": 2.5}):
        with pytest.raises(PatchbayesError, match=r"bayesianize_\(\w+=.*expected a whole number"):
            pb.bayesianize_(classifier(), batches(x, y), **options)  # type: ignore[arg-type]
    with pytest.raises(PatchbayesError, match="one of the two"):
        pb.bayesianize_(classifier(), batches(x, y), predict_cost=2.0, sites="all")
    net = classifier()
    pb.patch_(net, Spread(), "all")
    with pytest.raises(PatchbayesError, match="patched already"):
        pb.bayesianize_(net, batches(x, y))
    with pytest.raises(PatchbayesError, match='"learn" or "keep"'):
        pb.calibrate_(net, batches(x, y), spread="other")  # type: ignore[arg-type]


@pytest.fixture
def ctrl_c_interrupts() -> Iterator[None]:
    """Python's own handler, which a process that was started in the background of a shell does not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_ctrl_c_keeps_the_best_until_then() -> None:
    net, x = classifier(scale=4.0), inputs(300)
    y = labels_from(torch.softmax(classifier()(x), -1).detach())
    told: list[str] = []

    def progress(stage: str, left: float) -> None:
        told.append(stage)
        assert left >= 0
        if len(told) == 6:
            signal.raise_signal(signal.SIGINT)

    assert threading.current_thread() is threading.main_thread()
    report = pb.bayesianize_(net, batches(x, y), budget=30_000, progress=progress)
    assert report.interrupted
    assert "interrupted" in str(report)
    assert 1 <= len(report.losses) <= 3
    assert pb.is_patched(net)
    assert float(network_of(net).likelihood.temperature) == report.temperature


@pytest.mark.parametrize("tries", [1, 4])
@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_ctrl_c_while_layers_are_compared_keeps_the_best_until_then(
    tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one try of the first set of layers, and within the look at the second."""
    torch.manual_seed(0)
    blocks = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh())]
    net, x = nn.Sequential(*blocks, nn.Linear(6, 4)).eval(), inputs(200)
    y = labels_from(torch.softmax(classifier()(x), -1).detach())
    found = SpreadSearch._scored
    done: list[str] = []

    def scored(search: SpreadSearch, level: float, slope: float, examples: int) -> Tried:
        if len(done) == tries:
            done.append("interrupted")
            signal.raise_signal(signal.SIGINT)
        done.append(search.layers)
        return found(search, level, slope, examples)

    monkeypatch.setattr(SpreadSearch, "_scored", scored)
    report = pb.bayesianize_(net, batches(x, y), budget=4000)
    assert report.interrupted
    assert len(report.tried) == tries
    assert pb.is_patched(net)
    assert float(network_of(net).likelihood.temperature) == report.temperature
    if tries == 1:
        assert {one.layers for one in report.tried} == {"norm and first layers"}


@pytest.mark.parametrize(
    ("held_out", "likelihood", "advice"),
    [
        ((torch.randn(8, 6), torch.zeros(8)), None, r"pass \[\(inputs, targets\)\]"),
        ([(torch.randn(8, 6), np.zeros(8))], None, r"torch\.as_tensor"),
        ([(torch.randn(8, 6), torch.arange(8) % 2)], None, r"likelihoods\.Bernoulli\(\) and float targets"),
        ([(torch.randn(8, 6), (torch.arange(8) % 2).float())], None, r"likelihoods\.Bernoulli\(\)"),
        ([(torch.randn(8, 6), torch.randn(8))], Gaussian(), r"targets\.unsqueeze\(-1\)"),
        ([(torch.randn(8, 6), torch.ones(8))], Bernoulli(), r"targets\.unsqueeze\(-1\)"),
    ],
)
def test_advice_for_one_output_and_data_in_memory(held_out, likelihood, advice) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PatchbayesError, match=advice):
        pb.calibrate_(nn.Linear(6, 1), held_out, likelihood=likelihood)


def test_modes_and_frozen_flags_come_back() -> None:
    net, x = classifier(scale=3.0), inputs(100)
    y = labels_from(torch.softmax(classifier()(x), -1).detach())
    net.train()
    net[0].weight.requires_grad_(False)
    pb.bayesianize_(net, batches(x, y), budget=1000)
    assert net.training
    assert net[2].training
    assert not net[0].weight.requires_grad
    assert net[2].weight.requires_grad
    assert all(p.grad is None for p in net.parameters())


def test_pair_of_reads_what_transformers_give() -> None:
    class Encoding:
        def __init__(self, content: dict[str, torch.Tensor]) -> None:
            self.content = content

        def keys(self):  # type: ignore[no-untyped-def]
            return self.content.keys()

        def __getitem__(self, key: str) -> torch.Tensor:
            return self.content[key]

    found, targets = pair_of(Encoding({"input_ids": torch.zeros(2, 3), "labels": torch.tensor([0, 1])}))
    assert list(found) == ["input_ids"]
    assert targets.tolist() == [0, 1]


def test_a_trained_low_rank_patch_keeps_its_mean():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).eval()
    pb.patch_(model, pb.posteriors.LowRank(2, 3, jitter=0.5), "linear")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for site in pb.patched_sites(model).values():  # products that do not average to zero, as after training
            site.posterior.left.add_(torch.randn(site.posterior.left.shape, generator=generator))
    x, y = torch.randn(120, 4, generator=generator), torch.randint(3, (120,), generator=generator)
    before = model(x).detach()
    pb.calibrate_(model, [(x, y)], draws=3, budget=300)
    torch.testing.assert_close(model(x), before, atol=1e-5, rtol=1e-4)
