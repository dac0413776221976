"""Five engines with a planted fault each, for `notebooks/07_debugging`: find each fault by its symptoms.

Read this afterwards.

FAULTS have an engine's class each: a stage's, with one wrong method. TRUTHS, from faults.toml, say what is wrong, on
which rank and where, and `check` compares a student's answers with them.
"""

import itertools
import tomllib
from pathlib import Path
from types import SimpleNamespace

from common.engines import find_engine
from course.pages.answers import NAME, NUMBER, Form, asks, by_name, given, is_number, judge, unfit

EVERY = "every rank"
FOUND = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
KINDS = FOUND.pop("kinds")
TRUTHS = {letter: SimpleNamespace(**truth) for letter, truth in FOUND.items()}


class A(find_engine("stage2_grad")):
    def gather(self, bucket):
        if (self.rank, bucket.name) != (TRUTHS["a"].rank, TRUTHS["a"].place):
            super().gather(bucket)


class B(find_engine("stage3_param")):
    def unshard(self, unit, order):
        super().unshard(unit, order)
        place = TRUTHS["b"].place
        if self.rank == TRUTHS["b"].rank and self.updates and self.state.records:
            for bucket in (bucket for bucket in unit.buckets if place in bucket.members):
                bucket.members[place].data = bucket.values.freed[place]


class C(find_engine("stage2_grad")):
    def reduce(self, bucket):
        self.allocate_gradients(bucket)
        if (self.rank, bucket.name) == (TRUTHS["c"].rank, TRUTHS["c"].place):
            self.seen = [*getattr(self, "seen", ()), bucket.local_gradients]
        super().reduce(bucket)


class D(find_engine("stage1_os")):
    def finish_backward(self):
        super().finish_backward()
        for bucket in self.buckets:
            bucket.optimizer_shard.mean.div_(self.world_size)


class E(find_engine("stage1_os")):
    def update(self):
        for bucket in self.buckets:
            late = (self.rank, bucket.name) == (TRUTHS["e"].rank, TRUTHS["e"].place)
            if not late:
                self.step_shard(bucket.optimizer_shard)
            self.gather(bucket)
            if late:
                self.synchronize()
                self.step_shard(bucket.optimizer_shard)
        self.synchronize()


FORMS = {
    "kind": NUMBER,
    "rank": Form(f'a rank, or "{EVERY}"', lambda answer: answer == EVERY or is_number(answer)),
    "place": NAME,
}
FAULTS = {"a": A, "b": B, "c": C, "d": D, "e": E}


@asks(by_name(FAULTS), str)
def check(question, answer):
    """Whether {letter: answer} to "kind", "rank" or "place" are right, a line each; a kind is its number in KINDS."""
    return "\n".join(f"{letter}: {_verdict(question, letter, one)}" for letter, one in answer.items())


def _verdict(question, letter, answer):
    truth = TRUTHS[letter]
    right = KINDS.index(truth.kind) if question == "kind" else getattr(truth, question)
    return unfit(answer, FORMS[question]) or judge(answer, right, otherwise=truth.hints[question])


NAMES = Form(
    'a list of names, such as ["accounts"]', lambda answer: isinstance(answer, list) and all(map(NAME.fits, answer))
)


@asks(NAMES, str)
def check_probes(answer, unnoticed):
    """Whether some probes notice all mutants, and no fewer would, by {mutant: {probe: whether it passes}}."""
    names = next(iter(unnoticed.values()))
    if not set(given(answer)) <= names.keys():
        return f"not yet: choose from {', '.join(names)}"

    def missed(probes):
        return [mutant for mutant, passes in unnoticed.items() if all(passes[probe] for probe in probes)]

    if missed(answer):
        return f"not yet: nobody notices that {missed(answer)[0]}"
    if any(not missed(fewer) for fewer in itertools.combinations(names, len(set(answer)) - 1)):
        return "not yet: all are noticed, but fewer probes would do"
    return "solved"
