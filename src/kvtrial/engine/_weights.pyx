"""Weights, and products with them.

A `Matrix` stays quantised: it is packed once, from whatever kind the file has (units.h), into panels of
eight rows in one of five forms (panels.h), and no weight moves. F16 and F32 stay as they lie in the file,
BF16 becomes F32. `dequantise` writes rows as float32 (embedding rows, GEMM tiles of
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
        KINDS "KV_KINDS"
    ctypedef struct Form "kv_form":
        const char* name
        int units
        int bytes
        dot8_t with_bytes
        dot8_t with_floats
        void (*row)(const uint8_t* panel, int r, Py_ssize_t units, float* out) noexcept nogil
    ctypedef int (*pack_t "kv_pack_fn")(
        const uint8_t* rows, Py_ssize_t row_bytes, Py_ssize_t n, Py_ssize_t units, uint8_t* panel
    ) noexcept nogil
    ctypedef struct Kind "kv_kind":
        const char* name
        int form
        int units
        int bytes
        pack_t pack
    const Form* FORMS "kv_forms"
    const Kind* ALL_KINDS "kv_kinds"

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


cdef const Kind* _kind_of(str name) except? NULL:
    """The record of a quantised kind; NULL for those that have no blocks."""
    cdef int i
    for i in range(KINDS):
        if ALL_KINDS[i].name == name.encode():
            return ALL_KINDS + i
    return NULL


def form_of(str kind):
    """What a kind is packed into: the name of a form of panels.h, ``F32`` or ``F16``."""
    cdef const Kind* found = _kind_of(kind)
    if found == NULL:
        return "F32" if kind == "BF16" else kind
    return FORMS[found.form].name.decode()


def packed_nbytes(str kind, Py_ssize_t rows, Py_ssize_t cols):
    """Bytes that a matrix of a kind takes in memory: whole panels, or rows of F32 and F16."""
    cdef const Kind* found = _kind_of(kind)
    cdef Py_ssize_t whole = (rows + PANEL_ROWS - 1) // PANEL_ROWS * PANEL_ROWS
    if found == NULL:
        return rows * cols * (2 if kind == "F16" else 4)
    return whole * (cols // (BLOCK * FORMS[found.form].units)) * FORMS[found.form].bytes


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
        self.halves = np.zeros((batch, max(2 * blocks, 1)), np.float32)
        self.items = <Activation*> calloc(batch, sizeof(Activation))
        if self.items == NULL:
            raise MemoryError(f"no memory for {batch} activations")
        for b in range(batch):
            self.items[b].cols = cols
            self.items[b].values = &self.values[b, 0]
            self.items[b].bytes = &self.bytes[b, 0]
            self.items[b].pairs = &self.pairs[b, 0]
            self.items[b].sums = &self.sums[b, 0]
            self.items[b].halves = &self.halves[b, 0]

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
                    quantise_unit(
                        x, &self.bytes[b, i * BLOCK], &self.pairs[b, 2 * i], &self.halves[b, 2 * i]
                    )
                else:
                    self.sums[b, i] = q_sum(
                        q_add(
                            q_add(q_load(x), q_load(x + 8)), q_add(q_load(x + 16), q_load(x + 24))
                        )
                    )
                    self.halves[b, 2 * i] = q_sum(q_add(q_load(x), q_load(x + 8)))
                    self.halves[b, 2 * i + 1] = q_sum(q_add(q_load(x + 16), q_load(x + 24)))


cdef void quantise_unit(const float* x, int8_t* out, float* pair, float* halves) noexcept nogil:
    """A unit (32,) as bytes; pair: OUT scale, scale * sum of the bytes; halves: OUT scale * sum of 16 bytes
    each. A value that is not finite makes the scale NaN, so that it surfaces in every logit instead of as a
    wrong number."""
    cdef q_f32x8 a, largest = q_set(0), spread = q_set(0)
    cdef float peak, scale, inverse
    cdef int i
    cdef int[2] total = [0, 0]
    for i in range(0, BLOCK, 8):
        a = q_load(x + i)
        spread = q_fma(a, q_set(0), spread)  # NaN for NaN and inf, else 0
        largest = q_max(largest, q_max(a, q_mul(a, q_set(-1))))
    peak = q_max_lane(largest)
    # Below this the reciprocal would overflow; such a block is zero beside any other.
    scale = peak / 127 if peak > 1e-30 else 0
    inverse = 1 / scale if scale > 0 and isfinite(scale) else 0
    for i in range(0, BLOCK, 8):
        total[i // 16] += q_round_i8x8(q_mul(q_load(x + i), q_set(inverse)), out + i)
    scale += q_sum(spread)
    pair[0] = scale
    pair[1] = scale * (total[0] + total[1])
    halves[0] = scale * total[0]
    halves[1] = scale * total[1]


cdef struct _Packing:
    pack_t pack  # NULL: BF16, or rows that are copied as they are
    const uint8_t* rows
    Py_ssize_t row_bytes, n_rows, units, packed_row_bytes
    uint8_t* out
    int left  # an offset was none that fp16 holds


cdef void _pack_panel(void* context, int64_t panel) noexcept nogil:
    """Eight rows into a panel, or as they are."""
    cdef _Packing* job = <_Packing*> context
    cdef Py_ssize_t row = panel * PANEL_ROWS, n = min(<Py_ssize_t> PANEL_ROWS, job.n_rows - row), i
    cdef const uint8_t* rows = job.rows + row * job.row_bytes
    cdef uint8_t* out = job.out + row * job.packed_row_bytes
    if job.pack != NULL:
        if job.pack(rows, job.row_bytes, n, job.units, out):
            job.left = 1  # whoever sets it sets the same
    elif job.packed_row_bytes == job.row_bytes:
        memcpy(out, rows, n * job.row_bytes)
    else:
        for i in range(n * job.row_bytes // 2):  # the upper half of a float32, which is little endian
            out[4 * i] = out[4 * i + 1] = 0
            out[4 * i + 2] = rows[2 * i]
            out[4 * i + 3] = rows[2 * i + 1]


cdef class Matrix:
    """A weight matrix (rows, cols) of a kind of GGUF, those with blocks in panels.

    Parameters
    ----------
    name : str
    kind : str
        The name of a `kvtrial.engine.kinds.TensorKind`.
    rows, cols : int
        ``cols`` is a multiple of the kind's block.
    data : uint8 (nbytes,)
        As the file has it; may be read-only. It is copied.
    room : uint8 (packed_nbytes,), optional
        Where the weights are copied to; made here where it is not given.
    threads : int
        That pack it.

    Attributes
    ----------
    form : int
        Index in panels.h's forms; -1 for F32 and F16.

    Raises
    ------
    ValueError
        A kind, shape or size that is none.
    OverflowError
        An offset of a block is past what fp16 holds.
    """

    def __cinit__(
        self, str name, str kind, Py_ssize_t rows, Py_ssize_t cols, const uint8_t[::1] data, room=None,
        int threads=1,
    ):
        cdef const Kind* blocks = _kind_of(kind)
        cdef Py_ssize_t unit = 1, in_file
        self.name = name
        self.kind = kind
        self.rows = rows
        self.cols = cols
        self.form = -1
        if blocks != NULL:
            self.form = blocks.form
            unit = BLOCK * blocks.units
            self.quantised_dot8 = FORMS[self.form].with_bytes
            self.float_dot8 = FORMS[self.form].with_floats
        elif kind in ("F32", "BF16"):
            self.quantised_dot8 = self.float_dot8 = _dot8_f32
        elif kind == "F16":
            self.quantised_dot8 = self.float_dot8 = _dot8_f16
        else:
            names = [ALL_KINDS[i].name.decode() for i in range(KINDS)]
            raise ValueError(f"{name} has kind {kind!r}; allowed: F32, F16, BF16, {', '.join(names)}")
        if rows < 1 or cols < 1 or cols % unit:
            raise ValueError(
                f"{name} has shape ({rows}, {cols}); {kind} needs at least one row, and rows of whole "
                f"blocks of {unit}"
            )
        if blocks == NULL:
            in_file = cols * (4 if kind == "F32" else 2)
            self.row_bytes = cols * (2 if kind == "F16" else 4)
        else:
            in_file = cols // unit * blocks.bytes
            self.row_bytes = cols // (BLOCK * FORMS[self.form].units) * FORMS[self.form].bytes
        if data.shape[0] != rows * in_file:
            raise ValueError(
                f"{name} has {data.shape[0]} bytes; {kind} of shape ({rows}, {cols}) takes "
                f"{rows * in_file}"
            )
        if threads < 1:
            raise ValueError(f"threads is {threads}; give at least 1")
        self._bytes = self._copied(data, in_file, room, threads)
        self.data = &self._bytes[0]

    cdef object _copied(self, const uint8_t[::1] data, Py_ssize_t file_row_bytes, object room, int threads):
        """A file's rows in memory of one's own, blocks as panels: a file that is written to or cut while its
        map is read would change the weights, or end the process by SIGBUS."""
        cdef Py_ssize_t nbytes = packed_nbytes(self.kind, self.rows, self.cols)
        cdef uint8_t[::1] packed = np.empty(nbytes, np.uint8) if room is None else room
        cdef const Kind* blocks = _kind_of(self.kind)
        cdef _Packing job
        if packed.shape[0] != nbytes:
            raise ValueError(
                f"room for {self.name} has {packed.shape[0]} bytes; it takes {nbytes}"
            )
        job.pack = NULL if blocks == NULL else blocks.pack
        job.rows, job.row_bytes, job.n_rows = &data[0], file_row_bytes, self.rows
        job.units, job.packed_row_bytes, job.out = self.cols // BLOCK, self.row_bytes, &packed[0]
        job.left = 0
        with nogil:
            parallel_for(_pack_panel, &job, (self.rows + PANEL_ROWS - 1) // PANEL_ROWS, threads)
        if job.left:
            raise OverflowError(f"{self.name} has offsets past what FP16 holds")
        return packed

    cdef Product product(self, const Target* targets, bint quantised) noexcept nogil:
        cdef Product p
        p.weights = self.data
        p.rows = self.rows
        p.row_bytes = self.row_bytes
        p.panels = self.form >= 0
        p.dot8 = self.quantised_dot8 if quantised else self.float_dot8
        p.targets = targets
        return p

    cdef void dequantise_row(self, Py_ssize_t row, float* out) noexcept nogil:
        cdef const uint8_t* at = self.data + row * self.row_bytes
        cdef Py_ssize_t c
        if self.form >= 0:
            c = row % PANEL_ROWS
            FORMS[self.form].row(at - c * self.row_bytes, c, self.cols // BLOCK, out)
        elif self.row_bytes == 4 * self.cols:
            memcpy(out, at, self.row_bytes)
        else:
            for c in range(self.cols):
                out[c] = q_half(at + 2 * c)

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
            Quantise x per 32 first, for weights in panels; F16 and F32 take x as it is.
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
