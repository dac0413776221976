"""Exercises: the engines with their heart taken out, written anew from the engines.

    python -m common.course.exercises          write notebooks/exercises/stage1.py and the others

A test compares what is there with what this writes, so that no exercise falls behind its engine.
"""

import argparse
from dataclasses import replace

from common.course.parts import ROOT, Edit, Exercise, Part, bare, methods_of, place, shows, solutions, written
from common.errors import InputError
from common.outputs import one_line_errors

BUCKETS = {
    "Owned(parameters=, gradients=, optimizer=)": "what `owned` returns: three slices of the bucket",
    "self.rank, self.world_size": "r and N",
    "bucket.whole()": "all elements of a bucket, a slice",
    "bucket.shard(rank)": "those of a rank's shard, a slice",
    "bucket.local": "[N x shard] this rank's own gradients, once they are in",
    "bucket.reduced": "[shard] where the mean of this rank's shard is expected",
    "bucket.seal()": "makes `local` ready to travel: zeros as padding, and where no gradient came",
    "bucket.handle": "the reduction under way, a Handle; None before. Yours to assign: others wait for it",
    "bucket.gathering": "the all-gather under way, a Handle; None if there is none. Yours to assign as well",
    "bucket.name": "what traces and messages call it: the `label` of a collective",
    "handle.wait()": "returns when the collective is done",
}
COLLECTIVES = {
    "self.comm.all_reduce(tensor, label)": "-> Handle; every rank gets the mean, in place",
    "self.comm.reduce_scatter(tensor, shard, label)": "-> Handle; the mean of this rank's part of `tensor`, in `shard`",
    "self.comm.all_gather(shard, tensor, label)": "-> Handle; all ranks' shards, in `tensor`",
}
STEP = {"self.step_shard(bucket)": "the optimizer's step over this rank's shard"}
OWNED = Part("owned", "What must a rank keep between steps, of each of the three, to step its shard?")

EXERCISES = (
    Exercise(
        "stage1_os",
        "(8 + 8/N) Ψ bytes",
        "2 (N-1)/N Ψ elements, as in stage 0",
        (
            OWNED,
            Part("reduce", "A rank steps its own shard. Of which gradients does it need the mean?"),
            Part("update", "Step, and hand on what is new. A bucket may travel while the next is stepped."),
            Part("gather", "A rank has new values of its own shard, and needs those of all."),
            Part("synchronize", "When it returns, anybody may read the parameters, and all are new."),
        ),
        {
            **BUCKETS,
            "bucket.parameters": "[N x shard] all parameters of the bucket; the model's are views of it",
            **COLLECTIVES,
            **STEP,
            "self.buckets": "in the order in which gradients fill them",
        },
    ),
    Exercise(
        "stage2_grad",
        "(4 + 12/N) Ψ bytes, and never more than two buckets of gradients on their way",
        "2 (N-1)/N Ψ elements, as in stage 0",
        (
            OWNED,
            Part(
                "take_room", "`bucket.local` gets a tensor, unless it has one. Two of them at most are alive at once."
            ),
            Part("reduce", "What is kept is the mean of a shard. What becomes of the room that held the whole?"),
        ),
        {
            **BUCKETS,
            "bucket.local is None": "it has no room: so it is before its first gradient, and again when it has left",
            "bucket.padded_numel": "elements of the whole bucket, padding included",
            "bucket.kind.dtype": "of its gradients",
            **COLLECTIVES,
            "self.comm.device": "where tensors live",
            "self.travelling": "a list, empty when backward begins, and yours to fill: the handles of buckets that "
            "have left, the oldest first, until somebody has waited for them",
        },
    ),
    Exercise(
        "stage3_param",
        "16/N Ψ bytes, and a few units' parameters in use",
        "up to 3 (N-1)/N Ψ elements",
        (
            OWNED,
            Part("gather", "Room for the whole unit, and all shards on their way to it; nothing where that has begun."),
            Part("all_gather", "From where to where do a bucket's shards go?"),
            Part(
                "free",
                "What had all parameters gives its memory back, whoever else holds a view of it; the shard stays. "
                "A use outside the unit shall show.",
                "bucket.full.untyped_storage().resize_(0)",
            ),
            Part(
                "end_backward",
                "Its weights are not needed any more, and its gradients are there, if it will not run again.",
            ),
            Part("reduce_scatter", "Of which gradients is the mean kept, and where?"),
        ),
        {
            "bucket.parameters": "[shard] what this rank keeps",
            "bucket.full": "[N x shard] room for the whole bucket; its storage may shrink to nothing and grow again",
            "bucket.full.nbytes": "bytes of it, whatever its storage has",
            "bucket.views": "{name: the parameter as a view of `full`}",
            "bucket.nothing.views": "{name: NaN in the parameter's shape}",
            "bucket.nothing.restore()": "makes those NaN again, whatever was written there",
            "bucket.members": "{name: the model's parameter}",
            **BUCKETS,
            "unit.buckets, unit.gathered": "of a unit; whether it is gathered, or about to be",
            "self.turns.remains(unit)": "whether it ran more often in forward than backward has come to it",
            "unit.open": "its backward has begun and not ended",
            "self.reducing": "whether this backward communicates gradients",
            "self.reduce(unit)": "sends the gradients of a unit, by `reduce_scatter`",
            **COLLECTIVES,
        },
    ),
)


