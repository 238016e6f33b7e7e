/* A GPU driver for tests. Its one GPU has the process's memory, works at once when it is asked to, and runs the host
 * build of the copy kernels. Macros take parts away. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int result;
typedef uint64_t address;

#ifndef DRIVER_VERSION
#define DRIVER_VERSION 13000
#endif
#ifndef DEVICES
#define DEVICES 1
#endif

result cuInit(unsigned flags) { return DEVICES == 0 ? 100 : (int)flags; }
result cuDriverGetVersion(int *version) { *version = DRIVER_VERSION; return 0; }
result cuDeviceGetCount(int *count) { *count = DEVICES; return 0; }
result cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
result cuDeviceGetName(char *name, int length, int device) { (void)device; strncpy(name, "Fake GPU", length); return 0; }
#ifdef UNORDERED
/* Streams can wait, but writes of other devices are neither flushed (98) nor ordered (118). */
result cuDeviceGetAttribute(int *value, int which, int device) { (void)device; *value = which == 98 || which == 118 ? 0 : which == 16 ? 12 : 9; return 0; }
result cuStreamWaitValue32_v2(void *stream, address word, uint32_t value, unsigned flags) { (void)stream; (void)word; (void)value; (void)flags; return 801; }
result cuStreamIsCapturing(void *stream, int *status) { (void)stream; *status = 0; return 0; }
#else
result cuDeviceGetAttribute(int *value, int which, int device) { (void)device; *value = which == 16 ? 12 : 9; return 0; }
#endif
result cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = 1u << 30; return 0; }
result cuDeviceGetPCIBusId(char *id, int length, int device) { (void)device; strncpy(id, "0000:01:00.0", length); return 0; }
result cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; *context = context; return 0; }
result cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return 0; }
result cuCtxSetCurrent(void *context) { return context == 0 ? 1 : 0; }
result cuCtxSynchronize(void) { return 0; }
result cuThreadExchangeStreamCaptureMode(int *mode) { static __thread int of_thread; int before = of_thread; of_thread = *mode; *mode = before; return 0; }
result cuStreamCreate(void **stream, unsigned flags) { (void)flags; *stream = stream; return 0; }
result cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) { (void)flags; (void)priority; *stream = stream; return 0; }
result cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
result cuStreamDestroy_v2(void *stream) { (void)stream; return 0; }
result cuStreamSynchronize(void *stream) { (void)stream; return 0; }
result cuStreamQuery(void *stream) { (void)stream; return 0; }
result cuStreamWaitEvent(void *stream, void *event, unsigned flags) { (void)stream; (void)event; (void)flags; return 0; }
result cuEventCreate(void **event, unsigned flags) { (void)flags; *event = event; return 0; }
result cuEventRecord(void *event, void *stream) { (void)event; (void)stream; return 0; }
result cuEventSynchronize(void *event) { (void)event; return 0; }
result cuEventQuery(void *event) { (void)event; return 0; }
result cuEventElapsedTime_v2(float *time, void *from, void *to) { (void)from; (void)to; *time = 1.0f; return 0; }
result cuEventDestroy_v2(void *event) { (void)event; return 0; }
result cuMemAlloc_v2(address *memory, size_t bytes) { *memory = (address)(uintptr_t)calloc(1, bytes); return *memory == 0 ? 2 : 0; }
result cuMemFree_v2(address memory) { free((void *)(uintptr_t)memory); return 0; }
result cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { *free_bytes = *total = 1u << 30; return 0; }
result cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) { (void)flags; *memory = calloc(1, bytes); return *memory == 0 ? 2 : 0; }
result cuMemFreeHost(void *memory) { free(memory); return 0; }
result cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags) { (void)memory; (void)bytes; (void)flags; return 0; }
result cuMemHostUnregister(void *memory) { (void)memory; return 0; }
result cuMemHostGetDevicePointer_v2(address *memory, void *host, unsigned flags) { (void)flags; *memory = (address)(uintptr_t)host; return 0; }
result cuMemcpyHtoDAsync_v2(address to, const void *from, size_t bytes, void *stream) { (void)stream; memcpy((void *)(uintptr_t)to, from, bytes); return 0; }
result cuMemcpyDtoHAsync_v2(void *to, address from, size_t bytes, void *stream) { (void)stream; memcpy(to, (void *)(uintptr_t)from, bytes); return 0; }
result cuMemcpyDtoDAsync_v2(address to, address from, size_t bytes, void *stream) { (void)stream; memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes); return 0; }
result cuMemsetD8Async(address to, unsigned char value, size_t bytes, void *stream) { (void)stream; memset((void *)(uintptr_t)to, value, bytes); return 0; }
#ifdef OTHER_GPU
result cuModuleLoadData(void **module, const void *image) { (void)module; (void)image; return 209; }
#else
result cuModuleLoadData(void **module, const void *image) { (void)image; *module = module; return 0; }
#endif
result cuModuleUnload(void *module) { (void)module; return 0; }

typedef void kernel(const void *arguments);
kernel reprise_host_gather, reprise_host_scatter, reprise_host_gather_checked, reprise_host_scatter_checked, reprise_host_checksum;

static const struct { const char *name; kernel *code; } kernels[] = {
    {"reprise_gather", reprise_host_gather},
    {"reprise_scatter", reprise_host_scatter},
    {"reprise_gather_checked", reprise_host_gather_checked},
    {"reprise_scatter_checked", reprise_host_scatter_checked},
    {"reprise_checksum", reprise_host_checksum},
};
static char other_kernel, mark_sms;

result cuModuleGetFunction(void **function, void *module, const char *name) {
  (void)module;
  *function = strcmp(name, "reprise_mark_sms") == 0 ? &mark_sms : &other_kernel;
  for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++) {
    if (strcmp(kernels[i].name, name) == 0) *function = (void *)kernels[i].code;
  }
  return 0;
}
#ifndef WITHOUT_LAUNCH
/* Block i runs on SM i of 12. */
static void mark(unsigned blocks, void **parameters) {
#ifndef WITHOUT_MARKS
  uint32_t *used = (uint32_t *)(uintptr_t)*(address *)parameters[0];
  for (unsigned block = 0; block < blocks; block++) used[block % 12]++;
#else
  (void)blocks; (void)parameters;
#endif
}
result cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned u, unsigned v, unsigned w, unsigned shared, void *stream, void **parameters, void **extra) {
  (void)y; (void)z; (void)u; (void)v; (void)w; (void)shared; (void)stream; (void)extra;
  if (function == &mark_sms) mark(x, parameters);
  else if (function != &other_kernel) ((kernel *)function)(parameters[0]);
  return 0;
}
#endif
result cuGetErrorName(int error, const char **text) { *text = error == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : "CUDA_ERROR"; return 0; }
result cuGetErrorString(int error, const char **text) { (void)error; *text = "no kernel image is available"; return 0; }
