"""The adopted outcome of a verdict: which store the runtime opens, and which are retired.

`config/selection.yaml` is written by the target ``adopt``, one entry per machine class.
"""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from kvtrial import machine, paths

FILE_NAME = "selection.yaml"


@dataclass(frozen=True)
class Selection:
    """What the runtime obeys. Before any verdict: K1, and nothing is retired."""

    default: str = "K1"
    reference: str = "K1"
    retired: tuple[str, ...] = ()
    run_id: str = "no verdict yet"


def load() -> Selection:
    """This machine's selection from the configuration folder."""
    path = paths.config_dir() / FILE_NAME
    if not path.is_file():
        return Selection()
    entries = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    entry = entries.get(machine.machine_class())
    if entry is None:
        return Selection()
    return Selection(
        default=entry["default"],
        reference=entry["reference"],
        retired=tuple(entry["retired"]),
        run_id=entry["run_id"],
    )
