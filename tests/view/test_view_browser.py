"""Tests of the page of a token dump in a real Chromium: contents, selections and the pointer, dark and light."""

import json
import math
import os

import numpy as np
import pytest
from records import record_row, write_record
from toy_runs import printed

from rljax.commands.view import main
from rljax.record.token_dumps import ColumnSource, make_dump, write_dump

pytestmark = pytest.mark.browser

EVIL = "</script><img src=x onerror=alert(1)>"
IDS = [[14, 1, 2, 3, 4], [14, 5, 6, 7], [14, 1]]
TRAINER = [[None, -1.0, -0.5, -2.0, -0.125], [None, -0.25, -1.0, None], [None, -1.0]]
ROLLOUT = [[None, -1.5, -0.5, -1.0, -0.1875], [None, -0.25, -1.125, -1.0], [None, -1.0]]


def write_page(tmp_path):
    """Returns the address of a page with the log-ratios 0.5, 0, -1, 0.0625, then 0, 0.125 and none, then 0."""
    mask = [[False, True, False, True, True], [False, True, True, True], [False, True]]
    columns = {
        "values/advantage": [[None, 1.0, None, 1.0, 1.0], [None, -1.0, -1.0, -1.0], [None, 0.0]],
        "values/version": [[None, 3, None, 3, 4], [None, 4, 4, 4], [None, 4]],
        "values/entropy": [[None, 0.75, None, 2.5, 0.02], [None, 0.75, 0.02, 0.02], [None, 0.75]],
    }
    sources = {"trainer": ColumnSource("jax", role="trainer"), "rollout": ColumnSource("vllm", role="rollout")}
    sides = {"trainer": TRAINER, "rollout": ROLLOUT}
    return address_of(tmp_path, make_dump(["long", EVIL, "short"], IDS, mask, sides, sources, columns=columns))


def address_of(tmp_path, dump):
    printed(main, [write_dump(tmp_path / "tokens.parquet", dump), "-o", tmp_path / "page.html"])
    return (tmp_path / "page.html").as_uri()


