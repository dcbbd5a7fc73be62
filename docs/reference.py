"""Parts of the site that are made from the code while it builds: arms from their records, commands from
their parsers, targets from the Makefile.

=================  ======================================================================
``{arms} what``    what each candidate is; ``{arms} how``: how it is made
``{commands}``     each subcommand of ``kvtrial``, as ``--help`` prints it
``{make-targets}`` each target of the Makefile with its line
=================  ======================================================================
"""

from __future__ import annotations

import argparse
import os
import re
from importlib.metadata import entry_points
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[1]
#: Columns of a help text, so that it is the same on every machine.
COLUMNS = "100"


def arms(which: str) -> str:
    """A Markdown table of kvtrial's own candidates."""
    points = entry_points(group="kvtrial.candidates")
    ours = [p.load() for p in points if p.dist is not None and p.dist.name == "kvtrial"]
    ours.sort(key=lambda arm: arm.name)
    if which == "what":
        rows = [(f"**{arm.name}**", arm.title, arm.profile.name, arm.role) for arm in ours]
        return _table(("arm", "what it is", "rows", "role"), rows)
    rows = [
        (
            f"**{arm.name}**",
            arm.owner,
            arm.language,
            f"`{arm.layout}`",
            ", ".join(arm.missing_capabilities) or "nothing",
        )
        for arm in ours
    ]
    return _table(("arm", "owner", "kernel", "layout", "lacks"), rows)


def commands() -> str:
    """A Markdown section for each command, with its help as it is printed."""
    from kvtrial.tools.command import parser

    os.environ["COLUMNS"] = COLUMNS
    (subcommands,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    found = {f"kvtrial {name}": sub.format_help() for name, sub in subcommands.choices.items()}
    return "\n\n".join(f"## {name}\n\n```text\n{text.strip()}\n```" for name, text in found.items())


def make_targets() -> str:
    """A Markdown table of the Makefile's targets that have a line of help."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.findall(r"^([a-z0-9-]+):.*?## (.+)$", text, re.MULTILINE)
    return _table(("target", "what it does"), [(f"`make {name}`", line) for name, line in found])


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


class _Made(SphinxDirective):
    """Markdown that `text` gives, parsed where the directive stands."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # of what it shows Sphinx watches no file
        return self.parse_text_to_nodes(self.text(), allow_section_headings=True)

    def text(self) -> str:
        raise NotImplementedError


class Arms(_Made):
    def text(self) -> str:
        return arms(self.arguments[0])


class Commands(_Made):
    def text(self) -> str:
        return commands()


class MakeTargets(_Made):
    def text(self) -> str:
        return make_targets()


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("arms", Arms)
    app.add_directive("commands", Commands)
    app.add_directive("make-targets", MakeTargets)
    return {"parallel_read_safe": True}
