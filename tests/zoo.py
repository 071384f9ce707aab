"""Small networks of many kinds, each with a batch for it: what patching must cope with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import patchbayes as pb
from patchbayes.nets import mlp, pyramidnet, resnet18


@dataclass(frozen=True)
class Entry:
    """`network` makes the network, `batch` the inputs (a tuple is spread, a dict are keywords); classes on `class_dim`."""

    network: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Any]
    class_dim: int = -1
    output: Callable[[Any], Tensor] | None = None
    sites: str = "norm+output"

    def build(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.network()

    def inputs(self, seed: int = 0) -> Any:
        return self.batch(torch.Generator().manual_seed(seed))

    @property
    def likelihood(self) -> pb.likelihoods.Categorical:
        return pb.likelihoods.Categorical(self.class_dim)

    def logits(self, model: nn.Module, inputs: Any) -> Tensor:
        """The logits of one call, classes last."""
        result = model(*inputs) if isinstance(inputs, tuple) else model(**inputs) if isinstance(inputs, dict) else None
        result = model(inputs) if result is None else result
        return (self.output(result) if self.output else result).movedim(self.class_dim, -1)

    def predict(self, model: nn.Module, inputs: Any, draws: Any = 4, **options: Any) -> Any:
        return pb.predict(model, inputs, draws, likelihood=self.likelihood, output=self.output, **options)


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3)
        self.fc1, self.fc2 = nn.Linear(24, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 1)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class UNet(nn.Module):
    """Class scores for each pixel; the encoder's features skip to the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.down = self._block(2, 4)
        self.middle = self._block(4, 8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.merge = self._block(8, 4)
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        deep = self.up(self.middle(F.max_pool2d(skip, 2)))
        return self.head(self.merge(torch.cat([skip, deep], 1)))

    @staticmethod
    def _block(entering: int, leaving: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(entering, leaving, 3, padding=1), nn.GroupNorm(2, leaving), nn.ReLU())


class SequenceClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 5, batch_first=True, bidirectional=True)
        self.norm = nn.LayerNorm(10)
        self.fc = nn.Linear(10, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return self.fc(self.norm(states[:, -1]))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.fc = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc(self.encoder(self.embedding(tokens)).mean(1))


class UsesOneLayerTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.again, self.norm = nn.Linear(5, 6), nn.Linear(6, 6), nn.LayerNorm(6)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(2):
            x = x + self.again(self.norm(x)).tanh()
        return self.fc(x)


class TiedLanguageModel(nn.Module):
    """The decoder's weight is the embedding's; the decoder has a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.decoder = nn.Linear(6, 11)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(self.norm(self.embedding(tokens)))


class Frozen(nn.Module):
    """A frozen trunk, frozen norm included, under a trainable norm and head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.ReLU())
        self.norm, self.fc = nn.LayerNorm(6), nn.Linear(6, 3)
        self.trunk.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.trunk(x)))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 6), nn.Linear(4, 6)
        self.norm, self.fc = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.fc(F.relu(self.norm(self.left(left) + self.right(right))))


class DictOutput(TwoInputs):
    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        logits = super().forward(left, right)
        return {"scores": logits, "largest": logits.amax(-1)}


def _normal(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(*shape, generator=generator)


def _tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(11, (6, 4), generator=generator)


def _pair(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(6, 5, generator=generator), torch.randn(6, 4, generator=generator)


ZOO: dict[str, Entry] = {
    "mlp": Entry(lambda: mlp(5, (7,), 3), _normal(6, 5)),
    "lenet": Entry(LeNet, _normal(6, 1, 8, 8), sites="conv+linear"),
    "resnet18": Entry(lambda: resnet18(3, stem="cifar", width=4), _normal(6, 3, 8, 8)),
    "pyramidnet": Entry(lambda: pyramidnet(8, 6, 3), _normal(6, 3, 8, 8)),
    "unet": Entry(UNet, _normal(6, 2, 8, 8), class_dim=1),
    "lstm": Entry(SequenceClassifier, _tokens, sites="all"),
    "transformer": Entry(Transformer, _tokens, sites="norm+linear+output"),
    "layer used twice": Entry(UsesOneLayerTwice, _normal(6, 5), sites="norm+linear"),
    "tied": Entry(TiedLanguageModel, _tokens),
    "frozen": Entry(Frozen, _normal(6, 5)),
    "two inputs": Entry(TwoInputs, _pair),
    "keywords": Entry(TwoInputs, lambda generator: dict(zip(("left", "right"), _pair(generator), strict=True))),
    "dict output": Entry(DictOutput, _pair, output=lambda result: result["scores"]),
}


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything about a network that patching may touch: values, order, classes, hooks, attributes, tied parameters."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
    return {
        "state": [(key, value.clone()) for key, value in model.state_dict().items()],
        "classes": [(name, type(module)) for name, module in model.named_modules()],
        "parameters": [
            (name, first[id(p)], p.requires_grad, p.stride(), p.dtype, dict(p.__dict__))
            for name, p in model.named_parameters(remove_duplicate=False)
        ],
        "training": [module.training for module in model.modules()],
        "hooks": [
            {name: len(value) for name, value in vars(module).items() if "hooks" in name and hasattr(value, "__len__")}
            for module in model.modules()
        ],
        "attributes": [sorted(vars(module)) for module in model.modules()],
    }


def assert_same(before: dict[str, Any], model: nn.Module) -> None:
    after = snapshot(model)
    assert [key for key, _ in after["state"]] == [key for key, _ in before["state"]]
    for (key, new), (_, old) in zip(after.pop("state"), before["state"], strict=True):
        assert new.dtype == old.dtype, key
        assert torch.equal(new, old), key
    assert after == {name: value for name, value in before.items() if name != "state"}
