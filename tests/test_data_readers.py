"""Every reader against real files, or files written in the real layout, and what its options change."""

import csv
import gzip
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from patchbayes.data import ImageFileSplit, csv_rows, decode_image, from_arrays, read
from patchbayes.data.csv_file import MOST_CLASSES
from patchbayes.errors import PatchbayesError

DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")


# scikit-learn


def test_digits():
    dataset = read("digits")
    assert (dataset.task, dataset.input_shape, dataset.classes) == ("classification", (1, 8, 8), tuple("0123456789"))
    assert (len(dataset.train), len(dataset.held_out), len(dataset.test)) == (808, 90, 899)
    raw = dataset.test.inputs
    assert raw.dtype == torch.uint8
    assert (int(raw.min()), int(raw.max())) == (0, 255)
    from sklearn.datasets import load_digits

    found = load_digits()
    every = torch.cat([dataset.train.inputs, dataset.held_out.inputs, raw]).double().flatten(1)
    counts = torch.cat([dataset.train.targets, dataset.held_out.targets, dataset.test.targets]).bincount()
    assert counts.tolist() == np.bincount(found.target).tolist()
    assert abs(float(every.sum()) * 16 / 255 - found.data.sum()) < 0.5 * 16 / 255 * every.numel()
    assert torch.equal(read("digits", seed=5).test.inputs, raw)  # the test part is always the same


def test_diabetes():
    dataset = read("diabetes", held_out=0)
    assert (dataset.task, dataset.input_shape, dataset.classes) == ("regression", (10,), ("progression",))
    assert (len(dataset.train), len(dataset.test)) == (353, 89)
    assert dataset.features[:3] == ("age", "sex", "bmi")
    assert dataset.train.targets.shape == (353, 1)


# CIFAR


def test_cifar100(data_dir):
    dataset = read("cifar100", data_dir, held_out=0)
    assert (len(dataset.train), len(dataset.test), dataset.num_outputs) == (50_000, 10_000, 100)
    assert dataset.input_shape == (3, 32, 32)
    assert dataset.train.targets.bincount().tolist() == [500] * 100
    assert dataset.test.targets.bincount().tolist() == [100] * 100
    assert (dataset.classes[0], dataset.classes[49], dataset.classes[99]) == ("apple", "mountain", "worm")
    # The published constants are the statistics of the training pixels.
    pixels = dataset.train.inputs[::10].double() / 255
    torch.testing.assert_close(tuple(pixels.mean((0, 2, 3)).tolist()), dataset.preparation.mean, atol=3e-3, rtol=0)
    torch.testing.assert_close(tuple(pixels.std((0, 2, 3)).tolist()), dataset.preparation.std, atol=3e-3, rtol=0)
    # Record 0 of the file, byte by byte: coarse label, fine label, then the red, green and blue planes by rows.
    record = np.fromfile(data_dir / "cifar-100-binary" / "test.bin", dtype=np.uint8, count=3074)
    assert int(dataset.test.targets[0]) == record[1]
    assert dataset.test.inputs[0].flatten().tolist() == record[2:].tolist()
    assert len(read(f"cifar100:{data_dir}").test) == 10_000
    assert len(read(f"cifar100:{data_dir / 'cifar-100-binary'}").test) == 10_000


def test_cifar10(tmp_path):
    rng = np.random.default_rng(0)
    records = {}
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        record = rng.integers(0, 256, (4, 3073), dtype=np.uint8)
        record[:, 0] = rng.integers(0, 10, 4)
        record.tofile(tmp_path / name)
        records[name] = record
    (tmp_path / "batches.meta.txt").write_text("\n".join("abcdefghij") + "\n\n")
    dataset = read(f"cifar10:{tmp_path}", held_out=0)
    assert (len(dataset.train), len(dataset.test), dataset.classes) == (20, 4, tuple("abcdefghij"))
    third = records["data_batch_3.bin"]
    assert torch.equal(dataset.train.inputs[8:12].flatten(1), torch.tensor(third[:, 1:]))
    assert dataset.train.targets[8:12].tolist() == third[:, 0].tolist()


# idx


