"""The claims of the paper as a checklist: what it says, where, our verdict, and the numbers of the records behind it.

Theorems and equations are not here: they are checked by tests (PAPER_MAP.md).
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from . import gpu_memory, parameter_tables
from .calibrated_runs import outside_regime
from .claim import Claim, Finding, all_of, better, not_comparable, of_test, told, untested
from .experiment import TextTable, as_text, largest_record
from .image_claims import IMAGE_CLAIMS
from .memory_growth import TOLERANCE, exponents
from .registry import experiment
from .regression_claims import REGRESSION_CLAIMS
from .regression_comparison import PairedTest, paired_test
from .turns_of_training import pays_where_k_is_large

Result = Mapping[str, Any]
_FEW_HOURS = 1 + 6 / 168  # "a few additional hours" on a week, read as up to six
_MODULES = "counts of modules, equal as printed"
_GAIN = 0.05  # share of the NLL that more components may gain before five are too few


def claims_table(records: Path) -> TextTable:
    """Every claim with its verdict, from the records of the largest scale that was run (smoke runs are tests)."""
    lines = []
    for claim in CLAIMS:
        finding = judged(claim, records)
        lines.append(
            [f"{claim.text} ({claim.place})", claim.paper, finding.evidence or "-", finding.verdict, finding.why]
        )
    return ["the paper says", "paper", "ours", "verdict", "why"], lines


def verdict_counts(records: Path) -> dict[str, dict[str, int]]:
    """How many claims have which verdict, by what they are about."""
    counts: dict[str, dict[str, int]] = {}
    for claim in CLAIMS:
        topic = counts.setdefault(_topic(claim), {})
        verdict = judged(claim, records).verdict
        topic[verdict] = topic.get(verdict, 0) + 1
    return counts


def _topic(claim: Claim) -> str:
    return (
        experiment(claim.experiments[0]).title if claim.experiments else "The paper's own tables, and what was not run"
    )


def judged(claim: Claim, records: Path) -> Finding:
    """What the records in a folder say of a claim. Where those of several experiments can be compared, all must agree."""
    if not claim.experiments:
        return claim.judge({})
    found = {}
    for name in claim.experiments:
        record = largest_record(records, name)
        if record is not None:
            finding = claim.judge(record["result"])
            source = f"{name}, {record['scale']}{_subject(record['result'])}"
            found[name] = Finding(finding.verdict, finding.evidence, f"{finding.why} ({source})")
    if not found:
        return untested("not run yet: " + " or ".join(f"`patchbayes reproduce {name}`" for name in claim.experiments))
    comparable = {
        name: finding for name, finding in found.items() if finding.verdict not in ("not comparable", "not tested here")
    }
    taken = comparable or found
    if len(taken) == 1:
        return next(iter(taken.values()))
    return all_of(
        [
            Finding(finding.verdict, f"{name}: {finding.evidence}" if finding.evidence else "", finding.why)
            for name, finding in taken.items()
        ]
    )


def _subject(result: Result) -> str:
    """The seeds of an image study, which its verdicts rest on."""
    if "seeds" not in result or "methods" not in result:
        return ""
    return f", {result['seeds']} seed{'s' if result['seeds'] > 1 else ''}"


def _overheads(result: Result) -> Finding:
    """EMP and ECMP below 18 %, dropout none, mean-field Gaussian 100 % or more: all of modules."""
    texts, holds = [], True
    for network, counts in result["networks"].items():
        over = {m: 100 * (counts[m] / counts["plain"] - 1) for m in ("dropout", "emp", "ecmp", "mean_field_gaussian")}
        holds &= over["dropout"] == 0 and max(over["emp"], over["ecmp"]) < 18 and over["mean_field_gaussian"] >= 100
        texts.append(f"{network}: " + ", ".join(f"{name} {as_text(value, 3)} %" for name, value in over.items()))
    return told(bool(texts) and holds, "; ".join(texts), "counts of modules")


def _row_verdicts(matches: Callable[[str], bool], result: Result, why: str = _MODULES) -> Finding:
    """Numbers of the comparison with tables 1, 3, 4 and 6 by their own tolerances."""
    rows = [row for row in parameter_tables.rows(dict(result)) if matches(row.what)]
    known = [row for row in rows if row.verdict != "not comparable"]
    if not known:
        return untested("; ".join(dict.fromkeys(row.why for row in rows if row.why)) or "not in the record")
    texts = ", ".join(
        dict.fromkeys(f"{row.what.removeprefix('overhead in % of ')}: {as_text(row.ours)}" for row in known)
    )
    return told(all(row.verdict == "within" for row in known), texts, why)


def _growth(result: Result) -> Finding:
    """No exponent larger than the paper's order has on the same sizes."""
    if "growth" not in result:
        return untested("not in the record")
    found = exponents(result["growth"])
    larger = {key: pair for key, pair in found.items() if pair[0] > pair[1] + TOLERANCE}
    worst = max(found, key=lambda key: found[key][0] - found[key][1])
    ours, theirs = found[worst]
    text = f"{len(found) - len(larger)} of {len(found)} exponents are no larger than the order's; largest excess "
    text += f"{ours - theirs:+.2f} ({worst[0]} in {worst[1]}: {ours:.2f}, order {theirs:.2f})"
    return told(not larger, text, f"an exponent may exceed the order's by {TOLERANCE:g}")


