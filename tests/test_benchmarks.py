"""The benchmarks run, scale what they time on a part rightly, and write records that the tables are made from."""

import json
import math
import sys
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.prediction.plan import Plan, StagePlan

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
PARTS = ["--parts", "grid", "uci", "rivals"]
SMALL = ["--networks", "mlp", "--batch", "2", "--draws", "4", "--budget", "0.001"]


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    before = set(sys.modules)
    monkeypatch.syspath_prepend(FOLDER)
    yield
    for name in set(sys.modules) - before:  # so that "records" or "timing" mean nothing to other tests
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == FOLDER:
            del sys.modules[name]


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_every_benchmark_can_be_imported(name):
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        if error.name in {path.stem for path in FOLDER.glob("*.py")} or str(error.name).startswith("patchbayes"):
            raise
        pytest.skip(f"needs {error.name}")


def run(tmp_path, *words):
    import_module("prediction").main([*words, "--results", str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    return json.loads(path.read_text())


def plan(num_draws, *stages):
    """A fake: (distinct, flops) of each stage."""
    names = [StagePlan(("site",) * number, 1, distinct, flops) for number, (distinct, flops) in enumerate(stages)]
    return Plan(num_draws, "iid", False, engine="graph", networks=num_draws, stages=names)


def test_part_of_the_draws_is_scaled_by_arithmetic_not_by_draws():
    timing = import_module("timing")
    ten = plan(10, (1, 90), (5, 6), (10, 4))  # 90 + 30 + 40 of 100
    all_200 = plan(200, (1, 90), (5, 6), (25, 4))  # 90 + 30 + 100 of 100
    assert timing.arithmetic(ten) == pytest.approx(1.6)
    assert timing.arithmetic(all_200) == pytest.approx(2.2)
    assert timing.Part(10, ten, all_200).factor == pytest.approx(2.2 / 1.6)  # by draws it would be 20
    assert timing.Part(200, all_200, all_200).factor == 1
    by_loop = timing.Part(10, Plan(10, "iid", False), Plan(200, "iid", False))
    assert by_loop.factor == 20
    with_heads = plan(10, (2, 90), (10, 10))
    with_heads.heads = 5
    assert timing.Part(2, with_heads, all_200).num_timed == 2


def test_the_plan_of_a_prediction_comes_without_the_prediction():
    timing, subjects = import_module("timing"), import_module("subjects")
    subject = subjects.Subject.make("mlp", "norm+output", "emp", 3)
    draws = pb.Draws.sample(subject.model, 40)
    for asked in (draws, 40, 1000):
        mine = timing.plan_of(subject.model, subject.x, asked)
        real = pb.predict(subject.model, subject.x, asked, engine="graph").plan
        # chunks depend on the memory that is free, the first call captures, the rest comes later
        rest = {"chunk": 1, "evaluated": [], "capture_seconds": None}
        assert replace(mine, **rest) == replace(real, **rest)
    whole = timing.part_of(subject.model, subject.x, draws, 40)
    assert (whole.num_timed, whole.factor) == (40, 1)
    part = timing.part_of(subject.model, subject.x, draws, 10)
    assert part.num_timed == 10
    assert torch.equal(part.draws.assignments(), draws.assignments()[:10])
    assert 1 < part.factor < 4
    exact = timing.part_of(subject.model, subject.x, 1000, 200)  # 625 networks, but far less arithmetic
    assert (exact.num_timed, exact.factor, exact.whole.exact) == (625, 1, True)


def test_calls_take_turns():
    timing = import_module("timing")
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = timing.in_turn(calls, 0, fewest=3)
    assert "".join(order) == "abccbaabc"
    assert {name: len(values) for name, values in seconds.items()} == dict.fromkeys("abc", 3)
    assert len(timing.in_turn(calls, 10)["a"]) == 101
    assert timing.summary("x", [1.0, 2.0, 3.0, 4.0, 5.0]) == {"x": 3.0, "x_quartiles": [2.0, 4.0]}
    assert [timing.draws_to_time(*some) for some in ((200, 1, 1), (200, 0.01, 1), (4, 1, 1))] == [10, 100, 4]


def test_a_small_run_writes_a_record(tmp_path, capsys):
    record = run(tmp_path, *SMALL, *PARTS)
    assert record["benchmark"] == "prediction_mlp_2_4_grid_uci_rivals"
    assert [(c["sites"], c["method"]) for c in record["cells"]] == [
        (sites, method) for sites in ("norm+output", "last") for method in ("emp", "ecmp")
    ]
    for cell in record["cells"]:
        assert (cell["network"], cell["batch"], cell["draws"], cell["scaled"]) == ("mlp", 2, 4, False)
        assert cell["rounds"] >= 3
        for name in ("unpatched", "loop", "engine", "ratio", "floor_ratio"):
            low, high = cell[f"{name}_quartiles"]
            assert 0 < low <= cell[name] <= high < math.inf
        assert 0 < cell["work"] <= 1
    (uci,) = record["uci"]
    assert uci["networks"] == 25
    assert uci["paper_loop"] == pytest.approx(50 * uci["loop"])
    assert uci["paper_ratio"] == pytest.approx(uci["ratio"] / 50)
    names = [row["name"] for row in record["rivals"]]
    assert len(names) == len(set(names)) == 7
    for row in record["rivals"]:
        assert (row["seconds"] > 0 and row["times_unpatched"] > 0) if "seconds" in row else row["unavailable"]
    printed = capsys.readouterr().out
    assert printed.count("norm+output") >= 2
    assert "all 25 networks" in printed
    assert "laplace-torch" in printed


@pytest.mark.slow
def test_bert_and_a_large_output_layer_are_measured(tmp_path):
    pytest.importorskip("transformers")
    record = run(tmp_path, *SMALL, "--parts", "bert", "head")
    assert record["bert"]
    assert record["head"]


@pytest.mark.parametrize(
    ("words", "count", "key", "value"),
    [
        (["--sites", "last"], 2, "sites", "last"),
        (["--methods", "ecmp"], 2, "method", "ecmp"),
        (["--batch", "3"], 4, "batch", 3),
        (["--draws", "5"], 4, "draws", 5),
    ],
)
def test_filters_leave_what_they_name(words, count, key, value, tmp_path):
    record = run(tmp_path, *SMALL, *words, "--parts", "grid")
    assert not {"uci", "rivals"} & record.keys()
    assert len(record["cells"]) == count
    assert {cell[key] for cell in record["cells"]} == {value}


def test_long_cells_are_timed_on_some_draws_and_say_so(tmp_path):
    words = ["--networks", "mlp", "--sites", "last", "--batch", "2", "--parts", "grid"]
    record = run(tmp_path, *words, "--draws", "40", "200", "--budget", "1e-9")
    assert [cell["scaled"] for cell in record["cells"]] == [True] * 4
    for small, large in (record["cells"][:2], record["cells"][2:]):
        assert small["timed_draws"]["loop"] == large["timed_draws"]["loop"] == 10
        assert large["loop"] == pytest.approx(5 * small["loop"])  # the same timing
        assert "to_error" not in small
        assert large["to_error"] > 0
    few_emp, emp, few_ecmp, ecmp = record["cells"]
    assert [cell["timed_draws"]["engine"] for cell in record["cells"]] == [40, 200, 10, 10]  # EMP: little arithmetic
    assert ecmp["engine"] / few_ecmp["engine"] == pytest.approx(5 * ecmp["work"] / few_ecmp["work"])
    assert emp["work"] < few_emp["work"] < 0.25
    assert emp["own"] | {"timed_draws": 0} == {"sampling": "enumerated", "draws": 125, "heads": 1, "timed_draws": 0}
    assert ecmp["own"]["sampling"] not in ("iid", "enumerated")
    assert 5 <= ecmp["own"]["draws"] < 200
    assert ecmp["own"]["draws"] % 5 == 0


@pytest.mark.parametrize("words", [["--batch", "0"], ["--draws", "-1"], ["--budget", "0"], ["--networks", "vgg"]])
def test_bad_words_are_refused(words, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path, *words)
    assert words[0] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_early_stopping_says_what_data_it_lacks(tmp_path, monkeypatch):
    monkeypatch.delenv("PATCHBAYES_DATA", raising=False)
    with pytest.raises(SystemExit, match=r"cifar-100-binary/test\.bin"):
        run(tmp_path, "--early-stopping", "--data-dir", str(tmp_path))


@pytest.mark.slow
def test_early_stopping_saves_draws_on_real_images(data_dir, tmp_path, monkeypatch):
    benchmark = import_module("prediction")
    measure = benchmark.measure_early_stopping
    monkeypatch.setattr(benchmark, "MOST_DRAWS", 60)
    monkeypatch.setattr(sys.modules["patchbayes.prediction.predict"], "MOST_DRAWS", 60)
    loose = measure(data_dir, num_images=4, tolerance=0.05, rounds=2)
    assert (loose["inputs"], loose["draws"], loose["rounds"], loose["tolerance"]) == (4, 60, 2, 0.05)
    assert 0 < loose["draws_used"] < 60
    assert loose["inputs_with_all_draws"] < 4
    assert loose["ratio"] > 0
    assert 0 < loose["largest_change_of_top"] < 0.25
    monkeypatch.setattr(benchmark, "MOST_DRAWS", 10)
    monkeypatch.setattr(sys.modules["patchbayes.prediction.predict"], "MOST_DRAWS", 10)
    strict = measure(data_dir, num_images=2, tolerance=1e-6, rounds=2)
    assert (strict["draws_used"], strict["inputs_with_all_draws"]) == (10, 2)
    assert strict["draws_used_quartiles"] == [10, 10]
    monkeypatch.setattr(benchmark, "measure_early_stopping", lambda *_, **__: strict)  # the whole takes minutes
    record = run(tmp_path, "--early-stopping", "--data-dir", str(data_dir))
    assert record["benchmark"] == "early_stopping"
    text = "<!-- table: early_stopping -->\n<!-- end table -->"
    assert "10 draws for an input on average, 2 inputs take all 10" in import_module("readme_tables").render(
        text, tmp_path
    )


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("bayesian-torch", "bayesian_torch"),
        ("torch-uncertainty MC dropout, loop", "torch_uncertainty"),
        ("torch-uncertainty MC dropout, one batch", "torch_uncertainty"),
        ("laplace-torch, output", "laplace"),
    ],
)
def test_rivals_run(name, module):
    rivals = import_module("rivals")
    if not find_spec(module):
        pytest.skip(f"{module} is not installed")
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    state = torch.random.get_rng_state()
    rival = rivals.Rival.prepare(name, lambda: network, torch.randn(5, 3, generator=torch.Generator()))
    assert rival.reason is None
    first, second = rival.predict(3), rival.predict(3)
    assert first.shape == (5, 2)
    torch.testing.assert_close(first.sum(-1), torch.ones(5))
    assert torch.equal(first, second)  # the global generator was put back
    assert torch.equal(state, torch.random.get_rng_state())
    assert not torch.equal(first, rival.predict(2))
    assert rival.contender(200, 10).factor == (1 if module == "laplace" else 20)


