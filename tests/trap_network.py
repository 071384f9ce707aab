"""The network on which traps are tried: norms, a method besides forward, blocks that can be recomputed, a loop of calls."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import patchbayes as pb


class Net(nn.Module):
    """A LayerNorm network with a `features` method, blocks that can be recomputed, and a loop of forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 3)
        self.recompute: bool | None = None

    def features(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + (block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def generate(self, x: Tensor, steps: int = 4) -> list[Tensor]:
        outputs = []
        for _ in range(steps):
            x = self(x)
            outputs.append(x)
        return outputs


X = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
METHODS = [
    pb.EMP(4, jitter=1.0),
    pb.ECMP(3, jitter=1.0),
    pb.ECMP(2, sigma=0.3),
    pb.posteriors.MeanField(),
    pb.Dropout(0.3),
    pb.EMP(3, jitter=1.0, per_example=True),
]


def patched(method: pb.posteriors.Mixture | None = None, sites: str = "norm") -> Net:
    model = Net().double()
    pb.patch_(model, method or pb.EMP(4, jitter=1.0), sites)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-9, atol=1e-11, msg=name)
