"""How much noise to train with: a level of `posteriors.mixed`, given or chosen on the held-out part."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PatchbayesError
from ..posteriors import mixed
from ..posteriors.mixed import adam_rate
from ..posteriors.text import VANILLA, text_of_rules
from ..runs import RunFolder, TrainingConfig, train
from .calibrate import calibrate_
from .run import PartBatches

#: Levels that are tried one after the other, while each is better than the one before, beginning from 1.
_MORE, _LESS = (1.5, 2.0), (0.5, 0.25)


@dataclass(frozen=True)
class Trial:
    """A run with a level of noise, and what the held-out part says of it.

    nll           with the temperature that fits it best, of the draws or of the mean network, whichever is better.
    temperature   that of the mean network in one pass: above 1 it is overconfident.
    """

    noise: float
    folder: Path
    nll: float
    temperature: float


def with_noise(config: TrainingConfig, noise: float) -> TrainingConfig:
    """The same run with the patches of `mixed(noise)`; without any where noise is 0.

    With Adam the components get a learning rate of their own (`adam_rate`), unless `patch_lr` is given.
    """
    if not noise:
        return dataclasses.replace(config, method=VANILLA, sites=None, patch_lr=None)
    rules: dict[Any, Any] = {**mixed(noise)}
    rate = config.patch_lr
    if rate is None and config.optimizer != "sgd":
        rate = adam_rate(config.chosen_lr)
    return dataclasses.replace(config, method=text_of_rules(rules), sites=None, patch_lr=rate)


def train_with_chosen_noise(
    config: TrainingConfig,
    folder: str | Path,
    *,
    resume: bool = False,
    quiet: bool = False,
    trust_code: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> list[Trial]:
    """Train with several levels of noise, each in a run folder of its own below `folder`; the best trial comes first.

    The network is trained without patches first. Where its best temperature is at most 1 it is not overconfident, noise could
    only hurt, and that is all. Else it is trained with noise 1. Where that is better than no patches, and still overconfident,
    1.5 is tried, else 0.5, and then 2 or 0.25 where that was better: four runs at most, judged by the NLL of the held-out part.
    """
    if not config.held_out:
        raise PatchbayesError(
            "the noise is chosen on the held-out part, and held_out is 0.\n  do       give a share above 0, such as 0.1."
        )
    trials: list[Trial] = []

    def attempt(noise: float) -> Trial:
        path = Path(folder) / f"noise-{noise:g}"
        started = resume and (path / "config.json").exists()
        run = train(
            with_noise(config, noise), path, resume=started, quiet=quiet, trust_code=trust_code, say=lambda _: None
        )
        trials.append(_tried(run, noise, config.data_dir))
        say(_line(trials[-1]))
        return trials[-1]

    plain = attempt(0.0)
    if plain.temperature > 1:
        best = attempt(1.0)
        for noise in _MORE if best.nll < plain.nll and best.temperature > 1 else _LESS:
            further = attempt(noise)
            if further.nll >= best.nll:
                break
            best = further
    else:
        say("its best temperature is at most 1: it is not overconfident, and noise could only hurt.")
    return sorted(trials, key=lambda trial: trial.nll)


def _tried(run: RunFolder, noise: float, data_dir: str | None) -> Trial:
    dataset = run.dataset(data_dir)
    report = calibrate_(
        run.model(),
        PartBatches(dataset, dataset.part("held_out"), 256),
        spread="keep",
        draws=run.training.eval_draws,
        likelihood=run.likelihood(),
        progress=lambda _stage, _left: None,
    )
    nll = min(report.after.nll, report.temperature_scaled.nll)
    return Trial(noise, run.path, nll, report.mean_temperature)


def _line(trial: Trial) -> str:
    what = f"noise {trial.noise:g}" if trial.noise else "no patches"
    return f"{what}: NLL {trial.nll:.4f} on the held-out part, best temperature {trial.temperature:.2f}"
