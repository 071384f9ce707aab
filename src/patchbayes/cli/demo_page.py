"""The demo's page: what was found, the two tables, pictures of calibration. One file without script or network."""

from collections.abc import Mapping
from html import escape
from importlib import resources
from typing import Any

from .demo_table import COLUMNS, LEGEND, OWN, Row, best_of, remarks
from .reliability import reliability_picture

_SHOWN = ("original", "temperature scaling", OWN[2])


def demo_page(sentence: str, tables: Mapping[str, Mapping[str, Row]], record: Mapping[str, Any]) -> str:
    """The HTML text. tables: title -> rows by name."""
    style = resources.files("patchbayes.report").joinpath("page.css").read_text("utf-8")
    parts = []
    for number, (title, rows) in enumerate(tables.items()):
        pictures = "".join(reliability_picture({name: rows[name]}) for name in _SHOWN)
        parts.append(
            f'<section class="part" aria-labelledby="t{number}"><h2 id="t{number}">{escape(title.capitalize())}</h2>\n'
            f'{_table(title, rows)}\n<p class="note">{escape(" ".join(remarks(rows)))}</p>\n'
            f'<figure><div class="pictures">{pictures}</div><figcaption>Bars on the line: the network is right as '
            "often as it says. Stronger bars hold more images.</figcaption></figure></section>"
        )
    facts = (
        f"Record: commit {record['commit']}, seeds {', '.join(str(seed) for seed in record['seed_numbers'])}, "
        f"command <code>{escape(record['command'])}</code>."
    )
    lead = escape(sentence.replace("->", "→")).replace(" %", "&nbsp;%")
    legend = " ".join(escape(line) for line in (*LEGEND, "Bold: best of its column."))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<link rel="icon" href="data:,">\n<title>patchbayes demo</title>\n'
        f"<style>\n{style}\nfigure svg {{ max-width: 100%; height: auto; }}\n"
        ".pictures { display: flex; flex-wrap: wrap; gap: 0.5rem; }\n"
        "figure { max-width: none; margin-top: 1.2rem; }\n</style>\n</head>\n<body>\n"
        f'<header><h1>An overconfident network, and what can be done</h1>\n<p class="lead">{lead}</p></header>\n'
        f"<main>\n{chr(10).join(parts)}\n"
        f"<section class='part'>\n<p class='note'>{legend}</p>\n<p class='note'>{facts}</p>\n</section>\n"
        "</main>\n</body>\n</html>\n"
    )


def _table(title: str, rows: Mapping[str, Row]) -> str:
    best = {column.key: best_of(rows, column) for column in COLUMNS}
    arrows = {True: "↑", False: "↓"}
    head = "".join(f'<th scope="col">{c.heading}, {c.images}&nbsp;{arrows[c.more]}</th>' for c in COLUMNS)
    lines = []
    for name, row in rows.items():
        cells = [
            f'<td class="best"><b>{column.text(row)}</b><span class="hidden">, best</span></td>'
            if name in best[column.key]
            else f"<td>{column.text(row)}</td>"
            for column in COLUMNS
        ]
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{"".join(cells)}<td>{row["passes"]:.0f}</td></tr>')
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(title)}"><table><caption>Scores on '
        f'clean and corrupted test images, and on unfamiliar inputs</caption><thead><tr><th scope="col"></th>{head}'
        f'<th scope="col">passes</th></tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )
