"""What this machine is: a short class name for runs and selections, and the full record."""

from __future__ import annotations

import functools
import os
import platform
import re
from pathlib import Path


@functools.cache
def machine_class() -> str:
    """A name that equal machines share, such as ``x86_64-amd-epyc-f25m1s1-2c``."""
    fields: dict[str, str] = {}
    try:
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    name = fields.get("model name") or platform.processor() or "cpu"
    stepping = "".join(
        letter + fields[key]
        for letter, key in (("f", "cpu family"), ("m", "model"), ("s", "stepping"))
        if key in fields
    )
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    parts = [platform.machine(), slug, stepping, f"{os.cpu_count()}c"]
    return "-".join(p for p in parts if p)
