"""Which networks of other libraries are captured, what that takes, and whether the engine gives the loop's numbers on them.

Networks of timm, transformers and torchvision, built from their configuration with random weights (nothing is downloaded),
norms and output layer patched. Each is predicted by the loop and by the captured graph with the same draws; a network that
cannot be captured is named with the reason.

    python benchmarks/capture.py [--libraries timm ...] [--results FOLDER]
"""

import argparse
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from records import RESULTS, write_record
from subjects import define_torchvision_operators
from torch import nn

import patchbayes as pb

TIMM = (
    "resnet18", "resnetv2_50", "resnext50_32x4d", "seresnet50", "regnety_002", "convnext_atto", "convnextv2_atto",
    "efficientnet_b0", "tf_efficientnetv2_b0", "mobilenetv2_050", "mobilenetv3_small_050", "mnasnet_small", "ghostnet_050",
    "densenet121", "vgg11_bn", "dla34", "hrnet_w18_small", "res2net50_26w_4s", "mixer_s32_224", "resmlp_12_224",
    "gmlp_ti16_224", "vit_tiny_patch16_224", "deit_tiny_patch16_224", "cait_xxs24_224", "xcit_nano_12_p16_224",
    "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "maxvit_pico_rw_256", "poolformer_s12", "levit_128s",
)  # fmt: skip
TORCHVISION = (
    "alexnet", "vgg11", "resnet18", "squeezenet1_0", "densenet121", "googlenet", "shufflenet_v2_x0_5", "mobilenet_v3_small",
    "efficientnet_b0", "swin_t",
)  # fmt: skip
_SMALL = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 0, "num_labels": 3,
}  # fmt: skip
_DISTILLED = {
    "vocab_size": 60,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 64,
    "pad_token_id": 0,
    "num_labels": 3,
}
_GPT2 = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "pad_token_id": 0, "num_labels": 3}
_CAUSAL = {**_SMALL, "num_key_value_heads": 4}
_IMAGES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32,
    "patch_size": 8, "num_labels": 3,
}  # fmt: skip
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertForSequenceClassification": ("BertConfig", _SMALL),
    "RobertaForSequenceClassification": ("RobertaConfig", _SMALL),
    "DistilBertForSequenceClassification": ("DistilBertConfig", _DISTILLED),
    "ElectraForSequenceClassification": ("ElectraConfig", {**_SMALL, "embedding_size": 32}),
    "AlbertForSequenceClassification": ("AlbertConfig", {**_SMALL, "embedding_size": 16}),
    "MPNetForSequenceClassification": ("MPNetConfig", _SMALL),
    "DebertaV2ForSequenceClassification": ("DebertaV2Config", _SMALL),
    "GPT2ForSequenceClassification": ("GPT2Config", _GPT2),
    "LlamaForSequenceClassification": ("LlamaConfig", _CAUSAL),
    "MistralForSequenceClassification": ("MistralConfig", _CAUSAL),
    "Qwen2ForSequenceClassification": ("Qwen2Config", _CAUSAL),
    "GPTNeoXForSequenceClassification": ("GPTNeoXConfig", _SMALL),
    "ViTForImageClassification": ("ViTConfig", _IMAGES),
    "DeiTForImageClassification": ("DeiTConfig", _IMAGES),
    "BeitForImageClassification": ("BeitConfig", _IMAGES),
}


def of_timm(size: int | None = None) -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Any]]]]:
    """Each with a batch of its own input size; with `size`, of that size where the network takes any."""
    import timm

    for name in TIMM:

        def build(name: str = name) -> tuple[nn.Module, Any]:
            model = timm.create_model(name, num_classes=7)
            channels, *own = model.default_cfg["input_size"]
            free = size is not None and not model.default_cfg.get("fixed_input_size", False)
            return model, torch.rand(2, channels, *([size, size] if free else own))

        yield name, build


def of_torchvision() -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Any]]]]:
    from torchvision import models

    for name in TORCHVISION:

        def build(name: str = name) -> tuple[nn.Module, Any]:
            options = {"aux_logits": False} if name == "googlenet" else {}
            return getattr(models, name)(num_classes=7, **options), torch.rand(2, 3, 96, 96)

        yield name, build


def of_transformers() -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Any]]]]:
    import transformers

    for name, (config, options) in TRANSFORMERS.items():

        def build(name: str = name, config: str = config, options: Any = options) -> tuple[nn.Module, Any]:
            model = getattr(transformers, name)(getattr(transformers, config)(**options))
            if "Image" in name:
                return model, {"pixel_values": torch.rand(2, 3, 32, 32)}
            tokens = torch.randint(1, 60, (3, 9))
            return model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}

        yield name, build


LIBRARIES = {"timm": of_timm, "transformers": of_transformers, "torchvision": of_torchvision}


def measure(build: Callable[[], tuple[nn.Module, Any]]) -> dict[str, Any]:
    """Whether a network is captured, the processor's seconds, and how far the graph is from the loop; or why it is not."""
    torch.manual_seed(0)
    model, inputs = build()
    model.eval()
    pb.patch_(model, pb.ECMP(3, jitter=0.3), "norm+output")
    draws = pb.Draws.sample(model, 2)
    began = time.process_time()
    mine = pb.predict(model, inputs, draws, engine="graph")
    first = time.process_time() - began
    loop = pb.predict(model, inputs, draws, engine="loop")
    difference = float((mine.probs - loop.probs).abs().max())
    captured = mine.plan.engine == "graph"
    return {
        "captured": captured,
        "reason": mine.plan.fallback,
        "first_call_seconds": first,
        "largest_difference": difference,
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--libraries", nargs="+", choices=list(LIBRARIES), default=list(LIBRARIES))
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args(words)
    warnings.simplefilter("ignore")
    define_torchvision_operators()
    rows = []
    for library in arguments.libraries:
        for name, build in LIBRARIES[library]():
            try:
                row = measure(build)
            except Exception as error:  # a network that cannot be built or patched is a row too
                row = {"captured": False, "reason": f"{type(error).__name__}: {error}"}
            rows.append({"library": library, "network": name} | row)
            print(library, name, row, flush=True)
    print("written:", write_record("capture", {"rows": rows}, arguments.results))


if __name__ == "__main__":
    main()
