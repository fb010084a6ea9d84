"""The book around the chapters: modes, the map, search, the first page, and one address of the repository."""

import re
import shutil

import pytest
from built_book import BUILT, ROOT, Site, Visit, load_script, settle

repository = load_script(ROOT / "tools" / "set_repository.py")


def test_the_index_leads_to_the_first_page(site: Site, visit: Visit) -> None:
    visit.page.goto(site.url("index.html"))
    visit.page.wait_for_url("**/book/preface.html")


def test_the_mode_is_the_readers(site: Site, visit: Visit) -> None:
    page = visit.page
    page.goto(site.url("book/preface.html"))
    settle(page)
    modes, colours = [], []
    for _ in range(3):
        modes.append(page.evaluate("document.documentElement.dataset.theme"))
        colours.append(page.evaluate("getComputedStyle(document.querySelector('.gptlite-chart svg text')).fill"))
        page.locator(".theme-switch-button:visible").first.click()
    assert set(modes) == {"light", "dark"}
    assert len(set(colours)) == 2, "the chart's text follows the mode"
    assert not visit.complaints


def test_the_buttons_have_their_icons(site: Site, visit: Visit) -> None:
    page = visit.page
    page.goto(site.url("chapters/01_gptlite.html"))
    settle(page)
    assert page.locator("svg.svg-inline--fa").count() >= 5
    assert page.locator("svg.svg-inline--fa:not(:has(path)), svg[data-icon='question'], i[class*='fa-']").count() == 0


def test_a_part_has_one_accent_on_page_and_controls(site: Site, visit: Visit) -> None:
    page = visit.page
    accents = {}
    for name in ("book/preface.html", "chapters/01_gptlite.html"):
        page.goto(site.url(name))
        settle(page)
        style = "element => getComputedStyle(element)"
        accents[name] = page.locator("article h1").evaluate(f"{style}.borderBottomColor")
        assert page.locator("input[type=range]").first.evaluate(f"{style}.accentColor") == accents[name]
    assert len(set(accents.values())) == 2


def test_the_map_sorts_and_filters_by_keyboard(site: Site, visit: Visit) -> None:
    page = visit.page
    page.goto(site.url("book/map.html"))
    table = page.locator("table.technique-map")
    names = table.locator("tbody tr:visible td:first-child")
    every = names.all_text_contents()
    assert len(every) >= 2
    heading = table.get_by_role("button", name="Technique")
    for order in ("ascending", "descending"):
        heading.focus()
        page.keyboard.press("Enter")
        assert table.locator("th").first.get_attribute("aria-sort") == order
        assert names.all_text_contents() == sorted(every, key=str.lower, reverse=order == "descending")
    page.get_by_label("Find").fill("the unlikely tail")
    assert names.all_text_contents() == ["Sampling"]
    page.get_by_label("Find").fill("")
    page.get_by_label("Phase").select_option("prefill")
    assert "Sampling" not in names.all_text_contents()
    assert "GPTlite" in names.all_text_contents()
    assert page.locator(".technique-filters output").text_content() == f"{names.count()} of {len(every)} shown"
    assert not visit.complaints


def test_the_map_leads_to_chapter_code_and_test(site: Site, visit: Visit) -> None:
    page = visit.page
    page.goto(site.url("book/map.html"))
    row = page.locator("table.technique-map tbody tr").first
    links = row.locator("a").evaluate_all("links => links.map(link => link.getAttribute('href'))")
    assert any("chapters/01_gptlite.html" in link for link in links)
    assert any("api/gptlite/model/index.html#gptlite.model.GPTlite" in link for link in links)
    assert any("/blob/main/tests/" in link for link in links)


def test_search_finds_a_page(site: Site, visit: Visit) -> None:
    visit.page.goto(site.url("search.html?q=temperature"))
    visit.page.wait_for_selector("#search-results li a")
    assert not visit.complaints


def test_links_between_pages_hold() -> None:
    broken = []
    for path in BUILT.rglob("*.html"):
        if "_static" in path.parts:
            continue
        for href in re.findall(r'href="([^"#?]+\.html)', path.read_text(encoding="utf-8")):
            if not href.startswith("http") and not (path.parent / href).exists():
                broken.append(f"{path.relative_to(BUILT)} -> {href}")
    assert not broken


def test_one_command_sets_the_repository_everywhere(tmp_path) -> None:
    left_out = shutil.ignore_patterns(".git", ".venv*", "_build", "runs", "*.safetensors", ".*_cache", "__pycache__")
    copy = shutil.copytree(ROOT, tmp_path / "copy", ignore=left_out)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    old, new = (
        repository.ADDRESS.search((copy / "_config.yml").read_text(encoding="utf-8"))[1],
        "/".join(["ada", "other"]),
    )
    changed = {path.relative_to(copy).as_posix() for path in repository.set_repository(copy, new)}
    assert {"_config.yml", "pyproject.toml", "chapters/01_gptlite.ipynb"} <= changed
    assert not [path for path in copy.rglob("*.md") if old in path.read_text(encoding="utf-8")]
    repository.set_repository(copy, old)
    assert before == {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}


@pytest.mark.parametrize("wrong", ["", "work-per-byte", "a/b/c", "https://github.com/a/b", "a b/c", "-a/b"])
def test_a_wrong_address_is_refused(wrong: str, tmp_path) -> None:
    with pytest.raises(ValueError, match="it must be OWNER/NAME"):
        repository.set_repository(tmp_path, wrong)
