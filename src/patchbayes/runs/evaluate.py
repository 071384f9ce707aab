"""evaluate: everything that can be said of trained networks on test data, as a record for each."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..data import Dataset, Split, read
from ..data.corrupted_folders import read_corrupted
from ..data.corruptions import CORRUPTIONS, Strengths
from ..errors import PatchbayesError
from ..files import probe_writing
from ..likelihoods import Gaussian
from ..patching.network import network_of
from ..patching.patch import is_patched
from ..patching.report import PatchReport, number_of_parameters, report_on
from ..prediction.predict import Sampling
from ..provenance import provenance
from ..ranks import rank_and_number
from . import classification, regression
from .answers import class_answers, fitting_batch_size, value_answers
from .config import TrainingConfig
from .diversity import diversity
from .folder import RunFolder, Which
from .network import method_label
from .record import FILE, EvaluationRecord, OutOfDistribution, Parameters
from .robustness import Classifier, compared_with, corruption_scores, fitted, out_of_distribution

_MOST = 10**6  # draws, examples or replicates; beyond that a mistake, which would take years


@dataclass(frozen=True)
class EvaluationOptions:
    """What to evaluate, and how.

    split          part of the data, such as "test" or "test[5000:]".
    draws          S; `curve` the smaller numbers of draws that are shown beside it.
    temperature_on part of the data that a temperature is fitted on, which shares no example with `split`; None: the held-out
                   part where there is one and it is not the one that is scored.
    ood            data sets whose test inputs are of another kind.
    corruptions    evaluate under the fifteen corruptions, on `corruption_examples` examples with `corruption_draws` draws;
                   a folder in the layout of CIFAR-C or ImageNet-C instead of True takes the images from there.
    corruption_strengths  those of ImageNet-C, or "small" ones, made for images of about 32 pixels.
    sampling       how draws are made: "balanced" as in `predict`, or "iid", independently, as the paper does.
    which          the "best" checkpoint of a training, or the "last".
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
    corruption_strengths: Strengths = "imagenet"
    severities: tuple[int, ...] = (1, 2, 3, 4, 5)
    sampling: Sampling = "balanced"
    which: Which = "best"
    data_dir: Path | None = None
    replicates: int = 1000
    command: str | None = None


def evaluate(
    runs: Sequence[RunFolder],
    options: EvaluationOptions,
    say: Callable[[str], None] = lambda text: None,
    keep: Callable[[Path, EvaluationRecord], object] = lambda folder, record: None,
) -> list[EvaluationRecord]:
    """A record for each run, in the order given; the first vanilla one is the reference of corruption errors.

    `keep(folder, record)` is called as soon as a run is done, and again when the scores under corruption are there: with
    `write_evaluation`, an interruption loses no more than the run at hand. Of several processes (`torchrun`, after
    `init_process_group`) all call this: inputs and draws are divided over them (`predict_on_ranks`), all return the records,
    and the first one keeps and says.
    """
    if rank_and_number()[0] != 0:
        say, keep = lambda text: None, lambda folder, record: None
    for name in ("draws", "corruption_draws", "corruption_examples", "replicates"):
        if not 1 <= getattr(options, name) <= _MOST:
            raise PatchbayesError(f"evaluate: {name}={getattr(options, name)}; expected 1 to {_MOST:,}.")
    subjects = [_Evaluated(run, options) for run in runs]
    for run in runs:
        probe_writing(run.path / FILE)
    # Names in `ood` are the caller's own words, unlike those in a run folder.
    others = {spec: read(spec, options.data_dir, held_out=0, trust_code=True).test for spec in options.ood}
    for spec, other in others.items():
        for subject in subjects:
            if spec == subject.run.config["data"]["spec"]:
                raise PatchbayesError(
                    f"evaluate: {spec} is what {subject.name} was trained on, not data of another kind."
                )
            fitted(other.fetch(torch.zeros(1, dtype=torch.int64))[0], subject.dataset.input_shape)  # refuses tables
    if options.corruptions:
        _check_corruptions(subjects, options)
    records = []
    for subject in subjects:
        say(f"evaluating {subject.name}")
        records.append(subject.record(others, say))
        keep(subject.run.path, records[-1])
    if options.corruptions:
        records = _with_corruptions(subjects, records, options, say)
        for subject, record in zip(subjects, records, strict=True):
            keep(subject.run.path, record)
    return records


def evaluate_corruptions(
    runs: Sequence[RunFolder],
    records: Sequence[EvaluationRecord],
    options: EvaluationOptions,
    say: Callable[[str], None] = lambda text: None,
) -> list[EvaluationRecord]:
    """The records of runs that are evaluated already, with their scores under corruption; nothing else is done again."""
    if not options.corruptions:
        raise PatchbayesError(
            "evaluate_corruptions(options): expected corruptions=True or a folder of corrupted images."
        )
    subjects = [_Evaluated(run, options) for run in runs]
    _check_corruptions(subjects, options)
    return _with_corruptions(subjects, records, options, say)


