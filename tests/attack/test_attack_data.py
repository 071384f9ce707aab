"""Damaged data files: tables, arrays, idx files and images."""

import io
import os
import struct
import zipfile

import numpy as np
import pytest
import torch
from attacking import attack, survives
from mutations import damaged, damaged_text, word

from patchbayes.data import csv_rows, decode_image, read

SHORT = 150


def sane(dataset):
    """What was accepted is numbers that a network can be trained on."""
    assert dataset.columns or dataset.name.partition(":")[0] != "csv"
    for split in (dataset.train, dataset.test):
        inputs, targets = next(dataset.batches(split, 1000))
        assert inputs.dtype == torch.float32
        assert inputs.isfinite().all()
        assert len(inputs) == len(targets) == len(split)
        if dataset.task == "classification":
            assert 0 <= int(targets.min()) <= int(targets.max()) < len(dataset.classes)
        else:
            assert targets.isfinite().all()


def table():
    rng = np.random.default_rng(0)
    rows = [
        f"{rng.normal():.4f},{'abc'[i % 3]},{i % 7},{rng.integers(1000) / 7:.3f},{['no', 'yes'][i % 2]}"
        for i in range(30)
    ]
    return "\n".join(["x,kind,count,y,label", *rows]) + "\n"


def csv_case(folder):
    def prepare(rng):
        file = folder / "t.csv"
        file.write_bytes(damaged_text(table(), rng))
        target = rng.choice(("y", "label", "count", "0", word(rng)))
        columns = {
            rng.choice(("x", "kind", "count", "y", word(rng))): rng.choice(("number", "category", "ignore", word(rng)))
        }
        options = {"columns": columns} if rng.random() < 0.2 else {}

        def run():
            if rng.random() < 0.3:
                for _, rows in csv_rows(file, ("x", "kind=a", "kind=b", "kind=c", "count"), 8):
                    assert rows.isfinite().all()
            else:
                sane(
                    read(
                        f"csv:{file}", target=target, task=rng.choice((None, "classification", "regression")), **options
                    )
                )

        return run

    return prepare


def arrays(rng):
    x = np.arange(48, dtype=rng.choice(("u1", "<f4", "<f8"))).reshape(rng.choice(((12, 4), (12, 2, 2))))
    y = rng.choice((np.arange(12) % 3, np.arange(12) / 3, np.array(list("abcabcabcabc"))))
    return {"x_train": x, "y_train": y, "x_test": x[:4], "y_test": y[:4]}


def npz_case(folder):
    def prepare(rng):
        file = folder / "d.npz"
        members = {}
        for name, array in arrays(rng).items():
            content = io.BytesIO()
            np.lib.format.write_array(content, array, allow_pickle=False)
            members[f"{name}.npy"] = content.getvalue()
        if rng.random() < 0.6:  # damage inside the members, which are then packed well
            for name in rng.sample(sorted(members), rng.choice((1, 1, 2))):
                members[name] = hostile_member(members[name], rng)
        with zipfile.ZipFile(file, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        if rng.random() < 0.5:
            file.write_bytes(damaged(file.read_bytes(), rng))
        return lambda: sane(read(f"npz:{file}", task=rng.choice((None, "classification", "regression"))))

    return prepare


def hostile_member(content, rng):
    if rng.random() < 0.5:
        return damaged(content, rng)
    shape = rng.choice(
        ("(12,)", "(12, 4)", "(10**12,)", "(1000000000000,)", "(0, 4)", "(1000000, 1000000, 0)", "(-1,)", "()")
    )
    kind = rng.choice(
        ("<i8", "<f8", "|O", "<U0", "<U3", "|V8", "|b1", ">u8", "<M8[s]", "[('a', '<f8')]", "<c16", "|S4")
    )
    kind = kind if kind[0] == "[" else repr(kind)
    header = f"{{'descr': {kind}, 'fortran_order': {rng.random() < 0.5}, 'shape': {shape}, }}\n"
    values = rng.choice(
        (bytes(96), np.array([0, 1, 2] * 4, "<i8").tobytes(), np.full(12, 10**9).tobytes(), rng.randbytes(96), b"")
    )
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + values


def idx_case(folder):
    def prepare(rng):
        import gzip

        for part in ("train", "t10k"):
            images = struct.pack(">4B3I", 0, 0, 8, 3, 6, 4, 4) + bytes(range(96))
            labels = struct.pack(">4BI", 0, 0, 8, 1, 6) + bytes([0, 1, 2] * 2)
            contents = {f"{part}-images-idx3-ubyte": images, f"{part}-labels-idx1-ubyte": labels}
            for name, content in contents.items():
                packed = rng.random() < 0.3
                (folder / name).unlink(missing_ok=True)
                (folder / f"{name}.gz").unlink(missing_ok=True)
                hit = rng.random() < 0.4
                content = damaged(content, rng) if hit else content
                content = gzip.compress(content, 1) if packed else content
                content = damaged(content, rng) if hit and packed and rng.random() < 0.3 else content
                (folder / f"{name}{'.gz' if packed else ''}").write_bytes(content)
        return lambda: sane(read(f"idx:{folder}", held_out=0))

    return prepare


def image_case(folder):
    pillow = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    originals = []
    for form in ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP"):
        content = io.BytesIO()
        pillow.fromarray(pixels).save(content, form)
        originals.append(content.getvalue())
    originals += [
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\nshowpage\n%%EOF\n", b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"P6 100000 100000 255\n", b"P5 99999999999999999999 1 255\n", b"P6 4 4 65535\n" + bytes(96),
        b"GIF89a\xff\xff\xff\xff\x00",
    ]  # fmt: skip

    def prepare(rng):
        file = folder / f"image{rng.choice(('.png', '.jpg', '.tif', ''))}"
        file.unlink(missing_ok=True)
        if rng.random() < 0.01:
            os.mkfifo(file)
        else:
            file.write_bytes(damaged(rng.choice(originals), rng))

        def run():
            found = decode_image(file, (rng.choice((1, 3)), 8, 8))
            assert found.dtype == torch.uint8
            assert found.shape[1:] == (8, 8)

        return run

    return prepare


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "make", "long"),
    [("csv", csv_case, 2000), ("npz", npz_case, 1500), ("idx", idx_case, 1000), ("images", image_case, 1500)],
)
class TestDataFiles:
    def test_a_few(self, tmp_path, capsys, name, make, long):
        survives(attack(name, SHORT, make(tmp_path)), capsys, refused=0.3, accepted=0.02)

    @pytest.mark.slow
    def test_many(self, tmp_path, capsys, name, make, long):
        survives(attack(name, long, make(tmp_path), seed=1), capsys, refused=0.3, accepted=0.02)
