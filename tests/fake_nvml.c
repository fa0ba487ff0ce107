/* A driver's library as nvidia-ml-py loads it: one device, whose ledger is the file $FAKE_NVML.
 * First line: total and used bytes. Then a line for each process: pid and bytes.
 * `hang` as the first word: the driver does not answer. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gi, ci; } process_t;

static int read_ledger(memory_t *memory, process_t *processes, unsigned most) {
    FILE *file = fopen(getenv("FAKE_NVML"), "r");
    char line[256];
    unsigned found = 0;
    if (!file) return -1;
    if (!fgets(line, sizeof line, file)) line[0] = 0;
    if (!strncmp(line, "hang", 4)) for (;;) pause();
    sscanf(line, "%llu %llu", &memory->total, &memory->used);
    memory->free = memory->total - memory->used;
    while (fgets(line, sizeof line, file)) {
        process_t one = {0, 0, ~0u, ~0u};
        if (sscanf(line, "%u %llu", &one.pid, &one.used) == 2) {
            if (found < most) processes[found] = one;
            found++;
        }
    }
    fclose(file);
    return (int)found;
}

/* $FAKE_NVML.log has a line for each look that began and each that is over. */
static int note(const char *word) {
    char path[4096];
    FILE *file;
    snprintf(path, sizeof path, "%s.log", getenv("FAKE_NVML"));
    if ((file = fopen(path, "a"))) {
        fprintf(file, "%s\n", word);
        fclose(file);
    }
    return 0;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return note("began"); }
int nvmlShutdown(void) { return note("over"); }
const char *nvmlErrorString(int code) { return code == 7 ? "Insufficient Size" : "Unknown Error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "fake"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **handle) { (void)i; *handle = "0"; return 0; }
int nvmlDeviceGetUUID(void *h, char *text, unsigned size) { (void)h; snprintf(text, size, "GPU-fake"); return 0; }
int nvmlDeviceGetName(void *h, char *text, unsigned size) { (void)h; snprintf(text, size, "Fake"); return 0; }
int nvmlDeviceGetMemoryInfo(void *h, memory_t *memory) { (void)h; return read_ledger(memory, 0, 0) < 0 ? 999 : 0; }

int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *count, process_t *processes) {
    memory_t memory;
    int found = read_ledger(&memory, processes, *count);
    unsigned most = *count;
    (void)h;
    if (found < 0) return 999;
    *count = (unsigned)found;
    return (unsigned)found > most ? 7 : 0;
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *h, unsigned *count, process_t *p) { (void)h; (void)p; *count = 0; return 0; }
int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *h, unsigned *count, process_t *p) { (void)h; (void)p; *count = 0; return 0; }
