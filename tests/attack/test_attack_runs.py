"""Damaged run folders: checkpoints, configurations and records."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from attacking import CANARY, attack, survives
from mutations import damaged, damaged_json, damaged_value, word
from safetensors.torch import load_file, save_file
from torch.torch_version import TorchVersion

import patchbayes as pb
from patchbayes.data import read
from patchbayes.nets.named import build_net
from patchbayes.runs import (
    EvaluationOptions,
    RunFolder,
    TrainingConfig,
    evaluate,
    load_ordinary_,
    read_evaluation,
    train,
    write_evaluation,
)
from small_runs import write_npz

SHORT = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two small runs, one patched, both evaluated."""
    place = tmp_path_factory.mktemp("attacked")
    write_npz(place / "d.npz")
    for name, method in (("net", "ecmp(3)"), ("plain", "vanilla")):
        config = TrainingConfig(data=f"npz:{place / 'd.npz'}", model="mlp:6", method=method, epochs=1, batch_size=16)
        train(config, place / name, quiet=True)
    options = EvaluationOptions(draws=4, curve=(1, 4), replicates=20)
    evaluate([RunFolder.open(place / name) for name in ("net", "plain")], options, keep=write_evaluation)
    return place


@pytest.fixture
def attacked(folder, tmp_path, monkeypatch):
    """A copy to damage, beside a module that nobody may import."""
    shutil.copytree(folder, tmp_path / "runs")
    (tmp_path / f"{CANARY}.py").write_text("def run(*_): raise SystemExit(0)\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


# Checkpoints


def values_of(network):
    return [(key, value.clone()) for key, value in network.state_dict().items()]


def same_values(one, other):
    return [key for key, _ in one] == [key for key, _ in other] and all(
        torch.equal(a, b) for (_, a), (_, b) in zip(one, other, strict=True)
    )


class Values(list):
    """The values of a network, equal where all bits are."""

    def __eq__(self, other):
        return same_values(self, other)

    def __ne__(self, other):
        return not self == other

    __hash__ = None


def checkpoint_case(runs):
    originals = {
        "whole": (runs / "net" / "best.safetensors").read_bytes(),
        "plain": (runs / "plain" / "best.safetensors").read_bytes(),
        "state": (runs / "net" / "last.safetensors").read_bytes(),
    }
    network = RunFolder.open(runs / "net").model()
    pb.save(network, runs / "patch.safetensors")
    originals["patch"] = (runs / "patch.safetensors").read_bytes()
    torch.save(load_file(runs / "plain" / "best.safetensors"), runs / "plain.pt")
    originals["pickle"] = (runs / "plain.pt").read_bytes()
    targets = {"fresh": build_net("mlp:6", 3, (4,)), "patched": network}
    own = values_of(targets["fresh"]), values_of(network)
    state = {"target": targets["fresh"]}

    def prepare(rng):
        kind = rng.choice(sorted(originals))
        file = runs / f"attacked{'.pt' if kind == 'pickle' else '.safetensors'}"
        content = originals[kind]
        if kind != "pickle" and rng.random() < 0.6:
            content = described_anew(content, rng)
        file.write_bytes(damaged(content, rng) if rng.random() < 0.7 else content)
        chosen = rng.choice(("fresh", "patched"))
        if chosen == "fresh":  # a case that is accepted patches it
            targets["fresh"] = build_net("mlp:6", 3, (4,))
        else:
            network.load_state_dict(dict(own[1]))
        state["target"] = targets[chosen]
        check = rng.random() < 0.5

        def run():
            if kind == "pickle" or (kind == "plain" and rng.random() < 0.5):
                load_ordinary_(state["target"], file)
            else:
                pb.load_(state["target"], file, check_shared=check)

        return run

    return prepare, lambda: Values(values_of(state["target"]))


def pretrained_case(runs):
    """Folders of `save_pretrained`: any of their files damaged, swapped, missing, or in the place of another."""
    network = RunFolder.open(runs / "net").model()
    folder = runs / "pretrained"
    pb.save_pretrained(network, folder)
    originals = {path.name: path.read_bytes() for path in folder.iterdir()}
    files = [name for name in sorted(originals) if name.endswith(".safetensors")]
    target = build_net("mlp:6", 3, (4,))
    own = values_of(target)
    state = {"target": target}

    def prepare(rng):
        for name, content in originals.items():
            (folder / name).write_bytes(content)
        for _ in range(rng.choice((1, 1, 2))):
            name = rng.choice((*files, "patch_config.json"))
            content = originals[name]
            if name == "patch_config.json":
                content = damaged_json(json.loads(content), rng)
            elif rng.random() < 0.5:
                content = described_anew(content, rng)
            (folder / name).write_bytes(damaged(content, rng) if rng.random() < 0.5 else content)
        match rng.randrange(8):
            case 0:
                (folder / rng.choice(files)).unlink()
            case 1:
                (folder / files[0]).write_bytes(originals[files[1]])
        if pb.is_patched(state["target"]):  # an accepted case patched it
            state["target"] = build_net("mlp:6", 3, (4,))
            state["target"].load_state_dict(dict(own))
        found = state["target"]

        def run():
            if rng.random() < 0.5:
                made = pb.from_pretrained(build_net, folder, spec="mlp:6", num_outputs=3, input_shape=(4,))
                assert all(value.isfinite().all() for value in made.state_dict().values())
            else:
                pb.load_(found, folder, check_shared=False)

        return run

    return prepare, lambda: Values(values_of(state["target"]))


def exported_case(runs):
    """Exported files in place of checkpoints, whole and damaged, whatever they are called: they are archives and graphs that
    other programs run, and this package reads neither."""
    network = RunFolder.open(runs / "net").model()
    originals = {}
    onnx = ["exported.onnx"] if torch.__version__ >= TorchVersion("2.13") else []  # what older ones cannot write
    for name in ("exported.pt2", *onnx):
        pb.export(network, runs / name, 4, example_input=torch.zeros(2, 4))
        originals[name] = (runs / name).read_bytes()
    target = build_net("mlp:6", 3, (4,))
    run = runs / "net" / "best.safetensors"
    inputs = runs / "rows.csv"

    def prepare(rng):
        content = originals[rng.choice(sorted(originals))]
        content = damaged(content, rng) if rng.random() < 0.8 else content
        file = runs / f"attacked{rng.choice(('.pt2', '.onnx', '.pt', '.pth', '.safetensors', ''))}"
        for path in (file, run, inputs):
            path.write_bytes(content)
        looks = (
            lambda: pb.load_(target, file),
            lambda: pb.digests.verify(file),
            lambda: load_ordinary_(target, file),
            lambda: RunFolder.open(runs / "net").model(),
            lambda: read(f"csv:{inputs}#y"),
        )
        return rng.choice(looks)

    return prepare, lambda: Values(values_of(target))


def draws_case(runs):
    """Files of draws, and what is predicted with those that are accepted."""
    network = RunFolder.open(runs / "net").model()
    file = runs / "draws.json"
    plain = pb.Draws.sample(network, 4, generator=torch.Generator().manual_seed(0))
    originals = []
    for draws in (plain, plain.weighted([0.1, 0.2, 0.3, 0.4])):
        draws.save(file)
        originals.append(json.loads(file.read_text()))
    inputs = torch.zeros(2, 4)

    def prepare(rng):
        file.write_bytes(damaged_json(rng.choice(originals), rng))

        def run():
            found = pb.predict(network, inputs, pb.Draws.load(file, network))
            assert found.probs.isfinite().all()

        return run

    return prepare, lambda: Values(values_of(network))


def demo_case(runs):
    """Results that a demo kept, read by the next one."""
    from patchbayes.cli.demo import _kept, demo_record
    from patchbayes.cli.demo_table import finding, lines_of_table, titled

    record = demo_record()
    result = record["seeds"][0]

    def prepare(rng):
        contestant = rng.choice(("plain", f"mixed:{record['noise']:g}", f"dropout:{record['dropout_rate']:g}"))
        (runs / "kept.json").write_bytes(damaged_json(result[contestant], rng))

        def run():
            rows = titled([{**result, contestant: _kept(runs / "kept.json", contestant)}], record)
            finding(rows, 1.0)
            lines_of_table(rows, color=False)

        return run

    return prepare, None


def described_anew(content, rng):
    """The file with another description or other tensors; its digests may or may not be right."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    metadata = header.get("__metadata__", {})
    if "patchbayes" in metadata and rng.random() < 0.6:
        unsealed = {k: v for k, v in json.loads(metadata["patchbayes"]).items() if k != "sha256"}
        description = damaged_value(unsealed, rng)
        metadata = {"patchbayes": json.dumps(description)}
    elif rng.random() < 0.5:
        metadata = damaged_value(metadata, rng)
    else:
        header = damaged_value({key: value for key, value in header.items() if key != "__metadata__"}, rng)
    if isinstance(header, dict):
        header["__metadata__"] = metadata
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


# Configurations


def config_case(runs):
    originals = {name: json.loads((runs / name / "config.json").read_text()) for name in ("net", "plain")}
    histories = {name: (runs / name / "metrics.jsonl").read_bytes() for name in originals}

    def prepare(rng):
        name = rng.choice(sorted(originals))
        content = damaged_json(originals[name], rng)
        (runs / name / "config.json").write_bytes(content)
        (runs / name / "metrics.jsonl").write_bytes(
            damaged(histories[name], rng) if rng.random() < 0.3 else histories[name]
        )
        looks = [
            lambda: RunFolder.open(runs / name).model(rng.choice(("best", "last"))),
            lambda: RunFolder.open(runs / name).dataset(),
            lambda: RunFolder.open(runs / name).history(),
            lambda: RunFolder.open(runs / name).training,
            lambda: RunFolder.open(runs / name).likelihood(),
        ]

        def run():
            for look in rng.sample(looks, 2):
                look()

        return run

    return prepare, None


def setting_case(runs):
    """Training configurations alone, as --config and --set give them."""
    plain = RunFolder.open(runs / "net").training.to_json()

    def prepare(rng):
        content = damaged_value(plain, rng)
        if isinstance(content, dict) and rng.random() < 0.5:
            content[rng.choice(sorted(plain))] = word(rng)
        return lambda: TrainingConfig.from_json(content) if isinstance(content, dict) else None

    return prepare, None


# Records


def record_case(runs):
    from patchbayes.report import write_report

    originals = [json.loads((runs / name / "evaluation.json").read_text()) for name in ("net", "plain")]

    def prepare(rng):
        for name, original in zip(("net", "plain"), originals, strict=True):
            content = (
                damaged_json(original, rng) if name == "net" or rng.random() < 0.2 else json.dumps(original).encode()
            )
            (runs / name / "evaluation.json").write_bytes(content)
        pages = rng.random() < 0.1  # drawing takes long

        def run():
            records = [read_evaluation(runs / name) for name in ("net", "plain")]
            formats = ["html"] if pages else [rng.choice(("markdown", "latex", "csv"))]
            (page, *_) = write_report(records, [[], []], runs / "page.html", formats=formats)
            text = Path(page).read_text()
            assert "\x1b" not in text
            assert "<script>alert" not in text

        return run

    return prepare, None


@pytest.mark.parametrize(
    ("name", "make", "long", "accepted"),
    [
        ("checkpoints", checkpoint_case, 1500, 0.01),
        ("configurations", config_case, 800, 0.01),
        ("settings", setting_case, 600, 0.01),
        ("records", record_case, 600, 0.01),
        ("pretrained folders", pretrained_case, 1000, 0.01),
        ("exported files", exported_case, 500, 0.0),
        ("draws", draws_case, 400, 0.01),
        ("results of the demo", demo_case, 200, 0.01),
    ],
)
class TestRunFolders:
    def test_a_few(self, attacked, capsys, name, make, long, accepted):
        prepare, unchanged = make(attacked)
        number = SHORT // 4 if name == "records" else SHORT
        survives(attack(name, number, prepare, unchanged=unchanged), capsys, refused=0.3)

    @pytest.mark.slow
    def test_many(self, attacked, capsys, name, make, long, accepted):
        prepare, unchanged = make(attacked)
        survives(attack(name, long, prepare, seed=1, unchanged=unchanged), capsys, refused=0.3, accepted=accepted)


def test_pickled_code_is_not_run(tmp_path):
    """What torch.save writes may hold anything; what is not a tensor or a plain container is refused unread."""

    class Evil:
        def __reduce__(self):
            return (Path(tmp_path / "ran").touch, ())

    torch.save({"state_dict": Evil()}, tmp_path / "evil.pt")
    network = build_net("mlp:6", 3, (4,))
    with pytest.raises(pb.PatchbayesError, match="not opened, since that could run anything"):
        load_ordinary_(network, tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()
    save_file({"a": torch.zeros(1)}, tmp_path / "evil.pt")  # by its name a pickle, and none
    with pytest.raises(pb.PatchbayesError, match="cannot be read as a checkpoint"):
        load_ordinary_(network, tmp_path / "evil.pt")
