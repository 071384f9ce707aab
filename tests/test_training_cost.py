"""What a training step costs: counted memory and arithmetic, steps timed in turn, the paper's claims beside them."""

import itertools
import json

import pytest
import torch

from command_line import command
from patchbayes.errors import PatchbayesError
from patchbayes_reproduce import registry, training_cost
from patchbayes_reproduce.experiment import Workspace, read_record, reproduce
from patchbayes_reproduce.training_cost import Subject, TrainingStep, in_turn, ratio_quartiles

SMALL = Subject("small_cnn", 10, (1, 8, 8), 16, 3)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def memory():
    steps = {method: TrainingStep(method, SMALL, CPU) for method in training_cost.METHODS}
    for step in steps.values():
        step()
    return {method: step.memory() for method, step in steps.items()}


def test_memory_is_what_the_methods_hold(memory):
    plain = memory["vanilla"]
    assert memory["dropout"]["parameters"] == plain["parameters"]
    assert memory["meanfield"]["parameters"] == 2 * plain["parameters"]
    assert memory["ensemble"]["parameters"] == 5 * plain["parameters"]
    norms, output = 2 * (16 + 32), 128 * 10 + 10
    assert memory["emp"]["parameters"] - plain["parameters"] == 4 * 4 * (norms + output)
    for held in memory.values():
        assert held["gradients"] == held["parameters"]
        steps_counted = held["optimizer"] - 2 * held["parameters"]  # two moments, and a counter for each tensor
        assert 0 < steps_counted < 200


def test_memory_for_backward_grows_with_what_is_drawn(memory):
    saved = {method: held["saved_for_backward"] for method, held in memory.items()}
    assert saved["vanilla"] < saved["emp"] <= saved["ecmp"] < saved["meanfield"] < saved["ensemble"]
    assert saved["vanilla"] < saved["dropout"]  # a mask before every norm
    larger = TrainingStep("vanilla", Subject("small_cnn", 10, (1, 8, 8), 32, 3), CPU)
    assert larger.memory()["saved_for_backward"] > 1.8 * saved["vanilla"]


def test_arithmetic_of_a_step_is_that_of_the_networks_it_runs():
    flops = {
        method: TrainingStep(method, SMALL, CPU).flops() for method in ("vanilla", "ecmp", "meanfield", "ensemble")
    }
    assert flops["vanilla"] == flops["ecmp"] == flops["meanfield"] > 0
    assert flops["ensemble"] == 5 * flops["vanilla"]


def test_a_step_trains():
    step = TrainingStep("emp", SMALL, CPU)
    before = float(step.loss(step.inputs, step.targets)[1])
    for _ in range(30):
        step()
    assert float(step.loss(step.inputs, step.targets)[1]) < 0.7 * before


def test_steps_take_turns_and_every_second_round_runs_backwards(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(training_cost, "_now", lambda: next(clock))
    ran = []
    seconds = in_turn({"a": lambda: ran.append("a"), "b": lambda: ran.append("b") or next(clock)}, 3)
    assert ran == ["a", "b", "b", "a", "a", "b"]
    assert seconds == {"a": [1, 1, 1], "b": [2, 2, 2]}


def test_ratios_are_taken_within_a_round():
    noise = [1.0, 10.0, 3.0, 5.0]  # of the machine: the same for both
    assert ratio_quartiles([2 * n for n in noise], noise) == (2.0, 2.0, 2.0)


def test_the_claims_are_judged_on_a_resnet_18():
    def cost(seconds, flops):
        return {"seconds": [seconds] * 3, "flops": flops}

    result = {
        "subject": {"model": "resnet18_cifar", "batch_size": 32},
        "device": "cpu",
        "methods": {"vanilla": cost(1, 1), "emp": cost(1.03, 1), "ecmp": cost(1.2, 1), "meanfield": cost(2.5, 1)},
    }
    assert [row.verdict for row in training_cost.rows(result)] == ["within", "outside", "outside", "within"]
    del result["methods"]["meanfield"]
    assert [row.ours for row in training_cost.rows(result)][2:] == [None, None]
    assert "does not fit" in training_cost.rows(result)[2].why
    result["subject"]["model"] = "small_cnn"
    assert {row.verdict for row in training_cost.rows(result)} == {"not comparable"}


def test_smoke_scale_by_the_command(tmp_path):
    out = command("reproduce cost --scale smoke --results", tmp_path).out
    assert "training time of mean-field (2 to 4), times vanilla" in out
    result = read_record(tmp_path, "cost", "smoke")["result"]
    assert list(result["methods"]) == list(training_cost.METHODS)
    assert all(len(cost["seconds"]) == 3 for cost in result["methods"].values())
    tables = registry.experiment("cost").tables(json.loads(json.dumps(result)))
    for _, lines in tables.values():
        assert [line[0] for line in lines] == list(training_cost.METHODS)


def test_what_does_not_fit_into_memory_is_left_out(monkeypatch, tmp_path):
    run = TrainingStep.__call__

    def limited(step):
        if sum(p.numel() for p in step.loss.parameters()) > 20_000:
            raise torch.OutOfMemoryError
        run(step)

    monkeypatch.setattr(TrainingStep, "__call__", limited)
    said = []
    result = reproduce(registry.experiment("cost"), "smoke", Workspace(say=said.append), tmp_path)["result"]
    assert list(result["methods"]) == list(training_cost.METHODS)[:-1]
    assert "ensemble does not fit into the memory of cpu" in said
    time, _ = training_cost.tables(result).values()
    assert time[1][-1][:2] == ["ensemble", "does not fit into memory"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_papers_scale_needs_a_gpu(tmp_path):
    with pytest.raises(PatchbayesError, match="measured on a GPU; torch sees none here"):
        reproduce(registry.experiment("cost"), "paper", Workspace(), tmp_path)
