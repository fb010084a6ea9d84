"""Every page of the built book: no faults, nothing from elsewhere, small, accessible, readable on a phone."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from built_book import BUILT, CHAPTER, PREFACE, Site, Visit, settle

EVERY = sorted(str(path.relative_to(BUILT)) for path in BUILT.rglob("*.html") if "_static" not in path.parts)
PAGES = [name for name in EVERY if name != "index.html"]  # that one only leads to the first page
FIRST_LOAD, LATER_LOAD = 1_500_000, 300_000  # bytes on the wire


# A chapter has thousands of coloured words of code; axe gets one of each kind and box, and of the others the bare text.
# To leave them out by its `exclude` takes it far longer: it holds every element of the page against each of them.
BARE_REPEATED = """() => {
    const seen = new Set();
    for (const word of document.querySelectorAll(".highlight pre span")) {
        const classes = [];
        for (let e = word; e && e.tagName !== "SECTION"; e = e.parentElement) classes.push(e.className);
        const kind = classes.join("<");
        if (seen.has(kind)) word.replaceWith(...word.childNodes);
        seen.add(kind);
    }
}"""
# without preload axe asks for no style sheets itself, from wrong addresses
ALL_RULES = {"preload": False, "resultTypes": ["violations"]}
COLOUR_RULES = {**ALL_RULES, "runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}}


def serious(page, options: dict) -> list[str]:
    """Returns: the serious and critical violations that axe finds, with the elements at fault."""
    page.evaluate(BARE_REPEATED)
    violations = Axe().run(page, options=options).response["violations"]
    return [
        f"{violation['id']}: {node['html'][:160]} {node['failureSummary'][:300]}"
        for violation in violations
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]


def test_the_book_is_built(site: Site) -> None:
    assert "book/preface.html" in PAGES


def test_the_browser_keeps_what_the_pages_share(site: Site, visit: Visit, held: dict[str, set[str]]) -> None:
    visit.page.goto(site.url(PREFACE))
    settle(visit.page)
    site.sent.clear()
    visit.page.goto(site.url(CHAPTER))
    settle(visit.page)
    assert {name for name, _ in site.sent} == held[CHAPTER] - held[PREFACE]


@pytest.mark.parametrize("name", PAGES)
def test_page(name: str, site: Site, visit: Visit, held: dict[str, set[str]]) -> None:
    page = visit.page
    page.goto(site.url(name))
    settle(page)
    first = sum(size for _, size in site.sent)
    had = held[PREFACE if name != PREFACE else CHAPTER]
    later = sum(size for sent, size in site.sent if sent not in had)
    assert page.title()
    missing_text = page.eval_on_selector_all("img:not([alt])", "images => images.map(image => image.src)")
    assert not missing_text, "images without alt text"
    assert page.locator("h1:visible").count() == 1
    assert not serious(page, ALL_RULES), "in light mode"

    page.emulate_media(color_scheme="dark")
    page.wait_for_function("() => document.documentElement.dataset.theme !== 'light'")
    page.evaluate("Promise.all(document.getAnimations().map(animation => animation.finished))")
    assert not serious(page, COLOUR_RULES), "in dark mode"  # which changes nothing but the colours

    page.set_viewport_size({"width": 390, "height": 844})
    wide = page.evaluate(
        """() => document.documentElement.scrollWidth <= innerWidth ? [] : [...document.querySelectorAll("main *")]
            .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 120))"""
    )
    assert not wide, "wider than a phone"

    assert not visit.complaints
    assert not visit.elsewhere, "a page asks no other origin for anything"
    assert not site.missing
    assert 0 < later < LATER_LOAD
    assert first < FIRST_LOAD
    print(f"{name}: {first / 1e3:.0f} kB on first load, {later / 1e3:.0f} kB after")
