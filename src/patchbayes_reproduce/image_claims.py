"""What the paper claims of CIFAR-100, ImageNet and ImageNet-C, judged by the records of the image studies."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from .claim import Claim, Finding, alike, all_of, better, not_comparable, told
from .experiment import as_text, paper_table
from .image_study import outside_claims, scores_of
from .seed_statistics import mean_of

_PATCHED = ("emp_bn_output", "ecmp_bn_output")
_PLAIN = ("vanilla", "dropout")
_MARGIN = 0.5  # points of ECE that count as no difference: the paper's tables 9-11 differ by up to 0.15 past S = 100
_RISE = 0.01  # of the error: a corruption that does less harm says nothing of robustness
_DROPOUT_MARGIN = 1.0  # points: the paper's "little to no advantage" is half a point of ECE
_LABELS = {"emp_bn_output": "EMP", "ecmp_bn_output": "ECMP", "emp_bn": "EMP (BN)", "ecmp_bn": "ECMP (BN)"}
#: name of a measure -> factor that makes it points of which fewer are better, and their name
_MEASURES = {"accuracy": (-100.0, "error"), "ece": (100.0, "ECE"), "top5_accuracy": (-100.0, "top-5 error")}

Result = Mapping[str, Any]
Judge = Callable[[Result], Finding]
_CIFAR, _IMAGENET = ("cifar100", "cifar100-resnet"), ("imagenet",)


def _values(result: Result, label: str, measure: str) -> list[float]:
    """By seed, in points, smaller is better; none where the method was not run."""
    factor = _MEASURES[measure][0]
    values = [scores.value(measure) for scores in scores_of(result).get(label, [])]
    return [factor * value for value in values if value is not None]


def _against(result: Result, label: str, other: str, measure: str) -> Finding:
    what = f"{_MEASURES[measure][1]} of {_name(label)} - {_name(other)}:"
    return better(what, _values(result, label, measure), _values(result, other, measure))


def _name(label: str) -> str:
    return _LABELS.get(label, label)


def _patched_better(result: Result, measure: str) -> Finding:
    return all_of([_against(result, label, other, measure) for label in _PATCHED for other in _PLAIN])


def _trade_off(result: Result) -> Finding:
    """Dropout: smaller calibration error, larger error."""
    return all_of([_against(result, "dropout", "vanilla", "ece"), _against(result, "vanilla", "dropout", "accuracy")])


def _halved(result: Result) -> Finding:
    ours, plain = (_values(result, label, "ece") for label in ("ecmp_bn_output", "vanilla"))
    return better("ECE of ECMP - half of vanilla's:", ours, [value / 2 for value in plain])


def _dropout_useless(result: Result) -> Finding:
    dropout, plain = (_values(result, label, "ece") for label in ("dropout", "vanilla"))
    return alike("ECE of dropout - vanilla:", dropout, plain, _DROPOUT_MARGIN)


def _at(result: Result, label: str, measure: str, draws: int) -> list[float]:
    """By seed, in points, smaller is better; none where the curves have no such number of draws."""
    curves = [scores.draws_curve for scores in scores_of(result).get(label, [])]
    values = [None if curve is None else curve.at(draws, measure) for curve in curves]
    known = [_MEASURES[measure][0] * value for value in values if value is not None]
    return known if len(known) == len(values) else []


def _more_draws(result: Result, measure: str) -> Finding:
    """S = 20 against S = 1, and 100 against 20, of every method that draws."""
    found = []
    for label in (*_PATCHED, "dropout"):
        for few, many in ((1, 20), (20, 100)):
            what = f"{_MEASURES[measure][1]} of {_name(label)}, S = {many} - S = {few}:"
            found.append(better(what, _at(result, label, measure, many), _at(result, label, measure, few)))
    return all_of(found)


def _enough_draws(result: Result) -> Finding:
    found = []
    for label in _PATCHED:
        what = f"ECE of {_name(label)}, S = 200 - S = 100:"
        found.append(alike(what, _at(result, label, "ece", 200), _at(result, label, "ece", 100), _MARGIN))
    return all_of(found)


def _in_regime(judge: Judge) -> Judge:
    """The judge, asked only where the vanilla networks fit their training data and are overconfident."""

    def judged(result: Result) -> Finding:
        why = outside_claims(result)
        found = judge(result)
        return found if why is None else not_comparable(found.evidence, why)

    return judged


def _calibrated_better(result: Result, other: str) -> Finding:
    """The same comparison after every method was calibrated on the same held-out images: in NLL."""
    found = []
    for label in _PATCHED:
        ours, theirs = (_calibrated_nll(result, one) for one in (label, other))
        found.append(better(f"NLL of {_name(label)} - {other}:", ours, theirs))
    return all_of(found)


def _calibrated_nll(result: Result, label: str) -> list[float]:
    rows = [kept.get("calibrated") for kept in result["methods"].get(label, [])]
    return [float(row["draws"]["nll"]["value"]) for row in rows if row]


def _top5(result: Result) -> Finding:
    """EMP and ECMP have 0.5 points more than vanilla among five classes."""
    found = []
    plain = _values(result, "vanilla", "top5_accuracy")
    for label in _PATCHED:
        ours = [value + 0.5 for value in _values(result, label, "top5_accuracy")]
        found.append(better(f"top-5 error of {_name(label)} + 0.5 - vanilla's:", ours, plain))
    return all_of(found)


def _perfect(result: Result) -> Finding:
    """ECE within a point of what chance gives a perfectly calibrated network."""
    ours = _values(result, "ecmp_bn_output", "ece")
    floors = [100 * (scores.metrics["ece"].floor or 0.0) for scores in scores_of(result).get("ecmp_bn_output", [])]
    return better(
        f"ECE of ECMP {as_text(mean_of(ours), 3)} %, floor {as_text(mean_of(floors), 3)} %; ECE - floor - 1 point:",
        ours,
        [floor + 1 for floor in floors],
    )


def _output_helps(result: Result) -> Finding:
    pairs = [("emp_bn_output", "emp_bn"), ("ecmp_bn_output", "ecmp_bn")]
    return all_of([_against(result, a, b, measure) for a, b in pairs for measure in ("accuracy", "ece")])


def _corrupted(result: Result, key: str, pairs: Sequence[tuple[str, str]], margin: float | None = None) -> Finding:
    """mCE or relative mCE of the first of each pair against the second."""
    name, found = {"mce": "mCE", "relative_mce": "rmCE"}[key], []
    for pair in pairs:
        what = f"{name} of {_name(pair[0])} - {_name(pair[1])}:"
        ours, theirs = (_corruption_scores(result, label, key) for label in pair)
        found.append(better(what, ours, theirs) if margin is None else alike(what, ours, theirs, margin))
    together = all_of(found)
    harmless = _harmless(result) if key == "relative_mce" else 0
    if harmless:
        why = f"vanilla loses less than a point under {harmless} of the corruptions, and relative errors divide by that"
        return not_comparable(together.evidence, why)
    return together


def _harmless(result: Result) -> int:
    """Corruptions that raise the error of the first vanilla network by less than a point."""
    reference = next((one.corruptions for one in scores_of(result).get("vanilla", []) if one.corruptions), None)
    if reference is None or reference.clean_error is None:
        return 0
    errors = [reference.mean("error", name) for name in reference.names]
    return sum(error is not None and error - reference.clean_error < _RISE for error in errors)


def _corruption_scores(result: Result, label: str, key: str) -> list[float]:
    """By seed; none where a run was not scored under corruption."""
    found = [scores.corruptions for scores in scores_of(result).get(label, [])]
    values = [None if scores is None else getattr(scores, key) for scores in found]
    known = [float(value) for value in values if value is not None]
    return known if len(known) == len(values) else []


_EACH = [(label, other) for label in _PATCHED for other in _PLAIN]


def _published(table: str, column: str, _: Result) -> Finding:
    """Whether the paper's own table has EMP and ECMP below dropout and vanilla."""
    lines = {line["method"]: float(line[column]) for line in paper_table(table)}
    numbers = ", ".join(f"{_name(label)} {as_text(lines[label])}" for label in (*_LABELS, *_PLAIN) if label in lines)
    holds = all(lines[label] < lines[other] for label in _PATCHED for other in _PLAIN)
    return told(holds, f"as printed: {numbers}", "the paper's own numbers")


