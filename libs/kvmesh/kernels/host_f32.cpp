// The operators on fp32.

#include "host.h"

KVMESH_HOST_OPS(float, f32)

extern "C" void lightning_f32(const float* heads, const float* decay, float* states, float* out,
                              int64_t sequences, int64_t positions, int64_t num_heads,
                              int64_t key_dim, int64_t value_dim, int64_t state_stride,
                              int threads) {
  const Linear call{sequences, positions, num_heads, num_heads, key_dim, value_dim, state_stride};
  lightning(call, heads, decay, states, out, threads);
}
