"""Faults of the stages, each with the probe that shows it: those of faults.toml, and those that take more code."""

import contextlib
import functools

import planting
import stage_probes as probes
from matrix import Cell
from planting import replaced
from reading import Scene
from torch import nn
from training import STAGES

ZERO_ONE, ONE_TWO, TWO_THREE = STAGES[:2], STAGES[1:3], STAGES[2:]
SHARDED, BUCKETS = STAGES[1:], STAGES[:3]

TRAINED = Cell("plain", "fp32", 3, "SGD with momentum")  # Adam hides a factor
TRAINED_IN_BF16 = Cell("plain", "bf16", 3)
TRAINED_IN_FP16 = Cell("plain", "fp16", 3)
CLIPPED = Cell("plain", "fp32", 3, "clipped")
CLIPPED_IN_FP16 = Cell("plain", "fp16", 3, "clipped")
CLIPPED_GPT = Cell("gpt-tiny", "fp32", 3, "clipped")  # whose norms are compared, too
CLIPPED_GPT_IN_FP16 = Cell("gpt-tiny", "fp16", 3, "clipped")
MANY_BUCKETS = Cell("plain", "fp32", 3, "a bucket for each parameter")
GROUPS = Cell("gpt-tiny", "fp32", 3, "groups and a scheduler")
FUSED = Cell("gpt-tiny", "fp32", 3, "fused AdamW")
ACCUMULATED = Cell("gpt-tiny", "fp32", 3, "accumulated")
ACCUMULATED_IN_BF16 = Cell("gpt-tiny", "bf16", 3, "accumulated")
NO_SYNC = Cell("gpt-tiny", "fp32", 3, "accumulated under no_sync")
NO_SYNC_IN_BF16 = Cell("gpt-tiny", "bf16", 3, "accumulated under no_sync")
SOMETIMES_UNUSED = Cell("sometimes unused", "fp32", 2)
IN_PARTS = Cell("reentrant: around two and again", "fp32", 2, "a bucket for each parameter")
AROUND_TWO = Cell("not reentrant: around two", "fp32", 2)
FROZEN_ENDS = Cell("frozen ends", "fp32", 2)
RESNET = Cell("resnet-tiny", "bf16", 2)
ONE_AUTOCAST = Cell("one autocast", "fp32", 2)
TIED_BY_READING = Cell("tied by reading", "fp32", 2)
PROMPT_TUNING = Cell("prompt tuning", "fp32", 2)
FAILS_IN_BACKWARD = Cell("fails in backward", "fp32", 2, "SGD with momentum")

ACCOUNTS = functools.partial(probes.accounts, "gpt-tiny")
ACCOUNTS_WITH_BUFFERS = functools.partial(probes.accounts, "resnet-tiny")
SKIPS_INF = functools.partial(probes.skipped_without_a_trace, probes.OVERFLOW)
SKIPS_NAN = functools.partial(probes.skipped_without_a_trace, float("nan"))
READS_AT_ITS_END = functools.partial(probes.reads_as_in_stage_0, Scene("at its end", "penalty"))
READS_A_VIEW = functools.partial(probes.reads_nothing_freed, Scene("of a view by a hook", "transposed", begins=1))
SENDS_ALTERNATING_ONCE = functools.partial(probes.gradients_travel_once, "alternating")
SENDS_TWO_FORWARDS_ONCE = functools.partial(probes.gradients_travel_once, "two forwards")

MUTANTS = planting.read("stages", STAGES, vars(probes) | globals())
shown_by = functools.partial(planting.shown_by, MUTANTS, engines=STAGES)
globals().update((mutant.plant.__name__, mutant.plant) for mutant in MUTANTS)  # some are asked for by name


@shown_by(Cell("tied", "fp32", 2))
@contextlib.contextmanager
def a_tied_parameter_has_two_places(engine):
    def named_parameters(original, module, **options):
        return original(module, **{**options, "remove_duplicate": False})

    def partition(original, self):
        with replaced(nn.Module, "named_parameters", named_parameters):
            original(self)

    def gradient_ready(original, self, bucket, name, parameter):
        if parameter.grad is not None:  # otherwise the other place has it
            original(self, bucket, name, parameter)

    with replaced(engine, "partition", partition), replaced(engine, "gradient_ready", gradient_ready):
        yield
