"""`Model`: a GGUF file that runs, on any store of the contract; `Decoder`: its decode steps."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from kvtrial import candidates
from kvtrial.contract import (
    F32,
    I64,
    MAX_BUDGET_BYTES,
    MAX_THREADS,
    MAX_TOKENS,
    InvalidArgument,
    KVError,
    KVSession,
    KVStore,
    spec_behind,
)
from kvtrial.contract.arguments import callback, flag, integer, integers, page_size, shown
from kvtrial.engine._regions import Scratch
from kvtrial.engine.config import ModelConfig
from kvtrial.engine.errors import DecoderInUse, NonFiniteLogits, UnknownToken
from kvtrial.engine.gguf import GgufFile
from kvtrial.engine.prefill import Prefill
from kvtrial.engine.scheduler import Regions, Scheduler
from kvtrial.engine.tokenizer import Tokenizer
from kvtrial.engine.weights import Weights, load_weights

ACTIVATIONS = ("quantised", "fp32")
CHUNK = 512
#: Sessions of a decoder at most: its buffers hold the logits of each.
MAX_BATCH = 1024
#: Positions whose logits are made at a time where all are asked for.
LOGITS_ROWS = 64


@dataclass(frozen=True)
class Generation:
    """What `Model.generate` returns.

    Attributes
    ----------
    ids : list of int
        The n new tokens; fewer where the model's context was full before.
    step_ns : int64 (len(ids),)
        Nanoseconds of the step that gave each token.
    kv_bytes_read : int
        Bytes of valid K and V rows that all steps read, as stored.
    """

    ids: list[int]
    step_ns: I64
    kv_bytes_read: int


def greedy(logits: F32) -> int:
    """Index of the first maximum of logits (vocab,); `NonFiniteLogits` rather than token 0."""
    if not np.isfinite(logits).all():
        bad = int(np.flatnonzero(~np.isfinite(logits))[0])
        raise NonFiniteLogits(
            f"logit {bad} is {logits[bad]}; K, V or the activations left their range: try an FP32 "
            "store and activations='fp32', and check the model file"
        )
    return int(logits.argmax())


class Model:
    """Config, weights and tokenizer of one file.

    Attributes
    ----------
    name : str
    synthetic : bool
        The weights are random.
    config : ModelConfig
    unused_tensors : tuple of str
        Tensors of the file that its architecture has no use for.
    """

    def __init__(
        self, file: GgufFile, config: ModelConfig, weights: Weights, name: str, synthetic: bool
    ) -> None:
        self.file = file
        self.config = config
        self.weights = weights
        self.name = name
        self.synthetic = synthetic
        self.unused_tensors = weights.unused
        half = config.head_dim // 2
        self._frequencies = config.rope_base ** (-np.arange(half, dtype=np.float64) / half)
        self._frequencies /= config.rope_factor
        if weights.rope_factors is not None:
            self._frequencies /= weights.rope_factors

    @classmethod
    def from_gguf(
        cls, file: GgufFile, *, name: str | None = None, synthetic: bool = False
    ) -> Model:
        """Build a model of a file: its weights are copied, quantised matrices into panels.

        Raises
        ------
        UnsupportedArchitecture, TokenizerUnsupported, GgufInvalid, MissingTensor
        """
        config = ModelConfig.from_gguf(file)
        weights = load_weights(file, config)
        if weights.unused:
            warnings.warn(
                f"{file.path}: {len(weights.unused)} tensors that {config.architecture.name} does not "
                f"use: {', '.join(weights.unused[:8])}",
                stacklevel=2,
            )
        return cls(file, config, weights, name or Path(file.path).stem, synthetic)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer; `TokenizerUnsupported` for those not known to be right."""
        return Tokenizer(self.file)

    @functools.cached_property
    def sha256(self) -> str:
        """sha256 of the bytes that the weights come from; see `GgufFile.sha256`."""
        return self.file.sha256()

    def open_store(
        self,
        name: str | None,
        *,
        tokens: int,
        sessions: int = 1,
        threads: int = 1,
        page_tokens: int = 16,
        trial: bool = True,
    ) -> KVStore:
        """A store for ``sessions`` sessions of ``tokens`` tokens each, by candidate name.

        One page a layer and session is kept spare, for the page that a branch copies.

        Raises
        ------
        InvalidArgument, PoolExhausted, and the others of `kvtrial.open_store`
        """
        shape = self.config.store_shape
        tokens = integer(tokens, "tokens", 1, MAX_TOKENS)
        sessions = integer(sessions, "sessions", 1)
        budget = candidates.pool_bytes(
            name, shape, tokens=tokens, sessions=sessions, page_tokens=page_size(page_tokens)
        )
        if budget > MAX_BUDGET_BYTES:
            raise InvalidArgument(
                f"tokens is {tokens} and sessions is {shown(sessions)}: {shown(budget)} bytes of rows; "
                f"allowed: {MAX_BUDGET_BYTES} bytes"
            )
        return candidates.open_store(
            name,
            trial=trial,
            **shape,
            page_tokens=page_tokens,
            budget_bytes=budget,
            threads=threads,
        )

    def prefill(
        self,
        session: KVSession,
        ids: Iterable[int],
        chunk: int = CHUNK,
        progress: Callable[[int, int], None] | None = None,
        threads: int = 1,
        activations: str = "quantised",
        each: Callable[[F32], None] | None = None,
    ) -> F32:
        """Append ``ids`` to the session by matrix products over many positions.

        Parameters
        ----------
        session : KVSession
            From its length on; empty or not.
        ids : ints
            At least one.
        chunk : int
            Positions at a time.
        progress : callable, optional
            Called with (positions done, positions in all) after each chunk.
        threads : int
            Threads of the matrix products; the attention uses those of its store.
        activations : {"quantised", "fp32"}
            As `decoder`'s: "quantised" multiplies Q8_0 and Q4_1 weights on integers, 32 activations a
            scale; "fp32" goes through BLAS in float32, and is slower.
        each : callable, optional
            Called with the logits (m, vocab) of the next m positions, m <= `LOGITS_ROWS`, in order, until
            all n were given: no more of them are in memory at a time. An array is the callee's to keep.

        Returns
        -------
        float32 (vocab,)
            Logits of the last position.
        """
        tokens = self._checked_ids(ids)
        self._check_shape(session)
        chunk = integer(chunk, "chunk", 1)
        threads = integer(threads, "threads", 1, MAX_THREADS)
        callback(progress, "progress")
        callback(each, "each")
        run = self._prefill(min(chunk, len(tokens)), threads, activations)
        for start in range(0, len(tokens), chunk):
            hidden = run.run([(session, tokens[start : start + chunk])])
            if each is not None:
                for first in range(0, len(hidden), LOGITS_ROWS):
                    last = run.logits(hidden[first : first + LOGITS_ROWS])
                    each(last)
            if progress is not None:
                progress(min(start + chunk, len(tokens)), len(tokens))
        if each is None:
            last = run.logits(hidden[-1:])
        logits: F32 = last[-1]
        return logits

    def prefill_texts(
        self,
        sessions: Sequence[KVSession],
        texts: Sequence[Iterable[int]],
        each: Callable[[int, int, F32], object],
        threads: int = 1,
        activations: str = "quantised",
    ) -> None:
        """Append a text to each session side by side: many short ones read the weights as often as a long one.

        Parameters
        ----------
        sessions : sequence of KVSession
            All different, of one store or several.
        texts : sequence of ints
            One for each session, none empty.
        each : callable
            Called with (text, its first position, logits (m, vocab)) for all positions of all texts, in order,
            m <= `LOGITS_ROWS`. An array is the callee's to keep.
        threads, activations
            As in `prefill`.
        """
        checked = [self._checked_ids(ids) for ids in texts]
        for session in sessions:
            self._check_shape(session)
        threads = integer(threads, "threads", 1, MAX_THREADS)
        callback(each, "each")
        run = self._prefill(min(CHUNK, sum(map(len, checked))), threads, activations)
        for parts in _runs(checked, CHUNK):
            hidden = run.run([(sessions[text], ids) for text, _, ids in parts])
            owners = [(text, first + row) for text, first, ids in parts for row in range(len(ids))]
            for start in range(0, len(owners), LOGITS_ROWS):
                logits = run.logits(hidden[start : start + LOGITS_ROWS])
                for text, own in itertools.groupby(
                    owners[start : start + LOGITS_ROWS], key=itemgetter(0)
                ):
                    (_, first), *others = own
                    given, logits = np.split(logits, [1 + len(others)])
                    each(text, first, given)

    def decoder(
        self,
        threads: int = 1,
        activations: str = "quantised",
        batch: int = 1,
        direct: bool = True,
    ) -> Decoder:
        """Decode steps for up to ``batch`` sessions; see `Decoder`."""
        return Decoder(self, threads=threads, activations=activations, batch=batch, direct=direct)

    def logits(self, ids: Iterable[int], store: str = "K1", activations: str = "fp32") -> F32:
        """Logits of every position.

        Parameters
        ----------
        ids : ints (n,)
        store : str
            Candidate name.
        activations : {"fp32", "quantised"}
            "fp32" goes through the prefill, "quantised" token by token through the decode kernels.

        Returns
        -------
        float32 (n, vocab)
        """
        tokens = self._checked_ids(ids)
        _check_activations(activations)
        rows: list[F32] = []
        with _opened(self, store, len(tokens), threads=1) as session:
            if activations == "fp32":
                self.prefill(session, tokens, activations=activations, each=rows.append)
            else:
                decoder = self.decoder(activations=activations)
                for i in range(len(tokens)):
                    rows.append(decoder.step([session], tokens[i : i + 1]).copy())
        return np.concatenate(rows)

    def generate(
        self,
        ids: Iterable[int],
        n: int,
        store: str | None = "K1",
        threads: int = 1,
        activations: str = "quantised",
        beyond_context: bool = False,
    ) -> Generation:
        """``n`` greedy tokens after ``ids``: all but the last id are prefilled, then n timed steps.

        It stops where the model's `context_length` is full, unless ``beyond_context``: past that a
        model gives tokens of no worth.

        Raises
        ------
        NonFiniteLogits
        UnknownToken
            An id outside the vocabulary.
        InvalidArgument
            More ids than the context holds.
        """
        tokens = self._checked_ids(ids)
        n = integer(n, "n", 0, MAX_TOKENS - len(tokens))
        if not flag(beyond_context, "beyond_context"):
            n = min(n, self.config.room(len(tokens)))
        new: list[int] = []
        rows = 0
        with _opened(self, store, len(tokens) + n, threads) as session:
            step_ns = np.zeros(n, np.int64)  # the pool, which is larger, is there
            decoder = self.decoder(threads=threads, activations=activations)
            if len(tokens) > 1:
                self.prefill(session, tokens[:-1], threads=threads, activations=activations)
            last = int(tokens[-1])
            for i in range(n):
                start = time.perf_counter_ns()
                last = greedy(decoder.step([session], [last])[0])
                step_ns[i] = time.perf_counter_ns() - start
                new.append(last)
                rows += session.length(0)
            return Generation(new, step_ns, rows * self.config.layers * session.store.row_bytes)

    def _prefill(self, chunk: int, threads: int, activations: str) -> Prefill:
        _check_activations(activations)
        quantised = activations == "quantised"
        return Prefill(self.config, self.weights, self._frequencies, chunk, threads, quantised)

    def _checked_ids(self, ids: Iterable[int]) -> I64:
        tokens = integers(ids, "ids")
        if not len(tokens):
            raise InvalidArgument("ids is empty; give at least one integer")
        if tokens.min() < 0 or tokens.max() >= self.config.vocab:
            bad = int(tokens[(tokens < 0) | (tokens >= self.config.vocab)][0])
            raise UnknownToken(f"token id {bad}; allowed: 0 to {self.config.vocab - 1}")
        return np.ascontiguousarray(tokens, np.int64)

    def _check_shape(self, session: KVSession) -> None:
        spec, c = spec_behind(session), self.config
        shape = (spec.layers, spec.q_heads, spec.local_kv_heads, spec.head_dim)
        if shape != (c.layers, c.q_heads, c.kv_heads, c.head_dim):
            raise InvalidArgument(
                f"the session's store is (layers, q_heads, kv_heads, head_dim) {shape}; {self.name} "
                f"is {(c.layers, c.q_heads, c.kv_heads, c.head_dim)}: open it with model.open_store"
            )


