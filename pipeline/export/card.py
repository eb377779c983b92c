"""The card of a dataset on the hub: what is in it, what it was made of, how to load it."""

import json

from pipeline.formatting import format_count, format_share
from pipeline.report.dataset import plan_summary
from shards.reader import Dataset
from shards.text import printable

MARK = "<!-- written by pack push, which replaces it; remove this line to keep a card of your own -->"


def card_of(dataset: Dataset, repo: str) -> str:
    """Return the card, in Markdown.

    Args:
        dataset: What is pushed.
        repo: Where to, as USER/NAME.
    """
    manifest, plan = dataset.manifest, plan_summary(dataset)
    totals, tokenizer = manifest["totals"], manifest["tokenizer"]
    tokens = totals["tokens"]["packed"]
    full = format_share(tokens / (len(dataset) * dataset.seq_len)) if len(dataset) else "nothing"
    name = repo.partition("/")[2]
    figures = {
        "documents": f"{totals['documents']['packed']:,}",
        "tokens": f"{tokens:,}",
        "targets": f"{totals['targets']['packed']:,}",
        "packs": f"{len(dataset):,} of {dataset.seq_len:,} tokens, {full} full",
        "packer": dataset.packer,
        "tokenizer": f"{tokenizer['vocab_size']:,} entries, digest `{tokenizer['digest'][:16]}`, in `tokenizer/`",
        "dataset id": f"`{dataset.dataset_id}`",
    }
    sources = [
        f"| {_cell(source['name'])} | {source['counts']['documents']['packed']:,} "
        f"| {format_count(source['counts']['tokens']['packed'])} |"
        for source in manifest["sources"]
    ]
    recipe = json.dumps({name: value for name, value in plan.items() if name != "tokenizer"}, indent=1)
    return f"""---
tags: [shardpack]
configs:
- config_name: default
  data_files:
  - split: train
    path: shards/*.arrow
---
{MARK}
# {name}

Documents packed into rows of at most {dataset.seq_len:,} tokens, with their boundaries: in training every document
sees only itself.

| | |
|---|---|
{_rows(figures)}

| source | documents | tokens |
|---|---|---|
{chr(10).join(sources)}

## Load it

```bash
pip install shardpack
pack pull hf://datasets/{repo} data/{name}
pack train data/{name} --model MODEL --out runs/first
```

```python
from datasets import load_dataset

rows = load_dataset("{repo}", split="train")  # input_ids, cu_seqlens, … of each pack
```

## Recipe

```json
{recipe}
```
"""


def _rows(figures: dict[str, str]) -> str:
    return "\n".join(f"| {name} | {value} |" for name, value in figures.items())


def _cell(text: str) -> str:
    """Return a name from the corpus as it may stand in a table."""
    return printable(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "\\`")