def _exact_counts(result: Result) -> Finding:
    rows = [row for row in parameter_tables.rows(dict(result)) if row.what.startswith("parameters of")]
    wrong = [row.what for row in rows if row.verdict != "within"]
    text = f"{len(rows) - len(wrong)} of {len(rows)} come out (the MLP's by formula)"
    return told(not wrong, text + (f"; not {', '.join(wrong)}" if wrong else ""))


def _ensemble_sizes(result: Result) -> Finding:
    sizes = {method: result["mlp"][method]["log10_ensemble_size"] for method in ("ecmp", "emp", "dropout", "ensemble")}
    text = ", ".join(f"{method} 10^{as_text(round(size, 1), 6)}" for method, size in sizes.items())
    return told(sizes["ecmp"] > sizes["dropout"] > sizes["ensemble"] and sizes["emp"] > sizes["ensemble"], text)


def _little_memory(result: Result) -> Finding:
    """ "Nearly the same" is read as less than 10 % more; a doubling is what mean-field needs."""
    held = {method: sum(parts.values()) for method, parts in result["memory"]["bytes"].items()}
    ratio = {method: held[method] / held["vanilla"] for method in ("emp", "ecmp", "dropout", "mean_field_gaussian")}
    text = ", ".join(f"{method} {value:.3f}" for method, value in ratio.items())
    return told(
        max(ratio["emp"], ratio["ecmp"]) < 1.1, f"memory of a step, times vanilla: {text}", "below 1.1, counted bytes"
    )


def _doubling(model: str, result: Result) -> Finding:
    row = next(row for row in gpu_memory.rows(dict(result)) if row.what.endswith(f", {model}"))
    assert row.paper is not None
    assert row.ours is not None
    text = f"{as_text(row.ours, 3)} years, {100 * (row.ours / row.paper - 1):+.0f} % of the paper's"
    return told(
        row.verdict == "within", text, f"distance; within {100 * gpu_memory.TOLERANCE:g} %, another table of cards"
    )


def _cards(result: Result) -> Finding:
    """Another table of cards: a tenth more or fewer count as the same."""
    cards = result["fits"]["15 years before the paper"]["cards"]
    share = cards / 1599 - 1
    why = f"distance; within {100 * gpu_memory.TOLERANCE:g} %, another table of cards"
    return told(abs(share) <= gpu_memory.TOLERANCE, f"{cards:,} cards, {100 * share:+.0f} %", why)


def _finer(result: Result) -> Finding:
    """More jumps of a function; components are independent from set to set, so the errors of the means add."""
    jumps = {name: result["statistics"][name]["jumps"] for name in ("dropout", "EMP", "ECMP")}
    return all_of([_fewer(f"jumps of dropout - {name}:", jumps["dropout"], jumps[name]) for name in ("EMP", "ECMP")])


def _smoother(result: Result) -> Finding:
    """Smaller jumps."""
    sizes = {name: result["statistics"][name]["jump_size"] for name in ("dropout", "EMP", "ECMP")}
    return all_of(
        [_fewer(f"size of a jump, {name} - dropout:", sizes[name], sizes["dropout"]) for name in ("EMP", "ECMP")]
    )


def _fewer(what: str, a: Mapping[str, float], b: Mapping[str, float]) -> Finding:
    """a < b by the normal test: the means are over hundreds of sets."""
    difference, error = a["mean"] - b["mean"], math.hypot(a["standard_error"], b["standard_error"])
    p = math.erfc(abs(difference) / error / math.sqrt(2)) if error else float(difference == 0)
    why = "normal test over independent sets, p < 0.01 asked for"
    return of_test(what, PairedTest(difference, error, p, 0), why)


def _scores(result: Result, label: str, key: str = "nll") -> list[float]:
    return [scores[key] for scores in result["variants"][label]]


