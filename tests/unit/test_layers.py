"""Imports point down: what a module may import is decided by the room that it is in (ADR 14)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "kvtrial"

#: From the lowest up: a room imports from its own row and the rows before it.
LAYERS = (
    {"contract", "reference", "_threads"},
    {"host"},
    {"candidates"},
    {"hot", "cold", "engine"},
    {"conformance", "measure"},
    {"run"},
    {"decision"},
    {"show", "tracking"},
    {"stages"},
    {"tools"},
    {"__main__"},
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


def imports(path: Path, package: Path = PACKAGE) -> set[str]:
    """Modules below kvtrial that a file names in an import, at its top or inside a function."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            head, *rest = name.split(".")
            module = package.joinpath(*rest)
            if (
                head == "kvtrial"
                and rest
                and (module.is_dir() or module.with_suffix(".py").is_file())
            ):
                found.add(".".join(rest))
    return found


def graph(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Module → modules that it imports; a package stands for its ``__init__``."""
    files = {
        ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__"): path
        for path in package.rglob("*.py")
        if path != package / "__init__.py"
    }
    return {name: imports(path, package) - {name} for name, path in files.items()}


def upward(edges: dict[str, set[str]]) -> list[str]:
    """Imports that point up, as ``a imports b``."""
    return sorted(
        f"{module} imports {other}"
        for module, others in edges.items()
        for other in others
        if LEVEL[other.partition(".")[0]] > LEVEL[module.partition(".")[0]]
    )


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a ring, the first of them again at its end; [] without one."""
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for other in sorted(edges.get(module, ())):
            # A package's own head is loaded before any of its modules: no ring of texts.
            if not module.startswith(f"{other}.") and (ring := walk(other, [*path, module])):
                return ring
        done.add(module)
        return []

    return next((ring for module in sorted(edges) if (ring := walk(module, []))), [])


def test_imports_point_down():
    assert upward(graph()) == []


def test_there_is_no_circle():
    assert circle(graph()) == []


@pytest.mark.parametrize(
    ("planted", "seen_as"),
    [
        ({"run/paths.py": "from kvtrial.stages import m2\n"}, "upward"),
        (
            {
                "hot/a.py": "from kvtrial.hot import b\n",
                "hot/b.py": "def f():\n    from kvtrial.hot.a import x\n",
            },
            "circle",
        ),
    ],
)
def test_a_planted_fault_is_seen(tmp_path, planted, seen_as):
    for name in ("stages/__init__.py", "stages/m2.py", "run/__init__.py", "hot/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name, text in planted.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    edges = graph(tmp_path)
    if seen_as == "upward":
        assert upward(edges) == ["run.paths imports stages", "run.paths imports stages.m2"]
    else:
        assert circle(edges) == ["hot.a", "hot.b", "hot.a"]
