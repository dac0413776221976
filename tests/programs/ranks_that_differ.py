"""A command whose ranks build models from different seeds."""

import argparse

from training import make_engine

from common import models, train
from common.outputs import one_line_errors


def build(world):
    module = models.build("gpt-tiny")
    models.materialize(module, models.initial_values(world.rank), world.device)
    make_engine("stage1_os", module)


@one_line_errors()
def main():
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    train.command(build, options=parser.parse_args(["--nproc", "2", "--oversubscribe"]))
