"""The claims of the paper as a checklist: what it says, where, our verdict, and the numbers of the records behind it.

Theorems and equations are not here: they are checked by tests (PAPER_MAP.md).
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from . import gpu_memory, parameter_tables
from .claim import Claim, Finding, all_of, better, of_test, told, untested
from .experiment import TextTable, as_text, largest_record
from .image_claims import IMAGE_CLAIMS
from .regression_claims import REGRESSION_CLAIMS
from .regression_comparison import PairedTest, paired_test

Result = Mapping[str, Any]
_FEW_HOURS = 1 + 6 / 168  # "a few additional hours" on a week, read as up to six
_GAIN = 0.05  # share of the NLL that more components may gain before five are too few


def claims_table(records: Path) -> TextTable:
    """Every claim with its verdict, from the record of the largest scale that was run (smoke runs are tests)."""
    lines = []
    for claim in CLAIMS:
        finding = judged(claim, records)
        lines.append([claim.text, claim.place, finding.verdict, finding.evidence])
    return ["claim", "of the paper", "verdict", "evidence"], lines


def judged(claim: Claim, records: Path) -> Finding:
    """What the records in a folder say of a claim."""
    if claim.experiment is None:
        return claim.judge({})
    record = largest_record(records, claim.experiment)
    if record is None:
        return untested(f"run `patchbayes reproduce {claim.experiment}`")
    finding = claim.judge(record["result"])
    source = f"`{claim.experiment}-{record['scale']}`{_subject(record['result'])}"
    return Finding(finding.verdict, f"{source}: {finding.evidence}")


def _subject(result: Result) -> str:
    """The network and epochs of an image study: its verdicts are about these."""
    if "model" not in result:
        return ""
    return (
        f" ({result['model']} on {result['data']}, {result['training'].get('epochs')} epochs, "
        f"{result['seeds']} seed{'s' if result['seeds'] > 1 else ''})"
    )


def _overheads(result: Result) -> Finding:
    """EMP below 18 %, the rivals at 100 % or more; all are counts of modules."""
    texts, holds = [], True
    for network, counts in result["networks"].items():
        over = {
            m: 100 * (counts[m] / counts["plain"] - 1)
            for m in ("dropout", "emp", "ecmp", "mean_field_gaussian", "mnfg")
        }
        holds &= over["dropout"] == 0 and max(over["emp"], over["ecmp"]) < 18
        holds &= min(over["mean_field_gaussian"], over["mnfg"]) >= 100
        texts.append(f"{network}: " + ", ".join(f"{name} {as_text(value, 3)} %" for name, value in over.items()))
    return told(bool(texts) and holds, "; ".join(texts))


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
    return told(max(ratio["emp"], ratio["ecmp"]) < 1.1, f"memory of a step, times vanilla: {text}")


def _doubling(model: str, result: Result) -> Finding:
    row = next(row for row in gpu_memory.rows(dict(result)) if row.what.endswith(f", {model}"))
    fit = result["fits"]["15 years before the paper"][model]
    text = f"{as_text(fit['years'], 3)} years, 95 % interval {as_text(fit['low'], 3)} to {as_text(fit['high'], 3)}"
    return told(row.verdict == "within", text)


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
    return of_test(what, PairedTest(difference, error, p, 0))


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


def _few_hours(result: Result) -> Finding:
    """A step of EMP and ECMP takes at most six hours more on a week; rounds are the pairs."""
    plain = result["methods"]["vanilla"]["seconds"]
    found = []
    for method in ("emp", "ecmp"):
        if method not in result["methods"]:
            return untested(f"{method} does not fit into memory")
        seconds = result["methods"][method]["seconds"]
        ratio = sum(seconds) / sum(plain)
        test = paired_test(seconds, [_FEW_HOURS * value for value in plain])
        found.append(
            of_test(f"{method} takes {ratio:.3f} times vanilla; seconds of a step - {_FEW_HOURS:.3f} x vanilla:", test)
        )
    return all_of(found)


def _double_cost(result: Result) -> Finding:
    """Mean-field: twice the FLOPs, and 2 to 4 times the time of a step."""
    costs = result["methods"]
    if "meanfield" not in costs:
        return untested("mean-field does not fit into memory")
    plain, seconds = costs["vanilla"]["seconds"], costs["meanfield"]["seconds"]
    flops, ratio = costs["meanfield"]["flops"] / costs["vanilla"]["flops"], sum(seconds) / sum(plain)
    return all_of(
        [
            told(abs(flops - 2) < 0.1, f"FLOPs {flops:.3f} times vanilla, time {ratio:.3f} times"),
            better("seconds of a step, 2 x vanilla - mean-field:", [2 * value for value in plain], seconds),
            better("mean-field - 4 x vanilla:", seconds, [4 * value for value in plain]),
        ]
    )


CLAIMS: Sequence[Claim] = [
    Claim("Dropout costs no parameters and EMP or ECMP 1.1 to 17.9 %; other variational methods 100 % or more",
          "section 1, table 1", "parameters", _overheads),
    Claim("The printed numbers of parameters", "table 3", "parameters", _exact_counts),
    Claim("Implicit ensembles hold exponentially more networks than explicit ones, ECMP more than dropout",
          "section 3.4, table 3", "parameters", _ensemble_sizes),
    Claim("EMP and ECMP need little more memory than the vanilla network (we ask for less than 10 %)",
          "sections 1 and 3.4, table 3", "parameters", _little_memory),
    Claim("Memory of graphics cards doubles every 2.8 years (exponential)",
          "appendix E", "gpu-memory", partial(_doubling, "exponential")),
    Claim("Memory of graphics cards doubles every 3.2 years (exponential with offset)",
          "figure 1, appendix E", "gpu-memory", partial(_doubling, "exponential with offset")),
    Claim("Functions of the EMP prior have finer detail than those of the dropout prior",
          "figure 3, appendix D.1", "prior", _finer),
    Claim("Functions of the EMP prior are smoother than those of the dropout prior",
          "figure 3, appendix D.1", "prior", _smoother),
    *IMAGE_CLAIMS,
    *REGRESSION_CLAIMS,
    Claim("A component fixed at zero makes EMP and ECMP worse", "appendix D.1", "ablations", _zero_is_worse),
    Claim(f"Five components are expressive enough (we ask that ten gain less than {100 * _GAIN:g} % of the NLL)",
          "section 3.4", "ablations", _five_components),
    Claim("It helps to patch the output layer besides the norms",
          "section 3.3", "ablations", partial(_sites_help, "EMP", "EMP, norm")),
    Claim("It helps to patch the input layer too",
          "section 3.3", "ablations", partial(_sites_help, "EMP, norm+output+input", "EMP")),
    Claim("Training EMP or ECMP takes only a few hours more than a week (we ask for at most six)",
          "section 5", "cost", _few_hours),
    Claim("A method with a parameter overhead of 100 % takes twice the FLOPs and 2 to 4 times the training time",
          "section 5", "cost", _double_cost),
]  # fmt: skip
