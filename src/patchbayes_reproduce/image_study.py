"""What the experiments on images share: train every method with every seed, evaluate it, keep what the tables need.

Runs are folders of the working directory: an interrupted study goes on where it was, and several tables and figures come from
the same runs. A record that is there can be completed (`Workspace.known`), on another machine too: its runs are kept, and what
it lacks is made.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from patchbayes.data.corruptions import Strengths
from patchbayes.errors import PatchbayesError
from patchbayes.files import write_atomically
from patchbayes.patching.patch import is_patched
from patchbayes.runs import (
    EvaluationOptions,
    EvaluationRecord,
    RunFolder,
    TrainingConfig,
    evaluate,
    read_evaluation,
    train,
    write_evaluation,
)
from patchbayes.runs.answers import class_answers, fitting_batch_size
from patchbayes.runs.classification import draws_curve
from patchbayes.runs.evaluate import evaluate_corruptions
from patchbayes.runs.record import RunScores, as_json
from patchbayes.runs.robustness import compared_with

from .calibrated_runs import calibrated, ensemble_scores, outside_regime
from .experiment import Workspace

#: Methods of the paper's image experiments: label -> settings of the training (section 5, appendix D). Those with norm
#: components that start at random are Algorithm 1 by the letter; "mixed" is `pb.mixed(1.5)`, the noise that docs/training.md
#: advises for networks which learn their data by heart, with its learning rate for components.
METHODS: dict[str, dict[str, Any]] = {
    "emp_bn_output": {"method": "emp(5)", "sites": "norm+output"},
    "emp_bn": {"method": "emp(5)", "sites": "norm"},
    "ecmp_bn_output": {"method": "ecmp(5)", "sites": "norm+output"},
    "ecmp_bn": {"method": "ecmp(5)", "sites": "norm"},
    "dropout": {"method": "dropout(0.005)"},
    "vanilla": {"method": "vanilla"},
    "emp_random": {"method": "norm: emp(5, jitter=0.3); output: emp(5, init='independent')"},
    "ecmp_random": {"method": "norm: ecmp(5, jitter=0.3); output: ecmp(5, init='independent')"},
    "mixed": {"method": "norm+output: ecmp(5, jitter=0.3); hidden: dropout(0.15, predict=False)", "patch_lr": 5e-3},
}
#: Dropout at the best of several rates.
TUNED = "dropout_tuned"


@dataclass(frozen=True)
class DrawsStudy:
    """How many draws testing needs: scores of groups of S draws out of `pool`, for each S of the curve.

    Independent draws and balanced ones are made of the same networks and asked of the same examples, `split`.
    """

    pool: int
    curve: tuple[int, ...]
    split: str


@dataclass(frozen=True)
class Study:
    """Networks to train and how to look at them.

    Test draws are independent, as the paper's; `draws_study` puts balanced ones beside them, of the first seed's networks.
    calibrate   score every run also after `calibrate_`, and say whether the networks are in the regime of the paper's claims.
    later       methods that are run after all seeds of the others.
    corrupt_each  make the corrupted images once for each run, and keep its scores at once: for images that are small. Otherwise
                they are read or made once for all runs, at the end.
    rates       rates of dropout to choose from by the first seed's NLL on the held-out part: the method "dropout_tuned".
    """

    data: str
    model: str
    methods: Sequence[str]
    seeds: int
    training: Mapping[str, Any]
    draws: int = 200
    curve: tuple[int, ...] = (1, 20, 100, 200)
    split: str = "test"
    corruptions: bool | Path = False
    corruption_examples: int = 1000
    corruption_draws: int = 100
    corruption_strengths: Strengths = "imagenet"
    corrupt_each: bool = False
    draws_study: DrawsStudy | None = None
    note: str = ""
    each: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    calibrate: bool = False
    rates: tuple[float, ...] = ()
    later: Sequence[str] = ()

    def runs(self) -> list[tuple[str, int]]:
        """Method and seed of every run, in the order of their importance."""
        groups = (self.methods, self.later)
        return [(label, seed) for group in groups for seed in range(self.seeds) for label in group]

    def settings(self, label: str) -> dict[str, Any]:
        """What `train` is told of a method."""
        rate = label.removeprefix("dropout ")
        own = METHODS.get(label, {"method": f"dropout({rate})"})
        return {**self.training, **own, **self.each.get(label, {})}


def run_study(study: Study, setting: Workspace, name: str) -> dict[str, Any]:
    """The evaluations that the tables need, by method and seed: every run is kept as soon as it is made.

    Where the studies of the record are stopped, the next call goes on with the run at hand.
    """
    assert setting.work_dir is not None
    work = setting.work_dir / name
    known = _known_runs(study, setting.known)
    folders: dict[tuple[str, int], Path] = {}
    for label, seed in study.runs():
        if (label, seed) in known and _is_complete(study, known[label, seed]):
            continue
        with contextlib.suppress(_NotFinished):
            taken = _tuned_dropout(study, setting, work, known) if label == TUNED else label
            folders[label, seed] = _ran(study, setting, work, taken, seed)
    if not folders and not known:
        raise PatchbayesError(f"{work}: no run is finished yet; leave --finished out to go on with them.")
    if study.corruptions and not setting.finished:
        _corrupt(study, setting, list(folders.values()))
    rows = known | {run: _row(study, setting, run[1], folder) for run, folder in folders.items()}
    _compare_corruptions(rows)
    result = _circumstances(study, rows) | {"methods": _by_method(study, rows)}
    plain = [run for run in rows if run[0] == "vanilla"]
    if study.calibrate and len(plain) > 1:
        if all(run in folders for run in plain):
            result["ensemble"] = ensemble_scores([folders[run] for run in plain], study.split, setting.data_dir)
        elif setting.known and "ensemble" in setting.known:
            result["ensemble"] = setting.known["ensemble"]
    return result


_Rows = dict[tuple[str, int], dict[str, Any]]  # by method and seed
_SETTINGS = ("method", "sites", "patch_lr")  # what makes a method, beside the training that all have


def _row(study: Study, setting: Workspace, seed: int, folder: Path) -> dict[str, Any]:
    """What a record keeps of a run."""
    evaluation, config = read_evaluation(folder), RunFolder.open(folder).config
    kept = _kept(evaluation) | {name: config[name] for name in ("date", "commit")}
    kept["num_examples"] = evaluation.num_examples
    kept["settings"] = {name: config["training"][name] for name in _SETTINGS}
    if study.calibrate:
        kept["calibrated"] = calibrated(folder, study.split, setting.data_dir)
    if study.draws_study is not None and seed == 0:
        kept["draw_schemes"] = _draw_schemes(study.draws_study, setting, folder)
    return kept


def _circumstances(study: Study, rows: _Rows) -> dict[str, Any]:
    """What all runs of a record have in common. Data are named without the folder they lie in."""
    seeds = [sum(label == method for method, _ in rows) for label, _ in rows]
    return {
        "data": _named(study.data),
        "model": study.model,
        "split": study.split,
        "seeds": max(seeds, default=0),
        "draws": study.draws,
        "training": dict(study.training),
        "note": study.note,
        "num_examples": next((row["num_examples"] for row in rows.values()), 0),
    }


def _named(data: str) -> str:
    kind, _, path = data.partition(":")
    return f"{kind}:{Path(path).name}" if path else kind


def _by_method(study: Study, rows: _Rows) -> dict[str, list[dict[str, Any]]]:
    """The rows in the order in which they are run."""
    found: dict[str, list[dict[str, Any]]] = {}
    for label, seed in study.runs():
        if (label, seed) in rows:
            found.setdefault(label, []).append(rows[label, seed])
    return found


def _known_runs(study: Study, known: Mapping[str, Any] | None) -> _Rows:
    """The runs of a record of this very study; one of another is refused, and so are runs of a method that has changed."""
    if known is None:
        return {}
    there, asked = {**known, "data": _named(known["data"])}, json.loads(json.dumps(_circumstances(study, {})))
    for name in ("data", "model", "split", "draws", "training", "note"):
        if there[name] != asked[name]:
            raise PatchbayesError(
                f"the record that is there has {name} {there[name]}, this study {asked[name]}: it cannot be completed.\n"
                "  do       leave --add out, and all runs are made anew."
            )
    return {
        (label, kept["seed"]): {"num_examples": known["num_examples"], **kept}
        for label, found in known["methods"].items()
        for kept in found
        if label == TUNED or "settings" not in kept or kept["settings"] == _settings(study, label)
    }


def _settings(study: Study, label: str) -> dict[str, Any]:
    told = study.settings(label)
    return {name: told.get(name) for name in _SETTINGS}


def _is_complete(study: Study, kept: Mapping[str, Any]) -> bool:
    return not study.corruptions or kept["corruptions"] is not None


def _compare_corruptions(rows: _Rows) -> None:
    """mCE and relative mCE of every run against the first vanilla one."""
    read = {run: RunScores.from_json(row, f"the record of {run[0]}").corruptions for run, row in rows.items()}
    scores = {run: one for run, one in read.items() if one is not None}
    for reference in [run for run in scores if run[0] == "vanilla"][:1]:
        for run, one in scores.items():
            compared = compared_with(one, scores[reference], f"vanilla-{reference[1]}")
            rows[run]["corruptions"] = as_json(compared)


class _NotFinished(Exception):
    """A run that is not there, where only finished ones are asked for."""


def _ran(study: Study, setting: Workspace, work: Path, label: str, seed: int) -> Path:
    """The folder of a run that is trained, evaluated and, where asked for, calibrated."""
    folder = work / f"{label.replace(' ', '-')}-{seed}"
    if setting.finished:
        if not (folder / ("calibrated.json" if study.calibrate else "evaluation.json")).exists():
            raise _NotFinished
        return folder
    setting.say(f"{work.name}: {label}, seed {seed}")
    config = TrainingConfig(
        data=study.data,
        data_dir=None if setting.data_dir is None else str(setting.data_dir),
        model=study.model,
        seed=seed,
        **study.settings(label),
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    train(config, folder, resume=(folder / "config.json").exists(), quiet=True, trust_code=True)
    if not (folder / "evaluation.json").exists():
        _evaluate(study, setting, folder)
    if study.calibrate:
        calibrated(folder, study.split, setting.data_dir)
    if study.corruptions and study.corrupt_each:
        _corrupt(study, setting, [folder])
    return folder


def _tuned_dropout(study: Study, setting: Workspace, work: Path, known: _Rows) -> str:
    """Dropout at the rate whose calibrated prediction has the least NLL on the first seed's held-out part."""
    if (TUNED, 0) in known:
        return next(f"dropout {rate:g}" for rate in study.rates if known[TUNED, 0]["method"] == f"Dropout({rate:g})")
    tried = {f"dropout {rate:g}": 0.0 for rate in study.rates}
    for label in tried:
        folder = _ran(study, setting, work, label, 0)
        tried[label] = float(calibrated(folder, study.split, setting.data_dir)["held_out_nll"])
    return min(tried, key=lambda label: tried[label])


