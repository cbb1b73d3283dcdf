"""The report names what breaks a step, with line and cause, and is silent when it is fixed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.overrides import _get_current_function_mode_stack

from tpuscope.engine import torch_xla as runtime
from tpuscope.monitor import recompile_reasons
from tpuscope.monitor.watch import Budget, BudgetExceeded, compare, from_text, timeline, watch


def line_of(mark):
    """Where this file says ``# mark``, as a report writes it."""
    lines = Path(__file__).read_text().splitlines()
    [number] = [i for i, text in enumerate(lines, 1) if text.endswith(f"# {mark}")]
    return f"test_watch.py:{number} "


class Small:
    """A reader's own model: a convolution with batch norm, and its training step."""

    def __init__(self, xla, middle=()):
        torch.manual_seed(0)
        self.device = xla.device
        layers = [nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), *middle, nn.Conv2d(2, 1, 1)]
        self.model = nn.Sequential(*layers).to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        torch_xla.sync()  # so that nothing of the making is in the first step

    def step(self, size=4, power=2.0, dtype=torch.float32, channels_first=True):
        x = torch.rand(size, 1, 8, 8, dtype=dtype)
        x = x.to(self.device)  # upload
        y = self.model(x.float())  # forward
        loss = (y.abs() ** power).mean()  # power
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()  # update
        return loss


def verdict_of(w, count=1):
    verdicts = w.report().verdicts
    print(w.report())
    assert len(verdicts) == count, verdicts
    return verdicts[0]


def test_a_sound_loop_is_fine_in_one_line(xla):
    small = Small(xla)
    with watch() as w:
        for _ in range(3):
            small.step()
            torch_xla.sync()
    assert w.report().fine
    assert verdict_of(w).startswith("Fine: 3 steps, ")
    assert [step.programs for step in w.steps] == [1, 1, 1]
    assert sum(step.compilations for step in w.steps[1:]) == 0


def test_a_shape_that_changes_is_named_with_input_line_and_step(xla):
    small = Small(xla)
    with watch() as w:
        for size in (6, 6, 5):
            small.step(size)
            torch_xla.sync()
    verdict = verdict_of(w)
    assert "2 compilations where 1 would do: input 0 (" in verdict
    assert line_of("upload") in verdict
    assert "was (6, 1, 8, 8) and became (5, 1, 8, 8) at step 3: pad or drop the last" in verdict
    assert [step.compilations for step in w.steps] == [1, 0, 1]


def test_an_uploaded_batch_that_changes_is_named_where_it_is_first_used(xla):
    small = Small(xla)
    batches = [torch.rand(n, 1, 8, 8).to(small.device) for n in (7, 7, 3)]  # as a feed does
    torch_xla.sync()
    with watch() as w:
        for batch in batches:
            small.model(batch).sum()
            torch_xla.sync()
            small.step()
            torch_xla.sync()
    assert "was (7, 1, 8, 8) and became (3, 1, 8, 8) at step 5" in verdict_of(w)


def test_another_dtype_is_named(xla):
    small = Small(xla)
    with watch() as w:
        for dtype in (torch.float32, torch.float32, torch.float64):
            small.step(9, dtype=dtype)
            torch_xla.sync()
    verdict = verdict_of(w)
    assert "was float32 and became float64 at step 3" in verdict and line_of("upload") in verdict


def test_a_python_number_baked_into_the_graph_is_named_with_both_values(xla):
    small = Small(xla)
    with watch() as w:
        for power in (2.0, 2.0, 2.5, 3.5):
            small.step(power=power)
            torch_xla.sync()
    verdict = verdict_of(w)
    assert "argument 1 of pow" in verdict and line_of("power") in verdict
    assert "was 2.0 and became 2.5 at step 3 (then 3.5; 2 compilations)" in verdict
    fixed = Small(xla)
    powers = [torch.tensor([p]).to(fixed.device) for p in (2.0, 2.5, 3.5)]
    with watch() as w:
        for power in powers:
            fixed.step(power=power)
            torch_xla.sync()
    assert w.report().fine and w.report().compilations == 1, str(w.report())


