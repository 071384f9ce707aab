"""Folders of save_pretrained: ordinary readers get the mean network, ours the patched one, and nothing in them is run."""

import json

import pytest
import safetensors.torch
import torch
from torch import nn

import patchbayes as pb
from patchbayes.errors import CheckpointMismatch, PatchbayesError
from third_party import TOKENS, bert, gpt2, seeded

INPUTS = {"input_ids": TOKENS}


def network(seed=0):
    layers = [nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4)]
    return seeded(seed, lambda: nn.Sequential(*layers, nn.LayerNorm(4), nn.Linear(4, 2))).eval()


def patched(make=network, method=None, sites="norm+output"):
    model = make()
    pb.patch_(model, method or pb.EMP(3, jitter=0.5), sites)
    return model


def same_draws(one, other, inputs):
    draws = pb.Draws.sample(one, 4)
    a, b = (pb.predict(model, inputs, draws, engine="loop").probs for model in (one, other))
    torch.testing.assert_close(a, b, rtol=0, atol=0)


X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


class TestAnyNetwork:
    def test_the_folder_gives_the_patched_network_again(self, tmp_path):
        model = patched()
        pb.save_pretrained(model, tmp_path)
        same_draws(model, pb.from_pretrained(network, tmp_path), X)
        other = network(seed=1)  # not the weights of this file: refused, unless the ordinary ones are read first
        with pytest.raises(CheckpointMismatch, match=r"is not the one that the patch was trained on"):
            pb.load_(other, tmp_path)
        assert pb.digests.verify(tmp_path / "model.safetensors") > 10

    def test_options_go_to_the_function_that_makes_the_network(self, tmp_path):
        model = patched(lambda: network(seed=3))
        pb.save_pretrained(model, tmp_path)
        same_draws(model, pb.from_pretrained(network, tmp_path, seed=7), X)
        with pytest.raises(PatchbayesError, match=r"no save_pretrained of its own that could take push_to_hub"):
            pb.save_pretrained(model, tmp_path, push_to_hub=True)

    def test_the_ordinary_weights_are_those_of_the_mean_network(self, tmp_path):
        model = patched(method=pb.ECMP(3, jitter=0.5))
        pb.save_pretrained(model, tmp_path)
        state = safetensors.torch.load_file(tmp_path / "model.safetensors")
        plain = network(seed=2)
        plain.load_state_dict({key: state[key] for key in plain.state_dict()})
        torch.testing.assert_close(plain(X), model(X))

    def test_a_state_dict_with_patched_keys_is_read(self, tmp_path):
        model = patched()
        path = tmp_path / "state.safetensors"
        safetensors.torch.save_file(model.state_dict(), path)
        again = patched(lambda: network(seed=1))
        pb.load_(again, path)
        same_draws(model, again, X)
        with pytest.raises(CheckpointMismatch, match=r"does not say how it was patched"):
            pb.load_(network(), path)
        pb.save_pretrained(model, tmp_path)  # patch_config.json beside it says how
        fresh = network(seed=1)
        pb.load_(fresh, path)
        same_draws(model, fresh, X)

    def test_a_state_dict_of_another_patch_is_refused_and_changes_nothing(self, tmp_path):
        path = tmp_path / "state.safetensors"
        safetensors.torch.save_file(patched(sites="output").state_dict(), path)
        again = patched()
        before = {key: value.clone() for key, value in again.state_dict().items()}
        with pytest.raises(CheckpointMismatch, match=r"missing in the file: 1.patchbayes.components.weight"):
            pb.load_(again, path)
        assert all(torch.equal(value, before[key]) for key, value in again.state_dict().items())

    def test_the_card_tells_what_was_measured(self, tmp_path):
        model = patched()
        pb.save_pretrained(model, tmp_path)
        assert "Not measured" in (tmp_path / "README.md").read_text()
        held_out = [(torch.randn(40, 3, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 2)]
        report = pb.calibrate_(model, held_out, draws=4, budget=500)
        pb.save_pretrained(model, tmp_path)
        card = (tmp_path / "README.md").read_text()
        assert "Not measured" not in card
        assert f"| this one | {report.after.nll:.4f} |" in card
        assert card.count("# Sequential with") == 1
        assert json.loads((tmp_path / "patch_config.json").read_text())["calibration"]["held_out"] == 40
        again = pb.from_pretrained(network, tmp_path)
        pb.save_pretrained(again, tmp_path / "copy")  # what was measured goes with the network
        assert (tmp_path / "copy" / "README.md").read_text() == card

    def test_a_card_of_somebody_else_stays(self, tmp_path):
        (tmp_path / "README.md").write_text("# Mine\n")
        pb.save_pretrained(patched(), tmp_path)
        pb.save_pretrained(patched(), tmp_path)
        text = (tmp_path / "README.md").read_text()
        assert text.startswith("# Mine\n")
        assert text.count("patchbayes: begin") == 1

    def test_a_folder_without_a_patch_is_refused(self, tmp_path):
        with pytest.raises(CheckpointMismatch, match=r"holds no patch.safetensors"):
            pb.from_pretrained(network, tmp_path)
        pb.save_pretrained(patched(), tmp_path)
        with pytest.raises(PatchbayesError, match=r"nothing in a folder is run"):
            pb.from_pretrained(network, tmp_path, trust_remote_code=True)
        with pytest.raises(PatchbayesError, match=r"expected a network"):
            pb.from_pretrained(dict, tmp_path)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_the_hash_does_not_depend_on_the_dtype(self, tmp_path, dtype):
        make = lambda seed=0: seeded(seed, lambda: nn.Sequential(nn.Linear(50, 90), nn.LayerNorm(90), nn.Linear(90, 2)))  # noqa: E731
        model = patched(make)
        pb.save(model, tmp_path / "patch.safetensors")
        base = make().to(dtype)
        pb.load_(base, tmp_path / "patch.safetensors")
        components = pb.patched_sites(base)["2"].components("weight")
        assert components.dtype == dtype
        torch.testing.assert_close(
            components.float(), pb.patched_sites(model)["2"].components("weight"), atol=1e-2, rtol=1e-2
        )
        with pytest.raises(CheckpointMismatch, match=r"shared tensor 0.weight is not the one"):
            pb.load_(make(seed=1).to(dtype), tmp_path / "patch.safetensors")
        near = make().to(dtype)
        with torch.no_grad():
            near[0].weight.mul_(1.05)
        with pytest.raises(CheckpointMismatch, match=r"shared tensor 0.weight is not the one"):
            pb.load_(near, tmp_path / "patch.safetensors")


class TestTransformers:
    def test_an_ordinary_reader_gets_the_mean_network(self, tmp_path):
        model = patched(bert)
        model.save_pretrained(tmp_path)
        ordinary = type(bert()).from_pretrained(tmp_path).eval()
        torch.testing.assert_close(ordinary(TOKENS).logits, model(TOKENS).logits)
        assert not pb.is_patched(ordinary)

    def test_ours_gives_the_patched_network(self, tmp_path):
        transformers = pytest.importorskip("transformers")
        model = patched(bert)
        model.save_pretrained(tmp_path)
        same_draws(model, pb.from_pretrained(transformers.AutoModelForSequenceClassification, tmp_path), INPUTS)
        fresh = bert()
        pb.load_(fresh, tmp_path / "model.safetensors")
        same_draws(model, fresh, INPUTS)
        narrow = pb.from_pretrained(type(bert()), tmp_path, dtype=torch.bfloat16)
        assert narrow.dtype == torch.bfloat16

    def test_tied_weights_are_written_once_and_stay_tied(self, tmp_path):
        model = patched(gpt2)
        model.save_pretrained(tmp_path)
        keys = safetensors.torch.load_file(tmp_path / "model.safetensors").keys()
        assert "transformer.wte.weight" in keys
        assert "lm_head.weight" not in keys
        ordinary = type(gpt2()).from_pretrained(tmp_path).eval()
        assert ordinary.lm_head.weight is ordinary.transformer.wte.weight
        torch.testing.assert_close(ordinary(TOKENS).logits, model(TOKENS).logits)
        same_draws(model, pb.from_pretrained(type(gpt2()), tmp_path), INPUTS)

    def test_code_in_a_folder_is_not_run(self, tmp_path):
        transformers = pytest.importorskip("transformers")
        patched(bert).save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        config["auto_map"] = {"AutoModelForSequenceClassification": "evil.Evil", "AutoConfig": "evil.EvilConfig"}
        (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "evil"}))
        (tmp_path / "evil.py").write_text("raise SystemExit('the code of the folder was run')\n")
        with pytest.raises(ValueError, match=r"trust_remote_code|custom code"):
            pb.from_pretrained(transformers.AutoModelForSequenceClassification, tmp_path)
