"""Recorded traffic, lengths only, as cells of a trial: ``kvtrial protocol --traffic FILE``.

A line of the file is one turn of a conversation. What decodes is weighted by the tokens that it makes: a context in
which thousands of tokens are made counts for more than one in which ten are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtrial.contract.arguments import shown
from kvtrial.run.layout import ConfigError

#: Key of a line → least and largest value, and what holds where it is left out (None: it is required).
KEYS: dict[str, tuple[int, int, int | None]] = {
    "context": (1, 1_048_576, None),
    "generated": (1, 1_048_576, None),
    "concurrent": (1, 64, 1),
    "shared_prefix": (0, 1_048_576, 0),
}
#: Role of a cell → the share of generated tokens that are made at its context or a shorter one.
QUANTILES = {"primary": 0.5, "short": 0.1, "long": 0.9}
#: A longer context gets fewer rounds, as the registered ones do.
LONG, LONG_ROUNDS = 8192, 24


class TrafficInvalid(ConfigError):
    """A line is not what it may be; the message has file, line, value and what is allowed."""


@dataclass(frozen=True)
class Turn:
    """One line.

    Attributes
    ----------
    context : int
        Positions that are filled when its decode begins: the whole conversation so far and the prompt.
    generated : int
        Tokens that it makes.
    concurrent : int
        Sessions that decode at the same time, itself among them.
    shared_prefix : int
        Positions at the context's beginning that other sessions have as well, such as a system prompt.
    session : str
        Which conversation; empty where it is not said.
    """

    context: int
    generated: int
    concurrent: int = 1
    shared_prefix: int = 0
    session: str = ""

    @property
    def middle(self) -> int:
        """Positions when half of its tokens are made."""
        return self.context + self.generated // 2


def read(path: Path) -> list[Turn]:
    """The turns of a file, in their order.

    Raises
    ------
    TrafficInvalid
        It can't be read, is empty, or a line is not what it may be.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TrafficInvalid(f"{path}: can't be read ({error}); give a JSONL file") from None
    found = [_turn(f"{path}: line {n}", line) for n, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise TrafficInvalid(
            f"{path}: has no line; give one JSON object a line, such as {_EXAMPLE}"
        )
    return found


_EXAMPLE = '{"session": "a", "context": 1830, "generated": 120}'


def _turn(where: str, line: str) -> Turn:
    try:
        said = json.loads(line)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise TrafficInvalid(f"{where}: {shown(line)}; give a JSON object, such as {_EXAMPLE}")
    if unknown := sorted(said.keys() - {*KEYS, "session"}):
        raise TrafficInvalid(
            f"{where}: unknown key {shown(unknown[0])}; allowed: session, {', '.join(KEYS)}"
        )
    values: dict[str, Any] = {}
    for key, (low, high, default) in KEYS.items():
        value = said.get(key, default)
        if value is None:
            raise TrafficInvalid(f"{where}: no {key}; give a whole number from {low:,} to {high:,}")
        if type(value) is not int or not low <= value <= high:
            raise TrafficInvalid(
                f"{where}: {key} is {shown(value)}; allowed: a whole number from {low:,} to {high:,}"
            )
        values[key] = value
    if values["shared_prefix"] > values["context"]:
        raise TrafficInvalid(
            f"{where}: shared_prefix is {values['shared_prefix']:,}; allowed: up to the context, "
            f"{values['context']:,}"
        )
    session = said.get("session", "")
    if not isinstance(session, str):
        raise TrafficInvalid(f"{where}: session is {shown(session)}; give a text, or leave it out")
    return Turn(**values, session=session)


def quantile(values: Sequence[int], weights: Sequence[int], share: float) -> int:
    """The smallest value that, with all smaller ones, has at least ``share`` of the weight."""
    wanted, seen = share * sum(weights), 0
    for value, weight in sorted(zip(values, weights)):
        seen += weight
        if seen >= wanted:
            return value
    return max(values)


def restored(turns: Sequence[Turn]) -> list[int]:
    """Positions that each turn finds again, of those that find any: what its conversation held when it left off,
    else the prefix that it shares."""
    held: dict[str, int] = {}
    found = []
    for turn in turns:
        before = min(held.get(turn.session, 0), turn.context) if turn.session else 0
        found.append(max(before, turn.shared_prefix))
        held[turn.session] = turn.context + turn.generated
    return [positions for positions in found if positions]


def replace_cells(registered: Any, turns: Sequence[Turn], source: str) -> list[str]:
    """Put the cells of the traffic in place of a registration's; what was made and what is lost, in words.

    Deciding cells have one session and one thread, as the rule has it: at the median context, and at the 10% and
    the 90% quantile. Where sessions decode at the same time, further cells show the median and the 90% quantile of
    their number at the median context.
    """
    weights = [turn.generated for turn in turns]
    at = {
        role: quantile([turn.middle for turn in turns], weights, share)
        for role, share in QUANTILES.items()
    }
    primary = at["primary"]
    crowds = [quantile([t.concurrent for t in turns], weights, share) for share in (0.5, 0.9)]
    cells = [_cell(primary, 1, "primary")]
    cells += [_cell(c, 1, "veto") for c in sorted({at["short"], at["long"]} - {primary})]
    cells += [_cell(primary, n, "extra") for n in sorted(set(crowds) - {1})]
    registered["cells"] = cells
    registered["name"] = f"{registered['name']}-traffic"
    if "control" in registered:
        registered["control"]["context"] = primary
    registered["quality"]["decode"]["context"] = primary
    finds = restored(turns)
    if finds:
        registered["cold"]["prefix_tokens"] = quantile(finds, [1] * len(finds), 0.5)
    sessions = Counter(turn.session for turn in turns if turn.session)
    shared = sum(turn.shared_prefix for turn in turns) / sum(turn.context for turn in turns)
    longest = max(turn.context + turn.generated for turn in turns)
    beyond = sum(t.generated for t in turns if t.middle > at["long"]) / sum(weights)
    said = [
        f"Cells of {source}: {len(turns):,} turns, {sum(weights):,} generated tokens.",
        f"Contexts, weighted by generated tokens: 10% {at['short']:,}, median {primary:,}, 90% {at['long']:,}.",
        f"Decoding at the same time: median {crowds[0]}, 90% {crowds[1]}; the deciding cells have one session.",
    ]
    if finds:
        said.append(
            f"{len(finds):,} turns find positions again: cold.prefix_tokens is their median, "
            f"{registered['cold']['prefix_tokens']:,}."
        )
    if sessions:
        turns_of = sorted(sessions.values())
        said.append(
            f"{len(sessions):,} conversations, median {turns_of[len(turns_of) // 2]} turns: no cell takes turns; "
            "a later turn is the restore of the cold tier, then a decode."
        )
    said.append(
        f"Not measured: {beyond:.0%} of the tokens, at contexts beyond the 90% quantile (longest {longest:,}); "
        "arrival times; prompts of unequal length in one batch."
    )
    if shared:
        said.append(
            f"Not measured: pages shared between sessions, {shared:.0%} of the contexts here; each session of "
            "a cell has a text of its own."
        )
    return said


def _cell(context: int, sessions: int, role: str) -> dict[str, Any]:
    rounds = {"rounds": LONG_ROUNDS} if context > LONG else {}
    return {
        "context": context,
        "sessions": sessions,
        "threads": 1,
        **rounds,
        "role": role,
        "profile": "default",
    }
