"""What this machine offers, and what each thing means for a trial: ``kvtrial doctor``.

A check is a pure function from facts to a `Finding`; `examine` gathers the facts. Nothing on the
machine is changed: what would help is said, with the command.
"""

from __future__ import annotations

import enum
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from kvtrial.contract import StaleBuild
from kvtrial.engine.errors import ModelNotFetched
from kvtrial.host import build, machine, paths, printed
from kvtrial.measure import clock, probes
from kvtrial.measure.exclusive import MachineHeld, exclusive
from kvtrial.measure.stores import largest_bytes
from kvtrial.registration import Protocol
from kvtrial.run import models, protocol
from kvtrial.stages import workload

#: Readings of the probes: two to three seconds, as long as a short arm of a block takes.
READINGS = 20
#: Moves of a probe from which intervals are noticeably wider.
UNSTEADY = 0.15
FSYNCS = 8
FSYNC_BYTES = 64 * 1024
#: No disk that keeps its word is quicker than this.
HONEST_FSYNC_MS = 0.02
BUSY_LOAD = 0.5


class State(enum.StrEnum):
    """How a finding bears on a run."""

    GOOD = "good"
    NOTE = "note"
    POOR = "poor"
    STOP = "stop"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor.

    Attributes
    ----------
    name : str
        What was looked at, the same on every machine.
    value : Any
        What was found, JSON-safe.
    shown : str
        The value for people.
    state : State
        ``good``; ``note``: worth knowing; ``poor``: the verdict suffers; ``stop``: no run.
    meaning : str
        What that means for a run, and what to do.
    """

    name: str
    value: Any
    shown: str
    state: State
    meaning: str


# --------------------------------------------------------------------------------------------------
# The checks


def instruction_set(architecture: str, features: Sequence[str]) -> Finding:
    """Whether the SIMD arms have vector kernels here."""
    needed = {"x86_64": {"avx2", "fma", "f16c"}, "aarch64": {"asimd"}, "arm64": {"asimd"}}
    missing = sorted(needed.get(architecture, {"vectors"}) - set(features))
    shown = f"{architecture}: {', '.join(features) or 'no vector extension that is used'}"
    if missing:
        return Finding(
            "instruction set",
            {"architecture": architecture, "features": list(features)},
            shown,
            State.POOR,
            f"without {', '.join(missing)} the SIMD arms run their portable form: the verdict is right "
            "for this machine and tells nothing about others",
        )
    return Finding(
        "instruction set",
        {"architecture": architecture, "features": list(features)},
        shown,
        State.GOOD,
        "the SIMD arms run their vector kernels",
    )


def cores(logical: int, physical: int | None, usable: int) -> Finding:
    """CPUs that a run can use; ``physical`` None where the system doesn't say."""
    value = {"logical": logical, "physical": physical, "usable": usable}
    shown = f"{usable} of {logical} CPUs" if usable < logical else f"{logical} CPUs"
    if physical and physical < logical:
        shown += f" on {physical} cores"
    if usable == 1:
        state, meaning = (
            State.NOTE,
            "enough for a trial; whatever else runs takes its time from it, and profile full has no cells with "
            "several threads",
        )
    elif usable < logical:
        state, meaning = (
            State.NOTE,
            f"affinity or the control group allow {usable}: cells with all threads use {usable}",
        )
    elif physical and physical < logical:
        state, meaning = (
            State.NOTE,
            "two hardware threads share a core, so any other work slows the trial: keep the machine "
            "idle",
        )
    else:
        state, meaning = State.GOOD, f"cells with all threads use {usable}"
    return Finding("cores", value, shown, state, meaning)


def governor(name: str | None) -> Finding:
    """Who sets the clock."""
    if name is None:
        return Finding(
            "governor",
            None,
            "not visible",
            State.NOTE,
            "who sets the clock can't be seen, as in most virtual machines; it cancels in ratios",
        )
    if name == "performance":
        return Finding("governor", name, name, State.GOOD, "the clock stays at its highest")
    return Finding(
        "governor",
        name,
        name,
        State.POOR,
        "the clock follows the load: tokens/s differ from run to run, ratios hardly. To fix it during a "
        "run: sudo cpupower frequency-set -g performance",
    )


def virtualised(hypervisor: bool | None) -> Finding:
    """Whether others share the hardware; None where the CPU doesn't tell."""
    if hypervisor is None:
        said = "in a cloud, neighbours take time and bandwidth: intervals are wider"
        return Finding("virtualised", None, "not visible here", State.NOTE, said)
    if not hypervisor:
        return Finding("virtualised", False, "no", State.GOOD, "nobody else is on this hardware")
    return Finding(
        "virtualised",
        True,
        "yes",
        State.NOTE,
        "neighbours take time and bandwidth: most of it cancels in ratios, and intervals are wider",
    )


def c_compiler(text: str) -> Finding:
    """The compiler of the Cython kernels."""
    if text:
        return Finding("C compiler", text, text, State.GOOD, "it builds the kernels")
    return Finding(
        "C compiler",
        "",
        "none",
        State.STOP,
        "the kernels can't be built: install one (Debian, Ubuntu: apt install gcc libc6-dev; macOS: "
        "xcode-select --install) or name it in CC",
    )


