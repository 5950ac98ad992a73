"""The KV data plane: frames, state machines, and channels between workers."""
