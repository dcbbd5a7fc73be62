"""The adopted outcome of a verdict: which store the runtime opens, and which are retired.

`config/selection.yaml` is written by the target ``adopt``: one entry for each machine class and head shape, since
the same arms rank otherwise with other heads. A package that is installed away from the checkout reads
``$KVTRIAL_SELECTION``, else selection.yaml in the user's configuration folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtrial.host import machine, paths, shapes
from kvtrial.host.files import NotText, parsed_yaml


class SelectionInvalid(ValueError):
    """The selection can't be obeyed; the message names the file, the key and what to do."""


@dataclass(frozen=True)
class Selection:
    """What the runtime obeys. Before any verdict K1 is both stores, and nothing is retired.

    Attributes
    ----------
    default : str
        What `kvtrial.open_store` opens without a name.
    profile : str
        The default's numerical profile.
    fp32 : str
        What it opens with ``profile="fp32"``.
    reference : str
        The best incumbent: the reference path.
    retired : tuple of str
        Not to be opened but for a trial.
    cold : str or None
        The cold store; None where the verdict left it open.
    run_id : str or None
        The run whose verdict was adopted; None before any.
    """

    default: str = "K1"
    profile: str = "fp32"
    fp32: str = "K1"
    reference: str = "K1"
    retired: tuple[str, ...] = ()
    cold: str | None = None
    run_id: str | None = None

    @property
    def origin(self) -> str:
        """Where it comes from, in words."""
        if self.run_id is None:
            return "the default before any verdict"
        return f"adopted from the verdict of {self.run_id}"


def load(shape: Mapping[str, Any]) -> Selection:
    """This machine's selection for a shape; `Selection()` where no verdict was adopted for it.

    Parameters
    ----------
    shape : mapping
        ``q_heads``, ``kv_heads`` and ``head_dim``.

    Raises
    ------
    SelectionInvalid
    """
    return adopted().get(shapes.name_of(shape), Selection())


def adopted() -> dict[str, Selection]:
    """This machine's selections by the name of the head shape, such as ``9q3kv``.

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
        return {}
    try:
        entries = parsed_yaml(path.read_bytes()) or {}
        own = entries.get(machine.machine_class()) or {}
        return {str(shape): _read(entry) for shape, entry in own.items()}
    except (NotText, AttributeError, KeyError, TypeError) as error:
        raise SelectionInvalid(
            f"{path}: not what `make adopt` writes ({type(error).__name__}: {error}); run it again, or "
            "remove the file"
        ) from None


def _read(entry: dict[str, Any]) -> Selection:
    cold = entry["cold"]
    return Selection(
        default=str(entry["default"]),
        profile=str(entry["profile"]),
        fp32=str(entry["fp32"]),
        reference=str(entry["reference"]),
        retired=tuple(map(str, entry["retired"])),
        cold=None if cold is None else str(cold),
        run_id=str(entry["run_id"]),
    )


def said_of(name: str, selections: Mapping[str, Selection]) -> list[str]:
    """What was adopted of a candidate, in words, one for each head shape that has a say."""
    said = []
    for shape, chosen in selections.items():
        if name in chosen.retired:
            said.append(f"retired for {shape} by {chosen.run_id}")
        elif name == chosen.default:
            said.append(f"default for {shape}, {chosen.origin}")
        elif name == chosen.fp32:
            said.append(f'default for {shape} with profile="fp32"')
    if name == Selection().default:
        said.append("default for other heads" if selections else "default")
    return said
