"""Probes of the stages, in addition to the matrix: small trainings that need no baseline, or bring their own."""

import functools
from pathlib import Path

import torch
import torch.distributed as dist
from formulas import bytes_held
from late_lanes import on_lane
from optimizers import CountsInItsGroup, Estimates
from planting import broken
from reading import outcome
from training import batch_loss, inputs, make_engine, message_of, same_bits, small_engine, train_counted, train_step
from trap_models import CASES, WIDTH, Block, Counting, Net, Tiny, loss, net, step

from common.engine.mixed_precision import overflow_flag
from common.loop import sha256
from common.measure.memory import Timeline

# ---- measured = predicted -----------------------------------------------------------------------------------------


def formula(engine, per_parameter):
    """Bytes of model states: padding counts as parameters, and each bucket's step count takes 4 bytes."""
    return round(per_parameter * sum(bucket.padded_numel for bucket in engine.buckets)) + 4 * len(engine.buckets)


def accounts(model, world, engine, folder):
    """Bytes held and sent equal the predicted ones and the paper's; all ranks end with the same weights."""
    made, kept = train_counted(world, engine, model, clip_norm=1.0)
    return broken(
        **kept,
        papers_formula=sum(made.model_state_bytes().values()) == formula(made, bytes_held(engine, world.size)),
        ranks_agree=len(set(made.comm.gather_objects(sha256(made.full_state_dict())))) == 1,
    )


def accounts_of_a_sum(world, engine, folder):
    """In bf16 a step of two backwards holds their sum in fp32, in place of gradients that it no longer keeps."""
    made = make_engine(engine, "gpt-tiny", precision="bf16")
    for index in range(2):
        made.backward(batch_loss(made, world, index))
    made.step()
    held, per_parameter = made.model_state_bytes(), bytes_held(engine, world.size, "bf16", accumulated=True)
    return broken(
        held=held == made.predicted_model_state_bytes(),
        papers_formula=sum(held.values()) == formula(made, per_parameter),
    )


def gradients_travel_once(case, world, engine, folder):
    """However often a forward uses a weight, one backward reduces its gradient once."""
    make, run = CASES[case]
    made = small_engine(world, engine, make=make, steps=1, run=run)
    made.comm.traffic.reset()
    run(made, inputs(world, 1))
    sent, predicted = made.comm.traffic.by_collective(), made.predicted_wire_bytes_per_step()
    reductions = ("all_reduce", "reduce_scatter")
    return broken(sent=all(sent.get(name) == predicted.get(name) for name in reductions))


def in_flight(world, engine, model):
    """A step's peak of gradients in flight and receive buffers; and the limit, two buckets and one buffer."""
    made = make_engine(engine, model)
    train_step(made, world)
    made.synchronize()
    with Timeline(made) as timeline:
        train_step(made, world, 1)
    in_flight = sorted(bucket.padded_numel * 4 for bucket in made.buckets)
    received = in_flight[-1] * (world.size - 1) // world.size
    return timeline.peak_of("buckets in flight", "receive buffer"), sum(in_flight[-2:]) + received


def two_buckets_in_flight(world, engine, folder):
    """At most two buckets have gradients in flight, and one has a receive buffer."""
    peak, bound = in_flight(world, engine, "gpt-tiny")
    return broken(bound=peak <= bound)


# ---- optimizers ---------------------------------------------------------------------------------------------------


def thawed(world, engine, bucket_mb, folder):
    """Weights of a training in which half of the parameters are frozen at first, saved and loaded on the way."""
    made = functools.partial(small_engine, world, engine, bucket_mb=bucket_mb)
    old, new, loaded = made(make=half_frozen, steps=2), made(), made(seed=1)
    new.continue_from(old)
    step(new, inputs(world, 2))
    new.save(folder)
    loaded.load(folder)
    step(loaded, inputs(world, 3))
    return loaded.full_state_dict()


def half_frozen():
    module = Net()
    for parameter in list(module.parameters())[::2]:
        parameter.requires_grad_(False)
    return module


