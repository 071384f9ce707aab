"""What patching did: sites, skipped layers, the parameters it cost, the size of the ensemble it made."""

import math
from dataclasses import dataclass

from torch import nn

from ..draws.draws import format_count
from .network import PatchedNetwork, Site


@dataclass(frozen=True)
class PatchedSite:
    """One patched layer. `parameters_added` is what the method added to it; `frozen` says it does not require gradients."""

    name: str
    module: str
    method: str
    parameters_added: int
    log10_outcomes: float
    frozen: bool


@dataclass(frozen=True)
class PatchReport:
    """The result of `patch_`. Print it for a table."""

    network: str
    sites: tuple[PatchedSite, ...]
    skipped: dict[str, str]
    notes: tuple[str, ...]
    parameters_before: int
    parameters_after: int
    log10_outcomes: float

    @property
    def overhead_percent(self) -> float:
        """Parameters added, as a percentage of those before (table 3 and table 4)."""
        return 100 * (self.parameters_after / self.parameters_before - 1)

    @property
    def ensemble_size(self) -> str:
        """The effective ensemble size (table 3): how many distinct networks the patched one can be."""
        return format_count(self.log10_outcomes)

    def __str__(self) -> str:
        groups: dict[tuple[str, str, bool], list[PatchedSite]] = {}
        for site in self.sites:
            groups.setdefault((site.module, site.method, site.frozen), []).append(site)
        rows = [
            (
                f"{module} x{len(members)}",
                method + (" frozen" if frozen else ""),
                f"{sum(site.parameters_added for site in members):+,}",
                _names([site.name for site in members]),
            )
            for (module, method, frozen), members in groups.items()
        ]
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
        number = f"{len(self.sites)} site{'s' * (len(self.sites) != 1)}"
        lines = [
            f"patched {number} of {self.network}: {self.parameters_before:,} -> {self.parameters_after:,} "
            f"parameters ({self.overhead_percent:+.3g} %), effective ensemble size {self.ensemble_size}"
        ]
        lines += [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d}" for a, b, c, d in rows]
        lines += [f"  note     {note}" for note in self.notes]
        reasons: dict[str, list[str]] = {}
        for name, why in self.skipped.items():
            reasons.setdefault(why, []).append(name)
        lines += [f"  skipped  {_names(names)}: {why}" for why, names in reasons.items()]
        return "\n".join(lines)


def number_of_parameters(model: nn.Module) -> int:
    """All parameters, a tied one once; those of lazy modules that have no shape yet are left out."""
    return sum(p.numel() for p in model.parameters() if not isinstance(p, nn.parameter.UninitializedParameter))


def report_on(
    model: nn.Module, network: PatchedNetwork, added: list[Site], before: int, skipped: dict[str, str], notes: list[str]
) -> PatchReport:
    """The report on the sites that were just added to a network, which had `before` parameters."""
    rows = []
    for site in added:
        now = {id(p): p for p in site.parameters().values()}.values()
        plain = sum(math.prod(site.shapes[name]) for name in site.parameter_order if name in site.shapes)
        rows.append(
            PatchedSite(
                site.name or "(the network itself)",
                type(site.module).__name__,
                site.method.label,
                sum(p.numel() for p in now) - plain,
                site.posterior.log10_outcomes,
                not any(p.requires_grad for p in now),
            )
        )
    after = number_of_parameters(model)
    return PatchReport(
        type(model).__name__, tuple(rows), skipped, tuple(notes), before, after, _log10_ensemble_size(network)
    )


def _log10_ensemble_size(network: PatchedNetwork) -> float:
    tied = {s.posterior.log10_outcomes for s in network.sites if _is_networkwide(s)}
    return sum(s.posterior.log10_outcomes for s in network.sites if not _is_networkwide(s)) + sum(tied)


def _is_networkwide(site: Site) -> bool:
    groups = site.posterior.groups()
    return groups is not None and groups.tie == "network"


def _names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f", ... {names[-1]}" if len(names) > 3 else "")
