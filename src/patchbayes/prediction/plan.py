"""What a prediction did: how the draws were made, what was shared, how much work that saved."""

from dataclasses import dataclass, field

from ..draws import Draws


@dataclass
class StagePlan:
    """Operations that depend on the same sites: computed `distinct` times instead of once for every draw.

    flops counts multiplications and additions of one evaluation (0 for element-wise operations).
    """

    sites: tuple[str, ...]
    operations: int
    distinct: int
    flops: int = 0


@dataclass
class Plan:
    """How a prediction was computed. Print it.

    engine      "loop" (a forward pass for each draw) or "stages" (each stage once for each distinct assignment).
    sampling    how the draws were made: "iid", "stratified", "orthogonal" or "enumerated".
    heads       how many of the draws share all sites but the output layer, whose components are averaged over.
    networks    distinct networks among the draws.
    chunk       how many draws went together at the end.
    fallback    why the loop was taken, where it was.
    opaque      parts of the network that were run whole, for they could not be traced.
    """

    num_draws: int
    sampling: str
    exact: bool
    heads: int = 1
    engine: str = "loop"
    networks: int = 0
    chunk: int = 1
    fallback: str | None = None
    opaque: list[str] = field(default_factory=list)
    stages: list[StagePlan] = field(default_factory=list)

    @classmethod
    def of_draws(cls, draws: Draws) -> "Plan":
        return cls(len(draws), "+".join(sorted(draws.schemes)), draws.is_exact, draws.heads, networks=len(draws))

    @property
    def work(self) -> float:
        """Arithmetic of this plan as a fraction of one whole pass for each draw: 1 for the loop."""
        if not self.stages:
            return 1.0
        costs = [stage.flops for stage in self.stages]
        if not any(costs):
            costs = [stage.operations for stage in self.stages]
        done = sum(cost * stage.distinct for cost, stage in zip(costs, self.stages, strict=True))
        return done / (self.num_draws * sum(costs))

    def __str__(self) -> str:
        how = f"{self.num_draws} draws ({self.sampling}{', exact' if self.exact else ''})"
        if self.heads > 1:
            how = (
                f"{self.num_draws} draws ({self.num_draws // self.heads} {self.sampling}, each with {self.heads} heads)"
            )
        if self.engine == "loop":
            return f"{how}, one pass each" + (f": {self.fallback}" if self.fallback else "")
        lines = [
            f"{how}, {self.networks} distinct networks, {100 * self.work:.3g} % of the arithmetic of {self.num_draws} passes, "
            f"{self.chunk} at a time"
        ]
        merged = _merge(self.stages)
        lines += [
            f"  {distinct:>5} x {operations:>3} operations after {sites}" for distinct, operations, sites in merged
        ]
        if self.opaque:
            lines.append(f"  run whole: {', '.join(self.opaque)}")
        return "\n".join(lines)


def _merge(stages: list[StagePlan]) -> list[tuple[int, int, str]]:
    """Neighbouring stages with the same count in one row."""
    rows: list[tuple[int, int, str]] = []
    for stage in stages:
        sites = (
            "no site"
            if not stage.sites
            else f'"{stage.sites[-1]}"'
            if len(stage.sites) == 1
            else f"{len(stage.sites)} sites"
        )
        if rows and rows[-1][0] == stage.distinct and stage.sites:
            first = rows[-1][2].split(" to ")[0]
            rows[-1] = (stage.distinct, rows[-1][1] + stage.operations, f"{first} to {sites}")
        else:
            rows.append((stage.distinct, stage.operations, sites))
    return rows
