"""ZeRO++ with its switches set, by name, with two ranks per node if these divide the world size, otherwise one."""

import torch.distributed as dist

from zeropp import Engine

SWITCHES = ("quantize_weights", "hierarchical", "quantize_gradients")


def switched(*on, **others):
    """A subclass with these switches on."""
    chosen = {switch: switch in on for switch in SWITCHES} | others
    rounds = chosen["quantize_weights"] or chosen["quantize_gradients"]

    class Switched(Engine):
        exact, quantizes, reduces_at_once = not rounds, rounds, True

        def __init__(self, model, optimizer, **options):
            per_node = 2 if dist.get_world_size() > 2 and dist.get_world_size() % 2 == 0 else 1
            super().__init__(model, optimizer, **{"ranks_per_node": per_node, "block": 64, **chosen, **options})

    return Switched


Off, Copies, Weights = switched(), switched("hierarchical"), switched("quantize_weights")
Gradients, All = switched("quantize_gradients"), switched(*SWITCHES)
Remembering = switched(*SWITCHES, error_feedback=True)
