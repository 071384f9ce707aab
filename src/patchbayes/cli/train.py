"""patchbayes train: a run folder from a data set, a network and a method."""

import dataclasses
import inspect
import json
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .console import show, show_json, tell
from .options import TrustCode, need


def _list_settings(wanted: bool) -> None:
    if wanted:
        from ..runs import TrainingConfig

        show(inspect.getdoc(TrainingConfig) or "")
        raise typer.Exit


def train(
    folder: Annotated[Path, typer.Argument(help="The run folder to write.")],
    data: Annotated[
        str | None,
        typer.Option(
            help="digits, cifar100, idx:DIR, images:DIR, csv:FILE#TARGET, uci:NAME, npz:FILE, package.module:function, ..."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="small_cnn, mlp, cifar_resnet20, resnet18, ..., timm:NAME, torchvision:NAME, package.module:function."
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help='"ecmp(5)" if not given; "emp(5, jitter=0.3)", "dropout(0.1)", "norm: emp(5); linear: dropout(0.1)", ...; '
            "vanilla is not patched."
        ),
    ] = None,
    noise: Annotated[
        str | None,
        typer.Option(
            help="Instead of --method: the mixed scheme of docs/training.md with so much noise, 1 for most; 0: no patches; "
            "auto: up to four runs, of which the held-out part chooses."
        ),
    ] = None,
    sites: Annotated[
        str | None, typer.Option(help="Layers to patch, such as norm+output; the method's own if not given.")
    ] = None,
    objective: Annotated[
        Literal["elbo", "simplified"] | None,
        typer.Option(help="elbo if not given; simplified: the paper's appendix C.1."),
    ] = None,
    optimizer: Annotated[Literal["sgd", "adam", "adamw"] | None, typer.Option(help="adam if not given.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    patch_lr: Annotated[float | None, typer.Option(help="Learning rate of the patched layers, if another.")] = None,
    schedule: Annotated[
        Literal["cosine", "constant", "step"] | None, typer.Option(help="Of the learning rate; cosine if not given.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training part.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples in a step.")] = None,
    draws_per_step: Annotated[int | None, typer.Option(help="Draws of the network in a step.")] = None,
    same_draws: Annotated[
        bool | None, typer.Option("--same-draws", help="On several processes: one draw for all of them in a step.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the start, draws, data order and augmentation.")] = None,
    precision: Annotated[
        Literal["float32", "bfloat16"] | None, typer.Option(help="float32 if not given; bfloat16: mixed precision.")
    ] = None,
    device: Annotated[
        Literal["auto", "cpu"] | None, typer.Option(help="auto, if not given, takes a GPU where there is one.")
    ] = None,
    held_out: Annotated[
        float | None, typer.Option(help="Share of the training part kept for choosing the checkpoint.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets lie; else $PATCHBAYES_DATA.")] = None,
    tensorboard: Annotated[bool | None, typer.Option("--tensorboard", help="Write TensorBoard files too.")] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            metavar="NAME:KIND",
            help="What a column of a CSV file holds: number, decimal-comma, category or ignore. May be given several times.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A JSON file with any of these settings, such as the config.json of a run.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any setting of the run, by name; see --settings. May be given several times.",
        ),
    ] = None,
    list_settings: Annotated[
        bool,
        typer.Option("--settings", help="List all settings, and exit.", is_eager=True, callback=_list_settings),
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Then fit spread and temperature to the held-out part (calibrate_).")
    ] = False,
    views: Annotated[
        bool,
        typer.Option(
            "--views",
            help="With --calibrate: each draw sees a view of the image, such as the augmentation makes; so do evaluate and "
            "predict.",
        ),
    ] = False,
    trust_code: TrustCode = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the last row of metrics as JSON.")] = False,
) -> None:
    """Train a network, patched or not, into a run folder.

    The folder holds the resolved configuration, metrics by epoch (JSON lines), the last and the best checkpoint
    (safetensors), and a log. An interrupted run goes on with --resume, to the same bits. On several processes or machines:
    torchrun --nproc-per-node 2 -m patchbayes train ..., or accelerate launch -m patchbayes train ...

    \b
    patchbayes train runs/ecmp --data digits --model small_cnn --method ecmp --set warmup=1
    patchbayes train runs/emp --data cifar100 --model cifar_resnet20 --method "emp(5, jitter=0.3)"
    patchbayes train runs/ecmp --resume
    patchbayes train runs/net --data csv:table.csv#target --model mlp --noise auto --calibrate
    """
    from ..bayesianizing.noise import train_with_chosen_noise, with_noise
    from ..bayesianizing.run import calibrate_run, check_calibrating
    from ..errors import PatchbayesError
    from ..ranks import is_first
    from ..runs import RunFolder, TrainingConfig
    from ..runs import train as train_network
    from ..runs.config import SettingError

    named = {
        "data": data, "model": model, "method": method, "sites": sites, "objective": objective,
        "optimizer": optimizer, "lr": lr, "patch_lr": patch_lr,
        "schedule": schedule, "epochs": epochs, "batch_size": batch_size, "draws_per_step": draws_per_step,
        "same_draws": same_draws, "seed": seed,
        "precision": precision, "device": device, "held_out": held_out, "tensorboard": tensorboard,
        "data_dir": None if data_dir is None else str(data_dir), "columns": columns,
    }  # fmt: skip
    need("train", {"accelerate": "cli"})
    chosen: dict[str, Any] = {}
    first = folder / "noise-0" if noise == "auto" else folder
    if resume and ((first / "config.json").exists() or data is None):  # killed before it began: the options tell
        begun = RunFolder.open(first)
        if begun.kind != "train":
            raise PatchbayesError(f'{folder} holds a run of the kind "{begun.kind}"; only a training can be resumed.')
        chosen |= begun.training.to_json()
    if config is not None:
        chosen |= _from_file(config)
    typed = {name: value for name, value in named.items() if value is not None} | dict(map(_setting, settings or []))
    _refuse_code_of_files({key: value for key, value in chosen.items() if key not in typed}, trust_code)
    chosen |= typed
    if views and not calibrate:
        raise typer.BadParameter("--views goes with --calibrate.")
    missing = [f"--{name}" for name in ("data", "model") if name not in chosen]
    if missing:
        raise typer.BadParameter(f"give {' and '.join(missing)}.")
    try:
        settings_of_run = TrainingConfig.from_json(chosen)
    except SettingError as error:
        if named.get(error.name) is None:  # from --set or a file, which use the names of TrainingConfig
            raise
        raise typer.BadParameter(f"--{error.name.replace('_', '-')} {error.value}: {error.why}.") from None
    if noise is not None and (method is not None or sites is not None):
        raise typer.BadParameter("--noise says which layers are patched and how: leave out --method and --sites.")
    if noise == "auto":
        trials = train_with_chosen_noise(
            settings_of_run, folder, resume=resume, quiet=quiet, trust_code=True, say=tell if as_json else show
        )
        best = trials[0]
        if calibrate and best.noise:
            calibrate_run(RunFolder(best.folder), with_views=views)
        if as_json:
            show_json({**dataclasses.asdict(best), "folder": str(best.folder)})
            return
        show(f"chosen: {f'noise {best.noise:g}' if best.noise else 'no patches'}, in {best.folder}")
        show(f"next: patchbayes evaluate {shlex.join(str(trial.folder) for trial in trials)}")
        return
    if noise is not None:
        settings_of_run = with_noise(settings_of_run, _level(noise))
    if calibrate:
        check_calibrating(settings_of_run)
    run = train_network(settings_of_run, folder, resume=resume, quiet=quiet, trust_code=True, say=tell)
    if not is_first():
        return
    calibrated = calibrate_run(run, with_views=views) if calibrate else None
    history = run.history()
    if as_json:
        show_json({"folder": str(folder), **(history[-1] if history else {})})
        return
    last = history[-1] if history else {}
    scores = ", ".join(
        f"{key.replace('_', ' ')} {value:.4g}" for key, value in last.items() if key.startswith("held_out")
    )
    show(f"{folder}: after epoch {last.get('epoch', 0)}{', ' + scores if scores else ''}")
    if calibrated is not None:
        show(f"calibrated {calibrated}")
    elif settings_of_run.method != "vanilla" and not (folder / "calibrated.json").exists():
        show(
            "not calibrated: the same command with --resume --calibrate fits spread and temperature to the held-out part"
        )
    show(f"next: patchbayes evaluate {shlex.quote(str(folder))}")


