"""scikit-learn estimators: a small network with patched norms and output, or one of yours, with `fit` and `predict_proba`."""

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from ..bayesianizing import calibrate_
from ..layers import is_norm
from ..likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from ..nets import mlp
from ..objective import kl, share_gradients_
from ..patching.network import network_of
from ..patching.patch import is_patched, patch_
from ..posteriors import ECMP
from ..posteriors.method import Method
from ..prediction import Predictor, predict
from ..prior import Prior
from .weighted_rows import Rows, in_batches

#: How far the components start apart.
_JITTER = 0.3
#: Of the gradient, what components get that were not drawn (`share_gradients_`).
_SHARE = 0.5
#: With fewer held-out rows, a temperature says more about them than about the network.
_FEW = 20
#: Rows that are predicted together.
_TOGETHER = 4096


class _PatchBayes(BaseEstimator):
    """The parameters of both estimators, and how they train."""

    _optimizer: torch.optim.Optimizer | None  # that of `partial_fit`

    def __init__(
        self,
        module: nn.Module | Callable[[int, int], nn.Module] | None = None,
        *,
        hidden: Sequence[int] = (100,),
        method: Method | Mapping[Any, Method] | None = None,
        max_iter: int = 100,
        batch_size: int = 100,
        learning_rate: float = 1e-2,
        prior_precision: float = 1.0,
        held_out: float = 0.15,
        draws: int = 20,
        random_state: Any = None,
    ) -> None:
        self.module = module
        self.hidden = hidden
        self.method = method
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.prior_precision = prior_precision
        self.held_out = held_out
        self.draws = draws
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on rows X (n, features) and targets y, then calibrate on the rows that were held out.

        A weight is a multiplicity: a row of weight 2 counts as two rows, one of weight 0 as none (up to ten passes over the
        rows in an epoch). The result does not depend on the order of the rows.
        """
        self._check_settings()
        X, y = self._validated(X, y, reset=True)
        self._begin(y, sample_weight)
        rows = self._rows(X, y, sample_weight)
        generator = self._make_network(rows)
        held_out, rows = self._split(rows, generator)
        optimizer = torch.optim.Adam(self._learned(), self.learning_rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.max_iter)
        for _ in range(self.max_iter):
            self._epoch(rows, optimizer, generator, rows.total)
            schedule.step()
        self.n_iter_, self._seen, self.calibration_ = self.max_iter, rows.total, None
        if held_out is not None:
            batches = [self._batch(held_out, some) for some in held_out.positions(generator).split(_TOGETHER)]
            self.calibration_ = calibrate_(
                self.network_.eval(), batches, draws=self.draws, spread="keep", progress=lambda *_: None
            )
        return self._finished()

    def _go_on(self, X: np.ndarray, y: np.ndarray, sample_weight: Any, first: bool) -> Self:
        """One pass over some rows, from the network as it is."""
        rows = self._rows(X, y, sample_weight)
        if first:
            self._check_settings()
            self._make_network(rows)
            self.n_iter_, self._seen, self.calibration_ = 0, 0.0, None
        if self._optimizer is None:
            self._optimizer = torch.optim.Adam(self._learned(), self.learning_rate)
        self._seen += rows.total
        self._epoch(rows, self._optimizer, torch.Generator().manual_seed(self._seed + self.n_iter_), self._seen)
        self.n_iter_ += 1
        return self._finished()

    def _check_settings(self) -> None:
        """Refuse parameters that mean nothing, as scikit-learn does: when fitting, by a ValueError."""
        where = type(self).__name__
        for name in ("max_iter", "batch_size", "draws"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < (2 if name == "batch_size" else 1):
                least = 2 if name == "batch_size" else 1
                raise ValueError(f"{where}({name}={value!r}): expected a whole number of at least {least}.")
        for name in ("learning_rate", "prior_precision"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not 0 < float(value) < math.inf:
                raise ValueError(f"{where}({name}={value!r}): expected a number above 0.")
        if not isinstance(self.held_out, Real) or not 0 <= float(self.held_out) < 1:
            raise ValueError(f"{where}(held_out={self.held_out!r}): expected a share from 0 to below 1.")

    def _rows(self, X: np.ndarray, y: np.ndarray, sample_weight: Any) -> Rows:
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        targets = self._encoded(y)
        table = np.column_stack([X, targets])[weights > 0]
        if not len(table):
            raise ValueError(f"{type(self).__name__}: all {len(weights)} sample weights are 0; expected some above.")
        table, place = np.unique(table, axis=0, return_inverse=True)
        weights = np.bincount(place.ravel(), weights[weights > 0])
        inputs, wanted = table[:, : X.shape[1]], table[:, X.shape[1] :]
        targets = wanted[:, 0].astype(np.int64) if targets.ndim == 1 else wanted
        return Rows(*(torch.tensor(part) for part in (inputs, targets, weights)))

    def _make_network(self, rows: Rows) -> torch.Generator:
        """The network, patched, and the source of all random numbers of its training."""
        self._seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        generator = torch.Generator().manual_seed(self._seed)
        features, outputs = rows.inputs.shape[1], self._num_outputs()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            if self.module is None:
                network: nn.Module = mlp(features, tuple(self.hidden), outputs, gamma=1.0).double()
            elif isinstance(self.module, nn.Module):
                network = copy.deepcopy(self.module)
            else:
                network = self.module(features, outputs)
        self._dtype = next(parameter.dtype for parameter in network.parameters())
        prior = Prior(float(self.prior_precision), float(self.prior_precision))
        likelihood = self._likelihood(network, rows)
        if is_patched(network):
            network_of(network).prior, network_of(network).likelihood = prior, likelihood
        else:
            patch_(
                network,
                self._rules(network) if self.method is None else self.method,
                prior=prior,
                likelihood=likelihood,
                generator=generator,
            )
        self.network_ = network
        self._optimizer = None
        return generator

    def _rules(self, network: nn.Module) -> dict[Any, Method]:
        """ECMP on norms, drawn for every example, and on the output layer, which takes one draw for a batch."""
        rules: dict[Any, Method] = {"output": ECMP(5, jitter=_JITTER)}
        if any(is_norm(module) for module in network.modules()):
            rules = {"norm": ECMP(5, jitter=_JITTER, per_example=True), **rules}
        return rules

    def _learned(self) -> list[nn.Parameter]:
        everything = [*self.network_.parameters(), *network_of(self.network_).likelihood.parameters()]
        return [parameter for parameter in everything if parameter.requires_grad]

    def _split(self, rows: Rows, generator: torch.Generator) -> tuple[Rows | None, Rows]:
        """The rows that are held out, if they are enough, and the others; of every class the same share."""
        groups = rows.targets if rows.targets.dim() == 1 else torch.zeros(len(rows.targets), dtype=torch.int64)
        order = torch.randperm(len(groups), generator=generator)
        away = torch.zeros(len(groups), dtype=torch.bool)
        for group in groups.unique():
            mine = order[groups[order] == group]
            away[mine[: int(self.held_out * len(mine))]] = True
        if int(away.sum()) < _FEW:
            return None, rows
        return rows[away], rows[~away]

    def _epoch(self, rows: Rows, optimizer: torch.optim.Optimizer, generator: torch.Generator, num_data: float) -> None:
        network = self.network_.train()
        for some in in_batches(rows.positions(generator), int(self.batch_size)):
            inputs, targets = self._batch(rows, some)
            log_prob = network_of(network).likelihood.log_prob(network(inputs).unsqueeze(0), targets)
            loss = kl(network) / num_data - log_prob.mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            share_gradients_(network, _SHARE)
            optimizer.step()

    def _batch(self, rows: Rows, some: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets in the network's type; numbers of classes stay whole."""
        targets = rows.targets[some]
        return rows.inputs[some].to(self._dtype), targets.to(self._dtype) if targets.is_floating_point() else targets

    def _finished(self) -> Self:
        self.network_.eval().zero_grad(set_to_none=True)
        self.predictor_ = Predictor(self.network_, self.draws, engine="auto")
        return self

    def _inputs(self, X: Any) -> list[Tensor]:
        """The rows to predict, checked, in batches."""
        check_is_fitted(self)
        rows = validate_data(self, X, reset=False, dtype=np.float64)
        return list(torch.tensor(rows).to(self._dtype).split(_TOGETHER))

    # What the two estimators say

    @abstractmethod
    def _validated(self, X: Any, y: Any, reset: bool) -> tuple[np.ndarray, np.ndarray]:
        """The rows and targets, checked as scikit-learn asks for."""

    @abstractmethod
    def _begin(self, y: np.ndarray, sample_weight: Any) -> None:
        """Keep what `_encoded` needs to know about the targets."""

    @abstractmethod
    def _encoded(self, y: np.ndarray) -> np.ndarray:
        """The targets as numbers of classes (n,) or in standard units (n, D)."""

    @abstractmethod
    def _num_outputs(self) -> int:
        """How many numbers the network gives for a row."""

    @abstractmethod
    def _likelihood(self, network: nn.Module, rows: Rows) -> Likelihood:
        """What these say of the targets."""


