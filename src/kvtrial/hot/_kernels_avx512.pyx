"""K1's, K2's and K5's kernel with vectors of sixteen floats, where CMake finds AVX-512."""

include "_kernels_simd.pyx"
