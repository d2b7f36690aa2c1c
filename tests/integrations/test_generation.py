"""`compile_for_generation` against `generate` of the same model in eager: tokens, programs, sampling, refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.generation import CompileConfig

import kp_dynamo
from kp_dynamo import TPUConfigurationError, TPUModelPreparationError, TPUValidationError
from kp_dynamo.integrations.generation_programs import prefill
from kp_dynamo.telemetry import snapshot
from tests.spine import run_script

EXACT = {"precision": "float32"}
VOCABULARY, PAD, EOS = 97, 0, 2
READ = "aten::_local_scalar_dense"


def llama(num_layers: int = 2, **changes) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=256, pad_token_id=PAD, bos_token_id=1,
        eos_token_id=None, **changes,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def qwen3() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=VOCABULARY, max_position_embeddings=256, pad_token_id=PAD, eos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        n_embd=64, n_layer=2, n_head=4, n_positions=256, vocab_size=VOCABULARY, pad_token_id=PAD, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def mistral() -> MistralForCausalLM:
    """Its window of 8 is shorter than the prompts and their padding."""
    config = MistralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=256, sliding_window=8, pad_token_id=PAD, eos_token_id=None,
    )  # fmt: skip
    return MistralForCausalLM(config).eval()


def t5() -> T5ForConditionalGeneration:
    config = T5Config(
        d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, vocab_size=VOCABULARY,
        pad_token_id=PAD, decoder_start_token_id=PAD, eos_token_id=EOS,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).eval()


def whisper() -> WhisperForConditionalGeneration:
    """Takes 16 features of 100 frames. Wide positions of the decoder spread its tokens."""
    config = WhisperConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=96, decoder_ffn_dim=96, num_mel_bins=16, max_source_positions=50, max_target_positions=48,
        vocab_size=160, pad_token_id=PAD, bos_token_id=1, eos_token_id=EOS, decoder_start_token_id=3,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.model.decoder.embed_positions.weight.mul_(20)
    settings = {
        "is_multilingual": True,
        "lang_to_id": {"<|en|>": 4, "<|de|>": 5, "<|fr|>": 6},
        "task_to_id": {"transcribe": 7, "translate": 8},
        "no_timestamps_token_id": 9,
        "max_initial_timestamp_index": 10,
    }
    vars(model.generation_config).update(settings)
    return model


def wide(model: nn.Module) -> nn.Module:
    """Random models repeat one token, with logits that rounding could swap. Larger weights spread both."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def prompts(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def uneven(*lengths: int) -> dict[str, torch.Tensor]:
    """Prompts of these lengths, padded on the left."""
    longest = max(lengths)
    mask = torch.stack([torch.arange(longest) >= longest - length for length in lengths]).long()
    return {"input_ids": prompts(len(lengths), longest) * mask + PAD * (1 - mask), "attention_mask": mask}


def programs() -> int:
    return int(snapshot()["programs"])


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("make", [llama, slow(gpt2), slow(qwen3), slow(mistral)])
def test_greedy_tokens_are_those_of_eager(make):
    model = wide(make())
    compiled = kp_dynamo.compile_for_generation(model, max_length=64, options=EXACT)
    for given in ({"input_ids": prompts(2, 11)}, uneven(3, 12)):
        wanted = model.generate(**given, max_new_tokens=12)
        assert len(set(wanted[:, -12:].flatten().tolist())) > 3, "a text that repeats one token tests little"
        assert torch.equal(compiled.generate(**given, max_new_tokens=12), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("make", [llama, t5])
@pytest.mark.parametrize("mode", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5}])
def test_beam_search_is_that_of_eager(make, mode):
    model = wide(make())
    compiled = kp_dynamo.compile_for_generation(model, max_length=64, options=EXACT)
    given = {"input_ids": prompts(2, 9)} if make is t5 else uneven(9, 4)
    wanted = model.generate(**given, max_new_tokens=10, **mode)
    assert torch.equal(compiled.generate(**given, max_new_tokens=10, **mode), wanted)