@pytest.mark.skipif(not DEBIAN_FASHION.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed")
def test_fashion_mnist(tmp_path):
    dataset = read("fashion-mnist", tmp_path, held_out=0)
    assert (len(dataset.train), len(dataset.test), dataset.input_shape) == (60_000, 10_000, (1, 28, 28))
    assert dataset.train.targets.bincount().tolist() == [6000] * 10
    assert dataset.classes[int(dataset.train.targets[0])] == "Ankle boot"
    assert abs(dataset.preparation.mean[0] - 0.2860) < 1e-4
    assert abs(dataset.preparation.std[0] - 0.3530) < 1e-4
    numbered = read(f"idx:{DEBIAN_FASHION}", held_out=0)
    assert numbered.classes == tuple("0123456789")
    assert torch.equal(numbered.test.inputs, dataset.test.inputs)


def write_idx(folder, train=8, test=4, classes=3, side=5, compress=False, test_name="t10k"):
    rng = np.random.default_rng(1)
    for name, count in (("train", train), (test_name, test)):
        pixels = rng.integers(0, 256, (count, side, side), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % classes
        images = bytes([0, 0, 8, 3]) + struct.pack(">3I", count, side, side) + pixels.tobytes()
        for kind, content in (
            ("images-idx3", images),
            ("labels-idx1", b"\0\0\10\1" + struct.pack(">I", count) + labels.tobytes()),
        ):
            file = folder / f"{name}-{kind}-ubyte{'.gz' if compress else ''}"
            file.write_bytes(gzip.compress(content) if compress else content)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("test_name", ["t10k", "test"])
def test_idx_plain_and_compressed(tmp_path, compress, test_name):
    write_idx(tmp_path, compress=compress, test_name=test_name)
    dataset = read(f"idx:{tmp_path}", held_out=0)
    assert (len(dataset.train), len(dataset.test), dataset.classes) == (8, 4, ("0", "1", "2"))
    expected = np.random.default_rng(1).integers(0, 256, (8, 5, 5), dtype=np.uint8)
    assert torch.equal(dataset.train.inputs.squeeze(1), torch.tensor(expected))


def test_mnist_is_found_in_other_layouts(tmp_path):
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    write_idx(tmp_path / "MNIST" / "raw", classes=10)
    dataset = read("mnist", tmp_path, held_out=0)
    assert len(dataset.train) == 8
    assert dataset.num_outputs == 10


def test_data_folder_from_the_environment(tmp_path, monkeypatch):
    (tmp_path / "mnist").mkdir()
    write_idx(tmp_path / "mnist", train=6)
    monkeypatch.setenv("PATCHBAYES_DATA", str(tmp_path))
    assert len(read("mnist", held_out=0).train) == 6
    monkeypatch.delenv("PATCHBAYES_DATA")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / ".cache" / "patchbayes").mkdir(parents=True)
    shutil.copytree(tmp_path / "mnist", tmp_path / "home" / ".cache" / "patchbayes" / "mnist")
    assert len(read("mnist", held_out=0).train) == 6
    monkeypatch.chdir(tmp_path)
    assert len(read("idx:mnist", held_out=0).train) == 6  # relative to the working directory
    assert len(read("idx:mnist", tmp_path / "home" / ".cache" / "patchbayes", held_out=0).train) == 6


# UCI


@pytest.mark.parametrize(
    ("name", "rows", "features", "test_rows"),
    [
        ("boston", 506, 13, 51),
        ("concrete", 1030, 8, 103),
        ("energy", 768, 8, 77),
        ("kin8nm", 8192, 8, 819),
        ("naval", 11934, 16, 1193),
        ("power", 9568, 4, 957),
        ("protein", 45730, 9, 4573),
        ("wine", 1599, 11, 160),
        ("yacht", 308, 6, 31),
    ],
)
def test_uci(data_dir, name, rows, features, test_rows):
    dataset = read(f"uci:{name}", data_dir, held_out=0)
    assert (dataset.task, dataset.input_shape, dataset.num_outputs) == ("regression", (features,), 1)
    assert (len(dataset.train), len(dataset.test)) == (rows - test_rows, test_rows)
    inputs, targets = next(dataset.batches(dataset.train, rows))
    assert float(inputs.abs().max()) < 100
    assert abs(float(targets.std()) - 1) < 0.01


def test_published_splits_differ_and_are_those_of_the_files(data_dir):
    first, second = (read("uci:yacht", data_dir, split=split, held_out=0) for split in (0, 7))
    assert not torch.equal(first.test.inputs, second.test.inputs)
    table = np.loadtxt(data_dir / "uci" / "yacht" / "data.txt")
    rows = np.loadtxt(data_dir / "uci" / "yacht" / "index_test_7.txt").astype(int)
    np.testing.assert_array_equal(second.test.inputs.numpy(), table[rows, :6].astype(np.float32))
    np.testing.assert_array_equal(second.test.targets.numpy().ravel(), table[rows, 6].astype(np.float32))
    with pytest.raises(PatchbayesError, match=r"no split 20.*20 splits"):
        read("uci:yacht", data_dir, split=20)


def test_second_targets(data_dir):
    energy = np.loadtxt(data_dir / "uci" / "energy" / "ENB2012_data.csv", delimiter=";", skiprows=1)
    naval = np.loadtxt(data_dir / "uci" / "naval-propulsion-plant" / "data.txt")
    for spec, target, name, column in (
        ("uci:energy", None, "heating", energy[:, 8]),
        ("uci:energy", "cooling", "cooling", energy[:, 9]),
        ("uci:energy#cooling", None, "cooling", energy[:, 9]),
        ("uci:naval", 0, "compressor", naval[:, 16]),
        ("uci:naval", 1, "turbine", naval[:, 17]),
        ("uci:naval-propulsion-plant", "turbine", "turbine", naval[:, 17]),
    ):
        dataset = read(spec, data_dir, target=target, held_out=0)
        assert dataset.classes == (name,)
        both = torch.cat([dataset.train.targets, dataset.test.targets]).flatten().sort().values
        np.testing.assert_allclose(both.numpy(), np.sort(column).astype(np.float32))
    with pytest.raises(PatchbayesError, match="heating, cooling"):
        read("uci:energy", data_dir, target="lighting")
    with pytest.raises(PatchbayesError, match="leave one out"):
        read("uci:energy#cooling", data_dir, target="heating")


def test_constant_columns_of_naval(data_dir):
    dataset = read("uci:naval", data_dir, held_out=0)
    assert [i for i, std in enumerate(dataset.preparation.std) if std == 1.0] == [8, 11]
    inputs, _ = next(dataset.batches(dataset.test, 10_000))
    assert float(inputs[:, [8, 11]].abs().max()) < 1e-5


# CSV


def write_csv(file, rows, delimiter=",", encoding="utf-8"):
    with file.open("w", newline="", encoding=encoding) as target:
        csv.writer(target, delimiter=delimiter).writerows(rows)


def housing(n=40):
    rng = np.random.default_rng(0)
    header = ["size", "color", "price", "rooms"]
    colors = ["red", "green", "blue"]
    return [header, *([f"{rng.normal():.6f}", colors[i % 3], f"{100 + rng.normal():.4f}", i % 4] for i in range(n))]


def test_csv_regression_and_classification(tmp_path):
    file = tmp_path / "houses.csv"
    write_csv(file, housing())
    prices = read(f"csv:{file}#price", held_out=0)
    assert (prices.task, prices.classes) == ("regression", ("price",))
    assert prices.features == ("size", "color=blue", "color=green", "color=red", "rooms")
    assert (len(prices.train), len(prices.test)) == (32, 8)
    assert torch.equal(prices.train.inputs[:, 1:4].sum(1), torch.ones(32))
    colors = read(f"csv:{file}", target="color", held_out=0)
    assert (colors.task, colors.classes, colors.features) == (
        "classification",
        ("blue", "green", "red"),
        ("size", "price", "rooms"),
    )
    rooms = read(f"csv:{file}#3", held_out=0)
    assert (rooms.task, rooms.classes) == ("classification", ("0", "1", "2", "3"))
    assert read(f"csv:{file}", target=3, held_out=0).classes == rooms.classes
    forced = read(f"csv:{file}#rooms", task="regression", held_out=0)
    assert (forced.task, forced.classes) == ("regression", ("rooms",))
    named = read(f"csv:{file}#price", task="classification", held_out=0)
    assert (named.task, named.num_outputs) == ("classification", 40)


def test_csv_rows_keep_their_values(tmp_path):
    file = tmp_path / "t.csv"
    rows = housing(30)
    write_csv(file, rows)
    dataset = read(f"csv:{file}#price", held_out=0.25)
    got = {
        (float(x[0]), float(y)): x.tolist()
        for split in (dataset.train, dataset.held_out, dataset.test)
        for x, y in zip(split.inputs, split.targets, strict=True)
    }
    assert len(got) == 30
    for size, color, price, number in rows[1:]:
        inputs = got[(float(np.float32(size)), float(np.float32(price)))]
        assert inputs[1:] == [float(color == name) for name in ("blue", "green", "red")] + [float(number)]


def test_the_split_of_a_csv_file(tmp_path):
    file = tmp_path / "t.csv"
    write_csv(file, housing())
    first, other_seed, other = (read(f"csv:{file}#price", **options) for options in ({}, {"seed": 1}, {"split": 1}))
    assert torch.equal(first.test.inputs, other_seed.test.inputs)
    assert not torch.equal(first.held_out.inputs, other_seed.held_out.inputs)
    assert not torch.equal(first.test.inputs, other.test.inputs)


def test_many_whole_numbers_are_a_regression(tmp_path):
    file = tmp_path / "t.csv"
    for distinct, task in ((MOST_CLASSES, "classification"), (MOST_CLASSES + 1, "regression")):
        write_csv(file, [["a", "b"], *([i, i % distinct] for i in range(60))])
        assert read(f"csv:{file}#b").task == task


@pytest.mark.parametrize(
    ("delimiter", "encoding"), [(";", "utf-8"), ("\t", "utf-8"), (",", "utf-8-sig"), ("|", "utf-8")]
)
def test_delimiters_and_byte_order_marks(tmp_path, delimiter, encoding):
    file = tmp_path / "t.csv"
    write_csv(file, housing(), delimiter, encoding)
    assert read(f"csv:{file}#price").features[0] == "size"


def test_a_file_name_with_a_number_sign(tmp_path):
    file = tmp_path / "a#b.csv"
    write_csv(file, housing())
    assert read(f"csv:{file}", target="price").task == "regression"
    assert read(f"csv:{file}#price").task == "regression"


def test_rows_for_prediction(tmp_path):
    file, new = tmp_path / "t.csv", tmp_path / "new.csv"
    write_csv(file, housing())
    dataset = read(f"csv:{file}#price", held_out=0)
    write_csv(new, [["rooms", "note", "color", "size"], [3, "x", "red", 0.5], [1, "y", "blue", -2]])
    (lines, inputs), (other_lines, others) = csv_rows(new, dataset.features, batch_size=1)
    assert (lines, other_lines) == ([2], [3])
    assert inputs.tolist() == [[0.5, 0, 0, 1, 3]]
    assert others.tolist() == [[-2, 1, 0, 0, 1]]
    assert [len(lines) for lines, _ in csv_rows(new, dataset.features, batch_size=5)] == [2]
    write_csv(new, [["rooms", "color", "size"], [3, "pink", 0.5]])
    with pytest.raises(PatchbayesError, match=r"new.csv, line 2: 'pink' in column 'color'"):
        list(csv_rows(new, dataset.features))
    write_csv(new, [["rooms", "size"], [3, 0.5]])
    with pytest.raises(PatchbayesError, match="no column for the feature 'color=blue'"):
        list(csv_rows(new, dataset.features))


# npz and arrays


def test_npz_of_images(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (12, 6, 7, 3), dtype=np.uint8), np.arange(12) % 3
    np.savez_compressed(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x[:4], y_test=y[:4], classes=["a", "b", "c"])
    dataset = read(f"npz:{tmp_path / 'd.npz'}", held_out=0)
    assert (dataset.task, dataset.input_shape, dataset.classes) == ("classification", (3, 6, 7), ("a", "b", "c"))
    assert torch.equal(dataset.train.inputs, torch.tensor(x).permute(0, 3, 1, 2))
    np.savez(tmp_path / "d.npz", x_train=x[..., 0], y_train=y, x_test=x[:4, ..., 0], y_test=y[:4])
    gray = read(f"npz:{tmp_path / 'd.npz'}", held_out=0)
    assert (gray.input_shape, gray.classes) == ((1, 6, 7), ("0", "1", "2"))
    assert read(f"npz:{tmp_path / 'd.npz'}", task="regression").classes == ("y0",)


def test_npz_of_tables(tmp_path):
    x, y = np.arange(20.0).reshape(10, 2), np.arange(10.0)
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x[:4], y_test=y[:4])
    dataset = read(f"npz:{tmp_path / 'd.npz'}", held_out=0)
    assert (dataset.task, dataset.input_shape, dataset.features) == ("regression", (2,), ("x0", "x1"))
    assert read(f"npz:{tmp_path / 'd.npz'}", task="classification").num_outputs == 10


