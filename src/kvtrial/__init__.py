"""kvtrial: decides by paired measurement which KV cache a machine should run.

The public surface is small; everything is loaded on first use, so that importing the package is
cheap and never compiles, downloads or refuses.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "load_model": "kvtrial.run.models",
    "open_store": "kvtrial.candidates",
    "decide": "kvtrial.decision.verdict",
    "Verdict": "kvtrial.decision.verdict",
    "merge": "kvtrial.contract",
    "KVError": "kvtrial.contract",
    "MemoryLedger": "kvtrial.contract",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvtrial' has no attribute {name!r}; it has {sorted(_HOMES)}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
