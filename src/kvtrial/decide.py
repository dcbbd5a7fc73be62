"""The decision rule: a pure function of (events, protocol).

``decide(events, protocol)`` reads nothing else: no clock, no file, no candidate. Rows that it needs:

* stage ``run``: ``run/run_id``, ``run/model``, ``run/machine``, ``run/synthetic``, ``run/profile`` and per
  candidate ``candidate/profile``, ``candidate/language``, ``candidate/missing``, ``candidate/not_built``;
* stage ``conformance``: ``conformance/outcome`` (1 passed, 0 failed, NaN gap; text names test and P);
* stage ``fp16_parity``: ``parity/token``, ``parity/margin``, ``parity/max_abs_logit_difference``;
* stages ``m1``, ``m2``, ``cold_tier``: measurements by block with the probes of each block;
* every stage: ``attempt/complete``, one row per attempt whose planned blocks are all there.

The rule itself is spelled out in docs/protocol.md. Comparisons are made on logarithms with the
registered relative slack, so that exactly 10% adopts and exactly 3% passes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import pandas as pd

from kvtrial import characteristics, gates, parity, rule, stats
from kvtrial import protocol as registered
from kvtrial.contrasts import Measured, cell_key, contrast, digits

ADOPT, KEEP, INCONCLUSIVE = "ADOPT", "KEEP", "INCONCLUSIVE"


class MixedProtocol(ValueError):
    """The events were not all made under the protocol given."""


@dataclass(frozen=True)
class Verdict:
    """What was decided and why; ``data`` is what verdict.json holds."""

    data: dict[str, Any]

    @property
    def outcome(self) -> str:
        """ADOPT, KEEP or INCONCLUSIVE, for the hot tier."""
        return str(self.data["hot"]["outcome"])

    @property
    def adopted(self) -> str | None:
        """The hot store to run, or None when inconclusive."""
        return self.data["hot"]["adopted"]

    def to_json(self) -> str:
        """Canonical text of verdict.json: ratios to 12 digits, no times of day, no paths."""
        return json.dumps(self.data, indent=2, sort_keys=True, allow_nan=False) + "\n"


def decide(events: pd.DataFrame, protocol: dict[str, Any]) -> Verdict:
    """Apply the fixed rule.

    Parameters
    ----------
    events : DataFrame
        The columns of `kvtrial.events.COLUMNS`; every attempt of every stage.
    protocol : dict
        The registered protocol, as `kvtrial.protocol.load` returns it.

    Raises
    ------
    MixedProtocol
        An event carries another protocol's hash.
    ProtocolError
        The protocol is not what its schema allows.
    """
    registered.check(protocol)
    protocol_sha256 = registered.sha256(protocol)
    strange = sorted(set(events["protocol_sha256"]) - {protocol_sha256})
    if strange:
        raise MixedProtocol(
            f"events carry protocol {strange[0][:12]}, the protocol given is {protocol_sha256[:12]}; a "
            "run never mixes protocols: decide each run with its own protocol.json"
        )
    facts = _run_facts(events)
    chosen, attempts = _first_complete_attempts(events)
    trials = gates.judge(chosen, protocol)
    measured = Measured(trials.valid_rows, protocol, facts["profile"])
    parity_result = parity.judge(chosen, protocol)
    eligibility = _eligibility(chosen, protocol, parity_result)
    hot = _decide_hot(measured, trials, eligibility, protocol)
    data = {
        "run_id": facts["run_id"],
        "protocol_sha256": protocol_sha256,
        "protocol": protocol["name"],
        "model": facts["model"],
        "synthetic": facts["synthetic"],
        "machine": facts["machine"],
        "build_id": facts["build_id"],
        "hot": hot,
        "characteristics": characteristics.of_run(
            measured,
            trials,
            rule.tested(protocol["decision"]["challengers"], eligibility),
            _comparators(eligibility, protocol),
            protocol,
        ),
        "parity": parity_result,
        "eligibility": eligibility,
        "attempts": attempts,
        "gates": trials.summary,
        "hypotheses": _hypotheses(measured, protocol),
        "profiles": _profiles(measured, eligibility, parity_result, protocol),
        "direct_write": _direct_write(chosen, protocol),
        "cold": _decide_cold(chosen, protocol),
    }
    return Verdict(data)


# --------------------------------------------------------------------------------------------------
# What was run


def _run_facts(events: pd.DataFrame) -> dict[str, Any]:
    rows = events[events["stage"] == "run"]
    texts = {m: t for m, t in zip(rows["metric"], rows["text"]) if m.startswith("run/")}
    builds = sorted(set(events["build_id"]))
    return {
        "run_id": texts.get("run/run_id", "unknown"),
        "model": texts.get("run/model", "unknown"),
        "machine": texts.get("run/machine", "unknown"),
        "synthetic": texts.get("run/synthetic", "") == "true",
        "profile": texts.get("run/profile", "default"),
        "build_id": builds[0] if len(builds) == 1 else "mixed: " + ", ".join(builds),
    }


def _first_complete_attempts(events: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The rows that decide: each stage's first complete attempt. All attempts are counted."""
    kept, attempts = [], {}
    for stage, rows in events.groupby("stage", sort=True):
        complete = sorted(set(rows.loc[rows["metric"] == "attempt/complete", "attempt"]))
        every = sorted(set(rows["attempt"]))
        decides = complete[0] if complete else every[-1]
        kept.append(rows[rows["attempt"] == decides])
        attempts[str(stage)] = {
            "made": len(every),
            "complete": len(complete),
            "decided_by": int(decides),
        }
    return pd.concat(kept, ignore_index=True), attempts


