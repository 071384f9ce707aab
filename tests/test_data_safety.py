"""Files of strangers: nothing is executed, waited for without end, or unpacked without a limit; typing errors are seen."""

import gzip
import os
import stat
import struct
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest

from patchbayes import files
from patchbayes.data import csv_rows, decode_image, from_arrays, read
from patchbayes.errors import PatchbayesError
from patchbayes.nets.named import build_net


def refused(message, function, *args, **options):
    """The function refuses its arguments with the message, and within seconds."""
    outcome = []

    def run():
        try:
            outcome.append(function(*args, **options))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert outcome, "still waiting"
    assert isinstance(outcome[0], PatchbayesError), repr(outcome[0])
    with pytest.raises(PatchbayesError, match=message):
        raise outcome[0]


# Images


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def test_no_image_starts_another_program(tmp_path, monkeypatch):
    marker, gs = tmp_path / "ran", tmp_path / "bin" / "gs"
    gs.parent.mkdir()
    gs.write_text(f"#!/bin/sh\ntouch {marker}\n")
    gs.chmod(0o755)
    monkeypatch.setenv("PATH", f"{gs.parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "photo.png").write_bytes(EPS)
    refused("photo.png: cannot be read as an image", decode_image, tmp_path / "photo.png", (3, 8, 8))
    assert not marker.exists()


@pytest.mark.parametrize("name", ["photo.png", "train-images-idx3-ubyte.gz", "t.csv", "d.npz"])
def test_pipes_are_refused_at_once(tmp_path, name):
    os.mkfifo(tmp_path / name)
    reader = {
        ".png": lambda: decode_image(tmp_path / name, (3, 8, 8)),
        ".gz": lambda: read(f"idx:{tmp_path}"),
        ".csv": lambda: read(f"csv:{tmp_path / name}#y"),
        ".npz": lambda: read(f"npz:{tmp_path / name}"),
    }[Path(name).suffix]
    try:
        for part in ("train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
            (tmp_path / f"{part}-ubyte").write_bytes(b"")
        refused("is a pipe or a device, and a file is wanted", reader)
    finally:  # a reader that waits goes on
        os.close(os.open(tmp_path / name, os.O_RDWR))


def test_devices_are_refused(tmp_path):
    (tmp_path / "endless.png").symlink_to("/dev/zero")
    refused("is a pipe or a device", decode_image, tmp_path / "endless.png", (3, 8, 8))


def png_of(width, height):
    """A PNG file that says it has this size, and holds next to nothing."""
    import zlib

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


def test_images_of_too_many_pixels_or_bytes(tmp_path, monkeypatch):
    file = tmp_path / "large.png"
    file.write_bytes(png_of(9000, 9000))
    refused(r"9000 x 9000 pixels, and more than 80,000,000 are refused", decode_image, file, (3, 8, 8))
    monkeypatch.setenv("PATCHBAYES_LIMITS", "pixels=90000000")
    refused("cannot be read as an image", decode_image, file, (3, 8, 8))
    monkeypatch.setenv("PATCHBAYES_LIMITS", "image=50")
    refused("an image file of .* bytes, and more than 50 are refused", decode_image, file, (3, 8, 8))


# Bombs


def npz_member(shape, dtype="<i8", content=b""):
    header = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


def arrays(**changes):
    x, y = np.zeros((6, 2)), np.arange(6) % 3
    return {"x_train": x, "y_train": y, "x_test": x[:3], "y_test": y[:3]} | changes


def test_large_class_numbers_do_not_become_names(tmp_path, monkeypatch):
    y = np.array([0, 1, 2, 10**9, 0, 1])
    np.savez(tmp_path / "d.npz", **arrays(y_train=y))
    refused("y_train: 1,000,000,001 classes, and more than 100,000 are refused", read, f"npz:{tmp_path / 'd.npz'}")
    monkeypatch.setenv("PATCHBAYES_LIMITS", "classes=2")
    with pytest.raises(PatchbayesError, match="y_train: 3 classes, and more than 2 are refused"):
        from_arrays(**arrays())
    with pytest.raises(PatchbayesError, match="y_train: 6 classes, and more than 2"):
        from_arrays(**arrays(y_train=np.array(list("abcdef")), y_test=np.array(list("abc"))))


def test_a_zip_bomb_is_not_unpacked(tmp_path, monkeypatch):
    file = tmp_path / "bomb.npz"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x_train.npy", npz_member((3 * 10**6, 2), "<f8", bytes(48 * 10**6)))
    monkeypatch.setenv("PATCHBAYES_LIMITS", "unpacked=40M")
    refused(r"bomb.npz: [\d,]+ bytes unpack to 48,000,128, and more than 40,000,000 are refused", read, f"npz:{file}")
    monkeypatch.setenv("PATCHBAYES_LIMITS", "unpacked=50M")
    refused("bomb.npz: lacks y_train", read, f"npz:{file}")
    with zipfile.ZipFile(file, "w") as archive:  # not packed: as large as it looks, no bomb
        archive.writestr("x_train.npy", npz_member((3, 2), "<f8", bytes(48)))
    monkeypatch.setenv("PATCHBAYES_LIMITS", "unpacked=10")
    refused("bomb.npz: lacks y_train", read, f"npz:{file}")


@pytest.mark.parametrize("shape", [(10**12,), (10**6, 10**6, 10**6), (-1,), (10**12, 0)])
def test_memory_is_taken_for_what_is_there_and_not_for_what_a_header_says(tmp_path, shape):
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
        archive.writestr("x_train.npy", npz_member(shape, "<U0" if shape == (10**12,) else "<f8"))
    refused("d.npz: (not a complete npz file|lacks)", read, f"npz:{tmp_path / 'd.npz'}")


def test_texts_of_characters_that_do_not_exist(tmp_path):
    np.savez(tmp_path / "d.npz", **arrays(y_train=np.array([0x110000] * 6, "<u4").view("<U1")))
    refused("not a complete npz file .*characters that do not exist", read, f"npz:{tmp_path / 'd.npz'}")


def idx(*shape, values):
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + bytes(values)


@pytest.fixture
def mnist(tmp_path):
    for part in ("train", "t10k"):
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(idx(4, 3, 3, values=bytes(36)))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(4, values=[0, 1, 2, 1]))
    return tmp_path


def test_a_gzip_bomb_is_not_unpacked(mnist, monkeypatch):
    file = mnist / "train-images-idx3-ubyte.gz"
    (mnist / "train-images-idx3-ubyte").unlink()
    file.write_bytes(gzip.compress(idx(10, 1000, 1000, values=bytes(10**7))))
    monkeypatch.setenv("PATCHBAYES_LIMITS", "unpacked=5M")
    refused(r"idx3-ubyte.gz: [\d,]+ bytes unpack to 10,000,000, and more than 5,000,000", read, f"idx:{mnist}")
    file.write_bytes(gzip.compress(idx(2**31, 2**15, 2**15, values=b"")))
    monkeypatch.setenv("PATCHBAYES_LIMITS", "")
    refused("and more than 4,000,000,000 are refused", read, f"idx:{mnist}")


def test_what_follows_the_values_is_not_unpacked(mnist):
    """A small header before a gigabyte of zeros: one byte more than announced is unpacked, and the file refused."""
    import tracemalloc

    file = mnist / "train-images-idx3-ubyte.gz"
    (mnist / "train-images-idx3-ubyte").unlink()
    file.write_bytes(gzip.compress(idx(4, 3, 3, values=bytes(2 * 10**8)), compresslevel=1))
    tracemalloc.start()
    try:
        refused("says 4 x 3 x 3 values and holds more than 36", read, f"idx:{mnist}")
        assert tracemalloc.get_traced_memory()[1] < 10**7
    finally:
        tracemalloc.stop()


def test_limits_are_checked():
    from patchbayes.data.limits import Limits

    assert Limits.current() == Limits()
    for text in ("classes", "classes=-1", "size=3", "classes=1e6"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATCHBAYES_LIMITS", text)
            with pytest.raises(PatchbayesError, match=f"'{text}' is no limit; write NAME=NUMBER"):
                Limits.current()


# What is ambiguous


def test_labels_with_gaps(mnist):
    (mnist / "train-labels-idx1-ubyte").write_bytes(idx(4, values=[0, 1, 4, 1]))
    refused("labels go from 0 to 4, and none is 2", read, f"idx:{mnist}")


def test_labels_that_begin_with_1(mnist):
    for part in ("train", "t10k"):
        (mnist / f"{part}-labels-idx1-ubyte").write_bytes(idx(4, values=[1, 2, 3, 2]))
    found = read(f"idx:{mnist}", held_out=0)
    assert found.classes == ("1", "2", "3")
    assert found.train.targets.tolist() == [0, 1, 2, 1]


def test_an_array_that_is_there_twice(tmp_path):
    file = tmp_path / "d.npz"
    np.savez(file, **arrays())
    with zipfile.ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("y_test.npy", npz_member((3,), "<i8", np.array([2, 2, 2]).tobytes()))
    refused("holds y_test twice", read, f"npz:{file}")
    np.savez(file, **arrays())
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("y_test", npz_member((3,), "<i8", np.array([2, 2, 2]).tobytes()))
    refused("holds y_test twice", read, f"npz:{file}")


# Columns of tables


def table(tmp_path, column, rows=40, delimiter=","):
    lines = [f"age{delimiter}x{delimiter}y"]
    lines += [f"{column(i)}{delimiter}{i * i % 7}{delimiter}{i / 3:.3f}" for i in range(rows)]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    return f"csv:{tmp_path / 't.csv'}#y"


def kinds(dataset):
    return {column.name: column.kind for column in dataset.columns}


def test_a_typing_error_does_not_make_categories_of_numbers(tmp_path):
    spec = table(tmp_path, lambda i: "3O" if i == 8 else "l7" if i == 30 else 20 + i)
    refused(r"t.csv, lines 10, 32: '3O', 'l7' in column 'age' are not numbers, and the other 38 values are", read, spec)
    given = read(spec, columns={"age": "category"})
    assert len(given.features) == 41
    refused("line.* 10, 32: .* and the column was given as number", read, spec, columns={"age": "number"})
    assert read(spec, columns={"age": "ignore"}).features == ("x",)


def test_what_was_inferred_is_told(tmp_path):
    spec = table(tmp_path, lambda i: "abc"[i % 3])
    dataset = read(spec, columns={"x": "category"})
    assert kinds(dataset) == {"age": "category", "x": "category", "y": "number"}
    assert [str(column) for column in dataset.columns] == [
        "age: category of 3: a, b, c (inferred)",
        "x: category of 4: 0, 1, 2, 4 (given)",
        "y: number (inferred, target)",
    ]
    assert read(table(tmp_path, lambda i: i)).columns[0].kind == "number"


def test_decimal_commas(tmp_path):
    spec = table(tmp_path, lambda i: f"{i},5", delimiter=";")
    dataset = read(spec, held_out=0)
    assert kinds(dataset) == {"age": "decimal-comma", "x": "number", "y": "number"}
    assert set(dataset.train.inputs[:, 0].tolist()) | set(dataset.test.inputs[:, 0].tolist()) == {
        i + 0.5 for i in range(40)
    }
    (_, inputs), *_ = csv_rows(tmp_path / "t.csv", dataset.features, columns=kinds(dataset))
    assert inputs[:2].tolist() == [[0.5, 0], [1.5, 1]]
    refused("'0,5' in column 'age' is not a finite number", lambda: list(csv_rows(tmp_path / "t.csv", ["age"])))
    spec = table(tmp_path, lambda i: f"{i + 1},500", delimiter=";")
    refused("line 2: '1,500' in column 'age' may be a decimal number or thousands", read, spec)
    assert kinds(read(spec, columns={"age": "decimal-comma"}))["age"] == "decimal-comma"
    spec = table(tmp_path, lambda i: f"{i},5" if i % 2 else f"{i}.5", delimiter=";")
    refused("'1,5' in column 'age' has a comma, and '0.5' on line 2 a point", read, spec)


def test_decimal_commas_of_the_target(tmp_path):
    rows = "".join(f"{i};{i},25\n" for i in range(30))
    (tmp_path / "t.csv").write_text(f"a;y\n{rows}")
    dataset = read(f"csv:{tmp_path / 't.csv'}#y", held_out=0)
    assert dataset.task == "regression"
    assert sorted(dataset.train.targets.flatten().tolist() + dataset.test.targets.flatten().tolist())[:2] == [
        0.25,
        1.25,
    ]


@pytest.mark.parametrize("text", ["1_000", "٣", "0x10"])
def test_numbers_are_written_as_people_write_them(tmp_path, text):
    spec = table(tmp_path, lambda i: text if i == 3 else i)
    refused(f"line 5: '{text}' in column 'age' is not a number", read, spec)


def test_numbers_too_large_for_float32(tmp_path):
    refused("'1e39' in column 'age' is not a finite", read, table(tmp_path, lambda i: "1e39" if i == 3 else i))


def test_kinds_of_columns_are_checked(tmp_path):
    spec = table(tmp_path, lambda i: i)
    refused(
        "column 'age' as 'text'; kinds are number, decimal-comma, category, ignore", read, spec, columns={"age": "text"}
    )
    refused("no column 'agee' that could be number", read, spec, columns={"agee": "number"})
    refused("the column to predict, 'y', cannot be ignored", read, spec, columns={"y": "ignore"})
    refused("columns means nothing for this data", read, "digits", columns={"age": "number"})
    assert read(spec, columns={"y": "category"}).task == "classification"
    refused("'y' is given as a category; task='regression'", read, spec, columns={"y": "category"}, task="regression")
    (tmp_path / "t.csv").write_text("c,c=a,y\n" + "".join(f"{'ab'[i % 2]},{i},{i}.5\n" for i in range(30)))
    refused("the columns 'c' and 'c=a' would give features of the same name", read, spec)


# Names of code


def test_a_name_that_is_not_trusted_imports_nothing(tmp_path, monkeypatch):
    (tmp_path / "evil_code.py").write_text("raise SystemExit(0)\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    for run in (
        lambda: read("evil_code:data", trust_code=False),
        lambda: build_net("evil_code:net", 2, (3,), trust_code=False),
    ):
        refused("'evil_code:(data|net)' is a function of a Python module.*\n.*--trust-code", run)
    assert "evil_code" not in sys.modules
    assert sys.path == before


def test_leaving_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "leaves_at_once.py").write_text("raise SystemExit(0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    refused("'sys:exit': the function failed with SystemExit", read, "sys:exit", trust_code=True)
    refused("SystemExit: 0; the module must be importable", read, "leaves_at_once:data", trust_code=True)
    refused("SystemExit: 0; the module must be importable", build_net, "leaves_at_once:net", 2, (3,), trust_code=True)


PROGRAM = """
import sys
from patchbayes.data import read
assert {cwd!r} not in sys.path
try:
    read("own_set:data", trust_code=True)
except ValueError as error:
    assert "returned int" in str(error), error
assert sys.path[-1] == {cwd!r}, sys.path
import antigravity_of_ours
"""


def test_the_working_directory_is_looked_into_last_and_only_for_a_function(tmp_path):
    """A file that is called like a module of Python's does not take its place."""
    (tmp_path / "own_set.py").write_text("import wave\ndef data(): return 3 if hasattr(wave, 'open') else None\n")
    (tmp_path / "wave.py").write_text("raise SystemExit(9)\n")
    (tmp_path / "antigravity_of_ours.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM.format(cwd=str(tmp_path))],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["timm:hf-hub:someone/network", "timm:local-dir:/tmp/x", "torchvision:../x"])
def test_nothing_is_downloaded_for_a_network(name):
    refused("is no name of a network; .* nothing is downloaded", build_net, name, 2, (3, 32, 32))


@pytest.mark.parametrize("spec", ["mlp:9999999", "mlp:1000000,1000000"])
def test_a_network_that_does_not_fit_into_memory(spec):
    refused("hidden units are whole numbers up to|cannot be made", build_net, spec, 2, (10**6,))


# Writing


def test_what_killed_writers_left_is_removed(tmp_path):
    target = tmp_path / "record.json"
    program = "import os, sys\nfrom pathlib import Path\nfrom patchbayes.files import replacing\n"
    program += "with replacing(Path(sys.argv[1])) as file:\n    file.write_text('half')\n    os.kill(os.getpid(), 9)\n"
    subprocess.run([sys.executable, "-c", program, str(target)], check=False)
    (left,) = tmp_path.iterdir()
    assert left.name.endswith(".part")
    with files.replacing(tmp_path / "other.json") as mine:
        mine.write_bytes(b"")
        assert left.exists()  # the rest of another file is not touched
        files.write_atomically(target, b"{}")
        assert mine.exists()  # nor what is being written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.json", "record.json"]


def test_places_that_cannot_be_written_are_found_before_the_work(tmp_path):
    files.probe_writing(tmp_path / "new" / "deeper" / "report.html")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    refused("file/report.html cannot be written", files.probe_writing, tmp_path / "file" / "report.html")
    refused("is a folder, and a file is to be written", files.probe_writing, tmp_path)
    if os.geteuid() != 0:  # to root nothing is forbidden
        tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
        refused("cannot be written", files.probe_writing, tmp_path / "report.html")
    full = Path("/dev/full")
    if full.exists():
        refused("cannot be written", files.probe_writing, full / "report.html")


def test_json_of_any_depth_is_one_error(tmp_path):
    (tmp_path / "c.json").write_text("[" * 10**6)
    refused("c.json: is not JSON.* nested too deeply", files.read_json, tmp_path / "c.json")
    (tmp_path / "c.json").write_bytes(b'{"a": "\xff"}')
    refused("c.json: is not JSON", files.read_json, tmp_path / "c.json")
    (tmp_path / "c.json").write_text("9" * 10**4)
    refused("c.json: is not JSON", files.read_json, tmp_path / "c.json")
    (tmp_path / "c.json").write_text('{"a": 1}')
    assert files.read_json(tmp_path / "c.json") == {"a": 1}


def test_git_is_not_kept_waiting(monkeypatch):
    from patchbayes import provenance

    asked = []
    run = subprocess.run
    monkeypatch.setattr(provenance.subprocess, "run", lambda words, **how: (asked.append(words), run(words, **how))[1])
    provenance.commit()
    assert asked
    assert all(words[:2] == ["git", "--no-optional-locks"] for words in asked)


def test_downloads_that_were_killed_are_removed(tmp_path):
    from patchbayes.data.download import Source, download

    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    mark = files.writer_mark().replace(str(os.getpid()), str(process.pid))
    (tmp_path / f".download.{mark}x").mkdir()
    (tmp_path / f".download.{mark}x" / "half").write_text("")
    (tmp_path / f".download.{files.writer_mark()}y").mkdir()
    with pytest.raises(PatchbayesError, match="the download failed"):
        download(Source("set", ("a",), ("file:///no/such/file",), ("md5:0",)), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f".download.{files.writer_mark()}y"]
