"""What the paper claims of the ten regression sets, judged by the records of all splits with corrected tests."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from .claim import Claim, ClaimVerdict, Finding, told, untested
from .experiment import as_text, paper_table
from .regression_comparison import corrected_test
from .regression_splits import SETS

_PATCHED, _RIVALS = ("ecmp", "emp"), ("dropout", "ensemble")
_SIGNS = {"rmse": 1.0, "lpd": -1.0}  # smaller is better
_NAMES = {"rmse": "lowest RMSE", "lpd": "highest log density"}

_CORRECTED = "paired over splits, corrected for their overlap, p < 0.01 asked for; runs at the full protocol alone"

Runs = dict[tuple[str, str], dict[str, Any]]


def _runs(result: Mapping[str, Any]) -> Runs:
    """The runs at the paper's full protocol, by set and method."""
    return {(run["set"], run["method"]): run for run in result["runs"] if run["full_protocol"]}


def _order(runs: Runs, ours: str, other: str, name: str, metric: str) -> int:
    """-1 where `ours` is better on the set with p < 0.01, 1 where it is worse, 0 where that is not decided."""
    pair = runs[name, ours], runs[name, other]
    mine, theirs = ([_SIGNS[metric] * row[metric] for row in run["splits"]] for run in pair)
    if len(mine) < 2 or len(mine) != len(theirs):
        return 0
    test = corrected_test(mine, theirs, pair[0]["num_train"], pair[0]["num_test"])
    return 0 if not test.significant else -1 if test.difference < 0 else 1


def _complete(runs: Runs, methods: Sequence[str]) -> list[str]:
    """The sets that all the methods were run on."""
    return [name for name in SETS if all((name, method) in runs for method in methods)]


def _lead(result: Mapping[str, Any], metric: str, wanted: int) -> Finding:
    """EMP or ECMP ahead of dropout and ensemble in `wanted` of the ten sets.

    By mean, and beyond doubt: one of the two is better than both rivals with p < 0.01. The claim cannot be true any more
    where on more than 10 - `wanted` sets a rival is better than both.
    """
    runs = _runs(result)
    sets = _complete(runs, [*_PATCHED, *_RIVALS])
    if not sets:
        return untested("no set with all four methods at the full protocol")
    means, sure, lost = 0, [], []
    for name in sets:
        mean = {m: _SIGNS[metric] * runs[name, m]["summary"][metric]["mean"] for m in (*_PATCHED, *_RIVALS)}
        means += min(mean[m] for m in _PATCHED) <= min(mean[m] for m in _RIVALS)
        orders = {(ours, rival): _order(runs, ours, rival, name, metric) for ours in _PATCHED for rival in _RIVALS}
        if any(all(orders[ours, rival] < 0 for rival in _RIVALS) for ours in _PATCHED):
            sure.append(name)
        if any(all(orders[ours, rival] > 0 for ours in _PATCHED) for rival in _RIVALS):
            lost.append(name)
    verdict: ClaimVerdict = "not confirmed"
    if len(sure) >= wanted:
        verdict = "confirmed"
    elif len(lost) > len(SETS) - wanted:
        verdict = "contradicted"
    return Finding(
        verdict,
        f"{_NAMES[metric]} by mean in {means} of {len(sets)} sets run; with p < 0.01 better than both rivals in "
        f"{_listed(sure)}, and worse than one in {_listed(lost)}",
        _CORRECTED,
    )


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names)})" if names else "none"


def _outperform(result: Mapping[str, Any], other: str) -> Finding:
    """EMP and ECMP better than the other method in both measures on every set."""
    runs = _runs(result)
    sets = _complete(runs, [*_PATCHED, other])
    if not sets:
        return untested(f"no set with ECMP, EMP and {other} at the full protocol")
    texts, orders = [], []
    for metric in _SIGNS:
        for ours in _PATCHED:
            found = [_order(runs, ours, other, name, metric) for name in sets]
            orders += found
            worse = [name for name, order in zip(sets, found, strict=True) if order > 0]
            texts.append(
                f"{ours.upper()}, {metric.upper()}: better in {found.count(-1)}, undecided in {found.count(0)}, worse in "
                f"{_listed(worse)}"
            )
    verdict: ClaimVerdict = "contradicted" if 1 in orders else "confirmed" if set(orders) == {-1} else "not confirmed"
    return Finding(verdict, f"{len(sets)} sets; " + "; ".join(texts), _CORRECTED)


