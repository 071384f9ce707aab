"""Markdown, LaTeX and CSV beside the page: numbers that read back, and hostile records that stay text."""

import csv
import html.parser
import io
import math
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patchbayes.errors import PatchbayesError
from patchbayes.report.formats import escape_latex, escape_markdown, plain_text
from simulated_records import mutated, one_run, simulate, write_report

ALL = ("html", "markdown", "latex", "csv")
HOSTILE = [
    "<script>alert(1)</script>",
    "</style><img src=x onerror=alert(1)>",
    "{{ 7 * 7 }}{% raw %}",
    "a|b`c`*d*_e_[f](http://g)~h~",
    r"\input{/etc/passwd} 100% $x_1$ #1 & {~^} \\",
    "=HYPERLINK(\"http://x\",'y')",
    "+1-1",
    "@SUM(A1)",
    "-2",
    "\t=1",
    "line\nbreak\rand \x00 \x1b[31m \u202e \ud800",
    "&lt;b&gt; \"quoted\" 'single'",
    "naïve 模型 🙂",
    "]]> --> <!-- x",
]
# Elements and attributes that the template itself uses.
TAGS = set(
    """html head meta link title style body header h1 h2 h3 h4 p nav a main section ul li div table caption thead tbody tr th
    td span small b figure figcaption svg defs g path use text line clippath rect details summary pre dl dt dd img""".split()  # noqa: SIM905
)
TEX = set(
    """section begin end caption centering small toprule midrule bottomrule quad footnotesize textbf textbackslash textless
    textgreater textbar textasciitilde textasciicircum textasciigrave char ldots pm infty uparrow downarrow""".split()  # noqa: SIM905
)


