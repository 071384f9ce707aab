"""Training with patches against its rivals, by regime: all at equal epochs, calibrated on the same held-out examples.

    fashion     2,000 images at 14 x 14, 40 epochs: the network fits them and is overconfident. The demo's regime.
    underfit    the same images, 4 epochs: the network does not fit them yet. Noise can only hurt.
    uci         Concrete, published splits, a network for mean and variance. (--data-dir)
    cifar       CIFAR-100, 20 classes x 250 images at 16 x 16, no augmentation, 60 epochs: it knows them by heart. (--data-dir)
    intents     a pretrained MiniLM, fine-tuned to tell 150 intents apart, 5 requests each; its fresh output layer learns
                40 times as fast as the rest. (--data-dir)

Contestants: "plain" (the original network, temperature scaling, `bayesianize_`), "dropout:RATE" (20 draws and one pass),
"mixed:NOISE" (patches as `pb.mixed` puts them, for MiniLM as `fine_tuning` does, none for 0, then `calibrate_`; 20 draws and
one pass), "ensemble:MEMBERS".

Where there are several rates or levels of noise, all are trained with the first seed and see its held-out examples alone; the
one with the least NLL on them, in its better form, is trained and scored with every seed. The record keeps what was found.

With --reuse, the results of the kinds that it names are those of the record that is there, of the seeds that it has, which
were made by the same code; the new record says from which commit they are. All else is trained.

Each result is kept in --work as it comes, so that a stopped run goes on. At the end results/regime_<regime>.json is written;
for "fashion" also the record that the demo shows. With --members, ensembles alone are trained, into
results/ensemble_<regime>.json.

    python benchmarks/from_scratch.py --regime fashion --seeds 0 1 2 3 4
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import uci_regime
from intents_regime import few_intents
from records import RESULTS, write_record

from patchbayes.cli.demo import RECORD
from patchbayes.cli.demo_study import DRAWS, Material, contest, fashion, optimizer_of, patched
from patchbayes.cli.memory import keep_freed_memory
from patchbayes.data import read
from patchbayes.files import write_atomically
from patchbayes.nets import small_resnet

DEMO = RESULTS.parent / "src" / "patchbayes" / "cli" / RECORD
#: What --reuse can name.
KINDS = ("plain", "dropout", "mixed")
Results = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Regime:
    """What is trained, for how long, and with which rates of dropout and levels of noise to choose from.

    material   (seed, data_dir) -> data and networks. contest  (material, contestant, seed, epochs) -> rows.
    step       (material, contestant) -> a training step, for its time.
    """

    epochs: int
    material: Callable[[int, str | None], Any]
    contest: Callable[[Any, str, int, int], dict[str, Any]]
    step: Callable[[Any, str], Callable[[], None]]
    rates: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2, 0.3)
    noises: tuple[float, ...] = (1.0,)

    @staticmethod
    def without_test(material: Any) -> Any:
        """The material with its held-out examples in the place of all that is scored."""
        more = {"corrupted": {}, "unfamiliar": None} if isinstance(material, Material) else {}
        return replace(material, test=material.held_out, **more)


def cifar(seed: int, data_dir: str | None) -> Material:
    """20 classes x 250 training images, 1,000 others held out, the 2,000 test images of those classes; 16 x 16 pixels."""
    data = read("cifar100", data_dir, held_out=0)
    parts = []
    for split in (data.train, data.test):
        few = split.subset((split.targets < 20).nonzero().squeeze(1))
        raw, classes = few.fetch(torch.arange(len(few)))
        parts.append(((F.avg_pool2d(raw.float(), 2) / 255 - 0.48) / 0.26, classes))
    (x, y), test = parts
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    ranks = torch.empty_like(order)
    for number in range(20):
        own = order[y[order] == number]
        ranks[own] = torch.arange(len(own))
    train, rest = order[ranks[order] < 250], order[ranks[order] >= 250][:1000]
    return Material((x[train], y[train]), (x[rest], y[rest]), test, _network)


def _network(seed: int) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return small_resnet(3, 20)


def training_step(material: Material, contestant: str) -> Callable[[], None]:
    """A training step of a contestant of `contest`."""
    network = patched(material, contestant, 0).train()
    optimizer = optimizer_of(network, contestant, material.learning_rate, material.fresh)
    x, y = (part[: material.batch] for part in material.train)
    x = material.trim(x)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()

    return step


def _fashion(seed: int, _: str | None) -> Material:
    return fashion(seed)


def _clean_fashion(seed: int, _: str | None) -> Material:
    return replace(fashion(seed, corrupted=1), corrupted={}, unfamiliar=None)


REGIMES = {
    "fashion": Regime(40, _fashion, contest, training_step),
    "underfit": Regime(4, _clean_fashion, contest, training_step, rates=(0.02, 0.1), noises=(0.0, 0.1)),
    "uci": Regime(
        100,
        uci_regime.concrete,
        uci_regime.contest,
        uci_regime.step,
        rates=(0.02, 0.05, 0.1),
        noises=(0.0, 0.25, 0.5, 1.0),
    ),
    "cifar": Regime(60, cifar, contest, training_step, rates=(0.1, 0.2, 0.3), noises=(0.5, 1.0, 1.5, 2.0)),
    "intents": Regime(10, few_intents, contest, training_step, rates=(0.02, 0.05, 0.1), noises=(0.4, 1.0, 2.0)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regime", choices=REGIMES, default="fashion")
    parser.add_argument(
        "--rates", type=float, nargs="+", help="of dropout to choose from; those of the regime if not given"
    )
    parser.add_argument("--noises", type=float, nargs="+", help="to choose from; those of the regime if not given")
    parser.add_argument("--members", type=int, default=0, help="train ensembles of so many networks, and nothing else")
    parser.add_argument("--epochs", type=int, help="those of the regime, if not given")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--data-dir", help="where the data lies")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "from_scratch")
    parser.add_argument("--reuse", nargs="+", choices=KINDS, default=[], help="of the present record")
    parser.add_argument("--only-train", action="store_true", help="write no record yet")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    keep_freed_memory()
    regime = REGIMES[options.regime]
    epochs = options.epochs or regime.epochs
    first = options.seeds[0]
    options.work.mkdir(parents=True, exist_ok=True)
    made: dict[int, Any] = {}
    present = json.loads((RESULTS / f"regime_{options.regime}.json").read_text()) if options.reuse else {}
    known: list[int] = present.get("seed_numbers", [])
    if present and (present["epochs"] != epochs or first not in known):
        raise SystemExit("--reuse: the present record has other epochs or another first seed")

    def result(contestant: str, seed: int, searching: bool = False) -> dict[str, Any]:
        if not searching and contestant.partition(":")[0] in options.reuse and seed in known:
            return dict(present["seeds"][known.index(seed)][contestant])
        kind = "search" if searching else "scores"
        file = options.work / f"{options.regime}_{epochs}_{seed}_{contestant.replace(':', '-')}_{kind}.json"
        if not file.exists():
            if seed not in made:
                made.clear()  # one at a time
                made[seed] = regime.material(seed, options.data_dir)
            seen = regime.without_test(made[seed]) if searching else made[seed]
            write_atomically(file, json.dumps(regime.contest(seen, contestant, seed, epochs)).encode())
        found: dict[str, Any] = json.loads(file.read_text())
        print(f"seed {seed} {contestant}: " + _line(found), flush=True)
        return found

    if options.members:
        ensembles = [_rounded(result(f"ensemble:{options.members}", seed)["rows"]) for seed in options.seeds]
        content = {"epochs": epochs, "members": options.members, "seed_numbers": options.seeds, "seeds": ensembles}
        print(f"wrote {write_record(f'ensemble_{options.regime}', content)}")
        return
    levels = {"dropout": options.rates or regime.rates, "mixed": options.noises or regime.noises}
    search = {
        kind: {float(level): nll for level, nll in present["search"][kind].items()}
        if kind in options.reuse
        else {level: held_out(result(f"{kind}:{level:g}", first, searching=True)) for level in some}
        for kind, some in levels.items()
    }
    rate, noise = (min(found, key=found.__getitem__) for found in search.values())
    contestants = ["plain", f"mixed:{noise:g}", f"dropout:{rate:g}"]
    seeds: list[Results] = [{name: result(name, seed) for name in contestants} for seed in options.seeds]
    if options.only_train:
        return
    content = {
        "epochs": epochs,
        "draws": DRAWS,
        "seed_numbers": options.seeds,
        "search": {
            kind: {f"{key:g}": round(value, 5) for key, value in found.items()} for kind, found in search.items()
        },
        "dropout_rate": rate,
        **({"reused": {kind: _origin(present, kind) for kind in options.reuse}} if options.reuse else {}),
        "noise": noise,
        "seeds": [{name: _rounded(one) for name, one in results.items()} for results in seeds],
        "step_times": step_times(regime, regime.material(first, options.data_dir), contestants[:3]),
    }
    path = write_record(f"regime_{options.regime}", content)
    if options.regime == "fashion":
        write_atomically(DEMO, path.read_bytes())
    print(f"wrote {path}")


def _origin(record: dict[str, Any], kind: str) -> str:
    """The commit that made the results of a kind in a record, which may have reused them itself."""
    return str(record.get("reused", {}).get(kind, record["commit"]))


def held_out(result: dict[str, Any]) -> float:
    """The NLL on held-out examples in the form, 20 draws or one pass, in which it is lower."""
    return min(float(row["held_out_nll"]) for row in result["rows"].values())


def step_times(regime: Regime, material: Any, contestants: list[str], seconds: float = 40.0) -> dict[str, float]:
    """Processor time of a training step in units of the plain network's: the median over rounds in which all take turns, at
    least 60 of them, and for so many seconds. Memory is kept as the command `patchbayes` keeps it."""
    steps = {name: regime.step(material, name) for name in contestants}
    times: dict[str, list[float]] = {name: [] for name in steps}
    start = time.process_time()
    while len(times["plain"]) < 60 or time.process_time() - start < seconds:
        for name, step in steps.items():
            began = time.process_time()
            step()
            times[name].append(time.process_time() - began)
    return {
        name: round(statistics.median(t / plain for t, plain in zip(own[2:], times["plain"][2:], strict=True)), 3)
        for name, own in times.items()
    }


def _rounded(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _rounded(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_rounded(value) for value in content]
    return round(content, 5) if isinstance(content, float) else content


def _line(result: dict[str, Any]) -> str:
    rows = [
        " ".join([name, *(f"{key} {row[key]:.4f}" for key in ("accuracy", "rmse", "nll", "ece") if key in row)])
        for name, row in result["rows"].items()
    ]
    return "; ".join(rows) + f" | {result['training_seconds']:.0f} s"


if __name__ == "__main__":
    main()
