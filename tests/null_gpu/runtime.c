/* A GPU that accepts every call and computes nothing: CUDA's runtime, cuBLAS, cuFFT, and a cuDNN
 * that supports nothing. build.py adds an empty function for each other one that torch needs.
 *
 * Memory is host memory, zeroed; copies copy at once. Every synchronization and every copy from or
 * to pageable memory is reported to `listener`, if there is one, on the thread that makes it. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "driver_types.h"
#include "vector_types.h"

typedef void *P;
typedef unsigned long long U64;
enum { OK = 0, OUT_OF_MEMORY = 2 };
/* Kinds of what `listener` gets. */
enum { STREAM, DEVICE, EVENT, COPY, PAGEABLE };
static void (*listener)(int kind, size_t bytes);
void null_gpu_listen(void (*to)(int, size_t)) { listener = to; }
static void tell(int kind, size_t bytes) { if (listener) listener(kind, bytes); }
static void note(const char *name) { if (getenv("NULL_GPU_TRACE")) fprintf(stderr, "null GPU: %s\n", name); }

/* ---- memory: blocks of the device and of pinned host memory, found by address */
typedef struct { char *start; size_t bytes; int pinned; } Block;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Block *blocks;
static size_t count, room, used;
static const size_t TOTAL = 85028896768UL; /* of an H100, all ranks' own */

static int take(void **p, size_t bytes, int pinned) {
  size_t whole = (bytes + 4095) & ~4095UL;
  if (!whole) whole = 4096;
  pthread_mutex_lock(&lock);
  if (!pinned && used + whole > TOTAL) { pthread_mutex_unlock(&lock); *p = NULL; return OUT_OF_MEMORY; }
  *p = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*p == MAP_FAILED) { pthread_mutex_unlock(&lock); *p = NULL; return OUT_OF_MEMORY; }
  if (count == room) blocks = realloc(blocks, (room = 2 * room + 64) * sizeof *blocks);
  blocks[count++] = (Block){*p, whole, pinned};
  if (!pinned) used += whole;
  pthread_mutex_unlock(&lock);
  return OK;
}
static int give(void *p) {
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < count; i++)
    if (blocks[i].start == p) {
      munmap(p, blocks[i].bytes);
      if (!blocks[i].pinned) used -= blocks[i].bytes;
      blocks[i] = blocks[--count];
      break;
    }
  pthread_mutex_unlock(&lock);
  return OK;
}
/* Return 1 for pinned host memory, 0 for the device's, -1 for any other. */
static int place(const void *p) {
  int found = -1;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < count && found < 0; i++)
    if ((char *)p >= blocks[i].start && (char *)p < blocks[i].start + blocks[i].bytes) found = blocks[i].pinned;
  pthread_mutex_unlock(&lock);
  return found;
}
/* The driver's side maps segments that grow, which count as well. */
int null_gpu_map(size_t bytes) {
  pthread_mutex_lock(&lock);
  int full = used + bytes > TOTAL;
  if (!full) used += bytes;
  pthread_mutex_unlock(&lock);
  return full ? OUT_OF_MEMORY : OK;
}
void null_gpu_unmap(size_t bytes) { pthread_mutex_lock(&lock); used -= bytes; pthread_mutex_unlock(&lock); }

