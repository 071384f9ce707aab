"""A Lightning module as users write them, and a script's main that trains it in spawned processes."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from torchvision_names import torchvision_operators

_OPERATORS = torchvision_operators()

import lightning as L  # noqa: E402

import patchbayes as pb  # noqa: E402
from patchbayes.integrations.lightning import PatchBayes  # noqa: E402


def data(number: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(number, 4, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long())


def loader(number: int = 64, batch_size: int = 16) -> DataLoader:
    return DataLoader(data(number), batch_size)


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))


class Classifier(L.LightningModule):
    """Nothing in it knows of patches."""

    def __init__(self) -> None:
        super().__init__()
        self.model = network()

    def training_step(self, batch, _):
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def validation_step(self, batch, _):
        x, y = batch
        logits = self.model(x)
        self.log("nll", F.cross_entropy(logits, y))
        self.log("accuracy", (logits.argmax(-1) == y).float().mean())

    test_step = validation_step

    def predict_step(self, batch, _):
        return pb.predict(self.model, batch[0], 5)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer(**options) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return L.Trainer(**{"enable_checkpointing": False, "max_epochs": 1, "devices": 1, **quiet, **options})


def main(folder: Path) -> None:
    """Two processes train one patched module; what they learned is written here."""
    module, callback = Classifier(), PatchBayes(pb.ECMP(3, jitter=0.5), draws=4)
    callback.patch_(module)
    trainer(strategy="ddp_spawn", devices=2, callbacks=[callback]).fit(module, loader(), loader())
    pb.save(module.model, folder / "patch.safetensors", whole=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
