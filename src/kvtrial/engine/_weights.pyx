"""Weights, and products with them.

A `Matrix` stays quantised: Q8_0 and Q4_1 are packed once into panels of eight rows (panels.h), F16
and F32 stay as they lie in the file. `dequantise` writes rows as float32 (embedding rows, GEMM tiles of
the prefill); the decode multiplies the weights directly, with float32 activations or with activations
quantised per block of 32 to int8. Eight rows are summed at a time; a row's sum is made in one order
whatever the number of threads or the batch, so results are bitwise the same.

The scale and the block sum of a quantised activation are float32: in fp16 the sum of a block of
3,000s already overflows.
"""

from libc.math cimport isfinite
from libc.stdint cimport int8_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

import numpy as np

from kvtrial._threads cimport parallel_for

cdef extern from "quants.h" nogil:
    ctypedef struct q_f32x8:
        pass
    q_f32x8 q_set(float a)
    q_f32x8 q_load(const float* p)
    q_f32x8 q_add(q_f32x8 a, q_f32x8 b)
    q_f32x8 q_mul(q_f32x8 a, q_f32x8 b)
    q_f32x8 q_fma(q_f32x8 a, q_f32x8 b, q_f32x8 c)
    q_f32x8 q_max(q_f32x8 a, q_f32x8 b)
    float q_sum(q_f32x8 a)
    float q_max_lane(q_f32x8 a)
    float q_half(const void* p)
    q_f32x8 q_load_f16(const void* p)
    int q_round_i8x8(q_f32x8 a, int8_t* out)

cdef extern from "panels.h" nogil:
    enum:
        DOT_VECTORS "KV_DOT_VECTORS"
    void kv_pack_q4_1(
        const uint8_t* rows, Py_ssize_t row_bytes, Py_ssize_t n, Py_ssize_t blocks, uint8_t* panel
    ) noexcept
    void kv_pack_q8_0(
        const uint8_t* rows, Py_ssize_t row_bytes, Py_ssize_t n, Py_ssize_t blocks, uint8_t* panel
    ) noexcept
    void kv_dot8_q4_1_bytes(
        const uint8_t* panel, Py_ssize_t row_bytes, const Activation* x, Py_ssize_t n, float* sums
    ) noexcept
    void kv_dot8_q8_0_bytes(
        const uint8_t* panel, Py_ssize_t row_bytes, const Activation* x, Py_ssize_t n, float* sums
    ) noexcept
    void kv_dot8_q4_1_floats(
        const uint8_t* panel, Py_ssize_t row_bytes, const Activation* x, Py_ssize_t n, float* sums
    ) noexcept
    void kv_dot8_q8_0_floats(
        const uint8_t* panel, Py_ssize_t row_bytes, const Activation* x, Py_ssize_t n, float* sums
    ) noexcept

cdef enum:
    TASKS_PER_THREAD = 4
    MIN_TASK_ROWS = 32
    MAX_TASK_ROWS = 512


# --- dots of eight rows that lie one by one; those of panels are in panels.h ---

cdef void _dot8_f16(
    const uint8_t* rows, Py_ssize_t row_bytes, const Activation* x, Py_ssize_t n, float* sums
) noexcept nogil:
    cdef q_f32x8 acc[PANEL_ROWS]
    cdef Py_ssize_t whole = x.cols - x.cols % 8, c, v
    cdef int r
    for v in range(n):
        for r in range(PANEL_ROWS):
            acc[r] = q_set(0)
        for c in range(0, whole, 8):
            for r in range(PANEL_ROWS):
                acc[r] = q_fma(q_load_f16(rows + r * row_bytes + 2 * c), q_load(x[v].values + c), acc[r])
        for r in range(PANEL_ROWS):
            sums[PANEL_ROWS * v + r] = q_sum(acc[r])
            for c in range(whole, x.cols):
                sums[PANEL_ROWS * v + r] += q_half(rows + r * row_bytes + 2 * c) * x[v].values[c]


