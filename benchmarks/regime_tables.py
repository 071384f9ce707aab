"""Tables and the picture of training by regime, from the records of benchmarks/from_scratch.py."""

import json
import math
import statistics
from typing import Any

from records import RESULTS

from patchbayes.cli.demo_table import form_of_dropout, titled
from patchbayes.cli.reliability import reliability_picture
from patchbayes.metrics.student import two_sided_p

_TITLES = {
    "regime_fashion": "Fashion-MNIST, 2,000 images at 14 x 14",
    "regime_underfit": "the same images, under-fitted",
    "regime_uci": "Concrete, published splits",
    "regime_cifar": "CIFAR-100, 20 classes x 250 images at 16 x 16",
    "regime_intents": "MiniLM, 150 intents x 5 requests",
}


def front(record: dict[str, Any]) -> str:
    """README's table: six rows."""
    rows = titled(record["seeds"], record)
    contestants = [
        "plain",
        "plain",
        f"dropout:{record['dropout_rate']:g}",
        "plain",
        *[f"mixed:{record['noise']:g}"] * 2,
    ]
    lines = ["| | NLL | ECE | accuracy | training step | passes |", "|---|---|---|---|---|---|"]
    for (title, row), contestant in zip(rows.items(), contestants, strict=True):
        lines.append(
            f"| {title.replace('bayesianize_', '`bayesianize_`')} | {row['nll']:.3f} | {100 * row['ece']:.1f} % "
            f"| {100 * row['accuracy']:.1f} % | {_time(record, contestant)} | {row['passes']:.0f} |"
        )
    number = len(record["seeds"])
    seeds = f"Mean of {number} seeds" if number > 1 else "One seed"
    lines += [
        "",
        f"2,000 small pictures of clothes, {record['epochs']} epochs; all rows but the first calibrated on 1,000 others; 2,000 "
        f"test images. {seeds}; dropout's rate is the best of {len(record['search']['dropout'])}. {_said(record)} "
        f"Command: `{record['command']}`, {_commits(record)}.",
    ]
    return "\n".join(lines)


def _commits(record: dict[str, Any]) -> str:
    """The commit of a record, and those of the results that it took over from an earlier one."""
    earlier: dict[str, list[str]] = {}
    for kind, commit in record.get("reused", {}).items():
        earlier.setdefault(commit, []).append(kind)
    return f"commit {record['commit']}" + "".join(f", {' and '.join(k)} of {c}" for c, k in earlier.items())


def _tried(record: dict[str, Any]) -> str:
    rates = list(record["search"]["dropout"])
    if len(rates) == 1:
        return f"dropout rate {rates[0]} alone was tried"
    return f"dropout's rate is the best of {', '.join(rates)} on the first seed's held-out data"


def _said(record: dict[str, Any]) -> str:
    """How the NLL of patches in one pass compares, paired over seeds; "better" needs p < 0.01. "" for one seed."""
    if not record["noise"]:
        return f"Held-out data chose no patches, which is {_compared(record, 'dropout')}."
    found = [text for rival in ("temperature scaling", "dropout") if (text := _compared(record, rival))]
    return f"Patches in one pass are {' and '.join(found)}." if found else ""


def _beside_dropout(records: list[dict[str, Any]]) -> str:
    """NLL of patches as a part of dropout's better form: in one pass, in their better form, and where held-out data choose."""
    ratios: dict[str, list[float]] = {"one pass": [], "better": [], "chosen": []}
    for record in records:
        names = f"mixed:{record['noise']:g}", f"dropout:{record['dropout_rate']:g}"
        rows = {
            "one pass": [[_row(r, n, record) for r in record["seeds"]] for n in (_one_pass(record), "dropout")],
            "better": [[_row(r, n, record) for r in record["seeds"]] for n in (_better_form(record), "dropout")],
            "chosen": [[_chosen(r, n) for r in record["seeds"]] for n in names],
        }
        for key, (ours, rival) in rows.items():
            ratios[key].append(statistics.fmean(r["nll"] for r in ours) / statistics.fmean(r["nll"] for r in rival))
    each = {key: ", ".join(f"{ratio:.3f}" for ratio in found) for key, found in ratios.items()}
    means = {key: statistics.fmean(found) for key, found in ratios.items()}
    return (
        "NLL of patches in one pass, times that of dropout in its better form, by regime in this order: "
        f"{each['one pass']}; on average {means['one pass']:.3f}. In their better form by held-out data too (20 draws or one "
        "pass; for networks trained without patches `bayesianize_` or temperature scaling): "
        f"{each['better']}; on average {means['better']:.3f}. Where each seed's held-out data choose between a method and "
        f"nothing, for both alike: {each['chosen']}; on average {means['chosen']:.3f}."
    )


