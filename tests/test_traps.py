"""Every trap of parametrized networks that was met in a try-out (table in the design), and that it is no trap here."""

import copy
import gc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.patching.frames import last_draw
from patchbayes.patching.network import network_of
from stored import components, gradient, mean_field
from trap_network import Net, X, assert_close, gradients, patched
from zoo import TiedLanguageModel, snapshot

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
    components = [(key, value) for key, value in before if "patchbayes.components" in key]
    assert len(components) == 4
    assert all(not torch.equal(after[key], value) for key, value in components)


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "SGD"])
def test_an_optimizer_that_stepped_before_patching_is_refused(name):
    model = Net().double()
    optimizer = OPTIMIZERS[name](model.parameters())
    step(model, optimizer)
    pb.patch_(model, pb.EMP(3), "norm")
    model(X).square().sum().backward()
    before = snapshot(model)["state"]
    with pytest.raises(
        PatchbayesError, match=r"before patch_(.|\n)*\(6,\)(.|\n)*\(18,\)(.|\n)*make the optimizer anew"
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
    assert components(model, "blocks.0.0")[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    seen = set()
    norm.register_forward_hook(lambda module, *_: seen.add(module.weight[0].item()))
    for _ in range(60):
        model(X)
    assert seen == {0.0, 1.0, 2.0, 3.0}
    assert norm.weight[0].item() == 1.5  # outside of a call, the mean


def test_assigning_a_weight_gives_every_component_that_value():
    model = patched()
    bias = components(model, "blocks.0.0", "bias").clone()
    model.blocks[0][0].weight = torch.full((6,), 5.0, dtype=torch.float64)
    assert (components(model, "blocks.0.0") == 5).all()
    assert torch.equal(components(model, "blocks.0.0", "bias"), bias)
    with pytest.raises(PatchbayesError, match=r'"blocks.0.0.weight".*\(6,\).*got \(5,\)'):
        model.blocks[0][0].weight = torch.zeros(5, dtype=torch.float64)
    assert (components(model, "blocks.0.0") == 5).all()


# ---- batch-norm statistics per component lose their updates


def test_statistics_of_the_drawn_component_are_updated_and_no_others():
    model = nn.Sequential(nn.BatchNorm1d(3)).double()
    pb.patch_(model, pb.EMP(3, statistics="per_component"), "norm")
    for number in range(3):
        with pb.use_draw(model, pb.Draws.enumerate(model)[number]):
            before = model[0].patchbayes.running_mean.clone()
            model(X)
            changed = (model[0].patchbayes.running_mean != before).any(1).tolist()
            assert changed == [k == number for k in range(3)]
    torch.testing.assert_close(model[0].patchbayes.running_mean, 0.1 * X.mean(0).expand(3, 3))


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
    with pb.use_draw(model, first):
        step(model, optimizer)
    before = stored.detach().clone()
    with pb.use_draw(model, second):
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


@pytest.mark.parametrize(
    "method", [pb.EMP(3), pb.ECMP(3), pb.Dropout(0.2), pb.posteriors.MeanField()], ids=lambda m: m.label
)
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
    record["indices"] = last_draw(network_of(model)).indices.clone()
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
    assert "blocks.0.0.patchbayes.components.weight" in names
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
    assert not torch.equal(last_draw(network_of(model)).indices, last_draw(network_of(clone)).indices)
    assert torch.equal(network_of(model).generator, network_of(clone).generator)


# ---- vmap, functional calls


def test_functional_call_takes_given_parameters():
    model = patched(pb.EMP(2), "norm+output")
    draws = pb.Draws.sample(model, 1)
    values = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    values["head.patchbayes.components.bias"] = torch.full((6,), 4.0, dtype=torch.float64)
    before = snapshot(model)["state"]
    with pb.use_draw(model, draws):
        assert (torch.func.functional_call(model, values, (X,)) == 4).all()
        own = dict(model.named_parameters())
        assert torch.equal(torch.func.functional_call(model, own, (X,)), model(X))
        loss = lambda p: torch.func.functional_call(model, p, (X,)).square().sum()  # noqa: E731
        functional = torch.func.grad(loss)(own)
        model(X).square().sum().backward()
    assert_close({n: g for n, g in functional.items() if n in gradients(model)}, gradients(model))
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before)


@pytest.mark.parametrize(
    "method", [pb.EMP(3), pb.ECMP(3), pb.ECMP(2, sigma=0.2), pb.posteriors.MeanField()], ids=lambda m: m.label
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
        for parameter, value in site.realize(draws).items()
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
        pb.posteriors.MeanField(),
        pb.Dropout(0.1),
        pb.posteriors.DropConnect(0.2),
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
    if isinstance(method, pb.posteriors.MeanField):
        mean, before_softplus = mean_field(model, "3")
        assert torch.equal(mean, source[3].weight)
        size = F.softplus(before_softplus) / source[3].weight.detach().square().mean().sqrt()
        torch.testing.assert_close(size, torch.full_like(size, method.scale))
    if isinstance(method, pb.posteriors.Mixture) and not method.zero:
        stored = components(model, "3")
        assert torch.equal(stored[0], source[3].weight)
        weight = source[3].weight.detach()
        size = (stored.detach()[1:] - weight).square().mean().sqrt() / weight.square().mean().sqrt()
        assert float(size) == pytest.approx(method.jitter, rel=0.8)
    if method.config().get("statistics") == "per_component":
        assert torch.equal(model[1].patchbayes.running_mean, source[1].running_mean.expand(3, 4))
    pb.unpatch_(model)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in ordinary.items())


def test_a_strict_load_still_misses_what_is_missing():
    model = patched(sites="norm+output")
    ordinary = Net().double().state_dict()
    del ordinary["head.bias"]
    with pytest.raises(RuntimeError, match=r"head.patchbayes.components.bias"):
        model.load_state_dict(ordinary)
    with pytest.raises(RuntimeError, match="extra"):
        model.load_state_dict({**Net().double().state_dict(), "extra": torch.zeros(())})


def test_an_ordinary_checkpoint_loads_through_a_wrapper_and_into_tied_weights():
    model, source = TiedLanguageModel(), TiedLanguageModel()
    pb.patch_(model, pb.ECMP(3), "norm+output")
    nn.Sequential(model).load_state_dict({f"0.{key}": value for key, value in source.state_dict().items()})
    assert "weight" not in model.embedding._parameters
    assert torch.equal(model.embedding.weight, model.decoder.weight)
    assert torch.equal(components(model, "decoder")[0], source.decoder.weight)


def test_a_patched_state_dict_goes_round_with_the_generator():
    model, other = patched(pb.EMP(20)), patched(pb.EMP(20))
    model(X), model(X)
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(X), other(X))
    assert torch.equal(model(X), other(X))


# ---- tie="network" trains one member per step


def test_tie_network_trains_one_member_in_a_step_and_all_of_them_by_enumeration():
    model = patched(pb.Ensemble(3), "all")
    model(X).square().sum().backward()
    assert int(gradient(model, "head").abs().flatten(1).amax(1).gt(0).sum()) == 1
    model.zero_grad()
    pb.forward_draws(model, X, pb.Draws.enumerate(model)).square().sum().backward()
    assert int(gradient(model, "head").abs().flatten(1).amax(1).gt(0).sum()) == 3


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
