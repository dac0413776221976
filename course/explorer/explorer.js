// ---- the setting ----

const stops = (...numbers) => numbers;
const tenfold = [1, 1.1, 1.2, 1.3, 1.5, 1.75, 2, 2.2, 2.5, 2.7, 3, 3.5, 4, 4.5, 5, 5.3, 6, 6.7, 7, 7.5, 8, 9];
const sizes = [8, 9, 10, 11, 12].flatMap((power) => tenfold.map((number) => Number(`${number}e${power}`)));
const SLIDERS = [
  { key: "params", said: "Parameters", stops: [...sizes, 1e13], words: (count) => many(count) },
  {
    key: "world_size",
    said: "GPUs",
    stops: stops(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 2240, 3072, 4096),
  },
  { key: "per_node", said: "GPUs in a node", stops: stops(1, 2, 4, 8, 16) },
  { key: "batch", said: "Samples of a micro-batch", stops: stops(1, 2, 4, 8, 16, 32, 64, 128) },
  { key: "accumulate", said: "Micro-batches of a step", stops: stops(1, 2, 4, 8, 16, 32, 64, 128, 240) },
  { key: "seq", said: "Tokens of a sample", stops: stops(128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072) },
  { key: "tensor", said: "Tensor-parallel degree", stops: stops(1, 2, 4, 8) },
  { key: "pipeline", said: "Pipeline-parallel degree", stops: stops(1, 2, 4, 8, 12, 16, 35) },
];
const CHOICES = [
  {
    key: "model", said: "Model",
    options: [["", "a GPT of so many parameters"], ...Object.keys(PLAN.shapes).map((name) => [name, name])],
  },
  { key: "gpu", said: "GPU", options: Object.entries(PLAN.gpus).map(([name, gpu]) => [name, gpu.name]) },
  { key: "precision", said: "Precision", options: Object.keys(PLAN.widths).map((name) => [name, name]) },
];
const CHECKS = [
  { key: "checkpoints", said: "Activation checkpoints", place: "choices" },
  { key: "offload_activations", said: "which go to the host", place: "choices" },
  { key: "fused_loss", said: "A loss that keeps no logits", place: "choices" },
  { key: "sequence_parallel", said: "Sequence parallelism, with tensor", place: "choices" },
  ...["qwZ: parameters sent in int8", "hpZ: each node keeps a copy", "qgZ: gradients sent in int4"]
    .map((said, number) => ({ key: PLAN.switches[number], said, place: "switches" })),
];
const USUAL = {
  model: "", params: 7.5e9, gpu: "v100-32g", world_size: 64, per_node: 16, batch: 1, seq: 2048, tensor: 1, pipeline: 1,
  accumulate: 1, precision: "fp16", checkpoints: true, offload_activations: false, fused_loss: false,
  sequence_parallel: false, way: 0, ...Object.fromEntries(PLAN.switches.map((name) => [name, true])),
};
let setting = { ...USUAL };

const at = (id) => document.getElementById(id);

// Values in the address are settings if they make sense; all others take their defaults.
function fromAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const found = { ...USUAL };
  for (const [key, usual] of Object.entries(USUAL)) {
    if (!given.has(key)) continue;
    const text = given.get(key);
    if (typeof usual === "boolean") found[key] = text === "true" || (text !== "false" && usual);
    else if (typeof usual === "number") found[key] = Math.max(key === "way" ? 0 : 1, Number(text) || usual);
    else found[key] = text;
  }
  if (!(found.gpu in PLAN.gpus)) found.gpu = USUAL.gpu;
  if (!(found.precision in PLAN.widths)) found.precision = USUAL.precision;
  if (!(found.model in PLAN.shapes)) found.model = "";
  for (const key of SLIDERS.slice(1).map((slider) => slider.key)) found[key] = Math.round(found[key]);
  found.way = Math.min(found.way, PLAN.ways.length - 1);
  return found;
}

function toAddress() {
  const changed = Object.entries(setting).filter(([key, value]) => value !== USUAL[key]);
  history.replaceState(null, "", `#${new URLSearchParams(changed)}`);
}

