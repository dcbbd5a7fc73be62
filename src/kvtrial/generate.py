"""Greedy text, piece by piece, through the adopted store: what ``kvtrial generate`` prints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from kvtrial import models, selection
from kvtrial.contract import InvalidArgument
from kvtrial.engine.transformer import greedy


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
    threads : int
        Threads of the decoder and of the store.

    Attributes
    ----------
    made : int
        Tokens made so far.
    decode_s : float
        Seconds spent on the tokens after the first, which the prefill gives.

    Raises
    ------
    ModelError, KVError
    """

    def __init__(
        self, text: str, *, model: str, tokens: int, store: str | None = None, threads: int = 1
    ) -> None:
        for name, value in (("tokens", tokens), ("threads", threads)):
            if value < 1:
                raise InvalidArgument(f"{name} is {value}; give at least 1")
        self.store = store or selection.load().default
        self._model = models.load_model(model)
        self._prompt = self._model.tokenizer.encode(text)
        if not self._prompt:
            raise InvalidArgument("the text is empty; give at least one token to continue")
        self._tokens = tokens
        self._threads = threads
        self.made = 0
        self.decode_s = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Decode rate, total over total; None before the second token."""
        return (self.made - 1) / self.decode_s if self.decode_s else None

    def __iter__(self) -> Iterator[str]:
        return whole_characters(self._ids(), self._model.tokenizer.decode)

    def _ids(self) -> Iterator[int]:
        room = len(self._prompt) + self._tokens
        # Not a trial: a retired store is refused.
        store = self._model.open_store(self.store, tokens=room, threads=self._threads, trial=False)
        try:
            session = store.open_session()
            decoder = self._model.decoder(threads=self._threads)
            logits = self._model.prefill(session, self._prompt, threads=self._threads)
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
        finally:
            store.close()


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
