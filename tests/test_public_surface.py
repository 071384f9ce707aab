"""The public names: sorted, documented, typed, without side effects, and every keyword exercised by some test."""

import ast
import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import patchbayes as pb
from patchbayes.patching.contract import Contract
from patchbayes.patching.network import Site
from patchbayes.patching.report import PatchReport
from patchbayes.prediction import ClassPrediction, PredictiveCheck, RegressionPrediction

PUBLIC = {name: getattr(pb, name) for name in pb.__all__}
CLASSES = {name: thing for name, thing in PUBLIC.items() if inspect.isclass(thing)}
FUNCTIONS = {name: thing for name, thing in PUBLIC.items() if not inspect.isclass(thing)}
RETURNED = [ClassPrediction, RegressionPrediction, PredictiveCheck, PatchReport, Contract, Site]


def own_members(cls):
    """Public methods and properties that a class (or a base of ours) defines, not what it takes over from torch."""
    found = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("patchbayes"):
            found |= {name: member for name, member in vars(base).items() if not name.startswith("_")}
    hooks = {"forward", "extra_repr"}
    kinds = (classmethod, staticmethod, property)
    return {n: m for n, m in found.items() if n not in hooks and (inspect.isfunction(m) or isinstance(m, kinds))}


EVERY_CLASS = {**CLASSES, **{cls.__name__: cls for cls in RETURNED}}
METHODS = {(name, m): member for name, cls in EVERY_CLASS.items() for m, member in own_members(cls).items()}


def test_all_is_sorted_and_complete():
    def order(name):
        return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)

    assert sorted(pb.__all__, key=order) == pb.__all__
    assert len(set(pb.__all__)) == len(pb.__all__)
    visible = {name for name, thing in vars(pb).items() if not name.startswith("_") and not inspect.ismodule(thing)}
    assert visible == set(pb.__all__)


@pytest.mark.parametrize("name", pb._MOVED)
def test_names_that_moved_are_found_with_a_warning_that_says_where(name):
    place = f"patchbayes.{pb._MOVED[name]}.{name}"
    with pytest.warns(DeprecationWarning, match=f"{place};".replace(".", "[.]")):
        found = getattr(pb, name)
    assert found is getattr(getattr(pb, pb._MOVED[name]), name)
    assert name not in pb.__all__


def test_version_is_that_of_the_project():
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'version = "{pb.__version__}"' in project


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented_in_its_own_words(name):
    thing = PUBLIC[name]
    text = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
    assert text
    assert not text.startswith(f"{name}(")  # what dataclasses write by themselves


@pytest.mark.parametrize(("owner", "name"), METHODS)
def test_every_public_method_is_documented(owner, name):
    assert inspect.getdoc(getattr(EVERY_CLASS[owner], name))


def signatures():
    for name, function in FUNCTIONS.items():
        yield name, inspect.signature(function)
    for name, cls in EVERY_CLASS.items():
        if not issubclass(cls, Exception):
            yield name, inspect.signature(cls.__init__)
    for (owner, name), member in METHODS.items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        yield f"{owner}.{name}", inspect.signature(function)


SIGNATURES = dict(signatures())


@pytest.mark.parametrize("name", SIGNATURES)
def test_every_signature_is_typed(name):
    signature = SIGNATURES[name]
    untyped = [
        p.name for p in signature.parameters.values() if p.annotation is p.empty and p.name not in ("self", "cls")
    ]
    assert untyped == []
    assert signature.return_annotation is not inspect.Signature.empty


def test_the_package_carries_its_types():
    assert (Path(pb.__file__).parent / "py.typed").exists()


PROBE = """
import json, random, sys, warnings
import torch
torch.manual_seed(3); random.seed(3)
def state():
    from torch.optim import optimizer
    return {
        "torch": hash(torch.random.get_rng_state().numpy().tobytes()),
        "python": hash(random.getstate()),
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "filters": len(warnings.filters),
        "optimizer hooks": len(optimizer._global_optimizer_pre_hooks),
        "module hooks": len(torch.nn.modules.module._global_forward_pre_hooks),
    }
before, loaded = state(), set(sys.modules)
import patchbayes
new = set(sys.modules) - loaded
print(json.dumps({"same": state() == before, "new": sorted(new)}))
"""


@pytest.fixture(scope="module")
def imported():
    result = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert result.stderr == ""
    return json.loads(result.stdout)


def test_importing_changes_no_global_state(imported):
    assert imported["same"]


