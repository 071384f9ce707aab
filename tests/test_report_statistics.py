"""What the report concludes: intervals over seeds, which value is best, which runs are one group, what has collapsed."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from patchbayes.metrics.student import student_t
from patchbayes.report.collapse import sentence, verdict
from patchbayes.report.estimates import Estimate, beats, best, mean_interval, over_seeds
from patchbayes.report.groups import compare
from patchbayes.report.measures import Measure, measure
from patchbayes.report.tables import tables
from simulated_records import read_run, simulate, simulate_regression


def runs(methods=("EMP(K=5)",), seeds=(0, 1)):
    return [read_run(record) for record in simulate(methods, seeds)[0]]


# ---- estimates


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 10, 19, 50, 301])
@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
def test_student_t_is_that_of_scipy(degrees, level):
    assert student_t(degrees, level) == pytest.approx(stats.t.ppf((1 + level) / 2, degrees), rel=1e-9)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8))
def test_the_interval_over_seeds_is_the_t_interval(values):
    low, high = mean_interval(values)
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    assert (low, high) == pytest.approx((np.mean(values) - half, np.mean(values) + half), abs=1e-7)


def test_one_seed_keeps_its_own_interval_and_several_get_theirs():
    own = Estimate(1.0, 0.8, 1.3)
    single = over_seeds({4: 1.0}, own, [0.1])
    assert (single.value, single.low, single.high, single.floor, single.half_width) == (1.0, 0.8, 1.3, 0.1, None)
    several = over_seeds({0: 1.0, 1: 2.0}, own, [0.1, 0.3, None])
    assert several.value == 1.5
    assert several.floor == pytest.approx(0.2)
    assert several.half_width == pytest.approx(stats.t.ppf(0.975, 1) * 0.5)
    assert over_seeds({0: None}).value is None
    assert over_seeds({0: 1.0, 1: math.inf}).low is None


def seeds(*values):
    return over_seeds(dict(enumerate(values)))


def test_best_needs_differences_that_seeds_agree_on():
    steady, higher = seeds(1.0, 2.0, 3.0), seeds(1.1, 2.1, 3.11)
    assert steady.high > higher.low  # the intervals overlap widely, the differences do not contain zero
    assert best([steady, higher], "higher") == 1
    assert best([steady, higher], "lower") == 0
    assert best([steady, seeds(1.5, 1.5, 3.5)], "higher") is None
    assert best([steady, higher], "none") is None


def test_best_needs_intervals_that_do_not_overlap_where_seeds_differ():
    one, apart, near = Estimate(1, 0.9, 1.1), Estimate(2, 1.9, 2.1), Estimate(2, 1.05, 2.1)
    assert best([one, apart], "higher") == 1
    assert best([one, apart], "lower") == 0
    assert best([one, near], "higher") is None
    assert best([one, Estimate(2)], "higher") is None  # no interval
    assert best([one, apart, Estimate(None)], "higher") == 1
    assert best([one, apart, near], "higher") is None  # must be better than every other one
    assert best([one], "higher") is None
    assert best([Estimate(None), one], "higher") is None


def test_a_variant_is_no_rival_of_its_own_method_unless_alone():
    one, twin, other = Estimate(2, 1.9, 2.1), Estimate(2.05, 1.9, 2.2), Estimate(1, 0.9, 1.1)
    assert best([one, twin, other], "higher") is None
    assert best([one, twin, other], "higher", [0, 0, 1]) == 1
    assert best([one, other], "higher", [0, 0]) == 0


def test_equal_values_beat_nothing():
    assert not beats(seeds(1, 1), seeds(1, 1), "higher")
    assert not beats(seeds(1, 1), seeds(1, 1 + 1e-15), "lower")
    assert not beats(seeds(math.inf, 1), seeds(1, 1), "higher")


def test_under_no_difference_best_is_marked_in_less_than_five_percent():
    rng = np.random.default_rng(0)
    marked = sum(best([seeds(*rng.normal(size=3)) for _ in range(4)], "lower") is not None for _ in range(2000))
    power = sum(best([seeds(*rng.normal(size=3)), seeds(*(9 + rng.normal(size=3)))], "lower") == 0 for _ in range(200))
    assert marked <= stats.binom.isf(1e-6, 2000, 0.05)
    assert power > 150


# ---- numbers as text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("accuracy", 0.71234, "71.2"),
        ("nll", 1.12849, "1.128"),
        ("log_density", -1.5, "−1.500"),  # noqa: RUF001
        ("rmse", 53.1234, "53.12"),
        ("rmse", 0.00314159, "0.003142"),
        ("rmse", 123456.7, "123457"),
        ("rmse", 1.5e-9, "1.5e−09"),  # noqa: RUF001
        ("rmse", 0.0, "0"),
        ("nll", math.inf, "∞"),
        ("nll", None, "–"),  # noqa: RUF001
        ("my own", 2.0, "2.000"),
    ],
)
def test_numbers_are_written_with_sense(name, value, text):
    assert measure(name).show(value) == text


def test_an_interval_has_the_decimals_of_its_value():
    assert measure("rmse").show(0.00876, beside=0.9924) == "0.0088"
    assert Measure("x", decimals=1).show(0.26, beside=1000.0) == "0.3"


# ---- groups


def test_runs_that_differ_by_seed_are_one_group_in_order_of_seeds():
    (comparison,) = compare(runs(("vanilla", "EMP(K=5)"), (2, 0, 1)))
    assert [group.label for group in comparison.groups] == ["vanilla", "EMP(K=5)"]
    assert [[run.seed for run in group.runs] for group in comparison.groups] == [[0, 1, 2]] * 2
    assert comparison.groups[0].seeds_text == "3 seeds, S = 1"


def test_the_seed_is_found_in_every_way_a_command_says_it():
    for spelling in ("--seed {}", "--seed={}", "--set seed={}", "--set other=1 --set seed={} --quiet", "'--seed' {}"):
        records, _ = simulate(["EMP(K=5)"], [0, 1])
        for record in records:
            record["train_command"] = (
                f"patchbayes train runs/{record['name']} {spelling.format(record['seed'])} --lr 0.1"
            )
        assert len(compare([read_run(r) for r in records])[0].groups) == 1
    # A seed that is the default need not be said.
    records[0]["train_command"] = "patchbayes train emp-seed0 --lr 0.1"
    records[1]["train_command"] = "patchbayes train emp-seed1 --set seed=1 --lr 0.1"
    assert len(compare([read_run(r) for r in records])[0].groups) == 1


@pytest.mark.parametrize(
    ("key", "value", "label"),
    [
        ("sites", "norm", "EMP(K=5), norm"),
        ("model", "resnet18", "EMP(K=5), resnet18"),
        ("draws", 5, "EMP(K=5), S = 5"),
        ("train_command", "patchbayes train emp-seed1 --seed 1 --lr 0.5 'open quote", "EMP(K=5), "),
        ("seed", 0, "EMP(K=5), emp-seed1"),  # a seed is not counted twice
        ("seed", None, "EMP(K=5), emp-seed1"),
    ],
)
def test_runs_that_differ_in_more_are_groups_with_their_own_names(key, value, label):
    records, _ = simulate(["EMP(K=5)"], [0, 1])
    records[1][key] = value
    (comparison,) = compare([read_run(record) for record in records])
    assert len(comparison.groups) == 2
    assert comparison.groups[1].label.startswith(label)
    assert comparison.groups[0].label != comparison.groups[1].label


def test_settings_tell_groups_apart_by_their_words():
    records, _ = simulate(["EMP(K=5)"], [0, 0])
    records[1] |= {"name": "b", "folder": "runs/b"}
    records[1]["train_command"] = records[0]["train_command"].replace("emp-seed0", "b") + " --set lr=0.5"
    (comparison,) = compare([read_run(record) for record in records])
    assert [group.label for group in comparison.groups] == ["EMP(K=5)", "EMP(K=5), lr=0.5"]


def test_a_folder_may_be_named_like_a_setting():
    records, _ = simulate(["EMP(K=5)"], [0, 1])
    for record, folder in zip(records, ("runs/emp", "runs/emp-1"), strict=True):
        record |= {"name": folder.removeprefix("runs/"), "folder": folder}
        record["train_command"] = f"patchbayes train {folder} --method emp --set init=emp --set seed={record['seed']}"
    (comparison,) = compare([read_run(record) for record in records])
    assert [group.seeds_text for group in comparison.groups] == ["2 seeds, S = 40"]


def test_the_same_run_twice_is_numbered():
    records, _ = simulate(["EMP(K=5)"], [0, 0])
    (comparison,) = compare([read_run(record) for record in records])
    assert [group.label for group in comparison.groups] == ["EMP(K=5) (1)", "EMP(K=5) (2)"]


def test_only_runs_on_the_same_examples_are_compared():
    records = simulate(["EMP(K=5)"], [0, 1])[0] + simulate_regression([0])[0]
    records[1]["split"] = "test[:5000]"
    comparisons = compare([read_run(record) for record in records])
    assert [c.title for c in comparisons] == ["cifar10, test[5000:]", "cifar10, test[:5000]", "diabetes, test"]
    assert [len(c.groups) for c in comparisons] == [1, 1, 2]


# ---- tables


def column(table, key):
    index = next(i for i, c in enumerate(table.columns) if c.key == key)
    return [row.cells[index] for row in table.rows]


def test_the_summary_shows_mean_interval_and_floor():
    records, _ = simulate(("vanilla", "ECMP(K=5)"))
    summary = tables(compare([read_run(record) for record in records])[0])["summary"]
    assert [row.derived for row in summary.rows] == [False, True, False, True]
    values = [record["metrics"]["ece"]["value"] for record in records[:3]]
    floors = [record["metrics"]["ece"]["floor"] for record in records[:3]]
    half = stats.t.ppf(0.975, 2) * np.std(values, ddof=1) / math.sqrt(3)
    cell = column(summary, "ece")[0]
    assert cell.text == f"{100 * np.mean(values):.1f}"
    assert cell.details == (f"±\N{NO-BREAK SPACE}{100 * half:.1f}", f"floor {100 * np.mean(floors):.1f}")
    scaled = [record["temperature"]["metrics"]["nll"]["value"] for record in records[3:]]
    assert column(summary, "nll")[3].text == f"{np.mean(scaled):.3f}"


def test_a_value_is_bold_only_where_the_seeds_support_it():
    records, _ = simulate(("vanilla", "ECMP(K=5)"))
    for record in records:
        record["temperature"] = None
    summary = tables(compare([read_run(record) for record in records])[0])["summary"]
    assert [cell.best for cell in column(summary, "nll")] == [False, True]
    for record in records[3:]:
        record["metrics"]["nll"]["value"] = records[0]["metrics"]["nll"]["value"] - 0.01 * (record["seed"] == 0)
    summary = tables(compare([read_run(record) for record in records])[0])["summary"]
    assert [cell.best for cell in column(summary, "nll")] == [False, False]


def test_corruption_tables_average_over_severities_and_seeds():
    records, _ = simulate(["vanilla"], [0, 1])
    made = tables(compare([read_run(record) for record in records])[0])
    errors = np.array([record["corruptions"]["error"] for record in records])
    assert column(made["corruption"], "mean_error")[0].text == f"{100 * errors.mean():.1f}"
    assert column(made["corruption"], "mce")[0].text == "100.0"  # the reference itself
    assert made["corruption"].rows[0].detail == "2 seeds, S = 1"
    assert made["corruption"].notes[0] == "Means are over 15 corruptions of 300 images, severity 1, 2, 3, 4, 5."
    assert [row.label for row in made["corruptions"].rows][:2] == ["gaussian noise", "shot noise"]
    assert made["corruptions"].rows[3].cells[0].text == f"{100 * errors[:, 3].mean():.1f}"


def test_scores_under_corruption_name_their_own_draws_and_severities():
    (record,), _ = simulate(["EMP(K=5)"], [0])
    record["corruptions"] |= {
        "names": ["fog"],
        "severities": [2],
        "relative_mce": None,
        **{name: record["corruptions"][name][:1] for name in ("error", "nll", "ece")},
    }
    for name in ("error", "nll", "ece"):
        record["corruptions"][name] = [record["corruptions"][name][0][:1]]
    made = tables(compare([read_run(record)])[0])["corruption"]
    assert made.rows[0].detail == "1 seed, S = 20"
    assert made.notes[0] == "Means are over 1 corruption of 300 images, severity 2."
    assert not any("elative mCE" in note for note in made.notes)


def test_unfamiliar_inputs_do_not_claim_the_draws_of_the_scores():
    (record,), _ = simulate(["EMP(K=5)"], [0])
    made = tables(compare([read_run(record)])[0])["ood"]
    assert [row.detail for row in made.rows] == ["1 seed"]
    assert made.notes == ("Both kinds of input by as many draws, 20 at most.",)


def test_tables_without_content_are_not_there():
    record = {"schema": 1, "name": "a", "task": "regression", "method": "EMP", "data": "d", "metrics": {}}
    assert tables(compare([read_run(record)])[0]) == {}


def test_the_ensemble_size_is_a_number_or_a_power():
    records, _ = simulate(["EMP(K=5)"], [0])
    shown = []
    for exponent in (0.0, math.log10(125), 13.3, 1412.0, None, math.inf):
        records[0]["parameters"]["log10_ensemble_size"] = exponent
        made = tables(compare([read_run(records[0])])[0])
        shown.append(column(made["cost"], "log10_ensemble_size")[0].text)
    assert shown == ["1", "125", "10¹³", "10¹⁴¹²", "–", "∞"]  # noqa: RUF001


# ---- collapse


def with_diversity(task="classification", **diversity):
    (record,), _ = simulate(["EMP(K=5)"], [0])
    record["diversity"] = {"disagreement": None, "mutual_information": None, "components": [], **diversity}
    record["task"] = task
    return read_run(record)


def test_the_rule_of_collapse():
    run = with_diversity()
    error, nll = 1 - run.metrics["accuracy"].value, run.metrics["nll"].value
    assert verdict(with_diversity(disagreement=0.049 * error, mutual_information=0.009 * nll)) == "collapsed"
    assert verdict(with_diversity(disagreement=0.051 * error, mutual_information=0.009 * nll)) == "diverse"
    assert verdict(with_diversity(disagreement=0.049 * error, mutual_information=0.011 * nll)) == "diverse"
    assert verdict(with_diversity(disagreement=0.049 * error)) == "collapsed"
    assert verdict(with_diversity()) == "not known"


def test_weights_decide_only_where_there_are_no_answers():
    same = [{"site": "a", "distance": 0.009}, {"site": "b", "distance": 0.0}]
    apart = [{"site": "a", "distance": 0.2}, {"site": "b", "distance": 0.0}]
    assert verdict(with_diversity(components=same)) == "collapsed"
    assert verdict(with_diversity(components=apart)) == "diverse"
    assert verdict(with_diversity(components=apart, disagreement=0.0, mutual_information=0.0)) == "collapsed"


def test_one_example_of_disagreement_counts_as_none_where_nothing_is_wrong():
    (record,), _ = simulate(["EMP(K=5)"], [0])
    record["metrics"]["accuracy"]["value"] = 1.0
    record["diversity"] = {"disagreement": 1 / record["num_examples"], "mutual_information": None}
    assert verdict(read_run(record)) == "collapsed"
    record["diversity"]["disagreement"] *= 2
    assert verdict(read_run(record)) == "diverse"


def test_the_verdict_is_said_plainly():
    one, diverse = runs(["vanilla"], [0])[0], runs()[0]
    collapsed = with_diversity(disagreement=0.0)
    assert verdict(one) == "one network"
    assert sentence([one]) == "one network, nothing to differ"
    assert sentence([diverse, diverse]) == "not collapsed: the draws differ"
    assert sentence([collapsed, diverse, collapsed]) == "collapsed to one model for 2 of 3 seeds"
    assert sentence([collapsed]) == "collapsed to one model"
    assert sentence([with_diversity()]) == "not known"
