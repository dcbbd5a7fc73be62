"""The registered text that contexts are filled with, as token slices that no two sessions share."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kvtrial.engine.errors import WorkloadError
from kvtrial.engine.tokenizer import Tokenizer
from kvtrial.host import paths

TEXT_NAME = "devils-dictionary.txt"
TEXT_SHA256 = "4e7f2ffe899bcddcbce11cd7acd119c257d77cc9a2fc39fe5811e7c6db85cec3"
#: The forced stream: so many of the text's own tokens follow a filled context, and every arm is fed them.
FORCED_TOKENS = 512


def load_text(path: str | Path | None = None) -> str:
    """The workload text; `WorkloadError` if it is not byte for byte the registered one.

    Parameters
    ----------
    path : path, optional
        By default config/workload/devils-dictionary.txt.
    """
    path = Path(path) if path is not None else paths.config_file(f"workload/{TEXT_NAME}")
    raw = path.read_bytes()
    sha256 = hashlib.sha256(raw).hexdigest()
    if sha256 != TEXT_SHA256:
        raise WorkloadError(
            f"{path} has sha256 {sha256}; registered: {TEXT_SHA256}; restore it from the repository "
            "(git may have changed its line ends)"
        )
    return raw.decode()


def session_tokens(tokenizer: Tokenizer, context: int, session: int) -> list[int]:
    """Token ids of one session: those that fill its context, and `FORCED_TOKENS` that follow in the text.

    Parameters
    ----------
    context : int
        Tokens that fill it, at least 1.
    session : int
        Number of the session from 0; different sessions are filled by different parts of the text.

    Raises
    ------
    WorkloadError
        The text has fewer than (session + 1) x context + `FORCED_TOKENS` tokens.
    """
    if context < 1 or session < 0:
        raise WorkloadError(
            f"context is {context}, session {session}; allowed: context from 1, session from 0"
        )
    ids = _ids(tokenizer)
    start, stop = session * context, (session + 1) * context + FORCED_TOKENS
    if stop > len(ids):
        raise WorkloadError(
            f"session {session} of context {context} needs {stop} tokens with the {FORCED_TOKENS} of its "
            f"forced stream; the workload text has {len(ids)}; lower contexts or sessions in "
            "config/protocol.yaml"
        )
    return ids[start:stop]


def places(tokenizer: Tokenizer, context: int, count: int, tokens: int) -> list[list[int]]:
    """``count`` parts of the text, each of so many tokens, that share none with what fills a context.

    The first is what follows the context in the text; the others are spread evenly over the rest.

    Raises
    ------
    WorkloadError
        The text has fewer than context + count x tokens tokens.
    """
    ids = _ids(tokenizer)
    needed = context + count * tokens
    if needed > len(ids):
        raise WorkloadError(
            f"{count} places of {tokens} tokens after a context of {context} need {needed} tokens; the "
            f"workload text has {len(ids)}; lower quality.chunks or the contexts in config/protocol.yaml"
        )
    room = len(ids) - tokens - context
    starts = [context + room * place // max(count - 1, 1) for place in range(count)]
    return [ids[start : start + tokens] for start in starts]


def _ids(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(load_text())
