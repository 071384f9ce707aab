"""patchbayes params: what patching would cost, before doing it."""

import math
from typing import Annotated, Any

import typer

from .console import show, show_json, show_table

_CHOICES = ["norm", "output", "input", "norm+output", "input+norm+output", "all"]


def params(
    model: Annotated[
        str, typer.Argument(help="A built-in net, timm:NAME, torchvision:NAME or package.module:function.")
    ],
    outputs: Annotated[int, typer.Option(help="Number of classes or targets.")] = 1000,
    input_shape: Annotated[str, typer.Option("--input", help="Shape of one input, for example 3,32,32.")] = "3,224,224",
    sites: Annotated[list[str] | None, typer.Option(help="Sites to count; may be given several times.")] = None,
    components: Annotated[
        list[int] | None, typer.Option("-K", "--components", help="May be given several times.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What patching would cost, before doing it.

    Parameters, memory of float32 weights and effective ensemble size, for each choice of sites and K. Nothing is trained or
    loaded. The ensemble size is the number of different networks that can be drawn.

    \b
    patchbayes params resnet18
    patchbayes params cifar_resnet20 --outputs 100 --input 3,32,32 --sites norm+output -K 2 -K 5
    """
    from ..nets.named import build_net

    network = build_net(model, outputs, parse_shape(input_shape), trust_code=True)  # named on the command line
    base, rows = costs(network, sites, components or [2, 5, 10])
    if as_json:
        show_json({"model": model, "parameters": base, "choices": rows})
        return
    show(f"{model}: {base:,} parameters ({_memory(base)})")
    table = [
        [
            row["sites"],
            str(row["components"]),
            str(row["num_sites"]),
            f"{row['parameters']:,}",
            f"{row['overhead_percent']:+.3g} %",
            _memory(row["parameters"]),
            _count(row["log10_ensemble_size"]["emp"]),
            _count(row["log10_ensemble_size"]["ecmp"]),
        ]
        for row in rows
    ]
    show_table(["sites", "K", "layers", "parameters", "added", "weights", "EMP networks", "ECMP networks"], table)
    shares = {row["sites"]: row["overhead_percent"] / (row["components"] - 1) for row in rows if row["components"] > 1}
    if shares:
        alone = {name: share for name, share in shares.items() if "+" not in name} or shares
        show("Patching keeps K copies of the chosen layers: it adds K - 1 times their share of the parameters.")
        show(f"That share, here: {', '.join(f'{name} {share:.3g} %' for name, share in alone.items())}.")
        show("Norms are nearly free; an output layer with many classes in a small network is not.")


def costs(network: Any, sites: list[str] | None, components: list[int]) -> tuple[int, list[dict[str, Any]]]:
    """The parameters of the network, and for each choice what patching would make of them (table 3).

    sites: where None, the usual choices, without those that this network has no layer for.
    EMP draws one of K for each of the L layers, K^L networks; ECMP for each of their n elements, K^n.
    """
    from ..counting import overhead_percent, patched_count
    from ..errors import NothingToPatch
    from ..patching.selection import select

    base = sum(p.numel() for p in network.parameters())
    rows: list[dict[str, Any]] = []
    for text in sites or _CHOICES:
        try:
            modules = list(select(network, text).modules.values())
        except NothingToPatch:
            if sites:
                raise
            continue
        elements = sum({id(p): p.numel() for module in modules for p in module.parameters(recurse=False)}.values())
        for number in components:
            total = patched_count(network, modules, number)
            rows.append(
                {
                    "sites": text,
                    "components": number,
                    "num_sites": len(modules),
                    "parameters": total,
                    "overhead_percent": overhead_percent(total, base),
                    "log10_ensemble_size": {
                        "emp": len(modules) * math.log10(number),
                        "ecmp": elements * math.log10(number),
                    },
                }
            )
    return base, rows


def parse_shape(text: str) -> tuple[int, ...]:
    """ "3,32,32" as (3, 32, 32)."""
    parts = text.replace("x", ",").split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r} is not a shape; give whole numbers, such as 3,32,32.")
    return tuple(int(part) for part in parts)


def _memory(parameters: int) -> str:
    return f"{4 * parameters / 1e6:,.1f} MB" if parameters >= 250_000 else f"{4 * parameters / 1e3:,.1f} kB"


def _count(log10: float) -> str:
    from ..draws.draws import format_count

    return format_count(log10)
