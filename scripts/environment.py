"""Write environment.yml from pyproject.toml, for people who work with conda.

``python scripts/environment.py > environment.yml``
"""

import tomllib
from pathlib import Path

HEAD = """\
# Made by `python scripts/environment.py > environment.yml`; change pyproject.toml instead.
# conda env create -f environment.yml && conda activate kvtrial
# pip install --no-deps --no-build-isolation -e .
name: kvtrial
channels: [conda-forge]
dependencies:
  - python >=3.11
  - c-compiler
  - make
  - rust
  - pip
  - pip:
"""


def environment(pyproject: Path) -> str:
    """The text of environment.yml."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    groups = project["dependency-groups"]
    wanted = dict.fromkeys([*project["project"]["dependencies"], *groups["build"], *groups["dev"]])
    return HEAD + "".join(f"    - {line}\n" for line in wanted)


if __name__ == "__main__":
    print(environment(Path(__file__).resolve().parent.parent / "pyproject.toml"), end="")
