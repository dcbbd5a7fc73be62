"""``kvtrial completion SHELL``: a script made from the parser, so that it never knows other words than that does.

Verbs, their options and the words that they take. Names of candidates and models are not in it: they change with
what is installed.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class Verb:
    """What may follow a verb: its options with their help, and words that are given in full."""

    name: str
    line: str
    options: dict[str, str]
    words: tuple[str, ...]


def verbs(parser: argparse.ArgumentParser) -> list[Verb]:
    """The verbs of a parser of subcommands, in their order."""
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    lines = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    found = []
    for name, sub in commands.choices.items():
        options, words = {}, []
        for action in sub._actions:
            for option in action.option_strings:
                if option.startswith("--"):
                    options[option] = (action.help or "").partition(";")[0]
            if not action.option_strings and action.choices:
                words += [str(choice) for choice in action.choices]
        found.append(Verb(name, lines[name], options, tuple(words)))
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
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _kvtrial kvtrial
"""


def _bash(found: list[Verb]) -> str:
    cases = "\n".join(
        f'        {verb.name}) words="{" ".join([*verb.words, *verb.options])}" ;;'
        for verb in found
    )
    return _BASH.format(names=" ".join(verb.name for verb in found), cases=cases)


_ZSH = """\
#compdef kvtrial
# zsh completion of kvtrial; made by `kvtrial completion zsh`.
_kvtrial() {{
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
    names = "\n".join(f"        {_quoted(f'{verb.name}:{verb.line}')}" for verb in found)
    cases = []
    for verb in found:
        words = "".join(f" {word}" for word in verb.words)
        first = f"'1:word:({words.strip()})' " if words else ""
        options = " ".join(_quoted(f"{o}[{_bracketed(text)}]") for o, text in verb.options.items())
        cases.append(
            f"    {verb.name}) shift words; (( CURRENT-- )); _arguments {first}{options} '*:file:_files' ;;"
        )
    return _ZSH.format(names=names, cases="\n".join(cases))


def _fish(found: list[Verb]) -> str:
    lines = ["# fish completion of kvtrial; made by `kvtrial completion fish`."]
    for verb in found:
        lines.append(
            f"complete -c kvtrial -n __fish_use_subcommand -f -a {verb.name} -d {_quoted(verb.line)}"
        )
    for verb in found:
        after = f"complete -c kvtrial -n {_quoted(f'__fish_seen_subcommand_from {verb.name}')}"
        if verb.words:
            lines.append(f"{after} -f -a {_quoted(' '.join(verb.words))}")
        lines += [
            f"{after} -l {option.removeprefix('--')} -d {_quoted(text)}"
            for option, text in verb.options.items()
        ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """For zsh and fish alike: single quotes, in which fish takes backslashes for itself."""
    return "'" + text.replace("\\", "").replace("'", "’") + "'"


def _bracketed(text: str) -> str:
    return text.replace("[", "(").replace("]", ")").replace(":", ",")
