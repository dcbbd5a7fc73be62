"""The doctor: each check says what a finding means for a run, from facts given by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trial_events import ROOT

from kvtrial.measure import exclusive
from kvtrial.measure.probes import Reading
from kvtrial.tools import command, doctor
from kvtrial.tools.doctor import State


@pytest.mark.parametrize(
    ("architecture", "features", "state"),
    [
        ("x86_64", ["avx2", "f16c", "fma"], State.GOOD),
        ("x86_64", ["avx2", "fma"], State.POOR),
        ("aarch64", ["asimd"], State.GOOD),
        ("arm64", ["asimd"], State.GOOD),
        ("riscv64", [], State.POOR),
    ],
)
def test_a_lacking_vector_extension_is_said(architecture, features, state):
    found = doctor.instruction_set(architecture, features)
    assert found.state is state
    assert ("run their vector kernels" in found.meaning) == (state is State.GOOD)
    if features == ["avx2", "fma"]:
        assert found.meaning.startswith("without f16c ")


@pytest.mark.parametrize(
    ("counts", "shown", "state"),
    [
        ((1, 1, 1), "1 CPUs", State.NOTE),
        ((8, 8, 8), "8 CPUs", State.GOOD),
        ((8, 4, 8), "8 CPUs on 4 cores", State.NOTE),
        ((8, None, 2), "2 of 8 CPUs", State.NOTE),
    ],
)
def test_cores_are_those_that_a_run_can_use(counts, shown, state):
    found = doctor.cores(*counts)
    assert (found.shown, found.state) == (shown, state)


def test_a_governor_that_follows_the_load_comes_with_the_command():
    assert doctor.governor("performance").state is State.GOOD
    assert doctor.governor(None).state is State.NOTE
    found = doctor.governor("powersave")
    assert found.state is State.POOR
    assert "cpupower frequency-set -g performance" in found.meaning


def test_only_what_no_run_can_do_without_stops_it():
    assert doctor.c_compiler("").state is State.STOP
    assert not doctor.ready([doctor.c_compiler("")])
    assert doctor.rustc("", "").state is State.NOTE
    assert doctor.ready([doctor.rustc("", ""), doctor.kernels("", "not built; run: make build")])
    assert "apt install clang" in doctor.clang("", "").meaning
    assert doctor.clang("clang version 14", "").meaning == "with K1C in the trial"
    built_without = doctor.rustc("rustc 1.90", "rustc was not found")
    assert (built_without.state, "make build" in built_without.meaning) == (State.NOTE, True)


def test_memory_is_held_against_the_largest_cell():
    assert doctor.memory(8 * 10**9, 2 * 10**9, "m at 16,384 positions").state is State.GOOD
    short = doctor.memory(10**9, 2 * 10**9, "m at 16,384 positions")
    assert short.state is State.POOR
    assert short.meaning.startswith("m at 16,384 positions needs about 2.0 GB: ")
    assert doctor.memory(10**9, None, "kvtrial fetch m").meaning == "kvtrial fetch m"


@pytest.mark.parametrize(
    ("free", "kind", "fsync_ms", "state"),
    [
        (9 * 10**9, "ext4", 2.0, State.GOOD),
        (10**9, "ext4", 2.0, State.STOP),
        (9 * 10**9, "tmpfs", 2.0, State.POOR),
        (9 * 10**9, "ext4", 0.001, State.POOR),
    ],
)
def test_the_disk_has_to_hold_the_run_and_keep_its_word(free, kind, fsync_ms, state):
    assert doctor.disk("/r", free, 2 * 10**9, kind, fsync_ms).state is state


def test_noise_is_how_far_the_probes_moved():
    def seen(*bandwidths: float) -> doctor.Finding:
        return doctor.noise([Reading(5.0, gb, 40.0, 50.0) for gb in bandwidths])

    steady = seen(10, 10, 9.5)
    assert steady.state is State.GOOD
    assert steady.value["bandwidth_move"] == pytest.approx(10 / 9.5 - 1)
    moved = seen(10, 10, 8)
    assert moved.state is State.NOTE and "wider intervals and more blocks" in moved.meaning
    assert moved.value["bandwidth_move"] == pytest.approx(0.25)


def test_a_machine_that_is_measured_on_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTRIAL_LOCK", str(tmp_path / "machine.lock"))
    with exclusive.exclusive("m2 of run-a"):
        found = doctor._noise()
    assert (found.value, found.state) == (None, State.NOTE)
    assert "the machine is held by m2 of run-a (process " in found.meaning


def test_the_command_says_something_about_everything(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KVTRIAL_RESULTS", str(tmp_path))
    monkeypatch.setenv("KVTRIAL_CONFIG", str(ROOT / "config"))
    monkeypatch.setattr(doctor, "READINGS", 4)
    assert command.main(["doctor", "--model", "tiny-llama", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ready"] is True
    assert set(said["findings"]) == {
        "instruction set", "cores", "governor", "virtualised", "C compiler", "rustc", "clang", "kernels",
        "memory", "disk", "load", "noise",
    }  # fmt: skip
    assert all(f["meaning"] and f["state"] in list(State) for f in said["findings"].values())
    assert said["findings"]["memory"]["meaning"].endswith("kvtrial fetch tiny-llama")
    assert list(Path(tmp_path).iterdir()) == []
