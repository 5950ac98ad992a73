"""The prefix caches of a mesh as one pool, for programs outside of it."""
