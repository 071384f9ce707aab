"""docs/results.md: which claims of the paper hold; docs/results/NAME.md: what the records say, experiment by experiment.

Rendered from the records and nothing else.
"""

import io
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from patchbayes.errors import PatchbayesError
from patchbayes.files import write_atomically

from .bayesianize_route import route_tables
from .calibrated_runs import TEMPERATURE, TRAIN_ACCURACY
from .claim import ClaimVerdict
from .claims import claims_table, verdict_counts
from .experiment import ComparedNumber, Experiment, TextTable, as_text, largest_record
from .registry import experiment, names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Tables from records of other measurements, in the folder above the experiments' own, by the experiment they stand beside.
_BESIDE: dict[str, Callable[[Path], dict[str, TextTable]]] = {"cifar100": route_tables}

_OPENING = """# Does the paper hold?

Every sentence of the paper with a number or a comparison in it, beside what this code measures. All of it is rendered from the
records in `results`; `patchbayes reproduce --verify` does so again and compares.

- That something is better is *confirmed* or *contradicted* only with p < 0.01, paired over seeds, rounds or splits (corrected
  for their overlap); else it is *not confirmed*. Differences of percentages are in points; negative ones favor the claim.
- A claim on accuracy or calibration is judged only where the network without patches reaches {train:g} % on its training data
  and is overconfident (a temperature of at least {temperature:g} fits the held-out part); else it is *not comparable*.
- A claim of several parts is confirmed by all of them and contradicted by any one. A verdict is about what was run: the record
  and its scale are named.
"""


def render(records: Path) -> dict[str, bytes]:
    """The files of the pages: results.md, results/NAME.md and figures/*.svg."""
    files: dict[str, bytes] = {}
    links = []
    for name in names():
        found = experiment(name)
        lines = [f"# {found.title} ({', '.join(found.items)})\n", *([f"{found.note}\n"] if found.note else [])]
        record = largest_record(records, name)
        if record is None:
            lines.append(f"Not run yet: `patchbayes reproduce {name}`, {found.duration['small']}.\n")
        else:
            lines += _section(found, record)
        if name in _BESIDE:
            lines += _titled(_BESIDE[name](records.parent))
        for title, figure in (found.figures(record["result"]) if record else {}).items():
            files[f"figures/{title}.svg"] = svg(figure)
            lines.append(f"![{title.replace('_', ' ')}](../figures/{title}.svg)\n")
        files[f"results/{name}.md"] = _page(lines)
        state = f"{record['scale']} scale, {record['date'][:10]}" if record else "not run yet"
        links.append(f"- [{found.title}](results/{name}.md): {', '.join(found.items)} ({state})")
    opening = _OPENING.format(train=100 * TRAIN_ACCURACY, temperature=TEMPERATURE)
    files["results.md"] = _page(
        [opening, markdown(_tally(records)), "", markdown(claims_table(records)), "", "## Details\n", *links]
    )
    return files


def _tally(records: Path) -> TextTable:
    """Claims by topic and verdict, and in all."""
    counts = verdict_counts(records)
    verdicts = get_args(ClaimVerdict)
    lines = [[topic, *(str(found.get(verdict, "")) for verdict in verdicts)] for topic, found in counts.items()]
    totals = [sum(found.get(verdict, 0) for found in counts.values()) for verdict in verdicts]
    return ["claims on", *verdicts], [*lines, [f"all {sum(totals)}", *map(str, totals)]]


def _page(lines: Sequence[str]) -> bytes:
    return ("\n".join(lines).rstrip() + "\n").encode()


def _section(found: Experiment, record: dict[str, Any]) -> list[str]:
    machine = record["machine"]
    runs = found.runs(record["result"]) or [(record["date"], record["seconds"])]
    days = sorted({date[:10] for date, _ in runs})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    of_runs = f" of {len(runs)} runs" if len(runs) > 1 else ""
    lines = [
        f"`patchbayes reproduce {found.name} --scale {record['scale']}`, {when}, commit {record['commit']}, "
        f"{machine['processor']}, {machine['threads']} thread{'s' if machine['threads'] != 1 else ''}, "
        f"{sum(seconds for _, seconds in runs):,.0f} s{of_runs}.\n"
    ]
    own = _titled(found.tables(record["result"]))
    rows = found.rows(record["result"])
    if not rows:
        return lines + own
    beside = _titled(dict([comparison(rows)]))
    return lines + (own + beside if _shared_reason(rows) else beside + own)


