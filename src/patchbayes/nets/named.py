"""Networks by name: the built-in ones, those of timm and torchvision, and functions of the user."""

import importlib
import inspect
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PatchbayesError
from ..named_code import called, looks_like_code, named_function
from .cifar_resnet import cifar_resnet20, cifar_resnet56, small_resnet
from .mlp import mlp
from .pyramidnet import pyramidnet
from .resnet import resnet18
from .small_cnn import small_cnn

Shape = tuple[int, ...]

#: Networks for images of three channels, by name; each takes the number of outputs.
_FOR_COLOR: dict[str, Callable[[int], nn.Module]] = {
    "cifar_resnet20": cifar_resnet20,
    "cifar_resnet56": cifar_resnet56,
    "resnet18": resnet18,
    "resnet18_cifar": lambda outputs: resnet18(outputs, stem="cifar"),
    "pyramidnet110": lambda outputs: pyramidnet(110, 270, outputs),
    "pyramidnet272": lambda outputs: pyramidnet(272, 200, outputs),
}
NET_NAMES = ("mlp", "small_cnn", "small_resnet", *_FOR_COLOR)
_LIBRARIES = ("timm", "torchvision")
_MOST_UNITS = 2**20
_MOST_VALUES = 2**31  # of an input, or outputs


def names_code(spec: str) -> bool:
    """Whether `build_net(spec, ...)` runs a function that is not of this package, timm or torchvision."""
    return spec.partition(":")[0] not in (*NET_NAMES, *_LIBRARIES) and looks_like_code(spec)


def build_net(spec: str, num_outputs: int, input_shape: Shape, seed: int = 0, *, trust_code: bool = False) -> nn.Module:
    """A fresh network for inputs (B, *input_shape) with outputs (B, num_outputs), its start given by the seed.

    spec   a built-in name: "small_cnn", "small_resnet" (any image), "mlp" or "mlp:100,100" (hidden units; images flattened),
           "cifar_resnet20", "cifar_resnet56", "resnet18", "resnet18_cifar" (keeps the resolution of small images),
           "pyramidnet110" (alpha 270, the paper's), "pyramidnet272" (alpha 200; basic blocks, no bottlenecks); or
           "timm:NAME", "torchvision:NAME"; or "package.module:function", called as function(num_outputs, input_shape),
           or without arguments where it takes none.
    trust_code   whether such a function may be imported and called; not where the name came with a file of someone else.

    Networks that are not built in are tried on two zero inputs, so that a wrong shape is found here.
    """
    shape = _checked_shape(input_shape)
    if isinstance(num_outputs, bool) or not isinstance(num_outputs, int) or not 1 <= num_outputs <= _MOST_VALUES:
        raise PatchbayesError(
            f"build_net(num_outputs={num_outputs!r}): expected a whole number of outputs, at least 1 and at most 2^31."
        )
    make = _maker(spec, num_outputs, shape, trust_code)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            network = make()
        except (RuntimeError, MemoryError) as error:  # as torch says that there is not enough memory
            raise PatchbayesError(
                f"model {spec!r} for inputs {shape} and {num_outputs} outputs cannot be made ({error})."
            ) from error
    if not isinstance(network, nn.Module):
        raise PatchbayesError(f"{spec}: the function must return a torch.nn.Module, not a {type(network).__name__}.")
    if spec.partition(":")[0] not in NET_NAMES:
        _try_out(network, spec, num_outputs, shape)
    return network


