"""What the published book needs beyond its pages: addresses, previews in social media, a sitemap, a 404 page, a date.

The repository's address in _config.yml says where it all lies: `https://OWNER.github.io/NAME/`, unless the environment
variable BOOK_URL names another place. Nothing here makes a page ask for anything.
"""

import datetime
import html
import os
import re
import subprocess
import tomllib
from pathlib import Path
from xml.etree import ElementTree

from docutils import nodes
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
CARD = "_static/art/card.png"  # tools/card.py makes it
CARD_SIZE = (1200, 630)  # pixels, what the social networks ask for
CARD_ALT = "Work per Byte: efficient LLM inference, built and measured"
DESCRIPTION = "Efficient LLM inference, built and measured: an interactive textbook with a small package."
LONGEST = 200  # characters of a description
INK = "#1b2733"  # the text's colour in light mode, as in book.css

NOT_FOUND = """<!DOCTYPE html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <meta name="robots" content="noindex">
  <title>No such page: {title}</title>
  <link rel="icon" href="data:,">
  <style>
    html {{ color-scheme: light dark; background: #ffffff; color: #1b2733; }}
    a {{ color: #0064a0; }}
    @media (prefers-color-scheme: dark) {{
      html {{ background: #14191e; color: #e3e8ec; }}
      a {{ color: #6cc0f0; }}
    }}
    body {{ max-width: 36rem; margin: 15vh auto 0; padding: 0 1.25rem; font: 1.1rem/1.6 Charter, Georgia, serif; }}
    input, button {{ font: inherit; padding: 0.3rem 0.6rem; max-width: 100%; }}
  </style>
</head>
<body><main>
  <h1>There is no such page</h1>
  <p>It may have moved, or the address has a slip in it. Two ways on: <a href="{home}">the first page</a>,
  or a search of the book.</p>
  <form action="{search}" method="get" role="search">
    <label>Words to look for <input name="q" type="search"></label>
    <button>Search</button>
  </form>
</main></body>
</html>
"""


def book_url(repository: str, environment: dict | None = None) -> str:
    """Where the book is published.

    Args:
        repository: its address, `https://github.com/OWNER/NAME`.
        environment: in which BOOK_URL may name another place; this process's own when None.
    Returns: the address of the book's folder, with a slash at its end.
    Raises: ValueError when one of the two is no such address.
    """
    named = (os.environ if environment is None else environment).get("BOOK_URL", "")
    if named:
        if not re.fullmatch(r"https?://[\w.:-]+(/[\w.~-]+)*/?", named):
            raise ValueError(f"BOOK_URL is {named!r}, it must be an address such as https://example.org/book/")
        return named.rstrip("/") + "/"
    owner_and_name = re.fullmatch(r"https://github\.com/([\w.-]+)/([\w.-]+)", repository)
    if not owner_and_name:
        raise ValueError(f"the repository's address is {repository!r}, it must be https://github.com/OWNER/NAME")
    return f"https://{owner_and_name[1].lower()}.github.io/{owner_and_name[2]}/"


def standalone(svg: str) -> str:
    """Returns: a drawing of book/_static/art for a page elsewhere: dark on white, whatever is around it."""
    colours = f"background: #ffffff; color: {INK}; "
    opening = re.search(r"<svg\b[^>]*>", svg)[0]
    if 'style="' in opening:
        return svg.replace(opening, opening.replace('style="', f'style="{colours}', 1), 1)
    return svg.replace("<svg ", f'<svg style="{colours.strip()}" ', 1)


def version() -> str:
    """Returns: the version in pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def date() -> datetime.date:
    """Returns: the day of the last commit; of SOURCE_DATE_EPOCH, or today, where there is no repository."""
    command = ["git", "log", "-1", "--format=%cs"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        return datetime.date.fromisoformat(found)
    except (OSError, subprocess.CalledProcessError, ValueError):
        if epoch := os.environ.get("SOURCE_DATE_EPOCH"):
            return datetime.datetime.fromtimestamp(int(epoch), datetime.UTC).date()
        return datetime.datetime.now(datetime.UTC).date()


def described(doctree: nodes.document | None) -> str:
    """Returns: the first paragraph of a page that is a sentence, cut at a word; the book's own line without one."""
    for paragraph in doctree.findall(nodes.paragraph) if doctree else ():
        inside = (nodes.figure, nodes.table, nodes.field_list, nodes.sidebar, nodes.Admonition, nodes.list_item)
        parent = paragraph.parent
        while parent is not None and not isinstance(parent, inside):
            parent = parent.parent
        text = " ".join(paragraph.astext().split())
        if parent is None and re.search(r"[.?!]$", text) and "$" not in text and "\\" not in text and len(text) > 40:
            return text if len(text) <= LONGEST else text[: LONGEST - 1].rsplit(" ", 1)[0].rstrip(",;:") + "…"
    return DESCRIPTION


