"""The parts of the training loop: data order, schedule, loss, optimizer groups, turns, growing jitter, held-out scores,
weights read from ordinary checkpoints."""

import copy
import itertools
import json
import math

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import patchbayes as pb
from patchbayes.data import ArraySplit, Dataset, Preparation
from patchbayes.draws import network_of
from patchbayes.errors import CheckpointMismatch, PatchbayesError
from patchbayes.nets import mlp, small_cnn
from patchbayes.training import TrainingConfig, load_ordinary_
from patchbayes.training.data_order import EpochBatches, num_steps
from patchbayes.training.held_out import held_out_scores
from patchbayes.training.jitter import grow_jitter_
from patchbayes.training.loss import TrainingLoss, build_likelihood
from patchbayes.training.methods import patch_with_
from patchbayes.training.optimizers import build_optimizer
from patchbayes.training.patched_net import patched_net
from patchbayes.training.schedule import learning_rate_factor
from patchbayes.training.state import FORMAT
from patchbayes.training.turns import hold_still_


def config(**settings):
    return TrainingConfig(**{"data": "npz:x.npz", "model": "mlp:6", **settings})


def table(rows=10, task="classification"):
    inputs = torch.arange(3.0 * rows).view(rows, 3)
    targets = torch.arange(rows) % 3 if task == "classification" else torch.arange(2.0 * rows).view(rows, 2)
    preparation = Preparation((1.0, 2.0, 3.0), (10.0, 10.0, 10.0))
    if task == "regression":
        preparation = Preparation((1.0, 2.0, 3.0), (10.0, 10.0, 10.0), "none", (5.0, 6.0), (2.0, 4.0))
    names = ("a", "b", "c")
    split = ArraySplit(inputs, targets)
    return Dataset(
        "table", task, split, split, split, names if task == "classification" else names[:2], names, preparation
    )


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


# ---- loss


def training_loss(task="classification", num_data=40, **settings):
    chosen = config(**settings)
    network, _ = patched_net(chosen, 3, (4,))
    return TrainingLoss(network, build_likelihood(task, chosen), chosen, num_data)


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(8) % 3


def test_the_elbo_of_a_patched_network():
    loss = training_loss(method="emp", prior_precision=3.0, draws_per_step=2)
    twin = copy.deepcopy(loss.network)
    value, nll, kl = loss(X, Y)
    total = pb.kl(twin, pb.Prior(3.0, 3.0))
    expected = pb.negative_elbo(pb.forward_draws(twin, X, 2), Y, total, num_data=40)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(kl, total)
    torch.testing.assert_close(nll + kl / 40, value)


def test_an_unpatched_network_has_the_prior_of_a_point():
    loss = training_loss(method="vanilla", prior_precision=2.0)
    value, nll, kl = loss(X, Y)
    torch.testing.assert_close(nll, nn.functional.cross_entropy(loss.network(X), Y))
    torch.testing.assert_close(kl, sum(p.square().sum() for p in loss.network.parameters()))
    torch.testing.assert_close(value, nll + kl / 40)


def test_the_simplified_loss_is_the_nll_and_weight_decay_is_the_optimizer_s():
    loss = training_loss(method="ecmp", objective="simplified")
    value, nll, kl = loss(X, Y)
    assert value == nll
    assert kl == 0


@pytest.mark.parametrize("method", ["vanilla", "ecmp"])
def test_with_weight_decay_the_kl_leaves_the_shared_parameters_out(method):
    loss = training_loss(method=method, weight_decay=0.1)
    expected = torch.zeros(()) if method == "vanilla" else pb.kl(loss.network, shared=False)
    assert loss(X, Y)[2] == expected


def test_the_share_of_a_process_weighs_its_likelihood_only():
    loss = training_loss(method="vanilla")
    value, nll, kl = loss(X, Y, 0.5)
    torch.testing.assert_close(value, 0.5 * nll + kl / 40)


