"""A claim of the paper, and how records judge it.

A claim that one thing is better than another is *confirmed* or *contradicted* only with p < 0.01 (paired over seeds, or
corrected for overlapping splits), else *not confirmed*; a claim that two things are alike by their 99 % interval and a stated
margin.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from patchbayes.metrics.student import student_t

from .experiment import as_text
from .regression_comparison import LEVEL, PairedTest, paired_test

ClaimVerdict = Literal["confirmed", "not confirmed", "contradicted", "not tested here"]


@dataclass(frozen=True)
class Finding:
    """What a record says of a claim; the reason, where it says nothing."""

    verdict: ClaimVerdict
    evidence: str


@dataclass(frozen=True)
class Claim:
    """What the paper says, in our words, where it says so, and who judges it.

    experiment  the one whose record `judge` sees; None for what the paper's own tables tell: `judge` then gets {}.
    """

    text: str
    place: str
    experiment: str | None
    judge: Callable[[Mapping[str, Any]], Finding]


def better(what: str, ours: Sequence[float], theirs: Sequence[float]) -> Finding:
    """The claim that `ours` is smaller than `theirs`, paired by seed."""
    return _too_few(what, ours, theirs) or of_test(what, paired_test(ours, theirs))


def _too_few(what: str, ours: Sequence[float], theirs: Sequence[float]) -> Finding | None:
    if not ours or not theirs:
        return untested(f"{what} not in the record")
    return Finding("not confirmed", f"{what} {as_text(ours[0] - theirs[0], 3)} (one seed)") if len(ours) < 2 else None


def of_test(what: str, test: PairedTest) -> Finding:
    """The claim that the difference is negative."""
    verdict: ClaimVerdict = "not confirmed"
    if test.significant:
        verdict = "confirmed" if test.difference < 0 else "contradicted"
    return Finding(verdict, f"{what} {as_text(test.difference, 3)} ({_p_text(test.p)})")


def _p_text(p: float) -> str:
    return f"p = {p:.2g}" if p >= 1e-6 else "p < 1e-6"


def alike(what: str, ours: Sequence[float], theirs: Sequence[float], margin: float) -> Finding:
    """The claim that `ours` and `theirs` differ by less than `margin`, paired by seed."""
    few = _too_few(what, ours, theirs)
    if few is not None:
        return few
    test = paired_test(ours, theirs)
    reach = student_t(test.degrees, 1 - LEVEL) * test.standard_error
    verdict: ClaimVerdict = "not confirmed"
    if abs(test.difference) + reach < margin:
        verdict = "confirmed"
    elif abs(test.difference) - reach > margin:
        verdict = "contradicted"
    return Finding(verdict, f"{what} {as_text(test.difference, 3)} ± {as_text(reach, 2)}")


def all_of(findings: Sequence[Finding]) -> Finding:
    """A claim of several parts: confirmed where every part is, contradicted where some part is."""
    verdicts = {finding.verdict for finding in findings}
    order: tuple[ClaimVerdict, ...] = ("contradicted", "not tested here", "not confirmed", "confirmed")
    return Finding(
        next(verdict for verdict in order if verdict in verdicts), "; ".join(finding.evidence for finding in findings)
    )


def told(holds: bool, evidence: str) -> Finding:
    """A claim on exact numbers."""
    return Finding("confirmed" if holds else "contradicted", evidence)


def untested(why: str) -> Finding:
    return Finding("not tested here", why)
