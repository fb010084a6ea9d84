"""What the package shows to the outside: docstrings, citations, imports that point one way, and a quick import."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

import gptlite

ROOT = Path(__file__).parents[2]
PACKAGE = Path(gptlite.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__main__.py")


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def definitions(tree, prefix="", methods=True):
    """The public functions, classes and methods that a module defines: name and node."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef) and methods:
                yield from definitions(node, f"{prefix}{node.name}.")


PUBLIC = {f"{module}.{name}": node for module, tree in MODULES.items() for name, node in definitions(tree)}


def inherited_docstring(qualified):
    """The docstring of a method that overrides one, which says what the override keeps to."""
    module = next(name for name in sorted(MODULES, key=len, reverse=True) if qualified.startswith(name + "."))
    found = importlib.import_module(module)
    for part in qualified[len(module) + 1 :].split("."):
        found = getattr(found, part)
    return inspect.getdoc(found)


def test_the_top_level_names_are_the_few_that_every_chapter_uses():
    assert gptlite.__all__ == ["GPTConfig", "GPTlite", "generate", "load", "load_corpus"]
    for name in gptlite.__all__:
        assert callable(getattr(gptlite, name))
    assert re.fullmatch(r"\d+\.\d+\.\d+", gptlite.__version__)


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_is(module):
    assert ast.get_docstring(MODULES[module])


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_docstring(name):
    node = PUBLIC[name]
    overload = any("overload" in ast.unparse(d) for d in node.decorator_list)
    forward = node.name == "forward" and isinstance(node, ast.FunctionDef)  # its class says what it does
    if not (ast.get_docstring(node) or overload or forward):
        assert "." in name.removeprefix("gptlite."), name
        assert inherited_docstring(name), f"{name} has no docstring, and overrides nothing that has"


def is_tensor(annotation):
    return annotation is not None and re.search(r"\bTensor\b", ast.unparse(annotation)) is not None


TAKES_TENSORS = {
    name: node
    for name, node in PUBLIC.items()
    if isinstance(node, ast.FunctionDef)
    and ast.get_docstring(node)
    and not name.startswith("gptlite.notebook.")  # shows things, computes nothing
    and (is_tensor(node.returns) or any(is_tensor(arg.annotation) for arg in node.args.args))
}


@pytest.mark.parametrize("name", TAKES_TENSORS)
def test_a_function_of_tensors_gives_their_shapes(name):
    text = ast.get_docstring(TAKES_TENSORS[name])
    # [B, S], [n], [..., d]; or a scalar; or the state or weights of a whole, each with its own shape
    shapes = re.search(r"\[(\.\.\.|[A-Za-z*+\- 0-9_]+)(, [^\]]+)?\]|\bscalar\b|\bstate\b|\bweights\b", text)
    assert shapes, f"{name} takes or gives tensors, its docstring gives no shape"


@pytest.mark.parametrize("name", gptlite.__all__)
def test_the_docstrings_of_the_top_level_names_are_complete(name):
    thing = getattr(gptlite, name)
    text = inspect.getdoc(thing.forward if name == "GPTlite" else thing)
    for part in ("Args:", "Raises:"):
        assert part in text
    parameters = inspect.signature(thing.forward if name == "GPTlite" else thing).parameters
    for parameter in parameters:
        if parameter not in ("self", "model", "device", "dtype"):
            assert re.search(rf"\b{parameter}\b", text), f"{name} does not explain {parameter}"


def test_every_citation_is_in_the_bibliography():
    keys = set(re.findall(r"^@\w+\{([^,\s]+),", (ROOT / "book" / "references.bib").read_text(encoding="utf-8"), re.M))
    assert len(keys) > 20
    cited = {
        key.strip(): str(path.relative_to(ROOT))
        for path in FILES
        for group in re.findall(r"\{cite(?::\w+)?\}`([^`]+)`", path.read_text(encoding="utf-8"))
        for key in group.split(",")
    }
    assert len(cited) > 8
    missing = {key: where for key, where in cited.items() if key not in keys}
    assert not missing