def _zero_is_worse(result: Result) -> Finding:
    """Both readings: weight and bias of one component at zero, or its weight alone."""
    found = []
    for method in ("EMP", "ECMP"):
        for variant in (f"{method}, one zero", f"{method}, one zero weight"):
            what = f"NLL of {method} - {variant.replace(',', ' with')}:"
            found.append(better(what, _scores(result, method), _scores(result, variant)))
    return all_of(found)


def _five_components(result: Result) -> Finding:
    """Ten components gain less than a twentieth of the NLL."""
    found = []
    for method in ("EMP", "ECMP"):
        five, ten = _scores(result, method), _scores(result, f"{method}, K = 10")
        what = f"{1 - _GAIN:g} x NLL of {method} with K = 5 - with K = 10:"
        found.append(better(what, [(1 - _GAIN) * value for value in five], ten))
    return all_of(found)


def _sites_help(extended: str, plain: str, result: Result) -> Finding:
    return better(f"NLL of {extended} - {plain}:", _scores(result, extended), _scores(result, plain))


def _one_draw(result: Result) -> Finding:
    """At equal compute, by what training is for: the NLL of the training data. No claim on calibration: any regime tells."""
    longer = result["equal_compute"]
    ours = [scores["train_nll"] for scores in longer["S = 1"]]
    return all_of(
        [
            better(f"training NLL of S = 1 - {label}:", ours, [scores["train_nll"] for scores in rows])
            for label, rows in longer.items()
            if label != "S = 1"
        ]
    )


def _falls(result: Result) -> Finding:
    texts, holds = [], True
    for label, (kept,) in result["methods"].items():
        values = kept["epochs"]
        holds &= len(values) > 1 and all(after < before for before, after in pairwise(values))
        texts.append(f"{label} {as_text(values[0], 3)} to {as_text(values[-1], 3)} in {len(values)} epochs")
    return told(holds, ", ".join(texts), "every epoch below the one before")


def _output_overhead(result: Result) -> Finding:
    counts = result["networks"].get("resnet18", {})
    if "emp_bn" not in counts:
        return untested("not in the record")
    percent = 100 * (counts["emp"] - counts["emp_bn"]) / counts["plain"]
    return told(abs(percent - 17.6) <= 0.05, f"{percent:.2f} %", _MODULES)


def _few_hours(result: Result) -> Finding:
    """A step of EMP and ECMP takes at most six hours more on a week; the ratio within a round is tested."""
    found = []
    for method in ("emp", "ecmp"):
        if method not in result["methods"]:
            return untested(f"{method} does not fit into memory")
        ratios = _ratios(result, method)
        what = f"{method} {statistics.median(ratios):.3f} times vanilla; mean ratio - {_FEW_HOURS:.3f}:"
        test = paired_test(ratios, [_FEW_HOURS] * len(ratios))
        found.append(of_test(what, test, "paired over rounds, p < 0.01 asked for; few hours read as up to six"))
    return all_of(found)


def _ratios(result: Result, method: str) -> list[float]:
    """Seconds of a step over those of vanilla, round by round."""
    pairs = zip(result["methods"][method]["seconds"], result["methods"]["vanilla"]["seconds"], strict=True)
    return [seconds / plain for seconds, plain in pairs]


def _double_flops(result: Result) -> Finding:
    costs = result["methods"]
    if "meanfield" not in costs:
        return untested("mean-field does not fit into memory")
    flops = costs["meanfield"]["flops"] / costs["vanilla"]["flops"]
    return told(abs(flops - 2) < 0.1, f"mean-field {flops:.3f} times vanilla", "counted; within 0.1")


def _double_time(result: Result) -> Finding:
    """Mean-field: 2 to 4 times the time of a step."""
    if "meanfield" not in result["methods"]:
        return untested("mean-field does not fit into memory")
    ratios = _ratios(result, "meanfield")
    median = f"mean-field {statistics.median(ratios):.3f} times vanilla"
    why = "paired over rounds, p < 0.01 asked for"
    return all_of(
        [
            of_test(f"{median}; 2 - mean ratio:", paired_test([2.0] * len(ratios), ratios), why),
            of_test("mean ratio - 4:", paired_test(ratios, [4.0] * len(ratios)), why),
        ]
    )


def _of_ablations(judge: Callable[[Result], Finding]) -> Callable[[Result], Finding]:
    """Ablations are judged by NLL where their network without patches is in the regime of the claims."""

    def found(result: Result) -> Finding:
        why = outside_regime(result["regimes"])
        finding = judge(result)
        return finding if why is None else not_comparable(finding.evidence, why)

    return found


