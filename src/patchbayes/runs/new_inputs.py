"""Answers for new inputs: image files or rows of CSV files, one row of results each, as a stream."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..data import Dataset, Preparation, csv_rows
from ..data.image_files import SUFFIXES, decode_image, decode_images
from ..data.image_folder import test_view
from ..draws.draws import Draws
from ..errors import PatchbayesError
from ..likelihoods import Likelihood
from ..metrics import threshold_at_risk
from ..patching.network import network_of
from ..patching.patch import is_patched
from ..prediction import Conformal, conformal, predict
from ..prediction.predict import MOST_DRAWS, make_draws
from ..prediction.prediction import check_level
from ..views import Views
from .answers import class_answers, fitting_batch_size
from .folder import RunFolder, Which

_MOST = 10**6  # draws, or inputs at a time; beyond that a mistake
_SHOWN = 8


@dataclass(frozen=True)
class NewInputs:
    """A network of a run, ready to answer; all inputs by the same draws.

    taken: the draws, "auto" for as many as each input needs for the `tolerance`; None for an unpatched network.
    draws: how many set a threshold. threshold: an answer with a smaller probability is for a human. covering: what makes an
    answer a set of classes or an interval.
    """

    model: nn.Module
    run: RunFolder
    data_dir: Path | None
    likelihood: Likelihood
    draws: int
    taken: Draws | Literal["auto"] | None
    tolerance: float | None
    batch_size: int
    threshold: float | None = None
    risk: float | None = None
    covering: Conformal | None = None
    views: Views | None = None

    @property
    def _draws(self) -> Any:
        """What `predict` takes: the draws, or with a tolerance as many as that needs."""
        return self.taken if self.tolerance is None else "auto"

    @classmethod
    def open(
        cls,
        folder: Path,
        which: Which,
        data_dir: Path | None,
        *,
        draws: int | None = None,
        tolerance: float | None = None,
        batch_size: int = 64,
        trust_code: bool = False,
    ) -> "NewInputs":
        """Open a run. Give a number of draws, 20 if nothing is said, or the tolerance that each answer shall have."""
        if draws is not None and tolerance is not None:
            raise PatchbayesError(
                f"predict(draws={draws}, tolerance={tolerance:g}): a tolerance draws as often as each input needs; give one."
            )
        if tolerance is not None and not (math.isfinite(tolerance) and tolerance > 0):
            raise PatchbayesError(f"predict(tolerance={tolerance}): expected a finite number above 0.")
        draws = draws if draws is not None else 20 if tolerance is None else MOST_DRAWS
        for name, value in (("draws", draws), ("batch_size", batch_size)):
            if not 1 <= value <= _MOST:
                raise PatchbayesError(f"predict({name}={value}): expected 1 to {_MOST:,}.")
        run = RunFolder.open(folder, trust_code=trust_code)
        model = run.model(which)
        taken: Draws | Literal["auto"] | None = None
        if is_patched(model):
            auto = tolerance is not None
            taken = "auto" if auto else make_draws(model, network_of(model), draws, "balanced", None)
        if tolerance is not None and taken is None:
            raise PatchbayesError(
                f"predict: {folder} is not patched and answers once; a tolerance is for a network that draws."
            )
        views, likelihood = run.views(which), run.likelihood(which)
        return cls(model, run, data_dir, likelihood, draws, taken, tolerance, batch_size, views=views)

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
        dataset = self._unseen(part)
        size = fitting_batch_size(self.draws, dataset.num_outputs)
        found = class_answers(self.model, dataset.batches(dataset.part(part), size), self.draws, views=self.views)
        confidence, named = found.log_probs.max(1)
        threshold = threshold_at_risk(confidence.exp().clamp_max(1), named == found.targets, risk)
        return replace(self, threshold=threshold, risk=risk)

    def covered(self, level: float, part: str = "held_out") -> "NewInputs":
        """The same with answers that hold the truth with probability `level`, set on a part that was not trained on."""
        check_level("predict --coverage", level)
        dataset = self._unseen(part)
        size = fitting_batch_size(self.draws, dataset.num_outputs)
        batches = list(dataset.batches(dataset.part(part), size))
        found = self._predicted(batches)
        return replace(self, covering=conformal(found, torch.cat([targets for _, targets in batches]), level))

    def _unseen(self, part: str) -> Dataset:
        """The data of the run, where that part of it has not trained the network."""
        if part.strip().startswith("train"):
            raise PatchbayesError(
                f"predict: the network was trained on {part}, and errs less there than on new inputs; name a part that it has "
                "not seen, such as --risk-on test[:500]."
            )
        dataset = self.run.dataset(self.data_dir)
        if part == "held_out" and dataset.held_out is None:
            raise PatchbayesError(
                f"predict: {self.run.path} held no examples out; name a part that it was not trained on, such as "
                "--risk-on test[:500]."
            )
        return dataset

    @property
    def about_threshold(self) -> str:
        if self.threshold is None:
            return "no threshold was asked for."
        if self.threshold == math.inf:
            return f"no threshold could be shown to keep the risk below {self.risk:g}: every answer is for a human."
        return f"answers with a probability below {self.threshold:.4f} are for a human."

    def answers(self, files: Sequence[Path]) -> Iterator[dict[str, Any]]:
        """A row for each image or line, in order.

        An input that cannot be answered (a damaged image, outputs that are not finite) does not cost the others their
        rows: it is named in an error after all of them.
        """
        images = len(self.data["input_shape"]) == 3
        named: Iterator[tuple[str, Any]] = self._images(files) if images else self._lines(files)
        failed: list[str] = []
        while batch := list(itertools.islice(named, self.batch_size)):
            before = len(failed)
            names, raw = self._decoded(batch, failed) if images else _rows_as_tensor(batch)
            if names:
                yield from self._rows(names, self.preparation.inputs(raw), failed)
            if before == 0 and len(failed) == len(batch) > 1:
                break  # not a single one of the first batch: the network or the files are to blame, not an input
        if len(failed) == 1:
            raise PatchbayesError(failed[0])
        if failed:
            more = f"\n  - ... and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
            listing = "".join(f"\n  - {reason}" for reason in failed[:_SHOWN])
            raise PatchbayesError(f"predict: {len(failed)} of the inputs could not be answered:{listing}{more}")

    def _decoded(self, batch: list[tuple[str, Any]], failed: list[str]) -> tuple[list[str], Tensor]:
        """The images of a batch with their names; those that cannot be read are added to `failed`."""
        shape = tuple(self.data["input_shape"])
        view = test_view(shape[-1]) if str(self.data["spec"]).startswith("images:") else "cover"
        try:
            return [name for name, _ in batch], decode_images([file for _, file in batch], shape, view)
        except PatchbayesError:
            names, images = [], []
            for name, file in batch:
                try:
                    images.append(decode_image(file, shape, view))
                    names.append(name)
                except PatchbayesError as error:
                    failed.append(str(error))
            return names, torch.stack(images) if images else torch.empty(0)

    def _rows(self, names: list[str], inputs: Tensor, failed: list[str]) -> Iterator[dict[str, Any]]:
        """The rows of a batch; where it cannot be answered as a whole, each input by itself."""
        answer = self._class_rows if self.data["task"] == "classification" else self._value_rows
        try:
            rows = list(answer(names, inputs))
        except PatchbayesError as error:
            if len(names) == 1:
                failed.append(f"{names[0]}: {error}")
                return
            apart: list[str] = []
            found = [list(self._rows([name], inputs[i : i + 1], apart)) for i, name in enumerate(names)]
            if len(apart) == len(names):  # the network is to blame, not an input
                raise PatchbayesError(f"{names[0]} to {names[-1]}: {error}") from None
            failed += apart
            yield from itertools.chain(*found)
            return
        for row in rows:
            wrong = [key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
            if wrong:
                failed.append(f"{row['input']}: the {wrong[0]} is {row[wrong[0]]}, which is no answer.")
            else:
                yield row

    def _predicted(self, inputs: Any) -> Any:
        """The prediction of a batch or of batches; an unpatched network answers in one pass."""
        likelihood = None if self.data["task"] == "classification" else self.likelihood
        return predict(
            self.model, inputs, self._draws or 1, tolerance=self.tolerance, likelihood=likelihood, views=self.views
        )

    def _class_rows(self, names: list[str], inputs: Tensor) -> Iterator[dict[str, Any]]:
        found, classes = self._predicted(inputs), self.data["classes"]
        sets = None if self.covering is None else self.covering.sets(found)
        for i, name in enumerate(names):
            best = int(found.predicted_class[i])
            row = {
                "input": name,
                "class": classes[best],
                "probability": float(found.probs[i, best]),
                "epistemic": float(found.mutual_information[i]),
                "aleatoric": float(found.expected_entropy[i]),
                "draws": int(found.draws_used[i]),
            }
            if sets is not None:
                likely = found.probs[i].argsort(descending=True).tolist()
                row["set"] = [classes[c] for c in likely if sets[i, c]]
            yield row | ({} if self.threshold is None else {"refer": not row["probability"] >= self.threshold})

    def _value_rows(self, names: list[str], inputs: Tensor) -> Iterator[dict[str, Any]]:
        mean = torch.tensor(self.preparation.target_mean, dtype=torch.float64)
        std = torch.tensor(self.preparation.target_std, dtype=torch.float64)
        noise = float(getattr(self.likelihood, "precision")) ** -0.5  # noqa: B009  only Gaussian has one
        found = self._predicted(inputs)
        bounds = () if self.covering is None else zip(("low", "high"), self.covering.interval(found), strict=True)
        named = {"mean": found.mean, **dict(bounds)}
        epistemic = found.epistemic_variance.clamp_min(0).sqrt()
        for i, name in enumerate(names):
            row: dict[str, Any] = {"input": name}
            for d, target in enumerate(self.data["classes"]):
                label = "" if len(self.data["classes"]) == 1 else f"{target}_"
                row |= {
                    f"{label}{what}": float(value[i, d].double() * std[d] + mean[d]) for what, value in named.items()
                }
                row[f"{label}epistemic"] = float(epistemic[i, d].double() * std[d])
                row[f"{label}aleatoric"] = noise * float(std[d])
            yield row | {"draws": int(found.draws_used[i])}

    def _images(self, files: Sequence[Path]) -> Iterator[tuple[str, Path]]:
        for file in files:
            if file.is_dir():
                inside = sorted(p for p in file.rglob("*") if p.suffix.lower() in SUFFIXES and not p.is_dir())
                if not inside:
                    raise PatchbayesError(f"predict: the folder {file} holds no image ({', '.join(sorted(SUFFIXES))}).")
                yield from ((str(path), path) for path in inside)
            else:
                yield str(file), file

    def _lines(self, files: Sequence[Path]) -> Iterator[tuple[str, list[float]]]:
        for file in files:
            columns = self.data.get("columns")
            for numbers, values in csv_rows(file, self.data["features"], self.batch_size, columns):
                yield from ((f"{file.name}:{n}", row) for n, row in zip(numbers, values.tolist(), strict=True))


def _rows_as_tensor(batch: list[tuple[str, list[float]]]) -> tuple[list[str], Tensor]:
    return [name for name, _ in batch], torch.tensor([values for _, values in batch], dtype=torch.float32)
