"""Capture: a network's operations as one graph whose inputs are all that may change between two calls."""

import contextlib
import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ...patching.selection import copied
from .remembering import structure_of

aten = torch.ops.aten

#: Operations without a result that only check; and those that do nothing in evaluation mode.
_CHECKS = (
    "_assert_scalar",
    "_assert_tensor_metadata",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
    "_assert_async",
)
_OUTPUTS = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, str, type(None))
_MOST_SIZES = 1024  # that are remembered as fulfilling the guards of a graph or not
_DYNAMIC, _STATIC = torch.export.Dim.AUTO, torch.export.Dim.STATIC

#: One capture at a time in a process: `torch.export` is not made for threads.
CAPTURING = threading.RLock()


#: The context in which a network computes with given drawn tensors, (site, name) -> tensor, and numbers of its examples.
Drawing = Callable[[Mapping[tuple[int, str], Tensor], Tensor], AbstractContextManager[Any]]


class NotCapturable(Exception):
    """Why a network cannot be captured, in words for the plan."""


@dataclass(frozen=True)
class Source:
    """Where the value of a graph's input comes from.

    kind   "argument" (leaf `place` of the call's arguments), "live" (tensor `name` of the module `owner`, read at every
           run), "drawn" (tensor `name` of site number `place`), "examples" (their numbers) or "constant".
    """

    kind: str
    place: int = 0
    name: str = ""
    owner: Callable[[], nn.Module | None] | None = None
    constant: Tensor | None = None

    def value(self, arguments: list[Any], examples: Tensor) -> Any:
        """The value now, for all kinds but "drawn"."""
        if self.kind == "live":
            module = self.owner() if self.owner is not None else None
            assert module is not None
            return module._parameters[self.name] if self.name in module._parameters else module._buffers[self.name]
        if self.kind == "argument":
            return arguments[self.place]
        return examples if self.kind == "examples" else self.constant


@dataclass
class Capture:
    """The operations of a network for one form of call.

    graph     functional operations; nodes carry the shapes of the example in `node.meta["val"]`.
    sources   for each input of the graph, where its value comes from.
    spec      the structure of the network's output, of which `outputs` are the leaves (nodes or constants).
    shapes    of each tensor argument, its sizes: a number where the graph holds for that alone, None where for any.
    guards    what the sizes must fulfil besides, since `forward` looked at them.
    """

    graph: fx.Graph
    sources: dict[fx.Node, Source]
    outputs: list[Any]
    spec: TreeSpec
    shapes: list[tuple[int | None, ...] | None]
    guards: "Guards"
    attributes: dict[str, Any] = field(default_factory=dict)

    def fits(self, leaves: list[Any]) -> bool:
        """Whether the graph holds for tensors of these sizes."""
        given = [leaf.shape if shape is not None else () for shape, leaf in zip(self.shapes, leaves, strict=True)]
        known = all(
            size is None or size == here
            for shape, sizes in zip(self.shapes, given, strict=True)
            for size, here in zip(shape or (), sizes, strict=True)
        )
        return known and self.guards.hold((*given, (batch_size(leaves),)))

    def unflatten(self, leaves: list[Any]) -> Any:
        """The network's output from its leaves."""
        return tree_unflatten(leaves, self.spec)


class Guards:
    """What sizes must fulfil for a graph to hold: relations between them that `forward` asked for while it was captured.

    sizes       for each input, its sizes as numbers and symbols; none where they do not matter.
    relations   expressions of these symbols, all true for the example.
    """

    def __init__(self, sizes: list[tuple[Any, ...]], relations: list[Any]) -> None:
        self._sizes, self._relations = sizes, relations
        self._known: dict[Any, bool] = {}

    def hold(self, given: tuple[tuple[int, ...], ...]) -> bool:
        """Whether these sizes fulfil them."""
        key = tuple(map(tuple, given))
        if key not in self._known:
            if len(self._known) >= _MOST_SIZES:
                self._known.clear()
            self._known[key] = self._fulfilled(key)
        return self._known[key]

    def _fulfilled(self, given: tuple[tuple[int, ...], ...]) -> bool:
        from sympy import Integer, sympify, true  # type: ignore[import-untyped]

        pairs = [pair for sizes, numbers in zip(self._sizes, given, strict=True) for pair in zip(sizes, numbers)]  # noqa: B905
        values: dict[Any, Any] = {}
        for size, number in pairs:
            if not isinstance(size, int) and size.is_Symbol:
                values.setdefault(size, Integer(number))
        same = all(sympify(size).xreplace(values) == number for size, number in pairs)
        return same and all(relation.xreplace(values) == true for relation in self._relations)


