/* A disk that fails on request, for `kvtrial.measure.cold.faults`: loaded before the C library (LD_PRELOAD) it
 * stands in front of the calls that write, sync, and read at a place, for files below one folder. RocksDB
 * goes through them as well. Linux and glibc.
 *
 * It counts writes and syncs; lets calls fail, write less than they were asked to, or kill the process; and
 * models a power cut: with a memory folder given, a sync copies the file there (or, of a folder, its names)
 * instead of asking the disk, so that what lies there is what would be left. RocksDB's own log of events
 * (LOG*) and lock files mean nothing and are left alone. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { WRITE = 0, SYNC = 1, ANY = 2, READ = 3 }; /* ANY: a write or a sync */
enum { DIE = -1, SHORT = -2 }; /* beside the numbers of errno */

static char folder[PATH_MAX], memory[PATH_MAX];
static long calls[4];
/* From the `after`-th call of its kind on: a write takes `keep` bytes first, then all fail. */
static struct { int kind, error; long after, keep; } plan = {.kind = ANY};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

EXPORT void kvtrial_disk_watch(const char *path, const char *remember)
{
    snprintf(folder, sizeof folder, "%s", path);
    snprintf(memory, sizeof memory, "%s", remember);
    calls[WRITE] = calls[SYNC] = 0;
    plan.error = 0;
}

EXPORT void kvtrial_disk_fail(int kind, int error, long after, long keep)
{
    /* A short write takes a byte at least: after one that takes none the caller tries again, for ever. */
    if (error == SHORT && keep < 1)
        keep = 1;
    pthread_mutex_lock(&lock);
    plan.kind = kind, plan.error = error, plan.after = after, plan.keep = keep;
    pthread_mutex_unlock(&lock);
}

EXPORT long kvtrial_disk_calls(int kind) { return calls[kind]; }

/* A file's identity, which an inode number alone is not: it is given again once a file is gone. */
EXPORT int kvtrial_disk_key(const char *path, char *key, size_t size)
{
    struct statx s;
    if (statx(AT_FDCWD, path, 0, STATX_INO | STATX_BTIME, &s))
        return -1;
    snprintf(key, size, "%llx-%llx-%x", (unsigned long long)s.stx_ino,
             (unsigned long long)s.stx_btime.tv_sec, s.stx_btime.tv_nsec);
    return 0;
}

static int is_watched(int fd, char *path)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = *folder ? readlink(link, path, PATH_MAX - 1) : -1;
    size_t head = strlen(folder);
    if (n < (ssize_t)head)
        return 0;
    path[n] = 0;
    if (strncmp(path, folder, head) || (path[head] && path[head] != '/'))
        return 0;
    const char *name = strrchr(path, '/') + 1;
    return strncmp(name, "LOG", 3) && strcmp(name, "LOCK");
}

static int put(int fd, const char *data, size_t n)
{
    while (n) {
        ssize_t done = syscall(SYS_write, fd, data, n);
        if (done < 0)
            return -1;
        data += done, n -= done;
    }
    return 0;
}

/* Copy what `path` holds now to where a power cut leaves it: bytes of a file, names of a folder. */
static int remember(int fd, const char *path)
{
    char key[64], link[64], beside[PATH_MAX + 80], kept[PATH_MAX + 80], buffer[1 << 16];
    struct stat s;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (fstat(fd, &s) || kvtrial_disk_key(link, key, sizeof key))
        return -1;
    if (!strcmp(path, folder))
        strcpy(key, "root");
    snprintf(kept, sizeof kept, "%s/%s", memory, key);
    snprintf(beside, sizeof beside, "%s/.%s.new", memory, key);
    int out = open(beside, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644), status = out < 0 ? -1 : 0;
    int in = open(link, O_RDONLY | O_CLOEXEC);
    if (S_ISDIR(s.st_mode)) {
        DIR *names = fdopendir(in);
        for (struct dirent *e; !status && names && (e = readdir(names));) {
            if (e->d_name[0] == '.' && (!e->d_name[1] || !strcmp(e->d_name, "..")))
                continue;
            char inside[PATH_MAX + 300];
            snprintf(inside, sizeof inside, "%s/%s", path, e->d_name);
            if (kvtrial_disk_key(inside, key, sizeof key))
                continue;
            int n = snprintf(buffer, sizeof buffer, "%s %s\n", key, e->d_name);
            status = put(out, buffer, n);
        }
        if (names)
            closedir(names);
    } else {
        ssize_t n;
        while (!status && (n = syscall(SYS_read, in, buffer, sizeof buffer)) > 0)
            status = put(out, buffer, n);
        close(in);
    }
    close(out);
    return status ? status : rename(beside, kept);
}