def _evaluate(study: Study, setting: Workspace, folder: Path) -> None:
    run = RunFolder.open(folder, trust_code=True)
    evaluate([run], _options(study, setting), setting.say, write_evaluation)


def _corrupt(study: Study, setting: Workspace, folders: Sequence[Path]) -> None:
    """Add the scores under corruption of the runs that lack them. Images are read and corrupted once, for all of these."""
    lacking = [folder for folder in folders if read_evaluation(folder).corruptions is None]
    if not lacking:
        return
    runs = [RunFolder.open(folder, trust_code=True) for folder in lacking]
    options = replace(_options(study, setting), corruptions=study.corruptions)
    records = [read_evaluation(folder) for folder in lacking]
    for folder, record in zip(lacking, evaluate_corruptions(runs, records, options, setting.say), strict=True):
        write_evaluation(folder, record)


def _options(study: Study, setting: Workspace) -> EvaluationOptions:
    return EvaluationOptions(
        split=study.split,
        draws=study.draws,
        curve=study.curve,
        corruption_examples=study.corruption_examples,
        corruption_draws=study.corruption_draws,
        corruption_strengths=study.corruption_strengths,
        sampling="iid",
        which="last",  # the paper evaluates what training ends with
        data_dir=setting.data_dir,
        replicates=50,
    )