# The second half. What they show of stages 1 to 3 is what the exercises before them ask for.
LATER = (
    Exercise(
        "offload",
        "on the device 4 Ψ bytes, and never more than two buckets of gradients on their way; on the host 16/N Ψ",
        "2 (N-1)/N Ψ elements between ranks, as in stage 2; over the bus Ψ/N down and Ψ/N up",
        (
            Part("placed", "Of each state: which elements does this rank keep, and in which tier?"),
            Part("reduce", "Where does the mean go that is kept, and when may it? The room is given back.", "mean ="),
            Part(
                "update",
                "The host steps beside whatever follows. Begin the steps, and wait for none of them here.",
                "for bucket in self.buckets:",
                "if not self.delayed_update",
            ),
            Part("bring_up", "What has to be over before new parameters come up? Others wait for the copy."),
            Part("gather", "Every rank needs all shards on its device. From when on does this one have its own there?"),
        ),
        {
            "self.rank": "r",
            "self.ratio": "the part of a shard that stays on the device, its last elements; 0 to 1",
            'self.tier["device"], self.tier["cpu"]': "the tiers: the device, and the host beside it",
            "bucket.whole()": "all elements of a bucket, a slice",
            "bucket.shard(rank)": "those of a rank's shard, a slice",
            "layout.cut_in_two(part, fraction)": "-> the first `fraction` of a slice, and the rest of it: two slices",
            '{"parameters": [(part, tier)], ...}': "what `placed` returns: for each of parameters, gradients and "
            "optimizer the slices that are kept, each with its tier",
            "length(part)": "elements of a slice; a part without any is in no table",
            "bucket.local": "[N x shard] this rank's own gradients on the device; None when the room is given back",
            "bucket.parameters": "[N x shard] all parameters of the bucket, on the device",
            "bucket.pieces": "the parts of this rank's shard, each of which lies in one tier and is stepped there",
            "bucket.handle": "the Handle of the reduction and what follows it. Yours to assign: others wait for it",
            "bucket.stepping": "a list: the Handles of the steps of its pieces. Yours to assign",
            "bucket.rising": "the Handle of the copy that brings new parameters up. Yours to assign",
            "bucket.gathering": "the Handle of the all-gather. Yours to assign as well",
            "bucket.name": "what traces and messages call it: the `label` of a collective",
            "self.step_piece(bucket, piece)": "-> Handle; begins a piece's step, in its tier",
            "self.bus.down(bucket, mean, after=)": "-> Handle; `mean` [shard] goes down to the pieces, once the Handle "
            "`after` is done",
            "self.bus.up(bucket)": "-> Handle; what the steps have made comes up into this rank's part of "
            "`bucket.parameters`",
            "self.comm.reduce_scatter(tensor, shard, label)": "-> Handle; the mean of this rank's part of `tensor`, in "
            "`shard`, which may be that part itself",
            "self.comm.all_gather(shard, tensor, label, after=)": "-> Handle; all ranks' shards, in `tensor`, once the "
            "Handle `after` is done",
            "handle.wait()": "returns when it is done",
            "self.travelling": "a list, yours to fill: for each bucket that has left the handle after which its room "
            "is free, the oldest first; `take_room` waits for them",
        },
        sources=("cpu.py",),
    ),
    Exercise(
        "zeropp",
        "16/N Ψ bytes, and a few units' parameters in use; with `hierarchical` 2/P Ψ more",
        "between nodes of P ranks, of the M = 2 Ψ bytes that stage 3 sends three times: M/2, 0 and M/4",
        (
            Part(
                "Blocks.pack",
                "From `part` [..., blocks, elements], fp32, to the scale of each block and to `steps`, whole "
                "numbers of it in fp32, from -largest to largest. Every number comes back to within half a step of its "
                "own block; a block of zeros as zeros; one with an infinity or a NaN as NaN throughout.",
                "top = ",
                "if self.bits == 4:",
            ),
            Part(
                "Blocks._values", "What do those steps stand for, in the largest range that is allowed?", "return steps"
            ),
            Part(
                "SecondShards.second",
                "Of a node's copy of a bucket each of its ranks keeps an equal part, in the order of its ranks.",
            ),
            Part(
                "TwoHops.reduce",
                "Both hops, but for the sum at the end: pieces to messages in the right order, inside the node, their "
                "sums over this node, and those across.",
                "pieces = ",
                "return self._mean",
            ),
        ),
        {
            "self.largest": "127 for 8 bits, 7 for 4: the most that a code counts in either direction",
            "scales": "[..., blocks] fp32, a view of the message: to be written",
            "elements, codes": "views of the values and of the message; the lines below write the codes from `steps`",
            "torch.finfo(torch.float32).tiny": "the smallest normal number",
            "top.isfinite()": "where a tensor is neither infinite nor NaN",
            "steps, scales[..., None]": "in `_values`: steps [..., blocks, elements], and a scale for each of them",
            "tensor.clamp_(-largest, largest)": "keeps values within the range, in place; NaN stays",
            "bucket.padded_numel": "elements of a bucket, padding included",
            "bucket.local": "[N x shard] this rank's own gradients: N pieces in the order of the ranks",
            "nodes, places, shard": "how many nodes, how many ranks on each, elements of a shard",
            "self.inside, self.across": "Collectives of this rank's node, and of the ranks at its place in all nodes: "
            "`rank`, `size` and `all_to_all` of each are theirs",
            "inside.all_to_all(tensor, received, label)": "part k of a flat `tensor` goes to rank k of the node, and "
            "part k of `received` comes from there",
            "self._messages(bucket, *shape)": "room for messages of one shard each, uint8 [*shape, bytes]",
            "self._pack(bucket, hop, scale, pieces, messages)": "pieces [..., shard] into their messages, on the lane; "
            "the first hop is 0, the second 1",
            "self.blocks.add_up(messages, total)": "what messages [k, ..., bytes] stand for, added up over k into "
            "`total` [..., shard], fp32; at once, so to be handed to the lane",
            "self.comm.work(label, function)": "-> Handle; runs it on the lane, after what was handed there before",
            "self.comm.buffer(*shape, dtype=)": "a tensor for the lane to write",
            "partial(function, *args)": "a call for later",
            "outgoing, incoming": "the names that the last line has for the messages of the second hop; `messages`, "
            "`received` and `sums` those of the first",
        },
        sources=("quantize.py", "transports.py", "engine.py"),
    ),
    Exercise(
        "stage2_grad",
        "(4 + 12/N) Ψ bytes, and never more than two buckets of gradients on their way",
        "2 (N-1)/N Ψ elements, as in stage 0",
        (
            Part("take_room", "One bucket may travel while another one fills; a third has to wait. For which handle?"),
            Part("reduce", "Who is the first to read the mean? Until then the reduction has time."),
            Part("update", "One bucket's shards may travel while the next one's is stepped."),
            Part("gather", "Who is the first to read the parameters?"),
        ),
        {
            **{what: does for what, does in BUCKETS.items() if what.startswith(("bucket.h", "bucket.g", "handle"))},
            "bucket.local is None": "it has no room: so it is before its first gradient, and again when it has left",
            "bucket.arrive()": "waits for the reduction, and adds up the mean; `finish_backward` calls it",
            "bucket.land()": "waits for the all-gather under way, if there is one",
            **{what: does for what, does in COLLECTIVES.items() if "all_reduce" not in what},
            **STEP,
            "self.travelling": "a list, empty when backward begins: room for the handles of buckets that have left, "
            "until somebody has waited for them",
            "self.synchronize()": "waits for all all-gathers under way",
        },
        edits=(
            Edit("take_room", (), "filling =", "bucket.local = torch"),
            Edit("reduce", ("bucket.handle.wait()", "bucket.local = None"), "bucket.local = None"),
            Edit("update", ("for bucket in self.buckets:", "    self.gather(bucket)"), "self.gather(bucket)"),
            Edit("gather", ("bucket.land()",)),
        ),
        name="overlap",
    ),
)
ALL = (*EXERCISES, *LATER)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)  # there are none
    with one_line_errors():
        for exercise in ALL:
            if exercise.engine.resolve() == exercise.path.resolve():
                raise InputError(
                    f"{exercise.package}/engine.py is what you write; an exercise as given is in the archive"
                )
            exercise.path.parent.mkdir(exist_ok=True)
            exercise.path.write_text(written(exercise))
            print(exercise.path.relative_to(ROOT))


def apart(exercises):
    """The same exercises with more parts: what an earlier one asks for stands in no later one either."""
    asked, found = [], []  # (the lines of a part, where it is asked for)
    for exercise in exercises:
        parts = {part.method: part for part in exercise.parts}
        methods, lines = methods_of(exercise.solution)
        for name, method in methods.items():
            body = bare(lines[slice(*place(method, Part(name, ""), lines))])
            before = [(text, where) for text, where in asked if shows(body, text)]
            if name not in parts and before:
                text, where = before[-1]
                but = "" if text in body else ", but for a line"
                parts[name] = Part(name, f"You have written this before{but}, in {where}.")
        asked += [(text, f"`{name}` of {exercise.path.name}") for name, text in solutions(exercise).items()]
        found.append(replace(exercise, parts=tuple(parts[name] for name in methods if name in parts)))
    return found


if __name__ == "__main__":
    main()