class _Evaluated:
    """A run with its network and data, and what it answered."""

    def __init__(self, run: RunFolder, options: EvaluationOptions) -> None:
        self.run, self.options = run, options
        self.name = run.path.resolve().name
        self.model = run.model(options.which)
        self.dataset: Dataset = run.dataset(options.data_dir)
        self.split: Split = self.dataset.part(options.split)
        self.fitted_on = options.temperature_on
        self.views = run.views(options.which)
        self._check()
        if self.fitted_on is None and self.dataset.held_out is not None and not self._scores("held_out"):
            self.fitted_on = "held_out"

    def record(self, others: Mapping[str, Split], say: Callable[[str], None]) -> EvaluationRecord:
        scores = self._classification(others, say) if self.dataset.task == "classification" else self._regression()
        return EvaluationRecord(**self._circumstances(), **scores)

    def _check(self) -> None:
        """Refuse what cannot be evaluated, before the work begins."""
        options, name = self.options, self.name
        if self.dataset.task == "regression":
            refused = [key for key in ("ood", "corruptions", "temperature_on") if getattr(options, key)]
            if refused:
                raise PatchbayesError(f"evaluate: {name} is a regression; {refused[0]} is for classification.")
        if options.temperature_on is not None and self._scores(options.temperature_on):
            raise PatchbayesError(
                f"evaluate: the temperature would be fitted on {options.temperature_on}, and some of these examples are "
                f"scored (split {options.split}).\n  do       give parts that share nothing, such as test[:500] and test[500:]."
            )
        chosen_on = self.run.config.get("held_out") if self.run.kind == "bayesianize" else None
        if chosen_on is not None and self._scores(chosen_on):
            raise PatchbayesError(
                f"evaluate: the jitter of {name} was chosen on {chosen_on}, and some of these examples would be scored (split "
                f"{options.split}).\n  do       give a split without them, such as test[500:] after test[:500]."
            )

    def _scores(self, part: str) -> bool:
        """Whether some examples of the part are among those that are scored."""
        name, scored = _numbers(self.dataset, self.options.split)
        other, numbers = _numbers(self.dataset, part)
        return name == other and max(scored.start, numbers.start) < min(scored.stop, numbers.stop)

    @property
    def classifier(self) -> Classifier:
        data = self.dataset
        return Classifier(
            self.name,
            self.model,
            data.preparation,
            data.input_shape,
            data.num_outputs,
            self.options.sampling,
            self.views,
        )

    def _classification(self, others: Mapping[str, Split], say: Callable[[str], None]) -> dict[str, Any]:
        options, data = self.options, self.dataset
        size = fitting_batch_size(options.draws, data.num_outputs)
        batches = data.batches(self.split, size)
        curve = sorted({*options.curve, options.draws})
        how: dict[str, Any] = {"sampling": options.sampling, "views": self.views}
        answers = class_answers(self.model, batches, options.draws, curve=curve, **how)
        temperature = None
        if self.fitted_on is not None:
            say(f"{self.name}: fitting a temperature on {self.fitted_on}")
            held_out = data.batches(data.part(self.fitted_on), size)
            kept = class_answers(self.model, held_out, min(options.draws, 20), **how)
            temperature = classification.temperature_scores(answers, kept, self.fitted_on, options.replicates)
        reliability, histogram, coverage = classification.shapes_of_confidence(answers)
        return {
            "num_draws": answers.num_draws,
            "exact": answers.exact,
            "metrics": classification.class_scores(answers.log_probs, answers.targets, options.replicates),
            "temperature": temperature,
            "draws_curve": classification.draws_curve(answers.at_draws),
            "reliability": reliability,
            "histogram": histogram,
            "coverage": coverage,
            "diversity": None if self.run.draws_agree(options.which) else diversity(self.model, answers),
            "ood": self._out_of_distribution(others, size, say),
            "examples": classification.extreme_examples(answers, self.split, data.classes),
        }

    def _out_of_distribution(
        self, others: Mapping[str, Split], size: int, say: Callable[[str], None]
    ) -> tuple[OutOfDistribution, ...]:
        """Both sides by as many draws: the mutual information of few draws is smaller than that of many."""
        if not others:
            return ()
        few = min(self.options.draws, 20)
        batches = self.dataset.batches(self.split, size)
        known = class_answers(self.model, batches, few, sampling=self.options.sampling, views=self.views)
        found: list[OutOfDistribution] = []
        for spec, other in others.items():
            say(f"{self.name}: inputs of {spec}")
            found += out_of_distribution(self.classifier, known, other, spec, few)
        return tuple(found)

    def _regression(self) -> dict[str, Any]:
        options, data = self.options, self.dataset
        likelihood = self.run.likelihood(options.which)
        assert isinstance(likelihood, Gaussian)
        mean, std = torch.tensor(data.preparation.target_mean), torch.tensor(data.preparation.target_std)
        batches = data.batches(self.split, 256)
        answers = value_answers(self.model, batches, options.draws, likelihood, mean, std, options.sampling)
        return {
            "num_draws": answers.num_draws,
            "exact": answers.exact,
            "metrics": regression.value_scores(answers, options.replicates),
            "diversity": diversity(self.model),
            "quantiles": regression.quantile_curve(answers),
        }

    def _circumstances(self) -> dict[str, Any]:
        config = self.run.config
        training = config.get("training", {})
        patches = _what_was_patched(self.model)
        count = number_of_parameters(self.model)
        seconds = [row["train_seconds"] for row in self.run.history() if "train_seconds" in row]
        return {
            "name": self.name,
            "folder": str(self.run.path),
            "task": self.dataset.task,
            "method": method_label(self.model),
            "model": config["model"],
            "sites": self.run.training.chosen_sites if training and patches else config.get("sites"),
            "data": self.dataset.name,
            "split": self.options.split,
            "num_examples": len(self.split),
            "classes": tuple(self.dataset.classes),
            "draws": self.options.draws,
            "views": None if self.views is None else self.views.name,
            "seed": training.get("seed", config.get("seed", 0)),
            "command": self.options.command,
            "train_command": config.get("command") or _train_command(self.run),
            **provenance(),
            "parameters": Parameters(
                unpatched=patches.parameters_before if patches else count,
                patched=count,
                patched_sites=len(patches.sites) if patches else 0,
                log10_ensemble_size=patches.log10_outcomes if patches else 0.0,
            ),
            "patch_report": str(patches) if patches else None,
            "training_seconds": sum(seconds) if seconds else None,
        }


