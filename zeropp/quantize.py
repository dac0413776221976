"""Block quantization: numbers to 8 or 4 bits, with a scale for each block of them.

An outlier makes the steps of all elements that share its scale coarse, so every `block` elements have a scale of their
own. Quantization is symmetric: zero stays zero, and a code counts steps of the scale in both directions.

    scale = largest absolute value of the block / 127 (or 7)
    code  = round(value / scale)                                  |value - code * scale| <= scale / 2

Two 4-bit codes, from -7 to 7, are the two digits of a byte in base 16: byte = first + 16 * second, -119 to 119.
Rounding byte / 16 gives the second, as the first is less than half of 16.

A message holds some elements as bytes, their scales in fp32:

    | scale of block 0 | scale of block 1 | ... | codes of block 0 | codes of block 1 | ... | padding to 4 bytes |

The last block may be shorter than the others, so that a small tensor sends no more codes than it has elements.

Source: ZeRO++, arXiv 2306.10209, sec. 3.1 and 4.2.
"""

import torch

# Elements at a time: on a CPU intermediate results stay in the cache, on a GPU each of a few kernels gets some 64 MB.
CHUNK, GPU_CHUNK = 2**17, 2**24
DIVISION = "eager_numerics.division_rounding"  # the compiler divides as eager kernels do; torch 2.11 lacks it


class Blocks:
    """A format of quantized blocks.

    Args:
        bits: of a code, 8 or 4.
        block: elements that share a scale, an even number.
        chunk: elements at a time.
        compiled: let torch.compile fuse the arithmetic, if that keeps the bits. On a GPU two kernels replace ten.
    """

    def __init__(self, bits, block=256, chunk=CHUNK, compiled=False):
        self.bits, self.block, self.chunk = bits, block, chunk
        self.largest = {8: 127, 4: 7}[bits]
        if compiled and DIVISION in torch._inductor.list_options():
            self._steps = torch.compile(self._steps, dynamic=True, options={DIVISION: True})
            self._values = torch.compile(self._values, dynamic=True, options={DIVISION: True})

    def nbytes(self, numel):
        """The bytes of a message of `numel` elements."""
        blocks, codes = -(-numel // self.block), -(-numel * self.bits // 8)
        return 4 * blocks + -(-codes // 4) * 4

    def pack(self, values, message):
        """Quantize floating-point `values` [..., n] into a `message` for each row of them, uint8 [..., nbytes(n)].

        A block with an infinity or a NaN arrives as NaN throughout: nothing is raised, and a loss scaler sees it.
        """
        for part, scales, codes in self._parts(message, values):
            found, steps = self._steps(part.float())
            scales.copy_(found)
            codes.copy_(steps)

    def unpack(self, message, values):
        """Write what a `message` [..., nbytes(n)] stands for into `values` [..., n], rounded to their dtype."""
        for part, scales, codes in self._parts(message, values):
            part.copy_(self._values(scales, codes, part))

    def add_up(self, messages, total):
        """Write what `messages` [k, ..., nbytes(n)] stand for, added in their order, into `total`, fp32 [..., n]."""
        for first, *others in zip(*(self._parts(message, total) for message in messages), strict=True):
            part, scales, codes = first
            part.copy_(self._values(scales, codes, part))
            for _, scales, codes in others:
                part += self._values(scales, codes, part)

    def _steps(self, part):
        """The scales [...] and the codes [..., bytes], as fp32, of fp32 values [..., elements]."""
        top = part.abs().amax(dim=-1)
        # Divide by a tensor: CUDA turns division by a number into a product, except in compiled code.
        # The smallest normal number is fine enough a step for denormal values, and no division overflows.
        scale = (top / top.new_full((), self.largest)).clamp_(min=torch.finfo(torch.float32).tiny)
        scales = torch.where(top.isfinite(), scale, torch.nan)
        steps = (part / scale[..., None]).round_().clamp_(-self.largest, self.largest)
        if self.bits == 4:
            first, second = steps.tensor_split([-(-part.shape[-1] // 2)], dim=-1)
            steps = first.contiguous()
            steps[..., : second.shape[-1]].add_(second, alpha=16)
        return scales, steps

    def _values(self, scales, codes, part):
        """fp32 values, in the shape of `part` [..., elements], from scales [...] and codes [..., bytes]."""
        steps = torch.empty_like(part, dtype=torch.float32)
        first, second = steps.tensor_split([codes.shape[-1]], dim=-1)
        first.copy_(codes)
        if self.bits == 4:
            tens = torch.mul(first, 1 / 16).round_()
            first.sub_(tens, alpha=16)
            second.copy_(tens[..., : second.shape[-1]])
        # Rounding may turn the largest finite number into an infinity, which is clamped; NaN stays.
        largest = torch.finfo(part.dtype).max
        return steps.mul_(scales[..., None]).clamp_(-largest, largest)

    def _parts(self, message, values):
        """Views of both: values [..., blocks, elements], scales [..., blocks], codes [..., blocks, bytes], in parts."""
        numel = values.shape[-1]
        blocks, whole = -(-numel // self.block), numel // self.block
        scales, codes = message[..., : 4 * blocks].view(torch.float32), message[..., 4 * blocks :].view(torch.int8)
        step = max(1, self.chunk * numel // (self.block * values.numel()))
        spans = [(block, min(whole, block + step), self.block) for block in range(0, whole, step)]
        if blocks > whole:
            spans.append((whole, blocks, numel % self.block))
        for start, stop, width in spans:
            bytes_of_one = -(-width * self.bits // 8)
            elements = values[..., start * self.block :][..., : (stop - start) * width].unflatten(-1, (-1, width))
            of_them = codes[..., start * self.block * self.bits // 8 :][..., : (stop - start) * bytes_of_one]
            yield elements, scales[..., start:stop], of_them.unflatten(-1, (-1, bytes_of_one))
