"""The training objective: KL, negative ELBO, and the simplified L2 loss. The only file that knows scales."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .draws import network_of
from .errors import PatchbayesError
from .likelihoods import Categorical, Gaussian, checked_likelihood
from .network import Network
from .posteriors import Mixture
from .posteriors.posterior import Entropy, is_bias, quadratic
from .prior import LearnedPrior, Prior


def kl(
    model: nn.Module,
    prior: Prior | LearnedPrior | None = None,
    *,
    shared: bool = True,
    entropy: Entropy | None = None,
) -> Tensor:
    """KL(q || prior) of the whole network, (), in nats: for all N training examples together.

        sum_{patched i} sum_k tau_i p_ik / 2 ||M_ik||^2 + sum_{patched j} sum_k rho_j p_jk / 2 ||m_jk||^2
        + sum_{shared i} tau_i / 2 ||M_i||^2 + sum_{shared j} rho_j / 2 ||m_j||^2            Eqs. (2) and (6)

    Divide by the number of training examples, never by the batch size: `loss = cross_entropy + kl(model) / num_data`. Do
    not use weight decay as well; it is the same term.

    prior     precisions; by default those given to `patch_` (1).
    shared    whether shared parameters count. With False, leave them to the optimizer's weight decay.
    entropy   None: the equations above, up to a constant in M and m (with a `LearnedPrior` all terms in tau and rho are kept,
              which are then not constant). "lower": the whole KL with the entropy of the mixture bounded from below by
              sum_k p_k H_k, so an upper bound on the KL and a valid lower bound on the evidence; needs sigma > 0 on all
              counted parameters. "upper": the same with sum_k p_k H_k + H(p) for every independent draw: a lower bound on
              the KL. Between the two lies the truth. Mean-field sites are exact in any case.

    Deviation: Eq. (7) of the paper states the bound sum_k p_k H_k with the inequality reversed.
    """
    if entropy not in (None, "lower", "upper"):
        raise PatchbayesError(f'kl(entropy={entropy!r}): give None, "lower" or "upper".')
    network: Network = network_of(model)
    prior = prior or network.prior
    inside = _prefix_of(model, network)
    terms: list[Tensor] = []
    counted: set[int] = set()
    for site in network.sites:
        posterior = site.posterior
        names = (*posterior.names, *posterior.fixed_names)
        counted |= {id(posterior.stored(name)) for name in names}
        if names:
            tau, rho = prior.precisions(site.name)
            terms.append(posterior.kl(tau, rho, normalized=prior.learned, entropy=entropy))
    if shared:
        for layer, name, parameter in _own_parameters(model):
            if id(parameter) in counted:
                continue
            counted.add(id(parameter))
            if entropy is not None:
                raise PatchbayesError(
                    f'kl(entropy="{entropy}"): the shared parameter "{layer}.{name}" has no sigma, so no entropy.\n'
                    '  do       patch_ the rest with {"*": Shared(sigma)} too, or pass shared=False.'
                )
            tau, rho = prior.precisions(layer.removeprefix(inside))
            precision = rho if is_bias(name) else tau
            terms.append(quadratic(precision, parameter.square().sum(), parameter.numel(), normalized=prior.learned))
    total = torch.stack([term.to(terms[0]) for term in terms]).sum()
    if entropy == "upper":
        total = total - _assignment_entropy(network)
    return total


def negative_elbo(
    outputs: Tensor,
    targets: Tensor,
    kl_total: Tensor | float,
    *,
    num_data: int,
    likelihood: Categorical | Gaussian | None = None,
) -> Tensor:
    """Negative evidence lower bound per training example, in nats (appendix B.2; Eq. 9 for regression).

        -ELBO / N = -(1 / S B) sum_s sum_b log p(y_b | x_b, w_s) + KL(q || p) / N

    Draws are averaged outside the logarithm. This is not the loss of the averaged prediction, which is never larger.

    outputs (S, B, C) from `forward_draws` (one draw: `model(x)[None]`): logits for `Categorical`, means for `Gaussian`.
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
    log_prob = likelihood.log_prob(outputs, targets)
    if log_prob.dim() > 2:  # an example with many labels: log p(y_b) is their sum
        log_prob = log_prob.flatten(2).sum(-1)
    return -log_prob.mean() + kl_total / num_data


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
    terms = [
        getattr(lambdas, group) * parameter.square().sum()
        for group, parameters in _groups(model).items()
        for parameter in parameters
    ]
    return torch.stack(terms).sum()


