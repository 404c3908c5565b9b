"""Static inference: a prompt whole, in chunks or token by token, beside the forward of the whole sequence.

Megatron's engines that batch dynamically need flash-attn, and go past the core attention anyway.
"""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.engines import StaticInferenceEngine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import (
    InferenceWrapperConfig,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron_harness import (
    LENGTH,
    VOCAB,
    assert_same_attention,
    batch,
    build_gpt,
    core,
    definition,
    latent,
    local_spec,
    qkv,
    tiny_config,
)

from fp4mega.megatron import swap_core_attention

pytestmark = pytest.mark.usefixtures("megatron")

CHUNKS = (0, 10, 17, 18, 24)
MODELS = {
    "grouped-queries": lambda: (tiny_config(), local_spec()),
    "window": lambda: (tiny_config(window_size=(5, 0)), local_spec()),
    "sink": lambda: (tiny_config(softmax_type="learnable"), local_spec()),
    "padding-causal": lambda: (tiny_config(), local_spec(AttnMaskType.padding_causal)),
    "latent": latent,
}


def model(name, policy):
    config, spec = MODELS[name]()
    return build_gpt(config, swap_core_attention(spec, policy=policy)).eval()


@torch.no_grad()
def whole(model, tokens):
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    return model(tokens, positions, None)


@torch.no_grad()
def in_pieces(model, tokens, bounds):
    context = StaticInferenceContext(len(tokens), LENGTH)
    context.materialize_only_last_token_logits = False
    logits = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        positions = torch.arange(start, end).expand(len(tokens), -1)
        piece = model(
            tokens[:, start:end],
            positions,
            None,
            inference_context=context,
            runtime_gather_output=True,
        )
        logits.append(piece)
        context.increment_sequence_len_offset(end - start)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("bounds", [CHUNKS, tuple(range(25))], ids=["chunks", "tokens"])
@pytest.mark.parametrize("name", MODELS)
def test_pieces_give_the_logits_of_the_whole(name, bounds):
    ours, tokens = model(name, "exact"), batch()["input_ids"]
    torch.testing.assert_close(
        in_pieces(ours, tokens, bounds), whole(ours, tokens), rtol=1e-4, atol=5e-5
    )


def test_scales_of_a_head_span_the_rows_that_are_there():
    """Powers of two, and scales of a row, do not depend on them; the FP32 number of NVFP4 does."""
    tokens = batch()["input_ids"]
    for policy, same in (("mxfp4_qk_fp8_pv", True), ("nvfp4_qk_fp8_pv", False)):
        ours = model("grouped-queries", policy)
        pieces, expected = in_pieces(ours, tokens, CHUNKS), whole(ours, tokens)
        assert torch.allclose(pieces, expected, rtol=1e-4, atol=1e-4) == same
        assert torch.cosine_similarity(pieces.flatten(), expected.flatten(), dim=0) > 0.9


def test_only_a_causal_layer_hides_the_future_of_a_chunk():
    inputs = qkv(3, 8)
    future = torch.ones(3, 8, dtype=torch.bool).triu(6)
    given = core()(*inputs, None, attn_mask_type=AttnMaskType.no_mask)
    assert_same_attention(given, definition(*inputs, future), inputs)
    for arguments in (
        {"attn_mask_type": AttnMaskType.no_mask},
        {"attn_mask_type": AttnMaskType.padding},
        {"attention_type": "cross"},
    ):
        given = core(**arguments)(*inputs, None, attn_mask_type=AttnMaskType.no_mask)
        assert_same_attention(given, definition(*inputs, torch.zeros_like(future)), inputs)


class Letters:
    """A tokenizer of letters, none of them the end of a document."""

    vocab_size, eod, bos = VOCAB, VOCAB, None

    def tokenize(self, text):
        return [ord(letter) % VOCAB for letter in text]

    def detokenize(self, ids, **options):
        return " ".join(map(str, ids))

    def offsets(self, ids, text):
        return list(range(len(ids)))


def test_megatrons_static_engine_writes_what_the_whole_forward_would(monkeypatch):
    """Prompts of different lengths in one batch."""
    timer = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda x: 1)
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: timer)
    ours = model("grouped-queries", "exact")
    settings = InferenceWrapperConfig(
        hidden_size=64,
        params_dtype=torch.float32,
        inference_batch_times_seqlen_threshold=-1,
        padded_vocab_size=VOCAB,
        inference_max_requests=3,
        inference_max_seq_length=LENGTH,
    )
    wrapped = GPTInferenceWrapper(ours, settings, StaticInferenceContext.from_config(settings))
    controller = TextGenerationController(inference_wrapped_model=wrapped, tokenizer=Letters())
    with pytest.warns(UserWarning, match="static engine"):
        engine = StaticInferenceEngine(controller, legacy=True)
    sampling = SamplingParams(num_tokens_to_generate=5, top_k=1)
    for request in engine.generate(["hello", "abcdefgh", "xy"], sampling_params=sampling):
        ids = Letters().tokenize(request.prompt)
        for _ in range(5):
            ids.append(int(whole(ours, torch.tensor([ids]))[0, -1].argmax()))
        assert request.generated_tokens.tolist() == ids[-5:], request.prompt