def _candidate_texts(events: pd.DataFrame, metric: str) -> dict[str, str]:
    rows = events[(events["stage"] == "run") & (events["metric"] == metric)]
    return dict(zip(rows["candidate"], rows["text"]))


def _eligibility(
    events: pd.DataFrame, protocol: dict[str, Any], parity_result: dict[str, Any]
) -> dict[str, list[str]]:
    """Candidate → reasons why it can't win; an empty list means eligible."""
    not_built = _candidate_texts(events, "candidate/not_built")
    missing = _candidate_texts(events, "candidate/missing")
    outcomes = events[events["metric"] == "conformance/outcome"]
    failed_rows = events[events["metric"].isin(["failed", "not_run"])]
    reasons: dict[str, list[str]] = {}
    for name in protocol["candidates"]:
        mine: list[str] = []
        if not_built.get(name):
            reasons[name] = [f"not built: {not_built[name]}"]
            continue
        own = outcomes[outcomes["candidate"] == name]
        if own.empty:
            mine.append("conformance: not run")
        for test in sorted(own.loc[own["value"] == 0, "text"]):
            mine.append(f"conformance: {test} failed")
        if missing.get(name):
            mine.append(f"lacks: {missing[name]}")
        mine.extend(parity_result["candidates"].get(name, {}).get("reasons", []))
        for _, row in failed_rows[failed_rows["candidate"] == name].iterrows():
            text = f"{row['stage']}: {row['text']}"
            if text not in mine:
                mine.append(text)
        reasons[name] = mine
    return reasons


def _only_lacks(reasons: list[str]) -> bool:
    """Sound, if perhaps without a capability: fit to be compared with, not always to win."""
    return all(r.startswith("lacks: ") for r in reasons)


def _comparators(eligibility: dict[str, list[str]], protocol: dict[str, Any]) -> list[str]:
    """The Cython FP32 arms that a challenger has to beat."""
    return [n for n in protocol["decision"]["incumbents"] if _only_lacks(eligibility[n])]


# --------------------------------------------------------------------------------------------------
# The hot tier


