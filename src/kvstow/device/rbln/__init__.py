"""RBLN NPUs. Written against public code and tested on an emulated device; not run on an NPU."""
