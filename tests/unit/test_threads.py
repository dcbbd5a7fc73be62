"""Threads: how many there are, and that no result depends on them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kvtrial import candidates
from kvtrial.engine import prefill
from kvtrial.engine.errors import DecoderInUse
from kvtrial.engine.gguf import read_gguf
from kvtrial.engine.transformer import Model

TINY = Path(__file__).parent.parent / "data" / "llama-tiny-q4_1.gguf"

COUNT = """
import sys
import numpy as np, psutil
from kvtrial.engine.gguf import read_gguf
from kvtrial.engine.transformer import Model

before = psutil.Process().num_threads()
model = Model.from_gguf(read_gguf(sys.argv[1]))
for name in sys.argv[2:]:
    session = model.open_store(name, tokens=1100, threads=3).open_session()
    decoder = model.decoder(threads=3)
    for token in range(4):
        decoder.step([session], [token])
    session.attend_block(
        0, *np.zeros((2, 4, model.config.q_heads, model.config.head_dim), np.float32), 1.0
    )
print(psutil.Process().num_threads() - before)
"""


def test_the_weights_and_every_arm_share_two_workers_where_three_threads_are_asked_for():
    arms = [name for name in ("K1", "K2", "K3", "K4") if candidates.get(name).not_built is None]
    done = subprocess.run(
        [sys.executable, "-c", COUNT, str(TINY), *arms],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # no workers of a BLAS among those counted
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) == 2


@pytest.mark.parametrize("activations", ["quantised", "fp32"])
@pytest.mark.parametrize("name", ["K1", "K2", "K5", "K5T", "K6", "K7"])
def test_a_prefill_has_the_same_bits_on_any_number_of_threads(name, activations, monkeypatch):
    monkeypatch.setattr(prefill, "TILE_FLOATS", 1 << 11)  # several tiles in each matrix
    model = Model.from_gguf(read_gguf(TINY))
    ids = np.random.default_rng(5).integers(0, model.config.vocab, 300)

    def run(threads: int) -> list[bytes]:
        store = model.open_store(name, tokens=310, threads=threads)
        session = store.open_session()
        # The block of the second chunk has several tasks a head, and looks back at the first.
        model.prefill(session, ids[:20], threads=threads, activations=activations)
        logits = model.prefill(session, ids[20:], threads=threads, activations=activations)
        rows = session.read(model.config.layers - 1, np.arange(300))
        return [logits.tobytes(), *(row.tobytes() for row in rows)]

    assert run(3) == run(1)


def test_a_decoder_amid_a_step_takes_no_second_one():
    """Of another thread or of its own region; the step goes on, and its logits are those of a step alone."""
    model = Model.from_gguf(read_gguf(TINY))
    store = model.open_store("K1", tokens=8, sessions=3)
    first, second, alone = (store.open_session() for _ in range(3))
    decoder = model.decoder()
    expected = decoder.step([alone], [5]).tobytes()
    refused: list[type[Exception]] = []

    def step() -> None:
        try:
            decoder.step([second], [7])
        except Exception as error:
            refused.append(type(error))

    attention = decoder.scheduler.regions.attention

    def intruded(layer: int) -> None:
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        step()
        attention(layer)

    decoder.scheduler.regions.attention = intruded
    assert decoder.step([first], [5]).tobytes() == expected
    assert refused == [DecoderInUse] * 2 * model.config.layers
    assert [second.length(layer) for layer in range(model.config.layers)] == [0] * (
        model.config.layers
    )
    decoder.scheduler.regions.attention = attention
    assert decoder.step([second], [5]).tobytes() == expected