def test_a_number_that_becomes_one_is_named_and_one_that_only_changes_is_not(xla):
    x = torch.ones(5).to(xla.device)
    with watch() as w:
        for weight in (0.25, 0.5, 0.75, 1.0):
            y = x * weight  # weighted
            torch_xla.sync()
            del y
    verdict = verdict_of(w)
    assert "argument 1 of mul" in verdict and line_of("weighted") in verdict
    assert "was 0.75 and became 1.0 at step 4" in verdict
    assert [step.compilations for step in w.steps] == [1, 0, 0, 1]


def test_a_loop_that_runs_more_often_and_a_branch_are_named(xla):
    x = torch.ones(6).to(xla.device)

    def rounds(count, branch):
        y = x
        for _ in range(count):
            y = torch.sin(y)  # rounds
        return torch.cos(y) if branch else y

    with watch() as w:
        for count, branch in ((4, False), (4, False), (5, False), (4, True)):
            y = rounds(count, branch)
            torch_xla.sync()
            del y
    kinds = [(c.step, c.cause.kind, c.cause.what) for c in w.report().compiled]
    assert kinds == [
        (1, recompile_reasons.FIRST, ""),
        (3, recompile_reasons.OPERATIONS, "sin"),
        (4, recompile_reasons.OPERATIONS, "cos"),
    ]
    cause = str(w.report().compiled[1].cause)
    assert "ran 4 times, and then 5 times" in cause and line_of("rounds") in cause


def test_a_zero_that_was_a_constant_of_the_first_graph_is_named(xla):
    total = torch.zeros(()).to(xla.device)  # before the watch: nobody has seen it come
    x = torch.ones(7).to(xla.device)
    with watch() as w:
        for _ in range(3):
            total = total + x.sum()  # total
            torch_xla.sync()
    verdict = verdict_of(w)
    assert "was a part of the graph (prim::Constant 0) and became data at step 2" in verdict
    assert line_of("total") in verdict


def test_state_that_an_optimizer_makes_in_its_first_step_is_named(xla):
    small = Small(xla)
    small.optimizer = torch.optim.SGD(small.model.parameters(), lr=0.1, momentum=0.9)
    with watch() as w:
        for _ in range(3):
            small.step(23)
            torch_xla.sync()
    assert [c.cause.kind for c in w.report().compiled] == [
        recompile_reasons.FIRST,
        recompile_reasons.FIRST_STEP,
    ]
    verdict = verdict_of(w)
    assert line_of("update") in verdict and "ran not at all, and then " in verdict


def test_state_of_the_first_training_step_is_named_though_a_sync_came_before_it(xla):
    small = Small(xla)
    small.optimizer = torch.optim.Adam(small.model.parameters(), lr=0.1)
    with watch() as w:
        made = torch.ones(29).to(xla.device).add(1)
        torch_xla.sync()  # as a loader's, for what the making of the model has left
        for _ in range(3):
            small.step(29)
            torch_xla.sync()
    assert made.shape == (29,)
    kinds = [(c.step, c.cause.kind) for c in w.report().compiled]
    assert kinds == [
        (1, recompile_reasons.FIRST),
        (2, recompile_reasons.FIRST),
        (3, recompile_reasons.FIRST_STEP),
    ]
    assert "modules and optimizers make state in their first step" in verdict_of(w)


def test_reads_of_torch_xla_itself_are_not_blamed_on_another_line(xla):
    x = torch.ones(31).to(xla.device)
    torch_xla.sync()
    with watch() as w:
        for _ in range(4):
            with torch._C.DisableTorchFunction():  # as mark_sharding reads: no call of PyTorch
                x.cpu()
            y = x * 2
            torch_xla.sync()
        y.cpu()  # innocent
    verdict = verdict_of(w)
    assert verdict.startswith("Host reads in 4 of 4 steps (4 reads) that no line of PyTorch asked")
    assert "innocent" not in verdict and "input_sharding" in verdict
    assert [event.line is None for event in w.report().events] == [True] * 4 + [False]


