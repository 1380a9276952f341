"""Who may import whom: the import graph, read from the sources.

Rooms are the packages and modules directly under the package. Dependencies point one way, down the
levels below; rooms of one level may use each other as long as no circle comes of it.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "dynatrain_megatron"

LEVELS = {
    "": 0,  # the package itself, which holds the version and nothing else
    "errors": 0,
    "faults": 0,
    "whereabouts": 0,
    "layout": 1,
    "configs": 0,  # presets, as YAML files
    "presets": 1,
    "config": 2,
    "vps": 2,
    "shapes": 3,
    "platform": 2,
    "observe": 2,
    "planner": 3,
    "advisor": 4,
    "elastic": 4,
    "engine": 4,
    "ahead": 4,
    "adapters": 4,
    "policies": 5,
    "transition": 5,
    "plugin": 6,
    "launch": 6,
    "cli": 6,
}
# Geometry and planning are plain arithmetic: they run anywhere, in a helper process or a report.
WITHOUT_TORCH = {
    "",
    "errors",
    "layout",
    "configs",
    "presets",
    "config",
    "vps",
    "shapes",
    "planner",
    "advisor",
    "ahead",
    "policies",
}
WITH_MEGATRON = {"adapters", "plugin", "platform"}


@dataclass(frozen=True, slots=True)
class Import:
    """One import statement: ``top`` says that it runs when its module is imported."""

    module: str
    target: str
    line: int
    top: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its full name."""
    return {module_name(path): path for path in sorted((ROOT / PACKAGE).rglob("*.py"))}


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports_of(module: str, source: str, *, is_package: bool) -> Iterator[Import]:
    """All imports of one module, at its top and inside functions, also those by name."""
    package = module if is_package else module.rpartition(".")[0]
    tree = ast.parse(source)
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, base] if base else up)
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            names = [str(node.args[0].value)]
        for name in names:
            assert isinstance(node, ast.stmt | ast.expr)
            yield Import(module, name, node.lineno, id(node) not in inside)


@cache
def imports() -> tuple[Import, ...]:
    return tuple(
        found
        for module, path in modules().items()
        for found in imports_of(module, path.read_text(), is_package=path.name == "__init__.py")
    )


def is_in(target: str, module: str) -> bool:
    return target == module or target.startswith(f"{module}.")


def own_module(target: str) -> str | None:
    """The module of ours that an import reaches; ``from room import name`` may mean either."""
    if not is_in(target, PACKAGE):
        return None
    return target if target in modules() else target.rpartition(".")[0]


def test_the_graph_is_read_as_python_reads_it() -> None:
    source = """
import a.b
from ..room import one
from . import two
def later():
    from c import d
    importlib.import_module("e.f")
"""
    found = list(imports_of("p.q.r", source, is_package=False))
    assert [(i.target, i.top) for i in found] == [
        ("a.b", True), ("p.room.one", True), ("p.q.two", True), ("c.d", False), ("e.f", False)
    ]  # fmt: skip
    assert next(imports_of("p.q", "from .r import x", is_package=True)).target == "p.q.r.x"
    reached = {own_module(i.target) for i in imports()}
    assert {f"{PACKAGE}.errors", f"{PACKAGE}.vps.region", None} <= reached


def test_every_room_has_a_level() -> None:
    assert {room(module) for module in modules()} <= set(LEVELS)


def test_our_imports_name_modules_that_exist() -> None:
    unknown = [str(i) for i in imports() if (own := own_module(i.target)) and own not in modules()]
    assert unknown == []


def test_no_room_imports_a_higher_one() -> None:
    upwards = [
        str(i)
        for i in imports()
        if (own := own_module(i.target)) and LEVELS[room(own)] > LEVELS[room(i.module)]
    ]
    assert upwards == []


def test_rooms_of_one_level_make_no_circle() -> None:
    edges: dict[str, set[str]] = {name: set() for name in LEVELS}
    for i in imports():
        own = own_module(i.target)
        if own and room(own) != room(i.module):
            edges[room(i.module)].add(room(own))
    while leaves := [name for name, targets in edges.items() if not targets]:
        for leaf in leaves:
            del edges[leaf]
        for targets in edges.values():
            targets.difference_update(leaves)
    assert edges == {}


def test_geometry_and_planning_do_not_know_torch() -> None:
    wrong = [
        str(i) for i in imports() if room(i.module) in WITHOUT_TORCH and is_in(i.target, "torch")
    ]
    assert wrong == []


def test_only_rooms_that_touch_the_host_import_it() -> None:
    wrong = [
        str(i)
        for i in imports()
        if is_in(i.target, "megatron") and room(i.module) not in WITH_MEGATRON
    ]
    assert wrong == []


def loads_megatron() -> set[str]:
    """Modules that import Megatron as soon as they are imported themselves."""
    return {i.module for i in imports() if i.top and is_in(i.target, "megatron")}


def test_a_module_that_loads_megatron_is_only_imported_when_it_is_used() -> None:
    eager = [str(i) for i in imports() if i.top and own_module(i.target) in loads_megatron()]
    assert eager == []


def test_a_room_that_lists_its_modules_lists_them_all() -> None:
    missing = []
    for package, path in modules().items():
        named = set(re.findall(r"``(\w+)``", ast.get_docstring(ast.parse(path.read_text())) or ""))
        own = {m.rpartition(".")[2] for m in modules() if m.rpartition(".")[0] == package}
        if path.name == "__init__.py" and named & own:
            missing += [f"{package}: {name}" for name in sorted(own - named)]
    assert missing == []


@pytest.mark.host
def test_importing_everything_else_loads_no_megatron() -> None:
    light = [
        module
        for module in modules()
        if module not in loads_megatron() and not module.endswith(".__main__")
    ]
    script = (
        "import importlib, sys\n"
        f"for module in {light}:\n"
        "    importlib.import_module(module)\n"
        "loaded = [name for name in sys.modules if name.partition('.')[0] == 'megatron']\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
