"""patchbayes reproduce: the paper's tables and figures."""

from pathlib import Path
from typing import Annotated

import typer

from patchbayes.cli.console import show, show_json, show_table, tell


def reproduce(
    name: Annotated[str | None, typer.Argument(help="The experiment; see --list.")] = None,
    scale: Annotated[
        str, typer.Option(help="smoke (seconds), small (this machine), paper (the full experiment).")
    ] = "small",
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets lie; else $PATCHBAYES_DATA.")] = None,
    results: Annotated[Path, typer.Option(help="Folder of the records.")] = Path("results/reproduce"),
    work: Annotated[Path | None, typer.Option(help="Folder of unfinished work; by default RESULTS/work.")] = None,
    docs: Annotated[Path, typer.Option(help="Folder of the summary page.")] = Path("docs"),
    list_all: Annotated[bool, typer.Option("--list", help="List the experiments.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Check the pages against the records.")] = False,
    write_docs: Annotated[bool, typer.Option("--write-docs", help="Write the summary page from the records.")] = False,
    finished: Annotated[
        bool, typer.Option("--finished", help="Take the runs that are finished; begin no other.")
    ] = False,
    add: Annotated[
        bool, typer.Option("--add", help="Keep the runs of the record that is there; make those that it lacks.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Repeat an experiment of the paper.

    Its record is written, and the paper's numbers are printed beside ours.

    \b
    patchbayes reproduce --list
    patchbayes reproduce prior
    patchbayes reproduce regression --scale small --data-dir data
    patchbayes reproduce imagenet --add
    patchbayes reproduce --verify
    """
    from . import experiment as experiments
    from . import registry, summary

    if sum([name is not None, list_all, verify, write_docs]) > 1:
        raise typer.BadParameter("give one of the name of an experiment, --list, --verify and --write-docs.")
    if list_all:
        found = [registry.experiment(name) for name in registry.names()]
        rows = [[e.name, ", ".join(e.items), *(e.duration[s] for s in experiments.SCALES)] for e in found]
        show_table(["experiment", "of the paper", *experiments.SCALES], rows)
    elif verify:
        figures = summary.verify_summary(results, docs)
        show(
            f"{docs / 'results.md'} and its pages are what the records in {results} and {results.parent} say; their {figures} "
            "figures are there."
        )
        if summary.verify_readme(docs):
            show("README.md: its tables are what the records say.")
        else:
            show("README.md: not checked; that is done in a checkout of the project.")
    elif write_docs:
        for path in summary.write_summary(results, docs):
            show(f"written: {path}")
    elif name is None:
        raise typer.BadParameter("give the name of an experiment, or --list, --verify or --write-docs.")
    else:
        chosen = registry.experiment(name)
        if scale not in experiments.SCALES:
            raise typer.BadParameter(f"--scale {scale}: give one of {', '.join(experiments.SCALES)}.")
        setting = experiments.Workspace(data_dir, work or results / "work", tell, finished)
        record = experiments.reproduce(chosen, scale, setting, results, add=add)
        if as_json:
            show_json(record)
            return
        lines = chosen.rows(record["result"])
        beside = dict([summary.comparison(lines)]) if lines else {}
        for title, table in (beside | chosen.tables(record["result"])).items():
            show(f"\n{title}")
            show_table(*table)
        show(f"\nrecord: {experiments.record_path(results, name, scale)}")
