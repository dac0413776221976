"""Losses of transformers' Trainer, of Accelerate and of Fabric, stock under DDP and by these engines.

Where they part, a second row takes the cause away. Of each library the script is one and the same.

    python -m common.words.beside_hugging_face --json results/local/words_hugging_face.json
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn

from common.data import load_text
from common.measure.hardware import hardware
from common.measure.tables import Table
from common.outputs import check_outputs, one_line_errors, parser_of, publish
from common.ranks.world import launch
from common.train import STAGES
from common.words.wrapped import TRIED, tried

STEPS, WINDOW, SAMPLES = 8, 32, 4  # SAMPLES of a micro-batch on a rank
LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
WAYS = {  # library -> {what the script does: what it says}; "engine_options" and "exact_norm" are taken out
    "Trainer": {
        "plain": {},
        "2 micro-batches": {"gradient_accumulation_steps": 2},
        "clipped": {"max_grad_norm": 0.5},
        "clipped, norms in float64": {"max_grad_norm": 0.5, "exact_norm": True},
        "bf16=True": {"bf16": True},
        "bf16=True, and precision='bf16' here": {"bf16": True, "engine_options": {"precision": "bf16"}},
    },
    "Accelerate": {
        "plain": {},
        "2 micro-batches": {"gradient_accumulation_steps": 2},
        "clipped": {"max_norm": 0.05},
        "mixed_precision='bf16'": {"mixed_precision": "bf16"},
    },
    "Fabric": {
        "plain": {},
        "2 micro-batches": {"accumulate": 2},
        "clipped": {"max_norm": 0.05},
        "'bf16-mixed'": {"precision": "bf16-mixed"},
    },
}
CAUSES = {
    "micro-batches": "stages 2 and 3 reduce each and add the means; DDP adds on each rank, and reduces the sum",
    "clipping": "the norm is summed in float64 here, in fp32 there",
    "16-bit weights": "autocast there keeps weights in fp32; here they are in bf16, with fp32 masters",
}


def main(arguments=None):
    """Parse the arguments, run all, show the table and write it."""
    parser = parser_of("common.words.beside_hugging_face", __doc__)
    parser.add_argument("--nproc", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the rows here")
    options = parser.parse_args(arguments)
    with one_line_errors():
        check_outputs(options)
        tried("transformers", "accelerate", "lightning")
        rows = launch(_rows, nproc=options.nproc, oversubscribe=True)
    versions = ", ".join(f"{name} {version}" for name, version in TRIED.items() if name != "peft")
    machine = f"{hardware(torch.device('cpu'))}; {versions}"
    results = {"world_size": options.nproc, "hardware": machine, "rows": rows}
    publish(options, results, [table(results)])


def _rows(world):
    told = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_WORLD_SIZE": world.size}
    told |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1}
    os.environ.update({name: str(value) for name, value in told.items()})
    rows = []
    for library, ways in WAYS.items():
        for way, given in ways.items():
            if world.rank == 0:
                print(f"{library}, {way}", file=sys.stderr)
            losses = {name or "stock": RUNS[library](name, **given) for name in (None, *STAGES)}
            rows.append({"library": library, "way": way, "losses": losses, "cause": cause(way, losses)})
    return rows


def cause(way, losses):
    """Which of the CAUSES it is, where losses part; the row without it shows that it is no other."""
    if all(other == losses["stock"] for other in losses.values()):
        return None
    named = {"2 micro-batches": "micro-batches", "clipped": "clipping"}
    return named.get(way, "16-bit weights" if "precision=" in way and "here" in way else "unknown")


def apart(losses, names):
    """By how much the losses of engines differ from the stock ones at most."""
    return max(abs(one - other) for name in names for one, other in zip(losses[name], losses["stock"], strict=True))


# ---- the three scripts -----------------------------------------------------------------------------------------------


class Windows(torch.utils.data.Dataset):
    """Windows of Python's own source as byte tokens; the first of each are no targets, of some more than of others."""

    def __init__(self, count, start=0):
        self.text = torch.tensor(load_text()[start : start + count * WINDOW].copy()).long().view(count, WINDOW)

    def __len__(self):
        return len(self.text)

    def __getitem__(self, index):
        labels = self.text[index].clone()
        labels[: index * 7 % 20] = -100
        return {"input_ids": self.text[index], "labels": labels}


