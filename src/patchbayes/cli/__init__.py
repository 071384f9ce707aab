"""The console command `patchbayes`: one file per subcommand, each of which imports what it needs when it runs."""

import sys


def main() -> None:
    """Run the console command."""
    try:
        from .application import run
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.exit('patchbayes: the command line needs the package typer: pip install "patchbayes[cli]"')
    run()
