"""What kernels are chosen by, as the CPU says it and the system has enabled it."""


cdef extern from *:
    """
    static int has_avx512(void) {
    #if defined(__x86_64__)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
               __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    #else
        return 0;
    #endif
    }
    """
    bint avx512 "has_avx512"() nogil


def has_avx512():
    """Whether this machine runs the kernels of sixteen lanes; rust/src/simd.rs asks the same."""
    return avx512()
