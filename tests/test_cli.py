"""The console command as a whole: help, exit codes, errors, JSON, completion; and `params`, which trains nothing."""

import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import patchbayes
from command_line import command
from patchbayes import ECMP, EMP, patch_
from patchbayes.cli import application
from patchbayes.errors import PatchbayesError
from patchbayes.nets.named import build_net

COMMANDS = {given.callback.__name__: given.callback for given in application.application.registered_commands}


def python(*words, **environment):
    """A Python of its own, piped."""
    source = str(Path(patchbayes.__file__).parent.parent)
    settings = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"} | environment
    settings = {name: value for name, value in settings.items() if value is not None}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=settings, check=False)


def test_the_commands_are_those_that_are_promised():
    assert set(COMMANDS) == {"demo", "train", "bayesianize", "evaluate", "predict", "report", "params", "reproduce"}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_every_example_on_a_line_of_its_own(name):
    examples = [line.strip() for line in COMMANDS[name].__doc__.split("\b")[1].splitlines() if line.strip()]
    assert examples
    assert all(line.startswith(f"patchbayes {name}") or name == "bayesianize" for line in examples)
    shown = [line.strip() for line in command(f"{name} --help").out.splitlines()]
    assert [line for line in examples if line not in shown] == []
    assert command(f"{name} -h").out == command(f"{name} --help").out


def test_help_of_the_whole_says_in_full_what_each_command_does():
    out = command("--help").out
    for name in COMMANDS.keys() - {"demo"}:
        line = next(line for line in out.splitlines() if line.startswith(f"  {name} "))
        assert line.split(maxsplit=1)[1] == COMMANDS[name].__doc__.splitlines()[0]  # not cut off by dots
    assert "--install-completion" in out
    assert "--show-completion" in out


def test_nothing_given_shows_three_things_to_do_but_is_no_success():
    found = command("", code=2)
    assert found.out == ""
    assert max(map(len, found.err.splitlines())) <= 100
    said = re.findall(r"^    patchbayes (\w+)", found.err, re.MULTILINE)
    assert said == ["demo", "bayesianize", "train", "evaluate", "report"]
    lines = found.err.replace("\\\n", "").splitlines()
    for line in (shlex.split(line) for line in lines if line.startswith("    patchbayes")):
        options = [word for word in line if word.startswith("--")]
        assert all(option in command(f"{line[1]} --help").out for option in options)


def test_version():
    assert command("--version").out == f"patchbayes {patchbayes.__version__}\n"


@pytest.mark.parametrize("line", ["nonsense", "--nonsense", "params", "params mlp --nonsense", "predict run", "report"])
def test_a_command_that_is_not_understood_exits_with_2(line):
    found = command(line, code=2)
    assert found.out == ""
    assert "Error" in found.err
    assert "Traceback" not in found.err


def test_an_error_is_one_message_on_standard_error_and_exits_with_1(tmp_path):
    found = command("evaluate", tmp_path, code=1)
    assert found.out == ""
    assert found.err == f"patchbayes: {tmp_path} is not a run folder: it has no config.json.\n"
    (tmp_path / "noise-0").mkdir()
    (tmp_path / "noise-0" / "config.json").write_text("{}")
    found = command("evaluate", tmp_path, code=1)
    assert found.err.splitlines()[1] == f"  do       name one of the runs in it: {tmp_path / 'noise-0'}."


def test_debug_raises_the_error_itself(tmp_path):
    with pytest.raises(PatchbayesError, match="is not a run folder"):
        command("--debug evaluate", tmp_path)
    command("evaluate", tmp_path, code=1)  # and the next command is quiet again


