"""The deck: which slides, in which order."""

from common.slides import beyond, stages
from common.slides.pictures import STATES


def slides(recorded):
    """All slides, in order.

    Args:
        recorded: {stage: what `common.lessons.recording` has of it}, for the timelines.
    """
    return [
        stages.title(),
        stages.sixteen_bytes(),
        stages.sixty_four(),
        stages.promises(),
        stages.code_0(),
        stages.numbers("stage0_ddp", *stages.QUESTIONS["stage0_ddp"]),
        stages.idea(("optimizer",), "Stage 1: shard the optimizer states", *stages.IDEA["stage1_os"]),
        stages.code_1(),
        stages.numbers("stage1_os", *stages.QUESTIONS["stage1_os"]),
        stages.idea(("gradients", "optimizer"), "Stage 2: shard the gradients too", *stages.IDEA["stage2_grad"]),
        stages.code_2(),
        stages.numbers("stage2_grad", *stages.QUESTIONS["stage2_grad"]),
        stages.idea(STATES, "Stage 3: shard the parameters too", *stages.IDEA["stage3_param"]),
        stages.code_3(),
        stages.numbers("stage3_param", *stages.QUESTIONS["stage3_param"]),
        stages.timelines(recorded),
        stages.wire(),
        beyond.code_offload(),
        beyond.offload(),
        beyond.code_infinity(),
        beyond.infinity(),
        beyond.code_zeropp(),
        beyond.zeropp(),
        beyond.when(),
        beyond.summary(),
    ]