def _maker(spec: str, num_outputs: int, shape: Shape, trust_code: bool) -> Callable[[], Any]:
    name, colon, rest = spec.partition(":")
    if name == "mlp":
        hidden = _hidden(spec, rest) if colon else (50,)
        return lambda: _flat_mlp(shape, hidden, num_outputs)
    if spec == "small_cnn":
        channels, *sides = _image(spec, shape)
        return lambda: small_cnn(channels, num_outputs, max(sides))
    if spec == "small_resnet":
        return lambda: small_resnet(_image(spec, shape)[0], num_outputs)
    if spec in _FOR_COLOR:
        if _image(spec, shape)[0] != 3:
            raise PatchbayesError(
                f"{spec} takes images of 3 channels, these have {shape[0]}.\n"
                '  do       use "small_cnn", which takes any, or a package.module:function of your own.'
            )
        return lambda: _FOR_COLOR[spec](num_outputs)
    if name in _LIBRARIES and any(mark in rest for mark in ":/\\"):
        raise PatchbayesError(
            f"model {spec!r}: {rest!r} is no name of a network; timm and torchvision are asked for those they define, and "
            "nothing is downloaded."
        )
    if name == "timm":
        create = _imported("timm", spec).create_model
        channels = _image(spec, shape)[0]
        return lambda: _third_party(
            spec, lambda: create(rest, pretrained=False, num_classes=num_outputs, in_chans=channels)
        )
    if name == "torchvision":
        models = _imported("torchvision.models", spec)
        return lambda: _third_party(spec, lambda: models.get_model(rest, weights=None, num_classes=num_outputs))
    if names_code(spec):
        return _function(spec, num_outputs, shape, trust_code)
    raise PatchbayesError(
        f"model {spec!r} is not known.\n  known    {', '.join(NET_NAMES)}\n"
        "  do       use one of these, timm:NAME, torchvision:NAME, or package.module:function."
    )


def _flat_mlp(shape: Shape, hidden: Shape, num_outputs: int) -> nn.Module:
    network = mlp(math.prod(shape), hidden, num_outputs)
    if len(shape) == 1:
        return network
    return nn.Sequential(OrderedDict([("flatten", nn.Flatten()), *network.named_children()]))


def _hidden(spec: str, text: str) -> Shape:
    parts = text.split(",")
    units = [int(part) if len(part) < 9 and part.strip().isdecimal() else 0 for part in parts]
    if not all(0 < count <= _MOST_UNITS for count in units):
        raise PatchbayesError(
            f"model {spec!r}: the hidden units are whole numbers up to {_MOST_UNITS:,}, such as mlp:100 or mlp:200,100."
        )
    return tuple(units)


def _image(spec: str, shape: Shape) -> Shape:
    if len(shape) != 3:
        raise PatchbayesError(
            f"{spec} takes images (channels, height, width); the inputs have the shape {shape}.\n"
            '  do       use "mlp" for tables.'
        )
    return shape


def _imported(module: str, spec: str) -> Any:
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:  # torchvision raises the latter where its operators do not load
        raise PatchbayesError(
            f"model {spec!r}: {package} cannot be imported ({error}).\n"
            f"  do       install a {package} that matches this torch ({torch.__version__})."
        ) from None


def _third_party(spec: str, create: Callable[[], Any]) -> Any:
    try:
        return create()
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise PatchbayesError(f"model {spec!r}: {error}") from None


def _function(spec: str, num_outputs: int, shape: Shape, trust_code: bool) -> Callable[[], Any]:
    function = named_function(spec, "model", trusted=trust_code)
    try:
        signature = inspect.signature(function)
        if not signature.parameters:  # it knows its sizes itself, and `_try_out` compares them
            return lambda: called(function, spec, "model")
        signature.bind(num_outputs, shape)
    except (TypeError, ValueError) as error:
        name = spec.partition(":")[2]
        raise PatchbayesError(
            f"model {spec!r}: it is called as {name}(num_outputs, input_shape), which does not fit ({error}).\n"
            f"  do       def {name}(num_outputs, input_shape): ..., or a function without arguments."
        ) from None
    return lambda: called(function, spec, "model", num_outputs, shape)


def _try_out(network: nn.Module, spec: str, num_outputs: int, shape: Shape) -> None:
    modes = [(module, module.training) for module in network.modules()]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            output = network.eval()(torch.zeros(2, *shape))
    except Exception as error:
        raise PatchbayesError(f"{spec} does not take inputs of the shape {shape}: {error}") from None
    finally:
        for module, training in modes:
            module.training = training
    given = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if given != (2, num_outputs):
        raise PatchbayesError(
            f"{spec}: two inputs of the shape {shape} give {given}; required is a tensor (2, {num_outputs}), "
            "a row of outputs for each input."
        )


def _checked_shape(shape: Shape) -> Shape:
    sides = [side for side in shape if isinstance(side, int) and side > 0]
    if len(shape) not in (1, 3) or len(sides) < len(shape) or math.prod(sides) > _MOST_VALUES:
        raise PatchbayesError(
            f"build_net(input_shape={shape!r}): the shape of one input, (features,) or (channels, height, width)."
        )
    return tuple(shape)
