"""`python -m lab.capacity`: the largest GPT that each stage trains when a rank's memory is limited.

Every rank gets a hard limit from the system: an allocation beyond it fails. Under that limit a GPT of fixed width is
trained two steps (the first creates the optimizer's states, so the second holds everything), with more layers or
fewer, until the largest that trains is found: Table 2 of the ZeRO paper, with a limit for the GPUs' memory.

For the prediction the same engine takes the same steps on fake tensors, in a simulated world of as many ranks, at two
numbers of layers. The peaks of live bytes that are counted there define a line, and the prediction is where that line
meets the limit, less what a rank held before the model was built (its libraries and threads). The measurement stays a
few percent below: the prediction leaves out Python's objects and malloc's fragments, some 0.2 MB a layer.

Source: ZeRO, arXiv 1910.02054, sec. 5.4 and Table 2.
"""

import gc
import os
import re
import resource
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import torch
from rich.console import Console

from common import models
from common.engine.mixed_precision import dtype_of
from common.engines import ENGINES, find_engine
from common.errors import InputError
from common.loop import choose_exact_kernels, sha256, train_step
from common.measure.hardware import hardware, private_held
from common.measure.memory import set_malloc_thresholds
from common.measure.tables import Table, show_bytes
from common.models.gpt import GPT, GPTConfig
from common.outputs import asked, check_counts, one_line_errors, parser_of, tell
from common.ranks.world import LocalWorld, RankFailed, check_size
from common.train import default_nproc
from lab import figures
from lab.activations import largest_fitting
from lab.compare import BASELINE
from lab.simulate.world import Setting
from lab.simulate.world import simulate as a_step

# Small blocks, short samples and small buckets, so that model states, which ZeRO shards, fill the memory.
SHAPE = {"width": 256, "heads": 8, "sequence": 32}
BUCKET_MB = 2.0
CHECKPOINTS = models.KINDS[0]
SIMULATED = (8, 16)  # layers of the two models that a prediction is drawn through
DDP_BYTES = 16  # of model states per parameter, with Adam: 4 + 4 + 8 in fp32, 2 + 2 + 12 in 16-bit
TRIAL_SECONDS = 600  # without an answer in this time a trial is an error
# How a rank that ran out of memory ends: with an error of Python, C++, torch, CUDA, its libraries or NCCL; an abort, a
# crash.
OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|MemoryError|bad_alloc|RLIMIT_DATA leaves|out of memory|ALLOC_FAILED|Failed to CUDA calloc|"
    r"died with exit code -(6|11)$",
    re.MULTILINE,
)
UP_TO = 256  # layers that a search ends at: if everything lies on disk, memory is no bound for long
MORE = {  # columns, where some engine has it
    "host": "host_bytes",
    "disk": "disk_bytes",
    "bits as without limit": "bits_without_limit",
}


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, try, show and write the results."""
    parser = parser_of("lab.capacity", __doc__)
    parser.add_argument("--cap", default="1GB", help="what a rank may hold: 800MB, 1.5GB (default: %(default)s)")
    parser.add_argument("--nproc", type=int, default=default_nproc(), help="local ranks (default: %(default)s)")
    parser.add_argument("--oversubscribe", action="store_true", help="allow more ranks than there are GPUs or CPUs")
    parser.add_argument("--engines", default=",".join(ENGINES), help="comma-separated (default: all)")
    parser.add_argument("--precisions", default="fp32,bf16", help="(default: %(default)s)")
    parser.add_argument("--up-to", type=int, default=UP_TO, help="layers to search up to (default: %(default)s)")
    parser.add_argument("--compare", action="store_true", help="train each largest model without the limit, too")
    options = asked(parser, arguments, figure=True)
    tell(options, survey(options), table, figures.capacity)


def survey(options):
    """Find the largest model of every engine in every precision: the JSON of `lab.capacity`.

    Parameters are of the largest model, 0 if not even one layer fits. Options that cannot be used are an InputError.
    """
    check_counts(options, "up_to")
    engines, precisions, cap = check(options)
    rows = []
    for precision in precisions:
        for engine in engines:
            rows.append(row(engine, precision, cap, options.nproc, options.up_to))
            if options.compare and rows[-1]["layers"]:
                alike = ends_alike(rows[-1], cap, options.nproc)
                rows[-1]["bits_without_limit"] = "the same" if alike else "others"
    for found in rows:
        base = next((r for r in rows if (r["engine"], r["precision"]) == (BASELINE, found["precision"])), None)
        known = base and not base["or_more"]  # a bound is nothing to compare with
        found["ratio_to_stage0"] = _ratio(found["parameters"], base["parameters"]) if known else None
    return {
        "world_size": options.nproc,
        "cap_bytes": cap,
        "hardware": hardware(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "model": SHAPE,
        "optimizer": "AdamW",
        "bucket_mb": BUCKET_MB,
        "rows": rows,
    }


def check(options):
    """Validate the options before any rank starts; return the engines, the precisions and the cap in bytes."""
    if not torch.cuda.is_available() and sys.platform != "linux":
        raise InputError("without a GPU the limit is Linux's RLIMIT_DATA; other systems enforce none")
    engines, precisions = options.engines.split(","), options.precisions.split(",")
    for name in engines:
        if not hasattr(find_engine(name), "owned"):
            raise InputError(f"--engines: {name} has no ownership table to predict from")
    for precision in precisions:
        dtype_of(precision)
        if precision == "fp16":
            raise InputError("--precisions fp16: it has the bytes of bf16, but skips its first steps; choose bf16")
    check_size(options.nproc, options.oversubscribe)
    cap, gpus = size_of(options.cap), map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    there = sum(gpu.total_memory for gpu in gpus) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if options.nproc * cap > there:  # the system would then end ranks, or others, before they reach their limits
        raise InputError(
            f"--cap {options.cap}: {options.nproc} ranks would hold more than this machine has, {show_bytes(there)}"
        )
    return engines, precisions, cap


def size_of(text):
    """The bytes that a text such as 800MB or 1.5GB names, or an InputError; 1 GB = 1e9 B, as in the papers."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(MB|GB)", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * {"MB": 1e6, "GB": 1e9}[match[2].upper()]) if match else 0
    if not size:
        raise InputError(f"--cap {text}: give a size above 0 in MB or GB, such as 800MB or 1GB")
    return size


