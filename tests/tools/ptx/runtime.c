// SPDX-License-Identifier: Apache-2.0
// What a compiled variant asks of the CUDA runtime and of CuTe's, without a GPU: launches are written down, for test_compiled_host.py.

#include <stdint.h>
#include <string.h>

typedef struct {
  uint32_t grid[3], block[3];
  uint64_t smem;
  void* stream;
  const unsigned char* attributes;  // of 72 bytes each
  uint32_t count;
} Config;  // cudaLaunchConfig_t

#define ATTRIBUTE 72
#define MAX_LAUNCHES 16
#define MAX_PARAMETERS 64
#define MAX_KERNELS 16
#define MAX_BYTES 65536

static char names[MAX_KERNELS][1024];
static int num_kernels;

typedef struct {
  int32_t kernel;  // its number in `names`
  uint32_t grid[3], block[3], smem, count;
  unsigned char attributes[8 * ATTRIBUTE];
  uint64_t stream;
} Launch;

static Launch launches[MAX_LAUNCHES];
static int num_launches;
static uint64_t used, sizes[MAX_KERNELS][MAX_PARAMETERS];  // bytes of each kernel's parameters, which a call is told beforehand
static unsigned char bytes[MAX_BYTES];                      // of all launches, one behind the other

void forget(void) { num_launches = 0, used = 0; }
int launched(void) { return num_launches; }
const Launch* launch_of(int i) { return &launches[i]; }
const unsigned char* parameters(void) { return bytes; }

// A kernel's number; -1 where there is no room for one more.
int number_of(const char* name) {
  int i = 0;
  while (i < num_kernels && strcmp(names[i], name)) ++i;
  if (i == MAX_KERNELS || strlen(name) >= sizeof names[0]) return -1;
  if (i == num_kernels) strcpy(names[num_kernels++], name);
  return i;
}

void set_size(int kernel, int i, uint64_t size) { sizes[kernel][i] = size; }

int _cudaLaunchKernelEx(const Config* config, void* kernel, void** given) {
  if (num_launches == MAX_LAUNCHES || config->count > 8) return 1;
  Launch* launch = &launches[num_launches++];
  memset(launch, 0, sizeof *launch);
  launch->kernel = (int32_t)(uintptr_t)kernel - 1;
  memcpy(launch->grid, config->grid, sizeof launch->grid);
  memcpy(launch->block, config->block, sizeof launch->block);
  launch->smem = (uint32_t)config->smem, launch->count = config->count, launch->stream = (uint64_t)(uintptr_t)config->stream;
  memcpy(launch->attributes, config->attributes, (size_t)config->count * ATTRIBUTE);
  for (int i = 0; i < MAX_PARAMETERS && sizes[launch->kernel][i]; ++i) {
    uint64_t size = sizes[launch->kernel][i];
    if (used + size > MAX_BYTES) return 1;
    memcpy(bytes + used, given[i], size);
    used += size;
  }
  return 0;
}

int _cudaLibraryLoadData(void** library, const void* code, void* a, void* b, int n, void* c, void* d, int m) {
  *library = (void*)1;
  return 0;
}

// A kernel is its number and one more, since none is null.
int _cudaLibraryGetKernel(void** kernel, void* library, const char* name) {
  *kernel = (void*)(intptr_t)(number_of(name) + 1);
  return *kernel ? 0 : 1;
}

int _cudaGetDevice(int* device) { return *device = 0; }
int _cudaSetDevice(int device) { return 0; }
int _cudaDeviceGetAttribute(int* value, int attribute, int device) { return *value = 232448, 0; }
int _cuKernelGetAttribute(int* value, int attribute, void* kernel, int device) { return *value = 0; }
int _cudaKernelSetAttributeForDevice(void* kernel, int attribute, int value, int device) { return 0; }
int _cudaFuncSetAttribute(void* kernel, int attribute, int value) { return 0; }
int _cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* kernel, int threads, uint64_t smem) { return *blocks = 1, 0; }

int cuda_dialect_init_library_once(void** library, int (*init)(void**), int (*load)(void**, int), void* raise) {
  if (*library) return 0;
  int failed = init(library);
  return failed ? failed : load(library, 0);
}
void cuda_dialect_unload_library_once(void* library) {}
const char* cuda_dialect_get_error_name(int error) { return "an error of the stand-in"; }
void CuteDSLRT_TVMFFISetRaisedCudaError(void (*raise)(const char*, const char**, int), int error) {
  const char* parts[] = {"the stand-in of the runtime has no room"};
  raise("RuntimeError", parts, 1);
}
