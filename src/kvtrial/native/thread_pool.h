/* A small persistent thread pool. Workers spin briefly, then block; none is made for n_threads = 1.

   One module includes this header, _threads.pyx, and lends the pool to all. One parallel_for runs at a
   time: a second caller, or a call from inside a task, runs its tasks itself. After fork the child starts
   without workers and makes its own when it needs them. Tasks are claimed by index, so which thread runs a
   task varies; a task's result must depend on its index alone.

   A job waits only for workers that are inside it. One that is not scheduled in time finds the gate
   closed and leaves the job alone: on a busy machine the caller does the work and does not wait. */
#ifndef KV_THREAD_POOL_H
#define KV_THREAD_POOL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#define KV_MAX_THREADS 256
#define KV_SPIN 4000
#define KV_CLOSED (1 << 30)

typedef void (*kv_task_fn)(void *context, int64_t task);

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    int workers; /* alive; only the holder of `busy` changes it */
    atomic_flag busy;
    _Atomic uint64_t job; /* counts jobs; a worker tries the gate when it moves */
    _Atomic int64_t next;
    /* Workers inside, and KV_CLOSED between jobs. The fields below change only while it is closed and
       nobody is inside; a worker reads them only if it came in while it was open. */
    _Atomic int gate;
    kv_task_fn task;
    void *context;
    int64_t n_tasks;
    int wanted; /* workers of this job: those with index < wanted */
} kv_pool = {
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
    .done = PTHREAD_COND_INITIALIZER,
    .busy = ATOMIC_FLAG_INIT,
    .gate = KV_CLOSED,
};

static inline void kv_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void kv_run_tasks(void) {
    int64_t task;
    while ((task = atomic_fetch_add(&kv_pool.next, 1)) < kv_pool.n_tasks)
        kv_pool.task(kv_pool.context, task);
}

typedef struct {
    int index;
    uint64_t seen;
} kv_worker_start;

static kv_worker_start kv_starts[KV_MAX_THREADS];

static void *kv_worker(void *argument) {
    const kv_worker_start *start = argument;
    const int index = start->index;
    uint64_t seen = start->seen;
    for (;;) {
        for (int i = 0; i < KV_SPIN && atomic_load(&kv_pool.job) == seen; i++) kv_pause();
        if (atomic_load(&kv_pool.job) == seen) {
            pthread_mutex_lock(&kv_pool.lock);
            while (atomic_load(&kv_pool.job) == seen) pthread_cond_wait(&kv_pool.wake, &kv_pool.lock);
            pthread_mutex_unlock(&kv_pool.lock);
        }
        /* A job that opens after this read moves `job` again: none is missed. */
        seen = atomic_load(&kv_pool.job);
        if (!(atomic_fetch_add(&kv_pool.gate, 1) & KV_CLOSED) && index < kv_pool.wanted) kv_run_tasks();
        if (atomic_fetch_sub(&kv_pool.gate, 1) == KV_CLOSED + 1) {
            pthread_mutex_lock(&kv_pool.lock);
            pthread_cond_signal(&kv_pool.done);
            pthread_mutex_unlock(&kv_pool.lock);
        }
    }
    return 0;
}

static void kv_forked(void) {
    pthread_mutex_init(&kv_pool.lock, 0);
    pthread_cond_init(&kv_pool.wake, 0);
    pthread_cond_init(&kv_pool.done, 0);
    kv_pool.workers = 0;
    atomic_store(&kv_pool.gate, KV_CLOSED);
    atomic_flag_clear(&kv_pool.busy);
}

/* Runs task(context, i) for every i in [0, n_tasks) on up to n_threads threads, the caller among them. */
static void kv_parallel_for(kv_task_fn task, void *context, int64_t n_tasks, int n_threads) {
    if (n_threads > n_tasks) n_threads = (int)n_tasks;
    if (n_threads > KV_MAX_THREADS) n_threads = KV_MAX_THREADS;
    if (n_threads <= 1 || atomic_flag_test_and_set(&kv_pool.busy)) {
        for (int64_t i = 0; i < n_tasks; i++) task(context, i);
        return;
    }
    static int registered = 0;
    if (!registered) registered = pthread_atfork(0, 0, kv_forked) == 0;
    while (kv_pool.workers < n_threads - 1) {
        pthread_t thread;
        kv_worker_start *start = &kv_starts[kv_pool.workers];
        start->index = kv_pool.workers;
        start->seen = atomic_load(&kv_pool.job);
        if (pthread_create(&thread, 0, kv_worker, start)) break;
        pthread_detach(thread);
        kv_pool.workers++;
    }
    kv_pool.task = task;
    kv_pool.context = context;
    kv_pool.n_tasks = n_tasks;
    kv_pool.wanted = n_threads - 1;
    atomic_store(&kv_pool.next, 0);
    atomic_fetch_and(&kv_pool.gate, ~KV_CLOSED);
    pthread_mutex_lock(&kv_pool.lock);
    atomic_fetch_add(&kv_pool.job, 1);
    pthread_cond_broadcast(&kv_pool.wake);
    pthread_mutex_unlock(&kv_pool.lock);
    kv_run_tasks();
    atomic_fetch_or(&kv_pool.gate, KV_CLOSED);
    for (int i = 0; i < KV_SPIN && atomic_load(&kv_pool.gate) != KV_CLOSED; i++) kv_pause();
    if (atomic_load(&kv_pool.gate) != KV_CLOSED) {
        pthread_mutex_lock(&kv_pool.lock);
        while (atomic_load(&kv_pool.gate) != KV_CLOSED) pthread_cond_wait(&kv_pool.done, &kv_pool.lock);
        pthread_mutex_unlock(&kv_pool.lock);
    }
    atomic_flag_clear(&kv_pool.busy);
}

#endif
