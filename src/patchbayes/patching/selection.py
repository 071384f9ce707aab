"""What can be patched, and how it is selected: by word, by glob on names, or by predicate on (name, module)."""

import contextlib
import copy
import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NothingToPatch, PatchbayesError
from ..layers import NORMS, drawn_values, is_conv, is_linear, is_norm
from ..posteriors.posterior import Posterior

Sites = str | Callable[[str, nn.Module], bool]

WORDS = ("norm", "output", "input", "hidden", "linear", "conv", "lora", "trainable", "all")


@dataclass
class Selection:
    """The modules that a rule selects, by name, and what was passed over, with the reason."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def select(model: nn.Module, sites: Sites, example_input: Any = None, required: bool = True) -> Selection:
    """The modules of `model` that `sites` names. Raises `NothingToPatch` when there is none, unless told that it may be so."""
    named = layers_of(model)
    chosen = Selection()
    if callable(sites):
        for name, module in named.items():
            if sites(name, module):
                _take(chosen, name, module)
        wanted = f"a predicate ({getattr(sites, '__name__', 'callable')})"
    elif isinstance(sites, str):
        parts = [part.strip() for part in sites.split("+")]
        for part in parts:
            _select_part(chosen, model, named, part, example_input)
        wanted = f'sites="{sites}"'
        for part in parts:
            if part == "norm":
                wanted += (
                    " (BatchNorm, LayerNorm, GroupNorm, InstanceNorm, RMSNorm and look-alikes, with affine parameters)"
                )
    else:
        raise PatchbayesError(
            f"sites={sites!r}: give words joined by + ({', '.join(WORDS)}), a glob on module names, "
            "or a predicate (name, module) -> bool."
        )
    if not chosen.modules and not required:
        chosen.notes.append(f"{wanted} found no layer")
    elif not chosen.modules:
        raise NothingToPatch(_nothing(model, named, wanted, chosen))
    order = {name: position for position, name in enumerate(named)}
    chosen.modules = dict(sorted(chosen.modules.items(), key=lambda item: order[item[0]]))
    return chosen


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The network's own modules by name, without the posteriors that patched ones hold."""
    inside = {id(inner) for module in model.modules() if isinstance(module, Posterior) for inner in module.modules()}
    return {name: module for name, module in model.named_modules() if id(module) not in inside}


def _select_part(
    chosen: Selection, model: nn.Module, named: dict[str, nn.Module], part: str, example_input: Any
) -> None:
    if part in ("output", "input"):
        _select_end(chosen, model, named, part, example_input)
        return
    if part == "hidden":
        ends = Selection()
        for end in ("input", "output"):
            _select_end(ends, model, named, end, example_input)
        for name, module in named.items():
            if (is_linear(module) or is_conv(module)) and name not in ends.modules:
                _take(chosen, name, module)
        return
    tests: dict[str, Callable[[str, nn.Module], bool]] = {
        "norm": lambda _, module: is_norm(module),
        "linear": lambda _, module: is_linear(module),
        "conv": lambda _, module: is_conv(module),
        "lora": lambda name, _: is_adapter(name),
        "trainable": lambda _, module: any(p is not None and p.requires_grad for p in module._parameters.values()),
        "all": lambda _, module: _owns(module),
    }
    if part in tests:
        for name, module in named.items():
            if tests[part](name, module):
                _take(chosen, name, module)
            elif part == "norm" and isinstance(module, NORMS):
                chosen.skipped[name] = "a norm layer without affine parameters"
        return
    matches = [name for name in named if name and fnmatch.fnmatchcase(name, part)]
    if not matches:
        raise NothingToPatch(
            f'patch_ found no module named "{part}" in {type(model).__name__} ({len(named)} modules).\n'
            f"  wanted   a word ({', '.join(WORDS)}) or a glob on module names\n"
            f"  present  {_some_names(named)}\n"
            f"  do       print([name for name, _ in model.named_modules()]) lists all names."
        )
    for name in matches:
        _take(chosen, name, named[name])


def is_adapter(name: str) -> bool:
    """Whether a module's name is that of a LoRA matrix: PEFT keeps them below lora_A, lora_B, lora_embedding_A, ..."""
    return any(part.startswith("lora_") for part in name.split("."))


def adapter_partner(named: dict[str, nn.Module], name: str) -> nn.Module | None:
    """For the LoRA matrix B, which starts at zero, its A."""
    for of_b, of_a in (("lora_B", "lora_A"), ("lora_embedding_B", "lora_embedding_A")):
        if of_b in name.split("."):
            return named.get(".".join(of_a if part == of_b else part for part in name.split(".")))
    return None


def _select_end(
    chosen: Selection, model: nn.Module, named: dict[str, nn.Module], which: str, example_input: Any
) -> None:
    """The first or last executed layer that maps features to features."""

    def candidate(module: nn.Module) -> bool:
        ends = is_linear(module) or is_conv(module) or isinstance(module, nn.Bilinear)
        return ends or (which == "input" and isinstance(module, nn.Embedding | nn.RNNBase))

    if example_input is None:
        order = [name for name, module in named.items() if candidate(module)]
        how = "in order of registration; pass example_input to have the order of execution traced"
    else:
        order = _executed(model, {name: m for name, m in named.items() if candidate(m)}, example_input)
        how = "in order of execution"
    if not order:
        chosen.notes.append(f"{which}: there is no linear, convolution or embedding layer")
        return
    name = order[0] if which == "input" else order[-1]
    chosen.notes.append(f'{which} is "{name}" ({"first" if which == "input" else "last"} {how})')
    _take(chosen, name, named[name])


