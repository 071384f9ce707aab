"""Small networks of transformers and PEFT, built from their configuration: nothing is downloaded."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchvision_names import torchvision_operators

_OPERATORS = torchvision_operators()

TOKENS = torch.randint(1, 100, (4, 7), generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3])


def seeded(seed: int, make: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def bert(seed: int = 0) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=5
    )
    return seeded(seed, lambda: transformers.BertForSequenceClassification(config)).eval()


def gpt2(seed: int = 0, vocabulary: int = 100, width: int = 16) -> nn.Module:
    """With tied embeddings, as GPT-2 has them."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=vocabulary, n_positions=64, n_embd=width, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return seeded(seed, lambda: transformers.GPT2LMHeadModel(config)).eval()


def llama(seed: int = 0, vocabulary: int = 100, width: int = 16) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return seeded(seed, lambda: transformers.LlamaForCausalLM(config)).eval()


def lora(seed: int = 0, **options: Any) -> nn.Module:
    """BERT with LoRA on queries and values; its classifier is copied and trained, as PEFT does for this task."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS", **options)
    return seeded(seed, lambda: peft.get_peft_model(bert(), config)).eval()


def train(model: nn.Module, steps: int = 4, rate: float = 1e-2) -> None:
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate)
    for _ in range(steps):
        model(input_ids=TOKENS, labels=LABELS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


class Requests(torch.utils.data.Dataset):
    """The items of a Hugging Face data set: a class that the first token tells."""

    def __init__(self, number: int, seed: int = 1) -> None:
        self.tokens = torch.randint(1, 100, (number, 7), generator=torch.Generator().manual_seed(seed))
        self.labels = self.tokens[:, 0] % 5

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[number], "labels": self.labels[number]}


def clinc150() -> list[str]:
    """The training requests of CLINC150."""
    folder = os.environ.get("PATCHBAYES_DATA")
    path = Path(folder or "") / "text" / "clinc150" / "data_small.json"
    if not folder or not path.is_file():
        pytest.skip("set PATCHBAYES_DATA to a folder with text/clinc150")
    return [text for text, _ in json.loads(path.read_text())["train"]]
