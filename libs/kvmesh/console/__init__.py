"""The console: what the mesh does now, as a web page on the gateway's admin port."""
