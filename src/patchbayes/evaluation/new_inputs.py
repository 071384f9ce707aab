"""Answers for new inputs: image files or rows of CSV files, one row of results each, as a stream."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data import Preparation, csv_rows
from ..data.image_files import SUFFIXES, decode_images
from ..draws import Draws, network_of
from ..errors import PatchbayesError
from ..likelihoods import Likelihood
from ..metrics import threshold_at_risk
from ..patching import is_patched
from ..prediction import predict
from ..prediction.predict import make_draws
from ..training import RunFolder
from ..training.run_folder import Which
from .answers import class_answers, fitting_batch_size, plain_outputs


@dataclass(frozen=True)
class NewInputs:
    """A network of a run, ready to answer; all inputs by the same draws.

    taken: the draws; None for an unpatched network. threshold: an answer with a smaller probability is for a human.
    """

    model: nn.Module
    run: RunFolder
    data_dir: Path | None
    likelihood: Likelihood
    draws: int
    taken: Draws | None
    tolerance: float | None
    batch_size: int
    threshold: float | None = None
    risk: float | None = None

    @classmethod
    def open(
        cls, folder: Path, which: Which, data_dir: Path | None, *, draws: int, tolerance: float | None, batch_size: int
    ) -> "NewInputs":
        for name, value in (("draws", draws), ("batch_size", batch_size)):
            if value < 1:
                raise PatchbayesError(f"predict: {name}={value}; at least 1 is required.")
        run = RunFolder.open(folder)
        model = run.model(which)
        taken = make_draws(model, network_of(model), draws, "balanced", None) if is_patched(model) else None
        if tolerance is not None and taken is None:
            raise PatchbayesError(
                f"predict: {folder} is not patched and answers once; a tolerance is for a network that draws."
            )
        return cls(model, run, data_dir, run.likelihood(which), draws, taken, tolerance, batch_size)

    @property
    def data(self) -> Mapping[str, Any]:
        """What the run remembers of its data; the data set itself need not be there."""
        content: Mapping[str, Any] = self.run.config["data"]
        return content

    @property
    def preparation(self) -> Preparation:
        return Preparation.from_config(self.data["preparation"])

    def referring(self, risk: float, part: str = "held_out") -> "NewInputs":
        """The same with a threshold set on a part that was not trained on; `metrics.threshold_at_risk` says what it keeps."""
        if self.data["task"] != "classification":
            raise PatchbayesError("predict: a risk is for classification; a regression gives deviations instead.")
        if part.strip().startswith("train"):
            raise PatchbayesError(
                f"predict: the network was trained on {part}, and errs less there than on new inputs; set the risk on a part "
                "that it has not seen, such as test[:500]."
            )
        dataset = self.run.dataset(self.data_dir)
        if part == "held_out" and dataset.held_out is None:
            raise PatchbayesError(
                f"predict: {self.run.path} held no examples out to set a risk on; name a part that it was not trained on, such "
                "as --risk-on test[:500]."
            )
        size = fitting_batch_size(self.draws, dataset.num_outputs)
        found = class_answers(self.model, dataset.batches(dataset.part(part), size), self.draws)
        confidence, named = found.log_probs.max(1)
        threshold = threshold_at_risk(confidence.exp().clamp_max(1), named == found.targets, risk)
        return replace(self, threshold=threshold, risk=risk)

    @property
    def about_threshold(self) -> str:
        if self.threshold is None:
            return "no threshold was asked for."
        if self.threshold == math.inf:
            return f"no threshold could be shown to keep the risk below {self.risk:g}: every answer is for a human."
        return f"answers with a probability below {self.threshold:.4f} are for a human."

    def answers(self, files: Sequence[Path]) -> Iterator[dict[str, Any]]:
        """A row for each image or line, in order."""
        shape = tuple(self.data["input_shape"])
        images = len(shape) == 3
        named: Iterator[tuple[str, Any]] = self._images(files) if images else self._lines(files)
        while batch := list(itertools.islice(named, self.batch_size)):
            names, values = [name for name, _ in batch], [value for _, value in batch]
            raw = decode_images(values, shape) if images else torch.tensor(values, dtype=torch.float32)
            yield from self._rows(names, self.preparation.inputs(raw))

    def _rows(self, names: list[str], inputs: Tensor) -> Iterator[dict[str, Any]]:
        if self.data["task"] == "classification":
            yield from self._class_rows(names, inputs)
        else:
            yield from self._value_rows(names, inputs)

    def _class_rows(self, names: list[str], inputs: Tensor) -> Iterator[dict[str, Any]]:
        if self.taken is not None:
            found = predict(self.model, inputs, self.taken, tolerance=self.tolerance)
            probs, epistemic, aleatoric, used = (
                found.probs, found.mutual_information, found.expected_entropy, found.draws_used
            )  # fmt: skip
        else:
            probs = plain_outputs(self.model, inputs).softmax(-1)
            aleatoric = torch.special.entr(probs).sum(-1)
            epistemic, used = torch.zeros_like(aleatoric), torch.ones(len(probs), dtype=torch.int64)
        for i, name in enumerate(names):
            best = int(probs[i].argmax())
            row = {
                "input": name,
                "class": self.data["classes"][best],
                "probability": float(probs[i, best]),
                "epistemic": float(epistemic[i]),
                "aleatoric": float(aleatoric[i]),
                "draws": int(used[i]),
            }
            yield row | ({} if self.threshold is None else {"refer": row["probability"] < self.threshold})

    def _value_rows(self, names: list[str], inputs: Tensor) -> Iterator[dict[str, Any]]:
        mean = torch.tensor(self.preparation.target_mean, dtype=torch.float64)
        std = torch.tensor(self.preparation.target_std, dtype=torch.float64)
        noise = float(getattr(self.likelihood, "precision")) ** -0.5  # noqa: B009  only Gaussian has one
        if self.taken is not None:
            found = predict(self.model, inputs, self.taken, tolerance=self.tolerance, likelihood=self.likelihood)
            middle, epistemic, used = found.mean, found.epistemic_variance.clamp_min(0).sqrt(), found.draws_used
        else:
            middle = plain_outputs(self.model, inputs)
            epistemic, used = torch.zeros_like(middle), torch.ones(len(middle), dtype=torch.int64)
        for i, name in enumerate(names):
            row: dict[str, Any] = {"input": name}
            for d, target in enumerate(self.data["classes"]):
                label = "" if len(self.data["classes"]) == 1 else f"{target}_"
                row[f"{label}mean"] = float(middle[i, d].double() * std[d] + mean[d])
                row[f"{label}epistemic"] = float(epistemic[i, d].double() * std[d])
                row[f"{label}aleatoric"] = noise * float(std[d])
            yield row | {"draws": int(used[i])}

    def _images(self, files: Sequence[Path]) -> Iterator[tuple[str, Path]]:
        for file in files:
            if file.is_dir():
                inside = sorted(path for path in file.rglob("*") if path.suffix.lower() in SUFFIXES)
                if not inside:
                    raise PatchbayesError(f"predict: the folder {file} holds no image ({', '.join(sorted(SUFFIXES))}).")
                yield from ((str(path), path) for path in inside)
            else:
                yield str(file), file

    def _lines(self, files: Sequence[Path]) -> Iterator[tuple[str, list[float]]]:
        for file in files:
            for numbers, values in csv_rows(file, self.data["features"], self.batch_size):
                yield from ((f"{file.name}:{n}", row) for n, row in zip(numbers, values.tolist(), strict=True))
