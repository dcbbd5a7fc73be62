"""Stage ``adopt``: let the runtime obey a verdict, and write it down for people.

Writes config/selection.yaml (this machine class's entry; others stay), docs/session-state.md and
docs/adr/0006-hot-and-cold-kv-tiers.md. Says what has changed and how to undo it.

``python -m kvtrial.stages.after.adopt --run-dir DIR --selection FILE --docs DIR --note FILE``

``python -m kvtrial.stages.after.adopt --undo NOTE --selection FILE`` puts back what was there before.
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import jinja2
import yaml

from kvtrial.decision import labels
from kvtrial.host import machine, paths
from kvtrial.host.files import write_text
from kvtrial.show import answers, fleet

Entry = dict[str, Any]

#: template -> page below the documentation's folder
PAGES = {
    "session-state.md": Path("session-state.md"),
    "adr-0006.md": Path("adr/0006-hot-and-cold-kv-tiers.md"),
}
#: What an entry says, in words, and what holds before any verdict.
_SAID: tuple[tuple[str, str, Any], ...] = (
    ("default", "open_store()", "K1"),
    ("profile", "its numerical profile", "fp32"),
    ("fp32", 'open_store(profile="fp32")', "K1"),
    ("reference", "reference path", "K1"),
    ("retired", "retired", []),
    ("cold", "cold store", None),
)


class NothingToAdopt(ValueError):
    """The verdict is open, another machine's, or of random weights; the message says what to do."""


def entry(verdict: dict[str, Any], *, synthetic: bool = False) -> Entry:
    """What config/selection.yaml says for the verdict's machine class.

    ``synthetic``: a verdict that was measured with random weights is adopted as well.

    Raises
    ------
    NothingToAdopt
        What to run is undecided, or the verdict is of another machine class, or of random weights.
    """
    run, language = verdict["run"], verdict["language"]
    if run["store"] is None:
        raise NothingToAdopt(
            f"what to run is undecided: {run['reason']}; nothing is adopted. Remove the cause and give "
            "`make verdict` again"
        )
    if verdict["machine"] != machine.machine_class():
        raise NothingToAdopt(
            f"the verdict is of machine {verdict['machine']!r}, this is "
            f"{machine.machine_class()!r}; adopt it there, or run a trial here"
        )
    if verdict["synthetic"] and not synthetic:
        raise NothingToAdopt(
            f"{verdict['model']} has random weights, and what is adopted holds for every model on this machine: "
            "run a trial with a real model, or give `make adopt FORCE=1` with the same MODEL and PROTOCOL"
        )
    return {
        "default": run["store"],
        "profile": run["profile"],
        "fp32": run["fp32_store"],
        # Where the language is open, the registered reference is what stays.
        "reference": language["reference"] or run["fp32_store"],
        "retired": sorted(language["retired"]),
        "cold": verdict["cold"]["adopted"],
        "run_id": verdict["run_id"],
    }


def adopted(path: Path) -> dict[str, Entry]:
    """What the file says, by machine class; nothing where there is no file.

    Raises
    ------
    NothingToAdopt
        It is not what this stage writes.
    """
    if not path.is_file():
        return {}
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        return {**entries}
    except (yaml.YAMLError, TypeError) as error:
        raise NothingToAdopt(
            f"{path} is not what `make adopt` writes ({type(error).__name__}); remove it, and what was "
            "adopted for other machines with it"
        ) from None


def write_selection(chosen: Entry | None, path: Path) -> None:
    """Set this machine class's entry, or remove it; those of other machines stay as they are."""
    entries = adopted(path)
    entries.pop(machine.machine_class(), None)
    if chosen is not None:
        entries[machine.machine_class()] = chosen
    text = "# Written by `make adopt`: what open_store() and `kvtrial generate` obey, by machine.\n"
    write_text(path, text + yaml.safe_dump(entries, sort_keys=True))


