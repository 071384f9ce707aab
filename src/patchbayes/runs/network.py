"""The network that a run trains: built by name, started by the seed, patched."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..errors import PatchbayesError
from ..layers import is_norm
from ..nets.named import build_net
from ..patching.network import Site, network_of
from ..patching.patch import patch_, patched_sites
from ..patching.report import PatchReport
from ..patching.selection import Sites, select
from ..posteriors import Method, Posterior
from ..prior import GammaPrior, LaplacePrior, LearnedPrior, Prior
from .config import TrainingConfig
from .data_order import PATCHES, stream_seed


def patched_net(
    config: TrainingConfig, num_outputs: int, input_shape: tuple[int, ...], *, trust_code: bool = False
) -> tuple[nn.Module, PatchReport | None]:
    """The network at the start of training, and what was patched (None for vanilla); trust_code as in `build_net`."""
    network = build_net(config.model, num_outputs, input_shape, config.seed, trust_code=trust_code)
    rules = config.rules()
    if not rules:
        return network, None
    report = patch_with_(
        network,
        rules,
        seed=stream_seed(config.seed, PATCHES),
        input_shape=input_shape,
    )
    network_of(network).prior = _prior(config, network)
    _check_together(config, network)
    return network, report


def _prior(config: TrainingConfig, network: nn.Module) -> Prior | LearnedPrior:
    """The prior of a patched network. Learned precisions are set by `maximize_prior_`, not by the optimizer."""
    precision = 1.0 if config.prior_precision is None else config.prior_precision
    if config.prior == "learned":
        return LearnedPrior(network, precision, precision).requires_grad_(False)
    if config.prior == "gamma":
        return GammaPrior(network, 1.0, 1.0 / precision)
    return (LaplacePrior if config.prior == "laplace" else Prior)(precision, precision)


def patch_with_(
    network: nn.Module,
    rules: Mapping[str, Method],
    *,
    seed: int = 0,
    input_shape: tuple[int, ...] | None = None,
) -> PatchReport:
    """Patch a built network in place; a draw for each example is taken where the layer allows it, on norm layers.

    rules: sites -> method, as `posteriors.text.parse_rules` gives them. input_shape: traces which layer is the output.
    """
    example = None if input_shape is None else torch.zeros(2, *input_shape)
    divided: dict[Sites, Method] = {}
    for sites, method in rules.items():
        divided |= _divided(network, sites, method, example)
    generator = torch.Generator().manual_seed(seed)
    return patch_(network, divided, example_input=example, generator=generator)


def _divided(network: nn.Module, sites: str, method: Any, example: Any) -> dict[Sites, Method]:
    """The rule, in two where its method draws for each example: only norm layers can, others draw for the batch."""
    if not getattr(method, "per_example", False):
        return {sites: method}
    chosen = select(network, sites, example).modules
    norms = {name for name, module in chosen.items() if is_norm(module)}
    others = chosen.keys() - norms
    if not norms:
        raise PatchbayesError(
            f'per_example=True: sites="{sites}" has no norm layer, and only norm layers draw for each example.'
        )
    rules: dict[Sites, Method] = {lambda name, _: name in norms: method}
    return rules | ({lambda name, _: name in others: replace(method, per_example=False)} if others else {})


def num_members(network: nn.Module) -> int:
    """Members of an explicit ensemble, which one draw chooses for the whole network; 0 for any other network."""
    posteriors = [site.posterior for site in patched_sites(network).values()]
    groups = [posterior.groups() for posterior in posteriors]
    whole = bool(groups) and all(group is not None and group.tie == "network" for group in groups)
    quiet = all(posterior.noise == "none" for posterior in posteriors)
    return max(posterior.num_components for posterior in posteriors) if whole and quiet else 0


def spreading_sites(network: nn.Module) -> list[Site]:
    """The sites whose spread around their mean can be scaled."""
    found = []
    for site in patched_sites(network).values():
        try:
            copy.deepcopy(site.posterior, {id(site.module): site.module}).scale_spread_(1.0)
        except PatchbayesError:
            continue
        found.append(site)
    return found


def _check_together(config: TrainingConfig, network: nn.Module) -> None:
    """Refuse settings that this patched network would make meaningless."""

    def refuse(name: str, why: str) -> None:
        raise PatchbayesError(f"TrainingConfig({name}={getattr(config, name)!r}, method={config.method!r}): {why}.")

    posteriors = [site.posterior for site in network_of(network).sites]
    if config.draws_per_step != 1 and num_members(network):
        refuse("draws_per_step", "an ensemble trains each of its members in every step")
    if config.sharing and not any(map(_shares, posteriors)):
        refuse("sharing", "no patched layer draws among components that could share a gradient")
    if config.objective == "simplified" and any("law" in posterior.roles().values() for posterior in posteriors):
        refuse("objective", "a law that is learned (a deviation, probabilities) needs the entropy term of the ELBO")
    if config.prior == "laplace" and any(posterior.noise != "none" for posterior in posteriors):
        refuse("prior", "a Laplace prior is for methods without noise, which have the L1 norm of their values")
    if config.jitter_warmup and not spreading_sites(network):
        refuse("jitter_warmup", "no patched layer has a spread that could grow")


def _shares(posterior: Posterior) -> bool:
    groups = posterior.groups()
    return groups is not None and groups.tie == "site" and posterior.num_components > 1


def method_label(model: nn.Module) -> str:
    """ "ECMP(K=5)", "vanilla"; several where sites differ."""
    labels = dict.fromkeys(site.method.label for site in patched_sites(model).values())
    return ", ".join(labels) or "vanilla"
