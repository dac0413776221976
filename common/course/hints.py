"""What a teacher says to a mistake, in three steps: the idea, where it lives, and nearly how it is done."""

HINTS = {
    "open part": (
        "This part is yours to write. The method's docstring says what it is for, and the head of the file what is "
        "at hand.",
        "Write what the table at the head of the file says of this phase, and nothing more: most parts call one "
        "collective.",
        "Read the same phase on one page, in minimal.py of the stage, and say it with what is at hand here.",
    ),
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
    "crash": (
        "The traceback names your line. Read what it says of lengths: a shard has an N-th of the elements of its "
        "bucket.",
        "Is each tensor what the call wants? `reduce_scatter` takes a whole bucket and a shard, `all_gather` a "
        "shard and a whole bucket.",
        "Print the lengths and what is None, on each rank, just before that line, and run the smallest case again.",
    ),
    "died": (
        "A process that dies without a traceback has read memory that it does not have any more.",
        "Something still looks into a storage that was given back: a weight, or a view of it.",
        "Before anybody can read them, point the weights at something else: see what stands for freed ones.",
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
        "Keep the handle when a gather begins, and before anybody may read the parameters wait for every one that "
        "was kept.",
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
        "One bucket fills while one travels: a third one has to wait until the older has arrived.",
        "Before taking room, count the buckets that have room and those that travel; while there are more than one, "
        "wait for the handle that left first.",
    ),
    "not freed": (
        "A unit's parameters are needed while it runs, in forward and in backward, and at no other time.",
        "Autograd holds views of the buffer, so letting go of the parameters frees nothing: the storage itself has "
        "to go.",
        "Shrink the buffer's storage to nothing, and point the weights at what stands for freed ones.",
    ),
    "freed weights keep what was written": (
        "A freed weight must show that it is none: whoever reads it sees NaN, whatever somebody wrote there meanwhile.",
        "The NaN is one number that stands for all elements. A write changes that number.",
        "Whenever a unit is freed, make what stands for its weights NaN again.",
    ),
    "sent twice": (
        "A layer that runs twice gets its gradient in two parts, and its weights need one reduction.",
        "Its first backward ended, and another one is to come. How does the engine know?",
        "Send a unit's gradients when the count of its runs, forward less backward, has come down to none.",
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
        "Is something gathered that is gathered already, or reduced that has been reduced?",
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
        "Take the smallest case, print each phase's tensors on both ranks, and find the first that is not what "
        "minimal.py of the stage has there.",
    ),
}
