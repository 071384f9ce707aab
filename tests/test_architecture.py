"""The import graph points one way, and the sources keep the rules that a reader relies on."""

import ast
import graphlib
import itertools
from pathlib import Path

import pytest

import patchbayes

SOURCE = Path(patchbayes.__file__).parent

# Each layer may import the layers before it, and modules of its own as long as there is no circle.
LAYERS = [
    {"digests", "errors", "files", "layers", "named_code", "plain_text", "ranks", "views"},
    {"draws", "metrics"},
    {"posteriors", "prior", "likelihoods"},
    {"patching"},
    {"objective", "prediction", "stacking"},
    {"export"},
    {"nets", "counting", "provenance", "data"},
    {"runs"},
    {"bayesianizing", "report", "training", "evaluation"},
    {"integrations"},
    {"cli"},
    {"__main__"},
]
# Parts that stand beside the core, and what they may use of it; nothing of the core uses them.
BESIDE = {
    "nets": {"errors", "named_code"},
    "counting": {"errors"},
    "metrics": {"errors"},
    "provenance": set(),
    "data": {"errors", "files", "draws", "named_code"},
    "report": {"errors", "files", "metrics", "plain_text", "runs"},
}

FILES = {path.relative_to(SOURCE): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def module_name(path):
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path) for path in FILES}


def imports_of(path):
    """Names of our modules that a file imports anywhere, also inside functions, without the leading package name."""
    package = list(path.parent.parts)
    found = set()
    for node in ast.walk(FILES[path]):
        if isinstance(node, ast.Import):
            found |= {
                alias.name.removeprefix("patchbayes.") for alias in node.names if alias.name.startswith("patchbayes")
            }
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1]
            elif node.module and node.module.split(".")[0] == "patchbayes":
                base = []
            else:
                continue
            stem = (node.module or "").removeprefix("patchbayes").lstrip(".") if not node.level else node.module or ""
            target = ".".join([*base, *([stem] if stem else [])])
            for alias in node.names:
                inner = f"{target}.{alias.name}".lstrip(".")
                found.add(inner if inner in NAMES else target)
    return found


GRAPH = {path: imports_of(path) for path in FILES}


def part(name):
    return name.split(".")[0]


def test_every_module_has_a_place():
    placed = set().union(*LAYERS) | {""}
    assert {part(module_name(path)) for path in FILES} == placed
    assert sum(len(names) for names in GRAPH.values()) > 60  # the parser above does see imports
    assert GRAPH[Path("patching/checkpoint.py")] >= {"digests", "patching.patch", "patching.patch_file", "prior"}
    assert GRAPH[Path("prediction/loop.py")] >= {"draws.draws", "patching.network", "patching.selection"}


def test_nothing_imports_a_later_layer():
    rank = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    wrong = [
        (module_name(path), target)
        for path, targets in GRAPH.items()
        for target in targets
        if part(module_name(path)) in rank and rank.get(part(target), len(LAYERS)) > rank[part(module_name(path))]
    ]
    assert wrong == []


def test_parts_beside_the_core_know_little_of_it():
    wrong = [
        (module_name(path), target)
        for path, targets in GRAPH.items()
        for target in targets
        if part(module_name(path)) in BESIDE
        and part(target) not in {part(module_name(path)), *BESIDE[part(module_name(path))]}
    ]
    assert wrong == []


def test_the_report_knows_runs_by_their_records_alone():
    used = {target for path, targets in GRAPH.items() if path.parts[0] == "report" for target in targets}
    assert {target for target in used if part(target) == "runs"} == {"runs.entry", "runs.record"}
    assert {part(target) for name in ("entry", "record") for target in GRAPH[Path(f"runs/{name}.py")]} <= {
        "errors", "files", "plain_text", "runs"
    }  # fmt: skip


def test_only_the_package_itself_imports_the_package_root():
    assert [module_name(path) for path, targets in GRAPH.items() if "" in targets] == []


def test_no_circles():
    graph = {module_name(path): targets - {module_name(path)} for path, targets in GRAPH.items()}
    graphlib.TopologicalSorter(graph).prepare()
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph | {"errors": {"patching.patch"}}).prepare()


def calls(tree):
    """(dotted name, node, enclosing with-statements) of every call."""

    def walk(node, withs):
        if isinstance(node, ast.With):
            withs = [*withs, *(ast.unparse(item.context_expr) for item in node.items)]
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node, withs
        for child in ast.iter_child_nodes(node):
            yield from walk(child, withs)

    return walk(tree, [])


ALL_CALLS = [(path, *found) for path, tree in FILES.items() for found in calls(tree)]


def test_nothing_is_pickled_or_evaluated():
    modules = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    imported = {
        (str(path), name)
        for path, tree in FILES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        if name.split(".")[0] in modules
    }
    assert imported == set()
    forbidden = {"torch.load", "torch.save", "np.load", "numpy.load", "eval", "exec"}
    found = [(str(path), name, ast.unparse(node)) for path, name, node, _ in ALL_CALLS if name in forbidden]
    safe = {"torch.load": "weights_only=True", "np.load": "allow_pickle=False"}
    assert [call for call in found if call[1] not in safe or safe[call[1]] not in call[2]] == []


def test_random_numbers_come_from_an_explicit_generator():
    drawing = {"rand", "randn", "randint", "randperm", "multinomial", "bernoulli", "normal", "bernoulli_", "normal_"}
    without = [
        (str(path), ast.unparse(node))
        for path, name, node, _ in ALL_CALLS
        if name.rpartition(".")[2] in drawing
        and not name.startswith(("nn.init", "self.", "check_random_state("))  # the last is an explicit generator too
        and not any(keyword.arg == "generator" for keyword in node.keywords)
        and not ast.unparse(node).startswith("check_random_state(")  # scikit-learn's explicit generator
    ]
    assert without == []
    assert sum(name == "torch.randn" for _, name, *_ in ALL_CALLS) >= 2  # there are such calls to look at


def test_the_global_seed_is_set_only_under_fork_rng():
    seeding = {"torch.manual_seed", "torch.seed", "torch.random.manual_seed", "random.seed", "np.random.seed"}
    bare = [
        (str(path), name)
        for path, name, _, withs in ALL_CALLS
        if name in seeding and not any("fork_rng" in text for text in withs)
    ]
    assert bare == []


def test_files_carry_the_nouns_of_the_paper():
    vague = {"utils", "util", "helpers", "helper", "common", "core", "base", "misc"}
    assert {p for path in FILES for p in path.with_suffix("").parts} & vague == set()


@pytest.mark.parametrize("path", FILES, ids=str)
def test_every_file_says_what_it_is(path):
    assert ast.get_docstring(FILES[path])


def test_the_checks_above_see_what_they_look_for():
    tree = ast.parse("import pickle\ntorch.load(x)\nwith torch.random.fork_rng():\n    torch.manual_seed(0)\n")
    names = {name: withs for name, _, withs in calls(tree)}
    assert names.keys() == {"torch.load", "torch.random.fork_rng", "torch.manual_seed"}
    assert names["torch.manual_seed"] == ["torch.random.fork_rng()"]
    assert names["torch.load"] == []
    assert len(list(itertools.chain(*LAYERS))) == len(set().union(*LAYERS))
