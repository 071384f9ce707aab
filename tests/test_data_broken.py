"""Broken files: every reader names the file, says what is wrong with it, and what to do."""

import gzip
import pickle
import shutil
import struct
import zipfile

import numpy as np
import pytest
import torch

from patchbayes.data import decode_image, from_arrays, read
from patchbayes.errors import PatchbayesError


def refuses(message, spec, **options):
    with pytest.raises(PatchbayesError, match=message) as caught:
        read(spec, **options)
    assert "\n" not in str(caught.value)


# CIFAR


@pytest.fixture
def cifar(tmp_path):
    records = np.zeros((6, 3074), dtype=np.uint8)
    records[:, 1] = np.arange(6)
    records.tofile(tmp_path / "train.bin")
    records.tofile(tmp_path / "test.bin")
    (tmp_path / "fine_label_names.txt").write_text("\n".join(f"c{i}" for i in range(100)))
    assert len(read(f"cifar100:{tmp_path}", held_out=0).train) == 6
    return tmp_path


def test_cifar_of_a_wrong_size(cifar):
    whole = (cifar / "test.bin").read_bytes()
    for content in (whole[:-1], whole[: 6 * 3073], b""):
        (cifar / "test.bin").write_bytes(content)
        refuses(rf"test.bin: {len(content):,} bytes are not a whole number of records of 3074", f"cifar100:{cifar}")


def test_cifar_with_a_wrong_label(cifar):
    records = np.fromfile(cifar / "train.bin", dtype=np.uint8).reshape(6, 3074)
    records[4, 1] = 100
    records.tofile(cifar / "train.bin")
    refuses("train.bin: record 4 has the class number 100", f"cifar100:{cifar}")


def test_cifar_without_its_names(cifar):
    (cifar / "fine_label_names.txt").write_text("apple\n")
    refuses("fine_label_names.txt: 1 class names", f"cifar100:{cifar}")
    (cifar / "fine_label_names.txt").unlink()
    refuses("lacks fine_label_names.txt", f"cifar100:{cifar}")


def test_a_folder_in_place_of_a_file(cifar):
    (cifar / "test.bin").unlink()
    (cifar / "test.bin").mkdir()
    refuses("lacks test.bin", f"cifar100:{cifar}")


# idx


def idx(*shape, values=None, first=(0, 0, 8)):
    content = np.zeros(shape, dtype=np.uint8).tobytes() if values is None else bytes(values)
    return bytes([*first, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + content


@pytest.fixture
def mnist(tmp_path):
    for part in ("train", "t10k"):
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(idx(4, 3, 3))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(4, values=[0, 1, 2, 1]))
    assert len(read(f"idx:{tmp_path}", held_out=0).train) == 4
    return tmp_path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-images-idx3-ubyte", idx(4, 3, 3)[:-1], "4 x 3 x 3 values and holds 35"),
        ("train-images-idx3-ubyte", idx(4, 3, 3) + b"\0", "holds more than 36"),
        ("train-images-idx3-ubyte", b"", "begins with"),
        ("train-images-idx3-ubyte", idx(4, 9), "bytes in 3 dimensions begins with"),
        ("train-images-idx3-ubyte", idx(4, 3, 3, first=(0, 0, 13)), "begins with"),
        ("train-labels-idx1-ubyte", idx(3), "holds 4 images .*3 labels"),
        ("t10k-labels-idx1-ubyte", idx(4, values=[0, 1, 2, 3]), "a test label is 3; there are 3 classes"),
        ("train-labels-idx1-ubyte", idx(4), "a test label is 2; there are 1 classes"),
        ("train-images-idx3-ubyte", idx(0, 3, 3), "0 x 3 x 3"),
    ],
)
def test_broken_idx_files(mnist, name, content, message):
    (mnist / name).write_bytes(content)
    refuses(message, f"idx:{mnist}")


def test_one_class_only(mnist):
    for part in ("train", "t10k"):
        (mnist / f"{part}-labels-idx1-ubyte").write_bytes(idx(4))
    refuses("only the class 0; classification needs two", f"idx:{mnist}")


def test_a_label_too_large_for_the_named_set(mnist):
    (mnist / "train-labels-idx1-ubyte").write_bytes(idx(4, values=[0, 1, 10, 1]))
    refuses("a training label is 10; there are 10 classes", f"fashion-mnist:{mnist}")