int cudaMalloc(void **p, size_t n) { return take(p, n, 0); }
int cudaMallocAsync(void **p, size_t n, void *s) { return take(p, n, 0); }
int cudaFree(void *p) { return give(p); }
int cudaFreeAsync(void *p, void *s) { return give(p); }
int cudaHostAlloc(void **p, size_t n, unsigned f) { return take(p, n, 1); }
int cudaMallocHost(void **p, size_t n) { return take(p, n, 1); }
int cudaFreeHost(void *p) { return give(p); }
int cudaHostRegister(void *p, size_t n, unsigned f) {
  pthread_mutex_lock(&lock);
  if (count == room) blocks = realloc(blocks, (room = 2 * room + 64) * sizeof *blocks);
  blocks[count++] = (Block){p, n, 1};
  pthread_mutex_unlock(&lock);
  return OK;
}
int cudaHostUnregister(void *p) {
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < count; i++)
    if (blocks[i].start == p) { blocks[i] = blocks[--count]; break; }
  pthread_mutex_unlock(&lock);
  return OK;
}
int cudaHostGetDevicePointer(void **d, void *h, unsigned f) { *d = h; return OK; }
int cudaMemGetInfo(size_t *f, size_t *t) { *t = TOTAL; *f = TOTAL - used; return OK; }
int cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  int where = place(p);
  memset(a, 0, sizeof *a);
  a->type = where < 0 ? cudaMemoryTypeUnregistered : where ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  a->devicePointer = where < 0 ? NULL : (void *)p;
  a->hostPointer = where ? (void *)p : NULL;
  return OK;
}
static int copied(void *a, const void *b, size_t n, int kind) {
  const void *host = kind == cudaMemcpyHostToDevice ? b : kind == cudaMemcpyDeviceToHost ? a : NULL;
  if (host && n && place(host) < 0) tell(PAGEABLE, n);
  memmove(a, b, n);
  return OK;
}
int cudaMemcpy(void *a, const void *b, size_t n, int k) { tell(COPY, n); return copied(a, b, n, k); }
int cudaMemcpyAsync(void *a, const void *b, size_t n, int k, void *s) { return copied(a, b, n, k); }
int cudaMemcpyPeerAsync(void *a, int d, const void *b, int e, size_t n, void *s) { memmove(a, b, n); return OK; }
int cudaMemset(void *a, int v, size_t n) { memset(a, v, n); return OK; }
int cudaMemsetAsync(void *a, int v, size_t n, void *s) { memset(a, v, n); return OK; }
int cudaGetSymbolAddress(void **p, const void *s) { return take(p, 1 << 16, 0); }

/* ---- devices */
static __thread int device;
static int devices(void) { const char *n = getenv("NULL_GPU_COUNT"); return n ? atoi(n) : 1; }
int cudaGetDeviceCount(int *n) { *n = devices(); return OK; }
int cudaGetDevice(int *d) { *d = device; return OK; }
int cudaSetDevice(int d) { device = d; return OK; }
int cudaDriverGetVersion(int *v) { *v = 13000; return OK; }
int cudaRuntimeGetVersion(int *v) { *v = 13000; return OK; }
const char *cudaGetErrorString(int e) { return e == OUT_OF_MEMORY ? "out of memory" : "null GPU"; }
const char *cudaGetErrorName(int e) { return e == OUT_OF_MEMORY ? "cudaErrorMemoryAllocation" : "null GPU"; }
int cudaDeviceGetStreamPriorityRange(int *low, int *high) { *low = 0; *high = -5; return OK; }
int cudaDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, n, "0000:%02x:00.0", d + 1); return OK; }
int cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return OK; }
int cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H100 80GB HBM3");
  memset(&p->uuid, d + 1, sizeof p->uuid);
  p->totalGlobalMem = TOTAL;
  p->major = 9;
  p->multiProcessorCount = 132;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = p->maxBlocksPerMultiProcessor = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxGridSize[0] = p->memPitch = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->l2CacheSize = 52428800;
  p->memoryBusWidth = 5120;
  p->pciBusID = d + 1;
  p->textureAlignment = 512;
  p->totalConstMem = 65536;
  p->asyncEngineCount = 3;
  p->unifiedAddressing = p->concurrentKernels = 1;
  return OK;
}
int null_gpu_attribute(int a) {
  switch (a) {
    case 1: case 2: case 3: return 1024; /* threads of a block, in each direction */
    case 4: return 64;
    case 5: return 2147483647; /* blocks of a grid */
    case 6: case 7: return 65535;
    case 8: return 49152; /* shared memory of a block; 81: of a processor; 97: of a block at most */
    case 81: return 233472;
    case 97: return 232448;
    case 10: case 106: return 32; /* threads of a warp, blocks of a processor */
    case 12: case 82: return 65536; /* registers */
    case 16: return 132; /* processors */
    case 39: return 2048; /* threads of one */
    case 75: return 9; /* compute capability 9.0 */
    case 76: return 0;
    default: return 1;
  }
}
int cudaDeviceGetAttribute(int *v, int a, int d) { *v = null_gpu_attribute(a); return OK; }
int cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->binaryVersion = a->ptxVersion = 90;
  a->maxDynamicSharedSizeBytes = 49152;
  return OK;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t s) { *n = 4; return OK; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned g) { *n = 4; return OK; }