def begins_at_step_0(world, engine, folder):
    """A thawed parameter steps as it does alone in its bucket."""
    ways = (engine, 25, Path(folder) / "together"), ("stage0_ddp", 1e-6, Path(folder) / "alone")
    return broken(bits=same_bits(*(thawed(world, *way) for way in ways)))


def counts_once(world, engine, folder):
    """However many shards a step has, an optimizer that counts in its options counts one."""
    made = small_engine(world, engine, optimizer=CountsInItsGroup, bucket_mb=1e-6, steps=3)
    return broken(counted=made.optimizer.param_groups[0]["step"] == 3)


def estimates_are_refused(world, engine, folder):
    """What shards or ranks estimate differently is refused."""
    return broken(refused=message_of(small_engine, world, engine, optimizer=lambda p: Estimates(p, 30), steps=32))


# ---- norms and clipping -------------------------------------------------------------------------------------------


def norm_is_that_of_the_gradient(world, engine, folder):
    """In float64: fp32's squares of small numbers would underflow."""
    norms = []
    for factor in (1.0, 2.0**-80):
        made = small_engine(world, engine, clip_norm=1e3)
        made.backward(loss(made(inputs(world, 0))) * factor)
        norms.append(made.step().norm)
    return broken(small_numbers=norms[1] == norms[0] * 2.0**-80)


# ---- what is read when ----------------------------------------------------------------------------------------------


def no_bit_depends_on_when_the_lane_runs(world, engine, folder, prompt=()):
    """If collectives and copies run only when they are waited for, a training ends with the baseline's bits."""
    how = {"bucket_mb": 1e-6, "steps": 3}
    reference = small_engine(world, "baseline:AverageAfterBackward", **how).full_state_dict()
    with on_lane("late", world.rank, prompt):
        return broken(weights=same_bits(small_engine(world, engine, **how).full_state_dict(), reference))


def no_bit_depends_on_when_the_bus_runs(world, engine, folder):
    """If copies run late, and the host steps as early as allowed, a training ends with the baseline's bits."""
    return no_bit_depends_on_when_the_lane_runs(world, engine, folder, prompt=("host",))


def old_graphs_do_not_go_backward(world, engine, folder):
    """A graph from before a step used weights that are gone: its backward raises."""
    made = small_engine(world, engine)
    old = loss(made(inputs(world, 0)))
    step(made, inputs(world, 1))
    return broken(raises=message_of(made.backward, old) is not None)


def calls_pass_the_door(world, engine, folder):
    """What is written is kept before another call, or the call is refused; and a step needs a gradient."""
    made = small_engine(world, engine, "bf16", steps=1)
    with made.gathered(write=True), torch.no_grad():
        made.module.head.bias.fill_(0.5)
        kept = made.full_state_dict()["head.bias"].eq(0.5).all()
    said = message_of(made.step)
    with torch.no_grad():
        made.module.head.bias.fill_(1.5)
    return broken(keeps=kept, steps=said is not None, reads=message_of(made.full_state_dict) is not None)


def reads_as_in_stage_0(scene, world, engine, folder):
    """A weight that is read at a place where it can be right is read as in stage 0."""
    return broken(reads=outcome(world, engine, scene) == "right")


def reads_nothing_freed(scene, world, engine, folder):
    """A backward that needs a weight that is freed, or gathered and not yet there, raises."""
    with on_lane("late", world.rank):
        return broken(reads=not outcome(world, engine, scene).startswith("wrong"))


def writes_to_freed_weights_are_lost(world, engine, folder):
    """A write to a freed weight of stage 3 reaches no other weight, and is gone after a step."""
    made, found = small_engine(world, engine, make=Tiny), []
    weights = [weight for weight in made.module.parameters() if weight.numel()]
    for written in weights:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():  # bypasses the refusal
            written.fill_(5.0)
            found += [other.isnan().all() for other in weights if other is not written]
        step(made, inputs(world, 0))
        with torch._C.DisableTorchFunctionSubclass():
            found.append(written.isnan().all())
    return broken(nan=all(found))


# ---- loss scale and overflow --------------------------------------------------------------------------------------