def test_what_the_calls_do_not_show_is_said_to_be_unknown(xla):
    x = torch.ones(8).to(xla.device)
    kept = []
    with watch() as w:
        for step in range(3):
            y = x * 3
            z = y + 4
            if step == 2:
                kept.append(y)  # one more result of the same calls
            del y
            torch_xla.sync()
            del z
    assert [c.cause.kind for c in w.report().compiled] == [
        recompile_reasons.FIRST,
        recompile_reasons.UNKNOWN,
    ]
    assert "a result that is still referenced" in verdict_of(w)


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda loss: loss.item(), "item"),  # reads
        (lambda loss: print(loss), "__repr__"),
        (lambda loss: f"{loss:.3f}", "__format__"),
        (lambda loss: loss.cpu(), "cpu"),
        (lambda loss: bool(loss > 0), "__bool__"),
    ],
)
def test_a_read_in_the_middle_of_a_step_is_named_and_after_it_is_not_a_cut(xla, read, name):
    small = Small(xla)
    with watch() as w:
        for _ in range(2):
            read(small.step())
            torch_xla.sync()
    assert "2 reads cut the graph, " in verdict_of(w)
    assert {event.name for event in w.report().events} == {name}
    assert all(event.cut and event.line for event in w.report().events)
    assert [step.programs for step in w.steps] == [2, 2]
    with watch() as w:
        for _ in range(10):
            loss = small.step()
            torch_xla.sync()
        read(loss)
    assert w.report().fine and w.report().host_reads == 1, str(w.report())


def test_the_line_of_a_read_is_the_users(xla):
    small = Small(xla)
    with watch() as w:
        loss = small.step()
        loss.item()  # item
        torch_xla.sync()
    assert line_of("item") in verdict_of(w)


def test_reading_in_every_step_is_said_even_if_it_cuts_nothing(xla):
    small = Small(xla)
    with watch() as w:
        for _ in range(4):
            loss = small.step()
            torch_xla.sync()
            loss.item()
    assert "Host reads in 4 of 4 steps" in verdict_of(w)


def test_a_fallback_of_the_backward_pass_is_named_with_its_forward_line(xla):
    small = Small(xla, [nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)])
    with watch() as w:
        for _ in range(2):
            small.step()
            torch_xla.sync()
    verdict = verdict_of(w)
    assert verdict.startswith("upsample_bilinear2d_backward ran on the host 2 times (1 a step)")
    assert line_of("forward") in verdict and "(the forward line)" in verdict
    fixed = Small(xla, [nn.ConvTranspose2d(2, 2, 2, stride=2)])
    with watch() as w:
        fixed.step()
        torch_xla.sync()
    assert w.report().fallbacks == 0


def test_a_fallback_of_the_forward_pass_is_named_with_its_line(xla):
    x = torch.rand(3, 3).to(xla.device)
    with watch() as w:
        torch.linalg.eigvals(x)  # eigen
    assert line_of("eigen") in w.report().verdicts[-1]
    assert w.report().counts.fallbacks == {"linalg_eig": 1}


def test_a_missing_sync_is_said(xla):
    small = Small(xla)
    with watch() as w:
        for _ in range(3):
            small.step(3).item()
    assert "No sync in the block, though 3 updates of one optimizer came" in w.report().verdicts[0]
    assert "3 programs had to be compiled" in w.report().verdicts[0]
    torch_xla.sync()
    with watch() as w:
        for _ in range(2):
            small.step(3)
        torch_xla.sync()  # too late
    verdict = verdict_of(w)
    assert "Step 1 holds 2 updates of one optimizer" in verdict and line_of("too late") in verdict
    with watch() as w:
        for _ in range(2):
            small.step(3)
            xm.mark_step()
    assert w.report().fine


def test_steps_are_seen_however_they_end(xla):
    small = Small(xla)
    with watch() as w:
        with torch_xla.step():
            small.step()
        small.step()
        torch_xla.sync()
        small.step()
        xm.mark_step()
    assert [step.programs for step in w.steps] == [1, 1, 1]
    assert len({str(step.line) for step in w.steps}) == 3
    assert all("test_watch.py" in str(step.line) for step in w.steps)


