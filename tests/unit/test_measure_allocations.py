"""The counter must see what tracemalloc cannot: native allocations, of this thread and of all."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest

from kvtrial.measure import allocations

needs_preload = pytest.mark.skipif(
    sys.platform != "linux", reason="the counter needs Linux and glibc; recorded as not available"
)


def counted(code: str):
    """Run ``code`` in a process that counts; it prints JSON."""
    preload = allocations.preload_environment()
    assert preload is not None, "the counter was not built or not installed"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **preload},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_without_the_library_nothing_is_counted_and_it_says_so():
    assert not allocations.available()
    assert allocations.count_calls(list) is None
    assert allocations.copied_bytes(list) is None


@needs_preload
def test_a_planted_malloc_is_caught_and_an_empty_call_counts_nothing():
    found = counted(
        """
        import json, tracemalloc
        from kvtrial.measure import _allocations, allocations
        def nothing(): pass
        for _ in range(10):
            allocations.count_calls(nothing)
            allocations.count_calls(_allocations.planted_malloc, 100)
        print(json.dumps([
            allocations.available(),
            [allocations.count_calls(nothing) for _ in range(50)],
            [allocations.count_calls(_allocations.planted_malloc, 64) for _ in range(50)],
        ]))
        """
    )
    assert found == [True, [0] * 50, [1] * 50]


@needs_preload
def test_planted_copies_are_caught_to_the_byte():
    found = counted(
        """
        import json
        from kvtrial.measure import _allocations, allocations
        def nothing(): pass
        sizes = [0, 1, 64, 4096]
        for size in sizes:
            allocations.copied_bytes(_allocations.planted_copy, size)
        print(json.dumps([
            allocations.copied_bytes(nothing),
            [allocations.copied_bytes(_allocations.planted_copy, size) for size in sizes],
        ]))
        """
    )
    assert found == [0, [0, 1, 64, 4096]]


@needs_preload
def test_copies_that_overlap_are_right_while_they_are_counted():
    """The counter's own memmove stands in for the C library's in the whole process."""
    found = counted(
        """
        import ctypes, json
        from kvtrial.measure import allocations
        whole = bytes(range(251)) * 20
        moved = []
        for start, to in ((0, 1), (1, 0), (5, 300), (300, 5), (7, 7)):
            array = ctypes.create_string_buffer(whole, len(whole))
            at = ctypes.addressof(array)
            copied = allocations.copied_bytes(ctypes.memmove, at + to, at + start, 4000)
            right = whole[:to] + whole[start : start + 4000] + whole[to + 4000 :]
            moved.append(array.raw == right and copied >= 4000)
        print(json.dumps(moved))
        """
    )
    assert found == [True] * 5


@needs_preload
def test_a_folder_with_a_space_counts_too(tmp_path, monkeypatch):
    found = allocations.library()
    moved = tmp_path / "sp'ace é"
    moved.mkdir()
    shutil.copy(found, moved)
    monkeypatch.setattr(allocations, "library", lambda: moved / found.name)
    code = "from kvtrial.measure import allocations; print(str(allocations.available()).lower())"
    assert counted(code) is True


@needs_preload
def test_every_kind_of_call_counts():
    """Each of the C library's own names, called through ctypes, adds one."""
    found = counted(
        """
        import ctypes, json, mmap
        from kvtrial.measure import allocations
        c = ctypes.CDLL(None)
        for name in ("malloc", "calloc", "realloc", "aligned_alloc", "mmap", "mmap64"):
            getattr(c, name).restype = ctypes.c_void_p
        out, n = ctypes.c_void_p(), ctypes.c_size_t
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        calls = {
            "malloc": (n(100),), "calloc": (n(10), n(10)), "realloc": (None, n(100)),
            "aligned_alloc": (n(64), n(128)), "posix_memalign": (ctypes.byref(out), n(64), n(100)),
            "mmap": (None, n(4096), mmap.PROT_READ, anonymous, -1, ctypes.c_long(0)),
            "mmap64": (None, n(4096), mmap.PROT_READ, anonymous, -1, ctypes.c_long(0)),
            "abs": (3,),
        }
        for name, args in calls.items():  # ctypes' own first call allocates
            getattr(c, name)(*args)
        base = min(allocations.count_calls(c.abs, 3) for _ in range(20))
        print(json.dumps({
            name: min(allocations.count_calls(getattr(c, name), *args) for _ in range(20)) - base
            for name, args in calls.items()
        }))
        """
    )
    assert found == {
        "malloc": 1,
        "calloc": 1,
        "realloc": 1,
        "aligned_alloc": 1,
        "posix_memalign": 1,
        "mmap": 1,
        "mmap64": 1,
        "abs": 0,
    }


@needs_preload
def test_another_thread_counts_only_when_every_thread_is_asked_for():
    found = counted(
        """
        import json, threading
        from kvtrial.measure import _allocations, allocations
        go, done = threading.Semaphore(0), threading.Semaphore(0)
        def work():
            while True:
                go.acquire()
                for _ in range(1000):
                    _allocations.planted_malloc(64)
                done.release()
        threading.Thread(target=work, daemon=True).start()
        def let_it_work():
            go.release()
            done.acquire()
        let_it_work()
        print(json.dumps([
            allocations.count_calls(let_it_work),
            allocations.count_calls(let_it_work, every_thread=True),
        ]))
        """
    )
    assert found[0] < 100
    assert 1000 <= found[1] < 1100
