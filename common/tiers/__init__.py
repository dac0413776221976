"""Where states are kept, on the device, the host or a disk, and how they move between these tiers."""