def changes(before: Entry | None, after: Entry | None) -> list[str]:
    """What each key was and is, a line each; one that stays is named without an arrow."""
    lines = []
    for key, said, default in _SAID:
        was, now = (
            _text((one or {}).get(key, default) if one else default) for one in (before, after)
        )
        lines.append(f"  {said}: {now}" if was == now else f"  {said}: {was} -> {now}")
    return lines


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return "undecided" if value is None else str(value)


def places(value: float | None, digits: int) -> str:
    """A number to so many decimals; a dash for what could not be measured."""
    return "-" if value is None else f"{value:.{digits}f}"


def page(name: str, verdict: dict[str, Any]) -> str:
    """One written page, a template of kvtrial/show/templates filled from the verdict alone."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(paths.PACKAGE / "show" / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["places"] = places
    environment.globals["label"] = labels.of_contrast
    return environment.get_template(f"{name}.j2").render(
        verdict=verdict,
        answers=answers.of_verdict(verdict),
        arms=answers.arms(verdict),
        contexts=answers.contexts(verdict),
        context_heads=answers.context_heads(verdict),
        past_trained=answers.past_trained(verdict),
        primary=answers.primary_context(verdict),
        ratio=answers.interval,
        sig=answers.significant,
    )


def _say(before: Entry | None, after: Entry | None, files: list[Path], undo: str | None) -> None:
    here = machine.machine_class()
    said = f"adopted from {after['run_id']}" if after else "nothing is adopted any more"
    print(f"{said}, for {here}:")
    print("\n".join(changes(before, after)))
    print(f"written: {', '.join(map(str, files))}")
    if undo is not None:
        print(f"undo: {undo}")


def undo(note: Path, selection: Path) -> None:
    """Put back what an adoption replaced."""
    try:
        kept = json.loads(note.read_text(encoding="utf-8"))
        before, after = kept["before"], kept["adopted"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NothingToAdopt(
            f"{note}: {error}; give the adopted.json that `make adopt` wrote into a run's folder"
        ) from None
    now = adopted(selection).get(machine.machine_class())
    if now != after:
        raise NothingToAdopt(
            f"{selection} does not hold what {note} adopted: another verdict was adopted since; undo that "
            "one first, or adopt again the one that you want"
        )
    write_selection(before, selection)
    _say(after, before, [selection], None)


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--selection", type=Path, required=True, help="config/selection.yaml")
    parser.add_argument("--docs", type=Path, help="where the pages go")
    parser.add_argument("--note", type=Path, help="where the adopted entry goes")
    parser.add_argument("--undo", type=Path, metavar="NOTE", help="put back what was before it")
    parser.add_argument("--synthetic", action="store_true", help="random weights are no obstacle")
    args = parser.parse_args(argv)
    if args.undo is not None:
        undo(args.undo, args.selection)
        return 0
    if args.run_dir is None or args.docs is None or args.note is None:
        parser.error("--run-dir, --docs and --note are needed, or --undo")
    verdict = fleet.load(args.run_dir)
    chosen = entry(verdict, synthetic=args.synthetic)
    before = adopted(args.selection).get(machine.machine_class())
    if before == chosen and args.note.is_file():
        # The same once more: what was there before the first time is what an undo brings back.
        before = json.loads(args.note.read_text(encoding="utf-8")).get("before")
    write_selection(chosen, args.selection)
    pages = [args.docs / path for path in PAGES.values()]
    for name, path in zip(PAGES, pages):
        write_text(path, page(name, verdict))
    write_text(args.note, json.dumps({"adopted": chosen, "before": before}, indent=2) + "\n")
    back = f"python -m kvtrial.stages.after.adopt --undo {shlex.quote(str(args.note))}"
    _say(
        before,
        chosen,
        [args.selection, *pages],
        f"{back} --selection {shlex.quote(str(args.selection))}",
    )
    if verdict["synthetic"]:
        print(
            "note: this was measured with synthetic weights; every model on this machine uses it now"
        )
    return 0


if __name__ == "__main__":
    from kvtrial.run.exits import exit_with

    exit_with(main)
