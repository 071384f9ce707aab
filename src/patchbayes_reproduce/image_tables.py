"""What the tables and figures of the image studies show: the paper's numbers beside ours, all methods raw and calibrated."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from patchbayes.runs.record import RunScores

from .calibrated_runs import CALIBRATED_DRAWS
from .experiment import ComparedNumber, TextTable, as_text
from .image_study import outside_claims, scores_of
from .seed_statistics import interval_text, mean_of, paired_verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def runs_of(result: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Date and seconds of training of each run."""
    return [(kept["date"], kept["training_seconds"]) for kepts in result["methods"].values() for kept in kepts]


PERCENT = {"top1": "accuracy", "top5": "top5_accuracy", "ece": "ece", "mce": "mce"}


def value_of(scores: RunScores, column: str) -> float | None:
    """A column of the paper's tables, in percent."""
    value = scores.value(PERCENT[column])
    return None if value is None else 100 * value


def comparison_rows(
    result: Mapping[str, Any], published: Sequence[Mapping[str, str]], same_scale: bool
) -> list[ComparedNumber]:
    """The paper's table beside ours. At paper scale within means one point; at another scale nothing can be compared."""
    why = "" if same_scale else f"another scale: {result['note'] or result['data']}"
    made = []
    found = scores_of(result)
    for line in published:
        label = line["method"] if line["method"] in found else f"{line['method']}_bn_output"
        records = found.get(label)
        if not records:
            continue
        for column in PERCENT:
            ours = mean_of([value_of(record, column) for record in records])
            made.append(
                ComparedNumber(f"{label}, {column} %", float(line[column]), ours, 1.0 if same_scale else None, why)
            )
    return made


def score_table(result: Mapping[str, Any]) -> TextTable:
    """Accuracy, likelihood and calibration by method: mean and 95 % interval over seeds; the paired verdict on the NLL."""
    header = [
        "method",
        "parameters",
        "top-1 %",
        "top-5 %",
        "NLL",
        "ECE %",
        "floor %",
        "MCE %",
        "NLL against vanilla",
    ]
    lines = []
    found = scores_of(result)
    plain = found.get("vanilla")
    outside = outside_claims(result)
    for label, records in found.items():
        nll = [record.value("nll") for record in records]
        floor = mean_of([_percent(record.metrics["ece"].floor) for record in records])
        reference = None if plain is None else [record.value("nll") for record in plain]
        lines.append(
            [
                label,
                f"{records[0].parameters.patched:,}",
                *(interval_text([value_of(record, column) for record in records]) for column in ("top1", "top5")),
                interval_text(nll, 4),
                interval_text([value_of(record, "ece") for record in records]),
                as_text(floor, 3),
                interval_text([value_of(record, "mce") for record in records]),
                against(nll, reference, outside) if label != "vanilla" else "-",
            ]
        )
    return header, lines


def against(values: Sequence[float | None], reference: Sequence[float | None] | None, outside: str | None) -> str:
    """The paired verdict against a reference, of the seeds that both have; none outside of the regime of the claims."""
    if reference is None:
        return "-"
    if outside is not None:
        return "not comparable"
    both = min(len(values), len(reference))
    return paired_verdict(values[:both], reference[:both])


