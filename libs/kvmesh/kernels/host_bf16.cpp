// The operators on bf16.

#include "host.h"

KVMESH_HOST_OPS(Bf16, bf16)
