"""Splits, preparation and data sets: what is fetched, how it is standardized and augmented, what is held out."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchbayes.data import ArraySplit, Contents, Preparation, from_arrays, read
from patchbayes.errors import PatchbayesError


def images(n=20, channels=3, side=12, seed=0):
    return torch.randint(0, 256, (n, channels, side, side), generator=torch.Generator().manual_seed(seed)).to(
        torch.uint8
    )


def contents(n=20, augmentation="none", **kwargs):
    targets = torch.arange(n) % 3
    return Contents(
        "classification",
        ArraySplit(images(n), targets),
        ArraySplit(images(7, seed=1), torch.arange(7) % 3),
        ("a", "b", "c"),
        augmentation=augmentation,
        **kwargs,
    )


def table(n=50, constant=False):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 4, generator=generator) * torch.tensor([1.0, 1e3, 1e-3, 1]) + torch.tensor([0.0, 5e4, 7, -2])
    if constant:
        # As Naval's: equal up to rounding in float64, so that a plain "std == 0" does not see it.
        x[:, 3] = 0.998 + 1e-13 * torch.randn(n, generator=generator)
    y = (100 + 20 * torch.randn(n, 2, generator=generator)).float()
    return Contents("regression", ArraySplit(x, y), ArraySplit(x[:5] * 3, y[:5]), ("p", "q"), tuple("abcd"))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# Splits


def test_fetch_and_subset_agree():
    split = contents().train
    chosen = torch.tensor([4, 0, 17])
    inputs, targets = split.fetch(chosen)
    assert torch.equal(inputs, split.inputs[chosen])
    part = split.subset(chosen)
    assert len(part) == 3
    assert torch.equal(part.fetch(torch.arange(3))[0], inputs)
    assert torch.equal(part.targets, targets)


def test_as_many_inputs_as_targets():
    with pytest.raises(PatchbayesError, match="3 inputs and 4 targets"):
        ArraySplit(torch.zeros(3, 2), torch.zeros(4))


# What is held out


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 60), st.floats(0.01, 0.9), st.integers(0, 99))
def test_held_out_and_training_examples_partition_the_training_part(n, share, seed):
    whole = Contents(
        "regression",
        ArraySplit(torch.arange(n).float().unsqueeze(1), torch.zeros(n, 1)),
        ArraySplit(torch.zeros(1, 1), torch.zeros(1, 1)),
        ("y",),
    )
    if max(1, round(share * n)) == n:
        with pytest.raises(PatchbayesError, match="leaves none"):
            whole.dataset("d", share, seed)
        return
    dataset = whole.dataset("d", share, seed)
    assert len(dataset.held_out) == max(1, round(share * n))
    parts = torch.cat([dataset.train.inputs, dataset.held_out.inputs]).flatten()
    assert parts.sort().values.tolist() == list(range(n))


def test_seed_and_share_choose_what_is_held_out():
    first, same, other = (contents().dataset("d", 0.3, seed) for seed in (1, 1, 2))
    assert torch.equal(first.held_out.inputs, same.held_out.inputs)
    assert not torch.equal(first.held_out.inputs, other.held_out.inputs)
    assert len(contents().dataset("d", 0.5).held_out) == 10
    assert contents().dataset("d", 0).held_out is None
    assert len(contents().dataset("d", 0).train) == 20


def test_a_held_out_part_of_their_own_is_kept():
    own = ArraySplit(images(4, seed=9), torch.tensor([0, 1, 2, 0]))
    dataset = contents(held_out=own).dataset("d", 0.3)
    assert dataset.held_out is own
    assert len(dataset.train) == 20
    assert contents(held_out=own).dataset("d", 0).held_out is None


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_is_between_0_and_1(share):
    with pytest.raises(PatchbayesError, match="held_out"):
        contents().dataset("d", share)


# Standardization


def test_pixels_are_standardized_with_the_training_part_alone():
    dataset = contents().dataset("d", 0.25)
    pixels = dataset.train.inputs.double().numpy() / 255
    np.testing.assert_allclose(dataset.preparation.mean, pixels.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(dataset.preparation.std, pixels.std((0, 2, 3)), rtol=1e-12)
    inputs = dataset.preparation.inputs(dataset.train.inputs)
    assert inputs.dtype == torch.float32
    torch.testing.assert_close(inputs.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(inputs.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5, rtol=0)
    expected = (torch.tensor(pixels) - torch.tensor(dataset.preparation.mean).view(3, 1, 1)) / torch.tensor(
        dataset.preparation.std
    ).view(3, 1, 1)
    torch.testing.assert_close(inputs, expected.float(), atol=1e-5, rtol=1e-5)


def test_tables_and_targets_are_standardized_with_the_training_part_alone():
    dataset = table().dataset("d", 0.2)
    np.testing.assert_allclose(dataset.preparation.mean, dataset.train.inputs.double().mean(0), rtol=1e-12)
    np.testing.assert_allclose(
        dataset.preparation.target_std, dataset.train.targets.double().std(0, correction=0), rtol=1e-12
    )
    inputs, targets = next(dataset.batches(dataset.train, 1000))
    for values in (inputs, targets):
        torch.testing.assert_close(values.mean(0), torch.zeros(values.shape[1]), atol=2e-3, rtol=0)
        torch.testing.assert_close(values.std(0, correction=0), torch.ones(values.shape[1]), atol=2e-3, rtol=0)
    raw = dataset.train.targets
    back = targets * torch.tensor(dataset.preparation.target_std) + torch.tensor(dataset.preparation.target_mean)
    torch.testing.assert_close(back.float(), raw, rtol=1e-5, atol=1e-3)


def test_a_constant_column_is_not_divided_by_its_rounding():
    dataset = table(constant=True).dataset("d", 0)
    assert dataset.preparation.std[3] == 1.0
    inputs, _ = next(dataset.batches(dataset.train, 1000))
    assert float(inputs[:, 3].abs().max()) < 1e-6
    constant = from_arrays(np.zeros((4, 2)), np.arange(4.0), np.zeros((1, 2)), np.zeros(1)).dataset("d", 0)
    assert constant.preparation.std == (1.0, 1.0)


def test_class_numbers_are_not_standardized():
    dataset = contents().dataset("d", 0)
    _, targets = next(dataset.batches(dataset.train, 20))
    assert torch.equal(targets, dataset.train.targets)


def test_preparation_goes_through_json():
    for dataset in (contents(augmentation="crop").dataset("d"), table().dataset("d")):
        preparation = dataset.preparation
        assert Preparation.from_config(json.loads(json.dumps(preparation.to_config()))) == preparation


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mean": [0.0]}, "mean and std are needed"),
        ({"mean": [0.0], "std": [1.0], "colour": 3}, "only augmentation"),
        ({"mean": [0.0], "std": [0.0]}, "positive"),
        ({"mean": [0.0], "std": [1.0, 2.0]}, "as many"),
        ({"mean": [float("nan")], "std": [1.0]}, "finite"),
        ({"mean": [0.0], "std": [1.0], "target_mean": [1.0]}, "target_mean"),
        ({"mean": [0.0], "std": [1.0], "augmentation": "cutout"}, "crop"),
    ],
)
def test_a_broken_preparation_is_refused(config, message):
    with pytest.raises(PatchbayesError, match=message):
        Preparation.from_config(config)


def test_inputs_of_another_kind_are_refused():
    preparation = contents().dataset("d").preparation
    with pytest.raises(PatchbayesError, match="3 channels or features"):
        preparation.inputs(images(2, channels=1))
    with pytest.raises(PatchbayesError, match="takes"):
        preparation.inputs(images(2)[0])


# Augmentation


def preparation(augmentation, channels=3):
    return Preparation((0.5,) * channels, (0.2,) * channels, augmentation)


def test_crop_shifts_every_image_by_itself_within_four_pixels():
    raw = images(64, side=10)
    got = preparation("crop").augment(raw, generator())
    padded = torch.nn.functional.pad(raw, (4, 4, 4, 4))
    shifts = set()
    for before, after in zip(padded, got, strict=True):
        places = [(y, x) for y in range(9) for x in range(9) if torch.equal(before[:, y : y + 10, x : x + 10], after)]
        assert len(places) == 1
        shifts.add(places[0])
    assert {y for y, _ in shifts} == {x for _, x in shifts} == set(range(9))


def test_flip_mirrors_about_half_of_the_images():
    raw = images(200, side=10)
    plain = preparation("crop").augment(raw, generator())
    mirrored = preparation("crop+flip").augment(raw, generator())
    same = [torch.equal(a, b) for a, b in zip(plain, mirrored, strict=True)]
    turned = [torch.equal(a.flip(2), b) for a, b in zip(plain, mirrored, strict=True)]
    assert all(a != b for a, b in zip(same, turned, strict=True))
    assert 60 < sum(turned) < 140  # within 5.6 deviations of 100


def test_resized_crop_shows_a_part_of_the_image():
    # A picture whose pixels are their own coordinates: the window can be read off the result.
    y, x = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
    raw = torch.stack([y * 4, x * 4, y * 0]).to(torch.uint8).expand(300, 3, 64, 64)
    got = preparation("resized-crop+flip").augment(raw, generator()).double() / 4
    assert got.shape == raw.shape
    tall = got[:, 0].amax((1, 2)) - got[:, 0].amin((1, 2))
    wide = got[:, 1].amax((1, 2)) - got[:, 1].amin((1, 2))
    area = tall * wide / 63**2
    assert 0.05 < float(area.min()) < 0.2
    assert 0.7 < float(area.max()) <= 1.0
    assert 0.6 < float((wide / tall).min()) < 0.9 < 1.1 < float((wide / tall).max()) < 1.6
    assert float(got[:, 2].max()) == 0


@pytest.mark.parametrize("augmentation", ["crop", "crop+flip", "resized-crop+flip"])
def test_augmentation_depends_on_the_generator_alone(augmentation):
    raw = images()
    before = torch.random.get_rng_state()
    first = preparation(augmentation).augment(raw, generator(1))
    assert torch.equal(first, preparation(augmentation).augment(raw, generator(1)))
    assert not torch.equal(first, preparation(augmentation).augment(raw, generator(2)))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first.dtype == torch.uint8
    assert first.shape == raw.shape
    assert first.is_contiguous()


def test_no_augmentation_changes_nothing():
    raw = images()
    state = generator()
    assert preparation("none").augment(raw, state) is raw
    assert torch.equal(state.get_state(), generator().get_state())


def test_tables_cannot_be_augmented():
    with pytest.raises(PatchbayesError, match="tables"):
        preparation("crop").augment(torch.zeros(2, 3), generator())
    dataset = table().dataset("d")
    with pytest.raises(PatchbayesError, match="images"):
        dataclasses.replace(dataset, preparation=dataclasses.replace(dataset.preparation, augmentation="crop"))


# Parts and batches


def test_shapes_and_outputs():
    dataset = contents().dataset("d")
    assert (dataset.input_shape, dataset.num_outputs) == ((3, 12, 12), 3)
    assert (table().dataset("d").input_shape, table().dataset("d").num_outputs) == ((4,), 2)


def test_parts_by_text():
    dataset = contents(n=40).dataset("d", 0.25)
    assert dataset.part("train") is dataset.train
    assert dataset.part(" test ") is dataset.test
    assert len(dataset.part("held_out[:4]")) == 4
    pieces = [dataset.part(text) for text in ("test[:3]", "test[3:6]", "test[-1:]")]
    assert torch.equal(torch.cat([piece.inputs for piece in pieces]), dataset.test.inputs)


@pytest.mark.parametrize("text", ["tset", "test[3]", "test[:8]", "test[7:]", "test[4:2]", "test[:-9]", "test[::2]", ""])
def test_wrong_parts_are_refused(text):
    with pytest.raises(PatchbayesError, match="d"):
        contents().dataset("d").part(text)


def test_no_held_out_part():
    with pytest.raises(PatchbayesError, match="held_out above 0"):
        contents().dataset("d", 0).part("held_out")


def test_batches_follow_the_order_and_lose_nothing():
    dataset = contents().dataset("d", 0)
    order = torch.randperm(20, generator=generator())[:13]
    batches = list(dataset.batches(dataset.train, 5, order=order))
    assert [len(targets) for _, targets in batches] == [5, 5, 3]
    inputs = torch.cat([inputs for inputs, _ in batches])
    assert torch.equal(inputs, dataset.preparation.inputs(dataset.train.inputs[order]))
    assert len(list(dataset.batches(dataset.train, 7))) == 3
    assert list(dataset.batches(dataset.train, 7, order=order[:0])) == []
    with pytest.raises(PatchbayesError, match="batch_size"):
        next(dataset.batches(dataset.train, 0))


def test_batches_augment_where_asked():
    dataset = contents(augmentation="crop").dataset("d", 0)
    plain, _ = next(dataset.batches(dataset.train, 20))
    again, _ = next(dataset.batches(dataset.train, 20))
    shifted, _ = next(dataset.batches(dataset.train, 20, augment=generator()))
    expected = dataset.preparation.inputs(dataset.preparation.augment(dataset.train.inputs, generator()))
    assert torch.equal(plain, again)
    assert torch.equal(shifted, expected)
    assert not torch.equal(plain, shifted)


# Contents that cannot be right


@pytest.mark.parametrize(
    ("task", "targets", "classes", "message"),
    [
        ("classification", torch.tensor([0, 1, 2, 3]), ("a", "b", "c"), "0 to 2"),
        ("classification", torch.tensor([0, -1, 2, 2]), ("a", "b", "c"), "-1 to 2"),
        ("classification", torch.tensor([0, 0, 0, 0]), ("a",), "only the class a"),
        ("classification", torch.tensor([0.0, 1, 1, 0]), ("a", "b"), "int64"),
        ("regression", torch.tensor([0.0, 1, 1, 0]), ("a",), r"float32 \(N, 1\)"),
        ("regression", torch.tensor([[0.0], [1], [float("nan")], [0]]), ("a",), "example 2"),
    ],
)
def test_targets_that_do_not_fit_the_task(task, targets, classes, message):
    good = ArraySplit(torch.zeros(4, 1), targets)
    with pytest.raises(PatchbayesError, match=message):
        Contents(task, good, good, classes).dataset("d", 0)


def test_an_empty_part():
    with pytest.raises(PatchbayesError, match="part test: no examples"):
        dataclasses.replace(contents(), test=contents().test.subset(torch.tensor([], dtype=torch.int64))).dataset("d")


# package.module:function


def _module(tmp_path, monkeypatch, name, body):
    (tmp_path / f"{name}.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)


HEADER = "import numpy as np\nfrom patchbayes.data import from_arrays\n"
ARRAYS = "from_arrays(np.arange(40.).reshape(20, 2), np.arange(20) % 2, np.zeros((2, 2)), np.array([0, 1]))"


def test_a_function_gives_contents_or_a_data_set(tmp_path, monkeypatch):
    _module(
        tmp_path,
        monkeypatch,
        "own_data",
        f"{HEADER}def found(): return {ARRAYS}\n"
        f"def kept(): return {ARRAYS}.dataset('x', 0.5)\ndef whole(): return {ARRAYS}.dataset('x', 0)\n",
    )
    found = read("own_data:found", held_out=0.2, trust_code=True)
    assert (found.name, len(found.train), len(found.held_out)) == ("own_data:found", 16, 4)
    kept = read("own_data:kept", held_out=0.2, trust_code=True)
    assert (len(kept.train), len(kept.held_out)) == (10, 10)
    whole = read("own_data:whole", held_out=0.2, trust_code=True)
    assert (len(whole.train), len(whole.held_out)) == (16, 4)
    assert whole.preparation.mean == (19.0, 20.0)  # as the function made it


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("bad_data:missing", "missing"),
        ("bad_data:number", "returned int"),
        ("bad_data:fails", "ZeroDivisionError"),
    ],
)
def test_a_function_that_does_not_work(tmp_path, monkeypatch, spec, message):
    _module(tmp_path, monkeypatch, "bad_data", "def number(): return 3\ndef fails(): return 1 / 0\n")
    with pytest.raises(PatchbayesError, match=message):
        read(spec, trust_code=True)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cifar-100", "Did you mean cifar100"),
        ("nonsense", "Known are fashion, digits"),
        ("http://x/y", "unknown data"),
        ("", "unknown data"),
        ("digits:here", "write 'digits' alone"),
        ("csv:", "a path is missing"),
        ("images:/no/such/folder", "/no/such/folder"),
    ],
)
def test_unknown_data(spec, message):
    with pytest.raises(PatchbayesError, match=message):
        read(spec)


@pytest.mark.parametrize("option", [{"target": "x"}, {"size": 32}, {"split": 1}, {"task": "regression"}])
def test_options_that_mean_nothing_are_refused(option):
    with pytest.raises(PatchbayesError, match=next(iter(option))):
        read("digits", **option)