def calibrated_table(result: Mapping[str, Any]) -> TextTable:
    """Every method after `calibrate_` on the same held-out part, by draws and in one pass, and the explicit ensemble."""
    rows = {label: [kept["calibrated"] for kept in kepts] for label, kepts in result["methods"].items()}
    plain = [row["draws"]["nll"]["value"] for row in rows["vanilla"]] if "vanilla" in rows else None
    outside = outside_claims(result)
    lines = []
    for label, found in rows.items():
        scores = {
            (way, name): [row[way][name]["value"] for row in found]
            for way in ("draws", "one_pass")
            for name in ("accuracy", "nll", "ece")
        }
        lines.append(
            [
                label,
                str(len(found)),
                interval_text([100 * row["train_accuracy"] for row in found]),
                interval_text([row["temperature"] for row in found]),
                interval_text([100 * value for value in scores["draws", "accuracy"]]),
                interval_text(scores["draws", "nll"], 4),
                interval_text([100 * value for value in scores["draws", "ece"]]),
                interval_text(scores["one_pass", "nll"], 4),
                "-" if label == "vanilla" else against(scores["draws", "nll"], plain, outside),
            ]
        )
    ensemble = result.get("ensemble")
    if ensemble:
        of = {name: ensemble["calibrated"][name]["value"] for name in ("accuracy", "nll", "ece")}
        values = [as_text(100 * of["accuracy"], 3), as_text(of["nll"]), as_text(100 * of["ece"], 3)]
        raw = f"raw NLL {as_text(ensemble['raw']['nll']['value'])}, ECE {as_text(100 * ensemble['raw']['ece']['value'], 3)} %"
        name = f"explicit ensemble of the {ensemble['members']} vanilla networks ({raw})"
        lines.append([name, "1", "-", as_text(ensemble["temperature"], 3), *values, "-", "-"])
    header = ["method", "seeds", "training accuracy %", "temperature of the mean network", "top-1 %"]
    header += [f"NLL, {CALIBRATED_DRAWS} draws", "ECE %", "NLL, one pass", "NLL against vanilla"]
    return header, lines


def calibration_figure(result: Mapping[str, Any]) -> "Figure":
    """Accuracy against confidence, the examples of all seeds pooled (figures 4, 5 and 7)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="tab:gray", linewidth=1, linestyle=":")
    for label, records in scores_of(result).items():
        points = zip(*(_bins(record) for record in records), strict=True)
        sums = [tuple(map(sum, zip(*bins, strict=True))) for bins in points]
        kept = [(confidence / count, right / count) for count, confidence, right in sums if count > 5]
        axes.plot([x for x, _ in kept], [y for _, y in kept], marker="o", markersize=3, label=label)
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axes.legend(fontsize="small")
    return figure


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _bins(scores: RunScores) -> list[tuple[float, float, float]]:
    """Number of examples, sum of confidences, number of right ones of each bin."""
    found = scores.reliability
    assert found is not None
    values = zip(found.count, found.confidence, found.accuracy, strict=True)
    return [(n, n * (confidence or 0.0), n * (accuracy or 0.0)) for n, confidence, accuracy in values]


#: Scores of a curve, and what they are multiplied by.
CURVE_SCORES = (("top5_accuracy", 100), ("accuracy", 100), ("ece", 100), ("mce", 100), ("nll", 1))
CURVE_TITLES = ("top-5 %", "top-1 %", "ECE %", "MCE %", "NLL")


def scheme_table(result: Mapping[str, Any]) -> dict[str, TextTable]:
    """Independent and balanced draws of the first seed's networks, where a study looked at both."""
    studied = {label: records[0].get("draw_schemes") for label, records in result["methods"].items()}
    first = next((found for found in studied.values() if found), None)
    if first is None:
        return {}
    title = (
        f"Independent and balanced draws of the same networks (seed 0, {first['split']}): mean over groups of S draws out "
        f"of {first['pool']:,}, ± the Monte-Carlo standard error of one group"
    )
    return {title: _schemes(studied)}


def _schemes(studied: Mapping[str, Mapping[str, Any] | None]) -> TextTable:
    """A curve's standard error is that of the mean over R groups; a single group varies sqrt(R) times as much."""
    lines = []
    for label, found in studied.items():
        for place, draws in enumerate(found["curve"] if found else []):
            for sampling in ("iid", "balanced"):
                assert found is not None
                repeats, curve = found[sampling]["repeats"][place], found[sampling]["curve"]
                cells = []
                for name, scale in CURVE_SCORES:
                    error = curve[name]["standard_error"][place]
                    alone = None if error is None else error * repeats**0.5
                    cells.append(with_error(scale * curve[name]["value"][place], alone, scale))
                lines.append([label, str(draws), sampling, str(repeats), *cells])
    return ["method", "S", "draws", "groups", *CURVE_TITLES], lines


def with_error(value: float | None, error: float | None, scale: float) -> str:
    """A mean (scaled already), and its error times `scale` where there is one."""
    return as_text(value) if error is None else f"{as_text(value)} ± {as_text(scale * error, 2)}"
