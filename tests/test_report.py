"""The written report: what is in it, that hostile records stay text in every format, and how files are written."""

import html.parser
import io
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import patchbayes
from patchbayes.errors import PatchbayesError
from patchbayes.report.drawing import DASHES, SERIES, dash, line_style, panel, svg
from simulated_records import simulate, simulate_regression, write_report

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


# ---- content


def test_every_section_is_there(full):
    headings = re.findall(r'<h3 id="c1-(\w+)">', full["html"])
    assert headings == [
        *("summary", "reliability", "confidence", "draws", "coverage", "corruption", "ood", "diversity", "examples"),
        *("training", "patched"),
    ]
    assert full["html"].count('<svg class="plot"') == 2 + 2 + 4 + 1 + 1 + 4
    assert full["html"].count('<figure class="heat">') == 4
    assert full["html"].count("<img ") == 2 * 16
    assert "patchbayes train runs/" in full["html"]
    assert "c9ec0d9" in full["html"]
    assert "patched 19 sites of CifarResNet" in full["html"]


def test_the_page_is_well_formed_accessible_and_alone(full):
    page = Page(full["html"])
    assert page.open == []
    assert {tag for tag, _ in page.tags} <= TAGS
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.tags:
        assert not {name for name in attributes if name.startswith("on")}
        assert attributes.get("src", "data:").startswith("data:image/png;base64,") or tag != "img"
        assert re.match("#|data:,$", attributes.get("href", "#"))
        if attributes.get("href", "").startswith("#"):
            assert attributes["href"][1:] in ids
        if tag == "th":
            assert attributes["scope"] in ("row", "col")
        if tag == "img":
            assert re.match(r"Example \d+: predicted \w+ with \d+ %, (which is right|true is \w+)", attributes["alt"])
        if attributes.get("class") == "plot":
            assert len(attributes["aria-label"]) > 40
            assert re.search(r"\d", attributes["aria-label"])
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))
    assert dict(page.tags)["html"] == {"lang": "en"}
    assert "http://" not in full["html"].replace("http-equiv", "")
    assert "https://" not in full["html"]
    assert "@import" not in full["html"]
    assert "url(" not in re.sub(r"url\(#[\w-]+\)", "", full["html"])


def test_the_findings_name_the_best_row_or_say_that_there_is_none(tmp_path):
    evaluations, _ = simulate(("vanilla", "ECMP(K=5)"))
    for record in evaluations:
        record["temperature"] = None
    text = " ".join(Page(report(tmp_path, evaluations)).text)
    assert re.search(r"Lowest NLL: ECMP\(K=5\)[^;]*; next: vanilla[^;]*; a significant difference", text)
    for record in evaluations[3:]:
        record["metrics"] = evaluations[record["seed"]]["metrics"]
    text = " ".join(Page(report(tmp_path, evaluations)).text)
    assert re.search(r"Lowest NLL: (vanilla|ECMP)[^;]*; next: [^;]*; no significant difference", text)


def test_a_collapsed_ensemble_is_named(tmp_path):
    evaluations, _ = simulate(("vanilla", "ECMP(K=5)"), (0, 1))
    assert "collapsed to one model for" not in report(tmp_path, evaluations)
    evaluations[3]["diversity"] |= {"disagreement": 0.0, "mutual_information": 0.0}
    assert "ECMP(K=5) collapsed to one model for 1 of 2 seeds (see Diversity)." in report(tmp_path, evaluations)


def test_regression_runs_have_their_own_sections(tmp_path):
    text = report(tmp_path, *simulate_regression())
    assert re.findall(r'<h3 id="c1-(\w+)">', text) == ["summary", "quantiles", "training"]
    for label in ("RMSE", "Log density", "CRPS", "Coverage, %", "Width"):
        assert f">{label}" in text


def test_two_data_sets_are_two_parts(tmp_path):
    (first, *_), _ = simulate(["vanilla"], [0])
    (second, *_), _ = simulate_regression([0])
    text = report(tmp_path, [first, second])
    assert re.findall(r'<h2 id="(\w+)">', text) == ["c1", "c2", "reproduce"]
    Page(text)


SECTIONS = {
    "reliability": "reliability",
    "histogram": "confidence",
    "draws_curve": "draws",
    "coverage": "coverage",
    "corruptions": "corruption",
    "ood": "ood",
    "diversity": "diversity",
    "examples": "examples",
}


