/* Counts allocation calls and copied bytes, for `kvtrial.measure.allocations`: loaded before the C
 * library (LD_PRELOAD) it stands in front of malloc and its kin, and of memcpy and memmove. glibc
 * only; its own entry points are called directly, so nothing is looked up (a look-up would
 * allocate). */
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
static __thread uint64_t bytes_here __attribute__((tls_model("initial-exec")));
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

EXPORT uint64_t kvtrial_copied_bytes_here(void) { return bytes_here; }

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

/* What code that was compiled for large files calls, Python and every Cython module among it. */
EXPORT void *mmap64(void *address, size_t length, int protection, int flags, int fd, off64_t offset)
{
    return mmap(address, length, protection, flags, fd, (off_t)offset);
}

/* Forwards, or backwards where the end of the source would be overwritten. The barrier keeps the
 * compiler from making a call to memmove, which is this very function, out of the loop. */
EXPORT void *memmove(void *to, const void *from, size_t size)
{
    unsigned char *out = to;
    const unsigned char *in = from;
    bytes_here += size;
    if (out == in)
        return to;
#if defined(__x86_64__)
    if (out < in || out >= in + size) {
        void *rest = to;
        __asm__ volatile("rep movsb" : "+D"(rest), "+S"(from), "+c"(size) : : "memory");
        return to;
    }
#endif
    if (out < in) {
        for (size_t i = 0; i < size; i++) {
            out[i] = in[i];
            __asm__ volatile("" : : : "memory");
        }
    } else {
        while (size--) {
            out[size] = in[size];
            __asm__ volatile("" : : : "memory");
        }
    }
    return to;
}

EXPORT void *memcpy(void *restrict to, const void *restrict from, size_t size)
{
    return memmove(to, from, size);
}
