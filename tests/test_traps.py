"""Every trap of parametrized networks that was met in a try-out (table in the design), and that it is no trap here."""

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import patchbayes as pb
from patchbayes.draws import network_of
from patchbayes.errors import PatchbayesError
from zoo import TiedLanguageModel, assert_same, snapshot


class Net(nn.Module):
    """A LayerNorm network with a `features` method, blocks that can be recomputed, and a loop of forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 3)
        self.recompute: bool | None = None

    def features(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + (block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def generate(self, x: Tensor, steps: int = 4) -> list[Tensor]:
        outputs = []
        for _ in range(steps):
            x = self(x)
            outputs.append(x)
        return outputs


X = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
METHODS = [
    pb.EMP(4, jitter=1.0),
    pb.ECMP(3, jitter=1.0),
    pb.ECMP(2, sigma=0.3),
    pb.MeanField(),
    pb.Dropout(0.3),
    pb.EMP(3, jitter=1.0, per_example=True),
]


def patched(method: pb.Mixture | None = None, sites: str = "norm") -> Net:
    model = Net().double()
    pb.patch_(model, method or pb.EMP(4, jitter=1.0), sites)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-9, atol=1e-11, msg=name)


# ---- a hook that closes over site objects: a deepcopy never redraws


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
def test_deepcopy_redraws_and_does_so_independently(method):
    model = patched(method)
    model(X)
    clone = copy.deepcopy(model)
    ours, theirs = [model(X) for _ in range(4)], [clone(X) for _ in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert any(not torch.equal(theirs[0], other) for other in theirs[1:])
    fifth = clone(X)
    assert torch.equal(model(X), fifth)


def test_deepcopy_shares_nothing():
    model = patched()
    clone = copy.deepcopy(model)
    before = snapshot(model)
    for parameter in clone.parameters():
        parameter.data.add_(1.0)
    clone(X), clone(X)
    assert_same(before, model)
    sites = pb.patched_sites(clone)
    assert all(site.module is clone.get_submodule(name) for name, site in sites.items())
    assert all(site.network is network_of(clone) for site in sites.values())
    assert network_of(clone) is not network_of(model)


def test_unpatching_a_deepcopy_leaves_the_original_patched_and_whole():
    for model, x in ((patched(sites="all"), X), (TiedLanguageModel(), torch.tensor([[1, 2]]))):
        if not pb.is_patched(model):
            pb.patch_(model, pb.ECMP(3), "all")
        clone, before = copy.deepcopy(model), snapshot(model)
        pb.unpatch_(clone)
        assert_same(before, model)
        model(x).sum().backward()
        pb.unpatch_(model)
        assert torch.equal(clone(x), model(x))


# ---- calls that bypass the root's forward


def test_a_call_that_bypasses_forward_raises_in_training_and_says_what_to_do():
    model = patched()
    with pytest.raises(PatchbayesError, match=r'"blocks.0.0"(.|\n)*patchbayes.drawn\(model\)'):
        model.features(X)
    with pytest.raises(PatchbayesError, match="outside a forward call"):
        model.blocks[0](model.enter(X))
    model(X)
    with pytest.raises(PatchbayesError, match="outside a forward call"):
        model.features(X)


def test_a_call_that_bypasses_forward_works_under_drawn():
    model = patched()
    draws = pb.Draws.sample(model, 5)
    for number in range(5):
        with pb.drawn(model, draws[number]):
            assert torch.equal(model.head(model.features(X)), model(X))


def test_a_call_that_bypasses_forward_warns_in_evaluation():
    model = patched().eval()
    with pytest.warns(UserWarning, match="one random draw"):
        model.features(X)


def test_an_instance_forward_that_hides_the_networks_own_is_noticed():
    model = patched()
    model.forward = lambda x: model.head(model.features(x))
    with pytest.raises(PatchbayesError, match="outside a forward call"):
        model(X)


def test_a_generating_loop_holds_one_draw_under_drawn_and_not_otherwise():
    model = patched(pb.EMP(50))
    seen: list[Tensor] = []
    model.blocks[0][0].register_forward_hook(lambda module, *_: seen.append(module.weight.detach().clone()))
    model.generate(X)
    assert len({tuple(w.tolist()) for w in seen}) > 1
    seen.clear()
    with pb.drawn(model):
        model.generate(X)
    assert len(seen) == 4
    assert len({tuple(w.tolist()) for w in seen}) == 1
    with pb.drawn(model):
        model.generate(X)
    assert len({tuple(w.tolist()) for w in seen}) == 2


def test_drawn_blocks_nest_and_end_also_after_an_error():
    model = patched(pb.EMP(50))
    one, two = pb.Draws.sample(model, 2)
    with pb.drawn(model, one):
        first = model(X)
        with pb.drawn(model, two):
            assert not torch.equal(model(X), first)
        assert torch.equal(model(X), first)
        with pytest.raises(RuntimeError), pb.drawn(model, two):
            raise RuntimeError
        assert torch.equal(model(X), first)
    with pytest.raises(PatchbayesError, match="outside a forward call"):
        model.features(X)


def test_drawn_without_draws_advances_the_networks_own_generator():
    model = patched()
    clone = copy.deepcopy(model)
    with pb.drawn(model):
        inside = model(X), model(X)
    assert torch.equal(inside[0], inside[1])
    assert torch.equal(inside[0], clone(X))
    assert torch.equal(model(X), clone(X))


def test_an_old_evaluation_loop_is_warned_once():
    model = patched().eval()
    with pytest.warns(UserWarning, match=r"patchbayes.predict(.|\n)*Predictor") as record:
        model(X), model(X)
    assert len(record) == 1


def test_training_and_prediction_do_not_warn(recwarn):
    model = patched()
    model(X)
    pb.predict(model, X, 3)
    model.eval()
    pb.predict(model, X, 3)
    with pb.drawn(model):
        model(X)
    assert not recwarn.list


# ---- two forwards before one backward, and activation checkpointing


def reference_gradients(model: Net, weights: list[Tensor]) -> dict[str, Tensor]:
    """Gradients of sum_i (output_i * weights_i), a backward after every forward."""
    clone = copy.deepcopy(model)
    clone.recompute = None
    for weight in weights:
        (clone(X) * weight).sum().backward()
    return gradients(clone)


WEIGHTS = [torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(3)]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
def test_two_forwards_before_one_backward_give_each_its_own_component(method):
    model = patched(method)
    expected = reference_gradients(model, WEIGHTS)
    outputs = [model(X) for _ in WEIGHTS]
    assert len({output[0, 0].item() for output in outputs}) > 1
    sum((output * weight).sum() for output, weight in zip(outputs, WEIGHTS, strict=True)).backward()
    assert_close(gradients(model), expected)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.label)
def test_activation_checkpointing_recomputes_with_the_draw_of_the_forward(method, reentrant):
    model = patched(method)
    expected = reference_gradients(model, WEIGHTS)
    model.recompute = reentrant
    outputs = [model(X) for _ in WEIGHTS]
    for output, weight in reversed(list(zip(outputs, WEIGHTS, strict=True))[1:]):
        (output * weight).sum().backward()
    (outputs[0] * WEIGHTS[0]).sum().backward()
    assert_close(gradients(model), expected)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_activation_checkpointing_of_several_forwards_in_one_backward(reentrant):
    model = patched()
    expected = reference_gradients(model, WEIGHTS)
    model.recompute = reentrant
    outputs = [model(X) for _ in WEIGHTS]
    sum((output * weight).sum() for output, weight in zip(outputs, WEIGHTS, strict=True)).backward()
    assert_close(gradients(model), expected)


def test_activation_checkpointing_with_several_draws_of_forward_draws():
    model = patched()
    draws = pb.Draws.enumerate(model)
    pb.forward_draws(model, X, draws).square().sum().backward()
    expected = gradients(model)
    model.zero_grad()
    model.recompute = False
    pb.forward_draws(model, X, draws).square().sum().backward()
    assert_close(gradients(model), expected)


def test_checkpointing_the_whole_patched_network_recomputes_the_same_draw():
    model = patched()
    expected = reference_gradients(model, WEIGHTS)
    outputs = [checkpoint(model, X, use_reentrant=False) for _ in WEIGHTS]
    sum((output * weight).sum() for output, weight in zip(outputs, WEIGHTS, strict=True)).backward()
    assert_close(gradients(model), expected)
    assert network_of(model).generator[1] == len(WEIGHTS)


def test_reentrant_checkpointing_of_the_whole_network_is_refused_outside_drawn():
    model = patched()
    x = X.clone().requires_grad_()
    outputs = checkpoint(model, x, use_reentrant=True), checkpoint(model, x, use_reentrant=True)
    with pytest.raises(PatchbayesError, match=r"use_reentrant=False(.|\n)*patchbayes.drawn\(model\)"):
        (outputs[0] + outputs[1]).sum().backward()
    model.zero_grad()
    draws = pb.Draws.sample(model, 1)
    with pb.drawn(model, draws):
        checkpoint(model, x, use_reentrant=True).square().sum().backward()
    found = gradients(model)
    model.zero_grad()
    with pb.drawn(model, draws):
        model(x).square().sum().backward()
    assert_close(found, gradients(model))


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointing_a_bypass_needs_backward_inside_drawn(reentrant):
    model = patched()
    model.recompute = reentrant
    one, two = pb.Draws.sample(model, 2)
    with pb.drawn(model, one):
        features = model.features(X)
    with pytest.raises(PatchbayesError, match=r"(?s)the draw of its forward is not known.*drawn\(model\)"):
        features.sum().backward()
    model.zero_grad()
    with pb.drawn(model, two):
        model.features(X).square().sum().backward()
    found = gradients(model)
    model.zero_grad()
    model.recompute = None
    with pb.drawn(model, two):
        features = model.features(X)
    features.square().sum().backward()
    assert_close(found, gradients(model))


def test_a_backward_inside_a_drawn_block_does_not_change_the_held_draw():
    model = patched(pb.EMP(50))
    earlier = model(X)
    draws = pb.Draws.sample(model, 1)
    with pb.drawn(model, draws):
        expected = model.features(X)
        earlier.sum().backward()
        assert torch.equal(model.features(X), expected)


def test_checkpointing_works_when_the_output_is_no_tensor():
    class Output:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    class Wrapped(Net):
        def forward(self, x: Tensor) -> Any:
            return Output(super().forward(x))

    model = Wrapped().double()
    pb.patch_(model, pb.EMP(4, jitter=1.0), "norm")
    clone = copy.deepcopy(model)
    for weight in WEIGHTS:
        (clone(X).logits * weight).sum().backward()
    model.recompute = False
    outputs = [model(X).logits for _ in WEIGHTS]
    sum((output * weight).sum() for output, weight in zip(outputs, WEIGHTS, strict=True)).backward()
    assert_close(gradients(model), gradients(clone))


# ---- tied weights: the embedding suddenly has shape (K, ...)


@pytest.mark.parametrize("tied", ["together", "separate"])
def test_tied_weights_keep_their_shape_for_both_owners(tied):
    model = TiedLanguageModel()
    pb.patch_(model, pb.ECMP(3), "output", tied=tied)
    tokens = torch.tensor([[1, 2, 3]])
    assert model(tokens).shape == (1, 3, 11)
    assert model.embedding.weight.shape == model.decoder.weight.shape == (11, 6)
    assert torch.equal(model.embedding.weight, model.decoder.weight) == (tied == "together")


# ---- optimizer made before patching

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, 0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(X).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "Adagrad"])
def test_an_optimizer_made_before_patching_trains_the_components(name):
    model = Net().double()
    optimizer = OPTIMIZERS[name](model.parameters())
    pb.patch_(model, pb.EMP(3), "norm")
    before = snapshot(model)["state"]
    step(model, optimizer)
    after = model.state_dict()
    assert all(not torch.equal(after[key], value) for key, value in before if "original" in key)


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "SGD"])
def test_an_optimizer_that_stepped_before_patching_is_refused(name):
    model = Net().double()
    optimizer = OPTIMIZERS[name](model.parameters())
    step(model, optimizer)
    pb.patch_(model, pb.EMP(3), "norm")
    model(X).square().sum().backward()
    before = snapshot(model)["state"]
    with pytest.raises(
        PatchbayesError, match=r"before patch_(.|\n)*\(6,\)(.|\n)*\(3, 6\)(.|\n)*make the optimizer anew"
    ):
        optimizer.step()
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before)
    step(model, OPTIMIZERS[name](model.parameters()))


def test_an_optimizer_without_state_may_have_stepped_before_patching():
    model = Net().double()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    step(model, optimizer)
    pb.patch_(model, pb.EMP(3), "norm")
    before = pb.patched_sites(model)["blocks.0.0"].components("weight").detach().clone()
    step(model, optimizer)
    assert not torch.equal(before, pb.patched_sites(model)["blocks.0.0"].components("weight"))


def test_optimizers_of_other_networks_are_left_alone():
    patched()
    other = Net().double()
    optimizer = OPTIMIZERS["Adam"](other.parameters())
    step(other, optimizer), step(other, optimizer)


# ---- nn.init on a patched weight is lost


def test_initialization_of_a_drawn_weight_is_lost_and_through_components_it_is_not():
    model = patched()
    norm = model.blocks[0][0]
    stored = pb.patched_sites(model)["blocks.0.0"].components("weight")
    before = stored.detach().clone()
    nn.init.constant_(norm.weight, 7.0)
    assert torch.equal(stored, before)
    for number, component in enumerate(stored):
        nn.init.constant_(component, float(number))
    assert stored[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    seen = set()
    for _ in range(60):
        model(X)
        seen.add(norm.weight[0].item())
    assert seen == {0.0, 1.0, 2.0, 3.0}


def test_assigning_a_weight_gives_every_component_that_value():
    model = patched()
    model.blocks[0][0].weight = torch.full((6,), 5.0, dtype=torch.float64)
    assert (pb.patched_sites(model)["blocks.0.0"].components("weight") == 5).all()


# ---- batch-norm statistics per component lose their updates


def test_statistics_of_the_drawn_component_are_updated_and_no_others():
    model = nn.Sequential(nn.BatchNorm1d(3)).double()
    pb.patch_(model, pb.EMP(3, statistics="per_component"), "norm")
    for number in range(3):
        with pb.drawn(model, pb.Draws.enumerate(model)[number]):
            before = model[0].component_running_mean.clone()
            model(X)
            changed = (model[0].component_running_mean != before).any(1).tolist()
            assert changed == [k == number for k in range(3)]
    torch.testing.assert_close(model[0].component_running_mean, 0.1 * X.mean(0).expand(3, 3))


# ---- a draw for each example: batch_norm and layer_norm refuse a per-example affine


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(3), nn.LayerNorm(3)], ids=["BatchNorm1d", "LayerNorm"])
def test_an_affine_for_each_example(norm):
    model = nn.Sequential(norm).double()
    pb.patch_(model, pb.EMP(2, jitter=1.0, per_example=True), "norm")
    weight, bias = (pb.patched_sites(model)["0"].components(name) for name in ("weight", "bias"))
    x = X.repeat(6, 1)
    plain = F.batch_norm(x, None, None, training=True) if isinstance(norm, nn.BatchNorm1d) else F.layer_norm(x, (3,))
    output = model(x)
    fits = torch.stack([(output - (plain * w + b)).abs().amax(1) < 1e-9 for w, b in zip(weight, bias, strict=True)])
    assert (fits.sum(0) == 1).all()
    assert fits.any(1).all()


# ---- Adam and momentum move components that were not drawn


@pytest.mark.parametrize(
    ("name", "moves"), [("SGD", False), ("SGD with momentum", True), ("Adam", True), ("RMSprop", False)]
)
def test_which_optimizers_move_components_that_were_not_drawn(name, moves):
    model = patched(pb.EMP(2))
    stored = pb.patched_sites(model)["blocks.0.0"].components("weight")
    first, second = pb.Draws.enumerate(model)[[0, 3]]
    assert first.assignments().tolist() == [[0, 0]]
    assert second.assignments().tolist() == [[1, 1]]
    optimizer = OPTIMIZERS[name](model.parameters())
    with pb.drawn(model, first):
        step(model, optimizer)
    before = stored.detach().clone()
    with pb.drawn(model, second):
        step(model, optimizer)
    assert not torch.equal(stored[1], before[1])
    assert torch.equal(stored[0], before[0]) is not moves


# ---- convert_sync_batchnorm


def test_sync_batchnorm_is_converted_before_patching_and_refused_after():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    after = copy.deepcopy(model)
    pb.patch_(after, pb.EMP(3))
    with pytest.raises((RuntimeError, TypeError, KeyError)):
        nn.SyncBatchNorm.convert_sync_batchnorm(after)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    report = pb.patch_(converted, pb.EMP(3))
    assert [site.module for site in report.sites] == ["SyncBatchNorm", "Linear"]
    pb.patch_(model, pb.EMP(3))
    draws = pb.Draws.enumerate(model)
    assert torch.equal(pb.predict(converted, X, draws).probs, pb.predict(model, X, draws).probs)


# ---- DDP


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    gc.collect()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("method", [pb.EMP(3), pb.ECMP(3), pb.Dropout(0.2), pb.MeanField()], ids=lambda m: m.label)
def test_ddp_on_one_process_trains_as_without(one_process, method):
    model = patched(method, "norm+output")
    alone = copy.deepcopy(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    ours, theirs = OPTIMIZERS["Adam"](wrapped.parameters()), OPTIMIZERS["Adam"](alone.parameters())
    for _ in range(3):
        step(wrapped, ours), step(alone, theirs)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(parameter, model.get_parameter(name), rtol=1e-12, atol=1e-12)
    assert torch.equal(pb.kl(wrapped), pb.kl(model))
    assert torch.equal(pb.predict(wrapped, X, 3).probs, pb.predict(model, X, 3).probs)


def ddp_worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ddp_work(rank, Path(folder))
    gc.collect()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def ddp_work(rank: int, folder: Path) -> None:
    torch.manual_seed(0)
    model = patched(pb.EMP(50), "norm+output")
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    for _ in range(rank):
        model(x)  # the ranks are at different counts of their generators
    wrapped = nn.parallel.DistributedDataParallel(model)
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    alone(x).square().sum().backward()
    wrapped(x).square().sum().backward()
    record = {f"local.{name}": gradient for name, gradient in gradients(alone).items()}
    record |= {f"averaged.{name}": gradient for name, gradient in gradients(model).items()}
    record["indices"] = network_of(model).current.indices.clone()
    record["generator"] = network_of(model).generator.clone()
    optimizer.step()
    record |= {f"weights.{name}": p.detach().clone() for name, p in model.named_parameters()}
    save_file(record, folder / f"rank{rank}.safetensors")


@pytest.mark.slow
def test_ddp_on_two_processes_draws_differently_and_averages_gradients(tmp_path):
    torch.multiprocessing.spawn(ddp_worker, (str(tmp_path),), nprocs=2)
    zero, one = (load_file(tmp_path / f"rank{rank}.safetensors") for rank in (0, 1))
    assert not torch.equal(zero["indices"], one["indices"])
    assert zero["generator"][0] == one["generator"][0]
    assert [int(record["generator"][1]) for record in (zero, one)] == [1, 2]
    names = [key.removeprefix("local.") for key in zero if key.startswith("local.")]
    assert "blocks.0.0.parametrizations.weight.original" in names
    for name in names:
        mean = (zero[f"local.{name}"] + one[f"local.{name}"]) / 2
        torch.testing.assert_close(zero[f"averaged.{name}"], mean, rtol=1e-10, atol=1e-12)
        assert torch.equal(zero[f"averaged.{name}"], one[f"averaged.{name}"])
        assert torch.equal(zero[f"weights.{name}"], one[f"weights.{name}"])
    assert any(not torch.equal(zero[f"local.{name}"], one[f"local.{name}"]) for name in names)


def test_the_rank_is_part_of_the_seed(one_process, monkeypatch):
    model = patched(pb.EMP(50))
    clone = copy.deepcopy(model)
    model(X)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 1)
    clone(X)
    assert not torch.equal(network_of(model).current.indices, network_of(clone).current.indices)
    assert torch.equal(network_of(model).generator, network_of(clone).generator)


# ---- vmap, functional calls


def test_functional_call_takes_given_parameters():
    model = patched(pb.EMP(2), "norm+output")
    draws = pb.Draws.sample(model, 1)
    values = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    values["head.parametrizations.bias.original"] = torch.full((2, 3), 4.0, dtype=torch.float64)
    before = snapshot(model)["state"]
    with pb.drawn(model, draws):
        assert (torch.func.functional_call(model, values, (X,)) == 4).all()
        own = dict(model.named_parameters())
        assert torch.equal(torch.func.functional_call(model, own, (X,)), model(X))
        loss = lambda p: torch.func.functional_call(model, p, (X,)).square().sum()  # noqa: E731
        functional = torch.func.grad(loss)(own)
        model(X).square().sum().backward()
    assert_close({n: g for n, g in functional.items() if n in gradients(model)}, gradients(model))
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before)


@pytest.mark.parametrize(
    "method", [pb.EMP(3), pb.ECMP(3), pb.ECMP(2, sigma=0.2), pb.MeanField()], ids=lambda m: m.label
)
def test_vmap_over_realized_draws_equals_the_loop_in_eval_mode(method):
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()
    model = copy.deepcopy(plain)
    pb.patch_(model, method)
    model.eval(), plain.eval()
    draws = pb.Draws.sample(model, 6)
    weights = {
        f"{name}.{parameter}": value
        for name, site in pb.patched_sites(model).items()
        for parameter, value in site.posterior.realize(site.posterior.draw(draws)).items()
    }
    assert {value.shape[0] for value in weights.values()} == {6}
    together = torch.func.vmap(lambda w: torch.func.functional_call(plain, w, (X,)))(weights)
    torch.testing.assert_close(together, pb.forward_draws(model, X, draws), rtol=1e-12, atol=1e-12)


# ---- strict load of an ordinary checkpoint


@pytest.mark.parametrize(
    "method",
    [
        pb.EMP(3, statistics="per_component"),
        pb.ECMP(3),
        pb.MeanField(),
        pb.Dropout(0.1),
        pb.DropConnect(0.2),
        pb.ECMP(3, jitter=0),
    ],
    ids=lambda m: m.label,
)
def test_an_ordinary_checkpoint_loads_strictly_and_starts_the_components_anew(method):
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()

    source, model = network(), network()
    source(X)
    ordinary = {key: value.clone() for key, value in source.state_dict().items()}
    pb.patch_(model, method)
    generator = network_of(model).generator.clone()
    result = model.load_state_dict(ordinary, strict=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert list(ordinary) == list(source.state_dict())
    assert torch.equal(network_of(model).generator, generator)
    stored = pb.patched_sites(model)["3"].components("weight")
    if isinstance(method, pb.Mixture) and not method.zero:
        assert torch.equal(stored[0], source[3].weight)
        weight = source[3].weight.detach()
        size = (stored.detach()[1:] - weight).square().mean().sqrt() / weight.square().mean().sqrt()
        assert float(size) == pytest.approx(method.jitter, rel=0.8)
    if method.config().get("statistics") == "per_component":
        assert torch.equal(model[1].component_running_mean, source[1].running_mean.expand(3, 4))
    pb.unpatch_(model)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in ordinary.items())


def test_a_strict_load_still_misses_what_is_missing():
    model = patched(sites="norm+output")
    ordinary = Net().double().state_dict()
    del ordinary["head.bias"]
    with pytest.raises(RuntimeError, match=r"head.parametrizations.bias.original"):
        model.load_state_dict(ordinary)
    with pytest.raises(RuntimeError, match="extra"):
        model.load_state_dict({**Net().double().state_dict(), "extra": torch.zeros(())})


def test_an_ordinary_checkpoint_loads_through_a_wrapper_and_into_tied_weights():
    model, source = TiedLanguageModel(), TiedLanguageModel()
    pb.patch_(model, pb.ECMP(3), "norm+output")
    nn.Sequential(model).load_state_dict({f"0.{key}": value for key, value in source.state_dict().items()})
    assert model.embedding.parametrizations.weight.original is model.decoder.parametrizations.weight.original
    assert torch.equal(pb.patched_sites(model)["decoder"].components("weight")[0], source.decoder.weight)


def test_a_patched_state_dict_goes_round_with_the_generator():
    model, other = patched(pb.EMP(20)), patched(pb.EMP(20))
    model(X), model(X)
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(X), other(X))
    assert torch.equal(model(X), other(X))


# ---- tie="network" trains one member per step


def test_tie_network_trains_one_member_in_a_step_and_all_of_them_by_enumeration():
    model = patched(pb.Ensemble(3), "all")
    stored = pb.patched_sites(model)["head"].components("weight")
    model(X).square().sum().backward()
    assert int(stored.grad.abs().flatten(1).amax(1).gt(0).sum()) == 1
    model.zero_grad()
    pb.forward_draws(model, X, pb.Draws.enumerate(model)).square().sum().backward()
    assert int(stored.grad.abs().flatten(1).amax(1).gt(0).sum()) == 3


@pytest.mark.parametrize("name", ["SGD", "SGD with momentum", "Adam"])
def test_an_ensemble_trained_by_enumeration_is_separate_networks(name):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    pb.patch_(model, pb.Ensemble(3), "all")
    members = []
    for k in range(3):
        member = copy.deepcopy(model)
        pb.unpatch_(member, keep=k)
        members.append(member)
    assert not torch.equal(members[0][0].weight, members[1][0].weight)
    optimizer, draws = OPTIMIZERS[name](model.parameters()), pb.Draws.enumerate(model)
    for _ in range(4):
        optimizer.zero_grad()
        pb.forward_draws(model, X, draws).square().sum().backward()
        optimizer.step()
    for k, member in enumerate(members):
        own = OPTIMIZERS[name](member.parameters())
        for _ in range(4):
            step(member, own)
        trained = copy.deepcopy(model)
        pb.unpatch_(trained, keep=k)
        for key, value in member.state_dict().items():
            torch.testing.assert_close(trained.state_dict()[key], value, rtol=1e-10, atol=1e-12)
