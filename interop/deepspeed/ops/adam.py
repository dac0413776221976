"""`deepspeed.ops.adam`: torch's fused AdamW, or Adam, as the configuration's "Adam" is. The rest is not here."""

from common.errors import InputError
from interop.deepspeed.refusals import refuse_arguments
from interop.deepspeed.settings import optimizer_of


def FusedAdam(
    params,
    lr=1e-3,
    bias_correction=True,
    betas=(0.9, 0.999),
    eps=1e-8,
    adam_w_mode=True,
    weight_decay=0.0,
    amsgrad=False,
    set_grad_none=True,
):
    """An optimizer for `initialize`, which builds it anew; the engine decides where it steps.

    Raises:
        InputError: `amsgrad` is true, which DeepSpeed refuses too, or `bias_correction` is false.
    """
    refuse_arguments("FusedAdam", "DeepSpeed's has no AMSGrad", amsgrad=amsgrad)
    given = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    return optimizer_of("Adam", {**given, "adam_w_mode": adam_w_mode})(params)


def DeepSpeedCPUAdam(
    model_params,
    lr=1e-3,
    bias_correction=True,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0,
    amsgrad=False,
    adamw_mode=True,
    fp32_optimizer_states=True,
):
    """The same, in another order of arguments. Its states are in fp32."""
    if not fp32_optimizer_states:
        raise InputError("DeepSpeedCPUAdam(fp32_optimizer_states=False) is refused: states are in fp32")
    return FusedAdam(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)
