"""Figure 3 (section 3.4, appendix D.1): what functions a network draws under dropout, EMP and ECMP.

    y = B + sum_h W_h sign(b_h + w_h x),   H = 100,   B, b ~ N(0, 20^2),   W, w ~ N(0, 5^2)

The text does not say whether 20 and 5 are variances or deviations, nor the range of x: deviations and |x| <= 20 are taken.
Fresh components for each function would have the plain Gaussian law whatever the scheme, so one set of components is
fixed, and functions are drawn by their assignments. A function is constant between jumps; how many jumps it has and how
large they are says how fine its detail is.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from patchbayes.draws.draws import Draws
from patchbayes.patching.drawing import forward_draws
from patchbayes.patching.patch import patch_, patched_sites
from patchbayes.posteriors import ECMP, EMP, DropConnect, Mixture

from .experiment import ComparedNumber, Experiment, Scale, TextTable, Workspace, as_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_UNITS, _COMPONENTS, _REACH = 100, 5, 20.0
_METHODS: dict[str, Mixture] = {
    "dropout": DropConnect(0.5),  # single weights W_h and w_h are dropped, biases stay
    "EMP": EMP(_COMPONENTS),
    "ECMP": ECMP(_COMPONENTS),
}
_SIZES: Mapping[Scale, tuple[int, int, int]] = {  # sets of components, functions of each, points of x
    "smoke": (4, 10, 401),
    "small": (200, 25, 8001),
    "paper": (2000, 25, 32001),
}


class Sign(nn.Module):
    """g(x) = sign(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sign(x)


def run(scale: Scale, setting: Workspace) -> dict[str, Any]:
    """Jumps of functions drawn from each prior, and three functions of the first set for the figure."""
    sets, functions, points = _SIZES[scale]
    x = torch.linspace(-_REACH, _REACH, points, dtype=torch.float64).unsqueeze(1)
    shown: dict[str, Any] = {}
    statistics: dict[str, Any] = {}
    for name, method in _METHODS.items():
        numbers, sizes, spread = [], [], []
        for seed in range(sets):
            drawn = draw_functions(method, x, functions, seed)
            steps = drawn.diff(dim=1).abs()
            jumps = steps > 1e-9
            numbers.append(jumps.sum(1).double().mean())
            sizes.append((steps.sum() / jumps.sum().clamp_min(1)).double())
            spread.append(drawn.std(dim=1).mean())
            if seed == 0:
                shown[name] = drawn[:3, :: max(1, points // 800)].tolist()
        setting.say(f"{name}: {sets} sets of components")
        statistics[name] = {
            "jumps": _mean_and_error(torch.stack(numbers)),
            "jump_size": _mean_and_error(torch.stack(sizes)),
            "deviation_over_x": _mean_and_error(torch.stack(spread)),
        }
    return {
        "units": _UNITS,
        "components": _COMPONENTS,
        "reach": _REACH,
        "sets": sets,
        "functions": functions,
        "x": x[:: max(1, points // 800), 0].tolist(),
        "shown": shown,
        "statistics": statistics,
    }


def draw_functions(method: Mixture, x: Tensor, number: int, seed: int) -> Tensor:
    """`number` functions of one set of components: values (number, len(x)). x (n, 1) float64."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, _UNITS), Sign(), nn.Linear(_UNITS, 1)).double()
    patch_(model, method, "linear", generator=generator)
    with torch.no_grad():
        for site in patched_sites(model).values():
            _fill_(site.components("weight"), 5.0, generator)
            shared = next(p for name, p in site.module.named_parameters() if name == "bias") if method.zero else None
            _fill_(site.components("bias") if shared is None else shared, 20.0, generator)
        return forward_draws(model, x, Draws.sample(model, number, generator)).squeeze(-1)


def _fill_(values: Tensor, deviation: float, generator: torch.Generator) -> None:
    values.copy_(deviation * torch.randn(values.shape, generator=generator, dtype=values.dtype))


def _mean_and_error(values: Tensor) -> dict[str, float]:
    error = values.std() / len(values) ** 0.5 if len(values) > 1 else torch.tensor(torch.nan)
    return {"mean": float(values.mean()), "standard_error": float(error)}


def rows(result: dict[str, Any]) -> list[ComparedNumber]:
    """The paper shows a picture and no number."""
    return []


def tables(result: dict[str, Any]) -> dict[str, TextTable]:
    header = ["prior", "jumps of a function", "size of a jump", "deviation over x"]
    lines = []
    for name, numbers in result["statistics"].items():
        cells = [numbers[key] for key in ("jumps", "jump_size", "deviation_over_x")]
        lines.append([name, *(f"{as_text(c['mean'])} ± {as_text(c['standard_error'], 2)}" for c in cells)])
    title = f"Functions drawn from the prior, |x| <= {result['reach']:g}: mean and standard error over {result['sets']} sets"
    return {title: (header, lines)}


def figures(result: dict[str, Any]) -> "dict[str, Figure]":
    """Three functions of each prior, from one set of components."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.8), layout="constrained")
    for axes, (name, functions) in zip(figure.subplots(1, 3), result["shown"].items(), strict=True):
        for values in functions:
            axes.step(result["x"], values, where="post", linewidth=1)
        axes.set(title=name, xlabel="x", ylabel="y")
    return {"prior_functions": figure}


EXPERIMENT = Experiment(
    name="prior",
    title="The prior on functions",
    items=("figure 3", "section 3.4", "appendix D.1"),
    duration={"smoke": "1 s", "small": "2 min", "paper": "an hour or two"},
    run=run,
    rows=rows,
    tables=tables,
    figures=figures,
)
