from libc.stdint cimport int8_t, uint8_t

cdef extern from "panels.h" nogil:
    enum:
        BLOCK "KV_BLOCK"
        PANEL_ROWS "KV_PANEL_ROWS"
    ctypedef struct Activation "kv_activation":
        Py_ssize_t cols
        const float* values
        const int8_t* bytes
        const float* pairs
        const float* sums
        const float* halves


# A panel, or eight rows row_bytes apart (0: one row, eight times over), with n <= KV_DOT_VECTORS vectors.
# sums: OUT (n, 8).
ctypedef void (*dot8_t)(
    const uint8_t* rows, Py_ssize_t row_bytes, const Activation* x, Py_ssize_t n, float* sums
) noexcept nogil


cdef struct Target:
    # Where row r of a product goes: data[(r // inner) * outer_stride + (r % inner) * inner_stride].
    float* data
    Py_ssize_t inner
    Py_ssize_t outer_stride
    Py_ssize_t inner_stride


cdef struct Product:
    # out[b] = weights @ activation[b] for each of a batch.
    const uint8_t* weights
    Py_ssize_t rows
    Py_ssize_t row_bytes
    bint panels
    dot8_t dot8
    const Target* targets  # (batch,)


cdef class Matrix:
    cdef readonly str name
    cdef readonly str kind
    cdef readonly Py_ssize_t rows, cols, row_bytes
    cdef readonly int form
    cdef const uint8_t[::1] _bytes
    cdef const uint8_t* data
    cdef dot8_t quantised_dot8
    cdef dot8_t float_dot8

    cdef object _copied(self, const uint8_t[::1] data, Py_ssize_t file_row_bytes, object room, int threads)
    cdef void dequantise_row(self, Py_ssize_t row, float* out) noexcept nogil
    cdef Product product(self, const Target* targets, bint quantised) noexcept nogil


cdef class Activations:
    # Vectors of one region, prepared once and shared by every product in it.
    cdef readonly Py_ssize_t batch, cols
    cdef readonly bint quantised
    cdef float[:, ::1] values
    cdef int8_t[:, ::1] bytes
    cdef float[:, ::1] pairs
    cdef float[:, ::1] sums
    cdef float[:, ::1] halves
    cdef Activation* items

    cdef void prepare(self, Py_ssize_t n) noexcept nogil


cdef void quantise_unit(const float* x, int8_t* out, float* pair, float* halves) noexcept nogil


cdef void multiply(
    const Product* products, int n_products, const Activation* x, Py_ssize_t n, int threads
) noexcept nogil
