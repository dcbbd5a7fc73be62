"""The raw events: one long table, one row a value, Parquet on disk.

Everything that a verdict rests on is a row here, so that it can be derived again from the table and
the protocol alone. A stage writes ``results/<run_id>/events/<stage>.parquet``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
from pyarrow import ArrowException

from kvtrial.host.files import beside
from kvtrial.run.journal import Row

#: column -> (dtype, meaning)
COLUMNS: dict[str, tuple[str, str]] = {
    "protocol_sha256": ("string", "hash of the registered protocol"),
    "build_id": ("string", "hash of native sources, flags and compilers"),
    "binary_sha256": ("string", "hash of the compiled modules; empty where none was run"),
    "stage": (
        "string",
        "run, conformance, parity, m1, m2, aa, control, direct_write, cold_tier",
    ),
    "attempt": ("int64", "1 for the first; forcing a stage opens the next"),
    "block": ("int64", "replicate: one fresh process; -1 where a stage has none"),
    "trial": ("int64", "how often this block was run before, for void blocks"),
    "group": (
        "int64",
        "process of the block, where memory could not hold all arms at once; from 0",
    ),
    "candidate": ("string", "arm, or 'machine' for probes"),
    "context": ("int64", "filled positions; 0 where it has no meaning"),
    "sessions": ("int64", "concurrent sessions"),
    "threads": ("int64", "threads"),
    "shape": ("string", "query and KV heads of m1's rows, such as 9q3kv; empty elsewhere"),
    "place": ("int64", "order of the arm within its block, from 0; -1 for the block itself"),
    "metric": ("string", "what was measured, with its unit as the last part of the name"),
    "index": ("int64", "step, iteration or repetition, from 0"),
    "value": ("float64", "the number, NaN where the row is text"),
    "text": ("string", "the text, empty where the row is a number"),
}

#: What a metric's name may not hold elsewhere (MLflow allows letters, digits and ``_-. /:``).
METRIC_CHARACTERS = re.compile(r"[^A-Za-z0-9_\-./: ]")

_DEFAULTS: Row = {
    "binary_sha256": "",
    "attempt": 1,
    "block": -1,
    "trial": 0,
    "group": 0,
    "candidate": "machine",
    "context": 0,
    "sessions": 1,
    "threads": 1,
    "shape": "",
    "place": -1,
    "index": 0,
    "value": float("nan"),
    "text": "",
}


class EventsInvalid(ValueError):
    """A table of raw events that can't be used; the message names the file and what to do."""


def event(metric: str, **columns: Any) -> Row:
    """One row as a plain dict (JSON-safe); unknown columns raise KeyError."""
    unknown = columns.keys() - COLUMNS.keys()
    if unknown:
        raise KeyError(f"unknown event columns {sorted(unknown)}; known: {list(COLUMNS)}")
    return {**_DEFAULTS, "metric": metric, **columns}


def to_frame(rows: Iterable[Row]) -> pd.DataFrame:
    """A table with every column of `COLUMNS`, in order and typed."""
    frame = pd.DataFrame(list(rows), columns=list(COLUMNS))
    for name, (dtype, _) in COLUMNS.items():
        if name in _DEFAULTS:
            frame[name] = frame[name].fillna(_DEFAULTS[name])
        frame[name] = frame[name].astype(dtype)
    return frame


def write(frame: pd.DataFrame, path: Path) -> None:
    """Write beside and rename, so that a half-written table is never read."""
    with beside(path) as name, name.open("wb") as file:
        frame.to_parquet(file, index=False)


def read(path: Path) -> pd.DataFrame:
    """One stage's table.

    Raises
    ------
    EventsInvalid
        The file can't be read, is no whole Parquet file, or lacks a column.
    """
    try:
        with path.open(
            "rb"
        ) as file:  # not by its name: Arrow takes no bytes, and some names for addresses
            frame = pd.read_parquet(file)
    except (OSError, ValueError, ArrowException) as error:
        raise EventsInvalid(
            f"{path}: can't be read ({error}); remove that file, and `make verdict` writes it again"
        ) from None
    if missing := [name for name in COLUMNS if name not in frame.columns]:
        raise EventsInvalid(
            f"{path}: has no column {', '.join(missing)}; allowed: tables of kvtrial.run.events.COLUMNS"
        )
    return frame


def read_run(run_dir: Path) -> pd.DataFrame:
    """All events of a run, sorted by stage file name."""
    files = sorted((run_dir / "events").glob("*.parquet"))
    if not files:
        raise FileNotFoundError(
            f"no events under {run_dir / 'events'}; run `snakemake --cores 1 verdict`"
        )
    return pd.concat([read(file) for file in files], ignore_index=True)
