"""What the parsers of commands understand: numbers within bounds, near misses of a name, the version."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from typing import NoReturn

from kvtrial.contract import PAGE_TOKENS
from kvtrial.contract.arguments import page_size, shown
from kvtrial.host.printed import did_you_mean


class Parser(argparse.ArgumentParser):
    """Says which name was meant where an unknown one is near to it, and each default in its help."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(formatter_class=_Help, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """As argparse does, with the near name behind it."""
        if wrong := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            message += did_you_mean(wrong[1], re.findall(r"[\w-]+", wrong[2]))
        super().error(message)


class _Help(argparse.HelpFormatter):
    """Behind each option's help, what holds without it, where that is a value."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        value = action.default is not None and not isinstance(action.default, (bool, list))
        if value and action.default is not argparse.SUPPRESS and "default" not in text:
            text += " (default: %(default)s)"
        return text


def whole(low: int, high: int) -> Callable[[str], int]:
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


def wholes(low: int, high: int) -> Callable[[str], list[int]]:
    """Whole numbers between commas, each once and in their order."""
    one = whole(low, high)

    def parse(text: str) -> list[int]:
        return list(dict.fromkeys(one(part) for part in text.split(",")))

    return parse


def page_sizes(text: str) -> tuple[int, ...]:
    """Page sizes P between commas."""
    try:
        return tuple(page_size(int(part)) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{shown(text)}: give some of {', '.join(map(str, PAGE_TOKENS))}, with commas"
        ) from None


def share(text: str) -> float:
    """A ratio above 0 and up to 1."""
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio <= 1:
        raise argparse.ArgumentTypeError(f"{shown(text)}: give a ratio above 0 and up to 1")
    return ratio


class Version(argparse.Action):
    """``--version``: read when it is asked for, so that --help stays quick."""

    def __call__(self, *_: object, **__: object) -> None:
        from importlib.metadata import version

        from kvtrial.host import build

        made = build.facts().get("build_id")
        print(
            f"kvtrial {version('kvtrial')}" + (f", build {made}" if made else ", kernels not built")
        )
        sys.exit(0)
