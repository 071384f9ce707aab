"""The command line application: its subcommands, and what becomes of errors."""

import signal
import sys
from importlib.metadata import entry_points
from typing import Annotated

import typer

from .bayesianize import bayesianize
from .console import warn
from .demo import demo
from .evaluate import evaluate
from .memory import keep_freed_memory
from .params import params
from .predict import predict
from .report import report
from .train import train

application = typer.Typer(
    name="patchbayes",
    help="Make a neural network that you already have into a Bayesian one, and see how far to trust it.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, train, bayesianize, evaluate, predict, report, params):
    application.command()(command)
for extra in sorted(entry_points(group="patchbayes.commands"), key=lambda entry: entry.name):
    application.command(name=extra.name)(extra.load())  # commands of packages beside this one, such as reproduce

_debug = False

#: What `patchbayes` alone says: the three things that one can do.
START = """\
patchbayes makes a neural network say how sure it is, and be right about it.

See what it does, in minutes and offline:
    patchbayes demo

Calibrate a network that is trained already:
    patchbayes bayesianize weights.safetensors runs/net --model resnet18 --data images:photos \\
        --held-out "test[:500]"

Train a network on data of your own, score it, and see the report:
    patchbayes train runs/net --data csv:table.csv#target --model mlp --epochs 100 --calibrate
    patchbayes evaluate runs/net
    patchbayes report runs/net

All commands: patchbayes --help. One of them: patchbayes train --help.
"""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"patchbayes {sys.modules['patchbayes'].__version__}")
        raise typer.Exit


@application.callback()
def options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import", metavar="MODULE", help="Import a module of yours first, such as one that defines a method."
        ),
    ] = None,
) -> None:
    """Make a neural network that you already have into a Bayesian one, and see how far to trust it."""
    from ..named_code import import_named

    global _debug
    _debug = debug
    for module in modules or []:
        import_named(module)
    if context.invoked_subcommand is None:
        warn(START.rstrip())  # nothing was done: not on standard output, and not success
        raise typer.Exit(2)


def run() -> None:
    """Run the command. Exit codes: 0 done, 1 the work failed, 2 the command was not understood, 128 + n signal n."""
    from ..errors import PatchbayesError

    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `patchbayes ... | head` ends quietly
    keep_freed_memory()
    try:
        application(prog_name="patchbayes")
    except SystemExit as ending:
        if ending.code == 130:  # typer's, for Ctrl-C
            warn("interrupted: nothing is left half-written")
        raise
    except Exception as error:
        if _debug:
            raise
        known = isinstance(error, PatchbayesError | OSError | ImportError)
        more = "" if known else f" ({type(error).__name__}; patchbayes --debug ... shows where)"
        warn(f"patchbayes: {str(error) or 'failed'}{more}")
        stopped_by = getattr(error, "signal_number", None)  # of TrainingInterrupted
        sys.exit(1 if stopped_by is None else 128 + stopped_by)
