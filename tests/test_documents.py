"""The documents are right: README code runs, its tables come from records, every row of the paper map resolves."""

import ast
import re
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
    if "not yet" in (code, test):
        assert code == test == "not yet"
        return
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
