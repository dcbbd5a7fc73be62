"""K1T's and K2T's kernel with vectors of sixteen floats, where CMake finds AVX-512."""

include "_kernels_panel_simd.pyx"
