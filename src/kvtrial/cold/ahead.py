"""Do the next piece of work while the last one is used: reads and hashes overlap what follows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def ahead(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Iterator[Result]]:
    """``map(function, items)``, one item ahead in a thread of its own.

    Worth it where ``function`` lets go of the interpreter (reading, BLAKE3). When the context ends,
    by an error too, nothing runs any more: buffers may be given back then.
    """
    if len(items) < 2:
        yield map(function, items)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="kvtrial-cold") as pool:

        def results() -> Iterator[Result]:
            pending: Future[Result] = pool.submit(function, items[0])
            for item in items[1:]:
                following = pool.submit(function, item)
                yield pending.result()
                pending = following
            yield pending.result()

        yield results()
