"""Predictor: the posterior predictive as a module, for pipelines that call a model and expect an answer."""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..draws.draws import Draws
from ..errors import PatchbayesError
from ..likelihoods import Likelihood, checked_likelihood
from ..patching.network import network_of
from ..views import Views
from .batches import batch_size, batches, is_batch, on_device
from .model_output import model_output
from .predict import Mode, Options, Predicting, Sampling, check_options, make_draws
from .prediction import Prediction
from .targets import TARGET_KEYS, without_targets
from .turns import Turns, places


class _Forward:
    """The call of a `Predictor`, which tells those who ask its signature that it takes what the network takes."""

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        if instance is None:
            return owner._answer  # type: ignore[attr-defined]
        call: Any = functools.partial(instance._answer)
        call.__signature__ = inspect.signature(instance.model.forward)
        return call


class Predictor(nn.Module):
    """A module that answers with the posterior predictive, for pipelines that call a model and expect an answer.

    Its output is the averaged log-probabilities (B, C), or for `Gaussian` the pair mean (B, D), variance (B, D). The draws
    are made once: the same input always gives the same answer. The weights of the draws are made at the first call and
    kept, within `memory_limit`, until a parameter changes (as optimizers and `load_state_dict` change it; after writing to
    `.data`, call `refresh_`). Any number of threads may call it; as many work at a time as there are cores for, the others wait
    in turn. No gradients. Arguments as in `predict`.

    returns   "tensor" as said above; "model_output": what a network of transformers returns, with the averaged
              log-probabilities as `logits`, and the NLL of the averaged prediction as `loss` where labels are given. Attributes
              that it does not have itself (config, device, ...) are the network's, and so is the signature of `forward`: it
              works in a `pipeline` and in a `Trainer` that evaluates.
    """

    def __init__(
        self,
        model: nn.Module,
        draws: int | Draws | Literal["exact"] = 20,
        likelihood: Likelihood | None = None,
        *,
        sampling: Sampling = "balanced",
        engine: Mode = "graph",
        memory_limit: int | None = None,
        generator: torch.Generator | None = None,
        select: Callable[[Any], Any] | None = None,
        output: Callable[[Any], Tensor] | None = None,
        views: Views | Callable[[Any, torch.Generator], Any] | None = None,
        returns: Literal["tensor", "model_output"] = "tensor",
    ) -> None:
        super().__init__()
        if returns not in ("tensor", "model_output"):
            raise PatchbayesError(f'Predictor(returns={returns!r}): expected "tensor" or "model_output".')
        self.model, self.returns = model, returns
        self.draws = make_draws(model, network_of(model), draws, sampling, generator)
        self.likelihood = checked_likelihood(likelihood or network_of(model).likelihood)
        self.engine, self.memory_limit, self.select, self.output = engine, memory_limit, select, output
        self.views = views
        self._kept = _Kept()
        check_options(self.draws, network_of(model), Options(engine=engine, views=views))

    forward: Any = _Forward()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if self.__dict__.get("returns") != "model_output":
                raise
            return getattr(super().__getattr__("model"), name)

    def _answer(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        kwargs |= {} if labels is None else {"labels": labels}
        prediction = self.predict(*args, **kwargs)
        if self.returns == "tensor":
            return prediction.answer
        labels = next((kwargs[key] for key in TARGET_KEYS if kwargs.get(key) is not None), None)
        return model_output(self.model, prediction, labels)

    def predict(self, *args: Any, **kwargs: Any) -> Prediction:
        """The whole prediction for one batch, given as to the network."""
        inputs = kwargs or (args if len(args) != 1 else args[0])
        if args and kwargs:
            raise PatchbayesError("Predictor: expected all inputs by position or all by keyword, got both.")
        (batch,) = batches(inputs if is_batch(inputs) else (inputs,), self.select)
        kept = self._kept
        with kept.turns:
            predicting = self._predicting(kept)
            with torch.inference_mode():
                batch = on_device(without_targets(self.model, batch), predicting.device)
                prediction = predicting.batch(batch, torch.arange(batch_size(batch)))
        return prediction.usable()

    def refresh_(self) -> None:
        """Forget the weights that were made for the draws."""
        self._kept = _Kept()

    def _predicting(self, kept: "_Kept") -> Predicting:
        network = network_of(self.model)
        state = tuple((id(p), p._version, p.data_ptr()) for s in network.sites for p in s.parameters().values())
        with kept.lock:
            if kept.predicting is None or kept.state != state:
                options = Options(
                    likelihood=self.likelihood,
                    engine=self.engine,
                    memory_limit=self.memory_limit,
                    output=self.output,
                    views=self.views,
                )
                kept.predicting = Predicting(self.model, network, self.draws, options, num_batches=1)
                kept.state = state
            return kept.predicting


class _Kept:
    """What a `Predictor` keeps from call to call. A copy starts without."""

    def __init__(self) -> None:
        self.lock, self.turns = threading.Lock(), Turns(places())
        self.state: Any = None
        self.predicting: Predicting | None = None

    def __reduce__(self) -> Any:
        return _Kept, ()