def test_arrays():
    x = np.zeros((4, 3), dtype=np.int16)
    names = from_arrays(x, ["cat", "dog", "cat", "ant"], x, ["dog"] * 4, features=("a", "b", "c")).dataset("d")
    assert (names.classes, names.test.targets.tolist()) == (("ant", "cat", "dog"), [2, 2, 2, 2])
    assert names.features == ("a", "b", "c")
    two = from_arrays(x, np.ones((4, 2)), x, np.ones((4, 2)), classes=("p", "q")).dataset("d")
    assert (two.task, two.classes) == ("regression", ("p", "q"))
    channels_first = np.zeros((4, 3, 9, 3), dtype=np.uint8)
    assert from_arrays(channels_first, [0, 1, 0, 1], channels_first, [0, 1, 0, 1]).dataset("d").input_shape == (3, 9, 3)
    floats = from_arrays(np.ones((4, 1, 5, 5)), [0, 1, 0, 1], np.ones((4, 1, 5, 5)), [0, 1, 0, 1]).dataset("d")
    assert floats.preparation.mean == (1.0,)


# Image folders


def picture(file, color, size=(20, 30), mode="RGB"):
    image = pytest.importorskip("PIL.Image")
    file.parent.mkdir(parents=True, exist_ok=True)
    image.new("RGB", size, color).convert(mode).save(file)


