"""The probes do the work that they claim, and the clock refuses an interval that it can't
resolve."""

import functools
import inspect
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvtrial.host import machine
from kvtrial.measure import _probes, clock, probes
from kvtrial.run import protocol

ROOT = Path(__file__).resolve().parents[2]


def test_spin_is_the_chain_that_it_says():
    x = 7
    for _ in range(1000):
        x = (x * 6364136223846793005 + 1442695040888963407) % 2**64
    assert _probes.spin(7, 1000) == x


@pytest.mark.parametrize("words", [0, 64, 128, 64 * 1001])
def test_read_touches_every_word_once(words):
    data = np.random.default_rng(1).integers(0, 2**64, words, dtype=np.uint64)
    assert _probes.read(data) == int(data.sum(dtype=np.uint64))


def test_read_takes_whole_strides_only():
    with pytest.raises(ValueError, match="63"):
        _probes.read(np.zeros(63, np.uint64))


def test_fma_runs_every_round():
    """x = x / 2 + 1 from c is 2 + (c - 2) / 2**n after n rounds, c from 1 to 10; they are summed."""
    assert _probes.fma(0.5, 1.0, 3) == 10 * 2 + (55 - 20) / 2**3
    assert _probes.fma(1.0, 1.0, 1000) == 10 * 1000 + 55
    assert _probes.FMA_FLOPS % 20 == 0


class Clock:
    """Advances by a fixed step at each reading."""

    def __init__(self, step_ns):
        self.now, self.step = 0, step_ns

    def __call__(self):
        self.now += self.step
        return self.now


@pytest.fixture
def small_cache(monkeypatch):
    """A machine whose last-level cache has 2**18 bytes: a buffer of four times that is quickly read."""
    monkeypatch.setattr(machine, "last_level_cache_bytes", lambda threads: 2**18)


def test_the_probes_take_turns(monkeypatch, small_cache):
    """Two passes of the spin and the multiply-adds, four reads: each spread over the reading. Two times
    the cache is read, eight times in a row, since it keeps what comes again."""
    order = []
    for name in ("spin", "read", "fma"):
        stand_in = functools.partial(lambda name, *args: order.append(name), name)
        stand_in.__name__ = name
        monkeypatch.setattr(probes, name, stand_in)
    monkeypatch.setattr(clock, "now_ns", Clock(1_000_000))
    probes.Probes(read_passes=4, passes=2).measure()
    cached = ["read"] * 8
    assert order == ["spin", "read", *cached, "fma", "read", "spin", "read", *cached, "fma", "read"]


def test_rates_are_work_over_time(monkeypatch, small_cache):
    monkeypatch.setattr(clock, "now_ns", Clock(1_000_000))
    for threads in (1, 2):
        probe = probes.Probes(threads=threads)
        reading = probe.measure()
        probe.close()
        assert reading.spin_ms == 1.0
        assert reading.read_gb_per_s == pytest.approx(2**20 / 1e-3 / 1e9)
        assert reading.cached_read_gb_per_s == pytest.approx(2**16 / 1e-3 / 1e9)
        flops = threads * probes.FMA_ROUNDS * _probes.FMA_FLOPS
        assert reading.fma_gflop_per_s == pytest.approx(flops / 1e-3 / 1e9)


def test_a_reading_is_the_best_of_so_many_passes(monkeypatch, small_cache):
    taken = []

    def passes(self, function, work):
        kind = function.__name__ + " cached" * (work[0][0] is probe._cached[0])
        taken.append(kind)
        return 20_000_000 - 1_000_000 * taken.count(kind)

    monkeypatch.setattr(probes.Probes, "_time_ns", passes)
    probe = probes.Probes(llc_multiple=2, read_passes=3, passes=2)
    reading = probe.measure()
    assert [taken.count(name) for name in ("spin", "read", "read cached", "fma")] == [2, 3, 16, 2]
    assert reading.spin_ms == 18.0
    assert reading.read_gb_per_s == pytest.approx(2**19 / 17e-3 / 1e9)
    assert reading.cached_read_gb_per_s == pytest.approx(2**16 / 4e-3 / 1e9)


def test_probing_without_a_protocol_is_as_registered():
    registered = protocol.load(ROOT / "config" / "protocol.yaml")["probes"]
    defaults = inspect.signature(probes.Probes).parameters
    assert registered == {key: defaults[key].default for key in registered}


@pytest.mark.parametrize("step", [0, -5])
def test_a_clock_that_stands_still_is_a_typed_error(monkeypatch, small_cache, step):
    monkeypatch.setattr(clock, "now_ns", Clock(step))
    with pytest.raises(clock.TimerResolution, match="spin"):
        probes.Probes().measure()


def test_the_buffer_is_larger_than_the_last_level_cache():
    probe = probes.Probes()
    assert probe._buffer.nbytes >= 4 * machine.last_level_cache_bytes() - 2**12
    probe.close()


