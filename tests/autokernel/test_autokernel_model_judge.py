"""Gate 8's way of measuring: replayed by all models or by none, and what is written down about it."""

import dataclasses
import json
import re
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from test_autokernel_loop import loop
from test_autokernel_loop import no_gpu
from test_autokernel_loop import repository

from tilegym.autokernel import docs
from tilegym.autokernel import model_judge
from tilegym.autokernel.judge import Failed
from tilegym.autokernel.model_judge import ModelJudge
from tilegym.autokernel.model_judge import ModelRules
from tilegym.autokernel.model_judge import ModelSettings
from tilegym.autokernel.model_worker import EAGER
from tilegym.autokernel.model_worker import REPLAYED
from tilegym.autokernel.model_worker import STEPS
from tilegym.autokernel.model_worker import ModelRuns
from tilegym.autokernel.model_worker import ModelSpec
from tilegym.autokernel.replay import Replays
from tilegym.autokernel.running import RunningModel
from tilegym.autokernel.running import not_greedy
from tilegym.autokernel.sandbox import Limits
from tilegym.autokernel.workers import WorkerFailed

__all__ = ["no_gpu", "repository"]
SPEC = ModelSpec(f"{Path(__file__).with_name('autokernel_models.py')}::gated_norm", "float32")
RULES = ModelRules(rounds=2, throughput=False)


def as_it_is(run, state, device):
    """A replay that is the function itself."""
    return run


def no_capture(run, state, device):
    raise RuntimeError("operation not permitted when stream is capturing")


def no_prompts(run, state, device):
    if not state:
        raise RuntimeError("prompts wait for the device")
    return run


def other_tokens(run, state, device):
    def replay():
        run()
        for t in state:
            if t.dim() == 2 and t.shape[1] > 1:  # the tokens so far
                t.copy_((t + 1) % 128)

    return replay


def dies(run, state, device):
    """Takes its process with it."""


class HereWorker:
    """A worker in this process. A solution's name says how its model is captured; it computes what the model does."""

    confined = {"memory": True, "network": True}

    def __init__(self, host):
        self.host, self.folder, self.ended = host, Path(tempfile.mkdtemp(dir=host.folder)), False

    def ask(self, command, **arguments):
        assert not self.ended
        if command == "model":
            kernels = arguments.pop("kernels")
            self.name = next(iter(kernels.values()))["solution"] if kernels else "original"
            self.runs = ModelRuns(kernels={}, device="cpu", **arguments)
            captured = self.host.captures.get(self.name)
            if captured is not None:
                self.runs.replays = Replays(self.runs.model, self.runs.batches, arguments["output_length"], captured)
            return {}
        if self.host.captures.get(self.name) is dies and arguments.get("way", EAGER) != EAGER:
            self.close()
            raise WorkerFailed("crash", "the worker died (SIGSEGV)\nand more")
        self.host.asked.append((self.name, command, arguments.get("way", EAGER)))
        try:
            return getattr(self.runs, command)(**arguments)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def close(self):
        self.ended = True


class Host:
    def __init__(self, folder, **captures):
        self.folder, self.captures, self.asked, self.begun = folder, captures, [], 0
        folder.mkdir()

    def worker(self, kind, limits):
        self.begun += 1
        return HereWorker(self)


def judge_on(tmp_path, rules=RULES, **captures):
    host = Host(tmp_path / "workers", **captures)
    return ModelJudge(host, ModelSettings(SPEC, 5, 6), rules, Limits(), tmp_path / "baseline")


def test_the_twin_is_made_meanwhile(tmp_path):
    """It is loaded and has run before the first model is asked for the last of what is not timed."""
    ran = threading.Event()

    class Meeting(HereWorker):
        def ask(self, command, **arguments):
            if arguments.get("oracle"):
                assert ran.wait(20)
            answer = super().ask(command, **arguments)
            if command == "generate" and self in self.host.workers[1:]:
                ran.set()
            return answer

    class Two(Host):
        def worker(self, kind, limits):
            self.workers = [*getattr(self, "workers", []), Meeting(self)]
            return self.workers[-1]

    judge = ModelJudge(Two(tmp_path / "workers"), ModelSettings(SPEC, 5, 6), RULES, Limits(), tmp_path / "baseline")
    assert judge.baseline()["rounds"] == RULES.rounds
    assert [worker.ended for worker in judge.host.workers] == [False, True]
    judge.close()


def test_a_twin_that_fails_is_no_baseline(tmp_path):
    class Second(Host):
        def worker(self, kind, limits):
            if self.begun:
                raise WorkerFailed("crash", "no second one")
            return super().worker(kind, limits)

    judge = ModelJudge(Second(tmp_path / "workers"), ModelSettings(SPEC, 5, 6), RULES, Limits(), tmp_path / "baseline")
    with pytest.raises(WorkerFailed, match="no second one"):
        judge.baseline()
    judge.close()


def kernels(name):
    return {"region": {"root": "nowhere", "solution": name}}


