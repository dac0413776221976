"""Faults of the stages, each with the probe that shows it: those of faults.toml, and those that take more code."""

import contextlib
import functools

import stage_probes as probes
from matrix import Cell
from planting import Mutant, read, replaced
from torch import nn
from training import STAGES

SENDS_ALTERNATING_ONCE = functools.partial(probes.gradients_travel_once, "alternating")
SENDS_TWO_FORWARDS_ONCE = functools.partial(probes.gradients_travel_once, "two forwards")

MUTANTS = read("stages", STAGES, vars(probes) | globals())


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


MUTANTS.append(Mutant(a_tied_parameter_has_two_places, Cell("tied", "fp32", 2), STAGES, 3))