def imports(tree, at_import=True):
    """The modules that a module imports: when it is itself imported, or at any time; not those for types alone."""
    found = set()

    def visit(node, inside):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add(node.module)
            found.update(
                f"{node.module}.{alias.name}" for alias in node.names if f"{node.module}.{alias.name}" in MODULES
            )
        if at_import and isinstance(node, ast.FunctionDef | ast.Lambda):
            return
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(tree, False)
    return found


# the parts of the package from the bottom up: a module imports from its own layer and those below
LAYERS = [
    {"config", "facts", "progress"},
    {"attention", "cache.contract", "arithmetic", "arithmetic_cache"},
    {
        "model",
        "cache",
        "cache.tracked",
        "cache.dense",
        "cache.prefix",
        "cache.block_store",
        "cache.radix",
        "cache.blocks",
        "cache.tables",
        "cache.splits",
        "cache.paged",
        "data",
        "sampling",
        "hardware",
    },
    {"generate", "checkpoint", "cache.offload", "cache.reuse"},
    {"measure", "writes", "fast", "export", "layers", "serving", "semantic"},
    {
        "train",
        "record",
        "sweeps",
        "variants",
        "quantize",
        "compress",
        "speculative",
        "cache.quantized",
        "cache.quantized_paged",
        "cache.quantized_text",
    },
    {"cli", "cli_convert", "cli_quantize", "cli_distill", "cli_compress", "cli_heads", "notebook"},
]


def layer_of(module):
    name = module.removeprefix("gptlite").removeprefix(".")
    for i, layer in enumerate(LAYERS):
        if name in layer or (name.split(".")[0] in layer and not name.startswith("cache.")):
            return i
    return None


@pytest.mark.parametrize("module", [name for name in MODULES if name != "gptlite"])
def test_dependencies_point_one_way(module):
    own = layer_of(module)
    assert own is not None, f"{module} has no layer yet: give it one"
    for other in imports(MODULES[module], at_import=False):
        if other.startswith("gptlite."):
            assert layer_of(other) <= own, f"{module} imports {other}"


def test_the_model_imports_no_technique():
    used = {name for name in imports(MODULES["gptlite.model"], at_import=False) if name.startswith("gptlite")}
    assert used == {"gptlite.attention", "gptlite.cache.contract", "gptlite.config"}


EXTRAS = {
    "ipywidgets",
    "matplotlib",
    "altair",
    "IPython",
    "transformers",
    "faiss",
    "sentence_transformers",
    "tokenizers",
    "simpy",
}


@pytest.mark.parametrize("module", [name for name in MODULES if not name.startswith("gptlite.notebook")])
def test_nothing_outside_the_notebook_part_imports_widgets_or_needs_an_extra(module):
    at_any_time = {name.split(".")[0] for name in imports(MODULES[module], at_import=False)}
    assert not at_any_time & {"ipywidgets", "IPython"}
    assert not {name.split(".")[0] for name in imports(MODULES[module])} & EXTRAS
    if module not in ("gptlite.cli", "gptlite.record"):
        assert not any(name.startswith("gptlite.notebook") for name in imports(MODULES[module], at_import=False))


def run_python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_the_package_needs_torch_numpy_and_safetensors_alone():
    heavy = run_python(
        "import sys, gptlite, gptlite.generate, gptlite.measure, gptlite.cache.dense, gptlite.train\n"
        f"print(sorted({EXTRAS!r} & set(sys.modules)))"
    )
    assert heavy == "[]"


def test_the_notebook_part_names_the_extra_that_it_needs():
    message = run_python(
        "import importlib.util as util\n"
        "real = util.find_spec\n"
        "util.find_spec = lambda name, package=None: None if name == 'altair' else real(name, package)\n"
        "try:\n    import gptlite.notebook\nexcept ImportError as error:\n    print(error)"
    )
    assert message == 'gptlite.notebook needs altair: pip install "gptlite[lab]"'


@pytest.mark.alone
@pytest.mark.slow
def test_the_import_takes_less_than_two_seconds_more_than_torch(record_property):
    code = "import time, torch; begin = time.perf_counter(); import gptlite; print(time.perf_counter() - begin)"
    seconds = median(float(run_python(code)) for _ in range(3))
    record_property("seconds", seconds)
    assert seconds < 2
