"""The probes' fixed work, without the interpreter in it. See `kvtrial.measure.probes`."""

from libc.stdint cimport uint64_t


cdef extern from "probe_loops.h" nogil:
    uint64_t probe_spin(uint64_t seed, size_t links)
    uint64_t probe_read(const uint64_t *data, size_t n)
    float probe_fma(float factor, float addend, size_t rounds)
    enum:
        PROBE_FMA_FLOPS


#: Floating-point operations of one round of `fma`.
FMA_FLOPS = PROBE_FMA_FLOPS


def spin(uint64_t seed, size_t links):
    """``links`` dependent multiply-adds on 64-bit integers, starting at ``seed``."""
    cdef uint64_t x
    with nogil:
        x = probe_spin(seed, links)
    return x


def read(const uint64_t[::1] data):
    """Sum (mod 2**64) of ``data`` uint64 (n,), n a multiple of 64, in one ascending pass."""
    cdef uint64_t total
    if data.shape[0] % 64:
        raise ValueError(f"read got {data.shape[0]} words; give a multiple of 64")
    if data.shape[0] == 0:
        return 0
    with nogil:
        total = probe_read(&data[0], data.shape[0])
    return total


def fma(float factor, float addend, size_t rounds):
    """``rounds`` times x = x * factor + addend on ten chains, from 1 to 10 addends; a lane's sum."""
    cdef float x
    with nogil:
        x = probe_fma(factor, addend, rounds)
    return x
