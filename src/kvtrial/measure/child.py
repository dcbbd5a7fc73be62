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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, TypeVar

import psutil

from kvtrial.host import build, machine
from kvtrial.host.files import write_text
from kvtrial.host.records import plain, read
from kvtrial.measure import exclusive
from kvtrial.measure.baton import PartnerGone
from kvtrial.measure.heartbeat import Heart, last_beat
from kvtrial.measure.specs import Ends, Spec

Row = dict[str, Any]
S = TypeVar("S", bound=Spec)

#: Exit code of a process that found too little memory; what else has it means the same: try later.
_NO_MEMORY = os.EX_TEMPFAIL
#: Exit code of a process that ended for an arm's sake.
_ARM_FAILED = os.EX_SOFTWARE
#: Exit code of a side of a pair whose other one has ended.
_PARTNER_GONE = os.EX_UNAVAILABLE
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
    spec : Spec
        The module's own record. With ``pythons`` its two arms have a process each, of the interpreters named
        there, and take turns (`kvtrial.measure.baton`).
    threads : int
        For the thread pools of libraries.
    preload : dict, optional
        Further variables, see `kvtrial.measure.allocations.preload_environment`.

    Raises
    ------
    ChildDied
        A process left no rows; the message has the end of what it wrote to stderr.
    """
    with contextlib.ExitStack() as stack:
        with (
            contextlib.ExitStack() as pipes
        ):  # theirs once they run: an end of ours would hide a death
            children = [
                stack.enter_context(
                    _Child.started(module, own, environment(threads, preload), python)
                )
                for own, python in _sides(pipes, spec)
            ]
        limit = math.inf if spec.step_limit_s is None else spec.step_limit_s
        if (hung := _wait(children, limit)) is not None:
            raise ChildDied(
                f"{hung.arm} hung: a step took more than {limit:g} s; {hung.words()}".rstrip("; "),
                hung.arm,
            )
        failed = [child for child in children if child.rows() is None]
        # Where one side of a pair has died, the other one only says so.
        failed.sort(key=lambda child: child.process.poll() in (None, _PARTNER_GONE))
        if failed:
            code, arm = failed[0].process.wait(), failed[0].arm
            raise ChildDied(
                f"{module} {_how_it_ended(code)}{f' while it ran {arm}' if arm else ''}: "
                f"{failed[0].words()}",
                None if code in _FROM_OUTSIDE else arm,
            )
        return [row for child in children for row in child.rows() or []]


def _sides(pipes: contextlib.ExitStack, spec: Spec) -> list[tuple[Spec, str]]:
    """What each process is told, and its interpreter; of a pair, the pipes between the two as well."""
    arms = [arm for arm in spec.candidates if arm in spec.pythons]
    if len(arms) < 2:
        return [(spec, spec.pythons[arms[0]] if arms else sys.executable)]
    there, back = os.pipe(), os.pipe()
    for end in (*there, *back):
        pipes.callback(os.close, end)
    batons = (
        Ends(receive=back[0], send=there[1], held=True),
        Ends(receive=there[0], send=back[1], held=False),
    )
    return [
        (replace(spec, own=[arm], baton=baton), spec.pythons[arm])
        for arm, baton in zip(arms, batons)
    ]


@dataclass
class _Child:
    """A measured process at work, in a folder of its own."""

    process: subprocess.Popen[bytes]
    out: Path
    said: IO[str]
    stopped_s: float = 0.0

    @classmethod
    @contextlib.contextmanager
    def started(
        cls, module: str, spec: Spec, variables: dict[str, str], python: str
    ) -> Iterator[_Child]:
        """Start it; what is left of it at the end is killed.

        An interpreter that is not this one has packages of its own: no path of ours leads past them.
        """
        ours = python == sys.executable
        if not ours:
            variables = {k: v for k, v in variables.items() if k != "PYTHONPATH"}
        pipes = [end for end in (spec.baton.receive, spec.baton.send) if end is not None]
        with tempfile.TemporaryDirectory(prefix="kvtrial-") as name:
            folder = Path(name)
            told = replace(spec, fingerprint=build.fingerprint() if ours else "")
            (folder / "spec.json").write_text(json.dumps(plain(told)), encoding="utf-8")
            out = folder / "out.json"
            with (folder / "stderr").open("w+", encoding="utf-8", errors="replace") as said:
                flags = [] if ours else ["-P"]
                process = subprocess.Popen(
                    [python, *flags, "-m", module, str(folder / "spec.json"), str(out)],
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(*exclusive.held(), *pipes),
                    stderr=said,
                )
                try:
                    yield cls(process, out, said)
                finally:
                    process.kill()  # nothing where it has ended
                    process.wait()

    @property
    def arm(self) -> str | None:
        """The arm at work, or that was when it ended."""
        return last_beat(_heart_path(self.out)).arm or None

    def rows(self) -> list[Row] | None:
        """What it has measured; None where it has not ended well."""
        if self.process.poll() != 0 or not self.out.is_file():
            return None
        found: list[Row] = json.loads(self.out.read_text(encoding="utf-8"))
        return found

    def words(self) -> str:
        """The end of what it wrote to stderr."""
        self.said.seek(0)
        return self.said.read().strip()[-2000:]

    def hangs(self, limit_s: float, looked_s: float) -> bool:
        """Whether one piece of its work has passed the limit.

        A process that somebody has stopped is not at work: its time does not count.
        """
        arm, seconds = last_beat(_heart_path(self.out))
        with contextlib.suppress(psutil.Error):
            if psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED:
                self.stopped_s += looked_s
        if not arm:
            self.stopped_s = 0.0
        return bool(arm) and seconds - self.stopped_s > limit_s


def _wait(children: Sequence[_Child], limit_s: float) -> _Child | None:
    """Wait until all have ended, or one badly; one that hangs is returned, with it still alive."""
    while alive := [child for child in children if child.process.poll() is None]:
        codes = {child.process.poll() for child in children}
        if codes - {None, 0, _PARTNER_GONE}:
            return None
        _sleep_until_one_ends([child.process for child in alive], _LOOK_S)
        for child in alive:
            if child.process.poll() is None and child.hangs(limit_s, _LOOK_S):
                return child
    return None


def _sleep_until_one_ends(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """At most so long, without waking up meanwhile where the system allows it."""
    descriptors: list[int] = []
    try:
        for process in processes:
            descriptors.append(os.pidfd_open(process.pid))
        select.select(descriptors, [], [], seconds)
    except (AttributeError, OSError):  # not Linux, or too old
        with contextlib.suppress(subprocess.TimeoutExpired):
            processes[0].wait(seconds)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def run_survivors(
    module: str,
    spec: Spec,
    threads: int,
    preload: dict[str, str] | None = None,
    *,
    left_out: Callable[[str, str], None],
) -> list[Row]:
    """`run`, and again without any of ``spec.candidates`` that took the process down.

    ``left_out(candidate, what happened)`` is called for each of those.
    """
    while True:
        try:
            return run(module, spec, threads, preload)
        except ChildDied as error:
            dead = error.candidate
            if dead is None or dead not in spec.candidates:
                raise
            left_out(dead, failed_row(str(error)))
            spec = replace(spec, candidates=[name for name in spec.candidates if name != dead])


def main(
    kind: type[S], measure: Callable[[S, Callable[[str], None]], list[Row]], argv: list[str]
) -> None:
    """The child's side, told a ``kind``. ``measure(spec, note)`` calls ``note(candidate)`` before each piece of
    its work."""
    if len(argv) != 3:
        raise SystemExit(f"usage: python -m {measure.__module__} SPEC.json OUT.json")
    spec = read(kind, json.loads(Path(argv[1]).read_bytes()), "spec")
    if spec.fingerprint not in ("", build.fingerprint()):
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
    except PartnerGone as error:
        print(error, file=sys.stderr)
        raise SystemExit(_PARTNER_GONE) from None
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