int cudaGetDriverEntryPointByVersion(const char *s, void **f, unsigned v, U64 flags, int *found) {
  int (*look)(const char *, void **, int, U64, P) = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuGetProcAddress_v2");
  *f = NULL;
  if (look) look(s, f, v, flags, NULL);
  if (found) *found = !*f;
  return OK;
}

/* ---- streams, events, launches */
static size_t tokens = 16;
static int token(void **p) { *p = (void *)__sync_add_and_fetch(&tokens, 16); return OK; }
int cudaStreamCreate(void **s) { return token(s); }
int cudaStreamCreateWithFlags(void **s, unsigned f) { return token(s); }
int cudaStreamCreateWithPriority(void **s, unsigned f, int p) { return token(s); }
int cudaStreamGetPriority(void *s, int *p) { *p = 0; return OK; }
int cudaStreamIsCapturing(void *s, int *c) { *c = 0; return OK; }
int cudaStreamGetCaptureInfo(void *s, int *c, U64 *id, void *g, void *d, void *e, void *n) { *c = 0; if (id) *id = 0; return OK; }
int cudaStreamSynchronize(void *s) { tell(STREAM, 0); return OK; }
int cudaDeviceSynchronize(void) { tell(DEVICE, 0); return OK; }
int cudaEventSynchronize(void *e) { tell(EVENT, 0); return OK; }
int cudaEventCreate(void **e) { return token(e); }
int cudaEventCreateWithFlags(void **e, unsigned f) { return token(e); }
int cudaEventElapsedTime(float *ms, void *a, void *b) { *ms = 0.5f; return OK; }
int cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t s, void *t) { return OK; }
int __cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t s, void *t) { return OK; }
int __cudaGetKernel(void **k, const void *f) { *k = (void *)f; return OK; }
char __cudaInitModule(void **h) { return 1; }

/* ---- cuBLAS, cuFFT, cuDNN */
int cublasCreate_v2(void **h) { return token(h); }
int cublasGetMathMode(void *h, int *m) { *m = 0; return OK; }
int cublasGetPointerMode_v2(void *h, int *m) { *m = 0; return OK; }
size_t cublasLtGetVersion(void) { return 130100; }
int cublasLtMatmulDescCreate(void **d, int a, int b) { *d = calloc(1, 1024); return OK; }
int cublasLtMatmulPreferenceCreate(void **d) { *d = calloc(1, 1024); return OK; }
int cublasLtMatrixLayoutCreate(void **d, int t, size_t r, size_t c, long long l) { *d = calloc(1, 1024); return OK; }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *e, void *p, int n, char *r, int *got) { memset(r, 0, 160); *got = 1; return OK; }
int cufftCreate(int *plan) { *plan = 1; return OK; }
int cufftXtMakePlanMany(int plan, int rank, void *n, void *a, long long b, long long c, int d, void *e, long long f, long long g, int h, long long batch, size_t *work, int type) { *work = 0; return OK; }
int cudnnCreate(void **h) { return 3000; } /* CUDNN_STATUS_NOT_SUPPORTED */
