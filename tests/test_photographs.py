"""Image files become pixels as torchvision's transforms make them: random parts in training, resize and center in testing."""

import importlib
import importlib.util

import numpy as np
import pytest
import torch

from patchbayes.data import read
from patchbayes.data.image_files import ImageFileSplit, decode_image, decode_random_crop, random_box
from patchbayes.data.preparation import Preparation

Image = pytest.importorskip("PIL.Image")
SIZES = [(500, 375), (375, 500), (256, 256), (300, 224), (90, 400)]


def torchvision_transforms():
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    if not hasattr(torch.ops.torchvision, "nms"):  # beside a torch without GPU its own operators do not load
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        KEPT.append(library)
    return importlib.import_module("torchvision.transforms")


KEPT = []


def picture(folder, size, seed=0):
    """A PNG file with structure at several scales."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 255, (9, 11, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    noisy = np.clip(np.asarray(coarse).astype(int) + rng.integers(-20, 20, (size[1], size[0], 3)), 0, 255)
    file = folder / f"{size[0]}x{size[1]}-{seed}.png"
    Image.fromarray(noisy.astype(np.uint8)).save(file)
    return file


def pixels(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@pytest.mark.parametrize("size", SIZES)
def test_testing_is_resize_256_and_center_crop_224(size, tmp_path):
    transforms = torchvision_transforms()
    file = picture(tmp_path, size)
    usual = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224)])
    assert torch.equal(decode_image(file, (3, 224, 224), "photograph"), pixels(usual(Image.open(file))))


@pytest.mark.parametrize("size", SIZES)
def test_training_is_random_resized_crop_and_flip(size, tmp_path):
    """With the same random numbers, the same pixels: torchvision draws from the global generator, we from a seed."""
    transforms = torchvision_transforms()
    file = picture(tmp_path, size)
    usual = transforms.Compose([transforms.RandomResizedCrop(64), transforms.RandomHorizontalFlip()])
    for seed in range(6):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            theirs = pixels(usual(Image.open(file)))
        assert torch.equal(decode_random_crop(file, seed, (3, 64, 64), flip=True), theirs)


def test_published_corrupted_files_are_only_center_cropped(tmp_path):
    file = picture(tmp_path, (224, 224))
    whole = pixels(Image.open(file))
    assert torch.equal(decode_image(file, (3, 224, 224), "crop"), whole)
    assert torch.equal(decode_image(file, (3, 200, 200), "crop"), whole[:, 12:212, 12:212])
    assert decode_image(file, (3, 300, 300), "crop").shape == (3, 300, 300)  # enlarged where there is too little


def test_boxes_lie_in_the_image_and_cover_all_of_it():
    generator = torch.Generator().manual_seed(0)
    seen = torch.zeros(40, 60)
    for _ in range(400):
        left, top, wide, tall = random_box(60, 40, generator)
        assert left >= 0
        assert left + wide <= 60
        assert top >= 0
        assert top + tall <= 40
        assert 0.07 < wide * tall / 2400 <= 1
        seen[top : top + tall, left : left + wide] += 1
    assert seen[0, 0] > 0  # the corners, which no crop of the center has
    assert seen[-1, -1] > 0
    assert random_box(400, 4, generator)[2:] == (5, 4)  # no part of that aspect fits: the largest in the middle


def test_training_parts_come_from_the_whole_image(tmp_path):
    """The borders of a wide image are red and blue; its center is green. The center alone would never show the borders."""
    array = np.zeros((40, 120, 3), dtype=np.uint8)
    array[:, :40, 0] = array[:, 40:80, 1] = array[:, 80:, 2] = 255
    file = tmp_path / "wide.png"
    Image.fromarray(array).save(file)
    split = ImageFileSplit([file] * 40, torch.zeros(40, dtype=torch.int64), (3, 16, 16))
    preparation = Preparation((0.5,) * 3, (0.5,) * 3, "resized-crop+flip")
    raw, targets = split.fetch_augmented(torch.arange(40), preparation, torch.Generator().manual_seed(0))
    assert raw.shape == (40, 3, 16, 16)
    assert len(targets) == 40
    assert (raw.amax((2, 3)) == 255).all(0).tolist() == [False, False, False]
    assert (raw.amax((2, 3)) == 255).any(0).tolist() == [True, True, True]
    again, _ = split.fetch_augmented(torch.arange(40), preparation, torch.Generator().manual_seed(0))
    assert torch.equal(raw, again)
    plain, _ = split.fetch_augmented(
        torch.arange(2), Preparation((0.5,) * 3, (0.5,) * 3), torch.Generator().manual_seed(0)
    )
    assert torch.equal(plain, split.fetch(torch.arange(2))[0])


def test_folders_are_photographs_from_64_pixels_on(tmp_path):
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            picture(tmp_path / part / name, (80, 70))
    large, small = (read(f"images:{tmp_path}", held_out=0, size=size).test for size in (64, 32))
    file = small.files[0]
    assert torch.equal(large.fetch(torch.tensor([0]))[0][0], decode_image(file, (3, 64, 64), "photograph"))
    assert torch.equal(small.fetch(torch.tensor([0]))[0][0], decode_image(file, (3, 32, 32), "cover"))
    assert large.subset(torch.tensor([1])).view == "photograph"
