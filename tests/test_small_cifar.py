"""The study at small scale: its part of CIFAR-100, its networks, corruptions for small images, and calibrated runs."""

import copy
import dataclasses
import json

import pytest
import torch

import patchbayes as pb
from patchbayes.data import read
from patchbayes.data.corruptions import CORRUPTIONS, CorruptedSplit, corrupt
from patchbayes.data.splits import ArraySplit
from patchbayes.errors import PatchbayesError
from patchbayes.nets.named import build_net
from patchbayes.posteriors.mixed import adam_rate
from patchbayes.runs import TrainingConfig
from patchbayes.runs.answers import class_answers
from patchbayes_reproduce import image_tables
from patchbayes_reproduce.calibrated_runs import outside_regime
from patchbayes_reproduce.experiment import Workspace
from patchbayes_reproduce.image_study import Study, run_study
from patchbayes_reproduce.small_cifar import first_of_each, shrunk, write_image_tree, write_twenty_classes


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    """Files in the format of CIFAR-100 with 360 training and 60 test images of every fifth class, in noise."""
    root = tmp_path_factory.mktemp("data")
    folder = root / "cifar-100-binary"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for name, number in (("train.bin", 360), ("test.bin", 60)):
        fine = torch.arange(100).repeat_interleave(torch.tensor([number if i % 5 == 0 else 1 for i in range(100)]))
        records = torch.randint(0, 256, (len(fine), 3074), generator=generator, dtype=torch.uint8)
        records[:, 1] = fine.to(torch.uint8)
        (folder / name).write_bytes(records.numpy().tobytes())
    (folder / "fine_label_names.txt").write_text("\n".join(f"class{i:02}" for i in range(100)))
    return root


def test_twenty_classes_in_halved_images(cifar, tmp_path):
    file = write_twenty_classes(tmp_path / "part.npz", cifar)
    data = read(f"npz:{file}", held_out=2 / 7)
    assert (len(data.train), len(data.held_out), len(data.test)) == (5000, 2000, 1000)
    assert data.classes == tuple(f"class{i:02}" for i in range(0, 100, 5))
    whole = read("cifar100", cifar, held_out=0)
    raw, targets = data.test.fetch(torch.arange(50, 52))
    first = first_of_each(whole.test, range(5, 6), 2)
    blocks = whole.test.fetch(first)[0].float().view(2, 3, 16, 2, 16, 2).mean((3, 5)).round()
    assert torch.equal(raw.float(), blocks)
    assert targets.tolist() == [1, 1]
    before = file.read_bytes()
    write_twenty_classes(file, None)  # is there already
    assert file.read_bytes() == before


def test_first_of_each_and_shrinking_refuse():
    split = ArraySplit(torch.zeros(3, 3, 32, 32, dtype=torch.uint8), torch.tensor([0, 0, 1]))
    with pytest.raises(PatchbayesError, match="class 1 has fewer than 2"):
        first_of_each(split, range(2), 2)
    with pytest.raises(PatchbayesError, match="divisor of 32"):
        shrunk(split.inputs, 12)


def test_a_tree_of_image_files(cifar, tmp_path):
    pytest.importorskip("PIL")
    folder = write_image_tree(tmp_path / "tree", cifar, train=3, held_out=2, test=2)
    data = read(f"images:{folder}", size=32)
    assert (len(data.train), len(data.held_out), len(data.test)) == (60, 40, 40)
    whole = read("cifar100", cifar, held_out=0)
    places = first_of_each(whole.train, range(0, 100, 5), 5).view(20, 5)
    assert torch.equal(
        data.train.fetch(torch.arange(60))[0], whole.train.fetch(places[:, :3].flatten())[0]
    )  # files without loss, and none of them in two parts
    assert torch.equal(data.held_out.fetch(torch.arange(40))[0], whole.train.fetch(places[:, 3:].flatten())[0])
    files = sorted(folder.rglob("*.png"))
    write_image_tree(folder, None)  # is there already
    assert sorted(folder.rglob("*.png")) == files


@pytest.mark.parametrize("name", ["resnet8", "pyramidnet20", "pyramidnet110"])
def test_networks_of_the_study(name):
    network = build_net(f"patchbayes_reproduce.small_cifar:{name}", 20, (3, 16, 16), trust_code=True)
    weight = next(p for p in network.parameters() if p.dim() == 4 and p.shape[1] > 1)
    assert weight.is_contiguous(memory_format=torch.channels_last)
    convolutions = sum(isinstance(module, torch.nn.Conv2d) for module in network.modules())
    assert convolutions >= {"resnet8": 7, "pyramidnet20": 19, "pyramidnet110": 109}[name]


# ---- corruptions for small images


