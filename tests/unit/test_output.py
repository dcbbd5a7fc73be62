"""Nobody wins by skipping the work: what was timed is what passed, and gave the right output."""

from __future__ import annotations

import math
from typing import Any

import pytest
from trial_events import BLOCKS, REGISTERED, arm_rows, flat, row, trial, with_rows, without

from kvtrial.decision import output
from kvtrial.decision.verdict import ADOPT, KEEP, decide
from kvtrial.host import build
from kvtrial.run import events

ARMS = flat(K0=100.0, A1=80.0, A2=70.0, K1=22.0, K2=15.0, K3=11.0, K4=22.0)
AT = {"context": 4096}


def reasons(*rows: Any) -> dict[str, list[str]]:
    """What is wrong with the output of K1 and K3, whose blocks are right but for the rows given."""
    own = [
        found
        for name in ("K1", "K3")
        for block in range(2)
        for found in arm_rows(name, {0: 20.0, 1: 20.0}, block=block, **AT)
    ]
    return output.reasons(events.to_frame([*own, *rows]))


def k3(metric: str, *, stage: str = "m2", **columns: Any) -> dict[str, Any]:
    found: dict[str, Any] = row(stage, metric, candidate="K3", **{"block": 0, **AT, **columns})
    return found


def test_right_output_gives_no_reason() -> None:
    assert reasons() == {}
    # One time its bound is right.
    for metric in ("m2/output_error", "m2/row_error"):
        assert reasons(k3(metric, value=1.0)) == {}
    assert reasons(k3("m1/output_error", stage="m1", value=1.0, shape="9q3kv")) == {}


OFF = "times its error bound off the oracle"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (k3("m2/output_error", value=1.0000001), f"m2 at 4096x1x1: a timed output is 1 {OFF}"),
        (k3("m2/output_error", value=1.5), f"m2 at 4096x1x1: a timed output is 1.5 {OFF}"),
        (k3("m2/output_error", value=math.inf), f"m2 at 4096x1x1: a timed output is inf {OFF}"),
        (k3("m2/output_error"), f"m2 at 4096x1x1: a timed output is nan {OFF}"),
        (
            k3("m2/row_error", value=2.0),
            "m2 at 4096x1x1: a row that was handed in comes back 2 times its storage bound off",
        ),
        (
            k3("m2/row_error"),
            "m2 at 4096x1x1: a row that was handed in comes back nan times its storage bound off",
        ),
        (
            k3("m1/output_error", stage="m1", value=1.5, shape="14q2kv"),
            f"m1 at 4096x1x1-14q2kv: a timed output is 1.5 {OFF}",
        ),
        (
            k3("m1/output_error", stage="m1", shape="14q2kv"),
            f"m1 at 4096x1x1-14q2kv: a timed output is nan {OFF}",
        ),
        (
            k3("output_xxh3", block=1, text="b" * 32),
            "m2 at 4096x1x1: its logits are not the same in every block",
        ),
        (
            k3("rows_xxh3", block=1, text="b" * 32),
            "m2 at 4096x1x1: its rows are not the same in every block",
        ),
    ],
)
def test_an_arm_whose_timed_output_is_wrong_is_named(wrong: Any, said: str) -> None:
    assert reasons(wrong) == {"K3": [said]}


def test_one_wrong_call_among_many_right_ones_is_not_lost() -> None:
    for value in (1.5, math.nan):
        rows = [k3("m2/output_error", index=n, value=0.1) for n in range(5)]
        assert "K3" in reasons(*rows, k3("m2/output_error", index=5, value=value))


def test_other_bytes_in_another_cell_are_no_contradiction() -> None:
    rows = arm_rows("K3", {0: 5.0}, block=0, context=512)
    for found in rows:
        if found["metric"] in ("output_xxh3", "rows_xxh3"):
            found["text"] = "c" * 32
    assert reasons(*rows) == {}


@pytest.mark.parametrize("metric", ["m2/output_error", "m2/row_error", "output_xxh3", "rows_xxh3"])
def test_timed_steps_without_evidence_show_nothing(metric: str) -> None:
    table = events.to_frame(
        [
            found
            for name in ("K1", "K3")
            for block in range(3)
            for found in arm_rows(name, {0: 20.0}, block=block, **AT)
        ]
    )
    said = f"m2 at 4096x1x1: timed steps without {metric}; nothing is shown"
    assert output.reasons(without(table, metric=metric, candidate="K3")) == {"K3": [said]}
    # Of one block is enough.
    assert output.reasons(without(table, metric=metric, candidate="K3", block=1)) == {"K3": [said]}


def test_tokens_and_logits_of_the_decode_are_no_reason() -> None:
    """Rounding of activations turns the last bit into another token: a rule on it excludes by chance."""
    rows = [
        k3(f"m2/logits_{what}", value=value)
        for what, value in (("kld", 1.0), ("top1", 0.0), ("shift", 9.0))
    ]
    assert reasons(*rows) == {}


def test_what_is_wrong_keeps_an_arm_from_winning() -> None:
    assert decide(trial(ARMS), REGISTERED).outcome == ADOPT
    wrong = [k3("m2/output_error", block=BLOCKS - 1, index=3, value=1.5)]
    found = decide(with_rows(trial(ARMS), wrong), REGISTERED)
    assert found.outcome == KEEP  # K4 comes next in the sequence, and ties
    (reason,) = found.data["eligibility"]["K3"]
    assert reason == {"why": "output", "text": f"m2 at 4096x1x1: a timed output is 1.5 {OFF}"}


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([("conformance", "a"), ("m2", "a"), ("parity", "a")], None),
        ([("conformance", "a"), ("m2", "b")], "conformance aaaaaaaaaaaa; m2 bbbbbbbbbbbb"),
        ([("m2", "a"), ("m2", "b")], "m2 aaaaaaaaaaaa; m2 bbbbbbbbbbbb"),
        ([("m2", "a"), ("run", "")], None),  # nothing compiled was run there
        ([], None),
    ],
)
def test_stages_of_one_trial_ran_the_same_binaries(
    parts: list[tuple[str, str]], said: str | None
) -> None:
    rows = [row(stage, "x", binary_sha256=binary * 64) for stage, binary in parts]
    found = output.binaries(events.to_frame(rows))
    assert found == (said and f"the compiled modules are not the same in every stage: {said}")


def test_the_binary_hash_is_that_of_the_installed_modules(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """By hand over a folder of two libraries: name, size and bytes of each, in order."""
    import hashlib
    import sys
    from types import ModuleType

    digest = hashlib.sha256()
    for name, data in (("hot/_a.so", b"one"), ("hot/lib.dylib", b"three")):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    (tmp_path / "hot" / "notes.txt").write_text("no library")
    facts = ModuleType("kvtrial._build_facts")
    facts.__file__ = str(tmp_path / "_build_facts.py")
    monkeypatch.setitem(sys.modules, "kvtrial._build_facts", facts)
    monkeypatch.setattr("kvtrial._build_facts", facts, raising=False)
    build.binary_sha256.cache_clear()
    try:
        assert build.binary_sha256() == digest.hexdigest()
    finally:
        build.binary_sha256.cache_clear()
