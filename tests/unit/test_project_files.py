"""The files around the package agree with one another: environments, workflows, the citation, the guide's targets."""

import ast
import re
import tomllib

import pytest
import yaml
from built_book import ROOT
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONDA_NAMES = {"torch": "pytorch-cpu", "matplotlib": "matplotlib-base"}  # where conda-forge has another
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
REPOSITORY = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["repository"]["url"]


def targets() -> set[str]:
    """The targets of the Makefile."""
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


def workflow(path) -> dict:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    content["on"] = content.pop(True)  # YAML 1.1 reads the key `on` so
    return content


def steps(content: dict) -> list[dict]:
    return [step for job in content["jobs"].values() for step in job.get("steps", [])]


# Binder and conda


def conda() -> tuple[dict[str, str], list[str]]:
    """The packages of environment.yml with their ranges, and what pip installs."""
    entries = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    named = [re.fullmatch(r"([\w-]+)(.*)", entry).groups() for entry in entries if isinstance(entry, str)]
    return dict(named), next(entry["pip"] for entry in entries if isinstance(entry, dict))


def test_binders_environment_has_the_ranges_of_the_package() -> None:
    there, pip = conda()
    wanted = [Requirement(each) for each in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["lab"]]]
    for requirement in wanted:
        name = CONDA_NAMES.get(requirement.name, requirement.name)
        assert there.get(name) == str(requirement.specifier), (
            f"{requirement} in pyproject.toml, {name} in environment.yml"
        )
    assert set(there) == {CONDA_NAMES.get(each.name, each.name) for each in wanted} | {"python", "jupyterlab", "pip"}
    assert SpecifierSet(PROJECT["requires-python"]).contains(there["python"].removeprefix("="))
    assert pip == ["-e .[semantic]"], "the package itself, and what its semantic cache needs"
    assert "semantic" in PROJECT["optional-dependencies"]


def test_binder_builds_from_that_file_alone() -> None:
    """Binder would take these before environment.yml, or beside it, and the two could drift apart."""
    others = ("binder", ".binder", "requirements.txt", "setup.py", "Pipfile", "runtime.txt", "apt.txt", "postBuild")
    assert not [name for name in others if (ROOT / name).exists()]


# Workflows


