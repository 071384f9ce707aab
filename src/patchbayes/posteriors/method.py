"""Methods: what a user passes to `patch_`. Defining a subclass is enough to save, load and name it."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from ..errors import PatchbayesError

F = TypeVar("F", bound=Callable[..., "Method"])
_METHODS: dict[str, type["Method"]] = {}
_CONSTRUCTORS: dict[str, Callable[..., "Method"]] = {}


class Method(ABC):
    """A recipe for the posterior of a site: a frozen dataclass whose fields are numbers, texts and tuples of these.

    A field called `jitter` is how far components start apart. Subclassing registers the method under its class name, in a
    user's module too: files name the class, never the module, so the module must be imported before such a file is read.

    default_sites   where `patchbayes train` puts the method if it is not told.
    start_fields    fields that matter only when components start: they may differ between a file and the network it fills.
    """

    default_sites: str = "norm+output"
    start_fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        known = _METHODS.get(cls.__name__)
        if known is not None and known.__module__ != cls.__module__ and known.__module__.startswith(__package__):
            raise PatchbayesError(
                f"class {cls.__name__}(Method): patchbayes has a method of that name, and files go by the name.\n"
                "  do       call it otherwise."
            )
        _METHODS[cls.__name__] = cls

    @property
    def label(self) -> str:
        """The method's name in a table, with its main numbers."""
        return repr(self)

    @abstractmethod
    def posterior(self, module: nn.Module, generator: torch.Generator) -> Any:
        """The `Posterior` over the parameters of `module`, not yet started: nothing of the module is changed.

        `generator` is for what must be drawn before anything is changed (components from the module's own initializer).
        """

    @property
    def copies(self) -> int:
        """How many times a layer's size a file has to hold for it."""
        return 1

    @property
    def random_at_start(self) -> bool:
        """Whether draws differ from the module's own value even when components start without spread."""
        return not self._has_jitter

    def without_spread(self) -> "Method":
        """The same method, started with all components at the module's own value: by default with a `jitter` of 0."""
        return dataclasses.replace(self, jitter=0.0) if self._has_jitter else self  # type: ignore[type-var]

    @property
    def _has_jitter(self) -> bool:
        return any(field.name == "jitter" for field in dataclasses.fields(self))  # type: ignore[arg-type]

    def config(self) -> dict[str, Any]:
        """The method as JSON: its class and fields."""
        return {"method": type(self).__name__, **dataclasses.asdict(self)}  # type: ignore[call-overload]


def constructor(function: F) -> F:
    """Let the textual form of a method know a function that makes one, by the function's name in lower case."""
    _CONSTRUCTORS[function.__name__.lower()] = function
    return function


def constructors() -> Mapping[str, Callable[..., Method]]:
    """Everything that makes a method, by its name in lower case: functions such as EMP, and all subclasses of `Method`."""
    return {name.lower(): cls for name, cls in _METHODS.items()} | _CONSTRUCTORS


def method_from_config(config: Mapping[str, Any]) -> Method:
    """The method that `Method.config` described. Nothing is imported: an unknown class is an error."""
    fields = dict(config)
    name = fields.pop("method", None)
    if name not in _METHODS:
        raise PatchbayesError(
            f"the method {name!r} is not known; known are {', '.join(sorted(_METHODS))}.\n"
            f"  do       import the module that defines the class {name}, then try again."
        )
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    try:
        return _METHODS[name](**fields)
    except TypeError as error:
        raise PatchbayesError(f"method {name}: {error}.") from None
