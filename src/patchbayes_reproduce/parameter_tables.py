"""Tables 1 and 3 (sections 1 and 3.3): what each method needs in parameters and memory; figure 2: how it assigns weights.

All counts are of modules that were built and patched, but for table 3's MLP, whose two counts no single module has.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from patchbayes.counting import mlp_count, mlp_log10_ensemble_size, overhead_percent
from patchbayes.draws.draws import Draws, format_count
from patchbayes.layers import is_norm
from patchbayes.nets import pyramidnet, resnet18
from patchbayes.patching.drawing import forward_draws
from patchbayes.patching.patch import patch_, patched_sites
from patchbayes.posteriors import ECMP, EMP, MNF, DropConnect, Dropout

from .experiment import ComparedNumber, Experiment, Scale, TextTable, Workspace, paper_table
from .memory_growth import growth_table, measured_growth
from .step_memory import METHODS, step_memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COMPONENTS = 5
#: method -> why table 1's number for it has none of ours beside it, or why ours is another
_REASONS = {
    "pbp": "PBP passes moments through perceptrons alone, so that no such network can be counted",
    "mnfg": f"counted from modules with two flows a layer, each of {MNF().layers} layers of {MNF().hidden} units",
}
_NETWORKS: dict[str, Callable[[], nn.Module]] = {"resnet18": resnet18, "pyramidnet_d110_a270": pyramidnet}
_COUNTED = {method: make(_COMPONENTS) for method, make in METHODS.items()} | {
    "emp_bn": (EMP(_COMPONENTS), "norm"),
    "mnfg": (MNF(), "linear+conv"),
}
_MLP_SIZES: Mapping[Scale, tuple[int, int]] = {"smoke": (4, 10), "small": (100, 100), "paper": (100, 100)}
_BATCH = 100


def run(scale: Scale, setting: Workspace) -> dict[str, Any]:
    """Counts of patched modules (table 3's networks) and formulas, memory of a training step, drawn assignments."""
    networks: dict[str, Any] = {}
    for name, build in _NETWORKS.items():
        if scale == "smoke" and name != "resnet18":
            continue
        networks[name] = {"plain": sum(p.numel() for p in build().parameters())}
        for method, (posterior, sites) in _COUNTED.items():
            if scale == "smoke" and method in ("ensemble", "mean_field_gaussian", "mnfg"):
                continue  # half a gigabyte each
            setting.say(f"counting {name}, {method}")
            model = build()
            patch_(model, posterior, sites)
            networks[name][method] = sum(p.numel() for p in model.parameters())
    layers, hidden = _MLP_SIZES[scale]
    formulas = {
        method: {
            "parameters": mlp_count(method, 100, 100, _COMPONENTS),
            "log10_ensemble_size": mlp_log10_ensemble_size(method, 100, 100, _COMPONENTS),
        }
        for method in ("emp", "ecmp", "dropout", "dropconnect", "ensemble")
    }
    memory = {method: step_memory(method, layers, hidden) for method in ("vanilla", *METHODS)}
    return {
        "components": _COMPONENTS,
        "networks": networks,
        "mlp": formulas,
        "memory": {"layers": layers, "hidden": hidden, "batch": _BATCH, "bytes": memory},
        "growth": measured_growth(scale),
        "inception_norm_percent": inception_norm_percent(),
        "schemes": drawn_schemes(),
    }


def inception_norm_percent() -> float | None:
    """The share of InceptionV3's parameters that are in norm layers (section 3.3); None without torchvision."""
    if importlib.util.find_spec("torchvision") is None:
        return None
    if not hasattr(torch.ops.torchvision, "nms"):  # beside a torch without GPU its own operators do not load
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
    models = importlib.import_module("torchvision.models")
    model = models.inception_v3(weights=None, init_weights=False)
    norms = sum(p.numel() for module in model.modules() if is_norm(module) for p in module.parameters())
    return 100 * norms / sum(p.numel() for p in model.parameters())


_KEPT: list[torch.library.Library] = []  # an operator lives as long as its library


def drawn_schemes(rows: int = 6, columns: int = 8) -> dict[str, list[list[list[int]]]]:
    """Three draws of one weight matrix by each scheme: the number of the component of every element, 0 for dropped."""
    schemes: dict[str, Any] = {"Dropout": Dropout(0.5), "EMP": EMP(3), "ECMP": ECMP(3), "DropConnect": DropConnect(0.5)}
    found = {}
    for name, method in schemes.items():
        layer = nn.Linear(columns, rows, bias=False)
        model = nn.Sequential(layer)
        if name == "Dropout":
            found[name] = _dropout_masks(rows, columns)
            continue
        patch_(model, method, "linear")
        stored = patched_sites(model)["0"].components("weight")
        with torch.no_grad():
            stored.copy_(torch.arange(1.0, len(stored) + 1).view(-1, 1, 1).expand_as(stored))
            drawn = forward_draws(model, torch.eye(columns), Draws.sample(model, 3))
        found[name] = drawn.transpose(1, 2).round().int().tolist()
    return found


def _dropout_masks(rows: int, columns: int) -> list[list[list[int]]]:
    """Dropout of input units: a unit dropped is a column of the weight matrix dropped (table 2)."""
    model = nn.Sequential(nn.Linear(columns, rows, bias=False))
    patch_(model, Dropout(0.5), "linear")
    with torch.no_grad():
        next(model.parameters()).fill_(0.5)  # what is kept is doubled
        seen = []
        for draw in Draws.sample(model, 3):
            columns_kept = [forward_draws(model, _unit(i, columns), draw)[0, 0] for i in range(columns)]
            seen.append(torch.stack(columns_kept, dim=1).round().int().tolist())
    return seen


def _unit(index: int, size: int) -> Tensor:
    return torch.eye(size)[index : index + 1]


def rows(result: dict[str, Any]) -> list[ComparedNumber]:
    """Tables 1 and 3, number by number: module counts must be equal, rounded ones equal as printed."""
    made = []
    for line in paper_table("parameters"):
        network, method = line["network"], line["method"]
        ours = (
            result["mlp"][method]["parameters"]
            if network.startswith("mlp")
            else result["networks"].get(network, {}).get(method)
        )
        made.append(ComparedNumber(f"parameters of {network}, {method}", float(line["parameters"]), ours, 0.0))
    for line in paper_table("overhead_survey"):
        why = _REASONS.get(line["method"], "")
        for network, column in (("resnet18", "resnet18"), ("pyramidnet_d110_a270", "pyramidnet")):
            counts, method = result["networks"].get(network, {}), line["method"]
            ours = counts.get(method)
            printed = line[f"{column}_parameters"].removesuffix("M"), line[f"{column}_overhead_percent"]
            rounded = None if ours is None else float(f"{ours / 1e6:.3g}")
            percent = None if ours is None else overhead_percent(ours, counts["plain"])
            what = f"of {network}, {method}"
            made.append(ComparedNumber(f"millions of parameters {what}", float(printed[0]), rounded, 1e-9, why))
            made.append(_overhead(f"overhead in % {what}", printed[1], percent, why))
    for table, network in (("imagenet_resnet18", "resnet18"), ("cifar100_pyramidnet", "pyramidnet_d110_a270")):
        counts = result["networks"].get(network, {})
        for line in paper_table(table):
            ours = counts.get(_COUNTS.get(line["method"], line["method"]))
            percent = None if ours is None else overhead_percent(ours, counts["plain"])
            made.append(
                _overhead(f"overhead in % of {network}, {line['method']}", line["overhead_percent"], percent, "")
            )
    share = result.get("inception_norm_percent")
    made.append(
        _overhead("norm layers of InceptionV3, % of its parameters", "0.1", share, "" if share else "no torchvision")
    )
    return made


#: What tables 4 and 6 call a method -> what was counted; EMP and ECMP have the same parameters.
_COUNTS = {"emp_bn_output": "emp", "ecmp_bn_output": "ecmp", "ecmp_bn": "emp_bn", "vanilla": "plain"}


def _overhead(what: str, printed: str, percent: float | None, why: str) -> ComparedNumber:
    """Equal as printed: ours lies within half of the last printed digit."""
    half = 0.5 * 10.0 ** -len(printed.partition(".")[2])
    return ComparedNumber(what, float(printed), percent, half, why)


def tables(result: dict[str, Any]) -> dict[str, TextTable]:
    memory = result["memory"]
    base = memory["bytes"]["vanilla"]
    lines = []
    for method, held in memory["bytes"].items():
        size = result["mlp"].get(method, {}).get("log10_ensemble_size")
        lines.append(
            [
                method,
                "1" if method == "vanilla" else "-" if size is None else format_count(size),
                f"{held['parameters'] / 1e6:.3f}",
                f"{held['saved_for_backward'] / 1e6:.3f}",
                f"{(held['parameters'] + held['saved_for_backward']) / (base['parameters'] + base['saved_for_backward']):.3f}",
            ]
        )
    title = (
        f"Memory of a training step, MLP with L = {memory['layers']}, H = {memory['hidden']}, batch {memory['batch']}"
    )
    header = [
        "method",
        "networks (formula, L = H = 100)",
        "parameters, MB",
        "saved for backward, MB",
        "both, times vanilla",
    ]
    grown = f"Growth of the extra memory of a step with L, H and K: exponents, K fixed at {_COMPONENTS} where it does not grow"
    return {title: (header, lines), grown: growth_table(result["growth"])}


def figures(result: dict[str, Any]) -> "dict[str, Figure]":
    """Figure 2: the component of every element of a weight matrix, three draws of each scheme."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    schemes = result["schemes"]
    figure = Figure(figsize=(7, 1.7 * len(schemes)), layout="constrained")
    colors = ListedColormap(["#f2f2f2", "#4477aa", "#ee6677", "#228833"])
    for line, (name, draws) in zip(figure.subplots(len(schemes), 3), schemes.items(), strict=True):
        for number, (axes, draw) in enumerate(zip(line, draws, strict=True)):
            axes.pcolormesh(draw, cmap=colors, vmin=0, vmax=3, edgecolors="white", linewidth=1)
            axes.set(xticks=[], yticks=[], aspect="equal")
            if number == 0:
                axes.set_ylabel(name)
    return {"schemes": figure}


EXPERIMENT = Experiment(
    name="parameters",
    title="Parameters, memory and schemes",
    items=("table 1", "table 3", "figure 2"),
    duration={"smoke": "5 s", "small": "20 s", "paper": "20 s"},
    run=run,
    rows=rows,
    tables=tables,
    figures=figures,
)
