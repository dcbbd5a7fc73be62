"""Rows in and out of pages: the only place that knows how a row is stored, and where in its page."""

from libc.math cimport INFINITY, fabsf, isfinite
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint16_t
from libc.string cimport memcpy, memset

from kvtrial.hot._simd cimport (
    kv_add,
    kv_fma,
    kv_from_half,
    kv_hmax,
    kv_hsum,
    kv_load_head,
    kv_max,
    kv_mul,
    kv_splat,
    kv_store_int16,
    kv_sub,
    kv_to_half,
    kv_zero,
    vector,
)


cdef enum Format:
    FP32, FP16, Q8_0


cdef enum:
    STEP_CANDIDATES = 16  # halves from max / 127 upwards; 1.5 % of it at most


# The rows of one head in one page: a K tile, then a V tile of as many bytes. V rows lie one after the
# other, and so do those of K; `transposed` (not Q8_0), K lies [head_dim][token].
ctypedef struct Layout:
    Format form
    bint transposed
    int64_t tokens, dim
    int64_t row_bytes, tile_bytes


cdef inline int64_t row_nbytes(Format form, int64_t dim) noexcept nogil:
    """Bytes of one row of one head as it lies in a page."""
    if form == FP32:
        return (dim + 7) // 8 * 32
    if form == FP16:
        return (dim + 7) // 8 * 16
    return (dim + 31) // 32 * 34


cdef inline Layout page_layout(
    Format form, int64_t tokens, int64_t dim, bint transposed
) noexcept nogil:
    cdef Layout layout
    layout.form, layout.transposed = form, transposed
    layout.tokens, layout.dim = tokens, dim
    layout.row_bytes = row_nbytes(form, dim)
    layout.tile_bytes = tokens * layout.row_bytes
    return layout


cdef inline int64_t first_unfit(Format form, const float *row, int64_t n) noexcept nogil:
    """Index of the first value that the format can't hold, or -1."""
    cdef int64_t i
    if form == FP16:
        for i in range(n):
            if isfinite(row[i]) and fabsf(row[i]) >= 65520:
                return i
    elif form == Q8_0:
        for i in range(n):
            # The scale is the block's largest value / 127.
            if not (fabsf(row[i]) / 127 < 65520):
                return i
    return -1


cdef inline vector q8_steps(vector x, float step) noexcept nogil:
    """x in whole steps, to nearest, at most 127 of them: a step that rounded down may ask for 128."""
    cdef vector low = kv_splat(-127), shift = kv_splat(12582912)  # 1.5 * 2^23: no fraction is left
    x = kv_max(kv_mul(x, kv_splat(1 / step)), low)
    x = kv_sub(kv_zero(), kv_max(kv_sub(kv_zero(), x), low))
    return kv_sub(kv_add(x, shift), shift)


cdef inline uint16_t best_step(const vector *x, uint16_t smallest) noexcept nogil:
    """Of some halves from ``smallest`` up, the step with the least squared error over 32 elements.

    They all leave errors up to half a step, but how the elements fall between the steps differs:
    the best of 16 takes an eighth off the squared error of the plain max / 127.
    """
    cdef uint16_t best = smallest, half
    cdef float least = INFINITY, error, step
    cdef vector sums, off
    cdef int32_t i
    for half in range(smallest, min(smallest + STEP_CANDIDATES, 0x7C00)):
        step = kv_from_half(half)
        sums = kv_zero()
        for i in range(4):
            off = kv_fma(q8_steps(x[i], step), kv_splat(-step), x[i])
            sums = kv_fma(off, off, sums)
        error = kv_hsum(sums)
        if error < least:
            least, best = error, half
    return best