@pytest.fixture
def folder(tmp_path):
    for part, count in (("train", 3), ("val", 2)):
        for name, color in (("red", (255, 0, 0)), ("blue", (0, 0, 255)), ("dark", (9, 9, 9))):
            for i in range(count):
                picture(tmp_path / part / name / f"{i}.png", color)
    (tmp_path / "train" / "red" / "notes.txt").write_text("not a picture")
    (tmp_path / "train" / ".cache").mkdir()
    return tmp_path


def test_image_folder(folder):
    dataset = read(f"images:{folder}", size=16, held_out=0)
    assert (dataset.classes, dataset.input_shape) == (("blue", "dark", "red"), (3, 16, 16))
    assert (len(dataset.train), len(dataset.test)) == (9, 6)
    raw, targets = dataset.test.fetch(torch.arange(6))
    colors = torch.tensor([[0, 0, 255], [9, 9, 9], [255, 0, 0]], dtype=torch.uint8)
    assert targets.tolist() == [0, 0, 1, 1, 2, 2]
    assert torch.equal(raw, colors[targets].view(6, 3, 1, 1).expand(6, 3, 16, 16))
    assert dataset.preparation.augmentation == "resized-crop+flip"
    assert read(f"images:{folder}").input_shape == (3, 224, 224)
    part = dataset.test.subset(torch.tensor([5, 0]))
    assert part.targets.tolist() == [2, 0]
    assert torch.equal(part.fetch(torch.tensor([0]))[0], raw[5:])
    inputs, _ = next(dataset.batches(dataset.train, 4, augment=torch.Generator().manual_seed(0)))
    assert inputs.shape == (4, 3, 16, 16)


