"""What the adapter for CMU 15-442 is tried with: an answer of our own, as short as it can be."""

import numpy as np
from mpi4py import MPI


class ZeroDPStage3FCLayer:
    """A fully connected layer of whose weight [in_dim, out_dim] and bias [1, out_dim] a rank has shards."""

    def __init__(self, comm, in_dim, out_dim, dp_size, full_w=None, full_b=None, seed=15442):
        self.comm, self.rank, self.dp_size, self.shape = comm, comm.Get_rank(), dp_size, (in_dim, out_dim)
        drawn = np.random.default_rng(seed)
        full_w = drawn.standard_normal(self.shape) / np.sqrt(in_dim) if full_w is None else full_w
        full_b = np.zeros((1, out_dim)) if full_b is None else full_b
        self.w_shard, self.w_shard_size = self._partition_flat_tensor(full_w, self.rank, dp_size)
        self.b_shard, self.b_shard_size = self._partition_flat_tensor(full_b, self.rank, dp_size)
        self.zero_grad()

    def _partition_flat_tensor(self, tensor, shard_idx, num_shards):
        padded = np.append(tensor, np.zeros(-tensor.size % num_shards, tensor.dtype))
        shard = np.split(padded, num_shards)[shard_idx].copy()
        return shard, shard.size

    def zero_grad(self):
        self.grad_w_shard, self.grad_b_shard = np.zeros_like(self.w_shard), np.zeros_like(self.b_shard)

    def gathered(self, shard, shape):
        whole = np.empty(self.dp_size * shard.size, shard.dtype)
        self.comm.Allgather(shard, whole)
        return whole[: np.prod(shape)].reshape(shape)

    def scattered(self, gradient, into):
        """This rank's shard of the sum of all ranks' gradients."""
        padded = np.append(gradient, np.zeros(into.size * self.dp_size - gradient.size, gradient.dtype))
        self.comm.Reduce_scatter(padded, into, op=MPI.SUM)

    def forward(self, x):
        self.x = x
        return x @ self.gathered(self.w_shard, self.shape) + self.gathered(self.b_shard, (1, self.shape[1]))

    def backward(self, output_grad):
        self.scattered(self.x.T @ output_grad, self.grad_w_shard)
        self.scattered(output_grad.sum(0), self.grad_b_shard)
        return [output_grad @ self.gathered(self.w_shard, self.shape).T]


class ZeroDPAdam:
    """Adam over shards, with moments of these alone."""

    def __init__(self, layers, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8):
        self.layers, self.lr, self.beta1, self.beta2, self.eps = layers, lr, beta1, beta2, eps
        self.state, self.step_idx = {}, 0

    def step(self):
        self.step_idx += 1
        for index, layer in enumerate(self.layers):
            self.update((index, "w"), layer.w_shard, layer.grad_w_shard)
            self.update((index, "b"), layer.b_shard, layer.grad_b_shard)

    def update(self, key, shard, gradient):
        moments = self.state.setdefault(key, {"m": np.zeros_like(shard), "v": np.zeros_like(shard)})
        moments["m"] += (1 - self.beta1) * (gradient - moments["m"])
        moments["v"] += (1 - self.beta2) * (gradient**2 - moments["v"])
        mean, square = moments["m"] / self.correction(self.beta1), moments["v"] / self.correction(self.beta2)
        shard -= self.lr * mean / (np.sqrt(square) + self.eps)

    def correction(self, beta):
        """What a moment lacks that began at zero."""
        return 1 - beta**self.step_idx
