"""What a teacher says to a mistake, in three steps: the idea, where it lives, and nearly how it is done."""

from common.course.later_hints import LATER

HINTS = {
    "syntax": (
        "Python cannot read the file. Nothing was run.",
        "The mark shows where reading stopped; the mistake is often a line earlier: a bracket, a colon, an "
        "indentation.",
        "Open the file in an editor that marks such things, or compare with a freshly written exercise.",
    ),
    "import": (
        "The file raises while it is imported, before any engine is built.",
        "Only the parts were taken out. Are names used that are imported nowhere, or that are misspelt?",
        "Compare what stands outside of the parts with a freshly written exercise: python -m common.course.exercises",
    ),
    "solution": (
        "This takes the stage's own engine. The exercise is to write what is missing in it.",
        "Everything that an engine does stands in the file, but for what `common` has at hand.",
        "Begin with a freshly written exercise: python -m common.course.exercises",
    ),
    "past the meter": (
        "The notebooks call torch.distributed by its name. Here an engine sends by `self.comm`, which counts the bytes "
        "and returns a handle at once.",
        "The collectives at the head of the file do what you mean: look for the one of the same name.",
        "`self.comm.all_gather(shard, tensor, label)` takes flat tensors, the shard and the whole, and no list.",
    ),
    "name": (
        "Python knows no such name here: a letter is off, or it has another name.",
        "The message names your line, and often what you may have meant. What is at hand stands at the head of the "
        "file.",
        "Compare the name with the list at the head of the file, letter by letter.",
    ),
    "call": (
        "Something is called with other arguments than it takes.",
        "The message names your line. How many arguments does the list at the head of the file give, and in which "
        "order?",
        "A reduce-scatter takes the whole and then the shard, an all-gather the shard and then the whole; both take a "
        "label.",
    ),
    "lengths": (
        "The lengths do not fit: a shard has an N-th of the elements of its bucket.",
        "Is each tensor what the call wants? `reduce_scatter` takes a whole bucket and a shard, `all_gather` a "
        "shard and a whole bucket.",
        "Print the lengths, on each rank, just before that line, and grade again: the end of what is printed is shown.",
    ),
    "nothing there": (
        "Where a tensor is needed there is None: the room was never taken, or given back before it was used.",
        "A bucket's room is None before its first gradient and after it has left. Who uses it here, and when?",
        "Take the room before it is sealed, also for a bucket that got no gradient; let go of it when the collective "
        "has been begun.",
    ),
    "no memory": (
        "A tensor is used whose storage has too few bytes.",
        "A freed unit's buffer has a storage of nothing. Who gives it back its bytes, before the gather fills it?",
        "Have the storage of `full` grow to `full.nbytes`, bytes and not elements, before the all-gather begins.",
    ),
    "a new tensor": (
        "The weights of the model lie in another tensor than the one that the engine fills.",
        "Assigning a name, or a parameter's data, makes it another tensor. The model's weights are views of the old.",
        "Write into the tensor that is there, in place: a collective does so.",
    ),
    "calls itself": (
        "A phase calls what calls it, round and round: engine.step() calls `update`, as backward calls `reduce`.",
        "Which of the phases calls the method that you are in? The list at the head of the file has their order.",
        "In the update, step each bucket's shard by what is at hand for that, and not by the engine's step.",
    ),
    "step_shard": (
        "`update` is what engine.step() calls, and it steps one bucket's shard at a time.",
        "The optimizer is over all shards, and has a gradient only while one of them is stepped.",
        "For each bucket call `self.step_shard(bucket)`: it hands the mean over and calls the optimizer.",
    ),
    "two ranks only": (
        "On 2 ranks all is well, and on 3 it is not: N stands where it was written as 2.",
        "Which number in the parts is a number of ranks? `bucket.shard(rank)` and `self.world_size` know how many "
        "there are.",
        "Take a rank's part by `bucket.shard(self.rank)`, and write no 2, nor `1 - self.rank`.",
    ),
    "elsewhere": (
        "A tensor is made without saying where. It comes to lie on torch's default device, which need not be the "
        "engine's.",
        "On a GPU it would lie in the host's memory. Which line makes a tensor?",
        "Give `torch.empty` and its kin `device=self.comm.device`.",
    ),
    "waited for at once": (
        "The bits are right, and nothing overlaps: a collective is waited for where it begins.",
        "What is computed next does not need it. Who is the first to read what it writes?",
        "Keep the handle, return, and leave the waiting to whoever reads the result.",
    ),
    "no prefetch": (
        "The next unit's parameters should be on their way while this one computes. Here nothing is.",
        "A gather begins one unit ahead, and only `use` waits for it.",
        "Begin the all-gather, keep its handle as `bucket.gathering`, and wait for nothing in `gather`.",
    ),
    "foreign backward": (
        "Gradients can come by a backward that is not this engine's: then other ranks may not be there to reduce them.",
        "`self.reducing` says whether this backward is the engine's own and communicates; hooks of gradients are for "
        "`allocate` to place, which refuses what no engine's backward brings.",
        "Reduce only where `self.reducing` is set; the rest waits for the end of backward, or for the step.",
    ),
    "crash": (
        "The message names your line. The error is in this line alone, and no collective is to blame.",
        "What does each name in that line hold there, on this rank and on the other?",
        "Print them just before that line, on each rank, and grade again: the end of what is printed is shown.",
    ),
    "died": (
        "A process that dies without a traceback has read memory that it does not have any more.",
        "Something still looks into a storage that was given back: a weight, or a view of it.",
        "Point freed weights at what stands for them before anybody can read them. And let the storage of `full` grow "
        "again: a new tensor in its place leaves the views behind.",
    ),
    "16-bit": (
        "In fp32 all was well. In 16-bit a gradient has half the bytes, and something here has not.",
        "Rooms for gradients are of the bucket's own dtype, and on the device of the engine.",
        "Give the tensor that you make the dtype that the head of the file names.",
    ),
    "hang": (
        "A collective begins when all ranks have called it. Here some wait in one that others never call.",
        "Does something that differs between ranks decide whether, or in which order, a collective is called?",
        "Call the same collectives in the same order on every rank: never inside an `if` on the rank, on values, or "
        "on what happened to arrive. And a loop has to end.",
    ),
    "table": (
        "Ask of each state: who reads it after backward has ended, and which part of it?",
        "The optimizer steps one shard of a bucket. What it does not read, and forward does not read either, no "
        "rank keeps.",
        "Parameters are read by forward, whole, unless they can be gathered; gradients and optimizer states by the "
        "step, which is of one shard. Compare with 'held' at the head of the file.",
    ),
    "not reduced": (
        "Each rank has seen its own samples only. What makes their gradients those of the whole batch?",
        "The weights moved as this rank's own gradient says. The mean over ranks never reached the step.",
        "Send the bucket's own gradients into a reduce-scatter, and let it write where the mean is expected.",
    ),
    "sum, not mean": (
        "The gradient of a mean over N ranks is the mean of their gradients, not the sum.",
        "The step is N times as long as it should be. The collectives here divide; is something added once more?",
        "Give each gradient to one reduction only, and step its mean once.",
    ),
    "divided twice": (
        "The mean is a sum, divided by N once.",
        "The step is an N-th of what it should be. The collectives here divide already.",
        "Leave the division to the collective: what it hands back is the mean.",
    ),
    "not stepped": (
        "Nothing moved. Between the mean and the new weights lies the optimizer's step.",
        "The shards are stepped by `step_shard`, and an optimizer passes over what has no gradient.",
        "In the update, step every bucket, and see that the mean has been written where it is expected.",
    ),
    "factor": (
        "The direction is right and the length is not: something multiplies, divides or steps once too often.",
        "Count how often a gradient is added and how often a shard is stepped, in one step.",
        "Each bucket is reduced once and stepped once.",
    ),
    "not gathered": (
        "After the step each rank has new values of its own shard, and old ones of all others.",
        "What a rank stepped must reach all ranks before the next forward. Which collective hands every shard to "
        "everybody?",
        "After its step every bucket is all-gathered, shard by shard, into the parameters that the model sees.",
    ),
    "gathered too early": (
        "What other ranks send is what they have at that moment. Here it is what they had before their step.",
        "The order within the update decides: the new values of a shard exist once it has been stepped.",
        "First step a bucket's shard, then begin its all-gather.",
    ),
    "not waited for": (
        "A collective that has begun is not a collective that has ended. Where it runs late, old values are read.",
        "Each collective returns a handle. Whoever reads what it writes waits for that handle first.",
        "Keep the handle when a gather begins, and wait for every one that was kept before anybody may read the "
        "parameters. If `synchronize` does that: who calls it?",
    ),
    "another shard": (
        "These values are right, and in the wrong place: they belong to another rank's shard.",
        "Rank r keeps, steps and sends shard r of a bucket. Which shard does each rank give away here?",
        "A bucket's shard of a rank is a slice: the rank's own number picks it, the same on the way out and in.",
    ),
    "no handle": (
        "The engine waits for a collective whose handle it was not given.",
        "A collective returns a handle. The rest of the engine looks for it on the bucket.",
        "Assign what the collective returns: a reduction's to `bucket.handle`, a gather's to `bucket.gathering`.",
    ),
    "not marked": (
        "The engine believes that the unit is not there, although its parameters are on their way.",
        "Whether a unit is gathered is written down on the unit, and others ask for it before they gather or free.",
        "Set `unit.gathered` when its gather begins; a unit that has it set is not gathered a second time.",
    ),
    "reads nothing": (
        "NaN is what memory holds here that nobody has written. Something reads before it was filled, or after it "
        "was freed.",
        "Follow the tensor: who takes the room, who fills it, who reads it, who gives it back? In which order?",
        "A unit's room is filled by an all-gather of all shards; a bucket's room by gradients, and by `seal` where "
        "none came.",
    ),
    "padding": (
        "A bucket is padded to N equal shards. What stands in the padding is added up and counted like any other "
        "gradient.",
        "The norm is over whole shards. One NaN in the padding makes all of it NaN, and clipping multiplies by it.",
        "Before a bucket leaves, the places that no gradient fills have to be zero: see what is at hand for that.",
    ),
    "unused": (
        "A layer that did not run got no gradient on this rank. The others still add this rank's part of it.",
        "Its place in the bucket holds what was there before: an old gradient, or whatever the memory had.",
        "Before a bucket leaves, the places that no gradient fills have to be zero: see what is at hand for that.",
    ),
    "room kept": (
        "Once a bucket is reduced, nobody reads the whole of its gradients again.",
        "Besides the mean of its shard the rank still holds the room in which the whole gradient travelled.",
        "When the bucket has left, let go of its room: the collective holds on to it as long as it needs it.",
    ),
    "two rooms": (
        "Gradients come faster than buckets leave. If each takes room at once, all of them are alive together again.",
        "One bucket fills while one travels: a third has to wait until the one that travels has arrived.",
        "Before taking room: as long as `travelling` has a handle, and the buckets with room and those that travel are "
        "more than one together, take out the oldest handle and wait for it. Whoever sends a bucket puts its handle "
        "there.",
    ),
    "not freed": (
        "A unit's parameters are needed while it runs, in forward and in backward, and at no other time.",
        "Autograd holds views of the buffer, so letting go of the parameters frees nothing: the storage itself has "
        "to go.",
        "Shrink the buffer's storage to nothing, and point the weights at what stands for freed ones.",
    ),
    "freed weights keep what was written": (
        "A freed weight has to show that it is gone: whoever reads it sees NaN, whatever was written there meanwhile.",
        "The NaN is one number that stands for all elements. A write changes that number.",
        "Whenever a unit is freed, make what stands for its weights NaN again.",
    ),
    "sent twice": (
        "Gradients are reduced once, when all of them are there. A layer that runs twice gets its own in two parts.",
        "One backward of the layer has ended, and another may be to come, or has ended before. How does the engine "
        "know?",
        "In stage 3, mark a unit whose backward has ended as not open, and send its gradients when the count of its "
        "runs, forward less backward, has come down to none.",
    ),
    "recomputation": (
        "A checkpoint runs the forward again during backward, and needs the weights again.",
        "What frees a unit must not do so between its second forward and its backward.",
        "See which phase the checkpoint calls before it computes again, and that nothing frees after it.",
    ),
    "half of an all-reduce": (
        "An all-reduce is a reduce-scatter and an all-gather. What is the second half for, if each rank steps one "
        "shard?",
        "The bits are right, and the bytes are not: the mean of all shards comes to a rank that reads one of them.",
        "Take the half that leaves each rank the mean of its own shard.",
    ),
    "sent too much": (
        "The weights are right, and more was sent than the stage needs.",
        "Count the collectives over one bucket in one step, and compare with 'sent' at the head of the file.",
        "Is something gathered that is gathered already, or reduced that has been reduced? In stage 3, is a unit still "
        "marked as open whose backward has ended?",
    ),
    "sent too little": (
        "Something that the ranks need from each other was not sent.",
        "Count the collectives over one bucket in one step, and compare with 'sent' at the head of the file.",
        "At the end of backward every bucket has been reduced once, whether it filled or not.",
    ),
    "held too much": (
        "The weights are right, and more is kept than the stage allows.",
        "Compare what is kept with the table at the head of the file, state by state.",
        "What nobody reads again is given back: set to None, or its storage shrunk to nothing.",
    ),
    "held too little": (
        "A state is missing just before the update, when all of them should be there.",
        "Which tensor should hold it, and who let go of it?",
        "Keep the mean of this rank's shard until the step has used it.",
    ),
    "differs": (
        "The weights go another way, and neither a factor nor an old value explains it.",
        "Compare the first element that is off: in which bucket does it lie, in whose shard, and what came last "
        "before?",
        "Print each phase's tensors on each rank and grade again: the end of what is printed is shown. Which is the "
        "first that is not what you expect?",
    ),
}