def test_three_folders_are_train_held_out_and_test(folder):
    shutil.copytree(folder / "val", folder / "test")
    (folder / "test" / "red" / "0.png").unlink()
    dataset = read(f"images:{folder}", size=8)
    assert (len(dataset.train), len(dataset.held_out), len(dataset.test)) == (9, 6, 5)
    shutil.rmtree(folder / "val")
    assert len(read(f"images:{folder}", size=8, held_out=0.2).held_out) == 2


def test_decoding_crops_the_middle_and_turns_upright(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = np.zeros((10, 30, 3), dtype=np.uint8)
    pixels[:, 10:20] = 200  # the middle third
    image.fromarray(pixels).save(tmp_path / "wide.png")
    assert decode_image(tmp_path / "wide.png", (3, 10, 10)).unique().tolist() == [200]
    assert decode_image(tmp_path / "wide.png", (1, 10, 30)).shape == (1, 10, 30)
    exif = image.Exif()
    exif[0x0112] = 6  # turned by a quarter when shown
    image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    shown = decode_image(tmp_path / "turned.png", (3, 30, 10))
    assert shown[0, :, 0].tolist() == [0] * 10 + [200] * 10 + [0] * 10


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_every_usual_kind_of_picture_is_read(tmp_path, mode):
    suffix = "tif" if mode == "CMYK" else "png"
    picture(tmp_path / f"p.{suffix}", (255, 255, 255), mode=mode)
    assert decode_image(tmp_path / f"p.{suffix}", (3, 4, 4)).unique().tolist() == [255]


def test_a_file_split_needs_a_target_for_each_file(tmp_path):
    with pytest.raises(PatchbayesError, match="1 files and 2 targets"):
        ImageFileSplit([tmp_path / "a.png"], torch.tensor([0, 1]), (3, 4, 4))
