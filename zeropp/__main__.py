"""`python -m zeropp`: train with less sent between nodes and print what was measured."""

from common.train import main
from zeropp.engine import check_options


def add_own(parser):
    """Add the switches; return a function that gives the engine's name and its switches."""
    for switch, told in (
        ("quantize-weights", "gather parameters as they are, not as int8"),
        ("hierarchical", "keep no copy of the parameters in each node"),
        ("quantize-gradients", "reduce gradients as they are, not as int4 in two hops"),
    ):
        parser.add_argument(f"--no-{switch}", dest=switch.replace("-", "_"), action="store_false", help=told)
    parser.add_argument("--error-feedback", action="store_true", help="add rounding errors to the next gradient")
    parser.add_argument("--block", type=int, default=256, help="elements that share a scale (default: %(default)s)")

    def own(options):
        check_options(options.block, options.error_feedback, options.quantize_gradients)
        switches = ("quantize_weights", "hierarchical", "quantize_gradients", "error_feedback", "block")
        return "zeropp", {switch: getattr(options, switch) for switch in switches}

    return own


if __name__ == "__main__":
    main("zeropp", add_own=add_own)
