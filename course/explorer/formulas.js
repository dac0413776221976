// lab/plan in JavaScript, name by name: what a rank holds, sends and moves. A test holds both to the same figures.

const PLAN = JSON.parse(document.getElementById("plan").textContent);
const [LOSS, HEAD, BLOCK, BUCKETS, FIRST, EMBEDDING] = PLAN.moments;
const STATES = ["parameters", "gradients", "optimizer"];

// The rows of lab.plan for `setting`; {refused} says why there are none.
function figures(setting) {
  const degree = setting.tensor * setting.pipeline;
  if (setting.world_size % degree) {
    return { refused: `Tensor × pipeline, ${degree}, does not divide ${setting.world_size} GPUs: choose other degrees.` };
  }
  const shape = setting.model ? PLAN.shapes[setting.model] : ofSize(setting.params);
  if (setting.pipeline > shape.layers) {
    return { refused: `A pipeline of ${setting.pipeline} needs as many layers: the model has ${shape.layers}.` };
  }
  if (shape.positions && setting.seq > shape.positions) {
    return { refused: `The model has ${shape.positions} positions: a sample has as many at most.` };
  }
  for (const heads of [shape.heads, shape.kv_heads]) {
    if (heads % setting.tensor) {
      return { refused: `Tensor, ${setting.tensor}, does not divide the model's ${heads} heads.` };
    }
  }
  const machine = PLAN.gpus[setting.gpu];
  const offload_activations = setting.checkpoints && setting.offload_activations;
  const sequence_parallel = setting.tensor > 1 && setting.sequence_parallel;
  const width = PLAN.widths[setting.precision];
  const rank = new Rank(shape, machine, { ...setting, offload_activations, sequence_parallel, width });
  const budget = PLAN.usable * machine.holds;
  const switches = Object.fromEntries(PLAN.switches.map((name) => [name, setting[name]]));
  const rows = PLAN.ways.map((way) => {
    const row = rank.row(way.engine === "zeropp" ? { ...way, own: switches } : way);
    const uneven = way.engine.startsWith("zeropp") && rank.ranks % rank.perNode;
    row.refused = uneven ? `${way.way} needs nodes of equal size: ${rank.perNode} does not divide ${rank.ranks}.` : null;
    row.fits = !uneven && row.device <= budget && !full(row, rank.gpu, budget);
    return row;
  });
  const advised = PLAN.advised.find((number) => rows[number].fits);
  return { rank, rows, budget, compute_seconds: rank.computeSeconds(), computing: rank.computing(), advised };
}

// The first limit that a row exceeds; undefined if it fits.
function full(row, gpu, budget) {
  if (row.device > budget) return "GPU";
  if (row.host > PLAN.usable * gpu.host_holds) return "host";
  return row.disk > PLAN.usable * gpu.disk_holds ? "disk" : undefined;
}

// A GPT with so many parameters, `aspect` times as wide as it is deep.
function ofSize(parameters) {
  const { aspect, vocabulary, sequence } = PLAN;
  const layers = Math.max(1, Math.round((parameters / (12 * aspect ** 2)) ** (1 / 3)));
  const rest = vocabulary / (24 * layers); // 12 layers width² and an embedding are all of them
  const width = Math.max(1, Math.round((rest ** 2 + parameters / (12 * layers)) ** 0.5 - rest));
  const root = Math.min(vocabulary * width, parameters);
  return {
    parameters, layers, block: (parameters - root) / layers, root, last: 0, largest: root, tied: true, width, vocabulary, sequence,
    attention: width, heads: 8 * Math.max(1, Math.floor(width / (8 * aspect))), kv_heads: 0, window: 0,
    whole: 4 * width, cut: 12 * width, working: 4 * width, weights: 5 * width ** 2,
  };
}

// A rank's part, if so many GPUs of a node are in use, of what a node has once.
function sharedBy(machine, gpus) {
  const parts = ["disk", "host_memory", "host_holds", "disk_holds"].map((name) => [name, machine[name] / gpus]);
  const buses = machine.buses ?? Infinity;
  return { ...machine, bus: machine.bus * Math.min(1, buses / gpus), ...Object.fromEntries(parts) };
}

// Where a way keeps each state: "device", "cpu" or "nvme".
function tiersOf(way) {
  const tiers = way.own.tiers ?? "device";
  return typeof tiers === "string" ? Object.fromEntries(STATES.map((state) => [state, tiers])) : tiers;
}

