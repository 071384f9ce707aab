"""Networks of transformers and timm, built from their configuration (nothing is downloaded), where those are installed."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from torchvision_names import torchvision_operators
from zoo import assert_same, snapshot

pytestmark = pytest.mark.slow
_OPERATORS = torchvision_operators()


TOKENS = torch.randint(1, 50, (4, 7), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def bert(transformers: Any) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    return transformers.BertForSequenceClassification(config)


def gpt2(transformers: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def llama(transformers: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def t5(transformers: Any) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_decoder_layers=1, num_heads=2
    )
    return transformers.T5ForConditionalGeneration(config)


def vit(transformers: Any) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        patch_size=8,
        num_labels=3,
    )
    return transformers.ViTForImageClassification(config)


# network: (builder, keyword inputs, class name of its norms, name of its output layer)
TRANSFORMERS = {
    "bert": (bert, {"input_ids": TOKENS}, "LayerNorm", "classifier"),
    "gpt2": (gpt2, {"input_ids": TOKENS}, "LayerNorm", "lm_head"),
    "llama": (llama, {"input_ids": TOKENS}, "LlamaRMSNorm", "lm_head"),
    "t5": (t5, {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :3]}, "T5LayerNorm", "lm_head"),
    "vit": (vit, {"pixel_values": IMAGES}, "LayerNorm", "classifier"),
}
TIMM = {
    "resnet18": ({}, "BatchNorm2d", "fc"),
    "convnext_atto": ({}, "LayerNorm2d", "head.fc"),
    "vit_tiny_patch16_224": ({"img_size": 32, "depth": 2}, "LayerNorm", "head"),
    "mobilenetv3_small_050": ({}, "BatchNormAct2d", "classifier"),
    "mobilevit_xxs": ({}, "LayerNorm", "head.fc"),
}
SHIFTED = ("swin_tiny_patch4_window7_224", {"img_size": 32, "window_size": 4, "depths": (1, 1, 1, 1), "embed_dim": 24})
METHODS = {"EMP": pb.EMP(3), "ECMP": pb.ECMP(3), "Dropout": pb.Dropout(0.1), "MeanField": pb.posteriors.MeanField()}


def build_transformer(name: str, seed: int = 0) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return TRANSFORMERS[name][0](transformers)


def build_timm(name: str, seed: int = 0) -> nn.Module:
    timm = pytest.importorskip("timm")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        options = dict([SHIFTED]).get(name) or TIMM[name][0]
        return timm.create_model(name, pretrained=False, num_classes=3, **options)


def logits(model: nn.Module, inputs: Any) -> Tensor:
    return model(**inputs).logits if isinstance(inputs, dict) else model(inputs)


def live(model: nn.Module, inputs: Any, method: Any, norm: str, output: str, tmp_path: Any) -> None:
    """Patch, train, predict, save, load, unpatch."""
    untouched = snapshot(model)
    report = pb.patch_(model, method, example_input=inputs)
    kinds = {site.name: site.module for site in report.sites}
    assert norm in kinds.values()
    assert output in kinds
    assert f'output is "{output}" (last in order of execution)' in report.notes
    clone = copy.deepcopy(model)
    pb.unpatch_(clone)
    assert_same(untouched, clone)

    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(2):
        optimizer.zero_grad()
        (logits(model.train(), inputs).square().mean() + pb.kl(model) / 1e6).backward()
        optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())

    draws = pb.Draws.sample(model, 3)
    prediction = pb.predict(model, inputs, draws)
    assert prediction.mutual_information.max() > 0
    pb.save(model, tmp_path / "patch")
    shared = copy.deepcopy(model)
    pb.unpatch_(shared)
    pb.load_(shared, tmp_path / "patch")
    assert torch.equal(pb.predict(shared, inputs, draws).probs, prediction.probs)
    pb.unpatch_(model, keep="mean")
    assert list(model.state_dict()) == [key for key, _ in untouched["state"]]
    assert logits(model.eval(), inputs).shape == prediction.probs.shape


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_networks_live_through_everything(name, method, tmp_path):
    _, inputs, norm, output = TRANSFORMERS[name]
    live(build_transformer(name), inputs, METHODS[method], norm, output, tmp_path)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", TIMM)
def test_timm_networks_live_through_everything(name, method, tmp_path):
    _, norm, output = TIMM[name]
    live(build_timm(name), IMAGES, METHODS[method], norm, output, tmp_path)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_contract_holds_for_transformers(name):
    contract = pb.check_patchable(build_transformer(name), TRANSFORMERS[name][1])
    assert contract, str(contract)


@pytest.mark.parametrize("name", TIMM)
def test_the_contract_holds_for_timm(name):
    contract = pb.check_patchable(build_timm(name), IMAGES)
    assert contract, str(contract)


ENGINE_METHODS = {
    "EMP": pb.EMP(3, jitter=0.5),
    "ECMP": pb.ECMP(3, jitter=0.5),
    "Dropout": pb.Dropout(0.1),
    "DropConnect": pb.posteriors.DropConnect(0.2),
    "Ensemble": pb.Ensemble(2, init="copies", jitter=0.5),
    "MeanField": pb.posteriors.MeanField(0.1),
}


@pytest.mark.parametrize("method", ENGINE_METHODS)
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "resnet18", "convnext_atto", SHIFTED[0]])
def test_engine_and_loop_agree(name, method):
    inputs = TRANSFORMERS[name][1] if name in TRANSFORMERS else IMAGES
    model = (build_transformer if name in TRANSFORMERS else build_timm)(name).eval()
    sites = "all" if method == "Ensemble" else "norm+output"
    pb.patch_(model, ENGINE_METHODS[method], sites, example_input=inputs)
    draws = pb.Draws.sample(model, 4)
    for some in (inputs, torch.utils._pytree.tree_map(lambda t: t[:1], inputs)):
        mine = pb.predict(model, some, draws, engine="graph")
        loop = pb.predict(model, some, draws, engine="loop")
        assert (mine.plan.engine, mine.plan.fallback) == ("graph", None)
        torch.testing.assert_close(mine.probs, loop.probs, rtol=1e-4, atol=1e-6)


def test_a_bfloat16_bert_gives_the_loops_numbers():
    """Of MiniLM's size: one such ended a process with an illegal instruction once (docs/prediction.md)."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=100,
        hidden_size=384,
        num_hidden_layers=2,
        num_attention_heads=12,
        intermediate_size=1536,
        num_labels=3,
    )
    model = transformers.BertForSequenceClassification(config).eval().to(torch.bfloat16)
    pb.patch_(model, pb.ECMP(5), "norm+output")
    inputs = {"input_ids": torch.arange(64).reshape(4, 16), "attention_mask": torch.ones(4, 16, dtype=torch.int64)}
    mine, loop = (pb.predict(model, inputs, 6, engine=engine) for engine in ("graph", "loop"))
    assert (mine.plan.engine, loop.plan.engine) == ("graph", "loop")
    torch.testing.assert_close(mine.probs, loop.probs, rtol=0, atol=0.02)


