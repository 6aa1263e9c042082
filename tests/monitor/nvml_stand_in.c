/* A stand-in for NVIDIA's libnvidia-ml.so.1, for the functions that the sampler calls.

   What it answers stands in the text file that STAND_IN_NVML names, read when it changes:
       init 9                an error of nvmlInit
       count 999             an error of nvmlDeviceGetCount
       gpus 8                how many there are
       3 temperature 88      a value of GPU 3
       7 lost 1              every call about GPU 7 answers GPU_IS_LOST
   What no line names is not supported (3). The numbers are those of nvml.h. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { OK = 0, INVALID = 2, UNSUPPORTED = 3, INSUFFICIENT = 7, NO_LIBRARY = 12, LOST = 15 };
typedef int Return;
typedef unsigned long Handle; /* 1 + index */

enum { MACHINE, GPUS = 16, FACTS = 64 };
typedef struct { char what[64], value[128]; } Fact;
static Fact facts[1 + GPUS][FACTS]; /* of the machine, then of each GPU */
static int fact_counts[1 + GPUS];
static int is_frozen; /* several values are being asked for in one call */

/* Read the file, when it is another one than before. */
static void refresh(void) {
    static struct stat seen;
    struct stat now;
    char line[256];
    const char *path = getenv("STAND_IN_NVML");
    if (is_frozen || !path || stat(path, &now)) return;
    if (now.st_ino == seen.st_ino && now.st_mtim.tv_sec == seen.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec && now.st_size == seen.st_size) return;
    seen = now;
    memset(fact_counts, 0, sizeof fact_counts);
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file)) {
        int is_gpu = line[0] >= '0' && line[0] <= '9', who = is_gpu ? 1 + atoi(line) : MACHINE;
        if (who > GPUS || fact_counts[who] == FACTS) continue;
        Fact *fact = &facts[who][fact_counts[who]];
        fact_counts[who] += sscanf(line, is_gpu ? "%*s %63s %127[^\n]" : "%63s %127[^\n]",
                                   fact->what, fact->value) == 2;
    }
    if (file) fclose(file);
}

/* The value of `name` for the machine (0) or a GPU (1 + its index). */
static int look_up(int who, const char *name, char *value) {
    refresh();
    for (int i = 0; i < fact_counts[who]; i++)
        if (!strcmp(facts[who][i].what, name)) {
            strcpy(value, facts[who][i].value);
            return 1;
        }
    return 0;
}

static Return text(Handle gpu, const char *name, char *value) {
    char lost[128];
    if (look_up((int)gpu, "lost", lost) && atoi(lost)) return LOST;
    return look_up((int)gpu, name, value) ? OK : UNSUPPORTED;
}

static Return number(Handle gpu, const char *name, unsigned long long *value) {
    char found[128];
    Return result = text(gpu, name, found);
    if (result == OK) *value = strtoull(found, NULL, 0);
    return result;
}

static Return small(Handle gpu, const char *name, unsigned *value) {
    unsigned long long found = 0;
    Return result = number(gpu, name, &found);
    if (result == OK) *value = (unsigned)found;
    return result;
}

Return nvmlInitWithFlags(unsigned flags) {
    char found[128];
    if (!getenv("STAND_IN_NVML")) return NO_LIBRARY; /* a test that names no GPUs has none */
    return look_up(MACHINE, "init", found) ? atoi(found) : OK;
}
Return nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(Return result) { return "an error of the stand-in"; }

Return nvmlDeviceGetCount_v2(unsigned *count) {
    char found[128];
    *count = look_up(MACHINE, "gpus", found) ? (unsigned)atoi(found) : 0;
    return look_up(MACHINE, "count", found) ? atoi(found) : OK;
}

Return nvmlSystemGetDriverVersion(char *version, unsigned size) {
    char found[128];
    if (!look_up(MACHINE, "driver", found)) return UNSUPPORTED;
    snprintf(version, size, "%s", found);
    return OK;
}
Return nvmlSystemGetCudaDriverVersion_v2(int *version) {
    char found[128];
    if (!look_up(MACHINE, "cuda", found)) return UNSUPPORTED;
    *version = atoi(found);
    return OK;
}

Return nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle *gpu) {
    unsigned count, gone = 0;
    nvmlDeviceGetCount_v2(&count);
    if (index >= count) return INVALID;
    *gpu = index + 1;
    return small(*gpu, "gone", &gone) == OK && gone ? LOST : OK; /* lost before it was opened */
}

static Return copied(Handle gpu, const char *name, char *buffer, unsigned size) {
    char found[128];
    Return result = text(gpu, name, found);
    if (result == OK) snprintf(buffer, size, "%s", found);
    return result;
}
Return nvmlDeviceGetUUID(Handle gpu, char *b, unsigned n) { return copied(gpu, "uuid", b, n); }
Return nvmlDeviceGetName(Handle gpu, char *b, unsigned n) { return copied(gpu, "name", b, n); }

