"""A claim of the paper, and how records judge it: by rules that are stated, never by a number copied from the paper.

A claim that one thing is better than another is *confirmed* or *contradicted* only with p < 0.01 (paired over seeds, or
corrected for overlapping splits), else *not confirmed*; a claim that two things are alike by their 99 % interval and a stated
margin. A claim on accuracy or calibration is *not comparable* where the network without patches does not fit its training data
or is not overconfident: there no Bayesian method can help.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from patchbayes.metrics.student import student_t

from .experiment import as_text
from .regression_comparison import LEVEL, PairedTest, paired_test

ClaimVerdict = Literal["confirmed", "not confirmed", "contradicted", "not comparable", "not tested here"]


@dataclass(frozen=True)
class Finding:
    """What a record says of a claim.

    evidence  our numbers; empty where there are none.
    why       the rule that made the verdict, or the reason why there is none.
    """

    verdict: ClaimVerdict
    evidence: str
    why: str = ""


@dataclass(frozen=True)
class Claim:
    """What the paper says, in our words, with its numbers, where it says so, and who judges it.

    paper       the paper's numbers as text.
    experiments those whose records `judge` sees, one by one; none for what the paper's own tables tell: `judge` then gets {}.
    """

    text: str
    place: str
    paper: str
    experiments: tuple[str, ...]
    judge: Callable[[Mapping[str, Any]], Finding]


_PAIRED = "paired over seeds, p < 0.01 asked for"


def better(what: str, ours: Sequence[float], theirs: Sequence[float]) -> Finding:
    """The claim that `ours` is smaller than `theirs`, paired by seed."""
    return _too_few(what, ours, theirs) or of_test(what, paired_test(ours, theirs))


def _too_few(what: str, ours: Sequence[float], theirs: Sequence[float]) -> Finding | None:
    if not ours or not theirs:
        return untested(f"{what} not in the record")
    if len(ours) != len(theirs) or len(ours) < 2:
        seeds = min(len(ours), len(theirs))
        ending = "one seed" if seeds == 1 else f"{seeds} seeds of both"
        return Finding("not confirmed", f"{what} {as_text(ours[0] - theirs[0], 3)}", f"{ending}: no test")
    return None


def of_test(what: str, test: PairedTest, why: str = _PAIRED) -> Finding:
    """The claim that the difference is negative."""
    verdict: ClaimVerdict = "not confirmed"
    if test.significant:
        verdict = "confirmed" if test.difference < 0 else "contradicted"
    return Finding(verdict, f"{what} {as_text(test.difference, 3)} ({_p_text(test.p)})", why)


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
    why = f"99 % interval within ±{margin:g} asked for"
    return Finding(verdict, f"{what} {as_text(test.difference, 3)} ± {as_text(reach, 2)}", why)


#: Of several parts the first of these that some part has.
_ORDER: tuple[ClaimVerdict, ...] = ("not comparable", "contradicted", "not tested here", "not confirmed", "confirmed")


def all_of(findings: Sequence[Finding]) -> Finding:
    """A claim of several parts: confirmed where every part is, contradicted where some part is."""
    verdicts = {finding.verdict for finding in findings}
    whys = dict.fromkeys(finding.why for finding in findings if finding.why)
    return Finding(
        next(verdict for verdict in _ORDER if verdict in verdicts),
        "; ".join(finding.evidence for finding in findings if finding.evidence),
        "; ".join(whys),
    )


def told(holds: bool, evidence: str, why: str = "exact numbers") -> Finding:
    """A claim on numbers that nothing but their rounding makes uncertain."""
    return Finding("confirmed" if holds else "contradicted", evidence, why)


def not_comparable(evidence: str, why: str) -> Finding:
    return Finding("not comparable", evidence, why)


def untested(why: str) -> Finding:
    return Finding("not tested here", "", why)
