"""The vLLM connector: the only package that imports vLLM."""