_NETWORKS_OF_TABLE_1 = "ResNet-18 17.9 %, PyramidNet 1.10 %; others >= 100 %"

CLAIMS: Sequence[Claim] = [
    Claim("Dropout costs no parameters and EMP or ECMP little; a mean-field Gaussian doubles them",
          "section 1, table 1", _NETWORKS_OF_TABLE_1, ("parameters",), _overheads),
    Claim("Multiplicative normalizing flows need 300 times the parameters", "table 1", "29900 % more", ("parameters",),
          partial(_row_verdicts, lambda what: what.startswith("overhead in %") and what.endswith("mnfg"),
                  why="counts of modules with our MNF, two flows of two layers of 50; the paper does not derive its number")),
    Claim("The printed numbers of parameters", "table 3", "15 counts", ("parameters",), _exact_counts),
    Claim("Overheads of BN, and of BN and output", "tables 4 and 6", "0.328 %, 17.9 %; 1.10 %", ("parameters",),
          partial(_row_verdicts, lambda what: what.startswith("overhead in %") and "emp" in what)),
    Claim("The output layer of ResNet-18 costs 17.6 % over the norms alone", "section 5", "17.6 %", ("parameters",),
          _output_overhead),
    Claim("Norm layers are only 0.1 % of InceptionV3", "section 3.3", "0.1 %", ("parameters",),
          partial(_row_verdicts, lambda what: "InceptionV3" in what)),
    Claim("Implicit ensembles hold exponentially more networks than explicit ones, ECMP more than dropout",
          "section 3.4, table 3", "K^L, K^(H^2 + L H), 2^(L H), K", ("parameters",), _ensemble_sizes),
    Claim("The memory overhead of each method grows as its order says", "table 3",
          "K (H^2 + L H), L H, L H^2, K L H^2", ("parameters",), _growth),
    Claim("EMP and ECMP need little more memory than the vanilla network (we ask for less than 10 %)",
          "sections 1 and 3.4", "nearly the same", ("parameters",), _little_memory),
    Claim("Graphics cards of the 15 years before the paper", "figure 1, appendix E", "1599", ("gpu-memory",), _cards),
    Claim("Memory of graphics cards doubles every 2.8 years (exponential)",
          "appendix E", "2.8 years", ("gpu-memory",), partial(_doubling, "exponential")),
    Claim("Memory of graphics cards doubles every 3.2 years (exponential with offset)",
          "section 1, figure 1, appendix E", "3.2 years", ("gpu-memory",), partial(_doubling, "exponential with offset")),
    Claim("Functions of the EMP prior have finer detail than those of the dropout prior",
          "figure 3, appendix D.1", "a picture", ("prior",), _finer),
    Claim("Functions of the EMP prior are smoother than those of the dropout prior",
          "figure 3, appendix D.1", "a picture", ("prior",), _smoother),
    *IMAGE_CLAIMS,
    *REGRESSION_CLAIMS,
    Claim("EMP and ECMP train on networks with hundreds of layers (we ask that the training NLL falls in every epoch)",
          "section 1", "hundreds", ("hundred-layers",), _falls),
    Claim("A component fixed at zero makes EMP and ECMP worse", "appendix D.1", "no number", ("ablations",),
          _of_ablations(_zero_is_worse)),
    Claim(f"Five components are expressive enough (we ask that ten gain less than {100 * _GAIN:g} % of the NLL)",
          "section 3.4", "K = 5", ("ablations",), _of_ablations(_five_components)),
    Claim("It helps to patch the output layer besides the norms",
          "section 3.3", "no number", ("ablations",), _of_ablations(partial(_sites_help, "EMP", "EMP, norm"))),
    Claim("It helps to patch the input layer too",
          "section 3.3", "no number", ("ablations",), _of_ablations(partial(_sites_help, "EMP, norm+output+input", "EMP"))),
    Claim("One draw in a training step is the most efficient", "appendix B.4", "S = 1", ("ablations",), _one_draw),
    Claim("Training EMP or ECMP takes only a few hours more than a week (we ask for at most six)",
          "section 5", "a week and a few hours", ("cost",), _few_hours),
    Claim("A method with a parameter overhead of 100 % takes twice the FLOPs", "section 5", "2", ("cost",), _double_flops),
    Claim("A method with a parameter overhead of 100 % takes 2 to 4 times the training time",
          "section 5", "2 to 4", ("cost",), _double_time),
    Claim("Coordinate descent between shared and patched parameters pays most when K is large",
          "appendix C.2", "no number", ("coordinate-descent",), pays_where_k_is_large),
]  # fmt: skip
