"""K1C's kernel: the text of K1's, which CMake gives to clang. Where clang is missing this module is too."""

from cpython.pycapsule cimport PyCapsule_New

from kvtrial.hot._kernel cimport KV_KERNEL_CAPSULE

include "_kernels_simd.pyx"


def kernel_capsule():
    """K1's kernel over FP32 pages as clang compiles it, a ``kv_span_fn`` in a PyCapsule."""
    return PyCapsule_New(<void *>span_fp32, KV_KERNEL_CAPSULE, NULL)