def rustc(text: str, missing: str) -> Finding:
    """The compiler of K3, K4 and K3T; ``missing`` is why the last build did without."""
    return _optional_compiler(
        "rustc",
        text,
        missing,
        "K3, K4 and K3T",
        "the trial runs without challengers: install Rust 1.73 or newer",
    )


def clang(text: str, missing: str) -> Finding:
    """The compiler of K1C, a control; ``missing`` is why the last build did without."""
    return _optional_compiler(
        "clang",
        text,
        missing,
        "K1C",
        "the report can't tell compiler from language; the verdict is the same. Install clang "
        "(Debian, Ubuntu: apt install clang)",
    )


def _optional_compiler(name: str, text: str, missing: str, arms: str, without: str) -> Finding:
    if text and not missing:
        return Finding(name, text, text, State.GOOD, f"with {arms} in the trial")
    again = paths.how_to("build")
    if text:
        meaning = f"the installed kernels are without {arms} ({missing}); to look again: {again}"
    else:
        meaning = f"without {arms} {without}, then {again}"
    return Finding(name, text, text or "none", State.NOTE, meaning)


def kernels(build_id: str, stale: str) -> Finding:
    """The compiled kernels; ``stale`` is why they can't be loaded, or empty."""
    if stale:
        return Finding("kernels", build_id, "not usable", State.NOTE, stale)
    return Finding("kernels", build_id, build_id, State.GOOD, "up to date")


def memory(available: int, needed: int | None, what: str) -> Finding:
    """Bytes that are free; ``needed`` None where the model is not here to be asked."""
    shown = f"{_gb(available)} available"
    if needed is None:
        return Finding("memory", available, shown, State.NOTE, what)
    if available < needed:
        return Finding(
            "memory",
            available,
            shown,
            State.POOR,
            f"{what} needs about {_gb(needed)}: that cell fails and the verdict is INCONCLUSIVE; free "
            "memory, or register a protocol with shorter contexts",
        )
    return Finding(
        "memory", available, shown, State.GOOD, f"{what} needs about {_gb(needed)} of it"
    )


def disk(folder: str, free: int, needed: int | None, kind: str, fsync_ms: float) -> Finding:
    """Where the cold tier is measured; ``free``: there and below the results; ``fsync_ms``: median of small
    writes made durable."""
    value = {"folder": folder, "free_bytes": free, "type": kind, "fsync_ms": round(fsync_ms, 4)}
    shown = f"{_gb(free)} free on {kind or 'an unknown file system'}, fsync {fsync_ms:.2g} ms"
    if needed is not None and free < needed:
        state, meaning = (
            State.STOP,
            f"a run writes about {_gb(needed)}: free that, or let KVTRIAL_RESULTS name another folder",
        )
    elif kind in ("tmpfs", "ramfs"):
        state, meaning = (
            State.POOR,
            "this is memory, so the cold tier's figures would mean nothing: let KVTRIAL_SCRATCH name a "
            "folder on a disk",
        )
    elif fsync_ms < HONEST_FSYNC_MS:
        state, meaning = (
            State.POOR,
            "too quick to be true: what is synced here may not survive a power cut, and the cold "
            "tier's figures with it",
        )
    else:
        state, meaning = State.GOOD, "the cold tier is measured here"
    return Finding("disk", value, shown, state, meaning)


def load(average: float) -> Finding:
    """What else runs, from the load average of the last minute."""
    if average > BUSY_LOAD:
        return Finding(
            "load",
            average,
            f"{average:.2f}",
            State.POOR,
            "something else runs, which widens intervals: see `top`, and wait or stop it",
        )
    return Finding("load", average, f"{average:.2f}", State.GOOD, "the machine is idle")


def noise(readings: Sequence[probes.Reading]) -> Finding:
    """How steady the machine is: what arms in rotation share drops out, so this voids nothing."""
    spins = [reading.spin_ms for reading in readings]
    rates = [reading.read_gb_per_s for reading in readings]
    value = {
        "spin_move": max(spins) / min(spins) - 1,
        "bandwidth_move": max(rates) / min(rates) - 1,
        "read_gb_per_s": max(rates),
        "fma_gflop_per_s": max(reading.fma_gflop_per_s for reading in readings),
    }
    shown = (
        f"clock moved by {value['spin_move']:.1%}, bandwidth by {value['bandwidth_move']:.1%} (best "
        f"{value['read_gb_per_s']:.1f} GB/s)"
    )
    if value["spin_move"] > UNSTEADY or value["bandwidth_move"] > UNSTEADY:
        meaning = "others use this machine: a trial works, with wider intervals and more blocks"
        return Finding("noise", value, shown, State.NOTE, meaning)
    return Finding("noise", value, shown, State.GOOD, "the machine is steady")


def _gb(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.1f} GB"


# --------------------------------------------------------------------------------------------------
# The facts


