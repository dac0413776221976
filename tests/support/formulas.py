"""The papers' formulas, per parameter: what a rank holds with Adam, and what it sends per step."""

NODE = 8  # ranks per node, in simulated worlds
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def bytes_held(stage, ranks, precision="fp32", accumulated=False):
    """Model states in bytes per parameter: ZeRO, arXiv 1910.02054, sec. 5; ZeRO++, arXiv 2306.10209, sec. 3.2.

    In fp32 4 + 4 + 8, in 16-bit 2 + 2 + 12. When 16-bit gradients accumulate over several backwards, their fp32 sum
    replaces a gradient shard, or comes on top of gradients that are kept whole.
    """
    parameters, gradients = BYTES[precision], BYTES[precision]
    optimizer = 8 if precision == "fp32" else 12
    total = 4 if accumulated and precision != "fp32" else 0
    return {
        "stage0_ddp": parameters + gradients + total + optimizer,
        "stage1_os": parameters + gradients + (total + optimizer) / ranks,
        "stage2_grad": parameters + ((total or gradients) + optimizer) / ranks,
        "stage3_param": (parameters + (total or gradients) + optimizer) / ranks,
        "offload": parameters,  # on the device
        "offload.nvme": 0,  # on the device
        "zeropp": (parameters + (total or gradients) + optimizer) / ranks + parameters / NODE,
    }[stage]


def bytes_on_host(ranks, precision="fp32", ratio=0.0):
    """What ZeRO-Offload keeps on the host, in bytes per parameter: arXiv 2101.06840, sec. 3, 14 in 16-bit."""
    return (BYTES[precision] + 12) / ranks * (1 - ratio)


def bytes_sent(stage, ranks, precision="fp32"):
    """Bytes sent by one rank per parameter and step: ZeRO, arXiv 1910.02054, sec. 7."""
    passes = 3 if stage == "stage3_param" else 2
    return passes * (ranks - 1) / ranks * BYTES[precision]