def test_a_broken_gzip_file(mnist):
    whole = gzip.compress((mnist / "train-images-idx3-ubyte").read_bytes())
    (mnist / "train-images-idx3-ubyte").unlink()
    for content in (whole[:-9], whole[:5] + b"\xff" + whole[6:15] + b"\xff\xff" + whole[17:], b"hello"):
        (mnist / "train-images-idx3-ubyte.gz").write_bytes(content)
        refuses("train-images-idx3-ubyte.gz: not a complete gzip file", f"idx:{mnist}")
    (mnist / "train-images-idx3-ubyte.gz").unlink()
    refuses("one file train-images-idx3-ubyte or train-images-idx3-ubyte.gz is needed; found: none", f"idx:{mnist}")


def test_two_sets_in_one_folder(mnist):
    shutil.copy(mnist / "train-images-idx3-ubyte", mnist / "other-train-images-idx3-ubyte")
    refuses("found: other-train-images-idx3-ubyte, train-images-idx3-ubyte", f"idx:{mnist}")


# UCI


@pytest.fixture
def uci(tmp_path):
    folder = tmp_path / "uci" / "own"
    folder.mkdir(parents=True)
    np.savetxt(folder / "data.txt", np.random.default_rng(0).normal(size=(10, 3)))
    for name, values in (("features", [0, 1]), ("target", [2]), ("train_0", range(8)), ("test_0", [8, 9])):
        np.savetxt(folder / f"index_{name}.txt", np.array(values))
    assert len(read("uci:own", tmp_path, held_out=0).train) == 8
    return folder


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("data.txt", "1 2 3\n4 5\n", "data.txt: not a table of numbers"),
        ("data.txt", "1 2 3\n4 five 6\n", "data.txt: not a table of numbers"),
        ("data.txt", "1 2 3\n4 nan 6\n", "data.txt: row 1 is not finite"),
        ("data.txt", "", "data.txt: no numbers"),
        ("index_features.txt", "0\n3\n", "index_features.txt: holds 0 to 3; whole numbers from 0 to 2"),
        ("index_train_0.txt", "0\n-1\n", "index_train_0.txt: holds -1 to 0"),
        ("index_train_0.txt", "0\n1.5\n", "index_train_0.txt"),
        ("index_test_0.txt", "7\n9\n", "row 7 is in the training and the test part of split 0"),
        ("index_test_0.txt", "", "index_test_0.txt: no numbers"),
    ],
)
def test_broken_uci_files(uci, file, content, message):
    (uci / file).write_text(content)
    refuses(message, "uci:own", data_dir=uci.parents[1])


def test_missing_uci_files(uci):
    (uci / "index_target.txt").unlink()
    refuses("index_target.txt is missing", "uci:own", data_dir=uci.parents[1])
    refuses("not one of boston, concrete", "uci:ownn", data_dir=uci.parents[1])


def test_energy_rows_must_be_aligned(tmp_path, data_dir):
    energy = tmp_path / "uci" / "energy"
    shutil.copytree(data_dir / "uci" / "energy", energy)
    file = energy / "ENB2012_data.csv"
    file.chmod(0o644)
    energy.chmod(0o755)
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], *lines[:0:-1]]) + "\n")
    assert read("uci:energy", tmp_path).classes == ("heating",)
    refuses("ENB2012_data.csv: its first columns are not those of data.txt", "uci:energy#cooling", data_dir=tmp_path)
    file.unlink()
    refuses("ENB2012_data.csv is missing", "uci:energy#cooling", data_dir=tmp_path)


# CSV

GOOD = ["a,b,y", "1,2,0.5", "2,1,1.5", "3,5,2.5", "4,4,3.5", "5,0,4.5", "6,1,5.5"]


