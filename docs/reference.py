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
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from kvtrial.show import tables
from kvtrial.tools.command import parser

ROOT = Path(__file__).resolve().parents[1]
#: Columns of a help text, so that it is the same on every machine.
COLUMNS = "100"


def arms(which: str) -> str:
    """A Markdown table of kvtrial's own candidates."""
    points = entry_points(group="kvtrial.candidates")
    ours = [p.load() for p in points if p.dist is not None and p.dist.name == "kvtrial"]
    ours.sort(key=lambda arm: arm.name)
    if which == "what":
        return tables.markdown(
            [
                {
                    "arm": f"**{arm.name}**",
                    "what it is": arm.title,
                    "rows": arm.profile.name,
                    "role": arm.role,
                }
                for arm in ours
            ]
        )
    return tables.markdown(
        [
            {
                "arm": f"**{arm.name}**",
                "owner": arm.owner,
                "kernel": arm.language,
                "layout": f"`{arm.layout}`",
                "lacks": ", ".join(arm.missing_capabilities) or "nothing",
            }
            for arm in ours
        ]
    )


def commands() -> str:
    """A Markdown section for each command, with its help as it is printed."""
    os.environ["COLUMNS"] = COLUMNS
    (subcommands,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    found = {f"kvtrial {name}": sub.format_help() for name, sub in subcommands.choices.items()}
    return "\n\n".join(f"## {name}\n\n```text\n{text.strip()}\n```" for name, text in found.items())


def make_targets() -> str:
    """A Markdown table of the Makefile's targets that have a line of help."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.findall(r"^([a-z0-9-]+):.*?## (.+)$", text, re.MULTILINE)
    return tables.markdown(
        [{"target": f"`make {name}`", "what it does": line} for name, line in found]
    )


def _directive(made: Callable[..., str]) -> type[SphinxDirective]:
    """The Markdown that a function gives, told the directive's argument, parsed where that stands."""

    class Made(SphinxDirective):
        optional_arguments = 1

        def run(self) -> list[nodes.Node]:
            self.env.note_reread()  # of what it shows Sphinx watches no file
            return self.parse_text_to_nodes(made(*self.arguments), allow_section_headings=True)

    return Made


def setup(app: Sphinx) -> dict[str, bool]:
    for name, made in {"arms": arms, "commands": commands, "make-targets": make_targets}.items():
        app.add_directive(name, _directive(made))
    return {"parallel_read_safe": True}
