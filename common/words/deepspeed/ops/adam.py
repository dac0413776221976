"""`deepspeed.ops.adam`: torch's fused AdamW, or Adam, as the configuration's "Adam" is."""

from common.words.deepspeed.settings import optimizer_of


def FusedAdam(params, lr=1e-3, *, adam_w_mode=True, **arguments):
    """An optimizer to give to `initialize`, which builds it anew; where it steps is the engine's."""
    return optimizer_of("Adam", {"lr": lr, "adam_w_mode": adam_w_mode, **arguments})(params)


def DeepSpeedCPUAdam(model_params, lr=1e-3, *, adamw_mode=True, **arguments):
    """The same, with DeepSpeed's other name for an argument."""
    return FusedAdam(model_params, lr, adam_w_mode=adamw_mode, **arguments)
