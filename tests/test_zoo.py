"""Patch, train a step, predict, save, load, unpatch: on networks of many kinds, with every method."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import patchbayes as pb
from patchbayes.nets import resnet18
from zoo import ZOO, Transformer, UNet, assert_same, snapshot

METHODS = {
    "EMP": pb.EMP(3),
    "ECMP": pb.ECMP(3),
    "EMP with statistics": pb.EMP(2, statistics="per_component"),
    "Dropout": pb.Dropout(0.2),
    "DropConnect": pb.posteriors.DropConnect(0.2),
    "units": pb.posteriors.Mixture(components=2, tie="unit", zero=True),
    "Ensemble": pb.Ensemble(2),
    "MeanField": pb.posteriors.MeanField(),
    "sigma": pb.EMP(2, sigma=0.05),
}


def sites_for(name: str, method: str) -> str:
    """Dropout needs activations: not before an embedding."""
    entry = ZOO[name]
    if method == "Dropout" and entry.sites == "all":
        return "norm+output"
    return "all" if method == "Ensemble" else entry.sites


@pytest.fixture(autouse=True)
def unfused_encoders():
    """The fused kernel of `nn.TransformerEncoderLayer`, which no patched encoder uses, rounds otherwise than its layers."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ZOO)
def test_patch_train_predict_save_load_unpatch(name, method, tmp_path):
    entry = ZOO[name]
    inputs = entry.inputs()
    model = entry.build()
    keys = list(model.state_dict())
    report = pb.patch_(model, METHODS[method], sites_for(name, method), example_input=inputs)
    assert report.parameters_after == sum(p.numel() for p in model.parameters())

    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    logits = entry.logits(model.train(), inputs)
    targets = torch.arange(logits[..., 0].numel()) % logits.shape[-1]
    loss = F.cross_entropy(logits.flatten(0, -2), targets) + pb.kl(model) / 1000
    loss.backward()
    optimizer.step()
    for key, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), key
        assert torch.equal(parameter, before[key]) is not parameter.requires_grad, key

    draws = pb.Draws.sample(model, 4, torch.Generator().manual_seed(1))
    prediction = entry.predict(model, inputs, draws)
    assert prediction.probs.shape == logits.shape
    torch.testing.assert_close(prediction.probs.sum(-1), torch.ones_like(prediction.probs[..., 0]))
    assert prediction.mutual_information.max() > 1e-9
    assert model.training

    path = tmp_path / "patch.safetensors"
    pb.save(model, path)
    shared = copy.deepcopy(model)
    pb.unpatch_(shared)
    assert list(shared.state_dict()) == keys
    pb.load_(shared, path)
    assert torch.equal(entry.predict(shared, inputs, draws).probs, prediction.probs)
    assert list(shared.state_dict()) == list(model.state_dict())
    for key, value in model.state_dict().items():
        if ("running" not in key and "num_batches" not in key) or "patchbayes." in key:
            assert torch.equal(shared.state_dict()[key], value), key

    pb.save(model, path, whole=True)
    fresh = entry.build(seed=1)
    pb.load_(fresh, path)
    assert torch.equal(entry.predict(fresh, inputs, draws).probs, prediction.probs)

    pb.unpatch_(model, keep="mean")
    assert not pb.is_patched(model)
    assert list(model.state_dict()) == keys
    assert [type(module) for module in model.modules()] == [type(module) for module in entry.build().modules()]
    with torch.no_grad():
        assert torch.equal(entry.logits(model.eval(), inputs), entry.logits(model, inputs))


@pytest.mark.parametrize("method", ["EMP", "ECMP", "Dropout", "MeanField", "Ensemble"])
@pytest.mark.parametrize("name", ZOO)
def test_the_contract_holds(name, method):
    entry = ZOO[name]
    model = entry.build()
    before = snapshot(model)
    contract = pb.check_patchable(model, entry.inputs(), METHODS[method], sites_for(name, method))
    assert contract, str(contract)
    assert len(contract.checks) == 12
    assert str(contract).startswith(f"{type(model).__name__}: 12 of 12 promises hold")
    assert_same(before, model)


