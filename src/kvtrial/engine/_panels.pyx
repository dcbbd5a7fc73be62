"""Products of many positions with quantised weights, on integers: the prefill's.

Positions are quantised per 32 to int8, as the decode quantises its activations, and lie four by four as
unpacked.h wants them. A task unpacks a panel or two of weights and takes all
positions through them while they are in cache. An element's sum is made in one order, whatever the
number of threads or of other positions.
"""

from libc.stdint cimport int8_t, int64_t, uint8_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

import numpy as np

from kvtrial._threads cimport parallel_for
from kvtrial.engine._weights cimport BLOCK, PANEL_ROWS, Matrix, quantise_unit

cdef extern from "unpacked.h" nogil:
    enum:
        UNPACKED_BYTES "KV_UNPACKED_BYTES"
        UNPACKED_FLOATS "KV_UNPACKED_FLOATS"
        QUAD "KV_QUAD"
    ctypedef struct Unpacked "kv_unpacked":
        int panels
        void (*unpack)(
            const uint8_t* first, const uint8_t* second, Py_ssize_t units, uint8_t* bytes,
            float* heads
        ) noexcept nogil
        void (*dot)(
            const uint8_t* bytes, const float* heads, const int8_t* x, const float* pairs,
            const float* halves, Py_ssize_t units, float* sums
        ) noexcept nogil
    const Unpacked* UNPACKED "kv_unpacked_forms"


cdef struct _Job:
    const uint8_t* weights
    const Unpacked* form
    Py_ssize_t rows, row_bytes, units, n
    const int8_t* bytes
    const float* pairs
    const float* halves
    float* out
    int failed


