"""Tables 12 and 13: the splits, the runs and their records, the verdicts and the paired tests."""

import copy
import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from patchbayes.errors import PatchbayesError
from patchbayes.metrics.student import two_sided_p
from patchbayes_reproduce import (
    regression_sets,
    regression_speed,
    regression_splits,
    regression_tables,
    regression_variants,
)
from patchbayes_reproduce.experiment import SCALES, Workspace, paper_table, reproduce
from patchbayes_reproduce.regression_comparison import corrected_test, paired_test
from patchbayes_reproduce.regression_sets import (
    FEWER_EPOCHS,
    METHODS,
    PAPER,
    Protocol,
    config_of,
    protocol_of,
    recipe_of,
    run,
    run_all,
    sets_of,
)
from patchbayes_reproduce.regression_splits import SETS, read_splits
from patchbayes_reproduce.regression_variants import VARIANTS

TINY = Protocol(recipe={"epochs": 2, "batch_size": 12}, splits=2, draws=7)


@pytest.fixture
def folder(tmp_path, generator):
    """A data folder with a made-up Yacht and Energy in the published layout."""
    for name, second in (("yacht", False), ("energy", True)):
        place = tmp_path / "uci" / name
        place.mkdir(parents=True)
        features = 8 if second else 6
        table = torch.randn(30, features, generator=generator, dtype=torch.float64) * 3 + 1
        table[:, 2] = 288.0  # a constant column
        target = 5 * table[:, :1] + torch.randn(30, 1, generator=generator, dtype=torch.float64)
        rows = [" ".join(f"{value:.6f}" for value in row) for row in torch.cat([table, target], dim=1).tolist()]
        (place / "data.txt").write_text("\n".join(rows))
        (place / "index_features.txt").write_text("\n".join(str(float(n)) for n in range(features)))
        (place / "index_target.txt").write_text(str(features))
        for split in range(20):
            order = torch.randperm(30, generator=generator).tolist()
            tested = 4 if split == 2 else 3  # this split has another size
            (place / f"index_test_{split}.txt").write_text("\n".join(map(str, order[:tested])))
            (place / f"index_train_{split}.txt").write_text("\n".join(map(str, order[tested:])))
        if second:
            lines = [row.replace(" ", ";") + f";{number}" for number, row in enumerate(rows)]
            header = ";".join([*(f"X{n}" for n in range(1, 9)), "Y1", "Y2"])
            (place / "ENB2012_data.csv").write_text("\n".join([header, *lines]))
    return tmp_path


def test_splits_are_standardized_with_their_training_part(folder):
    (data,) = read_splits("yacht", folder, [0, 1])
    assert data.numbers == (0, 1)
    assert data.train_inputs.shape == (2, 27, 6)
    assert data.test_targets.shape == (2, 3, 1)
    for table in (data.train_inputs, data.train_targets):
        varying = [column for column in range(table.shape[-1]) if table.shape[-1] == 1 or column != 2]
        assert table.mean(1).abs().max() < 1e-5
        assert (table[..., varying].square().mean(1) - 1).abs().max() < 1e-5
    assert (data.train_inputs[..., 2] == 0).all()  # constant: centered, not divided by nothing
    assert (data.test_inputs[..., 2] == 0).all()
    assert data.test_inputs.mean(1).abs().max() > 0.05  # the test part is not centered by itself