class PatchBayesClassifier(ClassifierMixin, _PatchBayes):
    """A classifier whose probabilities are averages over the draws of a patched network, calibrated on held-out rows.

    module           None: a fully connected network with a batch norm at the input and after each of the `hidden` layers,
                     ECMP with five components on norms, drawn for every example in training, and on the output layer. Or a
                     network of yours, which is copied and trained, or a function (features, outputs) -> network.
    hidden           widths of the network that is made where `module` is None.
    method           how a network that is not patched yet is patched: a method for norms and output, or rules {sites: method}.
    max_iter         epochs; the learning rate falls to 0 over them along a cosine.
    prior_precision  of the Gaussian prior on all weights: the KL to it, divided by the sum of the weights of the rows, is
                     part of the loss.
    held_out         the share of rows that fits the temperature (`calibrate_`) and does not train; where that makes fewer than
                     20 rows, all rows train and nothing is fitted.
    draws            networks that a prediction averages.
    random_state     as everywhere in scikit-learn; the same state gives the same estimator.

    classes_, network_ (the patched network), predictor_ (`Predictor`), calibration_ (the report of `calibrate_`, or None),
    n_iter_, n_features_in_.
    """

    classes_: np.ndarray

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """One pass over some rows. The first call names all `classes`. Nothing is held out: temperatures stay as they are."""
        first = not hasattr(self, "network_")
        X, y = self._validated(X, y, reset=first)
        if first and classes is None:
            raise ValueError("PatchBayesClassifier.partial_fit: the first call needs classes=, all of them.")
        known = np.unique(classes) if first else self.classes_
        if not first and classes is not None and not np.array_equal(np.unique(classes), known):
            raise ValueError(
                f"PatchBayesClassifier.partial_fit: classes={classes!r} are not those of the first call, {known}."
            )
        strange = np.setdiff1d(y, known)
        if len(strange):
            raise ValueError(f"PatchBayesClassifier.partial_fit: y holds {strange[:5]}, not among the classes {known}.")
        if first:
            self.classes_ = known
        return self._go_on(X, y, sample_weight, first)

    def predict_proba(self, X: Any) -> np.ndarray:
        """(n, C): the averaged probabilities, in the order of `classes_`."""
        batches = self._inputs(X)
        probs = torch.cat([self.predictor_(batch) for batch in batches]).double().softmax(-1)
        return probs.numpy()

    def predict(self, X: Any) -> np.ndarray:
        """(n,): the most probable class."""
        probs = self.predict_proba(X)
        return self.classes_[probs.argmax(1)]

    def _validated(self, X: Any, y: Any, reset: bool) -> tuple[np.ndarray, np.ndarray]:
        X, y = validate_data(self, X, y, reset=reset, dtype=np.float64)
        check_classification_targets(y)
        return X, y

    def _begin(self, y: np.ndarray, sample_weight: Any) -> None:
        self.classes_ = np.unique(y)

    def _encoded(self, y: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.classes_, y)

    def _num_outputs(self) -> int:
        return len(self.classes_)

    def _likelihood(self, network: nn.Module, rows: Rows) -> Likelihood:
        return Categorical()


