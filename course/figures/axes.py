"""Pictures of several axes: what each rank holds and sends on which, what checkpoints keep, how schedules fill time."""

from matplotlib.patches import Patch

from lab.figures.style import COLORS, PALETTE, PHASE_COLORS, mark_phases, once, stacked

AXIS_COLORS = {"data": PALETTE[3], "tensor": PALETTE[4], "pipeline": PALETTE[2], "expert": PALETTE[5]}
PLAIN, CUT = PALETTE[4], PALETTE[0]


def by_rank_and_axis(panels, rows):
    """Two panels of bars for each rank: model states by kind, bytes sent by axis; a diamond is the prediction."""
    held, sent = panels
    names = list(rows[0]["wire_bytes_per_step"])
    for place, row in enumerate(rows):
        states = row["model_state_bytes"]
        stacked(held, place, [(size / 1e6, {"color": COLORS[name], "label": name}) for name, size in states.items()])
        _predicted(held, place, sum(row["predicted_model_state_bytes"].values()))
        for nth, axis in enumerate(names):
            counted, foreseen = (
                sum(row[f"{said}wire_bytes_per_step"].get(axis, {}).values()) for said in ("", "predicted_")
            )
            beside = place + 0.27 * (nth - (len(names) - 1) / 2)
            sent.bar(beside, counted / 1e6, 0.25, color=AXIS_COLORS[axis], label=once(sent, f"{axis} axis"))
            _predicted(sent, beside, foreseen)
    places = ["\n".join(str(number) for number in row["rank"].values()) for row in rows]
    for axes, height in ((held, 1.45), (sent, 1.45)):
        axes.set_xticks(range(len(rows)), places)
        axes.set_xlabel("rank: its place on the " + ", ".join(rows[0]["rank"]) + " axis, from the top")
        axes.set_ylim(0, height * axes.dataLim.ymax)
        axes.legend(loc="upper left", ncols=2, fontsize=9)
    held.set(ylabel="MB of model states", title="held")
    sent.set(ylabel="MB in a step", title="sent")


def _predicted(axes, place, nbytes):
    style = {"color": "white", "markeredgecolor": "black", "markersize": 5, "linestyle": "", "marker": "D"}
    axes.plot(place, nbytes / 1e6, label=once(axes, "predicted"), **style)


def kept_through_a_step(axes, cases):
    """Live bytes of activations through a step, a line for each case: {name: [(phase, bytes)]}.

    Gathers make one case longer: each is drawn over the share of its operations, phase by phase.
    """
    phases = [phase for phase, _ in max(cases.values(), key=len)]
    for (name, samples), color in zip(cases.items(), (PLAIN, CUT), strict=True):
        places, heights = [], []
        for phase in dict.fromkeys(phases):
            begin, of = phases.index(phase), phases.count(phase)
            own = [nbytes / 1e6 for one, nbytes in samples if one == phase]
            places += [begin + of * at / len(own) for at in range(len(own))]
            heights += own
        axes.plot(places, heights, color=color, label=name)
    mark_phases(axes, phases)
    axes.set(ylim=(0, 1.15 * axes.dataLim.ymax), ylabel="live MB of activations, a rank")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def schedules(panels, cases):
    """What each stage computes when, {title: for each stage [(kind, micro-batch, begins, ends)]}; white is waiting."""
    for axes, (title, stages) in zip(panels, cases.items(), strict=True):
        for row, cells in enumerate(stages):
            for kind, number, begins, ends in cells:
                axes.barh(row, ends - begins, 0.86, begins, color=PHASE_COLORS[kind], edgecolor="white", linewidth=0.8)
                middle = {"ha": "center", "va": "center"}
                axes.text((begins + ends) / 2, row, number, color="white", fontsize=9, **middle)
        axes.set_yticks(range(len(stages)), [f"stage {row}" for row in range(len(stages))])
        axes.set(ylim=(len(stages) - 0.5, -0.5), title=title)
        axes.tick_params(left=False)
    end = max(cells[-1][3] for stages in cases.values() for cells in stages)
    axes.set(xlim=(0, end), xlabel="time; a forward takes one unit, a backward two, and nothing else takes time")
    handles = [Patch(color=PHASE_COLORS[kind], label=f"{kind} of a micro-batch") for kind in ("forward", "backward")]
    panels[0].figure.legend(handles=handles, loc="outside lower center", ncols=2)


def buffers(axes, in_flight, gradients):
    """Bytes over parameters: of all `gradients`, {parameters: bytes}, and of those in flight, {bucket_mb: the same}."""
    axes.plot([n / 1e6 for n in gradients], [b / 1e6 for b in gradients.values()], "--", color="black")
    ends = {"all gradients": max(gradients.values())}
    for (size, line), color, marker in zip(in_flight.items(), (PALETTE[0], PALETTE[4]), "os", strict=True):
        axes.plot([n / 1e6 for n in line], [b / 1e6 for b in line.values()], marker + "-", color=color)
        ends[f"in flight, bucket_mb={size}"] = line[max(line)]
    for name, height in ends.items():
        axes.text(1.03 * max(gradients) / 1e6, height / 1e6, name, va="center")
    axes.set(xlabel="millions of parameters", ylabel="MB, at its most in a step", ylim=(0, None), xlim=(0, None))
