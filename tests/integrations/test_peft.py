"""peft: adapters train, switch, merge and are saved as in eager."""

import peft
import pytest
import torch

from tests.integrations.training_runs import llama
from tests.spine import counted

pytestmark = pytest.mark.slow
TOKENS = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(2))
# Logits of size 1 from sums of 32 and 64 terms in two layers: some ten roundings of 1e-7.
CLOSE = dict(rtol=1e-4, atol=1e-5)


def adapted(**config):
    model = llama()
    torch.manual_seed(3)
    settings = dict(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    model = peft.get_peft_model(model, peft.LoraConfig(**{**settings, **config}))
    model.add_adapter("other", peft.LoraConfig(**{**settings, **config, "r": 2}))
    return model


def compiled(model):
    return torch.compile(model, backend="kp_tpu", options={"precision": "float32"})


@pytest.mark.parametrize("config", [{}, {"use_dora": True}, {"use_rslora": True, "lora_alpha": 3}])
def test_training_steps_are_those_of_eager(config):
    mine, eager = adapted(**config), adapted(**config)
    run = compiled(mine)
    found, expected = [], []
    for model, call, losses in ((mine, run, found), (eager, eager, expected)):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
        for _ in range(5):
            loss = call(input_ids=TOKENS, labels=TOKENS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=0)
    assert expected[-1] < expected[0]


def test_each_state_of_the_adapters_is_that_of_eager():
    mine, eager = adapted().eval(), adapted().eval()
    run = compiled(mine)

    def check():
        torch.testing.assert_close(run(input_ids=TOKENS).logits, eager(input_ids=TOKENS).logits, **CLOSE)

    with torch.no_grad():
        check()
        for model in (mine, eager):
            model.set_adapter("other")
        check()
        with mine.disable_adapter(), eager.disable_adapter():
            check()
        for model in (mine, eager):
            model.set_adapter("default")
        with counted() as count:
            check()
        assert count.programs == 0
        for model in (mine, eager):
            model.merge_adapter()
        check()
        for model in (mine, eager):
            model.unmerge_adapter()
        check()


def test_an_adapter_is_saved_and_loaded(tmp_path):
    model = adapted().eval()
    run = compiled(model)
    with torch.no_grad():
        found = run(input_ids=TOKENS).logits
        model.save_pretrained(tmp_path)
        loaded = compiled(peft.PeftModel.from_pretrained(llama(), tmp_path).eval())
        torch.testing.assert_close(loaded(input_ids=TOKENS).logits, found, **CLOSE)


def test_the_original_model_after_merging():
    model, eager = adapted().eval(), adapted().eval()
    with torch.no_grad():
        compiled(model)(input_ids=TOKENS)
        merged = compiled(model.merge_and_unload())
        torch.testing.assert_close(merged(input_ids=TOKENS).logits, eager(input_ids=TOKENS).logits, **CLOSE)
