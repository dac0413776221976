"""Public recipes by an engine: the losses and weights of their libraries' own DDP, or one line that refuses."""

import hugging_face as hf
import pytest

from lab.recipes import EXACT, RECIPES, WAYS, diffusion, ema, on_rank, verdict


@pytest.mark.parametrize("way", ["stage1_os", "stage3_param", "zeropp, not quantized"])
@pytest.mark.parametrize(
    "recipe", [pytest.param(recipe, marks=hf.needs(*needed)) for recipe, needed in RECIPES.items()]
)
def test_a_public_recipe_has_the_bits_of_ddp_or_is_refused(world, recipe, way):
    stock = {EXACT: [on_rank(world, recipe, exact=True)]}
    found = verdict([on_rank(world, recipe, *WAYS[way])], stock)
    reads = {
        ema: "refused: EMAWeightAveraging writes weights",
        diffusion: "refused: the values of 'conv_in.weight' are",
    }
    assert found.startswith(EXACT if way == "stage1_os" else reads.get(recipe, EXACT))
