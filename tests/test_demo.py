"""patchbayes demo in a small form: the table, the verdicts, the report, the JSON, and going on where it was."""

import re

import pytest

from command_line import command

pytest.importorskip("imagecorruptions")
pytestmark = pytest.mark.slow  # the corruptions of eight networks take a minute
SMALL = ("--seeds", 2, "--epochs", 1, "--corruption-examples", 2)
METHODS = ("vanilla", "dropout", "emp", "ecmp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("demo") / "runs"


@pytest.fixture(scope="module")
def printed(folder):
    return command("demo", folder, *SMALL).out


def test_the_table_has_a_row_for_each_method_with_an_interval(printed):
    rows = [line for line in printed.splitlines() if re.match(r"\S+.*±.*±", line)]
    assert len(rows) == len(METHODS)
    assert printed.count("against vanilla, seed by seed") == 3
    assert re.search(r"corrupted NLL [+-][\d.]+ \((better|worse|not told apart)\)", printed)


def test_the_report_and_the_runs_are_written(folder, printed):
    assert "<html" in (folder / "report.html").read_text()
    assert str((folder / "report.html").resolve()) in printed
    for name in METHODS:
        for seed in (0, 1):
            assert (folder / f"{name}-{seed}" / "evaluation.json").exists()


def test_run_again_it_trains_nothing_and_gives_the_same_numbers_as_json(folder, printed):
    files = sorted(folder.glob("*/*.safetensors"))
    before, lines = [path.read_bytes() for path in files], _epochs(folder)
    records = command("demo", folder, *SMALL, "--json").json
    assert files
    assert [path.read_bytes() for path in files] == before
    assert _epochs(folder) == lines
    assert [record["seed"] for record in records] == [0, 1] * len(METHODS)
    vanilla = [100 * record["metrics"]["accuracy"]["value"] for record in records[:2]]
    assert f"{sum(vanilla) / 2:.3g}" in printed
    for record in records:
        assert record["corruptions"]["nll"]
        assert record["ood"][0]["auroc"] is not None


def _epochs(folder):
    return [path.read_text() for path in sorted(folder.glob("*/metrics.jsonl"))]