def replaced(line, text):
    return "\n".join([*GOOD[:line], text, *GOOD[line + 1 :]]) + "\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "t.csv: empty"),
        ("\n\n", "t.csv: empty"),
        ("a,b,y\n", "t.csv: 0 rows; at least 5"),
        (replaced(3, "3,nan,2.5"), "line 4: 'nan' in column 'b' is not a finite number"),
        (replaced(3, "3,,2.5"), "line 4: '' in column 'b'"),
        (replaced(3, "3,inf,2.5"), "line 4: 'inf' in column 'b'"),
        (replaced(2, "2,1,"), "line 3: no value in the target column 'y'"),
        (replaced(2, "2,1,NaN"), "line 3: no value in the target column 'y'"),
        (replaced(2, "2,1,-inf"), "target column 'y' holds an infinite value"),
        (replaced(2, "2,1,1.5x"), "line 3: the target '1.5x' is not a number"),
        (replaced(2, "2,1"), "line 3: 2 values; the header names 3 columns"),
        (replaced(0, "a,a,y"), "two columns are called 'a'"),
        (replaced(0, "a, ,y"), "column 1 has no name"),
        (replaced(0, "1,2,3"), "the first line holds numbers"),
        ("y\n1\n2\n3\n4\n5\n", "no column besides the target 'y'"),
        (replaced(0, "a,b,z"), "no column 'y'; there are a, b, z"),
        ("a,y\n" + "".join(f"word{i},{i}.5\n" for i in range(60)), "line 2: 'word0' in column 'a' is not a number"),
        (
            "a,y\n" + "".join(f"{i},{i}.5\n" for i in range(60)) + "6o,1\n",
            "line 62: '6o' in column 'a' is not a number",
        ),
        ("a,y\n" + "x,1.5\nz,2.5\n,3.5\nx,4.5\nz,5.5\n", "line 4: '' in column 'a'"),
        ("a,y\n" + "1,same\n" * 6, "every row has the target 'same'"),
        ('a,b,y\n1,"2,3\n', "cannot be read as a CSV file"),
    ],
)
def test_broken_csv_files(tmp_path, content, message):
    (tmp_path / "t.csv").write_text(content)
    refuses(message, f"csv:{tmp_path / 't.csv'}#y")


def test_csv_files_that_are_no_text(tmp_path):
    (tmp_path / "t.csv").write_bytes(b"a,b\n\xff\xfe,1\n")
    refuses("t.csv: cannot be read as a CSV file", f"csv:{tmp_path / 't.csv'}#a")
    refuses("is a folder, and a CSV file is wanted", f"csv:{tmp_path}#a")


def test_csv_options(tmp_path):
    (tmp_path / "t.csv").write_text("\n".join(GOOD))
    refuses("name the column to predict", f"csv:{tmp_path / 't.csv'}")
    refuses("no column 3", f"csv:{tmp_path / 't.csv'}", target=3)
    refuses("no column -1", f"csv:{tmp_path / 't.csv'}", target=-1)
    refuses("task='clustering'", f"csv:{tmp_path / 't.csv'}#y", task="clustering")
    (tmp_path / "t.csv").write_text("a,y\n" + "1,x\n2,z\n" * 5)
    refuses("line 2: the target 'x' is not a number", f"csv:{tmp_path / 't.csv'}#y", task="regression")


# npz


def arrays(**changes):
    x, y = np.zeros((6, 2)), np.arange(6) % 3
    return {"x_train": x, "y_train": y, "x_test": x[:3], "y_test": y[:3]} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_train": np.array([0, 1, 2, -1, 0, 1])}, "y_train: class numbers -1 to 2"),
        ({"y_test": np.array([0, 1, 3])}, "y_test: class numbers 0 to 3; with 3 classes, 0 to 2"),
        ({"y_train": np.arange(6) % 3 + 1}, "no example of class 0"),
        ({"y_train": np.zeros(6, dtype=int), "y_test": np.zeros(3, dtype=int)}, "only the class 0"),
        ({"y_train": np.arange(5) % 3}, "x_train holds 6 examples and y_train 5"),
        ({"x_test": np.zeros((3, 4))}, r"x_train holds examples \(2,\), x_test \(4,\)"),
        ({"x_train": np.full((6, 2), np.nan)}, "x_train: example 0 holds a value that is not finite"),
        ({"x_train": np.zeros((6, 2), dtype=complex)}, "x_train: complex128"),
        ({"x_train": np.zeros((6, 4, 4, 3)).astype(np.int32)}, "x_train: images of int32"),
        ({"x_train": np.zeros(6)}, r"x_train: float64 \(6,\)"),
        ({"y_train": np.zeros((6, 1), dtype=int)}, r"y_train: int64 \(6, 1\); one class for each"),
        ({"y_train": np.array([0, 1, np.inf, 0, 1, 0])}, "y_train: example 2 holds"),
        ({"y_test": np.array(["a", "b", "c"])}, "class numbers and y_test class names"),
        ({"y_train": np.array(list("aabbcc")), "y_test": np.array(list("abd"))}, "class 'd' is not among"),
        ({"y_train": np.array(["a"] * 6, dtype=object)}, "not a complete npz file of plain arrays"),
    ],
)
def test_broken_npz_files(tmp_path, changes, message):
    np.savez(tmp_path / "d.npz", **arrays(**changes))
    refuses(message, f"npz:{tmp_path / 'd.npz'}", held_out=0)


