"""evaluate: everything that can be said of trained networks on test data, as a record for each."""

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..data import Dataset, Split, read
from ..data.corrupted_folders import read_corrupted
from ..draws import network_of
from ..errors import PatchbayesError
from ..files import write_atomically
from ..likelihoods import Gaussian
from ..patch_report import PatchReport, number_of_parameters, report_on
from ..patching import is_patched, patched_sites
from ..provenance import provenance
from ..training import RunFolder, TrainingConfig
from . import classification, regression
from .answers import ClassAnswers, class_answers, fitting_batch_size, value_answers
from .robustness import Classifier, compared_with, corruption_scores, out_of_distribution

_FILE = "evaluation.json"
SCHEMA = 1


@dataclass(frozen=True)
class Evaluating:
    """What to evaluate.

    split          part of the data, such as "test" or "test[5000:]".
    draws          S; `curve` the smaller numbers of draws that are shown beside it.
    temperature_on part of the data that a temperature is fitted on; None: the held-out part where there is one.
    ood            data sets whose test inputs are of another kind.
    corruptions    evaluate under the fifteen corruptions, on `corruption_examples` examples with `corruption_draws` draws;
                   a folder in the layout of CIFAR-C or ImageNet-C instead of True takes the images from there.
    replicates     of the bootstrap.
    """

    split: str = "test"
    draws: int = 200
    curve: tuple[int, ...] = (1, 5, 20, 100, 200)
    temperature_on: str | None = None
    ood: tuple[str, ...] = ()
    corruptions: bool | Path = False
    corruption_examples: int = 1000
    corruption_draws: int = 20
    severities: tuple[int, ...] = (1, 2, 3, 4, 5)
    which: str = "best"
    data_dir: Path | None = None
    replicates: int = 1000
    command: str | None = None


def evaluate(
    runs: Sequence[RunFolder], options: Evaluating, say: Callable[[str], None] = lambda text: None
) -> list[dict[str, Any]]:
    """A record for each run, in the order given; the first vanilla one is the reference of corruption errors."""
    if options.draws < 1 or options.corruption_draws < 1:
        raise PatchbayesError("evaluate: at least one draw is needed.")
    subjects = [_Subject(run, options) for run in runs]
    records = []
    for subject in subjects:
        say(f"evaluating {subject.name}")
        records.append(subject.record(say))
    if options.corruptions:
        _add_corruptions(subjects, records, options, say)
    return records


def write_evaluation(folder: Path, record: dict[str, Any]) -> Path:
    """Put the record into the run folder."""
    path = folder / _FILE
    write_atomically(path, (json.dumps(_finite(record), indent=1, ensure_ascii=False) + "\n").encode())
    return path


def read_evaluation(folder: Path) -> dict[str, Any]:
    """The record of a run folder."""
    path = folder / _FILE
    if not path.exists():
        raise PatchbayesError(f"{folder} has not been evaluated; run: patchbayes evaluate {shlex.quote(str(folder))}")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PatchbayesError(f"{path} cannot be read ({error}); evaluate the run again.") from None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise PatchbayesError(f"{path} is not an evaluation of this version; evaluate the run again.")
    return record


