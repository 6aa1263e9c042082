/* As much of NVML as torch's allocator and a start ask for. Other functions are missing, so that
 * the monitor has no temperatures, clocks and powers to show. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void *P;
enum { OK = 0 };
static const unsigned long long TOTAL = 85028896768ULL;
int nvmlInit_v2(void) { return OK; }
int nvmlInitWithFlags(unsigned flags) { return OK; }
int nvmlShutdown(void) { return OK; }
int nvmlSystemGetDriverVersion(char *s, unsigned n) { snprintf(s, n, "580.0"); return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 13000; return OK; }
int nvmlDeviceGetCount_v2(unsigned *n) { const char *given = getenv("NULL_GPU_COUNT"); *n = given ? atoi(given) : 1; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, P *device) { *device = (P)(16UL + index); return OK; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, P *device) { *device = (P)16; return OK; }
int nvmlDeviceGetName(P device, char *s, unsigned n) { snprintf(s, n, "NVIDIA H100 80GB HBM3"); return OK; }
int nvmlDeviceGetUUID(P device, char *s, unsigned n) { snprintf(s, n, "GPU-%08lx-0000-0000-0000-000000000000", (unsigned long)device - 15); return OK; }
int nvmlDeviceGetCudaComputeCapability(P device, int *major, int *minor) { *major = 9; *minor = 0; return OK; }
int nvmlDeviceGetMemoryInfo(P device, unsigned long long *total_free_used) { total_free_used[0] = total_free_used[1] = TOTAL; total_free_used[2] = 0; return OK; }
int nvmlDeviceGetGpuFabricInfoV(P device, void *info) { return OK; } /* no fabric: the caller zeroed it */
int nvmlDeviceGetComputeRunningProcesses_v3(P device, unsigned *n, void *infos) { *n = 0; return OK; }
const char *nvmlErrorString(int e) { return "null GPU"; }