def _better_form(record: dict[str, Any]) -> str:
    """The row of ours with the least NLL on held-out examples, over all seeds."""
    noise = record["noise"]
    forms = [f"mixed {noise:g}, {form}" for form in ("draws", "one pass")]
    forms = forms if noise else ["bayesianize_", "temperature scaling"]
    return min(forms, key=lambda name: statistics.fmean(_row(r, name, record)["held_out_nll"] for r in record["seeds"]))


def _one_pass(record: dict[str, Any]) -> str:
    return f"mixed {record['noise']:g}, one pass"


def _compared(record: dict[str, Any], rival: str) -> str:
    ours = _one_pass(record)
    differences = [
        _row(results, ours, record)["nll"] - _row(results, rival, record)["nll"] for results in record["seeds"]
    ]
    mean, p = statistics.fmean(differences), _paired_p(differences)
    if p is None:
        return ""
    word = "not significantly different from" if p >= 0.01 else "better than" if mean < 0 else "worse than"
    text = f"p = {p:.2g}" if p >= 0.0001 else "p < 0.0001"
    return f"{word} {rival} (NLL {mean:+.3f}, {text})"


def _paired_p(differences: list[float]) -> float | None:
    if len(differences) < 2:
        return None
    deviation = statistics.stdev(differences)
    if deviation == 0:
        return None
    return two_sided_p(statistics.fmean(differences) / (deviation / math.sqrt(len(differences))), len(differences) - 1)


def _row(results: dict[str, Any], name: str, record: dict[str, Any]) -> dict[str, Any]:
    if name == "dropout":
        rate = f"{record['dropout_rate']:g}"
        found: dict[str, Any] = results[f"dropout:{rate}"]["rows"]
        return found[f"dropout {rate}, {form_of_dropout(record['seeds'], record)}"]
    return next(result["rows"][name] for result in results.values() if name in result["rows"])


def _time(record: dict[str, Any], contestant: str) -> str:
    """Processor time of a training step in units of the plain network's, where it was measured."""
    return f"x {record['step_times'][contestant]:.2f}" if contestant in record.get("step_times", {}) else "not measured"


def regimes(records: list[dict[str, Any]]) -> str:
    """All rows, a block for each regime, and how patches compare in it."""
    lines = ["| | accuracy or RMSE | NLL | ECE | temperature | training step |", "|---" * 6 + "|"]
    ordered = [record for title in _TITLES for record in records if record["benchmark"] == title]
    for record in ordered:
        number = len(record["seeds"])
        seeds = f"{number} seeds" if number > 1 else "one seed"
        lines.append(f"| **{_TITLES[record['benchmark']]}**, {record['epochs']} epochs, {seeds} | | | | | |")
        for contestant in record["seeds"][0]:
            for title in [*record["seeds"][0][contestant]["rows"], *_choice(contestant)]:
                rows = [
                    _chosen(results, contestant) if title in _choice(contestant) else results[contestant]["rows"][title]
                    for results in record["seeds"]
                ]
                classes = "accuracy" in rows[0]
                right = _spread([100 * row["accuracy"] for row in rows], 1, " %") if classes else ""
                cells = [
                    right or _spread([row["rmse"] for row in rows], 2, ""),
                    _spread([row["nll"] for row in rows], 3, ""),
                    f"{100 * statistics.fmean(row['ece'] for row in rows):.1f} %" if classes else "",
                    f"{statistics.fmean(row['temperature'] for row in rows):.2f}",
                    _time(record, contestant),
                ]
                lines.append(f"| {title} | {' | '.join(cells)} |")
    said = [f"- {_TITLES[record['benchmark']]}: {_tried(record)}. {_said(record)}".rstrip() for record in ordered]
    commands = "; ".join(f"`{record['command']}` ({_commits(record)})" for record in ordered)
    notes = f"Mean of the seeds ± standard deviation; 20 draws; paired t-tests. Commands: {commands}."
    return "\n".join([*lines, "", *said, "", _beside_dropout(ordered), "", notes])