def test_without_explaining_there_are_counts_and_steps_but_no_lines(xla):
    small = Small(xla)
    with watch(explain=False) as w:
        for size in (2, 11, 12, 13, 14):
            small.step(size).item()
            torch_xla.sync()
    report = w.report()
    assert report.events == report.compiled == report.graphs == []
    assert "watch(explain=True) names what" in report.verdicts[0]
    assert "in steps 1, 2, 3, 4, 5" in report.verdicts[0]
    assert report.host_reads == 5 and [step.programs for step in w.steps] == [2] * 5


def test_explaining_changes_no_graph(xla):
    small = Small(xla)
    for _ in range(2):
        small.step(10)
        torch_xla.sync()
    with watch() as w:
        small.step(10)
        torch_xla.sync()
    assert w.report().compilations == 0


def state():
    """Everything that a watch puts in place."""
    mode = _get_current_function_mode_stack()
    return torch_xla._XLAC._xla_step_marker, len(mode), len(_global_optimizer_post_hooks)


def test_a_watch_leaves_everything_as_it_was_also_after_an_exception(xla):
    before = state()
    for _ in range(2):
        with watch():
            assert state() != before
        assert state() == before
    with pytest.raises(ZeroDivisionError), watch():
        _ = 1 / 0
    assert state() == before
    with pytest.raises(BudgetExceeded), watch(budget=Budget(host_reads=0)):
        torch.ones(1).to(xla.device).cpu()
    assert state() == before


def test_watches_may_be_nested(xla):
    small = Small(xla)
    with watch() as outer:
        small.step()
        torch_xla.sync()
        with watch() as inner:
            small.step()
            torch_xla.sync()
            small.step().item()  # nested
            torch_xla.sync()
        small.step()
        torch_xla.sync()
    assert len(outer.steps) == 4 and len(inner.steps) == 2
    for w in (outer, inner):
        [event] = w.report().events
        assert line_of("nested").startswith(str(event.line).split("/")[-1])


def test_watches_may_be_closed_in_any_order(xla):
    before = torch_xla._XLAC._xla_step_marker, _get_current_function_mode_stack()
    small = Small(xla)
    first, second = watch(), watch()
    for opened in (first, second):
        opened.__enter__()
    small.step()
    torch_xla.sync()
    first.__exit__(None, None, None)
    loss = small.step()
    torch_xla.sync()
    loss.item()
    second.__exit__(None, None, None)
    assert (torch_xla._XLAC._xla_step_marker, _get_current_function_mode_stack()) == before
    assert (len(first.steps), len(second.steps)) == (1, 2)
    [read] = second.report().events
    assert read.line.text == "loss.item()"
    assert not first.report().events


def test_a_report_may_be_had_inside_of_the_block(xla):
    small = Small(xla)
    with watch() as w:
        small.step()
        torch_xla.sync()
        assert len(w.report().steps) == 1
        small.step()
        torch_xla.sync()
    assert len(w.report().steps) == 2


def test_a_budget_that_is_kept_is_silent(xla):
    small = Small(xla)
    with watch(budget=Budget(compilations=1, fallbacks=0, host_reads=1)) as w:
        for _ in range(3):
            loss = small.step(15)
            torch_xla.sync()
        loss.item()
    assert w.report().compilations == 1


def test_a_budget_that_is_exceeded_says_which_number_and_why_in_one_line(xla):
    small = Small(xla)
    allowed = Budget(compilations=1, host_reads=0)
    with pytest.raises(BudgetExceeded) as error, watch(budget=allowed):
        for size in (16, 17):
            small.step(size)
            torch_xla.sync()
        small.step(17).item()  # over budget
    message = str(error.value)
    print(message)
    assert "\n" not in message
    assert "compilations, 1 allowed: " in message and "1 host reads, 0 allowed: " in message
    assert "was (16, 1, 8, 8) and became (17, 1, 8, 8)" in message
    assert line_of("over budget") in message


