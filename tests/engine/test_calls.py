"""Every public call of an engine, wherever it may stand: right, as in a plain loop, or refused, as `calls.toml` says.

A state is a function `state(training, run)`: it brings a training there, calls `run()`, and leaves again.
"""

import contextlib
import functools
import hashlib
import re
import types
from unittest import mock

import pytest
import torch
from plain_loop import LoopWithCalls
from training import inputs, make_engine, message_of, small_engine
from trap_models import WIDTH, Block, Rooted, Stop
from trap_models import loss as loss_of

from common.calls import TABLE
from common.loop import sha256
from common.tensors import tensors_of_state

EIGHT = ("stage0_ddp", "stage1_os", "stage2_grad", "stage3_param", "offload", "offload.nvme", "quantized:Off")
EIGHT += ("replicated:Pairs",)
SAYS = {  # what the looks say; a place says its line
    "values": r"^init= leaves 'blocks.0.*' without values; ",
    "members": r"^'extra' was added later, and would not be trained; ",
    "writes": r"^what was written to '.*' would be lost; write weights within|^the tensors of engine.optimizer were "
    r"written, those of '|^'.*' or another weight of bucket \d+ was written past the engine; write weights within",
    "gradients": r"^'head.bias' was trainable when the engine was built; |^'head.bias' has a .grad of its own, ",
    "optimizer": r"^engine.optimizer.step was replaced after the engine was built; do it in step\(\) of ",
}


class AdamW(torch.optim.AdamW):
    """Raises in the next step, if told so."""

    raises = False

    def step(self, closure=None):
        if AdamW.raises:
            raise Stop
        return super().step(closure)


MAKE = functools.partial(AdamW, lr=1e-2)


class CallingBlock(Block):
    """Calls `on_the_way` on the way forward, and `on_the_way_back` on the way back, amid its own weights."""

    on_the_way = on_the_way_back = None

    def forward(self, x):
        inner = self.up(x)
        if self.on_the_way is not None:
            self.on_the_way()
        if self.on_the_way_back is not None and inner.requires_grad:
            inner.register_hook(lambda gradient: self.on_the_way_back())
        return x + self.down(torch.tanh(inner))


class Calling(Rooted):
    """Counts its forwards; the root has weights before and after its blocks, which call what a test wants."""

    def __init__(self):
        super().__init__(block=CallingBlock)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += 1
        return super().forward(x)


