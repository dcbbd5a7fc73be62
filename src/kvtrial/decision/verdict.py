"""From events to a verdict: a pure function of (events, protocol).

``decide(events, protocol)`` reads nothing else: no clock, no file, no candidate. Rows that it needs:

* stage ``run``: ``run/run_id``, ``run/model``, ``run/machine``, ``run/synthetic``, ``run/shape``,
  ``run/profile``, ``run/usable_cpus``, ``run/context_length``, when and where it was measured, and per
  candidate ``candidate/profile``, ``candidate/role``, ``candidate/layout``, ``candidate/missing``,
  ``candidate/not_built``;
* stage ``conformance``: ``conformance/outcome`` (1 passed, 0 failed, NaN gap; text names test and P);
* stage ``parity``: what `parity` and `quality` judge;
* stages ``m1``, ``m2``, ``aa``, ``control``, ``direct_write``, ``cold_tier``: measurements by block;
* every stage: ``attempt/complete``, one row per attempt whose planned blocks are all there.

The rule is spelled out in docs/protocol.md. Comparisons are made on logarithms with the registered relative
slack, so that exactly 10% adopts and exactly 3% passes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from typing import Any

import pandas as pd

from kvtrial.contract import InvalidArgument
from kvtrial.contract.arguments import shown
from kvtrial.decision import (
    attribution,
    cold,
    eligibility,
    error_rates,
    facts,
    known_answers,
    language,
    output,
    parity,
    quality,
    rule,
    running,
    validity,
)
from kvtrial.decision.contrasts import Layouts, Measured, cell_key
from kvtrial.decision.document import Document, Row
from kvtrial.decision.language import ADOPT, INCONCLUSIVE, KEEP, Outcome
from kvtrial.measure.plan import cell_name
from kvtrial.registration import Protocol
from kvtrial.run import protocol as registration
from kvtrial.run.events import COLUMNS

__all__ = ["ADOPT", "INCONCLUSIVE", "KEEP", "MixedProtocol", "Outcome", "Verdict", "decide"]

#: Stages without whose complete attempt no question about the hot tier can be decided.
NEEDED = ("conformance", "parity", "m1", "aa", "m2")


class MixedProtocol(ValueError):
    """The events were not all made under the protocol given."""


@dataclass(frozen=True)
class Verdict:
    """What was decided and why; ``data`` is what verdict.json holds."""

    data: Document

    @property
    def store(self) -> str | None:
        """What to run, or None when that can't be decided."""
        return self.data["run"]["store"]

    @property
    def outcome(self) -> Outcome:
        """The answer about the language."""
        return Outcome(self.data["language"]["outcome"])

    @property
    def decided(self) -> bool:
        """Whether both questions about the hot tier have an answer."""
        return self.store is not None and self.outcome != INCONCLUSIVE

    def to_json(self) -> str:
        """Canonical text of verdict.json: ratios to 12 digits, no times of day, no paths."""
        return json.dumps(self.data, indent=2, sort_keys=True, allow_nan=False) + "\n"


def decide(events: pd.DataFrame, protocol: Protocol) -> Verdict:
    """Apply the fixed rule.

    Parameters
    ----------
    events : DataFrame
        The columns of `kvtrial.run.events.COLUMNS`; every attempt of every stage.
    protocol : dict
        The registered protocol, as `kvtrial.run.protocol.load` returns it.

    Raises
    ------
    InvalidArgument
        ``events`` is no such table, has no row, or does not say which run it is of.
    MixedProtocol
        An event carries another protocol's hash.
    ProtocolError
        The protocol is not what its schema allows.
    """
    registration.check(protocol)
    events = _table(events)
    protocol_sha256 = registration.sha256(protocol)
    refuse_mixed(events, protocol)
    # Plain strings: slices of Arrow's are what would take the time.
    texts = events.select_dtypes("string").columns
    events = events.astype(dict.fromkeys(texts, object)).copy()
    of_run = facts.of_run(events)
    chosen, attempts = validity.first_complete_attempts(events)
    trials = validity.judge(chosen, protocol)
    measured = Measured(trials.valid_rows, protocol, of_run.profile, of_run.usable_cpus)
    layouts = Layouts(chosen)
    parity_result = parity.judge(chosen, protocol)
    quality_result = quality.judge(chosen, protocol, parity_result)
    reasons = eligibility.judge(chosen, protocol, parity_result)
    known = known_answers.of_run(trials, protocol)
    open_because = _open(chosen, attempts, trials, measured, known, protocol)
    profile_of = facts.by_candidate(chosen, "candidate/profile")
    hot = language.decide(measured, reasons, layouts, protocol, open_because)
    decision = protocol["decision"]
    data: Document = {
        "run_id": of_run.run_id,
        "model": of_run.model,
        "shape": of_run.shape,
        "synthetic": of_run.synthetic,
        "machine": of_run.machine,
        "context_length": of_run.context_length,
        "measured": of_run.measured,
        "build_id": _build_id(events),
        "protocol_sha256": protocol_sha256,
        "protocol": protocol["name"],
        "run": running.decide(
            measured, reasons, quality_result, hot, layouts, profile_of, protocol, open_because
        ).as_json(),
        "language": hot.as_json(),
        "cold": cold.decide(chosen, protocol, attempts),
        "arms": [
            {**arm, "profile": profile_of.get(name, "")}
            for cell in measured.cells
            for name in protocol["candidates"]
            if (arm := measured.arm(cell, name)) is not None
        ],
        "contrasts": _contrasts(measured, layouts, protocol),
        "known_answers": known.as_json(),
        "error_rates": error_rates.of_run(
            measured,
            trials,
            reasons.first_eligible(decision["challengers"]),
            reasons.to_beat(decision["incumbents"]),
            protocol,
        ),
        "parity": parity_result,
        "quality": quality_result,
        "eligibility": reasons.as_json(),
        "attempts": attempts,
        "validity": trials.summary,
        "skipped": _skipped(chosen),
        "hypotheses": attribution.hypotheses(measured, of_run.shape, layouts, protocol),
        "control": attribution.control(trials, protocol),
        "direct_write": attribution.direct_write(chosen, trials, protocol),
    }
    return Verdict(data)


