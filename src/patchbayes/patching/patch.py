"""patch_ and unpatch_: make sites of a network random, in place, and undo it."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..draws.draws import RECORD, Draws, with_article
from ..errors import NotASite, NothingToPatch, NotPatched, PatchbayesError
from ..layers import drawn_values, is_compiled
from ..likelihoods import Categorical, Likelihood, checked_likelihood
from ..posteriors.method import Method
from ..posteriors.posterior import Posterior, own_parameters
from ..prior import LearnedPrior, Prior
from .drawing import check_functions, hold
from .folding import check_foldable, fold_temperature_
from .frames import MEAN
from .network import PatchedNetwork, Site, network_of, own_network, site_of
from .report import PatchReport, number_of_parameters, report_on
from .roots import install_root_, remove_root_
from .selection import Sites, adapter_partner, layers_of, select
from .sites import install_site_, is_tied, remove_site_

Tied = Literal["together", "separate"]


def patch_(
    model: nn.Module,
    method: Method | Mapping[Sites, Method],
    sites: Sites = "norm+output",
    *,
    example_input: Any = None,
    tied: Tied = "together",
    prior: Prior | LearnedPrior | None = None,
    likelihood: Likelihood | None = None,
    generator: torch.Generator | None = None,
) -> PatchReport:
    """Make the chosen layers of a network random, in place; the rest stays shared (section 3).

    method         `EMP()`, `ECMP()`, `Dropout(rate)`, ...; or several rules at once, a mapping from sites to methods, where
                   the first rule that matches a layer wins: `{"norm": EMP(5), "linear": Dropout(0.1)}`.
    sites          words joined by + ("norm", "output", "input", "linear", "conv", "all"; "hidden" is linear and convolution
                   layers but the first and the last; "lora" the adapter matrices of PEFT; "trainable" the layers with
                   parameters that require gradients), globs on module names ("layer4.*"), or a predicate (name, module) ->
                   bool.
    example_input  an input to trace, so that "output" and "input" follow the order of execution; without it they follow
                   the order of registration. A tuple is spread over the arguments, a mapping over the keywords.
    tied           what to do where a site's parameter belongs to other modules too (tied embeddings): "together" makes it
                   random in all of them, with one draw; "separate" unties the site.
    prior          the precisions that `kl` uses; N(0, 1) by default.
    likelihood     what the network's output says about the data, which `predict` then takes for granted: `Categorical()` by
                   default. It belongs to the patched network and its file, with its temperature.
    generator      source of the jitter and of the seed of the network's own draws; a generator with seed 0 by default.

    A site holds its posterior as the child "patchbayes", with the components in the Parameter objects that were the
    layer's, so an optimizer made before still holds them (one that has already stepped holds state of the old shape and is
    refused at its next step). Patch before wrapping in DDP or compiling. Buffers, frozen flags, classes and hooks of the
    network stay. Batch norm: convert to SyncBatchNorm first. Note that momentum and Adam move components that were not drawn
    in a step; plain SGD does not. After an error the network is as it was.
    """
    if not isinstance(model, nn.Module):
        raise PatchbayesError(f"patch_: expected a torch.nn.Module, got {with_article(type(model).__name__)}.")
    _refuse_wrapped(model)
    if likelihood is not None:
        checked_likelihood(likelihood)
    generator = generator or torch.Generator().manual_seed(0)
    network = own_network(model)
    with hold(network, MEAN) if network else contextlib.nullcontext():  # tracing is not a draw
        plan = _plan(model, _rules(method, sites), example_input, tied, generator)
    before = number_of_parameters(model)
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    with untouched_on_error(model):
        if network is None:
            network = PatchedNetwork(seed, prior or Prior(), likelihood or Categorical())
            install_root_(model, network)
        else:
            network.prior, network.likelihood = prior or network.prior, likelihood or network.likelihood
        named = layers_of(model)
        added = [_install(network, chosen, adapter_partner(named, chosen.name), generator) for chosen in plan.sites]
        order = {name: position for position, (name, _) in enumerate(model.named_modules())}
        network.sites.sort(key=lambda site: order[site.name])
        network.lay_out()
    _watch_optimizers()
    plan.notes += _frozen_note(model, added)
    return report_on(model, network, added, before, plan.skipped, plan.notes)


def unpatch_(model: nn.Module, keep: int | Literal["mean"] | Draws = 0, *, example_input: Any = None) -> None:
    """Turn a patched network back into an ordinary one, in place.

    keep           which network to leave: the number of a component (0 is the network that was patched, bit for bit if
                   untrained and not started from another `norm_scale`), "mean" for the mean of every parameter, or one draw, a
                   `Draws` of length 1. Running statistics kept for each component are chosen, or averaged, alike.
    example_input  with keep="mean", of a classifier that `calibrate_` or `bayesianize_` has calibrated: inputs that find the
                   output layer, which is divided by the temperature of the mean network. The softmax of model(x) is then what
                   predict(model, x, draws="mean") gave. Without it, the temperature is lost. After an error the network is
                   as it was.
    """
    network = network_of(model)
    if own_network(model) is None:
        raise NotPatched("unpatch_: call it on the network that was patched, not on a module that holds it.")
    if example_input is not None:
        check_foldable(network.likelihood, keep)
    with torch.no_grad():
        plan = [(site, _collapsed(network, site, keep)) for site in network.sites]
    with untouched_on_error(model) if example_input is not None else contextlib.nullcontext():
        for site, values in plan:
            remove_site_(site, values)
        remove_root_(model)
        if example_input is not None:
            fold_temperature_(model, float(network.likelihood.mean_temperature), example_input)


def is_patched(model: nn.Module) -> bool:
    """Whether `model` is, wraps or contains a patched network."""
    return any(RECORD in module.__dict__ for module in model.modules())


@contextlib.contextmanager
def untouched_on_error(model: nn.Module) -> Iterator[None]:
    """If the block fails, everything that patching changes is put back: classes, attributes, parameters and their values."""
    modules = [(m, type(m), [(m.__dict__, dict(m.__dict__))]) for m in model.modules()]
    for module, _, held in modules:
        held += [(value, dict(value)) for value in module.__dict__.values() if isinstance(value, dict)]
    parameters = [(p, p.data, p.grad, p.requires_grad, dict(p.__dict__)) for p in model.parameters()]
    network = own_network(model)
    record = {} if network is None else {**network.__dict__, "sites": list(network.sites)}
    try:
        yield
    except BaseException:
        for module, cls, held in modules:
            module.__class__ = cls
            for container, content in held:
                container.clear()
                container.update(content)
        for parameter, data, gradient, learned, extra in parameters:
            parameter.data, parameter.grad = data, gradient
            parameter.requires_grad_(learned)
            parameter.__dict__.clear()
            parameter.__dict__.update(extra)
        if network is not None:
            network.__dict__.update(record)
            network.lay_out()
        raise


def patched_sites(model: nn.Module) -> dict[str, Site]:
    """The sites of a patched network by module name; empty for an ordinary network."""
    return {site.name: site for site in network_of(model).sites} if is_patched(model) else {}


@dataclass
class _Chosen:
    name: str
    module: nn.Module
    method: Method
    posterior: Posterior
    tied: dict[str, list[tuple[str, nn.Module, str]]]
    untie: tuple[str, ...]


@dataclass
class _Plan:
    sites: list[_Chosen]
    skipped: dict[str, str]
    notes: list[str]


def _rules(method: Method | Mapping[Sites, Method], sites: Sites) -> list[tuple[Sites, Method]]:
    rules = list(method.items()) if isinstance(method, Mapping) else [(sites, method)]
    for _, one in rules:
        if not isinstance(one, Method):
            given = f"{one.__name__} (without parentheses)" if callable(one) and hasattr(one, "__name__") else repr(one)
            raise PatchbayesError(
                f"patch_: {given} is not a method; give one such as EMP(components=5) or Dropout(0.005)."
            )
    if not rules:
        raise PatchbayesError("patch_: the mapping of rules is empty; give at least one {sites: method}.")
    return rules


def _plan(
    model: nn.Module, rules: list[tuple[Sites, Method]], example_input: Any, tied: Tied, generator: torch.Generator
) -> _Plan:
    """Everything that can fail, before anything is changed."""
    if tied not in ("together", "separate"):
        raise PatchbayesError(f'patch_(tied={tied!r}): give "together" or "separate".')
    owners = _owners(model)
    plan = _Plan([], {}, [])
    taken: dict[int, str] = {}
    for sites, method in rules:
        # a network of two layers has none between them: no reason to refuse the other rules
        selection = select(model, sites, example_input, required=len(rules) == 1 or sites != "hidden")
        plan.notes += [note for note in selection.notes if note not in plan.notes]
        plan.skipped |= {name: why for name, why in selection.skipped.items() if name not in plan.skipped}
        for name, module in selection.modules.items():
            why = _why_not(module, taken)
            if why is not None:
                plan.skipped[name] = why
                continue
            if any(chosen.module is module for chosen in plan.sites):
                continue
            try:
                posterior = method.posterior(module, generator)
            except NotASite as error:
                plan.skipped[name] = str(error)
                continue
            except PatchbayesError as error:
                raise PatchbayesError(f'patch_ at "{name}": {error}') from None
            shared = {n: owners[id(module._parameters[n])] for n in posterior.names}
            shared = {n: [o for o in all_of if o[1] is not module] for n, all_of in shared.items() if len(all_of) > 1}
            if shared:
                others = ", ".join(f'"{o[0]}.{o[2]}"' for all_of in shared.values() for o in all_of)
                plan.notes.append(f'"{name}" shares a parameter with {others}: {_TIED_NOTES[tied]}')
            if tied == "together":
                taken |= {id(module._parameters[n]): name for n in shared}
                plan.sites.append(_Chosen(name, module, method, posterior, shared, ()))
            else:
                plan.sites.append(_Chosen(name, module, method, posterior, {}, tuple(shared)))
    if not plan.sites:
        reasons = "; ".join(f'"{name}": {why}' for name, why in list(plan.skipped.items())[:5])
        raise NothingToPatch(
            f"patch_ found nothing left to patch in {type(model).__name__}.\n  skipped  {reasons}\n"
            "  do       choose other sites, or unpatch_(model) first to start over."
        )
    _check_networkwide(model, plan)
    return plan


_TIED_NOTES = {"together": "patched together, one draw for both", "separate": "untied, the others keep the old value"}


def _why_not(module: nn.Module, taken: dict[int, str]) -> str | None:
    if site_of(module) is not None or is_tied(module):
        return "already patched"
    parameters = own_parameters(module)
    if nn.utils.parametrize.is_parametrized(module):
        return "has a parametrization of another kind"
    if not parameters:
        return "no floating-point parameters of its own"
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in parameters.values()):
        return "not initialized yet (lazy module): run a batch through the network first"
    if any(p.is_meta for p in parameters.values()):
        return "its parameters are on the meta device and have no values yet: load the weights first"
    tied_to = next((taken[id(p)] for p in parameters.values() if id(p) in taken), None)
    return f'shares its parameter with "{tied_to}" and is patched together with it' if tied_to is not None else None


def _owners(model: nn.Module) -> dict[int, list[tuple[str, nn.Module, str]]]:
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for name, module in layers_of(model).items():
        for parameter_name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((name, module, parameter_name))
    return owners


def _check_networkwide(model: nn.Module, plan: _Plan) -> None:
    network = own_network(model)
    existing = [site.posterior for site in network.sites] if network else []
    laws = set()
    for posterior in [*existing, *(chosen.posterior for chosen in plan.sites)]:
        groups = posterior.groups()
        if groups is not None and groups.tie == "network":
            laws.add((groups, posterior.probabilities()))
    if len(laws) > 1:
        raise PatchbayesError('patch_: sites with tie="network" share one draw, so their components and p must agree.')


def _frozen_note(model: nn.Module, added: list[Site]) -> list[str]:
    """Where no patch can learn though other parts of the network do, as with adapters: said aloud."""
    if any(p.requires_grad for site in added for p in site.parameters().values()):
        return []
    note = (
        'every patched layer is frozen, so training moves no patch: choose sites="trainable" or "lora", or unfreeze them; '
        "calibrate_ works without training"
    )
    if any(p.requires_grad for p in model.parameters()):
        warnings.warn(f"patch_: {note}.", stacklevel=3)
    return [note]


def _install(network: PatchedNetwork, chosen: _Chosen, partner: nn.Module | None, generator: torch.Generator) -> Site:
    module = chosen.module
    order = tuple(module._parameters)
    for name in chosen.untie:
        parameter = module._parameters[name]
        assert parameter is not None
        module._parameters[name] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    values: dict[str, Tensor] = {name: p.detach() for name, p in own_parameters(module).items()}
    layouts = {name: torch.channels_last for name, value in values.items() if _is_channels_last(value)}
    shapes = {name: tuple(p.shape) for name, p in module._parameters.items() if p is not None}
    site = Site(chosen.name, module, network, order, chosen.tied, layouts, shapes)
    network.sites.append(site)
    if partner is not None:  # where a layer is all zero, its jitter is relative to what it is multiplied with
        held = [p for p in partner._parameters.values() if p is not None] + drawn_values(partner)
        values |= {f"partner.{number}": p.detach() for number, p in enumerate(held)}
    try:
        install_site_(site, chosen.posterior, values, generator)
    except (RuntimeError, MemoryError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PatchbayesError(f'patch_ at "{chosen.name}" with {chosen.method.label}: {first}') from error
    return site


def _is_channels_last(value: Tensor) -> bool:
    return value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last) and not value.is_contiguous()


def _collapsed(network: PatchedNetwork, site: Site, keep: int | str | Draws) -> dict[str, Tensor]:
    if isinstance(keep, Draws):
        network.check(keep)
        check_functions(network, "unpatch_(keep=draws)")
        if len(keep) != 1:
            raise PatchbayesError(f"unpatch_: one draw can be kept, got {len(keep)}; pass draws[i].")
        return site.realized(keep.network_draw(0, network.device))
    if keep == "mean":
        return site.posterior.mean()
    if isinstance(keep, bool) or not isinstance(keep, int):
        raise PatchbayesError(f'unpatch_(keep={keep!r}): expected the number of a component, "mean", or one draw.')
    return site.posterior.component(keep)


def _refuse_wrapped(model: nn.Module) -> None:
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    if isinstance(model, wrappers) or is_compiled(model):
        raise PatchbayesError(
            f"patch_ was given a {type(model).__name__}: patch the network first, then wrap or compile it.\n"
            "  do       patch_(model.module, ...) before DDP, patch_(model, ...) before torch.compile(model)."
        )
    inner = [name for name, module in model.named_modules() if name and RECORD in module.__dict__]
    if inner:
        raise PatchbayesError(
            f'patch_: the part "{inner[0]}" is a patched network already; a draw belongs to one network.\n'
            f"  do       unpatch_ that part, and patch the whole in one call with rules for its parts."
        )


_watching, _times_patched = False, 0
_SEEN = "_patchbayes_seen"  # of an optimizer: the state that was looked through, and after how many calls of patch_


def _watch_optimizers() -> None:
    """Once a process: refuse the step of an optimizer whose state still has the shape from before patching."""
    global _watching, _times_patched
    _times_patched += 1
    if not _watching:
        _watching = True
        register_optimizer_step_pre_hook(_refuse_old_state)


def _refuse_old_state(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    seen = optimizer.__dict__.get(_SEEN)
    if seen is not None and seen[0] is optimizer.state and seen[1] == _times_patched:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            before = parameter.__dict__.get("_patchbayes_shape_before")
            if before is None or before == tuple(parameter.shape) or not before:
                continue
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and tuple(value.shape) == before:
                    raise PatchbayesError(
                        f"{type(optimizer).__name__} was made, and had stepped, before patch_: its {name} has the shape "
                        f"{before}, the patched parameter {tuple(parameter.shape)}.\n"
                        f"  do       make the optimizer anew after patch_(model, ...)."
                    )
    if optimizer.state:  # whose shapes stay right until a state is loaded or a network patched
        optimizer.__dict__[_SEEN] = (optimizer.state, _times_patched)