class _Called(nn.Module):
    """The network with its arguments, drawn tensors and the numbers of the examples as inputs."""

    def __init__(self, network: nn.Module, keys: list[tuple[int, str]], drawing: Drawing) -> None:
        super().__init__()
        self.network, self.keys, self.drawing = network, keys, drawing

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], drawn: list[Tensor], examples: Tensor) -> Any:
        before = structure_of(self.network)
        with self.drawing(dict(zip(self.keys, drawn, strict=True)), examples):
            made = self.network(*args, **kwargs)
        if structure_of(self.network) != before:
            raise NotCapturable("its forward changes attributes of the network")
        leaves, spec = tree_flatten(made)  # caches of states and the like are left out
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            raise NotCapturable(f"it returns a {type(made).__name__}, whose tensors cannot be seen")
        return tree_unflatten([leaf if isinstance(leaf, _OUTPUTS) else None for leaf in leaves], spec)


def evaluation_copy(model: nn.Module) -> nn.Module:
    """The same network in evaluation mode, with its own structure and the very same tensors: nothing is done to `model`."""
    try:
        twin = copied(model, [*model.parameters(), *model.buffers()]).eval()
    except Exception as error:
        raise NotCapturable(f"it cannot be copied: {_first_line(error)}") from error
    for module in twin.modules():
        if isinstance(module, nn.RNNBase) and "_flat_weights" in module.__dict__:
            del module.__dict__["_flat_weights"]
            module.__class__ = type(type(module).__name__, (type(module),), {"_flat_weights": _FLAT_WEIGHTS})
    return twin


#: The weights of a recurrent layer, read when it runs. Its own list of them would be set while it is captured: torch warns.
_FLAT_WEIGHTS = property(lambda self: [getattr(self, name, None) for name in self._flat_weights_names], lambda *_: None)


def capture(
    model: nn.Module,
    twin: nn.Module,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    drawn: Mapping[tuple[int, str], Tensor],
    drawing: Drawing,
    dynamic: Mapping[int, set[int]],
) -> Capture:
    """The graph of `twin`, a copy of `model` in evaluation mode, called with `arguments` (args, kwargs).

    drawn     example tensors of what is drawn for the sites; `drawing` is the context that holds them.
    dynamic   for the leaves of the arguments, the dimensions whose size may be another one in the next call.
    """
    leaves, spec = tree_flatten(arguments)
    sizes = [
        {axis: _DYNAMIC if axis in dynamic.get(place, ()) else _STATIC for axis in range(leaf.dim())}
        if isinstance(leaf, Tensor)
        else None
        for place, leaf in enumerate(leaves)
    ]
    args, kwargs = tree_unflatten(sizes, spec)
    values, examples = list(drawn.values()), torch.arange(batch_size(leaves))
    shapes = {"args": args, "kwargs": kwargs, "drawn": [None] * len(values), "examples": {0: _DYNAMIC}}
    called = _Called(twin, list(drawn), drawing)
    try:
        with CAPTURING, torch.no_grad(), _every_size(), _builtins_left_alone():
            given = (*arguments, values, examples)
            program = torch.export.export(called, given, strict=False, dynamic_shapes=shapes)
            if not _is_plain(program.graph):
                program = program.run_decompositions({})
    except NotCapturable:
        raise
    except Exception as error:
        raise NotCapturable(_first_line(error)) from error
    return _read(program, model, leaves, list(drawn))


