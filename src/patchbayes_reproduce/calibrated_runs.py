"""Beside a run's raw scores: whether it is in the regime of the paper's claims, and how it scores once it is calibrated.

A claim on accuracy or calibration says something where the network without patches fits its training data and is too sure of
itself. Elsewhere no Bayesian method can help, and none is judged.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from patchbayes.bayesianizing import calibrate_
from patchbayes.data import Dataset, Split
from patchbayes.errors import PatchbayesError
from patchbayes.files import write_atomically
from patchbayes.metrics import accuracy, apply_temperature, fit_temperature
from patchbayes.prediction import predict_batches
from patchbayes.runs import RunFolder
from patchbayes.runs.answers import plain_outputs
from patchbayes.runs.classification import class_scores
from patchbayes.runs.record import as_json

#: What the vanilla network must have reached, on its training data and by the temperature that fits the held-out part.
TRAIN_ACCURACY, TEMPERATURE = 0.95, 1.1
#: Draws of a calibrated prediction, as `predict` takes by default.
CALIBRATED_DRAWS = 20
#: Less than `calibrate_` takes by default: its inputs through the network, and held-out examples.
_BUDGET, _EXAMPLES = 10_000, 1000
_BATCH = 250
_REPLICATES = 50


def outside_regime(regimes: Sequence[Mapping[str, float]]) -> str | None:
    """Why these vanilla networks say nothing of the paper's claims; None where each is in their regime."""
    if not regimes:
        return "no vanilla network to judge by"
    fitted = min(one["train_accuracy"] for one in regimes)
    if fitted < TRAIN_ACCURACY:
        return f"vanilla reaches {100 * fitted:.1f} % on its training data, below {100 * TRAIN_ACCURACY:g} %"
    temperature = min(one["temperature"] for one in regimes)
    if temperature < TEMPERATURE:
        return f"vanilla is not overconfident: its temperature is {temperature:.2f}, below {TEMPERATURE:g}"
    return None


def calibrated(folder: Path, split: str, data_dir: Path | None) -> dict[str, Any]:
    """The regime of a run and its calibrated scores, kept in its folder.

    train_accuracy and temperature are those of the mean network in one pass, as it was trained; the temperature, like
    `calibrate_`, on the held-out part. draws and one_pass: the scores on `split` after `calibrate_`.
    """
    path = folder / "calibrated.json"
    if path.exists():
        try:
            known: dict[str, Any] = json.loads(path.read_text())
            if known["split"] == split:
                return known
        except (ValueError, KeyError, TypeError):
            raise PatchbayesError(f"{path} cannot be read; delete it, and it is made again.") from None
    run = RunFolder.open(folder, trust_code=True)
    model, data = run.model("last"), run.dataset(data_dir)
    if data.held_out is None:
        raise PatchbayesError(f"{folder}: the run held nothing out to calibrate on; train it with held_out above 0.")
    trained = _log_probs(model, data, data.train, "mean")
    held_out = list(data.batches(data.held_out, _BATCH))
    report = calibrate_(model, held_out, draws=CALIBRATED_DRAWS, budget=_BUDGET, examples=_EXAMPLES)
    scored = data.part(split)
    ways: dict[str, int | Literal["mean"]] = {"draws": CALIBRATED_DRAWS, "one_pass": "mean"}
    rows = {
        name: as_json(class_scores(_log_probs(model, data, scored, draws), scored.targets, _REPLICATES))
        for name, draws in ways.items()
    }
    found = {
        "split": split,
        "train_accuracy": accuracy(trained.exp(), data.train.targets),
        "temperature": report.mean_temperature,
        "held_out_nll": report.after.nll,
        "spread": report.chosen,
        "draws_temperature": report.temperature,
        **rows,
    }
    write_atomically(path, (json.dumps(found, indent=1) + "\n").encode())
    return found


def ensemble_scores(folders: Sequence[Path], split: str, data_dir: Path | None) -> dict[str, Any]:
    """The explicit ensemble of vanilla runs: its scores as it is, and with a temperature fitted on the held-out part."""
    runs = [RunFolder.open(folder, trust_code=True) for folder in folders]
    models, data = [run.model("last") for run in runs], runs[0].dataset(data_dir)
    assert data.held_out is not None

    def averaged(part: Split) -> Tensor:
        each = torch.stack([_log_probs(model, data, part, "plain") for model in models])
        return each.logsumexp(0) - torch.tensor(float(len(models))).log()

    scored = data.part(split)
    raw, temperature = averaged(scored), fit_temperature(averaged(data.held_out), data.held_out.targets)
    softened = apply_temperature(raw.double(), temperature)
    return {
        "members": len(models),
        "temperature": temperature,
        "raw": as_json(class_scores(raw, scored.targets, _REPLICATES)),
        "calibrated": as_json(class_scores(softened, scored.targets, _REPLICATES)),
    }


def _log_probs(model: nn.Module, data: Dataset, part: Split, draws: int | Literal["mean", "plain"]) -> Tensor:
    """Log-probabilities (N, C), by draws, by the mean network, or of a network that has no patches."""
    inputs = [x for x, _ in data.batches(part, _BATCH)]
    if draws == "plain":
        return torch.cat([torch.log_softmax(plain_outputs(model, x).float(), -1) for x in inputs])
    answers: Any = predict_batches(model, inputs, draws=draws)
    return torch.cat([one.log_probs for one in answers])
