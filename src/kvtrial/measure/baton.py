"""The baton: two processes whose steps take turns, as the arms of one process do.

Two builds of one package can't be loaded into one process, so each side of the comparison has its own. Both
compute the same orders; a side makes its own steps, and hands the baton on where the other's step comes. It
goes through a pipe: who waits sleeps until the byte is there, so it takes nothing from the side that is timed (a
page that both look at would have to be polled, on the very CPU that the two share), and where a side has died
the other reads the pipe's end.
"""

from __future__ import annotations

import os
import struct

#: Of the pair of processes: how they take turns, what a side is told and what it answers. A git ref whose number
#: is another can't be measured beside this build.
INTERFACE = 1

_FORM = struct.Struct("<q")


class PartnerGone(RuntimeError):
    """The other side of a pair has ended; why, it has said itself."""


class OutOfStep(RuntimeError):
    """The two sides order their steps differently, so what they timed is no pair."""


class Baton:
    """One side's end of it. Without pipes the process is alone and always has its turn.

    Parameters
    ----------
    receive, send : int, optional
        Descriptors: the end of a pipe that is read, and that of another one that is written.
    held : bool
        Whether this side begins.
    """

    def __init__(
        self, receive: int | None = None, send: int | None = None, held: bool = True
    ) -> None:
        self._receive, self._send, self._held = receive, send, held

    def take(self, step: int) -> None:
        """Have the turn, for step ``step``; sleep until the other side has given it.

        Raises
        ------
        PartnerGone, OutOfStep
        """
        if self._held or self._receive is None:
            return
        said = os.read(self._receive, _FORM.size)
        if len(said) < _FORM.size:
            raise PartnerGone("the other side has ended")
        (given,) = _FORM.unpack(said)
        if given != step:
            raise OutOfStep(f"step {step} was to come, and the other side is at {given}")
        self._held = True

    def give(self, step: int) -> None:
        """The step that comes is the other's: hand the baton on, where it has not gone yet.

        Raises
        ------
        PartnerGone
        """
        if not self._held or self._send is None:
            return
        self._held = False
        try:
            os.write(self._send, _FORM.pack(step))
        except BrokenPipeError:
            raise PartnerGone("the other side has ended") from None
