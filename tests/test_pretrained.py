"""A network that someone else trained: patching keeps it, changes it only as asked, and gives it back."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import patchbayes as pb
from patchbayes.nets import cifar_resnet20

METHODS = {"EMP": pb.EMP, "ECMP": pb.ECMP}


@pytest.fixture(scope="module")
def path(data_dir):
    return data_dir / "pretrained" / "cifar100_resnet20.safetensors"


@pytest.fixture(scope="module")
def file_tensors(path):
    return load_file(path)


@pytest.fixture(scope="module")
def images(data_dir):
    records = np.fromfile(data_dir / "cifar-100-binary" / "test.bin", np.uint8, count=64 * 3074).reshape(64, 3074)
    x = torch.from_numpy(records[:, 2:].reshape(64, 3, 32, 32).astype(np.float32)) / 255
    mean, std = torch.tensor([0.5070, 0.4865, 0.4409]), torch.tensor([0.2673, 0.2564, 0.2761])
    return (x - mean.view(3, 1, 1)) / std.view(3, 1, 1), torch.from_numpy(records[:, 1].astype(np.int64))


def pretrained(file_tensors):
    model = cifar_resnet20().eval()
    model.load_state_dict(file_tensors)
    return model


@pytest.fixture(scope="module")
def logits(file_tensors, images):
    """Of the network as its makers left it."""
    torch.set_num_threads(1)
    with torch.random.fork_rng(), torch.no_grad():
        return pretrained(file_tensors)(images[0])


@torch.no_grad()
def drawn_logits(model, x, number=3):
    draws = pb.Draws.sample(model, number)
    outputs = []
    for draw in draws:
        with pb.use_draw(model.eval(), draw):
            outputs.append(model(x))
    return torch.stack(outputs)


def assert_is_the_file(model, file_tensors):
    state = model.state_dict()
    assert list(state) == list(cifar_resnet20().state_dict())
    assert state.keys() == file_tensors.keys()
    for name, value in file_tensors.items():
        assert torch.equal(state[name], value), name


def test_the_images_and_weights_are_the_right_ones(images, logits):
    assert 38 <= int((logits.argmax(1) == images[1]).sum()) <= 52  # 69 % of 64, give or take


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_without_jitter_the_logits_stay_bit_for_bit(method, file_tensors, images, logits):
    model = pretrained(file_tensors)
    report = pb.patch_(model, method(5, jitter=0), sites="norm+output")
    assert len(report.sites) == 22  # 21 batch norms (stem, 18 in the blocks, 2 shortcuts) and the output layer
    assert torch.equal(drawn_logits(model, images[0]), logits.expand(3, -1, -1))
    model.eval()
    prediction = pb.predict(model, images[0], draws=3)
    torch.testing.assert_close(prediction.probs, torch.softmax(logits, -1), rtol=1e-5, atol=1e-7)
    assert prediction.standard_error.max() < 1e-5  # rounding: draws are computed together


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_the_default_jitter_changes_the_logits_and_makes_the_draws_differ(method, file_tensors, images, logits):
    model = pretrained(file_tensors)
    pb.patch_(model, method(5), sites="norm+output")
    outputs = drawn_logits(model, images[0][:16])
    changes = (outputs - logits[:16]).abs().amax(dim=(1, 2))
    assert (changes > 0.1).all()
    assert not torch.equal(outputs[0], outputs[1])
    pb.unpatch_(model)
    assert_is_the_file(model, file_tensors)


@pytest.mark.parametrize("through", ["load_", "load_state_dict"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_the_ordinary_file_loads_into_a_patched_network(method, through, path, file_tensors, images, logits):
    def load(model):
        if through == "load_":
            pb.load_(model, path)
        else:
            model.load_state_dict(load_file(path), strict=True)

    torch.manual_seed(8)
    exact, jittered = cifar_resnet20().eval(), cifar_resnet20().eval()
    pb.patch_(exact, method(3, jitter=0))
    pb.patch_(jittered, method(3))
    assert not torch.equal(drawn_logits(exact, images[0][:4], 1)[0], logits[:4])
    for model in (exact, jittered):
        load(model)
    assert torch.equal(drawn_logits(exact, images[0], 1)[0], logits)
    components = pb.patched_sites(jittered)["fc"].components("weight")
    assert torch.equal(components[0], file_tensors["fc.weight"])
    size = file_tensors["fc.weight"].square().mean().sqrt()
    for other in components[1:]:
        assert float((other - components[0]).detach().square().mean().sqrt() / size) == pytest.approx(0.1, rel=0.1)
    for model in (exact, jittered):
        pb.unpatch_(model)
        assert_is_the_file(model, file_tensors)


def test_loading_replaces_what_training_did(path, file_tensors, images):
    model = pretrained(file_tensors).train()
    pb.patch_(model, pb.EMP(3, statistics="per_component"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.nn.functional.cross_entropy(model(images[0][:8]), images[1][:8]).backward()
    optimizer.step()
    assert not torch.equal(model.conv1.weight, file_tensors["conv1.weight"])
    pb.load_(model, path)
    for keep in (2, 0):
        twin = pretrained(file_tensors)
        pb.patch_(twin, pb.EMP(3, statistics="per_component"))
        twin.load_state_dict(model.state_dict())
        pb.unpatch_(twin, keep)
        for name in ("bn1.running_mean", "layer3.0.bn1.running_var", "conv1.weight"):
            assert torch.equal(twin.state_dict()[name], file_tensors[name]), name
        assert torch.equal(twin.fc.weight, file_tensors["fc.weight"]) == (keep == 0)


def test_a_patch_of_the_pretrained_network_travels_without_it(path, file_tensors, images, tmp_path):
    model = pretrained(file_tensors)
    pb.patch_(model, pb.ECMP(3))
    patch = tmp_path / "patch.safetensors"
    pb.save(model, patch)
    assert patch.stat().st_size < 0.5 * path.stat().st_size
    other = pretrained(file_tensors)
    pb.load_(other, patch)
    assert torch.equal(drawn_logits(other, images[0][:8]), drawn_logits(model, images[0][:8]))
    stranger = cifar_resnet20()
    before = {name: value.clone() for name, value in stranger.state_dict().items()}
    with pytest.raises(pb.errors.CheckpointMismatch, match="not the one that the patch was trained on"):
        pb.load_(stranger, patch)
    assert not pb.is_patched(stranger)
    assert all(torch.equal(value, before[name]) for name, value in stranger.state_dict().items())