class Rank {
  constructor(shape, machine, job) {
    const { tensor, pipeline } = job;
    const degree = tensor * pipeline;
    const used = Math.min(job.per_node, job.world_size); // GPUs of a node
    this.ranks = job.world_size / degree;
    this.used = used;
    this.perNode = Math.min(this.ranks, Math.max(1, Math.floor(used / degree)));
    this.rings = Math.min(degree, used);
    this.gpu = sharedBy(machine, used);
    const split = job.sequence_parallel ? tensor : 1; // ranks that share what tensor parallelism leaves whole
    Object.assign(this, { shape, job, tensor, split, width: job.width, sequence: job.seq });
    this.psi = shape.parameters / degree;
    this.master = 8 + (this.width === 2 ? 4 : 0); // Adam's two moments; in 16-bit an fp32 weight too
    this.summed = job.accumulate > 1 ? 4 : this.width; // sums over micro-batches are in fp32
    this.bucket = Math.min(this.psi, Math.max(PLAN.bucket, shape.largest / tensor));
    [this.block, this.root, this.last] = [shape.block, shape.root, shape.last].map((count) => count / tensor);
    this.kept = (this.root + (this.last || this.block)) / pipeline; // stays gathered between forward and backward
  }

  row(way) {
    const { gpu, job } = this;
    const [states, onHost, disk] = this.states(way);
    const [sent, sent_by_node] = this.sent(way);
    const [moved, disk_moved] = this.moved(way);
    const host = onHost + this.offloaded();
    const bus = moved + (2 * job.accumulate * this.offloaded()) / job.pipeline;
    const moments = PLAN.moments.map((moment) => [moment, this.transient(way, moment), this.activations(moment)]);
    const [moment, transient, activations] = moments.reduce((worst, one) => (one[1] + one[2] > worst[1] + worst[2] ? one : worst));
    const seconds = {
      collectives: Math.max(sent / gpu.inside, (this.rings * sent_by_node) / gpu.between),
      bus: bus / gpu.bus,
      disk: disk_moved ? disk_moved / gpu.disk : 0,
    };
    const stepsOnHost = way.engine.startsWith("offload");
    const stepped = this.psi / (way.engine === "stage0_ddp" ? 1 : this.sharers(way));
    const stepping = ((PLAN.stepped + 2 * 8) * stepped) / (stepsOnHost ? gpu.host_memory : gpu.memory);
    const computing = this.computing() + this.packed(way) / gpu.memory;
    return {
      ...way, states, host, disk, moment, transient, activations, sent, sent_by_node, bus, disk_moved, seconds,
      device: states.parameters + states.gradients + states.optimizer + transient + activations,
      step_seconds: Math.max(computing, ...Object.values(seconds)) + stepping,
    };
  }

  // How many ranks hold the states between them: those of a node in hybrid sharding, else all.
  sharers(way) {
    return way.engine === "zeropp.hybrid" ? this.perNode : this.ranks;
  }

  // Bytes of model states: on the device by class, on the host, on disk.
  states(way) {
    const { width: w, master: m, summed: g, psi } = this;
    const n = this.sharers(way);
    const second = this.switches(way).second ? w / this.perNode : 0;
    const held = {
      stage0_ddp: [w, w, m],
      stage1_os: [w, w, m / n],
      stage2_grad: [w, g / n, m / n],
      stage3_param: [w / n, g / n, m / n],
      zeropp: [w / n + second, g / n, m / n],
      offload: [w, 0, 0],
      "offload.nvme": [w / n, g / n, m / n],
      "zeropp.hybrid": [w / n, g / n, m / n],
    }[way.engine];
    const tiers = tiersOf(way);
    const beside = g + (g > w ? w : 0); // in tiers a 16-bit mean stays beside the sum
    if (way.own.tiers) held[1] = beside / n;
    if (w === 4 && tiers.parameters !== tiers.optimizer) held[2] += 4 / n;
    const on = (tier) => STATES.map((state, number) => (tiers[state] === tier ? held[number] * psi : 0));
    const [parameters, gradients, optimizer] = on("device");
    const [host, disk] = ["cpu", "nvme"].map((tier) => on(tier).reduce((sum, count) => sum + count));
    return [{ parameters, gradients, optimizer }, way.engine === "offload" ? ((beside + 12) / n) * psi : host, disk];
  }

  // Which of ZeRO++'s three are on. Within one node a secondary shard would be the first, so there is none.
  switches(way) {
    const [int8, second, int4] = PLAN.switches.map((name) => way.own[name] ?? true);
    return { int8, second: second && this.ranks > this.perNode, int4 };
  }

