"""Pieces of text as they come."""

from __future__ import annotations

from kvtrial.tools.generate import whole_characters

BYTES = {0: b"a", 1: b"\xc3", 2: b"\xa9", 3: b"\xf0", 4: b"\x9f", 5: b"\x98", 6: b"\x80"}


def decode(ids: list[int]) -> str:
    return b"".join(BYTES[i] for i in ids).decode(errors="replace")


def test_a_character_waits_for_its_bytes():
    assert list(whole_characters([0, 1, 2, 3, 4, 5, 6, 0], decode)) == ["a", "é", "😀", "a"]


def test_bytes_that_never_become_a_character_are_shown_at_the_end():
    assert list(whole_characters([0, 1], decode)) == ["a", "\N{REPLACEMENT CHARACTER}"]
