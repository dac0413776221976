"""`python -m offload`: train with the optimizer beside the device and print what was measured."""

from common.errors import InputError
from common.train import main
from offload.cpu import check_options

TIERS = ("cpu",)


def add_own(parser):
    """Add the options of offload; return what the engine takes of them."""
    parser.add_argument("--tier", default="cpu", help=f"where states lie: {', '.join(TIERS)} (default: %(default)s)")
    parser.add_argument("--ratio", type=float, default=0.0, help="part that stays on the device (default: %(default)s)")
    parser.add_argument("--delayed-update", action="store_true", help="step beside the next forward and backward")
    parser.add_argument("--warmup-steps", type=int, default=0, help="updates before the first delayed one")

    def own(options):
        if options.tier not in TIERS:
            raise InputError(f"--tier {options.tier}: unknown; choose one of: {', '.join(TIERS)}")
        check_options(options.ratio, options.delayed_update, options.warmup_steps)
        return {name: getattr(options, name) for name in ("ratio", "delayed_update", "warmup_steps")}

    return own


if __name__ == "__main__":
    main("offload", add_own=add_own)
