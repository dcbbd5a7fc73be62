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
    found = hashlib.sha256(raw).hexdigest()
    if found != TEXT_SHA256:
        raise WorkloadError(
            f"{path} has sha256 {found}; registered: {TEXT_SHA256}; restore it from the repository "
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
    ids = tokenizer.encode(load_text())
    start, stop = session * context, (session + 1) * context + FORCED_TOKENS
    if stop > len(ids):
        raise WorkloadError(
            f"session {session} of context {context} needs {stop} tokens with the {FORCED_TOKENS} of its "
            f"forced stream; the workload text has {len(ids)}; lower contexts or sessions in "
            "config/protocol.yaml"
        )
    return ids[start:stop]
