"""What the control groups allow this process: those it is in, and all above them, v1 and v2.

A limit binds everything below its group, so the tightest along the way to the root counts. Where the
hierarchies are mounted, and which part of them, is in /proc/self/mountinfo (proc_pid_mountinfo(5));
the process's own group is in /proc/self/cgroup (cgroups(7)). A group outside of what is mounted or
of the process's namespace can't be read: then the mount itself is asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

#: Below this lie ``proc`` and ``sys``.
ROOT = Path("/")


class _Mount(NamedTuple):
    """A hierarchy, or the part of it from ``root`` down, at ``point``."""

    controllers: frozenset[str]  # empty for v2, which has them all
    root: PurePosixPath
    point: PurePosixPath


def cpu_quota() -> float | None:
    """CPUs that may be used at once, such as 1.5; None without a limit."""
    quotas = []
    for folder in _groups("cpu"):
        texts = _read(folder / "cpu.max").split() or [
            _read(folder / "cpu.cfs_quota_us"),
            _read(folder / "cpu.cfs_period_us"),
        ]
        numbers = [_number(text) for text in texts]
        if len(numbers) == 2 and numbers[0] and numbers[1]:
            quotas.append(numbers[0] / numbers[1])
    return min(quotas, default=None)


def throttled() -> int | None:
    """How often a quota stopped one of the groups so far; None where nothing counts it."""
    counts = [_numbers(folder / "cpu.stat").get("nr_throttled") for folder in _groups("cpu")]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def memory_left_bytes() -> int | None:
    """Bytes until the nearest limit; None without a limit.

    The page cache is the groups' too, and goes when memory is wanted; a tmpfs' pages stay.
    """
    left = []
    for folder in _groups("memory"):
        stat = _numbers(folder / "memory.stat")
        used = _number(_read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes"))
        cache = stat.get("file", stat.get("total_cache", 0))
        cache -= stat.get("shmem", 0) if "file" in stat else stat.get("total_shmem", 0)
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            limit = _number(_read(folder / name))
            if limit is not None and used is not None:
                left.append(max(0, limit - used + cache))
    return min(left, default=None)


def _groups(controller: str) -> Iterator[Path]:
    """Folders of the process's groups that may limit ``controller``, upwards, in each hierarchy."""
    mounts = list(_mounts())
    for line in _read(ROOT / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, own = rest.partition(":")
        wanted = controller if names else ""
        if names and controller not in names.split(","):
            continue
        of_this = [m for m in mounts if (wanted in m.controllers if wanted else not m.controllers)]
        yield from _upwards(of_this, PurePosixPath(own))


def _upwards(mounts: list[_Mount], own: PurePosixPath) -> Iterator[Path]:
    """The group ``own`` and those above it, as far up as any of the mounts shows."""
    seen = [m for m in mounts if own.is_relative_to(m.root) and ".." not in own.parts]
    if not seen:
        yield from (_below_root(m.point) for m in mounts[:1])
        return
    mount = min(seen, key=lambda m: len(m.root.parts))
    below = own.relative_to(mount.root)
    yield from (_below_root(mount.point / part) for part in (below, *below.parents))


def _mounts() -> Iterator[_Mount]:
    """Mounted hierarchies of control groups, in the order of /proc/self/mountinfo."""
    for line in _read(ROOT / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        root, point = (PurePosixPath(_unescaped(text)) for text in fields[3:5])
        if not point.is_absolute():
            continue
        controllers = kind[2].split(",") if kind[0] == "cgroup" else []
        yield _Mount(frozenset(controllers), root, point)


def _unescaped(text: str) -> str:
    """A path of mountinfo, where a space stands as ``\\040``."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)


def _below_root(path: PurePosixPath) -> Path:
    return ROOT.joinpath(*path.parts[1:])


def _numbers(path: Path) -> dict[str, int]:
    """``key value`` lines of a file; empty where there is none."""
    found = {}
    for line in _read(path).splitlines():
        pair = line.split()
        if len(pair) == 2 and (number := _number(pair[1])) is not None:
            found[pair[0]] = number
    return found


def _number(text: str) -> int | None:
    """A count of 64 bits as the kernel writes it; None for "max" and any other text."""
    return int(text) if re.fullmatch(r"[0-9]{1,20}", text) else None


def _read(path: Path) -> str:
    """A file's text; empty where none can be read. A group's name may be any bytes."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").strip()
    except (OSError, ValueError):  # a path with a NUL is a ValueError
        return ""
