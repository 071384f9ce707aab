"""patchbayes demo: an overconfident network, and what patches make of it."""

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from importlib import resources
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import show, show_json, tell
from .demo_page import demo_page
from .demo_table import LEGEND, finding, in_numbers, lines_of_table, number_of_seeds, titled
from .options import need

#: The record of several seeds, made by benchmarks/from_scratch.py.
RECORD = "demo_record.json"


def demo(
    folder: Annotated[Path, typer.Argument(help="Where the results and the page go.")] = Path("patchbayes-demo"),
    seed: Annotated[int, typer.Option(help="Of the network's start, its data and all draws.")] = 0,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the 2,000 training images.")] = 40,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
) -> None:
    """What it is for, in two minutes and offline: a network that is too sure of itself, and what can be done.

    A small residual network learns 2,000 pictures of clothes until it fits them. It is then overconfident. It is calibrated by
    temperature scaling and by `bayesianize_`, without training; and trained again, with dropout and with patches. All are
    scored on test images, on corrupted ones, and by how well they notice digits, which they have never seen; beside them the
    same for several seeds, measured before. Where a rival is best, the table says so. A started demo goes on where it was.

    \b
    patchbayes demo
    patchbayes demo /tmp/demo --seed 3
    """
    need("demo", {"sklearn": "cli"})  # its digits

    from ..files import probe_writing, write_atomically

    page = folder / "report.html"
    probe_writing(page)
    began = time.perf_counter()
    record = demo_record()
    contestants = ["plain", f"mixed:{record['noise']:g}", f"dropout:{record['dropout_rate']:g}"]
    results = _contests(folder, contestants, seed, epochs)
    live = titled([results], record)
    past = titled(record["seeds"], record)
    sentence = finding(live, results["plain"]["train_accuracy"])
    title, known = f"live, seed {seed}", f"measured before, {number_of_seeds(record)}"
    write_atomically(page, demo_page(f"{sentence} {in_numbers(live)}", {title: live, known: past}, record).encode())
    if as_json:
        show_json({"finding": sentence, "live": live, "record": past, "page": str(page.resolve())})
        return
    show(sentence)
    show(in_numbers(live))
    for name, rows in ((title, live), (known, past)):
        show()
        show(f"{name}: 2,000 test images, {record['draws']} draws")
        for line in lines_of_table(rows, color=_on_terminal()):
            typer.echo(line)  # with colors of our own, which `show` would take out
    show()
    for line in (*LEGEND, "*: best of its column."):
        show(line)
    show()
    show(f"page: {page.resolve()}   ({time.perf_counter() - began:.0f} s)")
    show("next: a trained network of your own, in Python")
    show("    import patchbayes as pb")
    show("    print(pb.bayesianize_(model, held_out))  # batches (inputs, labels) that it was not trained on")
    show("    probs = pb.predict(model, x, draws=20).probs")


def demo_record() -> dict[str, Any]:
    """Scores of several seeds, and the dropout rate and noise that were best on their held-out images."""
    found: dict[str, Any] = json.loads((resources.files(__package__) / RECORD).read_text("utf-8"))
    return found


def _contests(folder: Path, contestants: list[str], seed: int, epochs: int) -> dict[str, dict[str, Any]]:
    """Results by contestant: read where they are there, else made, two at a time, each with one thread."""
    from ..files import write_atomically

    folder.mkdir(parents=True, exist_ok=True)
    files = {c: folder / f"{c.replace(':', '-')}_seed{seed}_epochs{epochs}.json" for c in contestants}
    results = {c: _kept(f, c) for c, f in files.items() if f.exists()}
    missing = [c for c in contestants if c not in results]
    if missing:
        tell(f"training and scoring {len(missing)} networks, two at a time: about two minutes ...")
        with ProcessPoolExecutor(2, get_context("spawn"), _end_with, (os.getpid(),)) as pool:
            waiting: Mapping[Future[dict[str, Any]], str] = {pool.submit(_contest, c, seed, epochs): c for c in missing}
            for future in as_completed(waiting):
                contestant = waiting[future]
                results[contestant] = future.result()
                write_atomically(files[contestant], json.dumps(results[contestant]).encode())
                tell(f"{contestant.partition(':')[0]}: trained and scored ({len(results)} of {len(contestants)})")
    return results


def _kept(file: Path, contestant: str) -> dict[str, Any]:
    """A result that an earlier demo wrote; it has the form of those in the record."""
    from ..errors import PatchbayesError
    from ..files import read_json

    found: dict[str, Any] = read_json(file)
    form = {key: demo_record()["seeds"][0][contestant][key] for key in ("train_accuracy", "rows")}
    if not _has_form(found, form):
        raise PatchbayesError(
            f"{file} is not a result of the demo, or is damaged.\n  do       remove it; the demo makes it again."
        )
    return found


def _has_form(found: Any, form: Any) -> bool:
    if isinstance(form, dict):
        return isinstance(found, dict) and all(
            key in found and _has_form(found[key], value) for key, value in form.items()
        )
    if isinstance(form, list) and isinstance(form[0], list):  # any number of the same
        return isinstance(found, list) and all(_has_form(one, form[0]) for one in found)
    if isinstance(form, list):
        return isinstance(found, list) and len(found) == len(form) and all(map(_has_form, found, form))
    return isinstance(found, int | float) and not isinstance(found, bool) and abs(found) < 1e9


def _end_with(parent: int) -> None:
    """End this worker soon after its parent, however that ended: nobody would wait for its work."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _contest(contestant: str, seed: int, epochs: int) -> dict[str, Any]:
    import torch

    from .demo_study import contest, fashion

    torch.set_num_threads(1)  # the networks are small, and two run at a time
    torch.set_flush_denormal(True)
    return contest(fashion(seed), contestant, seed, epochs)


def _on_terminal() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