class Page(html.parser.HTMLParser):
    """Tags with their attributes, and the text between them."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.text, self.open = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def report(tmp_path, evaluations, histories=None, **options):
    (path,) = write_report(evaluations, histories or [[] for _ in evaluations], tmp_path / "report.html", **options)
    return path.read_text("utf-8")


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """The report on two methods with two seeds each, as text, one for each format."""
    folder = tmp_path_factory.mktemp("report")
    paths = write_report(*simulate(("vanilla", "ECMP(K=5)"), (0, 1)), folder / "report.html", formats=ALL)
    assert [path.name for path in paths] == ["report.html", "report.md", "report.tex", "report.csv"]
    return {path.suffix[1:]: path.read_text("utf-8") for path in paths}


# ---- the tables


def test_markdown_tables_read_back_with_the_numbers(full):
    records, _ = simulate(["vanilla"], [0, 1])
    lines = full["md"].splitlines()
    assert lines[0] == "# How far to trust these networks"
    header = next(line for line in lines if line.startswith("| Method | Accuracy, % ↑ | NLL ↓ |"))
    row = lines[lines.index(header) + 2]
    accuracy = np.mean([record["metrics"]["accuracy"]["value"] for record in records])
    assert row.startswith(f"| vanilla (2 seeds, S = 1) | {100 * accuracy:.1f} ± ")
    assert row.count("|") == header.count("|")
    assert re.search(r"floor \d", row)
    assert "**" in full["md"]


def test_latex_tables_are_balanced(full):
    text = full["tex"]
    assert text.startswith("% Needs \\usepackage{booktabs}.\n")
    assert text.count(r"\begin{table}") == text.count(r"\end{table}") == 6
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    counts = {len(re.findall(r"(?<!\\)&", row)) for row in rows}
    assert counts <= {2, 4, 5, 6}
    assert text.count("{") == text.count("}")  # nothing in these records is an escaped brace
    assert r"\textbf{" in text


def test_csv_has_full_precision_and_plain_names(full):
    rows = list(csv.DictReader(io.StringIO(full["csv"], newline="")))
    assert {row["table"] for row in rows} == {"summary", "cost", "ood", "corruption", "corruptions", "diversity"}
    records, _ = simulate(["vanilla"], [0, 1])
    row = next(r for r in rows if (r["table"], r["row"], r["column"]) == ("summary", "vanilla", "nll"))
    assert float(row["value"]) == np.mean([record["metrics"]["nll"]["value"] for record in records])
    assert row["seeds"] == "2"
    assert float(row["low"]) < float(row["value"]) < float(row["high"])
    assert {r["row"] for r in rows if r["table"] == "summary"} >= {"vanilla", "ECMP(K=5)"}
    assert any(r["best"] == "yes" for r in rows)
    assert all(0 <= float(r["value"]) <= 1 for r in rows if r["column"] == "ece")


# ---- hostile records


def hostile_records(text):
    """Two runs in which every text is hostile."""

    def poison(value):
        if isinstance(value, dict):
            return {key: poison(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [poison(inner) for inner in value]
        return text if isinstance(value, str) else value

    records, _ = simulate(("vanilla", "ECMP(K=5)"), [0])
    poisoned = []
    for record in records:
        new = poison(record) | {"task": record["task"], "folder": f"runs/{text}"}
        new |= {"histogram": None, "draws_curve": None, "coverage": None}  # figures take time
        for certain in ("most_certain", "least_certain"):
            for example, original in zip(new["examples"][certain], record["examples"][certain], strict=True):
                example["png"] = original["png"]
        new["metrics"][text] = new["metrics"]["nll"]
        new["machine"][text] = text
        poisoned.append(new)
    return poisoned, [[], []]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_stay_texts_in_every_format(text, tmp_path):
    paths = write_report(*hostile_records(text), tmp_path / "report.html", title=text, formats=ALL)
    page_text, markdown, latex, table = (path.read_text("utf-8") for path in paths)

    page = Page(page_text)
    assert {tag for tag, _ in page.tags} <= TAGS
    assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)
    visible = "".join(c if c in "\n\t" or (ord(c) > 31 and c not in "\ud800\u202e") else "\ufffd" for c in text)
    assert visible.split() in [chunk.split() for chunk in page.text]

    assert set(re.findall(r"\\([a-zA-Z]+)", latex.partition("\n")[2])) <= TEX
    assert latex.count("\n\\begin{tabular}") == 6

    for row in csv.reader(io.StringIO(table, newline="")):
        assert len(row) == 13
        for cell in row:
            assert not re.match(r"\s*[=+@]", cell)
            assert not re.match(r"\s*-", cell) or math.isfinite(float(cell))

    for line in markdown.splitlines():
        assert not line.startswith("|") or len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) >= 3


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_are_shown_as_they_are_by_a_markdown_reader(text, tmp_path):
    reader = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable(["table", "strikethrough"])
    (path,) = write_report(*hostile_records(text), tmp_path / "report.md", title=text, formats=["markdown"])
    rendered = reader.render(path.read_text("utf-8"))
    tags = set(re.findall(r"</?([a-z0-9]+)", rendered))
    assert tags <= {"h1", "h2", "p", "table", "thead", "tbody", "tr", "th", "td", "strong"}
    rows = [re.findall(r"<t[hd]", row) for row in re.findall(r"<tr>.*?</tr>", rendered, re.DOTALL)]
    assert {len(row) for row in rows} <= {3, 5, 6, 7, 8}
    visible = re.sub(r"\s+", " ", "".join(c if ord(c) > 31 or c in "\n\t" else "\ufffd" for c in text)).strip()
    visible = visible.replace("\u202e", "\ufffd").replace("\ud800", "\ufffd")
    assert f"<h1>{visible}</h1>" in html.unescape(rendered)


# A character that prints itself, or a command that prints a character.
TEX_TEXT = re.compile(
    r"(?:[^\\{}$&#_%~^<>|\"`\[\]\n]|\\[{}$&#_%]|\\(?:text[a-z]+|ldots)\{\}|\{\\char34\}|\{[\[\]]\}|\{\}"
    r"|\$(?:\\pm|-|\\infty|\^\{[-0-9]\})\$)*"
)


@given(st.text())
def test_escaped_latex_has_nothing_that_tex_acts_on(text):
    assert TEX_TEXT.fullmatch(escape_latex(text))


@given(st.text(alphabet="-"))
def test_hyphens_stay_hyphens_in_latex(text):
    assert "--" not in escape_latex(text)
    assert escape_latex(text).replace("{}", "") == text


def test_escapes_are_what_they_should_be():
    assert escape_latex(r"\input{x}_%") == r"\textbackslash{}input\{x\}\_\%"
    assert escape_markdown("a|b <i> _x_ www.x.org http://x 5:6 a: b") == (
        r"a\|b \<i\> \_x\_ www\.x.org http\://x 5\:6 a: b"
    )
    assert plain_text("=1") == "'=1"
    assert plain_text(" \uff1d1") == "' \uff1d1"
    assert plain_text("a=1") == "a=1"


@given(st.text())
def test_markdown_text_reads_back_as_it_was(text):
    reader = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable(["table", "strikethrough"])
    clean = re.sub(r"\s+", " ", text.replace("\0", "")).strip()
    assert html.unescape(reader.renderInline(escape_markdown(clean))) == clean.replace("\ud800", "")


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_record_gives_a_page_or_a_clear_refusal(data, tmp_path_factory):
    record, history = one_run()
    record["corruptions"] = {key: rows[:2] if isinstance(rows, list) and len(rows) > 5 else rows
                             for key, rows in record["corruptions"].items()}  # fmt: skip
    record["examples"]["least_certain"] = []
    folder = tmp_path_factory.mktemp("any")
    refusal = None
    try:
        write_report([mutated(data, record)], [history], folder / "report.html", formats=ALL)
    except PatchbayesError as error:
        refusal = str(error)
    assert refusal is None or re.match(r"(report: )?(\S+evaluation\.json|\S+metrics\.jsonl|record 1|runs/)", refusal)
    assert len(list(folder.iterdir())) == (4 if refusal is None else 0)