def test_debug_prints_the_traceback_and_exits_with_1(tmp_path):
    found = python("-m", "patchbayes", "--debug", "evaluate", str(tmp_path))
    assert found.returncode == 1
    assert found.stdout == ""
    assert "Traceback" in found.stderr
    assert "is not a run folder" in found.stderr.splitlines()[-1]


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A module in the working directory, as a user has one; named anew for each test."""
    monkeypatch.chdir(tmp_path)
    name = f"own_{tmp_path.name}"

    def write(text):
        Path(f"{name}.py").write_text(text)
        return name

    yield write
    sys.modules.pop(name, None)


def test_an_interruption_exits_with_130(own_module):
    name = own_module("def data():\n    raise KeyboardInterrupt\n")
    found = command(f"train run --data {name}:data --model mlp", code=130)
    assert found.out == ""
    assert "Traceback" not in found.err
    assert not Path("run/config.json").exists()


def test_an_error_that_nobody_foresaw_is_one_sentence_too(own_module):
    name = own_module(
        "import torch\n\n"
        "class Broken(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.linear = torch.nn.Linear(10, 1)\n"
        "    def forward(self, x):\n        return [][1] if self.training else self.linear(x)\n\n"
        "def build(num_outputs, input_shape):\n    return Broken()\n"
    )
    found = command(f"train run --data diabetes --model {name}:build --method vanilla", code=1)
    assert found.err == "patchbayes: list index out of range (IndexError; patchbayes --debug ... shows where)\n"


def test_without_typer_one_sentence_says_what_to_install():
    block = "import sys; sys.modules['typer'] = None; from patchbayes.cli import main; main()"
    found = python("-c", block)
    assert found.returncode == 1
    assert found.stderr == 'patchbayes: the command line needs the package typer: pip install "patchbayes[cli]"\n'


@pytest.mark.parametrize(
    ("words", "number", "offered"),
    [
        ("patchbayes ev", 1, "evaluate"),
        ("patchbayes predict --format js", 3, "jsonl"),
        ("patchbayes train --me", 2, "--method"),
    ],
)
def test_the_shell_completes_commands_options_and_values(monkeypatch, words, number, offered):
    monkeypatch.setenv("_PATCHBAYES_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(number))
    assert command("").out.split() == [offered]


# params


def patched_report(model, outputs, shape, method, sites):
    network = build_net(model, outputs, shape)
    return patch_(network, method, sites, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("components", [2, 3, 7])
@pytest.mark.parametrize("sites", ["norm", "output", "input+norm+output", "all", "norm+output"])
@pytest.mark.parametrize(("model", "shape"), [("small_cnn", (1, 8, 8)), ("mlp", (13,))])
def test_params_counts_what_patching_would_make(model, shape, sites, components):
    line = f"params {model} --outputs 4 --input {','.join(map(str, shape))} --sites {sites} -K {components} --json"
    content = command(line).json
    (row,) = content["choices"]
    for name, method in (("emp", EMP(components)), ("ecmp", ECMP(components))):
        report = patched_report(model, 4, shape, method, sites)
        assert content["parameters"] == report.parameters_before
        assert row["parameters"] == report.parameters_after
        assert row["num_sites"] == len(report.sites)
        assert row["log10_ensemble_size"][name] == pytest.approx(report.log10_outcomes)
        assert row["overhead_percent"] == pytest.approx(100 * (report.parameters_after / report.parameters_before - 1))


def test_params_shows_a_table_with_the_same_numbers():
    out = command("params small_cnn --outputs 10 --input 1,8,8 --sites norm+output -K 5").out
    report = patched_report("small_cnn", 10, (1, 8, 8), EMP(5), "norm+output")
    first, _, row, *why = out.splitlines()
    assert max(map(len, out.splitlines())) <= 100
    share = (report.parameters_after / report.parameters_before - 1) / 4
    assert f"norm+output {100 * share:.3g} %" in " ".join(why)
    assert first == f"small_cnn: {report.parameters_before:,} parameters (24.6 kB)"
    assert row.split() == [
        "norm+output",
        "5",
        "3",
        f"{report.parameters_after:,}",
        "+90.3",
        "%",
        "46.7",
        "kB",
        "125",
        "10^968.8",
    ]


def test_params_of_the_usual_choices_leaves_out_what_the_network_lacks(own_module):
    name = own_module(
        "import torch\n\ndef build(num_outputs, input_shape):\n    return torch.nn.Linear(input_shape[0], num_outputs)\n"
    )
    rows = command(f"params {name}:build --outputs 2 --input 3 --json").json["choices"]
    assert {row["sites"] for row in rows} == {"output", "input", "norm+output", "input+norm+output", "all"}
    assert {row["components"] for row in rows} == {2, 5, 10}
    assert "found no site" in command(f"params {name}:build --outputs 2 --input 3 --sites norm", code=1).err


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("params nosuch", 1, "known    mlp, small_cnn"),
        ("params mlp --input 3,x", 2, "give whole numbers, such as 3,32,32"),
        ("params mlp --input 0", 2, "give whole numbers"),
        ("params mlp --input 3 -K 0", 1, "at least one component"),
        ("params mlp --input 3 --outputs 0", 1, "at least 1"),
        ("params mlp --input 3 --sites norm --sites nosuch", 1, 'no module named "nosuch"'),
    ],
)
def test_params_says_what_is_wrong(line, code, said):
    found = command(line, code=code)
    assert said in found.err
    assert found.out == ""


def test_reproduce_prints_its_record_as_json(tmp_path):
    record = command("reproduce parameters --scale smoke --json --results", tmp_path).json
    assert (record["experiment"], record["scale"]) == ("parameters", "smoke")
    assert "give the name of an experiment" in command("reproduce", code=2).err
    assert "give one of smoke" in command("reproduce parameters --scale huge", code=2).err


def test_which_commands_speak_json():
    """Each of these is read as strict JSON by a test: here, or in the tests of the command."""
    speaking = {name for name in COMMANDS if "--json" in command(f"{name} --help").out}
    assert speaking == {"demo", "train", "bayesianize", "evaluate", "report", "params", "reproduce"}


FAULTS = """
import resource, torch
from patchbayes.cli.memory import keep_freed_memory
kept = keep_freed_memory()
def step():
    return [torch.ones(2**20) for _ in range(8)]
for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(40):
    step()
print(int(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's mallopt")
def test_a_command_keeps_the_memory_that_a_step_frees_unless_the_environment_says_how_to_allocate():
    none = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"))
    kept, wished = (
        [int(word) for word in python("-c", FAULTS, **none | settings).stdout.split()]
        for settings in ({}, {"MALLOC_MMAP_THRESHOLD_": "131072"})  # of which the second gives every tensor back
    )
    assert kept[0] == 1
    assert wished[0] == 0
    assert wished[1] >= 40 * 8  # a page of each tensor at least, where pages are large
    assert kept[1] < 0.3 * wished[1]
