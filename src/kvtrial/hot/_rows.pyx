"""The layout of a format's rows in a page; see _rows.pxd."""

from cpython.pycapsule cimport PyCapsule_GetPointer

from kvtrial.contract import InvalidArgument


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
        K can't be transposed in this format.
    """

    def __init__(self, format, int64_t tokens, int64_t dim):
        self._rows = format.rows()
        self.c.rows = <const kv_rows *>PyCapsule_GetPointer(self._rows, KV_ROWS_CAPSULE)
        if format.transposed and not self.c.rows.element_bytes:
            raise InvalidArgument(
                f"format {format.name} is transposed, and its rows are blocks; only rows of elements can be"
            )
        self.c.transposed = format.transposed
        self.c.tokens, self.c.dim = tokens, dim
        self.c.row_bytes = self.c.rows.row_bytes(dim)
        self.c.tile_bytes = tokens * self.c.row_bytes

    @property
    def row_bytes(self):
        """Bytes of one row of one head, its padding included."""
        return self.c.row_bytes
