"""The console command `patchbayes`: one file per subcommand, each of which imports what it needs when it runs."""

from .application import main

__all__ = ["main"]
