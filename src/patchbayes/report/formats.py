"""Tables as Markdown, LaTeX and CSV. Whatever a record says stands there as text: nothing of it is markup or a formula."""

import csv
import io
import re
from collections.abc import Sequence

from .groups import Comparison
from .measures import MINUS, MISSING
from .tables import Table, TableCell, TableColumn, TableRow, tables

CSV_HEADER = (
    "data",
    "split",
    "table",
    "row",
    "detail",
    "column",
    "value",
    "low",
    "high",
    "floor",
    "seeds",
    "best",
    "text",
)


def markdown(title: str, comparisons: Sequence[Comparison]) -> str:
    """All tables, in the tables of GitHub-flavored Markdown."""
    blocks = [f"# {escape_markdown(title)}"]
    for comparison in comparisons:
        for table in tables(comparison).values():
            blocks.append(f"## {escape_markdown(table.title)}")
            header = [escape_markdown(table.corner), *(_markdown_column(column) for column in table.columns)]
            lines = [header, ["---", *["---:"] * len(table.columns)]]
            lines += [[_markdown_label(row), *map(_markdown_cell, row.cells)] for row in table.rows]
            blocks.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
            blocks += [escape_markdown(note) for note in table.notes]
    return "\n\n".join(blocks) + "\n"


def _markdown_column(column: TableColumn) -> str:
    return f"{escape_markdown(column.label)} {column.arrow}".strip()


def _markdown_label(row: TableRow) -> str:
    return escape_markdown(f"{'… ' if row.derived else ''}{row.label}{f' ({row.detail})' if row.detail else ''}")


def _markdown_cell(cell: TableCell) -> str:
    text = escape_markdown(cell.text)
    return " ".join([f"**{text}**" if cell.best else text, *map(escape_markdown, cell.details)])


def escape_markdown(text: str) -> str:
    """The text on one line, with a backslash before every character that Markdown, or GitHub's dialect, would act on.

    For text within a line: what acts at the start of one (lists, underlines) is left alone.
    """
    line = re.sub(r"\s+", " ", text).strip()
    line = re.sub(r"([\\`*_{}\[\]<>|~$&#!@^])", r"\\\1", line)
    # A bare address would become a link, a word between colons a pictogram.
    return re.sub(r"(?i)\b(www)\.", r"\1\\.", re.sub(r":(?=[\w/+-])", r"\:", line))


def latex(title: str, comparisons: Sequence[Comparison]) -> str:
    r"""All tables as LaTeX tables with a caption, to be \input after \usepackage{booktabs}."""
    blocks = [rf"\section*{{{escape_latex(title)}}}"]
    for comparison in comparisons:
        blocks += [_latex_table(table) for table in tables(comparison).values()]
    return "% Needs \\usepackage{booktabs}.\n" + "\n\n".join(blocks) + "\n"


def _latex_table(table: Table) -> str:
    header = " & ".join([escape_latex(table.corner), *(_latex_column(column) for column in table.columns)])
    rows = [" & ".join([_latex_label(row), *(_latex_cell(cell) for cell in row.cells)]) + r" \\" for row in table.rows]
    caption = escape_latex(". ".join([table.title, *(note.rstrip(".") for note in table.notes)]) + ".")
    return "\n".join(
        [
            r"\begin{table}[htbp]",
            rf"\caption{{{caption}}}",
            r"\centering\small",
            rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
            r"\toprule",
            header + r" \\",
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


def _latex_column(column: TableColumn) -> str:
    arrow = {"↑": r" $\uparrow$", "↓": r" $\downarrow$", "": ""}[column.arrow]
    return escape_latex(column.label) + arrow


def _latex_label(row: TableRow) -> str:
    label = escape_latex(row.label)
    return rf"\quad {label}" if row.derived else label


def _latex_cell(cell: TableCell) -> str:
    text = escape_latex(cell.text)
    text = rf"\textbf{{{text}}}" if cell.best else text
    details = escape_latex(" ".join(cell.details))
    return rf"{text} {{\footnotesize {details}}}" if details else text


LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "_": r"\_",
    "%": r"\%",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"{\char34}",
    "`": r"\textasciigrave{}",
    "[": "{[}",  # after \\ a bracket would be read as a length
    "]": "{]}",
    "±": r"$\pm$",
    MINUS: r"$-$",
    "∞": r"$\infty$",
    MISSING: "--",
    "…": r"\ldots{}",
    **{sup: f"$^{{{digit}}}$" for digit, sup in zip("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹", strict=True)},
}


def escape_latex(text: str) -> str:
    """The text on one line, with every character that TeX would act on written as a command that prints it."""
    line = re.sub(r"\s+", " ", text).strip()
    return "".join(LATEX.get(c, c) for c in line.replace("--", "-\0-").replace("--", "-\0-")).replace("\0", "{}")


def comma_separated(comparisons: Sequence[Comparison]) -> str:
    """One line for each cell of each table, numbers in full precision and in their own unit (shares, not per cent)."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(CSV_HEADER)
    for comparison in comparisons:
        for name, table in tables(comparison).items():
            owner = ""
            for row in table.rows:
                owner = owner if row.derived else row.label
                label = f"{owner}, {row.label}" if row.derived else row.label
                for column, cell in zip(table.columns, row.cells, strict=True):
                    place = (comparison.data, comparison.split, name, label, row.detail, column.key or column.label)
                    writer.writerow([*map(plain_text, place), *_numbers(cell), plain_text(cell.text)])
    return out.getvalue()


def _numbers(cell: TableCell) -> list[object]:
    if cell.numbers is None:
        return [""] * 6
    e = cell.numbers
    return [e.value, e.low, e.high, e.floor, len(e.by_seed), "yes" if cell.best else ""]


def plain_text(text: str) -> str:
    """The text with an apostrophe before it where a spreadsheet would take it for a formula."""
    return f"'{text}" if re.match(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n]", text) else text
