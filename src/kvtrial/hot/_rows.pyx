"""The layout of a format's rows in a page; see _rows.pxd."""

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid

from kvtrial.contract import InvalidArgument
from kvtrial.contract.arguments import shown

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
        Its ``kv_rows`` lacks a function, or says what no row can take.
    CandidateNotBuilt
        The format gives no ``kv_rows``.
    """

    def __init__(self, format, int64_t tokens, int64_t dim):
        self._rows = format.native("rows")
        self.c.rows = <const kv_rows *>from_capsule(
            self._rows, f"rows of format {format.name}", KV_ROWS_CAPSULE
        )
        self.check(format, dim)
        self.c.tiles.page_tokens, self.c.tiles.head_dim = tokens, dim
        self.c.tiles.row_bytes = self.c.rows.row_bytes(self.c.rows, dim)
        self.c.pair_bytes = 2 * tokens * self.c.tiles.row_bytes

    cdef int check(self, object format, int64_t dim) except -1:
        """`InvalidArgument` for what would lead out of a page."""
        cdef const kv_rows *rows = self.c.rows
        cdef int64_t row
        if not rows.row_bytes or not rows.first_unfit or not rows.write or not rows.read:
            raise InvalidArgument(
                f"rows of format {format.name} lacks a function; give row_bytes, first_unfit, write and read"
            )
        row = rows.row_bytes(rows, dim)
        if not 1 <= row <= MOST_ROW_BYTES:
            raise InvalidArgument(
                f"a row of format {format.name} takes {row} bytes at head_dim {dim}; allowed: 1 to "
                f"{MOST_ROW_BYTES}"
            )
        return 0

    @property
    def row_bytes(self):
        """Bytes of one row of one head, its padding included; the mean of K's and V's."""
        return self.c.tiles.row_bytes