def test_a_budget_does_not_hide_another_exception(xla):
    with pytest.raises(ZeroDivisionError), watch(budget=Budget(host_reads=0)):
        torch.ones(1).to(xla.device).cpu()
        _ = 1 / 0


def test_two_steps_are_compared_by_numbers_and_calls(xla):
    small = Small(xla)
    with watch() as w:
        for size, power in ((18, 2.0), (18, 2.0), (19, 2.0)):
            small.step(size, power)
            torch_xla.sync()
    same, other = compare(w.steps[0], w.steps[1]), compare(w.steps[1], w.steps[2])
    print(same, other, sep="\n\n")
    assert "the calls of both are the same" in same
    assert "was (18, 1, 8, 8) and became (19, 1, 8, 8)" in other
    assert other.splitlines()[0].split() == ["step", "2", "step", "3"]
    assert any(line.split() == ["compilations", "0", "1"] for line in other.splitlines())


def test_two_reports_are_compared(xla):
    small = Small(xla)
    reports = []
    for upload in (1, 2):
        with watch(explain=False) as w:
            for _ in range(upload):
                small.step()
                torch_xla.sync()
        reports.append(w.report())
    table = compare(*reports)
    assert "programs run" in table and "host fallbacks" not in table


def test_a_report_is_json_and_a_picture(xla):
    small = Small(xla)
    with watch() as w:
        for _ in range(3):
            small.step(20).item()
            torch_xla.sync()
    back = json.loads(json.dumps(w.report().to_dict()))
    assert back["verdicts"] == w.report().verdicts
    assert [step["programs"] for step in back["steps"]] == [2, 2, 2]
    assert back["events"][0]["name"] == "item"
    [axis] = timeline(w).axes
    assert len(axis.patches) == 3 * 4  # trace, compile, wait; device
    for step in w.steps:
        host = step.trace_seconds + step.compile_seconds + step.wait_seconds
        assert host == pytest.approx(step.seconds, rel=1e-6)
        assert step.execute_seconds > 0


def test_graphs_are_told_by_their_inputs_with_how_often_they_ran(xla):
    small = Small(xla)
    with watch() as w:
        for size in (21, 21, 22, 21, 22):
            small.step(size)
            torch_xla.sync()
    seen = {graph.inputs[0].shape[0]: graph.runs for graph in w.report().graphs}
    assert seen == {21: 3, 22: 2}


def test_a_forked_loader_worker_is_not_watched(xla):
    small = Small(xla)
    data = torch.utils.data.TensorDataset(torch.rand(4, 1, 8, 8))
    with watch() as w:
        for (batch,) in torch.utils.data.DataLoader(data, batch_size=2, num_workers=1):
            F.relu(small.model(batch.to(small.device))).sum()
            torch_xla.sync()
    assert len(w.steps) == 2


def test_a_text_of_this_process_gives_the_numbers_of_a_watch(xla):
    script = """
import torch, torch_xla, torch_xla.debug.metrics as met
from tpuscope.monitor.watch import watch
with watch() as w:
    x = torch.rand(4, 4).to(torch_xla.device())
    for _ in range(3):
        torch.linalg.eigvals(x)
        x = x * x.sum().item()
        torch_xla.sync()
import json
print(json.dumps({"text": met.metrics_report(), "dict": w.report().to_dict()}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    report, watched = from_text(found["text"]), found["dict"]
    assert report.compilations == watched["compilations"] > 0
    assert report.fallbacks == watched["fallbacks"] == 3
    assert report.host_reads == watched["host_reads"] == 3
    assert report.counts.compile_seconds == pytest.approx(
        watched["metrics"]["CompileTime"]["total"], rel=1e-3
    )
    assert "linalg_eig ran on the host 3 times" in report.verdicts[0]


def test_a_watch_without_torch_xla_says_what_to_do(monkeypatch):
    monkeypatch.setattr(runtime, "installed", lambda: False)
    with pytest.raises(runtime.XlaUnavailable, match="torch_xla is not installed"), watch():
        pass
