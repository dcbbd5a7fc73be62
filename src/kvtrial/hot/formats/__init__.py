"""Row formats: how K and V rows lie in a page of kvtrial's pool. One file each, one record each.

A format of another package is registered as these are, by an entry point in the group ``kvtrial.formats``
whose name is the record's; a candidate opens the pool with it: ``open_paged(spec, format="bf16")``.

=================  =========================================================================
`fp32`, ``_fp32``  floats as they are, and with K transposed
`fp16`, ``_fp16``  halves, and with K transposed
`q8_0`, ``_q8_0``  blocks of 32 int8 with a step
=================  =========================================================================

The first is the record, the second its ``kv_rows``, which moves rows in and out of a page.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from kvtrial.contract import InvalidArgument, Profile

GROUP = "kvtrial.formats"


@dataclass(frozen=True)
class RowFormat:
    """A row format and the kernel that reads it.

    Attributes
    ----------
    name : str
        In page formats, and so in what a cold store finds pages by: other bytes need another name.
    profile : Profile
        The numerical profile of what `read` gives back, with its bound.
    rows : callable
        Gives the PyCapsule named "kvtrial.kv_rows", a ``kv_rows`` of native/kv_rows.h: bytes of a row, write,
        read, what does not fit.
    kernel : callable
        Gives the PyCapsule named "kvtrial.kv_kernel", a ``kv_span_fn`` of native/kv_kernel.h.
    transposed : bool
        K lies [head_dim][token] within the page. Only rows of elements can.
    in_place : bool
        An element is a float32 as the machine has it, so that rows can be written where they lie
        (``reserve_slot``).
    """

    name: str
    profile: Profile
    rows: Callable[[], Any]
    kernel: Callable[[], Any]
    transposed: bool = False
    in_place: bool = False


def compiled(module: str) -> Any:
    """A compiled module of ours, such as "_kernels_simd", loaded when a store opens and not before."""
    return import_module(f"kvtrial.hot.{module}")


@functools.cache
def formats() -> dict[str, RowFormat]:
    """Every registered row format by name, sorted.

    Raises
    ------
    InvalidArgument
        An entry point does not lead to a `RowFormat` of its own name.
    """
    found = {}
    for point in sorted(entry_points(group=GROUP), key=lambda p: p.name):
        record = point.load()
        if not isinstance(record, RowFormat) or record.name != point.name:
            raise InvalidArgument(
                f"entry point {point.name} of {GROUP} leads to {record!r}; let it lead to a RowFormat of that name"
            )
        found[point.name] = record
    return found


def row_format(name: str | RowFormat) -> RowFormat:
    """The format of that name, or the record itself; `InvalidArgument` lists the known ones."""
    if isinstance(name, RowFormat):
        return name
    known = formats()
    if name not in known:
        raise InvalidArgument(f"format is {name!r}; allowed: {', '.join(known)}, or a RowFormat")
    return known[name]
