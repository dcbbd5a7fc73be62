"""Stage ``adopt``: let the runtime obey a verdict, and write it down for people.

Writes config/selection.yaml (this machine class's entry; others stay), docs/session-state.md and
docs/adr/0006-hot-and-cold-kv-tiers.md.

``python -m kvtrial.stages.after.adopt --run-dir DIR --selection FILE --docs DIR --note FILE``
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jinja2
import yaml

from kvtrial.decision import labels
from kvtrial.host import machine, paths
from kvtrial.host.files import write_text

#: template -> page below the documentation's folder
PAGES = {
    "session-state.md": Path("session-state.md"),
    "adr-0006.md": Path("adr/0006-hot-and-cold-kv-tiers.md"),
}


class NothingToAdopt(ValueError):
    """The verdict is inconclusive, or another machine's; the message says what to do."""


def entry(verdict: dict[str, Any]) -> dict[str, Any]:
    """What config/selection.yaml says for the verdict's machine class."""
    hot = verdict["hot"]
    if hot["adopted"] is None:
        raise NothingToAdopt(
            f"the verdict is {hot['outcome']}: {hot['reason']}; nothing is adopted"
        )
    if verdict["machine"] != machine.machine_class():
        raise NothingToAdopt(
            f"the verdict is of machine {verdict['machine']!r}, this is "
            f"{machine.machine_class()!r}; adopt it there, or run a trial here"
        )
    return {
        "default": hot["adopted"],
        "reference": hot["reference"],
        "retired": sorted(hot["retired"]),
        "cold": verdict["cold"]["adopted"],
        "run_id": verdict["run_id"],
    }


def write_selection(chosen: dict[str, Any], path: Path) -> None:
    """Set this machine class's entry; those of other machines stay as they are."""
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
        entries = {**(entries or {}), machine.machine_class(): chosen}
    except (yaml.YAMLError, TypeError) as error:
        raise NothingToAdopt(
            f"{path} is not what `make adopt` writes ({type(error).__name__}); remove it, and what was "
            "adopted for other machines with it"
        ) from None
    text = "# Written by `make adopt`: what open_store() and `kvtrial generate` obey, by machine.\n"
    write_text(path, text + yaml.safe_dump(entries, sort_keys=True))


def places(value: float | None, digits: int) -> str:
    """A number to so many decimals; a dash for what could not be measured."""
    return "-" if value is None else f"{value:.{digits}f}"


def page(name: str, verdict: dict[str, Any]) -> str:
    """One written page, a template of kvtrial/templates filled from the verdict alone."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(paths.PACKAGE / "show" / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["places"] = places
    environment.globals["label"] = labels.of_contrast
    primary = next(arm for arm in verdict["hot"]["arms"] if arm["role"] == "primary")
    return environment.get_template(f"{name}.j2").render(verdict=verdict, primary=primary)


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--selection", type=Path, required=True, help="config/selection.yaml")
    parser.add_argument("--docs", type=Path, required=True, help="where the pages go")
    parser.add_argument("--note", type=Path, required=True, help="where the adopted entry goes")
    args = parser.parse_args(argv)
    verdict = json.loads((args.run_dir / "verdict.json").read_text(encoding="utf-8"))
    chosen = entry(verdict)
    write_selection(chosen, args.selection)
    for name, path in PAGES.items():
        write_text(args.docs / path, page(name, verdict))
    write_text(args.note, json.dumps(chosen, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    from kvtrial.run.exits import exit_with

    exit_with(main)
