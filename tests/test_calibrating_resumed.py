"""bayesianize_ after a kill: what was tried is kept in a file, used by the same call alone, and leads to the same result."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

import patchbayes as pb
from calibrated_networks import batches, classifier, inputs, labels_from
from command_line import command
from patchbayes.bayesianizing.spread import SpreadSearch
from patchbayes.errors import PatchbayesError
from patchbayes.nets import small_cnn
from patchbayes.patching.network import network_of
from patchbayes.runs import RunFolder


class Killed(BaseException):
    pass


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The levels that were scored, each time that one was."""
    seen: list[float] = []
    own = SpreadSearch._scored

    def counted(self: SpreadSearch, level: float, slope: float, examples: int) -> object:
        seen.append(level)
        return own(self, level, slope, examples)

    monkeypatch.setattr(SpreadSearch, "_scored", counted)
    return seen


def run(path: Path | None, dies_after: int | None = None, scored: list[float] | None = None, **options: object) -> str:
    net, x = classifier(scale=3.0), inputs(300)
    y = labels_from(torch.softmax(net(x) / 2, -1).detach())

    def progress(_stage: str, _left: float) -> None:
        if dies_after is not None and scored is not None and len(scored) > dies_after:
            raise Killed

    report = pb.bayesianize_(net, batches(x, y), progress=progress, keep_tries=path, **{"budget": 6000, **options})  # type: ignore[arg-type]
    return json.dumps([report.losses, report.spread, report.temperature, report.passes, report.after.nll])


def test_a_killed_search_goes_on_to_the_same_result(tmp_path: Path, scored: list[float]) -> None:
    whole, number = run(None), len(scored)
    scored.clear()
    with pytest.raises(Killed):
        run(tmp_path / "tried.json", 2, scored)
    kept = len(json.loads((tmp_path / "tried.json").read_text())["tries"])
    scored.clear()
    assert run(tmp_path / "tried.json") == whole
    assert kept == 2
    assert len(scored) == number - kept


def test_what_another_call_tried_is_not_used(tmp_path: Path, scored: list[float]) -> None:
    run(tmp_path / "tried.json")
    for other in ({"seed": 1}, {"draws": 8}, {"budget": 5000}, {"sites": "output"}):
        scored.clear()
        whole = run(None, **other)
        number = len(scored)
        scored.clear()
        assert run(tmp_path / "tried.json", **other) == whole
        assert len(scored) == number


def test_a_file_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tried.json"
    for content in ("[]", "no", '"digest"'):
        path.write_text(content)
        with pytest.raises(PatchbayesError, match=r"tried\.json"):
            run(path)


def test_the_command_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scored: list[float]) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    safetensors.torch.save_file(small_cnn(1, 10).state_dict(), "net.safetensors")
    line = (
        "bayesianize net.safetensors run --model small_cnn --data digits --held-out test[:60] --budget 2000 --draws 5"
    )
    own = SpreadSearch._scored

    def dying(self: SpreadSearch, *place: object) -> object:
        if len(scored) == 3:
            raise Killed
        return own(self, *place)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(SpreadSearch, "_scored", dying)
        with pytest.raises(Killed):
            command(line)
    assert Path("run.tried.json").exists()
    assert not Path("run").exists()
    scored.clear()
    resumed = command(f"{line} --resume --json").json
    again = len(scored)
    assert not Path("run.tried.json").exists()
    assert "is done: there is nothing to resume" in command(f"{line} --resume", code=1).err
    scored.clear()
    whole = command(line.replace(" run ", " whole ") + " --json").json
    assert again == len(scored) - 3
    for found in (resumed, whole):
        del found["folder"], found["seconds"]
    assert resumed == whole


