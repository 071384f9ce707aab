"""The training objective: KL, negative ELBO, and the simplified L2 loss. The only file that knows scales."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .draws.layout import NetworkDraw
from .draws.randomness import fold
from .draws.schemes import assign
from .errors import PatchbayesError
from .likelihoods import Categorical, Likelihood, checked_likelihood
from .patching.assignment import expected_log_prob
from .patching.drawing import DrawnOutputs
from .patching.frames import last_draw
from .patching.network import PatchedNetwork, Site, network_of, root_of
from .patching.sharding import refuse_sharded
from .posteriors.posterior import CHILD, KL, Entropy, Posterior, PriorTerms, is_bias, quadratic
from .prior import GammaPrior, LaplacePrior, LearnedPrior, Prior


def kl(
    model: nn.Module,
    prior: Prior | LearnedPrior | None = None,
    *,
    shared: bool = True,
    frozen: bool = False,
    entropy: Entropy | None = None,
) -> Tensor:
    """KL(q || prior) of the whole network, (), in nats: for all N training examples together.

        sum_{patched i} sum_k tau_i p_ik / 2 ||M_ik||^2 + sum_{patched j} sum_k rho_j p_jk / 2 ||m_jk||^2
        + sum_{shared i} tau_i / 2 ||M_i||^2 + sum_{shared j} rho_j / 2 ||m_j||^2            Eqs. (2) and (6)

    Divide by the number of training examples, never by the batch size: `loss = cross_entropy + kl(model) / num_data`. Do
    not use weight decay as well; it is the same term.

    prior     precisions; by default those given to `patch_` (1).
    shared    whether shared parameters count. With False, leave them to the optimizer's weight decay.
    frozen    whether parameters count that are not trained (requires_grad is False): they add a constant to the KL, and on a
              large frozen base that constant costs more time than all the rest.
    entropy   None: the equations above, up to a constant in M and m (with a `LearnedPrior` all terms in tau and rho are kept,
              which are then not constant). "lower": the whole KL with the entropy of the mixture bounded from below by
              sum_k p_k H_k, so an upper bound on the KL and a valid lower bound on the evidence; needs sigma > 0 on all
              counted parameters. "upper": the same with sum_k p_k H_k + H(p) for every independent draw: a lower bound on
              the KL. Between the two lies the truth. Mean-field sites are exact in any case.

    Where mixing probabilities are learned, log K - H(p) is added for every independent draw: the divergence of the assignment
    from a uniform prior. Posteriors without a closed form (learned sigma, flows) are estimated with one draw of their own,
    another one after every forward pass.

    Deviation: Eq. (7) of the paper states the bound sum_k p_k H_k with the inequality reversed.
    """
    if entropy not in (None, "lower", "upper"):
        raise PatchbayesError(f'kl(entropy={entropy!r}): give None, "lower" or "upper".')
    root, network = root_of(model)
    refuse_sharded(network, "kl")
    prior = prior or network.prior
    if entropy is not None and isinstance(prior, LaplacePrior):
        raise PatchbayesError(
            f'kl(entropy="{entropy}") with a LaplacePrior: it is for posteriors without noise, or entropy.'
        )
    terms: list[Tensor] = []
    counted: set[int] = set()
    for site in network.sites:
        posterior = site.posterior
        here = site.parameters()
        counted |= {id(parameter) for parameter in here.values()}
        tau, rho = prior.precisions(site.name)
        inside = [p for name, p in here.items() if name.startswith(f"{CHILD}.") or name in posterior.kept]
        if frozen or any(p.requires_grad for p in inside):
            draw = site.draw_of(_draw_for_kl(network)) if posterior.kl_draws else None
            if isinstance(prior, LaplacePrior):
                found = _laplace_kl(site, tau, rho)
            else:
                found = posterior.kl(PriorTerms(tau, rho, prior.learned, entropy), draw)
            terms.append(found.value)
            if entropy != "upper" and found.kind != "monte_carlo":  # an estimate has the law of the mixture inside
                terms += _divergence_of_law(network, site)
        for name, parameter in _fixed(site).items():
            if not (frozen or parameter.requires_grad):
                continue
            if entropy is not None:
                raise PatchbayesError(
                    f'kl(entropy="{entropy}"): the fixed parameter "{name}" has no noise, so no entropy.'
                )
            terms.append(_kl_of_point(prior, rho if is_bias(name) else tau, parameter))
    if shared:
        for layer, name, parameter in _own_parameters(root):
            if id(parameter) in counted or not (frozen or parameter.requires_grad):
                continue
            counted.add(id(parameter))
            if entropy is not None:
                raise PatchbayesError(
                    f'kl(entropy="{entropy}"): the shared parameter "{layer}.{name}" has no sigma, so no entropy.\n'
                    '  do       patch_ the rest with {"*": GaussianNoise(sigma)} too, or pass shared=False.'
                )
            tau, rho = prior.precisions(layer)
            terms.append(_kl_of_point(prior, rho if is_bias(name) else tau, parameter))
    if isinstance(prior, GammaPrior):
        terms.append(prior.divergence())
    if not terms:
        reference = next(model.parameters())
        return torch.zeros((), dtype=reference.dtype, device=reference.device)
    total = torch.stack([term.to(terms[0]) for term in terms]).sum()  # in the precision of the network
    if entropy == "upper":
        total = total - _assignment_entropy(network)
    return total


def _kl_of_point(prior: Prior | LearnedPrior, precision: Tensor | float, parameter: Tensor) -> Tensor:
    """Of a parameter that is not random, up to a constant."""
    if isinstance(prior, LaplacePrior):
        return precision * parameter.abs().sum()
    return quadratic(precision, parameter.square().sum(), parameter.numel(), normalized=prior.learned)


def _laplace_kl(site: Site, tau: Tensor | float, rho: Tensor | float) -> KL:
    """sum_k p_k tau |M_k|_1 over the components of a site, up to a constant."""
    posterior, groups = site.posterior, site.posterior.groups()
    number = groups.outcomes if groups is not None else 1
    if posterior.noise != "none" or number not in (posterior.num_components, posterior.num_components + 1):
        raise PatchbayesError(
            f'LaplacePrior at "{site.name}": {site.method.label} is not a choice among components without noise.\n'
            "  do       EMP, ECMP, an ensemble or DropConnect there, or the Gaussian Prior."
        )
    log_p = posterior.log_p()
    p = [1 / number] * number if log_p is None else log_p.exp().unbind(0)
    terms = [
        p[k] * (rho if is_bias(name) else tau) * posterior.component(k)[name].abs().sum()
        for k in range(number)
        for name in posterior.names
    ]
    return KL(torch.stack([torch.as_tensor(term) for term in terms]).sum(), "exact")


def _draw_for_kl(network: PatchedNetwork) -> NetworkDraw:
    """A draw for estimates of the KL: another one after every forward pass of this thread, whoever made that pass's draw."""
    key = fold(fold(last_draw(network).key, 3), network.generator[1])
    return NetworkDraw(key, assign(network.law(), key, 0, network.layout.num_groups, network.device))


