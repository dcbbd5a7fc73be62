"""What a model needs: its shape, bytes of weights and of rows, and the context that fits: ``kvtrial models``."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import NotRequired, TypedDict

from kvtrial import candidates
from kvtrial.engine._weights import packed_nbytes
from kvtrial.engine.config import ModelConfig
from kvtrial.engine.errors import ModelError, ModelNotFetched
from kvtrial.engine.gguf import GgufFile, read_gguf
from kvtrial.engine.synthetic import is_synthetic, sizes_like, write_synthetic
from kvtrial.host import machine, paths
from kvtrial.run import models

#: Positions of the pool whose bytes are divided by them.
_POSITIONS = 4096


class Room(TypedDict):
    """Of a profile's rows."""

    bytes_a_token: int
    fits_tokens: int


class Need(TypedDict):
    """Of one model: `of_model`."""

    model: str
    note: str
    missing: NotRequired[str]
    refused: NotRequired[str]
    architecture: NotRequired[str]
    synthetic: NotRequired[bool]
    layers: NotRequired[int]
    q_heads: NotRequired[int]
    kv_heads: NotRequired[int]
    head_dim: NotRequired[int]
    context_length: NotRequired[int]
    weight_bytes: NotRequired[int]
    profiles: NotRequired[dict[str, Room]]


def of_registered() -> list[Need]:
    """What each model of config/models.yaml needs."""
    return [of_model(name) for name in models.entries()]


def of_model(name_or_path: str) -> Need:
    """What one model needs, by name or path.

    Returns
    -------
    Need
        ``model``, ``note``, and ``missing`` (what fetches it) or ``refused`` (why it does not run), or else
        ``architecture``, ``synthetic``, ``layers``, ``q_heads``, ``kv_heads``, ``head_dim``, ``context_length``
        (positions), ``weight_bytes`` (in memory), and ``profiles``: by name ``bytes_a_token`` and ``fits_tokens``.

    Raises
    ------
    UnknownModel, ModelNotFetched
        No such name or file.
    """
    known = models.entries().get(name_or_path)
    note = known.get("note", "") if known else ""
    told: Need = {"model": name_or_path, "note": note}
    try:
        path = models.path_of(name_or_path)
    except ModelNotFetched:
        if known is None:
            raise
        return {**told, "missing": f"kvtrial fetch {name_or_path}"}
    try:
        file = read_gguf(path)
        return _of_file(told, file, ModelConfig.from_gguf(file))
    except ModelError as error:
        return {**told, "refused": str(error)}


def _of_file(told: Need, file: GgufFile, config: ModelConfig) -> Need:
    weight_bytes = sum(
        packed_nbytes(t.kind.name, *t.shape) if len(t.shape) == 2 else t.data.nbytes
        for t in file.tensors.values()
    )
    left = max(0, machine.available_memory_bytes() - weight_bytes)
    return {
        **told,
        "architecture": config.architecture.name,
        "synthetic": is_synthetic(file),
        "layers": config.layers,
        "q_heads": config.q_heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "context_length": config.context_length,
        "weight_bytes": weight_bytes,
        "profiles": {
            name: {"bytes_a_token": each, "fits_tokens": left // each}
            for name, each in _bytes_a_token(config).items()
        },
    }


def _bytes_a_token(config: ModelConfig) -> dict[str, int]:
    """By profile, most first: of the arm that needs the fewest."""
    found: dict[str, int] = {}
    for name, candidate in candidates.candidates().items():
        if candidate.not_built is None and candidate.role != "control":
            pool = candidates.pool_bytes(
                name, config.store_shape, tokens=_POSITIONS, page_tokens=32, spare_pages=0
            )
            each = -(-pool // _POSITIONS)
            profile = candidate.profile.name
            found[profile] = min(each, found.get(profile, each))
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def render(told: list[Need]) -> str:
    """As text of at most 80 columns, a paragraph a model; messages of files that are refused are as they are."""
    return "\n".join("\n".join(_lines(one)) for one in told)


def _lines(one: Need) -> list[str]:
    note = textwrap.wrap(one["note"], 80, initial_indent="  ", subsequent_indent="  ")
    lines = [one["model"], *note]
    if "missing" in one:
        return [*lines, f"  not here: {one['missing']}"]
    if "refused" in one:
        return [*lines, f"  does not run: {one['refused']}"]
    trained = one["context_length"]
    lines.append(
        f"  {one['architecture']}{', synthetic' if one['synthetic'] else ''}, {one['layers']} layers, "
        f"{one['q_heads']}/{one['kv_heads']} heads of {one['head_dim']}"
    )
    lines.append(
        f"  trained for {trained:,} positions; weights take {one['weight_bytes'] / 1e6:,.0f} MB"
    )
    lines.append(f"  {'rows':10}{'bytes a token':>14}{'tokens that fit here':>22}")
    for name, profile in one["profiles"].items():
        fits = profile["fits_tokens"]
        beyond = "" if fits <= trained else "  past the trained length"
        lines.append(f"  {name:10}{profile['bytes_a_token']:14,}{fits:22,}{beyond}")
    return lines


def make_synthetic(file: Path) -> Path:
    """A file of random weights in the shape of another, of any kind: its path, in the results.

    Raises
    ------
    ModelNotFetched, ModelError, InvalidArgument
    """
    found = models.own_file(file, "give the path of a GGUF file")
    sizes = sizes_like(read_gguf(found))
    made = paths.results_dir() / "models" / "shapes" / f"{found.stem}.gguf"
    made.parent.mkdir(parents=True, exist_ok=True)
    write_synthetic(made, f"shape of {found.stem}", sizes)
    return made