def refuse_mixed(events: pd.DataFrame, protocol: Protocol) -> None:
    """`MixedProtocol` for events that were not all made under this protocol."""
    given = registration.sha256(protocol)
    if strange := sorted(set(events["protocol_sha256"]) - {given}):
        raise MixedProtocol(
            f"events carry protocol {strange[0][:12]}, the protocol given is {given[:12]}; a run never mixes "
            "protocols: decide each run with its own protocol.json"
        )


def _table(events: object) -> pd.DataFrame:
    """Typed rows, numbered from 0; `InvalidArgument` for what is no table of events."""
    if not isinstance(events, pd.DataFrame):
        raise InvalidArgument(
            f"events is {shown(events)}; give a table of kvtrial.run.events.COLUMNS"
        )
    if missing := [name for name in COLUMNS if name not in events.columns]:
        raise InvalidArgument(
            f"events has no column {', '.join(missing)}; give a table of kvtrial.run.events.COLUMNS"
        )
    if not events.columns.is_unique:
        raise InvalidArgument("events has a column twice; give each once")
    if events.empty:
        raise InvalidArgument("events has no row; give those of a run, as read_run returns them")
    rows = events.reset_index(drop=True)
    for name, (dtype, _) in COLUMNS.items():
        try:
            rows[name] = rows[name].astype(dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArgument(
                f"events has a column {name} that is no {dtype}: {error}"
            ) from None
        if dtype == "string" and rows[name].isna().any():
            raise InvalidArgument(
                f"events has a column {name} with missing texts; give '' for none"
            )
    return rows


def _build_id(events: pd.DataFrame) -> str:
    builds = sorted(set(events["build_id"]))
    return builds[0] if len(builds) == 1 else "mixed: " + ", ".join(builds)


def _open(
    events: pd.DataFrame,
    attempts: dict[str, Any],
    trials: validity.Judged,
    measured: Measured,
    known: known_answers.KnownAnswers,
    protocol: Protocol,
) -> str | None:
    """Why no question about the hot tier can be decided, or None."""
    if (mixed := output.binaries(events)) is not None:
        return mixed
    for cell in rule.judged_cells(protocol):
        if (why := trials.broken.get(cell_name(cell))) is not None:
            return f"context {cell['context']} can't be decided: {why}"
    for stage in NEEDED:
        if not attempts.get(stage, {}).get("complete"):
            return f"stage {stage} has no complete attempt"
    for cell in rule.judged_cells(protocol):
        if (why := measured.short(cell)) is not None:
            return f"context {cell['context']} can't be decided: {why}"
    return known.fault


def _contrasts(measured: Measured, layouts: Layouts, protocol: Protocol) -> list[Row]:
    """Challengers and profiles over every incumbent, incumbents over the reference; where both were measured."""
    decision = protocol["decision"]
    pairs = [
        *product([*decision["challengers"], *decision["profiles"]], decision["incumbents"]),
        *((n, decision["reference"]) for n in decision["incumbents"] if n != decision["reference"]),
    ]
    return [
        {
            "challenger": challenger,
            "incumbent": incumbent,
            "layouts_differ": layouts.differ(challenger, incumbent),
            **cell_key(cell),
            **measured.contrast(cell, challenger, incumbent).as_json(),
        }
        for challenger, incumbent in pairs
        for cell in measured.cells
        if measured.has(cell, challenger) and measured.has(cell, incumbent)
    ]


def _skipped(events: pd.DataFrame) -> list[dict[str, str]]:
    """Cells that the machine could not hold, each with its reason."""
    rows = events[events["metric"] == "cell/skipped"]
    found = {(str(r["stage"]), cell_name(r), str(r["text"])) for _, r in rows.iterrows()}
    return [dict(zip(("stage", "cell", "reason"), one)) for one in sorted(found)]
