"""`{benchmark-table} KIND`: what `make bench` measured, from benchmarks/results, as `KINDS` says."""

import json
from itertools import pairwise
from pathlib import Path
from statistics import median

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

PEER, CT2 = "transformers generate", "CTranslate2"
STATIC, CONTINUOUS = "transformers static", "transformers continuous"


def times_as_fast(seconds: dict[str, list[float]], name: str, over: str) -> str:
    """How many times as fast `name` is as `over`, the median over rounds; empty when that did not run."""
    if over not in seconds:
        return ""
    return f"{median(theirs / own for theirs, own in zip(seconds[over], seconds[name], strict=True)):.2f}"


def about(content: dict) -> str:
    """The machine and its own roof, in words."""
    machine, roof = content["machine"], content["roof"]
    threads = f"{content['threads']} thread" + "s" * (content["threads"] > 1)
    return (
        f"{machine['name']}, {threads}, {machine['system']}, torch {machine['torch']}; "
        f"in the same run it copied {roof['bytes_per_second'] / 1e9:.1f} GB/s and multiplied at "
        f"{roof['flop_per_second'] / 1e9:.0f} GFLOP/s in fp32."
    )


def grouped(rows: list[list[str]]) -> list[list[str]]:
    """The rows with their first cell only where it is another than above, since it is long and often the same."""
    return [rows[0]] + [["" if row[0] == above[0] else row[0], *row[1:]] for above, row in pairwise(rows)]


def decode(content: dict) -> tuple[list[list[str]], str]:
    """Rows and caption of the works with prompts of one length."""
    rows = [["work", "engine", "speed", "times transformers", "times CTranslate2", "of the roof"]]
    for result in content["results"]:
        n_tokens = result["batch"] * result["n_new"]
        for name, seconds in result["median_seconds"].items():
            speed = f"{n_tokens / seconds:,.1f} token/s" if n_tokens else f"{1e3 * seconds:,.0f} ms"
            share = f"{100 * result['least_seconds'] / seconds:.0f} %"
            ratios = [times_as_fast(result["seconds"], name, peer) for peer in (PEER, CT2)]
            rows.append([result["name"], name, speed, *ratios, share])
    return grouped(rows), f"The same work by several engines. {about(content)}"


def mixed(content: dict) -> tuple[list[list[str]], str]:
    """Rows and caption of the requests of mixed lengths."""
    rows = [["work", "engine", "speed", "times its static batching", "times its continuous batching"]]
    for result in content["mixed"]:
        for name, speed in result["tokens_per_second"].items():
            ratios = [times_as_fast(result["seconds"], name, peer) for peer in (STATIC, CONTINUOUS)]
            rows.append([result["name"], name, f"{speed:,.0f} token/s", *ratios])
    share = 100 * content["mixed"][0]["overhead_outside_the_model"]
    return grouped(rows), (
        "Requests of mixed lengths; ratios are to transformers. Of a step of the engine over a paged cache "
        f"{share:.0f} % is outside the model. {about(content)}"
    )


def growth(content: dict) -> tuple[list[list[str]], str]:
    """Rows and caption of the steps by batch and context, beside the fit."""
    rows = [["batch", "context (tokens)", "TPOT (ms)", "fitted (ms)"]]
    for point in content["points"]:
        fitted = content["constant_seconds"][str(point["batch"])] + point["kv_bytes"] / content["kv_bytes_per_second"]
        times = [f"{1e3 * seconds:.1f}" for seconds in (point["seconds"], fitted)]
        rows.append([str(point["batch"]), f"{point['context']:,}", *times])
    error, speed = 100 * content["largest_relative_error"], content["kv_bytes_per_second"] / 1e9
    return rows, (
        f"A decode step of {content['shape']} with packed weights, and the fit: a constant for each batch, and "
        f"keys and values read at {speed:.1f} GB/s. The fit is at most {error:.0f} % off. "
        f"{content['machine']['name']}."
    )


def build(content: dict) -> tuple[list[list[str]], str]:
    """Rows and caption of the book's own build by number of chapters."""
    rows = [["chapters", "pages", "seconds", "seconds per page"]]
    for point in content["points"]:
        pages, seconds = point["pages"], point["seconds"]
        rows.append([str(point["chapters"]), str(pages), f"{seconds:.0f}", f"{seconds / pages:.2f}"])
    return rows, f"The book built from nothing, in one process. {content['machine']['name']}."


KINDS = {
    "decode": ("bench.json", decode),
    "mixed": ("bench.json", mixed),
    "decode-zen1": ("bench-zen1.json", decode),
    "mixed-zen1": ("bench-zen1.json", mixed),
    "decode-intel": ("bench-intel.json", decode),
    "mixed-intel": ("bench-intel.json", mixed),
    "decode-zen4": ("bench-zen4.json", decode),
    "decode-zen4-one-thread": ("bench-zen4-one-thread.json", decode),
    "mixed-zen4": ("bench-zen4.json", mixed),
    "mixed-zen4-one-thread": ("bench-zen4-one-thread.json", mixed),
    "growth": ("growth.json", growth),
    "build": ("build.json", build),
}


class BenchmarkTable(SphinxDirective):
    """One of the tables; `machine` is what the text calls the one that was measured, where the results say less."""

    required_arguments = 1
    option_spec = {"name": directives.unchanged_required, "machine": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        """Returns: the table."""
        kind = self.arguments[0]
        if kind not in KINDS:
            raise self.error(f"there is no benchmark table {kind!r}, there are {', '.join(KINDS)}")
        file, make = KINDS[kind]
        path = Path(self.env.srcdir) / "benchmarks" / "results" / file
        self.env.note_dependency(str(path))
        rows, caption = make(json.loads(path.read_text(encoding="utf-8")))
        caption = f"{self.options['machine']}. {caption}" if "machine" in self.options else caption
        lines = [f"::::{{list-table}} {caption}", f":name: {self.options['name']}", ":header-rows: 1", ""]
        for row in rows:
            lines += [f"{'* -' if i == 0 else '  -'} {cell}".rstrip() for i, cell in enumerate(row)]
        parent = nodes.Element()
        self.state.nested_parse(StringList([*lines, "::::"], source=self.env.docname), self.content_offset, parent)
        return parent.children


def setup(app: Sphinx) -> dict:
    """Called by Sphinx."""
    app.add_directive("benchmark-table", BenchmarkTable)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