def _decide_hot(
    measured: Measured,
    trials: gates.Judged,
    eligibility: dict[str, list[str]],
    protocol: dict[str, Any],
) -> dict[str, Any]:
    decision = protocol["decision"]
    judged_cells = rule.judged_cells(protocol)
    comparators = _comparators(eligibility, protocol)
    contrasts = [
        {
            "challenger": challenger,
            "incumbent": incumbent,
            **cell_key(cell),
            **contrast(
                measured.tokens_per_s(cell, challenger),
                measured.tokens_per_s(cell, incumbent),
                protocol,
            ),
        }
        for challenger in [*decision["challengers"], *decision["profiles"]]
        for cell in measured.cells
        for incumbent in decision["incumbents"]
        if measured.tokens_per_s(cell, challenger) and measured.tokens_per_s(cell, incumbent)
    ]
    arms = [
        arm
        for cell in measured.cells
        for name in protocol["candidates"]
        if (arm := measured.arm(cell, name)) is not None
    ]
    result: dict[str, Any] = {"contrasts": contrasts, "arms": arms}

    def inconclusive(reason: str) -> dict[str, Any]:
        return {
            **result,
            "outcome": INCONCLUSIVE,
            "adopted": None,
            "reference": None,
            "retired": [],
            "reason": reason,
        }

    for cell in judged_cells:
        broken = trials.broken.get(gates.cell_name(cell))
        if broken:
            return inconclusive(f"gate broken at context {cell['context']}: {broken}")
    winners = [n for n in decision["incumbents"] if not eligibility[n]]
    if not winners:
        return inconclusive(
            "no eligible Cython FP32 arm: " + _listed(eligibility, decision["incumbents"])
        )
    rates: dict[str, float] = {}
    for name in winners:
        for cell in judged_cells:
            blocks = measured.tokens_per_s(cell, name)
            if len(blocks) < decision["min_blocks"]:
                return inconclusive(
                    f"{name} has {len(blocks)} valid blocks at context {cell['context']}; "
                    f"{decision['min_blocks']} are needed"
                )
        rates[name] = float(
            np.mean(np.log(list(measured.tokens_per_s(judged_cells[0], name).values())))
        )
    best = max(winners, key=lambda n: rates[n])

    said = [
        f"{name} is out: {'; '.join(eligibility[name])}"
        for name in takewhile(lambda n: eligibility[n], decision["challengers"])
    ]
    challenger = rule.tested(decision["challengers"], eligibility)
    if challenger is not None:
        outcome, reason = _judge_challenger(challenger, comparators, measured, protocol)
        said.append(f"{challenger}: {reason}")
        if outcome == INCONCLUSIVE:
            return inconclusive(". ".join(said))
        if outcome == ADOPT:
            return {
                **result,
                "outcome": ADOPT,
                "adopted": challenger,
                "reference": "K1",
                "retired": [n for n in ("K0",) if n in protocol["candidates"]],
                "reason": ". ".join(said),
            }
        untested = decision["challengers"][decision["challengers"].index(challenger) + 1 :]
        if untested:
            said.append(
                f"{', '.join(untested)} not tested: the fixed sequence ends at {challenger}"
            )
    said.append(f"Cython stays, by its best arm {best}")
    return {
        **result,
        "outcome": KEEP,
        "adopted": best,
        "reference": best,
        "retired": [n for n in decision["challengers"] if n in protocol["candidates"]],
        "reason": ". ".join(said),
    }


def _listed(eligibility: dict[str, list[str]], names: list[str]) -> str:
    return "; ".join(f"{n} ({', '.join(eligibility[n])})" for n in names)