def test_a_step_takes_every_member_of_an_ensemble():
    loss = training_loss(method="ensemble", components=3)
    draws = pb.Draws.enumerate(loss.network)
    outputs = pb.forward_draws(copy.deepcopy(loss.network), X, draws)
    torch.testing.assert_close(loss(X, Y)[1], pb.negative_elbo(outputs, Y, 0.0, num_data=40))
    assert len(draws) == 3


def test_regression_has_a_gaussian_and_classes_refuse_its_settings():
    loss = training_loss("regression", method="vanilla", output_precision=4.0)
    targets = torch.zeros(8, 3)
    expected = -torch.distributions.Normal(loss.network(X), 0.5).log_prob(targets).sum(1).mean()
    torch.testing.assert_close(loss(X, targets)[1], expected)
    for settings in ({"output_precision": 1.0}, {"learn_precision": True}):
        with pytest.raises(PatchbayesError, match=r"are for regression, and npz:x.npz has classes"):
            build_likelihood("classification", config(**settings))


# ---- optimizers


def optimizer_of(**settings):
    chosen = config(**settings)
    network, _ = patched_net(chosen, 3, (4,))
    likelihood = build_likelihood("regression" if chosen.learn_precision else "classification", chosen)
    optimizer = build_optimizer(chosen, network, likelihood)
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    learned = [*network.parameters(), *(likelihood.parameters() if chosen.learn_precision else ())]
    assert sorted(held) == sorted(map(id, learned))
    return optimizer, {group["name"]: group for group in optimizer.param_groups}


def test_patched_parameters_have_a_group_of_their_own():
    _, groups = optimizer_of(lr=0.2, patch_lr=0.05)
    assert {name: group["lr"] for name, group in groups.items()} == {
        "patched_weights": 0.05,
        "patched_biases": 0.05,
        "shared_weights": 0.2,
        "shared_biases": 0.2,
    }
    assert all(group["initial_lr"] == group["lr"] for group in groups.values())
    assert {group["weight_decay"] for group in groups.values()} == {0.0}
    for optimizer in ("sgd", "adam"):
        assert {group["lr"] for group in optimizer_of(lr=0.2, optimizer=optimizer)[1].values()} == {0.2}


def test_turns_need_two_kinds_of_parameters():
    with pytest.raises(PatchbayesError, match=r'sites="all" leaves nothing to take turns with'):
        optimizer_of(sites="all", alternate=1.0)


def test_shared_and_patched_parameters_learn_in_turns():
    optimizer, groups = optimizer_of()
    learned = []
    for step in range(6):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        hold_still_(optimizer, 0.5, step, 3)  # a turn lasts two steps
        names = {name for name, group in groups.items() if all(p.grad is not None for p in group["params"])}
        assert {name for name, group in groups.items() if any(p.grad is not None for p in group["params"])} == names
        learned.append({name.partition("_")[0] for name in names})
    assert learned == [{"shared"}] * 2 + [{"patched"}] * 2 + [{"shared"}] * 2


def test_nothing_is_decayed_twice():
    """What the optimizer decays is exactly what the KL leaves out."""
    decays = {name: group["weight_decay"] for name, group in optimizer_of(weight_decay=0.1)[1].items()}
    assert decays == {"patched_weights": 0.0, "patched_biases": 0.0, "shared_weights": 0.1, "shared_biases": 0.1}
    simplified = optimizer_of(objective="simplified", weight_decay=0.1)[1]
    assert {group["weight_decay"] for group in simplified.values()} == {0.1}
    papers = optimizer_of(objective="simplified", batch_size=50)[1]  # weight decay 2 lambda with lambda = 0.001 / 50
    assert {group["weight_decay"] for group in papers.values()} == {2 * 0.001 / 50}
    assert optimizer_of(method="vanilla", weight_decay=0.1)[1]["weights"]["weight_decay"] == 0.1
    with pytest.raises(PatchbayesError, match="leaves no shared parameter to decay"):
        optimizer_of(method="ensemble", weight_decay=0.1)