def _divergence_of_law(network: PatchedNetwork, site: Site) -> list[Tensor]:
    """log K - H(p) for every draw whose law the site has and learns: KL(Cat(p) || uniform). Without it p runs into a corner."""
    if site not in network.owners or not site.posterior.learns_law:
        return []
    log_p, groups = site.posterior.log_p(), site.posterior.groups()
    assert log_p is not None
    assert groups is not None
    return [groups.length * (math.log(groups.outcomes) + (log_p.exp() * log_p).sum())]


def _fixed(site: Site) -> dict[str, nn.Parameter]:
    """The layer's own parameters that its posterior neither draws nor keeps."""
    kept = set(site.posterior.names) | set(site.posterior.kept)
    return {name: p for name, p in site.module._parameters.items() if p is not None and name not in kept}


def negative_elbo(
    outputs: Tensor,
    targets: Tensor,
    kl_total: Tensor | float,
    *,
    num_data: int,
    likelihood: Likelihood | None = None,
) -> Tensor:
    """Negative evidence lower bound per training example, in nats (appendix B.2; Eq. 9 for regression).

        -ELBO / N = -(1 / S B) sum_s sum_b log p(y_b | x_b, w_s) + KL(q || p) / N

    Draws are averaged outside the logarithm. This is not the loss of the averaged prediction, which is never larger.

    outputs (S, B, C) from `forward_draws` (one draw: `model(x)[None]`): logits for `Categorical`, means for `Gaussian`.
    Enumerated draws bring their probabilities with them, and are weighed by these instead of 1 / S.
    targets (B,) class numbers, or (B, D); with more axes the terms of an example are summed.
    kl_total (): `kl(model)`, not yet divided by anything. num_data: N.

    Deviation: appendix B drops the 1/S once, and Eq. (9) the constants of the Gaussian density; both are here.
    """
    if not isinstance(num_data, int) or num_data < 1:
        raise PatchbayesError(f"negative_elbo(num_data={num_data!r}): the number of training examples, at least 1.")
    likelihood = checked_likelihood(likelihood or Categorical())
    if outputs.dim() < 2 or outputs.shape[1:2] != targets.shape[:1]:
        raise PatchbayesError(
            f"negative_elbo: outputs are (S, B, ...) and targets (B, ...); given were {tuple(outputs.shape)} and "
            f"{tuple(targets.shape)}.\n  do       pass model(x)[None] for a single draw, or forward_draws(model, x, draws=S)."
        )
    weights = outputs.draw_weights if isinstance(outputs, DrawnOutputs) else None
    plain = outputs.as_subclass(Tensor)
    if isinstance(outputs, DrawnOutputs) and outputs.law is not None:
        return -expected_log_prob(likelihood, plain, targets, weights, outputs.law) + kl_total / num_data
    return -likelihood.expected_log_prob(plain, targets, weights) + kl_total / num_data


