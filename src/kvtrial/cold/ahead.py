"""Do the next piece of work while the last one is used: reads and hashes overlap what follows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def ahead(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Iterator[Result]]:
    """``map(function, items)``, one item ahead in a thread of its own.

    Worth it where ``function`` lets go of the interpreter (reading, BLAKE3). When the context ends,
    by an error too, nothing runs any more: buffers may be given back then.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="kvtrial-cold") as pool:

        def results() -> Iterator[Result]:
            pending: Future[Result] | None = None
            for item in items:
                following = pool.submit(function, item)
                if pending is not None:
                    yield pending.result()
                pending = following
            if pending is not None:
                yield pending.result()

        yield results()
