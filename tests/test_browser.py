"""The report in a real browser: nothing in the console, nothing from the network, all of it visible, in light and dark.

Needs Chromium and its driver (Debian: chromium, chromium-driver) and selenium.
"""

import json
import shutil

import pytest

from simulated_records import simulate, simulate_regression, write_report

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not BROWSER or not DRIVER,
    reason="no Chromium with chromedriver on this machine (Debian: chromium, chromium-driver)",
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)
SCHEMES, WIDTHS = ("light", "dark"), (360, 1280)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A report on four methods with three seeds each, and on regression runs, with names that are hard to fit."""
    evaluations, histories = (a + b for a, b in zip(simulate(), simulate_regression(), strict=True))
    evaluations[0]["name"] = "a_run_with_a_very_long_name_" * 8
    evaluations[3]["patch_report"] = "patched " + "x" * 400
    for record in evaluations[-3:]:
        record["method"] = "a_method_with_a_very_long_name_" * 6
    (path,) = write_report(evaluations, histories, tmp_path_factory.mktemp("report") / "report.html")
    return path.as_uri()


@pytest.fixture(params=[(scheme, width) for scheme in SCHEMES for width in WIDTHS], ids=lambda p: f"{p[0]}-{p[1]}")
def opened(request, browser, address):
    """The report, opened in one color scheme at one width, everything unfolded."""
    scheme, width = request.param
    show(browser, address, scheme, width)
    browser.execute_script("for (const fold of document.querySelectorAll('details')) fold.open = true")
    return browser


def show(browser, address, scheme, width):
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    for kind in ("browser", "performance"):
        browser.get_log(kind)  # what came before
    browser.get(address)


def requests(browser):
    """The addresses that the page asked for."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


def test_nothing_is_said_in_the_console_or_asked_of_the_network(opened, address):
    assert opened.get_log("browser") == []
    asked = requests(opened)
    assert address in asked
    assert [url for url in asked if url != address and not url.startswith("data:")] == []


def test_the_checks_above_see_a_page_that_misbehaves(browser, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<script>console.error('x')</script><img src='http://127.0.0.1:9/x.png'><p style='width: 3000px'>wide"
    )
    show(browser, bad.as_uri(), "light", 360)
    assert len(browser.get_log("browser")) >= 1
    assert "http://127.0.0.1:9/x.png" in requests(browser)
    assert overflow(browser) > 0


def test_every_figure_and_picture_is_visible(opened):
    found = opened.execute_script(
        """
        return [...document.querySelectorAll('figure, figure > svg, .heat table, img')].map(element => {
            const box = element.getBoundingClientRect();
            const style = getComputedStyle(element);
            const loaded = element.tagName !== 'IMG' || (element.complete && element.naturalWidth > 0);
            return [element.tagName, box.width, box.height, style.visibility, style.opacity, loaded];
        })
        """
    )
    kinds = [name.lower() for name, *_ in found]
    # Eight panels by group, four against draws, one of coverage, one of distances, four of training; three for regression.
    assert kinds.count("svg") == 8 + 4 + 1 + 1 + 4 + 3
    assert kinds.count("table") == 8
    assert kinds.count("img") == 4 * 16
    for name, width, height, visibility, opacity, loaded in found:
        assert width >= (40 if name == "IMG" else 200), name
        assert height >= 40, name
        assert (visibility, opacity, loaded) == ("visible", "1", True)


def test_every_figure_draws_something_and_labels_do_not_leave_it(opened):
    shapes = opened.execute_script(
        """
        return [...document.querySelectorAll('svg.plot')].map(plot => {
            const frame = plot.getBoundingClientRect();
            const texts = [...plot.querySelectorAll('text')].map(text => text.getBoundingClientRect());
            const colors = [...plot.querySelectorAll('path, use')].map(shape => getComputedStyle(shape).stroke);
            return [texts.length, colors.filter(color => color.startsWith('rgb')).length,
                    Math.max(...texts.map(box => Math.max(frame.left - box.left, box.right - frame.right,
                                                          frame.top - box.top, box.bottom - frame.bottom)))];
        })
        """
    )
    for texts, drawn, outside in shapes:
        assert texts >= 5
        assert drawn >= 5
        assert outside <= 1


def test_the_page_does_not_scroll_sideways(opened):
    assert overflow(opened) == 0
    inside = opened.execute_script(
        """
        const wide = element => element.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5;
        return [...document.querySelectorAll('body *')].filter(wide).filter(e => !e.closest('.scroll') && !e.closest('pre'))
            .map(e => e.outerHTML.slice(0, 120))
        """
    )
    assert inside == []


def overflow(browser):
    return browser.execute_script("const page = document.documentElement; return page.scrollWidth - page.clientWidth")


CONTRAST = """
const parse = text => {
    const [r, g, b, a] = text.match(/[\\d.]+/g).map(Number);
    return {r, g, b, a: a === undefined ? 1 : a};
};
const over = (top, under) => ({
    r: top.r * top.a + under.r * (1 - top.a), g: top.g * top.a + under.g * (1 - top.a),
    b: top.b * top.a + under.b * (1 - top.a), a: 1});
const channel = value => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
const luminance = color => 0.2126 * channel(color.r) + 0.7152 * channel(color.g) + 0.0722 * channel(color.b);
const background = element => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.push(parse(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((under, layer) => over(layer, under), {r: 255, g: 255, b: 255, a: 1});
};
const texts = new Set();
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) if (walker.currentNode.textContent.trim()) texts.add(walker.currentNode.parentElement);
return [...texts].map(element => {
    const style = getComputedStyle(element);
    const under = background(element);
    const color = over(parse(element instanceof SVGElement ? style.fill : style.color), under);
    const [light, dark] = [luminance(color), luminance(under)].sort((a, b) => b - a);
    return [(light + 0.05) / (dark + 0.05), element.tagName, element.textContent.slice(0, 30)];
})
"""


def test_every_text_has_enough_contrast(opened):
    found = opened.execute_script(CONTRAST)
    assert len(found) > 500
    assert [entry for entry in found if entry[0] < 4.5] == []


def test_the_measure_of_contrast_is_right(browser, tmp_path):
    page = tmp_path / "gray.html"
    page.write_text("<body style='background: #fff; color: #767676'><p>a<p style='background: rgb(0 0 0 / 0.5)'>b")
    show(browser, page.as_uri(), "light", 1280)
    (_, first, second) = [0, *(ratio for ratio, *_ in browser.execute_script(CONTRAST))]
    assert first == pytest.approx(4.54, abs=0.01)
    assert second == pytest.approx(1.15, abs=0.05)


def test_light_and_dark_differ_and_figures_follow(browser, address):
    colors = {}
    for scheme in SCHEMES:
        show(browser, address, scheme, 1280)
        colors[scheme] = browser.execute_script(
            """
            const text = document.querySelector('svg.plot text');
            return [getComputedStyle(document.body).backgroundColor, getComputedStyle(text).fill,
                    getComputedStyle(document.body).color]
            """
        )
    assert colors["light"][0] != colors["dark"][0]
    for _, drawn, written in colors.values():
        assert drawn == written


def test_links_lead_to_their_sections(opened):
    missing = opened.execute_script(
        "return [...document.querySelectorAll('nav a')].filter(a => !document.querySelector(a.getAttribute('href'))).length"
    )
    assert missing == 0
