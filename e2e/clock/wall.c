// Adds an offset from a mapped file to the wall clock of programs that are started with this object preloaded.
//
// The file is named by REPRISE_E2E_WALL_CLOCK and has two numbers of 64 bits: the seconds to add, which a test may change
// at any time, and the number of reads of the clock with a non-zero offset. All other clocks are the kernel's.

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct wall {
    _Atomic int64_t seconds;
    _Atomic uint64_t altered_reads;
};

static struct wall *wall;

// Aborts if the file cannot be mapped: with an unchanged clock, every test would pass.
__attribute__((constructor)) static void map_file(void) {
    const char *path = getenv("REPRISE_E2E_WALL_CLOCK");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    void *mapped = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *wall, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) {
        perror("REPRISE_E2E_WALL_CLOCK");
        abort();
    }
    close(file);
    wall = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *shown) {
    int failed = (int)syscall(SYS_clock_gettime, clock, shown);
    if (failed || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE) || !wall)
        return failed;
    int64_t seconds = atomic_load_explicit(&wall->seconds, memory_order_relaxed);
    if (seconds) {
        shown->tv_sec += seconds;
        atomic_fetch_add_explicit(&wall->altered_reads, 1, memory_order_relaxed);
    }
    return 0;
}

int gettimeofday(struct timeval *restrict shown, void *restrict zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now))
        return -1;
    shown->tv_sec = now.tv_sec;
    shown->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *shown) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (shown)
        *shown = now.tv_sec;
    return now.tv_sec;
}
