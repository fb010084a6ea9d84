import re
import subprocess
import sys

import matplotlib
import pytest
import torch

import gptlite.sampling
from gptlite.notebook.helpers import new_figure, setup, show_difference, show_figure, show_source, table


def test_set_up_seeds_and_prints_where_it_runs(capsys):
    device = setup(3)
    first = torch.rand(2)
    assert capsys.readouterr().out.startswith(f"device {device.type} (")
    setup(3)
    assert torch.equal(first, torch.rand(2))
    assert f"dtype float32, torch {torch.__version__}\n" in capsys.readouterr().out
    assert matplotlib.rcParams["svg.hashsalt"] == "gptlite"


def test_source_is_that_of_the_package():
    shown = show_source(gptlite.sampling.sample)
    assert repr(shown).startswith("def sample(probs: Tensor, u: Tensor) -> Tensor:")
    bundle = shown._repr_mimebundle_()
    assert bundle["text/markdown"] == f"```python\n{shown!r}\n```" and bundle["text/plain"] == repr(shown)


def test_long_source_is_folded_and_a_part_is_chosen_by_its_lines():
    long = show_source(gptlite.sampling.probabilities)._repr_mimebundle_()["text/markdown"]
    assert re.match(
        r'<details class="gptlite-source"><summary>gptlite.sampling.probabilities, \d+ lines</summary>\n\n```python\n',
        long,
    )
    part = repr(show_source(gptlite.sampling.probabilities, ("ordered, order", "keep =")))
    assert part.startswith("ordered, order") and part.splitlines()[-1].startswith("keep =")
    with pytest.raises(ValueError, match=r"no line with 'nowhere' in the source of gptlite\.sampling\.sample"):
        show_source(gptlite.sampling.sample, ("cdf", "nowhere"))


def test_a_table_in_its_three_forms():
    shown = table([{"Model": "a|b", "Size (MB)": 12}, {"Model": "<c>", "Size (MB)": 3.14159}], "Sizes & names.")
    assert repr(shown).splitlines() == ["Sizes & names.", "Model  Size (MB)", "a|b           12", "<c>        3.142"]
    assert "| a\\|b | 12 |" in shown._repr_markdown_() and "| :--- | ---: |" in shown._repr_markdown_()
    html = shown._repr_html_()
    assert "<caption>Sizes &amp; names.</caption>" in html and "&lt;c&gt;" in html
    assert html.count('<th scope="col"') == 2 and '<td style="text-align: right">12</td>' in html
    assert "1,234,567" in repr(table([{"N": 1_234_567}])) and "12,346" in repr(table([{"N": 12_345.67}]))


@pytest.mark.parametrize(
    ("rows", "says"),
    [([], "needs at least one row"), ([{"a": 1}, {"b": 1}], r"row 1 has headers \['b'\], the first has \['a'\]")],
)
def test_a_table_of_unequal_rows_is_refused(rows, says):
    with pytest.raises(ValueError, match=says):
        table(rows)


def test_a_figure_is_the_same_in_every_run_and_takes_the_colour_of_the_page():
    def draw():
        figure = new_figure()
        axes = figure.subplots()
        axes.plot([1, 2], [3, 4], label="a")
        axes.set(xlabel="x (s)", ylabel="y (ms)")
        axes.legend()
        return show_figure(figure, "A rising line", "rise", "It rises.")._repr_mimebundle_()

    first, second = draw(), draw()
    assert first == second and first["text/plain"] == "Figure rise: A rising line"
    html = first["text/html"]
    assert "currentColor" in html and "#6e7782" not in html and "<style" not in html
    assert '<desc id="figure-rise-desc">A rising line</desc>' in html and "<figcaption>It rises.</figcaption>" in html
    ids = re.findall(r'\bid="([^"]*)"', html)
    assert len(ids) == len(set(ids)) and all(i.startswith("figure-rise-") for i in ids)
    assert set(re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', html)) and all(
        (a or b) in ids for a, b in re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', html)
    )


def test_a_difference_is_said_in_words_or_raised(capsys):
    show_difference("a against b", torch.tensor([1e-7, -2e-6]), 1e-5)
    show_difference("tokens", 0, 0)
    assert capsys.readouterr().out == "a against b: equal to within 1e-05\ntokens: exactly equal\n"
    for value in (torch.tensor([0.0, -2e-5]), float("nan")):
        with pytest.raises(AssertionError, match=r"a against b: they differ by (2e-05|nan), 1e-05 is allowed"):
            show_difference("a against b", value, 1e-5)


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_without_the_extra_the_error_names_it():
    done = python(
        "import sys\n"
        "for name in ('altair', 'ipywidgets', 'matplotlib'):\n"
        "    sys.modules[name] = None\n"
        "    try: import gptlite.notebook\n"
        "    except ImportError as error: print(error)\n"
        "    del sys.modules[name]"
    )
    expected = [
        f'gptlite.notebook needs {n}: pip install "gptlite[lab]"' for n in ("altair", "ipywidgets", "matplotlib")
    ]
    assert done.stdout.splitlines() == expected, done.stderr


def test_nothing_outside_notebook_imports_widgets_or_charts():
    done = python(
        "import importlib, pkgutil, sys, gptlite\n"
        "for m in pkgutil.walk_packages(gptlite.__path__, 'gptlite.'):\n"
        "    if not m.name.startswith(('gptlite.notebook', 'gptlite.__main__')): importlib.import_module(m.name)\n"
        "print(sorted({'altair', 'ipywidgets', 'matplotlib', 'IPython'} & set(sys.modules)))"
    )
    assert done.stdout.strip() == "[]", done.stderr