def steps_of(world, made, factors):
    """Steps with a factor each on the last rank's loss; return which were skipped, and the scale after each."""
    results, good = [], 0
    for factor in factors:
        value = loss(made(inputs(world, good)))
        made.backward(value * factor if world.rank == world.size - 1 else value)
        results.append((made.step().skipped, made.loss_scaler.scale))
        good += not results[-1][0]
    return results


OVERFLOW = 1e30


def scale_follows(world, engine, folder):
    """The loss scale halves from the second overflow on, and doubles after two good steps in a row."""
    made = small_engine(world, engine, "fp16")
    found = steps_of(world, made, [OVERFLOW, OVERFLOW, OVERFLOW, 1, 1, OVERFLOW, 1, OVERFLOW, 1])
    meant = [(True, 1024), (True, 512), (True, 256), (False, 256), (False, 512), (True, 512)]
    meant += [(False, 512), (True, 256), (False, 256)]
    return broken(scales=found == meant)


def skipped_without_a_trace(factor, world, engine, folder):
    """A step that overflows is skipped, and training goes on as if it had never happened."""
    ends = []
    for factors in ([1, factor, 1], [1, 1]):
        made = small_engine(world, engine, "fp16")
        ends.append(([skipped for skipped, _ in steps_of(world, made, factors)], made.full_state_dict()))
    (skipped, weights), (_, without) = ends
    return broken(skipped=skipped == [False, True, False], weights=same_bits(weights, without))


def overflow_is_agreed(world, engine, folder):
    """An overflow in one rank's gradients makes every rank skip."""
    made = small_engine(world, engine, "fp16")
    made.backward(loss(made(inputs(world, 0))))
    if world.rank == world.size - 1:
        made.buckets[0].gradient_shard[0] = float("inf")
    return broken(flag=bool(overflow_flag(made.buckets, made.comm) > 0))


# ---- checkpoints --------------------------------------------------------------------------------------------------


def resumes(world, engine, folder):
    """A training that was saved and loaded goes on like one that was not interrupted."""
    first, second = (small_engine(world, engine, "fp16", net(block=Counting), steps=steps) for steps in (3, 0))
    for group in first.optimizer.param_groups:
        group["lr"] *= 0.5
    first.save(folder)
    second.backward(loss(second(inputs(world, 7))))  # a load drops it
    second.load(folder)
    same_scale = first.loss_scaler == second.loss_scaler
    for made in (first, second):
        step(made, inputs(world, 3))
    return broken(loss_scale=same_scale, weights=same_bits(first.full_state_dict(), second.full_state_dict()))


def refuses_what_is_damaged(world, engine, folder):
    """A checkpoint with one flipped bit is not loaded."""
    made = small_engine(world, engine)
    made.save(folder)
    if world.rank == 0:
        file = min(Path(folder).glob("*.safetensors"))  # rank 0's; others may hold nothing but padding
        contents = bytearray(file.read_bytes())
        contents[-1] ^= 1  # in the values, after the header
        file.write_bytes(contents)
    made.comm.gather_objects("the file is damaged")
    return broken(refused="is damaged" in (message_of(made.load, folder) or ""))


# ---- two engines --------------------------------------------------------------------------------------------------


class HalfUsed(Block):
    """Rank 0 leaves a weight unused."""

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        return x + (self.down(hidden) if dist.get_rank() else hidden[..., :WIDTH])


def distilled(world, engine):
    """One loss trains student and teacher, and one rank leaves weights unused; the student's backward runs."""
    options = {"make": net(block=HalfUsed), "bucket_mb": 1e-6}
    student, teacher = (small_engine(world, engine, seed=seed, **options) for seed in range(2))
    for index in range(2):
        x = inputs(world, index)
        student.backward(loss(student(x) - teacher(x)))
        student.step()
        teacher.step()
    return student.full_state_dict(), teacher.full_state_dict()


def two_engines_share_a_loss(world, engine, folder):
    """A backward through two engines trains both, like two models without engines."""
    pairs = zip(distilled(world, engine), distilled(world, "baseline:AverageAfterBackward"), strict=True)
    student, teacher = (same_bits(ours, theirs) for ours, theirs in pairs)
    return broken(student=student, teacher=teacher)
