"""A child that reads damaged files: ``python reading.py KIND[,KIND…] FIRST COUNT``.

Prints one line of JSON: how many files ran, how many each typed error refused, and every fault: another error, or a
file that wanted more memory than `ROOM_BYTES`, or longer than `LIMIT_S`.
"""

from __future__ import annotations

import collections
import json
import resource
import signal
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import psutil
from mutants import mutant

from kvtrial import engine
from kvtrial.engine.errors import ModelError, ModelTooLarge

#: What a file of half a megabyte may take of address space beyond what the process has.
ROOM_BYTES = 512 << 20
LIMIT_S = 60


def outcome(path: Path) -> str:
    """Name of the typed error, or ``ran``; other errors are raised."""
    try:
        model = engine.load(path)
        ids = (
            [*model.tokenizer.encode("ab 12")[:3], 0]
            if "tokenizer.ggml.model" in model.file.metadata
            else [0]
        )
        ids = [i for i in ids if i < model.config.vocab]
        model.logits(ids)
        model.logits(ids, activations="quantised")
    except ModelTooLarge:
        raise
    except ModelError as error:
        return type(error).__name__
    return "ran"


def main(kinds: str, first: str, count: str) -> None:
    """Read the mutants of seeds [first, first + count) of each kind."""
    faults: list[str] = []
    seen: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        for kind in kinds.split(","):
            for seed in range(int(first), int(first) + int(count)):
                path.write_bytes(mutant(kind, seed))
                room = psutil.Process().memory_info().vms + ROOM_BYTES
                resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
                signal.alarm(LIMIT_S)
                try:
                    seen[outcome(path)] += 1
                except Exception as error:  # whatever it is, it has no name that says what is wrong
                    faults.append(f"{kind} {seed}: {type(error).__name__}: {error}")
                signal.alarm(0)
    print(json.dumps({"seen": seen, "faults": faults}))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    main(*sys.argv[1:])
