"""The documents are right: README code runs, its tables come from records, every row of the paper map resolves."""

import ast
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
MAP = (ROOT / "PAPER_MAP.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in MAP.split("## Departures")[0].splitlines()
    if line.startswith("| ") and not line.startswith("| paper")
]


GUIDE = (ROOT / "docs" / "guide.md").read_text()


def python_blocks(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def after(diff):
    """The code that a diff leads to."""
    return "\n".join(line[2:] for line in diff.splitlines() if not line.startswith("-"))


def what_a_reader_has():
    """The names that README takes for granted: a network, data, and a loop's usual imports."""
    import torch
    import torch.nn.functional as F

    from patchbayes.nets import small_cnn

    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(256, 1, 8, 8, generator=generator), torch.randint(10, (256,), generator=generator)
    batches = list(zip(x.split(64), y.split(64), strict=True))
    names = {"torch": torch, "F": F, "loader": batches[:2], "held_out": batches[2:], "x": x[:8], "epochs": 2}
    return names | {"model": small_cnn(), "make_network": small_cnn}


def test_readme_code_for_a_trained_network_runs_and_is_exported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = what_a_reader_has()
    first, export = python_blocks(README)
    exec(compile(first, "README.md", "exec"), names)
    assert (tmp_path / "patch.safetensors").exists()
    assert names["prediction"].probs.shape == (8, 10)
    pytest.importorskip("onnxscript")
    exec(compile(export, "README.md", "exec"), names)
    assert (tmp_path / "network.onnx").stat().st_size > 1000
    assert not names["pb"].is_patched(names["model"])


def test_the_loop_that_the_readme_shows_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = what_a_reader_has()
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    exec(compile(after(diff), "README.md", "exec"), names)
    assert names["probs"].shape == (*names["x"].shape[:1], 10)
    assert names["probs"].sum(-1).allclose(names["probs"].new_ones(()))
    again = names["make_network"]()
    names["pb"].load_(again, "network.safetensors")
    assert names["pb"].predict(again, names["x"], draws="mean").probs.equal(names["probs"])


def test_the_readme_is_short():
    assert len(README.split()) <= 700


def test_the_code_of_the_guide_runs(tmp_path, monkeypatch, capsys):
    """The blocks build on each other, as a reader runs them."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in python_blocks(GUIDE):
        exec(compile(block, "docs/guide.md", "exec"), names)
    assert (tmp_path / "patch.safetensors").exists()
    assert "125 draws (enumerated, exact)" in capsys.readouterr().out


def test_the_code_of_the_page_on_methods_runs(tmp_path, monkeypatch, capsys):
    """The blocks build on each other, as a reader runs them."""
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks((ROOT / "docs" / "methods.md").read_text())
    assert len(blocks) >= 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/methods.md", "exec"), names)
    assert "held-out log score" in capsys.readouterr().out


def test_the_recipe_in_the_docs_is_the_one_in_the_code():
    import patchbayes as pb
    from patchbayes.posteriors.text import parse_rules

    text = (ROOT / "docs" / "training.md").read_text()
    (recipe,) = re.findall(r"```\n(norm\+output: .*?)\n```", text)
    assert parse_rules(recipe) == pb.mixed()


def test_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


EXTENDING = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXTENDING)))
def test_extensions_of_the_docs_keep_every_promise(number, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(EXTENDING[number], "docs/extending.md", "exec"), {"__name__": "an_extension"})
    printed = capsys.readouterr().out
    assert "promises hold" in printed
    assert "FAIL" not in printed


def test_the_posterior_of_the_docs_has_its_whole_kl_with_a_learned_prior(capsys):
    """E_q[-log p(w)] of a learned prior, with all terms in tau and rho, against the density summed over the components."""
    import patchbayes as pb
    from patchbayes.prior import LearnedPrior

    names = {"__name__": "an_extension"}
    exec(compile(EXTENDING[0], "docs/extending.md", "exec"), names)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).double()
    pb.patch_(model, names["InputScales"](3, jitter=0.5), "linear")
    prior = LearnedPrior(model, tau=2.0, rho=5.0)

    def cross_entropy(tau, rho):
        total = 0.0
        for layer in (model[0], model[2]):
            weight, factors = layer._parameters["weight"], layer.patchbayes.factors
            drawn = torch.stack([weight * r for r in factors])
            law, of_bias = (torch.distributions.Normal(0.0, p**-0.5) for p in (tau, rho))
            total = total - law.log_prob(drawn).flatten(1).sum(1).mean() - of_bias.log_prob(layer.bias).sum()
        constant = sum(p.numel() for n, p in model.named_parameters() if n.endswith(("weight", "bias")))
        return total - 0.5 * constant * math.log(2 * math.pi)

    tau, rho = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (2.0, 5.0))
    found, expected = pb.kl(model, prior), cross_entropy(tau, rho)
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    for log, value in ((prior.log_tau, tau), (prior.log_rho, rho)):  # all layers start from one value
        torch.testing.assert_close(log.grad.double().sum(), value.grad * value.detach(), rtol=1e-5, atol=1e-5)


def shell_lines(block):
    return [shlex.split(line, comments=True) for line in block.splitlines() if line.startswith("patchbayes ")]


SHELL = [shell_lines(block) for block in re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL)]


def run_command(words, folder):
    command = [sys.executable, "-m", *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def test_commands_of_the_guide_run(tmp_path):
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
def test_commands_of_the_guide_for_a_checkpoint_run(tmp_path, data_dir):
    pytest.importorskip("typer")
    (tmp_path / "cifar100_resnet20.safetensors").symlink_to(data_dir / "pretrained" / "cifar100_resnet20.safetensors")
    first, second = SHELL[1]
    done = run_command([word.replace("test[:5000]", "test[:300]") for word in [*first, "--budget", "2000"]], tmp_path)
    assert done.returncode == 0, done.stderr
    faster = [word.replace("test[5000:]", "test[5000:5200]").replace("test[:5000]", "test[:200]") for word in second]
    done = run_command(faster, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Spread(5)" in done.stdout


def test_readme_tables_come_from_the_records():
    result = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "readme_tables.py", "--check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


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
        beside = path.startswith("patchbayes_reproduce/")
        assert name in _names(ROOT / "src" / ("" if beside else "patchbayes") / path), place
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
