"""Weights as they lie in the file, and products with them.

A `Matrix` stays quantised. `dequantise` writes rows as float32 (embedding rows, GEMM tiles of the
prefill); the decode multiplies the blocks directly, with float32 activations or with activations
quantised per block of 32 to int8. Four rows are summed at a time; a row's sum is made in one order
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
    void q_store(float* p, q_f32x8 a)
    q_f32x8 q_add(q_f32x8 a, q_f32x8 b)
    q_f32x8 q_mul(q_f32x8 a, q_f32x8 b)
    q_f32x8 q_fma(q_f32x8 a, q_f32x8 b, q_f32x8 c)
    q_f32x8 q_max(q_f32x8 a, q_f32x8 b)
    float q_sum(q_f32x8 a)
    float q_max_lane(q_f32x8 a)
    float q_half(const void* p)
    q_f32x8 q_load_f16(const void* p)
    void q_spread_nibbles(const void* p, int8_t* out)
    q_f32x8 q_load_i8x8(const void* p)
    int q_round_i8x8(q_f32x8 a, int8_t* out)

cdef extern from "row_dots.h" nogil:
    enum:
        DOT_VECTORS "KV_DOT_VECTORS"
    void kv_dot4_q4_1_bytes(
        const uint8_t* rows, Py_ssize_t row_bytes, const Activation* x, Py_ssize_t n, float* sums
    ) noexcept
    void kv_dot4_q8_0_bytes(
        const uint8_t* rows, Py_ssize_t row_bytes, const Activation* x, Py_ssize_t n, float* sums
    ) noexcept

cdef enum:
    TASKS_PER_THREAD = 4
    MIN_TASK_ROWS = 32
    MAX_TASK_ROWS = 512


# --- dots of four rows with unquantised vectors; those with bytes are in row_dots.h ---

cdef void _dot4_q4_1_floats(
    const uint8_t* rows, Py_ssize_t row_bytes, const Activation* x, Py_ssize_t n, float* sums
) noexcept nogil:
    cdef q_f32x8 acc[4 * DOT_VECTORS]
    cdef float offsets[4 * DOT_VECTORS]
    cdef q_f32x8 weights[4]
    cdef int8_t spread[BLOCK]
    cdef const uint8_t* block
    cdef float scale, offset
    cdef Py_ssize_t b, v
    cdef int r, i
    for i in range(4 * n):
        acc[i] = q_set(0)
        offsets[i] = 0
    for b in range(x.cols // BLOCK):
        for r in range(4):
            block = rows + r * row_bytes + b * Q4_1_BYTES
            q_spread_nibbles(block + 4, spread)
            for i in range(4):
                weights[i] = q_load_i8x8(spread + 8 * i)
            scale, offset = q_half(block), q_half(block + 2)
            for v in range(n):
                _add_block(weights, scale, x[v].values + b * BLOCK, acc + 4 * v + r)
                offsets[4 * v + r] += offset * x[v].sums[b]
    for i in range(4 * n):
        sums[i] = q_sum(acc[i]) + offsets[i]


cdef void _dot4_q8_0_floats(
    const uint8_t* rows, Py_ssize_t row_bytes, const Activation* x, Py_ssize_t n, float* sums
) noexcept nogil:
    cdef q_f32x8 acc[4 * DOT_VECTORS]
    cdef q_f32x8 weights[4]
    cdef const uint8_t* block
    cdef float scale
    cdef Py_ssize_t b, v
    cdef int r, i
    for i in range(4 * n):
        acc[i] = q_set(0)
    for b in range(x.cols // BLOCK):
        for r in range(4):
            block = rows + r * row_bytes + b * Q8_0_BYTES
            scale = q_half(block)
            for i in range(4):
                weights[i] = q_load_i8x8(block + 2 + 8 * i)
            for v in range(n):
                _add_block(weights, scale, x[v].values + b * BLOCK, acc + 4 * v + r)
    for i in range(4 * n):
        sums[i] = q_sum(acc[i])


cdef inline void _add_block(
    const q_f32x8* weights, float scale, const float* x, q_f32x8* acc
) noexcept nogil:
    """acc: IN/OUT (8,) plus scale times a block's weights (32,) times x (32,)."""
    cdef q_f32x8 dot = q_mul(weights[0], q_load(x))
    cdef int i
    for i in range(1, 4):
        dot = q_fma(weights[i], q_load(x + 8 * i), dot)
    acc[0] = q_fma(q_set(scale), dot, acc[0])


cdef void _dot4_f16(
    const uint8_t* rows, Py_ssize_t row_bytes, const Activation* x, Py_ssize_t n, float* sums
) noexcept nogil:
    cdef q_f32x8 acc[4]
    cdef Py_ssize_t whole = x.cols - x.cols % 8, c, v
    cdef int r
    for v in range(n):
        for r in range(4):
            acc[r] = q_set(0)
        for c in range(0, whole, 8):
            for r in range(4):
                acc[r] = q_fma(q_load_f16(rows + r * row_bytes + 2 * c), q_load(x[v].values + c), acc[r])
        for r in range(4):
            sums[4 * v + r] = q_sum(acc[r])
            for c in range(whole, x.cols):
                sums[4 * v + r] += q_half(rows + r * row_bytes + 2 * c) * x[v].values[c]


