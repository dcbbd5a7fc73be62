"""Imports point down: what a module may import is decided by the room that it is in (ADR 14)."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("rooms", ROOT / "scripts" / "rooms.py")
assert _SPEC is not None and _SPEC.loader is not None
rooms = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(rooms)


@pytest.fixture(scope="module")
def edges() -> dict[str, set[str]]:
    return rooms.graph()


def test_imports_point_down(edges):
    assert rooms.upward(edges) == []


def test_there_is_no_circle(edges):
    assert rooms.circle(edges) == []


def test_kernels_are_looked_at_too(edges):
    assert "hot._memory" in edges["hot._pages"]


#: Rooms of more modules than a head can name: a stage is named by its rule, a check by what it checks, and the
#: head of measure explains what the metrics mean.
WITHOUT_A_MAP = {"conformance", "stages", "stages.after", "show.plots", "tracking"}


def test_a_packages_head_is_its_map():
    for head in rooms.PACKAGE.rglob("__init__.py"):
        package = ".".join(head.parent.relative_to(rooms.PACKAGE).parts)
        if not package or package in WITHOUT_A_MAP:
            continue
        named = head.read_text(encoding="utf-8")
        for path in head.parent.glob("*.p*"):
            if not path.stem.endswith(("__", "_clang")):  # built from another's text
                assert re.search(rf"[`.]{path.stem}\b", named), (
                    f"{package} does not name {path.name}"
                )


def test_every_room_is_drawn_as_it_is_now(edges):
    between = rooms.between_rooms(edges)
    assert set(between) == set(rooms.COLUMN) | {"_threads", "__main__"}
    drawn = rooms.DRAWN.read_text(encoding="utf-8")
    assert drawn == rooms.picture(between), "draw it again: make rooms"


def test_what_another_way_says_is_not_drawn():
    between = {"show": {"decision", "run"}, "decision": {"run"}, "run": set()}
    assert rooms.needed_arrows(between) == {("show", "decision"), ("decision", "run")}


@pytest.mark.parametrize(
    ("planted", "seen_as"),
    [
        ({"run/paths.py": "from kvtrial.stages import m2\n"}, "upward"),
        ({"run/paths.pyx": "from kvtrial.stages.m2 cimport x\n"}, "upward"),
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
    edges = rooms.graph(tmp_path)
    if seen_as == "upward":
        assert "run.paths imports stages.m2" in rooms.upward(edges)
    else:
        assert rooms.circle(edges) == ["hot.a", "hot.b", "hot.a"]