class Training:
    """A training by an engine or by the plain loop, and what its calls need."""

    def __init__(self, world, name, precision, folder, make):
        AdamW.raises = False
        self.name, self.keeps_writes = name, keeps_writes(name, precision)
        self.world, self.folder, self.index = world, folder, 0
        self.engine, self.other = make(0), make(1)
        self.is_plain = isinstance(self.engine, LoopWithCalls)
        self.model = self.engine.module
        self.pending, self.graph = False, None  # whether there is a gradient; a loss before its backward
        self.first = self.engine.snapshot()
        for engine in (self.other, self.engine):
            engine.backward(self.loss(engine))
            engine.step()
        self.engine.save(f"{folder}/before")
        self.before, self.before_of_other = self.engine.snapshot(), self.other.snapshot()
        self.weights = {name: tensor.float() / 2 for name, tensor in self.engine.full_state_dict().items()}

    def reset(self, to=None):
        """Go back, to begin anew."""
        self.engine.restore(to or self.before)
        self.other.restore(self.before_of_other)
        self.pending, self.graph, self.kept, self.index = False, None, None, 10

    def loss(self, engine=None):
        loss = loss_of((engine or self.engine)(inputs(self.world, self.index)))
        self.index += 1  # not if it was refused
        return loss

    def backward(self, loss=None):
        self.engine.backward(self.loss() if loss is None else loss)
        self.pending = True

    def go_on(self):
        """What the weights are after two more steps, and back at a snapshot, if one was taken."""
        if self.pending:
            self.engine.step()
        for _ in range(2):
            self.engine.backward(self.loss())
            self.engine.step()
        if not self.is_plain:
            assert self.engine.model_state_bytes() == self.engine.predicted_model_state_bytes()
        ended = [sha256(self.engine.full_state_dict())]
        if self.kept is not None:
            self.engine.restore(self.kept)
            ended.append(sha256(self.engine.full_state_dict()))
        return ended

    def held(self):
        """A digest of the weights, states and gradients that this rank has in memory."""
        digest = hashlib.sha256()
        for bucket in self.engine.buckets:
            tensors = [bucket.parameters, *tensors_of_state(self.engine.optimizer)]
            tensors += [bucket.gradient_shard] if self.pending else []  # else a call may end what raised
            for tensor in (tensor for tensor in tensors if tensor is not None and tensor.numel()):
                digest.update(tensor.detach().cpu().clone().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


# ---- calls: each returns what can be compared ----------------------------------------------------------------------


def backward(training):
    training.backward(training.graph)
    training.graph = None


def receiving_gradients(training):
    loss = training.loss() if training.graph is None else training.graph
    with training.engine.receiving_gradients([loss]):
        loss.backward()
    training.pending, training.graph = True, None


def step(training):
    training.engine.step()
    training.pending, training.graph = False, None


def zero_grad(training):
    training.engine.zero_grad()
    training.pending = False


def no_sync(training):
    with training.engine.no_sync():
        pass


def gathered(training):
    with training.engine.gathered():
        return {name: p.detach().float().sum().item() for name, p in training.model.named_parameters()}


def gathered_write(training):
    with training.engine.gathered(write=True), torch.no_grad():
        for parameter in training.model.parameters():
            parameter.mul_(1.5)
    training.graph = None


def gradients(training):
    with training.engine.gradients() as found:
        return {name: value.sum().item() for name, value in found.items()}


def gradients_write(training):
    with training.engine.gradients(write=True) as found:
        double(training, found)


def save(training, wait=True):
    """What another engine loads from there."""
    saving = training.engine.save(f"{training.folder}/call", wait=wait)
    if saving is not None:
        saving.wait()
    training.other.load(f"{training.folder}/call")
    return sha256(training.other.full_state_dict())


def snapshot(training):
    training.kept = training.engine.snapshot()


def replaced(call):
    """A call that replaces the weights, and drops the gradients."""

    def run(training):
        call(training)
        training.pending, training.graph = False, None

    return run


def continue_from_it(training):
    training.other.continue_from(training.engine)
    return sha256(training.other.full_state_dict())


def counts(training):
    if not training.is_plain:
        training.engine.model_state_bytes()
        training.engine.predicted_model_state_bytes()
        training.engine.predicted_wire_bytes_per_step()
        training.engine.live()


CALLS = {
    "engine()": lambda training: training.loss().item(),
    "backward()": backward,
    "receiving_gradients()": receiving_gradients,
    "step()": step,
    "zero_grad()": zero_grad,
    "no_sync()": no_sync,
    "gathered()": gathered,
    "gathered(write=True)": gathered_write,
    "gradients()": gradients,
    "gradients(write=True)": gradients_write,
    "synchronize()": lambda training: training.engine.synchronize(),
    "module": lambda training: sum(parameter.numel() for parameter in training.engine.module.parameters()),
    "train(), eval()": lambda training: [training.engine.eval(), training.engine.train()].clear(),
    "full_state_dict()": lambda training: sha256(training.engine.full_state_dict()),
    "save()": save,
    "save(wait=False)": functools.partial(save, wait=False),
    "snapshot()": snapshot,
    "load()": replaced(lambda training: training.engine.load(f"{training.folder}/before")),
    "load_weights()": replaced(lambda training: training.engine.load_weights(training.weights)),
    "restore()": replaced(lambda training: training.engine.restore(training.before)),
    "continue_from()": replaced(lambda training: training.engine.continue_from(training.other)),
    "continue_from(old)": continue_from_it,
    "model_state_bytes()": counts,
}
assert [*CALLS] == [*TABLE["before"]]


# ---- states ----------------------------------------------------------------------------------------------------------


def after(*calls):
    """A state: after some calls of a training."""

    def state(training, run):
        for call in calls:
            call(training)
        run()

    return state


def after_a_forward(training, run):
    training.graph = training.loss()
    run()
    if training.graph is not None and not training.pending:
        training.backward(training.graph)


def within(open_one, write=None):
    """A state: within a context, after a backward."""

    def state(training, run):
        training.backward()
        with open_one(training.engine) as found:
            if write:
                write(training, found)
            run()

    return state


def within_no_sync(training, run):
    with training.engine.no_sync():
        training.backward()
        run()


def write_a_weight(training, found=None):
    with torch.no_grad():
        training.model.stem.weight.mul_(1.5)
    if training.is_plain:
        training.engine.keep_written()


def double(training, found):
    for value in found.values():
        value.mul_(2)


def inside_a_forward(training, run):
    training.backward()
    training.graph = training.loss()
    call_once(training, "on_the_way", run)
    loss = training.loss()
    if message_of(training.backward, loss) is not None:  # the call has changed weights that the forward had read
        training.pending = False


def inside_a_backward(training, run):
    training.graph = training.loss()
    call_once(training, "on_the_way_back", run)
    training.backward()


def call_once(training, place, run):
    block = training.model.blocks[1]

    def once():
        setattr(block, place, None)
        run()

    setattr(block, place, once)


def raise_in_forward(training):
    with stopping(training.model.blocks[1], "on_the_way"):
        training.loss()


def raise_in_backward(training, block=1):
    with stopping(training.model.blocks[block], "on_the_way_back"):
        training.backward()


def stop():
    raise Stop


@contextlib.contextmanager
def stopping(block, place):
    with mock.patch.object(block, place, stop), pytest.raises(Stop):
        yield


def raise_in_step(training):
    AdamW.raises = True
    with pytest.raises(Stop):
        training.engine.step()
    AdamW.raises = training.pending = False
    if training.is_plain:
        training.engine.zero_grad()


def with_a_save_in_flight(training, run):
    training.backward()
    saving = training.engine.save(f"{training.folder}/flight", wait=False)
    run()
    if saving is not None:
        saving.wait()


def under(mode, state=None):
    """A state: under one of torch's modes, after a forward and a backward of others."""

    def both(training, run):
        training.graph = training.loss()
        if state is None:
            training.backward()

        def run_under():
            with mode():
                run()

        (state or after())(training, run_under)

    return both


def written(write, lost):
    """A state: after a write past the engine, unless it is refused at once. What is lost is then undone."""

    def state(training, run):
        training.backward()
        if message_of(write, training) is None:
            run()
        if lost(training):
            training.reset()

    return state


@torch.no_grad()
def write_states(training):
    for state in training.engine.optimizer.state.values():
        state["exp_avg"].mul_(0.5)


@torch.no_grad()
def write_masters(training):
    for group in training.engine.optimizer.param_groups:
        for tensor in group["params"]:
            tensor.mul_(1.5)


def changed(change, undo):
    """A state: after a change of the model, or of its head's bias, that is undone in the end."""

    def state(training, run):
        training.backward()
        training.graph = training.loss()
        change(training, training.model.head.bias)
        run()
        undo(training, training.model.head.bias)

    return state


def set_gradient(training, bias, value=None):
    if not training.is_plain:
        bias.grad = value


def after_the_optimizers_step_was_replaced(training, run):
    training.backward()
    optimizer = training.engine.optimizer
    with mock.patch.object(optimizer, "step", types.MethodType(lambda self, closure=None: None, optimizer)):
        run()


STATES = {
    "before the first step": after(lambda training: training.reset(training.first)),
    "after a step": after(),
    "after a forward": after_a_forward,
    "after a backward": after(Training.backward),
    "after several backwards": after(Training.backward, Training.backward),
    "within no_sync()": within_no_sync,
    "inside the module's own forward": inside_a_forward,
    "inside a backward, from a hook": inside_a_backward,
    "after a forward that raised": after(Training.backward, raise_in_forward),
    "after a backward that raised": after(raise_in_backward),
    "after a backward that raised elsewhere on each rank": after(lambda t: raise_in_backward(t, 1 + t.world.rank % 2)),
    "after a step that raised": after(Training.backward, raise_in_step),
    "with a save in flight": with_a_save_in_flight,
    "after a parameter was added": changed(
        lambda training, _: setattr(training.model, "extra", torch.nn.Parameter(torch.ones(3))),
        lambda training, _: delattr(training.model, "extra"),
    ),
    "after a parameter was frozen": changed(
        lambda _, bias: bias.requires_grad_(False), lambda _, bias: bias.requires_grad_(True)
    ),
    "after a gradient was set by hand": changed(
        lambda training, bias: set_gradient(training, bias, torch.ones(WIDTH, dtype=bias.dtype)), set_gradient
    ),
    "after the optimizer's step was replaced": after_the_optimizers_step_was_replaced,
    "within gathered()": within(lambda engine: engine.gathered()),
    "within gathered(write=True)": within(lambda engine: engine.gathered(write=True)),
    "within gathered(write=True), after a write": within(lambda engine: engine.gathered(write=True), write_a_weight),
    "within gradients()": within(lambda engine: engine.gradients()),
    "within gradients(write=True)": within(lambda engine: engine.gradients(write=True)),
    "within gradients(write=True), after a write": within(lambda engine: engine.gradients(write=True), double),
    "under torch.no_grad()": under(torch.no_grad),
    "under torch.inference_mode()": under(torch.inference_mode),
    "under torch.inference_mode(), after a backward that raised": under(torch.inference_mode, after(raise_in_backward)),
    "under torch.autocast()": under(functools.partial(torch.autocast, "cpu", torch.bfloat16)),
    "after a state of the optimizer was written": written(write_states, lambda training: training.name == EIGHT[5]),
    "after a weight was written past the engine": written(write_a_weight, lambda training: not training.keeps_writes),
    "after the optimizer's tensors were written": written(write_masters, lambda training: True),
}
assert set(STATES) == set(TABLE["states"])


# ---- cells -----------------------------------------------------------------------------------------------------------


def keeps_writes(name, precision):
    """Whether whole parameters, which no master weights overwrite, are what an engine keeps."""
    return name in EIGHT[:3] and precision == "fp32"


def refusal(name, precision, state, call):
    """What the table says of a cell: a pattern of the line that refuses it; None if it is right."""
    if call in ("backward()", "receiving_gradients()") and "writes" in TABLE["states"][state]:
        return ""  # no cell: a graph would be older than the write, and autograd refuses that
    for why in TABLE["states"][state]:
        if why in SAYS:
            kept = state == "after a weight was written past the engine" and keeps_writes(name, precision)
            if why in TABLE["before"][call] and not kept:
                return SAYS[why]
        elif call in TABLE["refused"][why]["calls"]:
            return "^" + re.escape(TABLE["refused"][why]["line"].format(call=call)) + "$"
    return None


def both(world, name, precision, folder):
    """A training by an engine, and the same by a plain loop."""

    def plain(seed):
        torch.manual_seed(seed)
        loop = LoopWithCalls(Calling().to(world.device), MAKE, precision=precision)
        loop.reduces_at_once = name in EIGHT[2:]
        return loop

    made = functools.partial(small_engine, world, name, precision, Calling, optimizer=MAKE)
    ways = {"engine": lambda seed: made(seed=seed), "plain": plain}
    return [Training(world, name, precision, f"{folder}/{way}", make) for way, make in ways.items()]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", EIGHT)
def test_a_call_that_the_table_refuses_says_its_line_and_changes_nothing(world, tmp_path, name, precision):
    made, plain = both(world, name, precision, tmp_path)
    for state, play in STATES.items():
        lines = {call: refusal(name, precision, state, call) for call in CALLS}
        lines = {call: line for call, line in lines.items() if line}

        def refused(lines=lines, state=state):
            before = made.held()
            for call, line in lines.items():
                said = message_of(CALLS[call], made)
                assert said is not None and re.search(line, said), (state, call, said)
            assert made.held() == before, state

        ended = []
        for training, run in ((made, refused), (plain, lambda: None)) if lines else ():
            training.reset()
            play(training, run)
            ended.append(training.go_on())
        assert ended[:1] == ended[1:], state


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", EIGHT)
def test_any_other_call_does_what_a_plain_loop_does(world, tmp_path, name, state, precision):
    made, plain = both(world, name, precision, tmp_path)
    for call, make in CALLS.items():
        if refusal(name, precision, state, call) is not None:
            continue
        gave, ended = {}, {}
        for training in (made, plain):

            def run(training=training, make=make, gave=gave):
                gave[training] = make(training)

            training.reset()
            STATES[state](training, run)
            ended[training] = training.go_on()
        assert gave.get(made) == gave[plain] or made not in gave, (call, gave)
        assert ended[made] == ended[plain], (call, gave)


@contextlib.contextmanager
def calling(module, call):
    """In this context a module makes a call whenever it runs."""
    hook = module.register_forward_pre_hook(lambda *_: [call()].clear())
    yield
    hook.remove()


@pytest.mark.parametrize("name", EIGHT)
def test_a_part_of_a_block_that_runs_alone_may_call_its_engine_or_raise(world, name):
    made = small_engine(world, name, steps=1)
    part, x = made.module.blocks[1].up, inputs(world, 0)
    calls = [made.full_state_dict, made.snapshot, lambda: gathered(types.SimpleNamespace(engine=made, model=part))]
    with torch.no_grad():
        expected = part(x)
        for call in calls:
            with calling(part, call):
                assert torch.equal(part(x), expected), call
        with calling(part, stop), pytest.raises(Stop):
            part(x)
    made.zero_grad()
    assert not any(unit.pins for unit in getattr(made, "units", ()))


@pytest.mark.parametrize("name", EIGHT)
def test_weights_without_values_are_neither_used_nor_read(world, tmp_path, name):
    with torch.device("meta"):
        model = Calling()
    training = Training.__new__(Training)
    training.engine = make_engine(name, model, MAKE, init=leave_out)
    training.world, training.folder, training.index, training.other = world, tmp_path, 0, small_engine(world, name)
    for call, looks in TABLE["before"].items():
        if "values" in looks:
            assert re.search(SAYS["values"], message_of(CALLS[call], training)), call


def leave_out(name, tensor):
    if not name.startswith("blocks.0"):
        tensor.zero_()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", EIGHT)
def test_what_is_no_collective_can_be_called_on_one_rank(world, tmp_path, name, precision):
    made, plain = both(world, name, precision, tmp_path)
    for call in TABLE["alone"]["calls"]:
        ended = []
        for training in (made, plain):
            training.reset()
            training.backward()
            with training.engine.gathered():
                if world.rank == 0 and call == "engine()":
                    (training.model if training.is_plain else training.engine)(inputs(world, 0).to(made.engine.dtype))
                elif world.rank == 0:
                    CALLS[call](training)
            training.kept = None  # no other rank has one
            ended.append(training.go_on())
        assert ended[0] == ended[1], call