def test_optimizers_by_name():
    assert type(optimizer_of()[0]) is torch.optim.Adam
    assert type(optimizer_of(optimizer="adamw")[0]) is torch.optim.AdamW
    sgd, groups = optimizer_of(optimizer="sgd")
    assert type(sgd) is torch.optim.SGD
    assert {(g["momentum"], g["nesterov"], g["lr"]) for g in groups.values()} == {(0.9, False, 0.1)}
    groups = optimizer_of(optimizer="sgd", momentum=0.5, nesterov=True)[1]
    assert {(g["momentum"], g["nesterov"]) for g in groups.values()} == {(0.5, True)}


def test_a_learned_precision_is_optimized_without_decay():
    groups = optimizer_of(learn_precision=True, objective="simplified", weight_decay=0.5)[1]
    assert groups["output_precision"]["weight_decay"] == 0


# ---- patching


def test_default_sites_are_the_paper_s():
    def sites(method):
        return patched_net(config(method=method), 3, (4,))[1].sites

    names = {method: [site.name for site in sites(method)] for method in ("ecmp", "dropout", "ensemble")}
    assert names == {
        "ecmp": ["norm0", "norm1", "output"],
        "dropout": ["norm0", "norm1"],
        "ensemble": ["norm0", "hidden1", "norm1", "output"],
    }


def test_a_draw_for_each_example_is_taken_where_the_layer_allows():
    network = mlp(4, (6,), 3)
    patch_with_(network, pb.ECMP(3, per_example=True), "norm+output", input_shape=(4,))
    sites = pb.patched_sites(network)
    assert {name: site.method.per_example for name, site in sites.items()} == {
        "norm0": True,
        "norm1": True,
        "output": False,
    }
    network = mlp(4, (6,), 3)
    patch_with_(network, pb.ECMP(3, per_example=True), "norm")
    assert list(pb.patched_sites(network)) == ["norm0", "norm1"]
    with pytest.raises(PatchbayesError, match='sites="output" has no norm layer'):
        patch_with_(mlp(4), pb.ECMP(3, per_example=True), "output")


def test_the_output_is_the_layer_that_runs_last():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(4, 3), nn.Linear(4, 4)

        def forward(self, x):
            return self.last(self.first(x))

    network = Backwards()
    patch_with_(network, pb.EMP(3), "output", input_shape=(4,))
    assert list(pb.patched_sites(network)) == ["last"]
    network = Backwards()
    patch_with_(network, pb.EMP(3), "output")
    assert list(pb.patched_sites(network)) == ["first"]


def test_seed_and_precision_reach_the_patches():
    def patched(**options):
        network = mlp(4, (6,), 3)
        with torch.no_grad():
            network.output.weight.fill_(1.0)
        patch_with_(network, pb.EMP(3), "output", **options)
        return network

    def weights(network):
        return pb.patched_sites(network)["output"].components("weight")

    assert torch.equal(weights(patched()), weights(patched(seed=0)))
    assert not torch.equal(weights(patched()), weights(patched(seed=1)))
    assert network_of(patched(precision=7.0)).prior.precisions("output") == (7.0, 7.0)


# ---- jitter that grows


def test_components_start_as_copies_and_end_apart():
    chosen = config(method="ecmp", components=4, jitter=0.2, jitter_warmup=2.0, epochs=3)
    network, _ = patched_net(chosen, 3, (4,))
    site = pb.patched_sites(network)["output"]
    stored = site.components("weight").detach()
    start = stored.clone()
    assert torch.equal(stored, stored[:1].expand_as(stored))
    distances = []
    for step in range(15):
        grow_jitter_(network, chosen, step, steps_per_epoch=5)
        distances.append(float((stored[1:] - start[1:]).square().mean().sqrt()))
    size = float(start[0].square().mean().sqrt())
    assert torch.equal(stored[0], start[0])
    assert distances[9:] == [distances[9]] * 6  # nothing more after two epochs of five steps
    assert distances[4] == pytest.approx(distances[9] / 2, rel=1e-4)
    assert distances[9] == pytest.approx(0.2 * size, rel=0.4)  # the root mean square of 54 normal numbers, times 0.2
    assert not torch.equal(stored[1], stored[2])


