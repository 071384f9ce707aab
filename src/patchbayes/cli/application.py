"""The command line application: its subcommands, and what becomes of errors."""

import os
import signal
import sys
from typing import Annotated

import typer

from .bayesianize import bayesianize
from .demo import demo
from .evaluate import evaluate
from .params import params
from .predict import predict
from .report import report
from .reproduce import reproduce
from .train import train

application = typer.Typer(
    name="patchbayes",
    help="Make a neural network that you already have into a Bayesian one, and see how far to trust it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, train, bayesianize, evaluate, predict, report, params, reproduce):
    application.command()(command)

_debug = False


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"patchbayes {sys.modules['patchbayes'].__version__}")
        raise typer.Exit


@application.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Make a neural network that you already have into a Bayesian one, and see how far to trust it."""
    global _debug
    _debug = debug


def run() -> None:
    """Run the command. Exit codes: 0 done, 1 the work failed, 2 the command was not understood, 128 + n signal n."""
    from ..errors import PatchbayesError

    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `patchbayes ... | head` ends quietly
    sys.path.insert(0, os.getcwd())  # so that package.module:function may name a file of the user's
    try:
        application(prog_name="patchbayes")
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)
    except Exception as error:
        if _debug:
            raise
        known = isinstance(error, PatchbayesError | OSError | ImportError)
        more = "" if known else f" ({type(error).__name__}; patchbayes --debug ... shows where)"
        typer.echo(f"patchbayes: {str(error) or 'failed'}{more}", err=True)
        stopped_by = getattr(error, "signal_number", None)  # of TrainingInterrupted
        sys.exit(1 if stopped_by is None else 128 + stopped_by)
