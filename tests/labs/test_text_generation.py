"""Lab 12: what each way of generating compiles and reads, and that all of them write the same."""

import copy

import pytest
import torch
import torch_xla
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from labs.text_generation import bits, decoder, look, ways
from tpuscope.engine import torch_xla as runtime
from tpuscope.errors import RequestError
from tpuscope.monitor import layers
from tpuscope.monitor.watch import Budget, watch

PROMPTS = ["The target ", "A ", "Padding "]


@pytest.fixture(scope="module")
def device():
    return runtime.device()


@pytest.fixture(scope="module")
def host():
    """A decoder with random weights, one block."""
    return decoder.build(hidden=32, layers=1)


@pytest.fixture(scope="module")
def model(host, device):
    return decoder.move(copy.deepcopy(host), device)


def ends_at_once(logits, temperature=None):
    return torch.full_like(logits[:, :1], decoder.END).long()


# -- model and text --------------------------------------------------------------------------------


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0\n"), min_size=1))
def test_a_text_survives_encoding(text):
    assert decoder.decode(decoder.encode(text)) == text


def test_to_makes_two_of_shared_weights_and_move_does_not(host, device):
    model = copy.deepcopy(host).to(device)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    model = decoder.move(copy.deepcopy(host), device)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_saved_model_is_loaded_with_the_same_weights(host, model, device, tmp_path):
    decoder.save(model, tmp_path)
    loaded = decoder.load(tmp_path, device)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value.cpu(), host.state_dict()[name]), name
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_training_learns_with_two_programs_and_reads_at_its_end_only(host, device):
    model = decoder.move(copy.deepcopy(host), device)
    with watch(budget=Budget(compilations=2, fallbacks=0, host_reads=12)) as w:
        losses = decoder.train(model, "abc\nabd\n", steps=12)
    assert losses[-1] < 0.8 * losses[0]
    assert all(step.host_reads == 0 for step in w.steps)


# -- prompts ---------------------------------------------------------------------------------------


@given(
    st.lists(st.text("abc", min_size=1, max_size=20), min_size=1, max_size=4),
    st.integers(1, 16),
)
def test_prompts_end_together_at_a_multiple_and_their_tokens_count_from_zero(prompts, multiple):
    ids = ways.left_padded(prompts, multiple)
    longest = max(map(len, prompts))
    assert ids.shape[1] % multiple == 0 and longest <= ids.shape[1] < longest + multiple
    places = ways.positions(ids != decoder.PAD)
    for row, place, prompt in zip(ids, places, prompts, strict=True):
        assert decoder.decode(row.tolist()) == prompt
        assert place[-len(prompt) :].tolist() == list(range(len(prompt)))


# -- what compiles ---------------------------------------------------------------------------------


def test_growing_compiles_for_each_length_and_the_others_for_two_shapes(model):
    runs = {
        way.name: look.measure(way, ["The target ", "A cloud "], 8)
        for way in (ways.Growing(model), ways.Padded(model, 32), ways.Static(model, 32))
    }
    counts = {name: [run.report.compilations for run in of] for name, of in runs.items()}
    assert counts == {"growing": [8, 3], "padded": [2, 0], "static": [2, 0]}
    assert {run.report.host_reads for of in runs.values() for run in of} == {1}
    texts = {tuple(run.text for run in of) for of in runs.values()}
    assert len(texts) == 1, "all ways write the same"


def test_a_step_of_the_static_way_has_no_fallback_and_is_one_program(model):
    with watch() as w:
        ways.generate(ways.Static(model, 48), PROMPTS[:1], 12)
    assert [step.programs for step in w.steps] == [1] * 12
    assert w.report().fallbacks == 0
    assert w.report().compilations <= 2


def test_a_compiled_step_writes_the_same_and_compiles_nothing_for_the_next_prompt(model):
    way = ways.Compiled(model, 32)
    for number, prompt in enumerate(PROMPTS):
        with watch(explain=False) as w:
            text = ways.generate(way, [prompt], 6)
        assert way.fallback_reason is None
        assert text == ways.generate(ways.Static(model, 32), [prompt], 6)
        assert number == 0 or w.report().compilations == 0


