"""What a comparison of ways of feeding is asked to do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pipeline.report.feedings import FEEDINGS
from shards.errors import PackError
from shards.settings import check_choices, set_path

WIKITEXT = "hf:Salesforce/wikitext/wikitext-2-raw-v1"
PRESETS: dict[str, dict[str, Any]] = {
    "distilgpt2-wikitext2": {"data": WIKITEXT, "model": "distilbert/distilgpt2", "seq_len": 512, "batch": 8},
}


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One `pack bench`; what is said of a field is the help of its flag."""

    data: Annotated[str | Path | None, "Dataset directory, or a SOURCE of text. [default: the demo's corpus]"] = None
    model: Annotated[str | Path | None, "Model name, directory or config JSON. [default: the demo's small Llama]"] = (
        None
    )
    tokenizer: Annotated[str | Path | None, "Tokenizer of a SOURCE. [default: the model's]"] = None
    text_field: Annotated[str, "Field of a SOURCE with the text."] = "text"
    seq_len: Annotated[
        int | None, "Capacity of a pack, in tokens, for a SOURCE. [default: 1024; 512 on the demo's corpus]"
    ] = None
    batch: Annotated[int, "Documents in a padded micro-batch."] = 16
    tokens_per_batch: Annotated[
        int | None, "Maximum tokens of other micro-batches. [default: what --batch documents have on average]"
    ] = None
    steps: Annotated[
        int | None, "Optimizer steps, each of three padded batches. [default: 10; 5 on the demo's corpus]"
    ] = None
    strategies: Annotated[tuple[str, ...], f"Ways of feeding, with commas: {', '.join(FEEDINGS)}. [default: all]"] = (
        tuple(FEEDINGS)
    )
    dtype: Annotated[Literal["bf16", "fp32"] | None, "Arithmetic. [default: bf16 on a GPU, else fp32]"] = None
    device: Annotated[str | None, "cuda, mps or cpu. [default: the best there is]"] = None
    seed: Annotated[int, "Seed of the choice of documents and of random weights."] = 0

    def __post_init__(self) -> None:
        set_path(self, "data", "model", "tokenizer")
        check_choices(self)
        for name in ("batch", "steps", "tokens_per_batch", "seq_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PackError(f"`{name}`: {value}; expected at least 1.")
