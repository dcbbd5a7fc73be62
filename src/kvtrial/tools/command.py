"""The command ``kvtrial``: verdicts, the machine, candidates, generation, cold stores, lists."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvtrial.contract import MAX_THREADS, MAX_TOKENS, shown
from kvtrial.host import paths, printed
from kvtrial.host.files import is_dir
from kvtrial.run import layout
from kvtrial.run.exits import EXIT_FAILED, EXIT_INCONCLUSIVE, EXIT_SLOWER

#: Decodes of each arm that `kvtrial try` makes at most: hours of them.
MOST_BLOCKS = 1000


class NoVerdict(layout.ConfigError):
    """There is no verdict to show; the message says how to get one."""


# --------------------------------------------------------------------------------------------------
# Subcommands: each imports what it needs, so that --help is quick


def _newest_run() -> Path:
    """The run whose verdict, or whose last finished block, is the newest."""
    runs = [path.parent for path in paths.results_dir().glob("*/protocol.json")]
    if not runs:
        raise NoVerdict(f"no verdict under {paths.results_dir()}; run: make verdict")
    return max(runs, key=_last_change)


def _last_change(run_dir: Path) -> float:
    files = [run_dir / "verdict.json"]
    if not files[0].is_file():
        files = [run_dir / "protocol.json", *run_dir.glob("events/*"), *run_dir.glob("journal/*/*")]
    return max(path.stat().st_mtime for path in files)


def _run_dir(name: str | None) -> Path:
    """A run's folder by path or by run_id; the newest one without a name."""
    if name is None:
        return _newest_run()
    for candidate in (Path(name), paths.results_dir() / name):
        if is_dir(candidate):
            return candidate
    known = sorted(p.parent.name for p in paths.results_dir().glob("*/protocol.json"))
    raise layout.ConfigError(f"no run {shown(name)}; known: {', '.join(known) or 'none yet'}")


def _show(run_dir: Path, full: bool = False) -> int:
    """Print a run's verdict, the box last; how the command exits."""
    from kvtrial.show import fleet, terminal

    document = fleet.load(run_dir)
    console = printed.console()
    page = run_dir / "report.html"
    where = f"{page}" if page.is_file() else f"{run_dir} (one page with figures: make report)"
    rest = "" if full else "All of it: kvtrial verdict --full. "
    console.print(f"{rest}Figures: {where}, or make ui", soft_wrap=True)
    console.print(terminal.render(document, full=full))
    return _code(document)


def _show_so_far(run_dir: Path, full: bool, as_json: bool) -> int:
    """Print what an unfinished run says so far, marked so; never a verdict, so never decided."""
    from kvtrial.show import terminal
    from kvtrial.stages.after.provisional import decide_so_far

    so_far = decide_so_far(run_dir)
    document = {**so_far.verdict.data, "provisional": so_far.missing}
    _print(
        as_json,
        document,
        lambda: terminal.render(so_far.verdict.data, full=full, provisional=so_far.missing),
    )
    return EXIT_INCONCLUSIVE


def _code(verdict: dict[str, Any]) -> int:
    """0 for a verdict that decides what to run and which language, else `EXIT_INCONCLUSIVE`."""
    from kvtrial.decision.verdict import Verdict

    return 0 if Verdict(verdict).decided else EXIT_INCONCLUSIVE


def verdict(args: argparse.Namespace) -> int:
    """kvtrial verdict"""
    from kvtrial.show import fleet

    run_dir = _run_dir(args.run)
    path = run_dir / "verdict.json"
    if not path.is_file():
        if not (run_dir / "protocol.json").is_file():
            raise NoVerdict(f"{run_dir} has no verdict.json yet; run: make verdict")
        return _show_so_far(run_dir, args.full, args.json)
    if not args.json:
        return _show(run_dir, args.full)
    code = _code(fleet.load(run_dir))
    sys.stdout.write(path.read_text(encoding="utf-8"))
    return code


def decide(args: argparse.Namespace) -> int:
    """kvtrial decide RUN"""
    from kvtrial.stages.after.verdict import write_verdict

    run_dir = _run_dir(args.run)
    write_verdict(run_dir)
    return _show(run_dir, args.full)