def test_the_jitter_that_grows_depends_on_the_seed_and_defaults_to_the_method_s():
    def moved(**settings):
        chosen = config(method="emp", jitter_warmup=1.0, **settings)
        network, _ = patched_net(config(method="emp", jitter_warmup=1.0), 3, (4,))
        grow_jitter_(network, chosen, 0, 1)
        return pb.patched_sites(network)["output"].components("weight").detach()

    assert torch.equal(moved(), moved(jitter=0.1))
    assert not torch.equal(moved(), moved(jitter=0.2))
    assert not torch.equal(moved(), moved(seed=1))


# ---- held-out scores


def test_held_out_scores_of_classes_are_those_of_the_averaged_prediction():
    dataset = table(10)
    network, _ = patched_net(config(method="ecmp"), 3, (3,))
    inputs, targets = next(dataset.batches(dataset.test, 10))
    prediction = pb.predict(network, inputs, 7)
    scores = held_out_scores(network, dataset, dataset.test, pb.Categorical(), 7, 10)
    assert scores["held_out_nll"] == pytest.approx(
        -float(prediction.log_probs.gather(1, targets[:, None]).mean()), rel=1e-5
    )
    assert scores["held_out_accuracy"] == float((prediction.predicted_class == targets).double().mean())
    assert held_out_scores(network, dataset, dataset.test, pb.Categorical(), 7, 3) == pytest.approx(scores, rel=1e-5)
    assert held_out_scores(network, dataset, dataset.test, pb.Categorical(), 1, 10) != pytest.approx(scores, rel=1e-5)
    answers = iter([False, False, True])
    assert held_out_scores(network, dataset, dataset.test, pb.Categorical(), 7, 3, lambda: next(answers)) is None


@pytest.mark.parametrize("method", ["vanilla", "ecmp"])
def test_held_out_scores_of_a_regression_are_in_the_targets_own_units(method):
    dataset = table(10, "regression")
    network, _ = patched_net(config(method=method), 2, (3,))
    inputs, _ = next(dataset.batches(dataset.test, 10))
    raw = dataset.test.targets
    if method == "vanilla":
        means = network.eval()(inputs).detach()[None]
        network.train()
    else:
        means = pb.predict(network, inputs, 6, likelihood=pb.Gaussian(2.0), keep_draws=True).draw_means
    means = means.double() * torch.tensor([2.0, 4.0]) + torch.tensor([5.0, 6.0])
    scores = held_out_scores(network, dataset, dataset.test, pb.Gaussian(2.0), 6, 4)
    assert scores["held_out_rmse"] == pytest.approx(float((means.mean(0) - raw).square().mean().sqrt()), rel=1e-5)
    noise = torch.tensor([2.0, 4.0], dtype=torch.float64) / math.sqrt(2)
    density = torch.distributions.Normal(means, noise).log_prob(raw.double()).sum(-1).logsumexp(0) - math.log(
        len(means)
    )
    assert scores["held_out_nll"] == pytest.approx(-float(density.mean()), rel=1e-5)
    assert network.training


# ---- ordinary checkpoints


@pytest.fixture
def network():
    return small_cnn(1, 4, 8)


def other_weights(network):
    return {key: torch.full_like(value, 3) for key, value in network.state_dict().items()}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {f"module.{key}": value for key, value in state.items()},
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"state_dict": {f"model.{key}": value for key, value in state.items()}, "best": 0.1},
        lambda state: {"model": {"state_dict": state}},
        lambda state: {f"module._orig_mod.{key}": value for key, value in state.items()},
    ],
    ids=["bare", "ddp", "state_dict", "lightning", "nested", "compiled"],
)
def test_state_dicts_in_their_usual_wrappings(network, tmp_path, wrap):
    torch.save(wrap(other_weights(network)), tmp_path / "weights.pt")
    load_ordinary_(network, tmp_path / "weights.pt")
    assert all((value == 3).all() for value in network.state_dict().values())


