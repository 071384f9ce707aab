"""What works on which network: patch, train a step, predict, save and load, unpatch, export, over networks of three libraries.

The families of benchmarks/capture.py with small inputs, a U-Net and LSTMs; random weights, nothing is downloaded. A step that
fails is named with its reason. Resumable: networks that are in the record are not tried again.

    python benchmarks/matrix.py [--libraries timm ...] [--results FOLDER]
"""

import argparse
import copy
import functools
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from capture import of_timm, of_torchvision, of_transformers
from records import RESULTS, write_record
from subjects import define_torchvision_operators
from torch import Tensor, nn
from torch.nn import functional as F

import patchbayes as pb
from patchbayes.patching.selection import as_tensor

#: Pixels of images for networks that take any size.
SIZE = 64


class UNet(nn.Module):
    """Class scores for each pixel; the encoder's features skip to the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.merge = self._block(3, 8), self._block(8, 16), self._block(16, 8)
        self.up, self.head = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(8, 7, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        deep = self.up(self.middle(F.max_pool2d(skip, 2)))
        return self.head(self.merge(torch.cat([skip, deep], 1)))

    @staticmethod
    def _block(entering: int, leaving: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(entering, leaving, 3, padding=1), nn.BatchNorm2d(leaving), nn.ReLU())


class Recurrent(nn.Module):
    """A sequence classifier on a recurrent layer."""

    def __init__(self, kind: type[nn.RNNBase], bidirectional: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 16)
        self.recurrent = kind(16, 16, batch_first=True, bidirectional=bidirectional)
        width = 32 if bidirectional else 16
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.norm(self.recurrent(self.embedding(tokens))[0][:, -1]))


def of_torch() -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Any]]]]:
    yield "U-Net", lambda: (UNet(), torch.rand(2, 3, 32, 32))
    tokens = functools.partial(torch.randint, 60, (3, 9))
    yield "LSTM", lambda: (Recurrent(nn.LSTM, False), tokens())
    yield "LSTM, bidirectional", lambda: (Recurrent(nn.LSTM, True), tokens())
    yield "GRU", lambda: (Recurrent(nn.GRU, False), tokens())


LIBRARIES: dict[str, Callable[[], Iterator[tuple[str, Callable[[], tuple[nn.Module, Any]]]]]] = {
    "torch": of_torch,
    "transformers": of_transformers,
    "torchvision": of_torchvision,
    "timm": functools.partial(of_timm, SIZE),
}


class Steps:
    """The steps of one network, in order; each returns a note, and raises where it fails."""

    def __init__(self, build: Callable[[], tuple[nn.Module, Any]], folder: Path) -> None:
        torch.manual_seed(0)
        self.model, self.inputs = build()
        self.model.eval()
        self.plain, self.folder = copy.deepcopy(self.model), folder
        self.likelihood = pb.likelihoods.Categorical(1 if isinstance(self.model, UNet) else -1)

    def call(self) -> Tensor:
        inputs = self.inputs
        return as_tensor(self.model(**inputs) if isinstance(inputs, dict) else self.model(inputs))

    def patch(self) -> str:
        report = pb.patch_(self.model, pb.ECMP(2, jitter=0.1), "norm+output", likelihood=self.likelihood)
        return f"{len(report.sites)} sites"

    def train(self) -> str:
        """A step of SGD moves components of every site that takes part, and leaves finite numbers."""
        before = {name: site.posterior.state_dict() for name, site in pb.patched_sites(self.model).items()}
        before = {name: {k: v.clone() for k, v in state.items()} for name, state in before.items()}
        optimizer = torch.optim.SGD(self.model.train().parameters(), 1e-3)
        (F.log_softmax(self.call(), -1)[..., 0].neg().mean() + pb.kl(self.model) / 1000).backward()
        optimizer.step()
        self.model.eval()
        moved = [
            name
            for name, site in pb.patched_sites(self.model).items()
            if any(not torch.equal(v, before[name][k]) for k, v in site.posterior.state_dict().items())
        ]
        if not moved or not all(p.isfinite().all() for p in self.model.parameters()):
            raise AssertionError(f"{len(moved)} sites moved")
        return f"{len(moved)} sites moved"

    def predict(self) -> str:
        self.draws = pb.Draws.sample(self.model, 2)
        self.prediction = pb.predict(self.model, self.inputs, self.draws, engine="graph")
        if not bool(self.prediction.probs.isfinite().all()):
            raise AssertionError("probabilities that are not finite")
        return "captured" if self.prediction.plan.engine == "graph" else f"loop: {self.prediction.plan.fallback}"

    def save_and_load(self) -> str:
        path = self.folder / "network.safetensors"
        pb.save(self.model, path, whole=True)
        again = copy.deepcopy(self.plain)
        pb.load_(again, path)
        found = pb.predict(again, self.inputs, self.draws, engine="loop").probs
        expected = pb.predict(self.model, self.inputs, self.draws, engine="loop").probs
        if not torch.equal(found, expected):
            raise AssertionError(f"answers differ by {float((found - expected).abs().max()):.1e}")
        return f"{path.stat().st_size / 1e6:.1f} MB"

    def export(self) -> str:
        pb.export(self.model, self.folder / "network.pt2", self.draws, example_input=self.inputs)
        return f"{(self.folder / 'network.pt2').stat().st_size / 1e6:.1f} MB"

    def unpatch(self) -> str:
        pb.unpatch_(self.model, keep="mean")
        before, after = self.plain.state_dict(), self.model.state_dict()
        if list(before) != list(after) or type(self.model) is not type(self.plain) or pb.is_patched(self.model):
            raise AssertionError("the network is not an ordinary one again")
        self.call()
        return "ordinary"


STEPS = ("patch", "train", "predict", "save_and_load", "export", "unpatch")


def tried(build: Callable[[], tuple[nn.Module, Any]]) -> dict[str, Any]:
    """What each step says, or why it failed; a step after a patch that failed is not tried."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            steps = Steps(build, Path(folder))
        except Exception as error:
            return {"patch": {"passed": False, "note": f"not built: {_line(error)}"}}
        for name in STEPS:
            try:
                found[name] = {"passed": True, "note": getattr(steps, name)()}
            except Exception as error:  # a step that fails is a result
                found[name] = {"passed": False, "note": _line(error)}
                if name == "patch":
                    break
    return found


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--libraries", nargs="+", choices=list(LIBRARIES), default=list(LIBRARIES))
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args(words)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    define_torchvision_operators()
    path = arguments.results / "matrix.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    done = {(row["library"], row["network"]) for row in rows}
    for library in arguments.libraries:
        for name, build in LIBRARIES[library]():
            if (library, name) not in done:
                rows.append({"library": library, "network": name, "steps": tried(build)})
                print(rows[-1], flush=True)
                write_record("matrix", {"rows": rows}, arguments.results)
    print("written:", path)


if __name__ == "__main__":
    main()
