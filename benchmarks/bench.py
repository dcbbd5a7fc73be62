"""How near attention and decode come to this machine's ceilings, and a prefill to float32's; how the kinds of
weights compare.

``python benchmarks/bench.py [--write] [--kinds]``, or ``make bench``: about three minutes on one thread, beside the
committed figures. A fraction more than a tenth below the one in ``baseline.json`` is marked; ``--write``
makes today's figures the baseline. It is no test: on another machine, or beside busy neighbours, the
figures are others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attention
import engine
import kinds

from kvtrial.candidates import candidates
from kvtrial.engine.errors import ModelNotFetched
from kvtrial.host import machine
from kvtrial.measure.exclusive import exclusive
from kvtrial.run import layout, models

BASELINE = Path(__file__).with_name("baseline.json")
ARMS = ("K1", "K2", "K3", "K5", "K1T", "K3T", "K2T")
CONTEXTS = (512, 4096)
SLIDE = 0.9


def of_kinds() -> Iterator[tuple[str, float]]:
    """Figures of the tensor kinds."""
    with tempfile.TemporaryDirectory() as folder:
        yield from kinds.figures(Path(folder))


def measured() -> Iterator[tuple[str, float]]:
    """Name and fraction of each figure, as soon as it is there."""
    names = [name for name in ARMS if candidates()[name].not_built is None]
    for label, heads in attention.SHAPES.items():
        for name, fraction in attention.fractions(heads, names).items():
            yield f"{label} {name}", fraction
    try:
        gguf = models.path_of(layout.DEFAULT_MODEL)
    except ModelNotFetched as missing:
        print(f"no decode and no prefill: {missing}")
        return
    model = models.load_model(gguf)
    for context in CONTEXTS:
        for name, fraction in engine.decode(model, gguf, context, names).items():
            yield f"decode {context} {name}", fraction
    yield "in kernels 512 K1", engine.in_kernels(model)
    yield f"prefill {engine.PREFILL_TOKENS} K1", engine.prefill(model, gguf)


def exclusively(figures: Iterator[tuple[str, float]]) -> Iterator[tuple[str, float]]:
    """The figures, taken while no other job measures."""
    with exclusive("bench"):
        yield from figures


def main() -> None:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="make these figures the baseline")
    parser.add_argument("--kinds", action="store_true", help="the kinds of weights alone")
    args = parser.parse_args()
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    found = {}
    print(
        "time at the lower ceiling / time taken, 1 thread, and the share of a step that kernels take; of kinds "
        "by the packed bytes, prefill as a ratio of speeds, loads as multiples of a read;"
    )
    print(f"attention at {attention.TOKENS} positions, out of cache")
    print(f"{'what':20}{'now':>7}{'baseline':>10}")
    for key, now in exclusively(
        of_kinds() if args.kinds else itertools.chain(measured(), of_kinds())
    ):
        found[key] = round(now, 2)
        before = baseline.get(key)
        better = (
            before / now
            if before is not None and key.startswith("load/")
            else now / (before or now)
        )
        mark = "  slid" if better < SLIDE else ""
        print(f"{key:20}{now:7.2f}{'' if before is None else before:>10}{mark}", flush=True)
    if args.write:
        figures = {"machine": machine.machine_class(), **found}
        BASELINE.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