@dataclass(frozen=True)
class Lambdas:
    """The four weights of the simplified loss (appendix C.1): Loss + l1 sum ||M_ik||^2 + l2 ... + l3 ... + l4 ...

    Equal lambdas on all components mean a prior precision K times larger on patched layers than on shared ones.
    """

    patched_weights: float = 0.0
    patched_biases: float = 0.0
    shared_weights: float = 0.0
    shared_biases: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise PatchbayesError(f"Lambdas({name}={value!r}): a penalty weight is at least 0.")

    @classmethod
    def equal(cls, value: float) -> "Lambdas":
        """All four the same. The paper's experiments take 0.001 / batch size."""
        return cls(value, value, value, value)


def l2_penalty(model: nn.Module, lambdas: Lambdas) -> Tensor:
    """The penalty of the simplified loss, (): sum over the four groups of lambda * ||parameters||^2 (appendix C.1).

    Add it to a mean loss as it is. Deviation: the paper's last sum runs over patched layers; shared ones are meant.
    """
    weights = vars(lambdas)
    terms = [
        weights[group] * parameter.square().sum()
        for group, parameters in _groups(model).items()
        for parameter in parameters
        if group in weights
    ]
    return torch.stack(terms).sum()


def parameter_groups(
    model: nn.Module, lambdas: Lambdas | None = None, *, patch_lr: float | None = None, **options: Any
) -> list[dict[str, Any]]:
    """The groups of parameters for an optimizer, with names: the simplified loss as weight decay.

    For optimizers with coupled decay (SGD, Adam), weight_decay = 2 lambda has the gradient of `l2_penalty`; AdamW's is
    another thing. `options` go to every group. Use the groups also to freeze the shared parameters. Besides the four of
    `Lambdas` there is "law" for learned deviations and probabilities, which are never decayed. Frozen parameters are left out,
    and so are empty groups.

    patch_lr   learning rate of what the patches brought: a component is drawn in one of K steps, learns slower than the rest
               at the plain rate, and keeps up at K times that. The layers' own weights below dropout are not meant: they form
               groups of their own then, "patched_weights_kept" and "patched_biases_kept".
    """
    lambdas = lambdas or Lambdas()
    kept = {id(p) for site in network_of(model).sites for p in site.module._parameters.values()}
    groups: list[dict[str, Any]] = []
    brought = 0
    for name, parameters in _groups(model).items():
        learned = [p for p in parameters if p.requires_grad]
        fast = patch_lr is not None and not name.startswith("shared")
        own = [p for p in learned if fast and id(p) not in kept]
        rest = [p for p in learned if id(p) in kept] if own else learned
        fixed = {"weight_decay": 2 * vars(lambdas).get(name, 0.0), **options}
        groups += [{"params": own, "name": name, **fixed, "lr": patch_lr}] if own else []
        groups += [{"params": rest, "name": f"{name}_kept" if own else name, **fixed}] if rest else []
        brought += len(own)
    if patch_lr is not None and not brought:
        raise PatchbayesError(
            f"parameter_groups(patch_lr={patch_lr!r}): no patched layer brought parameters that learn (dropout has none)."
        )
    return groups


@torch.no_grad()
def share_gradients_(model: nn.Module, share: float = 0.5) -> None:
    """Let the components of EMP and ECMP that were not drawn learn too: call it after backward, before the optimizer's step.

    A component is drawn in one of K steps, so patches lag behind the rest when training starts from scratch. This makes the
    gradients g_1 ... g_K of the components

        K / (1 + share (K - 1)) * ((1 - share) g_k + share (g_1 + ... + g_K)).

    The sum is the gradient g with respect to what was drawn, and the mean of the new gradients is g: with SGD the mean of the
    components moves as one network would. At a share of 1 all components move alike, at 0 only those that were drawn, K times
    as far. Below 1 the gradient is multiplied by a positive definite matrix: steps are others, the points where the expected
    gradient is zero are not. Members of an `Ensemble` and posteriors that are no mixture keep their gradients. The optimizer
    must not decay the components: its decay would not be scaled with the gradient, and training would come to rest elsewhere.
    Put the penalty into the loss instead (`kl`, `l2_penalty`).
    """
    if not (isinstance(share, int | float) and 0 <= share <= 1):
        raise PatchbayesError(f"share_gradients_(share={share!r}): expected a number from 0 to 1.")
    for site in network_of(model).sites:
        site.posterior.share_gradients_(share)


