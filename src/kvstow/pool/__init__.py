"""Host memory, its slots and leases, the eviction policies, and the index of resident chunks."""
