"""Functions by name, package.module:function: the only place where a text becomes code that is run."""

import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .errors import PatchbayesError, UntrustedCode


def looks_like_code(spec: str) -> bool:
    """Whether a text has the form package.module:function."""
    module, colon, name = spec.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), name))


def named_function(spec: str, what: str, *, trusted: bool) -> Callable[..., Any]:
    """The function that `spec`, written package.module:function, names; importing its module runs it.

    what: "data" or "model", for errors. trusted: whether whoever is running this wrote the name; else it came with a file,
    and nothing is imported.

    The working directory is looked into last, after everything that is installed: a file there cannot take the place of a
    module of Python's or of a package.
    """
    if not trusted:
        raise UntrustedCode(
            f"{what} {spec!r} is a function of a Python module: to use it is to run its code, with everything you may do.\n"
            "  do       look at that code; if you trust it, allow it by --trust-code (in Python, trust_code=True)."
        )
    module_name, _, name = spec.partition(":")
    try:
        function = getattr(_imported(module_name), name)
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        kind = "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
        raise PatchbayesError(
            f"{what} {spec!r}: {kind}{error}; the module must be importable (from here or by PYTHONPATH) and have that "
            "function."
        ) from error
    if not callable(function):
        raise PatchbayesError(f"{what} {spec!r}: {name} is a {type(function).__name__}, and a function is needed.")
    return function


def import_named(module_name: str) -> None:
    """Import a module that whoever is running this named, such as one that defines a method or a likelihood."""
    try:
        _imported(module_name)
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        raise PatchbayesError(
            f"import {module_name}: {kind}{error}; the module must be importable (from here or by PYTHONPATH)."
        ) from error


def _imported(module_name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    return importlib.import_module(module_name)


def called(function: Callable[..., Any], spec: str, what: str, *arguments: Any) -> Any:
    """What the user's function returns; whatever it raises, sys.exit included, is an error that names it."""
    try:
        return function(*arguments)
    except (Exception, SystemExit) as error:
        raise PatchbayesError(f"{what} {spec!r}: the function failed with {type(error).__name__}: {error}") from error
