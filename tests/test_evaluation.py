"""`patchbayes evaluate` and `report`: the record of a run, against scores computed by hand from the same draws."""

import copy
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from command_line import command, strict_json
from patchbayes import predict
from patchbayes.data import read
from patchbayes.draws.draws import Draws
from patchbayes.errors import PatchbayesError
from patchbayes.metrics import disagreement
from patchbayes.patching.network import network_of
from patchbayes.patching.patch import patch_, patched_sites
from patchbayes.posteriors import EMP
from patchbayes.prediction.predict import make_draws
from patchbayes.runs import EvaluationOptions, RunFolder, evaluate, read_evaluation, write_evaluation
from patchbayes.runs.answers import class_answers
from patchbayes.runs.robustness import fitted

DRAWS = 20
KEYS = {
    "schema", "name", "folder", "task", "method", "model", "sites", "data", "split", "num_examples", "classes", "draws",
    "seed", "command", "train_command", "commit", "machine", "versions", "date", "parameters", "patch_report",
    "training_seconds", "metrics", "temperature", "draws_curve", "reliability", "histogram", "coverage", "diversity", "ood",
    "corruptions", "examples", "quantiles", "num_draws", "exact", "views",
}  # fmt: skip
CLASS_METRICS = {
    "accuracy", "top5_accuracy", "nll", "brier", "ece", "mce", "classwise_ece", "adaptive_ece", "aurc",
}  # fmt: skip
VALUE_METRICS = {"rmse", "log_density", "crps", "coverage_95", "interval_width_95"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of trained runs."""
    folder = tmp_path_factory.mktemp("runs")
    fast = "--epochs 2 --lr 0.01 --batch-size 32"
    for name, options in {
        "vanilla": "--data digits --model small_cnn --method vanilla",
        "ecmp": "--data digits --model small_cnn --method 'ecmp(3, jitter=0.3)'",
        "emp": "--data digits --model small_cnn --method emp(2) --sites norm",
        "diabetes": "--data diabetes --model mlp --method ecmp(3)",
        "plain-diabetes": "--data diabetes --model mlp --method vanilla",
    }.items():
        command(f"train {fast} {options}", folder / name)
    return folder


@pytest.fixture(scope="module")
def records(runs):
    """The records of three classifiers, evaluated together, as the command printed them."""
    names = [runs / name for name in ("vanilla", "ecmp", "emp")]
    found = command(f"evaluate --draws {DRAWS} --ood photos --json", *names)
    assert found.err == ""
    return {record["name"]: record for record in found.json}


@pytest.fixture(scope="module")
def values(runs):
    """The records of two regressions."""
    found = command(f"evaluate --draws {DRAWS} --json", runs / "diabetes", runs / "plain-diabetes").json
    return {record["name"]: record for record in found}


def answered(run, part="test", draws=DRAWS):
    """What the network of a run says of a part: the prediction, and the targets, in one batch."""
    run = RunFolder.open(run)
    data = run.dataset()
    split = data.part(part)
    ((inputs, targets),) = data.batches(split, len(split))
    model = run.model()
    taken = make_draws(model, network_of(model), draws, "balanced", None)
    return predict(model, inputs, taken, likelihood=run.likelihood(), keep_draws=True), targets


# the record


def test_the_record_of_a_classification_has_every_key(records, runs):
    for name, record in records.items():
        assert record.keys() == KEYS
        assert record["metrics"].keys() == CLASS_METRICS
        assert record["temperature"]["metrics"].keys() == CLASS_METRICS
        for entry in (*record["metrics"].values(), *record["temperature"]["metrics"].values()):
            assert entry["low"] <= entry["high"]
        for key in ("accuracy", "nll", "brier", "top5_accuracy"):
            assert record["metrics"][key]["low"] <= record["metrics"][key]["value"] <= record["metrics"][key]["high"]
        assert {key for key, entry in record["metrics"].items() if "floor" in entry} == {
            "ece", "mce", "classwise_ece", "adaptive_ece"
        }  # fmt: skip
        assert record["num_examples"] == 899
        assert record["classes"] == [str(digit) for digit in range(10)]
        assert sum(record["reliability"]["count"]) == 899
        assert sum(record["histogram"]["correct"]) + sum(record["histogram"]["wrong"]) == 899
        assert record["coverage"]["accuracy"][-1] == pytest.approx(record["metrics"]["accuracy"]["value"])
        assert record["quantiles"] is None
        assert record["command"].startswith("patchbayes evaluate --draws 20")
        assert strict_json((runs / name / "evaluation.json").read_text()) == record


def test_the_record_of_a_regression_has_every_key_with_null_for_what_is_of_classes(values):
    for record in values.values():
        assert record.keys() == KEYS
        assert record["metrics"].keys() == VALUE_METRICS
        assert record["ood"] == []
        for key in ("temperature", "draws_curve", "reliability", "histogram", "coverage", "corruptions", "examples"):
            assert record[key] is None
        assert record["quantiles"]["level"] == sorted(record["quantiles"]["level"])


def test_the_record_says_what_was_patched_and_how_to_train_it_again(records, runs, tmp_path, monkeypatch):
    record = records["ecmp"]
    assert record["method"] == "ECMP(K=3)"
    assert record["sites"] == "norm+output"
    assert record["parameters"] == {
        "unpatched": records["vanilla"]["parameters"]["patched"],
        "patched": sum(p.numel() for p in RunFolder.open(runs / "ecmp").model().parameters()),
        "patched_sites": 3,
        "log10_ensemble_size": pytest.approx(2 * (48 + 645) * math.log10(3)),
    }
    assert "BatchNorm2d x2" in record["patch_report"]
    monkeypatch.chdir(tmp_path)
    command(record["train_command"].removeprefix("patchbayes "))
    again, before = (folder.history() for folder in map(RunFolder.open, ("ecmp", runs / "ecmp")))
    assert [row["loss"] for row in again] == [row["loss"] for row in before]


# scores by hand


def by_hand(log_probs, targets):
    """Scores in NumPy, of log-probabilities (N, C)."""
    log_probs, targets = log_probs.double().numpy(), targets.numpy()
    probs = np.exp(log_probs)
    everyone = np.arange(len(targets))
    confidence, right = probs.max(1), probs.argmax(1) == targets
    ece, gaps = 0.0, [0.0]
    for low in range(20):
        inside = (confidence > low / 20) & (confidence <= (low + 1) / 20)
        if inside.sum() > 5:
            gaps.append(abs(right[inside].mean() - confidence[inside].mean()))
            ece += inside.mean() * gaps[-1]
    risks = np.cumsum(~right[np.argsort(-confidence, kind="stable")]) / (everyone + 1)
    return {
        "accuracy": right.mean(),
        "top5_accuracy": (np.argsort(-probs, 1)[:, :5] == targets[:, None]).any(1).mean(),
        "nll": -log_probs[everyone, targets].mean(),
        "brier": ((probs - np.eye(probs.shape[1])[targets]) ** 2).sum(1).mean(),
        "ece": ece,
        "mce": max(gaps),
        "aurc": risks.mean(),
    }


@pytest.mark.parametrize("name", ["ecmp", "emp", "vanilla"])
def test_scores_of_a_classifier_are_those_of_its_prediction(records, runs, name):
    if name == "vanilla":
        run = RunFolder.open(runs / name)
        ((inputs, targets),) = run.dataset().batches(run.dataset().test, 899)
        log_probs = torch.log_softmax(run.model()(inputs), 1).detach()
    else:
        prediction, targets = answered(runs / name)
        log_probs = prediction.log_probs
    found = {key: entry["value"] for key, entry in records[name]["metrics"].items()}
    for key, value in by_hand(log_probs, targets).items():
        assert found[key] == pytest.approx(value, abs=2e-4), key


def test_scores_of_a_regression_are_those_of_its_prediction(values, runs):
    prediction, targets = answered(runs / "diabetes")
    preparation = RunFolder.open(runs / "diabetes").dataset().preparation
    (mean,), (std,) = preparation.target_mean, preparation.target_std
    noise = std * float(RunFolder.open(runs / "diabetes").likelihood().precision) ** -0.5
    centers = prediction.draw_means[..., 0].double().numpy() * std + mean
    wanted = targets[:, 0].double().numpy() * std + mean
    density = np.exp(-0.5 * ((wanted - centers) / noise) ** 2) / (noise * math.sqrt(2 * math.pi))
    below = 0.5 * (1 + torch.erf(torch.tensor((wanted - centers) / noise / math.sqrt(2)))).numpy().mean(0)
    found = {key: entry["value"] for key, entry in values["diabetes"]["metrics"].items()}
    assert found["rmse"] == pytest.approx(np.sqrt(((centers.mean(0) - wanted) ** 2).mean()), rel=1e-4)
    assert found["log_density"] == pytest.approx(np.log(density.mean(0)).mean(), rel=1e-4)
    assert found["coverage_95"] == pytest.approx(((below >= 0.025) & (below <= 0.975)).mean())
    assert found["interval_width_95"] == pytest.approx(2 * 1.96 * noise, rel=0.02)  # the components are close
    noiseless = np.abs(centers - wanted).mean(0).mean()
    assert 0 < found["crps"] < noiseless


def test_fewer_draws_are_shown_beside_the_score(records, runs):
    curve = records["ecmp"]["draws_curve"]
    assert curve["draws"] == [1, 5, 20]
    prediction, targets = answered(runs / "ecmp")
    groups = prediction.draw_probs.unflatten(0, (4, 5)).mean(1)
    nll = -groups.gather(2, targets.expand(4, -1).unsqueeze(2)).log().mean((1, 2)).double()
    assert curve["nll"]["value"][1] == pytest.approx(float(nll.mean()), rel=1e-4)
    assert curve["nll"]["standard_error"][1] == pytest.approx(float(nll.std() / 2), rel=1e-2)
    assert curve["nll"]["value"][2] == pytest.approx(records["ecmp"]["metrics"]["nll"]["value"], rel=1e-4)
    assert curve["ece"]["value"][2] == pytest.approx(records["ecmp"]["metrics"]["ece"]["value"], abs=1e-4)
    assert curve["nll"]["standard_error"][2] is None  # there is one group of all draws
    assert curve["nll"]["value"][1] >= curve["nll"]["value"][2]  # Jensen: the groups of 5 make up the 20
    assert records["vanilla"]["draws_curve"] is None


def test_the_curve_follows_the_kind_of_draws(generator):
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    patch_(model, EMP(3), "linear", generator=generator)  # 27 networks; a block of pairs has 9
    inputs, targets = torch.randn(6, 3, generator=generator), torch.arange(6) % 4

    def probs_at(draws, repeats):
        groups = predict(model, inputs, draws, keep_draws=True).draw_probs.unflatten(0, (repeats, -1)).mean(1)
        return groups.amax(-1)

    for sampling, few, many in (
        ("balanced", Draws.stratified(model, 24), Draws.orthogonal(model, 24)),
        ("iid", Draws.sample(model, 24), Draws.sample(model, 24)),
    ):
        found = class_answers(model, [(inputs, targets)], 24, curve=(3, 24), sampling=sampling).at_draws
        torch.testing.assert_close(found[3].confidence, probs_at(few, 8))
        torch.testing.assert_close(found[24].confidence, probs_at(many, 1))


def test_the_temperature_is_the_best_on_the_held_out_part(records, runs):
    scaled = records["ecmp"]["temperature"]
    assert scaled["fitted_on"] == "held_out"

    def nll(prediction, targets, temperature):
        log_probs = torch.log_softmax(prediction.log_probs.double() / temperature, 1)
        return -float(log_probs.gather(1, targets[:, None]).mean())

    held_out = answered(runs / "ecmp", "held_out")

    def loss(temperature):
        return nll(*held_out, temperature) + 2 * math.log(temperature) ** 2 / len(held_out[1])  # shrunk towards 1

    for factor in (0.97, 1.03):
        assert loss(scaled["temperature"]) < loss(factor * scaled["temperature"])
    assert scaled["metrics"]["nll"]["value"] == pytest.approx(
        nll(*answered(runs / "ecmp"), scaled["temperature"]), rel=1e-4
    )
    assert scaled["metrics"]["accuracy"]["value"] == records["ecmp"]["metrics"]["accuracy"]["value"]


def test_inputs_of_another_kind_are_told_by_entropy_and_by_mutual_information(records, runs):
    sklearn = pytest.importorskip("sklearn.metrics")
    own, _ = answered(runs / "ecmp")
    run = RunFolder.open(runs / "ecmp")
    raw, _ = read("photos", held_out=0).test.fetch(torch.arange(len(read("photos", held_out=0).test)))
    inputs = run.dataset().preparation.inputs(fitted(raw, (1, 8, 8)))
    other = predict(run.model(), inputs, own.draws)
    foreign = np.r_[np.zeros(len(own.probs)), np.ones(len(other.probs))]
    rows = {row["score"]: row for row in records["ecmp"]["ood"]}
    for score, values in {
        "entropy": [torch.special.entr(p.probs).sum(1) for p in (own, other)],
        "mutual information": [p.mutual_information for p in (own, other)],
    }.items():
        assert rows[score]["data"] == "photos"
        assert rows[score]["auroc"] == pytest.approx(sklearn.roc_auc_score(foreign, torch.cat(values)), abs=2e-3)
        assert 0 <= rows[score]["fpr95"] <= 1


def test_both_kinds_of_input_are_seen_by_as_many_draws(records, runs):
    (many,) = evaluate(
        [RunFolder.open(runs / "ecmp")], EvaluationOptions(draws=60, curve=(), replicates=20, ood=("photos",))
    )
    assert_alike(many.to_json()["ood"], records["ecmp"]["ood"])  # twenty on either side


def test_diversity_is_that_of_draws_and_components(records, values, runs):
    assert records["vanilla"]["diversity"] is None
    found = records["ecmp"]["diversity"]
    prediction, _ = answered(runs / "ecmp")
    assert found["disagreement"] == pytest.approx(disagreement(prediction.draw_probs), abs=1e-4)
    assert found["mutual_information"] == pytest.approx(float(prediction.mutual_information.mean()), abs=1e-5)
    site = patched_sites(RunFolder.open(runs / "ecmp").model())["bn1"].posterior
    stored = torch.cat([site.stored(name).detach() for name in ("weight", "bias")], 1).double()
    pairs = [(stored[i] - stored[j]).square().sum() for i in range(3) for j in range(i)]
    distance = float((sum(pairs) / 3 / stored.mean(0).square().sum()).sqrt())
    assert {row["site"] for row in found["components"]} == {"bn1", "bn2", "fc"}
    assert next(row["distance"] for row in found["components"] if row["site"] == "bn1") == pytest.approx(distance)
    assert values["plain-diabetes"]["diversity"] is None
    assert values["diabetes"]["diversity"]["disagreement"] is None
    assert len(values["diabetes"]["diversity"]["components"]) == 3


def test_methods_without_components_and_a_single_draw_have_no_such_distances(runs, tmp_path):
    for method in ("dropout(0.1)", "meanfield"):
        command(f"train --data diabetes --model mlp --epochs 1 --method {method}", tmp_path / method)
        (record,) = command("evaluate --draws 3 --json", tmp_path / method).json
        assert record["diversity"]["components"] == []
    (record,) = evaluate([RunFolder.open(runs / "ecmp")], EvaluationOptions(draws=1, curve=(), replicates=20))
    assert record.diversity.disagreement is None
    assert record.diversity.mutual_information is None


def test_few_outcomes_are_averaged_exactly(records, runs):
    record = records["emp"]
    assert (record["num_draws"], record["exact"]) == (4, True)
    assert (records["ecmp"]["num_draws"], records["ecmp"]["exact"]) == (20, False)
    assert (records["vanilla"]["num_draws"], records["vanilla"]["exact"]) == (1, True)
    prediction, targets = answered(runs / "emp", draws="exact")
    nll = -float(prediction.log_probs.gather(1, targets[:, None]).mean())
    assert record["metrics"]["nll"]["value"] == pytest.approx(nll, rel=1e-5)


def test_the_extreme_examples_are_shown_as_pictures(records, runs):
    examples = records["ecmp"]["examples"]
    prediction, targets = answered(runs / "ecmp")
    confidence = prediction.probs.amax(1)
    first, last = examples["most_certain"][0], examples["least_certain"][0]
    assert first["confidence"] == pytest.approx(float(confidence.max()), abs=1e-5)
    assert last["confidence"] == pytest.approx(float(confidence.min()), abs=1e-5)
    assert last["true"] == str(int(targets[last["index"]]))
    assert last["png"].startswith("iVBOR")


def test_a_second_evaluation_says_the_same(records, runs):
    (record,) = command(f"evaluate --draws {DRAWS} --ood photos --json", runs / "ecmp").json
    expected = copy.deepcopy(records["ecmp"])
    assert record.pop("date") >= expected.pop("date")
    assert record.pop("command") != expected.pop("command")  # it named three runs
    assert_alike(record, expected)


def assert_alike(found, expected):
    """Equal but for the last digits: the order in which draws are added up may differ."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_alike(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)
    else:
        assert found == expected


# options


def test_an_interruption_keeps_the_runs_that_were_done(runs, tmp_path):
    folders = [shutil.copytree(runs / name, tmp_path / name) for name in ("emp", "vanilla")]
    for folder in folders:
        (folder / "evaluation.json").unlink(missing_ok=True)

    def interrupted_at_the_second(text):
        if text == "evaluating vanilla":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(
            [RunFolder.open(folder) for folder in folders],
            EvaluationOptions(draws=2),
            interrupted_at_the_second,
            write_evaluation,
        )
    assert read_evaluation(folders[0]).name == "emp"
    assert not (folders[1] / "evaluation.json").exists()


def test_split_and_checkpoint_and_temperature_part_change_the_record(runs, tmp_path):
    shutil.copytree(runs / "ecmp", tmp_path / "ecmp")
    line = "evaluate --draws 2 --json --split test[500:] --temperature-on test[:300] --checkpoint last"
    (record,) = command(line, tmp_path / "ecmp").json
    assert (record["split"], record["num_examples"], record["draws"]) == ("test[500:]", 399, 2)
    assert record["temperature"]["fitted_on"] == "test[:300]"
    (scored,) = evaluate(
        [RunFolder.open(tmp_path / "ecmp")], EvaluationOptions(split="held_out", draws=2, replicates=20)
    )
    assert scored.temperature is None  # what is scored is not fitted on


def test_the_data_are_found_where_they_have_moved(tmp_path, monkeypatch):
    for folder in ("old", "new", "elsewhere"):
        (tmp_path / folder).mkdir()
    rows = [f"{i % 7},{i % 3},{(i % 7 > 3) * 1}" for i in range(60)]
    (tmp_path / "old" / "table.csv").write_text("\n".join(["a,b,y", *rows]) + "\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    command("train run --data csv:table.csv#y --model mlp --epochs 1 --data-dir", tmp_path / "old")
    (tmp_path / "old" / "table.csv").rename(tmp_path / "new" / "table.csv")
    assert "table.csv is not there" in command("evaluate run --draws 2", code=1).err
    (record,) = command("evaluate run --draws 2 --json --data-dir", tmp_path / "new").json
    assert record["metrics"].keys() == CLASS_METRICS - {"top5_accuracy"}  # there are two classes


def test_the_command_shows_a_table_and_what_comes_next(runs):
    found = command("evaluate --draws 2", runs / "vanilla", runs / "diabetes")
    lines = found.out.splitlines()
    assert lines[0].split()[:4] == ["run", "method", "accuracy", "%"]
    assert max(map(len, lines[:-1])) <= 100
    assert lines[1].split()[:2] == ["vanilla", "vanilla"]
    (place,) = (number for number, line in enumerate(lines) if line.startswith("vanilla with temperature"))
    under_fitted = float(lines[place].split()[3]) < 0.9  # after few epochs
    assert ("less sure than it could be" in lines[place + 1]) == under_fitted
    assert any(line.startswith("diabetes") and "ECMP(K=3)" in line for line in lines)
    assert lines[-1] == f"next: patchbayes report {runs / 'vanilla'} {runs / 'diabetes'}"
    assert found.err == ""
    assert "\x1b" not in found.out


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("nosuch", 1, "is not a run folder"),
        ("ecmp --split nosuch", 1, "no part 'nosuch'"),
        ("ecmp --split test[5000:]", 1, "test has 899 examples"),
        ("ecmp --draws 0", 2, "greater than or equal to 1"),
        ("ecmp --temperature-on test", 1, "some of these examples are scored"),
        ("ecmp --temperature-on test[:10] --split test[9:]", 1, "some of these examples are scored"),
        ("ecmp --ood nosuch", 1, "unknown data 'nosuch'"),
        ("ecmp --ood diabetes", 1, "only images can be fitted"),
        ("ecmp --ood digits", 1, "digits is what ecmp was trained on"),
        ("ecmp --severities 6 --corruptions", 2, "from 1 to 5"),
        ("ecmp --severities 1 --corruption-draws 3", 2, "--corruption-draws and --severities: give --corruptions"),
        ("ecmp --checkpoint first", 2, "is not one of"),
        ("ecmp diabetes --corruptions", 1, "corruptions is for classification"),
        ("diabetes --ood digits", 1, "ood is for classification"),
        ("diabetes --temperature-on held_out", 1, "temperature_on is for classification"),
        ("ecmp --corruption-folder nosuch --draws 1", 1, "the layout of CIFAR-C"),
    ],
)
def test_what_cannot_be_evaluated_is_said(runs, monkeypatch, line, code, said):
    monkeypatch.chdir(runs)
    found = command(f"evaluate {line}", code=code)
    assert said in found.err
    assert found.out == ""


