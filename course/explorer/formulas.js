// lab/plan in JavaScript, name by name: what a rank holds, sends and moves. A test holds both to the same figures.

const PLAN = JSON.parse(document.getElementById("plan").textContent);

// The rows of lab.plan for `setting`; {refused} says why there are none.
function figures(setting) {
  const degree = setting.tensor * setting.pipeline;
  if (setting.world_size % degree) {
    return { refused: `Tensor × pipeline, ${degree}, does not divide ${setting.world_size} GPUs: choose other degrees.` };
  }
  const gpu = PLAN.gpus[setting.gpu];
  const ranks = setting.world_size / degree;
  const rank = new Rank({
    shape: setting.model ? PLAN.shapes[setting.model] : ofSize(setting.params),
    gpu,
    ranks,
    perNode: gcd(ranks, Math.max(1, Math.floor(setting.per_node / degree))),
    tensor: setting.tensor,
    pipeline: setting.pipeline,
    width: PLAN.widths[setting.precision],
    batch: setting.batch,
    sequence: setting.seq,
    checkpoints: setting.checkpoints,
  });
  const budget = PLAN.usable * gpu.holds;
  const switches = Object.fromEntries(PLAN.switches.map((name) => [name, setting[name]]));
  const rows = PLAN.ways.map((way) => {
    const row = rank.row(way.engine === "zeropp" ? { ...way, own: switches } : way);
    row.fits = row.device <= budget && row.host <= gpu.host_holds && row.disk <= gpu.disk_holds;
    return row;
  });
  const advised = PLAN.advised.find((number) => rows[number].fits);
  return { rank, rows, budget, compute_seconds: rank.computeSeconds(), advised };
}

// A GPT with so many parameters, `aspect` times as wide as it is deep.
function ofSize(parameters) {
  const { aspect, vocabulary, sequence } = PLAN;
  const layers = Math.max(1, Math.round((parameters / (12 * aspect ** 2)) ** (1 / 3)));
  const width = Math.max(1, Math.round((parameters / (12 * layers)) ** 0.5));
  return { parameters, layers, rest: vocabulary * width, width, vocabulary, sequence };
}

function gcd(one, other) {
  return other ? gcd(other, one % other) : one;
}

class Rank {
  constructor(about) {
    Object.assign(this, about);
    this.psi = this.shape.parameters / (this.tensor * this.pipeline);
    this.master = this.width === 2 ? 12 : 8; // the fp32 weight and Adam's two moments; in fp32 the weight is there
    this.rest = this.shape.rest / this.tensor;
    this.block = (this.shape.parameters - this.shape.rest) / this.shape.layers / this.tensor;
    this.kept = this.block + this.rest; // stays gathered between forward and backward
  }

  row(way) {
    const [states, host, disk] = this.states(way);
    const [sent, sent_by_node] = this.sent(way);
    const [bus, disk_moved] = this.moved(way);
    const [transient, activations] = [this.transient(way), this.activations()];
    return {
      ...way, states, host, disk, transient, activations, sent, sent_by_node, bus, disk_moved,
      device: states.parameters + states.gradients + states.optimizer + transient + activations,
      seconds: {
        collectives: Math.max(sent / this.gpu.inside, sent_by_node / this.gpu.between),
        bus: bus / this.gpu.bus,
        disk: disk_moved / this.gpu.disk,
      },
    };
  }

  // Bytes of model states: on the device by class, on the host, on disk.
  states(way) {
    const { width: w, ranks: n, master: m, psi } = this;
    const second = this.switches(way).second ? w / this.perNode : 0;
    const [parameters, gradients, optimizer] = {
      stage0_ddp: [w, w, m],
      stage1_os: [w, w, m / n],
      stage2_grad: [w, w / n, m / n],
      stage3_param: [w / n, w / n, m / n],
      zeropp: [w / n + second, w / n, m / n],
      offload: [w, 0, 0],
      "offload.nvme": [0, 0, 0],
    }[way.engine];
    const device = { parameters: parameters * psi, gradients: gradients * psi, optimizer: optimizer * psi };
    if (way.engine === "offload") return [device, ((w + 12) / n) * psi, 0];
    const beside = way.engine === "offload.nvme" ? ((2 * w + m) / n) * psi : 0;
    return way.own.tiers === "nvme" ? [device, 0, beside] : [device, beside, 0];
  }

