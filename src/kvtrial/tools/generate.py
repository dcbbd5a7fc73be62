"""Greedy text, piece by piece, through the adopted store: what ``kvtrial generate`` prints."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtrial import candidates
from kvtrial.cold import ColdStore, Identity, SpillReport, open_cold
from kvtrial.contract import Capability, InvalidArgument, KVSession, KVStore, Unsupported
from kvtrial.engine.transformer import Model, greedy
from kvtrial.run import models

#: Tokens that are computed again, elsewhere, to say what a restore has saved.
PROBE_TOKENS = 64
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
    ) -> None:
        for name, value in (("tokens", tokens), ("threads", threads)):
            if value < 1:
                raise InvalidArgument(f"{name} is {value}; give at least 1")
        chosen, self.why = candidates.choose(store, profile)
        self.store, self.profile = chosen.name, chosen.profile.value
        if cold is not None:
            _refuse_without_spill(self.store)
        self._model: Model = models.load_model(model)
        self._prompt = self._model.tokenizer.encode(text)
        if not self._prompt:
            raise InvalidArgument("the text is empty; give at least one token to continue")
        self._tokens = tokens
        self._threads = threads
        self._cold_path = cold
        self.made = 0
        self.decode_s = 0.0
        self.restored: Restored | None = None
        self.spilled: SpillReport | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Decode rate, total over total; None before the second token."""
        return (self.made - 1) / self.decode_s if self.decode_s else None

    def __iter__(self) -> Iterator[str]:
        return whole_characters(self._ids(), self._model.tokenizer.decode)

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
        self._model.prefill(session, self._prompt[:tokens], threads=self._threads)
        return (time.perf_counter() - begun) / tokens

    def _continue(self, session: KVSession) -> Iterator[int]:
        """The tokens after the prompt, whose first rows the session may hold already.

        The prompt's last token is decoded like those that follow. With quantised weights the logits do not
        depend, in any bit, on how many whole blocks of `BLOCK_TOKENS` the session held: the rows are the
        same. Weights in F32 and F16 go through a BLAS whose last bits depend on the number of rows.
        """
        decoder = self._model.decoder(threads=self._threads)
        before = self._prompt[session.length(0) : -1]
        if before:
            self._model.prefill(session, before, threads=self._threads)
        logits = decoder.step([session], self._prompt[-1:])[0]
        while True:
            token = greedy(logits)
            self.made += 1
            if token == self._model.tokenizer.eos_id:
                return
            yield token
            if self.made == self._tokens:
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


def whole_characters(ids: Iterable[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """Text of ``ids`` as it comes; a character is held back until all of its bytes are there."""
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        text = decode(pending)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text
            pending.clear()
    if pending:
        yield decode(pending)
