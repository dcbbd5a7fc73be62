"""What is printed for people is the text itself, in any encoding, whatever it looks like."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from shown_trial import decided
from trial_events import REGISTERED, flat, row, trial, with_rows

from kvtrial.decision.verdict import decide
from kvtrial.host import printed
from kvtrial.run import exits
from kvtrial.show import terminal
from kvtrial.stages import progress

#: Markup that closes nothing, markup that means a style, an emoji's name.
ODD = "OSError: cannot open [/usr/lib/libx.so] [float32] [bold] :warning: \\[a]"
SOURCES = Path(printed.__file__).parents[1]


def said(thing: object, monkeypatch: pytest.MonkeyPatch) -> str:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", "200")
    printed.console().print(thing)
    return out.getvalue()


def test_title_column_and_cell_are_literal(monkeypatch: pytest.MonkeyPatch) -> None:
    table = printed.table(ODD, title=ODD)
    table.add_column(ODD)
    table.add_row(ODD, ODD)
    assert said(table, monkeypatch).count(ODD) == 5
    assert ODD in said(printed.panel("inside", ODD), monkeypatch)
    assert ODD in said(ODD, monkeypatch)


def test_a_bar_s_text_is_literal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, where the bar is drawn."""

    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "300")
    with progress.Progress("conformance [/x]", {"a": 1.0}) as bar:
        bar.say("unit [/y] :warning:")
        bar.done("a")
    assert "conformance [/x]: unit [/y] :warning:" in screen.getvalue()
    assert re.search(r"conformance \[/x\].*100%", screen.getvalue())


def test_a_candidate_s_error_text_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text ended `kvtrial verdict` in a traceback, after the verdict was made."""
    failed = row("m2", "failed", candidate="A2", context=4096, text=ODD)
    events = trial(flat(K0=100.0, A1=80.0, A2=70.0, K1=22.0, K2=15.0, K3=20.0))
    verdict = decide(with_rows(events, [failed]), REGISTERED).data
    assert ODD in said(terminal.render(verdict, full=True), monkeypatch)


def test_everything_that_a_verdict_says_is_literal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text of it, its machine and model among them."""
    verdict = decided(missing={"K0": "pool"})
    odd = "a[/b]"

    def spoilt(value: object, key: str = "") -> object:
        if isinstance(value, dict):
            return {k: spoilt(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [spoilt(v, key) for v in value]
        if isinstance(value, str) and key in ("machine", "model", "reason", "text", "problem"):
            return value + odd
        return value

    for full in (False, True):
        assert odd in said(terminal.render(spoilt(verdict), full=full), monkeypatch)  # type: ignore[arg-type]


def test_only_one_module_makes_what_takes_markup() -> None:
    made = re.compile(r"\b(Console|Panel|Table|Progress|Live|Prompt|Status|Tree)\((?!\))")
    for path in SOURCES.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        names = set(re.findall(r"from rich[.\w]* import (.+)", text))
        from_rich = {name for line in names for name in re.findall(r"\w+", line)}
        used = {name for name in made.findall(text) if name in from_rich}
        assert not used or path == Path(printed.__file__), f"{path}: {used}; use host.printed"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_every_character_can_be_said(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONIOENCODING=ascii ended `kvtrial verdict` and `generate` with a UnicodeEncodeError."""
    streams = {name: io.TextIOWrapper(io.BytesIO(), encoding) for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)

    def main() -> int:
        print("K1 → K3 ±1 日本")
        printed.console().print(printed.table("K1 → K3", title="±"))
        raise exits.ConfigError("no model 'naïve日'")

    with pytest.raises(SystemExit, match="2"):
        exits.exit_with(main)
    for stream in streams.values():
        stream.flush()
    out, err = (stream.buffer.getvalue() for stream in streams.values())  # type: ignore[attr-defined]
    assert b"K1 " in out and b"K3" in out
    assert (rb"\u65e5" in err) == (encoding != "utf-8")