class PatchBayesRegressor(RegressorMixin, _PatchBayes):
    """A regressor that says how sure it is: the average over the draws of a patched network, calibrated on held-out rows.

    Parameters as for `PatchBayesClassifier`. The network that is made where `module` is None says mean and variance of every
    target. A network of yours may say both (2 D outputs, the D means first, then the D logarithms of variances) or the means
    alone (D outputs; one noise is then learned for each target). Targets are standardized for it.

    network_, predictor_, calibration_, n_iter_, n_features_in_ as there.
    """

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """One pass over some rows. The first call decides in which units targets are standardized."""
        first = not hasattr(self, "network_")
        X, y = self._validated(X, y, reset=first)
        if first:
            self._begin(y, sample_weight)
        return self._go_on(X, y, sample_weight, first)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """(n,) or (n, D): the mean; with return_std=True also the standard deviation of y, noise included."""
        found = [self.predictor_(batch) for batch in self._inputs(X)]
        means, variances = (torch.cat(parts).double().numpy() for parts in zip(*found, strict=True))
        mean = self._in_units(means * self._scale + self._center)
        return (mean, self._in_units(np.sqrt(variances) * self._scale)) if return_std else mean

    def predict_interval(self, X: Any, level: float = 0.9) -> np.ndarray:
        """(n, 2) or (n, D, 2): the central interval that holds y with probability `level`, of the averaged prediction."""
        if not isinstance(level, Real) or not 0 < float(level) < 1:
            raise ValueError(f"predict_interval(level={level!r}): expected a number between 0 and 1.")
        batches, draws = self._inputs(X), self.predictor_.draws
        found = [predict(self.network_, b, draws, keep_draws=True).interval(float(level)) for b in batches]
        bounds = (torch.cat(parts).double().numpy() * self._scale + self._center for parts in zip(*found, strict=True))
        return np.stack([self._in_units(bound) for bound in bounds], axis=-1)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _validated(self, X: Any, y: Any, reset: bool) -> tuple[np.ndarray, np.ndarray]:
        X, y = validate_data(self, X, y, reset=reset, dtype=np.float64, multi_output=True, y_numeric=True)
        return X, y.astype(np.float64)

    def _begin(self, y: np.ndarray, sample_weight: Any) -> None:
        weights = _check_sample_weight(sample_weight, y, dtype=np.float64)
        targets = y.reshape(len(y), -1)
        self._flat = y.ndim == 1
        self._center = np.average(targets, axis=0, weights=weights if weights.any() else None)
        spread = np.sqrt(np.average((targets - self._center) ** 2, axis=0, weights=weights if weights.any() else None))
        self._scale = np.where(spread > 0, spread, 1.0)

    def _encoded(self, y: np.ndarray) -> np.ndarray:
        return (y.reshape(len(y), -1) - self._center) / self._scale

    def _in_units(self, values: np.ndarray) -> np.ndarray:
        """As the targets came, (n,) or (n, D)."""
        return values[:, 0] if self._flat else values

    def _num_outputs(self) -> int:
        return 2 * len(self._center)

    def _likelihood(self, network: nn.Module, rows: Rows) -> Likelihood:
        targets = len(self._center)
        modes = {module: module.training for module in network.modules()}
        with torch.no_grad():
            outputs = network.eval()(rows.inputs[:2].to(self._dtype))
        for module, training in modes.items():
            module.training = training
        if isinstance(outputs, Tensor) and outputs.shape[1:] == (2 * targets,):
            return HeteroscedasticGaussian()
        if isinstance(outputs, Tensor) and outputs.shape[1:] == (targets,):
            return Gaussian([1.0] * targets, learn=True)
        shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(
            f"PatchBayesRegressor: expected a network with {targets} outputs (means) or {2 * targets} (means, then logarithms "
            f"of variances) for {targets} target(s), got {shape} for two rows."
        )
