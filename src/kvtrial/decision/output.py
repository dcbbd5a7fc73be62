"""Whether the timed code did the work: judged from events, so that nobody wins by skipping it.

The compiled modules of every stage are those that passed conformance. At steps and layers that the seed drew,
the output of the real, timed call is within the error bound of the float64 oracle, and the row that was handed
in is what the store gives back. An arm gives the same bytes in every block of a cell.

Tokens and logits are no part of it: the quantised decode rounds activations, which turns the last bit of a sum
into differences as large as the quantisation error itself (ADR 15).
"""

from __future__ import annotations

import pandas as pd

from kvtrial.measure.plan import cell_name

_KEYS = ["candidate", "context", "sessions", "threads", "shape"]
#: Metric → what it says; more than 1 of its bound is wrong.
_BOUNDED = {
    "m1/output_error": "a timed output is {:.3g} times its error bound off the oracle",
    "m2/output_error": "a timed output is {:.3g} times its error bound off the oracle",
    "m2/row_error": "a row that was handed in comes back {:.3g} times its storage bound off",
}
_SAME_BYTES = {"output_xxh3": "logits", "rows_xxh3": "rows"}


def binaries(events: pd.DataFrame) -> str | None:
    """Why the stages can't be one trial: their compiled modules differ. None where they are equal."""
    found = events.loc[events["binary_sha256"] != "", ["stage", "binary_sha256"]].drop_duplicates()
    if len(set(found["binary_sha256"])) <= 1:
        return None
    said = "; ".join(
        f"{stage} {binary[:12]}" for stage, binary in sorted(found.itertuples(index=False))
    )
    return f"the compiled modules are not the same in every stage: {said}"


def reasons(events: pd.DataFrame) -> dict[str, list[str]]:
    """Candidate → what was wrong with its output in timed runs; only those where something was."""
    found: dict[str, list[str]] = {}
    timed = events[events["stage"].isin(["m1", "m2"])]
    for metric, text in _BOUNDED.items():
        own = timed[timed["metric"] == metric]
        for (name, *cell), errors in own.groupby(_KEYS)["value"]:
            worst = errors.max(skipna=False)
            if not worst <= 1.0:  # NaN is wrong too
                where = f"{metric.partition('/')[0]} at {_where(cell)}"
                found.setdefault(str(name), []).append(f"{where}: {text.format(worst)}")
    for metric, what in _SAME_BYTES.items():
        own = timed[timed["metric"] == metric]
        for (name, *cell), texts in own.groupby(_KEYS)["text"]:
            if len(set(texts)) > 1:
                found.setdefault(str(name), []).append(
                    f"m2 at {_where(cell)}: its {what} are not the same in every block"
                )
    return found


def _where(cell: list[object]) -> str:
    return cell_name(dict(zip(_KEYS[1:], cell)))
