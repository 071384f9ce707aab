"""The evaluation record: read whole, written back, and refused with file and key where it is broken."""

import base64
import json
import math
import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patchbayes.errors import PatchbayesError
from patchbayes.runs.record import EvaluationRecord, Metric, read_evaluation, write_evaluation
from simulated_records import mutated, one_run, read_run, simulate, simulate_regression


def place(record, key):
    """The container and last step of a dotted key, numbers being positions of a list."""
    *path, last = [int(step) if step.isdigit() else step for step in key.split(".")]
    for step in path:
        record = record[step]
    return record, last


def test_a_good_record_is_read_whole():
    record, history = one_run()
    run = read_run(record, history)
    assert run.place == "runs/ecmp-seed0"
    assert run.metrics["ece"].value == record["metrics"]["ece"]["value"]
    assert run.metrics["ece"].floor == record["metrics"]["ece"]["floor"]
    assert run.metrics["nll"].floor is None
    assert run.draws_curve.scores["nll"].value == tuple(record["draws_curve"]["nll"]["value"])
    assert run.corruptions.tables["ece"][14] == tuple(record["corruptions"]["ece"][14])
    assert run.diversity.distances[-1] == ("fc", record["diversity"]["components"][-1]["distance"])
    assert run.examples.most_certain[0].png.startswith(b"\x89PNG")
    assert [epoch for epoch, _ in run.history["loss"]] == list(range(1, 31))
    assert run.machine == {"processor": "x86_64", "cores": 2}


def test_a_minimal_record_is_enough():
    record = {"schema": 1, "name": "a", "task": "regression", "method": "EMP", "data": "d", "metrics": {}}
    run = read_run(record, [], 3)
    assert run.place == "a"
    assert (run.draws_curve, run.reliability, run.diversity, run.corruptions, run.ood) == (None, None, None, None, ())


@pytest.mark.parametrize("simulated", [simulate, simulate_regression])
def test_a_record_is_written_as_it_was_read(simulated, tmp_path):
    for content in simulated(seeds=[0])[0]:
        record = EvaluationRecord.from_json(content, "it")
        written = record.to_json()
        assert EvaluationRecord.from_json(written, "again") == record
        assert {key: written[key] for key in content} == content
        write_evaluation(tmp_path, record)
        assert read_evaluation(tmp_path) == record


def test_a_record_of_a_newer_version_says_so():
    record, _ = one_run()
    with pytest.raises(PatchbayesError, match=r"schema: expected 1 or less \(a newer version of patchbayes wrote"):
        EvaluationRecord.from_json(record | {"schema": 2}, "it")
    for schema in (0, True, None, "1"):
        with pytest.raises(PatchbayesError, match="schema: expected 1"):
            EvaluationRecord.from_json(record | {"schema": schema}, "it")


def test_numbers_that_json_does_not_know_are_written_as_null(tmp_path):
    record = EvaluationRecord.from_json(one_run()[0], "it")
    odd = replace(record, metrics={"nll": Metric(math.inf, math.nan, 1.0)})
    write_evaluation(tmp_path, odd)
    assert json.loads((tmp_path / "evaluation.json").read_text())["metrics"]["nll"] == {
        "value": None, "low": None, "high": 1.0
    }  # fmt: skip


def test_nan_and_null_are_missing_and_infinity_is_a_number():
    record, _ = one_run()
    record["metrics"] = {"nll": {"value": math.inf, "low": math.nan, "high": None}, "ece": None}
    found = read_run(record, [], 1).metrics
    assert found["nll"].value == math.inf
    assert (found["nll"].low, found["nll"].high) == (None, None)
    assert "ece" not in found


def test_history_rows_without_epoch_are_counted_and_words_left_out():
    history = read_run(one_run()[0], [{"loss": 2, "note": "x"}, {"loss": 1, "best": True}], 1).history
    assert history == {"loss": ((1.0, 2.0), (2.0, 1.0))}


