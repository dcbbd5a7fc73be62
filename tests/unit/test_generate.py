"""Pieces of text as they come."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from kvtrial.contract import InvalidArgument
from kvtrial.engine.synthetic import ModelSizes, write_synthetic
from kvtrial.host.machine import machine_class
from kvtrial.tools import command
from kvtrial.tools.generate import Continuation, whole_characters

TINY = Path(__file__).parent.parent / "data" / "llama-tiny-q4_1.gguf"
#: The shape of its heads.
HEADS = "9q3kv32d"

BYTES = {0: b"a", 1: b"\xc3", 2: b"\xa9", 3: b"\xf0", 4: b"\x9f", 5: b"\x98", 6: b"\x80"}


def test_a_character_waits_for_its_bytes():
    assert list(whole_characters([0, 1, 2, 3, 4, 5, 6, 0], BYTES.__getitem__)) == [
        "a",
        "é",
        "😀",
        "a",
    ]


def test_bytes_that_never_become_a_character_are_shown_at_the_end():
    assert list(whole_characters([0, 1], BYTES.__getitem__)) == ["a", "\N{REPLACEMENT CHARACTER}"]


def test_bytes_that_are_no_text_are_not_held_back():
    """20,000 of them took 46 s, and were one piece at the end."""
    begun = itertools.count()
    given = (next(begun) and 0 for _ in range(2000))
    for said, piece in enumerate(whole_characters(given, {0: b"\x80"}.__getitem__), start=1):
        assert piece == "\N{REPLACEMENT CHARACTER}" and next(begun) == 2 * said - 1


def test_a_character_that_breaks_off_holds_three_bytes_back():
    tokens = {0: b"\xf0", 1: b"\x9f", 2: b"\x98", 3: b"a"}
    assert list(whole_characters([0, 1, 2, 3, 3], tokens.__getitem__)) == [
        "\N{REPLACEMENT CHARACTER}a",
        "a",
    ]


@pytest.fixture
def selection(tmp_path, monkeypatch):
    """Write what was adopted on this machine; before that, nothing was."""
    monkeypatch.setenv("KVTRIAL_CONFIG", str(tmp_path))

    def adopt() -> None:
        (tmp_path / "selection.yaml").write_text(
            f"{machine_class()}: {{{HEADS}: {{default: K2T, profile: fp16, fp32: K1, reference: K1, retired: [K3], "
            "cold: Z2, run_id: run-a}}"
        )

    return adopt


def said(capsys, *more: str) -> str:
    """What the command says of the store."""
    arguments = ["generate", "abc", "--model", str(TINY), "--tokens", "3", *more]
    assert command.main(arguments) == 0
    return capsys.readouterr().err


def test_it_says_which_store_it_used_and_why(selection, capsys):
    assert "with K1 (FP32; the default before any verdict)\n" in said(capsys)
    selection()
    assert "with K2T (FP16; adopted from the verdict of run-a)\n" in said(capsys)
    assert "with K1 (FP32; fp32 was asked for; adopted from the verdict of run-a)\n" in said(
        capsys, "--profile", "fp32"
    )
    assert "with K5 (Q8_0; as asked)\n" in said(capsys, "--store", "K5")


def test_the_store_is_the_one_that_it_says(selection):
    selection()
    made = Continuation("abc", model=str(TINY), tokens=3, profile="fp32")
    assert (made.store, made.profile) == ("K1", "fp32")
    assert "".join(made) == "".join(Continuation("abc", model=str(TINY), tokens=3, store="K1"))


def test_it_says_where_the_context_is_full_and_goes_on_if_told_to(selection, tmp_path, capsys):
    path = str(tmp_path / "m.gguf")
    shape = {"layers": 1, "q_heads": 2, "kv_heads": 1, "head_dim": 32, "ffn": 64, "vocab": 269}
    shape |= {"architecture": "llama", "kind": "Q8_0", "context": 8, "rope_base": 1e4, "seed": 1}
    write_synthetic(path, "m", ModelSizes(**shape))
    whole = Continuation("abc", model=path, tokens=20, beyond_context=True)
    text = "".join(whole)
    assert whole.made == 20 and not whole.context_full
    cut = Continuation("abc", model=path, tokens=20)
    assert text.startswith("".join(cut)) and cut.made == 6 and cut.context_full
    exact = Continuation("abc", model=path, tokens=6)
    assert "".join(exact) and exact.made == 6 and not exact.context_full
    assert command.main(["generate", "abc", "--model", path, "--tokens", "20"]) == 0
    said = capsys.readouterr().err
    assert "stopped: the model's context of 8 positions is full; --beyond-context goes on\n" in said
    arguments = ["generate", "abc", "--model", path, "--tokens", "20", "--beyond-context"]
    assert command.main(arguments) == 0
    assert "stopped" not in capsys.readouterr().err
    with pytest.raises(InvalidArgument, match="prompt has 9 tokens; the model was trained for 8"):
        Continuation("abcdefghi", model=path, tokens=1)


def test_a_profile_that_was_not_adopted_is_refused(selection):
    selection()
    with pytest.raises(InvalidArgument, match=r"allowed: fp16 \(K2T\), fp32 \(K1\)"):
        Continuation("abc", model=str(TINY), tokens=3, profile="q8_0")
