"""Options that several commands have, and what commands look at before they work."""

import importlib.util
from collections.abc import Mapping
from typing import Annotated

import typer

#: Draws of a network; more would take years.
MOST_DRAWS = 1_000_000

TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code",
        help="Run functions (package.module:function) that a run folder or a --config file names. Look at their code first.",
    ),
]


def need(command: str, packages: Mapping[str, str]) -> None:
    """Stop before the work where a package is missing; packages: module -> the extra that installs it."""
    from ..errors import PatchbayesError

    missing = {module: extra for module, extra in packages.items() if importlib.util.find_spec(module) is None}
    if missing:
        extras = ",".join(sorted(set(missing.values())))
        raise PatchbayesError(
            f"{command} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed; nothing was "
            f'done.\n  do       pip install "patchbayes[{extras}]"'
        )