BROKEN = {
    "schema": 2,
    "name": None,
    "task": "ranking",
    "method": 7,
    "data": ["cifar10"],
    "num_examples": -1,
    "seed": 1.5,
    "command": {"text": "patchbayes"},
    "machine": "fast",
    "parameters.patched": True,
    "training_seconds": "long",
    "metrics": None,
    "metrics.ece": 0.1,
    "metrics.ece.value": "0.1",
    "metrics.nll.low": 10**400,
    "temperature.metrics": [],
    "draws_curve.draws": [5, 1, 20, 40],
    "draws_curve.nll.value": [1.0],
    "draws_curve.nll.standard_error": "small",
    "reliability.count": [-1] * 20,
    "reliability.confidence": [None] * 20,
    "reliability.accuracy": [0.5] * 19,
    "histogram.edges": [0.0, 1.0],
    "histogram.edges.0": -math.inf,
    "histogram.wrong": [1],
    "coverage.coverage": [1.0, 0.5],
    "coverage.accuracy": None,
    "diversity.components.0.site": None,
    "diversity.disagreement": "much",
    "ood": {"svhn": 1},
    "ood.0.auroc": "high",
    "corruptions.error": [[0.1]],
    "corruptions.ece.3": [0.1],
    "corruptions.severities": ["one"],
    "examples.most_certain": "none",
    "examples.most_certain.0.index": "first",
    "examples.most_certain.0.png": "not base64!",
    "examples.least_certain.0.png": base64.b64encode(b"<svg onload=alert(1)>").decode(),
    "quantiles": {"level": [0.5, 0.1], "observed": [0.5, 0.1]},
}


@pytest.mark.parametrize("key", BROKEN)
def test_a_broken_record_is_refused_with_file_and_key(key):
    record, history = one_run()
    container, last = place(record, key)
    container[last] = BROKEN[key]
    with pytest.raises(PatchbayesError) as error:
        read_run(record, history, 1)
    text = str(error.value)
    blamed = {"reliability.confidence": "reliability", "histogram.edges.0": "histogram.edges"}.get(
        key, re.sub(r"\.(\d+)", r"[\1]", key)
    )
    assert f"runs/ecmp-seed0/evaluation.json: {blamed}" in text
    assert "expected" in text
    assert "patchbayes evaluate" in text


def test_broken_rows_of_the_history_are_refused_with_their_line():
    record, _ = one_run()
    for history in ([{"epoch": 1}, ["loss", 2]], [{"epoch": 1}, {"epoch": "two"}]):
        with pytest.raises(PatchbayesError, match=r"runs/ecmp-seed0/metrics\.jsonl: line 2"):
            read_run(record, history, 1)


def test_a_record_that_is_no_object_is_refused():
    for record in ([], None, "text"):
        with pytest.raises(PatchbayesError, match="record 4: the record: expected an object"):
            read_run(record, [], 4)


@given(st.text(alphabet=st.characters(codec=None, categories=["Cc", "Cs", "Cf", "Lu", "Zs", "Sm"])))
def test_text_is_without_control_characters_surrogates_and_reversals(text):
    record, _ = one_run()
    record["name"] = text
    name = read_run(record, [], 1).name
    name.encode()  # no lone surrogate
    assert len(name) == len(text)
    assert not set(name) & ({chr(c) for c in range(32)} - set("\n\t") | set("\x7f\x85\u202e\u2066"))
    assert all(a == b or b == "\N{REPLACEMENT CHARACTER}" for a, b in zip(text, name, strict=True))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_value_in_the_place_of_another_is_read_or_refused_by_name(data):
    refusal = None
    try:
        read_run(mutated(data, one_run()[0]), [], 1)
    except PatchbayesError as error:
        refusal = str(error)
    assert refusal is None or "evaluation.json" in refusal or "record 1" in refusal