def test_the_workflows_are_there() -> None:
    assert [path.stem for path in WORKFLOWS] == ["links", "publish", "scheduled", "test"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_names_targets_that_exist(path) -> None:
    content = workflow(path)
    named = [
        name for step in steps(content) for name in re.findall(r"\bmake ([\w-]+|\$\{\{.*?\}\})", step.get("run", ""))
    ]
    for name in list(named):
        if "matrix.target" in name:
            named.remove(name)
            jobs = [job for job in content["jobs"].values() if "matrix" in job.get("strategy", {})]
            named += [each["target"] for job in jobs for each in job["strategy"]["matrix"]["include"]]
    assert set(named) <= targets()
    scripts = [name for step in steps(content) for name in re.findall(r"(?:tools|\.ci)/[\w./]+", step.get("run", ""))]
    assert all((ROOT / name).exists() for name in scripts)
    assert named or scripts


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_bounded_and_pinned(path) -> None:
    content = workflow(path)
    assert content["permissions"] == {"contents": "read"}, "a job that may do more says so itself"
    for name, job in content["jobs"].items():
        if called := job.get("uses"):
            assert (ROOT / called).exists(), called
            continue
        assert 0 < job["timeout-minutes"] <= 360, name
        needs = job.get("needs", [])
        assert {needs} if isinstance(needs, str) else set(needs) <= set(content["jobs"])
        versions = [version for version in re.findall(r"python-version: (.*)", str(job)) if "matrix" not in version]
        assert all(SpecifierSet(PROJECT["requires-python"]).contains(version.strip("\"' ")) for version in versions)
    for step in steps(content):
        if action := step.get("uses"):
            assert re.fullmatch(r"[\w-]+/[\w-]+@(?:v\d+|[0-9a-f]{40})", action), action
        assert ("run" in step) != ("uses" in step)


def test_what_is_published_was_tested() -> None:
    content = workflow(next(path for path in WORKFLOWS if path.stem == "publish"))
    jobs = content["jobs"]
    assert content["on"]["push"] == {"branches": ["main"]}
    assert jobs["test"]["uses"] == "./.github/workflows/test.yml"
    assert jobs["build"]["needs"] == "test"
    assert jobs["pages"]["needs"] == jobs["colab"]["needs"] == "build"
    runs = [step.get("run") for step in jobs["build"]["steps"]]
    assert "make book" in runs
    assert "make colab" in runs
    uploads = [step["with"]["path"] for step in jobs["build"]["steps"] if "upload" in step.get("uses", "")]
    assert uploads == ["_build/html", "_build/colab"]


def test_the_long_runs_are_scheduled() -> None:
    content = workflow(next(path for path in WORKFLOWS if path.stem == "scheduled"))
    matrix = content["jobs"]["long"]["strategy"]["matrix"]["include"]
    assert {each["target"] for each in matrix} == {"execute", "colab-test", "mutation", "notebooks-mutation"}
    for path in WORKFLOWS:
        for entry in workflow(path)["on"].get("schedule", []) if isinstance(workflow(path)["on"], dict) else []:
            assert re.fullmatch(r"(\d+|\*)( (\d+|\*)){4}", entry["cron"])


def test_every_target_of_the_makefile_is_declared_and_explained() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = set(re.search(r"^\.PHONY: ((?:.*\\\n)*.*)", text, re.M)[1].replace("\\\n", " ").split())
    assert targets() == phony
    explained = set(re.findall(r"^([a-z-]+):.*## \S", text, re.M))
    assert targets() - explained == {"help"} - explained


# The citation, and the guide from the GPTlite post's files


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == PROJECT["version"]
    assert citation["repository-code"] == REPOSITORY
    assert {"title", "message", "authors", "type", "license"} <= set(citation)
    assert citation["license"] == ["MIT", "CC-BY-4.0"]
    assert all(set(author) <= {"name", "given-names", "family-names", "orcid"} for author in citation["authors"])


def is_there(symbol: str) -> bool:
    """Whether a dotted name is a module of the package, or a function or class that one defines."""
    path = ROOT / "src" / symbol.replace(".", "/")
    if path.with_suffix(".py").exists() or (path / "__init__.py").exists():
        return True
    module = path.parent.with_suffix(".py")
    if not module.exists():
        return False
    return path.name in {getattr(node, "name", "") for node in ast.parse(module.read_text(encoding="utf-8")).body}


def test_every_target_of_the_guide_from_the_post_exists() -> None:
    text = (ROOT / "book" / "original_files.md").read_text(encoding="utf-8")
    symbols = re.findall(r"\{py:\w+\}`(?:[^`<]*<)?([\w.]+)>?`", text)
    assert len(symbols) > 20
    for symbol in symbols:
        assert is_there(symbol), f"{symbol} is not in the package"
    links = re.findall(r"\]\(([^)#]+)\)", text)
    chapters = [link for link in links if link.endswith(".ipynb")]
    assert chapters
    for link in links:
        assert link.startswith("https://") or (ROOT / "book" / link).exists(), f"{link} leads nowhere"
    toc = (ROOT / "_toc.yml").read_text(encoding="utf-8")
    for link in chapters:
        assert link.removeprefix("../").removesuffix(".ipynb") in toc
    # what is planned has no link yet, and what is ready has one
    for row in re.split(r"^\* - ", text, flags=re.M)[1:]:
        cells = re.split(r"^  - ", row, flags=re.M)
        for cell in cells[2:4]:
            if ": ready" in cell:
                assert "{py:obj}" in cell or ".ipynb)" in cell, cell