def _same_density(result: Mapping[str, Any]) -> Finding:
    """All methods print the same log density on Kin8nm and Naval; the ensemble, which takes longest, may be missing."""
    runs, sets = _runs(result), ("kin8nm", "naval")
    every = (*_PATCHED, *_RIVALS)
    methods = [method for method in every if all((name, method) in runs for name in sets)]
    missing = [method for method in every if method not in methods]
    if missing not in ([], ["ensemble"]):
        there = [name for name in sets if (name, "ecmp") in runs]
        return untested(f"Kin8nm and Naval are asked for; run: {', '.join(there) or 'neither'}")
    spread = {}
    for name in sets:
        means = [runs[name, method]["summary"]["lpd"]["mean"] for method in methods]
        spread[name] = max(means) - min(means)
    texts = [f"{name}: largest difference {as_text(value, 2)}" for name, value in spread.items()]
    why = "largest difference below 0.01" + ("; without the ensemble" if missing else "")
    return told(all(value < 0.01 for value in spread.values()), "; ".join(texts), why)


def _year(result: Mapping[str, Any]) -> Finding:
    runs = _runs(result)
    if "year" not in _complete(runs, [*_PATCHED, *_RIVALS]):
        return untested("the file of Year is not there")
    means = {m: runs["year", m]["summary"]["rmse"]["mean"] for m in (*_PATCHED, *_RIVALS)}
    text = ", ".join(f"{method} {as_text(value)}" for method, value in means.items())
    return Finding("not confirmed", f"RMSE of one split: {text}", "one split allows no test")


def _published(metric: str, wanted: int, _: Mapping[str, Any]) -> Finding:
    """The count of the paper's own table, ties as wins."""
    won, all_sets = 0, 0
    for line in paper_table("uci"):
        if line["metric"] == metric:
            value = {method: _SIGNS[metric] * float(line[method]) for method in (*_PATCHED, *_RIVALS)}
            all_sets += 1
            won += min(value[m] for m in _PATCHED) <= min(value[m] for m in _RIVALS)
    return told(
        won >= wanted,
        f"as printed: {_NAMES[metric]}, ties included, in {won} of {all_sets} sets",
        "the paper's own numbers",
    )


_REGRESSION = ("regression",)

REGRESSION_CLAIMS = [
    Claim("ECMP or EMP has the lowest RMSE in eight of ten regression sets",
          "appendix D, table 12", "8 of 10", _REGRESSION, partial(_lead, metric="rmse", wanted=8)),
    Claim("ECMP or EMP has the highest log predictive density in nine of ten regression sets",
          "appendix D, table 13", "9 of 10", _REGRESSION, partial(_lead, metric="lpd", wanted=9)),
    Claim("The paper's own table 12 has ECMP or EMP first in eight sets", "table 12", "8 of 10", (),
          partial(_published, "rmse", 8)),
    Claim("The paper's own table 13 has ECMP or EMP first in nine sets", "table 13", "9 of 10", (),
          partial(_published, "lpd", 9)),
    Claim("EMP and ECMP consistently outperform dropout in RMSE and log density",
          "section 5", "tables 12 and 13", _REGRESSION, partial(_outperform, other="dropout")),
    Claim("EMP and ECMP consistently outperform the vanilla network in RMSE and log density",
          "section 5", "no number", _REGRESSION, partial(_outperform, other="vanilla")),
    Claim("On Kin8nm and Naval all methods have nearly the same log density: the output precision has the wrong scale",
          "appendix D, table 13", "-2.07", _REGRESSION, _same_density),
    Claim("On Year EMP and ECMP are worse than dropout and the ensemble", "appendix D, table 12",
          "RMSE ECMP 10.27, EMP 12.50, dropout 8.47, ensemble 8.69", _REGRESSION, _year),
]  # fmt: skip