def ensembles(records: list[dict[str, Any]]) -> str:
    """What an ensemble gains over temperature scaling, and which part of that patches in one pass have."""
    lines = []
    for record in records:
        regime = json.loads((RESULTS / f"regime_{record['benchmark'].removeprefix('ensemble_')}.json").read_text())
        by_seed = dict(zip(regime["seed_numbers"], regime["seeds"], strict=True))
        scaled, ours = (
            [_row(by_seed[seed], name, regime)["nll"] for seed in record["seed_numbers"]]
            for name in ("temperature scaling", _one_pass(regime))
        )
        nll = statistics.fmean(next(iter(rows.values()))["nll"] for rows in record["seeds"])
        share = (statistics.fmean(scaled) - statistics.fmean(ours)) / (statistics.fmean(scaled) - nll)
        lines.append(
            f"An ensemble of {record['members']} networks with a temperature ({_TITLES[regime['benchmark']]}, seeds "
            f"{', '.join(map(str, record['seed_numbers']))}): NLL {nll:.4f}, against {statistics.fmean(scaled):.4f} of "
            f"temperature scaling and {statistics.fmean(ours):.4f} of patches in one pass, which have {100 * share:.0f} % of "
            f"its gain. Command: `{record['command']}` (commit {record['commit']})."
        )
    return "\n".join(lines)


def own_loop(record: dict[str, Any]) -> str:
    """README's loop with noise from the first step, with `warm_up_` and without patches, by the number of epochs."""
    rows = {(row["epochs"], row["loop"], row["seed"]): row for row in record["rows"]}
    seeds, epochs = record["seed_numbers"], sorted({row["epochs"] for row in record["rows"]})
    loops = list(dict.fromkeys(row["loop"] for row in record["rows"]))

    def cell(number: int, loop: str, form: str, name: str) -> list[float]:
        return [rows[number, loop, seed][form][name] for seed in seeds]

    lines = [
        "| | accuracy | NLL | temperature | NLL, batch-norm statistics estimated again | steps that drew |",
        "|---|---|---|---|---|---|",
    ]
    for number in epochs:
        lines.append(f"| **{number} epochs** | | | | | |")
        for loop in loops:
            shares = [statistics.fmean(rows[number, loop, seed]["shares"] or [loop != "original"]) for seed in seeds]
            lines.append(
                f"| {loop.replace('warm_up_', '`warm_up_`')} "
                f"| {_spread([100 * value for value in cell(number, loop, 'as trained', 'accuracy')], 1, ' %')} "
                f"| {_spread(cell(number, loop, 'as trained', 'nll'), 3, '')} "
                f"| {statistics.fmean(cell(number, loop, 'as trained', 'temperature')):.2f} "
                f"| {_spread(cell(number, loop, 'statistics again', 'nll'), 3, '')} "
                f"| {100 * statistics.fmean(shares):.0f} % |"
            )
    lines += [
        "",
        f"Fashion-MNIST, 2,000 images at 14 x 14, in one pass, each with a temperature fitted to 1,000 held-out images; 2,000 "
        f"test images; mean of the seeds {', '.join(map(str, seeds))} ± standard deviation. Command: `{record['command']}` "
        f"(commit {record['commit']}).",
    ]
    return "\n".join(lines)


def _choice(contestant: str) -> list[str]:
    """The row in which every seed's held-out data choose between a method and temperature scaling, as --noise auto does."""
    kind, _, number = contestant.partition(":")
    return [f"{kind} or nothing, by held-out data"] if kind in ("mixed", "dropout") and float(number) else []


def _chosen(results: dict[str, Any], contestant: str) -> dict[str, Any]:
    """Of temperature scaling and the forms of one contestant, the one with the least NLL on a seed's held-out data."""
    forms = [results["plain"]["rows"]["temperature scaling"], *results[contestant]["rows"].values()]
    return min(forms, key=lambda row: float(row["held_out_nll"]))


def _spread(values: list[float], digits: int, unit: str) -> str:
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{unit}{spread}"


def before_and_after(record: dict[str, Any]) -> str:
    """The picture of README: the original network, and the one trained with patches in one pass."""
    rows = titled(record["seeds"], record)
    return reliability_picture({"before": rows["original"], "after, in one pass": rows["(b) in one pass"]})
