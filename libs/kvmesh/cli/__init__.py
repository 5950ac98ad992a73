"""The `kvmesh` command: local stack, benchmark, diagnosis, health checks."""
