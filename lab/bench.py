"""`python -m lab.bench`: how long a step takes, stages and libraries, in one run.

Every contestant trains in a world of its own. In each round all contestants take some steps in turn, in a new order
every time, so that the machine's variations affect all alike. A world may be a few per cent slower or faster for as
long as it lives: so after some rounds, of which the first warm up, all worlds are opened anew. What counts is the ratio
of two contestants' times within a round: its median over the rounds of all worlds, and the interval in which that
median lies in 95 % of bootstrap samples, drawn from the worlds first and from the rounds of each second.

All start from the same weights, see the same batches and get fused AdamW; a library runs with the settings that its
own documentation recommends. Losses are compared with those of torch's DistributedDataParallel: a contestant that does
not compute the same gets no time.

A bound shows how near they come to what the machine allows: the same model steps on every rank without communication
(`bare_loop`), and then as many bytes as a contestant sends in a step go round: by plain sockets, and between GPUs by
NCCL's all-reduce. A contestant below the bound overlaps some of that with the computation.

On GPUs a contestant has all of them to itself, and worlds come one after the other: several would share their memory.
"""

import itertools
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from common import models
from common.data import Batches, load_text
from common.engine.mixed_precision import dtype_of
from common.engines import ENGINES, find_engine
from common.errors import InputError
from common.loop import finish, train_step
from common.measure.hardware import hardware
from common.measure.memory import high_water
from common.outputs import asked, check_counts, one_line_errors, parser_of, progress_bar, publish
from common.ranks.collectives import Collectives
from common.ranks.sockets import small_send_buffers
from common.ranks.world import LocalWorld, check_size
from common.train import default_nproc
from interop import peers
from lab import figures
from lab.bench_results import row, tables
from lab.sockets import bytes_sent_by_own_sockets, ring

WARM_UP = 6  # rounds that are not timed: libraries take several to settle
FEWEST_ROUNDS = 11
BUCKET_MB = 25.0  # of the stages: the libraries' default