def test_a_compiled_way_takes_a_batch_after_a_single_prompt(model):
    way = ways.Compiled(model, 32)
    ways.generate(way, PROMPTS[:1], 4)
    expected = ways.generate(ways.Static(model, 32), PROMPTS, 4)
    assert ways.generate(way, PROMPTS, 4) == expected
    assert way.fallback_reason is None


# -- what is written -------------------------------------------------------------------------------


def test_a_batch_writes_what_its_prompts_write_alone(model):
    way = ways.Static(model, 32)
    together = ways.generate(way, PROMPTS, 8)
    assert together == [ways.generate(way, [prompt], 8)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("every", [1, 3, 0])
def test_the_stop_condition_costs_one_read_each_time_it_is_asked(model, monkeypatch, every):
    monkeypatch.setattr(ways, "choose", ends_at_once)
    with watch(explain=False) as w:
        texts = ways.generate(ways.Static(model, 32), PROMPTS, 7, stop_every=every)
    assert texts == PROMPTS, "after END there is only padding"
    assert len(w.steps) == (every or 7)
    assert w.report().host_reads == (2 if every else 1)


def test_the_devices_seed_makes_sampling_repeat_and_the_hosts_does_not_matter(model):
    way = ways.Static(model, 32)
    texts = []
    for seed, host_seed in ((1, 1), (1, 2), (2, 1)):
        torch.manual_seed(host_seed)
        torch_xla.manual_seed(seed)
        texts.append(ways.generate(way, PROMPTS, 8, temperature=1.0))
    assert texts[0] == texts[1] != texts[2]


def test_another_temperature_compiles_nothing(model):
    way = ways.Static(model, 32)
    ways.generate(way, PROMPTS, 4, temperature=1.0)
    with watch(explain=False, budget=Budget(compilations=0)):
        ways.generate(way, PROMPTS, 4, temperature=0.37)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-5, 5, width=32), min_size=4, max_size=4, unique=True))
def test_a_low_temperature_is_greedy(values):
    best, second = sorted(values)[:-3:-1]
    assume(best - second > 1e-3)  # 1,000 after the division: more than the noise of a draw
    logits = torch.tensor([values]) * 1000
    assert torch.equal(ways.choose(logits, torch.tensor([1e-3])), ways.choose(logits))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (lambda m: ways.generate(ways.Static(m, 32), ["a" * 30], 4), "capacity=48"),
        (lambda m: ways.generate(ways.Padded(m, 32), ["a" * 40], 4), "capacity=64"),
        (lambda m: ways.generate(ways.Static(m), [""], 4), "prompt 0 is ''"),
        (lambda m: ways.generate(ways.Static(m), [], 4), "at least one"),
        (lambda m: ways.generate(ways.Static(m), "text", 4), "'text'"),
        (lambda m: ways.generate(ways.Static(m), ["a"], 0), "tokens is 0"),
        (lambda m: ways.generate(ways.Static(m), ["a"], 4, temperature=0.0), "temperature is 0.0"),
        (lambda m: ways.generate(ways.Static(m), ["a"], 4, temperature=-1), "temperature is -1"),
        (lambda m: ways.generate(ways.Static(m), ["a"], 4, stop_every=-2), "stop_every is -2"),
        (lambda m: ways.Static(m, multiple=0), "multiple is 0"),
        (lambda m: ways.Padded(m, multiple=-8), "multiple is -8"),
        (lambda m: ways.Static(m, capacity=50, multiple=16), "take 64"),
        (lambda m: ways.left_padded(["a"], 0), "multiple is 0"),
        (lambda m: decoder.load("nowhere", m.device), "nowhere holds no model"),
    ],
)
def test_a_wrong_request_gives_one_line_that_names_the_value_or_the_fix(model, request_, words):
    with pytest.raises(RequestError) as raised:
        request_(model)
    assert words in str(raised.value) and "\n" not in str(raised.value)