cdef void _multiply_panels(void* context, int64_t task) noexcept nogil:
    """One or two panels with all positions. A prefill is no decode step, so a task allocates the
    room that it unpacks them into."""
    cdef _Job* job = <_Job*> context
    cdef Py_ssize_t width = job.form.panels * PANEL_ROWS, first = task * width, quad, p, v
    cdef Py_ssize_t rows = min(width, job.rows - first)
    cdef float sums[2 * QUAD * PANEL_ROWS]
    cdef uint8_t* bytes = <uint8_t*> malloc(
        job.units * (UNPACKED_BYTES + UNPACKED_FLOATS * sizeof(float))
    )
    cdef float* heads = <float*> (bytes + job.units * UNPACKED_BYTES)
    cdef const uint8_t* panel = job.weights + first * job.row_bytes
    cdef const int8_t* x = job.bytes
    cdef const float* pairs = job.pairs
    cdef const float* halves = job.halves
    cdef float* out
    if bytes == NULL:
        job.failed = 1
        return
    job.form.unpack(
        panel, panel + PANEL_ROWS * job.row_bytes if rows > PANEL_ROWS else panel, job.units, bytes, heads
    )
    for quad in range((job.n + QUAD - 1) // QUAD):
        job.form.dot(bytes, heads, x, pairs, halves, job.units, sums)
        for p in range(min(<Py_ssize_t> QUAD, job.n - quad * QUAD)):
            out = job.out + (quad * QUAD + p) * job.rows + first
            for v in range(rows // PANEL_ROWS):  # of one size: no call for eight floats
                memcpy(
                    out + PANEL_ROWS * v, sums + (v * QUAD + p) * PANEL_ROWS,
                    PANEL_ROWS * sizeof(float),
                )
            if rows % PANEL_ROWS:
                v = rows // PANEL_ROWS
                memcpy(
                    out + PANEL_ROWS * v, sums + (v * QUAD + p) * PANEL_ROWS,
                    rows % PANEL_ROWS * sizeof(float),
                )
        x += job.units * BLOCK * QUAD
        pairs += job.units * QUAD * 2
        halves += job.units * QUAD * 2
    free(bytes)


cdef class Quads:
    """Up to ``positions`` vectors of up to ``cols`` float32, quantised four by four.

    Attributes
    ----------
    n, cols : int
        Of those taken last.
    """

    cdef readonly Py_ssize_t n, cols
    cdef Py_ssize_t _room
    cdef int8_t[::1] _bytes  # (quads, blocks, 8, 4, 4)
    cdef float[::1] _pairs  # (quads, blocks, 4, 2)
    cdef float[::1] _halves  # the same
    cdef const float[:, ::1] _x

    def __cinit__(self, Py_ssize_t positions, Py_ssize_t cols):
        self._room = (positions + QUAD - 1) // QUAD * QUAD * (cols // BLOCK)
        self._bytes = np.zeros(max(self._room, 1) * BLOCK, np.int8)
        self._pairs = np.zeros(max(self._room, 1) * 2, np.float32)
        self._halves = np.zeros(max(self._room, 1) * 2, np.float32)

    def take(self, const float[:, ::1] x, int threads):
        """Quantise x (n, cols); cols is a multiple of 32."""
        cdef Py_ssize_t quads = (x.shape[0] + QUAD - 1) // QUAD
        if x.shape[1] % BLOCK or quads * QUAD * (x.shape[1] // BLOCK) > self._room:
            raise ValueError(
                f"x has shape ({x.shape[0]}, {x.shape[1]}); its rows need whole blocks of {BLOCK}, and "
                f"there is room for {self._room} blocks"
            )
        self.n, self.cols, self._x = x.shape[0], x.shape[1], x
        with nogil:
            parallel_for(_take_quad, <void*> self, quads, threads)
        self._x = None

    cdef void _quantise(self, Py_ssize_t quad) noexcept nogil:
        cdef Py_ssize_t blocks = self.cols // BLOCK, first = quad * QUAD, b, p, step
        cdef int8_t* out = &self._bytes[quad * blocks * BLOCK * QUAD]
        cdef float* pairs = &self._pairs[quad * blocks * QUAD * 2]
        cdef float* halves = &self._halves[quad * blocks * QUAD * 2]
        cdef Py_ssize_t at
        cdef int8_t block[BLOCK]
        for p in range(QUAD):
            for b in range(blocks):
                at = (b * QUAD + p) * 2
                if first + p < self.n:
                    quantise_unit(&self._x[first + p, b * BLOCK], block, pairs + at, halves + at)
                else:
                    memset(block, 0, BLOCK)
                    pairs[at] = pairs[at + 1] = halves[at] = halves[at + 1] = 0
                for step in range(BLOCK // 4):
                    memcpy(out + ((b * (BLOCK // 4) + step) * QUAD + p) * 4, block + 4 * step, 4)

    def multiply(self, Matrix matrix, float[:, ::1] out, int threads):
        """out (n, rows) = what was taken @ matrix.T, for a matrix in panels.

        Raises
        ------
        ValueError
            Another kind of matrix or another shape.
        MemoryError
        """
        cdef _Job job
        cdef Py_ssize_t width
        if matrix.form < 0 or matrix.cols != self.cols:
            raise ValueError(
                f"{matrix.name} is {matrix.kind} and has {matrix.cols} columns; what was taken has "
                f"{self.cols}, and weights in panels are multiplied on integers"
            )
        if out.shape[0] != self.n or out.shape[1] != matrix.rows:
            raise ValueError(
                f"out has shape ({out.shape[0]}, {out.shape[1]}); {self.n} positions by {matrix.name} "
                f"need ({self.n}, {matrix.rows})"
            )
        if not self.n:
            return
        job.weights, job.rows, job.row_bytes = matrix.data, matrix.rows, matrix.row_bytes
        job.form = UNPACKED + matrix.form
        job.units, job.n = self.cols // BLOCK, self.n
        job.bytes, job.pairs, job.halves = &self._bytes[0], &self._pairs[0], &self._halves[0]
        job.out = &out[0, 0]
        width = PANEL_ROWS * job.form.panels
        job.failed = 0
        with nogil:
            parallel_for(_multiply_panels, &job, (matrix.rows + width - 1) // width, threads)
        if job.failed:
            raise MemoryError(f"no memory for a panel of {matrix.name}")


cdef void _take_quad(void* context, int64_t task) noexcept nogil:
    (<Quads> context)._quantise(task)
