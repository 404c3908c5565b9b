/* A CUDA runtime that launches nothing: each launch is handed to a callback with its configuration and argument pointers.
   Linked into one shared object with a kernel's AOT host code, so that a real runtime in the process is never touched. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef int error;
typedef struct { unsigned x, y, z; } dim3;
typedef struct { int id; char pad[4]; union { char pad[64]; unsigned v[16]; } value; } attribute;
typedef struct {
    dim3 grid, block;
    size_t shared_bytes;
    void *stream;
    attribute *attributes;
    unsigned num_attributes;
} config;
typedef void (*callback)(const char *name, config *c, void **arguments);

static callback on_launch;
static int properties[3]; /* multiprocessors, compute capability major and minor */

static const char *refused;
int fp4mega_fake_refuse(const char *name) {
    refused = name;
    return 801; /* cudaErrorNotSupported */
}
const char *fp4mega_fake_refused(void) { return refused; }

void fp4mega_fake_setup(callback c, int sms, int major, int minor) {
    on_launch = c;
    properties[0] = sms;
    properties[1] = major;
    properties[2] = minor;
}

error cudaLibraryLoadData(void **lib, const void *code, void *a, void *b, unsigned n, void *c, void *d, unsigned m) {
    *lib = (void *)0x11;
    return 0;
}
error cudaLibraryUnload(void *lib) { return 0; }
error cudaLibraryGetKernel(void **kernel, void *lib, const char *name) {
    *kernel = strdup(name);
    return 0;
}
error cudaLibraryGetKernelCount(unsigned *count, void *lib) {
    *count = 1;
    return 0;
}
error cudaKernelSetAttributeForDevice(void *kernel, int attr, int value, int device) { return 0; }
error cudaFuncSetAttribute(void *f, int attr, int value) { return 0; }
error cudaFuncGetAttributes(void *attributes, const void *f) { return 0; }
error cudaGetDevice(int *device) {
    *device = 0;
    return 0;
}
error cudaSetDevice(int device) { return 0; }
error cudaGetDeviceCount(int *count) {
    *count = 1;
    return 0;
}
error cudaDeviceGetAttribute(int *value, int attr, int device) {
    switch (attr) {
    case 16: *value = properties[0]; break;
    case 75: *value = properties[1]; break;
    case 76: *value = properties[2]; break;
    case 97: *value = 232448; break; /* shared memory per block, opt-in */
    default: *value = 1;
    }
    return 0;
}
error cudaDriverGetVersion(int *version) {
    *version = 13040;
    return 0;
}
error cudaRuntimeGetVersion(int *version) {
    *version = 13040;
    return 0;
}
error cudaGetLastError(void) { return 0; }
error cudaPeekAtLastError(void) { return 0; }
const char *cudaGetErrorName(error e) { return "error of the fake runtime"; }
const char *cudaGetErrorString(error e) { return "error of the fake runtime"; }
error cudaStreamSynchronize(void *stream) { return 0; }
error cudaDeviceSynchronize(void) { return 0; }
error cudaLaunchKernelExC(config *c, const void *f, void **arguments) {
    if (on_launch) on_launch((const char *)f, c, arguments);
    return 0;
}

/* The dialect runtime fetches driver calls by name. */
static error kernel_attribute(int *value, int attr, void *kernel, int device) {
    *value = attr == 8 ? 232448 : 0;
    return 0;
}
static error nothing(void) { return 0; }
error cudaGetDriverEntryPointByVersion(const char *symbol, void **p, unsigned version, unsigned long long flags, int *status) {
    *p = strstr(symbol, "cuKernelGetAttribute") ? (void *)kernel_attribute : (void *)nothing;
    if (status) *status = 0;
    return 0;
}
