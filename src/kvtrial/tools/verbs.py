"""The verbs of the command ``kvtrial``, by their names. Each imports what it needs, so that --help is quick."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvtrial.contract.arguments import shown
from kvtrial.decision.document import Document
from kvtrial.host import paths, printed
from kvtrial.host.files import is_dir
from kvtrial.run import layout
from kvtrial.run.exits import EXIT_FAILED, EXIT_INCONCLUSIVE, EXIT_SLOWER

#: In place of a text: it is read from there.
STDIN = "-"


class NoVerdict(layout.ConfigError):
    """There is no verdict to show; the message says how to get one."""


def _newest_run() -> Path:
    """The run whose verdict, or whose last finished block, is the newest."""
    runs = [path.parent for path in paths.results_dir().glob("*/protocol.json")]
    if not runs:
        raise NoVerdict(f"no verdict under {paths.results_dir()}; run: {paths.how_to()}")
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
    where = (
        f"{page}"
        if page.is_file()
        else f"{run_dir} (one page with figures: {paths.how_to('report')})"
    )
    rest = "" if full else "All of it: kvtrial verdict --full. "
    console.print(f"{rest}Figures: {where}, or {paths.how_to('ui')}", soft_wrap=True)
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


def _code(verdict: Document) -> int:
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
            raise NoVerdict(f"{run_dir} has no verdict.json yet; run: {paths.how_to()}")
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


def run(args: argparse.Namespace) -> None:
    """kvtrial run"""
    from kvtrial.tools import pipeline

    pipeline.run(
        pipeline.command(
            args.targets,
            model=args.model,
            protocol=args.protocol,
            profile=args.profile,
            cores=args.cores,
            dry_run=args.dry_run,
            forcerun=args.forcerun or (),
            store=args.store,
            force=args.force,
        )
    )


def protocol(args: argparse.Namespace) -> None:
    """kvtrial protocol"""
    from kvtrial.tools import registering

    print(registering.registration(args.add or (), base=args.base, traffic=args.traffic), end="")


def conformance(args: argparse.Namespace) -> int:
    """kvtrial conformance NAME"""
    from kvtrial.tools import conforming

    found = conforming.try_suite(args.name, args.page_tokens, args.tests or (), args.out)
    print(conforming.summary(found))
    return 0 if found["passed"] else EXIT_FAILED


def ui(args: argparse.Namespace) -> None:
    """kvtrial ui"""
    from kvtrial.tracking import __main__ as store

    store.main(["ui", "--host", args.host, "--port", str(args.port)])


def completion(args: argparse.Namespace) -> None:
    """kvtrial completion SHELL"""
    from kvtrial.tools.completion import script

    print(script(args.shell, args.parser), end="")


def generate(args: argparse.Namespace) -> None:
    """kvtrial generate TEXT"""
    from kvtrial.tools.generate import BLOCK_TOKENS, Continuation

    made = Continuation(
        sys.stdin.read() if args.text == STDIN else args.text,
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
        printed.count(made.made, "token") + (f", {rate:.1f} tokens/s" if rate is not None else ""),
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
            f"{printed.count(kept.rows, 'token')} of the prompt in {args.cold}: "
            f"{printed.count(kept.pages_written, 'page')} written, {kept.pages_shared} were there",
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
    from kvtrial.show import tables

    adopted = selection.adopted()
    found = []
    for name, candidate in registry.candidates().items():
        state = f"not built: {candidate.not_built}"
        if candidate.not_built is None:
            state = "; ".join(selection.said_of(name, adopted)) or "built"
        found.append(
            {
                "name": name,
                "what it is": candidate.title,
                "profile": candidate.profile.name,
                "language": candidate.language,
                "state": state,
            }
        )
    keys = {"what it is": "title"}
    document = [{keys.get(key, key): text for key, text in row.items()} for row in found]
    _print(args.json, document, lambda: tables.table(found))


def models(args: argparse.Namespace) -> None:
    """kvtrial models"""
    from kvtrial.tools import needs

    if args.synthetic is not None:
        made = needs.make_synthetic(args.synthetic)
        print(
            f"{made}\nrandom weights in the shape of {args.synthetic}; measure it: kvtrial run --model '{made}'"
        )
        return
    told = needs.of_registered() if args.model is None else [needs.of_model(args.model)]
    if args.json:
        _print(True, told, str)
    else:
        print(needs.render(told))


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


def fleet(args: argparse.Namespace) -> int:
    """kvtrial fleet FILE..."""
    from kvtrial.show import fleet as verdicts

    found, problems = verdicts.load_all(args.files)
    rows = verdicts.table(found)
    _print(args.json, rows, lambda: verdicts.render(rows))
    _say_left_out(problems)
    return EXIT_FAILED if problems else 0


def compare(args: argparse.Namespace) -> None:
    """kvtrial compare RUN RUN"""
    from kvtrial.tools import comparing

    found = comparing.compare(_run_dir(args.first), _run_dir(args.second))
    _print_rows(args, found, comparing.compared(found), comparing.notes(found))


def history(args: argparse.Namespace) -> None:
    """kvtrial history"""
    from kvtrial.show import fleet as verdicts
    from kvtrial.tools import comparing

    runs = [path.parent for path in sorted(paths.results_dir().glob("*/verdict.json"))]
    if not runs:
        raise NoVerdict(f"no verdict under {paths.results_dir()}; run: {paths.how_to()}")
    decided, problems = verdicts.load_all(runs)
    found = comparing.history(decided, args.arm or ())
    _print_rows(args, found, comparing.told(found))
    _say_left_out(problems)


def _say_left_out(problems: Sequence[str]) -> None:
    """Name on stderr what is no verdict, behind the rows that are there."""
    for problem in problems:
        printed.console(stderr=True).print(f"left out: {problem}", soft_wrap=True)


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