@pytest.mark.parametrize("name", ZOO)
def test_one_component_is_bitwise_the_network(name):
    entry = ZOO[name]
    plain = entry.build()
    model = copy.deepcopy(plain)
    pb.patch_(model, pb.ECMP(1), "all")
    inputs = entry.inputs()
    one, other = entry.logits(model, inputs), entry.logits(plain, inputs)
    assert torch.equal(one, other)
    one.square().sum().backward(), other.square().sum().backward()
    ours = {name.replace("patchbayes.components.", ""): p for name, p in model.named_parameters()}
    assert len([key for key in ours if key in dict(plain.named_parameters())]) == len(list(plain.parameters()))
    for key, parameter in plain.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(ours[key].grad.reshape(parameter.shape), parameter.grad), key
    with torch.no_grad(), pb.use_draw(model, pb.Draws.sample(model, 1)):
        assert torch.equal(entry.logits(model.eval(), inputs), entry.logits(plain.eval(), inputs))


@pytest.mark.parametrize("name", ZOO)
def test_equal_components_make_the_draw_irrelevant(name):
    entry = ZOO[name]
    plain = entry.build()
    model = copy.deepcopy(plain)
    pb.patch_(model, pb.ECMP(3, jitter=0), entry.sites)
    inputs = entry.inputs()
    draws = pb.Draws.sample(model, 3)
    with torch.no_grad():
        expected = entry.logits(plain.eval(), inputs)
        for draw in draws:
            with pb.use_draw(model.eval(), draw):
                assert torch.equal(entry.logits(model, inputs), expected)


@pytest.mark.parametrize("name", ZOO)
def test_a_deepcopy_and_a_state_dict_carry_the_whole_network(name):
    entry = ZOO[name]
    model = entry.build()
    pb.patch_(model, pb.EMP(3), entry.sites)
    entry.logits(model, entry.inputs())
    other = entry.build(seed=1)
    pb.patch_(other, pb.EMP(3), entry.sites, generator=torch.Generator().manual_seed(9))
    other.load_state_dict(model.state_dict())
    clone = copy.deepcopy(model)
    for _ in range(3):
        outputs = [entry.logits(network, entry.inputs()) for network in (model, clone, other)]
        assert torch.equal(outputs[0], outputs[1])
        assert torch.equal(outputs[0], outputs[2])


# ---- dtypes and layouts

FLOATING = [n for n in ZOO if isinstance(ZOO[n].inputs(), torch.Tensor)]


def cast(inputs, dtype):
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