def _judge_challenger(
    challenger: str, comparators: list[str], measured: Measured, protocol: dict[str, Any]
) -> tuple[str, str]:
    """ADOPT, KEEP or INCONCLUSIVE for one challenger, with the reason."""
    decision = protocol["decision"]
    cells = rule.judged_cells(protocol)
    try:
        primary, *vetoes = (measured.log_ratios(c, challenger, comparators) for c in cells)
    except stats.Unusable as problem:
        return INCONCLUSIVE, str(problem)
    adopted = bool(rule.adopts(primary, vetoes, decision))
    worst_allowed = f"{decision['veto_regression']:.0%}"
    at_least = f"{1 + decision['adopt_lower_bound']:.2f}"
    shortfalls: list[str] = []
    notes: list[str] = []
    for cell, logs in zip(cells, [primary, *vetoes]):
        mean, low, _ = stats.t_bounds(logs, decision["confidence"])
        passed = rule.passes(cell["role"], mean, low, decision)
        cleared = rule.passes(cell["role"], low, low, decision)
        for i, incumbent in enumerate(comparators):
            where = f"against {incumbent} at {cell['context']}"
            ratio, bound = math.exp(mean[i]), math.exp(low[i])
            if cell["role"] == "primary" and not passed[i]:
                shortfalls.append(
                    f"{where} the lower bound of its ratio is {bound:.4f} (estimate {ratio:.4f}, "
                    f"n = {logs.shape[-1]}); at least {at_least} adopts"
                )
            elif not passed[i]:
                shortfalls.append(
                    f"vetoed {where}: ratio {ratio:.4f} is worse by more than {worst_allowed}"
                )
            elif not cleared[i]:
                notes.append(
                    f"passes the veto {where} with ratio {ratio:.4f}, whose interval from "
                    f"{bound:.4f} does not clear -{worst_allowed}"
                )
    if not adopted:
        return KEEP, shortfalls[0]
    reason = (
        f"the lower bound is at least {at_least} against every Cython FP32 arm "
        f"({', '.join(comparators)}), and no veto cell is worse by more than {worst_allowed}"
    )
    return ADOPT, "; ".join([reason, *notes])


# --------------------------------------------------------------------------------------------------
# Attribution, profiles, direct write, cold tier


def _hypotheses(measured: Measured, protocol: dict[str, Any]) -> list[dict[str, Any]]:
    """Each registered contrast: decode throughput, and attention alone, at every cell measured."""
    found = []
    ways: list[tuple[str, Callable[[dict[str, Any], str], dict[int, float]], bool]] = [
        ("m2/tokens_per_s", measured.tokens_per_s, False),
        ("m1/attention_speed", measured.attention_ms, True),
    ]
    for hypothesis in protocol["hypotheses"]:
        for cell in measured.cells:
            for metric, values, inverse in ways:
                start = values(cell, hypothesis["from"])
                end = values(cell, hypothesis["to"])
                if not start or not end:
                    continue
                top, bottom = (start, end) if inverse else (end, start)
                found.append(
                    {
                        **hypothesis,
                        **cell_key(cell),
                        "metric": metric,
                        **contrast(top, bottom, protocol),
                    }
                )
    return found


def _profiles(
    measured: Measured,
    eligibility: dict[str, list[str]],
    parity_result: dict[str, Any],
    protocol: dict[str, Any],
) -> dict[str, Any]:
    """Reduced-precision profiles: default only with parity evidence; FP32 stays available."""
    primary = next(c for c in protocol["cells"] if c["role"] == "primary")
    found = {}
    for name in protocol["decision"]["profiles"]:
        reasons = list(eligibility[name])
        if name not in parity_result["candidates"]:
            reasons.append("parity: no evidence")
        gain = contrast(
            measured.tokens_per_s(primary, name), measured.tokens_per_s(primary, "K1"), protocol
        )
        found[name] = {"default_allowed": not reasons, "reasons": reasons, "against_K1": gain}
    return found


