"""Every page of the built book: no faults, nothing from elsewhere, small, accessible, readable on a phone."""

from html.parser import HTMLParser

import pytest
from axe_playwright_python.sync_playwright import Axe
from built_book import BUILT, CHAPTER, PREFACE, Site, Visit, settle

EVERY = sorted(str(path.relative_to(BUILT)) for path in BUILT.rglob("*.html") if "_static" not in path.parts)
PAGES = [name for name in EVERY if name != "index.html"]  # that one only leads to the first page
PACKAGE = "book/api/"  # its pages come from one template
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
COLOURS = ("color-contrast", "link-in-text-block")  # two thirds of the time
COLOUR_RULES = {**ALL_RULES, "runOnly": {"type": "rule", "values": COLOURS}}
OTHER_RULES = {**ALL_RULES, "rules": {rule: {"enabled": False} for rule in COLOURS}}


class Kinds(HTMLParser):
    """The kinds of elements in a piece of HTML: tag and classes of each, with those of the one that holds it."""

    VOID = {"area", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}

    def __init__(self, html: str) -> None:
        super().__init__()
        self.within: list[tuple[str, str | None]] = []
        self.found: set[tuple] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        kind = (tag, dict(attributes).get("class"))
        self.found.add((*self.within[-1:], kind))
        if tag not in self.VOID:
            self.within.append(kind)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID and self.within:
            self.within.pop()


def coloured() -> set[str]:
    """Returns: the pages on which axe looks at colours: of the package's as many as have every kind of element."""
    pages, seen = set(), set()
    for name in PAGES:
        if name.startswith(PACKAGE):
            kinds = Kinds((BUILT / name).read_text(encoding="utf-8").partition("<main")[2]).found
            if kinds <= seen:
                continue
            seen |= kinds
        pages.add(name)
    return pages


COLOURED = coloured()


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


def test_colours_are_looked_at_wherever_an_element_is_of_a_new_kind() -> None:
    package = [name for name in PAGES if name.startswith(PACKAGE)]
    assert {name for name in PAGES if name not in package} < COLOURED
    assert 2 < len(COLOURED & set(package)) < len(package) / 4
    assert Kinds('<p>a<br><b class="c">d</b></p><p>e</p>').found == {
        (("p", None),),
        (("p", None), ("br", None)),
        (("p", None), ("b", "c")),
    }


def test_the_browser_keeps_what_the_pages_share(site: Site, visit: Visit, held: dict[str, set[str]]) -> None:
    visit.page.goto(site.url(PREFACE))
    settle(visit.page)
    visit.page.wait_for_load_state("networkidle")
    site.sent.clear()
    visit.page.goto(site.url(CHAPTER))
    settle(visit.page)
    visit.page.wait_for_load_state("networkidle")
    assert {name for name, _ in site.sent} == held[CHAPTER] - held[PREFACE]


@pytest.mark.parametrize("name", PAGES)
def test_page(name: str, site: Site, visit: Visit, held: dict[str, set[str]]) -> None:
    page = visit.page
    page.goto(site.url(name))
    settle(page)
    assert page.title()
    missing_text = page.eval_on_selector_all("img:not([alt])", "images => images.map(image => image.src)")
    assert not missing_text, "images without alt text"
    assert page.locator("h1:visible").count() == 1
    assert not serious(page, ALL_RULES if name in COLOURED else OTHER_RULES), "in light mode"

    if name in COLOURED:
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
    first = sum(size for _, size in site.sent)
    had = held[PREFACE if name != PREFACE else CHAPTER]
    later = sum(size for sent, size in site.sent if sent not in had)
    assert 0 < later < LATER_LOAD
    assert first < FIRST_LOAD
    print(f"{name}: {first / 1e3:.0f} kB on first load, {later / 1e3:.0f} kB after")
