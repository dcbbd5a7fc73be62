"""The command ``kvtrial``: its parser. `kvtrial.tools.verbs` has what each verb does."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from kvtrial.contract import MAX_THREADS, MAX_TOKENS, PAGE_TOKENS
from kvtrial.host.arguments import Parser, Version, page_sizes, share, whole, wholes
from kvtrial.run import layout
from kvtrial.run.exits import EXIT_FAILED, EXIT_INCONCLUSIVE, EXIT_SLOWER
from kvtrial.tools import verbs
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


def _add_model(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--model",
        default=layout.DEFAULT_MODEL,
        metavar="MODEL",
        help="a name of `kvtrial models`",
    )


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
        "run the trial and print its verdict, as `make verdict` does; a stopped run is resumed",
        "run --model smollm2-135m-instruct-q4_1 --protocol mine.yaml",
        "Results go to results/ of the checkout, or of the current folder where there is no checkout.",
    )
    sub.add_argument(
        "targets",
        nargs="*",
        metavar="TARGET",
        help="verdict by default; or report, adopt, peers, or a stage such as m2",
    )
    sub.add_argument("--model", metavar="MODEL", help="a name of `kvtrial models`, or a GGUF file")
    sub.add_argument(
        "--protocol", help="a registration's path; smoke: a small one that decides nothing"
    )
    sub.add_argument("--profile", choices=layout.PROFILES, help="full: all cells")
    sub.add_argument(
        "--cores",
        type=whole(1, MAX_THREADS),
        default=1,
        help="cores for the stages that are not timed",
    )
    sub.add_argument("--dry-run", action="store_true", help="print what would be done")
    sub.add_argument(
        "--forcerun",
        action="append",
        metavar="STAGE",
        help="measure this stage again, as another attempt",
    )
    sub.add_argument(
        "--store", metavar="CANDIDATE", help="adopt: an eligible arm other than the verdict's"
    )
    sub.add_argument(
        "--force",
        action="store_true",
        help="adopt: a verdict of random weights or a smoke run, too",
    )

    sub = add(
        verbs.protocol,
        "print a protocol with a candidate of yours, or with the contexts of your traffic",
        "protocol --add MINE > mine.yaml",
        "`kvtrial run --protocol mine.yaml` runs it.",
    )
    sub.add_argument(
        "--add",
        action="append",
        metavar="CANDIDATE",
        help="a candidate to add: the challenger that is tested, or a profile; may be given again",
    )
    sub.add_argument("--base", help="the protocol to start from; smoke: the small one")
    sub.add_argument(
        "--traffic",
        type=Path,
        metavar="FILE",
        help="JSONL of lengths, from which the cells are made",
    )

    sub = add(
        verbs.verdict,
        "show the newest verdict or that of a run; during a run, what is known so far",
        "verdict --full",
        f"{_CODES} A run without a verdict is shown as PROVISIONAL, with code {EXIT_INCONCLUSIVE}.",
    )
    sub.add_argument("run", nargs="?", metavar="RUN", help="run_id or folder")
    sub.add_argument("--full", action="store_true", help="all tables, not only the first")
    sub.add_argument("--json", action="store_true", help="verdict.json as it is")

    sub = add(
        verbs.decide,
        "derive a verdict again from its raw events, byte for byte",
        "decide results/RUN_ID",
        _CODES,
    )
    sub.add_argument("run", metavar="RUN", help="run_id or folder")
    sub.add_argument("--full", action="store_true", help="all tables, not only the first")

    sub = add(
        verbs.generate,
        "continue a text with the adopted store",
        'generate "Once upon a time" --tokens 64',
    )
    sub.add_argument("text", help="the prompt; - reads it from stdin")
    _add_model(sub)
    sub.add_argument("--tokens", type=whole(1, MAX_TOKENS), default=64, help="tokens to make")
    sub.add_argument("--store", metavar="CANDIDATE", help="by default the adopted one")
    sub.add_argument("--profile", help="without --store: fp32, or the adopted store's own profile")
    sub.add_argument(
        "--cold",
        type=Path,
        metavar="FOLDER",
        help="restore what this cold store has of the prompt, and store its whole blocks of 64 tokens",
    )
    sub.add_argument(
        "--threads", type=whole(1, MAX_THREADS), default=1, help="threads of the decode"
    )
    sub.add_argument(
        "--beyond-context",
        action="store_true",
        help="go on when the model's context is full, beyond its trained length",
    )

    sub = add(verbs.fetch, "fetch or make a model's file", f"fetch {layout.DEFAULT_MODEL}")
    sub.add_argument("name", metavar="MODEL", help="a name of `kvtrial models`")

    sub = add(verbs.doctor, "check this machine and say what is missing", "doctor --json")
    _add_model(sub)
    sub.add_argument("--json", action="store_true", help="for programs")

    sub = add(
        verbs.try_,
        "compare a candidate with the adopted store in about 90 seconds; adopts nothing",
        "try K5 --context 512,4096 --fail-below 0.97",
        f"Exit code 0: it passed and was measured. {EXIT_FAILED}: it failed. {EXIT_SLOWER}: with --fail-below, "
        "it is slower than that.",
    )
    sub.add_argument("name", metavar="CANDIDATE", help="a name of `kvtrial candidates`")
    sub.add_argument("--against", metavar="CANDIDATE", help="by default the adopted store")
    sub.add_argument(
        "--against-ref",
        metavar="REF",
        help="a git ref of its package, such as main: it is built once in results/refs, and the two take turns",
    )
    _add_model(sub)
    sub.add_argument(
        "--context",
        type=wholes(1, MAX_TOKENS),
        metavar="N[,N…]",
        help="filled positions; 4096 by default",
    )
    sub.add_argument("--threads", type=whole(1, MAX_THREADS), default=1, help="threads of a decode")
    sub.add_argument(
        "--blocks",
        type=whole(1, MOST_BLOCKS),
        help="fresh processes; by default as many as the interval needs",
    )
    sub.add_argument(
        "--fail-below",
        type=share,
        metavar="RATIO",
        help="such as 0.97: fail if a whole interval lies below it, of the decode or of its attention",
    )
    form = sub.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for programs")
    form.add_argument("--markdown", action="store_true", help="for a pull request")

    sub = add(
        verbs.conformance,
        "run the conformance suite on a candidate",
        "conformance MINE --page-tokens 16 --tests AttentionMasksHoles",
        f"Exit code 0: nothing failed. {EXIT_FAILED}: a check failed, or the candidate crashed.",
    )
    sub.add_argument("name", metavar="CANDIDATE", help="a name of `kvtrial candidates`")
    sub.add_argument(
        "out", nargs="?", type=Path, metavar="OUT", help="a JSON file to write the outcome to"
    )
    sub.add_argument(
        "--page-tokens",
        type=page_sizes,
        default=PAGE_TOKENS,
        metavar="P[,P…]",
        help="page sizes in tokens; by default 16,32,64",
    )
    sub.add_argument("--tests", nargs="+", metavar="TEST", help="names of tests; all by default")

    sub = add(verbs.fleet, "show many verdicts in one table", "fleet results/*/verdict.json --json")
    sub.add_argument("files", nargs="+", type=Path, metavar="RUN", help="verdict.json, or a run")
    sub.add_argument("--json", action="store_true", help="for programs")

    sub = add(
        verbs.compare,
        "say what changed for each arm between two runs",
        "compare RUN_BEFORE RUN_AFTER",
        "Ratios over each run's own reference are compared, so a faster or slower day cancels.",
    )
    sub.add_argument("first", metavar="RUN", help="the run before: run_id or folder")
    sub.add_argument("second", metavar="RUN", help="the run after: run_id or folder")
    _add_forms(sub)

    sub = add(verbs.history, "list all verdicts of results/ by time", "history --arm K3 --csv")
    sub.add_argument(
        "--arm",
        action="append",
        metavar="CANDIDATE",
        help="show this arm over the runs; may be given again",
    )
    _add_forms(sub)

    sub = add(
        verbs.cold,
        "look after a cold store: list, check, delete, free space",
        "cold verify FOLDER",
    )
    sub.add_argument("verb", choices=("catalogue", "delete", "gc", "verify"))
    sub.add_argument("folder", type=Path, help="what `kvtrial generate --cold` was given")
    sub.add_argument("keys", nargs="*", metavar="KEY", help="keys to delete, from the catalogue")
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
    sub.add_argument("--model", metavar="MODEL", help="this one alone: a name, or a GGUF file")
    sub.add_argument(
        "--synthetic",
        type=Path,
        metavar="FILE",
        help="make a file of random weights in this file's shape, to be measured in its place",
    )
    sub.add_argument("--json", action="store_true", help="for programs")

    sub = add(verbs.ui, "browse the measurements in MLflow", "ui --port 5001")
    sub.add_argument("--host", default="127.0.0.1", help="address to listen on")
    sub.add_argument("--port", type=whole(1, 65535), default=5000, help="port to listen on")

    sub = add(
        verbs.completion,
        "print a script that completes commands in a shell",
        "completion bash > ~/.local/share/bash-completion/completions/kvtrial",
    )
    sub.add_argument("shell", choices=SHELLS)
    sub.set_defaults(parser=top)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run one command; see `kvtrial.run.exits.exit_with` for what becomes of errors."""
    args = parser().parse_args(argv)
    return args.action(args) or 0