  // Bytes in flight at a moment: gathered units, buckets of gradients, and the buffer that receives a mean.
  transient(way, moment) {
    const { width: w, ranks: n, block, root, last, bucket, psi } = this;
    const unit = block + root;
    const onDevice = w === 2 && !way.engine.startsWith("offload");
    if (!PLAN.in_units.includes(way.engine)) {
      const receives = onDevice ? (4 * bucket) / (way.engine === "stage0_ddp" ? 1 : n) : 0;
      if (PLAN.no_sync.includes(way.engine)) {
        // The second micro-batch adds up in fp32, bucket by bucket; a third finds all sums.
        const added = this.job.accumulate > 2 ? psi : moment === LOSS ? 0 : bucket;
        return receives + (this.summed > w ? 4 * added : 0);
      }
      const inFlight = moment === LOSS ? 0 : moment === BUCKETS ? 2 : 1;
      return receives + w * Math.min(psi, inFlight * bucket);
    }
    const receives = onDevice ? (4 * Math.max(unit, last)) / this.sharers(way) : 0;
    if (moment === LOSS || moment === HEAD) return receives + w * (this.kept + (moment === LOSS ? 0 : root || last));
    if (moment === EMBEDDING) return receives + w * (root + (this.shape.tied ? 0 : last) + block + unit + last);
    const means = moment === FIRST && this.job.accumulate > 1 && !way.own.tiers ? (w * psi) / this.sharers(way) : 0;
    const codes = way.engine === "zeropp" ? this.codesInFlight(way, block) : 0;
    return receives + means + w * (root + 2 * block + unit) + codes;
  }

  // Bytes that ZeRO++ sends and receives: codes of the next block, and of the gradient of the one before, which has then
  // freed what it kept.
  codesInFlight(way, block) {
    const { int8, second, int4 } = this.switches(way);
    const [code, n, p] = [0.5 + PLAN.scale, this.ranks, this.perNode];
    const gathered = int8 && !second ? (1 + PLAN.scale) * (1 + 1 / n) : 0;
    const reduced = int4 ? 2 * code + 4 / n + (n > p ? (2 * code) / p + 4 / p : 0) : 0;
    return gathered * block + Math.max(0, reduced * block - this.layer()[2]);
  }

  // Bytes of a layer's activations: of its inputs, of all that it computes, and what it keeps for backward.
  layer() {
    const { width: w, shape, job, split } = this;
    const tokens = job.batch * this.sequence;
    const inputs = ((w * shape.width) / split) * tokens;
    const inside = w * (shape.whole / split + shape.cut / this.tensor) * tokens;
    return [inputs, inside, job.offload_activations ? 0 : job.checkpoints ? inputs : inside];
  }

  // Bytes of activations at a moment, and of gradients that are in no bucket yet.
  activations(moment) {
    const { width: w, tensor: t, shape, job } = this;
    const tokens = job.batch * this.sequence;
    let [inputs, inside, kept] = this.layer();
    kept *= shape.layers;
    const ends = kept / job.pipeline + 2 * inputs;
    const logits = job.fused_loss ? 0 : (shape.vocabulary * tokens) / t;
    if (moment === LOSS) return ends + PLAN.logit * logits;
    const embedding = (w * shape.vocabulary * shape.width) / t; // a gradient of it
    if (moment === HEAD) return ends + w * logits + embedding;
    if (moment === EMBEDDING) return inputs + (shape.tied ? 3 : 1) * embedding;
    if (moment === BUCKETS) kept *= 1 - this.bucket / this.psi; // what backward has gone through is freed
    if (moment === FIRST) kept *= 1 - (1 - 1 / shape.layers) / job.pipeline;
    const again = job.checkpoints ? inside - inputs : 0;
    const waits = shape.tied ? embedding : 0; // the head's, for the embedding's
    return kept + again + inputs + waits + (w * (shape.working * tokens + shape.weights)) / t;
  }

  // Bytes that checkpoints keep on the host.
  offloaded() {
    return this.job.offload_activations ? this.shape.layers * this.layer()[0] : 0;
  }

  // Bytes that a rank sends in a step, and that its data-parallel group sends out of its node.
  sent(way) {
    if (way.engine === "zeropp") return this.sentCompressed(way);
    const { width: w, psi, job } = this;
    const n = this.sharers(way);
    const reduced = psi * (PLAN.no_sync.includes(way.engine) ? 1 : job.accumulate);
    const gathered = PLAN.in_units.includes(way.engine) ? job.accumulate * (2 * psi - this.kept) : psi;
    const sent = (w * (reduced + gathered) * (n - 1)) / n;
    if (way.engine === "zeropp.hybrid") { // and the means across, in a ring for each rank of a node
      const across = 2 * w * reduced * (1 - n / this.ranks);
      return [sent + across / n, across];
    }
    return [sent, n > this.perNode ? sent : 0]; // a ring leaves each node once
  }