@contextlib.contextmanager
def _builtins_left_alone() -> Iterator[None]:
    """While it traces, `torch.export` puts functions of its own in the place of `max`, `min` and `math.pow`, for all threads:
    what others import or compute meanwhile sees these, and two traces at a time never take them back. Without them a
    comparison of sizes becomes a guard."""
    from torch.export import _trace as _tracing

    trace: Any = _tracing
    theirs = getattr(trace, "_override_builtin_ops", None)
    if theirs is None:
        yield
        return
    trace._override_builtin_ops = contextlib.nullcontext
    try:
        yield
    finally:
        trace._override_builtin_ops = theirs


def _every_size() -> AbstractContextManager[Any]:
    """Sizes of 0 and 1 are sizes like others, unless `forward` asks; in this thread."""
    from torch.fx.experimental import _config

    return _config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]


def batch_size(leaves: list[Any]) -> int:
    """The number of examples in a call: the first size of its first tensor."""
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 0)


def _is_plain(graph: fx.Graph) -> bool:
    """Make the graph functional where that is easy (an operation in place on a fresh value that nothing else reads)."""
    for node in list(graph.nodes):
        if node.op == "get_attr":
            return False
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if not node.target._schema.is_mutable:
            continue
        plain = _functional(node)
        if plain is None:
            return False
        node.target = plain
    graph.lint()
    return True


def _functional(node: fx.Node) -> Any:
    changed = node.args[0] if node.args else None
    if not isinstance(changed, fx.Node) or len(changed.users) > 1 or changed.op != "call_function":
        return None
    if not isinstance(changed.target, torch._ops.OpOverload) or any(
        a.alias_info for a in changed.target._schema.arguments
    ):
        return None  # a view: what it looks at changes too
    assert isinstance(node.target, torch._ops.OpOverload)
    name = node.target._schema.name.removeprefix("aten::").removesuffix("_")
    overload: Any = getattr(getattr(aten, name, None), node.target._overloadname, None)
    same = overload is not None and not overload._schema.is_mutable
    return overload if same and len(overload._schema.returns) == 1 else None


def _read(program: Any, model: nn.Module, leaves: list[Any], keys: list[tuple[int, str]]) -> Capture:
    signature, graph = program.graph_signature, program.graph
    changed = [s for s in signature.output_specs if s.kind.name != "USER_OUTPUT"]
    if changed:
        raise NotCapturable(f'its forward changes "{str(changed[0].target).removeprefix("network.")}"')
    nodes: dict[str, Any] = {node.name: node for node in graph.nodes}
    sources: dict[fx.Node, Source] = {}
    user_inputs: list[Any] = []
    for spec in signature.input_specs:
        node: Any = nodes.get(getattr(spec.arg, "name", ""))
        if spec.kind.name == "USER_INPUT":
            user_inputs.append(node)
        elif spec.kind.name in ("PARAMETER", "BUFFER"):
            path, _, name = spec.target.removeprefix("network.").rpartition(".")
            owner = weakref.ref(model.get_submodule(path))
            sources[node] = Source("live", name=name, owner=owner)
        elif spec.kind.name == "CONSTANT_TENSOR":
            sources[node] = Source("constant", constant=program.constants[spec.target])
        else:
            raise NotCapturable(f"its forward needs a {spec.kind.name.lower()}")
    arguments, drawn = user_inputs[: len(leaves)], user_inputs[len(leaves) : -1]
    sources[user_inputs[-1]] = Source("examples")
    guards = _guards([*arguments, user_inputs[-1] if user_inputs[-1].users else None])
    shapes: list[tuple[int | None, ...] | None] = []
    for place, (leaf, node) in enumerate(zip(leaves, arguments, strict=True)):
        shapes.append(None)
        if isinstance(leaf, Tensor):
            sources[node] = Source("argument", place=place)
            shapes[-1] = tuple(size if isinstance(size, int) else None for size in node.meta["val"].shape)
    for key, node in zip(keys, drawn, strict=True):
        sources[node] = Source("drawn", *key)
    _clean(graph)
    for node in graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and _is_random(node):
            raise NotCapturable(f"its forward draws random numbers ({node.target})")
    sources = {node: source for node, source in sources.items() if node.users}
    outputs = list(next(node for node in reversed(graph.nodes) if node.op == "output").args[0])
    attributes = {
        n.target: operator.attrgetter(n.target)(program.graph_module) for n in graph.nodes if n.op == "get_attr"
    }
    spec = program.call_spec.out_spec
    return Capture(graph, sources, outputs, spec, shapes, guards, attributes)


