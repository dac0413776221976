"""Text from a trained model, whose weights may be sharded: `python -m stage3_param --generate "def "`."""

import torch

from common.errors import InputError

TEMPERATURE = 0.8  # below 1: likely bytes become likelier
LENGTH = 256  # bytes


def generate(engine, prompt, seed=0, length=LENGTH, temperature=TEMPERATURE):
    """A prompt, of a byte at least, and `length` bytes more, each drawn from the model's distribution. A collective.

    Every rank draws the same bytes, from the same weights and the same seed, so that all take part in every gather.
    Under `gathered` the weights are collected once, not for every byte. The engine is left as it was.

    Raises:
        InputError: the model's logits are no numbers.
    """
    module, text, draws = engine.module, list(prompt), torch.Generator().manual_seed(seed)
    training = module.training
    engine.eval()
    with engine.gathered(), torch.no_grad():
        device = next(module.parameters()).device
        for _ in range(length):
            inputs = torch.tensor([text[1 - module.window :]], device=device)  # what the model can look back on
            logits = engine(inputs)[0, -1, :256].float().cpu()  # a larger vocabulary has tokens that are no byte
            if not logits.isfinite().all():
                raise InputError("the model has no text to tell: its training diverged; lower --lr")
            text.append(torch.multinomial((logits / temperature).softmax(-1), 1, generator=draws).item())
    engine.train(training)
    return bytes(text)