def _titled(tables: Mapping[str, TextTable]) -> list[str]:
    return [text for title, table in tables.items() for text in (f"**{title}**\n", markdown(table), "")]


def comparison(rows: Sequence[ComparedNumber]) -> tuple[str, TextTable]:
    """A title, and the table paper / ours / verdict. Why none of the numbers can be compared is said once, in the title."""
    reason = _shared_reason(rows)
    numbers = [[row.what, as_text(row.paper, 10), as_text(row.ours)] for row in rows]
    if reason:
        return f"The paper's numbers beside ours: not comparable ({reason})", (["", "paper", "ours"], numbers)
    verdicts = [row.verdict if not row.why or row.verdict == "within" else f"{row.verdict}: {row.why}" for row in rows]
    lines = [[*cells, verdict] for cells, verdict in zip(numbers, verdicts, strict=True)]
    return "The paper's numbers beside ours", (["", "paper", "ours", "verdict"], lines)


def _shared_reason(rows: Sequence[ComparedNumber]) -> str:
    """Why none of several numbers can be compared, where that is the same for all; else nothing."""
    reasons = {row.why if row.verdict == "not comparable" else "" for row in rows}
    return reasons.pop() if len(rows) > 1 and len(reasons) == 1 else ""


def markdown(table: TextTable) -> str:
    header, rows = table

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(header), line(["---"] * len(header)), *map(line, rows)])


def svg(figure: "Figure") -> bytes:
    """The figure as SVG, the same bytes every time."""
    import matplotlib

    content = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "patchbayes"}):
        figure.savefig(content, format="svg", metadata={"Date": None})
    return content.getvalue()


def write_summary(records: Path, docs: Path) -> list[Path]:
    """Write the page and its figures. A folder without a record is refused: the page would say that nothing was run."""
    if not any(records.glob("*.json")):
        raise PatchbayesError(
            f"{records} holds no record of an experiment, and the page would say so of all of them.\n"
            "  do       give the folder of the records by --results, or run an experiment first."
        )
    written = []
    for name, content in render(records).items():
        path = docs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
        written.append(path)
    return written


def verify_summary(records: Path, docs: Path) -> int:
    """Raise where a page's text is not what the records say, or a figure is missing; the number of the figures.

    Figures are not compared: their bytes depend on the version of matplotlib.
    """
    files = render(records)
    pages = [name for name in files if name.endswith(".md")]
    for name in pages:
        _verify_page(docs / name, files.pop(name).decode().splitlines())
    foreign = {path.name for path in (docs / "results").glob("*.md")} - {Path(name).name for name in pages}
    if foreign:
        raise PatchbayesError(f"{docs / 'results'}: {', '.join(sorted(foreign))} belong to no experiment; delete them.")
    for name in files:
        path = docs / name
        if not path.exists() or b"<svg" not in path.read_bytes():
            raise PatchbayesError(f"{path} is not a figure; write it with patchbayes reproduce --write-docs.")
    spare = {path.name for path in (docs / "figures").glob("*.svg")} - {Path(name).name for name in files}
    others = (docs.resolve().parent / "README.md", *docs.glob("*.md"))
    shown = "".join(other.read_text() for other in others if other.exists())
    spare = {name for name in spare if f"figures/{name}" not in shown}  # those of other pages are theirs
    if spare:
        raise PatchbayesError(f"{docs / 'figures'}: {', '.join(sorted(spare))} belong to no record; delete them.")
    return len(files)


def _verify_page(page: Path, wanted: Sequence[str]) -> None:
    if not page.exists():
        raise PatchbayesError(f"{page} does not exist; write it with patchbayes reproduce --write-docs.")
    present = page.read_text().splitlines()
    for number, (new, old) in enumerate(zip(wanted, present, strict=False), start=1):
        if new != old:
            raise PatchbayesError(
                f"{page}, line {number} is not what the records say.\n  page     {old}\n  records  {new}"
            )
    if len(wanted) != len(present):
        raise PatchbayesError(f"{page} has {len(present)} lines, the records give {len(wanted)}.")


def verify_readme(docs: Path) -> bool:
    """Raise where a table of README.md is not what its record says; False where `docs` is not that of a checkout."""
    checkout = docs.resolve().parent
    script = checkout / "benchmarks" / "readme_tables.py"
    if not (script.exists() and (checkout / "src" / "patchbayes_reproduce").is_dir()):
        return False
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PatchbayesError(done.stderr.strip() or f"{script} --check failed.")
    return True