def test_small_corruptions_change_images_and_follow_from_the_seed():
    pytest.importorskip("PIL")
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randint(0, 256, (4, 3, 8, 8), generator=generator).float()
    images = torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bilinear").round().to(torch.uint8)
    for name in CORRUPTIONS:
        first = corrupt(images, name, 3, strengths="small")
        assert first.shape == images.shape
        assert first.dtype == torch.uint8
        assert not torch.equal(first, images)
        assert torch.equal(first[2:], corrupt(images[2:], name, 3, strengths="small"))  # whatever else is in the batch
        gray = corrupt(images[:, :1], name, 1, strengths="small")
        assert gray.shape == (4, 1, 32, 32)
    for name in (
        "gaussian_noise",
        "shot_noise",
        "impulse_noise",
        "defocus_blur",
        "zoom_blur",
        "brightness",
        "contrast",
        "fog",
    ):
        distances = [
            float((corrupt(images, name, level, strengths="small").float() - images.float()).abs().mean())
            for level in range(1, 6)
        ]
        assert distances == sorted(distances)
    other = corrupt(images, "gaussian_noise", 3, seed=1, strengths="small")
    assert not torch.equal(other, corrupt(images, "gaussian_noise", 3, strengths="small"))
    with pytest.raises(PatchbayesError, match="strengths='large'"):
        corrupt(images, "fog", 1, strengths="large")
    split = CorruptedSplit(ArraySplit(images, torch.arange(4)), "contrast", 5, strengths="small")
    mean = images.float().mean((2, 3), keepdim=True)
    wanted = (mean + 0.15 * (images.float() - mean)).round()
    assert (split.subset(torch.tensor([3])).fetch(torch.tensor([0]))[0].float() - wanted[3]).abs().max() <= 1


# ---- runs


def test_outside_the_regime_says_why():
    inside = {"train_accuracy": 0.96, "temperature": 1.2}
    assert outside_regime([inside, inside]) is None
    assert "94.0 % on its training data" in outside_regime([inside, inside | {"train_accuracy": 0.94}])
    assert "temperature is 1.05" in outside_regime([inside | {"temperature": 1.05}])
    assert "no vanilla" in outside_regime([])


def tiny_study(**more):
    training = {"epochs": 1, "batch_size": 256, "objective": "simplified", "held_out": 0.3, "threads": 1}
    study = Study(
        "digits", "mlp:16", ("vanilla", "ecmp_bn_output"), 2, training, draws=4, curve=(1, 4), split="test[:60]",
        calibrate=True, later=("dropout_tuned",), rates=(0.02, 0.3),
        each={"ecmp_bn_output": {"method": "ecmp(5)", "sites": "output"}},
    )  # fmt: skip
    return dataclasses.replace(study, **more)


def test_a_study_keeps_every_run_and_takes_finished_ones(tmp_path, monkeypatch):
    monkeypatch.setitem(image_study_methods(), "dropout", {"method": "dropout(0.005)", "sites": "linear"})
    study = tiny_study(later=())
    result = run_study(study, Workspace(work_dir=tmp_path), "tiny")
    assert {label: len(kept) for label, kept in result["methods"].items()} == {"vanilla": 2, "ecmp_bn_output": 2}
    ours = result["methods"]["ecmp_bn_output"][0]
    assert ours["draws_curve"]["draws"] == [1, 4]
    assert {"accuracy", "top5_accuracy", "ece", "mce", "nll"} <= ours["draws_curve"].keys()
    assert ours["calibrated"]["draws"]["nll"]["value"] > 0
    assert result["ensemble"]["members"] == 2
    made = (tmp_path / "tiny" / "vanilla-0" / "calibrated.json").stat().st_mtime_ns
    again = run_study(study, Workspace(work_dir=tmp_path, finished=True), "tiny")
    assert json.dumps(again) == json.dumps(json.loads(json.dumps(result)))
    assert (tmp_path / "tiny" / "vanilla-0" / "calibrated.json").stat().st_mtime_ns == made
    (tmp_path / "tiny" / "ecmp_bn_output-1" / "calibrated.json").unlink()
    part = run_study(study, Workspace(work_dir=tmp_path, finished=True), "tiny")
    assert {label: len(kept) for label, kept in part["methods"].items()} == {"vanilla": 2, "ecmp_bn_output": 1}
    with pytest.raises(PatchbayesError, match="no run is finished"):
        run_study(study, Workspace(work_dir=tmp_path, finished=True), "other")
    header, lines = image_tables.calibrated_table(json.loads(json.dumps(result)))
    assert all(len(line) == len(header) for line in lines)
    assert lines[1][-1] == "not comparable"  # one epoch
    assert lines[2][0].startswith("explicit ensemble of the 2 vanilla networks")


