"""Room on the disk that is held for the day it is full.

RocksDB writes as it opens, and deleting appends to a log: without any room a store can't even be emptied. So
a store that is written to holds a file of so many bytes, `RESERVE`, and gives it up where room is short. It
is taken again as soon as there is room, and no spill begins without it.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from kvtrial.cold import disk
from kvtrial.cold.errors import DiskFull, of_disk

#: What RocksDB writes as it opens a store with nothing in it, logs a deletion and closes, several times over.
SPARE_BYTES = 4 << 20
NAME = "RESERVE"
#: It grows by so much, and by more once it is larger than that: a log grows with each batch (Z1).
_STEP_BYTES, _LARGE_STEP_BYTES = 1 << 20, 16 << 20


def index_bytes(index: Path) -> int:
    """Bytes that RocksDB may have to write again as it opens: its log, and its tables without the blobs."""
    total = 0
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(index) as files:
        for file in files:
            with suppress(FileNotFoundError):  # RocksDB removes some meanwhile
                total += 0 if file.name.endswith(".blob") else file.stat().st_size
    return total


def _rounded(nbytes: int) -> int:
    step = _STEP_BYTES if nbytes < _LARGE_STEP_BYTES else _LARGE_STEP_BYTES
    return -(-nbytes // step) * step


class Reserve:
    """The reserve of one store, which has its lock.

    Parameters
    ----------
    folder : Path
        The store's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder / NAME
        #: It was needed, and has not been taken again.
        self.given_up = False

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def hold(self, index_nbytes: int, batch_nbytes: int = 0) -> None:
        """Hold enough for an index of so many bytes, and see that a batch finds room beside it.

        Raises
        ------
        DiskFull
            There is no room for that; nothing was written.
        """
        needed = SPARE_BYTES + index_nbytes + batch_nbytes
        if (held := self.nbytes) < needed:
            try:
                disk.allocate(self.path, _rounded(needed))
            except OSError as error:
                with suppress(OSError):
                    os.truncate(self.path, held)
                raise of_disk(error, self.path, f"extended to {needed} bytes") from error
        self.given_up = False
        free = disk.free_bytes(self._folder)
        # RocksDB writes its log out whenever it likes, and is of no more use where that fails.
        if free < index_nbytes + batch_nbytes:
            raise DiskFull(
                errno.ENOSPC,
                f"{self._folder} has {free} bytes free, and this batch with its index may need "
                f"{index_nbytes + batch_nbytes}; nothing was written: free space, or delete() and gc",
            )

    def make_room(self, index_nbytes: int) -> None:
        """Give the reserve up where less than that is free."""
        if disk.free_bytes(self._folder) < SPARE_BYTES + index_nbytes:
            self.give_up()

    def give_up(self) -> bool:
        """Give the room back; whether there was any, and it could be."""
        try:
            self.path.unlink()
        except OSError:  # none is there, or it is no file of ours
            return False
        self.given_up = True
        return True

    def take_again(self, index_nbytes: int) -> None:
        """If it was given up, hold what there is room for by now: others may want that too."""
        if self.given_up:
            room = min(_rounded(SPARE_BYTES + index_nbytes), disk.free_bytes(self._folder))
            with suppress(OSError):
                disk.allocate(self.path, room)
            self.given_up = self.nbytes < SPARE_BYTES + index_nbytes
