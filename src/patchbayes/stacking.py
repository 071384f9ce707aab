"""Reweighting after inference (the paper's first suggestion for future work): stacking of draws, and of components.

    max over w in the simplex of   (1/N) sum_n log sum_s w_s p(y_n | x_n, w_s)

over examples that training has not seen (Yao et al., 2018).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .draws.draws import Draws
from .errors import PatchbayesError, TooManyOutcomes
from .likelihoods import Likelihood, checked_likelihood
from .patching.drawing import hold
from .patching.network import PatchedNetwork, network_of
from .patching.selection import call, evaluating

_NEWTON_STEPS, _MULTIPLICATIVE_STEPS = 100, 2000
_DROPPED = 1e-5  # a draw of less weight is left out, and the weights of the rest are found anew


@dataclass(frozen=True)
class Stacked:
    """Draws with the weights that `stack` found.

    draws             those with any weight: give them to `predict`. `standard_error` of such a prediction is NaN: weights that
                      were chosen are no sample's.
    log_score         the mean held-out log-probability with these weights; `log_score_before` with those that the draws had.
    duality_gap       how much higher the best possible log_score is at most, in nats.
    num_held_out      the number of held-out labels.
    """

    draws: Draws
    log_score: float
    log_score_before: float
    duality_gap: float
    num_held_out: int

    def __str__(self) -> str:
        return (
            f"{len(self.draws)} draws, held-out log score {self.log_score:.4f} (before {self.log_score_before:.4f}, "
            f"best possible {self.log_score + self.duality_gap:.4f}) on {self.num_held_out:,} labels"
        )


def stack(
    model: nn.Module,
    held_out: Any,
    draws: int | Draws = 100,
    *,
    likelihood: Likelihood | None = None,
    tolerance: float = 1e-6,
    generator: torch.Generator | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> Stacked:
    """The weights of draws that maximize the held-out log score; draws without weight are dropped.

    held_out    (inputs, targets) or an iterable of such batches, which training has not seen: on training data the weights
                would go to whichever draw fits it best.
    draws       a number (independent draws) or `Draws`. The problem is convex, and `duality_gap` tells how well it was solved.
    likelihood  the network's own by default; its temperature has no part in this.
    tolerance   the duality gap to reach, in nats.
    output      network output -> tensor, for networks that return something else.

    The network is not changed.
    """
    if not tolerance > 0:
        raise PatchbayesError(f"stack(tolerance={tolerance!r}): expected a gap above 0, in nats.")
    network = network_of(model)
    if isinstance(draws, Draws):
        if generator is not None:
            raise PatchbayesError("stack: generator= is for making draws; the draws given were made already.")
        network.check(draws)
        chosen = draws
    else:
        chosen = Draws.sample(model, draws, generator)
    if len(chosen) < 1:
        raise PatchbayesError("stack: the given Draws hold no draw; at least one is needed.")
    log_probs = _log_probs(model, network, held_out, chosen, likelihood, output)
    weights, gap = best_weights(log_probs, tolerance)
    before = _score(log_probs, chosen.weights)
    return Stacked(chosen.weighted(weights), _score(log_probs, weights), before, gap, log_probs.shape[1])


def stack_components_(
    model: nn.Module,
    held_out: Any,
    *,
    likelihood: Likelihood | None = None,
    sweeps: int = 20,
    limit: int = 4096,
    output: Callable[[Any], Tensor] | None = None,
) -> list[float]:
    """Set the mixing probabilities of every site to those with the best held-out log score, in place, a site at a time.

    Each site's problem is convex, all together are not: the scores go up from sweep to sweep, to a place that no other p of a
    single site improves. Needs all networks (at most `limit`), so few sites with one draw each. Returns the log score before
    and after each sweep.
    """
    if isinstance(sweeps, bool) or not isinstance(sweeps, int) or sweeps < 1:
        raise PatchbayesError(f"stack_components_(sweeps={sweeps!r}): expected an integer of at least 1.")
    network = network_of(model)
    if any(span.length > 1 for span in network.layout.spans):
        raise TooManyOutcomes(
            "stack_components_: a site has many draws (ECMP, dropout of weights), whose networks cannot all be tried.\n"
            "  do       stack(model, held_out), which weighs draws of the whole network."
        )
    if any(not hasattr(site.posterior, "set_probabilities_") for site in network.owners):
        raise PatchbayesError("stack_components_: expected mixtures (EMP, Ensemble), whose probabilities can be set.")
    draws = Draws.enumerate(model, limit)
    log_probs = _log_probs(model, network, held_out, draws, likelihood, output)
    which = draws.assignments()
    laws = [
        torch.full((span.outcomes,), 1 / span.outcomes, dtype=torch.float64)
        if p is None
        else torch.tensor(p, dtype=torch.float64)
        for span, p in zip(network.layout.spans, network.law().probabilities, strict=True)
    ]
    scores = [_score(log_probs, _joint(laws, which))]
    for _ in range(sweeps):
        for number, law in enumerate(laws):
            others = _joint([*laws[:number], torch.ones_like(law), *laws[number + 1 :]], which)
            of_component = [
                torch.logsumexp(log_probs[which[:, number] == k] + others[which[:, number] == k].log()[:, None], 0)
                for k in range(len(law))
            ]
            laws[number], _ = best_weights(torch.stack(of_component), 1e-9)
        scores.append(_score(log_probs, _joint(laws, which)))
        if scores[-1] - scores[-2] < 1e-9:
            break
    for owner, law in zip(network.owners, laws, strict=True):
        for site in network.sites:
            groups = site.posterior.groups()
            if site is owner or (
                groups is not None and groups.tie == "network" and site.posterior.offset == owner.posterior.offset
            ):
                site.posterior.set_probabilities_(law)  # type: ignore[operator]
    return scores


def best_weights(log_probs: Tensor, tolerance: float = 1e-6) -> tuple[Tensor, float]:
    """Weights (S,) in the simplex that maximize the mean over n of log sum_s w_s exp(log_probs[s, n]), and the duality gap.

    With g_s = mean_n p_sn / sum_t w_t p_tn, the best value is at most max_s g_s - 1 above that of w: that is the gap. Newton
    steps inside w > 0 (a primal-dual method); multiplicative steps w <- w g, which always gain, where these do not arrive.
    """
    unknown = ~(log_probs < torch.inf).all(0)
    if unknown.any():
        raise PatchbayesError(
            f"stack: {int(unknown.sum())} held-out labels have a log-probability that is not finite: look at the weights "
            "and inputs."
        )
    impossible = (log_probs == -torch.inf).all(0)
    if impossible.any():
        raise PatchbayesError(
            f"stack: {int(impossible.sum())} held-out labels have probability zero under every draw; no weights can help."
        )
    probs = (log_probs.double() - log_probs.double().amax(0)).exp()  # (S, N); a factor for each n changes nothing
    weights = _newton(probs, tolerance)
    kept = weights > _DROPPED
    if not kept.all():
        weights = torch.zeros_like(weights).masked_scatter(kept, _newton(probs[kept], tolerance))
    for _ in range(_MULTIPLICATIVE_STEPS):
        if _gap(probs, weights) <= tolerance:
            break
        weights = weights * _gains(probs, weights)
    return weights, max(_gap(probs, weights), 0.0)


def _newton(probs: Tensor, tolerance: float) -> Tensor:
    """Minimize -mean log(w P) + sum w over w > 0, whose solution sums to one by itself."""
    size, number = probs.shape
    w = torch.full((size,), 1 / size, dtype=torch.float64, device=probs.device)
    multiplier = torch.ones_like(w)
    best, best_gap = w, _gap(probs, w)
    for _ in range(_NEWTON_STEPS):
        if best_gap <= 0.1 * tolerance:
            break
        relative = probs / (w @ probs)
        target = 0.1 * float(w @ multiplier) / size
        curvature = relative @ relative.T / number + torch.diag(multiplier / w)
        factor, failed = torch.linalg.cholesky_ex(curvature)
        if failed:
            break
        residual = (target / w - 1 + relative.mean(1)).unsqueeze(1)
        step = torch.cholesky_solve(residual, factor).squeeze(1)
        other = target / w - multiplier - multiplier / w * step
        w = w + _largest_step(w, step) * step
        multiplier = multiplier + _largest_step(multiplier, other) * other
        now = w / w.sum()
        gap = _gap(probs, now)
        if gap < best_gap:
            best, best_gap = now, gap
    return best


def _largest_step(value: Tensor, step: Tensor) -> float:
    falling = step < 0
    limit = float((-value[falling] / step[falling]).min()) if falling.any() else torch.inf
    return min(1.0, 0.995 * limit)


def _gains(probs: Tensor, weights: Tensor) -> Tensor:
    return (probs / (weights @ probs)).mean(1)


def _gap(probs: Tensor, weights: Tensor) -> float:
    return float(_gains(probs, weights).max()) - 1


def _score(log_probs: Tensor, weights: Tensor) -> float:
    log_weights = weights.to(log_probs).log().unsqueeze(1)
    return float(torch.logsumexp(log_probs + log_weights, dim=0).mean())


def _joint(laws: list[Tensor], which: Tensor) -> Tensor:
    """The probability of every network, (S,), from those of its components; which (S, sites)."""
    total = torch.ones(len(which), dtype=torch.float64)
    for number, law in enumerate(laws):
        total = total * law[which[:, number]]
    return total


def _log_probs(
    model: nn.Module,
    network: PatchedNetwork,
    held_out: Any,
    draws: Draws,
    likelihood: Likelihood | None,
    output: Callable[[Any], Tensor] | None,
) -> Tensor:
    """log p(y_n | x_n, w_s) of every draw and held-out label, (S, N) float64 on the CPU."""
    chosen = checked_likelihood(likelihood or network.likelihood)
    parts, first = [], 0
    with evaluating(model), torch.no_grad():
        for inputs, targets in _batches(held_out):
            inputs, targets = (tree_map(lambda x: x.to(network.device), part) for part in (inputs, targets))
            examples = torch.arange(first, first + len(targets))
            rows = []
            for number in range(len(draws)):
                with hold(network, draws.network_draw(number, network.device, examples)):
                    result = call(model, inputs)
                result = output(result) if output is not None else getattr(result, "logits", result)
                rows.append(chosen.log_prob(result.unsqueeze(0).double(), targets).reshape(-1).cpu())
            parts.append(torch.stack(rows))
            first += len(targets)
    if not first:
        raise PatchbayesError(
            "stack: expected held-out data, (inputs, targets) or batches of these, got none.\n"
            "  do       keep a part of the data from training, and pass it here."
        )
    return torch.cat(parts, dim=1)


def _batches(held_out: Any) -> Iterator[tuple[Any, Tensor]]:
    if isinstance(held_out, tuple) and len(held_out) == 2 and isinstance(held_out[1], Tensor):
        yield held_out
        return
    if not isinstance(held_out, Iterable) or isinstance(held_out, Tensor | str | dict):
        raise PatchbayesError(
            f"stack: expected held-out data, (inputs, targets) or batches of these, got a {type(held_out).__name__}."
        )
    for batch in held_out:
        if not (isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[1], Tensor)):
            raise PatchbayesError("stack: expected batches (inputs, targets), two of a kind, with targets in a tensor.")
        yield batch[0], batch[1]
