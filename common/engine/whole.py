"""The whole model again, from what the ranks keep of it."""

import torch

from common.engine.piece import end_to_end


def whole_state(engine):
    """See `EngineBase.full_state_dict`. A collective; one bucket at a time is whole."""
    values = {}
    for bucket in engine.buckets + engine.frozen:
        with bucket.values_at_hand():
            whole = _whole(engine.comm, bucket)
            for name, parameter in bucket.members.items():
                values[parameter] = bucket.view(whole, name).detach().cpu().clone()
    state = engine.state_as_it_stands()
    return {key: values[tensor] if tensor in values else tensor.detach().cpu().clone() for key, tensor in state.items()}


def _whole(comm, bucket):
    if bucket.kind.trainable and bucket.sixteen_bit:
        kept = end_to_end([piece.master for piece in bucket.pieces], comm.device)
    else:
        kept = bucket.parameters
    if len(kept) == bucket.padded_numel:
        return kept
    whole = torch.empty(bucket.padded_numel, dtype=kept.dtype, device=kept.device)
    comm.all_gather(kept, whole, bucket.name).wait()
    return whole
