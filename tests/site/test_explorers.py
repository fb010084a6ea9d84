"""The explorers of the built book: they move by keyboard with no kernel, their numbers are Python's, and they print."""

import json
import re
import statistics
from collections.abc import Iterator

import pytest
import torch
from built_book import BUILT, CHAPTER, PREFACE, Site, Visit, settle, visiting

from gptlite.arithmetic import ModelShape, decode_costs, total
from gptlite.config import preset
from gptlite.sampling import SamplingParams, probabilities

PAGES = sorted(
    str(path.relative_to(BUILT))
    for path in BUILT.rglob("*.html")
    if '<figure class="gptlite-explorer"' in path.read_text(encoding="utf-8")
)


def open_explorer(visit: Visit, site: Site, name: str, which: str = "figure.gptlite-explorer"):
    """Returns: the explorer of a page, drawn."""
    visit.page.goto(site.url(name))
    settle(visit.page)
    return visit.page.locator(which).first


@pytest.fixture(scope="module", params=PAGES)
def opened(request, site: Site, browser) -> Iterator[Visit]:
    """A page with explorers, drawn, which tests share and move: loading it takes longer than most of them."""
    with visiting(site, browser) as visit:
        open_explorer(visit, site, request.param)
        yield visit


def words(explorer) -> list[str]:
    """Returns: the texts that the chart shows."""
    explorer.page.wait_for_timeout(50)
    return explorer.locator(".gptlite-chart svg text").all_text_contents()


def test_there_are_explorers() -> None:
    assert {CHAPTER, PREFACE} <= set(PAGES)


def test_every_slider_has_a_label_and_moves_its_chart_by_keyboard(opened: Visit) -> None:
    page = opened.page
    sliders = page.locator('.gptlite-explorer .gptlite-controls input[type="range"]')
    assert sliders.count() > 0
    for i in range(sliders.count()):
        slider = sliders.nth(i)
        explorer = slider.locator("xpath=ancestor::figure")
        assert slider.evaluate("input => input.labels.length && input.labels[0].textContent.trim()")
        slider.focus()
        assert slider.evaluate("input => input === document.activeElement")
        drawn = set()  # by each key, since a slider at its end moves one way only
        for key in ("ArrowLeft", "ArrowLeft", "ArrowRight", "ArrowRight", "ArrowRight", "PageDown"):
            page.keyboard.press(key)
            page.wait_for_timeout(50)
            drawn.add(explorer.locator(".gptlite-chart").inner_html())
        assert len(drawn) > 1, f"slider {i} does not move the chart"
    assert not opened.complaints
    assert not opened.elsewhere


def test_every_choice_of_a_menu_draws_its_chart(opened: Visit) -> None:
    odd = opened.page.evaluate(
        """async () => {
            const odd = [];
            for (const figure of document.querySelectorAll("figure.gptlite-explorer")) {
                for (const menu of figure.querySelectorAll(".gptlite-controls select")) {
                    for (let i = 0; i < menu.options.length; i++) {
                        menu.selectedIndex = i;
                        menu.dispatchEvent(new Event("change", { bubbles: true }));
                        await figure.view.runAsync();
                        for (const text of figure.querySelectorAll(".gptlite-chart svg text"))
                            if (/NaN|undefined/.test(text.textContent)) odd.push(text.textContent);
                    }
                }
            }
            return odd;
        }"""
    )
    assert not odd
    assert not [complaint for complaint in opened.complaints if not complaint.startswith("warning")]


@pytest.mark.alone
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_moved_slider_is_answered_in_a_tenth_of_a_second(theme: str, opened: Visit) -> None:
    opened.page.emulate_media(color_scheme=theme)
    opened.page.wait_for_function("theme => document.documentElement.dataset.theme === theme", arg=theme)
    of_each_slider = opened.page.locator("figure.gptlite-explorer").evaluate_all(
        """async (figures) => {
            const all = [];
            for (const figure of figures) {
                for (const slider of figure.querySelectorAll('.gptlite-controls input[type="range"]')) {
                    const times = [];
                    slider.value = slider.max; // from where it can move
                    for (let i = 0; i < 5; i++) {
                        const start = performance.now();
                        slider.value = Number(slider.value) - Number(slider.step);
                        slider.dispatchEvent(new Event("input", { bubbles: true }));
                        await figure.view.runAsync();
                        times.push(performance.now() - start);
                    }
                    all.push(times);
                }
            }
            return all;
        }"""
    )
    assert of_each_slider
    for milliseconds in of_each_slider:
        assert statistics.median(milliseconds) < 100


