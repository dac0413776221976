"""Memory that tensors may lie in, the device and the host, and how they move between these tiers."""
