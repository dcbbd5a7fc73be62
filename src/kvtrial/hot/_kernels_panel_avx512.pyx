"""K1T's and K2T's kernel with vectors of sixteen floats, for heads of whole vectors alone."""

include "_kernels_panel_simd.pyx"
