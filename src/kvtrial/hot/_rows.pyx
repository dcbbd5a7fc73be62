"""The layout of a format's rows in a page; see _rows.pxd."""

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid

from kvtrial.contract import InvalidArgument, shown

#: Bytes of a row at most: products with it stay far from 2^63.
cdef int64_t MOST_ROW_BYTES = 1 << 20


cdef void *from_capsule(object capsule, str what, const char *name) except NULL:
    """What a capsule of that name holds; `InvalidArgument` for anything else."""
    if not PyCapsule_IsValid(capsule, name):
        raise InvalidArgument(
            f"{what} gives {shown(capsule)}; give a PyCapsule named {name.decode()!r}"
        )
    return PyCapsule_GetPointer(capsule, name)


cdef class RowLayout:
    """A format's rows of a head in a page of so many tokens.

    Parameters
    ----------
    format : kvtrial.hot.formats.RowFormat
    tokens : int
        P.
    dim : int
        head_dim.

    Raises
    ------
    InvalidArgument
        K can't be transposed in this format, or its ``kv_rows`` says what no row can be.
    CandidateNotBuilt
        The format gives no ``kv_rows``.
    """

    def __init__(self, format, int64_t tokens, int64_t dim):
        self._rows = format.native("rows")
        self.c.rows = <const kv_rows *>from_capsule(
            self._rows, f"rows of format {format.name}", KV_ROWS_CAPSULE
        )
        self.check(format, dim)
        if format.transposed and not self.c.rows.element_bytes:
            raise InvalidArgument(
                f"format {format.name} is transposed, and its rows are blocks; only rows of elements can be"
            )
        self.c.transposed = format.transposed
        self.c.tokens, self.c.dim = tokens, dim
        self.c.row_bytes = self.c.rows.row_bytes(dim)
        self.c.tile_bytes = tokens * self.c.row_bytes

    cdef int check(self, object format, int64_t dim) except -1:
        """`InvalidArgument` for what would lead out of a page."""
        cdef const kv_rows *rows = self.c.rows
        cdef int64_t element = rows.element_bytes, row
        if not rows.row_bytes or not rows.first_unfit or not rows.write or not rows.read:
            raise InvalidArgument(
                f"rows of format {format.name} lacks a function; give row_bytes, first_unfit, write and read"
            )
        row = rows.row_bytes(dim)
        if not 1 <= row <= MOST_ROW_BYTES:
            raise InvalidArgument(
                f"a row of format {format.name} takes {row} bytes at head_dim {dim}; allowed: 1 to "
                f"{MOST_ROW_BYTES}"
            )
        if element < 0 or element > row // dim or (element and row % element):
            raise InvalidArgument(
                f"an element of format {format.name} takes {element} bytes, a row {row} at head_dim {dim}; "
                "allowed: a row of whole elements, at least head_dim of them, or 0 for blocks"
            )
        if format.in_place and element != sizeof(float):
            raise InvalidArgument(
                f"format {format.name} is in_place with elements of {element} bytes; allowed: float32"
            )
        return 0

    @property
    def row_bytes(self):
        """Bytes of one row of one head, its padding included."""
        return self.c.row_bytes
