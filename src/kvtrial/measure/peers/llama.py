"""llama.cpp through ``llama-cpp-python``'s own C bindings: no sampler and no Python wrapper is timed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvtrial.contract import F32
from kvtrial.host import machine
from kvtrial.measure.peers import llama_state
from kvtrial.measure.peers.programs import PEERS, Peer

#: Positions of a prompt at a time: llama.cpp's own default for a physical batch.
BATCH = 512
#: llama.cpp takes whole multiples of this for its cache.
_CELLS = 256
#: 1 keeps llama.cpp from turning rows that it quantises.
_UNTURNED = "LLAMA_ATTN_ROT_DISABLE"


class LlamaFailed(RuntimeError):
    """A call of llama.cpp did not succeed; the message names it."""


class Context:
    """One sequence with its KV cache; see `opened`."""

    def __init__(self, lib: Any, pointer: Any, peer: Peer, vocab: int) -> None:
        self._lib = lib
        self._pointer = pointer
        self._peer = peer
        self._vocab = vocab

    def eval(self, ids: Sequence[int]) -> F32:
        """Append ``ids``; logits (vocab,) of the last one, a view that is good until the next call."""
        lib = self._lib
        for start in range(0, len(ids), BATCH):
            part = ids[start : start + BATCH]
            tokens = (lib.llama_token * len(part))(*part)
            batch = lib.llama_batch_get_one(tokens, len(part))
            self._check("llama_decode", lib.llama_decode(self._pointer, batch) == 0)
        logits = lib.llama_get_logits_ith(self._pointer, -1)
        view: F32 = np.ctypeslib.as_array(logits, (self._vocab,))
        return view

    def clear(self) -> None:
        """Forget every position."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._pointer), False)

    def fill(self, k: F32, v: F32) -> None:
        """Replace what is cached by rows k and v (L, N, H_kv, D) at positions 0 to N - 1.

        They go in as a saved state, so that every engine starts from the very same context and none
        has to prefill it. The layout of a state is llama.cpp's own business: it is checked against
        that of a state which llama.cpp made of two tokens by itself.

        Raises
        ------
        UnknownStateLayout
            This version of llama.cpp saves another layout.
        LlamaFailed
        """
        lib, at = self._lib, self._pointer
        needed = 2 * (k.nbytes + v.nbytes)  # the sections, and all of them as one
        available = machine.available_memory_bytes()
        if needed > available:
            raise LlamaFailed(
                f"a state of {k.shape[1]} positions takes {needed} bytes to make and {available} are "
                "available: free memory, or leave this context out of peers.contexts"
            )
        self.clear()
        self.eval([0, 0])
        own = np.empty(lib.llama_state_seq_get_size(at, 0), np.uint8)
        written = lib.llama_state_seq_get_data(at, _bytes(own), own.size, 0)
        self._check("llama_state_seq_get_data", written == own.size)
        llama_state.check_layout(own, llama_state.sections(k[:, :2], v[:, :2], self._peer))
        state = llama_state.join(llama_state.sections(k, v, self._peer))
        read = lib.llama_state_seq_set_data(at, _bytes(state), state.size, 0)
        self._check("llama_state_seq_set_data", read == state.size)

    def _check(self, call: str, fine: bool) -> None:
        if not fine:
            raise LlamaFailed(f"{call} failed with {self._peer.setting}")


def _bytes(array: np.ndarray) -> Any:
    """The array's memory as C's ``uint8_t *``."""
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


@contextmanager
def opened(gguf: str, arm: str, tokens: int, threads: int) -> Iterator[Context]:
    """A context of the arm's setting with room for ``tokens`` positions.

    Raises
    ------
    LlamaFailed
        llama.cpp takes neither the model nor the setting.
    """
    import llama_cpp as lib

    peer = PEERS[arm]
    types = {
        "f32": lib.GGML_TYPE_F32,
        "f16": lib.GGML_TYPE_F16,
        "q8_0": lib.GGML_TYPE_Q8_0,
        "q4_0": lib.GGML_TYPE_Q4_0,
    }
    loading = lib.llama_model_default_params()
    loading.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(os.fsencode(gguf), loading)
    if not model:
        raise LlamaFailed(f"llama.cpp does not load {gguf}")
    try:
        params = lib.llama_context_default_params()
        params.n_ctx = -(-tokens // _CELLS) * _CELLS
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = threads
        params.type_k, params.type_v = types[peer.k_type], types[peer.v_type]
        params.flash_attn_type = int(peer.flash)  # 0 off, 1 on; its own default, -1, would choose
        params.no_perf = True
        os.environ[_UNTURNED] = str(int(not peer.turned))  # is read as a context opens
        pointer = lib.llama_init_from_model(model, params)
        if not pointer:
            raise LlamaFailed(f"llama.cpp does not open a context with {peer.setting}")
        try:
            vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
            yield Context(lib, pointer, peer, vocab)
        finally:
            lib.llama_free(pointer)
    finally:
        lib.llama_model_free(model)
