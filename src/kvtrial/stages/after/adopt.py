"""Stage ``adopt``: let the runtime obey a verdict, and write it down for people.

Writes config/selection.yaml (the entry of this machine class and head shape; others stay), and into the run's
folder adopted.json and two pages. Says what has changed and how to undo it.

``python -m kvtrial.stages.after.adopt --run-dir DIR --selection FILE``

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
from kvtrial.decision.document import Document
from kvtrial.host import machine, paths
from kvtrial.host.files import write_text
from kvtrial.run import protocol
from kvtrial.show import answers, fleet

Entry = dict[str, Any]

#: template -> page in the run's folder
PAGES = {"session-state.md": "session-state.md", "adr-0006.md": "0006-hot-and-cold-kv-tiers.md"}
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
    """The verdict is open, another machine's, of random weights or of a smoke run, or does not let that store be
    the default; the message says what to do."""


def entry(verdict: Document, *, store: str = "", force: bool = False) -> Entry:
    """What config/selection.yaml says for the verdict's machine class and head shape.

    Parameters
    ----------
    verdict : dict
        What verdict.json holds.
    store : str
        An eligible arm to be the default; what the verdict says to run without it.
    force : bool
        Take a verdict of random weights or of a smoke run as well.

    Raises
    ------
    NothingToAdopt
    """
    run, language = verdict["run"], verdict["language"]
    if run["store"] is None:
        raise NothingToAdopt(
            f"what to run is undecided: {run['reason']}; nothing is adopted. Remove the cause and give "
            f"`{paths.how_to()}` again"
        )
    if verdict["machine"] != machine.machine_class():
        raise NothingToAdopt(
            f"the verdict is of machine {verdict['machine']!r}, this is "
            f"{machine.machine_class()!r}; adopt it there, or run a trial here"
        )
    if not force and (weak := _weak(verdict)):
        raise NothingToAdopt(
            f"{weak}: run a trial with a real model and the default protocol, or give `make adopt FORCE=1` or "
            "`kvtrial run adopt --force` with the same model and protocol"
        )
    arm = _arm(verdict, store or run["store"])
    return {
        "default": arm.name,
        "profile": arm.profile,
        "fp32": arm.name if arm.profile == "fp32" else run["fp32_store"],
        # Where the language is open, the registered reference is what stays.
        "reference": language["reference"] or run["fp32_store"],
        "retired": sorted({*language["retired"]} - {arm.name}),
        "cold": verdict["cold"]["adopted"],
        "run_id": verdict["run_id"],
    }


def _weak(verdict: Document) -> str:
    """Why a verdict should not be obeyed, or nothing."""
    if verdict["synthetic"]:
        return (
            f"{verdict['model']} has random weights, and real models with these heads would obey it"
        )
    if verdict["protocol"] == protocol.SMOKE:
        return f"protocol {protocol.SMOKE} shows that every stage runs, and decides nothing"
    return ""


def _arm(verdict: Document, name: str) -> answers.Arm:
    """A measured arm that nothing speaks against: eligible, and of shown quality where its profile is reduced."""
    refused = {row["candidate"] for row in verdict["run"]["profiles"] if row["why_not"]}
    arms = {arm.name: arm for arm in answers.arms(verdict)}
    allowed = [
        arm.name
        for arm in arms.values()
        if arm.rates and arm.name not in refused and not verdict["eligibility"][arm.name]
    ]
    if name not in allowed:
        why = "; ".join(arms[name].reasons) if name in arms else "no arm of this trial"
        raise NothingToAdopt(
            f"the store to adopt is {name!r}: {why}; allowed: {', '.join(allowed)}"
        )
    return arms[name]


def adopted(path: Path) -> dict[str, dict[str, Entry]]:
    """What the file says, by machine class and head shape; nothing where there is no file.

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


def entry_of(path: Path, shape: str) -> Entry | None:
    """This machine class's entry for a head shape."""
    return _own(adopted(path)).get(shape)


def _own(entries: dict[str, dict[str, Entry]]) -> dict[str, Entry]:
    """This machine class's, by head shape. An entry that was of all shapes is left out: it is written anew."""
    own = entries.get(machine.machine_class()) or {}
    return {shape: entry for shape, entry in own.items() if isinstance(entry, dict)}


def write_selection(chosen: Entry | None, shape: str, path: Path) -> None:
    """Set this machine class's entry for a head shape, or remove it; all others stay as they are."""
    entries = adopted(path)
    own = {**_own(entries), shape: chosen}
    entries[machine.machine_class()] = {key: entry for key, entry in own.items() if entry}
    text = "# Written by `make adopt`: what open_store() and `kvtrial generate` obey, by machine and by heads.\n"
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


def page(name: str, verdict: Document, chosen: Entry) -> str:
    """One written page, a template of kvtrial/show/templates filled from the verdict and what was adopted of it."""
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
        chosen=chosen,
        answers=answers.of_verdict(verdict),
        arms=answers.arms(verdict),
        contexts=answers.contexts(verdict),
        context_heads=answers.context_heads(verdict),
        past_trained=answers.past_trained(verdict),
        primary=answers.primary_context(verdict),
        ratio=answers.interval,
        sig=answers.significant,
    )


def _say(
    before: Entry | None, after: Entry | None, shape: str, files: list[Path], undo: str | None
) -> None:
    here = f"{machine.machine_class()} and models of {shape}"
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
        before, after, shape = kept["before"], kept["adopted"], kept["shape"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NothingToAdopt(
            f"{note}: {error}; give the adopted.json that `make adopt` wrote into a run's folder"
        ) from None
    if entry_of(selection, shape) != after:
        raise NothingToAdopt(
            f"{selection} does not hold what {note} adopted: another verdict was adopted since; undo that "
            "one first, or adopt again the one that you want"
        )
    write_selection(before, shape, selection)
    _say(after, before, shape, [selection], None)


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--selection", type=Path, required=True, help="config/selection.yaml")
    parser.add_argument("--store", default="", help="an eligible arm, other than the verdict's")
    parser.add_argument("--undo", type=Path, metavar="NOTE", help="put back what was before it")
    parser.add_argument(
        "--force", action="store_true", help="random weights or a smoke run are no obstacle"
    )
    args = parser.parse_args(argv)
    if args.undo is not None:
        undo(args.undo, args.selection)
        return 0
    if args.run_dir is None:
        parser.error("--run-dir is needed, or --undo")
    verdict = fleet.load(args.run_dir)
    shape, note = verdict["shape"], args.run_dir / "adopted.json"
    chosen = entry(verdict, store=args.store, force=args.force)
    before = entry_of(args.selection, shape)
    if before == chosen and note.is_file():
        # The same once more: what was there before the first time is what an undo brings back.
        before = json.loads(note.read_text(encoding="utf-8")).get("before")
    write_selection(chosen, shape, args.selection)
    pages = [args.run_dir / path for path in PAGES.values()]
    for name, path in zip(PAGES, pages):
        write_text(path, page(name, verdict, chosen))
    kept = {"adopted": chosen, "before": before, "shape": shape}
    write_text(note, json.dumps(kept, indent=2) + "\n")
    back = f"python -m kvtrial.stages.after.adopt --undo {shlex.quote(str(note))}"
    _say(
        before,
        chosen,
        shape,
        [args.selection, *pages],
        f"{back} --selection {shlex.quote(str(args.selection))}",
    )
    if weak := _weak(verdict):
        print(f"note: {weak}")
    return 0


if __name__ == "__main__":
    from kvtrial.run.exits import exit_with

    exit_with(main)