cdef void _dot8_f32(
    const uint8_t* rows, Py_ssize_t row_bytes, const Activation* x, Py_ssize_t n, float* sums
) noexcept nogil:
    cdef q_f32x8 acc[PANEL_ROWS]
    cdef const float* row
    cdef Py_ssize_t whole = x.cols - x.cols % 8, c, v
    cdef int r
    for v in range(n):
        for r in range(PANEL_ROWS):
            acc[r] = q_set(0)
        for c in range(0, whole, 8):
            for r in range(PANEL_ROWS):
                row = <const float*> (rows + r * row_bytes)
                acc[r] = q_fma(q_load(row + c), q_load(x[v].values + c), acc[r])
        for r in range(PANEL_ROWS):
            row = <const float*> (rows + r * row_bytes)
            sums[PANEL_ROWS * v + r] = q_sum(acc[r])
            for c in range(whole, x.cols):
                sums[PANEL_ROWS * v + r] += row[c] * x[v].values[c]


# --- products ---

cdef void _multiply_rows(
    const Product* product, Py_ssize_t start, Py_ssize_t stop, const Activation* x, Py_ssize_t n
) noexcept nogil:
    """Rows [start, stop) of a product; start is a multiple of 8. Eight rows stay in cache for the
    whole batch, so the weights are read from memory once. Panels are whole; of rows that lie one by
    one, a tail of fewer than eight goes one by one."""
    cdef float sums[PANEL_ROWS * DOT_VECTORS]
    cdef Py_ssize_t row = start, count, vectors, first, v
    cdef bint whole
    while row < stop:
        whole = product.panels or row + PANEL_ROWS <= stop
        count = min(<Py_ssize_t> PANEL_ROWS, stop - row) if whole else 1
        first = 0
        while first < n:
            vectors = min(n - first, <Py_ssize_t> DOT_VECTORS)
            product.dot8(
                product.weights + row * product.row_bytes,
                product.row_bytes if whole else 0, x + first, vectors, sums,
            )
            for v in range(vectors):
                _put(product.targets + first + v, row, sums + PANEL_ROWS * v, count)
            first += vectors
        row += count


cdef inline void _put(
    const Target* target, Py_ssize_t row, const float* values, Py_ssize_t count
) noexcept nogil:
    cdef Py_ssize_t outer = row // target.inner, i
    cdef Py_ssize_t inner = row - outer * target.inner
    for i in range(count):
        target.data[outer * target.outer_stride + inner * target.inner_stride] = values[i]
        inner += 1
        if inner == target.inner:
            inner = 0
            outer += 1


cdef struct _Job:
    const Product* products
    const Activation* x
    Py_ssize_t n
    int threads


cdef Py_ssize_t _task_rows(Py_ssize_t rows, int threads) noexcept nogil:
    """Rows of a task: a few tasks a thread, long enough to stream and short enough to balance."""
    cdef Py_ssize_t share = rows // (TASKS_PER_THREAD * threads)
    share = (share + PANEL_ROWS - 1) // PANEL_ROWS * PANEL_ROWS
    return min(max(share, <Py_ssize_t> MIN_TASK_ROWS), <Py_ssize_t> MAX_TASK_ROWS)


cdef Py_ssize_t _tasks(const Product* product, int threads) noexcept nogil:
    cdef Py_ssize_t size = _task_rows(product.rows, threads)
    return (product.rows + size - 1) // size


cdef void _run_task(void* context, int64_t task) noexcept nogil:
    """The task-th run of rows, counted through the products."""
    cdef _Job* job = <_Job*> context
    cdef const Product* product = job.products
    cdef Py_ssize_t size, start
    while task >= _tasks(product, job.threads):
        task -= _tasks(product, job.threads)
        product += 1
    size = _task_rows(product.rows, job.threads)
    start = task * size
    _multiply_rows(product, start, min(start + size, product.rows), job.x, job.n)


cdef void multiply(
    const Product* products, int n_products, const Activation* x, Py_ssize_t n, int threads
) noexcept nogil:
    """All products of a region with the same n activations."""
    cdef _Job job
    cdef int64_t tasks = 0
    cdef int i
    job.products = products
    job.x = x
    job.n = n
    job.threads = threads
    for i in range(n_products):
        tasks += _tasks(products + i, threads)
    parallel_for(_run_task, &job, tasks, threads)


