"""Networks that accelerate loads, dispatches and offloads; networks of timm; layouts that a user chose."""

import pytest
import torch
from torch import nn

import patchbayes as pb
from third_party import TOKENS, bert
from torchvision_names import torchvision_operators

_OPERATORS = torchvision_operators()
INPUTS = {"input_ids": TOKENS}


def patched():
    model = bert()
    pb.patch_(model, pb.EMP(3, jitter=0.5))
    return model


def outputs(model, draws):
    return pb.predict(model, INPUTS, draws, engine="loop").probs


class TestAccelerate:
    @pytest.mark.parametrize("hooks", [False, True])
    def test_a_dispatched_checkpoint_takes_the_patch(self, tmp_path, hooks):
        accelerate = pytest.importorskip("accelerate")
        model = patched()
        model.save_pretrained(tmp_path)
        draws = pb.Draws.sample(model, 4)
        with accelerate.init_empty_weights():
            empty = type(bert())(model.config)
        loaded = accelerate.load_checkpoint_and_dispatch(
            empty, tmp_path, device_map={"": "cpu"}, force_hooks=hooks
        ).eval()
        torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits)  # the mean network
        pb.load_(loaded, tmp_path)
        torch.testing.assert_close(outputs(loaded, draws), outputs(model, draws))
        loaded.train()
        for module in loaded.modules():
            module.eval() if isinstance(module, nn.Dropout) else None
        drawn = {float(loaded(TOKENS).logits.detach().sum()) for _ in range(6)}
        assert len(drawn) > 1  # a hook that was there before does not pass the draw by
        pb.unpatch_(loaded.eval(), keep="mean")
        torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits)

    def test_an_offloaded_network_gives_the_same_numbers(self):
        accelerate = pytest.importorskip("accelerate")
        model = patched()
        draws = pb.Draws.sample(model, 4)
        expected, mean = outputs(model, draws), model(TOKENS).logits
        offloaded = accelerate.cpu_offload(model, execution_device="cpu")
        assert all(parameter.is_meta for parameter in offloaded.parameters())
        torch.testing.assert_close(offloaded(TOKENS).logits, mean)
        torch.testing.assert_close(outputs(offloaded, draws), expected)
        prediction = pb.predict(offloaded, INPUTS, draws)
        torch.testing.assert_close(prediction.probs, expected)
        assert "gets its weights from accelerate" in prediction.plan.fallback
        assert all(parameter.is_meta for parameter in offloaded.parameters())

    def test_a_patch_goes_on_a_base_in_another_precision(self, tmp_path):
        model = patched()
        pb.save(model, tmp_path / "patch.safetensors")
        base = bert().to(torch.bfloat16)
        pb.load_(base, tmp_path / "patch.safetensors")
        draws = pb.Draws.sample(model, 4)
        torch.testing.assert_close(outputs(base, draws).float(), outputs(model, draws), atol=0.02, rtol=0.05)


class TestLayouts:
    @pytest.mark.parametrize("method", [pb.EMP(3, jitter=0.1), pb.ECMP(3, jitter=0.1), pb.posteriors.Spread()])
    def test_a_patched_convolution_keeps_channels_last(self, method):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)).to(memory_format=torch.channels_last)
        pb.patch_(model, method, "conv")
        seen = []
        for layer in model:
            layer.register_forward_hook(lambda *call: seen.append(call[2]))
        x = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(0))  # in the ordinary layout
        model(x).sum().backward()
        model.eval()(x)
        assert len(seen) == 4
        assert all(y.is_contiguous(memory_format=torch.channels_last) and not y.is_contiguous() for y in seen)

    def test_layers_in_the_ordinary_layout_stay_so(self):
        model = nn.Sequential(nn.Conv2d(3, 8, 3))
        pb.patch_(model, pb.EMP(3), "conv")
        assert model(torch.zeros(2, 3, 9, 9)).is_contiguous()


@pytest.mark.slow
class TestTimm:
    def test_a_new_classifier_can_be_saved(self, tmp_path):
        timm = pytest.importorskip("timm")
        model = timm.create_model("resnet10t", num_classes=10)
        pb.patch_(model, pb.EMP(3))
        model.reset_classifier(7)
        with pytest.warns(UserWarning, match="no longer in the network"):
            pb.save(model, tmp_path / "patch.safetensors", whole=True)
        again = timm.create_model("resnet10t", num_classes=7)
        pb.load_(again, tmp_path / "patch.safetensors")
        assert "fc" not in pb.patched_sites(again)
        x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(again.eval()(x), model.eval()(x))

    def test_a_folder_for_a_network_of_timm(self, tmp_path):
        timm = pytest.importorskip("timm")
        model = timm.create_model("resnet10t", num_classes=3).to(memory_format=torch.channels_last).eval()
        pb.patch_(model, pb.ECMP(3, jitter=0.2))
        pb.save_pretrained(model, tmp_path)
        again = pb.from_pretrained(timm.create_model, tmp_path, model_name="resnet10t", num_classes=3)
        x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
        draws = pb.Draws.sample(model, 3)
        a, b = (pb.predict(m, x, draws, engine="loop").probs for m in (model, again))
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
