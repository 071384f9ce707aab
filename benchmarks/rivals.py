"""Other libraries that predict with draws, on the same networks and batch: each by its own Monte-Carlo prediction.

    bayesian-torch      a Gaussian on every weight of convolutions and linear layers (`dnn_to_bnn`, reparameterization); a
                        forward pass for each draw, as its documentation does.
    torch-uncertainty   `mc_dropout` with dropout before every norm layer and the output layer, the sites that are patched
                        beside it: its loop, and (its default) all draws in one batch.
    laplace-torch       Laplace approximation of the output layer, sampling predictive: one pass, then a head for each draw,
                        so that its like is a patched output layer.

Only times are compared: the methods differ in what they are uncertain about. What does not install or run says why.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import torch
from subjects import NETWORKS, Subject, define_torchvision_operators
from timing import draws_to_time, in_turn, part_of, quotients, summary, times
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import patchbayes as pb

Predictor = Callable[[int], Tensor]  # number of draws -> averaged probabilities (B, C)
PATCHED = {
    "patchbayes EMP, norm+output": ("emp", "norm+output"),
    "patchbayes ECMP, norm+output": ("ecmp", "norm+output"),
    "patchbayes ECMP, output": ("ecmp", "output"),
}
_DROPOUT = 0.005
_FITTED_ON = 16  # inputs: the fit is not timed


def compare(network: str, batch: int, numbers: list[int], budget: float) -> list[dict[str, Any]]:
    """Seconds for every library and number of draws, and how many times S unpatched passes that is."""
    subjects = {name: Subject.make(network, sites, method, batch) for name, (method, sites) in PATCHED.items()}
    plain = next(iter(subjects.values()))
    rivals = [Rival.prepare(name, NETWORKS[network][0], plain.x) for name in RIVALS]
    rows: list[dict[str, Any]] = []
    for number in numbers:
        timed = draws_to_time(number, plain.one_pass, budget)
        contenders = [_patched(name, subject, number, timed) for name, subject in subjects.items()]
        contenders += [rival.contender(number, timed) for rival in rivals if rival.predict is not None]
        calls: dict[str, Callable[[], Any]] = {one.facts["name"]: one.call for one in contenders}
        seconds = in_turn({"unpatched": partial(plain.passes, timed), **calls}, budget)
        unpatched = times(number / timed, seconds["unpatched"])
        cell = {"network": network, "batch": batch, "draws": number}
        for one in contenders:
            took = times(one.factor, seconds[one.facts["name"]])
            rows.append(cell | one.facts | {"rounds": len(took), "scaled": one.factor != 1} | summary("seconds", took))
            rows[-1] |= summary("times_unpatched", quotients(took, unpatched))
        for rival in rivals:
            if rival.predict is None:
                rows.append(cell | {"name": rival.name, "version": rival.version, "unavailable": rival.reason})
    return rows


@dataclass(frozen=True)
class Contender:
    """What takes part in a timing: what the record says of it, a call, and the time of all draws over that of the call."""

    facts: dict[str, Any]
    call: Callable[[], Any]
    factor: float


def _patched(name: str, subject: Subject, number: int, timed: int) -> Contender:
    part = part_of(subject.model, subject.x, number, timed)
    facts = {"name": name, "version": pb.__version__, "timed_draws": part.num_timed, "heads": part.whole.heads}
    return Contender(facts, partial(pb.predict, subject.model, subject.x, part.draws), part.factor)


@dataclass(frozen=True)
class Rival:
    """A library's prediction for one network and batch, or why there is none."""

    name: str
    version: str | None
    predict: Predictor | None
    reason: str | None = None

    @classmethod
    def prepare(cls, name: str, build: Callable[[], nn.Module], x: Tensor) -> "Rival":
        package, make = RIVALS[name]
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            return cls(name, None, None, f"{package} is not installed (extra: bench)")
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(0)
                define_torchvision_operators()
                predict = make(build().eval(), x)
                probs = predict(2)
        except Exception as error:  # whatever a library of others raises is what the record says
            return cls(name, version, None, f"{type(error).__name__}: {error}")
        if probs.shape[0] != len(x) or not torch.allclose(probs.sum(-1), torch.ones(len(x)), atol=1e-4):
            return cls(name, version, None, f"gives {tuple(probs.shape)} that are no probabilities")
        return cls(name, version, _undisturbing(predict))

    def contender(self, number: int, timed: int) -> Contender:
        predict = self.predict
        assert predict is not None
        some = number if self.name in SHARING else timed
        facts = {"name": self.name, "version": self.version, "timed_draws": some}
        return Contender(facts, partial(predict, some), number / some)


def _undisturbing(predict: Predictor) -> Predictor:
    """They draw from the global generator, which is put back."""

    def run(num_draws: int) -> Tensor:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            return predict(num_draws)

    return run


def _bayesian_torch(network: nn.Module, x: Tensor) -> Predictor:
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn

    settings = {
        "prior_mu": 0.0,
        "prior_sigma": 1.0,
        "posterior_mu_init": 0.0,
        "posterior_rho_init": -3.0,
        "type": "Reparameterization",
        "moped_enable": False,
        "moped_delta": 0.5,
    }
    dnn_to_bnn(network, settings)
    network.eval()
    return lambda num_draws: torch.stack([network(x).softmax(-1) for _ in range(num_draws)]).mean(0)


def _mc_dropout(on_batch: bool) -> Callable[[nn.Module, Tensor], Predictor]:
    def make(network: nn.Module, x: Tensor) -> Predictor:
        from torch_uncertainty.methods import mc_dropout

        insert_dropout_(network)

        def predict(num_draws: int) -> Tensor:
            wrapped = mc_dropout(network, num_estimators=num_draws, on_batch=on_batch).eval()
            outputs: Tensor = wrapped(x).unflatten(0, (num_draws, len(x)))
            return outputs.softmax(-1).mean(0)

        return predict

    return make


def insert_dropout_(network: nn.Module) -> None:
    """Before every batch norm and the last linear layer."""
    last = [module for module in network.modules() if isinstance(module, nn.Linear)][-1]
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if child is last or isinstance(child, nn.modules.batchnorm._BatchNorm):
                setattr(parent, name, nn.Sequential(nn.Dropout(_DROPOUT), child))


def _laplace(network: nn.Module, x: Tensor) -> Predictor:
    from laplace import Laplace

    inputs = torch.randn(_FITTED_ON, *x.shape[1:])
    num_classes = network(x[:1]).shape[-1]
    data = DataLoader(TensorDataset(inputs, torch.randint(num_classes, (_FITTED_ON,))), batch_size=_FITTED_ON)
    approximation = Laplace(network, "classification", subset_of_weights="last_layer", hessian_structure="kron")
    with torch.enable_grad():
        approximation.fit(data)
    return lambda num_draws: approximation(x, pred_type="nn", link_approx="mc", n_samples=num_draws)


RIVALS: dict[str, tuple[str, Callable[[nn.Module, Tensor], Predictor]]] = {
    "bayesian-torch": ("bayesian-torch", _bayesian_torch),
    "torch-uncertainty MC dropout, loop": ("torch-uncertainty", _mc_dropout(on_batch=False)),
    "torch-uncertainty MC dropout, one batch": ("torch-uncertainty", _mc_dropout(on_batch=True)),
    "laplace-torch, output": ("laplace-torch", _laplace),
}
# Their draws cost little beside the pass that all share: all are timed, since the time of some says nothing of all.
SHARING = {"laplace-torch, output"}
