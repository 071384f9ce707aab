"""Whether an ensemble collapsed to one model: do its draws still give different answers?

The rule. Of the two signs below, those that a record has must all hold:

    disagreement        <= max(0.05 * error rate, 1 / number of examples)
    mutual information  <= 0.01 * NLL

Both are relative to how much there is to disagree about: members of a useful ensemble disagree about as often as they are
wrong, so less than a twentieth of that says that they are one model to all purposes. Where a record has neither (regression),
the components' weights decide: collapsed when all sites' components lie within 1 % of each other (rms distance relative to
their mean). Weights are shown for every run, but do not overrule the answers: different weights may compute the same thing.
"""

from collections.abc import Sequence
from typing import Literal

from .records import EvaluatedRun

CollapseVerdict = Literal["one network", "not known", "collapsed", "diverse"]

SHARE_OF_ERROR = 0.05
SHARE_OF_NLL = 0.01
SMALLEST_DISTANCE = 0.01


def verdict(run: EvaluatedRun) -> CollapseVerdict:
    """One of: a single network by construction, nothing recorded, collapsed, diverse."""
    if run.diversity is None:
        return "one network"
    signs = []
    accuracy, nll = run.value("accuracy"), run.value("nll")
    if run.diversity.disagreement is not None and accuracy is not None:
        smallest = 1 / run.num_examples if run.num_examples else 0.0
        signs.append(run.diversity.disagreement <= max(SHARE_OF_ERROR * (1 - accuracy), smallest))
    if run.diversity.mutual_information is not None and nll is not None:
        signs.append(run.diversity.mutual_information <= SHARE_OF_NLL * nll)
    if not signs:
        signs = [distance <= SMALLEST_DISTANCE for _, distance in run.diversity.distances]
    if not signs:
        return "not known"
    return "collapsed" if all(signs) else "diverse"


def sentence(runs: Sequence[EvaluatedRun]) -> str:
    """The verdict on a group, in plain words."""
    verdicts = [verdict(run) for run in runs]
    collapsed = verdicts.count("collapsed")
    if collapsed == len(runs):
        return "collapsed to one model"
    if collapsed:
        return f"collapsed to one model for {collapsed} of {len(runs)} seeds"
    if "diverse" in verdicts:
        return "not collapsed: the draws differ"
    return "one network, nothing to differ" if "one network" in verdicts else "not known"