// The command with the same figures.
function command() {
  const model = setting.model ? `--model ${setting.model}` : `--params ${setting.params.toExponential().replace("+", "")}`;
  const numbers = { "world-size": setting.world_size, "per-node": setting.per_node, batch: setting.batch, seq: setting.seq };
  const parts = [`python -m lab.plan ${model} --gpu ${setting.gpu}`];
  for (const [name, number] of Object.entries(numbers)) parts.push(`--${name} ${number}`);
  for (const name of ["tensor", "pipeline"]) if (setting[name] > 1) parts.push(`--${name} ${setting[name]}`);
  if (setting.precision !== "bf16") parts.push(`--precision ${setting.precision}`);
  if (setting.accumulate > 1 || setting.pipeline > 1) parts.push(`--accumulate ${setting.accumulate}`);
  if (!setting.checkpoints) parts.push("--no-checkpoints");
  if (setting.checkpoints && setting.offload_activations) parts.push("--offload-activations");
  if (setting.fused_loss) parts.push("--fused-loss");
  if (setting.tensor > 1 && setting.sequence_parallel) parts.push("--sequence-parallel");
  for (const name of PLAN.switches) if (!setting[name]) parts.push(`--with ${name}=False`);
  return parts.join(" ");
}

function change(some) {
  setting = { ...setting, ...some };
  show();
  toAddress();
}

// Runs from papers, each with its whole setting and its stage.
const RUNS = Object.fromEntries(Object.values(PLAN.landmarks).map(({ engine, said, ...run }) => {
  const { model, gpu, world_size } = run;
  const way = PLAN.ways.findLastIndex((one) => one.engine === engine); // Infinity's with its disk
  const { sequence: seq } = PLAN.shapes[model];
  const { ranks_per_node: per_node, bfloat16 } = PLAN.gpus[gpu];
  const label = `${model} on ${world_size} × ${PLAN.gpus[gpu].name.match(/[A-Z]\d{3}/)}`;
  return [label, { ...USUAL, precision: bfloat16 ? "bf16" : "fp16", ...run, seq, way, per_node }];
}));
RUNS["ZeRO's figure 1: 7.5 B on 64 × V100"] = USUAL;

function isRun(name) {
  return Object.entries(RUNS[name]).every(([key, value]) => key === "way" || value === setting[key]);
}

// ---- what is shown ----

const CLASSES = {
  parameters: "parameters", gradients: "gradients", optimizer: "optimizer states", gathered: "gathered units",
  buckets: "buckets in flight", activations: "activations",
};
const WIDE = 1.5; // the length of the bars' tracks, in GPU memories

function many(count) {
  const [unit, said] = [[1e12, "T"], [1e9, "B"], [1e6, "M"]].find(([size]) => count >= size) ?? [1, ""];
  return `${Number((count / unit).toPrecision(3))} ${said}`;
}

function amount(count) {
  if (!count) return "0";
  const [unit, said] = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([size]) => count >= size) ?? [1, "B"];
  return `${Number((count / unit).toPrecision(3))} ${said}`;
}

function duration(seconds) {
  if (!seconds) return "0";
  return seconds >= 1 ? `${Number(seconds.toPrecision(3))} s` : `${Number((1000 * seconds).toPrecision(2))} ms`;
}

// What a row's device holds, by class.
function parts(row) {
  const inBuckets = !PLAN.in_units.includes(row.engine);
  return {
    ...row.states,
    gathered: inBuckets ? 0 : row.transient,
    buckets: inBuckets ? row.transient : 0,
    activations: row.activations,
  };
}

function show() {
  showSetting();
  const found = figures(setting);
  document.body.classList.toggle("refused", "refused" in found);
  at("command").textContent = command();
  if (found.refused) {
    at("said").textContent = found.refused;
    return;
  }
  const { rows, rank, budget } = found;
  const row = rows[setting.way];
  const { gpu } = rank;
  rows.forEach((one, number) => showWay(one, number, gpu, budget));
  at("line").textContent =
    `The line is the GPU's memory, ${amount(gpu.holds)}; the dots, the ${amount(budget)} to plan with. ` +
    "▸ goes on beyond the picture.";
  at("said").textContent = sentence(row, found);
  at("of-title").textContent = `${capital(row.way)}: in figures`;
  const held = parts(row);
  bars("held", Object.keys(CLASSES).map((name) => [CLASSES[name], held[name], name]), gpu.holds, amount);
  bars("beside", [["host", row.host, "host", gpu.host_holds], ["disk", row.disk, "disk", gpu.disk_holds]], 0, amount);
  const most = Math.max(...rows.flatMap((one) => [one.sent, one.sent_by_node]), row.bus, row.disk_moved);
  bars("moved", [
    ["each GPU sends", row.sent, "wire"],
    ["leaves each node", row.sent_by_node, "wire"],
    ["crosses its bus", row.bus, "host"],
    ["from and to disk", row.disk_moved, "disk"],
  ], most, amount);
  const { computing } = found;
  const slowest = Math.max(...rows.map((one) => one.seconds.collectives), computing, row.seconds.bus, row.seconds.disk);
  bars("times", [
    ["computing", computing, "compute"],
    ["collectives", row.seconds.collectives, "wire"],
    ["bus", row.seconds.bus, "host"],
    ["disk", row.seconds.disk, "disk"],
  ], slowest, duration);
  followStep(row);
}

