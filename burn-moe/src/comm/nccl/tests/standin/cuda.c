/* Stands in for CUDA's driver, as far as `device.rs` and `cuda.rs` use it: the memory of its devices is the process's. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
enum { SUCCESS = 0, NO_DEVICE = 100, INVALID_DEVICE = 101, NOT_READY = 600 };

/* A stream counts what was begun on it and what is done; NCCL's stand-in does the work. */
typedef struct { long begun, done; } Stream;
/* An event is a place in a stream. */
typedef struct { Stream *stream; long place; } Event;

static int devices(void) {
    const char *number = getenv("STANDIN_DEVICES");
    return number ? atoi(number) : 8;
}

Result cuInit(unsigned flags) { return devices() ? SUCCESS : NO_DEVICE; }
Result cuDeviceGetCount(int *count) { *count = devices(); return SUCCESS; }
Result cuDeviceGet(int *device, int number) {
    *device = number;
    return number < devices() ? SUCCESS : INVALID_DEVICE;
}
Result cuDeviceGetUuid_v2(char *uuid, int device) {
    memset(uuid, 0, 16);
    uuid[0] = (char)(device + 1);
    return SUCCESS;
}
Result cuDeviceGetUuid(char *uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }
Result cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)(intptr_t)(device + 1);
    return SUCCESS;
}
Result cuDevicePrimaryCtxRelease_v2(int device) { return SUCCESS; }
Result cuCtxSetCurrent(void *context) { return SUCCESS; }
Result cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return SUCCESS;
}

Result cuStreamCreateWithPriority(Stream **stream, unsigned flags, int priority) {
    *stream = calloc(1, sizeof **stream);
    return SUCCESS;
}
Result cuStreamDestroy_v2(Stream *stream) { free(stream); return SUCCESS; }

Result cuEventCreate(Event **event, unsigned flags) {
    *event = calloc(1, sizeof **event);
    return SUCCESS;
}
Result cuEventRecord(Event *event, Stream *stream) {
    event->stream = stream;
    event->place = __atomic_load_n(&stream->begun, __ATOMIC_SEQ_CST);
    return SUCCESS;
}
Result cuEventQuery(Event *event) {
    long done = __atomic_load_n(&event->stream->done, __ATOMIC_SEQ_CST);
    return done >= event->place ? SUCCESS : NOT_READY;
}
Result cuEventDestroy_v2(Event *event) { free(event); return SUCCESS; }

Result cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    *address = (uint64_t)malloc(bytes ? bytes : 1);
    return SUCCESS;
}
Result cuMemFree_v2(uint64_t address) { free((void *)address); return SUCCESS; }
Result cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) {
    memcpy((void *)to, from, bytes);
    return SUCCESS;
}
Result cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) {
    memcpy(to, (void *)from, bytes);
    return SUCCESS;
}

Result cuGetErrorName(Result result, const char **text) { *text = "STANDIN"; return SUCCESS; }
Result cuGetErrorString(Result result, const char **text) { *text = "a stand-in's error"; return SUCCESS; }
