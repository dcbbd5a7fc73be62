"""K1C's kernel: the text of K1's, which CMake gives to clang. Where clang is missing this module is too."""

include "_kernels_simd.pyx"