def test_npz_files_that_are_none(tmp_path):
    file = tmp_path / "d.npz"
    np.savez(file, **arrays())
    whole = file.read_bytes()
    for content in (whole[:-40], b"", b"hello", pickle.dumps(arrays())):
        file.write_bytes(content)
        refuses("d.npz: not a complete npz file", f"npz:{file}")
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x_train.npy", b"\x93NUMPY nonsense")
    refuses("d.npz: not a complete npz file", f"npz:{file}")
    np.savez(file, x_train=np.zeros((3, 2)))
    refuses("d.npz: lacks y_train, x_test, y_test", f"npz:{file}")


def test_npz_files_with_a_damaged_byte(tmp_path):
    file = tmp_path / "d.npz"
    np.savez_compressed(file, **arrays(x_train=np.random.default_rng(0).normal(size=(6, 2))))
    whole = file.read_bytes()
    refused = []
    for position in range(0, len(whole), 5):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
        try:
            read(f"npz:{file}")
        except PatchbayesError as error:
            refused.append(str(error))
    assert len(refused) > 20
    assert all(str(file) in message for message in refused)


def test_arrays_of_a_wrong_task():
    with pytest.raises(PatchbayesError, match="task='ranking'"):
        from_arrays(**arrays(), task="ranking")
    with pytest.raises(PatchbayesError, match="not class numbers or names"):
        from_arrays(**arrays(y_train=np.arange(6) + 0.5), task="classification")
    with pytest.raises(PatchbayesError, match="a regression has numbers"):
        from_arrays(**arrays(y_train=np.array(list("abcabc"))), task="regression")


# Images


@pytest.fixture
def folder(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            for suffix in ("png", "jpg"):
                image.fromarray(pixels).save(tmp_path / part / name / f"0.{suffix}")
    return tmp_path


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_a_truncated_image(folder, suffix):
    file = folder / "test" / "dog" / f"0.{suffix}"
    file.write_bytes(file.read_bytes()[:-300])
    dataset = read(f"images:{folder}", size=16, held_out=0)
    with pytest.raises(PatchbayesError, match=rf"dog/0.{suffix}: cannot be read as an image"):
        dataset.test.fetch(torch.arange(4))


def test_files_that_are_no_images(folder):
    file = folder / "test" / "dog" / "0.png"
    dataset = read(f"images:{folder}", size=16, held_out=0)
    for content in (b"", b"hello", b"\x89PNG\r\n\x1a\n" + bytes(50)):
        file.write_bytes(content)
        with pytest.raises(PatchbayesError, match=r"dog/0.png: cannot be read as an image"):
            dataset.test.fetch(torch.arange(4))
    file.unlink()
    with pytest.raises(PatchbayesError, match=r"dog/0.png is not there"):
        dataset.test.fetch(torch.arange(4))


def test_an_image_of_more_than_8_bits(tmp_path):
    image = pytest.importorskip("PIL.Image")
    image.fromarray(np.full((8, 8), 40_000, dtype=np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(PatchbayesError, match=r"deep\.png: more than 8 bits"):
        decode_image(tmp_path / "deep.png", (3, 8, 8))
    with pytest.raises(PatchbayesError, match="not 4"):
        decode_image(tmp_path / "deep.png", (4, 8, 8))


def test_image_folders_with_something_missing(folder):
    spec = f"images:{folder}"
    refuses("size=0", spec, size=0)
    shutil.move(folder / "test" / "cat", folder / "test" / "cow")
    refuses("test/cat is missing", spec)
    shutil.copytree(folder / "test" / "cow", folder / "test" / "cat")
    refuses("test/cow is not among the classes", spec)
    shutil.rmtree(folder / "test" / "cow")
    for file in (folder / "test" / "cat").iterdir():
        file.unlink()
    refuses("test/cat: no image file", spec)
    shutil.rmtree(folder / "test")
    refuses("neither val nor test", spec)
    shutil.rmtree(folder / "train" / "cat")
    refuses(r"train: 1 class folders \(dog\)", spec)
    shutil.rmtree(folder / "train" / "dog")
    refuses("train: 0 class folders", spec)
    shutil.rmtree(folder / "train")
    refuses("no folder train", spec)
