"""docs/results.md: what the records say, experiment by experiment, rendered from them and nothing else."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PatchbayesError
from ..files import write_atomically
from .experiment import SCALES, Experiment, Row, Table, as_text, read_record
from .registry import experiment, names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OPENING = """# Results

Every table and figure of the paper beside what this code measures. All numbers come from the records in `results/reproduce`;
`patchbayes reproduce --verify` renders this page again from them and compares. A verdict is *within* where our number lies
within the stated tolerance of the paper's, *outside* where it does not, and *not comparable* where scale, data or protocol
differ, with the reason.
"""


def render(records: Path) -> dict[str, bytes]:
    """The files of the page: results.md and figures/*.svg."""
    lines = [_OPENING]
    files: dict[str, bytes] = {}
    for name in names():
        found = experiment(name)
        lines.append(f"## {found.title} ({', '.join(found.items)})\n")
        record = _largest(records, name)
        if record is None:
            lines.append(f"Not run yet: `patchbayes reproduce {name}`.\n")
            continue
        lines += _section(found, record)
        for title, figure in found.figures(record["result"]).items():
            files[f"figures/{title}.svg"] = svg(figure)
            lines.append(f"![{title.replace('_', ' ')}](figures/{title}.svg)\n")
    files["results.md"] = ("\n".join(lines).rstrip() + "\n").encode()
    return files


def _largest(records: Path, name: str) -> dict[str, Any] | None:
    """The record of the largest scale that was run; smoke runs are tests, not results."""
    for scale in reversed(SCALES[1:]):
        record = read_record(records, name, scale)
        if record is not None:
            return record
    return None


def _section(found: Experiment, record: dict[str, Any]) -> list[str]:
    machine = record["machine"]
    lines = [
        f"`patchbayes reproduce {found.name} --scale {record['scale']}`, {record['date'][:10]}, commit {record['commit']}, "
        f"{machine['processor']}, {machine['threads']} threads, {as_text(record['seconds'], 3)} s.\n"
    ]
    rows = found.rows(record["result"])
    if rows:
        lines += [markdown(comparison(rows)), ""]
    for title, table in found.tables(record["result"]).items():
        lines += [f"**{title}**\n", markdown(table), ""]
    return lines


def comparison(rows: Sequence[Row]) -> Table:
    """paper / ours / verdict."""
    header = ["", "paper", "ours", "verdict"]
    cells = []
    for row in rows:
        verdict = row.verdict if not row.why or row.verdict == "within" else f"{row.verdict}: {row.why}"
        cells.append([row.what, as_text(row.paper, 10), as_text(row.ours), verdict])
    return header, cells


def markdown(table: Table) -> str:
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
    """Write the page and its figures."""
    written = []
    for name, content in render(records).items():
        path = docs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
        written.append(path)
    return written


def verify_summary(records: Path, docs: Path) -> None:
    """Raise where the page's text is not what the records say."""
    page = docs / "results.md"
    if not page.exists():
        raise PatchbayesError(f"{page} does not exist; write it with patchbayes reproduce --write-docs.")
    wanted, present = render(records)["results.md"].decode().splitlines(), page.read_text().splitlines()
    for number, (new, old) in enumerate(zip(wanted, present, strict=False), start=1):
        if new != old:
            raise PatchbayesError(
                f"{page}, line {number} is not what the records say.\n  page     {old}\n  records  {new}"
            )
    if len(wanted) != len(present):
        raise PatchbayesError(f"{page} has {len(present)} lines, the records give {len(wanted)}.")
