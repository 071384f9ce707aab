"""Posteriors are known by their interface alone: nothing outside their package asks for a class or a name of a method.

Read from the source: imports of concrete classes that are used in a check of type, such checks by attribute, comparisons with
the names of methods as texts, and `match` on them.
"""

import ast
from pathlib import Path

import pytest

import patchbayes as pb
from patchbayes.posteriors import Method, Posterior, constructors

SOURCE = Path(pb.__file__).parent

#: Modules that still ask. Nothing may be added here, and what no longer asks must be taken off.
STILL_ASKING = {"cli/demo_study.py"}


def subclasses(cls: type) -> set[type]:
    return {cls} | {deeper for direct in cls.__subclasses__() for deeper in subclasses(direct)}


def ours(cls: type) -> set[str]:
    return {c.__name__ for c in subclasses(cls) if c.__module__.startswith("patchbayes.")} - {cls.__name__}


CLASSES = ours(Method) | ours(Posterior)
NAMES = CLASSES | set(constructors()) | {"EMP", "ECMP", "DropConnect", "Ensemble"}
TEXTS = NAMES | {name.lower() for name in NAMES}


def test_the_search_knows_the_classes_and_names():
    assert {"Mixture", "Dropout", "MeanField", "MixturePosterior", "DropoutPosterior"} <= CLASSES
    assert {"EMP", "emp", "ecmp", "dropconnect", "meanfield", "dropout"} <= TEXTS
    assert not {"Method", "Posterior"} & CLASSES


def last_name(node: ast.expr) -> str | None:
    """`Mixture` for `Mixture`, `posteriors.Mixture` and `pb.posteriors.Mixture`; torch's `nn.Dropout` is another thing."""
    if isinstance(node, ast.Attribute):
        return f"nn.{node.attr}" if last_name(node.value) == "nn" else node.attr
    return node.id if isinstance(node, ast.Name) else None


def names_of_types(node: ast.expr) -> set[str]:
    """The classes of a second argument of isinstance: one, a tuple, or joined by |."""
    if isinstance(node, ast.Tuple):
        return set().union(*(names_of_types(part) for part in node.elts))
    if isinstance(node, ast.BinOp):
        return names_of_types(node.left) | names_of_types(node.right)
    name = last_name(node)
    return {name} if name else set()


def texts_in(node: ast.expr) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def offenses(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and last_name(node.func) in ("isinstance", "issubclass") and len(node.args) == 2:
            asked = names_of_types(node.args[1]) & CLASSES
            found += [f"line {node.lineno}: {last_name(node.func)}(..., {name})" for name in sorted(asked)]
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(o, ast.Is | ast.IsNot | ast.Eq | ast.NotEq) for o in node.ops):
                asked = {last_name(side) for side in sides} & CLASSES
                found += [f"line {node.lineno}: compared with the class {name}" for name in sorted(filter(None, asked))]
            literal = [s for s in sides if isinstance(s, ast.Constant | ast.Tuple | ast.List | ast.Set)]
            asked_texts = {text for side in literal for text in texts_in(side)} & TEXTS
            found += [f'line {node.lineno}: compared with the name "{text}"' for text in sorted(asked_texts)]
        elif isinstance(node, ast.MatchClass) and last_name(node.cls) in CLASSES:
            found.append(f"line {node.cls.lineno}: case {last_name(node.cls)}")
        elif isinstance(node, ast.MatchValue):
            found += [f'line {node.lineno}: case "{text}"' for text in sorted(texts_in(node.value) & TEXTS)]
        elif isinstance(node, ast.Dict):
            asked_keys = {last_name(key) for key in node.keys if key is not None} & CLASSES
            found += [f"line {node.lineno}: a table by the class {name}" for name in sorted(filter(None, asked_keys))]
        elif isinstance(node, ast.Call) and last_name(node.func) in ("hasattr", "getattr") and len(node.args) >= 2:
            attribute = node.args[1]
            if isinstance(attribute, ast.Constant) and attribute.value in ("components", "tie", "sigma", "zero"):
                found.append(f'line {node.lineno}: {last_name(node.func)}(..., "{attribute.value}")')
    return found


def modules() -> dict[str, Path]:
    inside = SOURCE / "posteriors"
    return {
        str(path.relative_to(SOURCE)): path for path in sorted(SOURCE.rglob("*.py")) if not path.is_relative_to(inside)
    }


MODULES = modules()


def test_all_modules_are_looked_at():
    assert len(MODULES) > 50
    assert {"patching/patch.py", "patching/network.py", "objective.py", "prediction/predict.py"} <= MODULES.keys()


@pytest.mark.parametrize("name", MODULES)
def test_no_module_asks_which_posterior_it_has(name):
    found = offenses(MODULES[name].read_text())
    if name in STILL_ASKING:
        assert found, f"{name} no longer asks: take it off the list"
    else:
        assert not found, f"{name}: {'; '.join(found)}"


def test_the_list_holds_modules_that_exist():
    assert MODULES.keys() >= STILL_ASKING


@pytest.mark.parametrize(
    "source",
    [
        "isinstance(method, Mixture)",
        "isinstance(method, (int, posteriors.Dropout))",
        "isinstance(site.posterior, int | MeanFieldPosterior)",
        "issubclass(type(method), pb.posteriors.Mixture)",
        "type(method) is Mixture",
        "Mixture == type(method)",
        "name == 'emp'",
        "'EMP' != config['method']",
        "name in ('emp', 'ecmp')",
        "name not in {'dropout'}",
        "match method:\n    case Mixture(): pass",
        "match name:\n    case 'ecmp': pass",
        "{Mixture: 1, Dropout: 2}[type(method)]",
        "getattr(method, 'components', 1)",
        "hasattr(posterior, 'sigma')",
    ],
)
def test_the_search_finds_what_asks(source):
    assert offenses(source)


@pytest.mark.parametrize(
    "source",
    [
        "isinstance(method, Method)",
        "isinstance(module, Posterior)",
        "isinstance(module, nn.Linear)",
        "isinstance(module, (nn.Dropout, nn.Dropout1d))",
        "posterior.noise == 'example'",
        "method = EMP(3)",
        "from .posteriors import Mixture",
        "groups.tie == 'network'",
        "table = {'emp': 1}",
        "print('dropout')",
        "getattr(site.posterior, 'stored', None)",
    ],
)
def test_the_search_leaves_other_things_alone(source):
    assert not offenses(source)