Return nvmlDeviceGetUtilizationRates(Handle gpu, unsigned *rates) {
    rates[1] = 0;
    return small(gpu, "utilization", rates);
}
Return nvmlDeviceGetMemoryInfo(Handle gpu, unsigned long long *total_free_used) {
    Return result = number(gpu, "memory_total", total_free_used);
    if (result == OK) result = number(gpu, "memory_used", total_free_used + 2);
    return result;
}
Return nvmlDeviceGetTemperature(Handle gpu, unsigned sensor, unsigned *celsius) {
    return small(gpu, "temperature", celsius);
}
Return nvmlDeviceGetTemperatureThreshold(Handle gpu, unsigned kind, unsigned *celsius) {
    return kind == 1 ? small(gpu, "slowdown", celsius) : UNSUPPORTED;
}
Return nvmlDeviceGetCudaComputeCapability(Handle gpu, int *major, int *minor) {
    unsigned number = 0;
    Return result = small(gpu, "capability", &number);
    *major = (int)number / 10, *minor = (int)number % 10;
    return result;
}
Return nvmlDeviceGetPowerUsage(Handle gpu, unsigned *mw) { return small(gpu, "power", mw); }
Return nvmlDeviceGetEnforcedPowerLimit(Handle gpu, unsigned *mw) {
    return small(gpu, "power_limit", mw);
}
Return nvmlDeviceGetClockInfo(Handle gpu, unsigned kind, unsigned *mhz) {
    return small(gpu, kind == 1 ? "sm_clock" : "memory_clock", mhz);
}
Return nvmlDeviceGetMaxClockInfo(Handle gpu, unsigned kind, unsigned *mhz) {
    return small(gpu, kind == 1 ? "sm_clock_max" : "memory_clock_max", mhz);
}
Return nvmlDeviceGetCurrentClocksEventReasons(Handle gpu, unsigned long long *bits) {
    return number(gpu, "clock_events", bits);
}
Return nvmlDeviceGetTotalEccErrors(Handle gpu, int uncorrected, int life, unsigned long long *n) {
    return life ? UNSUPPORTED : number(gpu, uncorrected ? "ecc_uncorrected" : "ecc_corrected", n);
}
Return nvmlDeviceGetRemappedRows(Handle gpu, unsigned *corrected, unsigned *uncorrected,
                                 unsigned *pending, unsigned *failed) {
    *uncorrected = *pending = *failed = 0;
    small(gpu, "remapped_uncorrected", uncorrected);
    small(gpu, "remap_pending", pending);
    small(gpu, "remap_failed", failed);
    return small(gpu, "remapped_corrected", corrected);
}
Return nvmlDeviceGetCurrPcieLinkGeneration(Handle gpu, unsigned *n) {
    return small(gpu, "pcie_generation", n);
}
Return nvmlDeviceGetMaxPcieLinkGeneration(Handle gpu, unsigned *n) {
    return small(gpu, "pcie_generation_max", n);
}
Return nvmlDeviceGetCurrPcieLinkWidth(Handle gpu, unsigned *n) {
    return small(gpu, "pcie_width", n);
}
Return nvmlDeviceGetMaxPcieLinkWidth(Handle gpu, unsigned *n) {
    return small(gpu, "pcie_width_max", n);
}
Return nvmlDeviceGetPcieReplayCounter(Handle gpu, unsigned *n) {
    return small(gpu, "pcie_replays", n);
}
Return nvmlDeviceGetMigMode(Handle gpu, unsigned *current, unsigned *pending) {
    *pending = 0;
    return small(gpu, "mig", current);
}

typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    int type, result;
    union { double d; unsigned u; unsigned long long ull; } value;
} FieldValue;

/* Values stand as `field_N`, and those of a scope (an NVLink) as `field_N_SCOPE`. */
Return nvmlDeviceGetFieldValues(Handle gpu, int count, FieldValue *values) {
    refresh();
    is_frozen = 1;
    Return result = OK;
    for (int i = 0; i < count; i++) {
        char name[64];
        unsigned long long found = 0;
        snprintf(name, sizeof name, "field_%u_%d", values[i].field, (int)values[i].scope);
        values[i].result = number(gpu, name, &found);
        if (values[i].result == UNSUPPORTED) {
            snprintf(name, sizeof name, "field_%u", values[i].field);
            values[i].result = number(gpu, name, &found);
        }
        if (values[i].result == LOST) result = LOST;
        values[i].type = 3; /* unsigned long long */
        values[i].value.ull = found;
    }
    is_frozen = 0;
    return result;
}

typedef struct { unsigned pid; unsigned long long used; unsigned instance, compute; } Process;

/* One process a GPU: `process PID BYTES`. */
Return nvmlDeviceGetComputeRunningProcesses_v3(Handle gpu, unsigned *count, Process *processes) {
    char found[128];
    Return result = text(gpu, "process", found);
    unsigned room = *count;
    *count = result == OK;
    if (result != OK) return result == UNSUPPORTED ? OK : result;
    if (room < 1) return INSUFFICIENT;
    memset(processes, 0, sizeof *processes);
    return sscanf(found, "%u %llu", &processes->pid, &processes->used) == 2 ? OK : INVALID;
}