def row(engine, precision, cap, world_size, up_to=UP_TO):
    """The largest model that trains under the cap, measured and predicted; a row of the results.

    A search that reached `up_to` layers leaves open how many more would train.

    Raises:
        InputError: a rank holds more than the cap before there is a model.
    """
    console = Console(stderr=True)
    tries = {}

    @cache
    def fits(layers):
        if layers > up_to:
            return False
        with console.status(f"{engine}, {precision}, {layers} layers"):
            tries[layers] = attempt(engine, precision, layers, cap, world_size)
        return tries[layers].fits

    fits(1)
    usable = cap - tries[1].held_before
    if usable <= 0:
        raise InputError(
            f"the cap of {show_bytes(cap)} leaves no room: a rank's libraries and threads alone hold "
            f"{show_bytes(tries[1].held_before)}; give more"
        )
    line = predict(engine, precision, world_size)
    predicted = line.layers(usable)
    layers = largest_fitting(fits, near=min(max(1, predicted), up_to))
    return {
        "engine": engine,
        "precision": precision,
        "layers": layers,
        "or_more": layers == up_to,
        "parameters": parameters(layers),
        "usable_bytes": usable,
        "predicted_layers": predicted,
        "predicted_parameters": parameters(predicted),
        "measured_over_predicted": None if layers == up_to else _ratio(parameters(layers), parameters(predicted)),
        "ideal_ratio": _ratio(DDP_BYTES, line.states_per_parameter),
        "state_bytes_per_parameter": line.states_per_parameter,
        "host_bytes": tries[layers].on_host if layers else 0,
        "disk_bytes": tries[layers].on_disk if layers else 0,
        "predicted_bytes": {"fixed": line.fixed, "per_layer": line.per_layer},
        "tries": {str(layers): tries[layers].fits for layers in sorted(tries)},
    }


