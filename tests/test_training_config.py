"""TrainingConfig: JSON and back, that of 0.1.0 too, and every bad or meaningless setting refused."""

import dataclasses
import json
import re

import pytest

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.runs import TrainingConfig
from patchbayes.runs.network import patched_net


def config(**settings):
    return TrainingConfig(**{"data": "digits", "model": "small_cnn", **settings})


def test_json_and_back():
    for one in (
        config(),
        config(schedule="step", milestones=(0.25, 0.5), step_factor=0.2, lr=1, target=3, method="emp"),
    ):
        text = json.dumps(one.to_json())
        assert TrainingConfig.from_json(json.loads(text)) == one
    assert config().to_json().keys() == {field.name for field in dataclasses.fields(TrainingConfig)}


def test_every_setting_is_documented():
    words = set(re.findall(r"\w+", TrainingConfig.__doc__ or ""))
    assert [field.name for field in dataclasses.fields(TrainingConfig) if field.name not in words] == []


def test_what_is_missing_has_its_default_and_unknown_keys_are_refused():
    assert TrainingConfig.from_json({"data": "digits", "model": "small_cnn", "epochs": 3}) == config(epochs=3)
    with pytest.raises(PatchbayesError, match=r"unknown 'epoch', 'K'.\n  known    data, model"):
        TrainingConfig.from_json({"data": "digits", "model": "mlp", "epoch": 3, "K": 5})
    with pytest.raises(PatchbayesError, match="data and model must be given"):
        TrainingConfig.from_json({})
    with pytest.raises(PatchbayesError, match="model must be given"):
        TrainingConfig.from_json({"data": "digits"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": "fast"}, r"TrainingConfig\(lr='fast'\): expected a finite number or None"),
        ({"lr": float("nan")}, "expected a finite number or None"),
        ({"lr": 0}, "expected a number above 0"),
        ({"lr": True}, "expected a finite number"),
        ({"patch_lr": -1.0}, "a number of at least 0"),
        ({"sharing": 1.1}, "a number of at least 0 and at most 1"),
        ({"alternate": -1.0}, "a number of at least 0"),
        ({"epochs": 0}, "at least 1"),
        ({"epochs": 1.5}, "expected a whole number"),
        ({"batch_size": None}, "expected a whole number"),
        ({"seed": -1}, "at least 0"),
        ({"seed": 2**63}, "at most"),
        ({"method": "bayes(3)"}, "there is no method 'bayes'"),
        ({"method": "emp(5, rate=0.1)"}, "EMP has no field 'rate'"),
        ({"method": 5}, "expected a text"),
        ({"optimizer": "lbfgs"}, 'expected one of "sgd", "adam", "adamw"'),
        ({"nesterov": 1}, "expected true or false"),
        ({"sites": 3}, "expected a text or None"),
        ({"milestones": [0.5], "schedule": "step"}, "expected a list of numbers or None"),
        ({"milestones": (0.5, "x"), "schedule": "step"}, "expected a list of numbers"),
        ({"milestones": (0.5, 1.0), "schedule": "step"}, "shares of the run"),
        ({"held_out": 1.0}, "at least 0 and below 1"),
        ({"held_out": -0.1}, "at least 0 and below 1"),
        ({"data": ""}, "expected a name"),
        ({"momentum": 1.5, "optimizer": "sgd"}, "at most 1"),
        ({"checkpoint_seconds": -1.0}, "at least 0"),
        # what the other settings make meaningless
        ({"method": "vanilla(3)"}, "there is no method 'vanilla'"),
        ({"method": "vanilla", "sites": "norm"}, '"vanilla" patches nothing'),
        ({"method": "vanilla", "patch_lr": 0.1}, '"vanilla" patches nothing'),
        ({"method": "vanilla", "alternate": 1.0}, '"vanilla" patches nothing'),
        ({"method": "vanilla", "sharing": 0.5}, '"vanilla" patches nothing'),
        ({"method": "vanilla", "jitter_warmup": 1.0}, '"vanilla" patches nothing'),
        ({"method": "vanilla", "draws_per_step": 2}, '"vanilla" patches nothing'),
        ({"method": "norm: emp(5)", "sites": "output"}, "the rules of method 'norm: emp.5.' say it already"),
        ({"alternate": 10.0}, "patched parameters would have no turn in 10 epochs"),
        ({"method": "vanilla", "weight_decay": 0.1, "prior_precision": 2.0}, "weight_decay takes its place"),
        ({"jitter_warmup": 11.0}, "ends after the run"),
        ({"warmup": 11.0}, "ends after the run"),
        ({"objective": "simplified", "prior_precision": 2.0}, "has weight_decay or lambdas instead"),
        ({"objective": "simplified", "prior": "gamma"}, "has weight_decay or lambdas instead"),
        ({"method": "vanilla", "prior": "learned"}, '"vanilla" patches nothing'),
        ({"prior": "cauchy"}, 'expected one of "gaussian", "laplace", "learned", "gamma"'),
        ({"lambdas": (0.1, 0.1, 0.1, 0.1)}, 'they are for objective "simplified"'),
        ({"objective": "simplified", "lambdas": (0.1,)}, "expected four numbers of at least 0"),
        ({"objective": "simplified", "lambdas": (0.1, -0.1, 0.0, 0.0)}, "expected four numbers of at least 0"),
        ({"objective": "simplified", "lambdas": (0.1,) * 4, "weight_decay": 0.1}, "give one of the two"),
        ({"momentum": 0.0}, 'it is for optimizer "sgd"; this is "adam"'),
        ({"nesterov": True}, 'it is for optimizer "sgd"'),
        ({"nesterov": True, "optimizer": "sgd", "momentum": 0.0}, "needs a momentum above 0"),
        ({"milestones": (0.5,)}, 'it is for schedule "step"'),
        ({"step_factor": 0.5}, 'it is for schedule "step"'),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(PatchbayesError, match=message):
        config(**settings)


def test_differences_leave_out_what_does_not_change_the_result():
    one = config(epochs=3, workers=0)
    assert one.differences(config(epochs=3, workers=2, data_dir="/x", tensorboard=True, checkpoint_steps=7)) == {}
    assert one.differences(config(epochs=4, lr=0.1)) == {"epochs": (3, 4), "lr": (None, 0.1)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "ensemble", "draws_per_step": 2}, "each of its members in every step"),
        ({"method": "dropout(0.1)", "sharing": 0.5}, "no patched layer draws among components"),
        ({"method": "meanfield", "prior": "laplace"}, "a Laplace prior is for methods without noise"),
        ({"method": "ensemble", "sharing": 0.5}, "no patched layer draws among components"),
        ({"method": "dropout(0.1)", "jitter_warmup": 1.0}, "a spread that could grow"),
        ({"method": "meanfield", "objective": "simplified"}, "needs the entropy term of the ELBO"),
    ],
)
def test_what_the_patched_network_makes_meaningless_is_refused_before_training(settings, message):
    with pytest.raises(PatchbayesError, match=message):
        patched_net(config(model="mlp:4", **settings), 3, (4,))


