"""Nobody wins by skipping the work: what was timed is what passed, and gave the right output."""

from __future__ import annotations

from typing import Any

import pytest
from trial_events import REGISTERED, flat, row, trial, with_rows

from kvtrial.decision.verdict import ADOPT, INCONCLUSIVE, KEEP, Verdict, decide
from kvtrial.host import build

ARMS = flat(K0=100.0, A1=80.0, A2=70.0, K1=22.0, K2=15.0, K3=11.0, K4=22.0)
AT = {"context": 4096}


def verdict(*rows: Any) -> Verdict:
    return decide(with_rows(trial(ARMS), list(rows)), REGISTERED)


def test_an_honest_run_adopts() -> None:
    hashes = [
        row("m2", "output_sha256", candidate="K3", block=b, text="same", **AT) for b in (0, 1)
    ]
    tie = row("m2", "m2/margin_at_difference", candidate="K3", block=0, value=0.4, **AT)
    right = row("m1", "m1/output_error", candidate="K3", block=0, value=1.0, shape="9q3kv", **AT)
    kept = row("m2", "m2/output_error", candidate="K3", block=0, value=1.0, **AT)
    assert verdict(*hashes, tie, right, kept).outcome == ADOPT


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [
                row("m2", "output_sha256", candidate="K3", block=0, text="one", **AT),
                row("m2", "output_sha256", candidate="K3", block=1, text="two", **AT),
            ],
            "m2: its output at 4096x1x1 is not the same in every block",
        ),
        (
            [row("m2", "m2/margin_at_difference", candidate="K3", block=0, value=3.0, **AT)],
            "m2: another token than K0's at 4096x1x1 where the margin is 3; a tie is at most 0.5",
        ),
        (
            [row("m2", "m2/margin_at_difference", candidate="K3", block=0, **AT)],  # NaN
            "m2: another token than K0's at 4096x1x1 where the margin is nan",
        ),
        (
            [
                row("m2", "m2/margin_at_difference", candidate="K3", block=b, value=margin, **AT)
                for b, margin in ((0, float("nan")), (1, 0.1))
            ],
            "m2: another token than K0's at 4096x1x1 where the margin is nan",
        ),
        (
            [row("m2", "m2/output_error", candidate="K3", block=0, value=1.5, **AT)],
            "m2: attention after the last step at 4096x1x1 is 1.5 times its error bound off the oracle",
        ),
        (
            [row("m2", "m2/output_error", candidate="K3", block=0, **AT)],  # NaN
            "m2: attention after the last step at 4096x1x1 is nan times its error bound off the oracle",
        ),
        (
            [row("m1", "m1/output_error", candidate="K3", value=1.5, shape="14q2kv", **AT)],
            "m1: a timed output of 14q2kv at 4096 is 1.5 times its error bound off the oracle",
        ),
        (
            [row("m1", "m1/output_error", candidate="K3", shape="14q2kv", **AT)],  # NaN
            "m1: a timed output of 14q2kv at 4096 is nan times its error bound",
        ),
    ],
)
def test_an_arm_whose_timed_output_is_wrong_is_out(rows: list[Any], said: str) -> None:
    found = verdict(*rows)
    assert found.outcome == KEEP  # K4 comes next in the sequence, and ties
    assert any(said in reason for reason in found.data["eligibility"]["K3"])


def test_tokens_that_were_compared_with_nobodys_are_no_evidence() -> None:
    """Where the baseline did not run, its arms' timed tokens are anybody's guess."""
    table = trial(ARMS)
    alone = table[(table["metric"] != "m2/agreed_steps") | (table["candidate"] != "K3")]
    found = decide(alone, REGISTERED)
    assert found.outcome == KEEP
    said = "m2: its tokens at 4096x1x1 were compared with nobody's: K0 gave none"
    assert said in found.data["eligibility"]["K3"]
    assert found.data["eligibility"]["K1"] == []


def test_other_binaries_than_those_that_passed_are_no_trial() -> None:
    parts = [("conformance", "a" * 64), ("m2", "a" * 64), ("m1", "b" * 64)]
    rows = [row(stage, "x", binary_sha256=binary) for stage, binary in parts]
    found = verdict(*rows)
    assert found.outcome == INCONCLUSIVE
    assert "m1 bbbbbbbbbbbb" in found.data["hot"]["reason"]
    assert verdict(*rows[:2]).outcome == ADOPT


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