@pytest.mark.parametrize("key", SECTIONS)
@pytest.mark.parametrize("gone", [None, "deleted"])
def test_a_missing_section_is_left_out(key, gone, tmp_path):
    (record,), _ = simulate(["ECMP(K=5)"], [0])
    for other in {*SECTIONS, "temperature", "patch_report"} - {key}:
        record[other] = None  # keeps this test quick
    whole = report(tmp_path, [record])
    assert f'id="c1-{SECTIONS[key]}"' in whole
    if gone is None:
        record[key] = None
    else:
        del record[key]
    text = report(tmp_path, [record])
    assert f'id="c1-{SECTIONS[key]}"' not in text
    kept = [name for name in re.findall(r'<h3 id="c1-(\w+)"', whole) if name != SECTIONS[key]]
    assert re.findall(r'<h3 id="c1-(\w+)"', text) == kept


def test_a_bare_record_gives_a_page(tmp_path):
    record = {"schema": 1, "name": "a", "task": "classification", "method": "EMP", "data": "d", "metrics": {}}
    text = report(tmp_path, [record])
    assert "No command was recorded." in text
    assert "<table" not in text
    assert "<svg" not in text


def test_examples_without_pictures_are_listed(tmp_path):
    (record,), _ = simulate(["ECMP(K=5)"], [0])
    example = {"index": 5, "true": 1.25, "predicted": 2, "confidence": None, "mutual_information": None, "png": None}
    record["examples"] = {"most_certain": [example], "least_certain": []}
    text = report(tmp_path, [record])
    assert "<img" not in text
    assert "true: 1.25" in text


def test_large_pictures_are_made_small(tmp_path):
    import base64

    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (500, 400, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, "PNG")
    (record,), _ = simulate(["ECMP(K=5)"], [0])
    for example in record["examples"]["most_certain"]:
        example["png"] = base64.b64encode(out.getvalue()).decode()
    assert len(out.getvalue()) > 500_000
    text = report(tmp_path, [record])
    assert len(text) < 1_000_000
    shown = base64.b64decode(re.search(r'src="data:image/png;base64,([^"]+)"', text)[1])
    assert Image.open(io.BytesIO(shown)).size == (77, 96)


def test_a_truncated_picture_is_refused_with_file_and_example(tmp_path):
    (record,), _ = simulate(["ECMP(K=5)"], [0])
    picture = record["examples"]["most_certain"][0]
    picture["png"] = picture["png"][:200]
    with pytest.raises(PatchbayesError, match=rf"runs/ecmp-seed0: examples: .* example {picture['index']} "):
        report(tmp_path, [record])


def test_four_methods_with_three_seeds_stay_below_a_megabyte(tmp_path):
    assert len(report(tmp_path, *simulate()).encode()) < 1_000_000


def test_a_long_history_is_thinned_and_keeps_its_end(tmp_path):
    history = [{"epoch": e, "loss": 1 / e} for e in range(1, 5001)]
    record = {"schema": 1, "name": "a", "task": "classification", "method": "EMP", "data": "d", "metrics": {}}
    text = report(tmp_path, [record], [history])
    assert "EMP ends at 0.0002" in text
    assert len(text) < 40_000


def test_more_groups_than_colors_differ_by_dash():
    assert len({(series % len(SERIES), dash(series)) for series in range(len(SERIES) * len(DASHES))}) == 24
    assert line_style(0) == "-"
    assert line_style(8) == (0, (5.0, 2.0))


def test_many_groups_make_a_page(tmp_path):
    (record,), _ = simulate(["ECMP(K=5)"], [0])
    for key in ("corruptions", "examples", "histogram", "reliability"):
        record[key] = None
    records = [record | {"method": f"ECMP(K={k})", "name": f"k{k}"} for k in range(11)]
    text = report(tmp_path, records)
    assert text.count("stroke-dasharray") >= 3
    Page(text)


# ---- figures


def test_figures_carry_the_colors_of_the_page_and_no_ids_of_others():
    made = []
    for name in ("a", "b"):
        with panel() as (figure, axes):
            axes.plot([0, 1], [0, 1], color=SERIES[2], marker="o")
            axes.set_xlabel('$x$ <b> "q" id="axes_1"')
            made.append(svg(figure, name, 'say "it" & <that>'))
    for text, name in zip(made, "ab", strict=True):
        assert "var(--series-2)" in text
        assert "currentColor" in text
        assert not re.search("#[0-9a-f]{6}", text)
        assert set(re.findall(r' id="(\w)-\d+"', text)) == {name}
        assert set(re.findall(r'(?:href="#|url\(#)(\w)-', text)) == {name}
        assert '>$x$ &lt;b&gt; "q" id="axes_1"<' in text
        assert 'aria-label="say &quot;it&quot; &amp; &lt;that&gt;"' in text
        assert "font-family" not in text
        assert "<style" not in text
    assert made[0].replace('"a-', '"b-').replace("#a-", "#b-") == made[1]


