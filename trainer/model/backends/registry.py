"""The kernels that can attend over packed rows: `ATTENTION_BACKENDS`, in the order in which `auto` tries them.

How one is called: `backend(q, k, v, cu_seqlens, max_seqlen, sliding_window, scale, softcap, sinks)`, see `Backend`.
How one is added: write a function of that form and one that says why it cannot serve some `Needs`; put both into
`ATTENTION_BACKENDS`. The property test compares it with the definition, `disagreement` with the segment loop before
a run. A sliding window W counts the current token, as in transformers; flash kernels count only the tokens before it.
"""

from trainer.model.backends import flash, flex, segments, varlen
from trainer.model.backends.interface import Backend

ATTENTION_BACKENDS: dict[str, Backend] = {
    "flash-attn-4": Backend(flash.flash_4, flash.flash_4_reason),
    "flash-attn-3": Backend(flash.flash_3, flash.flash_3_reason),
    "flash-attn": Backend(flash.flash_2, flash.flash_2_reason),
    "torch": Backend(varlen.attend, varlen.unsupported_reason),
    "flex": Backend(flex.attend, flex.unsupported_reason),
    # Plain torch, so it serves any device, dtype and kind of score; on a GPU it costs a host sync per layer.
    "cpu": Backend(segments.attend, lambda needs: None),
}
