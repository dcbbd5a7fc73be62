"""Measured processes: how they are started, what they are given, how they answer.

A measuring module is run as ``python -m <module> SPEC.json OUT.json``: a fresh process with fixed
surroundings, no MLflow, no compiler, no network. It writes its rows only when it is done, so a
child that dies leaves nothing half. Before each piece of work it says whose it is (`heartbeat`): if
the process dies (a kernel that crashes takes the interpreter along) or a step never ends, the parent
knows whose fault it was.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from kvtrial.host import build, machine
from kvtrial.host.files import write_text
from kvtrial.measure import exclusive
from kvtrial.measure.heartbeat import Heart, last_beat

Row = dict[str, Any]
Spec = dict[str, Any]


#: Exit code of a process that found too little memory; what else has it means the same: try later.
_NO_MEMORY = os.EX_TEMPFAIL
#: Exit code of a process that ended for an arm's sake.
_ARM_FAILED = os.EX_SOFTWARE
#: Seconds between two looks at a process that is to be ended when it hangs.
_LOOK_S = 0.5
#: What comes from elsewhere: signals (a batch system, a user, a kernel short of memory), and memory.
_FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, _NO_MEMORY}


class ArmFailed(RuntimeError):
    """An arm raised where the others can't go on without it: the process ends, and is run again without.

    ``arm`` is its name; the message is the error as `failed_row` says it.
    """

    def __init__(self, arm: str, error: BaseException) -> None:
        super().__init__(failed_row(error))
        self.arm = arm


@contextlib.contextmanager
def blamed(arm: str, note: Callable[[str], None]) -> Iterator[None]:
    """Whatever the body raises is this arm's fault: `ArmFailed`."""
    note(arm)
    try:
        yield
    except Exception as error:
        raise ArmFailed(arm, error) from error
    note("")


class ChildDied(RuntimeError):
    """A measured process ended without rows. ``candidate`` is whose fault it was, or None."""

    def __init__(self, message: str, candidate: str | None) -> None:
        super().__init__(message)
        self.candidate = candidate


def environment(threads: int, preload: dict[str, str] | None = None) -> dict[str, str]:
    """The surroundings of every measured process, the same for all arms.

    Libraries read their number of threads as they are loaded, so it has to be set here, before the
    child imports anything; setting it later has no effect.
    """
    fixed = {name: str(threads) for name in machine.THREAD_VARIABLES}
    kept = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "MALLOC_ARENA_MAX")}
    return {**kept, **fixed, "PYTHONHASHSEED": "0", **(preload or {})}


def run(module: str, spec: Spec, threads: int, preload: dict[str, str] | None = None) -> list[Row]:
    """Run a measuring module in a fresh process and return its rows.

    Parameters
    ----------
    module : str
        Such as ``kvtrial.measure.block``.
    spec : dict
        JSON-safe; what the module's docstring says.
    threads : int
        For the thread pools of libraries.
    preload : dict, optional
        Further variables, see `kvtrial.measure.allocations.preload_environment`.

    Raises
    ------
    ChildDied
        It left no rows; the message has the end of what it wrote to stderr.
    """
    with tempfile.TemporaryDirectory(prefix="kvtrial-") as folder:
        spec_path, out_path = Path(folder) / "spec.json", Path(folder) / "out.json"
        document = {**spec, "fingerprint": build.fingerprint()}
        spec_path.write_text(json.dumps(document), encoding="utf-8")
        with (Path(folder) / "stderr").open("w+", encoding="utf-8", errors="replace") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(spec_path), str(out_path)],
                env=environment(threads, preload),
                stdin=subprocess.DEVNULL,
                pass_fds=exclusive.held(),
                stderr=said,
            )
            heart = _heart_path(out_path)
            try:
                hung = _wait(process, heart, spec.get("step_limit_s", math.inf))
            finally:
                process.kill()  # nothing where it has ended
                code = process.wait()
            if code == 0 and out_path.is_file():
                rows: list[Row] = json.loads(out_path.read_text(encoding="utf-8"))
                return rows
            said.seek(0)
            text = said.read().strip()[-2000:]
        arm = last_beat(heart).arm or None
        if hung is not None:
            raise ChildDied(
                f"{arm} hung: a step took more than {hung:g} s; {text}".rstrip("; "), arm
            )
        raise ChildDied(
            f"{module} {_how_it_ended(code)}{f' while it ran {arm}' if arm else ''}: {text}",
            None if code in _FROM_OUTSIDE else arm,
        )


def _wait(process: subprocess.Popen[bytes], heart: Path, limit_s: float) -> float | None:
    """Wait for the process; where one piece of its work passes the limit, the limit, with it still alive.

    A process that somebody has stopped is not at work: its time does not count.
    """
    stopped_s = 0.0
    while not _ended(process, _LOOK_S):
        arm, seconds = last_beat(heart)
        with contextlib.suppress(psutil.Error):
            if psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                stopped_s += _LOOK_S
        if not arm:
            stopped_s = 0.0
        elif seconds - stopped_s > limit_s:
            return limit_s
    return None


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for the process at most so long, without waking up meanwhile where the system allows it."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # not Linux, or too old
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    else:
        select.select([descriptor], [], [], seconds)
        os.close(descriptor)
    return process.poll() is not None


def run_survivors(
    module: str,
    spec: Spec,
    threads: int,
    preload: dict[str, str] | None = None,
    *,
    left_out: Callable[[str, str], None],
) -> list[Row]:
    """`run`, and again without any of ``spec["candidates"]`` that took the process down.

    ``left_out(candidate, what happened)`` is called for each of those.
    """
    while True:
        try:
            return run(module, spec, threads, preload)
        except ChildDied as error:
            dead = error.candidate
            if dead is None or dead not in spec["candidates"]:
                raise
            left_out(dead, failed_row(str(error)))
            left = spec["candidates"].copy()  # a list, or a dict by name
            left.pop(dead if isinstance(left, dict) else left.index(dead))
            spec = {**spec, "candidates": left}


def main(measure: Callable[[Spec, Callable[[str], None]], list[Row]], argv: list[str]) -> None:
    """The child's side. ``measure(spec, note)`` calls ``note(candidate)`` before each piece of its work."""
    if len(argv) != 3:
        raise SystemExit(f"usage: python -m {measure.__module__} SPEC.json OUT.json")
    spec = json.loads(Path(argv[1]).read_text(encoding="utf-8"))
    if spec.pop("fingerprint", "") not in ("", build.fingerprint()):
        raise SystemExit(
            "kernels or the code beside them have changed since the stage began, and binaries are "
            "never mixed: undo the change and give the same command again, which goes on, or run "
            "`snakemake --cores 1 verdict`, which begins a run of the new build"
        )
    out = Path(argv[2])
    heart = Heart(_heart_path(out))
    gc.freeze()  # what was imported stays; to look through it is most of a collection's time
    try:
        rows = measure(spec, heart.beat)
    except machine.NotEnoughMemory as error:
        print(error, file=sys.stderr)
        raise SystemExit(_NO_MEMORY) from None
    except ArmFailed as error:
        heart.beat(error.arm)
        print(error, file=sys.stderr)
        raise SystemExit(_ARM_FAILED) from None
    write_text(out, json.dumps(rows))


def failed_row(error: BaseException | str) -> str:
    """An error as a row says it: one line, at most 500 characters.

    A want of memory is the machine's and becomes no candidate's row: it is raised again.
    """
    if isinstance(error, machine.NotEnoughMemory):
        raise error
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:500]


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Collect now, and not again until the body is done."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _heart_path(out: Path) -> Path:
    return out.with_suffix(".heart")


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
