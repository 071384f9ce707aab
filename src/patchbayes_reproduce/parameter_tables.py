"""Tables 1 and 3 (sections 1 and 3.3): what each method needs in parameters and memory; figure 2: how it assigns weights."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from patchbayes.counting import mlp_count, mlp_log10_ensemble_size, overhead_percent
from patchbayes.draws.draws import Draws, format_count
from patchbayes.nets import mlp, pyramidnet, resnet18
from patchbayes.patching.drawing import forward_draws
from patchbayes.patching.patch import patch_, patched_sites
from patchbayes.posteriors import ECMP, EMP, MNF, DropConnect, Dropout, Ensemble, MeanField
from patchbayes.posteriors.method import Method

from .experiment import ComparedNumber, Experiment, Scale, TextTable, Workspace, paper_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COMPONENTS = 5
#: method -> what it is, and the sites that the paper's counts assume
_METHODS: dict[str, tuple[Method, str]] = {
    "emp": (EMP(_COMPONENTS), "norm+output"),
    "ecmp": (ECMP(_COMPONENTS), "norm+output"),
    "dropout": (Dropout(0.005), "norm"),
    "dropconnect": (DropConnect(0.005), "linear+conv"),
    "ensemble": (Ensemble(_COMPONENTS), "all"),
    "mean_field_gaussian": (MeanField(), "all"),
    "mnfg": (MNF(), "linear+conv"),
}
#: method -> why table 1's number for it has none of ours beside it, or why ours is another
_REASONS = {
    "pbp": "PBP passes moments through perceptrons alone, so that no such network can be counted",
    "mnfg": f"counted from modules with two flows a layer, each of {MNF().layers} layers of {MNF().hidden} units",
}
_NETWORKS: dict[str, Callable[[], nn.Module]] = {"resnet18": resnet18, "pyramidnet_d110_a270": pyramidnet}
_MLP_SIZES: Mapping[Scale, tuple[int, int]] = {"smoke": (4, 10), "small": (100, 100), "paper": (100, 100)}
_BATCH = 100


def run(scale: Scale, setting: Workspace) -> dict[str, Any]:
    """Counts of patched modules (table 3's networks) and formulas, memory of a training step, drawn assignments."""
    networks: dict[str, Any] = {}
    for name, build in _NETWORKS.items():
        if scale == "smoke" and name != "resnet18":
            continue
        networks[name] = {"plain": sum(p.numel() for p in build().parameters())}
        for method, (posterior, sites) in _METHODS.items():
            if scale == "smoke" and method in ("ensemble", "mean_field_gaussian", "mnfg"):
                continue  # up to half a gigabyte each
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
    memory = {method: step_memory(method, layers, hidden) for method in ("vanilla", *_METHODS)}
    return {
        "components": _COMPONENTS,
        "networks": networks,
        "mlp": formulas,
        "memory": {"layers": layers, "hidden": hidden, "batch": _BATCH, "bytes": memory},
        "schemes": drawn_schemes(),
    }


def step_memory(method: str, layers: int, hidden: int) -> dict[str, int]:
    """Bytes that a training step of an MLP with L layers of H units holds: its parameters, and what backward needs.

    Counted from the tensors themselves, so the same on every machine; gradients and optimizer state come on top, in
    proportion to the parameters.
    """
    model = mlp(hidden, [hidden] * (layers - 1), hidden)
    if method != "vanilla":
        patch_(model, *_METHODS[method])
    x = torch.randn(_BATCH, hidden, generator=torch.Generator().manual_seed(0))
    saved = saved_for_backward(
        model, lambda: model(x) if method != "ensemble" else forward_draws(model, x, Draws.enumerate(model))
    )
    return {"parameters": sum(p.nbytes for p in model.parameters()), "saved_for_backward": saved}


def saved_for_backward(model: nn.Module, forward: Callable[[], object]) -> int:
    """Bytes that autograd keeps after `forward` for the backward pass, the parameters of `model` not counted."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept = forward()  # while it lives, no storage is used twice
    del kept
    return sum(saved.values())


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
            counts = result["networks"].get(network, {})
            ours = counts.get(line["method"])
            printed = float(line[f"{column}_parameters"].removesuffix("M"))
            rounded = None if ours is None else float(f"{ours / 1e6:.3g}")
            made.append(
                ComparedNumber(f"millions of parameters of {network}, {line['method']}", printed, rounded, 1e-9, why)
            )
            percent = None if ours is None else float(f"{overhead_percent(ours, counts['plain']):.3g}")
            made.append(
                ComparedNumber(
                    f"overhead of {network} in %, {line['method']}",
                    float(line[f"{column}_overhead_percent"]),
                    percent,
                    1e-9,
                    why,
                )
            )
    return made


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
    return {title: (header, lines)}


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
