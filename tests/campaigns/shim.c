/* Fails writes and syncs of a hub's store, as a broken or full disk would.
 *
 * Preloaded into the hub. SHIM_CONTROL names a file of six 32-bit integers that the campaign
 * changes while the hub runs: per mille of writes that fail, their errno, per mille of syncs that
 * fail, their errno, per mille of writes that are cut short, and how many milliseconds a sync takes
 * longer. Only files below a folder called `store` are affected. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

static volatile int32_t *control;
static __thread uint32_t chance;

__attribute__((constructor)) static void map_control(void) {
    const char *path = getenv("SHIM_CONTROL");
    int file = path ? open(path, O_RDONLY) : -1;
    if (file >= 0) {
        void *mapped = mmap(NULL, 4096, PROT_READ, MAP_SHARED, file, 0);
        if (mapped != MAP_FAILED) control = mapped;
        close(file);
    }
}

static int in_store(int descriptor) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size <= 0) return 0;
    path[size] = 0;
    return strstr(path, "/store/") != NULL;
}

static int happens(int32_t per_mille, int descriptor) {
    if (!per_mille) return 0;
    if (!chance) chance = (uint32_t)(uintptr_t)&chance ^ (uint32_t)getpid();
    chance = chance * 1664525u + 1013904223u;
    return (int32_t)((chance >> 8) % 1000) < per_mille && in_store(descriptor);
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

ssize_t write(int descriptor, const void *data, size_t size) {
    REAL(write);
    if (control && happens(control[0], descriptor)) { errno = control[1]; return -1; }
    if (control && size > 1 && happens(control[4], descriptor)) size /= 2;
    return real(descriptor, data, size);
}

ssize_t pwrite(int descriptor, const void *data, size_t size, off_t offset) {
    REAL(pwrite);
    if (control && happens(control[0], descriptor)) { errno = control[1]; return -1; }
    if (control && size > 1 && happens(control[4], descriptor)) size /= 2;
    return real(descriptor, data, size, offset);
}

ssize_t pwrite64(int descriptor, const void *data, size_t size, off64_t offset) {
    REAL(pwrite64);
    if (control && happens(control[0], descriptor)) { errno = control[1]; return -1; }
    if (control && size > 1 && happens(control[4], descriptor)) size /= 2;
    return real(descriptor, data, size, offset);
}

static void delay_sync(int descriptor) {
    if (control && control[5] > 0 && in_store(descriptor)) usleep((useconds_t)control[5] * 1000);
}

int fsync(int descriptor) {
    REAL(fsync);
    delay_sync(descriptor);
    if (control && happens(control[2], descriptor)) { errno = control[3]; return -1; }
    return real(descriptor);
}

int fdatasync(int descriptor) {
    REAL(fdatasync);
    delay_sync(descriptor);
    if (control && happens(control[2], descriptor)) { errno = control[3]; return -1; }
    return real(descriptor);
}