cdef void _dot4_f32(
    const uint8_t* rows, Py_ssize_t row_bytes, const Activation* x, Py_ssize_t n, float* sums
) noexcept nogil:
    cdef q_f32x8 acc[4]
    cdef const float* row
    cdef Py_ssize_t whole = x.cols - x.cols % 8, c, v
    cdef int r
    for v in range(n):
        for r in range(4):
            acc[r] = q_set(0)
        for c in range(0, whole, 8):
            for r in range(4):
                row = <const float*> (rows + r * row_bytes)
                acc[r] = q_fma(q_load(row + c), q_load(x[v].values + c), acc[r])
        for r in range(4):
            row = <const float*> (rows + r * row_bytes)
            sums[4 * v + r] = q_sum(acc[r])
            for c in range(whole, x.cols):
                sums[4 * v + r] += row[c] * x[v].values[c]


# --- products ---

cdef void _multiply_rows(
    const Product* product, Py_ssize_t start, Py_ssize_t stop, const Activation* x, Py_ssize_t n
) noexcept nogil:
    """Rows [start, stop) of a product. A row group stays in cache for the whole batch, so the
    weights are read from memory once; a tail of fewer than four goes row by row."""
    cdef float sums[4 * DOT_VECTORS]
    cdef Py_ssize_t row = start, count, vectors, first, v
    while row < stop:
        count = 4 if row + 4 <= stop else 1
        first = 0
        while first < n:
            vectors = min(n - first, <Py_ssize_t> DOT_VECTORS)
            product.dot4(
                product.weights + row * product.row_bytes,
                product.row_bytes if count == 4 else 0, x + first, vectors, sums,
            )
            for v in range(vectors):
                _put(product.targets + first + v, row, sums + 4 * v, count)
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
    cdef Py_ssize_t share = (rows // (TASKS_PER_THREAD * threads) + 3) // 4 * 4
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


cdef class Matrix:
    """A weight matrix (rows, cols) in its file's format.

    Parameters
    ----------
    name : str
    kind : {"F32", "F16", "Q8_0", "Q4_1"}
    rows, cols : int
        ``cols`` is a multiple of 32 for Q8_0 and Q4_1.
    data : uint8 (nbytes,)
        Kept alive, never copied; may be read-only.

    Attributes
    ----------
    block_bytes : int
        Bytes of a block of 32 weights, 0 for F32 and F16.
    """

    def __cinit__(self, str name, str kind, Py_ssize_t rows, Py_ssize_t cols, data):
        self.name = name
        self.kind = kind
        self.rows = rows
        self.cols = cols
        if kind == "F32":
            self.row_bytes = 4 * cols
            self.quantised_dot4 = self.float_dot4 = _dot4_f32
        elif kind == "F16":
            self.row_bytes = 2 * cols
            self.quantised_dot4 = self.float_dot4 = _dot4_f16
        elif kind == "Q8_0":
            self.block_bytes = Q8_0_BYTES
            self.row_bytes = cols // BLOCK * Q8_0_BYTES
            self.quantised_dot4 = kv_dot4_q8_0_bytes
            self.float_dot4 = _dot4_q8_0_floats
        elif kind == "Q4_1":
            self.block_bytes = Q4_1_BYTES
            self.row_bytes = cols // BLOCK * Q4_1_BYTES
            self.quantised_dot4 = kv_dot4_q4_1_bytes
            self.float_dot4 = _dot4_q4_1_floats
        else:
            raise ValueError(f"{name} has kind {kind!r}; allowed: F32, F16, Q8_0, Q4_1")
        if rows < 1 or cols < 1 or (kind.startswith("Q") and cols % BLOCK):
            raise ValueError(
                f"{name} has shape ({rows}, {cols}); {kind} needs at least one row and, in blocks "
                f"of {BLOCK}, whole rows"
            )
        self._bytes = data
        if self._bytes.shape[0] != rows * self.row_bytes:
            raise ValueError(
                f"{name} has {self._bytes.shape[0]} bytes; {kind} of shape ({rows}, {cols}) takes "
                f"{rows * self.row_bytes}"
            )
        self.data = &self._bytes[0]

    @property
    def nbytes(self):
        """Bytes of the weights as stored."""
        return self._bytes.shape[0]

    cdef Product product(self, const Target* targets, bint quantised) noexcept nogil:
        cdef Product p
        p.weights = self.data
        p.rows = self.rows
        p.row_bytes = self.row_bytes
        p.dot4 = self.quantised_dot4 if quantised else self.float_dot4
        p.targets = targets
        return p

    cdef void dequantise_row(self, Py_ssize_t row, float* out) noexcept nogil:
        cdef const uint8_t* block = self.data + row * self.row_bytes
        cdef int8_t spread[BLOCK]
        cdef const void* values
        cdef float scale, offset
        cdef Py_ssize_t b, c
        cdef int i
        if self.row_bytes == 4 * self.cols:
            memcpy(out, block, self.row_bytes)
        elif self.row_bytes == 2 * self.cols:
            for c in range(self.cols):
                out[c] = q_half(block + 2 * c)
        else:
            for b in range(self.cols // BLOCK):
                scale = q_half(block)
                if self.block_bytes == Q4_1_BYTES:
                    offset = q_half(block + 2)
                    q_spread_nibbles(block + 4, spread)
                    values = spread
                    block += Q4_1_BYTES
                else:
                    offset = 0
                    values = block + 2
                    block += Q8_0_BYTES
                for i in range(0, BLOCK, 8):
                    q_store(
                        out + b * BLOCK + i,
                        q_fma(q_set(scale), q_load_i8x8(<const int8_t*> values + i), q_set(offset)),
                    )

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
