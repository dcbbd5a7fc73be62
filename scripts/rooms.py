"""The rooms of src/kvtrial: which layer each lies in, what they import of each other, and their picture.

``make rooms`` draws docs/img/rooms.svg again. tests/unit/test_layers.py asks the same functions whether
imports point down.
"""

from __future__ import annotations

import ast
import re
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "kvtrial"
DRAWN = ROOT / "docs" / "img" / "rooms.svg"

#: From the lowest up: a room imports from its own row and the rows before it (ADR 14).
LAYERS = (
    {"contract", "reference", "registration", "_threads"},
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

# --------------------------------------------------------------------------------------------------
# Imports

#: ``from kvtrial.hot._memory cimport Memory`` and the like, in a text that Python can't parse.
_CYTHON_IMPORT = re.compile(
    r"^\s*(?:from\s+kvtrial\.([\w.]+)\s+c?import\s+(\w+)|c?import\s+kvtrial\.([\w.]+))",
    re.MULTILINE,
)


def _named(path: Path) -> list[str]:
    """Dotted names after ``kvtrial.`` that a file imports, at its top or inside a function."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return [
            name
            for module, member, whole in _CYTHON_IMPORT.findall(text)
            for name in ([whole] if whole else [module, f"{module}.{member}"])
        ]
    names: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name.removeprefix("kvtrial.") for name in names if name.startswith("kvtrial.")]


def imports(path: Path, package: Path = PACKAGE) -> set[str]:
    """Modules below kvtrial that a file imports, dotted; what is no module is left out."""

    def is_module(name: str) -> bool:
        place = package.joinpath(*name.split("."))
        return place.is_dir() or any(place.with_suffix(s).is_file() for s in (".py", ".pyx"))

    return {name for name in _named(path) if is_module(name)}


def graph(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Module → modules that it imports; a package stands for its ``__init__``."""
    edges: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.p*")):
        if path.suffix not in (".py", ".pyx", ".pxd") or path == package / "__init__.py":
            continue
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        edges[name] = edges.get(name, set()) | (imports(path, package) - {name})
    return edges


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


def between_rooms(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Room → other rooms that it imports from."""
    rooms: dict[str, set[str]] = {}
    for module, others in edges.items():
        room = module.partition(".")[0]
        rooms.setdefault(room, set()).update(other.partition(".")[0] for other in others)
    return {room: others - {room} for room, others in rooms.items()}


def needed_arrows(rooms: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Arrows that no longer way says already: ``show`` reaches ``run`` over ``decision``."""

    def reach(room: str, without: tuple[str, str]) -> set[str]:
        seen: set[str] = set()
        ahead = [room]
        while ahead:
            here = ahead.pop()
            for other in rooms.get(here, set()) - seen:
                if (here, other) != without:
                    seen.add(other)
                    ahead.append(other)
        return seen

    arrows = {(room, other) for room, others in rooms.items() for other in others}
    return {arrow for arrow in arrows if arrow[1] not in reach(arrow[0], arrow)}


# --------------------------------------------------------------------------------------------------
# The picture

#: Left to right; a room's row is its layer. Left out: ``_threads``, the thread pool, and ``__main__``.
COLUMN = {
    "tools": 1, "stages": 1, "tracking": 2, "show": 1, "decision": 1, "run": 1,
    "measure": 1, "conformance": 0, "hot": 0, "engine": 1, "cold": 2,
    "candidates": 1, "host": 1, "reference": 3, "registration": 0, "contract": 1,
}  # fmt: skip
JOB = {
    "tools": "the command kvtrial",
    "stages": "files in, files out",
    "tracking": "MLflow",
    "show": "report, terminal, figures",
    "decision": "events to a verdict, pure",
    "run": "what was asked; events",
    "registration": "the protocol as types",
    "measure": "blocks, probes, crashes",
    "conformance": "the suite for any candidate",
    "hot": "stores and kernels",
    "cold": "pages that left memory",
    "engine": "decodes a GGUF model",
    "candidates": "finds and opens a store",
    "host": "this machine, this build",
    "reference": "the float64 oracle",
    "contract": "verbs, errors, invariants",
}
_WIDE, _HIGH, _ACROSS, _DOWN, _EDGE = 184, 44, 226, 74, 44
#: Lines leave a box below its middle and come in above it.
_OFF = 8


def _middle(room: str) -> tuple[float, float]:
    top = max(LEVEL[name] for name in COLUMN)
    x = _EDGE + COLUMN[room] * _ACROSS + _WIDE / 2
    return x, 16 + (top - LEVEL[room]) * _DOWN + _HIGH / 2


def _is_free(column: int, above: int, below: int) -> bool:
    """Whether no box stands in a column between two layers."""
    return not any(COLUMN[name] == column and below < LEVEL[name] < above for name in COLUMN)


def _corners(start: str, end: str) -> list[tuple[float, float]]:
    """Corners of the line from one box down to another, round what stands between."""
    (x, y), (to_x, to_y) = _middle(start), _middle(end)
    column, to_column, above, below = COLUMN[start], COLUMN[end], LEVEL[start], LEVEL[end]
    toward = _WIDE / 2 if to_x > x else -_WIDE / 2
    if above == below:
        return [(x + toward, y - _OFF), (to_x - toward, y - _OFF)]
    if column == to_column and _is_free(column, above, below):
        return [(x, y + _HIGH / 2), (x, to_y - _HIGH / 2)]
    if column != to_column and _is_free(to_column, above, below):
        return [(x + toward, y + _OFF), (to_x, y + _OFF), (to_x, to_y - _HIGH / 2)]
    if column != to_column and _is_free(column, above, below - 1):
        return [(x, y + _HIGH / 2), (x, to_y - _OFF), (to_x - toward, to_y - _OFF)]
    # Down a gap: the outer one on the left, or the one on the side that the layer's number says.
    side = -1 if column != to_column or above % 2 == 0 else 1
    edge = side * _WIDE / 2
    gap = to_x + edge + side * 20
    return [(x + edge, y + _OFF), (gap, y + _OFF), (gap, to_y - _OFF), (to_x + edge, to_y - _OFF)]


def _line(corners: list[tuple[float, float]], title: str, dashes: str = "") -> str:
    points = " ".join(f"{x:g},{y:g}" for x, y in corners)
    return (
        f'<polyline points="{points}" fill="none" stroke="#555" stroke-width="1.3"{dashes} '
        f'marker-end="url(#head)"><title>{title}</title></polyline>'
    )


def _by_name() -> str:
    """`candidates` opens a store of `hot` by its entry point; no import says so."""
    (x, y), (to_x, to_y) = _middle("candidates"), _middle("hot")
    corners = [(x - _WIDE / 2, y), (to_x + 40, y), (to_x + 40, to_y + _HIGH / 2)]
    return _line(corners, "candidates opens hot by name", ' stroke-dasharray="5 4"')


def picture(rooms: dict[str, set[str]]) -> str:
    """The rooms as SVG, upper layers above; an arrow is an import that no longer way says already."""
    arrows = sorted(a for a in needed_arrows(rooms) if a[0] in COLUMN and a[1] in COLUMN)
    width = 2 * _EDGE + 3 * _ACROSS + _WIDE
    height = max(_middle(room)[1] for room in COLUMN) + _HIGH / 2 + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" font-family="sans-serif">',
        "<title>The rooms of kvtrial and what they import</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M 0 0 L 8 4 L 0 8 z" fill="#555"/></marker></defs>',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    lines += [_line(_corners(start, end), f"{start} imports {end}") for start, end in arrows]
    lines.append(_by_name())
    for room, job in JOB.items():
        x, y = _middle(room)
        lines += [
            f'<rect x="{x - _WIDE / 2:g}" y="{y - _HIGH / 2:g}" width="{_WIDE}" height="{_HIGH}" '
            'rx="6" fill="#f3f6fa" stroke="#34495e"/>',
            f'<text x="{x:g}" y="{y - 3:g}" text-anchor="middle" font-size="14" '
            f'font-weight="bold" fill="#1b2733">{escape(room)}</text>',
            f'<text x="{x:g}" y="{y + 14:g}" text-anchor="middle" font-size="11.5" '
            f'fill="#1b2733">{escape(job)}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    DRAWN.write_text(picture(between_rooms(graph())), encoding="utf-8")
    print(DRAWN.relative_to(ROOT), file=sys.stderr)