def test_a_chart_follows_its_column(site: Site, visit: Visit) -> None:
    explorer = open_explorer(visit, site, CHAPTER)
    fits = """figure => {
        const chart = figure.querySelector(".gptlite-chart"), box = chart.querySelector("svg").viewBox.baseVal;
        return Math.abs(box.width - chart.clientWidth) < 1.5;
    }"""
    handle = explorer.element_handle()
    for width in (390, 1280, 1000, 1440):
        visit.page.set_viewport_size({"width": width, "height": 900})
        visit.page.wait_for_function(fits, arg=handle)
    explorer.evaluate("figure => { figure.style.width = '400px' }")  # with no change of the window
    visit.page.wait_for_function(fits, arg=handle)
    assert explorer.locator(".gptlite-chart").evaluate("chart => chart.clientWidth") < 400


def test_the_distribution_is_the_packages_own(site: Site, visit: Visit) -> None:
    explorer = open_explorer(visit, site, CHAPTER, 'figure[id^="explorer-next-character"]')
    spec = json.loads(explorer.locator('script[type="application/json"]').first.text_content())
    rows = [
        row
        for values in rows_of(spec)
        for row in values
        if isinstance(row, dict) and row.get("prompt") == 0 and "logit" in row
    ]
    logits = torch.tensor([row["logit"] for row in sorted(rows, key=lambda row: row["token"])])

    def shown() -> list[str]:
        values = [text for text in words(explorer) if re.fullmatch(r"\d+\.\d%", text)]
        return sorted(values, key=lambda text: -float(text.rstrip("%")))

    def expected(**settings: float) -> list[str]:
        best = probabilities(logits[None], SamplingParams(**settings))[0].sort(descending=True).values
        return [f"{value:.1%}" for value in best[: len(shown())].tolist()]

    assert len(shown()) > 5
    assert shown() == expected()
    settings = {}
    for label, key, presses, setting in (
        ("Temperature", "ArrowLeft", 8, {"temperature": 0.6}),
        ("Top-k", "Home", 1, {"top_k": 1}),
        ("Top-k", "ArrowRight", 9, {"top_k": 10}),
        ("Top-p", "ArrowLeft", 20, {"top_p": 0.8}),
        ("Temperature", "Home", 1, {"temperature": 0.0}),
    ):
        explorer.locator(".gptlite-controls").get_by_label(label).focus()
        for _ in range(presses):
            visit.page.keyboard.press(key)
        settings |= setting
        assert shown() == expected(**settings), settings


def rows_of(spec: object) -> list[list[dict]]:
    """Returns: every list of rows in a Vega-Lite specification."""
    if isinstance(spec, dict):
        own = [spec["values"]] if isinstance(spec.get("values"), list) else []
        own += list(spec.get("datasets", {}).values())
        return own + [rows for value in spec.values() for rows in rows_of(value)]
    return [rows for value in spec for rows in rows_of(value)] if isinstance(spec, list) else []


def test_the_work_per_byte_is_the_packages_own(site: Site, visit: Visit) -> None:
    explorer = open_explorer(visit, site, PREFACE)

    def shown() -> str:
        return next(match[1] for text in words(explorer) if (match := re.match(r"([\d.]+) FLOP per byte", text)))

    def expected(batch: int, context: int) -> str:
        return f"{total(decode_costs(ModelShape.of(preset('7b')), batch, context)).intensity:.1f}"

    assert shown() == expected(8, 1024)
    explorer.locator(".gptlite-controls").get_by_label("Batch").focus()
    visit.page.keyboard.press("End")
    assert shown() == expected(256, 1024)
    explorer.locator(".gptlite-controls").get_by_label("Context").focus()
    visit.page.keyboard.press("ArrowRight")
    assert shown() == expected(256, 1152)


def test_a_printed_page_has_a_picture(opened: Visit) -> None:
    explorer = opened.page.locator("figure.gptlite-explorer").first
    still = explorer.locator(".gptlite-still")
    assert not still.is_visible()
    opened.page.emulate_media(media="print")
    assert still.is_visible()
    assert not explorer.locator(".gptlite-chart").is_visible()
    opened.page.emulate_media(media="screen")
    assert still.locator("svg title").count() == 1
    assert still.locator("svg desc").count() == 1


@pytest.mark.parametrize("name", PAGES)
def test_a_reader_without_scripts_has_a_picture(name: str, site: Site, browser) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(site.url(name))
    assert page.locator(".gptlite-still svg").first.is_visible()
    context.close()