_SHORT, _LONG = (2, 16, 100), (2, 16, 330)
_FALLBACK = {
    "temperature": (0.0, 0.4, 0.8), "compression_ratio_threshold": 1.0, "logprob_threshold": -0.1,
    "no_speech_threshold": 0.6, "condition_on_prev_tokens": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "mode"),
    [
        slow(_SHORT, {}),  # finds the language
        slow(_SHORT, {"language": "de", "task": "translate", "num_beams": 3}),
        slow(_SHORT, {"language": "en", "do_sample": True, "temperature": 0.9}),
        slow(_SHORT, {"language": "en", "num_beams": 2, "num_return_sequences": 2}),
        slow(_SHORT, {"language": "en", "prompt_ids": torch.tensor([3, 20, 21])}),
        slow(_SHORT, {"language": "en", "return_dict_in_generate": True}),
        slow(_LONG, {"return_timestamps": True}),
        slow(_LONG, {"return_timestamps": True, "return_segments": True, "language": "fr"}),
        slow(_LONG, {"return_timestamps": True, **_FALLBACK}),
        slow(_LONG, {"return_timestamps": True, "condition_on_prev_tokens": True}),
    ],
)
def test_whisper_writes_what_eager_writes(shape, mode):
    model = wide(whisper())
    compiled = kp_dynamo.compile_for_generation(model, max_length=48, options=EXACT)
    given = {"input_features": torch.randn(shape), "max_new_tokens": 12, **mode}
    if shape is _LONG:
        given["attention_mask"] = (torch.arange(330) < torch.tensor([[330], [250]])).long()
    found = []
    for generates in (model, compiled):
        torch.manual_seed(0)
        found.append(generates.generate(**copy.deepcopy(given)))
    eager, mine = found if isinstance(found[0], torch.Tensor) else [each["sequences"] for each in found]
    assert len(set(eager.flatten().tolist())) > 5, "a text that repeats one token tests little"
    assert torch.equal(mine, eager)


@pytest.mark.slow
def test_whisper_runs_few_programs():
    model = wide(whisper())
    compiled = kp_dynamo.compile_for_generation(model, max_length=48, options=EXACT)
    kp_dynamo.clear_cache()
    before = programs()
    for _ in range(3):
        compiled.generate(torch.randn(_SHORT), max_new_tokens=9)
    assert programs() - before == 4, "the encoder, the language, the start of the text, one more token"
    # With a mask of the tokens, as behind the text of an earlier segment: a start and a token.
    before, start = programs(), torch.tensor([[3, 4, 7, 9, 30]] * 2)
    given = {
        "input_features": torch.randn(_SHORT), "decoder_input_ids": start, "max_new_tokens": 7,
        "decoder_attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1] * 5]), "force_unique_generate_call": True,
    }  # fmt: skip
    assert torch.equal(compiled.generate(**given), model.generate(**given))
    assert programs() - before == 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}])
def test_programs_are_divided_at_their_layers(mode):
    """Each piece gets the cache of its own layers, or it could not be donated; `strict` raises then."""
    model = wide(llama(num_layers=4))
    options = {**EXACT, "blocks": "on", "strict": True}
    compiled = kp_dynamo.compile_for_generation(model, max_length=64, options=options)
    copied = []
    for lengths in ((9, 4), (5, 8)):
        given = uneven(*lengths)
        wanted = model.generate(**given, max_new_tokens=10, **mode)
        assert torch.equal(compiled.generate(**given, max_new_tokens=10, **mode), wanted)
        copied.append(snapshot()["copied_before_donation"])
    assert copied[1] == copied[0], "only the new buffers of the first request are copied"


