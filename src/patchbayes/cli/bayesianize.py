"""patchbayes bayesianize: an ordinary trained checkpoint becomes a Bayesian network."""

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .console import show, show_json


def bayesianize(
    checkpoint: Annotated[
        Path, typer.Argument(help="Trained weights: a safetensors file, or a state dict as torch.save writes it.")
    ],
    folder: Annotated[Path, typer.Argument(help="The run folder to write.")],
    model: Annotated[
        str,
        typer.Option(
            help="The network of the checkpoint: a built-in net, timm:NAME, torchvision:NAME, package.module:function."
        ),
    ],
    data: Annotated[str, typer.Option(help="The data it was trained on, such as cifar100 or images:DIR.")],
    held_out: Annotated[
        str | None,
        typer.Option(
            help="A part of the data that it was not trained on, such as test[:5000], to choose the jitter by."
        ),
    ] = None,
    method: Annotated[Literal["ecmp", "emp"], typer.Option(help="How components are drawn.")] = "ecmp",
    components: Annotated[int, typer.Option("-K", "--components", help="Components of each patched layer.")] = 5,
    sites: Annotated[str, typer.Option(help="Layers to patch.")] = "norm+output",
    jitter: Annotated[float | None, typer.Option(help="A jitter instead of the one that held-out data choose.")] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the training data; 0 only chooses the jitter.")] = 0.5,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the patches.")] = None,
    batch_size: Annotated[int, typer.Option(help="Examples in a step.")] = 128,
    seed: Annotated[int, typer.Option(help="Of components, draws and data order.")] = 0,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets lie; else $PATCHBAYES_DATA.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Turn a trained network into a Bayesian one.

    The network itself is not trained again: the chosen layers get K components around the trained values; only these are
    trained, for a part of an epoch, and how far they spread is chosen on held-out data. The result is a patch file, a few
    percent of a large network's size, in a run folder that points to the checkpoint: keep both. Without --held-out a documented
    default jitter is taken, and the command says so.

    \b
    patchbayes bayesianize resnet20.safetensors runs/bayes --model cifar_resnet20 --data cifar100 --held-out "test[:5000]"
    patchbayes evaluate runs/bayes --split "test[5000:]" --temperature-on "test[:5000]"
    """
    import dataclasses

    from ..bayesianizing.run import bayesianize_checkpoint
    from ..training import build_method

    options: dict[str, Any] = {"epochs": epochs, "sites": sites, "method": build_method(method, components=components)}
    if epochs == 0 and lr is not None:
        raise typer.BadParameter("--lr is for training the patches, and --epochs 0 does not.")
    options |= {} if lr is None else {"lr": lr}
    options |= {} if jitter is None else {"jitter": jitter}
    _, report = bayesianize_checkpoint(
        checkpoint,
        folder,
        data=data,
        model=model,
        held_out=held_out,
        data_dir=data_dir,
        batch_size=batch_size,
        seed=seed,
        command=shlex.join(["patchbayes", *sys.argv[1:]]),
        **options,
    )
    if as_json:
        content = dataclasses.asdict(report)
        content.pop("patch")
        show_json({"folder": str(folder), **content})
        return
    show(str(report))
    show(f"\nwritten: {folder}\nnext: patchbayes evaluate {shlex.join([str(folder), *_apart_from(held_out)])}")


def _apart_from(held_out: str | None) -> list[str]:
    """Options of `evaluate` that score what the jitter was not chosen on: after test[:500], test[500:]."""
    if held_out is None:
        return []
    first, last = re.fullmatch(r"test\[:(\d+)\]", held_out), re.fullmatch(r"test\[(\d+):\]", held_out)
    others = f"test[{first[1]}:]" if first else f"test[:{last[1]}]" if last else "PART"
    return ["--split", others, "--temperature-on", held_out]
