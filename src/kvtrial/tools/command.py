"""The command ``kvtrial``: its parser. `kvtrial.tools.verbs` has what each verb does."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from kvtrial.contract import MAX_THREADS, MAX_TOKENS, PAGE_TOKENS
from kvtrial.run import layout
from kvtrial.run.exits import EXIT_FAILED, EXIT_INCONCLUSIVE, EXIT_SLOWER
from kvtrial.tools import verbs
from kvtrial.tools.arguments import Parser, Version, page_sizes, share, whole, wholes
from kvtrial.tools.completion import SHELLS

#: Decodes of each arm that `kvtrial try` makes at most: hours of them.
MOST_BLOCKS = 1000

_CODES = (
    "Exit code 0: what to run and which language are decided. "
    f"{EXIT_INCONCLUSIVE}: the outcome is INCONCLUSIVE. 1 or 2: an error."
)


def _add_forms(sub: argparse.ArgumentParser) -> None:
    """``--json``, ``--markdown`` and ``--csv``, one of them at most."""
    form = sub.add_mutually_exclusive_group()
    for name, what in (("json", "for programs"), ("markdown", "a table"), ("csv", "for a sheet")):
        form.add_argument(f"--{name}", action="store_true", help=what)


def parser() -> argparse.ArgumentParser:
    """The command's parser; each subcommand's help is a line and an example."""
    top = Parser(prog="kvtrial", description="Which KV cache should this machine run?")
    top.add_argument("--version", action=Version, nargs=0, help="version and build, then exit")
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
        verbs.run,
        "run the trial to its verdict, as `make verdict` does; goes on where it was stopped",
        "run --model smollm2-135m-instruct-q4_1 --protocol mine.yaml",
        "In a checkout results go to its results/, elsewhere to results/ of the current folder.",
    )
    sub.add_argument(
        "targets",
        nargs="*",
        metavar="TARGET",
        help="verdict by default; or report, adopt, peers, or a stage such as m2",
    )
    sub.add_argument("--model", help="a name of `kvtrial models`, or a GGUF file")
    sub.add_argument(
        "--protocol", help="a registration's path; smoke: a small one that decides nothing"
    )
    sub.add_argument("--profile", choices=layout.PROFILES, help="full: all cells")
    sub.add_argument("--cores", type=whole(1, MAX_THREADS), default=1, help="for what is not timed")
    sub.add_argument("--dry-run", action="store_true", help="say what would be done")
    sub.add_argument(
        "--forcerun", action="append", metavar="STAGE", help="measure it again, as another attempt"
    )

    sub = add(
        verbs.protocol,
        "print a registration: with a candidate of yours, or with the cells of your traffic",
        "protocol --add MINE > mine.yaml",
        "`kvtrial run --protocol mine.yaml` runs it.",
    )
    sub.add_argument(
        "--add",
        action="append",
        metavar="NAME",
        help="a candidate: as the challenger that is tested, or among the profiles; may be given again",
    )
    sub.add_argument("--base", help="a registration to begin with; smoke: the small one")
    sub.add_argument(
        "--traffic", type=Path, metavar="FILE", help="JSONL of lengths: the cells are made from it"
    )

    sub = add(
        verbs.verdict,
        "show the newest verdict, or that of a run; of a run that goes on, what it says so far",
        "verdict --full",
        f"{_CODES} A run without a verdict is shown as PROVISIONAL, with code {EXIT_INCONCLUSIVE}.",
    )
    sub.add_argument("run", nargs="?", help="run_id or folder")
    sub.add_argument("--full", action="store_true", help="everything, not the first table alone")
    sub.add_argument("--json", action="store_true", help="verdict.json as it is")

    sub = add(
        verbs.decide,
        "decide again from a run's raw events; the same bytes",
        "decide results/RUN_ID",
        _CODES,
    )
    sub.add_argument("run", help="run_id or folder")
    sub.add_argument("--full", action="store_true", help="everything, not the first table alone")

    sub = add(
        verbs.generate,
        "continue a text with the adopted store",
        'generate "Once upon a time" --tokens 64',
    )
    sub.add_argument("text", help="the prompt; - reads it from stdin")
    sub.add_argument("--model", default=layout.DEFAULT_MODEL, help="a name of `kvtrial models`")
    sub.add_argument("--tokens", type=whole(1, MAX_TOKENS), default=64, help="tokens to make")
    sub.add_argument("--store", help="a candidate; by default the adopted one")
    sub.add_argument("--profile", help="without --store: fp32, or the adopted store's own profile")
    sub.add_argument(
        "--cold",
        type=Path,
        metavar="FOLDER",
        help="restore what this cold store knows of the text, and spill its whole blocks of 64 tokens",
    )
    sub.add_argument("--threads", type=whole(1, MAX_THREADS), default=1, help="of the decode")
    sub.add_argument(
        "--beyond-context",
        action="store_true",
        help="go on where the model's context is full, past what it was trained for",
    )

    sub = add(verbs.fetch, "fetch or make a model's file", f"fetch {layout.DEFAULT_MODEL}")
    sub.add_argument("name", help="a name of `kvtrial models`")

    sub = add(
        verbs.doctor, "say what this machine offers and what that means for a run", "doctor --json"
    )
    sub.add_argument("--model", default=layout.DEFAULT_MODEL, help="a name of `kvtrial models`")
    sub.add_argument("--json", action="store_true", help="for programs")

    sub = add(
        verbs.try_,
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
        type=wholes(1, MAX_TOKENS),
        metavar="N[,N…]",
        help="filled positions; 4096 as registered",
    )
    sub.add_argument("--threads", type=whole(1, MAX_THREADS), default=1, help="of a decode")
    sub.add_argument(
        "--blocks", type=whole(1, MOST_BLOCKS), help="decodes of each; what fits by default"
    )
    sub.add_argument(
        "--fail-below",
        type=share,
        metavar="RATIO",
        help="such as 0.97: fail where the whole interval lies below it, of the decode or of its attention",
    )
    form = sub.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for programs")
    form.add_argument("--markdown", action="store_true", help="for a pull request")

    sub = add(
        verbs.conformance,
        "try the conformance suite on a candidate: is it right?",
        "conformance MINE --page-tokens 16 --tests AttentionMasksHoles",
        f"Exit code 0: nothing failed. {EXIT_FAILED}: something did, or it crashed.",
    )
    sub.add_argument("name", help="a name of `kvtrial candidates`")
    sub.add_argument("out", nargs="?", type=Path, metavar="OUT", help="JSON to write as well")
    sub.add_argument(
        "--page-tokens",
        type=page_sizes,
        default=PAGE_TOKENS,
        metavar="P[,P…]",
        help="page sizes, in tokens; all that there are by default",
    )
    sub.add_argument("--tests", nargs="+", metavar="TEST", help="names of tests; all by default")

    sub = add(verbs.fleet, "one table over many verdicts", "fleet results/*/verdict.json --json")
    sub.add_argument("files", nargs="+", type=Path, metavar="FILE", help="verdict.json, or a run")
    sub.add_argument("--json", action="store_true", help="for programs")

    sub = add(
        verbs.compare,
        "say how each arm stands in a run against how it stood in another",
        "compare RUN_BEFORE RUN_AFTER",
        "Each is compared over the reference of its own run, so that what the machine did to both cancels.",
    )
    sub.add_argument("first", metavar="RUN", help="run_id or folder: before")
    sub.add_argument("second", metavar="RUN", help="run_id or folder: after")
    _add_forms(sub)

    sub = add(verbs.history, "list all verdicts of results/ by time", "history --arm K3 --csv")
    sub.add_argument(
        "--arm", action="append", metavar="NAME", help="follow this arm; may be given again"
    )
    _add_forms(sub)

    sub = add(
        verbs.cold,
        "look after a cold store: list it, check it, delete from it, give space back",
        "cold verify FOLDER",
    )
    sub.add_argument("verb", choices=("catalogue", "delete", "gc", "verify"))
    sub.add_argument("folder", type=Path, help="what `kvtrial generate --cold` was given")
    sub.add_argument("keys", nargs="*", metavar="KEY", help="what to delete: the catalogue's keys")
    sub.add_argument("--json", action="store_true", help="for programs")

    sub = add(
        verbs.candidates,
        "list the candidates, and which are built, default or retired",
        "candidates --json",
    )
    sub.add_argument("--json", action="store_true", help="for programs")
    sub = add(
        verbs.models,
        "say what each model needs, and what context fits this machine",
        "models --model path/to/model.gguf",
    )
    sub.add_argument("--model", metavar="NAME|PATH", help="this one alone")
    sub.add_argument(
        "--synthetic",
        type=Path,
        metavar="FILE",
        help="make a file of random weights in this file's shape, to be measured in its place",
    )
    sub.add_argument("--json", action="store_true", help="for programs")

    sub = add(verbs.ui, "browse the measurements in MLflow", "ui --port 5001")
    sub.add_argument("--host", default="127.0.0.1", help="address to answer at")
    sub.add_argument("--port", type=whole(1, 65535), default=5000, help="port to answer at")

    sub = add(
        verbs.completion,
        "print a script that lets a shell complete what is typed",
        "completion bash > ~/.local/share/bash-completion/completions/kvtrial",
    )
    sub.add_argument("shell", choices=SHELLS)
    sub.set_defaults(parser=top)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run one command; see `kvtrial.run.exits.exit_with` for what becomes of errors."""
    args = parser().parse_args(argv)
    return args.action(args) or 0