@pytest.mark.parametrize("name", ["bert", "llama", "vit"])
def test_all_layers_of_a_transformer_can_be_patched(name):
    contract = pb.check_patchable(build_transformer(name), TRANSFORMERS[name][1], pb.EMP(2), "all")
    assert contract, str(contract)


def test_gpt2_has_its_tied_head_patched_together_with_the_embedding():
    model = build_transformer("gpt2")
    report = pb.patch_(model, pb.ECMP(3), "output", example_input={"input_ids": TOKENS})
    assert any('"lm_head" shares a parameter with "transformer.wte.weight"' in note for note in report.notes)
    model(input_ids=TOKENS)
    assert torch.equal(model.lm_head.weight, model.transformer.wte.weight)
    assert model.transformer.wte.weight.shape == (50, 16)
    pb.unpatch_(model)
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generation_under_drawn_is_that_of_one_network(name):
    model = build_transformer(name).eval()
    pb.patch_(model, pb.ECMP(3, jitter=2.0))
    texts = set()
    for draw in pb.Draws.sample(model, 4):
        with pb.use_draw(model, draw):
            text = model.generate(TOKENS, max_new_tokens=6, do_sample=False, pad_token_id=0)
        member = copy.deepcopy(model)
        pb.unpatch_(member, keep=draw)
        assert torch.equal(member.generate(TOKENS, max_new_tokens=6, do_sample=False, pad_token_id=0), text)
        texts.add(tuple(text.flatten().tolist()))
    assert len(texts) > 1


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_gradient_checkpointing_gives_the_gradients_of_the_drawn_components(name, reentrant):
    model = build_transformer(name).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    pb.patch_(model, pb.EMP(4, jitter=1.0), "norm")
    inputs = TRANSFORMERS[name][1]
    plain = copy.deepcopy(model)
    for _ in range(3):
        logits(plain.train(), inputs).square().sum().backward()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    outputs = [logits(model.train(), inputs) for _ in range(3)]
    sum(output.square().sum() for output in outputs).backward()
    for (key, one), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), key
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-8, atol=1e-10, msg=key)


def test_a_transformers_state_dict_loads_into_the_patched_network():
    source, model = build_transformer("gpt2", seed=1).eval(), build_transformer("gpt2").eval()
    pb.patch_(model, pb.ECMP(3, jitter=0))
    model.load_state_dict(source.state_dict())
    with torch.no_grad(), pb.use_draw(model, pb.Draws.sample(model, 1)):
        assert torch.equal(logits(model, {"input_ids": TOKENS}), logits(source, {"input_ids": TOKENS}))


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto", "vit_tiny_patch16_224"])
def test_forward_features_of_timm_needs_a_draw_in_training(name):
    model = build_timm(name)
    pb.patch_(model, pb.EMP(3))
    with pytest.raises(PatchbayesError, match=r"drawn\(model\)"):
        model.forward_features(IMAGES)
    model.eval()
    with torch.no_grad(), pb.use_draw(model, pb.Draws.sample(model, 1)):
        assert torch.equal(model.forward_head(model.forward_features(IMAGES)), model(IMAGES))


@pytest.mark.parametrize("name", ["mobilenetv3_small_050", "convnext_atto"])
def test_a_draw_for_each_example_is_refused_where_timm_does_more_than_the_norm(name):
    """BatchNormAct2d applies the activation too; LayerNorm2d has its channels first."""
    model = build_timm(name)
    before = snapshot(model)
    with pytest.raises(PatchbayesError, match="per_example"):
        pb.patch_(model, pb.EMP(2, per_example=True), "norm")
    assert_same(before, model)
