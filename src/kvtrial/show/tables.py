"""Rows of equal columns, column → text, in the form that was asked for: at a terminal, as Markdown, as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvtrial.host import printed

Rows = Sequence[Mapping[str, str]]


def table(rows: Rows, right: Collection[str] = ()) -> Any:
    """As a rich table; columns of ``right`` are numbers, flush right."""
    made = printed.table(box=None, padding=(0, 2, 0, 0))
    for column in rows[0] if rows else ():
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*row.values())
    return made


def markdown(rows: Rows, right: Collection[str] = ()) -> str:
    """As a Markdown table; nothing where there is no row."""
    if not rows:
        return ""
    rule = ["---:" if column in right else "---" for column in rows[0]]
    lines = [list(rows[0]), rule, *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def as_csv(rows: Rows) -> str:
    """As CSV, a header first."""
    out = io.StringIO()
    if rows:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return out.getvalue()
