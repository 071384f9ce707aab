"""Which reading of the text gives which number: the protocol of tables 12 and 13 with one thing changed at a time.

    python -m patchbayes_reproduce.regression_variants --data-dir DATA --out results/regression/variants

Some published baselines (Yacht: dropout 12.90, ensemble 29.48) do not come out under the protocol as we read it. These runs
show how far each open choice moves the numbers; none is chosen by them.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .regression_sets import METHODS, PAPER, Protocol, run_all, say_with_time
from .regression_splits import SETS

SETS_OF_VARIANTS = ("yacht", "boston")
_WITH_NORM = ("ecmp", "emp", "vanilla")


@dataclass(frozen=True)
class ProtocolVariant:
    """One change of the protocol: what it reads differently, for which methods it makes a difference."""

    reading: str
    changes: dict[str, Any] = field(default_factory=dict)
    methods: tuple[str, ...] = tuple(METHODS)

    def protocol(self, of: Protocol) -> Protocol:
        """`of` with the changes; those of the recipe are added to its own."""
        return replace(of, **{**self.changes, "recipe": {**of.recipe, **self.changes.get("recipe", {})}})


VARIANTS = {
    "targets-raw": ProtocolVariant("only the inputs are standardized", {"standardized": "inputs"}),
    "nothing-standardized": ProtocolVariant("neither inputs nor targets are standardized", {"standardized": "neither"}),
    "test-by-itself": ProtocolVariant(
        "test inputs are standardized with the test part's statistics", {"standardized": "test by itself"}
    ),
    "norm-before-relu": ProtocolVariant(
        "the hidden BN stands before the ReLU", {"recipe": {"norm": "before"}}, _WITH_NORM
    ),
    "dropout-with-norm": ProtocolVariant(
        "dropout is added before the BNs", {"recipe": {"norm": "after"}}, ("dropout",)
    ),
    "decoupled-decay": ProtocolVariant("weight decay 0.01 is AdamW's", {"recipe": {"decay": "decoupled"}}),
    "elbo-loss": ProtocolVariant(
        "the loss is tau/2 times the squared error in original units (Eq. 9)", {"loss": "elbo"}
    ),
}


def run_variants(
    sets: Sequence[str],
    names: Sequence[str],
    protocol: Protocol,
    data_dir: Path,
    folder: Path,
    say: Callable[[str], None] = lambda text: None,
    methods: Sequence[str] = tuple(METHODS),
) -> list[Path]:
    """A record for each (variant, set, method) that the variant concerns, in folder/VARIANT; what is there is skipped."""
    paths = []
    for name in names:
        variant = VARIANTS[name]
        say(f"{name}: {variant.reading}")
        changed = variant.protocol(protocol)
        chosen = [method for method in methods if method in variant.methods]
        paths += run_all(sets, chosen, changed, data_dir, folder / name, say, variant=name)
    return paths


def main(words: Sequence[str] | None = None) -> None:
    """The command line of this file."""
    parser = argparse.ArgumentParser(description="Which reading of the text gives which number.")
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS_OF_VARIANTS))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("PATCHBAYES_DATA"))
    parser.add_argument("--out", type=Path, default=Path("results/regression/variants"))
    given = parser.parse_args(words)
    if given.data_dir is None:
        parser.error("give --data-dir, or set PATCHBAYES_DATA, to the folder that holds uci/")
    run_variants(given.sets, given.variants, PAPER, Path(given.data_dir), given.out, say_with_time, given.methods)


if __name__ == "__main__":
    main()
