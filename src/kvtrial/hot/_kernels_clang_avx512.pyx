"""K1C's kernel with vectors of sixteen floats, for heads of whole vectors alone."""

include "_kernels_simd.pyx"
