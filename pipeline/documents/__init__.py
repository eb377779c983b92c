"""From records to token ids and loss masks: tokenizers, chat templates, masks."""
