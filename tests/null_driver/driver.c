/* A CUDA driver, and the part of the CUDA runtime that CuPy calls, that do nothing.
 *
 * Work is done at once: copies are made, kernels only counted. Handles and addresses are
 * checked. Results are CUDA's error numbers, 0 for success.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NO_MEMORY = 2, BAD_HANDLE = 400,
       REGISTERED = 712, NOT_REGISTERED = 713 };
enum kind { STREAM, EVENT, DEVICE, PINNED, LOCKED, KINDS };

#define MOST 65536
static struct { uintptr_t at; size_t size; } things[KINDS][MOST];
static int used[KINDS];
static uintptr_t next_handle = 0x1000;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

/* Where a thing is that has these bytes; any of them, or all. -1: nowhere. */
static int find(enum kind kind, uintptr_t at, size_t size, int all)
{
    for (int i = 0; i < used[kind]; i++) {
        uintptr_t begin = things[kind][i].at, end = begin + things[kind][i].size;
        if (all ? begin <= at && at + size <= end : begin < at + size && at < end) {
            return i;
        }
    }
    return -1;
}

static int add(enum kind kind, uintptr_t at, size_t size, int taken)
{
    int result = taken;
    pthread_mutex_lock(&mutex);
    if (find(kind, at, size, 0) < 0) {
        result = used[kind] < MOST ? SUCCESS : NO_MEMORY;
        if (!result) {
            things[kind][used[kind]].at = at;
            things[kind][used[kind]++].size = size;
        }
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

static int drop(enum kind kind, uintptr_t at, int missing)
{
    int result = missing;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < used[kind]; i++) {
        if (things[kind][i].at == at) {
            things[kind][i] = things[kind][--used[kind]];
            result = SUCCESS;
            break;
        }
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

static int known(enum kind kind, uintptr_t at, size_t size)
{
    pthread_mutex_lock(&mutex);
    int found = find(kind, at, size, 1) >= 0;
    pthread_mutex_unlock(&mutex);
    return found;
}

static int new_handle(enum kind kind, uintptr_t *handle)
{
    pthread_mutex_lock(&mutex);
    *handle = next_handle += 16;
    pthread_mutex_unlock(&mutex);
    return add(kind, *handle, 1, BAD_HANDLE);
}

static int allocate(enum kind kind, void **at, size_t size)
{
    size = size ? size : 1;
    if (posix_memalign(at, 512, size)) {
        return NO_MEMORY;
    }
    memset(*at, 0, size);
    return add(kind, (uintptr_t)*at, size, INVALID_VALUE);
}

static int give_back(enum kind kind, void *at)
{
    int result = at ? drop(kind, (uintptr_t)at, INVALID_VALUE) : SUCCESS;
    if (!result) {
        free(at);
    }
    return result;
}

/* The default streams are 0, 1 and 2. */
static int stream(uintptr_t handle)
{
    return handle <= 2 || known(STREAM, handle, 1) ? SUCCESS : BAD_HANDLE;
}

static int event(uintptr_t handle)
{
    return known(EVENT, handle, 1) ? SUCCESS : BAD_HANDLE;
}

/* For tests: how many things there are of a kind, and launches of a kernel. */

int null_driver_used(int kind) { return used[kind]; }

static struct kernel { char name[128]; long launches; struct kernel *next; } *kernels;

long null_driver_launches(const char *name)
{
    long launches = 0;
    for (struct kernel *each = kernels; each; each = each->next) {
        launches += name && strcmp(each->name, name) ? 0 : each->launches;
    }
    return launches;
}

/* The driver. */

int cuGetErrorName(int e, const char **text) { *text = "CUDA_ERROR"; return SUCCESS; }
int cuGetErrorString(int e, const char **text) { *text = "refused"; return SUCCESS; }
int cuDevicePrimaryCtxRelease_v2(int device) { return SUCCESS; }
int cuCtxGetCurrent(uintptr_t *context) { *context = 1; return SUCCESS; }
int cuCtxSetCurrent(uintptr_t context) { return SUCCESS; }
int cuCtxGetDevice(int *device) { *device = 0; return SUCCESS; }
int cuModuleLoadData(uintptr_t *module, void *image) { *module = 1; return SUCCESS; }
int cuModuleUnload(uintptr_t module) { return SUCCESS; }
int cuFuncGetAttribute(int *value, int what, uintptr_t f) { *value = 32; return SUCCESS; }
int cuFuncSetAttribute(uintptr_t f, int what, int value) { return SUCCESS; }
int cuStreamGetCtx(uintptr_t s, uintptr_t *context) { *context = 1; return stream(s); }

int cuModuleGetFunction(uintptr_t *function, uintptr_t module, const char *name)
{
    struct kernel *made = calloc(1, sizeof *made);
    strncpy(made->name, name, sizeof made->name - 1);
    pthread_mutex_lock(&mutex);
    made->next = kernels;
    kernels = made;
    pthread_mutex_unlock(&mutex);
    *function = (uintptr_t)made;
    return SUCCESS;
}

int cuLaunchKernel(
    uintptr_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
    unsigned bz, unsigned shared, uintptr_t s, void **arguments, void **extra)
{
    if (!gx || !gy || !gz || !bx || !by || !bz || bx * by * bz > 1024 || gy > 65535) {
        return INVALID_VALUE;
    }
    ((struct kernel *)function)->launches++;
    return stream(s);
}

int cuOccupancyMaxActiveBlocksPerMultiprocessor(
    int *blocks, uintptr_t function, int block, size_t shared)
{
    *blocks = 8;
    return SUCCESS;
}

int cuOccupancyMaxPotentialBlockSize(
    int *grid, int *block, uintptr_t function, void *of_block, size_t shared, int limit)
{
    *grid = 132;
    *block = 256;
    return SUCCESS;
}

/* The runtime. */

int cudaGetDevice(int *device) { *device = 0; return SUCCESS; }
int cudaSetDevice(int device) { return device ? 101 : SUCCESS; }
int cudaGetDeviceCount(int *count) { *count = 1; return SUCCESS; }
int cudaDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cudaRuntimeGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cudaDeviceSynchronize(void) { return SUCCESS; }
int cudaGetLastError(void) { return SUCCESS; }
int cudaPeekAtLastError(void) { return SUCCESS; }
const char *cudaGetErrorName(int error) { return error ? "cudaError" : "cudaSuccess"; }
const char *cudaGetErrorString(int error) { return error ? "refused" : "no error"; }
int cudaDeviceCanAccessPeer(int *can, int one, int two) { *can = 1; return SUCCESS; }
int cudaDeviceEnablePeerAccess(int device, unsigned flags) { return SUCCESS; }

/* The beginning of a structure of a thousand bytes. */
struct properties {
    char name[256], uuid[16], luid[8];
    unsigned luid_mask;
    size_t memory, shared;
    int registers, warp;
};

int cudaGetDeviceProperties(struct properties *properties, int device)
{
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, "Null device");
    properties->warp = 32;
    return SUCCESS;
}

int cudaGetDeviceProperties_v2(struct properties *properties, int device)
{
    return cudaGetDeviceProperties(properties, device);
}

int cudaDeviceGetPCIBusId(char *text, int size, int device)
{
    snprintf(text, size, "0000:%02X:00.0", device + 1);
    return SUCCESS;
}

/* Those of a device of capability 9.0, by the numbers of cudaDeviceAttr. */
int cudaDeviceGetAttribute(int *value, int attribute, int device)
{
    switch (attribute) {
    case 1: *value = 1024; break;          /* threads of a block */
    case 2: case 3: *value = 1024; break;  /* in x, y */
    case 4: *value = 64; break;
    case 5: *value = 2147483647; break;    /* blocks of a grid in x */
    case 6: case 7: *value = 65535; break;
    case 8: *value = 49152; break;         /* shared memory of a block */
    case 10: *value = 32; break;           /* threads of a warp */
    case 16: *value = 132; break;          /* multiprocessors */
    case 39: *value = 2048; break;         /* threads of a multiprocessor */
    case 75: *value = 9; break;            /* capability */
    default: *value = 0;
    }
    return SUCCESS;
}

int cudaMemGetInfo(size_t *available, size_t *total)
{
    *available = *total = (size_t)8 << 30;
    return SUCCESS;
}

int cudaMalloc(void **at, size_t size) { return allocate(DEVICE, at, size); }
int cudaFree(void *at) { return give_back(DEVICE, at); }
int cudaHostAlloc(void **at, size_t n, unsigned flags) { return allocate(PINNED, at, n); }
int cudaFreeHost(void *at) { return give_back(PINNED, at); }

int cudaHostRegister(void *at, size_t size, unsigned flags)
{
    return size ? add(LOCKED, (uintptr_t)at, size, REGISTERED) : INVALID_VALUE;
}

int cudaHostUnregister(void *at) { return drop(LOCKED, (uintptr_t)at, NOT_REGISTERED); }

int cudaPointerGetAttributes(void *attributes, const void *at)
{
    /* type (2: of a device), device, its address, the host's */
    memset(attributes, 0, 32);
    *(int *)attributes = known(DEVICE, (uintptr_t)at, 1) ? 2 : 0;
    *((const void **)attributes + 1) = at;
    return SUCCESS;
}

/* 1: host to device, 2: device to host, 3: device to device, 4: whatever it is. */
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, uintptr_t s)
{
    int to_device = known(DEVICE, (uintptr_t)to, size);
    int from_device = known(DEVICE, (uintptr_t)from, size);
    if (stream(s)) {
        return BAD_HANDLE;
    }
    if (kind != 4 && (to_device != (kind == 1 || kind == 3) || from_device != kind >> 1)) {
        return INVALID_VALUE;
    }
    memmove(to, from, size);
    return SUCCESS;
}

int cudaMemcpy(void *to, const void *from, size_t size, int kind)
{
    return cudaMemcpyAsync(to, from, size, kind, 0);
}

int cudaMemsetAsync(void *at, int value, size_t size, uintptr_t s)
{
    if (stream(s) || !known(DEVICE, (uintptr_t)at, size)) {
        return stream(s) ? BAD_HANDLE : INVALID_VALUE;
    }
    memset(at, value, size);
    return SUCCESS;
}

int cudaMemset(void *at, int value, size_t size)
{
    return cudaMemsetAsync(at, value, size, 0);
}

int cudaStreamCreate(uintptr_t *s) { return new_handle(STREAM, s); }
int cudaStreamCreateWithFlags(uintptr_t *s, unsigned f) { return new_handle(STREAM, s); }

int cudaStreamCreateWithPriority(uintptr_t *s, unsigned flags, int priority)
{
    return new_handle(STREAM, s);
}

int cudaStreamDestroy(uintptr_t s) { return drop(STREAM, s, BAD_HANDLE); }
int cudaStreamSynchronize(uintptr_t s) { return stream(s); }
int cudaStreamQuery(uintptr_t s) { return stream(s); }
int cudaStreamIsCapturing(uintptr_t s, int *is) { *is = 0; return stream(s); }

int cudaStreamWaitEvent(uintptr_t s, uintptr_t e, unsigned flags)
{
    return stream(s) ? BAD_HANDLE : event(e);
}

int cudaEventCreate(uintptr_t *e) { return new_handle(EVENT, e); }
int cudaEventCreateWithFlags(uintptr_t *e, unsigned flags) { return new_handle(EVENT, e); }
int cudaEventDestroy(uintptr_t e) { return drop(EVENT, e, BAD_HANDLE); }
int cudaEventRecord(uintptr_t e, uintptr_t s) { return stream(s) ? BAD_HANDLE : event(e); }
int cudaEventQuery(uintptr_t e) { return event(e); }
int cudaEventSynchronize(uintptr_t e) { return event(e); }

int cudaEventElapsedTime(float *milliseconds, uintptr_t begin, uintptr_t end)
{
    *milliseconds = 1;
    return event(begin) ? BAD_HANDLE : event(end);
}
