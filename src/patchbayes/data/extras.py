"""Packages that only some readers need."""

import importlib
from types import ModuleType

from ..errors import PatchbayesError


def optional(module: str, extra: str, purpose: str) -> ModuleType:
    """The module, imported now; where it is missing, an error that names the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PatchbayesError(
            f"{purpose} needs the extra {extra!r} ({error}): pip install 'patchbayes[{extra}]'."
        ) from error