def _level(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"--noise {text}: expected a number, such as 1, or auto.") from None


def _refuse_code_of_files(read: dict[str, Any], trust_code: bool) -> None:
    """Functions are run that the command line names; those that a file names only where they are trusted."""
    from ..data import names_code as data_names_code
    from ..errors import UntrustedCode
    from ..nets.named import names_code as model_names_code

    for key, names_code in (("model", model_names_code), ("data", data_names_code)):
        spec = read.get(key)
        if isinstance(spec, str) and names_code(spec) and not trust_code:
            raise UntrustedCode(
                f"the configuration names code of its own: {key} {spec!r} is a function of a Python module.\n"
                f"  do       look at that code; if you trust it, add --trust-code, or name it yourself: --{key} {spec}"
            )


def _from_file(path: Path) -> dict[str, Any]:
    from ..errors import PatchbayesError
    from ..files import read_json

    try:
        content = read_json(path)
    except PatchbayesError as error:
        raise typer.BadParameter(f"--config: {error}") from None
    found = content.get("training", content) if isinstance(content, dict) else None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"--config {path}: expected a JSON object with settings.")
    return found


def _setting(text: str) -> tuple[str, Any]:
    """key=value, the value as JSON where it is JSON, else as text."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise typer.BadParameter(f"--set {text}: write KEY=VALUE, such as --set warmup=1.")
    try:
        return key.replace("-", "_"), json.loads(value)
    except (ValueError, RecursionError):
        return key.replace("-", "_"), value