def test_safetensors_and_missing_counters_of_batches(network, tmp_path):
    state = {key: value for key, value in other_weights(network).items() if "num_batches" not in key}
    save_file({f"module.{key}": value for key, value in state.items()}, tmp_path / "weights.safetensors")
    load_ordinary_(network, tmp_path / "weights.safetensors")
    assert all((network.state_dict()[key] == 3).all() for key in state)


def test_names_of_the_network_are_kept_though_they_look_like_a_wrapping(tmp_path):
    network = nn.ModuleDict({"module": nn.Linear(2, 2)})
    torch.save(other_weights(network), tmp_path / "weights.pt")
    load_ordinary_(network, tmp_path / "weights.pt")
    assert (network["module"].weight == 3).all()


def test_a_mismatch_lists_what_does_not_fit_and_changes_nothing(network, tmp_path):
    state = other_weights(network)
    state["head.weight"] = state.pop("fc.weight")
    state["conv1.weight"] = torch.zeros(16, 3, 3, 3)
    torch.save(state, tmp_path / "weights.pt")
    before = copy.deepcopy(network.state_dict())
    with pytest.raises(CheckpointMismatch) as error:
        load_ordinary_(network, tmp_path / "weights.pt")
    for line in (
        "missing in the file: fc.weight",
        "not in the network: head.weight",
        "conv1.weight: (16, 3, 3, 3) in the file, (16, 1, 3, 3) in the network",
    ):
        assert line in str(error.value)
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


class Evil:
    """Would run a command where a file with it is unpickled."""

    def __reduce__(self):
        return (print, ("unpickled",))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "there is no file"),
        (lambda path: path.write_bytes(b"not a checkpoint"), "cannot be read as a checkpoint"),
        (lambda path: path.write_bytes(b""), "cannot be read as a checkpoint"),
        (lambda path: torch.save({"state_dict": Evil()}, path), "could run anything"),
        (lambda path: torch.save(nn.Linear(2, 2), path), "could run anything"),
        (lambda path: torch.save([torch.zeros(2)], path), "holds no state dict.*found was a list"),
        (lambda path: torch.save({"epoch": 3}, path), "found was a mapping with the keys 'epoch'"),
        (lambda path: torch.save({}, path), "found was an empty mapping"),
    ],
)
def test_files_that_are_no_checkpoints(network, tmp_path, capsys, make, message):
    make(tmp_path / "weights.pt")
    with pytest.raises(CheckpointMismatch, match=message):
        load_ordinary_(network, tmp_path / "weights.pt")
    assert "unpickled" not in capsys.readouterr().out


def test_broken_and_patched_safetensors_are_refused(network, tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file(other_weights(network), path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointMismatch, match="not a whole safetensors file"):
        load_ordinary_(network, path)
    patched = copy.deepcopy(network)
    pb.patch_(patched, pb.EMP(2))
    pb.save(patched, path, whole=True)
    with pytest.raises(CheckpointMismatch, match="holds a patched network; an ordinary checkpoint is wanted"):
        load_ordinary_(network, path)
    with pytest.raises(CheckpointMismatch, match=r"is a folder.\n  do       give the file of the weights"):
        load_ordinary_(network, tmp_path)
    save_file({}, path, metadata={"patchbayes": json.dumps({"format": FORMAT})})
    with pytest.raises(CheckpointMismatch, match=r"is the state of a training.\n  do       give the weights alone"):
        load_ordinary_(network, path)


def test_the_public_networks_load(data_dir):
    """The weights that others trained on CIFAR-100."""
    from patchbayes.nets.named import build_net

    files = sorted((data_dir / "pretrained").glob("*resnet20*.safetensors"))
    if not files:
        pytest.skip("no pretrained networks there")
    network = build_net("cifar_resnet20", 100, (3, 32, 32))
    start = network.fc.weight.detach().clone()
    load_ordinary_(network, files[0])
    assert not torch.equal(network.fc.weight, start)
    with pytest.raises(CheckpointMismatch, match="missing in the file"):
        load_ordinary_(build_net("cifar_resnet56", 100, (3, 32, 32)), files[0])
