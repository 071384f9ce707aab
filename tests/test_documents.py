"""The documents are right: README code runs, its tables come from records, every row of the paper map resolves."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
MAP = (ROOT / "PAPER_MAP.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in MAP.split("## Departures")[0].splitlines()
    if line.startswith("| ") and not line.startswith("| paper")
]


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_readme_code_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {})
    assert (tmp_path / "patch.safetensors").exists()


def shell_lines(block):
    return [shlex.split(line, comments=True) for line in block.splitlines() if line.startswith("patchbayes ")]


SHELL = [shell_lines(block) for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)]


def run_command(words, folder):
    command = [sys.executable, "-m", *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def test_readme_commands_run(tmp_path):
    for package in ("typer", "accelerate", "matplotlib", "PIL", "sklearn"):
        pytest.importorskip(package)
    from PIL import Image
    from sklearn.datasets import load_digits

    Image.fromarray((load_digits().images[0] * 15).astype("uint8")).save(tmp_path / "digit.png")
    assert [words[1] for words in SHELL[0]] == ["params", "train", "train", "evaluate", "report", "predict"]
    for words in SHELL[0]:
        done = run_command(words, tmp_path)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stderr}"
    assert (tmp_path / "report.html").stat().st_size > 10_000


@pytest.mark.slow
def test_readme_commands_for_a_checkpoint_run(tmp_path, data_dir):
    pytest.importorskip("typer")
    (tmp_path / "cifar100_resnet20.safetensors").symlink_to(data_dir / "pretrained" / "cifar100_resnet20.safetensors")
    first, second = SHELL[1]
    done = run_command([*first, "--epochs", "0"], tmp_path)
    assert done.returncode == 0, done.stderr
    faster = [word.replace("test[5000:]", "test[5000:5200]").replace("test[:5000]", "test[:200]") for word in second]
    done = run_command(faster, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ECMP(K=5)" in done.stdout


def test_readme_tables_come_from_the_records():
    result = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "readme_tables.py", "--check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_readme_shows_what_patching_prints():
    import patchbayes as pb
    from patchbayes.nets import resnet18

    printed = str(pb.patch_(resnet18(), pb.ECMP(components=5), sites="norm+output")).splitlines()
    assert "\n".join(line for line in printed if "note" not in line) in README


def test_make_targets_named_in_the_readme_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE))
    assert named
    assert named <= targets


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_paper_map_row_resolves(row):
    assert len(row) == 4
    _, _, code, test = row
    for place in re.findall(r"`([^`]+)`", code):
        path, _, name = place.partition("::")
        assert name in _names(ROOT / "src" / "patchbayes" / path), place
    places = re.findall(r"`([^`]+)`", test)
    assert places
    for place in places:
        path, _, name = place.partition("::")
        assert (ROOT / "tests" / path).is_file(), place
        assert not name or name in _names(ROOT / "tests" / path), place


def test_paper_map_names_every_equation_table_and_figure():
    numbers = {
        kind: {int(n) for text in re.findall(rf"{kind}s? ([\d, and-]+)", MAP) for n in _expand(text)}
        for kind in ("table", "figure")
    }
    assert numbers["table"] >= set(range(1, 14))
    assert numbers["figure"] >= set(range(1, 8))
    assert {int(n) for n in re.findall(r"Eq\. \((\d+)\)", MAP)} >= set(range(1, 11))
    assert "Algorithm 1" in MAP


def test_every_deviation_in_the_code_is_listed():
    marked = sum(path.read_text().count("Deviation:") for path in (ROOT / "src").rglob("*.py"))
    listed = [line for line in MAP.split("## Departures")[1].splitlines() if line.startswith("| ")]
    assert 0 < marked <= len(listed) - 1


def _names(path):
    return {n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef | ast.ClassDef)}


def _expand(text):
    for part in re.findall(r"\d+-\d+|\d+", text):
        low, _, high = part.partition("-")
        yield from range(int(low), int(high or low) + 1)