def test_a_method_has_one_spelling():
    assert config(method="ECMP").method == config(method="ecmp( components=5 )").method == "ecmp(5)"
    assert config(method="norm:emp(5);linear : dropout( 0.1)").method == "norm: emp(5); linear: dropout(0.1)"
    assert config(method="Vanilla").method == "vanilla"
    assert config(method="ecmp(5)").differences(config()) == {}
    assert config(method="emp(3)").rules() == {"norm+output": pb.EMP(3)}
    assert config(method="emp(3)", sites="output").rules() == {"output": pb.EMP(3)}
    assert config(method="norm: emp(3); output: ecmp(2)").chosen_sites == "norm, output"
    assert config(method="vanilla").rules() == {}


def test_sharing_is_off_unless_asked_for():
    assert config().sharing == 0


OPTIONS = {"components": None, "rate": None, "jitter": None, "init": None, "per_example": False, "sharing": None}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"method": "vanilla"}, {"method": "vanilla"}),
        ({"method": "emp"}, {"method": "emp(5)", "sharing": 0.5}),
        ({"method": "emp", "components": 3, "jitter": 0.3}, {"method": "emp(3, jitter=0.3)", "sharing": 0.5}),
        ({"method": "ecmp", "jitter": 0.0}, {"method": "ecmp(5, jitter=0.0)", "sharing": 0.5}),
        ({"method": "ecmp", "sharing": 0.0}, {"method": "ecmp(5)"}),
        ({"method": "ecmp", "init": "independent"}, {"method": "ecmp(5, init='independent')", "sharing": 0.5}),
        ({"method": "emp", "per_example": True}, {"method": "emp(5, per_example=True)", "sharing": 0.5}),
        ({"method": "dropout"}, {"method": "dropout(0.005)"}),
        ({"method": "dropout", "rate": 0.1, "sites": "all"}, {"method": "dropout(0.1)", "sites": "all"}),
        ({"method": "dropconnect"}, {"method": "dropconnect(0.005)", "sites": "norm+output"}),
        ({"method": "meanfield", "jitter": 0.2}, {"method": "meanfield(0.2)"}),
        ({"method": "ensemble", "components": 2}, {"method": "ensemble(2)"}),
    ],
)
def test_configurations_of_0_1_0_are_read_as_they_were_meant(old, new):
    content = {"data": "digits", "model": "small_cnn", **OPTIONS, **old}
    assert TrainingConfig.from_json(content) == config(**new)


def test_options_beside_a_method_that_has_its_own_are_refused():
    with pytest.raises(PatchbayesError, match=r"components=3 was given beside the method 'emp\(5\)'"):
        TrainingConfig.from_json({"data": "digits", "model": "mlp", "method": "emp(5)", "components": 3})
    with pytest.raises(PatchbayesError, match=r"rate=0\.1 was given beside the method 'vanilla'"):
        TrainingConfig.from_json({"data": "digits", "model": "mlp", "method": "vanilla", "rate": 0.1})
