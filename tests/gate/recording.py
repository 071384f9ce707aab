"""What methods compute under fixed seeds: outputs, gradients, KL and draws of six methods on five networks.

`record()` runs against whichever patchbayes is imported. The committed recording was made with 0.1.0, before posteriors
became modules of their own; `python tests/gate/recording.py FILE` writes one, and `--compare FILE` tells whether this
machine computes the same bits. The KL of DropConnect differs in its last bit; everything else is equal.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import patchbayes as pb


class Attention(nn.Module):
    """A transformer encoder layer between an embedding and a head, whose attention reads patched weights itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x)).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 5, batch_first=True)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.rnn(x)[0][:, -1]))


class Twice(nn.Module):
    """One layer that runs twice in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.RMSNorm(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(self.first(x).relu())))


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    cnn = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, groups=3),
        nn.GroupNorm(2, 6),
        nn.Flatten(),
        nn.Linear(96, 3),
    )
    made: dict[str, tuple[nn.Module, Tensor]] = {
        "mlp": (mlp, torch.randn(5, 6)),
        "cnn": (cnn, torch.randn(4, 2, 6, 6)),
        "attention": (Attention(), torch.randn(3, 4, 6)),
        "recurrent": (Recurrent(), torch.randn(3, 4, 6)),
        "twice": (Twice(), torch.randn(5, 6)),
    }
    for network, _ in made.values():  # norm layers whose parameters are not all ones and zeros
        for module in network.modules():
            if "Norm" in type(module).__name__:
                for parameter in module.parameters():
                    parameter.data += 0.3 * torch.randn_like(parameter)
    return made


def methods() -> dict[str, tuple[object, str]]:
    return {
        "emp": (pb.EMP(3, jitter=0.5), "norm+output"),
        "emp_law": (pb.EMP(3, jitter=0.5, probabilities=(0.5, 0.3, 0.2), sigma=0.1), "norm+output"),
        "ecmp": (pb.ECMP(4, jitter=0.5), "norm+output"),
        "per_example": (pb.ECMP(3, jitter=0.5, per_example=True), "norm"),
        "unit": (pb.posteriors.Mixture(components=2, tie="unit", jitter=0.5), "linear+conv"),
        "dropout": (pb.Dropout(0.3), "norm+output"),
        "dropconnect": (pb.posteriors.DropConnect(0.2), "linear+conv+norm"),
        "ensemble": (pb.Ensemble(3), "all"),
        "meanfield": (pb.posteriors.MeanField(0.2), "all"),
    }


def record() -> dict[str, Tensor]:
    torch.set_num_threads(1)
    found: dict[str, Tensor] = {}
    for name in networks():
        for label, (method, sites) in methods().items():
            network, x = networks()[name]
            if label == "per_example" and name == "twice":
                sites = "norm"
            if label in ("unit", "ensemble") and name in ("attention", "recurrent"):
                sites = "norm+output"
            try:
                pb.patch_(network, method, sites, generator=torch.Generator().manual_seed(5))
            except pb.errors.NothingToPatch:
                continue
            where = f"{name}.{label}"
            found |= {f"{where}.{key}": value for key, value in _one(network, x).items()}
    return found


def _one(network: nn.Module, x: Tensor) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    stratified = getattr(pb.Draws, "stratified", None) or pb.Draws.stratify
    generator = torch.Generator().manual_seed(3)
    sampled, balanced = pb.Draws.sample(network, 3, generator), stratified(network, 5, generator)
    for kind, draws in (("sampled", sampled), ("stratified", balanced)):
        found[f"{kind}.indices"] = draws.assignments().to(torch.int16)
        found[f"{kind}.keys"] = draws.keys()
    network.train()
    outputs = pb.forward_draws(network, x, 2)  # the network's own draws, batch statistics
    found["own"] = outputs.detach()
    kl = pb.kl(network)
    found["kl"] = kl.detach()
    (outputs.square().mean() + kl / 100).backward()
    found |= {f"grad.{key}": gradient for key, gradient in gradients(network).items()}
    network.eval()
    found["given"] = pb.forward_draws(network, x, sampled).detach()
    prediction = pb.predict(network, x, sampled, engine="loop")
    found["probs"], found["mutual_information"] = prediction.probs, prediction.mutual_information
    return {key: value.clone() for key, value in found.items()}


def gradients(network: nn.Module) -> dict[str, Tensor]:
    """Gradients by ordinary parameter name, flat; what belongs to one parameter one after the other."""
    found: dict[str, Tensor] = {}
    for name, parameter in network.named_parameters():
        plain = name.replace("parametrizations.", "").removesuffix(".original")
        plain = plain.replace("patchbayes.components.", "").replace("patchbayes.before_softplus.", "")
        if parameter.grad is not None:
            gradient = parameter.grad.flatten()
            found[plain] = torch.cat([found[plain], gradient]) if plain in found else gradient
    return found


def compare(old: dict[str, Tensor], new: dict[str, Tensor]) -> list[str]:
    """The entries that are not equal to the bit."""
    names = sorted(old.keys() | new.keys())
    return [n for n in names if n not in old or n not in new or not torch.equal(old[n], new[n])]


if __name__ == "__main__":
    import safetensors.torch

    path = Path(sys.argv[-1])
    if "--compare" in sys.argv:
        different = compare(safetensors.torch.load_file(path), record())
        print("\n".join(different) or "equal to the bit")
        sys.exit(bool(different))
    safetensors.torch.save_file(record(), path)
