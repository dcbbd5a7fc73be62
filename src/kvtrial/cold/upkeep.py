"""A cold store looked after from the command line: ``kvtrial cold VERB FOLDER``.

None of it needs a model, and a folder that holds no store is left as it is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from rich.console import Group
from rich.text import Text

from kvtrial.cold import open_cold
from kvtrial.cold.errors import ForeignStore
from kvtrial.cold.folder import kind_of
from kvtrial.cold.store import ColdStore, Progress
from kvtrial.contract import InvalidArgument
from kvtrial.host import printed

if TYPE_CHECKING:
    from rich.table import Table

_BETWEEN = (
    "the index makes up for it, but gc can't empty that file, and it must not be built again: spill what "
    "you need into another folder"
)

_SHOWN = 16  # digits of a key; a store takes any beginning that fits one sequence alone


class Outcome(TypedDict, total=False):
    """What a verb has found or done: `look_after`."""

    folder: str
    kind: str
    bytes: int
    sequences: list[dict[str, Any]]
    damage: list[dict[str, Any]]
    freed_bytes: int
    deleted: list[str]


def _catalogue(cold: ColdStore, keys: Sequence[str], progress: Progress | None) -> Outcome:
    sequences = [entry._asdict() for entry in cold.catalogue()]
    for entry in sequences:  # JSON has no word for what a clock may have said
        entry["created"] = entry["created"] if math.isfinite(entry["created"]) else None
    return {"sequences": sequences}


def _local_time(created: float | None) -> str:
    """For people; a clock may have said what no calendar has."""
    if created is None:
        return "?"
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created))
    except (OverflowError, ValueError, OSError):
        return "?"


def _verify(cold: ColdStore, keys: Sequence[str], progress: Progress | None) -> Outcome:
    return {"damage": [damage._asdict() for damage in cold.verify(progress)]}


def _gc(cold: ColdStore, keys: Sequence[str], progress: Progress | None) -> Outcome:
    return {"freed_bytes": cold.gc(progress)}


def _delete(cold: ColdStore, keys: Sequence[str], progress: Progress | None) -> Outcome:
    known = [entry.key for entry in cold.catalogue()]
    meant = [_meant(given, known) for given in keys]  # all of them, before the first is gone
    return {"deleted": [key for key in dict.fromkeys(meant) if cold.delete(key)]}


def _meant(given: str, known: Sequence[str]) -> str:
    """The one key that begins as it was given."""
    fitting = [key for key in known if key.startswith(given.lower())]
    if not given or len(fitting) != 1:
        found = f"{len(fitting) or 'no'} keys start with {given!r}" if given else "the key is empty"
        stored = ", ".join(key[:_SHOWN] for key in fitting or known) or "the store is empty"
        raise InvalidArgument(f"{found}; give the start of one key: {stored}")
    return fitting[0]


_VERBS: dict[str, Callable[[ColdStore, Sequence[str], Progress | None], Outcome]] = {
    "catalogue": _catalogue,
    "delete": _delete,
    "gc": _gc,
    "verify": _verify,
}


def look_after(
    verb: str, folder: Path, keys: Sequence[str] = (), progress: Progress | None = None
) -> Outcome:
    """Do one thing with the store in a folder.

    Parameters
    ----------
    verb : {"catalogue", "delete", "gc", "verify"}
    folder : Path
    keys : sequence of str
        For ``delete``: keys of the catalogue, or their beginnings.
    progress : callable(done, to do), optional
        For ``gc`` and ``verify``.

    Returns
    -------
    Outcome
        JSON-safe: ``folder``, ``kind``, ``bytes`` of its files, and ``sequences``, ``deleted``,
        ``freed_bytes`` or ``damage``.

    Raises
    ------
    ForeignStore, InvalidArgument, and what `open_cold` raises
    """
    if bool(keys) != (verb == "delete"):
        raise InvalidArgument(
            f"delete needs at least one key; `kvtrial cold catalogue {folder}` lists them"
            if verb == "delete"
            else f"{verb} takes no key, and was given {', '.join(map(repr, keys))}; delete takes keys"
        )
    if kind_of(folder) is None:
        raise ForeignStore(f"{folder} holds no cold store; `kvtrial generate --cold` makes one")
    with open_cold(None, folder) as cold:
        outcome = _VERBS[verb](cold, keys, progress)
        return {"folder": str(folder), "kind": cold.kind, "bytes": cold.disk_bytes(), **outcome}


def sound(outcome: Outcome) -> bool:
    """Whether nothing was found damaged."""
    return not outcome.get("damage")


def render(outcome: Outcome) -> Group:
    """The same for people."""
    said = f"{outcome['folder']} ({outcome['kind']}, {outcome['bytes'] / 1e6:.1f} MB)"
    lines: list[Table | Text] = []
    if "sequences" in outcome:
        if outcome["sequences"]:
            lines.append(_table(outcome["sequences"]))
        last = f"sequences: {len(outcome['sequences'])}; {said}"
    elif "damage" in outcome:
        for damage in outcome["damage"]:
            needed = ", ".join(key[:_SHOWN] for key in damage["sequences"])
            if not damage["key"]:
                of_segment = (
                    ".seg at offset" in damage["what"]
                )  # the index's own damage says what to do
                lines.append(
                    Text(f"{damage['what']}\n  {_BETWEEN}" if of_segment else damage["what"])
                )
                continue
            advice = (
                f"delete {needed} and spill again" if needed else "nobody needs it: gc takes it"
            )
            lines.append(Text(f"page {damage['key'][:_SHOWN]}: {damage['what']}\n  {advice}"))
        pages = sum(bool(damage["key"]) for damage in outcome["damage"])
        last = f"damaged pages: {pages}; {said}"
    elif "freed_bytes" in outcome:
        last = f"given back: {outcome['freed_bytes'] / 1e6:.1f} MB; {said}"
    else:
        gone = ", ".join(key[:_SHOWN] for key in outcome["deleted"])
        last = f"deleted: {gone}, whose space gc gives back; {said}"
    return Group(*lines, Text(last))


def _table(sequences: Sequence[dict[str, Any]]) -> Table:
    table = printed.table("key", box=None, pad_edge=False)
    for name in ("rows", "pages"):
        table.add_column(name, justify="right")
    table.add_column("spilled")
    for entry in sequences:
        when = _local_time(entry["created"])
        table.add_row(entry["key"][:_SHOWN], str(entry["rows"]), str(entry["pages"]), when)
    return table