@pytest.fixture(scope="module")
def chromium():
    api = pytest.importorskip("playwright.sync_api")
    path = os.environ.get("RLJAX_CHROMIUM", "/usr/bin/chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium):
    """Yields a function that opens a page. At the end no page may have written to the console or used a network."""
    said, contexts = [], []

    def asked(request):
        if not request.url.startswith(("file:", "data:")):
            said.append(request.url)

    def open_page(address, **options):
        contexts.append(chromium.new_context(viewport={"width": 1200, "height": 900}, **options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", asked)
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.goto(address)
        page.wait_for_selector("body[data-ready]", timeout=30_000)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []


@pytest.fixture
def page(tmp_path, opened):
    return opened(write_page(tmp_path))


def card(page):
    rows = page.locator("#card table").first.locator("tr")
    return dict(row.locator("td").all_inner_texts() for row in rows.all())


def token(page, place):
    return page.locator("#tokens span").nth(place)


def kept(page):
    return page.inner_text("#kept").split(" response")[0]


def classes(page):
    return [span.get_attribute("class") for span in page.locator("#tokens span").all()]


def names(page):
    rows = [row for row in page.locator("#sequences tbody tr").all() if row.is_visible()]
    return [row.locator("td").first.inner_text() for row in rows]


def test_colours_tell_sign_and_size_and_a_card_has_the_numbers(page):
    assert page.inner_text("#tokens") == "141234"
    # The 99th percentile of the sizes is below 1, so the steps are 0.01, 0.03, 0.1, 0.3, 1.
    assert classes(page) == ["prompt", "p4", "environment", "n5", "p2"]
    steps = ["0.01", "0.03", "0.1", "0.3", "1"]
    below, above = [f"≤ −{step}" for step in reversed(steps)], [f"≥ {step}" for step in steps]
    assert page.locator("#steps i").all_inner_texts() == [*below, "within ±0.01", *above]
    page.select_option("#scale", label="up to 10")
    assert token(page, 1).get_attribute("class") == "p2"
    token(page, 3).hover()
    assert card(page) == {
        **{"token id": "3", "position": "2 in the response", "advantage": "1", "turn": "2", "version": "3"},
        **{"after the environment": "1 tokens"},
        **{"trainer log-probability": "-2 (p 0.135)", "rollout log-probability": "-1 (p 0.368)"},
        **{"log-ratio": f"-1 (ratio {math.exp(-1):.4f})", "entropy": "2.5"},
    }
    token(page, 0).hover()
    assert card(page)["position"] == "not sampled by the policy"
    token(page, 2).hover()
    assert card(page)["position"] == "written by the environment"
    assert "turn" not in card(page)
    page.mouse.move(5, 5)
    assert page.is_hidden("#card")
    token(page, 3).click()  # the keyboard walks
    page.focus("#tokens")
    page.keyboard.press("ArrowRight")
    assert card(page)["token id"] == "4"
    assert card(page)["log-ratio"] == "0.0625 (ratio 1.064)"
    page.keyboard.press("Escape")
    assert page.is_hidden("#card")
    page.set_viewport_size({"width": 390, "height": 800})  # a telephone
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


FILTERS = [
    ({}, "6 of 7", ["long", EVIL, "short"]),
    ({"#size-low": "0.5"}, "2 of 7", ["long"]),
    ({"#value-low": "0.1", "#value-high": "0.5"}, "1 of 7", [EVIL]),
    ({"#position-low": "2", "#position-high": "3"}, "2 of 7", ["long", EVIL]),
    ({"#entropy-low": "0.5", "#entropy-high": "1"}, "3 of 7", ["long", EVIL, "short"]),
    ({"#turn-low": "2"}, "2 of 7", ["long"]),
    ({"#turn-high": "2"}, "4 of 7", ["long", EVIL, "short"]),
    ({"#after-low": "1", "#after-high": "2"}, "1 of 7", ["long"]),
    ({"#version": "4"}, "4 of 7", ["long", EVIL, "short"]),
    ({"#advantage": "-1"}, "2 of 7", [EVIL]),
    ({"#advantage": "1", "#version": "4"}, "1 of 7", ["long"]),
]


def test_a_filter_leaves_what_it_should(page):
    for filters, left, sequences in FILTERS:
        for name, value in filters.items():
            page.select_option(name, value) if name in ("#version", "#advantage") else page.fill(name, value)
        assert (kept(page), names(page)) == (left, sequences), filters
        page.click("button[type=reset]")
        page.wait_for_selector("#kept:has-text('6 of 7')")
    page.click("#extreme")
    assert page.input_value("#size-low") == "0.5"
    assert ["off" in (each or "") for each in classes(page)] == [False, False, False, False, True]  # these tokens fade
    rows = [row.locator("td").all_inner_texts() for row in page.locator("#worst tbody tr").all()]
    assert rows == [["long", "2", "3", "-1", "-2", "-1"], ["long", "1", "1", "0.5", "-1", "-1.5"]]
    page.locator("#worst tbody tr").nth(1).click()
    assert card(page)["token id"] == "1"


def test_brushing_a_chart_or_a_click_on_a_bar_selects_tokens(page):
    def bars_of(chart):
        bars = page.locator(f"section[data-chart={chart}] svg g")
        return bars, [bar.locator("title").text_content() for bar in bars.all()]

    bars, titles = bars_of("value")
    assert titles[0] == "-1 to -0.3: 1 tokens, 1 selected on this page"
    assert titles[-1] == "0.3 to 1: 1 tokens, 1 selected on this page"
    last = bars.last.bounding_box()
    page.mouse.move(last["x"] + last["width"] / 2, last["y"] + 30)
    page.mouse.down()
    page.mouse.move(last["x"] - last["width"] / 2, last["y"] + 30)
    page.mouse.up()
    assert [page.input_value(f"#value-{end}") for end in ("low", "high")] == ["0.1", "1"]
    assert kept(page) == "2 of 7"
    page.locator("section[data-chart=value] svg").click(position={"x": 100, "y": 30})
    assert kept(page) == "6 of 7"
    charts = [chart.get_attribute("data-chart") for chart in page.locator("#charts section").all()]
    assert charts == ["value", "position", "turn", "after", "entropy"]
    bars, titles = bars_of("turn")
    assert [title.partition(" tokens")[0] for title in titles] == ["below 2: 4", "2 to 3: 2"]
    bars.last.click()
    assert [page.input_value(f"#turn-{end}") for end in ("low", "high")] == ["2", "3"]
    assert kept(page) == "2 of 7"


def test_sequences_are_sorted_and_chosen(page):
    assert names(page) == ["long", EVIL, "short"]
    page.select_option("#sort", "kept")
    assert names(page) == ["long", EVIL, "short"]
    page.locator("#sequences tbody tr").nth(1).click()
    assert (page.inner_text("#name"), page.inner_text("#tokens")) == (EVIL, "14567")
    assert token(page, 3).get_attribute("class") == "lost"
    token(page, 3).hover()
    assert card(page)["trainer log-probability"] == "none"


def test_numbers_that_are_not_finite_are_never_selected(tmp_path, opened):
    """The dump has one turn, so the page has no filters of turns."""
    columns = {"trainer": [[-np.inf, -1e30, -0.5]], "rollout": [[-1.0, -1.0, -1.0]]}
    page = opened(address_of(tmp_path, make_dump(["a"], [[1, 2, 3]], [[True] * 3], columns)))
    assert kept(page) == "1 of 3"
    assert classes(page) == ["lost", "lost", "p4"]
    assert "2 response tokens have no finite log-probability" in page.inner_text("#about")
    token(page, 0).hover()
    assert card(page)["trainer log-probability"] == "-Infinity (p 0)"
    assert page.locator("section[data-chart=turn]").count() == 0
    assert page.is_hidden("#of-turn")
    assert page.is_hidden("#of-after")


def test_dark_and_light_follow_the_system_and_taps_open_a_card(tmp_path, opened):
    address, grounds = write_page(tmp_path), []
    read = "(element) => [getComputedStyle(element).color, getComputedStyle(element).backgroundColor]"
    for scheme in ("light", "dark"):
        page = opened(address, color_scheme=scheme, has_touch=True)
        ink, paper = page.locator("body").evaluate(read)
        grounds.append(paper)
        assert min(contrast(*token(page, place).evaluate(read)) for place in (1, 3, 4)) >= 4.5
        assert contrast(ink, paper) >= 7
    assert grounds == ["rgb(255, 255, 255)", "rgb(20, 23, 27)"]
    for place, said in ((1, "0.5 (ratio 1.649)"), (3, f"-1 (ratio {math.exp(-1):.4f})")):
        token(page, place).tap()
        assert card(page)["log-ratio"] == said
    token(page, 3).tap()
    assert page.is_hidden("#card")


def contrast(*colours):
    """Returns the ratio of the luminances of two colours, as WCAG defines it."""

    def luminance(colour):
        parts = [int(part) / 255 for part in colour.split("(")[1].rstrip(")").split(",")[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted(map(luminance, colours))
    return (high + 0.05) / (low + 0.05)


def test_a_run_shows_texts_curves_dumps_and_likeliest_tokens(tmp_path, opened):
    run = write_record(tmp_path / "run", [record_row(step, surge=3, period=5) for step in range(1, 13)])
    (run / "config.yaml").write_text(json.dumps({"model": {"path": "toy-base"}, "run": {"dir": str(run)}}))
    ids, nothing = np.asarray([[-1, -1], [11, 3]], np.int32), [-np.inf, -np.inf]
    sides = [np.asarray([nothing, logprobs], np.float32) for logprobs in ([-0.25, -1.5], [-0.125, -2.5])]
    tops = {"top_ids": [ids], "top_logprobs": [sides[0]]}
    tops |= {"top_ids/trainer": [ids], "top_logprobs/trainer": [sides[1]]}
    for step, gap in ((1, 0.5), (2, 0.25)):
        columns = {"trainer": [[None, gap - 1.5]], "rollout": [[None, -1.5]]}
        dump = make_dump(["a"], [[11, 3]], [[False, True]], columns, columns=tops)
        write_dump(run / f"rollouts/step_{step:06d}.parquet", dump)
    printed(main, [run])
    page = opened((run / "report.html").as_uri())
    assert "surge at 3, period 5" in page.locator("#curves svg text").all_text_contents()
    assert page.locator("#curves").evaluate("(element) => element.getBoundingClientRect().height") > 300
    token(page, 1).hover()
    assert card(page)["log-ratio"].startswith("0.25 ")
    assert card(page)["weight"] == "1"
    assert page.inner_text("#tokens") == "=3"
    assert card(page)["rank for the rollout"] == card(page)["rank for the trainer"] == "2"
    texts = page.locator("#card p").all_inner_texts()
    tables = [table.locator("td").all_inner_texts() for table in page.locator("#card table").all()[1:]]
    assert dict(zip(texts, tables, strict=True)) == {
        "likeliest for the rollout": ["=", "-0.25", "p 0.779", "3", "-1.5", "p 0.223"],
        "likeliest for the trainer": ["=", "-0.125", "p 0.882", "3", "-2.5", "p 0.0821"],
    }
    page.select_option("#dumps", label="step_000001.parquet")
    page.wait_for_selector("body[data-ready='step_000001.parquet']")
    token(page, 1).hover()
    assert card(page)["log-ratio"].startswith("0.5 ")