  sentCompressed(way) {
    const { width: w, ranks: n, perNode: p, psi, job } = this;
    const { int8, second, int4 } = this.switches(way);
    const first = ((int8 ? 1 + PLAN.scale : w) * (n - 1)) / n;
    const again = second ? (w * (p - 1)) / p : first; // from the node's secondary shards, nothing leaves it
    const repeated = job.accumulate * (2 * psi - this.kept) - psi;
    const gatheredOut = first * (psi + (second ? 0 : repeated));
    let reduced = (w * psi * (n - 1)) / n;
    let reducedOut = reduced;
    if (int4) { // in two hops: within the node, and the node's sums across
      const [code, nodes] = [(0.5 + PLAN.scale) * psi, n / p];
      reduced = code * ((p - 1) / p + (nodes - 1) / n);
      reducedOut = (code * (nodes - 1)) / nodes;
    }
    const sent = first * psi + again * repeated + job.accumulate * reduced;
    return [sent, n > p ? gatheredOut + job.accumulate * reducedOut : 0];
  }

  // Bytes that ZeRO++ reads and writes for its codes, each in one pass.
  packed(way) {
    if (way.engine !== "zeropp") return 0;
    const { width: w, psi, job } = this;
    const { int8, second, int4 } = this.switches(way);
    const repeated = second ? 0 : job.accumulate * (2 * psi - this.kept) - psi;
    return (int8 ? (1 + w) * (psi + repeated) : 0) + (int4 ? (1 + w) * job.accumulate * psi : 0);
  }

  // Bytes over the bus in a step, and those that the disk reads and writes.
  moved(way) {
    const [w, g, k] = [this.width, this.summed, this.job.accumulate];
    const shard = this.psi / this.ranks;
    if (way.engine === "offload") return [(k + 1) * w * shard, 0]; // gradients to the host, parameters to the device
    if (way.engine !== "offload.nvme") return [0, 0];
    const { parameters, gradients, optimizer } = tiersOf(way);
    const gathers = w * k * (2 * shard - this.kept / this.ranks);
    let bus = (parameters !== "device" ? gathers : 0) + (gradients !== "device" ? k * w * shard : 0);
    for (const [tier, size] of [[gradients, g], [parameters, w]]) {
      if ((tier === "device") !== (optimizer === "device")) bus += size * shard;
    }
    let disk = parameters === "nvme" ? gathers + w * shard : 0;
    if (gradients === "nvme") disk += 2 * (w + 4 * (k - 1)) * shard; // sums are in fp32
    if (optimizer === "nvme") disk += 2 * 12 * shard;
    return [bus, disk];
  }

  // Seconds that a step computes; a pipeline waits for its first micro-batch to arrive at the last stage.
  computing() {
    return (this.job.accumulate + this.job.pipeline - 1) * this.computeSeconds();
  }

  // Seconds that a micro-batch computes: matrices, attention, what moves bytes through memory, and tensor's sums.
  computeSeconds() {
    const { shape, job, gpu, tensor } = this;
    const again = job.checkpoints ? 1 : 0;
    const layers = Math.ceil(shape.layers / job.pipeline); // of the stage with the head, for which the others wait
    const tokens = job.batch * this.sequence;
    const peak = gpu.flops[this.width];
    const head = shape.vocabulary * shape.width;
    const products = (6 + 2 * again) * ((((shape.active ?? shape.parameters) - head) * layers) / shape.layers + head);
    const [forward, backward] = gpu.attending;
    const window = Math.min(shape.window || this.sequence, this.sequence);
    const met = (window * (2 - window / this.sequence)) / 2; // tokens, on the mean
    const attending = ((4 * (1 + again)) / forward + 10 / backward) * layers * shape.attention * met;
    const elements = (PLAN.moved + 2 * again) * layers * (shape.whole / this.split + shape.cut / tensor);
    const moved = elements * this.width + (PLAN.logit_moved * shape.vocabulary) / tensor;
    const sums = layers * (4 + again) + (job.pipeline === 1 ? 2 : 1); // and the embedding's, and the head's
    const sent = sums * 2 * (1 - 1 / tensor) * this.width * shape.width * tokens;
    const rate = tensor <= this.used ? gpu.inside : gpu.between / this.used;
    return (products * tokens) / tensor / (peak * gpu.fraction) + (attending * tokens) / tensor / peak
      + (moved * tokens) / gpu.memory + sent / rate;
  }
}
