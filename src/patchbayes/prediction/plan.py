"""What a prediction did: how the draws were made, what was shared, how much work that saved."""

from dataclasses import dataclass, field

from ..draws.draws import Draws


@dataclass(frozen=True)
class StagePlan:
    """Operations that depend on the same sites: needed for `distinct` assignments instead of once for every draw.

    flops counts multiplications and additions of one evaluation (0 for element-wise operations).
    """

    sites: tuple[str, ...]
    operations: int
    distinct: int
    flops: int = 0


@dataclass
class Plan:
    """How a prediction was computed. Print it.

    engine      "graph" (captured; each stage once for each distinct assignment) or "loop" (a forward pass for each draw).
    sampling    how the draws were made: "iid", "stratified", "orthogonal" or "enumerated"; "mean" or "none" without draws.
    heads       how many of the draws share all sites but the output layer, whose components are averaged over.
    networks    distinct networks among the draws.
    chunk       how many draws went together at the end.
    fallback    why the network was not captured, where it was not.
    stages      what depends on which sites, and how often it had to be computed.
    evaluated   how often each of these was computed: more than `distinct` where memory did not allow to keep it, or where
                keeping it would have cost more than computing it again.
    capture_seconds  what capturing took, where this call did it.
    """

    num_draws: int
    sampling: str
    exact: bool
    heads: int = 1
    engine: str = "loop"
    networks: int = 0
    chunk: int = 1
    fallback: str | None = None
    stages: list[StagePlan] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    capture_seconds: float | None = None

    @classmethod
    def of_draws(cls, draws: Draws) -> "Plan":
        return cls(len(draws), "+".join(sorted(draws.schemes)), draws.is_exact, draws.heads, networks=len(draws))

    @property
    def work(self) -> float:
        """Arithmetic of this plan as a fraction of one whole pass for each draw: 1 for the loop.

        The floor, or more where what was needed again was not kept.
        """
        return max(self.floor, self._share(self.evaluated))

    @property
    def floor(self) -> float:
        """The least arithmetic that gives these draws, as a fraction of one whole pass for each: every stage once for each
        distinct assignment of its sites. Counted in multiplications and additions of matrix products and convolutions, or in
        operations where there are none; element-wise operations are not in it.
        """
        return self._share([stage.distinct for stage in self.stages])

    def _share(self, evaluations: list[int]) -> float:
        if not self.stages:
            return 1.0
        costs = [stage.flops for stage in self.stages]
        if not any(costs):
            costs = [stage.operations for stage in self.stages]
        done = sum(cost * times for cost, times in zip(costs, evaluations, strict=True))
        return done / (self.num_draws * sum(costs))

    def __str__(self) -> str:
        how = f"{self.num_draws} draws ({self.sampling}{', exact' if self.exact else ''})"
        if self.heads > 1:
            how = (
                f"{self.num_draws} draws ({self.num_draws // self.heads} {self.sampling}, each with {self.heads} heads)"
            )
        if self.networks < self.num_draws:
            how += f", {self.networks} distinct networks"
        if self.engine == "loop":
            return f"{how}, one pass each" + (f": {self.fallback}" if self.fallback else "")
        lines = [f"{how}, {100 * self.work:.3g} % of the arithmetic of {self.num_draws} passes, {self.chunk} at a time"]
        lines += [
            f"  {distinct:>5} x {operations:>3} operations after {sites}"
            for distinct, operations, sites in _merge(self.stages)
        ]
        if self.capture_seconds is not None:
            lines.append(f"  captured in {self.capture_seconds:.1f} s, for this call and those after it")
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
