"""The thread pool, for Cython; see _threads.pyx."""

from libc.stdint cimport int64_t

ctypedef void (*kv_task_fn)(void *context, int64_t task) noexcept nogil

cdef void parallel_for(
    kv_task_fn task, void *context, int64_t n_tasks, int n_threads
) noexcept nogil
