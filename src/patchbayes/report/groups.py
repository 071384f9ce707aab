"""Runs that belong together: groups that differ by seed alone, and comparisons of groups on the same examples."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from ..runs.record import Metric, Task
from .estimates import Estimate, over_seeds
from .records import EvaluatedRun


@dataclass(frozen=True)
class Group:
    """Runs that differ only by seed, in the order of their seeds; `series` numbers the colors of a comparison."""

    label: str
    runs: tuple[EvaluatedRun, ...]
    series: int

    @property
    def first(self) -> EvaluatedRun:
        return self.runs[0]

    @property
    def seeds_text(self) -> str:
        """How many seeds, and how many draws, in words."""
        draws = self.first.num_draws or self.first.draws
        return self._seeds_and_draws(draws, " (all)" if self.first.exact and draws and draws > 1 else "")

    @property
    def corrupted_text(self) -> str:
        """The same for the scores under corruption, which have draws of their own."""
        draws = self.first.corruptions.draws if self.first.corruptions else None
        return self._seeds_and_draws(1 if draws and self.first.num_draws == 1 else draws)

    def _seeds_and_draws(self, draws: int | None, more: str = "") -> str:
        seeds = f"{len(self.runs)} seeds" if len(self.runs) > 1 else "1 seed"
        return seeds if draws is None else f"{seeds}, S = {draws:,}{more}"

    def estimate(self, value: Callable[[EvaluatedRun], float | None]) -> Estimate:
        """The mean over seeds of a plain number of each run."""
        return over_seeds({_seed(run, i): value(run) for i, run in enumerate(self.runs)})

    def metric(self, metric: Callable[[EvaluatedRun], Metric | None]) -> Estimate:
        """The mean over seeds of a metric; for one run its own interval."""
        found = {_seed(run, i): metric(run) for i, run in enumerate(self.runs)}
        known = {seed: entry for seed, entry in found.items() if entry is not None and entry.value is not None}
        single = next((Estimate(entry.value, entry.low, entry.high) for entry in known.values()), None)
        return over_seeds(
            {seed: entry.value for seed, entry in known.items()}, single, [entry.floor for entry in known.values()]
        )


@dataclass(frozen=True)
class Comparison:
    """All groups that were scored on the same examples: what may stand side by side in a table."""

    task: Task
    data: str
    split: str
    num_examples: int | None
    groups: tuple[Group, ...]

    @property
    def title(self) -> str:
        return f"{self.data}, {self.split}" if self.split else self.data

    @property
    def runs(self) -> tuple[EvaluatedRun, ...]:
        return tuple(run for group in self.groups for run in group.runs)


def compare(runs: Sequence[EvaluatedRun]) -> list[Comparison]:
    """The comparisons, and in each the groups, in the order in which they first appear."""
    places: dict[tuple[Task, str, str, int | None], list[EvaluatedRun]] = {}
    for run in runs:
        places.setdefault((run.task, run.data, run.split, run.num_examples), []).append(run)
    comparisons = []
    for (task, data, split, num_examples), members in places.items():
        grouped = _grouped(members)
        groups = tuple(
            Group(label, tuple(group), series)
            for series, (label, group) in enumerate(zip(_labels(grouped), grouped, strict=True))
        )
        comparisons.append(Comparison(task, data, split, num_examples, groups))
    return comparisons


def _grouped(runs: Sequence[EvaluatedRun]) -> list[list[EvaluatedRun]]:
    """A seed that appears twice opens a new group: counting it again would make an interval look narrower than it is."""
    groups: list[tuple[object, list[EvaluatedRun]]] = []
    for run in runs:
        identity = _identity(run)
        for known, members in groups:
            if known == identity and run.seed is not None and run.seed not in {member.seed for member in members}:
                members.append(run)
                break
        else:
            groups.append((identity, [run]))
    return [sorted(members, key=lambda run: run.seed or 0) for _, members in groups]


def _identity(run: EvaluatedRun) -> object:
    """What must agree for runs to be one group: everything that was recorded, but seed, name and folder."""
    return run.method, run.model, run.sites, run.draws, _command(run)


def _command(run: EvaluatedRun) -> tuple[str, ...]:
    """The words of the training command without its seed and without the run's own folder."""
    command = run.train_command or ""
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    own = {run.name, PurePath(run.folder).name} - {""}
    kept: list[str] = []
    seed_follows = False
    for before, word in zip(["", *words], words, strict=False):
        option = word.rpartition("=")[0]
        if seed_follows or option in ("--seed", "seed"):
            if kept and kept[-1] == "--set":  # --set seed=1
                kept.pop()
            seed_follows = False
        elif word == "--seed":
            seed_follows = True
        elif option or before.startswith("-") or PurePath(word).name not in own:
            kept.append(word)
    return tuple(kept)


def _labels(groups: Sequence[Sequence[EvaluatedRun]]) -> list[str]:
    """The method's name; where several groups share it, also what tells them apart, in the last resort a number."""
    labels = [group[0].method or "(no method)" for group in groups]
    for marks_of in (_recorded, _command, lambda run: (run.name,)):
        for label in {label for label in labels if labels.count(label) > 1}:
            same = [i for i, other in enumerate(labels) if other == label]
            marks = [marks_of(groups[i][0]) for i in same]
            for i, own in zip(same, marks, strict=True):
                apart = [mark for mark in own if mark != "--set" and any(mark not in other for other in marks)]
                labels[i] = f"{label}, {' '.join(mark.lstrip('-') for mark in apart)}" if apart else label
    return [
        label if labels.count(label) == 1 else f"{label} ({labels[: i + 1].count(label)})"
        for i, label in enumerate(labels)
    ]


def _recorded(run: EvaluatedRun) -> tuple[str, ...]:
    draws = () if run.draws is None else (f"S = {run.draws:,}",)
    return tuple(text for text in (run.model, run.sites) if text) + draws


def _seed(run: EvaluatedRun, position: int) -> int:
    """The seed; a run that does not say one stands alone in its group."""
    return position if run.seed is None else run.seed
