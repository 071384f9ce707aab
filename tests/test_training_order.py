"""The order of the data in training, and the schedule of the learning rate."""

import itertools
import math

import pytest
import torch

from patchbayes.data import ArraySplit, Dataset, Preparation
from patchbayes.runs import TrainingConfig
from patchbayes.runs.data_order import EpochBatches, num_steps
from patchbayes.runs.schedule import learning_rate_factor
from small_runs import table


def config(**settings):
    return TrainingConfig(**{"data": "npz:x.npz", "model": "mlp:6", **settings})


def pictures(rows=12):
    images = torch.randint(0, 256, (rows, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    split = ArraySplit(images, torch.arange(rows) % 3)
    return Dataset(
        "pictures", "classification", split, None, split, ("a", "b", "c"), (), Preparation((0.5,), (0.2,), "crop+flip")
    )


# ---- data order


def examples_of(batches):
    """The numbers of the examples of each batch, read off their first feature."""
    return [((inputs[:, 0] * 10 + 1) / 3).round().int().tolist() for inputs, _, _ in batches.starting_at(0, 0)]


def test_an_epoch_is_a_permutation_in_batches_of_nearly_equal_size():
    seen = examples_of(EpochBatches(table(10), 4, seed=0, epoch=0))
    assert sorted(map(len, seen)) == [3, 3, 4]  # and not 4, 4, 2
    assert sorted(itertools.chain(*seen)) == list(range(10))
    assert seen == examples_of(EpochBatches(table(10), 4, seed=0, epoch=0))
    for other in ({"epoch": 1}, {"seed": 1}):
        assert seen != examples_of(EpochBatches(table(10), 4, **{"seed": 0, "epoch": 0, **other}))
    assert [num_steps(10, size) for size in (1, 3, 5, 10, 99)] == [10, 4, 2, 1, 1]


def test_processes_share_each_batch_and_their_shares_make_the_mean():
    dataset = table(11)
    whole = EpochBatches(dataset, 4, seed=0, epoch=0)
    parts = [EpochBatches(dataset, 4, 0, 0, process, 2) for process in (0, 1)]
    for step in range(len(whole)):
        inputs, targets, share = whole[step]
        assert share == 1
        pieces = [part[step] for part in parts]
        assert torch.equal(torch.cat([piece[0] for piece in pieces]), inputs)
        assert torch.equal(torch.cat([piece[1] for piece in pieces]), targets)
        mean = sum(share * piece.mean(0) for piece, _, share in pieces) / 2
        torch.testing.assert_close(mean, inputs.mean(0))


def test_an_epoch_can_begin_at_any_step_and_be_prepared_by_other_processes():
    dataset = pictures()
    batches = EpochBatches(dataset, 4, seed=5, epoch=2)
    before = torch.get_rng_state()
    everything = list(batches.starting_at(0, 0))
    for step, workers in ((1, 0), (2, 0), (3, 0), (1, 1)):
        rest = list(batches.starting_at(step, workers))
        assert len(rest) == 3 - step
        for (a, b, c), (d, e, f) in zip(everything[step:], rest, strict=True):
            assert torch.equal(a, d)
            assert torch.equal(b, e)
            assert c == f
    assert torch.equal(torch.get_rng_state(), before)


def test_augmentation_differs_between_steps_epochs_and_seeds():
    split = ArraySplit(
        torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8).repeat(12, 1, 1, 1), torch.zeros(12, dtype=torch.int64)
    )
    dataset = Dataset(
        "same", "classification", split, None, split, ("a", "b"), (), Preparation((0.5,), (0.2,), "crop+flip")
    )
    seen = [
        EpochBatches(dataset, 6, seed, epoch)[step][0]
        for seed, epoch, step in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0))
    ]
    assert not any(torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


# ---- schedule


def factors(**settings):
    chosen = config(**settings)
    return [learning_rate_factor(chosen, step, 5) for step in range(5 * chosen.epochs)]


def test_schedules():
    assert factors(schedule="constant", epochs=2) == [1.0] * 10
    torch.testing.assert_close(factors(epochs=2), [0.5 * (1 + math.cos(math.pi * t / 10)) for t in range(10)])
    steps = factors(schedule="step", epochs=4)
    assert steps == pytest.approx([1.0] * 10 + [0.1] * 5 + [0.01] * 5)
    assert factors(schedule="step", epochs=2, milestones=(0.3,), step_factor=0.5) == [1.0] * 3 + [0.5] * 7


def test_warm_up_rises_to_the_schedule():
    assert factors(schedule="constant", epochs=2, warmup=1.0) == pytest.approx(
        [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6] + [1.0] * 5
    )
    warm = factors(epochs=3, warmup=1.0)
    assert warm[5] == 1.0
    assert warm[5:] == sorted(warm[5:], reverse=True)
    assert warm[5:] == pytest.approx(factors(epochs=2))
    assert factors(schedule="constant", epochs=1, warmup=0.5) == pytest.approx([1 / 3, 2 / 3, 3 / 3, 1, 1])
