"""Limits of control groups, read from files as systemd, Docker, Slurm and v1 lay them out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvtrial.host import cgroups, machine

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
OTHER = "23 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw"


def v1(controllers: str, root: str = "/") -> str:
    return f"31 23 0:28 {root} /sys/fs/cgroup/{controllers} rw - cgroup cgroup rw,{controllers}"


Files = Callable[..., None]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    """Writes ``own`` groups and ``mounts`` to proc, and other files by their path."""
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)

    def write(own: list[str], mounts: list[str], others: dict[str, str]) -> None:
        texts = {
            "proc/self/cgroup": "\n".join(own),
            "proc/self/mountinfo": "\n".join([OTHER, *mounts]),
            **{f"sys/fs/cgroup/{path}": text for path, text in others.items()},
        }
        for name, text in texts.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")

    return write


def test_a_slice_above_the_own_scope_counts(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """``systemd-run -p CPUQuota``: the scope itself is free."""
    files(
        ["0::/user.slice/run-1.scope"],
        [V2],
        {
            "user.slice/run-1.scope/cpu.max": "max 100000",
            "user.slice/cpu.max": "100000 100000",
            "user.slice/run-1.scope/cpu.stat": "usage_usec 9\nnr_periods 8\nnr_throttled 7",
            "user.slice/cpu.stat": "nr_throttled 2",
        },
    )
    monkeypatch.setattr(machine, "affinity", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(machine.Path, "glob", lambda self, pattern: [])
    assert cgroups.cpu_quota() == 1.0
    assert machine.usable_cpus() == 1
    assert machine.throttle_events() == 7 + 2


@pytest.mark.parametrize(
    ("nearest", "above", "expected"),
    [
        ("150000 100000", "400000 100000", 1.5),
        ("400000 100000", "150000 100000", 1.5),
        ("max 100000", "max 100000", None),
        ("150000 100000", "max 100000", 1.5),
    ],
)
def test_the_tightest_quota_counts(
    files: Files, nearest: str, above: str, expected: float | None
) -> None:
    files(["0::/a/b"], [V2], {"a/b/cpu.max": nearest, "a/cpu.max": above})
    assert cgroups.cpu_quota() == expected


def test_a_sibling_limits_nobody(files: Files) -> None:
    files(["0::/a/b"], [V2], {"a/c/cpu.max": "1000 100000", "b/cpu.max": "1000 100000"})
    assert cgroups.cpu_quota() is None
    assert cgroups.throttled() is None
    assert cgroups.memory_left_bytes() is None


def test_a_container_with_its_own_namespace_sees_its_limit_at_the_mount(files: Files) -> None:
    files(["0::/"], [V2], {"cpu.max": "50000 100000", "cpu.stat": "nr_throttled 3"})
    assert cgroups.cpu_quota() == 0.5
    assert cgroups.throttled() == 3


@pytest.mark.parametrize("own", ["/docker/abc", "/../elsewhere"])
def test_a_container_without_one_sees_its_part_of_the_hierarchy(files: Files, own: str) -> None:
    mount = V2.replace(" / /sys/fs/cgroup", " /docker/abc /sys/fs/cgroup")
    files([f"0::{own}"], [mount], {"cpu.max": "50000 100000"})
    assert cgroups.cpu_quota() == 0.5


def test_v1_has_a_hierarchy_for_each_controller(files: Files) -> None:
    """Slurm: the job's group has the limit, the step's below it none."""
    job = "slurm/uid_1/job_2"
    files(
        [f"4:memory:/{job}/step_0", f"2:cpu,cpuacct:/{job}/step_0", "1:name=systemd:/x", "0::/x"],
        [
            v1("cpu,cpuacct"),
            v1("memory"),
            v1("name=systemd"),
            V2.replace("group rw", "group/v2 rw"),
        ],
        {
            f"cpu,cpuacct/{job}/step_0/cpu.cfs_quota_us": "-1",
            f"cpu,cpuacct/{job}/step_0/cpu.cfs_period_us": "100000",
            f"cpu,cpuacct/{job}/cpu.cfs_quota_us": "250000",
            f"cpu,cpuacct/{job}/cpu.cfs_period_us": "100000",
            f"cpu,cpuacct/{job}/cpu.stat": "nr_periods 4\nnr_throttled 5",
            f"memory/{job}/step_0/memory.limit_in_bytes": "9223372036854771712",
            f"memory/{job}/step_0/memory.usage_in_bytes": "100",
            f"memory/{job}/memory.limit_in_bytes": "1000",
            f"memory/{job}/memory.usage_in_bytes": "700",
            f"memory/{job}/memory.stat": "cache 1\ntotal_cache 90\ntotal_shmem 40",
        },
    )
    assert cgroups.cpu_quota() == 2.5
    assert cgroups.throttled() == 5
    assert cgroups.memory_left_bytes() == 1000 - 700 + 90 - 40


def test_memory_is_what_the_tightest_group_has_left(files: Files) -> None:
    """The cache goes when memory is wanted, a tmpfs does not; above ``high`` work all but stops."""
    texts = {
        "a/b/memory.max": "5000",
        "a/b/memory.current": "1000",
        "a/memory.max": "max",
        "a/memory.high": "4000",
        "a/memory.current": "3000",
        "a/memory.stat": "anon 1\nfile 500\nshmem 200",
    }
    files(["0::/a/b"], [V2], texts)
    assert cgroups.memory_left_bytes() == 4000 - 3000 + 500 - 200
    files(["0::/a/b"], [V2], {"a/memory.high": "2000"})
    assert cgroups.memory_left_bytes() == 0
    files(["0::/a/b"], [V2], {"a/memory.high": "max"})
    assert cgroups.memory_left_bytes() == 5000 - 1000


def test_a_mount_with_a_space_in_its_path(files: Files) -> None:
    files(["0::/a"], [V2.replace("/cgroup ", r"/cgroup/my\040own ")], {"my own/a/cpu.max": "2 1"})
    assert cgroups.cpu_quota() == 2.0


def test_a_system_without_control_groups_has_no_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    assert cgroups.cpu_quota() is None
    assert cgroups.throttled() is None
    assert cgroups.memory_left_bytes() is None


@pytest.mark.parametrize("odd", ["\u00b2", "9" * 5000, "-1", "0x10", "1 2"])
def test_what_is_no_count_of_the_kernels_limits_nobody(files: Files, odd: str) -> None:
    files(
        ["0::/a"],
        [V2],
        {
            "a/cpu.max": f"{odd} 100000",
            "a/cpu.stat": f"nr_throttled {odd}",
            "a/memory.max": odd,
            "a/memory.current": "5",
        },
    )
    assert cgroups.cpu_quota() is None
    assert cgroups.throttled() is None
    assert cgroups.memory_left_bytes() is None


@pytest.mark.parametrize(
    ("own", "mount"),
    [
        ("0::/a\0b", V2),
        ("0::/a", V2.replace("/sys/fs/cgroup", "/sys/fs/cg\\000roup")),
        ("0::/a", V2.replace("/sys/fs/cgroup", "sys/fs/cgroup")),
    ],
)
def test_a_path_that_is_none_limits_nobody(files: Files, own: str, mount: str) -> None:
    files([own], [mount], {"a/cpu.max": "100000 100000"})
    assert cgroups.cpu_quota() is None


def test_a_group_s_name_may_be_any_bytes(files: Files, tmp_path: Path) -> None:
    files([], [V2], {"a\udcff/cpu.max": "50000 100000"})
    (tmp_path / "proc/self/cgroup").write_bytes(b"0::/a\xff\n")
    assert cgroups.cpu_quota() == 0.5