def _printed(table: str, columns: Mapping[str, str], methods: Sequence[str] = (*_PATCHED, *_PLAIN)) -> str:
    """Columns of a table of the paper, method by method."""
    lines = {line["method"]: line for line in paper_table(table)}
    short = {label.partition("_")[0]: label for label in lines} | {label: label for label in lines}
    texts = []
    for column, title in columns.items():
        values = []
        for method in methods:
            line = lines[method if method in lines else short[method.partition("_")[0]]]
            values.append(f"{_name(method)} {line[column]}")
        texts.append(f"{title} {', '.join(values)}")
    return "; ".join(texts)


def _printed_draws(columns: Mapping[str, str], draws: Sequence[str], methods: Sequence[str]) -> str:
    lines = {(line["method"], line["draws"]): line for line in paper_table("mc_draws")}
    return "; ".join(
        f"{title} of {method.upper() if method != 'dropout' else method} at S = {', '.join(draws)}: "
        + ", ".join(lines[method, number][column] for number in draws)
        for column, title in columns.items()
        for method in methods
    )


_CIFAR_TABLE, _IMAGENET_TABLE = "cifar100_pyramidnet", "imagenet_resnet18"
_ALL_DRAWS, _DRAWN = ("1", "20", "100"), ("emp", "ecmp", "dropout")
_BOTH_SITES = (*_PATCHED, "emp_bn", "ecmp_bn")