class _Subject:
    """A run with its network and data, and what it answered."""

    def __init__(self, run: RunFolder, options: Evaluating) -> None:
        self.run, self.options = run, options
        self.name = run.path.resolve().name
        self.model = run.model("last" if options.which == "last" else "best")
        self.dataset: Dataset = run.dataset(options.data_dir)
        self.split: Split = self.dataset.part(options.split)
        self.answers: ClassAnswers | None = None

    def record(self, say: Callable[[str], None]) -> dict[str, Any]:
        record = self._circumstances()
        if self.dataset.task == "classification":
            return record | self._classification(say)
        return record | self._regression()

    @property
    def classifier(self) -> Classifier:
        data = self.dataset
        return Classifier(self.name, self.model, data.preparation, data.input_shape, data.num_outputs)

    def _classification(self, say: Callable[[str], None]) -> dict[str, Any]:
        options, data = self.options, self.dataset
        size = fitting_batch_size(options.draws, data.num_outputs)
        batches = data.batches(self.split, size)
        answers = class_answers(self.model, batches, options.draws, curve=sorted({*options.curve, options.draws}))
        self.answers = answers
        fitted_on = options.temperature_on or ("held_out" if data.held_out is not None else None)
        temperature = None
        if fitted_on is not None:
            say(f"{self.name}: fitting a temperature on {fitted_on}")
            fitted = class_answers(self.model, data.batches(data.part(fitted_on), size), min(options.draws, 20))
            temperature = classification.temperature_scores(answers, fitted, fitted_on, options.replicates)
        found: list[dict[str, Any]] = []
        for spec in options.ood:
            say(f"{self.name}: inputs of {spec}")
            other = read(spec, options.data_dir, held_out=0).test
            found += [
                {"data": spec} | row
                for row in out_of_distribution(self.classifier, answers, other, min(options.draws, 20))
            ]
        return {
            "num_draws": answers.num_draws,
            "exact": answers.exact,
            "metrics": classification.class_scores(answers.log_probs, answers.targets, options.replicates),
            "temperature": temperature,
            "draws_curve": classification.draws_curve(answers.at_draws),
            **classification.shapes_of_confidence(answers),
            "diversity": classification.diversity(self.model, answers),
            "ood": found,
            "corruptions": None,
            "examples": classification.extreme_examples(answers, self.split, data.classes),
            "quantiles": None,
        }

    def _regression(self) -> dict[str, Any]:
        options, data = self.options, self.dataset
        refused = [name for name in ("ood", "corruptions", "temperature_on") if getattr(options, name)]
        if refused:
            raise PatchbayesError(f"evaluate: {self.name} is a regression; {refused[0]} is for classification.")
        likelihood = self.run.likelihood("last" if options.which == "last" else "best")
        assert isinstance(likelihood, Gaussian)
        mean, std = torch.tensor(data.preparation.target_mean), torch.tensor(data.preparation.target_std)
        answers = value_answers(self.model, data.batches(self.split, 256), options.draws, likelihood, mean, std)
        return {
            "num_draws": answers.num_draws,
            "exact": answers.exact,
            "metrics": regression.value_scores(answers, options.replicates),
            "quantiles": regression.quantile_curve(answers),
        }

    def _circumstances(self) -> dict[str, Any]:
        config = self.run.config
        training = config.get("training", {})
        patches = _what_was_patched(self.model)
        count = number_of_parameters(self.model)
        seconds = [row["train_seconds"] for row in self.run.history() if "train_seconds" in row]
        return {
            "schema": SCHEMA,
            "name": self.name,
            "folder": str(self.run.path),
            "task": self.dataset.task,
            "method": method_label(self.model),
            "model": config["model"],
            "sites": self.run.training.chosen_sites if training and patches else config.get("sites"),
            "data": self.dataset.name,
            "split": self.options.split,
            "num_examples": len(self.split),
            "classes": list(self.dataset.classes),
            "draws": self.options.draws,
            "seed": training.get("seed", config.get("seed", 0)),
            "command": self.options.command,
            "train_command": config.get("command") or _train_command(self.run),
            **provenance(),
            "parameters": {
                "unpatched": patches.parameters_before if patches else count,
                "patched": count,
                "patched_sites": len(patches.sites) if patches else 0,
                "log10_ensemble_size": patches.log10_outcomes if patches else 0.0,
            },
            "patch_report": str(patches) if patches else None,
            "training_seconds": sum(seconds) if seconds else None,
        }


def _what_was_patched(model: nn.Module) -> PatchReport | None:
    if not is_patched(model):
        return None
    network = network_of(model)
    report = report_on(model, network, network.sites, 0, {}, [])
    added = sum(site.parameters_added for site in report.sites)
    return replace(report, parameters_before=report.parameters_after - added)


def _train_command(run: RunFolder) -> str:
    """The command that makes such a run: what differs from the defaults."""
    settings = run.training.to_json()
    plain = TrainingConfig(data=settings["data"], model=settings["model"]).to_json()
    words = ["patchbayes", "train", run.path.name, "--data", settings["data"], "--model", settings["model"]]
    for key, value in settings.items():
        if value != plain[key] and key != "data_dir":
            words += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(words)


def method_label(model: nn.Module) -> str:
    """ "ECMP(K=5)", "vanilla"; several where sites differ."""
    if not is_patched(model):
        return "vanilla"
    return ", ".join(dict.fromkeys(site.method.label for site in patched_sites(model).values()))


def _add_corruptions(
    subjects: Sequence[_Subject], records: list[dict[str, Any]], options: Evaluating, say: Callable[[str], None]
) -> None:
    """Corrupt the images once, show them to all networks of the same data, and compare with the reference."""
    names = {subject.dataset.name for subject in subjects}
    if len(names) > 1:
        raise PatchbayesError(f"evaluate: runs on {' and '.join(sorted(names))} cannot be compared under corruption.")
    first = subjects[0]
    if len(first.dataset.input_shape) != 3:
        raise PatchbayesError(f"evaluate: corruptions are for images; {first.dataset.name} is a table.")
    split = first.split.subset(torch.arange(min(options.corruption_examples, len(first.split))))
    folder = options.corruptions if isinstance(options.corruptions, Path) else None

    def corrupted(name: str, severity: int) -> Split:
        assert folder is not None
        found = read_corrupted(folder, name, severity, first.dataset.classes, first.dataset.input_shape)
        return found.subset(torch.arange(min(options.corruption_examples, len(found))))

    scores = corruption_scores(
        [subject.classifier for subject in subjects],
        split,
        options.corruption_draws,
        severities=options.severities,
        corrupted=corrupted if folder else None,
        say=say,
    )
    reference = next((i for i, record in enumerate(records) if record["method"] == "vanilla"), None)
    clean = [_clean_error(subject, split, options.corruption_draws) for subject in subjects]
    for i, (record, found) in enumerate(zip(records, scores, strict=True)):
        found |= {
            "mce": None,
            "relative_mce": None,
            "reference": None,
            "clean_error": clean[i],
            "num_examples": len(split),
        }
        if reference is not None:
            compared_with(found, clean[i], scores[reference], clean[reference])
            found["reference"] = records[reference]["name"]
        record["corruptions"] = found


def _clean_error(subject: _Subject, split: Split, draws: int) -> float:
    raw, targets = split.fetch(torch.arange(len(split)))
    return classification.clean_error(subject.classifier.answers(raw, targets, draws))


def _finite(content: Any) -> Any:
    """JSON knows no NaN: null stands in its place."""
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and content - content != 0 else content