def generate(args: argparse.Namespace) -> None:
    """kvtrial generate TEXT"""
    from kvtrial.tools.generate import BLOCK_TOKENS, Continuation

    made = Continuation(
        args.text,
        model=args.model,
        tokens=args.tokens,
        store=args.store,
        profile=args.profile,
        threads=args.threads,
        cold=args.cold,
        beyond_context=args.beyond_context,
    )
    for piece in made:
        print(piece, end="", flush=True)
    print()
    rate = made.tokens_per_s
    print(
        f"{made.made} tokens" + (f", {rate:.1f} tokens/s" if rate is not None else ""),
        f"with {made.store} ({made.profile.upper()}; {made.why})",
        file=sys.stderr,
    )
    if made.context_full:
        print(
            f"stopped: the model's context of {made.context_length} positions is full; "
            "--beyond-context goes on",
            file=sys.stderr,
        )
    if (known := made.restored) is not None:
        print(
            f"{known.tokens} tokens of the prompt restored in {known.restore_ms:.1f} ms instead of "
            f"computed in about {known.prefill_ms:.0f} ms: "
            f"{known.prefill_ms - known.restore_ms:.0f} ms saved",
            file=sys.stderr,
        )
    if (kept := made.spilled) is not None:
        print(
            f"{kept.rows} tokens of the prompt in {args.cold}: {kept.pages_written} pages written, "
            f"{kept.pages_shared} were there",
            file=sys.stderr,
        )
    elif args.cold is not None:
        print(
            f"nothing is kept in {args.cold}: it takes whole blocks of {BLOCK_TOKENS} tokens, and the "
            "prompt's last token is in none",
            file=sys.stderr,
        )


def fetch(args: argparse.Namespace) -> None:
    """kvtrial fetch NAME"""
    from kvtrial.run import models

    print(models.fetch(args.name))


def candidates(args: argparse.Namespace) -> None:
    """kvtrial candidates"""
    from kvtrial import candidates as registry
    from kvtrial.host import selection

    selected = selection.load()
    table = printed.table(
        "name", "what it is", "profile", "language", "state", box=None, pad_edge=False
    )
    for name, candidate in registry.candidates().items():
        state = "built"
        if candidate.not_built is not None:
            state = f"not built: {candidate.not_built}"
        elif name in selected.retired:
            state = f"retired by {selected.run_id}"
        elif name == selected.default:
            state = f"default: {selected.origin}" if selected.run_id else "default"
        elif name == selected.fp32:
            state = 'default with profile="fp32"'
        table.add_row(name, candidate.title, candidate.profile.name, candidate.language, state)
    printed.console().print(table)


def models(args: argparse.Namespace) -> None:
    """kvtrial models"""
    from kvtrial.run import models as registry

    for name, entry in registry.entries().items():
        here = (paths.results_dir() / "models" / f"{name}.gguf").is_file()
        print(
            f"{name:28} {'here' if here else 'kvtrial fetch ' + name}\n    {entry.get('note', '')}"
        )


def doctor(args: argparse.Namespace) -> int:
    """kvtrial doctor"""
    from kvtrial.tools import doctor as checks

    findings = checks.examine(args.model)
    _print(args.json, checks.document(findings), lambda: checks.render(findings))
    return 0 if checks.ready(findings) else EXIT_FAILED


def try_(args: argparse.Namespace) -> int:
    """kvtrial try NAME"""
    from kvtrial.tools import tried, trying

    trial = trying.measure(
        args.name,
        model=args.model,
        against=args.against,
        against_ref=args.against_ref,
        contexts=args.context or (),
        threads=args.threads,
        count=args.blocks,
    )
    if args.markdown:
        print(tried.markdown(trial), end="")
    else:
        _print(args.json, trial, lambda: tried.render(trial))
    if not tried.sound(trial):
        return EXIT_FAILED
    return EXIT_SLOWER if args.fail_below and tried.slower(trial, args.fail_below) else 0


def fleet(args: argparse.Namespace) -> None:
    """kvtrial fleet FILE..."""
    from kvtrial.show import fleet as verdicts

    rows = verdicts.table(args.files)
    _print(args.json, rows, lambda: verdicts.render(rows))


def compare(args: argparse.Namespace) -> None:
    """kvtrial compare RUN RUN"""
    from kvtrial.tools import comparing

    found = comparing.compare(_run_dir(args.first), _run_dir(args.second))
    _print_rows(args, found, comparing.compared(found), comparing.notes(found))


def history(args: argparse.Namespace) -> None:
    """kvtrial history"""
    from kvtrial.tools import comparing

    runs = [path.parent for path in sorted(paths.results_dir().glob("*/verdict.json"))]
    if not runs:
        raise NoVerdict(f"no verdict under {paths.results_dir()}; run: make verdict")
    found = comparing.history(runs, args.arm or ())
    _print_rows(args, found, comparing.told(found))


