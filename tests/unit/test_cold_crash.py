"""Writers killed with SIGKILL: what was acknowledged is there afterwards."""

from __future__ import annotations

import pytest

from kvtrial.cold import crash


@pytest.mark.parametrize("kind", ["Z1", "Z2"])
def test_nothing_acknowledged_is_lost_by_kill_9(kind, tmp_path):
    results = crash.crash_rounds(kind, tmp_path / "cold", rounds=6)
    assert [fault for r in results for fault in r.faults] == []
    assert sum(r.acknowledged for r in results) > 0
    assert sum(r.recovered for r in results) == sum(r.acknowledged for r in results)


def test_the_check_sees_a_lost_sequence_and_a_changed_byte(tmp_path):
    store = crash.PatternStore()
    with crash.open_cold("Z2", tmp_path / "cold", store.identity()) as cold:
        cold.spill(crash.pattern_session(store, 0), crash.pattern_tokens(0))
        cold.spill(crash.pattern_session(store, 3), crash.pattern_tokens(8))
    said = [["stored", "0"], ["stored", "1"], ["stored", "8"]]
    result = crash._check("Z2", tmp_path / "cold", 0, said)
    assert (result.acknowledged, result.recovered) == (3, 1)
    assert result.faults == [
        "sequence 1: 37 rows acknowledged, 16 there",
        "sequence 8: other bytes than were spilled",
    ]
