"""flash-attn 2 as the rehearsal sees it: the operator's signature and shapes, no kernel."""

from flash_attn.flash_attn_interface import flash_attn_varlen_func as flash_attn_varlen_func
