"""Learned mixing probabilities: unbiased gradients of the expected log-likelihood with respect to p.

    d/dp E_z[L(z)],   L(z) = log p(y | x, w(z)),   z_i ~ Cat(p_i)

L depends on p only through which z is drawn, so backpropagation alone finds nothing. Three ways, all unbiased: enumerated
draws weigh every z by its probability; draws whose components run over one site (`Draws.with_heads`) marginalize that site,
sum_k p_ik L(k, rest); for all other sites the score function with the mean of the other draws as baseline,

    (1/T) sum_t (L_t - mean_{u != t} L_u) d/dp log p(z_t).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..draws.draws import Draws, record_of
from ..draws.layout import NetworkDraw, Series
from ..draws.schemes import is_marginal
from ..errors import PatchbayesError
from ..likelihoods import Likelihood


@dataclass
class LawGradient:
    """How S draws depend on learned probabilities.

    shares     (S,) the weights of the draws in sums over all components of a site, as functions of p; None without.
    trunks     (S,) which of T independent draws each belongs to.
    log_prob   (T,), or (T, B) with a term for each example, of what was sampled: log p(z_t) as a function of p; None where all
               learned sites are summed over.
    """

    shares: Tensor | None
    trunks: Tensor
    log_prob: Tensor | None


def site_by_site(model: nn.Module, generator: torch.Generator | None = None) -> Draws:
    """One draw of the network, for each of its sites with a learned law once more with every component of that site.

    For EMP with K components and n sites n K passes, whose gradient with respect to every p is exact given the other sites
    (Titsias and Lazaro-Gredilla, 2015). Give it to `forward_draws`.
    """
    network = record_of(model)
    spans = [
        (span.name, span.outcomes)
        for span, site in zip(network.layout.spans, network.owners, strict=True)
        if site.posterior.learns_law
    ]
    if not spans or any(span.length > 1 for span in network.layout.spans if (span.name, span.outcomes) in spans):
        raise PatchbayesError(
            "site_by_site: expected learned probabilities at sites with one draw each (EMP, Ensemble).\n"
            "  do       forward_draws(model, inputs, draws=4), whose gradient is a score-function estimate."
        )
    trunk = Draws.sample(model, 1, generator)
    return Draws.concatenate([trunk.with_heads(name, outcomes) for name, outcomes in spans])


def law_gradient(model: nn.Module, drawn: Sequence[NetworkDraw], draws: Draws | None = None) -> LawGradient | None:
    """What `expected_log_prob` must know of the draws that a network has just computed with; None where nothing is learned.

    draws   where `drawn` are theirs; without, they are the network's own.
    """
    network = record_of(model)
    if not torch.is_grad_enabled() or not any(site.posterior.learns_law for site in network.sites):
        return None
    if draws is not None and draws.is_exact and not draws.is_weighted:
        return LawGradient(_enumerated(network, draws), torch.zeros(len(draws), dtype=torch.int64), None)
    learned = [number for number, site in enumerate(network.owners) if site.posterior.learns_law]
    shares: Tensor | None = None
    trunks, independent = torch.arange(len(drawn)), True
    if draws is not None:
        _check_unbiased(network, draws)
        shares, covered = _marginal(network, draws)
        learned = [number for number in learned if number not in covered]
        trunks, independent = _trunks(draws.series)
    own = [name for name in drawn[0].log_probs if all(name in draw.log_probs for draw in drawn)]
    if not learned and not own:
        return LawGradient(shares, trunks, None)
    if not independent or (own and len(trunks.unique()) < len(drawn)):
        raise PatchbayesError(
            "forward_draws: these draws leave the gradient of some learned probabilities without an unbiased estimate.\n"
            "  do       pass the number of draws, or patching.assignment.site_by_site(model)."
        )
    firsts = [drawn[int((trunks == t).nonzero()[0])] for t in range(int(trunks.max()) + 1)]
    log_prob = _log_prob(network, learned, [draw.indices for draw in firsts])
    return LawGradient(shares, trunks, _with_own(model, log_prob, firsts, own))


def _check_unbiased(network: Any, draws: Draws) -> None:
    if draws.law.probabilities != network.law().probabilities:
        raise PatchbayesError(
            "forward_draws: the draws were made with other mixing probabilities than the network has now.\n"
            "  do       make them anew at every step, or pass the number of draws."
        )
    whole = all(part.heads == 1 or len(part.counters) % part.heads == 0 for part in draws.series)
    if draws.schemes != {"iid"} or draws.is_weighted or not whole:
        raise PatchbayesError(
            f"forward_draws: learned probabilities need independent draws or all of them, got {draws!r}.\n"
            "  do       pass the number of draws, Draws.sample, Draws.enumerate, or patching.assignment.site_by_site(model)."
        )


def expected_log_prob(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, weights: Tensor | None, law: LawGradient
) -> Tensor:
    """`Likelihood.expected_log_prob`, the same number, with the gradient of the learned probabilities too.

    outputs (S, B, ...), targets (B, ...), weights (S,) or None.
    """
    log_prob = likelihood.log_prob(outputs, targets)
    log_prob = log_prob.flatten(2).sum(-1) if log_prob.dim() > 2 else log_prob
    log_prob = log_prob / likelihood.counted(targets).sum().clamp_min(1)  # (S, B)
    draws = len(log_prob)
    w = torch.full((draws,), 1 / draws).to(log_prob) if weights is None else weights.to(log_prob)
    total = (w @ log_prob).sum()
    fixed = log_prob.detach()
    if law.shares is not None:
        total = total + _only_gradient(law.shares.to(fixed) @ fixed.sum(1))
    if law.log_prob is not None:
        number = len(law.log_prob)
        if number < 2:
            raise PatchbayesError(
                "negative_elbo: learned probabilities need at least two independent draws a step, got one.\n"
                "  do       forward_draws(model, inputs, draws=2) or more, or patching.assignment.site_by_site(model)."
            )
        trunks, score = law.trunks.to(fixed.device), law.log_prob
        if score.dim() == 2 and score.shape[1] != fixed.shape[1]:  # rows that are not the examples count together
            score = score.sum(1)
        of_trunk = torch.zeros(number, fixed.shape[1]).to(fixed).index_add_(0, trunks, number * w.unsqueeze(1) * fixed)
        if score.dim() == 1:
            of_trunk = of_trunk.sum(1)
        others = (of_trunk.sum(0) - of_trunk) / (number - 1)
        total = total + _only_gradient(((of_trunk - others) * score.to(of_trunk)).sum() / number)
    return total


def _only_gradient(value: Tensor) -> Tensor:
    return value - value.detach()


def _log_prob(network: Any, spans: Iterable[int], drawn: Sequence[Tensor]) -> Tensor:
    """log p of the indices that the given spans have in each of T draws, (T,)."""
    total = torch.zeros(len(drawn), dtype=torch.float64, device=drawn[0].device)
    for number in spans:
        start, length = network.layout.starts[number], network.layout.spans[number].length
        log_p = network.owners[number].posterior.log_p()
        assert log_p is not None
        total = total + log_p[torch.stack([z[start : start + length] for z in drawn])].sum(1)
    return total


def _with_own(model: nn.Module, log_prob: Tensor, drawn: Sequence[NetworkDraw], own: Sequence[str]) -> Tensor:
    """With what sites drew for themselves, for each example, in place of their part of z: (T,) or (T, B).

    Where batch norm takes its statistics from the batch, an example's output depends on what the others drew: then all terms
    of a batch count as one.
    """
    if not own:
        return log_prob
    network = record_of(model)
    for number, site in enumerate(network.owners):
        if site.name in own:  # z was made for the site, and was not used
            log_prob = log_prob - _log_prob(network, [number], [draw.indices for draw in drawn])
    terms = [torch.stack([draw.log_probs[name] for draw in drawn]) for name in own]
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if any(norm.training or norm.running_mean is None for norm in norms) or len({t.shape for t in terms}) > 1:
        return log_prob + torch.stack([term.flatten(1).sum(1) for term in terms]).sum(0)
    return log_prob.unsqueeze(1) + torch.stack(terms).sum(0)


def _enumerated(network: Any, draws: Draws) -> Tensor:
    """The probability of each of all networks, (S,), as a function of the learned p."""
    indices = draws.assignments(device=network.device)
    total = torch.zeros(len(draws), dtype=torch.float64, device=indices.device)
    places = zip(network.layout.starts, network.layout.spans, network.owners, strict=True)
    for start, span, site in places:
        log_p = site.posterior.log_p()
        if log_p is not None:
            total = total + log_p.to(indices.device)[indices[:, start : start + span.length]].sum(1)
        else:
            total = total - span.length * math.log(span.outcomes)
    return total.exp()


def _marginal(network: Any, draws: Draws) -> tuple[Tensor | None, set[int]]:
    """The shares of draws that run over all components of a site, (S,), and which spans have them."""
    shares: Tensor | None = None
    covered: dict[int, int] = {}  # span -> independent draws of the rest
    for part in draws.series:
        if part.heads > 1 and is_marginal(network.layout.spans[part.head_span], part.heads):
            covered[part.head_span] = covered.get(part.head_span, 0) + len(part.counters) // part.heads
    position = 0
    for part in draws.series:
        number = len(part.counters)
        posterior = network.owners[part.head_span].posterior
        if part.head_span in covered and posterior.learns_law:
            log_p = posterior.log_p()
            assert log_p is not None
            heads = torch.tensor(list(part.counters), device=log_p.device) % part.heads
            share = log_p.exp()[heads] / covered[part.head_span]
            share = nn.functional.pad(share, (position, len(draws) - position - number))
            shares = share if shares is None else shares + share
        position += number
    return shares, set(covered)


def _trunks(parts: Sequence[Series]) -> tuple[Tensor, bool]:
    """Which independent draw each draw belongs to, (S,), and whether no such draw was used for two series."""
    known: dict[tuple[int, int], int] = {}
    found, once = [], True
    for part in parts:
        trunks = [(part.seed, counter // part.heads) for counter in part.counters]
        once = once and known.keys().isdisjoint(trunks)
        found += [known.setdefault(trunk, len(known)) for trunk in trunks]
    repeated = any(part.heads == 1 and len(set(part.counters)) < len(part.counters) for part in parts)
    return torch.tensor(found), once and not repeated
