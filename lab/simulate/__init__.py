"""One rank of a world of any size, on fake tensors: the engines themselves, with shapes and without values."""
