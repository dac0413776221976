"""Where states may lie, on the device, the host or a disk, and how they move between."""