_SIZES = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": None}
_LLAMA_LIKE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
_GPTJ_LIKE = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_ctx": 256, "rotary_dim": 8}
_BART_LIKE = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "decoder_start_token_id": PAD,
    "forced_eos_token_id": None,
}  # fmt: skip
FAMILIES = {
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4},  # its biases are made of the mask [B, S]
    "falcon": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "gemma2": {**_LLAMA_LIKE, "sliding_window": 8},
    "gemma3_text": {**_LLAMA_LIKE, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gptj": _GPTJ_LIKE,  # its table of positions is a plain attribute
    "codegen": _GPTJ_LIKE,
    "gpt_oss": {**_LLAMA_LIKE, "sliding_window": 8, "num_local_experts": 4},  # other code on the CPU
    "bart": _BART_LIKE,
    "marian": _BART_LIKE,  # looks for padding in the values of its tokens
    "mt5": {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": PAD},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", [{}, {"num_beams": 2}])
def test_tokens_of_many_families_are_those_of_eager(family, mode):
    config = AutoConfig.for_model(family, **FAMILIES[family], **_SIZES)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = wide(kind.from_config(config).eval())
    compiled = kp_dynamo.compile_for_generation(model, max_length=48, options=EXACT)
    for lengths in ((11, 5), (16, 19), (3, 8)):
        given = uneven(*lengths)
        eager = model.generate(**given, max_new_tokens=9, do_sample=False, **mode)
        assert torch.equal(compiled.generate(**given, max_new_tokens=9, do_sample=False, **mode), eager)


def test_a_prompt_attends_to_itself_and_not_to_the_cache():
    graphs = []

    def keep(graph, _):
        graphs.append(graph.graph)
        return graph

    torch._dynamo.reset()
    given = {"input_ids": prompts(2, 8), "cache_position": torch.arange(8), "attention_mask": torch.ones(2, 8)}
    tensors = [torch.ones(2, 2, 48, 16) for _ in range(4)]
    with torch.no_grad():
        torch.compile(prefill, backend=keep, fullgraph=True)(llama(), given, tensors, [], torch.tensor([7]))
    [nodes] = [list(graph.nodes) for graph in graphs]
    keys = [n.args[1].meta["example_value"] for n in nodes if n.target is F.scaled_dot_product_attention]
    assert [key.shape[2] for key in keys] == [8, 8]
    assert not [n for n in nodes if n.target == "index_copy_"]
    assert [bool(t[:, :, :8].any()) and not bool(t[:, :, 8:].any()) for t in tensors] == [True] * 4


@pytest.mark.slow
def test_the_device_starts_with_the_first_request():
    """What must come before its start, such as the disk cache, may follow `compile_for_generation`."""
    run_script(
        "import torch_xla, kp_dynamo\n"
        "from tests.integrations.test_generation import gpt2, llama, t5\n"
        "for make in (gpt2, llama, t5):\n"
        "    kp_dynamo.compile_for_generation(make(), max_length=48)\n"
        "assert not torch_xla._XLAC._xla_runtime_is_initialized()\n"
    )


@pytest.mark.slow
def test_encoder_decoder_with_prompts_of_several_lengths():
    model = wide(t5())
    compiled = kp_dynamo.compile_for_generation(model, max_length=64, options=EXACT)
    kp_dynamo.clear_cache()  # equal models of other tests would share programs
    before = programs()
    for given in (uneven(5, 5), uneven(12, 7), {"input_ids": prompts(2, 6)}, uneven(8, 3)):
        given = {name: value.flip(1) for name, value in given.items()}  # an encoder is padded on the right
        wanted = model.generate(**given, max_new_tokens=9)
        assert torch.equal(compiled.generate(**given, max_new_tokens=9), wanted)
    # Two buckets of the encoder, the start of the decoder, and the decoding step.
    assert programs() - before == 4
    start = prompts(2, 3)
    wanted = model.generate(**given, decoder_input_ids=start, max_new_tokens=5)
    assert torch.equal(compiled.generate(**given, decoder_input_ids=start, max_new_tokens=5), wanted)


def test_many_requests_take_one_decoding_program_and_one_for_each_bucket():
    import torch_xla.debug.metrics as metrics

    model = llama()
    compiled = kp_dynamo.compile_for_generation(model, max_length=64, options=EXACT)
    kp_dynamo.clear_cache()
    compiled.generate(prompts(1, 5), max_new_tokens=3, do_sample=True)
    before, lazy, read = programs(), metrics.counter_value("UncachedCompile"), metrics.counter_value(READ)
    for length in (5, 6, 7, 8):
        compiled.generate(prompts(1, length), max_new_tokens=60 - length, do_sample=length % 2 == 0)
    assert programs() == before
    for length in (9, 13, 16, 11):
        compiled.generate(prompts(1, length), max_new_tokens=4)
    assert programs() - before == 1
    assert metrics.counter_value("UncachedCompile") - lazy == 1, "torch_xla compiled programs of its own"
    assert metrics.counter_value(READ) == read, "a token was read from the device one by one"


def test_the_cache_is_donated():
    compiled = kp_dynamo.compile_for_generation(llama(), max_length=64, options=EXACT)
    compiled.generate(prompts(1, 5), max_new_tokens=2)
    before = snapshot()
    compiled.generate(prompts(1, 7), max_new_tokens=6)
    after = snapshot()
    assert after["donated_buffers"] - before["donated_buffers"] == 6 * 4, "a prompt and five tokens, two layers of two"
    assert after["copied_before_donation"] == before["copied_before_donation"]


@pytest.mark.slow
def test_another_batch_size_has_its_own_programs():
    model = wide(llama())
    compiled = kp_dynamo.compile_for_generation(model, max_length=64, options=EXACT)
    kp_dynamo.clear_cache()
    before = programs()
    for batch in (1, 3, 1, 3):
        given = prompts(batch, 6)
        wanted = model.generate(given, max_new_tokens=5)
        assert torch.equal(compiled.generate(given, max_new_tokens=5), wanted)
    assert programs() - before == 4


def test_the_end_of_a_text_stops_its_row_and_then_the_request():
    model = wide(llama())
    given = uneven(7, 5)
    free = model.generate(**given, max_new_tokens=20)[:, 7:]
    ends = [int(free[0, 4]), int(free[1, 9])]
    wanted = model.generate(**given, max_new_tokens=20, eos_token_id=ends)
    assert wanted.shape[1] < 27
    compiled = kp_dynamo.compile_for_generation(model, max_length=64, options=EXACT)
    assert torch.equal(compiled.generate(**given, max_new_tokens=20, eos_token_id=ends), wanted)
    stopped = compiled.generate(**given, max_new_tokens=20, stopping_criteria=[_after_ten_tokens])
    assert stopped.shape[1] == 10


def _after_ten_tokens(input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
    return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 10)


@pytest.mark.slow
def test_processors_see_the_true_tokens():
    """Padding inside the loop would be punished as a repeated token, and would end the ban of short texts early."""
    model = wide(llama())
    compiled = kp_dynamo.compile_for_generation(model, max_length=64, options=EXACT)
    given = {"input_ids": prompts(2, 9)}
    for mode in ({"repetition_penalty": 1.7}, {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[5], [7, 8]]}):
        wanted = model.generate(**given, max_new_tokens=12, **mode)
        assert torch.equal(compiled.generate(**given, max_new_tokens=12, **mode), wanted)


