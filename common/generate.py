"""Text from a trained model with weights sharded or not: `python -m stage3_param --generate "def "`."""

import torch

from common.errors import InputError

TEMPERATURE = 0.8  # below 1: likely bytes become likelier
LENGTH = 256  # bytes


def generate(engine, prompt, seed=0, length=LENGTH, temperature=TEMPERATURE):
    """A prompt, of at least one byte, and `length` more bytes drawn from the model's distribution. A collective.

    Every rank draws the same bytes, from the same weights and seed, so that every rank issues the same collectives.
    Under `gathered` the weights are gathered once, not for every byte. The engine's mode is restored.

    Raises:
        InputError: the model's logits are not finite.
    """
    module, text, draws = engine.module, list(prompt), torch.Generator().manual_seed(seed)
    training = module.training
    engine.eval()
    with engine.gathered(), torch.no_grad():
        device = next(module.parameters()).device
        for _ in range(length):
            inputs = torch.tensor([text[1 - module.window :]], device=device)  # the model's context
            logits = engine(inputs)[0, -1, :256].float().cpu()  # a larger vocabulary has tokens that are not bytes
            if not logits.isfinite().all():
                raise InputError("the model cannot generate: its training diverged; lower --lr")
            text.append(torch.multinomial((logits / temperature).softmax(-1), 1, generator=draws).item())
    engine.train(training)
    return bytes(text)