def _numbers(dataset: Dataset, text: str) -> tuple[str, range]:
    """A part as `Dataset.part` takes it: "test[5:]" as ("test", the numbers from 5 on)."""
    name, _, bounds = text.strip().rstrip("]").partition("[")
    dataset.part(text)  # refuses what is no part
    return name, range(len(dataset.part(name)))[slice(*(int(b) if b else None for b in (bounds or ":").split(":")))]


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
    if run.is_calibrated:
        words += ["--calibrate", *(["--views"] if run.views() is not None else [])]
    return shlex.join(words)


def _check_corruptions(subjects: Sequence[_Evaluated], options: EvaluationOptions) -> None:
    names = {subject.dataset.name for subject in subjects}
    if len(names) > 1:
        raise PatchbayesError(f"evaluate: runs on {' and '.join(sorted(names))} cannot be compared under corruption.")
    for subject in subjects:
        if len(subject.dataset.input_shape) != 3:
            raise PatchbayesError(f"evaluate: corruptions are for images; {subject.dataset.name} is a table.")
    if isinstance(options.corruptions, Path):
        first = subjects[0].dataset
        read_corrupted(options.corruptions, CORRUPTIONS[0], options.severities[0], first.classes, first.input_shape)


def _with_corruptions(
    subjects: Sequence[_Evaluated],
    records: Sequence[EvaluationRecord],
    options: EvaluationOptions,
    say: Callable[[str], None],
) -> list[EvaluationRecord]:
    """Corrupt the images once, show them to all networks of the same data, and compare with the reference."""
    first = subjects[0]
    split = _spread(first.split, options.corruption_examples)
    folder = options.corruptions if isinstance(options.corruptions, Path) else None

    def corrupted(name: str, severity: int) -> Split:
        assert folder is not None
        found = read_corrupted(folder, name, severity, first.dataset.classes, first.dataset.input_shape)
        return _spread(found, options.corruption_examples)

    found = corruption_scores(
        [subject.classifier for subject in subjects],
        split,
        options.corruption_draws,
        severities=options.severities,
        corrupted=corrupted if folder else None,
        strengths=options.corruption_strengths,
        say=say,
    )
    scores = [
        replace(one, clean_error=_clean_error(subject, split, options.corruption_draws), num_examples=len(split))
        for subject, one in zip(subjects, found, strict=True)
    ]
    reference = next((i for i, subject in enumerate(subjects) if not is_patched(subject.model)), None)
    if reference is not None:
        scores = [compared_with(one, scores[reference], records[reference].name) for one in scores]
    return [replace(record, corruptions=one) for record, one in zip(records, scores, strict=True)]


def _spread(split: Split, most: int) -> Split:
    """At most that many examples, evenly over the split: those of a class may stand together."""
    number = min(most, len(split))
    return split.subset(torch.arange(number) * len(split) // number)


def _clean_error(subject: _Evaluated, split: Split, draws: int) -> float:
    raw, targets = split.fetch(torch.arange(len(split)))
    return classification.clean_error(subject.classifier.answers(raw, targets, draws))
