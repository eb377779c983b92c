"""From conversations to a model that answers and then stops, as it was trained to."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline import BuildConfig, RecordOptions, build
from shards import Dataset
from trainer import TrainConfig, train

CHATML = (Path(__file__).parents[2] / "templates" / "chatml.jinja").read_text()
QUESTION = [{"role": "user", "content": "one two"}]
ANSWER = {"role": "assistant", "content": "three four"}


def test_a_chat_model_stops_where_training_taught_it_to(tokenizer_dir, llama, tmp_path, capsys):
    """hiyouga/LlamaFactory#7454, huggingface/trl#3299: the end mark comes, and generation goes on past it"""
    (tmp_path / "chats.jsonl").write_text(
        "".join(json.dumps({"messages": [*QUESTION, ANSWER]}) + "\n" for _ in range(40))
    )
    build(
        BuildConfig(
            sources=(str(tmp_path / "chats.jsonl"),), out=str(tmp_path / "data"), tokenizer=tokenizer_dir, seq_len=64,
            records=RecordOptions(kind="chat", chat_template=CHATML),
        )
    )  # fmt: skip
    (end,) = Dataset(tmp_path / "data").manifest["facts"]["trained_end_ids"]
    fields = json.loads(Path(llama).read_text()) | {"eos_token_id": 2}
    assert end != 2
    Path(llama).write_text(json.dumps(fields))
    result = train(
        TrainConfig(
            dataset=tmp_path / "data", model=llama, out=tmp_path / "run", steps=40, packs_per_step=2, lr=1e-2,
            dtype="fp32", device="cpu", last_step="pad", progress=False,
        )
    )  # fmt: skip
    assert f"export: generation stops at id {end} too, the end mark that was trained" in capsys.readouterr().err
    model = AutoModelForCausalLM.from_pretrained(result.model_dir)
    tokenizer = AutoTokenizer.from_pretrained(result.model_dir)
    text = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\none two<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    answer = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False)
    said = answer[0, prompt.shape[1] :].tolist()
    assert tokenizer.decode(said) == "three four<|im_end|>"
    assert said.index(end) == len(said) - 1