def tags(app: Sphinx, page: str, title: str, description: str) -> str:
    """Returns: the page's description, canonical address and Open Graph tags."""
    base = app.config.html_baseurl
    name = re.sub(r"<[^>]+>", "", title)
    named = {
        "og:type": "article",
        "og:site_name": app.config.html_title,
        "og:title": html.unescape(name),
        "og:description": description,
        "og:url": f"{base}{page}.html",
        "og:image": f"{base}{CARD}",
        "og:image:width": str(CARD_SIZE[0]),
        "og:image:height": str(CARD_SIZE[1]),
        "og:image:alt": CARD_ALT,
    }
    lines = [f'<meta name="description" content="{html.escape(description)}">']
    lines += [f'<meta property="{key}" content="{html.escape(value)}">' for key, value in named.items()]
    return "\n".join([*lines, '<meta name="twitter:card" content="summary_large_image">'])


def configure(app: Sphinx, config) -> None:
    """Set the book's address, and the line with version and date at the foot of every page."""
    config.html_baseurl = book_url(config.html_theme_options["repository_url"])
    day, footer = date(), config.html_theme_options.get("extra_footer", "")
    changes = f'<a href="{config.html_baseurl}book/changelog.html">{version()}</a>'
    config.html_theme_options["extra_footer"] = (
        f'{footer} Version {changes}, <time datetime="{day.isoformat()}">{day.day} {day:%B %Y}</time>.'
    )


def page_context(app: Sphinx, page: str, template: str, context: dict, doctree) -> None:
    """Add the tags of a page, and send its Colab button to the edition for Colab."""
    context["metatags"] = context.get("metatags", "") + tags(app, page, context.get("title", ""), described(doctree))
    branch = f"/blob/{app.config.html_theme_options['repository_branch']}/"
    for group in context.get("header_buttons", []):
        for button in group.get("buttons", []) if isinstance(group, dict) else []:
            if button.get("text") == "Colab":
                button["url"] = button["url"].replace(branch, f"/blob/{app.config.colab_branch}/", 1)


def write(app: Sphinx, exception: Exception | None) -> None:
    """Write the sitemap, robots.txt, the 404 page and the drawings for pages elsewhere into the built book."""
    if exception or app.builder.name != "html":
        return
    built, base = Path(app.outdir), app.config.html_baseurl
    urls = ElementTree.Element("urlset", xmlns="http://www.sitemaps.org/schemas/sitemap/0.9")
    for page in sorted(app.env.found_docs):
        ElementTree.SubElement(ElementTree.SubElement(urls, "url"), "loc").text = f"{base}{page}.html"
    ElementTree.indent(urls)
    ElementTree.ElementTree(urls).write(built / "sitemap.xml", encoding="utf-8", xml_declaration=True)
    (built / "robots.txt").write_text(f"User-agent: *\nAllow: /\nSitemap: {base}sitemap.xml\n", encoding="utf-8")
    first = f"{base}{app.config.root_doc}.html"
    page = NOT_FOUND.format(title=html.escape(app.config.html_title), home=first, search=f"{base}search.html")
    (built / "404.html").write_text(page, encoding="utf-8")
    (built / ".nojekyll").touch()  # GitHub Pages would leave out the folders that begin with an underscore
    drawings = built / "_static" / "diagrams"
    drawings.mkdir(parents=True, exist_ok=True)
    for path in sorted((Path(app.srcdir) / "book" / "_static" / "art").glob("*.svg")):
        (drawings / path.name).write_text(standalone(path.read_text(encoding="utf-8")), encoding="utf-8")


def setup(app: Sphinx) -> dict:
    """Called by Sphinx."""
    app.add_config_value("colab_branch", "colab", "env", str)
    app.connect("config-inited", configure, priority=950)
    app.connect("html-page-context", page_context, priority=950)
    app.connect("build-finished", write)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