def ends_alike(found, cap, world_size):
    """Whether the model of a row of the results ends with the same bits under the cap as without."""
    what = found["engine"], found["precision"], found["layers"]
    limited, free = (attempt(*what, limit, world_size, digest=True).digest for limit in (cap, None))
    return limited is not None and limited == free


def _ratio(one, other):
    return one / other if other else None


def build(layers, shape=SHAPE):
    """A GPT of so many layers on the meta device, with activation checkpoints: a layer then keeps one tensor."""
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=layers, **shape))
    model.checkpoint_activations = CHECKPOINTS
    return model


def parameters(layers):
    """How many parameters a model of so many layers has; none without layers."""
    return models.count(build(layers)) if layers else 0


def make_engine(engine, precision, layers, **options):
    """An engine over a new model."""
    adamw = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    init = models.initial_values(seed=0)
    return find_engine(engine)(build(layers), adamw, precision=precision, bucket_mb=BUCKET_MB, init=init, **options)


def take_step(engine):
    """Train one step from one sample of random bytes."""
    windows = torch.randint(256, (1, engine.module.window), dtype=torch.uint8, device=engine.comm.device)
    train_step(engine, [engine.module.inputs_and_targets(windows)])


# ---- predicted ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """What a rank holds at its peak, in bytes, as a function of the layers."""

    fixed: float
    per_layer: float
    states_per_parameter: float  # of model states, that each further parameter costs

    def layers(self, usable):
        """The most layers that fit into so many bytes."""
        return max(0, int((usable - self.fixed) // self.per_layer))


def predict(engine, precision, world_size):
    """Draw the Line through two simulated models."""
    few, many = SIMULATED
    (low, low_states), (high, high_states) = (simulate(engine, precision, n, world_size) for n in SIMULATED)
    slope = (high - low) / (many - few)
    more_parameters = parameters(many) - parameters(few)
    return Line(low - few * slope, slope, (high_states - low_states) / more_parameters)


def simulate(engine, precision, layers, world_size):
    """Two steps on fake tensors, over this machine's collectives: the second's peak, and predicted bytes of states."""
    setting = Setting(
        find_engine(engine),
        partial(build, layers),
        world_size,
        precision=precision,
        bucket_mb=BUCKET_MB,
        checkpoint_activations=CHECKPOINTS,
        backend="nccl" if torch.cuda.is_available() else "gloo",
    )
    found = a_step(setting, train_step)
    return found["peak_bytes"], sum(found["predicted_model_state_bytes"].values())


# ---- measured -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attempt:
    """How a trial went."""

    fits: bool  # the model trained
    held_before: int  # bytes of a rank before it was built
    on_host: int = 0  # bytes of model states that a rank keeps there
    on_disk: int = 0
    digest: str | None = None  # of the weights at the end, where it was asked for


def attempt(engine, precision, layers, cap, world_size, digest=False):
    """Train a model of so many layers for two steps, each rank under the cap if there is one: an Attempt."""
    small, asked = (engine, precision, 1, False), (engine, precision, layers, digest)
    held_before, kept = trial(train_under, small, asked, cap, world_size)
    if kept is None:
        return Attempt(False, held_before)
    on_host, on_disk, digests = zip(*kept, strict=True)
    return Attempt(True, held_before, max(on_host), max(on_disk), digests[0])


def trial(train_under, small, asked, cap, world_size):
    """Train a small model without a limit, then the one that is asked for under the cap, in a world of its own.

    `train_under` is called on every rank with the World, the cap or None, and what `small` and `asked` hold. Returns
    the most bytes that a rank held in between, and the answers of all ranks: None if one ran out of memory. Any other
    failure is a RankFailed.
    """
    with LocalWorld(world_size, oversubscribe=True) as world:
        held_before = max(world.run(warm_up, train_under, small, timeout=TRIAL_SECONDS))
        try:
            return held_before, world.run(train_under, cap, *asked, timeout=TRIAL_SECONDS)
        except (RankFailed, InputError) as failure:
            if not ran_out_of_memory(failure):
                raise
            return held_before, None


def ran_out_of_memory(failure):
    """Whether a rank failed because it could not allocate."""
    return OUT_OF_MEMORY.search(str(failure)) is not None


def warm_up(world, train_under, small):
    """Load all that a step needs, by training a small model; return the bytes held after it is freed."""
    if world.device.type == "cpu":
        give_back_freed_memory()
    train_under(world, None, *small)
    gc.collect()
    return held(world.device)


def train_under(world, cap, engine, precision, layers, digest):
    """Train under the cap; return the bytes kept on the host and on disk, and a digest of the weights or None."""
    if digest:
        choose_exact_kernels(world.device)
    made = trained_under(world.device, cap, engine, precision, layers, deterministic=digest)
    counted = made.accounting.measured()
    kept = [sum(counted.get(name, {}).values()) for name in ("host_state_bytes", "disk_state_bytes")]
    return *kept, sha256(made.full_state_dict()) if digest else None


def trained_under(device, cap, engine, precision, layers, **options):
    """An engine that has trained two steps of one sample of random bytes under the cap: the second holds everything."""
    with hard_limit(device, cap):
        torch.manual_seed(0)  # of the sample
        made = make_engine(engine, precision, layers, **options)
        for _ in range(2):
            take_step(made)
        made.synchronize()
        return made


def give_back_freed_memory():
    """Let malloc return freed memory to the system: otherwise it keeps fragments that count and fit nothing.

    Called in the rank: a rank is forked, and malloc reads MALLOC_MMAP_THRESHOLD_ only when a program starts.
    """
    set_malloc_thresholds(2**16)


def held(device):
    """Bytes that count against the limit: of CUDA's allocator, or the process's heap and private mappings."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(device)
    return private_held()


@contextmanager
def hard_limit(device, cap):
    """In this context an allocation that takes this process beyond `cap` bytes fails; None sets no limit."""
    if cap is None:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap / torch.cuda.mem_get_info(device)[1]), device)
        lift = partial(torch.cuda.set_per_process_memory_fraction, 1.0, device)
    else:
        before = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (cap, before[1]))
        lift = partial(resource.setrlimit, resource.RLIMIT_DATA, before)
    try:
        yield
    finally:  # reporting an error takes memory too
        lift()


# ---- shown ----------------------------------------------------------------------------------------------------


def table(results):
    """A row for each engine in each precision."""
    usable = min(row["usable_bytes"] for row in results["rows"])
    title = (
        f"Largest GPT of width {results['model']['width']} that trains, {results['world_size']} ranks of "
        f"{show_bytes(results['cap_bytes'])}, of which {show_bytes(usable)} or more are left for the model"
        f"\n{results['hardware']}"
    )
    more = {name: key for name, key in MORE.items() if any(found.get(key, 0) != 0 for found in results["rows"])}
    header = ("", "in", "measured", "predicted", "of that", "to stage 0", "ideal", *more)
    rows = []
    for found in results["rows"]:
        measured, predicted = (_millions(found[name]) for name in ("parameters", "predicted_parameters"))
        if found.get("or_more"):
            measured, predicted = f"{measured} or more", "-"
        of_that = "-" if found["measured_over_predicted"] is None else f"{100 * found['measured_over_predicted']:.0f} %"
        ratios = ["-" if found[name] is None else f"{found[name]:.2f}x" for name in ("ratio_to_stage0", "ideal_ratio")]
        ratios[0] += " or more" * bool(found.get("or_more") and found["ratio_to_stage0"])
        beside = (found.get(key) for key in more.values())
        beside = (value if isinstance(value, str) else show_bytes(value or None) for value in beside)
        rows.append((found["engine"], found["precision"], measured, predicted, of_that, *ratios, *beside))
    return Table(title, header, rows, words=(0, 1))


def _millions(count):
    return f"{count / 1e6:.1f} M" if count else "none fits"


if __name__ == "__main__":
    main()