def parameter_groups(model: nn.Module, lambdas: Lambdas | None = None, **options: Any) -> list[dict[str, Any]]:
    """The four groups of parameters for an optimizer, with names: the simplified loss as weight decay.

    For optimizers with coupled decay (SGD, Adam), weight_decay = 2 lambda has the gradient of `l2_penalty`; AdamW's is
    another thing. `options` go to every group. Use the groups also to give patches a learning rate of their own, or to
    freeze the shared parameters. Frozen parameters are left out, and so are empty groups.
    """
    lambdas = lambdas or Lambdas()
    groups = []
    for name, parameters in _groups(model).items():
        learned = [p for p in parameters if p.requires_grad]
        if learned:
            groups.append({"params": learned, "name": name, "weight_decay": 2 * getattr(lambdas, name), **options})
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
    gradient is zero are not. Members of an `Ensemble` and posteriors that are no mixture keep their gradients.
    """
    if not (isinstance(share, int | float) and 0 <= share <= 1):
        raise PatchbayesError(f"share_gradients_(share={share!r}): required is a number from 0 to 1.")
    for site in network_of(model).sites:
        if isinstance(site.method, Mixture) and site.method.tie != "network":
            for name in site.posterior.names:
                gradient = site.components(name).grad
                if gradient is not None:
                    scale = len(gradient) / (1 + share * (len(gradient) - 1))
                    gradient.lerp_(gradient.sum(0).expand_as(gradient), share).mul_(scale)


@torch.no_grad()
def maximize_prior_(model: nn.Module, prior: LearnedPrior | None = None) -> None:
    """Set every precision of a `LearnedPrior` to its best value for the present components (appendix C.1).

    The KL of a layer, tau/2 A - D/2 log(tau) with A = sum_k p_k ||M_k||^2 (+ D sigma^2), is least at tau = D / A. A layer
    that is all zero keeps its precision.
    """
    chosen = prior or network_of(model).prior
    if not isinstance(chosen, LearnedPrior):
        raise PatchbayesError(
            "maximize_prior_: the prior has fixed precisions; give patch_ or this call a LearnedPrior(model)."
        )
    # At tau = 1 the first derivative with respect to log(tau) is A/2 - D/2 and the second A/2: no cancellation for small A.
    unit = copy.deepcopy(chosen).to(torch.float32 if chosen.log_tau.device.type == "mps" else torch.float64)
    logs = [unit.log_tau.zero_(), unit.log_rho.zero_()]
    with torch.enable_grad():
        first = torch.autograd.grad(kl(model, unit), logs, create_graph=True, materialize_grads=True)
        second = torch.autograd.grad(torch.cat(first).sum(), logs, materialize_grads=True)
    for learned, slope, curvature in zip((chosen.log_tau, chosen.log_rho), first, second, strict=True):
        size, strength = 2 * (curvature - slope), 2 * curvature  # D and A
        learned.copy_(torch.where((size > 0) & (strength > 0), size.log() - strength.log(), learned))


def _groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    network: Network = network_of(model)
    posteriors = [site.posterior for site in network.sites]
    patched = {id(q.stored(name)) for q in posteriors for name in (*q.names, *q.fixed_names)}
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in vars(Lambdas())}
    seen: set[int] = set()
    for _, name, parameter in _own_parameters(model):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            owner = "patched" if id(parameter) in patched else "shared"
            groups[f"{owner}_{'biases' if is_bias(name) else 'weights'}"].append(parameter)
    return groups


def _own_parameters(model: nn.Module) -> list[tuple[str, str, nn.Parameter]]:
    """(layer, name, parameter) of the whole network, a patched parameter under the layer it belongs to."""
    found = []
    for full, parameter in model.named_parameters(remove_duplicate=False):
        layer, _, name = full.removesuffix(".original").replace("parametrizations.", "").rpartition(".")
        found.append((layer, name, parameter))
    return found


def _prefix_of(model: nn.Module, network: Network) -> str:
    """The name of the patched network inside `model`, with its dot: "" where they are the same."""
    for name, module in model.named_modules():
        if module.__dict__.get("_patchbayes") is network:
            return f"{name}." if name else ""
    return ""


def _assignment_entropy(network: Network) -> float:
    total = 0.0
    for span in network.layout.spans:
        p = torch.tensor(span.probabilities or (1 / span.outcomes,) * span.outcomes, dtype=torch.float64)
        total += span.length * float(torch.special.entr(p).sum())
    return total