def by_trainer(engine, engine_options=None, exact_norm=False, **given):
    """The losses that a Trainer logs."""
    import transformers  # noqa: PLC0415 - only where it is installed

    from common.words.transformers import Trainer  # noqa: PLC0415

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, max_position_embeddings=64, **LLAMA))
    given = {"max_grad_norm": 0.0, **given}
    if engine is not None and engine_options:
        given["bf16"] = False
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "use_cpu": True}
        schedule = {"max_steps": STEPS, "learning_rate": 1e-2, "warmup_steps": 4, "lr_scheduler_type": "cosine"}
        batch = {"per_device_train_batch_size": SAMPLES, "optim": "adamw_torch"}
        arguments = transformers.TrainingArguments(folder, **quiet, **schedule, **batch, **given)
        if engine is None:
            trainer = transformers.Trainer(model, arguments, train_dataset=Windows(256))
            if exact_norm:
                trainer.accelerator.clip_grad_norm_ = clip_exactly
        else:
            named = {"engine": engine, "engine_options": engine_options}
            trainer = Trainer(model, arguments, train_dataset=Windows(256), **named)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def clip_exactly(parameters, max_norm):
    """As torch.nn.utils.clip_grad_norm_, but for a norm that is summed in float64."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = sum(gradient.double().square().sum() for gradient in gradients).sqrt().float()
    for gradient in gradients:
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def small_model():
    """A model, its optimizer and its scheduler, as scripts build them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)


def by_accelerate(engine, max_norm=None, **given):
    """The losses of a loop in Accelerate's words: of rank 0, step by step."""
    import accelerate  # noqa: PLC0415

    from common.words.accelerate import Accelerator  # noqa: PLC0415

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    accelerator = (
        accelerate.Accelerator(cpu=True, **given) if engine is None else Accelerator(engine, cpu=True, **given)
    )
    every = accelerator.gradient_accumulation_steps
    data = Windows(STEPS * every * SAMPLES * accelerator.num_processes).text
    loader = torch.utils.data.DataLoader(data, batch_size=SAMPLES)
    model, optimizer, rates = small_model()
    model, optimizer, loader, rates = accelerator.prepare(model, optimizer, loader, rates)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients and max_norm:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            rates.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses[every - 1 :: every]


def by_fabric(engine, accumulate=1, max_norm=None, precision="32-true"):
    """The losses of a loop in Fabric's words: of rank 0, step by step."""
    from lightning.fabric import Fabric  # noqa: PLC0415
    from lightning.fabric.strategies import DDPStrategy  # noqa: PLC0415

    from common.words.fabric import ZeroStrategy  # noqa: PLC0415

    strategy = DDPStrategy() if engine is None else ZeroStrategy(engine)
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=dist.get_world_size(), precision=precision)
    fabric.launch()
    model, optimizer, rates = small_model()
    model, optimizer = fabric.setup(model, optimizer)
    batches = Windows(STEPS * accumulate * SAMPLES * fabric.world_size).text.split(SAMPLES)[fabric.global_rank :]
    losses = []
    for number, batch in enumerate(batches[:: fabric.world_size]):
        is_last = (number + 1) % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            fabric.backward(loss / accumulate)
        if is_last:
            if max_norm:
                fabric.clip_gradients(model, optimizer, max_norm=max_norm)
            optimizer.step()
            optimizer.zero_grad()
            rates.step()
            losses.append(loss.item())
    return losses


RUNS = {"Trainer": by_trainer, "Accelerate": by_accelerate, "Fabric": by_fabric}


def table(results):
    """The rows for people, and the causes below."""
    rows = []
    for found in results["rows"]:
        losses = found["losses"]
        differences = [apart(losses, names) for names in (STAGES[:2], STAGES[2:])]
        told = ["equal" if difference == 0 else f"{difference:.1e}" for difference in differences]
        last = f"{losses['stock'][-1]:.6f}"
        rows.append((found["library"], found["way"], last, *told, found["cause"] or ""))
    head = ("library", "what the script does", "stock, last", "stages 0, 1", "stages 2, 3", "cause")
    steps = len(results["rows"][0]["losses"]["stock"])
    title = (
        f"{steps} steps on {results['world_size']} ranks: the stock library's last loss, under DDP, and by how much "
    )
    title += "the engines' losses differ from its own at most"
    title += f"\n{results['hardware']}"
    note = "\n".join(f"- *{name}*: {words}." for name, words in CAUSES.items())
    return Table(title, head, rows, words=(0, 1, 5), note=note)


if __name__ == "__main__":
    main()