def packed_nbytes(str kind, Py_ssize_t rows, Py_ssize_t cols):
    """Bytes that a matrix takes in memory: whole panels of Q8_0 and Q4_1, rows of F32 and F16."""
    cdef Py_ssize_t whole = (rows + PANEL_ROWS - 1) // PANEL_ROWS * PANEL_ROWS
    if kind in ("F32", "F16"):
        return rows * cols * (4 if kind == "F32" else 2)
    return whole * (cols // BLOCK) * (Q4_1_BYTES if kind == "Q4_1" else Q8_0_BYTES)


cdef class Activations:
    """``batch`` vectors of ``cols`` float32, and what the kernels need beside them."""

    def __cinit__(self, Py_ssize_t batch, Py_ssize_t cols, bint quantised):
        cdef Py_ssize_t b, blocks = cols // BLOCK
        self.batch = batch
        self.cols = cols
        self.quantised = quantised
        self.values = np.zeros((batch, cols), np.float32)
        self.bytes = np.zeros((batch, max(cols, 1)), np.int8)
        self.pairs = np.zeros((batch, max(2 * blocks, 1)), np.float32)
        self.sums = np.zeros((batch, max(blocks, 1)), np.float32)
        self.items = <Activation*> calloc(batch, sizeof(Activation))
        if self.items == NULL:
            raise MemoryError(f"no memory for {batch} activations")
        for b in range(batch):
            self.items[b].cols = cols
            self.items[b].values = &self.values[b, 0]
            self.items[b].bytes = &self.bytes[b, 0]
            self.items[b].pairs = &self.pairs[b, 0]
            self.items[b].sums = &self.sums[b, 0]

    def __dealloc__(self):
        free(self.items)

    cdef void prepare(self, Py_ssize_t n) noexcept nogil:
        """After ``values`` of the first n vectors have changed: their bytes, scales and sums."""
        cdef Py_ssize_t b, i
        cdef const float* x
        for b in range(n):
            for i in range(self.cols // BLOCK):
                x = &self.values[b, i * BLOCK]
                if self.quantised:
                    quantise_block(x, &self.bytes[b, i * BLOCK], &self.pairs[b, 2 * i])
                else:
                    self.sums[b, i] = q_sum(
                        q_add(
                            q_add(q_load(x), q_load(x + 8)), q_add(q_load(x + 16), q_load(x + 24))
                        )
                    )


cdef void quantise_block(const float* x, int8_t* out, float* pair) noexcept nogil:
    """A block (32,) as bytes, and pair: OUT scale, scale * sum of the bytes. A value that is not finite
    makes the scale NaN, so that it surfaces in every logit instead of as a wrong number."""
    cdef q_f32x8 a, largest = q_set(0), spread = q_set(0)
    cdef float peak, scale, inverse
    cdef int i, total = 0
    for i in range(0, BLOCK, 8):
        a = q_load(x + i)
        spread = q_fma(a, q_set(0), spread)  # NaN for NaN and inf, else 0
        largest = q_max(largest, q_max(a, q_mul(a, q_set(-1))))
    peak = q_max_lane(largest)
    # Below this the reciprocal would overflow; such a block is zero beside any other.
    scale = peak / 127 if peak > 1e-30 else 0
    inverse = 1 / scale if scale > 0 and isfinite(scale) else 0
    for i in range(0, BLOCK, 8):
        total += q_round_i8x8(q_mul(q_load(x + i), q_set(inverse)), out + i)
    scale += q_sum(spread)
    pair[0] = scale
    pair[1] = scale * total


ctypedef void (*pack_t)(
    const uint8_t* rows, Py_ssize_t row_bytes, Py_ssize_t n, Py_ssize_t blocks, uint8_t* panel
) noexcept nogil


cdef class Matrix:
    """A weight matrix (rows, cols) in a format of GGUF; Q8_0 and Q4_1 in panels.

    Parameters
    ----------
    name : str
    kind : {"F32", "F16", "Q8_0", "Q4_1"}
    rows, cols : int
        ``cols`` is a multiple of 32 for Q8_0 and Q4_1.
    data : uint8 (nbytes,)
        As the file has it; may be read-only. It is copied.
    room : uint8 (packed_nbytes,), optional
        Where the weights are copied to; made here where it is not given.

    Attributes
    ----------
    block_bytes : int
        Bytes of a block of 32 weights, 0 for F32 and F16.
    """

    def __cinit__(
        self, str name, str kind, Py_ssize_t rows, Py_ssize_t cols, const uint8_t[::1] data, room=None
    ):
        self.name = name
        self.kind = kind
        self.rows = rows
        self.cols = cols
        if kind == "F32":
            self.row_bytes = 4 * cols
            self.quantised_dot8 = self.float_dot8 = _dot8_f32
        elif kind == "F16":
            self.row_bytes = 2 * cols
            self.quantised_dot8 = self.float_dot8 = _dot8_f16
        elif kind == "Q8_0":
            self.block_bytes = Q8_0_BYTES
            self.quantised_dot8 = kv_dot8_q8_0_bytes
            self.float_dot8 = kv_dot8_q8_0_floats
        elif kind == "Q4_1":
            self.block_bytes = Q4_1_BYTES
            self.quantised_dot8 = kv_dot8_q4_1_bytes
            self.float_dot8 = kv_dot8_q4_1_floats
        else:
            raise ValueError(f"{name} has kind {kind!r}; allowed: F32, F16, Q8_0, Q4_1")
        if rows < 1 or cols < 1 or (self.block_bytes and cols % BLOCK):
            raise ValueError(
                f"{name} has shape ({rows}, {cols}); {kind} needs at least one row and, in blocks "
                f"of {BLOCK}, whole rows"
            )
        if self.block_bytes:
            self.row_bytes = cols // BLOCK * self.block_bytes
        if data.shape[0] != rows * self.row_bytes:
            raise ValueError(
                f"{name} has {data.shape[0]} bytes; {kind} of shape ({rows}, {cols}) takes "
                f"{rows * self.row_bytes}"
            )
        self._bytes = self._copied(data, room)
        self.data = &self._bytes[0]

    cdef object _copied(self, const uint8_t[::1] data, object room):
        """A file's rows in memory of one's own, Q8_0 and Q4_1 as panels: a file that is written to or
        cut while its map is read would change the weights, or end the process by SIGBUS."""
        cdef Py_ssize_t nbytes = packed_nbytes(self.kind, self.rows, self.cols), panel, row, n
        cdef pack_t pack = kv_pack_q4_1 if self.block_bytes == Q4_1_BYTES else kv_pack_q8_0
        cdef uint8_t[::1] panels = np.empty(nbytes, np.uint8) if room is None else room
        if panels.shape[0] != nbytes:
            raise ValueError(
                f"room for {self.name} has {panels.shape[0]} bytes; it takes {nbytes}"
            )
        if not self.block_bytes:
            with nogil:
                memcpy(&panels[0], &data[0], nbytes)
            return panels
        with nogil:
            for panel in range((self.rows + PANEL_ROWS - 1) // PANEL_ROWS):
                row = panel * PANEL_ROWS
                n = min(<Py_ssize_t> PANEL_ROWS, self.rows - row)
                pack(
                    &data[row * self.row_bytes], self.row_bytes, n, self.cols // BLOCK,
                    &panels[row * self.row_bytes],
                )
        return panels

    cdef Product product(self, const Target* targets, bint quantised) noexcept nogil:
        cdef Product p
        p.weights = self.data
        p.rows = self.rows
        p.row_bytes = self.row_bytes
        p.panels = self.block_bytes > 0
        p.dot8 = self.quantised_dot8 if quantised else self.float_dot8
        p.targets = targets
        return p

    cdef void dequantise_row(self, Py_ssize_t row, float* out) noexcept nogil:
        cdef const uint8_t* at = self.data + row * self.row_bytes
        cdef Py_ssize_t c
        if self.block_bytes:
            self._dequantise_panels_row(row, out)
        elif self.row_bytes == 4 * self.cols:
            memcpy(out, at, self.row_bytes)
        else:
            for c in range(self.cols):
                out[c] = q_half(at + 2 * c)

    cdef void _dequantise_panels_row(self, Py_ssize_t row, float* out) noexcept nogil:
        cdef Py_ssize_t lane = row % PANEL_ROWS, _b
        cdef const uint8_t* block = self.data + (row - lane) * self.row_bytes
        cdef const uint8_t* codes
        cdef float scale, offset
        cdef int s, i
        for _b in range(self.cols // BLOCK):
            scale = q_half(block + 2 * lane)
            if self.block_bytes == Q4_1_BYTES:
                offset = q_half(block + 2 * (PANEL_ROWS + lane))
                codes = block + 4 * PANEL_ROWS + 4 * lane
                for s in range(4):
                    for i in range(4):
                        out[4 * s + i] = scale * (codes[i] & 15) + offset
                        out[16 + 4 * s + i] = scale * (codes[i] >> 4) + offset
                    codes += 4 * PANEL_ROWS
            else:
                codes = block + 2 * PANEL_ROWS + 4 * lane
                for s in range(8):
                    for i in range(4):
                        out[4 * s + i] = scale * <int8_t> codes[i]
                    codes += 4 * PANEL_ROWS
            block += self.block_bytes * PANEL_ROWS
            out += BLOCK

    def dequantise(self, Py_ssize_t start, Py_ssize_t stop, float[:, ::1] out):
        """Rows [start, stop) as float32 into ``out`` (at least stop - start, cols)."""
        cdef Py_ssize_t r
        if not 0 <= start <= stop <= self.rows:
            raise IndexError(f"rows [{start}, {stop}) of {self.name}; it has {self.rows}")
        if out.shape[0] < stop - start or out.shape[1] != self.cols:
            raise ValueError(
                f"out has shape ({out.shape[0]}, {out.shape[1]}); {self.name} needs "
                f"({stop - start}, {self.cols})"
            )
        with nogil:
            for r in range(start, stop):
                self.dequantise_row(r, &out[r - start, 0])

    def dequantise_rows(self, const long long[::1] rows, float[:, ::1] out):
        """The given rows as float32 into ``out`` (at least n, cols): embedding look-up."""
        cdef Py_ssize_t i
        if out.shape[0] < rows.shape[0] or out.shape[1] != self.cols:
            raise ValueError(
                f"out has shape ({out.shape[0]}, {out.shape[1]}); {self.name} needs "
                f"({rows.shape[0]}, {self.cols})"
            )
        for i in range(rows.shape[0]):
            if not 0 <= rows[i] < self.rows:
                raise IndexError(f"row {rows[i]} of {self.name}; it has {self.rows}")
        with nogil:
            for i in range(rows.shape[0]):
                self.dequantise_row(rows[i], &out[i, 0])

    def multiply(self, const float[:, ::1] x, bint quantised=False, int threads=1):
        """``x @ self.T`` by the decode kernels.

        Parameters
        ----------
        x : float32 (n, cols)
        quantised : bool
            Quantise x per block of 32 first (Q8_0 and Q4_1; F16 and F32 weights take x as it is).
        threads : int

        Returns
        -------
        float32 (n, rows)
        """
        if threads < 1:
            raise ValueError(f"threads is {threads}; give at least 1")
        if x.shape[1] != self.cols:
            raise ValueError(f"x has {x.shape[1]} columns; {self.name} has {self.cols}")
        cdef Py_ssize_t n = x.shape[0], b
        cdef Activations prepared = Activations(n, self.cols, quantised)
        cdef float[:, ::1] out = np.empty((n, self.rows), np.float32)
        cdef Target* targets = <Target*> calloc(max(n, 1), sizeof(Target))
        cdef Product product = self.product(targets, quantised)
        if targets == NULL:
            raise MemoryError(f"no memory for {n} targets")
        for b in range(n):
            targets[b] = Target(&out[b, 0], self.rows, self.rows, 1)
            prepared.values[b, :] = x[b, :]
        with nogil:
            prepared.prepare(n)
            multiply(&product, 1, prepared.items, n, threads)
        free(targets)
        return np.asarray(out)