def _executed(model: nn.Module, candidates: dict[str, nn.Module], example_input: Any) -> list[str]:
    """Names of the candidates in the order in which a forward pass runs them, last call counting."""
    calls: list[str] = []
    handles = [
        module.register_forward_hook(lambda *_, name=name: calls.append(name)) for name, module in candidates.items()
    ]
    try:
        with evaluating(model):
            call(model, example_input)
    finally:
        for handle in handles:
            handle.remove()
    return calls


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards modes, buffers and random state are what they were."""
    modules = list(model.modules())
    modes = [(module, module.training) for module in modules]
    buffers = [(module._buffers, dict(module._buffers)) for module in modules]
    known = [b for _, held in buffers for b in held.values() if b is not None and not nn.parameter.is_lazy(b)]
    contents = [(buffer, buffer.clone()) for buffer in known]
    parameters = [p for module in modules for p in module._parameters.values() if p is not None]
    devices = {p.device for p in parameters if p.device.type == "cuda"}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=sorted(devices, key=str)):
            for module, training in modes:
                if training:
                    module.training = False
            yield
    finally:
        for module, training in modes:
            if module.training != training:
                module.training = training
        for holder, held in buffers:
            if isinstance(holder, dict):  # scripted modules hold theirs elsewhere
                holder.clear()
                holder.update(held)
        with torch.no_grad():
            for buffer, content in contents:
                if buffer.layout != torch.strided or not torch.equal(buffer, content):
                    buffer.copy_(content)


def call(model: nn.Module, inputs: Any) -> Any:
    """model(inputs): a tuple is spread over the arguments, a mapping over the keywords, all else is one argument."""
    if isinstance(inputs, tuple):
        return model(*inputs)
    if hasattr(inputs, "keys") and hasattr(inputs, "__getitem__"):
        keywords = {key: inputs[key] for key in inputs.keys()}  # noqa: SIM118
        try:
            return model(**keywords)
        except TypeError as error:
            if "keyword argument" not in str(error) and "positional argument" not in str(error):
                raise
            raise PatchbayesError(
                f"a batch is a mapping with the keys {', '.join(map(str, keywords))}, but {type(model).__name__} cannot "
                f"be called with these: {error}.\n"
                "  do       name the inputs as forward does, or pass select=lambda batch: ..., which gives the inputs (and, "
                "where labels are needed, the pair of inputs and labels)."
            ) from error
    return model(inputs)


def as_tensor(value: Any) -> Tensor:
    """A network's output: the tensor itself, its `.logits` or its ["logits"]."""
    found = value if isinstance(value, Tensor) else getattr(value, "logits", None)
    if found is None and isinstance(value, Mapping):
        found = value.get("logits")
    if isinstance(found, Tensor):
        return found
    given = f"a {type(value).__name__}"
    if isinstance(value, Mapping):
        given += f" with the keys {', '.join(map(repr, value))}"
    raise PatchbayesError(
        f'the network returns {given}; expected a tensor, or one as .logits or ["logits"].\n'
        "  do       pass output=lambda y: y[...] that picks it."
    )


def _take(chosen: Selection, name: str, module: nn.Module) -> None:
    if _owns(module):
        chosen.modules[name] = module
        chosen.skipped.pop(name, None)
    elif isinstance(module, NORMS):
        chosen.skipped[name] = "a norm layer without affine parameters"


def _owns(module: nn.Module) -> bool:
    inside_parametrization = isinstance(module, nn.utils.parametrize.ParametrizationList)
    own = any(p is not None for p in module._parameters.values()) or bool(drawn_values(module))
    return own and not inside_parametrization


def _nothing(model: nn.Module, named: dict[str, nn.Module], wanted: str, chosen: Selection) -> str:
    layers = Counter(type(module).__name__ for module in named.values() if not list(module.children()))
    present = ", ".join(f"{kind} x{count}" for kind, count in layers.most_common(8)) or "no layer at all"
    if chosen.skipped:
        present += f"; {len(chosen.skipped)} norm layers without affine parameters"
    candidates = [name for name, module in named.items() if is_linear(module) or is_conv(module)]
    do = f'sites="output" would patch "{candidates[-1]}"; or pass' if candidates else "pass"
    return (
        f"patch_ found no site in {type(model).__name__} ({len(named)} modules).\n"
        f"  wanted   {wanted}\n  present  {present}\n  do       {do} a predicate (name, module) -> bool."
    )


def _some_names(named: dict[str, nn.Module]) -> str:
    names = [f'"{name}"' for name in named if name]
    return ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")


def copied(model: nn.Module, shared: Iterable[Tensor]) -> nn.Module:
    """A deep copy that shares these tensors, and what its modules keep from an earlier pass (which deepcopy refuses)."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in shared}
    for module in model.modules():
        for value in module.__dict__.values():
            kept = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
            memo |= {id(t): t.detach() for t in kept if isinstance(t, Tensor) and not t.is_leaf}
    return copy.deepcopy(model, memo)
