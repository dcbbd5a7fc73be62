"""Stage ``model``: fetch or make a model's file once, checked by sha256.

``python -m kvtrial.stages.model NAME --out results/models/NAME.gguf``
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvtrial.run import models


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="a name of config/models.yaml")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    models.fetch(args.name, args.out)
    return 0


if __name__ == "__main__":
    from kvtrial.run.exits import exit_with

    exit_with(main)
