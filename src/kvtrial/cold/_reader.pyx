"""Reads a record from a file straight into the pool's pages, and checks each page while it is in cache.

One call a record, without the interpreter's lock and without an object per page.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.errno cimport EINTR, errno
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len
    ssize_t preadv(int fd, const iovec *pieces, int count, int64_t offset)

cdef extern from "<time.h>" nogil:
    struct timespec:
        int64_t tv_sec
        int64_t tv_nsec
    int CLOCK_MONOTONIC
    int clock_gettime(int clock, timespec *at)

cdef extern from "xxh3.h" nogil:
    size_t KV_XXH3_SHORT
    uint64_t kv_xxh3(const uint8_t *data, size_t n)

cdef enum:
    # Pieces that one system call fills. They are checked right after it, so they have to be in cache
    # still; smaller groups cost more in system calls than they save.
    GROUP_BYTES = 768 << 10
    GROUP_PIECES = 64
    SOUND = -1
    ENDED = -2
    FAILED = -3

#: Pages up to this many bytes are not checked here: their sums are of another kind.
SHORT_BYTES = KV_XXH3_SHORT


cdef int64_t now_ns() noexcept nogil:
    cdef timespec at
    clock_gettime(CLOCK_MONOTONIC, &at)
    return at.tv_sec * 1000000000 + at.tv_nsec


cdef int fill(int fd, int64_t offset, const iovec *pieces, int count) noexcept nogil:
    """Fill all pieces from the file, continuing short reads; SOUND, ENDED or FAILED - errno."""
    cdef iovec[GROUP_PIECES] left
    cdef int first = 0
    cdef ssize_t n
    memcpy(left, pieces, count * sizeof(iovec))
    while first < count:
        n = preadv(fd, left + first, count - first, offset)
        if n < 0:
            if errno == EINTR:
                continue
            return FAILED - errno
        if n == 0:
            return ENDED
        offset += n
        while first < count and <size_t> n >= left[first].iov_len:
            n -= left[first].iov_len
            first += 1
        if n:
            left[first].iov_base = <char *> left[first].iov_base + n
            left[first].iov_len -= n
    return SOUND


cdef int read_checked(
    int fd, int64_t offset, const iovec *pieces, int count, const char *sums, int64_t *spent
) noexcept nogil:
    """Piece 0 is the head, the others the pages; the index of the first page whose sum is wrong.

    ``sums`` lies in the head, so it is good as soon as that is read. ``spent``: ns of reading, of
    checking.
    """
    cdef int first = 0, stop, i
    cdef size_t nbytes
    cdef int64_t begun = now_ns(), read_at, checked_at
    cdef uint64_t want
    while first < count:
        stop = first
        nbytes = 0
        while stop < count and stop - first < GROUP_PIECES:
            if stop > first and nbytes + pieces[stop].iov_len > GROUP_BYTES:
                break
            nbytes += pieces[stop].iov_len
            stop += 1
        i = fill(fd, offset, pieces + first, stop - first)
        read_at = now_ns()
        spent[0] += read_at - begun
        if i != SOUND:
            return i
        for i in range(max(first, 1), stop):
            if pieces[i].iov_len <= KV_XXH3_SHORT:
                continue
            memcpy(&want, sums + 8 * (i - 1), 8)
            if kv_xxh3(<const uint8_t *> pieces[i].iov_base, pieces[i].iov_len) != want:
                return i - 1
        checked_at = now_ns()
        spent[1] += checked_at - read_at
        begun = checked_at
        offset += nbytes
        first = stop
    return SOUND


cdef Py_ssize_t point_at(iovec *piece, object buffer, int flags) except -1:
    """The buffer's memory; who calls keeps the buffer alive."""
    cdef Py_buffer view
    PyObject_GetBuffer(buffer, &view, flags)
    piece.iov_base, piece.iov_len = view.buf, view.len
    PyBuffer_Release(&view)
    return piece.iov_len


def read_record(int fd, int64_t offset, bytearray head, list pages, int64_t[::1] spent_ns):
    """Fill ``head`` and ``pages`` from ``offset`` on and compare each page with its sum.

    Parameters
    ----------
    fd : int
    offset : int
        Where the record begins, bytes.
    head : bytearray
        Of header, meta and sums; its last 8 bytes a page are the sums.
    pages : list of writable buffers
        Longer than `SHORT_BYTES` each, or that page is not checked.
    spent_ns : int64 (2,)
        Nanoseconds of reading and of checking are added to it.

    Returns
    -------
    int
        -1 where all sums are right, -2 where the file ends inside the record, else the index of the
        first page that is not what was written.

    Raises
    ------
    OSError
        From the read.
    """
    cdef int count = len(pages) + 1, state, i
    cdef iovec *pieces = <iovec *> malloc(count * sizeof(iovec))
    cdef int64_t *spent = &spent_ns[0]
    cdef const char *sums
    if pieces is NULL:
        raise MemoryError()
    try:
        point_at(pieces, head, PyBUF_WRITABLE)
        for i in range(1, count):
            point_at(pieces + i, pages[i - 1], PyBUF_WRITABLE)
        sums = <const char *> pieces[0].iov_base + pieces[0].iov_len - 8 * (count - 1)
        with nogil:
            state = read_checked(fd, offset, pieces, count, sums, spent)
        if state <= FAILED:
            raise OSError(FAILED - state, f"reading at offset {offset} failed")
        return state
    finally:
        free(pieces)


def checksum(buffer):
    """XXH3-64 of a buffer longer than `SHORT_BYTES`."""
    cdef iovec piece
    cdef uint64_t found
    if point_at(&piece, buffer, PyBUF_SIMPLE) <= <Py_ssize_t> KV_XXH3_SHORT:
        raise ValueError(f"{piece.iov_len} bytes; this sum is for more than {KV_XXH3_SHORT}")
    with nogil:
        found = kv_xxh3(<const uint8_t *> piece.iov_base, piece.iov_len)
    return found