def _print_rows(
    args: argparse.Namespace, document: Any, rows: list[dict[str, str]], notes: Sequence[str] = ()
) -> None:
    """Rows in the form that was asked for; notes are for people alone."""
    from kvtrial.show import tables

    if args.markdown or args.csv:
        print(tables.markdown(rows) if args.markdown else tables.as_csv(rows), end="")
        return
    _print(args.json, document, lambda: tables.table(rows))
    if not args.json:
        for note in notes:
            printed.console().print(note, soft_wrap=True)


def _add_forms(sub: argparse.ArgumentParser) -> None:
    """``--json``, ``--markdown`` and ``--csv``, one of them at most."""
    form = sub.add_mutually_exclusive_group()
    for name, what in (("json", "for programs"), ("markdown", "a table"), ("csv", "for a sheet")):
        form.add_argument(f"--{name}", action="store_true", help=what)


def cold(args: argparse.Namespace) -> int:
    """kvtrial cold VERB FOLDER"""
    from kvtrial.cold import upkeep

    with printed.progress(transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(args.verb, total=None)
        outcome = upkeep.look_after(
            args.verb,
            args.folder,
            args.keys,
            lambda done, to_do: bar.update(task, completed=done, total=to_do),
        )
    _print(args.json, outcome, lambda: upkeep.render(outcome))
    return 0 if upkeep.sound(outcome) else EXIT_FAILED


def _print(as_json: bool, document: Any, render: Callable[[], Any]) -> None:
    """A document for programs or for people."""
    if as_json:
        import json

        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        printed.console().print(render())


def _whole(low: int, high: int) -> Callable[[str], int]:
    """A whole number from ``low`` to ``high``, for the parser: its message names the option."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(
                f"{shown(text)}: give a whole number from {low} to {high}"
            )
        return number

    return parse


def _wholes(low: int, high: int) -> Callable[[str], list[int]]:
    """Whole numbers between commas, each once and in their order."""
    one = _whole(low, high)

    def parse(text: str) -> list[int]:
        return list(dict.fromkeys(one(part) for part in text.split(",")))

    return parse


def _share(text: str) -> float:
    """A ratio above 0 and up to 1."""
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio <= 1:
        raise argparse.ArgumentTypeError(f"{shown(text)}: give a ratio above 0 and up to 1")
    return ratio


# --------------------------------------------------------------------------------------------------
# The parser


_CODES = (
    "Exit code 0: what to run and which language are decided. "
    f"{EXIT_INCONCLUSIVE}: the outcome is INCONCLUSIVE. 1 or 2: an error."
)


class _Version(argparse.Action):
    """``--version``: read when it is asked for, so that --help stays quick."""

    def __call__(self, *_: object, **__: object) -> None:
        from importlib.metadata import version

        from kvtrial.host import build

        made = build.facts().get("build_id")
        print(
            f"kvtrial {version('kvtrial')}" + (f", build {made}" if made else ", kernels not built")
        )
        sys.exit(0)


def parser() -> argparse.ArgumentParser:
    """The command's parser; each subcommand's help is a line and an example."""
    top = argparse.ArgumentParser(
        prog="kvtrial", description="Which KV cache should this machine run?"
    )
    top.add_argument("--version", action=_Version, nargs=0, help="version and build, then exit")
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    def add(
        action: Callable[[argparse.Namespace], int | None], line: str, example: str, more: str = ""
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            action.__name__.rstrip("_"),
            help=line,
            description=f"{line[0].upper()}{line[1:]}. {more}".rstrip(),
            epilog=f"example: kvtrial {example}",
        )
        sub.set_defaults(action=action)
        return sub

    sub = add(
        verdict,
        "show the newest verdict, or that of a run; of a run that goes on, what it says so far",
        "verdict --full",
        f"{_CODES} A run without a verdict is shown as PROVISIONAL, with code {EXIT_INCONCLUSIVE}.",
    )
    sub.add_argument("run", nargs="?", help="run_id or folder")
    sub.add_argument("--full", action="store_true", help="everything, not the first table alone")
    sub.add_argument("--json", action="store_true", help="verdict.json as it is")

    sub = add(
        decide,
        "decide again from a run's raw events; the same bytes",
        "decide results/RUN_ID",
        _CODES,
    )
    sub.add_argument("run", help="run_id or folder")
    sub.add_argument("--full", action="store_true", help="everything, not the first table alone")

    sub = add(
        generate,
        "continue a text with the adopted store",
        'generate "Once upon a time" --tokens 64',
    )
    sub.add_argument("text")
    sub.add_argument("--model", default=layout.DEFAULT_MODEL, help="a name of `kvtrial models`")
    sub.add_argument("--tokens", type=_whole(1, MAX_TOKENS), default=64, help="tokens to make")
    sub.add_argument("--store", help="a candidate; by default the adopted one")
    sub.add_argument("--profile", help="without --store: fp32, or the adopted store's own profile")
    sub.add_argument(
        "--cold",
        type=Path,
        metavar="FOLDER",
        help="restore what this cold store knows of the text, and spill its whole blocks of 64 tokens",
    )
    sub.add_argument("--threads", type=_whole(1, MAX_THREADS), default=1)
    sub.add_argument(
        "--beyond-context",
        action="store_true",
        help="go on where the model's context is full, past what it was trained for",
    )

    sub = add(fetch, "fetch or make a model's file", f"fetch {layout.DEFAULT_MODEL}")
    sub.add_argument("name", help="a name of `kvtrial models`")

    sub = add(doctor, "say what this machine offers and what that means for a run", "doctor --json")
    sub.add_argument("--model", default=layout.DEFAULT_MODEL, help="a name of `kvtrial models`")
    sub.add_argument("--json", action="store_true", help="for programs")

    sub = add(
        try_,
        "try a candidate against the adopted store, in about a minute and a half; never adopts",
        "try K5 --context 512,4096 --fail-below 0.97",
        f"Exit code 0: it passed and was measured. {EXIT_FAILED}: it failed. {EXIT_SLOWER}: with --fail-below, "
        "it is slower than that.",
    )
    sub.add_argument("name", help="a name of `kvtrial candidates`")
    sub.add_argument("--against", help="another candidate; by default the adopted store")
    sub.add_argument(
        "--against-ref",
        metavar="REF",
        help="a git ref of its package, such as main or HEAD~1: built once in results/refs, and measured by turns",
    )
    sub.add_argument("--model", default=layout.DEFAULT_MODEL, help="a name of `kvtrial models`")
    sub.add_argument(
        "--context",
        type=_wholes(1, MAX_TOKENS),
        metavar="N[,N…]",
        help="filled positions; 4096 as registered",
    )
    sub.add_argument(
        "--threads", type=_whole(1, MAX_THREADS), default=1, help="of a decode; 1 by default"
    )
    sub.add_argument(
        "--blocks", type=_whole(1, MOST_BLOCKS), help="decodes of each; what fits by default"
    )
    sub.add_argument(
        "--fail-below",
        type=_share,
        metavar="RATIO",
        help="such as 0.97: fail where the whole interval lies below it, of the decode or of its attention",
    )
    form = sub.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for programs")
    form.add_argument("--markdown", action="store_true", help="for a pull request")

    sub = add(fleet, "one table over many verdicts", "fleet results/*/verdict.json --json")
    sub.add_argument("files", nargs="+", type=Path, metavar="FILE", help="verdict.json, or a run")
    sub.add_argument("--json", action="store_true", help="for programs")

    sub = add(
        compare,
        "say how each arm stands in a run against how it stood in another",
        "compare RUN_BEFORE RUN_AFTER",
        "Each is compared over the reference of its own run, so that what the machine did to both cancels.",
    )
    sub.add_argument("first", metavar="RUN", help="run_id or folder: before")
    sub.add_argument("second", metavar="RUN", help="run_id or folder: after")
    _add_forms(sub)

    sub = add(history, "list all verdicts of results/ by time", "history --arm K3 --csv")
    sub.add_argument(
        "--arm", action="append", metavar="NAME", help="follow this arm; may be given again"
    )
    _add_forms(sub)

    sub = add(
        cold,
        "look after a cold store: list it, check it, delete from it, give space back",
        "cold verify FOLDER",
    )
    sub.add_argument("verb", choices=("catalogue", "delete", "gc", "verify"))
    sub.add_argument("folder", type=Path, help="what `kvtrial generate --cold` was given")
    sub.add_argument("keys", nargs="*", metavar="KEY", help="what to delete: the catalogue's keys")
    sub.add_argument("--json", action="store_true", help="for programs")

    add(candidates, "list the candidates, and which are built, default or retired", "candidates")
    add(models, "list the models", "models")
    return top


def main(argv: list[str] | None = None) -> int:
    """Run one command; see `kvtrial.run.exits.exit_with` for what becomes of errors."""
    args = parser().parse_args(argv)
    return args.action(args) or 0