def timed(host, since):
    """The runs of the turns that followed: (model, way), without those that were made to look at tokens."""
    runs = [(name, way) for name, command, way in host.asked[since:] if command == "generate"]
    return runs[-2 * RULES.rounds :]


def test_all_are_replayed(tmp_path):
    judge = judge_on(tmp_path, original=as_it_is, candidate=as_it_is)
    baseline = judge.baseline()
    assert (baseline["way"], baseline["why"]) == (REPLAYED, "") and baseline["rounds"] == RULES.rounds
    assert set(timed(judge.host, 0)) == {("original", REPLAYED)}
    before = len(judge.host.asked)
    found = judge.judge(kernels("candidate"), {}, baseline | {"noise": 0.99})
    assert (found["way"], found["why"], found["token_agreement"]) == (REPLAYED, "", 1.0)
    assert found["noise"] == 0.99 and found["ratio_to_original"] > 0
    assert set(timed(judge.host, before)) == {("original", REPLAYED), ("candidate", REPLAYED)}
    assert {"load", "first run", "exactness", "others", "graphs", "turns"} == found["steps"].keys()
    # The kept one is compared with the next, without capturing anything anew.
    begun, before = judge.host.begun, len(judge.host.asked)
    judge.host.captures["next"] = as_it_is
    found = judge.judge(kernels("next"), kernels("candidate"), baseline | {"noise": 0.99})
    assert found["way"] == REPLAYED and found["ratio_to_best"] > 0 and judge.host.begun == begun + 1
    asked = judge.host.asked[before:]
    assert [name for name, command, _ in asked if command == "logits"] == ["next"] * 2
    judge.close()
    assert not list(judge.host.folder.iterdir())


@pytest.mark.parametrize("capture, way, why", [
    (no_capture, EAGER, "candidate: operation not permitted when stream is capturing"),
    (no_prompts, STEPS, "candidate: prompts wait for the device"),
    (other_tokens, EAGER, "candidate: a replayed run chooses a token whose logit is .* below the best one's"),
    (dies, EAGER, r"candidate: the worker died \(SIGSEGV\)$"),
    (None, EAGER, "candidate: without a GPU there are no graphs"),
], ids=["steps too", "prompts alone", "other tokens", "dies", "no GPU"])  # fmt: skip
def test_one_that_is_not_replayed_is_measured_like_the_others(tmp_path, capture, way, why):
    judge = judge_on(tmp_path, original=as_it_is, candidate=capture)
    baseline = judge.baseline()
    assert baseline["way"] == REPLAYED
    before = len(judge.host.asked)
    found = judge.judge(kernels("candidate"), {}, baseline | {"noise": 0.99})
    assert found["way"] == way and re.match(why, found["why"])
    assert set(timed(judge.host, before)) == {("original", way), ("candidate", way)}
    assert found["noise"] == RULES.least_noise  # of its own runs, of which there is one pair; not of the baseline's
    # What was found out about the others stays: the next one is replayed again.
    judge.host.captures["next"] = as_it_is
    assert judge.judge(kernels("next"), {}, baseline)["way"] == REPLAYED


def test_a_baseline_that_is_not_replayed_decides_for_all(tmp_path):
    judge = judge_on(tmp_path, original=no_capture, candidate=as_it_is)
    baseline = judge.baseline()
    why = "original: operation not permitted when stream is capturing"
    assert (baseline["way"], baseline["why"]) == (EAGER, why)
    found = judge.judge(kernels("candidate"), {}, baseline)
    assert (found["way"], found["why"]) == (EAGER, why)
    assert ("candidate", "generate", REPLAYED) not in judge.host.asked
    for key in ("way", "why", "tie"):  # of a run that was begun before there was this
        del baseline[key]
    assert judge.judge(kernels("candidate"), {}, baseline)["way"] == EAGER


def test_what_is_begun_anew_is_captured_anew(tmp_path):
    judge = judge_on(tmp_path, original=as_it_is, other=dies)
    for name, asked in (("original", 2), ("other", 0)):
        model = judge._model({} if name == "original" else kernels(name))
        answers = []
        for _ in range(2):
            answers.append(model.refuses(REPLAYED, lambda tokens, logits: ""))
            model.end()
        assert answers == ([""] * 2 if asked else ["the worker died (SIGSEGV)"] * 2)
        assert judge.host.asked.count((name, "generate", REPLAYED)) == asked


def test_fewer_tokens_are_not_faster(tmp_path, monkeypatch):
    judge = judge_on(tmp_path, original=as_it_is, candidate=as_it_is)
    baseline, run = judge.baseline(), Replays.run
    monkeypatch.setattr(Replays, "run", lambda self, prompts: [t[:, :-1] for t in run(self, prompts)])
    found = judge.judge(kernels("candidate"), {}, baseline)
    assert found["way"] == EAGER and found["why"] == "candidate: a replayed run gives another number of tokens"