@dataclass(frozen=True)
class Case:
    """The settings in which contestants are compared."""

    model: str
    precision: str
    world_size: int
    batch: int  # samples of a step, all ranks together
    bucket_mb: float  # of the stages
    small_send_buffers: bool = False  # for everyone, not for the stages alone

    @property
    def tokens(self):
        """The tokens of a step, all ranks together."""
        return self.batch * (models.build(self.model).window - 1)

    @property
    def parameters(self):
        return models.count(models.build(self.model))

    def world(self, **options):
        """Ranks to train on; `options` are LocalWorld's."""
        preload = ["interop.peers", "lab.figures"]
        return LocalWorld(self.world_size, oversubscribe=True, preload=preload, **options)

    def batches(self):
        """The batches, which are the same for all contestants."""
        return Batches(load_text(), models.build(self.model).window, self.batch)

    def label(self):
        """The columns that name the case in its rows."""
        named = {"model": self.model, "parameters": self.parameters}
        return named | {"precision": self.precision, "world_size": self.world_size}


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, compare, show and write the results."""
    parser = parser_of("lab.bench", __doc__)
    parser.add_argument("--nproc", default=str(default_nproc()), help="world sizes (default: %(default)s)")
    parser.add_argument("--oversubscribe", action="store_true", help="allow more ranks than there are GPUs or CPUs")
    parser.add_argument("--engines", default=",".join(ENGINES), help="comma-separated (default: all)")
    parser.add_argument("--peers", default="all", help="names in interop.peers, comma-separated (default: all)")
    parser.add_argument("--models", default="gpt-mini", help="names of the model zoo (default: %(default)s)")
    parser.add_argument("--precisions", default="fp32,bf16", help="(default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="samples of a step on each rank (default: %(default)s)")
    small = "give libraries the small send buffers of the stages too"
    parser.add_argument("--small-send-buffers", action="store_true", help=small)
    parser.add_argument("--worlds", type=int, default=3, help="worlds per contestant, in turn (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds per world (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="steps per round (default: %(default)s)")
    options = asked(parser, arguments, figure=True)
    results = bench(options)
    publish(options, results, tables(results), lambda path: figures.save(figures.bench(results), path))


def bench(options):
    """Compare the contestants in every case, model by model, precision by precision: the JSON of `lab.bench`."""
    who, cases = check(options)
    rows, versions, settings = [], {"torch": torch.__version__}, {}
    log = Path(tempfile.mkdtemp(prefix="zero-")) / "bench.log"
    print(f"what libraries print goes to {log}", file=sys.stderr)
    for case in cases:
        reference, contestants = compare(who, case, options, log)
        bounds = [one.with_bytes(one.nbytes) for one in contestants if isinstance(one, Bound)]
        rows += [row(contestant, contestants, reference, case) for contestant in [*contestants, *bounds]]
        for peer in (one.made for one in contestants if one.refusal is None and hasattr(one.made, "settings")):
            versions |= peer.versions()
            settings[peer.name] = peer.settings
    return {
        "hardware": hardware(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "versions": versions,
        "settings": settings,
        "batch_per_rank": options.batch,
        "bucket_mb": BUCKET_MB,
        "small_send_buffers": "everyone" if options.small_send_buffers else "stages",
        "worlds": options.worlds,
        "rounds_per_world": options.rounds,
        "steps_per_round": options.steps,
        "rows": rows,
    }


def check(options):
    """Validate the options before any rank starts; return stages by name and peers as classes, and cases."""
    known = {name: getattr(peers, name) for name in peers.__all__ if getattr(peers, name).name}
    named = list(known) if options.peers == "all" else [name for name in options.peers.split(",") if name]
    for name in named:
        if name not in known:
            raise InputError(f"--peers: unknown peer {name!r}; known peers: {', '.join(known)}")
    stages = options.engines.split(",")
    for name in stages:
        find_engine(name)
    check_counts(options, "worlds", "rounds", "steps", "batch")
    if options.worlds * options.rounds < FEWEST_ROUNDS:
        given = f"--worlds {options.worlds} --rounds {options.rounds}"
        raise InputError(f"{given}: at least {FEWEST_ROUNDS} rounds in all are needed")
    cases, given = [], [getattr(options, name).split(",") for name in ("models", "precisions", "nproc")]
    for model, precision, number in itertools.product(*given):
        if not number.isdigit():
            raise InputError(f"--nproc: {number!r} is no world size; give numbers, such as 2,4")
        dtype_of(precision)
        size = int(number)
        check_size(size, options.oversubscribe)
        cases.append(Case(model, precision, size, options.batch * size, BUCKET_MB, options.small_send_buffers))
        cases[-1].batches().of(step=0, rank=0, world_size=size)
    return list(dict.fromkeys([*stages, *(known[name] for name in named)])), cases


def compare(who, case, options, log):
    """Train all contestants in turns, round by round, and in new worlds again.

    DDP is the reference of the losses: if it does not take part, it trains before the others, and leaves. Returns the
    reference and the contestants.
    """
    contestants = [Contestant(one, log) for one in who if case.world_size == 1 or one is not peers.BareLoop]
    if case.world_size > 1:
        contestants.append(Bound(case))
    found = [contestant for contestant in contestants if contestant.one is peers.TorchDDP]
    reference = found[0] if found else Contestant(peers.TorchDDP, log)
    together = [contestants] if reference in contestants else [[reference], contestants]
    if torch.cuda.is_available():
        together = [[contestant] for trained in together for contestant in trained]
    rounds, shuffled = WARM_UP + options.rounds, random.Random(0)
    with progress_bar() as bar:
        task = bar.add_task(figures.described(case.label()), total=options.worlds * len(together) * rounds)
        for _, trained in itertools.product(range(options.worlds), together):
            with entered(trained, case) as running:
                for number in range(rounds):
                    for contestant in shuffled.sample(running, len(running)):
                        contestant.take_steps(number * options.steps, options.steps)
                    bar.advance(task)
    return reference, contestants


@contextmanager
def entered(contestants, case):
    """In this context each contestant has a world. Yields those that take part."""
    with ExitStack() as worlds:
        # The first world is slower by a few per cent than others with an identical contestant, so it stays empty.
        if not torch.cuda.is_available():
            worlds.enter_context(case.world())
        for contestant in contestants:
            if contestant.refusal is None:
                contestant.enter(case, worlds)
        running = [contestant for contestant in contestants if contestant.refusal is None]
        yield running
        for contestant in running:
            contestant.leave()


class Contestant:
    """An engine or a library, which trains in one world of its own after another.

    Attributes:
        made, name, follows: its class; what it is called; the stage that it is or follows.
        log: a file for what its ranks print, if it is a library.
        refusal: why it does not take part, or None.
        seconds: of a step, for each world and round.
        losses: of each step, the mean over ranks.
        sent: bytes of a step on the rank that sent most, as the kernel counts them; None if it does not.
        peak_bytes: most memory held in any world, less what was held before building it, on the rank that held most.
    """

    def __init__(self, one, log=None):
        self.one, self.log = one, log
        self.made = find_engine(one) if isinstance(one, str) else one
        self.name, self.follows = getattr(self.made, "name", one), getattr(self.made, "follows", one)
        self.refusal, self.seconds, self.losses, self.sent, self.peak_bytes = None, [], [], None, None

    def enter(self, case, worlds):
        """Open a world and build it there."""
        is_stage = isinstance(self.one, str)
        small = is_stage or case.small_send_buffers
        self.world = worlds.enter_context(case.world(small_send_buffers=small, log=None if is_stage else self.log))
        self.refusal = self.world.run(_enter, self.one, case)[0]
        self.seconds.append([])

    def take_steps(self, first, count):
        """Train some steps; the slowest rank's time counts."""
        seconds, losses, sent = zip(*self.world.run(_take_steps, first, count), strict=True)
        self.seconds[-1].append(max(seconds) / count)
        self.sent = None if None in sent else max(sent) / count
        self.losses += [statistics.fmean(parts) for parts in zip(*losses, strict=True)]

    def leave(self):
        """Ask for the peak and end the world."""
        self.peak_bytes = max(self.peak_bytes or 0, *self.world.run(_peak))
        self.world.close()

    @property
    def timed(self):
        """Seconds of a step [worlds, rounds], without those that warm up."""
        return np.array([seconds[WARM_UP:] for seconds in self.seconds])