def test_a_record_is_completed_elsewhere(tmp_path, monkeypatch):
    """Runs of the record are kept as they are; those that it lacks are made, the tuned rate is the record's."""
    monkeypatch.setitem(image_study_methods(), "dropout 0.02", {"method": "dropout(0.02)", "sites": "linear"})
    monkeypatch.setitem(image_study_methods(), "dropout 0.3", {"method": "dropout(0.3)", "sites": "linear"})
    study = tiny_study()
    whole = json.loads(json.dumps(run_study(study, Workspace(work_dir=tmp_path / "one"), "tiny")))
    assert all(len(kept) == 2 for kept in whole["methods"].values())
    part = copy.deepcopy(whole)
    del part["methods"]["ecmp_bn_output"], part["methods"]["dropout_tuned"][1]
    part["methods"]["vanilla"][0]["metrics"]["nll"]["value"] = 7.0  # not made again
    setting = Workspace(work_dir=tmp_path / "two", known=part)
    completed = json.loads(json.dumps(run_study(study, setting, "tiny")))
    rate = whole["methods"]["dropout_tuned"][0]["method"].removeprefix("Dropout(").removesuffix(")")
    assert {path.name for path in (tmp_path / "two" / "tiny").iterdir()} == {
        "ecmp_bn_output-0", "ecmp_bn_output-1", f"dropout-{rate}-1"
    }  # fmt: skip
    assert completed["methods"]["vanilla"] == part["methods"]["vanilla"]
    assert completed["ensemble"] == whole["ensemble"]
    for label in ("ecmp_bn_output", "dropout_tuned"):
        assert [kept["metrics"] for kept in completed["methods"][label]] == [
            kept["metrics"] for kept in whole["methods"][label]
        ]
    assert list(completed["methods"]) == list(whole["methods"])
    nothing = run_study(study, Workspace(work_dir=tmp_path / "three", known=part, finished=True), "tiny")
    assert {label: len(kept) for label, kept in nothing["methods"].items()} == {"vanilla": 2, "dropout_tuned": 1}
    changed = dataclasses.replace(study, each={"ecmp_bn_output": {"method": "ecmp(4)", "sites": "output"}})
    left = run_study(changed, Workspace(work_dir=tmp_path / "three", known=whole, finished=True), "tiny")
    assert set(left["methods"]) == {"vanilla", "dropout_tuned"}  # of another ECMP nothing is known
    with pytest.raises(PatchbayesError, match="has draws 4, this study 5: it cannot be completed"):
        run_study(dataclasses.replace(study, draws=5), setting, "tiny")


def test_our_own_scheme_is_the_library_s():
    settings = image_study_methods()["mixed"]
    rules = TrainingConfig(data="digits", model="mlp:6", **settings).rules()
    for sites, method in pb.mixed(1.5).items():
        wanted, found = dataclasses.asdict(method), dataclasses.asdict(rules[sites])
        assert {key: value for key, value in found.items() if value != pytest.approx(wanted[key])} == {}
    assert settings["patch_lr"] == adam_rate(1e-3)


def image_study_methods():
    from patchbayes_reproduce import image_study

    return image_study.METHODS


@pytest.mark.slow
def test_the_rate_of_dropout_is_chosen_on_held_out_data(tmp_path):
    """Of two rates the one whose calibrated prediction is better on the first seed's held-out part, for all seeds."""
    training = {**tiny_study().training, "sites": "linear"}
    study = tiny_study(methods=(), later=("dropout_tuned",), training=training, rates=(0.02, 0.9))
    result = run_study(study, Workspace(work_dir=tmp_path), "tuned")
    folders = {path.name for path in (tmp_path / "tuned").iterdir()}
    scores = {
        rate: json.loads((tmp_path / "tuned" / f"dropout-{rate}-0" / "calibrated.json").read_text())["held_out_nll"]
        for rate in ("0.02", "0.9")
    }
    best = min(scores, key=scores.get)
    assert folders == {"dropout-0.02-0", "dropout-0.9-0", f"dropout-{best}-1"}
    assert len(result["methods"]["dropout_tuned"]) == 2


def test_curves_of_draws_count_the_five_best_classes():
    torch.manual_seed(0)
    import patchbayes as pb

    network = torch.nn.Sequential(torch.nn.Linear(4, 8))
    pb.patch_(network, pb.ECMP(3, jitter=1.0), "linear")
    x, y = torch.randn(50, 4), torch.randint(8, (50,))
    answers = class_answers(network, [(x, y)], 20, curve=[1, 20], sampling="iid")
    at = answers.at_draws[20]
    best = answers.log_probs.topk(5, 1).indices
    assert torch.equal(at.within_five[0], (best == y[:, None]).any(1))
    assert (answers.at_draws[1].within_five >= answers.at_draws[1].correct).all()
