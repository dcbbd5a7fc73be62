"""Greedy text, piece by piece, through the adopted store: what ``kvtrial generate`` prints."""

from __future__ import annotations

import codecs
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtrial import candidates
from kvtrial.cold import ColdStore, Identity, SpillReport, open_cold
from kvtrial.contract import (
    MAX_THREADS,
    MAX_TOKENS,
    Capability,
    InvalidArgument,
    KVSession,
    KVStore,
    Unsupported,
)
from kvtrial.contract.arguments import integer
from kvtrial.engine.transformer import Model, greedy
from kvtrial.run import models

#: Tokens that are computed again, elsewhere, to say what a restore has saved.
PROBE_TOKENS = 64
#: Of the prefill and of the decode; rows that others computed are another identity's.
ACTIVATIONS = "quantised"
#: A cold store is given whole blocks of so many tokens. Attention takes that many rows of a prefill at a time, so a
#: prefill that begins at a multiple of it makes the rows, bit for bit, that one from the beginning makes.
BLOCK_TOKENS = 64


@dataclass(frozen=True)
class Restored:
    """What a cold store spared a continuation.

    Attributes
    ----------
    tokens : int
        Rows of the prompt that came from the store.
    restore_ms : float
        What that took.
    prefill_ms : float
        What computing them takes here: the time of their first `PROBE_TOKENS`, at most, in
        proportion. Attention grows with the context, so a long prompt takes longer than this.
    """

    tokens: int
    restore_ms: float
    prefill_ms: float


