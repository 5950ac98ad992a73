/* Stands in for the CUDA driver in test_cuda_ipc.py: checks what it is called with, counts. */
#include <stdint.h>
#include <string.h>

typedef struct { char reserved[64]; } Handle;
typedef int Result;

enum { INVALID_VALUE = 1, INVALID_CONTEXT = 201, ALREADY_MAPPED = 208, NOT_FOUND = 500 };

/* Addresses and handles need all of their bits, and handles have zeros within. */
static const uint64_t BASE = 0x7f00deadbeef0000, SIZE = 1 << 20, THERE = 0x7e00cafe00000000;
static int context, retained, pushed, mapped;

int fake_held(void) { return retained + pushed + mapped; }
int fake_mapped(void) { return mapped; }

static Handle named(void) {
  Handle handle;
  for (int i = 0; i < 64; ++i) handle.reserved[i] = (char)(i % 5 ? 200 - i : 0);
  return handle;
}

Result cuDeviceGet(int *device, int ordinal) {
  *device = 40 + ordinal;
  return ordinal < 2 ? 0 : INVALID_VALUE;
}
Result cuDevicePrimaryCtxRetain(void **held, int device) {
  *held = &context;
  retained += device == 41;
  return device == 41 ? 0 : INVALID_VALUE;
}
Result cuDevicePrimaryCtxRelease_v2(int device) {
  retained -= device == 41;
  return 0;
}
Result cuCtxPushCurrent_v2(void *given) {
  pushed += given == &context;
  return given == &context ? 0 : INVALID_CONTEXT;
}
Result cuCtxPopCurrent_v2(void **given) {
  *given = &context;
  return pushed-- > 0 ? 0 : INVALID_CONTEXT;
}
Result cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t address) {
  if (!pushed) return INVALID_CONTEXT;
  *base = address >= BASE && address < BASE + SIZE ? BASE : THERE;
  *size = SIZE;
  return address == 5 ? NOT_FOUND : 0;
}
Result cuIpcGetMemHandle(Handle *handle, uint64_t address) {
  *handle = named();
  return !pushed ? INVALID_CONTEXT : address == BASE ? 0 : INVALID_VALUE;
}
Result cuIpcOpenMemHandle_v2(uint64_t *address, Handle handle, unsigned flags) {
  Handle wanted = named();
  if (!pushed) return INVALID_CONTEXT;
  if (flags != 1 || memcmp(&handle, &wanted, sizeof handle)) return INVALID_VALUE;
  if (mapped) return ALREADY_MAPPED;
  mapped = 1;
  *address = THERE;
  return 0;
}
Result cuIpcCloseMemHandle(uint64_t address) {
  if (address != THERE || !mapped) return INVALID_VALUE;
  mapped = 0;
  return 0;
}
Result cuPointerGetAttribute(int *value, int attribute, uint64_t address) {
  *value = 3;
  return attribute == 9 && address == THERE ? 0 : INVALID_VALUE;
}
Result cuGetErrorName(int code, const char **name) {
  *name = code == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR";
  return 0;
}