/* What becomes of a call: 0, go on; else it fails with that number, or SHORT: it writes plan.keep bytes. */
static int fate(int kind)
{
    pthread_mutex_lock(&lock);
    calls[kind]++;
    int error = 0;
    if (plan.error && (plan.kind == kind || (plan.kind == ANY && kind != READ)) && plan.after-- <= 0) {
        plan.after = 0;
        error = plan.error;
        if (kind == WRITE && plan.keep > 0)
            error = error == DIE ? DIE : SHORT;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

static void die(void)
{
    kill(getpid(), SIGKILL);
    for (;;)
        pause();
}

static ssize_t raw_write(int fd, const struct iovec *pieces, int n, off_t offset)
{
    if (offset < 0)
        return syscall(SYS_writev, fd, pieces, n);
    return syscall(SYS_pwritev, fd, pieces, n, (long)offset, 0L);
}

/* `offset` below 0: at the file's own place. */
static ssize_t watched_write(int fd, const struct iovec *pieces, int n, off_t offset)
{
    char path[PATH_MAX];
    int error = is_watched(fd, path) ? fate(WRITE) : 0;
    if (!error)
        return raw_write(fd, pieces, n, offset);
    if (error == DIE || error == SHORT) {
        struct iovec first = {pieces[0].iov_base, pieces[0].iov_len};
        if ((long)first.iov_len > plan.keep)
            first.iov_len = plan.keep;
        ssize_t done = raw_write(fd, &first, 1, offset);
        if (error == DIE)
            die();
        if (plan.error != SHORT)
            plan.keep = 0; /* the next one fails */
        return done;
    }
    errno = error;
    return -1;
}

static ssize_t watched_read(int fd, const struct iovec *pieces, int n, off_t offset)
{
    char path[PATH_MAX];
    int error = plan.kind == READ && is_watched(fd, path) ? fate(READ) : 0;
    if (!error)
        return syscall(SYS_preadv, fd, pieces, n, (long)offset, 0L);
    errno = error;
    return -1;
}

static int watched_sync(int fd, long number)
{
    char path[PATH_MAX];
    if (!is_watched(fd, path))
        return syscall(number, fd);
    int error = fate(SYNC);
    if (error == DIE)
        die();
    if (error > 0) {
        errno = error;
        return -1;
    }
    if (!*memory)
        return syscall(number, fd);
    /* Two threads that sync one folder would write its names into one file. */
    static pthread_mutex_t remembering = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&remembering);
    int status = remember(fd, path);
    pthread_mutex_unlock(&remembering);
    return status;
}

EXPORT ssize_t write(int fd, const void *data, size_t n)
{
    return watched_write(fd, &(struct iovec){(void *)data, n}, 1, -1);
}

EXPORT ssize_t pwrite(int fd, const void *data, size_t n, off_t offset)
{
    return watched_write(fd, &(struct iovec){(void *)data, n}, 1, offset);
}

EXPORT ssize_t pwrite64(int fd, const void *data, size_t n, off_t offset)
{
    return pwrite(fd, data, n, offset);
}

EXPORT ssize_t writev(int fd, const struct iovec *pieces, int n)
{
    return watched_write(fd, pieces, n, -1);
}

EXPORT ssize_t pwritev(int fd, const struct iovec *pieces, int n, off_t offset)
{
    return watched_write(fd, pieces, n, offset);
}

EXPORT ssize_t pwritev64(int fd, const struct iovec *pieces, int n, off_t offset)
{
    return pwritev(fd, pieces, n, offset);
}

/* Python's os.pwritev; the flags are hints. */
EXPORT ssize_t pwritev2(int fd, const struct iovec *pieces, int n, off_t offset, int flags)
{
    (void)flags;
    return watched_write(fd, pieces, n, offset);
}

EXPORT ssize_t pwritev64v2(int fd, const struct iovec *pieces, int n, off_t offset, int flags)
{
    return pwritev2(fd, pieces, n, offset, flags);
}

EXPORT ssize_t pread(int fd, void *data, size_t n, off_t offset)
{
    return watched_read(fd, &(struct iovec){data, n}, 1, offset);
}

EXPORT ssize_t pread64(int fd, void *data, size_t n, off_t offset)
{
    return pread(fd, data, n, offset);
}

/* Python's os.preadv; the flags are hints. */
EXPORT ssize_t preadv2(int fd, const struct iovec *pieces, int n, off_t offset, int flags)
{
    (void)flags;
    return watched_read(fd, pieces, n, offset);
}

EXPORT ssize_t preadv64v2(int fd, const struct iovec *pieces, int n, off_t offset, int flags)
{
    return preadv2(fd, pieces, n, offset, flags);
}

EXPORT ssize_t preadv(int fd, const struct iovec *pieces, int n, off_t offset)
{
    return watched_read(fd, pieces, n, offset);
}

EXPORT ssize_t preadv64(int fd, const struct iovec *pieces, int n, off_t offset)
{
    return preadv(fd, pieces, n, offset);
}

EXPORT int fsync(int fd) { return watched_sync(fd, SYS_fsync); }

EXPORT int fdatasync(int fd) { return watched_sync(fd, SYS_fdatasync); }
