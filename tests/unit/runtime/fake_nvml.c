/* Stands in for libcuda.so.1 and libnvidia-ml.so.1: one device, whose state is in a file.
 *
 * The file, named by FAKE_NVML, has five numbers: uncorrectable memory errors, whether no row is
 * left, an NVML error that every call about the device returns, the number of XIDs so far, and the
 * latest XID. Without it the device is fine. Signatures are those of nvml.h and cuda.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TIMEOUT = 10 };

typedef struct {
  void *device;
  unsigned long long type, data;
  unsigned gpu_instance, compute_instance;
} Event;
typedef struct {
  unsigned long long memory_errors;
  unsigned failing, error, num_xids, xid;
} State;

static int device, set, initialized, registered;
static unsigned told;

static State state(void) {
  State now = {0, 0, 0, 0, 0};
  const char *path = getenv("FAKE_NVML");
  FILE *file = path ? fopen(path, "r") : NULL;
  if (!file) return now;
  if (fscanf(file, "%llu %u %u %u %u", &now.memory_errors, &now.failing, &now.error, &now.num_xids,
             &now.xid) != 5)
    memset(&now, 0, sizeof now);
  fclose(file);
  return now;
}

int fake_held(void) { return initialized; }

int cuInit(unsigned flags) { return flags; }
int cuDeviceGet(int *found, int ordinal) {
  *found = 7 + ordinal;
  return ordinal ? 101 : 0;
}
int cuDeviceGetPCIBusId(char *text, int length, int given) {
  if (given != 7 || length < 13) return 1;
  strcpy(text, "0000:65:00.0");
  return 0;
}

int nvmlInitWithFlags(unsigned flags) {
  ++initialized;
  return flags;
}
int nvmlShutdown(void) {
  --initialized;
  return 0;
}
const char *nvmlErrorString(int code) { return code ? "a fault" : "none"; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **found) {
  *found = &device;
  return strcmp(bus, "0000:65:00.0") ? NOT_FOUND : 0;
}
int nvmlEventSetCreate(void **made) {
  *made = &set;
  return 0;
}
int nvmlEventSetFree(void *given) { return given == &set ? 0 : INVALID; }
int nvmlDeviceRegisterEvents(void *given, unsigned long long types, void *events) {
  if (getenv("FAKE_NVML_OLD")) return NOT_SUPPORTED;
  registered = given == &device && types == 8 && events == &set;
  told = state().num_xids;
  return registered ? 0 : INVALID;
}
int nvmlEventSetWait_v2(void *events, Event *event, unsigned timeout_ms) {
  if (events != &set || !registered) return INVALID;
  for (unsigned waited = 0;; waited += 10) {
    State now = state();
    if (now.error) return now.error;
    if (now.num_xids > told) {
      ++told;
      event->device = &device;
      event->type = 8;
      event->data = now.xid;
      return 0;
    }
    if (waited >= timeout_ms) return TIMEOUT;
    usleep(10000);
  }
}
int nvmlDeviceGetTotalEccErrors(void *given, int kind, int counter, unsigned long long *count) {
  if (given != &device || kind != 1 || counter != 0) return INVALID;
  if (getenv("FAKE_NVML_OLD")) return NOT_SUPPORTED;
  *count = state().memory_errors;
  return state().error;
}
int nvmlDeviceGetRemappedRows(void *given, unsigned *correctable, unsigned *uncorrectable,
                              unsigned *pending, unsigned *failure) {
  if (given != &device) return INVALID;
  if (getenv("FAKE_NVML_OLD")) return NOT_SUPPORTED;
  *correctable = *uncorrectable = *pending = 0;
  *failure = state().failing;
  return state().error;
}