def _guards(inputs: list[Any]) -> Guards:
    """Of a graph whose inputs, nodes or None, have such sizes."""
    values = [getattr(node, "meta", {}).get("val") for node in inputs]
    shapes: list[tuple[Any, ...]] = [tuple(value.shape) if isinstance(value, Tensor) else () for value in values]
    symbolic: list[Any] = [size for shape in shapes for size in shape if not isinstance(size, int)]
    known = symbolic[0].node.shape_env if symbolic else None  # also knows which sizes were found to be the same
    relations = [known.replace(guard.expr) for guard in known.guards] if known is not None else []
    return Guards([tuple(s if isinstance(s, int) else s.node.expr for s in shape) for shape in shapes], relations)


def _is_random(node: fx.Node) -> bool:
    """Whether an operation that may draw random numbers does: attention and recurrent layers, with dropout only."""
    places = {
        "scaled_dot_product_attention": (4, "dropout_p"),
        **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), (6, "train")),
    }
    place, name = places.get(node.target.__name__.partition(".")[0], (None, ""))  # type: ignore[union-attr]
    if place is None:
        return True
    return bool(node.args[place] if len(node.args) > place else node.kwargs.get(name, False))


def _clean(graph: fx.Graph) -> None:
    """Drop checks and what does nothing; let views be copies where they must be (`torch.vmap` moves dimensions)."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        name = node.target.__name__.partition(".")[0]
        if name in _CHECKS:
            graph.erase_node(node)
        elif node.target in (aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default):
            if not node.args[2]:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
        elif node.target is aten.view.default:
            node.target = aten.reshape.default
        elif node.target is aten.adaptive_avg_pool2d.default and tuple(node.args[1]) == (1, 1):
            node.target = aten.mean.dim  # without its strides, which vmap lacks
            node.args = (node.args[0], [-1, -2], True)
        elif node.target is aten._native_batch_norm_legit_no_training.default:
            _as_batch_norm(graph, node)
        elif node.target is aten.batch_norm.default and not node.args[5]:
            node.target = batch_norm
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))


def _as_batch_norm(graph: fx.Graph, node: fx.Node) -> None:
    """A batch norm with one result."""
    x, weight, bias, mean, variance, momentum, epsilon = node.args
    with graph.inserting_before(node):
        plain = graph.call_function(batch_norm, (x, weight, bias, mean, variance, False, momentum, epsilon, False))
    plain.meta["val"] = node.meta["val"][0]
    for user in list(node.users):
        if user.target is operator.getitem and user.args[1] == 0:
            user.replace_all_uses_with(plain)
            graph.erase_node(user)


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, *rest: Any
) -> Tensor:
    """A batch norm in evaluation mode; for several draws at once x * scale + shift, as it is computed inside, too: the rule of
    `torch.vmap` moves the draws to the channels and back. (Half precision is left to torch, which computes in single.)"""
    given = [one for one in (x, weight, bias) if one is not None]
    exact = x.dtype in (torch.float32, torch.float64) and all(one.dtype == x.dtype for one in (*given, mean, variance))
    if not exact or not any(map(torch._C._functorch.is_batchedtensor, given)):
        return aten.batch_norm.default(x, weight, bias, mean, variance, *rest)
    scale = (variance + rest[2]).rsqrt()
    scale = scale if weight is None else scale * weight
    shift = -mean * scale if bias is None else torch.addcmul(bias, mean, scale, value=-1)
    shape = (-1, *[1] * (x.dim() - 2))
    return torch.addcmul(shift.reshape(shape), x, scale.reshape(shape))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
