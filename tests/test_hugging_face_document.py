"""docs/integrations.md, what it says of Hugging Face: its code runs, its tables are those of the records."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from third_party import Requests, bert, gpt2
from torchvision_names import torchvision_operators

_OPERATORS = torchvision_operators()
ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "integrations.md").read_text()
SECTIONS = {
    part.partition("\n")[0].strip(): part
    for part in re.split(r"^## ", TEXT, flags=re.MULTILINE)
    if part.startswith("Hugging Face")
}


@pytest.mark.slow
def test_the_code_runs(tmp_path):
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    data = Requests(16)
    batch = {"input_ids": data.tokens, "labels": data.labels}
    names = {
        "model": bert(),
        "base": bert(),
        "folder": tmp_path / "folder",
        "AutoModelForSequenceClassification": transformers.AutoModelForSequenceClassification,
        "PeftModel": peft.PeftModel,
        "train": data,
        "held_out": data,
        "batch": batch,
        "language_model": gpt2(),
        "tokens": {"input_ids": data.tokens[:2]},
        "args": transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=1, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no"
        ),
    }
    for title, section in SECTIONS.items():
        for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
            names["folder"] = tmp_path / title.replace(" ", "_")
            if "language_model" in block:
                names["pb"].patch_(names["language_model"], names["pb"].EMP(3), "norm")
            exec(compile(block, "docs/integrations.md", "exec"), names)
    assert not names["pb"].is_patched(names["ordinary"])
    assert names["pb"].is_patched(names["bayesian"])
    assert not names["pb"].is_patched(names["merged"])
    assert torch.isfinite(names["prediction"].mutual_information).all()


@pytest.mark.parametrize("name", ["intents_adapting", "adapters"])
def test_the_tables_are_those_of_the_records(name, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module(name)
    try:
        assert module.table(json.loads((ROOT / "results" / f"{name}.json").read_text())) in TEXT
    finally:
        for other in ("records", "subjects", "intents_regime", name):
            sys.modules.pop(other, None)


def test_what_token_level_prediction_costs_is_in_the_record():
    record = json.loads((ROOT / "results" / "token_prediction.json").read_text())
    for key, unit in (("seconds", "of its time"), ("megabytes", "of its memory")):
        assert f"{record['ratios']['predict'][key]:.2f} {unit}" in TEXT