def test_importing_loads_nothing_but_the_core_dependencies(imported):
    packages = {name.split(".")[0] for name in imported["new"]}
    assert "patchbayes" in packages
    foreign = {p for p in packages if p not in sys.stdlib_module_names and not p.startswith("_")}
    assert foreign <= {"patchbayes", "safetensors", "torch", "numpy"}
    heavy = [name for name in imported["new"] if name.startswith(("torch._dynamo", "torch._inductor", "torch.onnx"))]
    assert heavy == []


def test_the_five_lines_of_the_design_work(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.randn(16, 4), torch.randint(3, (16,))
    report = pb.patch_(model, pb.ECMP(components=5), sites="norm+output")
    assert "patched 2 sites of Sequential" in str(report)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(model(x), y) + pb.kl(model) / 1000
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    prediction = pb.predict(model, x, draws=64)
    pb.save(model, tmp_path / "patch.safetensors")
    with torch.no_grad():
        pb.patched_sites(model)["3"].components("weight").zero_()
    assert not torch.equal(pb.predict(model, x, draws=64).probs, prediction.probs)
    pb.load_(model, tmp_path / "patch.safetensors")
    assert torch.equal(pb.predict(model, x, draws=64).probs, prediction.probs)
    pb.unpatch_(model)
    assert type(model) is nn.Sequential
    assert not pb.is_patched(model)


# Every keyword is exercised


def exercised_calls():
    """(owner or None, name, number of positional arguments, keywords) of all calls in the tests."""
    found = []
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            function = node.func
            if isinstance(function, ast.Attribute):
                owner = function.value
                owner = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", None)
                name = function.attr
            else:
                owner, name = None, getattr(function, "id", None)
            starred = any(isinstance(argument, ast.Starred) for argument in node.args)
            keywords = frozenset(keyword.arg for keyword in node.keywords if keyword.arg)
            found.append((owner, name, 0 if starred else len(node.args), keywords))
    return found


CALLS = exercised_calls()
MEMBERS = {"Mixture", "EMP", "ECMP", "DropConnect", "Ensemble"}  # whose options are fields of Mixture
#: Called by patch_ and by the engines of prediction, not by users.
INTERFACE = {"posterior", "draw_of", "realized", "values_of", "network_draw", "averaged", "running"}


def exercised(names, parameter, position, owner=None):
    return any(
        name in names and (owner is None or called_on == owner) and (parameter in keywords or number > position)
        for called_on, name, number, keywords in CALLS
    )


def keywords_to_exercise():
    for name, function in FUNCTIONS.items():
        for position, p in enumerate(inspect.signature(function).parameters.values()):
            yield name, {name}, p, position, None
    for name, cls in CLASSES.items():
        if dataclasses.is_dataclass(cls) and cls is not pb.prediction.Prediction:
            names = MEMBERS if cls is pb.posteriors.Mixture else {name}
            fields = inspect.signature(cls).parameters.values()
            for position, p in enumerate(fields):
                yield name, names, p, position if names == {name} else 10**6, None
        elif cls not in (pb.prediction.Prediction, pb.Draws) and not issubclass(cls, Exception):
            for position, p in enumerate(inspect.signature(cls).parameters.values()):
                yield name, {name}, p, position, None
    for (owner, name), member in METHODS.items():
        if isinstance(member, property) or name in INTERFACE:
            continue
        function = getattr(member, "__func__", member)
        parameters = list(inspect.signature(function).parameters.values())[1:]
        for position, p in enumerate(parameters):
            on_class = isinstance(member, classmethod) and owner != "Prediction"
            if p.name != "device":  # one device here
                yield f"{owner}.{name}", {name}, p, position, owner if on_class else None


KEYWORDS = [(f"{where}({p.name})", *rest) for where, *rest in keywords_to_exercise() for p in [rest[1]]]


@pytest.mark.parametrize(("label", "names", "parameter", "position", "owner"), KEYWORDS, ids=[k[0] for k in KEYWORDS])
def test_every_public_keyword_is_exercised_by_a_test(label, names, parameter, position, owner):
    if parameter.kind is parameter.VAR_KEYWORD:
        if names <= MEMBERS:
            return  # the fields of Mixture, each of which is a case of its own
        named = {other.name for _, others, other, *_ in KEYWORDS if others == names}
        assert any(name in names and keywords - named for _, name, _, keywords in CALLS), label
        return
    assert exercised(names, parameter.name, position, owner), f"no test passes {label}"


def test_what_is_left_out_of_the_search_exists():
    assert {name for _, name in METHODS} >= INTERFACE


def test_the_search_for_keywords_finds_what_is_missing():
    assert exercised({"predict"}, "keep_draws", 10**6)
    assert not exercised({"predict"}, "no_such_keyword", 10**6)
    assert not exercised({"no_such_function"}, "model", 0)
    assert len(KEYWORDS) > 80
