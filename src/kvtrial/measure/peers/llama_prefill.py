"""Prefill by llama.cpp: the work of `kvtrial.measure.peers.prefill`, and its spec, for arms of `PEERS`.

``python -m kvtrial.measure.peers.llama_prefill SPEC.json OUT.json``
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from kvtrial.measure.child import Row, main
from kvtrial.measure.peers import llama
from kvtrial.measure.peers.prefill import WARMUP_TOKENS, each, timed
from kvtrial.measure.specs import PrefillSpec


def measure(spec: PrefillSpec, note: Callable[[str], None]) -> list[Row]:
    """The time that each arm takes for the prompt."""

    def arm(name: str) -> int:
        ids = spec.ids
        with llama.opened(spec.gguf, name, len(ids), spec.threads) as context:
            context.eval(ids[:WARMUP_TOKENS])
            context.clear()
            return timed(lambda: context.eval(ids))

    return each(spec, note, arm)


if __name__ == "__main__":
    main(PrefillSpec, measure, sys.argv)