function showWay(row, number, gpu, budget) {
  const way = at("ways").children[number];
  const held = parts(row);
  const most = WIDE * gpu.holds;
  const track = way.querySelector(".track");
  for (const name of Object.keys(CLASSES)) {
    const part = track.querySelector(`.${name}-bar`);
    part.style.width = `${Math.min(100, (100 * held[name]) / most)}%`;
    part.classList.toggle("none", !held[name]);
  }
  track.classList.toggle("more", row.device > most);
  track.querySelector(".budget").style.left = `${(100 * budget) / most}%`;
  track.querySelector(".size").style.left = `${(100 * gpu.holds) / most}%`;
  const said = Object.keys(CLASSES).filter((name) => held[name]).map((name) => `${CLASSES[name]} ${amount(held[name])}`);
  track.setAttribute("aria-label", `${said.join(", ")}; the GPU has ${amount(gpu.holds)}`);
  way.querySelector("input").checked = number === setting.way;
  way.querySelector(".total").textContent = amount(row.device);
  way.querySelector(".fits").textContent = row.fits ? "fits" : row.refused ? "refused" : `${full(row, gpu, budget)} full`;
  way.querySelector(".fits").classList.toggle("no", !row.fits);
}

// Bars with their names and figures: [name, figure, class, and the length of its track, if not `most`].
function bars(id, rows, most, words) {
  at(id).replaceChildren(...rows.map(([name, figure, kind, room = most]) => {
    const bar = make("div", "bar", `<span>${name}</span><div class="track"><i class="${kind}-bar"></i></div><b></b>`);
    const track = bar.querySelector(".track");
    track.firstChild.style.width = `${room ? Math.min(100, (100 * figure) / room) : 0}%`;
    track.firstChild.classList.toggle("none", !figure);
    track.classList.toggle("more", figure > room);
    bar.querySelector("b").textContent = room === most ? words(figure) : `${words(figure)} of ${words(room)}`;
    return bar;
  }));
}

function sentence(row, { rows, rank, budget, advised, computing }) {
  const states = row.states.parameters + row.states.gradients + row.states.optimizer;
  const room = { GPU: `the ${amount(budget)} to plan with`, host: "its part of the host", disk: "its part of the disks" };
  const said = [`${capital(row.way)}: ${states ? `${amount(states)} of` : "no"} model states on the GPU, ` +
    `${amount(row.device)} in all. ${row.fits ? "It fits." : row.refused ?? `It does not fit into ${room[full(row, rank.gpu, budget)]}.`}`];
  if (advised === undefined) said.push("Nothing fits: take more GPUs, a tensor-parallel degree or shorter samples.");
  else if (rows[advised] !== row) said.push(`The lowest that fits is ${rows[advised].way}.`);
  else said.push("It is the lowest that fits.");
  const [name, seconds] = Object.entries(row.seconds).sort((one, other) => other[1] - one[1])[0];
  said.push(seconds > computing
    ? `${capital(name)} ${name === "collectives" ? "take" : "takes"} longer than computing, ${duration(seconds)} against ${duration(computing)}: ${PLAN.no_sync.includes(row.engine) ? "accumulate micro-batches or take larger ones" : "take larger micro-batches"}.`
    : `Computing takes longest, ${duration(computing)}.`);
  return said.join(" ");
}

function capital(text) {
  return text[0].toUpperCase() + text.slice(1);
}

// ---- the controls ----

function make(tag, name, html = "") {
  const element = document.createElement(tag);
  element.className = name;
  element.innerHTML = html;
  return element;
}

function nearest(numbers, number) {
  const distance = (other) => Math.abs(Math.log(other / number));
  return numbers.reduce((best, other, place) => (distance(other) < distance(numbers[best]) ? place : best), 0);
}

function showSetting() {
  for (const { key, stops: numbers, words = String } of SLIDERS) {
    const number = key === "params" && setting.model ? PLAN.shapes[setting.model].parameters : setting[key];
    const input = at(key);
    input.value = nearest(numbers, number);
    input.setAttribute("aria-valuetext", words(number));
    input.parentElement.querySelector("output").textContent =
      key === "params" && setting.model ? `${words(number)}, ${setting.model}` : words(number);
  }
  for (const { key } of CHOICES) at(key).value = setting[key];
  for (const { key } of CHECKS) at(key).checked = setting[key];
  at("landmark").value = Object.keys(RUNS).find(isRun) ?? "";
}