cdef inline void write_q8(unsigned char *at, const float *row, int64_t dim) noexcept nogil:
    cdef int64_t block
    cdef int32_t i
    cdef vector[4] x
    cdef vector most
    cdef uint16_t half
    cdef int16_t[32] steps
    for block in range((dim + 31) // 32):
        most = kv_zero()
        for i in range(4):
            x[i] = kv_load_head(
                row + 32 * block + 8 * i,
                <int32_t>max(min(dim - 32 * block - 8 * i, 8), 0),
            )
            most = kv_max(kv_max(x[i], kv_sub(kv_zero(), x[i])), most)
        half = kv_to_half(kv_hmax(most) / 127)
        # Below half of the smallest half there is nothing but zeros.
        if half:
            half = best_step(x, half)
        memcpy(at + 34 * block, &half, 2)
        for i in range(4):
            kv_store_int16(
                steps + 8 * i, q8_steps(x[i], kv_from_half(half)) if half else kv_zero()
            )
        for i in range(32):
            (<int8_t *>at)[34 * block + 2 + i] = <int8_t>steps[i]


cdef inline void write_row(
    Format form, unsigned char *at, const float *row, int64_t dim
) noexcept nogil:
    """One head's row; what stands behind ``dim`` is left as it was."""
    cdef int64_t i
    if form == FP32:
        memcpy(at, row, dim * sizeof(float))
    elif form == FP16:
        for i in range(dim):
            (<uint16_t *>at)[i] = kv_to_half(row[i])
    else:
        write_q8(at, row, dim)


cdef inline void read_row(
    Format form, float *row, const unsigned char *at, int64_t dim
) noexcept nogil:
    """One head's row as FP32."""
    cdef int64_t i
    cdef uint16_t half
    cdef float scale = 0
    if form == FP32:
        memcpy(row, at, dim * sizeof(float))
    elif form == FP16:
        for i in range(dim):
            row[i] = kv_from_half((<const uint16_t *>at)[i])
    else:
        for i in range(dim):
            if i % 32 == 0:
                memcpy(&half, at + 34 * (i // 32), 2)
                scale = kv_from_half(half)
            row[i] = scale * (<const int8_t *>at)[34 * (i // 32) + 2 + i % 32]


cdef inline int64_t element_nbytes(Format form) noexcept nogil:
    """Bytes of one element; Q8_0 has none of its own."""
    return sizeof(float) if form == FP32 else sizeof(uint16_t)


cdef inline int64_t key_offset(const Layout *layout, int64_t row) noexcept nogil:
    """Bytes from the beginning of a K tile to the first element of a row."""
    return row * (element_nbytes(layout.form) if layout.transposed else layout.row_bytes)


cdef inline int64_t key_step(const Layout *layout) noexcept nogil:
    """Bytes from one element of a K row to the next, but for Q8_0."""
    return (layout.tokens if layout.transposed else 1) * element_nbytes(layout.form)


cdef inline void write_pair(
    const Layout *layout, unsigned char *tiles, int64_t row, const float *k, const float *v
) noexcept nogil:
    """K and V row of the head whose K tile begins at ``tiles``."""
    cdef unsigned char *key = tiles + key_offset(layout, row)
    # Not read from the layout for each element: what is written might be it, for all that C knows.
    cdef Format form = layout.form
    cdef int64_t i, dim = layout.dim, step = key_step(layout)
    if layout.transposed:
        for i in range(dim):
            write_row(form, key + i * step, k + i, 1)
    else:
        write_row(layout.form, key, k, layout.dim)
    write_row(layout.form, tiles + layout.tile_bytes + row * layout.row_bytes, v, layout.dim)


cdef inline void read_pair(
    const Layout *layout, float *k, float *v, const unsigned char *tiles, int64_t row
) noexcept nogil:
    """The head's K and V row as FP32."""
    cdef const unsigned char *key = tiles + key_offset(layout, row)
    cdef Format form = layout.form
    cdef int64_t i, dim = layout.dim, step = key_step(layout)
    if layout.transposed:
        for i in range(dim):
            read_row(form, k + i, key + i * step, 1)
    else:
        read_row(layout.form, k, key, layout.dim)
    read_row(layout.form, v, tiles + layout.tile_bytes + row * layout.row_bytes, layout.dim)


cdef inline void fill_pair(
    const Layout *layout, unsigned char *tiles, int64_t row, int byte
) noexcept nogil:
    """One byte into all of the head's K and V row and their padding; 0xFF is NaN in every format."""
    cdef unsigned char *key = tiles + key_offset(layout, row)
    cdef int64_t i
    if layout.transposed:
        for i in range(layout.row_bytes // element_nbytes(layout.form)):
            memset(key + i * key_step(layout), byte, element_nbytes(layout.form))
    else:
        memset(key, byte, layout.row_bytes)
    memset(tiles + layout.tile_bytes + row * layout.row_bytes, byte, layout.row_bytes)
