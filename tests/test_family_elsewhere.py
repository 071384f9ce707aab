"""Every method of the family through the rest of the library: compiled, in DDP, exported, calibrated, saved, stacked."""

import copy
import gc

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.patching.drawing import forward_draws
from patchbayes.stacking import stack
from test_family import METHODS, NOT_ON_NORMS

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(6) % 3
MANY = pytest.mark.parametrize("name", METHODS)
#: Noise for every example: a file cannot hold what was drawn.
FRESH = [name for name, (method, _) in METHODS.items() if "Dropout" in type(method).__name__]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))


def sites_of(name: str) -> str:
    return "linear" if name in NOT_ON_NORMS else "all"


def patched(name: str) -> nn.Sequential:
    model = network()
    pb.patch_(model, METHODS[name][0], sites_of(name), generator=torch.Generator().manual_seed(1))
    return model


def step(called, model, optimizer, *, with_kl: bool = True) -> torch.Tensor:
    optimizer.zero_grad()
    loss = pb.objective.negative_elbo(forward_draws(called, X, 2), Y, pb.kl(model) if with_kl else 0.0, num_data=60)
    loss.backward()
    optimizer.step()
    return loss.detach()


@MANY
def test_saved_loaded_and_taken_off(name, tmp_path):
    model, other = patched(name), network()
    step(model, model, torch.optim.SGD(model.parameters(), 0.1))
    pb.save(model, tmp_path / "patch.safetensors", whole=True)
    pb.load_(other, tmp_path / "patch.safetensors")
    draws = [pb.Draws.sample(m, 4, torch.Generator().manual_seed(3)) for m in (model, other)]
    both = [pb.predict(m.eval(), X, d).probs for m, d in zip((model, other), draws, strict=True)]
    assert torch.equal(*both)
    assert torch.equal(pb.kl(model), pb.kl(other))
    mean = model.eval()(X)
    pb.unpatch_(model, keep="mean")
    assert not pb.is_patched(model)
    assert [type(m) for m in model] == [nn.Linear, nn.LayerNorm, nn.Tanh, nn.Linear]
    assert model.state_dict().keys() == network().state_dict().keys()
    torch.testing.assert_close(model(X), mean)


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    gc.collect()
    torch.distributed.destroy_process_group()


@MANY
def test_wrapped_in_ddp_it_trains_as_without(one_process, name):
    model = patched(name)
    alone = copy.deepcopy(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (wrapped, alone))
    for _ in range(2):
        torch.testing.assert_close(step(wrapped, model, ours), step(alone, alone, theirs))
    for (key, one), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=key)


@pytest.mark.slow
@MANY
def test_compiled_it_trains_as_in_eager_mode(name):
    """But for an estimated KL, which takes noise of its own: that is new after every step."""
    model = patched(name)
    eager = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, eager)]
    estimated = any(site.posterior.kl_draws for site in pb.patched_sites(model).values())
    values = []
    for _ in range(3):
        one = step(compiled, model, optimizers[0], with_kl=not estimated)
        other = step(eager, eager, optimizers[1], with_kl=not estimated)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        values.append(float(pb.kl(model).detach()))
    assert len(set(values)) == 3
    for (key, one), other in zip(model.named_parameters(), eager.parameters(), strict=True):
        if one.grad is None or other.grad is None:  # what only the KL would move
            assert estimated
            continue
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=key)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS if name not in FRESH])
def test_exported_with_fixed_draws_it_says_what_predict_says(name, tmp_path):
    model = patched(name).eval()
    draws = pb.Draws.sample(model, 4)
    pb.export(model, tmp_path / "m.pt2", draws, example_input=X)
    probs = torch.export.load(tmp_path / "m.pt2").module()(X)[0]
    torch.testing.assert_close(probs, pb.predict(model, X, draws).probs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FRESH)
def test_what_draws_for_every_example_is_not_exported(name, tmp_path):
    with pytest.raises(PatchbayesError, match="draws anew for every example"):
        pb.export(patched(name), tmp_path / "m.pt2", 3, example_input=X)
    assert not (tmp_path / "m.pt2").exists()


def test_weights_of_draws_are_in_the_exported_file(tmp_path):
    """The control: the same draws with equal weights say something else."""
    model = network().eval()
    pb.patch_(model, pb.EMP(3, jitter=1.0), "all")
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(60, 4, generator=generator)
    stacked = stack(model, (x, torch.randint(3, (60,), generator=generator)), 12)
    assert len(stacked.draws) < 12
    pb.export(model, tmp_path / "m.pt2", stacked.draws, example_input=X)
    probs = torch.export.load(tmp_path / "m.pt2").module()(X)[0]
    torch.testing.assert_close(probs, pb.predict(model, X, stacked.draws).probs, rtol=1e-5, atol=1e-5)
    equal = stacked.draws.weighted(torch.ones(len(stacked.draws)))
    assert not torch.allclose(probs, pb.predict(model, X, equal).probs, atol=1e-3)


QUICK = ("GaussianMixture", "Flow", "RankOne", "EMP, p learned")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in METHODS])
def test_calibrated_it_is_no_worse_than_temperature_scaling(name):
    model = patched(name).eval()
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(150, 4, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    report = pb.calibrate_(model, [(x, y)], draws=4, budget=3000)
    assert report.after.nll <= report.temperature_scaled.nll + 0.02 or report.chosen == "none"
    found = pb.predict(model, x, 4).log_probs[torch.arange(150), y]
    assert torch.isfinite(found).all()
