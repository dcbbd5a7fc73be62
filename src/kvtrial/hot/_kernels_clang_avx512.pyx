"""K1C's kernel with vectors of sixteen floats, where CMake finds AVX-512."""

include "_kernels_simd.pyx"
