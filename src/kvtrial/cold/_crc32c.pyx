"""CRC32C (Castagnoli), eight bytes at a step: what RocksDB puts over the records of its logs."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint8_t, uint32_t

cdef uint32_t[8][256] TABLE


cdef void fill_table() noexcept:
    cdef uint32_t i, crc
    cdef int step, _
    for i in range(256):
        crc = i
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        TABLE[0][i] = crc
    for i in range(256):
        for step in range(1, 8):
            TABLE[step][i] = (TABLE[step - 1][i] >> 8) ^ TABLE[0][TABLE[step - 1][i] & 0xFF]


fill_table()


cdef uint32_t summed(const uint8_t *data, size_t n) noexcept nogil:
    cdef uint32_t crc = 0xFFFFFFFF
    while n >= 8:
        crc ^= data[0] | data[1] << 8 | data[2] << 16 | <uint32_t>data[3] << 24
        crc = (
            TABLE[7][crc & 0xFF] ^ TABLE[6][crc >> 8 & 0xFF] ^ TABLE[5][crc >> 16 & 0xFF]
            ^ TABLE[4][crc >> 24] ^ TABLE[3][data[4]] ^ TABLE[2][data[5]]
            ^ TABLE[1][data[6]] ^ TABLE[0][data[7]]
        )
        data += 8
        n -= 8
    while n:
        crc = crc >> 8 ^ TABLE[0][(crc ^ data[0]) & 0xFF]
        data += 1
        n -= 1
    return ~crc


def crc32c(buffer):
    """The sum of a buffer of bytes, as an int below 2**32."""
    cdef Py_buffer view
    cdef uint32_t crc
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        with nogil:
            crc = summed(<const uint8_t *>view.buf, view.len)
        return crc
    finally:
        PyBuffer_Release(&view)
