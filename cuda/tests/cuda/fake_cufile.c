/* The library of cuFile for tests: it moves bytes between files and the process's memory. Macros take parts away. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#ifndef SUPPORTED
#define SUPPORTED (1u << 4)
#endif
#ifndef OPENED
#define OPENED 0
#endif
#ifndef REGISTERED
#define REGISTERED 0
#endif

typedef struct { int code; int driver; } status;
typedef struct { int kind; union { int fd; void *pointer; } handle; const void *operations; } descriptor;

static const char *base;
static size_t length;

static status of(int code) { return (status){code, 0}; }

status cuFileDriverOpen(void)
{
#ifdef HANGS
    for (;;) pause();
#endif
    return of(OPENED);
}
status cuFileDriverGetProperties(void *properties)
{
    unsigned supported = SUPPORTED;
    memset(properties, 0, 56);
    memcpy((char *)properties + 24, &supported, sizeof supported);
    return of(0);
}
status cuFileHandleRegister(void **handle, descriptor *file)
{
    int flags = fcntl(file->handle.fd, F_GETFL);
    if (REGISTERED != 0) return of(REGISTERED);
    if (file->kind != 1 || file->operations != 0) return of(5022);
    if (flags < 0 || (flags & O_DIRECT) == 0) return of(5020);
    *handle = (void *)(intptr_t)(file->handle.fd + 1);
    return of(0);
}
void cuFileHandleDeregister(void *handle) { (void)handle; }
status cuFileBufRegister(const void *start, size_t bytes, int flags)
{
    base = start;
    length = bytes;
    return of(flags);
}
status cuFileBufDeregister(const void *start) { return of(start == base ? 0 : 5024); }

/* At most 8 KiB at a time: callers must go on. */
static size_t part(size_t bytes) { return bytes < 8192 ? bytes : 8192; }
static int is_inside(const void *start, size_t bytes, off_t offset)
{
    return start == base && offset >= 0 && (size_t)offset + bytes <= length;
}

ssize_t cuFileRead(void *handle, void *start, size_t bytes, off_t file_offset, off_t offset)
{
    if (!is_inside(start, bytes, offset)) return -5014;
    return pread((int)(intptr_t)handle - 1, (char *)start + offset, part(bytes), file_offset);
}
#ifndef WITHOUT_WRITE
ssize_t cuFileWrite(void *handle, const void *start, size_t bytes, off_t file_offset, off_t offset)
{
    if (!is_inside(start, bytes, offset)) return -5014;
    return pwrite((int)(intptr_t)handle - 1, (const char *)start + offset, part(bytes), file_offset);
}
#endif
