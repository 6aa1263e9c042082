/* The CUDA driver of the null GPU (see runtime.c): what Triton and torch load
 * from libcuda.so.1. build.py adds an empty function for each other one. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef void *P;
typedef unsigned long long U64;
enum { OK = 0, NOT_FOUND = 500 };
static const size_t TOTAL = 85028896768UL;
/* Of runtime.c, which is loaded before. */
static void *ours(const char *name) { return dlsym(RTLD_DEFAULT, name); }

int cuInit(unsigned f) { return OK; }
int cuDriverGetVersion(int *v) { *v = 13000; return OK; }
int cuDeviceGetCount(int *n) { const char *given = getenv("NULL_GPU_COUNT"); *n = given ? atoi(given) : 1; return OK; }
int cuDeviceGet(int *d, int n) { *d = n; return OK; }
int cuDeviceGetName(char *s, int n, int d) { strncpy(s, "NVIDIA H100 80GB HBM3", n); return OK; }
int cuDeviceGetUuid_v2(char *u, int d) { memset(u, d + 1, 16); return OK; }
int cuDeviceTotalMem_v2(size_t *t, int d) { *t = TOTAL; return OK; }
int cuDeviceGetAttribute(int *v, int a, int d) { int (*of)(int) = ours("null_gpu_attribute"); *v = of ? of(a) : 1; return OK; }
int cuDevicePrimaryCtxRetain(P *c, int d) { *c = (P)16; return OK; }
int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) { *f = 0; *a = 1; return OK; }
int cuCtxGetCurrent(P *c) { *c = (P)16; return OK; }
int cuCtxPopCurrent_v2(P *c) { *c = (P)16; return OK; }
int cuCtxGetDevice(int *d) { int (*get)(int *) = ours("cudaGetDevice"); *d = 0; return get ? get(d) : OK; }
int cuCtxGetStreamPriorityRange(int *low, int *high) { *low = 0; *high = -5; return OK; }
int cuCtxGetLimit(size_t *v, int l) { *v = 0; return OK; }
int cuModuleLoad(P *m, const char *f) { *m = (P)32; return OK; }
int cuModuleLoadData(P *m, const void *i) { *m = (P)32; return OK; }
int cuModuleLoadDataEx(P *m, const void *i, unsigned n, P o, P v) { *m = (P)32; return OK; }
int cuModuleGetFunction(P *f, P m, const char *n) { *f = (P)48; return OK; }
int cuModuleGetGlobal_v2(P *p, size_t *s, P m, const char *n) { *p = calloc(1, 65536); *s = 65536; return OK; }
int cuFuncGetAttribute(int *v, int a, P f) { *v = a == 0 ? 1024 : a == 4 ? 64 : 0; return OK; }
int cuFuncGetName(const char **n, P f) { *n = "kernel"; return OK; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, P f, int b, size_t s) { *n = 4; return OK; }
int cuOccupancyMaxActiveClusters(int *n, P f, P c) { *n = 132; return OK; }
int cuStreamIsCapturing(P s, int *c) { *c = 0; return OK; }
int cuStreamGetCtx(P s, P *c) { *c = (P)16; return OK; }
int cuStreamSynchronize(P s) { int (*wait)(P) = ours("cudaStreamSynchronize"); return wait ? wait(s) : OK; }
int cuMemcpyHtoDAsync_v2(P a, const void *b, size_t n, P s) { memmove(a, b, n); return OK; }
int cuMemcpyDtoHAsync_v2(void *a, P b, size_t n, P s) { memmove(a, b, n); return OK; }
int cuMemcpyDtoDAsync_v2(P a, P b, size_t n, P s) { memmove(a, b, n); return OK; }
int cuMemsetD8Async(P a, char v, size_t n, P s) { memset(a, v, n); return OK; }
int cuGetErrorString(int e, const char **s) { *s = "null GPU"; return OK; }
int cuGetErrorName(int e, const char **s) { *s = "null GPU"; return OK; }
int cuPointerGetAttribute(void *v, int a, P p) { /* 3: the device's pointer, 7: an identity */
  if (a == 7) *(U64 *)v = 1; else if (a == 3) *(P *)v = p; else *(int *)v = 0;
  return OK;
}

/* Segments that grow: address space is reserved first, and gets memory piece by piece. */
int cuMemGetAllocationGranularity(size_t *n, P properties, int which) { *n = 2097152; return OK; }
int cuMemAddressReserve(P *p, size_t n, size_t align, P at, U64 f) {
  char *free_space = mmap(NULL, n + 2097152, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *p = (P)(((U64)free_space + 2097151) & ~2097151UL);
  return free_space == MAP_FAILED ? 2 : OK;
}
int cuMemAddressFree(P p, size_t n) { return munmap(p, n); }
int cuMemCreate(U64 *handle, size_t n, P properties, U64 f) {
  int (*map)(size_t) = ours("null_gpu_map");
  *handle = n; /* which is all there is to know of it */
  return map ? map(n) : OK;
}
int cuMemRelease(U64 handle) { void (*unmap)(size_t) = ours("null_gpu_unmap"); if (unmap) unmap(handle); return OK; }
int cuMemMap(P p, size_t n, size_t offset, U64 handle, U64 f) { return mprotect(p, n, PROT_READ | PROT_WRITE); }
int cuMemUnmap(P p, size_t n) { madvise(p, n, MADV_DONTNEED); return mprotect(p, n, PROT_NONE); }

int cuGetProcAddress_v2(const char *s, P *f, int v, U64 g, P q) {
  static P here;
  char versioned[128];
  if (!here) here = dlopen("libcuda.so.1", RTLD_NOW);
  strcat(strcpy(versioned, s), "_v2");
  if (!(*f = dlsym(here, versioned))) *f = dlsym(here, s);
  return *f ? OK : NOT_FOUND;
}
int cuGetProcAddress(const char *s, P *f, int v, U64 g) { return cuGetProcAddress_v2(s, f, v, g, NULL); }

/* ---- empty functions, written by build.py */