function build() {
  for (const { key, said, stops: numbers } of SLIDERS) {
    const slider = make("label", "slider", `<span>${said}</span><output for="${key}"></output>
      <input type="range" id="${key}" min="0" max="${numbers.length - 1}">`);
    slider.htmlFor = key; // else it would name the output
    slider.querySelector("input").addEventListener("input", ({ target }) => {
      change({ [key]: numbers[target.value], ...(key === "params" && { model: "" }) });
    });
    at("sliders").append(slider);
  }
  for (const { key, said, options } of CHOICES) {
    const list = options.map(([value, name]) => `<option value="${value}">${name}</option>`);
    const choice = make("label", "choice wide", `${said} <select id="${key}">${list.join("")}</select>`);
    choice.querySelector("select").addEventListener("change", ({ target }) => {
      const { value } = target;
      change({
        [key]: value,
        ...(key === "gpu" && { per_node: PLAN.gpus[value].ranks_per_node }),
        ...(key === "model" && value && { seq: PLAN.shapes[value].sequence }),
      });
    });
    at("choices").append(choice);
  }
  for (const { key, said, place } of CHECKS) {
    const check = make("label", "check wide", `<input type="checkbox" id="${key}"> ${said}`);
    check.querySelector("input").addEventListener("change", ({ target }) => change({ [key]: target.checked }));
    at(place).append(check);
  }
  const runs = Object.keys(RUNS).sort().map((name) => `<option>${name}</option>`);
  at("landmark").innerHTML = `<option value="">a setting of your own</option>${runs.join("")}`;
  at("landmark").addEventListener("change", ({ target }) => change(RUNS[target.value]));
  at("classes").innerHTML = Object.entries(CLASSES)
    .map(([name, said]) => `<li><i class="${name}-bar" aria-hidden="true"></i>${said}</li>`).join("");
  PLAN.ways.forEach((way, number) => {
    const segments = Object.keys(CLASSES).map((name) => `<i class="${name}-bar"></i>`).join("");
    const row = make("label", "way", `<span><input type="radio" name="way" value="${number}">${capital(way.way)}</span>
      <div class="track" role="img">${segments}<u class="budget"></u><u class="size"></u></div>
      <output><span class="total"></span><span class="fits"></span></output>`);
    row.querySelector("input").addEventListener("change", () => change({ way: number }));
    at("ways").append(row);
  });
  at("setting").addEventListener("submit", (event) => event.preventDefault());
}

// ---- a step: page.js has the steppers ----

const RECORDED = JSON.parse(at("recorded").textContent);
const steppers = {};

function followStep(row) {
  const there = row.engine in RECORDED;
  at("unrecorded").textContent = there ? "" : `No step of ${row.way} is recorded here: another engine's is shown.`;
  showStep(there ? row.engine : Object.keys(RECORDED).filter((name) => name !== "most").at(-1));
}

function showStep(engine) {
  for (const place of document.querySelectorAll(".stepper")) {
    place.hidden = place.dataset.side !== engine;
    if (!place.hidden && !(engine in steppers)) steppers[engine] = newStepper(place, engine);
  }
  for (const button of at("engines").children) button.setAttribute("aria-pressed", button.value === engine);
}

// The code behind an event is named here; the lesson pages link to it.
function newStepper(place, engine) {
  const events = RECORDED[engine].events.map((event) => ({ ...event, lines: [0, 0], line: event.lines[0] }));
  const cause = () => {
    const { method, line, code } = events[place.querySelector("input").value];
    place.querySelector(".cause").replaceChildren(...(line ? [`${method}, line ${line}: `, make("code", "")] : []));
    if (line) place.querySelector(".cause code").textContent = code;
  };
  place.addEventListener("shown", cause);
  const stepper = new Stepper(place, { [engine]: { ...RECORDED[engine], events }, most: RECORDED.most });
  const keys = { ArrowLeft: "back", ArrowRight: "next", Home: "first", End: "last", " ": "play" };
  place.addEventListener("keydown", (event) => {
    const onButton = event.key === " " && event.target.matches("button");
    const onSlider = event.key !== " " && event.target.matches("input");
    if (!(event.key in keys) || onButton || onSlider || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    stepper.go(keys[event.key]);
  });
  return stepper;
}

function buildSteps() {
  for (const place of document.querySelectorAll(".stepper")) {
    const button = make("button", "");
    button.type = "button";
    button.value = place.dataset.side;
    button.textContent = place.querySelector("h3").textContent;
    button.addEventListener("click", () => showStep(button.value));
    at("engines").append(button);
  }
}

build();
buildSteps();
setting = fromAddress();
show();
addEventListener("hashchange", () => {
  setting = fromAddress();
  show();
});
