"""The decision rule: a pure function of (events, protocol).

``decide(events, protocol)`` reads nothing else: no clock, no file, no candidate. Rows that it needs:

* stage ``run``: ``run/run_id``, ``run/model``, ``run/machine``, ``run/synthetic``, ``run/shape``,
  ``run/context_length``, ``run/profile``, ``run/usable_cpus`` and per candidate
  ``candidate/profile``, ``candidate/role``, ``candidate/layout``, ``candidate/missing``,
  ``candidate/not_built``;
* stage ``conformance``: ``conformance/outcome`` (1 passed, 0 failed, NaN gap; text names test and P);
* stage ``parity``: ``parity/positions``, ``parity/max_abs_logit_difference``, ``quality/kld``,
  ``quality/worst_kld``, ``quality/top1_agrees``, by chunk, and the same of a decode, by step;
* stages ``m1``, ``m2``, ``aa``, ``control``, ``direct_write``, ``cold_tier``: measurements by block
  with the probes of each block;
* every stage: ``attempt/complete``, one row per attempt whose planned blocks are all there.

The rule itself is spelled out in docs/protocol.md. Comparisons are made on logarithms with the
registered relative slack, so that exactly 10% adopts and exactly 3% passes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pandas as pd

from kvtrial.decision import (
    attribution,
    eligibility,
    error_rates,
    gates,
    known_answers,
    language,
    output,
    parity,
    rule,
)
from kvtrial.decision.break_even import restore_against_recompute
from kvtrial.decision.contrasts import Layouts, Measured, contrast, digits
from kvtrial.decision.language import ADOPT, INCONCLUSIVE, KEEP
from kvtrial.run import protocol as registered

__all__ = ["ADOPT", "INCONCLUSIVE", "KEEP", "MixedProtocol", "Verdict", "decide"]


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
        The columns of `kvtrial.run.events.COLUMNS`; every attempt of every stage.
    protocol : dict
        The registered protocol, as `kvtrial.run.protocol.load` returns it.

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
    measured = Measured(trials.valid_rows, protocol, facts["profile"], facts["usable_cpus"])
    layouts = Layouts(chosen)
    parity_result = parity.judge(chosen, protocol)
    reasons = eligibility.judge(chosen, protocol, parity_result)
    data = {
        "run_id": facts["run_id"],
        "protocol_sha256": protocol_sha256,
        "protocol": protocol["name"],
        "model": facts["model"],
        "shape": facts["shape"],
        "synthetic": facts["synthetic"],
        "machine": facts["machine"],
        "build_id": facts["build_id"],
        "hot": language.decide(
            measured, trials, reasons, layouts, protocol, output.binaries(chosen)
        ),
        "characteristics": {
            **error_rates.of_run(
                measured,
                trials,
                rule.tested(protocol["decision"]["challengers"], reasons),
                eligibility.comparators(reasons, protocol),
                protocol,
            ),
            "aa": known_answers.of_run(trials, protocol),
        },
        "parity": parity_result,
        "eligibility": reasons,
        "attempts": attempts,
        "gates": trials.summary,
        "skipped": _skipped(chosen),
        "hypotheses": attribution.hypotheses(measured, facts["shape"], layouts, protocol),
        "profiles": attribution.profiles(measured, reasons, parity_result, layouts, protocol),
        "control": attribution.control(trials.valid_rows, protocol),
        "direct_write": attribution.direct_write(chosen, trials.valid_rows, protocol),
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
        "shape": texts.get("run/shape", ""),
        "synthetic": texts.get("run/synthetic", "") == "true",
        "profile": texts.get("run/profile", "default"),
        "usable_cpus": int(texts.get("run/usable_cpus", "1")),
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


def _skipped(events: pd.DataFrame) -> list[dict[str, str]]:
    """Cells that the machine could not hold, each with its reason."""
    rows = events[events["metric"] == "cell/skipped"]
    found = {(str(r["stage"]), gates.cell_name(r), str(r["text"])) for _, r in rows.iterrows()}
    return [dict(zip(("stage", "cell", "reason"), one)) for one in sorted(found)]


# --------------------------------------------------------------------------------------------------
# The cold tier


def _decide_cold(events: pd.DataFrame, protocol: dict[str, Any]) -> dict[str, Any]:
    """Z1 or Z2 by restore latency at equal durability; RocksDB is the index either way."""
    everything = events[events["stage"] == "cold_tier"]
    prefix = protocol["cold"]["prefix_tokens"]
    rows = everything[everything["context"].isin([0, prefix])]
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
    result: dict[str, Any] = {
        "index": "RocksDB",
        "decided_by": decide_by,
        "figures": figures,
        **restore_against_recompute(everything, prefix),
    }

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
        broken = sorted(set(crash[crash["value"] != 1]["text"]))
        if broken:
            return inconclusive(f"{name} broke a promise after: {', '.join(broken)}")
    fsyncs = {
        name: set(
            rows[(rows["candidate"] == name) & (rows["metric"] == "cold/fsyncs_per_batch")]["value"]
        )
        for name in ("Z1", "Z2")
    }
    if not all(fsyncs.values()):
        return inconclusive("fsyncs per batch were not counted; equal durability is not shown")
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
