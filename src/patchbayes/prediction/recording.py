"""A prediction that is repeated, as the bare operations on tensors that it comes down to.

For a small network the calls of modules, parametrizations and vmap take several times longer than the arithmetic. Where the
same draws come again for a batch of the same form, all in one chunk, the operations are recorded, and from then on run as
they are, for as long as nothing about the network changes but the values of its tensors. What depends on the draws alone is
not computed again.
"""

import operator
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .attributes import described, has_hooks
from .calibration import close
from .execution import Results, tensors_in
from .memory import make_room
from .schedule import Chunk

_EXACT = frozenset({str, bytes, type(None)})  # equal only to what is the same; the rest is described
_FORMS = 8  # of batches that are remembered for given draws
_DICTIONARIES = (dict, OrderedDict)
Answer = list[tuple[Chunk, Results]]


class Recordings:
    """The recordings of given draws of one network, for each form of batch."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = list(model.modules())
        self._state: tuple[Any, ...] | None = None
        self._pinned: list[Any] = []
        self._seen: dict[Any, _Recording | None] = {}

    def run(self, arguments: dict[str, Any], compute: Callable[[dict[str, Any]], Answer]) -> Answer:
        """compute(arguments), or what it was recorded as: that is done when it is called in a form for the second time."""
        tensors = tensors_in(arguments)
        alike = len({id(tensor) for tensor in tensors}) < len(tensors)  # one tensor twice could be two the next time
        if alike or any(tensor.layout != torch.strided for tensor in tensors):
            return compute(arguments)
        state, form = self._state_now(), _form(arguments)
        if state is None:
            return compute(arguments)
        if state != self._state:
            self._modules, self._seen = list(self._model.modules()), {}
            self._state = self._state_now()
            if self._state is None:
                return compute(arguments)
            self._pinned = [dict(vars(module)) for module in self._modules]  # what is named by its address stays
        if form not in self._seen:
            make_room(self._seen, _FORMS)
            self._seen[form] = None
            return compute(arguments)
        if self._seen[form] is None:
            answer, self._seen[form] = _record(self._modules, arguments, compute)
            return answer
        recording = self._seen[form]
        assert recording is not None
        return compute(arguments) if recording.run is None else recording(arguments)

    def _state_now(self) -> tuple[Any, ...] | None:
        """All that a forward pass may depend on besides the values of tensors; None where that cannot be told."""
        if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))) or torch_module._has_any_global_hook():
            return None
        state: list[Any] = []
        for module in self._modules:
            if has_hooks(module):
                return None
            state.append(module.__class__)
            for name, value in vars(module).items():
                kind = value.__class__
                if kind in _EXACT:
                    state.append(value)
                elif name == "_parameters" or name == "_buffers":
                    state += [(id(t), t.dtype, t.device, t.shape, t.stride()) for t in value.values() if t is not None]
                elif name == "_modules":
                    state += map(id, value.values())
                elif not value and kind in _DICTIONARIES:
                    continue
                elif name == "_forward_hooks" or name == "_forward_pre_hooks":
                    state += value
                else:
                    state.append(described(value))
        return tuple(state)


@dataclass
class _Recording:
    """The operations of a computation in one chunk; `run` is None where they could not be recorded."""

    answer: Answer
    run: Callable[..., Tensor] | None

    def __call__(self, arguments: dict[str, Any]) -> Answer:
        assert self.run is not None
        ((chunk, results),) = self.answer
        return [(chunk, results.like(self.run(*tensors_in(arguments))))]


def _record(
    modules: list[nn.Module], arguments: dict[str, Any], compute: Callable[[dict[str, Any]], Answer]
) -> tuple[Answer, _Recording]:
    """The computation and its recording."""
    with _Recorder(modules, tensors_in(arguments)) as recorder, _Escapes(recorder):
        answer = compute(arguments)
    whole = answer[0][1].whole if len(answer) == 1 else None
    recording = _Recording([], recorder.recorded(whole))
    if recording.run is not None:  # it must hold for other inputs too
        ((chunk, results),) = answer
        recording.answer = [(chunk, results.like(torch.zeros(0)))]
        others = tree_map(lambda leaf: _another(leaf) if isinstance(leaf, Tensor) else leaf, arguments)
        try:
            ((_, expected),), ((_, found),) = compute(others), recording(others)
            if expected.whole is None or found.whole is None or not close(found.whole, expected.whole):
                recording.run = None
        except (RuntimeError, ValueError, IndexError, TypeError):  # inputs that it cannot take
            recording.run = None
    return answer, recording


def _form(arguments: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(
        (name, tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors_in(value)) or repr(value))
        for name, value in arguments.items()
    )


def _another(tensor: Tensor) -> Tensor:
    """Another input of the same form: the examples in another order, numbers with the other sign."""
    moved = tensor.roll(1, 0) if tensor.dim() else tensor
    return 0.05 - 0.9 * moved if tensor.is_floating_point() else moved


class _Recorder(TorchDispatchMode):
    """Notes the operations on tensors that depend on the inputs or on the network's tensors; the rest becomes constant."""

    def __init__(self, modules: list[nn.Module], inputs: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = fx.Graph()
        self._tensors: dict[str, Tensor] = {}
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[Tensor] = []  # nothing is freed while it is told by its address
        self._storages: set[int] = set()
        self._used: set[int] = set()
        self.fails = False
        for number, tensor in enumerate(inputs):
            self._know(tensor, self._graph.placeholder(f"input_{number}"))
        for module in modules:
            for held in (*module._parameters.values(), *module._buffers.values()):
                if held is not None and id(held) not in self._nodes:
                    self._know(held, self._constant(held))

    def recorded(self, value: Tensor | None) -> fx.GraphModule | None:
        """The recorded operations as a function of the inputs, or None where they do not tell the whole story."""
        if self.fails or value is None or id(value) not in self._nodes:
            return None
        self._graph.output(self._nodes[id(value)])
        self._graph.eliminate_dead_code()
        return fx.GraphModule(self._tensors, self._graph)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self._alive += given + outputs
        live = any(id(tensor) in self._nodes for tensor in given)
        if not self.fails:
            self.fails = not self._can_be_repeated(func, given, live, bool(outputs))
        if live and not self.fails:
            node = self._graph.call_function(func, *tree_map(self._argument, (args, kwargs)))
            if isinstance(made, Tensor):
                self._know(made, node)
            else:
                for place, part in enumerate(made):
                    if isinstance(part, Tensor):
                        self._know(part, self._graph.call_function(operator.getitem, (node, place)))
        return made

    def _can_be_repeated(self, func: Any, given: list[Tensor], live: bool, has_outputs: bool) -> bool:
        constants = [tensor for tensor in given if id(tensor) not in self._nodes]
        return not (
            any(t.layout != torch.strided or t.untyped_storage()._cdata in self._storages for t in constants)
            or (func._schema.is_mutable and any(live or id(tensor) in self._used for tensor in constants))
            or torch.Tag.nondeterministic_seeded in func.tags
            or (live and _is_data_dependent(func, given))
            or (live and not has_outputs)  # a number that Python goes on with
        )

    def _argument(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return self._nodes[id(value)] if id(value) in self._nodes else self._constant(value)

    def _constant(self, tensor: Tensor) -> fx.Node:
        name = f"tensor_{len(self._tensors)}"
        self._tensors[name] = tensor
        self._used.add(id(tensor))
        return self._graph.get_attr(name)

    def _know(self, tensor: Tensor, node: fx.Node) -> None:
        self._nodes[id(tensor)] = node
        self._storages.add(tensor.untyped_storage()._cdata)
        self._alive.append(tensor)


def _is_data_dependent(func: Any, given: list[Tensor]) -> bool:
    """Whether the shape or value that comes out, and so what Python does next, may depend on the content of the inputs."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    by_number = func.overloadpacket is torch.ops.aten.index and all(t.dtype != torch.bool for t in given[1:])
    return not by_number


class _Escapes(TorchFunctionMode):
    """Notices values that leave torch and could come back as constants."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.data_ptr):
            self._recorder.fails = True
        return func(*args, **(kwargs or {}))
