"""Direct storage: chunks in extents of NVMe, which workers fill and read without the host pool."""
