"""verdict.json key by key: what the views may ask of it.

``workflow/schemas/verdict.schema.yaml`` says what values there are.
"""

from __future__ import annotations

from typing import Any, TypedDict

from kvtrial.registration import Decision

#: A row of one of its tables, or an answer with its figures.
Row = dict[str, Any]


class Document(TypedDict):
    """What `kvtrial.decision.verdict.decide` gives and verdict.json holds."""

    run_id: str
    model: str
    shape: str
    synthetic: bool
    machine: str
    context_length: int | None
    measured: dict[str, str]
    build_id: str
    protocol_sha256: str
    protocol: str
    run: Row
    language: Row
    cold: Row
    arms: list[Row]
    contrasts: list[Row]
    known_answers: Row
    error_rates: Row
    parity: Row
    quality: Row
    eligibility: Row
    attempts: Row
    validity: Row
    skipped: list[Row]
    hypotheses: list[Row]
    control: Row | None
    direct_write: Row | None


class Shown(Document, total=False):
    """The same with what figures show of other places: engines of others, and the rule's limits."""

    peers: list[Row]
    decision: Decision