class Continuation:
    """A text's continuation; iterate over it once, for pieces of text as they are made.

    Parameters
    ----------
    text : str
        The prompt, at least one token long.
    model : str
        A name of config/models.yaml, or the path of a GGUF file.
    tokens : int
        Tokens to make, at least 1; fewer where the model ends the text.
    store : str, optional
        A candidate; by default the adopted one.
    profile : str, optional
        Without a store: a numerical profile that was adopted, such as ``fp32``.
    threads : int
        Threads of the decoder and of the store.
    cold : Path, optional
        Folder of a cold store, made where it is missing: the longest prefix of the prompt that it
        knows is restored instead of computed, and the prompt is spilled before its continuation is made, both
        in whole blocks of `BLOCK_TOKENS`.

    beyond_context : bool
        Go on where the model's context is full.

    Attributes
    ----------
    store : str
        The candidate that is used.
    profile : str
        Its numerical profile.
    why : str
        Why that one, in words.
    made : int
        Tokens made so far.
    context_full : bool
        It ended before ``tokens`` were made, since the model's context was full.
    decode_s : float
        Seconds spent on the tokens after the first.
    restored : Restored or None
        What the cold store spared; None where it knew nothing of the prompt. Set at the end.
    spilled : SpillReport or None
        What was stored of the prompt; None where it has no whole block.

    Raises
    ------
    ModelError, KVError, OSError
    """

    def __init__(
        self,
        text: str,
        *,
        model: str,
        tokens: int,
        store: str | None = None,
        profile: str | None = None,
        threads: int = 1,
        cold: Path | None = None,
        beyond_context: bool = False,
    ) -> None:
        tokens = integer(tokens, "tokens", 1, MAX_TOKENS)
        threads = integer(threads, "threads", 1, MAX_THREADS)
        self._model: Model = models.load_model(model)
        chosen, self.why = candidates.choose(store, profile, self._model.config.store_shape)
        self.store, self.profile = chosen.name, chosen.profile.name
        if cold is not None:
            _refuse_without_spill(self.store)
        self._prompt = self._model.tokenizer.encode(text)
        if not self._prompt:
            raise InvalidArgument("the text is empty; give at least one token to continue")
        self._tokens, self._asked = tokens, tokens
        if not beyond_context:
            self._tokens = min(tokens, self._model.config.room(len(self._prompt)))
        self._threads = threads
        self._cold_path = cold
        self.made = 0
        self.decode_s = 0.0
        self.context_full = False
        self.restored: Restored | None = None
        self.spilled: SpillReport | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Decode rate, total over total; None before the second token."""
        return (self.made - 1) / self.decode_s if self.decode_s else None

    @property
    def context_length(self) -> int:
        """Positions that the model was trained for."""
        return self._model.config.context_length

    def __iter__(self) -> Iterator[str]:
        return whole_characters(self._ids(), self._model.tokenizer.bytes_of)

    def _ids(self) -> Iterator[int]:
        room = len(self._prompt) + self._tokens
        # Not a trial: a retired store is refused.
        with contextlib.closing(
            self._model.open_store(
                self.store,
                tokens=room + PROBE_TOKENS,
                threads=self._threads,
                trial=False,
            )
        ) as store:
            if self._cold_path is None:
                yield from self._continue(store.open_session())
                return
            identity = Identity.of(
                store,
                model_sha256=self._model.sha256,
                rope_base=self._model.config.rope_base,
                activations=ACTIVATIONS,
            )
            with open_cold(None, self._cold_path, identity) as cold:
                yield from self._known(store, cold)

    def _known(self, store: KVStore, cold: ColdStore) -> Iterator[int]:
        """Begin with what the cold store has of the prompt, and leave it the prompt's whole blocks.

        Rows that were decoded are not stored: most arms make other ones, in their last bits, than a prefill,
        and quantised activations make another text of those.
        """
        # The last position is decoded, whatever is known: its logits are not stored.
        whole = self._prompt[: (len(self._prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS]
        session = store.open_session()
        begun = time.perf_counter()
        rows = cold.restore(whole, session)
        restore_s = time.perf_counter() - begun
        session.rollback_tail(rows % BLOCK_TOKENS)
        rows -= rows % BLOCK_TOKENS
        try:
            if rows < len(whole):
                self._model.prefill(session, whole[rows:], threads=self._threads)
        finally:  # of an interrupted prefill, what is finished
            if made := session.length(0):
                self.spilled = cold.spill(session, whole[:made])
        yield from self._continue(session)
        if rows:
            prefill_ms = self._probe_s(store, min(rows, PROBE_TOKENS)) * rows * 1e3
            self.restored = Restored(rows, restore_s * 1e3, prefill_ms)

    def _probe_s(self, store: KVStore, tokens: int) -> float:
        """Seconds a token that a prefill of the prompt's first tokens takes."""
        session = store.open_session()
        begun = time.perf_counter()
        self._prefill(session, self._prompt[:tokens])
        return (time.perf_counter() - begun) / tokens

    def _prefill(self, session: KVSession, ids: list[int]) -> None:
        self._model.prefill(session, ids, threads=self._threads, activations=ACTIVATIONS)

    def _continue(self, session: KVSession) -> Iterator[int]:
        """The tokens after the prompt, whose first rows the session may hold already.

        The prompt's last token is decoded like those that follow. With quantised weights the logits do not
        depend, in any bit, on how many whole blocks of `BLOCK_TOKENS` the session held: the rows are the
        same. Weights in F32 and F16 go through a BLAS whose last bits depend on the number of rows.
        """
        decoder = self._model.decoder(threads=self._threads, activations=ACTIVATIONS)
        before = self._prompt[session.length(0) : -1]
        if before:
            self._prefill(session, before)
        logits = decoder.step([session], self._prompt[-1:])[0]
        while True:
            token = greedy(logits)
            self.made += 1
            if token == self._model.tokenizer.eos_id:
                return
            yield token
            if self.made == self._tokens:
                self.context_full = self.made < self._asked
                return
            started = time.perf_counter()
            logits = decoder.step([session], [token])[0]
            self.decode_s += time.perf_counter() - started


def _refuse_without_spill(name: str) -> None:
    """`Unsupported` for a store whose pages can't leave memory."""
    known = candidates.candidates()
    if name in known and Capability.SPILL not in known[name].capabilities:
        able = [n for n, c in known.items() if Capability.SPILL in c.capabilities]
        raise Unsupported(
            f"{name} can't spill its pages; with a cold store choose one of {', '.join(able)}"
        )


def whole_characters(ids: Iterable[int], bytes_of: Callable[[int], bytes]) -> Iterator[str]:
    """Text of ``ids`` as it comes. At most three bytes are held back, those that may yet become a
    character; bytes that can't are U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in ids:
        if text := decoder.decode(bytes_of(token)):
            yield text
    if rest := decoder.decode(b"", final=True):
        yield rest
