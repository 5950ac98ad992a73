"""Kernels over paged KV. Each has a twin: the same function in plain torch, which tests compare."""