def test_every_way_to_standardize(folder):
    both, inputs, neither, itself = (
        read_splits("yacht", folder, [0], way)[0] for way in ("both", "inputs", "neither", "test by itself")
    )
    torch.testing.assert_close(inputs.train_inputs, both.train_inputs)
    assert inputs.unit.item() == neither.unit.item() == 1
    mean = neither.train_targets.mean()
    torch.testing.assert_close(both.train_targets * both.unit + mean, neither.train_targets, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(inputs.train_targets, neither.train_targets)
    assert neither.train_inputs[0, 0, 2] == 288
    assert itself.test_inputs.mean(1).abs().max() < 1e-5
    torch.testing.assert_close(itself.train_inputs, both.train_inputs)
    with pytest.raises(PatchbayesError, match="standardized='all'"):
        read_splits("yacht", folder, [0], "all")


def test_two_targets_and_splits_of_other_sizes(folder):
    first, second = read_splits("energy", folder, [0, 1, 2], "neither")
    assert first.numbers == (0, 1)
    assert second.numbers == (2,)
    assert first.train_targets.shape == (2, 27, 2)
    assert second.test_inputs.shape == (1, 4, 8)
    rows = sorted(first.train_targets[0, :, 1].tolist() + first.test_targets[0, :, 1].tolist())
    assert rows == list(range(30))  # the second target of these files is the row's number


def test_year_is_read_where_its_file_is(tmp_path, monkeypatch):
    assert not regression_splits.is_there("year", tmp_path)
    file = regression_splits.year_file(tmp_path)
    file.parent.mkdir(parents=True)
    lines = [",".join(map(str, [2000 + n, *range(n, n + 90)])) for n in range(10)]
    file.write_text("\n".join(lines))
    assert regression_splits.is_there("year", tmp_path)
    with pytest.raises(PatchbayesError, match=r"\(10, 91\) numbers; the Year set has 515,345 rows of 91"):
        read_splits("year", tmp_path, [0])
    monkeypatch.setattr(regression_splits, "_YEAR_TRAIN", 8)
    (data,) = read_splits("year", tmp_path, [0], "neither")
    assert data.train_inputs.shape == (1, 8, 90)
    assert data.train_targets[0, :, 0].tolist() == [2000 + n for n in range(8)]
    assert data.test_inputs[0, :, 0].tolist() == [8, 9]
    file.write_text("1,2\nx,3")
    with pytest.raises(PatchbayesError, match=r"YearPredictionMSD.txt"):
        read_splits("year", tmp_path, [0])


def test_the_protocol_is_the_papers():
    assert {name for name, _ in ((line["dataset"], 0) for line in paper_table("uci"))} == set(SETS)
    for line in paper_table("uci"):
        found = SETS[line["dataset"]]
        assert (found.hidden, found.splits, found.targets) == tuple(
            int(line[k]) for k in ("hidden", "splits", "targets")
        )
    recipe = recipe_of("protein", "ecmp", PAPER)
    assert (recipe.hidden, recipe.norm, recipe.components, recipe.tie, recipe.rate) == (100, "after", 5, "element", 0)
    assert (recipe.gamma, recipe.epochs, recipe.batch_size, recipe.weight_decay) == (0.2, 4000, 100, 0.01)
    dropout, ensemble = (recipe_of("yacht", method, PAPER) for method in ("dropout", "ensemble"))
    assert (dropout.norm, dropout.rate, ensemble.norm, ensemble.rate) == ("none", 0.005, "none", 0)
    assert (PAPER.tau, PAPER.draws, config_of("yacht", "ensemble", PAPER)["members"]) == (0.1, 10_000, 5)
    runs = [(name, method) for name in sets_of("small") for method in METHODS]
    assert sets_of("paper") == list(SETS)
    assert sets_of("small") == [name for name in SETS if name != "year"]
    assert all(protocol_of("paper", *run) == PAPER for run in runs)
    assert {run for run in runs if protocol_of("small", *run) != PAPER} == set(FEWER_EPOCHS)
    assert protocol_of("small", "protein", "ensemble") == replace(PAPER, recipe={"epochs": 200})
    assert protocol_of("smoke", "yacht", "emp").recipe["epochs"] < 10


@pytest.mark.parametrize("method", METHODS)
def test_a_run_has_its_numbers_and_they_repeat(method, folder):
    first, again = (run("energy", method, TINY, folder) for _ in range(2))
    assert first["splits"] == again["splits"]
    assert [row["split"] for row in first["splits"]] == [0, 1]
    for row in first["splits"]:
        assert row["rmse"] == pytest.approx(statistics.fmean(row["rmse_of_targets"]))
        assert row["lpd"] == pytest.approx(statistics.fmean(row["lpd_of_targets"]))
        assert ("member_rmse" in row) == (method == "ensemble")
        if method == "ensemble":
            assert row["rmse"] < row["member_rmse"]  # by Jensen's inequality
            assert row["lpd"] > row["member_lpd"]
    values = [row["rmse"] for row in first["splits"]]
    assert first["summary"]["rmse"]["mean"] == pytest.approx(statistics.fmean(values))
    assert first["summary"]["rmse"]["standard_error"] == pytest.approx(statistics.stdev(values) / 2**0.5)
    assert not first["full_protocol"]
    assert len(set(first["seeds"])) == (5 if method == "ensemble" else 1)


@pytest.mark.parametrize(
    "change",
    [
        {"recipe": {"epochs": 3, "batch_size": 12}},
        {"splits": 1},
        {"standardized": "inputs"},
        {"loss": "elbo"},
        {"tau": 1.0},
        {"draws": 3},
        {"seed": 1},
    ],
)
def test_every_setting_of_the_protocol_changes_the_result(change, folder):
    changed = Protocol(**{**vars(TINY), **change})
    assert run("yacht", "ecmp", changed, folder)["splits"] != run("yacht", "ecmp", TINY, folder)["splits"]


def test_splits_of_other_sizes_are_trained_too(folder):
    result = run("yacht", "emp", Protocol(recipe=TINY.recipe, splits=3), folder)
    assert [row["split"] for row in result["splits"]] == [0, 1, 2]


def test_runs_are_resumed_and_records_kept(folder, tmp_path):
    said = []
    out = tmp_path / "records"
    paths = run_all(["yacht", "year"], ["emp", "vanilla"], TINY, folder, out, said.append)
    assert [path.name for path in paths] == ["yacht-emp.json", "yacht-vanilla.json"]
    assert any("year: not run" in text for text in said)
    record = json.loads(paths[0].read_text())
    assert {"commit", "machine", "versions", "date", "source", "seeds", "config", "seconds"} <= set(record)
    before = [path.read_bytes() for path in paths]
    paths[1].unlink()
    said.clear()
    run_all(["yacht"], ["emp", "vanilla"], TINY, folder, out, said.append)
    assert said[0] == "yacht emp: yacht-emp.json is there"
    assert said[1].startswith("yacht vanilla: RMSE")
    assert paths[0].read_bytes() == before[0]
    assert json.loads(paths[1].read_text())["splits"] == json.loads(before[1])["splits"]
    with pytest.raises(PatchbayesError, match=r"another configuration \(draws\)"):
        run_all(["yacht"], ["emp"], Protocol(**{**vars(TINY), "draws": 8}), folder, out)
    paths[0].write_text("[]")
    with pytest.raises(PatchbayesError, match="not a record"):
        run_all(["yacht"], ["emp"], TINY, folder, out)


def test_command_lines(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(regression_sets, "SMOKE", TINY)
    monkeypatch.setenv("PATCHBAYES_DATA", str(folder))
    words = ["--scale", "smoke", "--methods", "emp", "--epochs", "1", "--out", str(tmp_path / "out")]
    regression_sets.main(words)
    assert "yacht emp: RMSE" in capsys.readouterr().out
    record = json.loads((tmp_path / "out" / "yacht-emp.json").read_text())
    assert record["config"]["recipe"]["epochs"] == 1
    monkeypatch.delenv("PATCHBAYES_DATA")
    with pytest.raises(SystemExit):
        regression_sets.main(words)
    assert "--data-dir" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        regression_sets.main([*words[:-1], str(tmp_path / "new"), "--data-dir", str(tmp_path / "nowhere")])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("regression_sets: ")
    assert "nowhere" in said


def test_student_t_and_the_corrected_test(generator):
    stats = pytest.importorskip("scipy.stats")
    for degrees in (1, 2, 3, 4, 7, 19, 20):
        for t in (0.0, 0.3, -2.0, 4.5, 30.0):
            assert two_sided_p(t, degrees) == pytest.approx(2 * stats.t.sf(abs(t), degrees), rel=1e-9, abs=1e-14)
    ours, theirs = torch.randn(2, 20, generator=generator, dtype=torch.float64).tolist()
    uncorrected = stats.ttest_rel(ours, theirs)
    test = paired_test(ours, theirs)
    assert test.p == pytest.approx(uncorrected.pvalue, rel=1e-9)
    assert test.degrees == 19
    widened = corrected_test(ours, theirs, num_train=90, num_test=10)
    assert widened.standard_error / test.standard_error == pytest.approx(((1 / 20 + 1 / 9) * 20) ** 0.5, rel=1e-6)
    assert widened.difference == test.difference
    assert corrected_test([1.0, 2.0], [1.0, 2.0], 9, 1).p == 1
    assert corrected_test([2.0, 3.0], [1.0, 2.0], 9, 1).significant
    with pytest.raises(PatchbayesError, match="at least two splits or seeds"):
        corrected_test([1.0], [2.0], 9, 1)


@pytest.fixture(scope="module")
def result():
    """Twenty splits of Yacht by every method, made up: ECMP better than dropout beyond doubt, EMP as good as ECMP."""
    generator = torch.Generator().manual_seed(0)
    base = 1.5 + 0.5 * torch.rand(20, generator=generator)
    runs = []
    for method, more in {"ecmp": 0.0, "emp": 0.001, "dropout": 11.2, "ensemble": 2.0, "vanilla": 0.5}.items():
        noise = 0.02 * torch.randn(20, generator=generator)
        rmse = (base + more + noise).tolist()
        rows = [
            {"split": n, "rmse": r, "lpd": -2.07 - r / 20, "member_rmse": r, "member_lpd": -3.0}
            for n, r in enumerate(rmse)
        ]
        runs.append(
            {
                "set": "yacht",
                "method": method,
                "config": config_of("yacht", method, PAPER),
                "full_protocol": True,
                "num_train": 277,
                "num_test": 31,
                "splits": rows,
                "summary": {m: regression_sets.summary([row[m] for row in rows]) for m in ("rmse", "lpd")},
            }
        )
    return {"runs": runs, "variants": [dict(runs[2], variant="targets-raw")]}


def test_verdicts(result):
    rows = {row.what: row for row in regression_tables.rows(result)}
    assert len(rows) == 80
    assert rows["RMSE of yacht, ECMP"].verdict == "within"
    assert rows["RMSE of yacht, ensemble"].verdict == "outside"
    assert rows["RMSE of boston, ECMP"].verdict == "not comparable"
    assert rows["RMSE of boston, ECMP"].why == "not run"
    error = result["runs"][0]["summary"]["rmse"]["standard_error"]
    assert rows["RMSE of yacht, ECMP"].tolerance == pytest.approx(2 * (error**2 + 0.23**2) ** 0.5 + 0.005)
    shorter = copy.deepcopy(result)
    shorter["runs"][0] |= {"full_protocol": False}
    shorter["runs"][0]["config"]["recipe"]["epochs"] = 40
    row = {row.what: row for row in regression_tables.rows(shorter)}["RMSE of yacht, ECMP"]
    assert (row.verdict, row.why) == ("not comparable", "40 epochs, 20 splits")


def test_tables(result):
    tables = regression_tables.tables(result)
    header, ((name, *cells),) = tables["RMSE, corrected paired tests"]
    tests = dict(zip(header[1:], cells, strict=True))
    assert name == "yacht"
    assert tests["ECMP against dropout"].startswith("better, 11")
    assert tests["ECMP against EMP"].startswith("undecided")
    assert dict(zip(header[1:], tables["LPD, corrected paired tests"][1][0][1:], strict=True))[
        "ECMP against dropout"
    ].startswith("better, 0.56")
    worse = copy.deepcopy(result)
    worse["runs"][0]["splits"], worse["runs"][2]["splits"] = worse["runs"][2]["splits"], worse["runs"][0]["splits"]
    assert regression_tables.tables(worse)["RMSE, corrected paired tests"][1][0][1].startswith("worse, -11")
    readings = regression_tables.tables(result)["Which reading of the text gives which number (RMSE / LPD)"][1]
    assert readings[0][:5] == ["yacht", "the paper's table", "1.59 / -2.25", "1.60 / -2.22", "12.90 / -10.79"]
    raw = next(row for row in readings if row[1] == VARIANTS["targets-raw"].reading)
    assert raw[2] == "-"
    assert raw[4].startswith("12.9 / ")
    assert "Which reading of the text gives which number (RMSE / LPD)" not in regression_tables.tables(
        {**result, "variants": []}
    )
    leaders = tables["Which of the paper's four methods leads (by mean; no test)"][1]
    assert leaders[0][0] == "yacht"
    assert leaders[1] == ["ECMP or EMP", "1 of 1", "1 of 1"]
    means = tables["RMSE, mean and standard error over splits"]
    assert means[1][0][-1] == "4000, 20"
    fewer = copy.deepcopy(result)
    (ensemble,) = [run for run in fewer["runs"] if run["method"] == "ensemble"]
    ensemble["config"]["recipe"]["epochs"] = 500
    tables = regression_tables.tables(fewer)  # what was trained for less time is shown, and compared with nothing
    assert tables["RMSE, mean and standard error over splits"][1][0][4].endswith("(500 epochs)")
    header, ((_, *cells),) = tables["RMSE, corrected paired tests"]
    assert [pair for pair, cell in zip(header[1:], cells, strict=True) if cell == "-"] == [
        "ECMP against ensemble", "EMP against ensemble"
    ]  # fmt: skip
    assert tables["Which of the paper's four methods leads (by mean; no test)"][1] == [
        ["ECMP or EMP", "0 of 0", "0 of 0"]
    ]


def test_variants_change_one_thing():
    for name, variant in VARIANTS.items():
        changed = variant.protocol(PAPER)
        for method in variant.methods:
            assert config_of("yacht", method, changed) != config_of("yacht", method, PAPER), (name, method)
    kept = VARIANTS["norm-before-relu"].protocol(Protocol(recipe={"epochs": 7}, draws=3))
    assert (kept.recipe, kept.draws) == ({"epochs": 7, "norm": "before"}, 3)


def test_the_whole_experiment_at_smoke_scale(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(regression_sets, "SMOKE", TINY)
    found = regression_tables.EXPERIMENT
    setting = Workspace(folder, tmp_path / "work")
    record = reproduce(found, "smoke", setting, tmp_path / "records")
    assert {run["method"] for run in record["result"]["runs"]} == set(METHODS)
    assert {run["variant"] for run in record["result"]["variants"]} == set(VARIANTS)
    assert len(found.rows(record["result"])) == 80
    assert len(found.tables(record["result"])) == 6
    assert set(found.duration) == set(SCALES)
    again = reproduce(found, "smoke", setting, tmp_path / "records")  # from the records of the runs
    assert again["result"] == record["result"]
    (tmp_path / "work" / "regression" / "yacht-emp.json").write_text("{}")
    with pytest.raises(PatchbayesError, match=r"yacht-emp.json is not a record"):
        reproduce(found, "smoke", setting, tmp_path / "records")
    with pytest.raises(PatchbayesError, match="work folder"):
        found.run("smoke", Workspace(folder))


def test_variants_command_line(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(regression_variants, "PAPER", TINY)
    words = [
        "--sets",
        "yacht",
        "--variants",
        "dropout-with-norm",
        "--data-dir",
        str(folder),
        "--out",
        str(tmp_path / "v"),
    ]
    regression_variants.main(words)
    record = json.loads((tmp_path / "v" / "dropout-with-norm" / "yacht-dropout.json").read_text())
    assert (record["variant"], record["config"]["recipe"]["norm"], record["config"]["recipe"]["rate"]) == (
        "dropout-with-norm",
        "after",
        0.005,
    )


def test_real_sets_can_be_read(data_dir):
    for name, shape in {"yacht": (2, 277, 6), "naval": (1, 10_741, 16), "energy": (2, 691, 8)}.items():
        (data,) = read_splits(name, data_dir, range(shape[0]))
        assert data.train_inputs.shape == shape
        assert data.train_targets.shape[2] == SETS[name].targets
        assert torch.isfinite(data.test_inputs).all()
        assert data.test_inputs.abs().max() < 20


def test_speed_is_measured_for_every_method(folder, tmp_path, capsys):
    out = tmp_path / "speed.json"
    regression_speed.main(["--sets", "yacht", "--rounds", "2", "--data-dir", str(folder), "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["method"] for row in rows] == list(METHODS)
    for row in rows:
        assert (row["rounds"], row["steps"], row["splits"]) == (2, 1, 19)
        assert all(row[f"{way}_microseconds_a_step"] > 0 for way in ("stacked", "alone", "modules"))
    assert capsys.readouterr().out.count("times over modules") == len(METHODS)


def test_threads_and_denormals_are_as_before_after_a_run(folder, tmp_path):
    torch.set_num_threads(2)
    run_all(["yacht"], ["emp"], TINY, folder, tmp_path / "records")
    assert torch.get_num_threads() == 2
    assert torch.tensor(1e-39) * 1 > 0


def test_committed_records_follow_the_protocol_and_their_own_splits():
    folder = Path(__file__).resolve().parent.parent / "results" / "regression"
    paths = [path for path in folder.rglob("*.json") if path.name != "speed.json"]
    if not paths:
        pytest.skip("no records beside the tests")
    result = regression_tables.result_of(paths)
    for path, record in zip(paths, result["runs"], strict=True):
        name, method, variant = record["set"], record["method"], record.get("variant")
        protocol = VARIANTS[variant].protocol(PAPER) if variant else protocol_of("small", name, method)
        assert path.relative_to(folder).as_posix() == f"{f'variants/{variant}/' if variant else ''}{name}-{method}.json"
        assert record["config"] == config_of(name, method, protocol), path
        assert [row["split"] for row in record["splits"]] == list(range(SETS[name].splits)), path
        for metric, value in record["summary"].items():
            assert value == regression_sets.summary([row[metric] for row in record["splits"]]), path


def test_the_record_is_made_of_finished_runs(tmp_path):
    """With `finished` nothing is trained: what is there is taken, and an empty folder is refused."""
    known = Path(__file__).resolve().parent.parent / "results" / "regression"
    setting = Workspace(data_dir=tmp_path, work_dir=tmp_path, finished=True)
    with pytest.raises(PatchbayesError, match="no run is finished"):
        regression_tables.run("small", setting)
    (tmp_path / "regression" / "variants" / "targets-raw").mkdir(parents=True)
    for file in ("yacht-dropout.json", "boston-emp.json", "variants/targets-raw/yacht-emp.json"):
        (tmp_path / "regression" / file).write_bytes((known / file).read_bytes())
    result = regression_tables.run("small", setting)
    assert [(run["set"], run["method"]) for run in result["runs"]] == [("yacht", "dropout"), ("boston", "emp")]
    assert [run["variant"] for run in result["variants"]] == ["targets-raw"]
    spent = regression_tables.EXPERIMENT.runs(result)
    assert len(spent) == 3
    assert all(seconds > 0 for _, seconds in spent)