  // Which of ZeRO++'s three are on. Within one node a secondary shard would be the first, so there is none.
  switches(way) {
    const [int8, second, int4] = PLAN.switches.map((name) => way.own[name] ?? true);
    return { int8, second: second && this.ranks > this.perNode, int4 };
  }

  // Bytes that come and go within a step: buckets in flight, or units that are gathered and their gradients.
  transient(way) {
    if (["stage0_ddp", "stage1_os"].includes(way.engine)) return 0;
    if (["stage2_grad", "offload"].includes(way.engine)) {
      return 2 * this.width * Math.min(this.psi, Math.max(PLAN.bucket, this.rest));
    }
    return this.width * (2 * this.block + this.rest + this.block + this.rest);
  }

  // Bytes of activations at their peak.
  activations() {
    const { width: w, tensor, shape } = this;
    const tokens = this.batch * this.sequence;
    const layers = shape.layers / this.pipeline;
    const inputs = w * shape.width * tokens;
    const inside = ((PLAN.block * w) / 2) * shape.width * tokens;
    const logits = (PLAN.logit * shape.vocabulary * tokens) / tensor;
    if (!this.checkpoints) return (layers * inside) / tensor + logits;
    return layers * inputs + Math.max(inside / tensor, logits);
  }

  // Bytes that a rank sends in a step, and that all ranks of a node send out of it.
  sent(way) {
    if (way.engine === "zeropp") return this.sentCompressed(way);
    const { width: w, ranks: n, psi } = this;
    const third = ["stage3_param", "offload.nvme"].includes(way.engine) ? psi - this.kept : 0;
    const sent = (w * (2 * psi + third) * (n - 1)) / n;
    return [sent, n > this.perNode ? sent : 0]; // a ring leaves each node once
  }

  sentCompressed(way) {
    const { width: w, ranks: n, perNode: p, psi } = this;
    const { int8, second, int4 } = this.switches(way);
    const first = ((int8 ? 1 + PLAN.scale : w) * (n - 1)) / n;
    const again = second ? (w * (p - 1)) / p : first; // from the node's secondary shards, nothing leaves it
    const gathered = first * psi + again * (psi - this.kept);
    const gatheredOut = second ? first * psi : gathered;
    let reduced = (w * psi * (n - 1)) / n;
    let reducedOut = reduced;
    if (int4) { // in two hops: within the node, and the node's sums across
      const [code, nodes] = [(0.5 + PLAN.scale) * psi, n / p];
      reduced = code * ((p - 1) / p + (nodes - 1) / n);
      reducedOut = (code * (nodes - 1)) / nodes;
    }
    return [gathered + reduced, n > p ? gatheredOut + reducedOut : 0];
  }

  // Bytes over the bus in a step, and those that the disk reads and writes.
  moved(way) {
    const w = this.width;
    const [shard, kept] = [this.psi / this.ranks, this.kept / this.ranks];
    if (way.engine === "offload") return [2 * w * shard, 0]; // gradients down, parameters up
    if (way.engine !== "offload.nvme") return [0, 0];
    const bus = w * (3 * shard - kept); // up before forward and before backward, gradients down
    if (way.own.tiers !== "nvme") return [bus, 0];
    const read = w * (3 * shard - kept) + 12 * shard; // for forward and backward; what is stepped
    return [bus, read + (2 * w + this.master) * shard];
  }

  // Seconds that a micro-batch computes: 6 operations for a parameter and token, 8 with checkpoints.
  computeSeconds() {
    const operations = (this.checkpoints ? 8 : 6) * this.psi * this.batch * this.sequence;
    return operations / (this.gpu.flops[this.width] * this.gpu.fraction);
  }
}
