"""What the pages load, all of it from the book itself: MathJax, Vega and the colour of each part."""

import importlib.util
import re
import shutil
from pathlib import Path

import vl_convert
from sphinx.application import Sphinx

MATHJAX_PARTS = ("tex-chtml.js", "output/chtml/fonts/woff-v2")  # the rest of its 24 MB is other formats

ICON = re.compile(
    r"""(?P<quote>"?)(?P<name>[\w-]+)(?P=quote):\[\d+,\d+,\[(?P<aliases>[^\]]*)\],"[0-9a-f]+","""
    r"""(?:"[^"]*"|\[(?:"[^"]*",?)*\])\],?"""
)

FIRST_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <title>{title}</title>
  <meta http-equiv="refresh" content="0; url={page}">
  <link rel="icon" href="_static/favicon.svg" type="image/svg+xml">
</head>
<body><main><h1>{title}</h1><p><a href="{page}">The first page of the book</a></p></main></body>
</html>
"""


def configure(app: Sphinx, config) -> None:
    """Point the pages at the local MathJax, and give the theme a logo for each of its modes."""
    config.mathjax_path = "mathjax/tex-chtml.js"
    config.html_theme_options["navbar_persistent"] = []  # the sidebar and the article's head have the search already
    config.html_theme_options["collapse_navbar"] = True  # else every page lists every page of the package
    config.html_theme_options["logo"] = {
        "image_light": "_static/logo.svg",
        "image_dark": "_static/logo-dark.svg",
        "alt_text": f"{config.html_title}, the first page",
    }


def part_of(page: str, sitemap) -> int:
    """Returns: the number of the part that holds the page, from 1; 0 for what stands before and after the parts."""
    for number, part in enumerate(sitemap.root.subtrees, start=1):
        if page in part.items and part.numbered:
            return number
    return 0


def wants_thebe(file) -> bool:
    """Returns: whether a script or style sheet is sphinx-thebe's, which declares a constant twice and names a CDN."""
    return "thebe" in f"{file} {getattr(file, 'attributes', '')}".lower()


def named(contents) -> str:
    """Returns: the sidebar's table of contents, with a name for the buttons that unfold it."""
    return str(contents).replace("<summary>", '<summary aria-label="The pages of this section">')


def page_context(app: Sphinx, page: str, template: str, context: dict, doctree) -> None:
    """Give a page the accent of its part, mend a role, and take out what would load a live kernel from a CDN."""
    sitemap = app.config.external_site_map
    accent = f"<style>:root {{ --accent: var(--accent-{part_of(page, sitemap)}) }}</style>"
    context["metatags"] = context.get("metatags", "") + accent
    contents = context["generate_toctree_html"]
    context["generate_toctree_html"] = lambda *args, **settings: named(contents(*args, **settings))
    # docutils calls the bibliography a list, but its entries have a role of their own, which no list may hold
    if "body" in context:
        context["body"] = context["body"].replace(
            '<div role="list" class="citation-list">', '<div class="citation-list">'
        )
    for kind in ("script_files", "css_files"):
        context[kind] = [file for file in context[kind] if not wants_thebe(file)]


def trim_icons(built: Path) -> None:
    """Keep, of the theme's 2,000 icons (half a megabyte on the wire), those whose names stand in the built pages.

    Raises: ValueError when the file is not as expected.
    """
    icons = built / "_static" / "scripts" / "fontawesome.js"
    pages = [*built.rglob("*.html"), *(file for file in built.rglob("*.js") if file != icons)]
    used = {name for page in pages for name in re.findall(r"\bfa-([a-z0-9-]+)", page.read_text(encoding="utf-8"))}
    text, n_icons = ICON.subn(
        lambda icon: icon[0] if used & {icon["name"], *re.findall(r'"([^"]+)"', icon["aliases"])} else "",
        icons.read_text(encoding="utf-8"),
    )
    if n_icons < 1000:
        raise ValueError(f"{icons.name} has {n_icons} icons of the expected form, it should have about 2,000")
    icons.write_text(text, encoding="utf-8")


def write_assets(app: Sphinx, exception: Exception | None) -> None:
    """Write MathJax's and Vega's files and the redirect from index.html into the built book."""
    if exception or app.builder.name != "html":
        return
    static = Path(app.outdir) / "_static"
    mathjax = Path(importlib.util.find_spec("sphinx-mathjax-offline").origin).parent / "static" / "mathjax"
    for part in MATHJAX_PARTS:
        (static / "mathjax" / part).parent.mkdir(parents=True, exist_ok=True)
        if (mathjax / part).is_dir():
            shutil.copytree(mathjax / part, static / "mathjax" / part, dirs_exist_ok=True)
        else:
            shutil.copyfile(mathjax / part, static / "mathjax" / part)
    # in a function of its own, the bundle's names stay apart from the theme's, and a page opened as a file loads it too
    (static / "vega.bundle.js").write_text(f"(() => {{{vl_convert.javascript_bundle()}\n}})();\n", encoding="utf-8")
    trim_icons(Path(app.outdir))
    first = FIRST_PAGE.format(title=app.config.html_title, page=f"{app.config.root_doc}.html")
    (Path(app.outdir) / "index.html").write_text(first, encoding="utf-8")


def setup(app: Sphinx) -> dict:
    """Called by Sphinx."""
    app.connect("config-inited", configure, priority=900)
    app.connect("html-page-context", page_context, priority=900)
    app.connect("build-finished", write_assets, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
