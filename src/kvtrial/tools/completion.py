"""``kvtrial completion SHELL``: a script made from the parser, so that it never knows other words than that does.

Names of candidates, models and runs change with what is installed and measured. The script asks for them as they
are needed, by ``kvtrial --names KIND``. Only what that takes is imported here: a person waits for the answer.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points

from kvtrial.host import paths
from kvtrial.host.files import parsed_yaml

SHELLS = ("bash", "zsh", "fish")
#: What the scripts ask the command with; it is no option for people.
NAMES = "--names"


def _models() -> Iterable[str]:
    return parsed_yaml(paths.config_file("models.yaml").read_bytes())["models"]


def _runs() -> Iterable[str]:
    return (found.parent.name for found in paths.results_dir().glob("*/protocol.json"))


#: What an argument takes, by its metavar in the parser.
KINDS: dict[str, Callable[[], Iterable[str]]] = {
    "CANDIDATE": lambda: entry_points(group="kvtrial.candidates").names,
    "MODEL": _models,
    "RUN": _runs,
}


def names(kind: str) -> list[str]:
    """The names of a kind, sorted; none where they can't be read, since a shell has no place for the reason."""
    with contextlib.suppress(Exception):
        return sorted(KINDS[kind]())
    return []


@dataclass(frozen=True)
class Values:
    """What an argument may be: words that are given in full, or names of a kind; neither where it is free."""

    words: tuple[str, ...] = ()
    kind: str = ""

    @classmethod
    def of(cls, action: argparse.Action) -> Values:
        """What the parser takes for this argument."""
        kind = action.metavar if isinstance(action.metavar, str) else ""
        return cls(tuple(map(str, action.choices or ())), kind if kind in KINDS else "")

    def spelt(self, ask: str) -> str:
        """Them for a shell, where ``ask`` is how it asks for the names of the kind ``?``."""
        return " ".join([*self.words, *([ask.replace("?", self.kind)] if self.kind else [])])


@dataclass(frozen=True)
class Option:
    """An option with its help; ``values`` is None where it takes none."""

    line: str
    values: Values | None


@dataclass(frozen=True)
class Verb:
    """What may follow a verb: its options, and the values of its other arguments."""

    name: str
    line: str
    options: dict[str, Option]
    values: Values


def verbs(parser: argparse.ArgumentParser) -> list[Verb]:
    """The verbs of a parser of subcommands, in their order."""
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    lines = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    found = []
    for name, sub in commands.choices.items():
        options, free = {}, []
        for action in sub._actions:
            if not action.option_strings:
                free.append(Values.of(action))
            for option in action.option_strings:
                if option.startswith("--"):
                    line = (action.help or "").partition(";")[0]
                    options[option] = Option(line, None if action.nargs == 0 else Values.of(action))
        words = tuple(word for values in free for word in values.words)
        kind = next((values.kind for values in free if values.kind), "")
        found.append(Verb(name, lines[name], options, Values(words, kind)))
    return found


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The script of a shell, one of `SHELLS`."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](verbs(parser))


_BASH = """\
# bash completion of kvtrial; made by `kvtrial completion bash`.
_kvtrial() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{names} --help --version"
    else
        case "${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD-1]}}" in
{valued}
            *) case "${{COMP_WORDS[1]}} $word" in
{options}
{free}
            esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _kvtrial kvtrial
"""


def _bash(found: list[Verb]) -> str:
    ask = f'$("${{COMP_WORDS[0]}}" {NAMES} ? 2>/dev/null)'
    valued, options, free = [], [], []
    for verb in found:
        for name, option in verb.options.items():
            if option.values is not None:
                spelt = option.values.spelt(ask)
                valued.append(f'            "{verb.name} {name}") words="{spelt}" ;;')
        options.append(f'                "{verb.name} -"*) words="{" ".join(verb.options)}" ;;')
        both = " ".join(filter(None, [verb.values.spelt(ask), *verb.options]))
        free.append(f'                "{verb.name} "*) words="{both}" ;;')
    return _BASH.format(
        names=" ".join(verb.name for verb in found),
        valued="\n".join(valued),
        options="\n".join(options),
        free="\n".join(free),
    )


_ZSH = """\
#compdef kvtrial
# zsh completion of kvtrial; made by `kvtrial completion zsh`.
_kvtrial() {{
    local program="$words[1]"
    local -a verbs
    verbs=(
{names}
    )
    if (( CURRENT == 2 )); then
        _describe 'verb' verbs
        return
    fi
    case "$words[2]" in
{cases}
    esac
}}
compdef _kvtrial kvtrial
"""


def _zsh(found: list[Verb]) -> str:
    ask = f"$($program {NAMES} ? 2>/dev/null)"

    def given(values: Values) -> str:
        return f"value:({values.spelt(ask)})" if values != Values() else "file:_files"

    names = "\n".join(f"        {_quoted(f'{verb.name}:{verb.line}')}" for verb in found)
    cases = []
    for verb in found:
        words = [
            _quoted(
                f"{name}[{_bracketed(option.line)}]"
                + (f":{given(option.values)}" if option.values is not None else "")
            )
            for name, option in verb.options.items()
        ]
        words.append(_quoted(f"*:{given(verb.values)}"))
        cases.append(
            f"    {verb.name}) shift words; (( CURRENT-- )); _arguments {' '.join(words)} ;;"
        )
    return _ZSH.format(names=names, cases="\n".join(cases))


def _fish(found: list[Verb]) -> str:
    ask = f"(kvtrial {NAMES} ? 2>/dev/null)"
    lines = ["# fish completion of kvtrial; made by `kvtrial completion fish`."]
    for verb in found:
        lines.append(
            f"complete -c kvtrial -n __fish_use_subcommand -f -a {verb.name} -d {_quoted(verb.line)}"
        )
    for verb in found:
        after = f"complete -c kvtrial -n {_quoted(f'__fish_seen_subcommand_from {verb.name}')}"
        if verb.values != Values():
            lines.append(f"{after} -f -a {_quoted(verb.values.spelt(ask))}")
        for name, option in verb.options.items():
            line = f"{after} -l {name.removeprefix('--')} -d {_quoted(option.line)}"
            if option.values is not None:
                spelt = option.values.spelt(ask)
                line += f" -x -a {_quoted(spelt)}" if spelt else " -r"
            lines.append(line)
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """For zsh and fish alike: single quotes, in which fish takes backslashes for itself."""
    return "'" + text.replace("\\", "").replace("'", "’") + "'"


def _bracketed(text: str) -> str:
    return text.replace("[", "(").replace("]", ")").replace(":", ",")
