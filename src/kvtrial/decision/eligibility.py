"""Who may win, who is compared with, and why not: from events alone."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from kvtrial.decision import facts, output
from kvtrial.registration import Protocol
from kvtrial.run.protocol import entrants


class Why(enum.Enum):
    """Kinds of reason; what follows from each is said by `Reasons`."""

    NOT_BUILT = "not built"
    CONTROL = "a control"
    LACKS = "lacks"
    CONFORMANCE = "conformance"
    PARITY = "parity"
    OUTPUT = "output"
    FAILED = "failed"


#: Not a word about whether what it does is right: it is sound to be compared with.
_NO_DOUBT = {Why.CONTROL, Why.LACKS}


@dataclass(frozen=True)
class Reason:
    """Why a candidate can't win. ``text`` is for people, without the kind."""

    why: Why
    text: str

    def __str__(self) -> str:
        return f"{self.why.value}: {self.text}"


class Reasons(Mapping[str, Sequence[Reason]]):
    """Candidate → reasons why it can't win; none means eligible."""

    def __init__(self, of: dict[str, list[Reason]]) -> None:
        self._of = of

    def __getitem__(self, name: str) -> list[Reason]:
        return self._of[name]

    def __iter__(self) -> Any:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def eligible(self, name: str) -> bool:
        """Whether it may win."""
        return not self._of[name]

    def first_eligible(self, names: Sequence[str]) -> str | None:
        """The first of these that may win, or None."""
        return next((name for name in names if self.eligible(name)), None)

    def built(self, name: str) -> bool:
        """Whether it is in the trial at all: only who is not is left out of what has to be beaten."""
        return all(reason.why is not Why.NOT_BUILT for reason in self._of[name])

    def to_beat(self, incumbents: Sequence[str]) -> list[str]:
        """Those of the incumbents that a challenger has to beat: all that are built, but for controls."""
        controls = {n for n in incumbents if any(r.why is Why.CONTROL for r in self._of[n])}
        return [n for n in incumbents if self.built(n) and n not in controls]

    def doubts(self, name: str) -> list[Reason]:
        """Reasons that put its own figures in doubt; a lack or a control's role does not."""
        return [reason for reason in self._of[name] if reason.why not in _NO_DOUBT]

    def as_json(self) -> dict[str, list[dict[str, str]]]:
        """What verdict.json holds."""
        return {
            name: [{"why": reason.why.value, "text": reason.text} for reason in own]
            for name, own in self._of.items()
        }


#: A candidate of this role is measured and reported; it never wins and is never compared with.
CONTROL = "control"


def judge(events: pd.DataFrame, protocol: Protocol, parity: dict[str, Any]) -> Reasons:
    """Reasons of every candidate. ``parity`` is what `kvtrial.decision.parity.judge` gave."""
    not_built = facts.by_candidate(events, "candidate/not_built")
    missing = facts.by_candidate(events, "candidate/missing")
    roles = facts.by_candidate(events, "candidate/role")
    outcomes = _by_candidate(events, "conformance/outcome")
    failures: dict[str, list[tuple[str, str]]] = {}
    for metric in ("failed", "not_run"):
        for name, rows in _by_candidate(events, metric).items():
            failures.setdefault(name, []).extend(zip(rows["stage"], rows["text"]))
    wrong_output = output.reasons(events)
    found: dict[str, list[Reason]] = {}
    for name in entrants(protocol):
        if not_built.get(name):
            found[name] = [Reason(Why.NOT_BUILT, not_built[name])]
            continue
        mine: list[Reason] = []
        if roles.get(name) == CONTROL or name not in protocol["candidates"]:
            mine.append(Reason(Why.CONTROL, "measured, never to win"))
        if (own := outcomes.get(name)) is None:
            mine.append(Reason(Why.CONFORMANCE, "not run"))
        else:
            if not (own["value"] == 1).any():
                mine.append(Reason(Why.CONFORMANCE, "no test was passed"))
            for test in sorted(own.loc[own["value"] == 0, "text"]):
                mine.append(Reason(Why.CONFORMANCE, f"{test} failed"))
        if missing.get(name):
            mine.append(Reason(Why.LACKS, missing[name]))
        mine += [
            Reason(Why.PARITY, text.removeprefix("parity: "))
            for text in parity["candidates"].get(name, {}).get("reasons", [])
        ]
        mine += [Reason(Why.OUTPUT, text) for text in wrong_output.get(name, [])]
        for stage, text in failures.get(name, []):
            reason = Reason(Why.FAILED, f"{stage}: {text}")
            if reason not in mine:
                mine.append(reason)
        found[name] = mine
    return Reasons(found)


def _by_candidate(events: pd.DataFrame, metric: str) -> dict[str, pd.DataFrame]:
    return {str(name): own for name, own in events[events["metric"] == metric].groupby("candidate")}
