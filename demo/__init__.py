"""`make demo`: a real vLLM server answers a repeated prompt from kvstow."""
