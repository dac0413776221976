"""ZeRO++ with its switches set, by name, with two ranks per node if these divide the world size, otherwise one."""

import torch.distributed as dist

from zeropp import Engine

SWITCHES = ("quantize_weights", "hierarchical", "quantize_gradients")


def switched(name, *on, **others):
    """A subclass with these switches on."""
    chosen = {switch: switch in on for switch in SWITCHES} | others

    def __init__(self, model, optimizer, **options):
        per_node = 2 if dist.get_world_size() > 2 and dist.get_world_size() % 2 == 0 else 1
        Engine.__init__(self, model, optimizer, **{"ranks_per_node": per_node, "block": 64, **chosen, **options})

    exact = not (chosen["quantize_weights"] or chosen["quantize_gradients"])
    own = {
        "__init__": __init__,
        "exact": exact,
        "quantizes": not exact,
        "reduces_at_once": True,
        "__module__": __name__,
    }
    return type(name, (Engine,), own)


Off = switched("Off")
Copies = switched("Copies", "hierarchical")
Weights = switched("Weights", "quantize_weights")
Gradients = switched("Gradients", "quantize_gradients")
All = switched("All", *SWITCHES)
Remembering = switched("Remembering", *SWITCHES, error_feedback=True)
