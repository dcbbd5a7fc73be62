"""The adopted outcome of a verdict: which store the runtime opens, and which are retired.

`config/selection.yaml` is written by the target ``adopt``, one entry per machine class. A package that
is installed away from the checkout reads ``$KVTRIAL_SELECTION``, else selection.yaml in the user's
configuration folder.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import yaml

from kvtrial.host import machine, paths


class SelectionInvalid(ValueError):
    """The selection can't be obeyed; the message names the file, the key and what to do."""


@dataclass(frozen=True)
class Selection:
    """What the runtime obeys. Before any verdict: K1, and nothing is retired."""

    default: str = "K1"
    reference: str = "K1"
    retired: tuple[str, ...] = ()
    run_id: str = "no verdict yet"


def load() -> Selection:
    """This machine's selection; `Selection()` where no verdict was adopted for it.

    Raises
    ------
    SelectionInvalid
        ``$KVTRIAL_SELECTION`` names no file, or the file is not what ``adopt`` writes.
    """
    path = paths.selection_file()
    if not path.is_file():
        if os.environ.get("KVTRIAL_SELECTION"):
            raise SelectionInvalid(
                f"KVTRIAL_SELECTION is {str(path)!r}, where no file lies; give the selection.yaml "
                "that `make adopt` wrote, or unset it"
            )
        return Selection()
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        entry = entries.get(machine.machine_class())
        return Selection() if entry is None else _read(entry)
    except (yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        raise SelectionInvalid(
            f"{path}: not what `make adopt` writes ({type(error).__name__}: {error}); run it again, or "
            "remove the file"
        ) from None


def _read(entry: dict[str, Any]) -> Selection:
    return Selection(
        default=str(entry["default"]),
        reference=str(entry["reference"]),
        retired=tuple(map(str, entry["retired"])),
        run_id=str(entry["run_id"]),
    )