def test_an_evaluation_that_is_missing_or_damaged_is_said(runs, tmp_path):
    with pytest.raises(PatchbayesError, match="has not been evaluated; run: patchbayes evaluate"):
        read_evaluation(tmp_path)
    for text, said in (("{", "is not JSON"), ('{"schema": 0}', "schema: expected 1, got 0")):
        (tmp_path / "evaluation.json").write_text(text)
        with pytest.raises(PatchbayesError, match=said):
            read_evaluation(tmp_path)


# the report


def test_the_report_of_evaluated_runs_in_every_format(records, values, runs, tmp_path):
    folders = [runs / name for name in (*records, *values)]
    assert "is given twice" in command("report", folders[0], folders[0], code=2).err
    forms = "--format html --format markdown --format latex --format csv"
    title = "Digits <b>& more"
    written = command(f"report {forms} --json --title", title, "-o", tmp_path / "out.html", *folders).json["written"]
    assert written == [str(tmp_path / f"out{suffix}") for suffix in (".html", ".md", ".tex", ".csv")]
    html, markdown, latex, table = (Path(path).read_text(encoding="utf-8") for path in written)
    for text in (html, markdown, latex, table):
        assert "ECMP(K=3)" in text
        assert "EMP(K=2)" in text
    assert "Digits &lt;b&gt;&amp; more" in html
    assert "<b>& more" not in html
    accuracy = f"{100 * records['ecmp']['metrics']['accuracy']['value']:.1f}"
    assert accuracy in html
    assert accuracy in markdown
    assert "diabetes" in markdown


def test_the_report_names_a_run_that_was_not_evaluated(runs, tmp_path):
    shutil.copytree(runs / "emp", tmp_path / "emp", ignore=shutil.ignore_patterns("evaluation.json"))
    found = command("report -o", tmp_path / "r.html", tmp_path / "emp", code=1)
    assert (
        found.err
        == f"patchbayes: {tmp_path / 'emp'} has not been evaluated; run: patchbayes evaluate {tmp_path / 'emp'}\n"
    )
    assert "give one of html, markdown" in command("report --format pdf", runs / "emp", code=2).err
    assert not (tmp_path / "r.html").exists()
