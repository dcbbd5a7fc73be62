"""What this machine is: a short class name for runs and selections, and the full record.

Everything here reads and nothing changes the machine: no governor is set, no cache dropped.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, TypedDict

from kvtrial.host import cgroups

#: Taken where neither the kernel nor sysctl says how large the last-level cache is.
ASSUMED_LLC_BYTES = 32 * 2**20
#: Set for every measured process, and recorded.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


@functools.cache
def machine_class() -> str:
    """A name that equal machines share, such as ``x86_64-amd-epyc-f25m1s1-2c``.

    Linux on ARM gives its CPUs no name: implementer, part, variant and revision tell them apart.
    """
    fields: dict[str, str] = {}
    try:
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    brand = fields.get("model name") or _sysctl("machdep.cpu.brand_string")
    name = brand or platform.processor() or "cpu"
    letters = {
        "f": "cpu family",
        "m": "model",
        "s": "stepping",
        "i": "CPU implementer",
        "p": "CPU part",
        "v": "CPU variant",
        "r": "CPU revision",
    }
    stepping = "".join(letter + fields[key] for letter, key in letters.items() if key in fields)
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    parts = [platform.machine(), slug, stepping, f"{os.cpu_count()}c"]
    return "-".join(p for p in parts if p)


class Cache(TypedDict):
    """One as the system tells of it."""

    level: int
    type: str  #: Data, Instruction or Unified
    bytes: int
    line_bytes: int | None


def caches() -> list[Cache]:
    """CPU 0's caches, nearest first."""
    listed: list[Cache] = []
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        size = re.fullmatch(r"(\d+)([KMG]?)", _read(index / "size"))
        level, kind = _read(index / "level"), _read(index / "type")
        if size is None or not level.isdigit():
            continue
        line = _read(index / "coherency_line_size")
        listed.append(
            {
                "level": int(level),
                "type": kind,
                "bytes": int(size[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[size[2]],
                "line_bytes": int(line) if line.isdigit() else None,
            }
        )
    for name, number, kind in (
        ("hw.l1icachesize", 1, "Instruction"),
        ("hw.l1dcachesize", 1, "Data"),
        ("hw.l2cachesize", 2, "Unified"),
        ("hw.l3cachesize", 3, "Unified"),
    ):
        if sys.platform == "darwin" and (text := _sysctl(name)).isdigit() and int(text):
            listed.append({"level": number, "type": kind, "bytes": int(text), "line_bytes": None})
    return listed


def last_level_cache_bytes(threads: int = 1) -> int:
    """Bytes of the last-level caches that so many threads can fill.

    A machine may have several: one is the largest data cache of CPU 0, `ASSUMED_LLC_BYTES` where the
    system doesn't say, and each thread may run beside another, as far as this process's CPUs do.
    """
    sizes = [c["bytes"] for c in caches() if c["type"] != "Instruction"]
    return max(sizes, default=ASSUMED_LLC_BYTES) * min(threads, _last_level_caches())


def _last_level_caches() -> int:
    """Caches of the highest level beside this process's CPUs; 1 where the system doesn't say."""
    level = str(max((c["level"] for c in caches()), default=0))
    shared_by = set()
    for cpu in affinity():
        for index in Path(f"/sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"):
            if _read(index / "level") == level:
                shared_by.add(_read(index / "shared_cpu_list"))
    return max(1, len(shared_by))


def affinity() -> list[int]:
    """CPUs that this process may run on; all of them where the system has no such notion."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable_cpus() -> int:
    """CPUs that work can really use at once: affinity and the control groups' quotas considered."""
    quota = cgroups.cpu_quota()
    return max(1, min(len(affinity()), int(quota) if quota else len(affinity())))


class NotEnoughMemory(MemoryError):
    """The machine has less memory left than a measurement takes; no candidate is to blame."""


def available_memory_bytes() -> int:
    """Bytes that a process could take now: what is free, inside the control groups' limits."""
    import psutil

    available = int(psutil.virtual_memory().available)
    left = cgroups.memory_left_bytes()
    return available if left is None else min(available, left)


def throttle_events() -> int | None:
    """How often the CPUs were throttled by heat, and the control groups by their quotas, so far.

    None where neither the kernel nor a control group counts it.
    """
    counts = [
        int(text)
        for path in Path("/sys/devices/system/cpu").glob(
            "cpu[0-9]*/thermal_throttle/*_throttle_count"
        )
        if (text := _read(path)).isdigit()
    ]
    of_groups = cgroups.throttled()
    if of_groups is not None:
        counts.append(of_groups)
    return sum(counts) if counts else None


def record() -> dict[str, Any]:
    """The full machine record, JSON-safe; None or an empty value where the system doesn't say.

    Takes about a second: it is made once a run, for the manifest, which adds what the kernels were
    built from and the versions of packages.
    """
    import cpuinfo
    import numpy as np  # noqa: F401  threadpoolctl lists only libraries that are loaded
    import psutil
    import threadpoolctl

    cpu = cpuinfo.get_cpu_info()
    flags = sorted(cpu.get("flags", []))
    cpufreq = Path("/sys/devices/system/cpu/cpu0/cpufreq")
    # AArch64 has no flag for it.
    tells = platform.machine() in ("x86_64", "AMD64") or sys.platform == "darwin"
    virtual = "hypervisor" in flags or _sysctl("kern.hv_vmm_present") == "1"
    return {
        "class": machine_class(),
        "cpu_model_name": cpu.get("brand_raw", platform.processor()),
        "architecture": platform.machine(),
        "cpu_features": flags,
        "caches": caches(),
        "logical_cpus": os.cpu_count(),
        "physical_cpus": psutil.cpu_count(logical=False),
        "affinity": affinity(),
        "cgroup_cpu_quota": cgroups.cpu_quota(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.system(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "governor": _read(cpufreq / "scaling_governor") or None,
        "frequency_mhz": frequency_mhz(),
        "hypervisor": virtual if tells else None,
        "transparent_huge_pages": _read(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
        or None,
        "address_space_randomisation": _read(Path("/proc/sys/kernel/randomize_va_space")) or None,
        "thread_variables": {name: os.environ.get(name) for name in THREAD_VARIABLES},
        "blas": [
            {
                key: pool.get(key)
                for key in ("internal_api", "version", "architecture", "num_threads")
            }
            for pool in threadpoolctl.threadpool_info()
        ],
    }


def frequency_mhz() -> float | None:
    """Clock of the fastest CPU in MHz, which is the one at work; None where the system doesn't say."""
    import psutil

    try:
        clocks = [cpu.current for cpu in psutil.cpu_freq(percpu=True) or [] if cpu.current]
    except (AttributeError, NotImplementedError, OSError, RuntimeError):
        return None
    return float(max(clocks)) if clocks else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _sysctl(name: str) -> str:
    if sys.platform != "darwin":
        return ""
    done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False)
    return done.stdout.strip()
