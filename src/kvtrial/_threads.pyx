"""The one thread pool of a process, for the weights and for every arm.

One, not one a module: a worker that has just finished waits busily for a while, so that the next job
finds it awake. Two pools would take the cores from each other just then, at every change between
attention and weights.
"""

cdef extern from "thread_pool.h" nogil:
    void kv_parallel_for(kv_task_fn task, void *context, int64_t n_tasks, int n_threads)


cdef void parallel_for(
    kv_task_fn task, void *context, int64_t n_tasks, int n_threads
) noexcept nogil:
    """``task(context, i)`` for each i in [0, n_tasks), on up to ``n_threads`` threads.

    The caller is one of them. Which thread runs a task varies: what a task does must depend on its
    index alone. From inside a task, or beside another call, it runs on the caller.
    """
    kv_parallel_for(task, context, n_tasks, n_threads)