def test_the_same_records_give_the_same_bytes_whatever_the_users_style(tmp_path):
    import matplotlib

    evaluations, histories = simulate(("vanilla", "ECMP(K=5)"), (0, 1))
    first = report(tmp_path, evaluations, histories)
    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"font.size": 30, "axes.grid": False, "svg.hashsalt": None, "lines.linewidth": 9}):
        assert report(tmp_path, evaluations, histories) == first
    assert dict(matplotlib.rcParams) == before


def test_the_report_uses_no_pyplot_and_draws_no_global_random_number(tmp_path):
    records = simulate(["ECMP(K=5)"], [0])
    (tmp_path / "records.json").write_text(json.dumps(records))
    script = """
import json, random, sys
import numpy as np
evaluations, histories = json.load(open("records.json"))
random.seed(1); np.random.seed(1)
before = random.getstate(), np.random.get_state()[1].tolist()
from patchbayes.report import write_report
from patchbayes.runs.record import EvaluationRecord
evaluations = [EvaluationRecord.from_json(content, "records.json") for content in evaluations]
assert not {"matplotlib", "jinja2", "PIL"} & sys.modules.keys()
write_report(evaluations, histories, "report.csv", formats=["csv", "markdown", "latex"])
assert not {"matplotlib", "jinja2", "PIL"} & sys.modules.keys()
write_report(evaluations, histories, "report.html")
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules
assert (random.getstate(), np.random.get_state()[1].tolist()) == before
"""
    environment = os.environ | {"PYTHONPATH": str(Path(patchbayes.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


# ---- writing


def small():
    record = {"schema": 1, "name": "a", "task": "regression", "method": "EMP", "data": "d"}
    return [record | {"metrics": {"rmse": {"value": 1.0, "low": 0.9, "high": 1.2}}}]


@pytest.mark.parametrize(
    ("name", "formats", "written"),
    [
        ("report.html", ["markdown"], ["report.md"]),
        ("report", ["csv", "latex"], ["report.csv", "report.tex"]),
        ("v1.2", ["html"], ["v1.2.html"]),
        ("a.tex", ["latex", "html"], ["a.tex", "a.html"]),
    ],
)
def test_files_take_the_suffix_of_their_format(name, formats, written, tmp_path):
    paths = write_report(small(), [[]], tmp_path / name, formats=formats)
    assert [path.name for path in paths] == written
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(written)
    assert write_report(small(), [[]], str(tmp_path / name), formats=formats) == paths


def test_the_title_is_the_heading(tmp_path):
    assert "<h1>Mine &amp; yours</h1>" in report(tmp_path, small(), title="Mine & yours")
    assert "<title>Mine &amp; yours</title>" in report(tmp_path, small(), title="Mine & yours")


@pytest.mark.parametrize(
    ("evaluations", "histories", "options", "text"),
    [
        ([], [], {}, "expected at least one evaluation"),
        (small(), [], {}, "a history for each of 1 evaluations, .* got 0"),
        (small(), [[]], {"formats": ["pdf"]}, "html, markdown, latex, csv"),
        (small(), [[]], {"formats": "html"}, "a list"),
        (small(), [[]], {"formats": []}, "one or more"),
    ],
)
def test_bad_arguments_are_refused(evaluations, histories, options, text, tmp_path):
    with pytest.raises(PatchbayesError, match=text):
        write_report(evaluations, histories, tmp_path / "report.html", **options)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_said_in_a_sentence(tmp_path):
    with pytest.raises(
        PatchbayesError, match=r"no/such/report\.html cannot be written: the folder \S*no/such does not exist"
    ):
        write_report(small(), [[]], tmp_path / "no" / "such" / "report.html")
    (tmp_path / "report.html").mkdir()
    with pytest.raises(PatchbayesError, match="cannot be written"):
        write_report(small(), [[]], tmp_path / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_full_disk_leaves_the_old_report(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")

    def full_disk(self, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(PatchbayesError, match="No space left"):
        write_report(small(), [[]], path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PatchbayesError, match=r"needs matplotlib.*patchbayes\[cli\]"):
        write_report(small(), [[]], tmp_path / "report.html")
    assert write_report(small(), [[]], tmp_path / "report.html", formats=["csv"])