def test_what_digests_cost_is_measured_and_told(tmp_path):
    words = ["--model", "mlp:64", "--seconds", "0.01", "--results", str(tmp_path)]
    import_module("load_digests").main(words)
    small = json.loads((tmp_path / "load_digests.json").read_text())
    assert small["rounds"] >= 3
    assert small["share_of_loading"] < 1
    record = json.loads((FOLDER.parent / "results" / "load_digests.json").read_text())
    assert record["share_of_loading"] < 0.1
    told = f"takes {100 * record['share_of_loading']:.1f} % of the time of loading"
    assert told in " ".join((FOLDER.parent / "SECURITY.md").read_text().split())


def test_exported_predictors_are_compared_and_told(tmp_path):
    pytest.importorskip("onnxruntime")
    words = ["--networks", "mlp", "--draws", "2", "--batch", "3", "--budget", "0.01", "--results", str(tmp_path)]
    import_module("export_time").main(words)
    (row,) = json.loads((tmp_path / "export_time.json").read_text())["rows"]
    assert 0 <= row["difference"] < 1e-5
    assert row["ratio"] > 0
    text = "<!-- table: export_time -->\n<!-- end table -->"
    made = import_module("readme_tables").render(text, tmp_path)
    assert f"| MLP 2x50 | {row['difference']:.1e} |" in made


