"""Print the real DeepSpeed's API as JSON: arguments of its words, names in its modules, rates of its schedulers."""

import inspect
import json
import sys
from functools import reduce

import deepspeed
import torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.engine import DeepSpeedEngine

modules, words, cases = map(json.loads, sys.argv[1:])


def public(thing):
    return [name for name in dir(thing) if not name.startswith("_")]


def found(path):
    """Resolve a dotted path from the library or, after "Engine", from its engine's class."""
    first, *rest = path.split(".")
    return reduce(getattr, rest, {"deepspeed": deepspeed, "Engine": DeepSpeedEngine}[first])


def rates(name, arguments):
    """The rates of two groups before each of 12 steps."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.5, 0.03)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    scheduler, told = getattr(lr_schedules, name)(optimizer, **arguments), []
    for _ in range(12):
        told.append([group["lr"] for group in optimizer.param_groups])
        scheduler.step()
    return told


def arguments(word):
    """[name, default] of each argument; a decorated method is unwrapped."""
    given = inspect.signature(word).parameters
    if list(given) == ["args", "kwargs"]:
        return arguments(next(cell.cell_contents for cell in word.__closure__ if callable(cell.cell_contents)))
    return [[name, repr(argument.default)] for name, argument in given.items() if name != "self"]


if __name__ == "__main__":
    own = set(public(DeepSpeedEngine)) - set(public(torch.nn.Module))
    told = {
        "names": {"Engine": sorted(own), **{name: public(found(name)) for name in modules}},
        "arguments": {path: arguments(found(path)) for path in words},
        "rates": [rates(*case) for case in cases],
    }
    print(json.dumps(told))