@torch.no_grad()
def maximize_prior_(model: nn.Module, prior: LearnedPrior | None = None) -> None:
    """Set every precision of a `LearnedPrior` to its best value for the present components (appendix C.1).

    The KL of a layer, tau/2 A - D/2 log(tau) with A = sum_k p_k ||M_k||^2 (+ D sigma^2), is least at tau = D / A. A layer
    that is all zero keeps its precision. A `GammaPrior` gets the best law of every precision.
    """
    chosen = prior or network_of(model).prior
    if not isinstance(chosen, LearnedPrior):
        raise PatchbayesError(
            "maximize_prior_: the prior has fixed precisions; give patch_ or this call a LearnedPrior(model)."
        )
    # At tau = 1 the first derivative with respect to log(tau) is A/2 - D/2 and the second A/2: no cancellation for small A.
    unit = chosen.at_one()
    logs = [unit.log_tau, unit.log_rho]
    with torch.enable_grad():
        first = torch.autograd.grad(kl(model, unit), logs, create_graph=True, materialize_grads=True)
        second = torch.autograd.grad(torch.cat(first).sum(), logs, materialize_grads=True)
    if isinstance(chosen, GammaPrior):
        pairs = [(2 * (curvature - slope), 2 * curvature) for slope, curvature in zip(first, second, strict=True)]
        chosen.set_((pairs[0][0], pairs[1][0]), (pairs[0][1], pairs[1][1]))
        return
    for learned, slope, curvature in zip((chosen.log_tau, chosen.log_rho), first, second, strict=True):
        size, strength = 2 * (curvature - slope), 2 * curvature  # D and A
        learned.copy_(torch.where((size > 0) & (strength > 0), size.log() - strength.log(), learned))


def no_decay_names(model: nn.Module) -> list[str]:
    """Names of the parameters that are usually not decayed: biases, norm layers, and laws (deviations, probabilities).

    For optimizers that choose by name. Those that choose by the number of axes, as timm's do, leave them alone already: the
    components of a vector are stored as one longer vector.
    """
    names, laws = [], _laws(model)
    for full, parameter in model.named_parameters():
        if parameter.dim() <= 1 or is_bias(full) or full in laws:
            names.append(full)
    return names


def _laws(model: nn.Module) -> set[str]:
    """Full names of parameters whose role is "law"."""
    found = set()
    for prefix, module in model.named_modules():
        if isinstance(module, Posterior):
            found |= {f"{prefix}.{name}" for name, role in module.roles().items() if role == "law"}
    return found


def _groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    network = network_of(model)
    roles: dict[int, str] = {}
    for site in network.sites:
        own = site.posterior.roles()
        for name, parameter in site.parameters().items():
            role = own[name.removeprefix(f"{CHILD}.")] if name.startswith(f"{CHILD}.") else _role(name)
            roles[id(parameter)] = "law" if role == "law" else f"patched_{_PLURAL[role]}"
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in (*vars(Lambdas()), "law")}
    seen: set[int] = set()
    for name, parameter in model.named_parameters():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            groups[roles.get(id(parameter), f"shared_{_PLURAL[_role(name)]}")].append(parameter)
    return groups


_PLURAL = {"weight": "weights", "bias": "biases"}


def _role(name: str) -> str:
    return "bias" if is_bias(name) else "weight"


def _own_parameters(root: nn.Module) -> list[tuple[str, str, nn.Parameter]]:
    """(layer, name, parameter) of the whole network."""
    found = []
    for full, parameter in root.named_parameters(remove_duplicate=False):
        layer, _, name = full.rpartition(".")
        found.append((layer, name, parameter))
    return found


def _assignment_entropy(network: PatchedNetwork) -> float:
    law = network.law()
    total = 0.0
    for span, probabilities in zip(law.layout.spans, law.probabilities, strict=True):
        p = torch.tensor(probabilities or (1 / span.outcomes,) * span.outcomes, dtype=torch.float64)
        total += span.length * float(torch.special.entr(p).sum())
    return total
