"""Arms that are a candidate under another name, in stages where one candidate is several of them."""

from __future__ import annotations

#: Known answers: one candidate three times, the last one slowed down by a registered share.
FIRST, SECOND, PLANTED = ARMS = ("first", "second", "planted")
#: How rows come in: written into a reserved slot, or by way of scratch and append.
WAYS = ("direct", "append")


def way_of(arm: str) -> tuple[str, str]:
    """Candidate and way of an arm such as ``K1.direct``."""
    candidate, _, way = arm.rpartition(".")
    return candidate, way
