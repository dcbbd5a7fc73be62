"""The probes do the work that they claim, and the clock refuses an interval that it can't
resolve."""

import numpy as np
import pytest

from kvtrial import machine
from kvtrial.measure import _probes, clock, probes


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
    """x = x / 2 + 1 from 0 is 2 - 2 / 2**n after n rounds; ten chains are summed."""
    assert _probes.fma(0.5, 1.0, 3) == 10 * (2 - 2 / 2**3)
    assert _probes.fma(1.0, 1.0, 1000) == 10 * 1000
    assert _probes.FMA_FLOPS % 20 == 0


class Clock:
    """Advances by a fixed step at each reading."""

    def __init__(self, step_ns):
        self.now, self.step = 0, step_ns

    def __call__(self):
        self.now += self.step
        return self.now


def test_rates_are_work_over_time(monkeypatch):
    monkeypatch.setattr(clock, "now_ns", Clock(1_000_000))
    for threads in (1, 2):
        probe = probes.Probes(threads=threads, buffer_bytes=2**20)
        reading = probe.measure()
        probe.close()
        assert reading.spin_ms == 1.0
        assert reading.read_gb_per_s == pytest.approx(2**20 / 1e-3 / 1e9)
        flops = threads * probes.FMA_ROUNDS * _probes.FMA_FLOPS
        assert reading.fma_gflop_per_s == pytest.approx(flops / 1e-3 / 1e9)


@pytest.mark.parametrize("step", [0, -5])
def test_a_clock_that_stands_still_is_a_typed_error(monkeypatch, step):
    monkeypatch.setattr(clock, "now_ns", Clock(step))
    with pytest.raises(clock.TimerResolution, match="spin"):
        probes.Probes(buffer_bytes=2**12).measure()


def test_the_buffer_is_larger_than_the_last_level_cache():
    probe = probes.Probes()
    assert probe._buffer.nbytes >= 4 * machine.last_level_cache_bytes() - 2**12
    probe.close()


def test_steal_is_a_share(monkeypatch):
    times = probes.psutil.cpu_times()
    if not hasattr(times, "steal"):
        assert probes.StealMeter().fraction() is None
        return
    meter = probes.StealMeter()
    later = times._replace(
        **{f: getattr(meter._start, f) for f in times._fields if f != "steal"},
        steal=meter._start.steal + 2.0,
    )._replace(user=meter._start.user + 6.0, guest=meter._start.guest + 6.0)
    monkeypatch.setattr(probes.psutil, "cpu_times", lambda: later)
    assert meter.fraction() == pytest.approx(0.25)


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
