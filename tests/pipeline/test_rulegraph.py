"""The drawn rule graph is that of the workflow."""

from __future__ import annotations

import html
import re
from pathlib import Path

DRAWN = Path(__file__).resolve().parents[2] / "docs" / "img" / "rulegraph.svg"


def edges(names: list[tuple[str, str]], arrows: list[tuple[str, str]]) -> set[tuple[str, str]]:
    """Arrows between numbered nodes, by the nodes' names."""
    by_number = dict(names)
    return {(by_number[start], by_number[end]) for start, end in arrows}


def test_the_drawn_graph_is_that_of_the_workflow(snakemake):
    done = snakemake("--rulegraph", "dot", "report", "adopt", "peers")
    assert done.returncode == 0, done.stdout
    wanted = edges(
        re.findall(r'(\d+)\[label = "(\w+)', done.stdout),
        re.findall(r"(\d+) -> (\d+)", done.stdout),
    )
    svg = html.unescape(DRAWN.read_text(encoding="utf-8"))
    drawn = edges(
        re.findall(r"<title>(\d+)</title>.*?<text[^>]*>(\w+)</text>", svg, re.DOTALL),
        re.findall(r"<title>(\d+)->(\d+)</title>", svg),
    )
    assert ("m2", "verdict") in wanted
    assert drawn == wanted, "draw it again: make rulegraph"