def test_sampling_repeats_under_a_seed_and_is_that_of_eager():
    model = wide(llama())
    compiled = kp_dynamo.compile_for_generation(model, max_length=64, options=EXACT)
    given = prompts(3, 6)

    def sample(of, seed):
        torch.manual_seed(seed)
        return of.generate(given, max_new_tokens=15, do_sample=True, temperature=1.3, top_k=30)

    first = sample(compiled, 5)
    assert torch.equal(sample(compiled, 5), first)
    assert torch.equal(sample(model, 5), first)
    assert not torch.equal(sample(compiled, 6), first)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [{"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}, {"temperature": 1.5, "top_k": 12, "top_p": 0.8}]
)
def test_samples_are_distributed_as_softmax_says(mode):
    """Of the second token, which the decoding program makes; the first is the same in all rows."""
    model = wide(llama())
    compiled = kp_dynamo.compile_for_generation(model, max_length=8, options=EXACT)
    given, num_rows = prompts(1, 4), 2000
    drawn = compiled.generate(
        given.repeat(num_rows, 1), max_new_tokens=2, do_sample=True, logits_processor=LogitsProcessorList([_first]),
        **{"top_k": 0, **mode},
    )[:, -1]  # fmt: skip
    with torch.no_grad():
        logits = model(torch.cat([given, torch.tensor([[3]])], dim=1)).logits[0, -1]
    wanted = truncated_softmax(logits, **mode)
    counts = torch.bincount(drawn, minlength=VOCABULARY).float()
    assert counts[wanted == 0].sum() == 0
    seen = wanted * num_rows >= 5  # where the normal approximation of the statistic holds
    rest = torch.tensor([counts[~seen].sum(), wanted[~seen].sum() * num_rows])
    terms = (counts[seen] - wanted[seen] * num_rows).square() / (wanted[seen] * num_rows)
    statistic = float(terms.sum() + (rest[0] - rest[1]).square() / rest[1].clamp(min=1))
    freedom = int(seen.sum())
    # The mean of chi-square is the degrees of freedom k, its variance 2k: five deviations.
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def _first(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    if input_ids.shape[1] > 4:
        return scores
    return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([3]), 0.0)


def truncated_softmax(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> torch.Tensor:
    """Probabilities: of the k best, the fewest whose sum reaches p."""
    order = logits.argsort(descending=True)
    kept = order[: top_k or len(order)]
    probabilities = (logits[kept] / temperature).softmax(0)
    kept = kept[probabilities.cumsum(0) - probabilities < top_p]
    return torch.zeros_like(logits).index_copy(0, kept, (logits[kept] / temperature).softmax(0))


@pytest.mark.parametrize("make", [llama, slow(t5)])
def test_the_model_stays_as_it_is(make):
    """T5's embedding has three parents, and its weight is the head's too."""
    model = make()
    before = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    attributes = set(vars(model))
    compiled = kp_dynamo.compile_for_generation(model, max_length=64, options=EXACT)
    compiled.generate(prompts(1, 5), max_new_tokens=3)
    with pytest.raises(ZeroDivisionError):
        compiled.generate(prompts(1, 5), max_new_tokens=3, stopping_criteria=[lambda *_, **__: 1 // 0])
    assert {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()} == {
        name: was for name, (was, _) in before.items()
    }
    assert all(torch.equal(tensor, before[name][1]) for name, tensor in model.state_dict().items())
    assert set(vars(model)) == attributes
    assert all(p.requires_grad and p.device.type == "cpu" for p in model.parameters())
    assert isinstance(compiled, type(model))
    assert compiled.config is model.config
    assert compiled.lm_head is model.lm_head
    given = {"input_ids": prompts(1, 5), **({"decoder_input_ids": prompts(1, 2)} if make is t5 else {})}
    assert torch.equal(compiled(**given).logits, model(**given).logits)


@pytest.mark.slow
def test_a_request_after_one_that_failed():
    model = wide(llama())
    compiled = kp_dynamo.compile_for_generation(model, max_length=64, options=EXACT)
    given = prompts(2, 6)
    wanted = model.generate(given, max_new_tokens=6)
    with pytest.raises(ZeroDivisionError):
        compiled.generate(given, max_new_tokens=6, stopping_criteria=[lambda *_, **__: 1 // 0])
    assert torch.equal(compiled.generate(given, max_new_tokens=6), wanted)


def test_changed_weights_are_seen():
    model = wide(llama())
    compiled = kp_dynamo.compile_for_generation(model, max_length=64, options=EXACT)
    given = prompts(2, 6)
    first = compiled.generate(given, max_new_tokens=6)
    model.model.layers[0].mlp.down_proj.weight.data.mul_(-3)
    before = programs()
    wanted = model.generate(given, max_new_tokens=6)
    assert not torch.equal(wanted, first)
    assert torch.equal(compiled.generate(given, max_new_tokens=6), wanted)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().flip(0))
    wanted = model.generate(given, max_new_tokens=6)
    assert torch.equal(compiled.generate(given, max_new_tokens=6), wanted)
    assert programs() == before


@pytest.mark.slow
def test_a_model_that_is_cast_gets_a_cache_of_its_dtype():
    model = wide(llama())
    compiled = kp_dynamo.compile_for_generation(model, max_length=64, options=EXACT)
    given = prompts(2, 6)
    compiled.generate(given, max_new_tokens=6)
    model.double()
    wanted = model.generate(given, max_new_tokens=6)
    assert torch.equal(compiled.generate(given, max_new_tokens=6), wanted)


@pytest.mark.slow
def test_nan_of_a_request_stays_in_it():
    model = wide(llama())
    compiled = kp_dynamo.compile_for_generation(model, max_length=64, options=EXACT)
    weight = model.model.layers[0].self_attn.v_proj.weight
    good = weight.detach().clone()
    weight.data.fill_(torch.nan)
    compiled.generate(prompts(2, 14), max_new_tokens=40)
    weight.data.copy_(good)
    given = uneven(3, 6)
    wanted = model.generate(**given, max_new_tokens=6)
    assert torch.equal(compiled.generate(**given, max_new_tokens=6), wanted)


def test_a_model_on_the_device():
    model = wide(llama())
    on_device = copy.deepcopy(model).to("xla")
    compiled = kp_dynamo.compile_for_generation(on_device, max_length=64, options=EXACT)
    given = uneven(7, 5)
    wanted = model.generate(**given, max_new_tokens=8)
    assert torch.equal(compiled.generate(**given, max_new_tokens=8), wanted)
    moved = {name: value.to("xla") for name, value in given.items()}
    found = compiled.generate(**moved, max_new_tokens=8)
    assert found.device.type == "xla"
    assert torch.equal(found.cpu(), wanted)


@pytest.mark.slow
def test_inference_mode_of_one_request_is_no_trouble_for_the_next():
    model = wide(llama())
    compiled = kp_dynamo.compile_for_generation(model, max_length=64, options=EXACT)
    given = prompts(1, 6)
    wanted = model.generate(given, max_new_tokens=5)
    with torch.inference_mode():
        assert torch.equal(compiled.generate(given.clone(), max_new_tokens=5), wanted)
    assert torch.equal(compiled.generate(given, max_new_tokens=5), wanted)


@pytest.mark.slow
def test_scores_are_those_of_eager():
    """To 1e-4: logits of some ten, each from sums whose order differs, 80 roundings of float32."""
    model = wide(llama())
    compiled = kp_dynamo.compile_for_generation(model, max_length=64, options=EXACT)
    mode = {"max_new_tokens": 5, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    given = uneven(6, 4)
    found, wanted = compiled.generate(**given, **mode), model.generate(**given, **mode)
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(found.scores, wanted.scores, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-4, atol=1e-4)
    assert "past_key_values" not in found


@pytest.mark.slow
def test_buckets_of_your_own():
    model = wide(llama())
    compiled = kp_dynamo.compile_for_generation(model, max_length=40, buckets=[12, 24], options=EXACT)
    kp_dynamo.clear_cache()
    before = programs()
    for length in (3, 12, 13, 24):
        given = prompts(1, length)
        wanted = model.generate(given, max_new_tokens=4)
        assert torch.equal(compiled.generate(given, max_new_tokens=4), wanted)
    assert programs() - before == 3
    with pytest.raises(TPUValidationError, match="a length of 25 is over the last bucket, 24"):
        compiled.generate(prompts(1, 25), max_new_tokens=4)


@pytest.mark.slow
def test_casts_change_the_scores_by_no_more_than_they_may():
    """Of the tokens before the first that differs: bfloat16 keeps 8 bits, through two layers and the head."""
    model = wide(llama())
    compiled = kp_dynamo.compile_for_generation(model, max_length=64)
    mode = {"max_new_tokens": 12, "return_dict_in_generate": True, "output_logits": True}
    given = uneven(9, 5)
    found, wanted = compiled.generate(**given, **mode), model.generate(**given, **mode)
    for row in range(2):
        differs = (found.sequences[row, 9:] != wanted.sequences[row, 9:]).nonzero()
        first = int(differs[0]) if len(differs) else 11
        for step in range(first + 1):
            mine, eager = found.logits[step][row], wanted.logits[step][row]
            bound = 2**-8 * 8 * float(eager.abs().max())
            assert float((mine - eager).abs().max()) < bound
        if len(differs):
            best = wanted.logits[first][row].topk(2).values
            assert float(best[0] - best[1]) < 2 * bound


REFUSED = {
    "assistant_model": dict(assistant_model=True),
    "prompt_lookup_num_tokens": dict(prompt_lookup_num_tokens=3),
    "custom_generate": dict(custom_generate="some/repository"),
    "use_cache=False": dict(use_cache=False),
    "cache_implementation='dynamic'": dict(cache_implementation="dynamic"),
    "prefill_chunk_size": dict(prefill_chunk_size=4),
    "compile_config": dict(compile_config=CompileConfig(backend="kp_tpu")),
    "guidance_scale": dict(guidance_scale=2.0),
    "output_attentions": dict(output_attentions=True, return_dict_in_generate=True),
    "output_hidden_states": dict(output_hidden_states=True, return_dict_in_generate=True),
    "past_key_values": dict(past_key_values=True),
    "inputs_embeds": dict(inputs_embeds=torch.zeros(1, 4, 64)),
    "position_ids": dict(position_ids=torch.zeros(1, 4, dtype=torch.int64)),
    "contrastive_search": dict(penalty_alpha=0.6, top_k=4),
    "group_beam_search": dict(num_beams=4, num_beam_groups=2, diversity_penalty=0.5),
    "max_length=16": dict(max_new_tokens=30),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(name):
    model = llama()
    compiled = kp_dynamo.compile_for_generation(model, max_length=16)
    given = dict(REFUSED[name])
    if "assistant_model" in given:
        given["assistant_model"] = llama()
    if "past_key_values" in given:
        given["past_key_values"] = StaticCache(config=model.config, max_cache_len=16)
    with pytest.raises(TPUConfigurationError, match=name):
        compiled.generate(prompts(1, 4), **{"max_new_tokens": 2, **given})


def test_tokens_outside_the_vocabulary_are_refused():
    compiled = kp_dynamo.compile_for_generation(llama(), max_length=16)
    with pytest.raises(TPUValidationError, match="hold tokens from 3 to 97"):
        compiled.generate(torch.tensor([[3, VOCABULARY]]), max_new_tokens=2)


def test_models_that_cannot_be_served_are_refused_by_name():
    mamba = MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=VOCABULARY, state_size=4))
    with pytest.raises(TPUModelPreparationError, match="MambaForCausalLM cannot be compiled for generation"):
        kp_dynamo.compile_for_generation(mamba, max_length=16)
    with pytest.raises(TPUConfigurationError, match="got Linear"):
        kp_dynamo.compile_for_generation(nn.Linear(2, 2), max_length=16)
    with pytest.raises(TPUConfigurationError, match="compiled already"):
        kp_dynamo.compile_for_generation(torch.compile(llama(), backend="kp_tpu"), max_length=16)
    with pytest.raises(TPUConfigurationError, match="LlamaForCausalLM has 256 positions"):
        kp_dynamo.compile_for_generation(llama(), max_length=257)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(max_length=0), "max_length=0 is invalid"),
        (dict(max_length=True), "max_length=True is invalid"),
        (dict(max_length=16, buckets=[8, 32]), "32 is over max_length=16"),
        (dict(max_length=16, buckets=[8, 4]), "buckets"),
        (dict(max_length=16, options={"buckets": [8]}), "got the option buckets"),
        (dict(max_length=16, options={"levle": "balanced"}), "level"),
    ],
)
def test_bad_arguments_are_refused(given, message):
    with pytest.raises(TPUConfigurationError, match=message):
        kp_dynamo.compile_for_generation(llama(), **given)
