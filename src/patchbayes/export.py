"""The averaged prediction as one file: fixed draws, the shared part computed once, temperature inside.

`torch.export` (".pt2") needs nothing else; ".onnx" needs the extra `patchbayes[export]`.
"""

import inspect
import io
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

from .draws.draws import Draws
from .errors import PatchbayesError
from .files import write_atomically
from .likelihoods import Likelihood, checked_likelihood
from .likelihoods.likelihood import tempered
from .patching.network import PatchedNetwork, network_of
from .patching.selection import as_tensor
from .prediction.batches import on_device
from .prediction.engine import Engine
from .prediction.engine.classes import Chosen
from .prediction.engine.execution import Execution
from .prediction.engine.route import Route
from .prediction.predict import Sampling, make_draws
from .prediction.viewing import Viewing
from .views import Views

FORMAT = "patchbayes-export-1"


@dataclass(frozen=True)
class Exported:
    """What `export` wrote: where, how large, the names of inputs and outputs, and how many networks are averaged in it."""

    path: Path
    size: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    num_draws: int
    networks: int


def export(
    model: nn.Module,
    path: str | Path,
    draws: int | Draws | Literal["exact"] = 32,
    *,
    example_input: Any,
    likelihood: Likelihood | None = None,
    sampling: Sampling = "balanced",
    generator: torch.Generator | None = None,
    output: Callable[[Any], Tensor] | None = None,
    views: Views | None = None,
    classes: Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Exported:
    """Write the averaged predictor with fixed draws as one graph: "m.onnx" for ONNX, "m.pt2" for `torch.export`.

    Inputs are the network's, with any batch size. Outputs are `probs`, `entropy` and `mutual_information` of a classifier or
    of labels, `mean`, `variance` and `epistemic_variance` of a regression: what `predict` says with the same draws, with the
    temperature of the likelihood, up to rounding. What draws have in common is computed once; where few networks exist, all
    are in the file, without Monte-Carlo error. The file holds the network once, and of every patched layer the weights of
    its distinct draws.

    example_input   a batch, as for `predict`.
    draws, likelihood, sampling, generator, output   as for `predict`.
    views           `patchbayes.views`, one for each draw, as for `predict`; a fixed list of them.
    classes         their names, for the metadata.
    metadata        what else to write there as JSON: a measured calibration, say.

    The metadata ("patchbayes" in the file) names the format, draws, method of each site, likelihood, temperature and classes.
    """
    path = Path(path)
    if path.suffix not in (".onnx", ".pt2"):
        raise PatchbayesError(f'export: expected a file name that ends in ".onnx" or ".pt2", got "{path.name}".')
    network = network_of(model)
    for site in network.sites:
        if site.posterior.noise == "example":
            raise PatchbayesError(
                f'export: "{site.name}" ({site.method.label}) draws anew for every example, which a file cannot do.\n'
                "  do       patch it with a method whose draws are weights (EMP, ECMP, DropConnect, MeanField), or export "
                "the mean network with torch.export."
            )
    if isinstance(draws, str) and draws != "exact":
        raise PatchbayesError(
            f'export(draws={draws!r}): expected a number of draws, Draws or "exact".\n'
            '  do       for one pass, unpatch_(model, keep="mean", example_input=x), and torch.onnx.export.'
        )
    likelihood = checked_likelihood(likelihood or network.likelihood)
    made = make_draws(model, network, draws, sampling, generator)
    if views is not None and not isinstance(views, Views):
        raise PatchbayesError(
            f"export(views={views!r}): expected a fixed list of views (patchbayes.views.mirror, shifts(), crops(), "
            "Views([...])); a function that makes a view for each draw is not written to files."
        )
    engine = Engine(model, network, made, mode="graph", memory_limit=None)
    batch = on_device(example_input, network.device)
    every = list(range(len(made)))
    parts = [(0, every, engine)] if views is None else Viewing(views, engine).parts
    if views is not None and not network.sites:  # one network, which sees every view
        parts = [(view, every, engine) for view in range(len(views))]
    routes = [(view, some, one.route(batch, output or as_tensor)) for view, some, one in parts]
    averaged = _Averaged(routes, views, made, likelihood)
    leaves = [leaf for leaf in tree_flatten(_call_arguments(batch))[0] if isinstance(leaf, Tensor)]
    program = _program(averaged, leaves, routes[0][2])
    names = _input_names(model, batch)
    described = _describe(network, made, likelihood, averaged.names, views, classes, metadata)
    content = (_onnx if path.suffix == ".onnx" else _pt2)(program, names, averaged.names, described)
    write_atomically(path, content)
    networks = sum(len(route.itinerary.order) for _, _, route in routes)
    return Exported(path, len(content), tuple(names), averaged.names, len(made), networks)


class _Averaged(nn.Module):
    """The averaged prediction of fixed draws as a module: tensors in, the named outputs out.

    routes   for each view (one, without views): its number, the draws that see it, and their way through the network.
    """

    def __init__(
        self, routes: list[tuple[int, list[int], Route]], views: Views | None, draws: Draws, likelihood: Likelihood
    ) -> None:
        super().__init__()
        self.views, self.likelihood = views, likelihood
        self.temperature, self.draw_temperature = float(likelihood.temperature), float(likelihood.draw_temperature)
        known: dict[int, str] = {}
        self.parts = [(view, route, self._held(part, route, known)) for part, (view, _, route) in enumerate(routes)]
        weights = [
            float(draws.weights[[some[i] for i in m]].sum()) for _, some, r in routes for m in r.itinerary.members
        ]
        self.register_buffer("weights", torch.tensor(weights) / sum(weights))
        self.names = _OUTPUTS[_kind(likelihood)]

    def _held(self, part: int, route: Route, known: dict[int, str]) -> dict[fx.Node, str]:
        """The buffers in which the values of a graph's inputs are; those of the network are there once."""
        held: dict[fx.Node, str] = {}
        for node, source in route.network.capture.sources.items():
            if source.kind in ("live", "constant"):
                value = source.value([], torch.zeros(0))
                held[node] = known.setdefault(id(value), f"network_{len(known)}")
                self.register_buffer(held[node], value.detach())
            elif source.kind == "drawn":
                held[node] = f"drawn_{part}_{source.place}_{len(held)}"
                self.register_buffer(held[node], route.realization.whole(source.place)[source.name].detach())
        return held

    def forward(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        outputs = torch.cat([self._outputs(*part, arguments) for part in self.parts])
        said, weights = self.likelihood.predictive(outputs.float()), self.get_buffer("weights")
        return _AVERAGES[_kind(self.likelihood)](said, weights, self.temperature, self.draw_temperature)

    def _outputs(self, view: int, route: Route, held: dict[fx.Node, str], arguments: tuple[Tensor, ...]) -> Tensor:
        capture = route.network.capture
        given = iter(arguments if self.views is None else self.views.view(arguments, view))
        leaves = [next(given) if shape is not None else None for shape in capture.shapes]
        kinds = {node: source.kind for node, source in capture.sources.items()}
        fixed: dict[fx.Node, Any] = {
            node: self.get_buffer(name) for node, name in held.items() if kinds[node] != "drawn"
        }
        fixed |= {n: leaves[s.place] for n, s in capture.sources.items() if s.kind == "argument"}
        baked = _Baked(
            {(s.place, s.name): self.get_buffer(held[n]) for n, s in capture.sources.items() if s.kind == "drawn"}
        )
        one_by_one = [1] * len(route.stages)  # rules of vmap would take the batch size for a constant
        execution = Execution(route.network, route.stages, route.itinerary, baked, fixed, one_by_one)
        wanted = [capture.outputs[leaf] for leaf in route.picked.leaves]
        ((members, values),) = execution.run(len(route.itinerary.order), wanted)
        return route.picked.collect(values, len(members))


class _Baked:
    """Drawn tensors by site and name, in the place of a `Realization`."""

    def __init__(self, drawn: dict[tuple[int, str], Tensor]) -> None:
        self.drawn = drawn

    def one(self, site: int, name: str, number: int) -> Tensor:
        return self.drawn[site, name][number]

    def several(self, site: int, name: str, chosen: Chosen) -> tuple[Tensor, int | None]:
        whole = self.drawn[site, name]
        if chosen.same or chosen.run.stop:
            return chosen.of(whole)
        return torch.stack([whole[number] for number in chosen.numbers.tolist()]), 0


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    return (weights.reshape(-1, *[1] * (values.dim() - 1)) * values).sum(0)


def _entropy(log_probs: Tensor) -> Tensor:
    probs = log_probs.exp()
    return -torch.where(probs > 0, probs * log_probs.clamp_min(-1e4), torch.zeros_like(probs)).sum(-1)


def _class_averages(
    said: Mapping[str, Tensor], weights: Tensor, temperature: float, draw_temperature: float
) -> tuple[Tensor, ...]:
    log_probs = said["log_probs"]
    log_weights = weights.log().reshape(-1, *[1] * (log_probs.dim() - 1))
    unsoftened = torch.logsumexp(log_probs + log_weights, 0)
    disagreement = _entropy(unsoftened) - _weighted(weights, _entropy(log_probs))
    averaged = unsoftened
    if draw_temperature != 1:
        averaged = torch.logsumexp(tempered(said, draw_temperature)["log_probs"] + log_weights, 0)
    final = averaged if temperature == 1 else torch.log_softmax(averaged / temperature, -1)
    return final.exp(), _entropy(final), disagreement.clamp_min(0)


def _label_averages(
    said: Mapping[str, Tensor], weights: Tensor, temperature: float, draw_temperature: float
) -> tuple[Tensor, ...]:
    pairs = torch.stack([nn.functional.logsigmoid(said["logits"]), nn.functional.logsigmoid(-said["logits"])], -1)
    probs, entropy, disagreement = _class_averages({"log_probs": pairs}, weights, temperature, draw_temperature)
    return probs[..., 0], entropy, disagreement


def _moments(
    said: Mapping[str, Tensor], weights: Tensor, temperature: float, _draw_temperature: float
) -> tuple[Tensor, ...]:
    means, variances = (v.unsqueeze(-1) if v.dim() == 2 else v for v in (said["mean"], said["variance"]))
    mean = _weighted(weights, means)
    between = temperature * _weighted(weights, (means - mean).square())
    return mean, between + temperature * _weighted(weights, variances), between


_OUTPUTS: dict[str, tuple[str, ...]] = {
    "classes": ("probs", "entropy", "mutual_information"),
    "labels": ("probs", "entropy", "mutual_information"),
    "moments": ("mean", "variance", "epistemic_variance"),
}
_AVERAGES = {"classes": _class_averages, "labels": _label_averages, "moments": _moments}


def _kind(likelihood: Likelihood) -> str:
    kinds = {"ClassPrediction": "classes", "LabelPrediction": "labels"}
    return kinds.get(likelihood.offers, "moments")


def _call_arguments(batch: Any) -> Any:
    if isinstance(batch, tuple):
        return batch, {}
    return ((), dict(batch)) if isinstance(batch, Mapping) else ((batch,), {})


def _program(averaged: _Averaged, leaves: list[Tensor], route: Route) -> Any:
    """The averaged prediction as an exported program, with the sizes open that are open in the captured network."""
    shapes = [shape for shape in route.network.capture.shapes if shape is not None]
    static, dynamic = torch.export.Dim.STATIC, torch.export.Dim.AUTO
    sizes = tuple({a: dynamic if size is None else static for a, size in enumerate(shape)} for shape in shapes)
    examples = tuple(torch.cat([t, t]) if t.shape[:1] == (1,) else t for t in leaves)  # one would be a constant
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(averaged, examples, dynamic_shapes=(sizes,), strict=False)
    except Exception as error:
        raise PatchbayesError(
            f"export: the averaged network cannot be written as one graph ({type(error).__name__}: {error}).\n"
            "  do       serve it with pb.Predictor instead."
        ) from error


def _input_names(model: nn.Module, batch: Any) -> list[str]:
    args, kwargs = _call_arguments(batch)
    parameters = [p for p in inspect.signature(model.forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
    given = [p.name if p.kind is not p.VAR_POSITIONAL else f"input_{i}" for i, p in enumerate(parameters[: len(args)])]
    named = [*zip(given, args, strict=False), *kwargs.items()]
    names = []
    for name, value in named:
        tensors = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]
        names += [name] if len(tensors) == 1 else [f"{name}_{i}" for i in range(len(tensors))]
    return names


def _describe(
    network: PatchedNetwork,
    draws: Draws,
    likelihood: Likelihood,
    outputs: tuple[str, ...],
    views: Views | None,
    classes: Sequence[str] | None,
    metadata: Mapping[str, Any] | None,
) -> str:
    content = {
        "format": FORMAT,
        "draws": len(draws),
        "sampling": "+".join(sorted(draws.schemes)),
        "exact": draws.is_exact,
        "methods": {site.name: site.method.config() for site in network.sites},
        "likelihood": likelihood.config(),
        "temperature": float(likelihood.temperature),
        "draw_temperature": float(likelihood.draw_temperature),
        "outputs": list(outputs),
        "views": views.name if views is not None else None,
        "classes": list(classes) if classes is not None else None,
        **dict(metadata or {}),
    }
    return json.dumps(content)


def _pt2(program: Any, names: list[str], outputs: tuple[str, ...], described: str) -> bytes:
    for node in program.graph.nodes:  # the lines of Python that it came from: more bytes than a small network has
        for name in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            node.meta.pop(name, None)
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={"patchbayes": described})
    return buffer.getvalue()


def _onnx(program: Any, names: list[str], outputs: tuple[str, ...], described: str) -> bytes:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise PatchbayesError(
            'export to ".onnx" needs the packages onnx and onnxscript.\n  do       pip install "patchbayes[export]"; '
            'or export to ".pt2".'
        ) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = torch.onnx.export(
                program, dynamo=True, input_names=names, output_names=list(outputs), verbose=False, optimize=False
            )
    except Exception as error:
        unsupported = ", ".join(sorted(set(_unsupported(error))))
        raise PatchbayesError(
            f"export: ONNX has no form for {unsupported or 'an operation of this network'} ({type(error).__name__}).\n"
            '  do       export to ".pt2", or replace that operation.'
        ) from error
    assert made is not None
    proto = made.model_proto
    _strip(proto.graph)
    for function in proto.functions:
        _strip(function)
    entry = proto.metadata_props.add()
    entry.key, entry.value = "patchbayes", described
    return proto.SerializeToString()


def _strip(graph: Any) -> None:
    """Drop what says from which line of Python a node came: more bytes than a small network has."""
    graph.doc_string = ""
    del graph.metadata_props[:], graph.value_info[:]
    for node in graph.node:
        node.doc_string = ""
        del node.metadata_props[:]
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _strip(inner)


def _unsupported(error: BaseException | None) -> Iterator[str]:
    """Names of operations in the messages of an error and of what caused it."""
    while error is not None:
        yield from re.findall(r"op='([\w.]+)'", str(error))
        error = error.__cause__ or error.__context__
