"""What is printed for people. A text is shown as it is: error texts and paths may look like markup.

The one place that makes rich's consoles, tables, panels and bars.
"""

from __future__ import annotations

import difflib
import io
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.panel import Panel
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table


def print_anything() -> None:
    """Let stdout and stderr take every character: one that their encoding lacks is shown by its number."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean K2T?``, to put behind the message about an unknown name; empty where none is near."""
    by_lower = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[near[0]]}?" if near else ""


def count(number: int, what: str) -> str:
    """``1 page``, ``1,200 pages``."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def console(*, stderr: bool = False) -> Console:
    """The terminal, or the file or pipe that stands for it."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def table(*columns: str, title: str = "", **style: Any) -> Table:
    """A table without rows whose title, columns and cells are literal; ``style`` as rich.Table takes it."""
    from rich.table import Table
    from rich.text import Text

    class Literal(Table):
        def add_column(self, header: Any = "", *args: Any, **kwargs: Any) -> None:
            super().add_column(literal(header), *args, **kwargs)

        def add_row(self, *cells: Any, **kwargs: Any) -> None:
            super().add_row(*map(literal, cells), **kwargs)

    def literal(cell: Any) -> Any:
        return Text(cell) if isinstance(cell, str) else cell

    named = Text(title, style.get("title_style") or "table.title") if title else None
    made = Literal(title=named, **style)
    for column in columns:
        made.add_column(column)
    return made


def panel(inside: Any, title: str, **style: Any) -> Panel:
    """A frame with a literal title; ``style`` as rich.Panel takes it."""
    from rich.panel import Panel
    from rich.text import Text

    return Panel(inside, title=Text(title), **style)


def progress(*columns: ProgressColumn, **options: Any) -> Progress:
    """A bar on stderr: what is done, literally, then how much, then the columns given."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    what = TextColumn("{task.description}", style="progress.description", markup=False)
    return Progress(
        what, BarColumn(), TaskProgressColumn(), *columns, console=console(stderr=True), **options
    )
