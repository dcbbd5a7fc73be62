"""Progress lines: what is done and what is left, at a pace a log can bear."""

from __future__ import annotations

import pytest

from kvtrial.stages import progress as module
from kvtrial.stages.workload import share_done


def test_a_long_unit_says_its_share_at_most_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with module.Progress("workload", {"session 0": 3.0, "session 1": 1.0}) as progress:
        for second, share in ((1, 0.1), (20, 0.2), (25, 0.3), (40, 0.4)):
            now[0] = 100.0 + second
            progress.within("session 0", share)
        now[0] = 160.0
        progress.done("session 0")
    lines = capsys.readouterr().err.splitlines()
    # 0.2 of 3 in 4 units is 15%: 20 s for that leave 20 * 85 / 15 = 113 s.
    assert lines == [
        "workload: session 0 at 20%, 15% of all, about 2 min left",
        "workload: session 0 at 40%, 30% of all, about 2 min left",
        "workload: session 0 done, 75% of all, about 20 s left",
    ]


def test_a_prefill_is_half_done_later_than_at_half_of_its_positions() -> None:
    assert share_done(0, 16384) == 0.0
    assert share_done(16384, 16384) == 1.0
    # 8192 * (4096 + 8192) / (16384 * (4096 + 16384)) = 3/10
    assert share_done(8192, 16384) == pytest.approx(0.3, rel=1e-12)


def test_an_estimate_is_corrected_by_what_blocks_took(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with module.Progress("m2", {"a0": 10.0, "a1": 10.0, "b0": 40.0}, in_seconds=True) as progress:
        now[0] = 20.0
        progress.expect({"a0": 20.0, "a1": 20.0})  # a0 took twice as long: so will a1
        progress.done("a0")
        progress.done("a1")
        progress.expect({"b1": 40.0})  # a block that was not planned
        progress.done("b0")
        now[0] = 120.0
        progress.done("b1")
    assert capsys.readouterr().err.splitlines() == [
        "m2: estimated time 60 s",
        "m2: a0 done, 25% of all, about 60 s left",
        "m2: a1 done, 50% of all, about 40 s left",
        "m2: b0 done, 67% of all, about 40 s left",
        "m2: b1 done, 100% of all, about 0 s left",
        "m2: took 2 min",
    ]


def test_units_that_run_side_by_side_count_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with module.Progress("conformance", {"K0 at P=16": 1.0, "K1 at P=16": 1.0}) as progress:
        progress.within("K0 at P=16", 0.5)
        now[0] = 20.0
        progress.within("K1 at P=16", 0.3)
        now[0] = 30.0
        progress.done("K0 at P=16")
        now[0] = 44.0
        progress.within("K1 at P=16", 0.5)  # said too little time ago
        progress.done("K1 at P=16")
    assert capsys.readouterr().err.splitlines() == [
        "conformance: K1 at P=16 at 30%, 40% of all, about 30 s left",
        "conformance: K0 at P=16 done, 65% of all, about 16 s left",
        "conformance: K1 at P=16 done, 100% of all, about 0 s left",
    ]
