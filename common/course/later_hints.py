"""What is said to a mistake in an exercise of the second half, where it is not what is said in the stages."""

LATER = {
    "offload": {
        "open placed": (
            "Forward and backward run on the device. Who reads the other two states, and where does that one run?",
            "What a step reads lies where the step is taken: this rank's shard of gradients and optimizer states, "
            "the first part on the host and the last `ratio` of it on the device.",
            "`layout.cut_in_two` the shard at 1 - ratio; pair each part with its tier, and leave out parts without "
            'any element. Return {"parameters": [(everything, device)], "gradients": those pairs, "optimizer": those '
            "pairs}.",
        ),
        "open reduce": (
            "As in stage 2 each rank keeps the mean of its shard. The step will look for it on the host.",
            "The mean may take the place of this rank's part of `bucket.local`. It goes down when it is there, "
            "beside the rest of backward, and whoever wants it waits for the copy.",
            "`reduce_scatter` from `local` into `local[shard]`; `self.bus.down(bucket, mean, after=)` that handle, "
            "and what it returns is `bucket.handle`; then `local` is None, and the handle goes to the end of "
            "`travelling`.",
        ),
        "open update": (
            "Each bucket's pieces are stepped, each in its tier. Whom would you keep waiting if you waited here?",
            "`step_piece` begins a step and returns its handle; `synchronize` looks for a list of them on each bucket.",
            "For each bucket: `bucket.stepping` is the list of what `self.step_piece(bucket, piece)` returns for "
            "each of `bucket.pieces`. Wait for nothing.",
        ),
        "open bring_up": (
            "What goes up is what the steps have made.",
            "The copy must not begin before all steps of this bucket are over; other buckets' steps may go on beside "
            "it.",
            "Wait for each of `steps`; then `bucket.rising` is what `self.bus.up(bucket)` returns.",
        ),
        "open gather": (
            "This is the all-gather of stage 2, but for the moment at which it may begin.",
            "This rank's shard on the device is new when the copy up is done. A collective can be told to wait for "
            "that, so that nobody else has to.",
            "`all_gather` of the shard of `bucket.parameters` into the whole, `after=bucket.rising`; keep its handle "
            "as `bucket.gathering`.",
        ),
        "placement": (
            "The weights are right, and a state lies in another tier than it should, or is said to.",
            "Of this rank's shard the first 1 - ratio belongs to the host and the rest to the device: gradients and "
            "optimizer states alike. Parameters are on the device, all of them.",
            "Look at the two slices that `cut_in_two` returns, which tier each is paired with, and that `gradients` "
            "and `optimizer` get the same pairs.",
        ),
        "sent too little": (
            "The step works with a gradient that never came to where the step is taken, or its result never came back.",
            "Compare 'sent' at the head of the file with what you begin: in a step each bucket crosses the bus twice.",
            "After the reduction `self.bus.down`, after the step `self.bus.up`, and then the all-gather.",
        ),
        "not waited for": (
            "Copies and collectives run on lanes of their own, and each lane knows only its own order. Where they "
            "run late, old values are read.",
            "The copy down reads what the reduction writes, the copy up what the steps make, the all-gather what the "
            "copy up brings. Which of these begins too early, or is kept nowhere?",
            "Give the earlier handle as `after=` to what follows it, wait for the steps before `bus.up`, and keep "
            "what `bus.up` returns as `bucket.rising`.",
        ),
        "nothing there": (
            "A tensor is used that nobody has made yet: the new parameters are there when the step is over.",
            "What the copy up reads is made by the steps of this bucket's pieces. Were they waited for?",
            "In `bring_up` wait for each of `steps` before `self.bus.up(bucket)` begins.",
        ),
        "two rooms": (
            "Nobody waits for what still uses the room, and so too many rooms are alive together.",
            "`take_room` waits for the handles in `travelling`. Who reads the room when the reduction is over?",
            "The mean lies in the room until it has gone down: append to `travelling` what `self.bus.down` returns.",
        ),
        "lengths": (
            "The lengths do not fit, or a part has no elements.",
            "With ratio 0 nothing stays on the device, and a part without any element is in no table. What is reduced "
            "is [shard], a part of the bucket.",
            "Leave out of the table what `length(part)` says has none. If the line is another: print the lengths there "
            "and grade again, the end of what is printed is shown.",
        ),
        "another shard": (
            "One rank steps right and the others do not: what they step belongs to another shard.",
            "What goes down is [shard], this rank's mean. Of which elements of the bucket are the ones that you give "
            "away?",
            "`bucket.local[bucket.shard(self.rank)]` is what the reduction writes and what goes down.",
        ),
        "waited for at once": (
            "The bits are right, and something is waited for where it begins: a collective, a copy, or a step of the "
            "host.",
            "The line above says what is missing beside what. Which handle is waited for before that moment?",
            "Hand handles on as `after=`, or keep them on the bucket. Only `bring_up` waits here, and only for the "
            "steps of its own bucket.",
        ),
    },
    "zeropp": {
        "open Blocks.pack": (
            "A code counts steps of a scale. How large must a step be, so that the largest number of a block still "
            "has a code?",
            "Largest absolute value of each block / `self.largest`, but no less than the smallest normal number, so "
            "that nothing is divided by zero. What is written to `scales` is NaN for a block that is not finite.",
            "`part.abs().amax(dim=-1)`; divide it and clamp from below; `torch.where` it is finite the scale, else "
            "NaN, copied into `scales`; then `part / scale[..., None]`, rounded: no step is beyond the largest code.",
        ),
        "open Blocks._values": (
            "A code says how many steps; a value is how large they are together.",
            "Each block has its own scale. Of a product that is beyond the dtype the largest number is taken.",
            "Multiply `steps` by `scales[..., None]`, clamp by `largest` on both sides, and return it.",
        ),
        "open SecondShards.second": (
            "All ranks of a node together hold the bucket once more. Which part has this one?",
            "The bucket is cut into as many parts as the node has ranks: the world's number does not matter here.",
            "`bucket.padded_numel // self.inside.size` elements, from `self.inside.rank` times that: a slice.",
        ),
        "open TwoHops.reduce": (
            "A piece crosses to another node once, as part of its node's sum. So who in this node adds up the pieces "
            "of rank (n, p)?",
            "Its neighbours send them to their own p-th rank. A message for place p holds the pieces of (0, p), (1, "
            "p), ...; what came is added up over the ranks of this node, packed again, and part n goes to node n.",
            "View `local` as [nodes, places, shard] and transpose the first two; `_pack` hop 0 into messages "
            "[places, nodes]; `inside.all_to_all`, flat; hand `partial(add_up, received, sums)` to `comm.work`, sums "
            "fp32 [nodes, shard]; `_pack` hop 1 into outgoing [nodes]; `across.all_to_all` into incoming.",
        ),
        "bound": (
            "A number has to come back to within half a step of its block, and one does not.",
            "Half a step is what rounding to the nearest costs. Is something cut off; does the largest number of the "
            "block have a code; is the scale that is written the one that was divided by?",
            "The scale is the largest absolute value / 127, or 7; round; and to come back multiply by the scale of "
            "the same block.",
        ),
        "one scale": (
            "One large number anywhere makes all steps coarse: small blocks come back as nothing.",
            "Over which dimension is the largest value taken? `part` is [..., blocks, elements].",
            "Take the maximum over the last dimension only, so that there is one scale for each block.",
        ),
        "zeros": (
            "A block of zeros has no largest value to count steps of. What is 0 / 0?",
            "NaN, and what integer NaN becomes depends on the machine. The scale must never be zero.",
            "Clamp the scale from below by the smallest normal number; zero divided by it is zero.",
        ),
        "no NaN": (
            "A gradient that overflowed has to be seen by whoever scales the loss. Here it became a number.",
            "A code cannot say NaN: which integer becomes of it depends on the machine. A scale can. Which blocks need "
            "that?",
            "Where the largest value of a block is not finite, write NaN as its scale: it comes back as NaN "
            "throughout.",
        ),
        "too large": (
            "The largest number that fp32 has went in, and an infinity comes back: a scaler takes it for an overflow.",
            "Largest code times scale is the largest number of the block, but for rounding. Rounding also goes up.",
            "In `_values` clamp the product by `largest` on both sides; NaN stays.",
        ),
        "table": (
            "The ranks of a node hold a copy of the bucket together. Between them nothing may be missing or kept "
            "twice.",
            "Two ranks of a node have two halves, and those of the next node the same two halves once more.",
            "The size and the rank that count are those of `self.inside`, and not those of the world.",
        ),
        "second shards": (
            "After an update the second shards are filled, and gathers inside the node bring other values than those.",
            "Which part of what came does each rank keep, and is that the part that its node expects of it?",
            "Part `self.inside.rank` of as many as `self.inside.size`.",
        ),
        "pieces": (
            "Pieces are added up that belong to different ranks, or they come to another rank than they belong to.",
            "Piece k is rank k's, and k counts node by node: [nodes, places]. An all-to-all inside the node sends "
            "its k-th part to place k, one across nodes to node k. Which index has to come first in each?",
            "First hop: [places, nodes], so transpose. Second hop: [nodes]. Add up over the ranks that sent, "
            "dimension 0.",
        ),
        "nodes and places": (
            "With as many nodes as ranks on a node all is well: one number stands where the other belongs.",
            "Ranks count node by node, so of a rank's number the node is the larger digit: [nodes, places].",
            "View as (nodes, places, shard) before it is transposed; messages and received are [places, nodes]; "
            "sums, outgoing and incoming [nodes].",
        ),
        "one hop": (
            "Other bytes are sent than by two hops: first inside the node, and then across with what the node has "
            "added up.",
            "Inside a node the link is fast, so most goes there. Across nodes each rank sends one message to each "
            "other node.",
            "`self.inside.all_to_all` of [places, nodes] messages, then `self.across.all_to_all` of [nodes] messages.",
        ),
        "divided twice": (
            "The mean is a sum, divided by N once.",
            "The step is too short by a factor. `_mean`, on the last line, divides already.",
            "Leave `sums` what they are: sums over the node.",
        ),
        "reads nothing": (
            "NaN is what memory holds here that nobody has written: something is computed before what it reads has "
            "come.",
            "A collective that has begun is not over when the next line runs. Which line computes at once?",
            "Hand the adding up to the lane: `self.comm.work(label, partial(self.blocks.add_up, received, sums))`.",
        ),
        "not waited for": (
            "Where the lane runs late, something is computed from what has not come yet.",
            "Nothing has to be waited for: what is handed to the lane runs in the order of the calls.",
            "Give the adding up to `self.comm.work`, as `_pack` and `_mean` do with theirs.",
        ),
        "waited for at once": (
            "The bits are right, and a hop is waited for where it begins: backward stands still meanwhile.",
            "The lane runs what it is given in order, so no line here has to wait for the one before it.",
            "Call no `wait` in here: the last line's handle is that of all.",
        ),
        "lengths": (
            "The lengths do not fit.",
            "An all-to-all has as many parts as the group has ranks, of equal length; a message is one shard's; a "
            "second shard one part of as many as the node has ranks.",
            "Print the shapes on each rank just before that line and grade again: the end of what is printed is shown. "
            "Compare it with the table in the class's docstring.",
        ),
    },
    "overlap": {
        "waited for at once": (
            "The bits are right. A collective is over before the next thing is computed, so nobody hides it.",
            "The line above says which collective should be under way, and beside what. Who waits for it before "
            "that? Look for `wait` and `land`, and for a loop that ends before the next one begins.",
            "In backward: begin the reduction, give up the room, note its handle in `travelling`, and wait only "
            "where a third room would be taken. In the step: one loop, step a bucket and begin its gather; wait "
            "behind the loop.",
        ),
        "two rooms": (
            "Now that nobody waits, gradients come faster than buckets leave: too many rooms are alive.",
            "A collective holds its room until it is over. `take_room` is where a third one would begin, and "
            "`travelling` is where it can see what has not come back.",
            "Before a bucket gets room: as long as `travelling` has a handle, and the buckets with room and those that "
            "travel are more than one together, take out the oldest handle and wait for it.",
        ),
        "not waited for": (
            "What is read after the step has not come yet.",
            "`gather` does not wait any more, and somebody has to, before the parameters are read.",
            "Behind the loop of `update`, call `self.synchronize()`.",
        ),
        "no handle": (
            "`finish_backward` waits for each bucket's reduction, and finds none.",
            "Whoever waits later needs the handle: the bucket's for the end of backward, and `travelling` for the "
            "room.",
            "Keep `bucket.handle`, and append the same handle to `self.travelling`.",
        ),
    },
}
