"""LoRA adapters of PEFT: patched, trained, merged, written for PEFT and read by it."""

import copy
import warnings

import pytest
import torch

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from third_party import TOKENS, bert, lora, train

peft = pytest.importorskip("peft")

INPUTS = {"input_ids": TOKENS}


def trained(method=None, sites="trainable", make=lora):
    model = make()
    pb.patch_(model, method or pb.EMP(3, jitter=0.5), sites)
    train(model)
    return model


def logits(model):
    with torch.no_grad():
        return model(**INPUTS).logits


def test_sites_by_word():
    model = lora()
    names = {
        n for n, m in model.named_modules() if any(p.requires_grad for p in m._parameters.values() if p is not None)
    }
    pb.patch_(model, pb.EMP(2), "trainable")
    assert pb.patched_sites(model).keys() == names
    other = lora()
    pb.patch_(other, pb.EMP(2), "lora")
    assert pb.patched_sites(other).keys() == {name for name in names if "lora_" in name}
    assert 0 < len(pb.patched_sites(other)) < len(names)


def test_the_jitter_of_b_is_relative_to_a():
    model = lora()
    pb.patch_(model, pb.EMP(40, jitter=0.3), "lora")
    sites = pb.patched_sites(model)
    for name, site in sites.items():
        if "lora_B" in name:
            a = sites[name.replace("lora_B", "lora_A")].components("weight")[0].detach()
            b = site.components("weight").detach()
            assert not b[0].any()  # a fresh adapter still changes nothing in its first component
            assert float(b[1:].std() / (0.3 * a.square().mean().sqrt())) == pytest.approx(1, abs=0.1)
    one, other = pb.Draws.sample(model, 2)[:1], pb.Draws.sample(model, 2)[1:]
    with pb.use_draw(model, one):
        first = logits(model)
    with pb.use_draw(model, other):
        assert not torch.equal(logits(model), first)


def test_frozen_patches_are_said_aloud():
    model = lora()
    with pytest.warns(UserWarning, match='every patched layer is frozen.*sites="trainable" or "lora"'):
        report = pb.patch_(model, pb.EMP(2), "norm")
    assert "every patched layer is frozen" in str(report)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pb.patch_(lora(), pb.EMP(2), "lora")
        pb.patch_(bert().requires_grad_(False), pb.EMP(2), "norm")  # nothing trains here: a note will do


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_peft_reads_the_files_and_gets_the_mean(tmp_path, kind):
    def make():
        if kind != "ia3":
            return lora(use_dora=kind == "dora")
        config = peft.IA3Config(target_modules=["query", "value"], feedforward_modules=[], task_type="SEQ_CLS")
        return peft.get_peft_model(bert(), config)

    model = trained(make=make)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(bert(), tmp_path).eval()
    torch.testing.assert_close(logits(again), logits(model))
    assert not torch.allclose(logits(again), logits(bert()), atol=1e-4)  # the adapter does something
    ours = pb.from_pretrained(peft.PeftModel, tmp_path, model=bert())
    draws = pb.Draws.sample(model, 4)
    torch.testing.assert_close(
        pb.predict(ours, INPUTS, draws, engine="loop").probs, pb.predict(model, INPUTS, draws, engine="loop").probs
    )
    with pytest.raises(PatchbayesError, match="an adapter needs the network it was trained on"):
        pb.from_pretrained(peft.PeftModel, tmp_path)


def test_loading_the_adapter_again_brings_back_the_components(tmp_path):
    model = trained()
    model.save_pretrained(tmp_path)
    before = copy.deepcopy(model.state_dict())
    train(model)
    model.load_adapter(str(tmp_path), "default")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items() if "generator" not in key)


def test_merging_takes_the_mean():
    model = trained()
    expected = logits(model)
    for merged in (copy.deepcopy(model).merge_and_unload(), pb.merge_(copy.deepcopy(model))):
        assert type(merged).__name__ == "BertForSequenceClassification"
        assert not pb.is_patched(merged)
        torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=1e-5)


def test_merging_takes_what_is_asked_for():
    model = trained()
    merged = pb.merge_(copy.deepcopy(model), keep=2)
    other = copy.deepcopy(model)
    pb.unpatch_(other, keep=2)
    torch.testing.assert_close(logits(merged), logits(other), atol=1e-5, rtol=1e-5)
    draw = pb.Draws.sample(model, 1)
    with pb.use_draw(model, draw):
        expected = logits(model)
    torch.testing.assert_close(logits(pb.merge_(copy.deepcopy(model), draw)), expected, atol=1e-5, rtol=1e-5)
    plain = bert()
    pb.patch_(plain, pb.EMP(2), "output")
    with pytest.raises(PatchbayesError, match="has no adapters to merge"):
        pb.merge_(plain)


def test_patches_outside_the_adapters_are_undone_with_them():
    model = lora()
    pb.patch_(model, {"lora": pb.EMP(2, jitter=0.5), "norm": pb.EMP(2, jitter=0.5)})
    train(model)
    expected = logits(model)
    merged = model.merge_and_unload()
    assert not any("patchbayes" in name for name in merged.state_dict())
    torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=1e-5)


def test_k_adapters_under_one_trunk_in_one_call():
    model = trained(pb.Ensemble(3, init="copies", jitter=0.5))
    alone = [torch.softmax(logits(pb.merge_(copy.deepcopy(model), keep=k)), -1) for k in range(3)]
    together = pb.predict(model, INPUTS, "exact", engine="graph")
    assert together.num_draws == 3
    assert together.plan.fallback is None  # captured: what the adapters share is computed once
    torch.testing.assert_close(together.probs, torch.stack(alone).mean(0), atol=1e-5, rtol=1e-5)


def test_a_copied_layer_is_refused():
    model = bert()
    pb.patch_(model, pb.EMP(3), "classifier")
    config = peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    wrapped = peft.get_peft_model(model, config)
    for training in (True, False):
        wrapped.train(training)
        with pytest.raises(PatchbayesError, match='A copy of the patched layer "classifier"'):
            wrapped(**INPUTS)
    with pytest.raises(PatchbayesError, match=r'as "base_model.model.classifier.modules_to_save.default"'):
        pb.predict(wrapped, INPUTS)


def test_a_copy_of_a_single_layer_by_itself_is_the_mean():
    model = bert()
    pb.patch_(model, pb.EMP(3, jitter=0.5), "classifier")
    alone, x = copy.deepcopy(model.classifier), torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(alone(x), torch.nn.functional.linear(x, model.classifier.weight, model.classifier.bias))


def test_a_trained_adapter_is_bayesianized():
    model = lora()
    train(model)
    expected = logits(model)
    tokens = torch.randint(1, 100, (60, 7), generator=torch.Generator().manual_seed(2))
    report = pb.bayesianize_(
        model, [{"input_ids": tokens, "labels": tokens[:, 0] % 5}], sites="lora", draws=3, budget=500
    )
    names = {site.name for site in report.patch.sites}
    assert all("lora_" in name for name in names)
    # Where draws gain nothing, no patches are left.
    assert pb.patched_sites(model).keys() == (set() if report.chosen == "none" else names)
    torch.testing.assert_close(logits(model), expected)
    assert report.after.nll <= report.temperature_scaled.nll + 1e-6
