"""`python -m zeropp`: train with less sent between nodes and print what was measured."""

from common.errors import InputError
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
    parser.add_argument("--hybrid", action="store_true", help="hybrid sharding: stage 3 in each node, replicated")
    defer = "with --hybrid and --no-sync: gradients cross with the last micro-batch only"
    parser.add_argument("--defer-all-reduce", action="store_true", help=defer)

    def own(options):
        check_options(options.block, options.error_feedback, options.quantize_gradients)
        switches = ("quantize_weights", "hierarchical", "quantize_gradients", "error_feedback", "block")
        given = {switch: getattr(options, switch) for switch in switches}
        if options.hybrid:
            if any(parser.get_default(switch) != value for switch, value in given.items()):
                raise InputError("--hybrid sends nothing quantized and has no switches; leave those of ZeRO++ out")
            return "zeropp.hybrid", {"defer_all_reduce": options.defer_all_reduce}
        if options.defer_all_reduce:
            raise InputError("--defer-all-reduce: ZeRO++ reduces every micro-batch; add --hybrid")
        return "zeropp", given

    return own


if __name__ == "__main__":
    main("zeropp", add_own=add_own)
