"""Row formats: how K and V rows lie in a page of kvtrial's pool. One file each, one record each.

A format of another package is registered as these are, by an entry point in the group ``kvtrial.formats``
whose name is the record's; a candidate opens the pool with it: ``open_paged(spec, format="bf16")``.

=============================  ==============================================================
`fp32`, ``_fp32``              floats as they are, and with K transposed
`fp16`, ``_fp16``              halves, and with K transposed
`q8_0`, ``_q8_0``              blocks of 32 int8 with a step
`int_panels`, ``_int_panels``  int8 and 4-bit codes as panels for integer products, rotated or not
=============================  ==============================================================

The first is the record, the second its ``kv_rows``, which moves rows in and out of a page. ``_blocks.pxd`` rounds
a block of 32, for both of those that have such blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kvtrial.contract import CANDIDATE_NAME, CandidateNotBuilt, InvalidArgument, KVError, Profile
from kvtrial.contract.arguments import shown

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
        read, what does not fit, and where floats can be written in place (``reserve_slot``).
    kernel : callable
        Gives the PyCapsule named "kvtrial.kv_kernel", a ``kv_span_fn`` of native/kv_kernel.h.
    """

    name: str
    profile: Profile
    rows: Callable[[], Any]
    kernel: Callable[[], Any]

    def __post_init__(self) -> None:
        """`InvalidArgument` for a field of another kind: pages are named by the name."""
        if not isinstance(self.name, str) or not CANDIDATE_NAME.fullmatch(self.name):
            raise InvalidArgument(
                f"name of a format is {shown(self.name)}; allowed: letters, digits, '.', '_' and '-'"
            )
        if not isinstance(self.profile, Profile):
            raise InvalidArgument(
                f"profile of format {self.name} is {shown(self.profile)}; give a kvtrial.contract.Profile"
            )
        for what in ("rows", "kernel"):
            if not callable(getattr(self, what)):
                raise InvalidArgument(
                    f"{what} of format {self.name} is {shown(getattr(self, what))}; give something to call"
                )

    def native(self, what: str) -> Any:
        """What ``rows`` or ``kernel`` gives; `CandidateNotBuilt` says why one can't."""
        try:
            return getattr(self, what)()
        except KVError:
            raise
        except Exception as error:
            raise CandidateNotBuilt(
                f"{what} of format {self.name}: {type(error).__name__}: {error}"
            ) from error


def compiled(module: str) -> Any:
    """A compiled module of ours, such as "_kernels_simd", loaded when a store opens and not before."""
    return import_module(f"kvtrial.hot.{module}")


@functools.cache
def _points() -> dict[str, EntryPoint]:
    """Entry points of row formats by name, sorted; none is loaded, since another's may not load."""
    return {p.name: p for p in sorted(entry_points(group=GROUP), key=lambda p: p.name)}


def row_format(name: str | RowFormat) -> RowFormat:
    """The format of that name, or the record itself.

    Raises
    ------
    InvalidArgument
        No format of that name is registered, or its entry point leads to no `RowFormat` of its own name.
    CandidateNotBuilt
        Its entry point does not load.
    """
    if isinstance(name, RowFormat):
        return name
    known = _points()
    if not isinstance(name, str) or name not in known:
        raise InvalidArgument(
            f"format is {shown(name)}; allowed: {', '.join(known)}, or a RowFormat"
        )
    try:
        record = known[name].load()
    except (Exception, SystemExit) as error:  # another's module may do anything
        raise CandidateNotBuilt(
            f"format {name}: entry point {known[name].value}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(record, RowFormat) or record.name != name:
        raise InvalidArgument(
            f"entry point {name} of {GROUP} leads to {shown(record)}; let it lead to a RowFormat of that name"
        )
    return record
