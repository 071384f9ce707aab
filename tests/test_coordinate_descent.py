"""Turns of shared and patched parameters: what rests is not differentiated, the fixed prefix is kept, the numbers stay."""

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.patching.prefix import find_prefix
from patchbayes.runs import TrainingConfig, train
from patchbayes.runs.coordinate_descent import Turns
from patchbayes.runs.data_record import training_data
from patchbayes.runs.loss import TrainingLoss, build_likelihood, build_optimizer
from patchbayes.runs.network import patched_net
from small_runs import rows_of, write_npz


class Branches(nn.Module):
    """A module used twice, a branch, work in place, a shape that is read, and sites after it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.twice = nn.Linear(4, 6), nn.Linear(6, 6)
        self.side, self.relu = nn.Linear(4, 6), nn.ReLU(inplace=True)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)
        self.runs = 0
        self.stem.register_forward_hook(self._count)

    def _count(self, *_):
        self.runs += 1

    def forward(self, x):
        h = self.relu(self.twice(self.stem(x)))
        side = self.side(x).view(h.shape[0], h.shape[1])
        h = self.norm(h + side)
        return self.head(self.twice(h))


def patched(model, sites="norm+output", **options):
    pb.patch_(model, pb.EMP(3, jitter=0.3, **options), sites)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("patchbayes" in name)
    return model


def test_the_rest_of_the_network_takes_the_kept_prefix():
    model = patched(Branches())
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    prefix = find_prefix(model, x)
    names = {id(module): name for name, module in model.named_modules()}
    assert {names[id(module)] for module in prefix.modules} == {"stem", "twice", "relu", "side"}
    assert prefix.bytes_per_example == 2 * 6 * 4  # of relu and side; stem and the first use of twice are read by nobody
    values = prefix.values(x)
    for number in range(4):
        draw = pb.Draws.sample(model, 4)[number]
        with pb.use_draw(model, draw):
            plain = model(x)
        runs = model.runs
        with pb.use_draw(model, draw), prefix.serving(values):
            served = model(torch.full_like(x, torch.nan))
        torch.testing.assert_close(served, plain, rtol=0, atol=0)
        assert model.runs == runs + 1  # the hook is called, its module is not run
    assert "forward" not in model.stem.__dict__


def test_gradients_are_those_of_the_whole_network():
    model = patched(Branches())
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    prefix, draw = find_prefix(model, x), pb.Draws.sample(model, 1)
    learned = [p for p in model.parameters() if p.requires_grad]
    with pb.use_draw(model, draw):
        plain = torch.autograd.grad(model(x).square().sum(), learned)
    values = prefix.values(x)
    with pb.use_draw(model, draw), prefix.serving([v[[1, 0, 2, 3, 4, 5]] for v in values]):
        served = torch.autograd.grad(model(x).square().sum(), learned)
    for one, other in zip(plain, served, strict=True):
        torch.testing.assert_close(one, other)


class Noisy(Branches):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


def test_what_changes_from_step_to_step_is_not_fixed():
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    assert find_prefix(patched(Noisy()), x) is None
    model = patched(Branches())
    model.requires_grad_(True)  # the trunk learns
    assert find_prefix(model, x) is None
    batch_norm = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    before = {key: value.clone() for key, value in batch_norm.state_dict().items()}
    patched(batch_norm, "output")
    assert find_prefix(batch_norm, x) is None
    assert all(torch.equal(batch_norm[0].state_dict()[key[2:]], v) for key, v in before.items() if key.startswith("0."))
    batch_norm[0].eval()
    assert len(find_prefix(batch_norm, x).modules) == 2
    first = patched(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)))
    assert find_prefix(first, x) is None  # nothing comes before the first site


def test_random_states_stay():
    model = patched(Branches())
    before, counter = torch.get_rng_state(), model.state_dict()["patchbayes_generator"].clone()
    assert find_prefix(model, torch.ones(4, 4)) is not None
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model.state_dict()["patchbayes_generator"], counter)


def config(tmp_path, **settings):
    write_npz(tmp_path / "classes.npz")
    fixed = {"data": f"npz:{tmp_path}/classes.npz", "model": "mlp:8", "method": "emp(3)", "epochs": 6, "batch_size": 12}
    return TrainingConfig(**{**fixed, "lr": 0.02, "alternate": 1.0, "threads": 1, **settings})


def turns_of(chosen):
    dataset = training_data(chosen, False)
    network, _ = patched_net(chosen, dataset.num_outputs, dataset.input_shape)
    likelihood = build_likelihood(dataset.task, chosen)
    loss = TrainingLoss(network, likelihood, chosen, len(dataset.train)).train()
    return Turns(chosen, loss, build_optimizer(chosen, network, likelihood), dataset), loss, dataset


def test_what_rests_is_not_differentiated_and_the_kl_stays_whole(tmp_path):
    turns, loss, _ = turns_of(config(tmp_path, sites="output"))
    whole = float(loss.kl().detach())
    seen = []
    for turn, learns in (("patched", "patchbayes"), ("shared", None), ("patched", "patchbayes")):
        turns.begin(turn, keep=False)
        for name, parameter in loss.network.named_parameters():
            assert parameter.requires_grad == (("patchbayes" in name) == (learns is not None)), (turn, name)
        assert float(loss.kl().detach()) == pytest.approx(whole, rel=1e-6)
        norms = [m for m in loss.network.modules() if isinstance(m, nn.BatchNorm1d)]
        assert all(norm.training == (turn == "shared") for norm in norms)
        value, _, _ = loss(torch.ones(4, 4), torch.tensor([0, 1, 2, 0]))
        value.backward()
        seen.append({name for name, p in loss.network.named_parameters() if p.grad is not None})
        loss.zero_grad()
    assert seen[0] == seen[2]
    assert seen[0] | seen[1] == {name for name, _ in loss.network.named_parameters()}
    assert not seen[0] & seen[1]


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"alternate": 1.0}, "a turn sees every example at most once"),
        ({"alternate": 2.0, "sites": "norm"}, "nothing before the first patched layer"),
        ({"alternate": 2.0, "sites": "output"}, None),
        ({"alternate": 0.0, "learn": "patches", "sites": "output"}, None),
    ],
)
def test_the_log_says_whether_the_prefix_is_kept(tmp_path, settings, word):
    run = train(config(tmp_path, **settings), tmp_path / "run", quiet=True)
    text = (run.path / "log.txt").read_text()
    assert ("prefix kept" in text) == (word is None)
    assert word is None or f"prefix not kept: {word}" in text


def test_a_kept_prefix_changes_no_number(tmp_path, monkeypatch):
    chosen = config(tmp_path, alternate=2.0, sites="output")
    kept = train(chosen, tmp_path / "kept", quiet=True)
    monkeypatch.setattr(Turns, "_reason_against", lambda *_: "no")
    plain = train(chosen, tmp_path / "plain", quiet=True)
    assert "prefix not kept: no" in (plain.path / "log.txt").read_text()
    for one, other in zip(rows_of(kept), rows_of(plain), strict=True):
        for key, value in one.items():
            assert value == pytest.approx(other[key], rel=1e-4), key
    assert rows_of(kept)[-1]["loss"] < rows_of(kept)[0]["loss"]


def test_a_prefix_that_is_too_large_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("patchbayes.runs.coordinate_descent._MOST_BYTES", 1000)
    run = train(config(tmp_path, alternate=2.0, sites="output"), tmp_path / "run", quiet=True)
    assert "prefix not kept: it would take" in (run.path / "log.txt").read_text()


def test_patches_alone_leave_the_trunk_as_it_was(tmp_path):
    chosen = config(tmp_path, alternate=0.0, learn="patches")
    start, _ = patched_net(chosen, 3, (4,))
    trained = train(chosen, tmp_path / "run", quiet=True).model("last")
    before = start.state_dict()
    for name, value in trained.named_parameters():
        assert torch.equal(value, before[name]) == ("patchbayes" not in name), name
