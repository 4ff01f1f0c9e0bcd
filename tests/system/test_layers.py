"""House rules that a machine can check: imports run strictly downward, and others."""

from __future__ import annotations

import ast
import graphlib
import re

import pytest

from .conftest import REPOSITORY

# From the bottom up.  A row may import from the rows before it; a package is one entry.
# "hpcaccum" is the public list of names.
LAYERS = [
    ["errors", "spans"],
    ["dtypes", "worker_threads"],
    ["deadline", "summation", "files"],
    ["layout"],
    ["device", "mpi"],
    ["arguments", "overlap", "nodes", "rows"],
    ["accumulator", "reducer"],
    ["server", "metrics"],
    ["optimizers"],
    ["torch", "jax", "checkpoint", "stopping"],
    ["tracing"],
    ["hpcaccum"],
    ["machine", "option_values", "plots", "tables"],
    ["plan"],
    ["train", "bench"],
    ["launch"],
    ["cli"],
    ["__main__"],
]
# What other packages use of these is what their __init__ names.
FACES = {"device", "mpi", "nodes", "rows", "accumulator", "reducer", "server"}
HEIGHT = {name: height for height, row in enumerate(LAYERS) for name in row}

PACKAGE = REPOSITORY / "hpcaccum"


def dotted(path):
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {dotted(path): path for path in sorted(PACKAGE.rglob("*.py"))}


class Imports(ast.NodeVisitor):
    """The modules that a file imports: at its top, in functions, or for types only."""

    def __init__(self, name):
        self.name = name
        self.found = set()
        self.visit(ast.parse(FILES[name].read_text()))

    def visit_Import(self, node):
        self.found.update(alias.name for alias in node.names)

    def visit_ImportFrom(self, node):
        origin = node.module or ""
        if node.level:
            is_package = FILES[self.name].name == "__init__.py"
            above = self.name.split(".")[: None if is_package else -1]
            above = above[: len(above) + 1 - node.level]
            origin = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            module = f"{origin}.{alias.name}"
            self.found.add(module if module in FILES else origin)


GRAPH = {
    name: {module for module in Imports(name).found if module in FILES} - {name}
    for name in FILES
}


def entry(name):
    """Return the module's place in the table."""
    return name.split(".")[1] if "." in name else name


def test_every_module_has_its_place():
    without = {entry(name) for name in FILES} - set(HEIGHT)

    assert not without, f"not in LAYERS of {__name__}: {sorted(without)}"


def test_imports_run_downward():
    upward = [
        (name, module)
        for name in FILES
        for module in GRAPH[name]
        if entry(module) != entry(name)
        and HEIGHT.get(entry(module), 0) >= HEIGHT.get(entry(name), 0)
    ]

    assert not upward


@pytest.mark.parametrize("name", FILES)
def test_library_packages_are_used_by_their_face(name):
    if entry(name) in ("hpcaccum", "bench", "train", "cli"):
        return
    inside = [
        module
        for module in GRAPH[name]
        if entry(module) in FACES
        and entry(module) != entry(name)
        and module.count(".") > 1
        and module not in ("hpcaccum.device.kernels", "hpcaccum.device.tables")
    ]

    assert not inside, f"{name} imports {inside}: name it in __init__"


@pytest.mark.parametrize("package", sorted(FACES | {"optimizers"}))
def test_no_module_imports_its_own_face(package):
    face = f"hpcaccum.{package}"

    assert not [n for n in FILES if n.startswith(f"{face}.") and face in GRAPH[n]]


def test_no_module_imports_itself_by_a_detour():
    list(graphlib.TopologicalSorter(GRAPH).static_order())


@pytest.mark.parametrize(
    ("pattern", "owner"),
    [
        (r"(?m)^ *(import|from) cupy", "hpcaccum.device.arrays"),
        (r"\bMPI\.Win\b", "hpcaccum.mpi.memory.windows"),
    ],
)
def test_only_one_module_uses(pattern, owner):
    users = [name for name in FILES if re.search(pattern, FILES[name].read_text())]

    assert users == [owner]


# Code people read; the words are in pieces so that this file keeps its own rules.
TEXTS = [
    path
    for folder in ("hpcaccum", "tests", "examples", "slurm", "kernels", ".ci")
    for path in sorted((REPOSITORY / folder).rglob("*"))
    if path.is_file() and "__pycache__" not in path.parts
]
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|X" r"XX)\b")
SOMEBODYS_MACHINE = re.compile(r"(?<![\w.}])/(ho" r"me|Us" r"ers|ro" r"ot|wo" r"rk)/\w")


def test_house_rules():
    for path in TEXTS:
        text = path.read_text()
        assert not UNFINISHED.search(text), path
        assert not SOMEBODYS_MACHINE.search(text), path
        if path.is_relative_to(REPOSITORY / "hpcaccum"):
            assert text.count("\n") <= 600, f"look for a natural cut of {path}"
        assert text.endswith("\n") or not text, path