def _draw_schemes(wanted: DrawsStudy, setting: Workspace, folder: Path) -> dict[str, Any] | None:
    """The curves of i.i.d. and of balanced draws of a run, kept in its folder; None of an unpatched network."""
    path = folder / "draw_schemes.json"
    asked = json.loads(json.dumps(asdict(wanted)))
    if path.exists():
        try:
            known = json.loads(path.read_text())
            if known["asked"] == asked:
                return dict(known["found"])
        except (ValueError, KeyError, TypeError):
            raise PatchbayesError(f"{path} cannot be read; delete it, and it is made again.") from None
    run = RunFolder.open(folder, trust_code=True)
    model = run.model("last")
    if not is_patched(model):
        return None
    data = run.dataset(setting.data_dir)
    size = fitting_batch_size(wanted.pool, data.num_outputs)
    found: dict[str, Any] = dict(asked)
    samplings: tuple[Literal["iid", "balanced"], ...] = ("iid", "balanced")
    for sampling in samplings:
        setting.say(f"{folder.name}: {wanted.pool} {sampling} draws")
        batches = data.batches(data.part(wanted.split), size)
        at_draws = class_answers(model, batches, wanted.pool, curve=wanted.curve, sampling=sampling).at_draws
        repeats = [len(scores.correct) for scores in at_draws.values()]
        found[sampling] = {"repeats": repeats, "curve": as_json(draws_curve(at_draws))}
    write_atomically(path, (json.dumps({"asked": asked, "found": found}, indent=1) + "\n").encode())
    return found


def _kept(record: EvaluationRecord) -> dict[str, Any]:
    """What the tables and figures of the paper are made of; pictures and commands stay in the run folder."""
    return {name: value for name, value in record.to_json().items() if name in RunScores.__dataclass_fields__}


def scores_of(result: Mapping[str, Any]) -> dict[str, list[RunScores]]:
    """What a record of a study keeps, by method and seed."""
    return {
        label: [RunScores.from_json(kept, f"the record of {label}") for kept in found]
        for label, found in result["methods"].items()
    }


def outside_claims(result: Mapping[str, Any]) -> str | None:
    """Why a study says nothing of the paper's claims; None where it does, as at paper scale, which is their own setting."""
    if result.get("scale") == "paper":
        return None
    rows = [kept.get("calibrated") for kept in result["methods"].get("vanilla", [])]
    if not all(rows):
        return "the record does not say whether the vanilla network fits its training data and is overconfident"
    return outside_regime(rows)
