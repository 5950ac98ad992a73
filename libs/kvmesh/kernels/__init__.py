"""Kernels over paged KV, each with a plain torch twin in `reference`."""