def test_a_rival_that_fails_says_why(monkeypatch):
    rivals = import_module("rivals")

    def broken(network, x):
        raise ValueError("no such layer")

    monkeypatch.setitem(rivals.RIVALS, "broken", ("torch", broken))
    monkeypatch.setattr(rivals, "define_torchvision_operators", lambda: None)
    monkeypatch.setitem(rivals.RIVALS, "absent", ("no-such-package", broken))
    failed, absent = (
        rivals.Rival.prepare(name, lambda: nn.Linear(2, 2), torch.ones(1, 2)) for name in ("broken", "absent")
    )
    assert (failed.predict, failed.reason) == (None, "ValueError: no such layer")
    assert absent.reason == "no-such-package is not installed (extra: bench)"


def test_tables_come_from_records(tmp_path):
    tables = import_module("readme_tables")
    words = ["--networks", "mlp", "--sites", "last", "--batch", "8", "--draws", "4", "200", "--budget", "0.001"]
    record = run(tmp_path, *words, *PARTS)
    (tmp_path / f"{tables.PREDICTION}.json").write_text(json.dumps(record))
    text = "".join(f"<!-- table: {name} -->\nold\n<!-- end table -->\n" for name in ("prediction", "rivals"))
    made = tables.render(text, tmp_path)
    assert "old" not in made
    assert made.count("| MLP 2x50 | last block, output |") == 2
    assert f"`{record['command']}`" in made
    assert "all 25 networks" in made
    for row in record["rivals"]:
        assert f"| {row['name']} (" in made
    assert tables.render("no table", tmp_path) == "no table"


def test_the_loop_of_ones_own_is_scored_with_both_statistics(tmp_path):
    own = import_module("own_loop")
    few = own.fashion(0, train=96, corrupted=1)
    few = own.replace(few, corrupted={}, unfamiliar=None, held_out=[t[:100] for t in few.held_out], batch=32)
    rows = []
    for loop in own.LOOPS:
        found = own.result(few, loop, 0, epochs=2)
        assert found["shares"] == ([0.0, 0.0] if loop.endswith("warm_up_") else [])  # two epochs are too few for noise
        assert found["as trained"]["nll"] != found["statistics again"]["nll"]
        rows.append({"seed": 0, "epochs": 2, "loop": loop, **found})
    record = {"seed_numbers": [0], "rows": rows, "command": "python benchmarks/own_loop.py", "commit": "abc"}
    (tmp_path / "own_loop.json").write_text(json.dumps(record))
    made = import_module("readme_tables").render("<!-- table: own_loop -->\n<!-- end table -->", tmp_path)
    for row, drew in zip(rows, (0, 100, 0), strict=True):
        cells = f"| {row['as trained']['nll']:.3f} | {row['as trained']['temperature']:.2f} "
        assert f"{cells}| {row['statistics again']['nll']:.3f} | {drew} % |" in made