def test_chosen_greedily():
    logits = [torch.tensor([[[0.0, 1.0, 0.9], [2.0, 1.0, 0.0]]])]  # [1, 2, 3]

    def judged(*tokens, tie=0.0):
        return not_greedy([torch.tensor([tokens])], logits, tie)

    assert judged(1, 0) == judged(1, 0, 2) == ""  # of the third step there are no logits
    assert "0.1 below" in judged(2, 0) and judged(2, 0, tie=0.2) == ""
    assert "2 below" in judged(1, 2, tie=0.2)
    assert "that there are not" in judged(1, 3) and "that there are not" in judged(1, -1)
    logits[0][0, 1, 1] = float("nan")
    assert judged(1, 0, tie=9.0)


class Clock:
    """Time that passes only in runs: of the given seconds, in turn."""

    def __init__(self, *models):
        self.now, self.models = 0.0, [Timed(self, seconds) for seconds in models]

    def monotonic(self):
        return self.now

    perf_counter = monotonic


class Timed(RunningModel):
    def __init__(self, clock, seconds):
        super().__init__(None, None, {})
        self.clock, self.seconds, self.runs = clock, seconds, 0

    def warm_up(self):
        pass

    def ask(self, command, **arguments):
        self.clock.now += self.seconds[self.runs % len(self.seconds)]
        self.runs += 1


@pytest.mark.parametrize("wide, budget, rounds", [
    (1, 1000.0, 8),  # at once as narrow as can be
    (12, 1000.0, 16),  # looked at after 8 and 16 rounds
    (99, 100.0, 50),  # as long as there is time
    (99, 10.0, 8),  # the rounds are made in any case
])  # fmt: skip
def test_more_turns_while_the_noise_is_wide(tmp_path, monkeypatch, wide, budget, rounds):
    clock, looks = Clock([1.0], [1.0]), []
    monkeypatch.setattr(model_judge, "time", clock)

    def enough(times):
        looks.append(len(times[0]))
        return len(times[0]) >= max(8, wide)

    judge = judge_on(tmp_path, ModelRules(seconds=budget))
    times = judge._turns(clock.models, REPLAYED, enough)
    assert [len(t) for t in times] == [rounds, rounds]
    assert looks == [n for n in (4, 5, 6, 7, 8, 16, 32) if n <= rounds]
    judge.rules = dataclasses.replace(judge.rules, throughput=False)  # without a GPU: as many as there are
    assert len(judge._turns(clock.models, EAGER, lambda times: False)[0]) == 8


def test_a_wide_band_takes_more_turns(tmp_path, monkeypatch):
    """Of two models that scatter by a tenth, more pairs say more."""
    clock = Clock([1.0, 1.1, 1.0, 1.2], [1.1, 1.0, 1.2, 1.0])
    monkeypatch.setattr(model_judge, "time", clock)
    judge = judge_on(tmp_path, ModelRules(seconds=60.0))
    narrow = judge._turns(clock.models, EAGER, lambda times: judge._band(*times) < 0.1)
    assert len(narrow[0]) == 16 and judge._band(*narrow) < 0.1 < judge._band(*(t[:8] for t in narrow))
    found = {"way": EAGER}
    with pytest.raises(Failed, match=r"may drop to .* \(eager\)") as failed:
        judge._speed(clock.models, 24, found | {"peak": 1}, {"noise": 0.005, "peak": 1})
    assert failed.value.status == "discard"


def test_the_record_says_how_it_was_measured(repository, tmp_path):
    made, said = loop(repository, tmp_path / "out"), []
    made.tell, fake = said.append, made.model_judge
    baseline, judge = fake.baseline, fake.judge

    def judged(kernels, best, baseline):
        found = {"way": EAGER, "why": "candidate: it waits"} if best else {"way": REPLAYED, "why": ""}
        return judge(kernels, best, baseline) | found

    fake.baseline, fake.judge = lambda: baseline() | {"way": REPLAYED, "why": ""}, judged
    made.run()
    assert any(line.endswith("the unpatched model: 100.00 tokens/s, replayed, noise 1.0%") for line in said)
    first, second = made.ledger.kept()
    assert first.model["way"] == REPLAYED and second.model["way"] == EAGER
    assert [e.verdict.gates[-1].detail for e in (first, second)] == [
        "55.00 tokens/s, 1.10x, replayed",
        "30.00 tokens/s, 1.20x, eager (candidate: it waits)",
    ]
    trace = json.loads((tmp_path / f"out/traces/{second.number}.json").read_text())
    assert json.loads(trace["evaluation"]["log"])["model"]["way"] == EAGER
    text = (tmp_path / "out/results.md").read_text()
    assert "\nThroughput is of runs that are replayed, and differs with the state of the machine; " in text
    kept = [line for line in text.splitlines() if " | keep | " in line]
    assert ["| throughput eager (candidate: it waits); " in line for line in kept] == [False, True]
    # What was measured in another way is no point of the curve, and no gain over the baseline.
    assert (tmp_path / "out/results.html").read_text().count("<circle") == 0
    assert "throughput 50.0 to 55.0 tokens/s (1.10x, replayed, in the same turns)" in "\n".join(
        docs.run_section(tmp_path / "out")
    )
