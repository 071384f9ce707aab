"""Lightning: the callback patches, adds the KL once a step, averages validation, writes patches; predictions are outputs."""

import copy
import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import patchbayes as pb
from patchbayes.errors import PatchbayesError

if importlib.util.find_spec("lightning") is None:
    pytest.skip("lightning is not installed", allow_module_level=True)


from lightning_modules import Classifier, L, PatchBayes, data, loader, network, trainer

pytestmark = pytest.mark.filterwarnings("ignore")
X, Y = data().tensors
METHOD = pb.ECMP(3, jitter=0.5)


def test_a_module_that_knows_nothing_of_patches_trains_and_is_validated_by_averages():
    module, callback = Classifier(), PatchBayes(METHOD, draws=7)
    run = trainer(callbacks=[callback], max_epochs=2)
    run.fit(module, loader(), loader(batch_size=64))
    assert list(pb.patched_sites(module.model)) == ["1", "3"]
    assert run.callback_metrics["kl"] == pytest.approx(
        float(pb.kl(module.model)), rel=0.2
    )  # of the step before the last
    (found,) = run.validate(module, loader(batch_size=64), verbose=False)
    prediction = pb.predict(module.model, X, pb.Predictor(module.model, 7).draws)
    assert found["nll"] == pytest.approx(float(F.nll_loss(prediction.log_probs, Y)), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float((prediction.predicted_class == Y).float().mean()))
    module.model.eval()
    mean = float(F.cross_entropy(module.model(X), Y))
    (plain,) = trainer(callbacks=[PatchBayes(METHOD, draws=None)]).validate(
        module, loader(batch_size=64), verbose=False
    )
    assert plain["nll"] == pytest.approx(mean, rel=1e-5)
    assert found["nll"] != pytest.approx(mean, rel=1e-4)
    (tested,) = trainer(callbacks=[callback]).test(module, loader(batch_size=64), verbose=False)
    assert tested["nll"] == pytest.approx(found["nll"], rel=1e-5)
    assert type(module.model) is type(copy.deepcopy(module.model))
    assert not isinstance(module.model, pb.Predictor)


@pytest.mark.parametrize("accumulated", [1, 4])
def test_the_kl_counts_once_in_a_step_whatever_is_accumulated(accumulated):
    """One step of plain SGD: parameters move by the gradient of the mean loss plus KL / N."""
    module = Classifier()
    trainer(
        callbacks=[PatchBayes(METHOD, num_data=50)],
        max_steps=1,
        accumulate_grad_batches=accumulated,
        limit_val_batches=0,
    ).fit(module, loader(batch_size=16))
    mine = network()
    pb.patch_(mine, METHOD)
    mine.train()
    loss = sum(F.cross_entropy(mine(x), y) / accumulated for x, y in list(loader(batch_size=16))[:accumulated])
    (loss + pb.kl(mine) / 50).backward()
    for (name, expected), found in zip(mine.named_parameters(), module.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected - 0.1 * expected.grad, msg=name)


def test_the_number_of_examples_is_that_of_the_training_data():
    found = []
    for number in (None, 64, 4):
        module = Classifier()
        trainer(callbacks=[PatchBayes(METHOD, num_data=number)], max_steps=2).fit(module, loader())
        found.append(module.model[0].weight.detach())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_checkpoints_resume_and_the_patch_is_written(tmp_path):
    file = tmp_path / "deeper" / "patch.safetensors"
    whole = Classifier()
    run = trainer(callbacks=[PatchBayes(METHOD, file=file)], max_epochs=2)
    run.fit(whole, loader())
    restored = network()
    pb.load_(restored, file)
    assert torch.equal(pb.predict(restored, X).probs, pb.predict(whole.model, X).probs)
    half = Classifier()
    run = trainer(callbacks=[PatchBayes(METHOD)], max_epochs=1)
    run.fit(half, loader())
    run.save_checkpoint(tmp_path / "half.ckpt")
    resumed = Classifier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = trainer(callbacks=[PatchBayes(METHOD)], max_epochs=2)
        run.fit(resumed, loader(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)  # draws went on where they were


def test_a_patch_alone_is_written_where_nothing_else_is_trained(tmp_path):
    module = Classifier()
    module.model[0].requires_grad_(False)
    trainer(callbacks=[PatchBayes(METHOD, file=tmp_path / "patch.safetensors")], max_steps=1).fit(module, loader())
    fresh = network()
    pb.load_(fresh, tmp_path / "patch.safetensors")
    with torch.no_grad():
        fresh = network()
        fresh[0].weight.add_(1)
    with pytest.raises(PatchbayesError, match="not the one that the patch was trained on"):
        pb.load_(fresh, tmp_path / "patch.safetensors")


def test_predictions_are_outputs_of_predict_step():
    module = Classifier()
    callback = PatchBayes(METHOD)
    found = trainer(callbacks=[callback]).predict(module, loader(batch_size=32))
    joined = type(found[0]).concatenate(found)
    assert len(joined) == 64
    torch.testing.assert_close(joined.probs, pb.predict(module.model, X, 5).probs)
    moved = found[0].to("meta")
    assert moved.probs.device.type == moved.draws_used.device.type == "meta"
    assert found[0].probs.device.type == "cpu"


class OwnLayers(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.output = torch.nn.LayerNorm(4), torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.output(self.norm(x))

    def training_step(self, batch, _):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_which_network_is_patched():
    module = OwnLayers()
    with pytest.raises(PatchbayesError, match="2 children with parameters"):
        trainer(callbacks=[PatchBayes(METHOD)]).fit(module, loader())
    with pytest.raises(PatchbayesError, match="draws=None"):
        PatchBayes(METHOD, network="")
    trainer(callbacks=[PatchBayes(METHOD, network="", draws=None)]).fit(module, loader())
    assert list(pb.patched_sites(module)) == ["norm", "output"]
    other = OwnLayers()
    PatchBayes(pb.EMP(2), "linear", network="output", likelihood=pb.likelihoods.Bernoulli()).patch_(other)
    assert not pb.is_patched(other.norm)
    assert pb.is_patched(other.output)
    with pytest.raises(PatchbayesError, match="num_data=0"):
        PatchBayes(METHOD, num_data=0)


def test_after_an_error_in_validation_the_network_is_back():
    class Failing(Classifier):
        def validation_step(self, batch, _):
            raise RuntimeError("stop")

    module = Failing()
    with pytest.raises(RuntimeError, match="stop"):
        trainer(callbacks=[PatchBayes(METHOD)]).fit(module, loader(), loader())
    assert not isinstance(module.model, pb.Predictor)


@pytest.mark.slow
def test_spawned_processes_train_a_patched_module(tmp_path):
    """The table of tools: ddp_spawn failed, for a patched network could not be pickled."""
    script = Path(__file__).with_name("lightning_modules.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=540, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    trained = network()
    pb.load_(trained, tmp_path / "patch.safetensors")
    start = network()
    assert not torch.equal(trained[0].weight, start[0].weight)
    with pytest.raises(PatchbayesError, match=r"callback.patch_\(module\)"):
        PatchBayes(METHOD).setup(trainer(strategy="ddp_spawn", devices=2), Classifier(), "fit")
