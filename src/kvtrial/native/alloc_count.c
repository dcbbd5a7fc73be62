/* Counts allocation calls, for `kvtrial.measure.allocations`: loaded before the C library
 * (LD_PRELOAD) it stands in front of malloc and its kin. glibc only; its own entry points are called
 * directly, so nothing is looked up (a look-up would allocate). */
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

/* initial-exec: the loader reserves it at start-up, so that counting allocates nothing. */
static __thread uint64_t calls_here __attribute__((tls_model("initial-exec")));
static uint64_t calls_everywhere;

static inline void count(void)
{
    calls_here++;
    __atomic_fetch_add(&calls_everywhere, 1, __ATOMIC_RELAXED);
}

EXPORT uint64_t kvtrial_allocations_here(void) { return calls_here; }

EXPORT uint64_t kvtrial_allocations_everywhere(void)
{
    return __atomic_load_n(&calls_everywhere, __ATOMIC_RELAXED);
}

EXPORT void *malloc(size_t size)
{
    count();
    return __libc_malloc(size);
}

EXPORT void *calloc(size_t n, size_t size)
{
    count();
    return __libc_calloc(n, size);
}

EXPORT void *realloc(void *p, size_t size)
{
    count();
    return __libc_realloc(p, size);
}

EXPORT void *memalign(size_t alignment, size_t size)
{
    count();
    return __libc_memalign(alignment, size);
}

EXPORT void *aligned_alloc(size_t alignment, size_t size)
{
    count();
    return __libc_memalign(alignment, size);
}

EXPORT int posix_memalign(void **out, size_t alignment, size_t size)
{
    count();
    if (alignment < sizeof(void *) || (alignment & (alignment - 1)))
        return EINVAL;
    void *p = __libc_memalign(alignment, size);
    if (p == NULL)
        return ENOMEM;
    *out = p;
    return 0;
}

EXPORT void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset)
{
    count();
    return (void *)syscall(SYS_mmap, address, length, protection, flags, fd, offset);
}
