"""The documentation and the code say the same; that the site builds and links is `make docs`."""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path

import yaml

from kvtrial.contract import Capability

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def public_errors() -> set[str]:
    """Names of the exception classes below src/kvtrial, read without importing anything."""
    bases: dict[str, list[str]] = {}
    for path in (ROOT / "src" / "kvtrial").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [ast.unparse(base).rpartition(".")[2] for base in node.bases]

    def is_error(name: str) -> bool:
        builtin = getattr(builtins, name, None)
        if isinstance(builtin, type):
            return issubclass(builtin, BaseException)
        return any(is_error(base) for base in bases.get(name, []))

    return {name for name in bases if not name.startswith("_") and is_error(name)}


def test_every_public_error_has_a_heading():
    found = public_errors()
    assert {"KVError", "PoolExhausted", "NoVerdict", "GgufTruncated", "DiskFull"} <= found
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### (\S+)$", page, re.MULTILINE)
    assert len(headings) == len(set(headings))
    assert set(headings) == found


def test_no_documented_command_has_its_target_behind_config():
    """Case: Snakemake's ``--config`` takes all that follows it, the target too."""
    pages = [ROOT / "README.md", ROOT / "config" / "README.md", *DOCS.rglob("*.md")]
    for page in pages:
        for command in re.findall(r"snakemake [^`]*", page.read_text(encoding="utf-8")):
            values = command.partition("--config ")[2]
            rest = re.sub(r"\w+=('[^']*'|\S+)", "", values).split(None, 1)
            assert not rest or not re.fullmatch(r"[a-z_]+", rest[0]), f"{page.name}: {command}"


def test_the_capability_table_is_whole():
    page = (DOCS / "candidates" / "package.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([A-Z_]+)` \|", page, re.MULTILINE)) == set(Capability.__members__)


def test_every_target_that_the_documentation_names_is_made():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    made = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    for page in pages:
        if page.is_relative_to(DOCS / "adr"):
            continue  # decisions of their day
        text = page.read_text(encoding="utf-8")
        for command in re.findall(r"`make ([a-z -]+?)(?:`| [A-Z]+=)", text):
            assert set(command.split()) <= made, f"{page.name}: make {command}"


def test_every_key_of_the_fleet_is_explained():
    schema = yaml.safe_load(
        (ROOT / "workflow" / "schemas" / "fleet.schema.yaml").read_text(encoding="utf-8")
    )
    keys = set(schema["properties"]["machines"]["additionalProperties"]["properties"])
    page = (DOCS / "machines.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([a-z_]+)` \|", page, re.MULTILINE)) == keys