def examine(model: str) -> list[Finding]:
    """Look at everything; about five seconds, for ``model`` by name or path.

    Raises
    ------
    UnknownModel, ProtocolError
        The configuration asks for something that is not there.
    """
    registered = protocol.load(paths.config_file("protocol.yaml"))
    record, tools, built = machine.record(), build.toolchain(), build.facts()
    needs_memory, needs_disk, what = _needs(model, registered)
    return [
        instruction_set(record["architecture"], build.cpu_features()),
        cores(record["logical_cpus"], record["physical_cpus"], machine.usable_cpus()),
        governor(record["governor"]),
        virtualised(record["hypervisor"]),
        c_compiler(tools["c_compiler"]),
        rustc(tools["rustc"], built.get("rust_missing", "")),
        clang(tools["clang"], built.get("clang_missing", "")),
        kernels(built.get("build_id", ""), _stale()),
        memory(machine.available_memory_bytes(), needs_memory, what),
        _disk(needs_disk),
        load(probes.load()),
        _noise(),
    ]


def ready(findings: Sequence[Finding]) -> bool:
    """Whether a run can be made at all."""
    return all(finding.state is not State.STOP for finding in findings)


def document(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings as JSON."""
    return {
        "machine_class": machine.machine_class(),
        "ready": ready(findings),
        "findings": {
            f.name: {"value": f.value, "state": f.state.value, "meaning": f.meaning}
            for f in findings
        },
    }


def render(findings: Sequence[Finding]) -> Any:
    """The findings as a rich table with one line on what to do next."""
    from rich.console import Group
    from rich.text import Text

    styles = {State.GOOD: "green", State.NOTE: "cyan", State.POOR: "yellow", State.STOP: "bold red"}
    table = printed.table(
        title=machine.machine_class(), title_justify="left", box=None, padding=(0, 1, 0, 0)
    )
    for column in ("", "what", "found", "what it means for a run"):
        table.add_column(column, overflow="fold")
    for f in findings:
        table.add_row(Text(f.state.value, styles[f.state]), f.name, Text(f.shown), Text(f.meaning))
    stops = [f.name for f in findings if f.state is State.STOP]
    poor = [f.name for f in findings if f.state is State.POOR]
    if stops:
        last = f"A run is not possible yet: {', '.join(stops)}."
    elif poor:
        last = f"You can run now, but results are better without: {', '.join(poor)}. Next: {paths.how_to()}"
    else:
        last = f"Ready: {paths.how_to()}"
    return Group(table, Text(last, "bold"))


def _stale() -> str:
    try:
        build.refuse_stale()
    except StaleBuild as error:
        return str(error)
    return ""


def _needs(model: str, registered: Protocol) -> tuple[int | None, int | None, str]:
    """Bytes of memory and of disk that a run of the default profile takes, and for what."""
    try:
        path = models.path_of(model)
    except ModelNotFetched:
        return None, None, f"{model} is not here to be asked what it needs: kvtrial fetch {model}"
    shape, weight_bytes = workload.shape_of_file(path), path.stat().st_size
    cells = protocol.cells(registered, "default")

    longest = max(cell["context"] for cell in cells)
    memory_bytes = max(
        workload.memory_needed(registered, shape, weight_bytes, cell) for cell in cells
    )
    # On disk the snapshots, Z1, Z2 and the plain file.
    tokens = 4 * registered["cold"]["prefix_tokens"]
    tokens += sum(cell["context"] * cell["sessions"] for cell in cells)
    disk_bytes = largest_bytes(
        registered["candidates"],
        shape,
        tokens=tokens,
        sessions=1,
        page_tokens=registered["page_tokens"],
    )
    return memory_bytes, disk_bytes, f"{path.stem} at {longest:,} positions"


def _disk(needed: int | None) -> Finding:
    """The disk of the cold tier, asked by writing to it, and the room below the results."""
    results = _there(paths.results_dir())
    folder = _there(paths.scratch_dir(results))
    times = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(FSYNCS):
            file.write(os.urandom(FSYNC_BYTES))
            file.flush()
            start = clock.now_ns()
            os.fsync(file.fileno())
            times.append(clock.elapsed_ns(start, clock.now_ns(), "fsync") / 1e6)
    free = min(psutil.disk_usage(str(where)).free for where in (folder, results))
    return disk(str(folder), free, needed, _file_system(folder), statistics.median(times))


def _there(folder: Path) -> Path:
    """The nearest folder above that is there."""
    while not folder.is_dir():
        folder = folder.parent
    return folder


def _file_system(folder: Path) -> str:
    mounts = {
        Path(part.mountpoint): part.fstype
        for part in psutil.disk_partitions(all=True)
        if folder.resolve().is_relative_to(part.mountpoint)
    }
    return mounts[max(mounts, key=lambda mount: len(mount.parts))] if mounts else ""


def _noise() -> Finding:
    """A short probe, unless somebody measures: it would disturb that, and be disturbed."""
    try:
        with exclusive("kvtrial doctor", wait=False):
            probe = probes.Probes(1)
            readings = [probe.measure() for _ in range(READINGS)]
            probe.close()
    except MachineHeld as held:
        return Finding(
            "noise", None, "not probed", State.NOTE, f"{held}; ask again when it is free"
        )
    return noise(readings)