def test_training_can_end_with_a_calibration(tmp_path: Path) -> None:
    line = "train --data digits --model small_cnn --method ecmp(2,jitter=0.3) --epochs 2 --quiet --calibrate"
    said = command(line, tmp_path / "run").out
    assert "calibrated on 90 held-out examples" in said
    network = RunFolder.open(tmp_path / "run").model()
    found = json.loads((tmp_path / "run" / "calibration.json").read_text())
    assert found["report"] in said
    assert float(network_of(network).likelihood.mean_temperature) != 1.0
    before = (tmp_path / "run" / "best.safetensors").read_bytes()
    command(f"train {tmp_path / 'run'} --resume --calibrate --quiet")  # nothing is left to do
    assert (tmp_path / "run" / "best.safetensors").read_bytes() == before
    again = command(f"train {tmp_path / 'run'} --resume --calibrate --views --quiet", code=1)
    assert "expected training with one of crop, crop+flip" in again.err
    refused = command(
        "train --data digits --model small_cnn --method vanilla --epochs 1 --calibrate", tmp_path / "plain", code=1
    )
    assert "expected a patched network of classes" in refused.err
    assert not (tmp_path / "plain").exists()  # before it was trained, not after
    table = tmp_path / "table.csv"
    table.write_text("a,b,y\n" + "".join(f"{i % 7},{i % 5},{0.1 * i}\n" for i in range(60)))
    numbers = command(f"train --data csv:{table}#y --model mlp --epochs 1 --calibrate", tmp_path / "numbers", code=1)
    assert "got a regression with ecmp" in numbers.err.lower()
    assert not (tmp_path / "numbers").exists()


@pytest.mark.parametrize("chosen", ["none", "learned"])
def test_draws_that_calibration_made_agree_did_not_collapse(tmp_path: Path, chosen: str) -> None:
    command(
        "train --data digits --model small_cnn --method ecmp(2,jitter=0.3) --epochs 1 --quiet --calibrate",
        tmp_path / "run",
    )
    mark = tmp_path / "run" / "calibration.json"
    mark.write_text(json.dumps(json.loads(mark.read_text()) | {"chosen": chosen}))
    command("evaluate --draws 4 --split test[:40]", tmp_path / "run")
    record = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert (record.get("diversity") is None) == (chosen == "none")
    assert record["train_command"].endswith("--calibrate")


def test_a_calibration_with_views_is_evaluated_and_asked_with_them(tmp_path: Path) -> None:
    """Those of the augmentation, in calibration.json and in the record; evaluate and predict average over them."""
    folder = tmp_path / "run"
    line = "train --data digits --model small_cnn --method ecmp(2,jitter=0.3) --epochs 4 --lr 0.01 --quiet"
    command(f"{line} --set augmentation=crop --calibrate --views", folder)
    assert json.loads((folder / "calibration.json").read_text())["views"] == "shifts(1, False)"
    run = RunFolder.open(folder)
    seen = run.views()
    assert seen is not None
    assert len(seen) == 5
    assert run.views("last") is None
    command("evaluate --draws 10 --split test[:40] --json", folder)
    record = json.loads((folder / "evaluation.json").read_text())
    assert record["views"] == "shifts(1, False)"
    dataset = run.dataset()
    x, y = next(iter(dataset.batches(dataset.part("test[:40]"), 40)))
    with_views, without = (pb.predict(run.model(), x, 10, views=views) for views in (seen, None))
    nll = -float(with_views.log_probs[torch.arange(40), y].mean())
    assert record["metrics"]["nll"]["value"] == pytest.approx(nll, abs=1e-4)
    assert abs(nll + float(without.log_probs[torch.arange(40), y].mean())) > 1e-3
    curve = record["draws_curve"]
    assert curve["nll"]["value"][curve["draws"].index(10)] == pytest.approx(nll, abs=1e-4)  # tempered as the whole is
    assert "goes with --calibrate" in command(f"{line} --views", tmp_path / "other", code=2).err
    calibrated = (folder / "best.safetensors").read_bytes()
    command(f"train {folder} --resume --quiet")  # and stays so, whichever epoch was the best
    assert (folder / "best.safetensors").read_bytes() == calibrated
    assert "is calibrated already, with shifts(1, False) views" in (
        command(f"train {folder} --resume --calibrate --quiet", code=1).err
    )
