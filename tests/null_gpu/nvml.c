/* As much of NVML as torch's allocator asks for where there is a driver: no fabric between GPUs.
 * Whoever reads temperatures finds that these functions are missing. */
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { *device = (void *)16; return 0; }
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return 0; } /* the caller zeroed it */