@pytest.fixture
def no_onednn():
    """Some machines claim AMX and stop with an illegal instruction in oneDNN's bfloat16 kernels, patched or not."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("first", ["convert", "patch"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("name", FLOATING)
def test_other_floating_point_types(name, dtype, first, no_onednn):
    entry = ZOO[name]
    plain = entry.build().to(dtype)
    model = entry.build()
    if first == "convert":
        model.to(dtype)
    pb.patch_(model, pb.ECMP(3, jitter=0.1 if first == "convert" else 0.0), entry.sites)
    model.to(dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    inputs = cast(entry.inputs(), dtype)
    output = entry.logits(model, inputs)
    assert output.dtype == dtype
    output.float().square().mean().backward()
    copy.deepcopy(model)
    assert torch.isfinite(entry.predict(model, inputs, 3).probs).all()
    assert entry.predict(model, inputs, 3).probs.dtype == torch.promote_types(dtype, torch.float32)
    pb.unpatch_(model)
    for (key, one), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(one, other), key
    assert torch.isfinite(entry.logits(model, inputs)).all()


@pytest.mark.parametrize("method", [pb.EMP(3), pb.ECMP(3)], ids=["EMP", "ECMP"])
@pytest.mark.parametrize("network", [UNet, lambda: resnet18(3, stem="cifar", width=4)], ids=["unet", "resnet18"])
def test_channels_last_inputs_and_weights(network, method, generator):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = network()
    channels = plain.down[0].in_channels if isinstance(plain, UNet) else 3
    x = torch.randn(4, channels, 8, 8, generator=generator)
    model = copy.deepcopy(plain)
    pb.patch_(plain, method, "norm+conv+output")
    model.to(memory_format=torch.channels_last)
    pb.patch_(model, method, "norm+conv+output")
    draws = pb.Draws.sample(model, 3)
    output = pb.forward_draws(model, x.contiguous(memory_format=torch.channels_last), draws)
    torch.testing.assert_close(output, pb.forward_draws(plain, x, draws), rtol=1e-4, atol=1e-4)
    output.square().sum().backward()
    pb.unpatch_(model)
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in model.parameters() if p.dim() == 4)


def test_channels_last_after_patching_norms_and_output(generator):
    model = UNet()
    pb.patch_(model, pb.EMP(3), "norm")
    draws = pb.Draws.sample(model, 2)
    x = torch.randn(4, 2, 8, 8, generator=generator)
    before = pb.forward_draws(model, x, draws)
    model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(pb.forward_draws(model, x, draws), before, rtol=1e-4, atol=1e-4)


@pytest.mark.xfail(
    strict=True, reason="torch takes stored (K, O, I, H, W) weights for a Conv3d's; convert first, then patch"
)
def test_channels_last_after_patching_convolutions(generator):
    model = UNet()
    pb.patch_(model, pb.EMP(3), "conv")
    model.to(memory_format=torch.channels_last)
    assert model(torch.randn(4, 2, 8, 8, generator=generator)).shape == (4, 3, 8, 8)


# ---- particular networks


@pytest.mark.parametrize("method", ["EMP", "ECMP", "Dropout"])
def test_a_transformer_draws_alike_in_train_and_eval_mode(method):
    """The encoder has a fast path in eval mode that reads the weights of its layers directly."""
    model = Transformer()
    pb.patch_(model, METHODS[method], "norm+linear")
    tokens = ZOO["transformer"].inputs()
    for draw in pb.Draws.sample(model, 3):
        with torch.no_grad(), pb.use_draw(model, draw):
            torch.testing.assert_close(model.train()(tokens), model.eval()(tokens), rtol=1e-5, atol=1e-5)


def test_attention_that_reads_its_projections_directly_gets_the_drawn_ones(generator):
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    plain = copy.deepcopy(model)
    pb.patch_(model, pb.ECMP(3), "all")
    assert list(pb.patched_sites(model)) == ["", "out_proj"]
    x = torch.randn(2, 3, 8, generator=generator)
    draws = pb.Draws.sample(model, 1)
    with pb.use_draw(model, draws):
        output, _ = model(x, x, x)
    pb.unpatch_(model, draws)
    assert torch.equal(model(x, x, x)[0], output)
    assert not torch.equal(plain(x, x, x)[0], output)


def test_a_dict_output_needs_to_be_told_which_tensor_is_meant():
    entry = ZOO["dict output"]
    model = entry.build()
    pb.patch_(model, pb.EMP(3))
    with pytest.raises(pb.errors.PatchbayesError, match=r"returns a dict(.|\n)*output="):
        pb.predict(model, entry.inputs(), 3)


def test_check_patchable_says_what_fails():
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x):
            return self.fc(x + torch.randn_like(x))

    contract = pb.check_patchable(Noisy(), torch.zeros(4, 3))
    assert not contract
    assert str(contract).splitlines()[:2] == [
        "Noisy: 0 of 1 promises hold",
        "  FAIL  the network runs on the example, and twice alike in eval mode  (1 output tensors)",
    ]

    class ReadsItsWeightOnce(nn.Module):
        """Keeps the weight it saw first, so that later draws do not reach it."""

        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)
            self.seen = None

        def forward(self, x):
            self.seen = self.fc.weight.detach().clone() if self.seen is None else self.seen
            return x @ self.seen.T + 0 * self.fc(x)

    failed = [
        check.promise for check in pb.check_patchable(ReadsItsWeightOnce(), torch.ones(4, 3)).checks if not check.holds
    ]
    assert "different draws give different outputs" in failed

    contract = pb.check_patchable(nn.Sequential(nn.ReLU()), torch.zeros(4, 3))
    assert [check.holds for check in contract.checks] == [True, False]
    assert "NothingToPatch" in str(contract)


def test_the_contract_compares_encoders_without_their_fused_kernel(monkeypatch):
    fused = []
    kernel = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *a, **k: fused.append(1) or kernel(*a, **k))
    entry = ZOO["transformer"]
    torch.backends.mha.set_fastpath_enabled(True)
    with torch.no_grad():
        entry.build().eval()(entry.inputs())
    assert fused, "this test needs an encoder that takes the fused kernel when it is not patched"
    fused.clear()
    assert pb.check_patchable(entry.build(), entry.inputs(), pb.ECMP(), entry.sites)
    assert not fused
    assert torch.backends.mha.get_fastpath_enabled()