class Bound(Contestant):
    """What the machine allows: each rank steps alone, then a step's bytes go round by plain sockets.

    Attributes:
        nbytes: what data parallelism sends in a step, 2 (N-1)/N of the gradients.
        passing: the seconds that these bytes took, for each world and round.
    """

    def __init__(self, case):
        super().__init__(peers.BareLoop)
        gradients = models.count(models.build(case.model)) * dtype_of(case.precision).itemsize
        self.nbytes, self.passing = 2 * (case.world_size - 1) * gradients // case.world_size, []

    def take_steps(self, first, count):
        """Train some steps, and pass on the bytes of one."""
        super().take_steps(first, count)
        self.passing += [[] for _ in self.seconds[len(self.passing) :]]  # a new world's
        self.passing[-1].append(max(self.world.run(_pass_on, self.nbytes)))

    def with_bytes(self, sent):
        """A contestant whose steps take as long as these and as so many bytes by sockets."""
        made = Contestant(self.one)
        made.name, made.sent, made.peak_bytes = f"{self.name} and sockets", sent, self.peak_bytes
        made.seconds = (np.array(self.seconds) + np.array(self.passing) * sent / self.nbytes).tolist()
        return made


# ---- on each rank ---------------------------------------------------------------------------------------------

_here = {}  # what this rank keeps from one round to the next


def _enter(world, one, case):
    """Build the contestant; return why it does not take part, or None."""
    make = find_engine(one) if isinstance(one, str) else one
    module = models.build(case.model)
    adamw = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    options = {"precision": case.precision, "init": models.initial_values(seed=0)}
    if isinstance(one, str):  # libraries have their own default, torch's 25 MiB
        options["bucket_mb"] = case.bucket_mb
    try:
        # A library may form groups of its own.
        with small_send_buffers() if case.small_send_buffers else nullcontext():
            make(models.build("mlp"), adamw, **options)  # first, so that what a library loads does not count
            _here["before"] = high_water(world.device)
            _here["engine"] = make(module, adamw, **options)
    except NotImplementedError as error:
        if one in ENGINES:  # an exercise that is still open
            raise
        return str(error)
    _here.update(module=module, batches=case.batches(), comm=Collectives())
    return None


def _take_steps(world, first, count):
    """Train some steps; return the seconds they took, their losses and the bytes sent."""
    module, engine = _here["module"], _here["engine"]
    windows = [_here["batches"].of(step, world.rank, world.size) for step in range(first, first + count)]
    batches = [module.inputs_and_targets(part.to(world.device)) for part in windows]
    _here["comm"].gather_objects(None)  # begin together
    finish(world.device)
    before, began = _sent(world), time.perf_counter()
    losses = [train_step(engine, [batch])[0] for batch in batches]
    engine.synchronize()
    finish(world.device)
    seconds, after = time.perf_counter() - began, _sent(world)
    return seconds, [loss.item() for loss in losses], None if after is None else after - before


def _sent(world):
    """Bytes that this rank's sockets have sent; None if NCCL may bypass them, or the system does not tell."""
    with suppress(OSError):
        return None if world.device.type == "cuda" else bytes_sent_by_own_sockets()


def _pass_on(world, nbytes):
    """Pass on `nbytes` bytes; return the seconds they took."""
    if "ring" not in _here and world.device.type == "cuda":
        gradients = torch.zeros(nbytes * world.size // (2 * (world.size - 1)), dtype=torch.uint8, device=world.device)
        _here["ring"] = partial(dist.all_reduce, gradients)
    elif "ring" not in _here:
        _here["ring"] = ring(_here["comm"], nbytes)
    _here["comm"].gather_objects(None)
    began = time.perf_counter()
    _here["ring"]()
    finish(world.device)
    return time.perf_counter() - began


def _peak(world):
    """Most memory held since the contestant was built, less what was held before."""
    return high_water(world.device) - _here["before"]


if __name__ == "__main__":
    main()
