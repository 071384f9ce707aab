"""The fifteen corruptions: any image, the same bytes in any company, and the published folders of others."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from patchbayes.data import (
    CORRUPTIONS,
    SEVERITIES,
    ArraySplit,
    CorruptedSplit,
    corrupt,
    decode_image,
    read,
    read_corrupted,
)
from patchbayes.errors import PatchbayesError


@pytest.fixture(scope="module", autouse=True)
def _package():
    pytest.importorskip("imagecorruptions", reason="the extra 'corruptions' is not installed")


def images(n=3, channels=3, height=32, width=32):
    """Smooth pictures: noise would hide what a blur does."""
    coarse = torch.rand(n, channels, 4, 4, generator=torch.Generator().manual_seed(0))
    fine = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")
    return (fine * 255).round().to(torch.uint8)


def distance(a, b):
    return float((a.double() - b.double()).abs().mean())


def test_fifteen_corruptions_of_five_severities():
    import imagecorruptions

    assert tuple(imagecorruptions.get_corruption_names()) == CORRUPTIONS
    assert len(CORRUPTIONS) == 15
    assert SEVERITIES == (1, 2, 3, 4, 5)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_every_corruption_changes_the_image_and_keeps_its_shape(name):
    clean = images()
    before = clean.clone()
    for severity in SEVERITIES:
        changed = corrupt(clean, name, severity)
        assert changed.dtype == torch.uint8
        assert changed.shape == clean.shape
        assert distance(changed, clean) > 0.1
    assert torch.equal(clean, before)


@pytest.mark.parametrize("name", ["gaussian_noise", "shot_noise", "impulse_noise", "contrast", "brightness"])
def test_severity_grows(name):
    clean = images(n=4)
    mild, severe = (distance(corrupt(clean, name, severity), clean) for severity in (1, 5))
    assert severe > 1.5 * mild


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_an_image_is_corrupted_alike_in_any_batch(name):
    clean = images(n=4)
    together = corrupt(clean, name, 3, seed=7)
    assert torch.equal(together, corrupt(clean, name, 3, seed=7))
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(together[order], corrupt(clean[order], name, 3, seed=7))
    assert torch.equal(together[1:2], corrupt(clean[1:2], name, 3, seed=7))


DRAWING = [name for name in CORRUPTIONS if name not in
           ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression")]  # fmt: skip


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_seed_changes_what_is_drawn(name):
    clean = images(n=4)
    same = torch.equal(corrupt(clean, name, 5, seed=0), corrupt(clean, name, 5, seed=1))
    assert same == (name not in DRAWING)


def test_images_of_a_batch_get_different_noise():
    clean = torch.full((2, 3, 32, 32), 128, dtype=torch.uint8)
    clean[1, 0, 0, 0] = 127
    noise = corrupt(clean, "gaussian_noise", 3).double() - clean.double()
    assert abs(float(torch.corrcoef(noise.flatten(1))[0, 1])) < 0.1


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_global_random_states_stay(name):
    numpy_state, torch_state = np.random.get_state(), torch.random.get_rng_state()
    corrupt(images(n=1), name, 2)
    after = np.random.get_state()
    assert numpy_state[0] == after[0]
    assert np.array_equal(numpy_state[1], after[1])
    assert numpy_state[2:] == after[2:]
    assert torch.equal(torch.random.get_rng_state(), torch_state)


def test_the_global_random_state_does_not_matter():
    clean = images()
    state = np.random.get_state()
    try:
        np.random.seed(1)
        first = corrupt(clean, "snow", 3)
        np.random.seed(2)
        assert torch.equal(corrupt(clean, "snow", 3), first)
    finally:
        np.random.set_state(state)


def test_threads_do_not_disturb_each_other():
    clean = images(n=8)
    alone = {name: corrupt(clean, name, 3) for name in ("gaussian_noise", "motion_blur", "glass_blur", "impulse_noise")}
    with ThreadPoolExecutor(4) as pool:
        jobs = [(name, pool.submit(corrupt, clean, name, 3)) for _ in range(5) for name in alone]
        for name, job in jobs:
            assert torch.equal(job.result(), alone[name])


@pytest.mark.parametrize(
    "shape", [(3, 8, 8), (1, 8, 8), (1, 28, 28), (3, 33, 45), (3, 70, 31), (1, 64, 64), (1, 5, 90)]
)
def test_every_size_and_gray_images(shape):
    clean = images(2, *shape)
    for name in CORRUPTIONS:
        changed = corrupt(clean, name, 3)
        assert changed.shape == clean.shape
        assert not torch.equal(changed, clean)


def test_large_images():
    clean = images(1, 3, 224, 224)
    for name in CORRUPTIONS:
        assert corrupt(clean, name, 1).shape == clean.shape


def test_black_and_white_images_pass():
    for value in (0, 255):
        flat = torch.full((1, 3, 32, 32), value, dtype=torch.uint8)
        for name in CORRUPTIONS:
            assert corrupt(flat, name, 5).shape == flat.shape


def test_enlarging_and_shrinking_alone_change_nothing(monkeypatch):
    """With a corruption that returns its argument, small and gray images come back as they were."""
    import imagecorruptions

    seen = []

    def unchanged(image, severity, corruption_name, **kwargs):
        seen.append(image.shape)
        return image

    monkeypatch.setattr(imagecorruptions, "corrupt", unchanged)
    for shape, enlarged in (((1, 8, 8), (32, 32, 3)), ((3, 28, 30), (56, 60, 3)), ((3, 40, 32), (40, 32, 3))):
        clean = images(2, *shape)
        assert torch.equal(corrupt(clean, "fog", 1), clean)
        assert seen[-1] == enlarged


def test_gray_noise_has_its_full_strength():
    flat = torch.full((1, 1, 64, 64), 128, dtype=torch.uint8)
    changed = corrupt(flat, "gaussian_noise", 1).double()
    assert abs(float(changed.std()) - 0.08 * 255) < 1.5


@pytest.mark.parametrize(
    ("given", "name", "severity"),
    [
        (torch.zeros(1, 3, 32, 32), "fog", 1),
        (torch.zeros(3, 32, 32, dtype=torch.uint8), "fog", 1),
        (torch.zeros(1, 4, 32, 32, dtype=torch.uint8), "fog", 1),
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "rain", 1),
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "fog", 0),
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "fog", 6),
    ],
)
def test_what_cannot_be_corrupted(given, name, severity):
    with pytest.raises(PatchbayesError, match="corrupt"):
        corrupt(given, name, severity)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "imagecorruptions", None)
    with pytest.raises(PatchbayesError, match=r"patchbayes\[corruptions\]"):
        corrupt(images(), "fog", 1)


# A split that is corrupted when fetched


def test_a_corrupted_split():
    clean = images(n=5)
    split = ArraySplit(clean, torch.arange(5))
    corrupted = CorruptedSplit(split, "gaussian_noise", 4, seed=2)
    raw, targets = corrupted.fetch(torch.tensor([3, 1]))
    assert torch.equal(raw, corrupt(clean, "gaussian_noise", 4, seed=2)[[3, 1]])
    assert targets.tolist() == [3, 1]
    assert len(corrupted) == 5
    assert torch.equal(corrupted.subset(torch.tensor([3])).fetch(torch.tensor([0]))[0], raw[:1])
    other = CorruptedSplit(split, "gaussian_noise", 4, seed=3).fetch(torch.tensor([3, 1]))[0]
    assert not torch.equal(other, raw)
    with pytest.raises(PatchbayesError, match="rain"):
        CorruptedSplit(split, "rain", 1)


def test_digits_can_be_corrupted():
    dataset = read("digits")
    part = CorruptedSplit(dataset.part("test[:4]"), "fog", 3)
    inputs, targets = next(dataset.batches(part, 4))
    assert inputs.shape == (4, 1, 8, 8)
    assert targets.tolist() == dataset.test.targets[:4].tolist()


# Folders of others


@pytest.fixture
def cifar_c(tmp_path):
    rng = np.random.default_rng(0)
    np.save(tmp_path / "fog.npy", rng.integers(0, 256, (20, 32, 32, 3), dtype=np.uint8))
    np.save(tmp_path / "labels.npy", np.tile(np.arange(4), 5))
    return tmp_path


def test_the_layout_of_cifar_c(cifar_c):
    split = read_corrupted(cifar_c, "fog", 2, ("a", "b", "c", "d"), (3, 32, 32))
    stored = np.lib.format.open_memmap(cifar_c / "fog.npy", mode="r")
    raw, targets = split.fetch(torch.arange(4))
    assert targets.tolist() == [0, 1, 2, 3]
    assert torch.equal(raw, torch.tensor(np.array(stored[4:8])).permute(0, 3, 1, 2))
    assert not torch.equal(read_corrupted(cifar_c, "fog", 3, ("a", "b", "c", "d"), (3, 32, 32)).inputs, raw)


@pytest.mark.parametrize(
    ("file", "array", "message"),
    [
        ("fog.npy", np.zeros((20, 32, 32, 3)), "fog.npy: float64"),
        ("fog.npy", np.zeros((20, 28, 28, 3), dtype=np.uint8), r"\(5 N, 32, 32, 3\) is needed"),
        ("fog.npy", np.zeros((19, 32, 32, 3), dtype=np.uint8), "19"),
        ("labels.npy", np.zeros(4, dtype=int), "one class number for each of 20 images"),
        ("labels.npy", np.full(20, 4), "class numbers 4 to 4; 0 to 3"),
        ("labels.npy", np.full(20, -1), "class numbers -1 to -1"),
        ("labels.npy", np.array([None] * 20), "not a complete npy file"),
    ],
)
def test_a_broken_cifar_c(cifar_c, file, array, message):
    np.save(cifar_c / file, array)
    with pytest.raises(PatchbayesError, match=message):
        read_corrupted(cifar_c, "fog", 2, ("a", "b", "c", "d"), (3, 32, 32))


def test_a_truncated_cifar_c(cifar_c):
    whole = (cifar_c / "fog.npy").read_bytes()
    for content in (whole[:-100], whole[:20], b""):
        (cifar_c / "fog.npy").write_bytes(content)
        with pytest.raises(PatchbayesError, match=r"fog\.npy: not a complete npy file"):
            read_corrupted(cifar_c, "fog", 2, ("a", "b", "c", "d"), (3, 32, 32))
    (cifar_c / "labels.npy").unlink()
    with pytest.raises(PatchbayesError, match=r"\.npy"):
        read_corrupted(cifar_c, "fog", 2, ("a", "b", "c", "d"), (3, 32, 32))


@pytest.mark.parametrize("above", ["", "weather"])
def test_the_layout_of_imagenet_c(tmp_path, above):
    image = pytest.importorskip("PIL.Image")
    for severity in (1, 2):
        for name in ("cat", "dog"):
            folder = tmp_path / above / "fog" / str(severity) / name
            folder.mkdir(parents=True)
            image.new("RGB", (20, 20), (10 * severity, 0, 0)).save(folder / "0.png")
    split = read_corrupted(tmp_path, "fog", 2, ("cat", "dog"), (3, 8, 8))
    raw, targets = split.fetch(torch.arange(2))
    assert targets.tolist() == [0, 1]
    assert torch.equal(raw[1], decode_image(tmp_path / above / "fog" / "2" / "dog" / "0.png", (3, 8, 8)))
    assert raw[:, 0].unique().tolist() == [20]
    for name, severity, classes, message in (
        ("fog", 3, ("cat", "dog"), "no folder 3"),
        ("fog", 2, ("cat", "cow"), "is missing"),
        ("snow", 2, ("cat", "dog"), r"neither snow.npy"),
        ("rain", 2, ("cat", "dog"), "rain"),
    ):
        with pytest.raises(PatchbayesError, match=message):
            read_corrupted(tmp_path, name, severity, classes, (3, 8, 8))
