"""patchbayes bayesianize: an ordinary trained checkpoint becomes a Bayesian network."""

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

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
        str,
        typer.Option(help="A part of the data that it was not trained on, such as test[:5000]: it chooses everything."),
    ],
    method: Annotated[
        str, typer.Option(help="How layers are drawn: spread(5), ecmp(5), rankone(5), ...")
    ] = "spread(5)",
    sites: Annotated[
        str,
        typer.Option(help="Layers to patch; auto: norms or the first ones, within a tenth of the network or 200 kB."),
    ] = "auto",
    small: Annotated[
        str | None,
        typer.Option(
            help="With --sites auto: the method of layers too large for --method, such as lowrank(4, 5), or none."
        ),
    ] = None,
    patch_bytes: Annotated[
        int | None, typer.Option(min=1, help="With --sites auto: what the patch may take, in bytes.")
    ] = None,
    predict_cost: Annotated[
        float | None,
        typer.Option(help="What all draws may cost, in passes of the network: the last layers are then patched."),
    ] = None,
    views: Annotated[
        str | None,
        typer.Option(
            help="Each draw sees a view of the image, in evaluate and predict too: mirror, 'shifts(1, True)', 'crops(0.9)'."
        ),
    ] = None,
    draws: Annotated[int, typer.Option(min=1, help="Draws that predictions will take.")] = 20,
    budget: Annotated[int, typer.Option(min=1, help="Inputs through the network for learning.")] = 40_000,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples read at a time.")] = 128,
    seed: Annotated[int, typer.Option(help="Of components, and of the part of the held-out data that is used.")] = 0,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets lie; else $PATCHBAYES_DATA.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a search that was killed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Turn a trained network into a Bayesian one.

    The network itself is not trained again. The chosen layers become random around their trained values; how far is learned on
    the held-out data, and how sharp the averaged prediction is. The result is a patch file, a few percent of a large network's
    size, in a run folder that points to the checkpoint: keep both. The folder is written when all is done; what was tried until
    then lies beside it, for --resume.

    \b
    patchbayes bayesianize resnet20.safetensors runs/bayes --model cifar_resnet20 --data cifar100 --held-out "test[:5000]"
    patchbayes evaluate runs/bayes --split "test[5000:]"
    """
    import dataclasses

    from ..bayesianizing.run import bayesianize_checkpoint
    from ..data import names_code as data_names_code
    from ..nets.named import names_code
    from ..posteriors.text import parse_method
    from .bayesianize_page import bayesianize_page

    if not sites:
        raise typer.BadParameter("--sites: expected layers, such as norm+output, got nothing.")
    options: dict[str, Any] = {"sites": sites, "method": parse_method(method), "draws": draws, "budget": budget}
    options |= {} if predict_cost is None else {"predict_cost": predict_cost}
    options |= {} if patch_bytes is None else {"patch_bytes": patch_bytes}
    options |= {} if small is None else {"small": None if small == "none" else parse_method(small)}
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
        resume=resume,
        views=views,
        page=bayesianize_page,
        **options,
    )
    if as_json:
        content = dataclasses.asdict(report.calibration)
        content |= {"patch_bytes": report.patch_bytes, "model_bytes": report.model_bytes}
        show_json({"folder": str(folder), **content})
        return
    show(str(report))
    show(f"\nwritten: {folder}, with a page to look at: {folder / 'bayesianize.html'}")
    trust = ["--trust-code"] if names_code(model) or data_names_code(data) else []
    show(f"next: patchbayes evaluate {shlex.join([str(folder), *_apart_from(held_out), *trust])}")


def _apart_from(held_out: str) -> list[str]:
    """Options of `evaluate` that score what nothing was chosen on: after test[:500], test[500:]."""
    first, last = re.fullmatch(r"test\[:(\d+)\]", held_out), re.fullmatch(r"test\[(\d+):\]", held_out)
    others = f"test[{first[1]}:]" if first else f"test[:{last[1]}]" if last else "PART"
    return ["--split", others]
