"""`python -m offload`: train with states on the host or on disk and print what was measured."""

from common.errors import InputError
from common.outputs import check_name
from common.train import main
from offload import cpu, nvme


def add_own(parser):
    """Add the options of both engines; return a function that says which engine to use, with which of them."""
    parser.add_argument(
        "--tier",
        default="cpu",
        help="cpu: ZeRO-Offload, the default. nvme, or such as parameters=cpu,gradients=device,optimizer=nvme: "
        "ZeRO-Infinity, all states in one tier or each in its own",
    )
    parser.add_argument("--ratio", type=float, default=0.0, help="part that stays on the device (default: %(default)s)")
    parser.add_argument("--delayed-update", action="store_true", help="step during the next forward and backward")
    parser.add_argument("--warmup-steps", type=int, default=0, help="updates before the first delayed one")
    parser.add_argument("--path", metavar="DIR", help="a folder on the disk to use (default: for temporary files)")
    parser.add_argument(
        "--sub-group-mb", type=float, default=64.0, help="MiB of weights stepped at a time (default: %(default)s)"
    )

    def own(options):
        check_name("--path", options.path)
        if options.tier == "cpu":
            cpu.check_options(options.ratio, options.delayed_update, options.warmup_steps)
            return "offload", {name: getattr(options, name) for name in ("ratio", "delayed_update", "warmup_steps")}
        if options.ratio or options.delayed_update or options.warmup_steps:
            raise InputError(f"--tier {options.tier}: --ratio, --delayed-update and --warmup-steps are for --tier cpu")
        tiers = options.tier
        if "=" in tiers:
            tiers = dict(pair.partition("=")[::2] for pair in tiers.split(","))
        tiers = nvme.check_options(tiers, options.sub_group_mb)
        return "offload.nvme", {"tiers": tiers, "path": options.path, "sub_group_mb": options.sub_group_mb}

    return own


if __name__ == "__main__":
    main("offload", add_own=add_own)