@pytest.fixture
def sysfs(monkeypatch):
    """Files below /sys/devices/system/cpu, with what they say."""
    files = {}
    root = Path("/sys/devices/system/cpu")
    monkeypatch.setattr(machine, "_read", lambda path: files.get(str(path.relative_to(root)), ""))
    monkeypatch.setattr(
        machine.Path,
        "glob",
        lambda self, pattern: [
            root / name
            for name in sorted({str(Path(file).parent) for file in files})
            if (root / name).match(str(self / pattern))
        ],
    )
    return files


@pytest.mark.parametrize(
    ("cpus", "threads", "caches"), [([0, 1, 2, 3], 1, 1), ([0, 1, 2, 3], 4, 2), ([2, 3], 2, 1)]
)
def test_each_thread_may_have_a_last_level_cache_of_its_own(
    monkeypatch, sysfs, cpus, threads, caches
):
    """CPUs 0 and 1 share 32 MiB, 2 and 3 another 32 MiB."""
    for cpu, shared in enumerate(("0-1", "0-1", "2-3", "2-3")):
        for index, (level, size, own) in enumerate((("1", "32K", str(cpu)), ("3", "32M", shared))):
            base = f"cpu{cpu}/cache/index{index}"
            sysfs |= {
                f"{base}/level": level,
                f"{base}/size": size,
                f"{base}/type": "Unified",
                f"{base}/shared_cpu_list": own,
            }
    monkeypatch.setattr(machine, "affinity", lambda: cpus)
    assert machine.last_level_cache_bytes(threads) == caches * 32 * 2**20


def test_the_clock_is_that_of_the_fastest_cpu(monkeypatch):
    cpus = [SimpleNamespace(current=800.0), SimpleNamespace(current=3400.0)]
    monkeypatch.setattr(probes.psutil, "cpu_freq", lambda percpu: cpus)
    assert machine.frequency_mhz() == 3400.0
    monkeypatch.setattr(probes.psutil, "cpu_freq", lambda percpu: None)
    assert machine.frequency_mhz() is None


@pytest.mark.parametrize("error", [NotImplementedError, OSError, RuntimeError])
def test_a_clock_that_can_not_be_asked_for_is_none(monkeypatch, error):
    def refuse(percpu):
        raise error("no file with the current frequency")

    monkeypatch.setattr(probes.psutil, "cpu_freq", refuse)
    assert machine.frequency_mhz() is None


def test_throttling_of_cpu_and_control_group_add_up(monkeypatch):
    monkeypatch.setattr(machine.cgroups, "throttled", lambda: 4)
    found = [Path(f"/sys/devices/system/cpu/cpu{n}/thermal_throttle") for n in (0, 1)]
    counters = [f / "core_throttle_count" for f in found]
    monkeypatch.setattr(machine.Path, "glob", lambda self, pattern: counters)
    monkeypatch.setattr(machine, "_read", lambda path: "3")
    assert machine.throttle_events() == 3 + 3 + 4
    monkeypatch.setattr(machine, "_read", lambda path: "")
    monkeypatch.setattr(machine.cgroups, "throttled", lambda: None)
    assert machine.throttle_events() is None


def test_memory_stays_inside_the_control_groups(monkeypatch):
    monkeypatch.setattr(machine.cgroups, "memory_left_bytes", lambda: 1 << 20)
    assert machine.available_memory_bytes() == 1 << 20
    monkeypatch.setattr(machine.cgroups, "memory_left_bytes", lambda: None)
    assert machine.available_memory_bytes() > 1 << 20


def test_measuring_changes_nothing_about_the_machine(small_cache):
    """Case F16: what can be set for the whole machine is as it was."""
    keys = ("governor", "transparent_huge_pages", "address_space_randomisation", "affinity")
    before = machine.record()
    probe = probes.Probes()
    probe.measure()
    probe.close()
    after = machine.record()
    assert [after[key] for key in keys] == [before[key] for key in keys]


def test_the_machine_record_names_what_a_reader_needs():
    import json

    record = machine.record()
    assert json.loads(json.dumps(record)) == record
    assert record["memory_bytes"] > 2**28
    assert set(record["affinity"]) <= set(range(record["logical_cpus"]))
    assert any(pool["num_threads"] >= 1 for pool in record["blas"])
    assert record["class"] == machine.machine_class()
    assert machine.usable_cpus() >= 1
    assert all(c["bytes"] >= 1024 for c in record["caches"])


def test_arm_cpus_that_linux_gives_no_name_are_told_apart(monkeypatch):
    """Graviton 2 and 3: equal but for part and revision."""

    def named(part, revision):
        text = f"processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: {part}\nCPU revision\t: {revision}\n"
        monkeypatch.setattr(machine.Path, "read_text", lambda *_, **__: text)
        monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
        monkeypatch.setattr(machine.platform, "processor", lambda: "")
        return machine.machine_class.__wrapped__()

    one, other = named("0xd0c", 1), named("0xd40", 1)
    assert one.startswith("aarch64-cpu-i0x41p0xd0cr1-") and other != one
    assert named("0xd0c", 2) != one