def _runs(texts: Sequence[I64], chunk: int) -> Iterator[list[tuple[int, int, I64]]]:
    """Texts end to end, cut into runs of at most ``chunk`` positions: (text, its first position, ids) each."""
    run: list[tuple[int, int, I64]] = []
    room = chunk
    for text, ids in enumerate(texts):
        first = 0
        while first < len(ids):
            part = ids[first : first + room]
            run.append((text, first, part))
            first, room = first + len(part), room - len(part)
            if not room:
                yield run
                run, room = [], chunk
    if run:
        yield run


class Decoder:
    """Decode steps of sessions in lockstep, with scratch made once.

    Weights are read once a step for all sessions, attention is per session. A session's logits and
    rows are bitwise the same in any batch, with any number of threads, and by either way into the
    cache. Its scratch and its logits are those of one step: it belongs to one thread at a time.

    Attributes
    ----------
    scheduler : Scheduler
        Its ``regions`` may be replaced, its ``region_ns`` tells where the last step's time went.
    """

    def __init__(
        self, model: Model, *, threads: int, activations: str, batch: int, direct: bool
    ) -> None:
        _check_activations(activations)
        batch = integer(batch, "batch", 1, MAX_BATCH)
        threads = integer(threads, "threads", 1, MAX_THREADS)
        self.model = model
        self.direct = flag(direct, "direct")
        self._scratch = Scratch(
            model.config, batch, activations == "quantised", threads, model._frequencies
        )
        self._ids = np.zeros(batch, np.int64)
        self._positions = np.zeros(batch, np.int64)
        # Views made once: a step makes no array of its own.
        self._position = [self._positions[b : b + 1] for b in range(batch)]
        self._k = [self._scratch.k[b : b + 1] for b in range(batch)]
        self._v = [self._scratch.v[b : b + 1] for b in range(batch)]
        self._q = [self._scratch.q[b] for b in range(batch)]
        self._attended = [self._scratch.attended[b] for b in range(batch)]
        self._scale = model.config.attention_scale
        self._sessions: Sequence[KVSession] = ()
        self._in_step = threading.Lock()  # taken or refused, never waited for: see `step`
        self.scheduler = Scheduler(
            Regions(self._embed, self._project, self._attention, self._feed_forward, self._head),
            model.config.layers,
        )

    @property
    def attention_ns(self) -> int:
        """Nanoseconds of the attention region in the last step."""
        return self.scheduler.region_ns["attention"]

    def step(self, sessions: Sequence[KVSession], ids: Sequence[int] | I64) -> F32:
        """Feed one token to each session, at the session's length.

        Parameters
        ----------
        sessions : sequence of KVSession
            Up to ``batch``, each once.
        ids : ints
            One for each.

        Returns
        -------
        float32 (len(sessions), vocab)
            A view, good until the next step.

        Raises
        ------
        KVError
            From a store; rows of the unfinished step are dropped in every session.
        UnknownToken
        DecoderInUse
            It is in a step already. It doesn't wait: whoever takes turns overwrites the other's logits.
        """
        if not self._in_step.acquire(blocking=False):
            raise DecoderInUse(
                "this decoder is in a step already; make one for each thread by model.decoder()"
            )
        try:
            return self._step(sessions, ids)
        finally:
            self._in_step.release()

    def _step(self, sessions: Sequence[KVSession], ids: Sequence[int] | I64) -> F32:
        if not isinstance(sessions, Sequence):
            raise InvalidArgument(f"sessions is {shown(sessions)}; give a list of sessions")
        tokens = self.model._checked_ids(ids)
        n = len(sessions)
        if (
            not 1 <= n <= self._scratch.batch
            or len(set(map(id, sessions))) != n
            or len(tokens) != n
        ):
            raise InvalidArgument(
                f"a step of {n} sessions and {len(tokens)} ids; allowed: 1 to {self._scratch.batch} "
                "sessions, each once, and one id for each (see batch= of Model.decoder)"
            )
        self._ids[:n] = tokens
        for b, session in enumerate(sessions):
            self.model._check_shape(session)
            self._positions[b] = session.length(0)
        self._sessions = sessions
        try:
            self.scheduler.run()
        except BaseException:
            for session in sessions:
                with contextlib.suppress(KVError):
                    session.abandon_step()
            raise
        finally:
            self._sessions = ()
        logits: F32 = self._scratch.logits[:n]
        return logits

    def _embed(self) -> None:
        n = len(self._sessions)
        self._scratch.begin(self.model.weights.embedding, self._ids[:n], self._positions[:n])

    def _project(self, layer: int) -> None:
        sessions, positions = self._sessions, self._position
        slots: list[Any]
        if self.direct:
            slots = [s.reserve_slot(layer, positions[b]) for b, s in enumerate(sessions)]
        else:
            slots = [None] * len(sessions)
        self.model.weights.layers[layer].project(self._scratch, slots)
        for b, session in enumerate(sessions):
            if slots[b] is None:
                session.append(layer, positions[b], self._k[b], self._v[b])
            else:
                session.commit_slot(layer, positions[b])

    def _attention(self, layer: int) -> None:
        for b, session in enumerate(self._sessions):
            session.attend(layer, self._q[b], self._attended[b], self._scale)

    def _feed_forward(self, layer: int) -> None:
        self.model.weights.layers[layer].feed_forward(self._scratch, len(self._sessions))

    def _head(self) -> None:
        self.model.weights.head.run(self._scratch, len(self._sessions))


def _check_activations(activations: str) -> None:
    if not isinstance(activations, str) or activations not in ACTIVATIONS:
        raise InvalidArgument(
            f"activations is {shown(activations)}; allowed: {', '.join(ACTIVATIONS)}"
        )


@contextlib.contextmanager
def _opened(model: Model, store: str | None, tokens: int, threads: int) -> Any:
    opened = model.open_store(store, tokens=tokens, threads=threads)
    try:
        yield opened.open_session()
    finally:
        opened.close()
