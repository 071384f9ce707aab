"""TrainingConfig and methods by name: JSON and back, and every bad or meaningless setting refused."""

import dataclasses
import json
import re

import pytest

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.training import METHODS, TrainingConfig, build_method


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
        ({"lr": "fast"}, r"TrainingConfig\(lr='fast'\): required is a finite number or None"),
        ({"lr": float("nan")}, "required is a finite number or None"),
        ({"lr": 0}, "required is a number above 0"),
        ({"lr": True}, "required is a finite number"),
        ({"patch_lr": -1.0}, "a number of at least 0"),
        ({"sharing": 1.1}, "a number of at least 0 and at most 1"),
        ({"alternate": -1.0}, "a number of at least 0"),
        ({"epochs": 0}, "at least 1"),
        ({"epochs": 1.5}, "required is a whole number"),
        ({"batch_size": None}, "required is a whole number"),
        ({"seed": -1}, "at least 0"),
        ({"seed": 2**63}, "at most"),
        ({"method": "EMP"}, 'required is one of "vanilla", "dropout"'),
        ({"optimizer": "lbfgs"}, 'required is one of "sgd", "adam", "adamw"'),
        ({"per_example": 1}, "required is true or false"),
        ({"sites": 3}, "required is a text or None"),
        ({"milestones": [0.5], "schedule": "step"}, "required is a list of numbers or None"),
        ({"milestones": (0.5, "x"), "schedule": "step"}, "required is a list of numbers"),
        ({"milestones": (0.5, 1.0), "schedule": "step"}, "shares of the run"),
        ({"held_out": 1.0}, "at least 0 and below 1"),
        ({"held_out": -0.1}, "at least 0 and below 1"),
        ({"data": ""}, "required is a name"),
        ({"momentum": 1.5, "optimizer": "sgd"}, "at most 1"),
        ({"checkpoint_seconds": -1.0}, "at least 0"),
        # what the other settings make meaningless
        ({"method": "vanilla", "components": 3}, "method 'vanilla' has no components"),
        ({"method": "vanilla", "sites": "norm"}, '"vanilla" patches nothing'),
        ({"method": "vanilla", "patch_lr": 0.1}, '"vanilla" patches nothing'),
        ({"method": "vanilla", "alternate": 1.0}, '"vanilla" has no patched beside shared'),
        ({"method": "ensemble", "alternate": 1.0}, '"ensemble" has no patched beside shared'),
        ({"alternate": 10.0}, "patched parameters would have no turn in 10 epochs"),
        ({"method": "vanilla", "weight_decay": 0.1, "prior_precision": 2.0}, "weight_decay takes its place"),
        ({"method": "dropout", "sharing": 0.5}, "only the components of emp and ecmp are drawn"),
        ({"method": "vanilla", "draws_per_step": 2}, '"vanilla" draws nothing'),
        ({"method": "ensemble", "draws_per_step": 2}, "each of its members in every step"),
        ({"method": "dropout", "components": 3}, "it is for emp, ecmp, ensemble"),
        ({"method": "ecmp", "rate": 0.1}, "it is for dropout, dropconnect"),
        ({"method": "ensemble", "jitter": 0.1}, "start independently"),
        ({"method": "ensemble", "per_example": True}, "has no per_example"),
        ({"method": "dropout", "jitter_warmup": 1.0}, "have a jitter to grow"),
        ({"init": "independent", "jitter_warmup": 1.0}, "have a jitter to grow"),
        ({"jitter_warmup": 11.0}, "ends after the run"),
        ({"warmup": 11.0}, "ends after the run"),
        ({"objective": "simplified", "prior_precision": 2.0}, "has weight_decay instead"),
        ({"objective": "simplified", "method": "meanfield"}, "no entropy term"),
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


def test_methods_by_name():
    assert METHODS == ("vanilla", "dropout", "emp", "ecmp", "dropconnect", "meanfield", "ensemble")
    assert build_method("vanilla") is None
    assert build_method("emp") == pb.EMP(5)
    assert build_method("ecmp", components=3, jitter=0.3, init="copies") == pb.ECMP(3, jitter=0.3)
    assert build_method("ecmp", init="independent", per_example=True) == pb.ECMP(
        5, init="independent", per_example=True
    )
    assert build_method("ensemble", components=2) == pb.Ensemble(2)
    assert build_method("ensemble", init="copies", jitter=0.2) == pb.Ensemble(5, init="copies", jitter=0.2)
    assert build_method("dropout") == pb.Dropout(0.005)
    assert build_method("dropout", rate=0.1) == pb.Dropout(0.1)
    assert build_method("dropconnect", rate=0.1) == pb.DropConnect(0.1)
    assert build_method("meanfield") == pb.MeanField()
    assert build_method("meanfield", jitter=0.3) == pb.MeanField(scale=0.3)
    with pytest.raises(PatchbayesError, match="method 'bayes' is not known; known are vanilla"):
        build_method("bayes")
    with pytest.raises(PatchbayesError, match="components=0"):
        build_method("emp", components=0)
