"""Reads a record's pages to their places in the pool, each checked on the way.

The kernel copies into a window that stays in this core's cache; from there one pass takes a page to its
place, past the caches, and its checksum with it. So memory sees what a plain read costs it, and the sum
is free where memory is what is waited for. Without the interpreter's lock.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.errno cimport EINTR, errno
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

cdef extern from "<unistd.h>" nogil:
    ssize_t pread(int fd, void *into, size_t n, int64_t offset)

cdef extern from "<time.h>" nogil:
    struct timespec:
        int64_t tv_sec
        int64_t tv_nsec
    int CLOCK_MONOTONIC
    int clock_gettime(int clock, timespec *at)

cdef extern from "xxh3.h" nogil:
    size_t KV_XXH3_SHORT
    uint64_t kv_xxh3(const uint8_t *data, size_t n)
    uint64_t kv_xxh3_copy(const uint8_t *data, size_t n, uint8_t *into)
    void kv_streamed()

cpdef enum:
    SOUND = -1
    ENDED = -2
    FAILED = -3

cdef struct Piece:
    uint8_t *at
    size_t nbytes

cpdef enum:
    # As many pages as fit come by one system call. It has to stay in a core's second cache.
    WINDOW_BYTES = 256 << 10

#: Pages up to this many bytes are not checked here: their sums are of another kind.
SHORT_BYTES = KV_XXH3_SHORT


cdef int64_t now_ns() noexcept nogil:
    cdef timespec at
    clock_gettime(CLOCK_MONOTONIC, &at)
    return at.tv_sec * 1000000000 + at.tv_nsec


cdef int fill(int fd, int64_t offset, Piece piece) noexcept nogil:
    """Fill the piece from the file, continuing short reads; SOUND, ENDED or FAILED - errno."""
    cdef ssize_t n
    while piece.nbytes:
        n = pread(fd, piece.at, piece.nbytes, offset)
        if n < 0:
            if errno == EINTR:
                continue
            return FAILED - errno
        if n == 0:
            return ENDED
        offset += n
        piece.at += n
        piece.nbytes -= n
    return SOUND


cdef uint64_t moved(const uint8_t *data, Piece page) noexcept nogil:
    """Take a page to its place, if it isn't there, and its sum; 0 for one that is not checked here."""
    if page.nbytes <= KV_XXH3_SHORT:
        if data != page.at:
            memcpy(page.at, data, page.nbytes)
        return 0
    if data == page.at:
        return kv_xxh3(data, page.nbytes)
    return kv_xxh3_copy(data, page.nbytes, page.at)


cdef int read_pages(
    int fd, int64_t offset, Piece head, const Piece *pages, int count, Piece window, int64_t *spent
) noexcept nogil:
    """The index of the first page whose sum is wrong, or SOUND, ENDED, FAILED - errno.

    The sums are the end of the head, so they are good as soon as that is read. ``spent``: ns of
    reading, of checking.
    """
    cdef const uint8_t *sums = head.at + head.nbytes - 8 * count
    cdef const uint8_t *data
    cdef int64_t begun = now_ns(), read_at
    cdef int first = 0, stop, i, state = fill(fd, offset, head)
    cdef uint64_t want, actual
    cdef Piece group
    offset += head.nbytes
    while first < count and state == SOUND:
        stop = first
        group.at, group.nbytes = window.at, 0
        while stop < count and group.nbytes + pages[stop].nbytes <= window.nbytes:
            group.nbytes += pages[stop].nbytes
            stop += 1
        if stop == first:  # larger than the window: it is read where it belongs
            group = pages[first]
            stop += 1
        state = fill(fd, offset, group)
        read_at = now_ns()
        spent[0] += read_at - begun
        if state != SOUND:
            break
        data = group.at
        for i in range(first, stop):
            actual = moved(data, pages[i])
            data += pages[i].nbytes
            memcpy(&want, sums + 8 * i, 8)
            if actual != want and pages[i].nbytes > KV_XXH3_SHORT:
                state = i
                break
        begun = now_ns()
        spent[1] += begun - read_at
        offset += group.nbytes
        first = stop
    kv_streamed()
    return state


cdef Piece piece_of(object buffer, int flags) except *:
    """The buffer's memory; who calls keeps the buffer alive."""
    cdef Py_buffer view
    cdef Piece piece
    PyObject_GetBuffer(buffer, &view, flags)
    piece.at, piece.nbytes = <uint8_t *> view.buf, view.len
    PyBuffer_Release(&view)
    return piece


cdef int read_record(
    int fd, int64_t offset, bytearray head, list pages, Piece window, int64_t *spent
) except *:
    """One record; as `read_pages` says."""
    cdef int count = len(pages), state, i
    cdef Piece first = piece_of(head, PyBUF_WRITABLE)
    cdef Piece *places = <Piece *> malloc((count + 1) * sizeof(Piece))
    if places is NULL:
        raise MemoryError()
    try:
        for i in range(count):
            places[i] = piece_of(pages[i], PyBUF_WRITABLE)
        with nogil:
            state = read_pages(fd, offset, first, places, count, window, spent)
        return state
    finally:
        free(places)


def read_records(list records):
    """Read records one after the other, up to the first that is not whole.

    All in one call: between two records the interpreter would find nothing of its own in the caches.

    Parameters
    ----------
    records : list of (fd, offset, head, pages)
        Offset in bytes. ``head`` is a bytearray of header, meta and sums, whose last 8 bytes a page are
        the sums; ``pages`` a list of writable buffers. Those of `SHORT_BYTES` or less are not checked.

    Returns
    -------
    states : list of int
        Of each record that was read: `SOUND`, or of the last one the index of the first page that is
        not what was written, `ENDED` where the file ends inside it, `FAILED` - errno where the disk
        gives an error.
    read_ns, check_ns : int
        Nanoseconds of reading, and of checking and moving.
    """
    cdef Piece window
    cdef int64_t[2] spent
    cdef int state
    cdef list states = []
    spent[0] = spent[1] = 0
    window.at, window.nbytes = <uint8_t *> malloc(WINDOW_BYTES), WINDOW_BYTES
    if window.at is NULL:
        raise MemoryError()
    try:
        for fd, offset, head, pages in records:
            state = read_record(fd, offset, head, pages, window, spent)
            states.append(state)
            if state != SOUND:
                break
        return states, spent[0], spent[1]
    finally:
        free(window.at)


def checksum(buffer):
    """XXH3-64 of a buffer longer than `SHORT_BYTES`."""
    cdef Piece piece = piece_of(buffer, PyBUF_SIMPLE)
    cdef uint64_t digest
    if piece.nbytes <= KV_XXH3_SHORT:
        raise ValueError(f"{piece.nbytes} bytes; this sum is for more than {KV_XXH3_SHORT}")
    with nogil:
        digest = kv_xxh3(piece.at, piece.nbytes)
    return digest