# Of the parts that are still open, by the method.
OPEN = {
    "owned": (
        "Fill in the table at the top of the stage's README: of each of the three, everything or a shard?",
        "A rank steps one shard: so much of the optimizer's states it needs. What do forward and backward need, and "
        "when?",
        "Return `Owned(parameters=..., gradients=..., optimizer=...)`, each `bucket.whole()` or "
        "`bucket.shard(self.rank)`.",
    ),
    "reduce": (
        "Backward has filled the bucket. Each rank needs the mean of what it steps, and nothing else.",
        "Make the bucket ready to travel, then begin the collective that leaves each rank the mean of its own "
        "shard. It runs on while backward does.",
        "`seal`, then `reduce_scatter` from `local` into `reduced`, its handle kept on the bucket. In stage 2 a "
        "bucket that got no gradient has no room yet, and what has left gives its room back.",
    ),
    "update": (
        "A step has two halves: each rank makes new values of its own shard, and then all ranks get them.",
        "Bucket by bucket, so that one travels while the next is stepped; and at the end nothing may be under way.",
        "For each bucket `step_shard`, then `gather`; behind the loop the method that waits for all of them.",
    ),
    "gather": (
        "Which collective gives every rank all shards?",
        "It takes this rank's shard and the room for the whole. In stage 3 that room has to be there first, and a "
        "unit that is gathered already is left alone.",
        "`all_gather`, and its handle kept as `bucket.gathering`. In stage 3: mark the unit, let the storage of "
        "`full` grow to `full.nbytes`, and gather `parameters` into it.",
    ),
    "synchronize": (
        "Whoever reads the parameters after a step must find the new ones.",
        "A gather that has begun has a handle. Which buckets have one?",
        "For each bucket whose `gathering` is not None: wait for it, and set it back to None.",
    ),
    "take_room": (
        "The first gradient of a bucket needs a place. How many such places may be alive at a time?",
        "Nothing to do where the bucket has room. Else count the buckets with room and those that travel.",
        "While one travels, and more than one is filling or travelling, wait for the one that left first; then "
        "`torch.empty` of the bucket's padded length, dtype and device.",
    ),
    "free": (
        "All that remains of a unit is its shard. Who holds on to the rest, and what shall a stray reader see?",
        "Autograd holds views of the buffer: letting go of a name frees nothing. The storage can shrink.",
        "Resize the storage of `full` to 0, point each parameter's `data` at its view of nothing, and restore the NaN.",
    ),
    "end_backward": (
        "A unit's backward is over. What is not needed any more, and what can leave?",
        "A unit that ran twice in forward has a second backward to come: its gradients wait for that.",
        "Mark it as not open; `free` it; and where this backward reduces and no run of it remains, `reduce` it.",
    ),
    "all_gather": (
        "What this rank has of a bucket is one shard. All ranks need all of them.",
        "The shards are what `bucket.parameters` is, on each rank its own; `bucket.full` has room for all.",
        "Return the Handle of `self.comm.all_gather` from the one to the other, under the bucket's name.",
    ),
    "reduce_bucket": (
        "This is how one bucket's gradients leave. Where have you written that before?",
        "As in `reduce` of stage 2, but for one line: what begins the collective is a method of its own here.",
        "`take_room`, `seal`, then `self.reduce_scatter(bucket)`, its handle kept on the bucket; `local` is None "
        "again, and the handle goes to `travelling`.",
    ),
    "reduce_scatter": (
        "What leaves here is the gradients of one bucket. Where have you sent those before?",
        "As in `reduce` of stages 1 and 2: of all gradients of the bucket each rank keeps the mean of its shard.",
        "Return the Handle of `self.comm.reduce_scatter` from `bucket.local` to `bucket.reduced`.",
    ),
}


def hints_of(idea, exercise=""):
    """The three hints of an idea; what is said of it in an exercise, by its key, if it is another thing there."""
    if idea in LATER.get(exercise, ()):
        return LATER[exercise][idea]
    return OPEN[idea.removeprefix("open ")] if idea.startswith("open ") else HINTS[idea]
