"""The console: the present state of the mesh, as a web page on the gateway's admin port."""