# -- pictures, host against device -----------------------------------------------------------------


def test_the_table_and_the_picture_show_each_way_and_prompt(model):
    runs = [
        run
        for way in (ways.Padded(model, 32), ways.Static(model, 32))
        for run in look.measure(way, PROMPTS[:2], 4)
    ]
    table = look.table(runs)
    assert len(table.splitlines()) == 5 and "'The target '" in table
    axis = look.time_per_token(runs).axes[0]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["padded", "static"]
    assert [len(line.get_xdata()) for line in axis.lines if line.get_linestyle() == "-"].count(
        8
    ) == 2


def test_hidden_states_agree_and_a_wrong_layer_is_found(host, model, device):
    ids = ways.left_padded(PROMPTS, 16)
    right = look.hidden_states(host, ids)
    found = look.differences(right, look.hidden_states(model, ids), ids != decoder.PAD)
    assert list(found) == ["embedding", "block 0, norm", "logits"]
    assert max(found.values()) < 1e-5
    broken = decoder.move(copy.deepcopy(host), device)
    with torch.no_grad():
        broken.model.layers[0].mlp.down_proj.weight += 0.1
    found = look.differences(right, look.hidden_states(broken, ids), ids != decoder.PAD)
    assert found["embedding"] == 0 and found["block 0, norm"] > 1e-2


def test_the_operations_of_a_block_are_named_by_layer_on_both(host, model):
    inputs = torch.randn(1, 8, 32)
    angles = host.model.rotary_emb(inputs, torch.arange(8)[None])
    arguments = (inputs, torch.zeros(1, 1, 8, 8), None, None, False, angles)
    with torch.no_grad():
        here, there = (
            layers.track(one.model.layers[0], *arguments, backward=False) for one in (host, model)
        )
    lines = look.operations(here, there).splitlines()
    [attention] = [line for line in lines if line.split()[0].endswith(".self_attn")]
    [query] = [line for line in lines if "q_proj" in line]
    assert "clone" in attention and "the same" in query
    assert here.total().flops == there.total().flops > 0


# -- fewer bits ------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([torch.int8, torch.float8_e4m3fn]))
def test_stored_numbers_are_near_the_weights(seed, dtype):
    weight = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed))
    stored, scale = bits.quantise(weight, dtype)
    back = stored.float() * scale[:, None]
    # int8: half a step. FP8: half of the last of three bits of fraction, or of its smallest step.
    near = (
        scale[:, None] / 2 if dtype is torch.int8 else weight.abs() / 16 + scale[:, None] * 2**-10
    )
    assert stored.dtype == dtype and bool(((back - weight).abs() <= near * 1.001).all())


def test_a_quantised_decoder_compiles_twice_and_has_no_fallback(host, device):
    small = bits.quantised(host)
    assert sum(isinstance(module, bits.Quantised) for module in small.modules()) == 7
    assert not any(isinstance(module, bits.Quantised) for module in host.modules())
    with watch(explain=False, budget=Budget(compilations=2, fallbacks=0)):
        ways.generate(ways.Static(decoder.move(small, device), 32), PROMPTS, 6)


def test_what_8_bits_do_on_torch_xla_2_9():
    outcomes = {trial.name: trial.outcome for trial in bits.trials(runtime.device())}
    assert outcomes == {
        "int8 weights, converted in the program": "works",
        "int8 weights, not converted": "works",
        "FP8 weights (e4m3fn), converted": "works",
        "FP8 weights, not converted": "works",
        "FP8 × FP8": "works",
        "torch._scaled_mm, FP8": "on the host",
        "FP8 of another kind (e4m3fnuz)": "error",
        "int8 × int8": "wrong",
        "torch._int_mm, int8": "on the host",
        "quantize_dynamic, then .to(device)": "on the host",
        "a quantised tensor, .to(device)": "error",
        "XlaQuantizedLinear, int8": "works",
        "XlaQuantizedLinear, inputs in int8, too": "works",
        "XlaQuantizedLinear, int4": "error",
    }