IMAGE_CLAIMS = [
    Claim("EMP and ECMP are better calibrated than dropout and the vanilla network on CIFAR-100",
          "section 5, table 6, figure 5", _printed(_CIFAR_TABLE, {"ece": "ECE %"}), _CIFAR,
          _in_regime(partial(_patched_better, measure="ece"))),
    Claim("EMP and ECMP are more accurate than dropout and the vanilla network on CIFAR-100",
          "section 5, table 6", _printed(_CIFAR_TABLE, {"top1": "top-1 %"}), _CIFAR,
          _in_regime(partial(_patched_better, measure="accuracy"))),
    Claim("ECMP more than halves the calibration error on CIFAR-100",
          "section 5, table 6", _printed(_CIFAR_TABLE, {"ece": "ECE %"}, ("ecmp_bn_output", "vanilla")), _CIFAR,
          _in_regime(_halved)),
    Claim("On CIFAR-100 the method with more networks, ECMP, is better calibrated than EMP",
          "section 5, table 6", _printed(_CIFAR_TABLE, {"ece": "ECE %"}, _PATCHED), _CIFAR,
          _in_regime(lambda result: _against(result, "ecmp_bn_output", "emp_bn_output", "ece"))),
    Claim(f"Dropout has little to no advantage in calibration on CIFAR-100 (we ask for less than {_DROPOUT_MARGIN:g} point)",
          "appendix D, table 11", _printed(_CIFAR_TABLE, {"ece": "ECE %"}, _PLAIN), _CIFAR, _in_regime(_dropout_useless)),
    Claim("Dropout is slightly better calibrated than vanilla but less accurate, as table 6 has it on CIFAR-100",
          "table 6", _printed(_CIFAR_TABLE, {"ece": "ECE %", "top1": "top-1 %"}, _PLAIN), _CIFAR, _in_regime(_trade_off)),
    Claim("Not the paper's, but what its claim is worth: EMP and ECMP are better than vanilla once all are calibrated",
          "CIFAR-100", "-", _CIFAR, _in_regime(partial(_calibrated_better, other="vanilla"))),
    Claim("Not the paper's: EMP and ECMP are better than dropout at its best rate once all are calibrated",
          "CIFAR-100", "-", _CIFAR, _in_regime(partial(_calibrated_better, other="dropout_tuned"))),
    Claim("More draws give better calibration (S = 1, 20, 100)", "section 5, figure 6, tables 9-11",
          _printed_draws({"cifar100_ece": "ECE %"}, _ALL_DRAWS, _DRAWN), _CIFAR,
          _in_regime(partial(_more_draws, measure="ece"))),
    Claim("More draws give higher accuracy (S = 1, 20, 100)", "appendix D, tables 9-11",
          _printed_draws({"cifar100_top1": "top-1 %"}, _ALL_DRAWS, _DRAWN), _CIFAR,
          _in_regime(partial(_more_draws, measure="accuracy"))),
    Claim(f"Past S = 100 there is hardly any gain in calibration (we ask for less than {_MARGIN:g} points)",
          "appendix D, tables 9-11", _printed_draws({"cifar100_ece": "ECE %"}, ("100", "200"), _DRAWN[:2]), _CIFAR,
          _in_regime(_enough_draws)),
    Claim("Dropout is slightly better calibrated than vanilla but less accurate on ImageNet",
          "section 5, table 4", _printed(_IMAGENET_TABLE, {"ece": "ECE %", "top1": "top-1 %"}, _PLAIN), _IMAGENET,
          _in_regime(_trade_off)),
    Claim("EMP and ECMP have a lower calibration error than vanilla and dropout on ImageNet",
          "section 5, table 4, figure 4", _printed(_IMAGENET_TABLE, {"ece": "ECE %"}), _IMAGENET,
          _in_regime(partial(_patched_better, measure="ece"))),
    Claim("EMP and ECMP have a higher accuracy than vanilla and dropout on ImageNet",
          "section 5, table 4", _printed(_IMAGENET_TABLE, {"top1": "top-1 %"}), _IMAGENET,
          _in_regime(partial(_patched_better, measure="accuracy"))),
    Claim("EMP and ECMP have 0.5 points more top-5 accuracy than vanilla on ImageNet",
          "section 5, table 4", _printed(_IMAGENET_TABLE, {"top5": "top-5 %"}, (*_PATCHED, "vanilla")), _IMAGENET,
          _in_regime(_top5)),
    Claim("ECMP on norm and output layers is almost perfectly calibrated on ImageNet (we ask for a point above the floor)",
          "abstract, section 5, table 4", _printed(_IMAGENET_TABLE, {"ece": "ECE %"}, ("ecmp_bn_output",)), _IMAGENET,
          _in_regime(_perfect)),
    Claim("Patching the output layer too makes EMP and ECMP more accurate and better calibrated",
          "section 5, table 4, figure 7", _printed(_IMAGENET_TABLE, {"ece": "ECE %", "top1": "top-1 %"}, _BOTH_SITES),
          _IMAGENET, _in_regime(_output_helps)),
    Claim("EMP and ECMP are more robust than dropout and vanilla on ImageNet-C (mCE)",
          "section 5, tables 5 and 7", _printed("imagenet_c_mce", {"mce": "mCE"}), _IMAGENET,
          _in_regime(partial(_corrupted, key="mce", pairs=_EACH))),
    Claim("EMP and ECMP are more robust than dropout and vanilla on ImageNet-C (relative mCE)",
          "section 5, table 8", _printed("imagenet_c_rmce", {"rmce": "rmCE"}), _IMAGENET,
          _in_regime(partial(_corrupted, key="relative_mce", pairs=_EACH))),
    Claim("EMP is more robust than ECMP on ImageNet-C",
          "appendix D, tables 7 and 8", _printed("imagenet_c_mce", {"mce": "mCE"}, _PATCHED), _IMAGENET,
          _in_regime(partial(_corrupted, key="mce", pairs=[_PATCHED]))),
    Claim("Dropout is no more robust than vanilla on ImageNet-C (we ask for less than 1 point of mCE)",
          "appendix D, table 7", _printed("imagenet_c_mce", {"mce": "mCE"}, _PLAIN), _IMAGENET,
          _in_regime(partial(_corrupted, key="mce", pairs=[("dropout", "vanilla")], margin=1.0))),
    Claim("The paper's own table 5 has EMP and ECMP below dropout and vanilla in mCE",
          "table 5", "100 is vanilla", (), partial(_published, "imagenet_c_mce", "mce")),
    Claim("The paper's own table 8 has EMP and ECMP below dropout and vanilla in relative mCE",
          "table 8", "100 is vanilla", (), partial(_published, "imagenet_c_rmce", "rmce")),
]  # fmt: skip
