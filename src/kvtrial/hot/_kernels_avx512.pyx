"""K1's, K2's and K5's kernel with vectors of sixteen floats, for heads of whole vectors alone."""

include "_kernels_simd.pyx"
