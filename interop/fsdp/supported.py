"""What becomes of FSDP2's words here: kept, or refused by name."""

import contextlib
import re

from common.errors import InputError
from common.measure.tables import Table
from interop.taking import refused

KEPT = {  # as what
    "fully_shard(module)": "a unit of stage 3: its parameters, but for those of units inside it",
    "mesh": "one dimension: its ranks. None: all ranks",
    "reshard_after_forward": "True: freed after the forward. False: kept for the backward. None: False for the root",
    "mp_policy.param_dtype": "None or float32: precision fp32. bfloat16: bf16, with fp32 masters. One for all modules",
    "mp_policy.reduce_dtype": "None or float32: NCCL adds in it, gloo in fp32; the mean is rounded to param_dtype",
    "mp_policy.output_dtype": "what the root returns is cast to it",
    "loss.backward()": "the engine's backward, once for each forward that the loss is made of; retain_graph is kept",
    "optimizer.step()": "the engine's step, by an optimizer over model.parameters() built before the first forward",
    "clip_grad_norm_": "import this one in place of torch's; it takes all parameters at once",
    "zero_grad()": "the optimizer's, the model's, or p.grad = None for all. step() drops gradients, too",
    "unshard, UnshardHandle": "gathers a module's own unit, until the root runs next",
    "reshard": "frees it",
    "set_requires_gradient_sync": "on the root: each backward reduces either way, step() needs a last one that syncs",
    "set_is_last_backward": "changes nothing: each backward waits for its reductions",
}
REFUSED = {  # methods, arguments, functions; and why
    "set_requires_all_reduce": "states are sharded over all ranks, so that there is no second reduction",
    "set_reshard_after_forward": "give reshard_after_forward= to fully_shard",
    "set_reshard_after_backward": "a unit is freed when its backward is over",
    **dict.fromkeys(
        ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"),
        "the unit that came next in the last step is prefetched",
    ),
    **dict.fromkeys(("set_custom_all_gather", "set_custom_reduce_scatter"), "how bytes travel is the engine's"),
    "set_all_reduce_hook": "there is no all-reduce",
    "set_post_optim_event": "step() returns when the shards are stepped",
    "set_reduce_scatter_divide_factor": "gradients are divided by the ranks; scale the loss",
    "set_gradient_divide_factor": "gradients are divided by the ranks; scale the loss",
    "set_force_sum_reduction_for_comms": "gradients are added up, and then divided, in any case",
    "set_reduce_scatter_unused_params": "unused parameters have zeros for gradients in any case",
    "set_reduce_scatter_max_input_buffers": "how many buffers there are is the engine's",
    "set_separate_reduce_scatter_group": "collectives run one after the other",
    "set_unshard_in_backward": "a unit is gathered for its backward in any case",
    "set_allocate_memory_from_process_group_for_comm": "where buffers lie is the engine's",
    "set_symm_mem_for_comm": "where buffers lie is the engine's",
    "reset_iter_state": "after an exception the next forward begins anew",
    "shard_placement_fn": "units are cut into flat shards, wherever a parameter begins",
    "offload_policy": "the engine offload.nvme keeps states on the host; here they stay on the device",
    "ignored_params": "freeze them, or keep them out of the module",
    "dp_mesh_dims": "parameters are no DTensors here",
    "register_fsdp_forward_method": "under torch.no_grad() other methods find weights whole; else call the module",
    "share_comm_ctx": "an engine has collectives of its own",
    "full_tensor": "of a parameter or its gradient; engine_behind(model).full_state_dict() has the whole weights",
    "to_local": "of a parameter or its gradient; shards lie in the engine: engine_behind(model).save(path) writes them",
}


def table():
    """The words and what they are here, for the page."""
    rows = [(f"`{name}`", "kept", words) for name, words in KEPT.items()]
    rows += [(f"`{name}`", "refused", words) for name, words in REFUSED.items()]
    return Table("", ("word", "here it is", "because, or as"), rows, words=range(3))


def refusal(name):
    return InputError(f"{name} is refused: {REFUSED[name]}")


def refusing(name):
    """What stands in the place of a word that is refused."""
    return refused(str(refusal(name)))


def refuse_dtensors(parameters):
    """Have parameters refuse the words that FSDP2's have: those are DTensors."""
    for parameter in parameters:
        parameter.full_tensor, parameter.to_local = refusing("full_tensor"), refusing("to_local")


@contextlib.contextmanager
def in_its_words():
    """What an engine refuses in this context names what such a script has in the place of `engine`."""
    try:
        yield
    except (InputError, RuntimeError) as error:
        error.args = tuple(re.sub(r"(?<![\w.])engine\.", "engine_behind(model).", str(said)) for said in error.args)
        raise