def _direct_write(events: pd.DataFrame, protocol: dict[str, Any]) -> dict[str, Any] | None:
    """Reserved slots against scratch and append: identical bytes, and step time not inferior."""
    rows = events[events["stage"] == "direct_write"]
    if rows.empty:
        return None
    margin = protocol["direct_write"]["non_inferiority"]
    found: dict[str, Any] = {}
    for name, own in rows[rows["metric"] == "direct/step_ms"].groupby("candidate"):
        sides = {
            text: {int(b): float(v.mean()) for b, v in half.groupby("block")["value"]}
            for text, half in own.groupby("text")
        }
        speed = contrast(sides.get("append", {}), sides.get("direct", {}), protocol)
        identical = rows[(rows["candidate"] == name) & (rows["metric"] == "direct/identical")]
        saved = rows[(rows["candidate"] == name) & (rows["metric"] == "direct/bytes_not_copied")]
        found[str(name)] = {
            "identical": bool(len(identical) and (identical["value"] == 1).all()),
            "speed": speed,
            "non_inferior": bool(
                speed["ratio"] is not None
                and speed["ci95"][0] is not None
                and math.log(speed["ci95"][0])
                >= math.log1p(-margin) - protocol["decision"]["relative_slack"]
            ),
            "bytes_not_copied_per_token": digits(float(saved["value"].mean()))
            if len(saved)
            else None,
        }
    return found


def _decide_cold(events: pd.DataFrame, protocol: dict[str, Any]) -> dict[str, Any]:
    """Z1 or Z2 by restore latency at equal durability; RocksDB is the index either way."""
    rows = events[events["stage"] == "cold_tier"]
    figures: dict[str, dict[str, Any]] = {}
    for (name, metric), own in rows[rows["metric"].str.startswith("cold/")].groupby(
        ["candidate", "metric"]
    ):
        numbers = own["value"].dropna()
        if len(numbers):
            figures.setdefault(str(name), {})[str(metric).removeprefix("cold/")] = digits(
                float(numbers.median())
            )
    decide_by = protocol["cold"]["decide_by"]
    result: dict[str, Any] = {"index": "RocksDB", "decided_by": decide_by, "figures": figures}

    def inconclusive(reason: str) -> dict[str, Any]:
        return {**result, "adopted": None, "reason": reason}

    times = {
        name: {
            int(b): float(v.median())
            for b, v in rows[
                (rows["candidate"] == name) & (rows["metric"] == f"cold/{decide_by}")
            ].groupby("block")["value"]
        }
        for name in ("Z1", "Z2")
    }
    for name in ("Z1", "Z2"):
        crash = rows[(rows["candidate"] == name) & (rows["metric"] == "cold/crash_recovered")]
        if crash.empty:
            return inconclusive(f"{name}: no crash evidence; equal durability is not shown")
        if not (crash["value"] == 1).all():
            return inconclusive(f"{name} lost acknowledged pages after a crash")
    fsyncs = {
        name: set(
            rows[(rows["candidate"] == name) & (rows["metric"] == "cold/fsyncs_per_batch")]["value"]
        )
        for name in ("Z1", "Z2")
    }
    if fsyncs["Z1"] != fsyncs["Z2"]:
        return inconclusive(f"fsyncs per batch differ: Z1 {fsyncs['Z1']}, Z2 {fsyncs['Z2']}")
    ratio = contrast(times["Z1"], times["Z2"], protocol)
    result["z1_over_z2"] = ratio
    if ratio["ratio"] is None:
        return inconclusive(f"restore latency: {ratio['problem']}")
    adopted = "Z2" if ratio["ratio"] >= 1 else "Z1"
    low, high = ratio["ci95"]
    clear = "" if not low <= 1 <= high else "; its interval includes 1, so this is close to a tie"
    reason = (
        f"{adopted} restores faster at equal durability: Z1 takes {ratio['ratio']:.3f} times Z2's time "
        f"({low:.3f} to {high:.3f}, n = {ratio['n_blocks']}){clear}"
    )
    return {**result, "adopted": adopted, "reason": reason}
